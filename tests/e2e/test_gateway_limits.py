"""kvgate_limit: requests and prompt tokens a key, one budget for all gateways."""
import concurrent.futures
import hashlib
import json
import os
import re
import signal

import openai
import pytest
import requests

from fake_worker import FakeWorker
from gateway import ROUTED, Fleet, Gateway, chat
from stack import Redis, wait_until

SLOW = "kvgate_limit key=$http_authorization requests=12r/d tokens=100000/d;"


def post(url, key=None, text="hello", path="/v1/chat/completions", **members):
    return requests.post(url + path, json=chat(text, **members), headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=120)


class Two:
    """Two gateways and one worker on one Redis."""

    def __init__(self, location):
        self.redis, self.worker = Redis(), FakeWorker("w1")
        self.gateways, self.location = [], location

    def __enter__(self):
        self.redis.start()
        self.worker.start()
        for _ in range(2):
            self.gateways.append(Gateway(self.redis, servers=[self.worker.addr], location=self.location, edits=[("worker_processes 1", "worker_processes 2")]).start())
        self.worker.register(self.redis, self.gateways[0].status()["models"][0]["fingerprint"])
        for gateway in self.gateways:
            wait_until(lambda: gateway.workers() == ["w1"], 10, "the worker seen")
        return self

    def __exit__(self, *_):
        try:
            for gateway in self.gateways:
                gateway.close()
        finally:
            self.worker.close()
            self.redis.close()


def test_two_gateways_share_one_budget_and_it_is_never_exceeded():
    with Two("kvgate_limit key=$http_authorization requests=40r/d;") as two:
        urls = [g.url for g in two.gateways]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            replies = list(pool.map(lambda i: post(urls[i % 2], "ann"), range(120)))
        passed = [r for r in replies if r.status_code == 200]
        assert len(passed) == 40 == len(two.worker.requests) and {r.status_code for r in replies} == {200, 429}
        assert sorted(int(r.headers["x-ratelimit-remaining-requests"]) for r in passed) == list(range(40))
        assert post(urls[0], "bob").status_code == 200
        limits = [g.status()["limits"] for g in two.gateways]
        assert sum(x["passed"] for x in limits) == 41 and sum(x["requests"] for x in limits) == 80


def test_two_gateways_share_one_budget_of_tokens():
    with Two("kvgate_limit key=$http_authorization tokens=5000/d;") as two:
        urls = [g.url for g in two.gateways]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            replies = list(pool.map(lambda i: post(urls[i % 2], "ann", "some words " * (10 + i % 50)), range(200)))
        used = sum(len(r.json()["prompt_token_ids"]) for r in two.worker.requests)
        shortest = min(len(r.json()["prompt_token_ids"]) for r in two.worker.requests)
        assert 5000 - 200 < used <= 5000 and shortest < 100 and {r.status_code for r in replies} == {200, 429}


@pytest.fixture(scope="module")
def fleet():
    server = """
    location /named/ { kvgate "on"; kvgate_limit key=$http_authorization requests=12r/d name=other; proxy_pass http://workers/; }
    location /both/ { kvgate "on"; kvgate_limit key=$http_authorization requests=2r/s burst_requests=3 tokens=600/m name=both; proxy_pass http://workers/; }
    location /few/ { kvgate "on"; kvgate_limit key=$http_authorization tokens=100/d name=few; proxy_pass http://workers/; }
    location /off/ { kvgate "on"; kvgate_limit off; proxy_pass http://workers/; }
    location /watch/ { kvgate observe; kvgate_limit key=$http_authorization requests=1r/d name=watch; proxy_pass http://workers/; }
    add_header X-Limit $kvgate_limit_status always;
    """
    with Fleet(2, server=server, location=SLOW) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def clean(request):
    if "fleet" in request.fixturenames:
        fleet = request.getfixturevalue("fleet")
        fleet.reset()
        client = fleet.redis.client()
        for key in client.keys("kvgate:limit:*"):
            client.delete(key)


def test_a_429_is_in_openais_shape(fleet):
    for i in range(12):
        reply = post(fleet.url, "ann")
        assert reply.status_code == 200 and reply.headers["X-Limit"] == "passed" and reply.headers["X-Kvgate-Reason"] in ROUTED
        assert reply.headers["x-ratelimit-limit-requests"] == "12" and reply.headers["x-ratelimit-remaining-requests"] == str(11 - i)
        assert reply.headers["x-ratelimit-limit-tokens"] == "100000" and int(reply.headers["x-ratelimit-remaining-tokens"]) < 100000
        assert re.fullmatch(r"\d+h\d+m\d+s", reply.headers["x-ratelimit-reset-requests"])
    before = fleet.gateway.status()
    reply = post(fleet.url, "ann")
    assert reply.status_code == 429 and reply.headers["X-Kvgate-Reason"] == "limited" and reply.headers["X-Limit"] == "requests"
    error = reply.json()["error"]
    assert error["type"] == "requests" and error["code"] == "rate_limit_exceeded" and error["param"] is None
    assert re.fullmatch(r"Rate limit reached on requests: limit 12, left 0, requested 1\. Please try again in [\dhms]+\.", error["message"])
    assert 7000 < int(reply.headers["Retry-After"]) <= 7200 and int(reply.headers["retry-after-ms"]) <= 7200_000
    assert len(fleet.requests) == 12
    after = fleet.gateway.status()
    assert after["reasons"]["limited"] == before["reasons"]["limited"] + 1 and after["limits"]["requests"] == before["limits"]["requests"] + 1
    assert after["models"][0]["decisions"][0]["number"] == before["models"][0]["decisions"][0]["number"]
    with pytest.raises(openai.RateLimitError) as caught:
        openai.OpenAI(base_url=fleet.url + "/v1", api_key="ann", max_retries=0).chat.completions.create(**chat("x"))
    assert caught.value.code == "rate_limit_exceeded"


def test_tokens_are_those_of_the_prompt_exactly(fleet):
    reply = post(fleet.url, "ann", "words " * 400)
    n = len(fleet.requests[-1].json()["prompt_token_ids"])
    assert n > 400 and reply.headers["x-ratelimit-remaining-tokens"] == str(100000 - n)


def test_each_prompt_of_an_array_counts(fleet):
    ask = lambda prompt: requests.post(fleet.url + "/v1/completions", json={"model": "smollm2", "prompt": prompt}, headers={"Authorization": "x"}, timeout=120)  # noqa: E731
    ask([[1, 2, 3]] * 5 + [[4] * 10])
    assert ask([[7]]).headers["x-ratelimit-remaining-tokens"] == str(100000 - 26)


def test_a_429_of_tokens_says_what_is_left(fleet):
    for _ in range(9):
        reply = post(fleet.url + "/few", "ann")
        if reply.status_code == 429:
            break
    left, needed = int(reply.headers["x-ratelimit-remaining-tokens"]), len(fleet.requests[-1].json()["prompt_token_ids"])
    assert reply.status_code == 429 and 0 < left < needed
    assert reply.json()["error"]["message"].startswith(f"Rate limit reached on tokens: limit 100, left {left}, requested {needed}. ")


def test_a_prompt_over_the_whole_budget_is_refused_for_good(fleet):
    reply = post(fleet.url, "ann", "words " * 100_000)
    assert reply.status_code == 429 and reply.headers["X-Limit"] == "tokens" and reply.headers["x-should-retry"] == "false"
    assert "Retry-After" not in reply.headers and re.fullmatch(r"Request too large: its \d+ prompt tokens are over the limit of 100000", reply.json()["error"]["message"])
    assert reply.json()["error"]["type"] == "tokens" and fleet.requests == []


def test_bursts_names_and_off(fleet):
    assert [post(fleet.url, "ann", path="/both/v1/chat/completions").status_code for _ in range(4)].count(200) in (3, 4)
    for _ in range(12):
        assert post(fleet.url, "ann").status_code == 200
    assert post(fleet.url, "ann").status_code == 429
    assert post(fleet.url, "ann", path="/named/v1/chat/completions").headers["x-ratelimit-remaining-requests"] == "11"
    for path in ("/off/v1/chat/completions", "/watch/v1/chat/completions"):
        for _ in range(15):
            reply = post(fleet.url, "ann", path=path)
            assert reply.status_code == 200 and not [h for h in reply.headers if h.startswith("x-ratelimit")]


def test_a_request_without_a_key_is_not_limited(fleet):
    for _ in range(14):
        reply = post(fleet.url)
        assert reply.status_code == 200 and "x-ratelimit-limit-requests" not in reply.headers


@pytest.mark.parametrize("path, kind", [("/v1/chat/completions", "text/plain"), ("/v1/chat/completions", None), ("/v1/other", "application/json")])
def test_no_other_way_to_post_passes_by_the_limit(fleet, path, kind):
    headers = {"Authorization": "ann", **({"Content-Type": kind} if kind else {})}
    codes = [requests.post(fleet.url + path, data=json.dumps(chat("words " * 50)).encode(), headers=headers, timeout=120) for _ in range(13)]
    assert [c.status_code for c in codes] == [200] * 12 + [429]
    if path.endswith("completions"):
        assert int(codes[0].headers["x-ratelimit-remaining-tokens"]) < 100000 - 50
    assert requests.get(fleet.url + "/v1/models", headers=headers, timeout=120).status_code == 200


def test_refused_requests_are_not_counted(fleet):
    for _ in range(15):
        assert requests.post(fleet.url + "/v1/chat/completions", data=b"{", headers={"Authorization": "ann", "Content-Type": "application/json"}, timeout=120).status_code == 400
    assert post(fleet.url, "ann").headers["x-ratelimit-remaining-requests"] == "11"


def test_the_key_does_not_stand_in_redis(fleet):
    post(fleet.url, "secret-key")
    keys = fleet.redis.client().keys("kvgate:limit:*")
    assert keys == ["kvgate:limit:{%s}" % hashlib.sha1(b":Bearer secret-key").hexdigest()]


def test_without_redis_requests_pass_and_it_is_said(fleet):
    before = fleet.gateway.status()["limits"]["unchecked"]
    os.kill(fleet.redis.pid, signal.SIGSTOP)
    try:
        replies = [post(fleet.url, "ann") for _ in range(20)]
    finally:
        os.kill(fleet.redis.pid, signal.SIGCONT)
    assert [r.status_code for r in replies] == [200] * 20 and {r.headers["X-Limit"] for r in replies} == {"unchecked"}
    assert fleet.gateway.status()["limits"]["unchecked"] == before + 20
    lines = [x for x in fleet.gateway.log().splitlines() if "kvgate_limit cannot be asked (redis_timeout)" in x]
    assert len(lines) == 1 and "requests pass without it" in lines[0]
    wait_until(lambda: post(fleet.url, "bob").headers["X-Limit"] == "passed", 10, "limited again")
