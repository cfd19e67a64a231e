"""The whole stack once: Redis, two workers on the real model, nginx with the shipped configuration, an OpenAI client.

The tests share one stack and run in this order: a cold and a warm chat, who owns the blocks, an eviction, Redis killed and back,
the owner killed. No request fails in any of them.
"""
import openai
import pytest

from gateway import Gateway
from stack import Redis, Worker, wait_until

BLOCK = 32
POOL = 96  # blocks a worker: 3,072 tokens, so that an eviction takes two prompts
MODEL = "smollm2"
PREFIX = f"kvgate:{{{MODEL}}}:"

# About 1,500 tokens, the same for every question.
HANDBOOK = "You answer questions about the handbook of a lighthouse.\n" + "\n".join(
    f"Rule {n}: lamp {n * 7 % 40} is lit at {n % 12 + 1} o'clock, and keeper number {n * 3 % 11} writes the oil level in the book."
    for n in range(1, 49))


class Stack:
    def __init__(self):
        self.redis = Redis()
        self.workers, self.gateway = {}, None

    def open(self):
        self.redis.start()
        for worker_id in ("w1", "w2"):
            self.start_worker(worker_id)
        self.gateway = Gateway(redis=self.redis, servers=[w.gateway_addr for w in self.workers.values()], redis_timeout="100ms")
        self.gateway.start()
        return self

    def start_worker(self, worker_id):
        worker = Worker("--num-kv-blocks", POOL, "--block-size", BLOCK, "--max-model-len", 3072, redis=self.redis, worker_id=worker_id)
        self.workers[worker_id] = worker
        worker.start()
        wait_until(lambda: self.redis.cli("exists", f"{PREFIX}w:{worker_id}") == "1", what=f"{worker_id} in Redis")

    def close(self):
        for part in (self.gateway, *self.workers.values(), self.redis):
            if part:
                part.close()

    def client(self):
        return openai.OpenAI(base_url=self.gateway.url + "/v1", api_key="none", max_retries=0, timeout=120)

    def ask(self, question, system=HANDBOOK, **options):
        """(completion, headers) through nginx; any failure raises."""
        raw = self.client().chat.completions.with_raw_response.create(
            model=MODEL, max_tokens=8, temperature=0, messages=[{"role": "system", "content": system}, {"role": "user", "content": question}],
            **options)
        return raw.parse(), raw.headers

    def claims(self, worker_id):
        """How many blocks Redis says a worker holds: the fields of all own buckets that name its lease."""
        client = self.redis.client()
        lease = client.hget(f"{PREFIX}w:{worker_id}", "lease")
        if lease is None:
            return 0
        return sum(lease in owners.split(",") for key in client.keys(f"{PREFIX}own:*") for owners in client.hvals(key))


@pytest.fixture(scope="module")
def stack():
    stack = Stack()
    try:
        yield stack.open()
    finally:
        stack.close()


def cached(completion):
    return completion.usage.prompt_tokens_details.cached_tokens


def held(worker):
    """Blocks in the worker's own tree."""
    return worker.metric("kvgate_kv_blocks_cached")


def computed(worker):
    return worker.metric("kvgate_computed_prompt_tokens_total")


def test_a_second_question_goes_to_the_owner_and_computes_only_new_tokens(stack):
    first, cold = stack.ask("When is lamp 7 lit?")
    assert first.usage.prompt_tokens >= 1500 and cached(first) == 0 and cold["x-kvgate-hit-tokens"] == "0"
    owner = cold["x-kvgate-worker"]
    before = {w: computed(worker) for w, worker in stack.workers.items()}
    wait_until(lambda: stack.claims(owner) >= first.usage.prompt_tokens // BLOCK, what="claims in Redis")

    second, warm = stack.ask("Who writes the oil level?")
    assert warm["x-kvgate-worker"] == owner and warm["x-kvgate-reason"] == "prefix"
    hit = cached(second)
    assert hit >= (first.usage.prompt_tokens - 40) // BLOCK * BLOCK and int(warm["x-kvgate-hit-tokens"]) == hit
    new = {w: computed(worker) - before[w] for w, worker in stack.workers.items()}
    assert new[owner] == second.usage.prompt_tokens - hit < 2 * BLOCK + 40 and sum(new.values()) == new[owner]


def test_a_stream_says_the_same(stack):
    plain, _ = stack.ask("Which rule is the last one?")
    chunks = list(stack.client().chat.completions.create(
        model=MODEL, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True},
        messages=[{"role": "system", "content": HANDBOOK}, {"role": "user", "content": "Which rule is the last one?"}]))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert chunks[-1].choices == [] and cached(chunks[-1]) >= 1400


def test_redis_names_the_owner_of_as_many_blocks_as_the_worker_holds(stack):
    _, headers = stack.ask("When is lamp 7 lit?")
    owner = headers["x-kvgate-worker"]
    other = next(w for w in stack.workers if w != owner)
    wait_until(lambda: stack.claims(owner) == held(stack.workers[owner]) > 0, what="claims equal to the owner's tree")
    assert stack.claims(other) == held(stack.workers[other])
    lease = stack.redis.cli("hget", f"{PREFIX}w:{owner}", "lease")
    assert stack.redis.cli("hget", f"{PREFIX}leases", lease).startswith(owner)


def test_blocks_that_a_live_worker_evicts_leave_redis(stack):
    _, headers = stack.ask("When is lamp 7 lit?")
    owner = headers["x-kvgate-worker"]
    worker = stack.workers[owner]
    evicted = worker.metric("kvgate_evicted_blocks_total")
    for n in (1, 2):  # other prompts, straight to that worker, until its pool is full of them
        worker.openai().completions.create(model=MODEL, prompt=[100 * n + i % 90 for i in range(1, 1400)], max_tokens=1, temperature=0)
    assert worker.metric("kvgate_evicted_blocks_total") - evicted >= 30
    wait_until(lambda: stack.claims(owner) == held(worker), what="claims equal to the tree after the eviction")
    completion, headers = stack.ask("When is lamp 7 lit?")
    assert int(headers["x-kvgate-hit-tokens"]) == cached(completion) < 1400


def test_redis_killed_and_back_costs_hits_but_no_request(stack):
    _, headers = stack.ask("When is lamp 7 lit?")
    stack.redis.kill()
    for n in range(3):
        completion, headers = stack.ask(f"What about keeper {n}?")
        assert completion.choices and headers["x-kvgate-reason"] != "prefix"
    stack.redis.start()

    def hit():
        _, headers = stack.ask("When is lamp 7 lit?")
        return headers["x-kvgate-reason"] == "prefix" and int(headers["x-kvgate-hit-tokens"]) >= 1400

    wait_until(hit, timeout=20, interval=0.2, what="hits after Redis came back")
    for worker_id, worker in stack.workers.items():
        wait_until(lambda w=worker_id, p=worker: stack.claims(w) == held(p), what=f"the index filled again by {worker_id}")
    # whom to turn to when an owner is gone follows with the gateway's next look
    wait_until(lambda: set(stack.gateway.workers()) == set(stack.workers), what="all workers known again")


def test_a_killed_owner_is_replaced_at_once(stack):
    _, headers = stack.ask("When is lamp 7 lit?")
    owner = headers["x-kvgate-worker"]
    other = next(w for w in stack.workers if w != owner)
    stack.workers[owner].kill()
    for _ in range(5):
        completion, headers = stack.ask("When is lamp 7 lit?")
        assert completion.choices and headers["x-kvgate-worker"] == other
    wait_until(lambda: stack.redis.cli("exists", f"{PREFIX}w:{owner}") == "0", timeout=10, what="the dead worker's row gone")
    completion, headers = stack.ask("Who writes the oil level?")
    assert headers["x-kvgate-worker"] == other and int(headers["x-kvgate-hit-tokens"]) == cached(completion) >= 1400
