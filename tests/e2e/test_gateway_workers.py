"""The gateway in front of real workers on SmolLM2: what it predicts is what they find, and their failures are not the clients'.
The gateway has only the cut of the model file, the workers have all of it."""
import json
import os
import subprocess

import openai
import pytest
import requests

from conftest import BUILD
from gateway import Gateway, chat
from stack import SMOLLM2, Redis, Worker, wait_until

SYSTEM = "You are a careful assistant of a small library. " * 40
QUICK = {"max_tokens": 4, "temperature": 0}


class Stack:
    def __init__(self):
        self.redis = Redis().start()
        self.workers = [Worker(redis=self.redis, worker_id=f"w{i}", kv_cache_memory="128M") for i in (1, 2)]
        for worker in self.workers:
            worker.start()
        cut = os.path.join(self.redis.dir, "cut.gguf")
        subprocess.run([os.path.join(BUILD, "kvgate-prompt"), "cut", SMOLLM2, cut], check=True)
        self.gateway = Gateway(self.redis, model=cut, server="add_header X-Kvgate-Chain $kvgate_chain always;",
                               servers=[w.gateway_addr for w in self.workers]).start()
        self.wait_seen(["w1", "w2"])

    def wait_seen(self, names):
        wait_until(lambda: self.gateway.workers() == names, 20, f"workers {names} seen")

    def ask(self, question, system=SYSTEM, **members):
        body = {"model": "smollm2", "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}], **QUICK, **members}
        return requests.post(self.gateway.url + "/v1/chat/completions", json=body, timeout=120)

    def named(self, name):
        return next(w for w in self.workers if w.worker_id == name)

    def close(self):
        try:
            self.gateway.close()
        finally:
            for worker in self.workers:
                worker.close()
            self.redis.close()


@pytest.fixture(scope="module")
def stack():
    stack = Stack()
    yield stack
    stack.close()


def cached(reply):
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_second_question_goes_to_the_worker_that_holds_the_prefix(stack):
    cold = stack.ask("What is a book?")
    assert cold.status_code == 200, cold.text
    assert cold.headers["X-Kvgate-Reason"] == "tie" and cached(cold) == 0
    name = cold.headers["X-Kvgate-Worker"]

    def warm():
        reply = stack.ask("What is a shelf?")
        assert reply.headers["X-Kvgate-Worker"] == name
        return reply if reply.headers["X-Kvgate-Reason"] == "prefix" else None
    reply = wait_until(warm, 10, "the blocks published")
    assert cached(reply) >= int(reply.headers["X-Kvgate-Hit-Tokens"]) >= 256
    assert stack.named(name).metric("kvgate_gateway_ids_used_total") >= 2
    assert stack.named(name).metric("kvgate_gateway_fingerprint_mismatches_total") == 0


def test_the_gateways_ids_are_the_workers_own(stack):
    """P4: one chain in the gateway, in each worker, and on the command line."""
    for salt in ({}, {"cache_salt": "mine"}):
        body = {"model": "smollm2", **chat("häß\u00dflich 🦙 <|im_end|> ok " * 12), **salt}
        reply = requests.post(stack.gateway.url + "/v1/chat/completions", json={**body, **QUICK}, timeout=120)
        told = [requests.post(w.url + "/tokenize", json=body, timeout=120).json() for w in stack.workers]
        assert told[0] == told[1] and len(told[0]["kvgate"]["chain"]) >= 3
        assert reply.json()["usage"]["prompt_tokens"] == told[0]["count"]
        assert reply.headers["X-Kvgate-Chain"] == told[0]["kvgate"]["chain"][-1]
        assert stack.gateway.status()["models"][0]["fingerprint"] == told[0]["kvgate"]["fingerprint"]
        printed = subprocess.run([os.path.join(BUILD, "kvgate-prompt"), "chain", "--model", SMOLLM2, "--name", "smollm2"],
                                 input=json.dumps(body), capture_output=True, text=True, check=True)
        assert printed.stdout.split() == told[0]["kvgate"]["chain"]


def test_predictions_are_compared_with_what_the_worker_found(stack):
    system = "You keep a list of all that was predicted. " * 30
    right = lambda r: cached(r) > 0 and int(r.headers["X-Kvgate-Hit-Tokens"]) == cached(r)  # noqa: E731
    reply = wait_until(lambda: r if right(r := stack.ask("one", system)) else None, 10, "all of the prompt's blocks known")
    worker = stack.named(reply.headers["X-Kvgate-Worker"])
    before = worker.metrics()
    reply = stack.ask("one", system)
    grown = lambda name: worker.metric(name) - sum(v for k, v in before.items() if k.startswith(name + "{"))  # noqa: E731
    assert grown("kvgate_gateway_hit_error_tokens_count") == 1 and grown("kvgate_gateway_hit_error_tokens_sum") == 0
    assert grown("kvgate_gateway_predicted_hit_tokens_total") == grown("kvgate_gateway_found_hit_tokens_total") == cached(reply) >= 256


def test_openais_client_streams_through_nginx(stack):
    client = openai.OpenAI(base_url=stack.gateway.url + "/v1", api_key="none", max_retries=0, timeout=120)
    assert [m.id for m in client.models.list()] == ["smollm2"]
    whole = client.chat.completions.create(**chat("Count to three."), max_tokens=12, temperature=0).choices[0].message.content
    parts = client.chat.completions.create(**chat("Count to three."), max_tokens=12, temperature=0, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == whole


@pytest.mark.parametrize("members, status", [({"temperature": "hot"}, 400), ({"messages": []}, 400), ({"n": 0}, 400),
                                              ({"messages": [{"role": "nobody", "content": "x"}]}, 400)])
def test_a_workers_refusal_reaches_the_client(stack, members, status):
    reply = requests.post(stack.gateway.url + "/v1/chat/completions", json={**chat("x"), **members}, timeout=120)
    assert reply.status_code == status and reply.json()["error"]["message"]


def test_a_priority_without_kvgate_priority_is_harmless(stack):
    assert stack.ask("hello", system="short", priority=-3).status_code == 200


def test_salts_are_separate_caches(stack):
    name = stack.ask("one", cache_salt="ann").headers["X-Kvgate-Worker"]
    wait_until(lambda: stack.ask("two", cache_salt="ann").headers["X-Kvgate-Reason"] == "prefix", 10, "ann's prefix known")
    bob = stack.ask("two", cache_salt="bob")
    assert bob.headers["X-Kvgate-Hit-Tokens"] == "0" and cached(bob) == 0 and name


def test_a_killed_worker_is_replaced_at_once_and_its_claims_are_void(stack):
    stack.ask("first")
    wait_until(lambda: stack.ask("again").headers["X-Kvgate-Reason"] == "prefix", 10, "the prefix known")
    victim = stack.named(stack.ask("again").headers["X-Kvgate-Worker"])
    other = next(w for w in stack.workers if w is not victim)
    victim.kill()
    for i in range(8):
        reply = stack.ask(f"question {i}")
        assert reply.status_code == 200 and reply.headers["X-Kvgate-Worker"] == other.worker_id
    stack.wait_seen([other.worker_id])
    victim.start()
    stack.wait_seen(["w1", "w2"])
    assert stack.ask("after all").headers["X-Kvgate-Reason"] == "prefix"


def test_a_flushed_redis_is_filled_again(stack):
    name = stack.ask("before").headers["X-Kvgate-Worker"]
    stack.redis.cli("flushall")
    for i in range(5):
        assert stack.ask(f"meanwhile {i}").status_code == 200

    def known_again():
        reply = stack.ask("and now")
        assert reply.status_code == 200
        return reply.headers["X-Kvgate-Reason"] == "prefix" and reply.headers["X-Kvgate-Worker"] == name
    wait_until(known_again, 20, "claims written again")
