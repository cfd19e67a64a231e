"""limit.lua in a real Redis and a real Valkey, against two leaky buckets as a plain model."""
import random
import threading

import pytest

from schemas import source
from stack import Redis, redis_programs


@pytest.fixture(scope="module", params=redis_programs())
def client(request):
    program = redis_programs()[request.param]
    if not program:
        pytest.skip(f"no {request.param} installed")
    with Redis(program=program) as server:
        yield server.client()


class Limit:
    def __init__(self, client, requests=None, tokens=None):
        """requests, tokens: (rate a second, burst)."""
        client.flushall()
        self.client, self.requests, self.tokens = client, requests, tokens
        self.code = client.register_script(source("limit"))

    def __call__(self, tokens=0, now="", key="kvgate:limit:{k}"):
        rates = [*(self.requests or ("", "")), *(self.tokens or ("", ""))]
        return self.code([key], [tokens, *rates, now], client=self.client)


def test_a_burst_passes_and_the_next_is_told_when(client):
    limit = Limit(client, requests=(1, 3))
    assert [limit(now=100)[0] for _ in range(4)] == ["ok", "ok", "ok", "requests"]
    assert float(limit(now=100)[1]) == 1 and float(limit(now=100.25)[1]) == 0.75
    assert limit(now=100.99)[0] == "requests" and limit(now=101)[0] == "ok" and limit(now=101)[0] == "requests"


def test_what_is_left_and_when_all_is_there_again(client):
    limit = Limit(client, requests=(2, 10), tokens=(100, 1000))
    assert limit(tokens=300, now=50) == ["ok", "0.000000", "9", "0.500000", "700", "3.000000"]
    assert limit(tokens=300, now=51) == ["ok", "0.000000", "9", "0.500000", "500", "5.000000"]
    assert limit(tokens=501, now=51) == ["tokens", "0.010000", "9", "0.500000", "500", "5.000000"]
    assert Limit(client, tokens=(100, 1000))(5, 1)[2:] == ["", "", "995", "0.050000"]


def test_a_refused_request_counts_for_nothing(client):
    limit = Limit(client, requests=(1, 100), tokens=(1, 10))
    assert limit(10, now=1)[0] == "ok"
    for _ in range(50):
        assert limit(5, now=1)[0] == "tokens"
    assert limit(0, now=1)[2] == "98"


def test_a_request_over_the_burst_would_never_pass(client):
    limit = Limit(client, tokens=(1000, 100))
    assert limit(101, now=1)[:2] == ["tokens", "-1.000000"] and limit(100, now=1)[0] == "ok"
    both = Limit(client, requests=(1, 1), tokens=(1, 100))
    assert both(1, now=1)[0] == "ok" and both(200, now=1)[:2] == ["tokens", "-1.000000"]


def test_the_longer_wait_is_told(client):
    limit = Limit(client, requests=(1, 1), tokens=(1, 50))
    assert limit(50, now=10)[0] == "ok"
    assert limit(50, now=10)[:2] == ["tokens", "50.000000"]
    assert limit(0, now=10)[:2] == ["requests", "1.000000"]


@pytest.mark.parametrize("seed", range(6))
def test_random_requests_agree_with_the_model(client, seed):
    rng = random.Random(seed)
    rates = (rng.choice([0.1, 1, 7]), rng.randint(1, 20)), (rng.choice([1, 50, 1e4]), rng.randint(10, 5000))
    limit, now, at, used = Limit(client, *rates), 1000.0, 1000.0, [0.0, 0.0]
    for _ in range(300):
        now = round(now + rng.choice([0, 0, 0.001, 0.5, 3]) * rng.random(), 6)
        need = (1, rng.randint(0, rates[1][1]))
        leaked = [max(0, u - (now - at) * r) for u, (r, _) in zip(used, rates)]
        expected = [u + n - b for u, n, (_, b) in zip(leaked, need, rates)]
        if any(abs(e) < 1e-6 and e for e in expected):
            continue  # rounding decides
        reply = limit(need[1], now=now)
        if all(e <= 0 for e in expected):
            assert reply[0] == "ok"
            used, at = [u + n for u, n in zip(leaked, need)], now
        else:
            assert reply[0] != "ok"
            waits = [e / r for e, (r, _) in zip(expected, rates)]
            assert float(reply[1]) == pytest.approx(max(waits), abs=1e-5)


def test_never_over_whoever_asks(client):
    """Eight callers at once, on the server's clock: at most the burst and what came back meanwhile."""
    limit = Limit(client, tokens=(0.001, 1000))
    admitted = []

    def ask(seed):
        rng = random.Random(seed)
        for _ in range(200):
            tokens = rng.randint(1, 30)
            if limit(tokens)[0] == "ok":
                admitted.append(tokens)
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 970 <= sum(admitted) <= 1000


def test_a_key_expires_when_its_buckets_are_empty(client):
    limit = Limit(client, requests=(10, 100), tokens=(5, 1000))
    limit(100)
    assert 15_000 < client.pttl("kvgate:limit:{k}") <= 21_000
    limit(0, key="kvgate:limit:{short}")
    assert client.pttl("kvgate:limit:{short}") <= 1_100


def test_a_clock_that_goes_back_gives_nothing_and_takes_nothing(client):
    limit = Limit(client, requests=(1, 2))
    assert [limit(now=now)[0] for now in (100, 90, 90)] == ["ok", "ok", "requests"]


def test_nonsense_in_the_key_counts_as_nothing(client):
    limit = Limit(client, requests=(1, 2))
    client.hset("kvgate:limit:{k}", mapping={"requests": "many", "at": "yesterday"})
    assert limit()[0] == "ok"
