"""Redis decides where a request goes, never whether it is served."""
import json
import os
import signal
import socket
import time

import pytest
import redis as redis_library
import requests

import schemas
from fake_redis import FakeRedis
from fake_worker import FakeWorker
from gateway import ROUTED, Fleet, Gateway, chat
from prompt_chain import chain
from schemas import rendezvous
from stack import Redis, Worker, wait_until


@pytest.fixture(scope="module")
def fleet():
    with Fleet(3) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def polite(request):
    if "fleet" in request.fixturenames:
        fleet = request.getfixturevalue("fleet")
        fleet.reset()
        wait_until(lambda: fleet.post().headers["X-Kvgate-Reason"] in ("tie", "prefix"), 15, "Redis answers")
        fleet.reset()


def chain_of(reply):
    return reply.headers["X-Kvgate-Chain"]


def test_the_worker_that_holds_the_prefix_is_chosen_with_its_hits(fleet):
    text = "a prefix that is worth keeping " * 40
    last = chain_of(fleet.post(text))
    n_tokens = len(fleet.requests[-1].json()["prompt_token_ids"])
    assert n_tokens % 32
    blocks = chain(fleet.requests[-1].json()["prompt_token_ids"], "smollm2", fleet.fingerprint)
    assert blocks[-1] == last
    for worker in fleet.workers:
        fleet.settle()
        assert worker.registration.publish(stored=blocks) == ["ok"]
        reply = fleet.post(text)
        assert reply.headers["X-Kvgate-Reason"] == "prefix"
        assert int(reply.headers["X-Kvgate-Hit-Tokens"]) == len(blocks) * 32 <= n_tokens
        assert worker.requests[-1].header("x-kvgate-hit-tokens") == str(len(blocks) * 32)
        assert worker.registration.publish(evicted=blocks) == ["ok"]
    fleet.settle()
    assert fleet.post(text).headers["X-Kvgate-Hit-Tokens"] == "0"


def test_a_prompt_of_whole_blocks_leaves_its_last_block_to_compute(fleet):
    """As in the worker: somebody has to compute the last token."""
    ids = [i % 900 + 1000 for i in range(96)]
    blocks = chain(ids, "smollm2", fleet.fingerprint)
    worker = fleet.workers[0]
    assert worker.registration.publish(stored=blocks) == ["ok"]
    try:
        for prompt, hit in ((ids, 64), (ids + [5], 96), (ids[:-1], 64), (ids[:32], 0), (ids[:31], 0)):
            reply = requests.post(fleet.url + "/v1/completions", json={"model": "smollm2", "prompt": prompt}, timeout=120)
            assert reply.headers["X-Kvgate-Hit-Tokens"] == str(hit), len(prompt)
    finally:
        assert worker.registration.publish(evicted=blocks) == ["ok"]


def test_without_redis_the_rendezvous_worker_is_chosen_and_it_is_the_same_as_with(fleet):
    texts = [f"conversation {i} " * 60 for i in range(12)]
    with_redis = []
    for text in texts:
        fleet.settle()
        with_redis.append(fleet.post(text))
    assert {r.headers["X-Kvgate-Reason"] for r in with_redis} == {"tie"}
    os.kill(fleet.redis.pid, signal.SIGSTOP)
    try:
        without = [fleet.post(t) for t in texts]
    finally:
        os.kill(fleet.redis.pid, signal.SIGCONT)
    assert {r.headers["X-Kvgate-Reason"] for r in without} <= {"redis_timeout", "redis_down"}
    predictions = [r.header("x-kvgate-hit-tokens") for w in fleet.workers for r in w.requests]
    assert predictions.count(None) == predictions.count("0") == len(texts)  # nothing is known without Redis
    assert [r.headers["X-Kvgate-Worker"] for r in without] == [r.headers["X-Kvgate-Worker"] for r in with_redis]
    assert len({r.headers["X-Kvgate-Worker"] for r in with_redis}) > 1


def test_the_fallback_follows_the_published_rendezvous_rule():
    """The block at 1,024 tokens decides, or the last whole one of a shorter prompt."""
    with Fleet(3) as fleet:
        fleet.redis.kill()
        wait_until(lambda: fleet.post().headers["X-Kvgate-Reason"] == "redis_down", 10, "Redis seen gone")
        for i in range(10):
            reply = fleet.post(f"{i} words " * (40 if i % 2 else 2000))
            worker = fleet.named(reply.headers["X-Kvgate-Worker"])
            blocks = chain(worker.requests[-1].json()["prompt_token_ids"], "smollm2", fleet.fingerprint)
            turn = blocks[min(len(blocks), 1024 // 32) - 1]
            assert worker.name == max(("w1", "w2", "w3"), key=lambda w: rendezvous(turn, w))


def test_a_stopped_redis_costs_few_requests_their_timeout(fleet):
    before = fleet.gateway.status()["reasons"]
    os.kill(fleet.redis.pid, signal.SIGSTOP)
    try:
        for _ in range(30):
            assert fleet.post().status_code == 200
        status = fleet.gateway.status()
        waited = [d for d in status["models"][0]["decisions"][:30] if d["lookup_us"] >= 500_000]  # of a kvgate_redis_timeout of 1 s
        lost = sum(status["reasons"][k] - before[k] for k in ("redis_timeout", "redis_down"))
        assert lost == 30 and 1 <= len(waited) <= 4  # three, and one that the end of the silent connection cut short
    finally:
        os.kill(fleet.redis.pid, signal.SIGCONT)
    wait_until(lambda: fleet.post().headers["X-Kvgate-Reason"] in ROUTED, 15, "Redis used again")


def test_clients_that_leave_while_redis_hangs_harm_nobody(fleet):
    body = json.dumps(chat()).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    before = fleet.gateway.children()
    os.kill(fleet.redis.pid, signal.SIGSTOP)
    try:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", fleet.gateway.port), timeout=120) as s:
                s.sendall(head + body)
    finally:
        os.kill(fleet.redis.pid, signal.SIGCONT)
    wait_until(lambda: fleet.post().headers["X-Kvgate-Reason"] in ROUTED, 15, "Redis used again")
    assert fleet.gateway.children() == before


def test_redis_killed_and_back_fails_no_request(fleet):
    fleet.redis.kill()
    for _ in range(50):
        assert fleet.post().status_code == 200
    wait_until(lambda: fleet.post().headers["X-Kvgate-Reason"] == "redis_down", 10, "Redis seen gone")
    fleet.redis.start()
    # the workers register again (RESYNC), and the gateway reconnects within its second
    wait_until(lambda: fleet.post().headers["X-Kvgate-Reason"] in ROUTED, 15, "Redis used again")
    assert fleet.gateway.log().count("requests are routed without it") >= 1


def test_flushed_scripts_are_sent_again(fleet):
    fleet.redis.cli("script", "flush")
    for _ in range(3):
        assert fleet.post().headers["X-Kvgate-Reason"] in ROUTED


def test_a_flushed_database_fails_no_request(fleet):
    fleet.redis.cli("flushall")
    for _ in range(20):
        assert fleet.post().status_code == 200
    wait_until(lambda: fleet.post().headers["X-Kvgate-Reason"] in ROUTED, 15, "workers registered again")
    # the fallback's list follows with the gateway's next look
    wait_until(lambda: set(fleet.gateway.workers()) == {"w1", "w2", "w3"}, 15, "all workers known again")


def test_a_redis_that_refuses_scripts_is_redis_error(fleet):
    fleet.redis.cli("acl", "setuser", "default", "-evalsha", "-eval")
    try:
        reply = fleet.post()
        assert reply.status_code == 200 and reply.headers["X-Kvgate-Reason"] == "redis_error"
        assert reply.headers["X-Kvgate-Worker"] in ("w1", "w2", "w3")
    finally:
        fleet.redis.cli("acl", "setuser", "default", "+evalsha", "+eval")


def test_the_connection_is_named_and_there_is_one_per_nginx_worker(fleet):
    names = [line for line in fleet.redis.cli("client", "list").splitlines() if "name=kvgate-gateway:" in line]
    pids = {int(line.split("name=kvgate-gateway:")[1].split()[0]) for line in names}
    assert len(names) == len(pids) and pids == set(fleet.gateway.children())


def test_password_database_and_prefix_are_used():
    with Redis("--requirepass", "s3cret%") as redis, FakeWorker("w1") as worker:
        url = f"redis://:s3cret%25@127.0.0.1:{redis.port}/3"
        with Gateway(servers=[worker.addr], redis_url=url, http="kvgate_redis_prefix test:;") as gateway:
            client = redis_library.Redis(port=redis.port, password="s3cret%", db=3, decode_responses=True)
            fingerprint = gateway.status()["models"][0]["fingerprint"]
            fake = schemas.FakeWorker(schemas.Schemas(client, "smollm2", "test:"), "w1", addr=worker.addr)
            assert fake.register(fingerprint=fingerprint)[0] == "ok" and fake.publish(live=True) == ["ok"] and fake.beat() == ["ok"]
            wait_until(lambda: gateway.workers() == ["w1"], 10, "the worker seen")
            assert "s3cret" not in gateway.log()


def test_the_next_url_is_tried_where_one_is_dead():
    with Redis() as redis, FakeWorker("w1") as worker:
        urls = f"redis://127.0.0.1:1 unix:/nowhere/redis.sock redis://127.0.0.1:{redis.port}"
        with Gateway(servers=[worker.addr], redis_url=urls) as gateway:
            worker.register(redis, gateway.status()["models"][0]["fingerprint"])
            wait_until(lambda: gateway.workers() == ["w1"], 10, "the third URL in use")


def test_redis_on_a_unix_socket_is_used():
    with Redis("--unixsocketperm", "777") as redis, FakeWorker("w1") as worker:
        os.chmod(redis.dir, 0o755)
        path = os.path.join(redis.dir, "redis.sock")
        redis.stop()
        redis.args += ["--unixsocket", path]
        redis.start()
        with Gateway(servers=[worker.addr], redis_url=f"unix:{path}") as gateway:
            worker.register(redis, gateway.status()["models"][0]["fingerprint"])
            wait_until(lambda: gateway.workers() == ["w1"], 10, "the socket in use")


def test_a_wrong_password_is_logged_and_fails_no_request():
    with Redis("--requirepass", "right") as redis, FakeWorker("w1") as worker:
        with Gateway(servers=[worker.addr], redis_url=f"redis://:wrong@127.0.0.1:{redis.port}") as gateway:
            reply = requests.post(gateway.url + "/v1/chat/completions", json=chat(), timeout=120)
            assert reply.status_code == 200 and reply.headers["X-Kvgate-Reason"] == "redis_error"
            assert "AUTH" in gateway.log() and "wrong" not in gateway.log().replace("WRONGPASS", "").split("[warn]")[0]


def test_no_worker_known_goes_to_the_server_lines():
    with Fleet(1, register=False) as fleet:
        reply = fleet.post()
        assert reply.status_code == 200 and reply.headers["X-Kvgate-Reason"] == "no_workers"
        assert "X-Kvgate-Worker" not in reply.headers and len(fleet.requests) == 1


def test_a_mismatch_of_block_size_is_loud_and_served():
    with Fleet(1, register=False) as fleet:
        fleet.workers[0].register(fleet.redis, fleet.fingerprint, block=64)
        fleet.wait_seen()
        reply = fleet.post()
        assert reply.status_code == 200 and reply.headers["X-Kvgate-Reason"] == "mismatch"
        assert "block size is 32 here and 64 at the workers" in fleet.gateway.log()


def test_addresses_outside_kvgate_allow_are_never_used():
    bad = ["8.8.8.8:80", "localhost:80", "127.0.0.1", "unix:", "[::2]:80", "127.0.0.1:0", "0.0.0.0:80", "unix:relative", "unix:@abstract", "127.1:80",
           "[::ffff:8.8.8.8]:80"]
    with Fleet(len(bad), register=False) as fleet:
        for worker, addr in zip(fleet.workers, bad):
            worker.register(fleet.redis, fleet.fingerprint, addr=addr)
        fleet.wait_seen()
        reply = fleet.post()
        assert reply.status_code == 200 and reply.headers["X-Kvgate-Reason"] == "denied"
        assert len(fleet.requests) == 1  # by a server line
        for addr in bad:
            assert f'advertises "{addr}"' in fleet.gateway.log()


def test_a_worker_on_a_unix_socket_is_served():
    with Fleet(0) as fleet:
        path = os.path.join(fleet.gateway.dir, "w.sock")
        with FakeWorker("w1", path=path) as worker:
            worker.register(fleet.redis, fleet.fingerprint)
            fleet.wait_seen(["w1"])
            for _ in range(3):
                reply = fleet.post()
                assert reply.status_code == 200 and reply.json()["worker"] == "w1"
            assert worker.connections == 1  # kept


def test_unrouted_requests_go_to_a_live_worker():
    with Fleet(1, servers=["127.0.0.1:1"]) as fleet:
        assert requests.get(fleet.url + "/v1/health", timeout=120).json()["worker"] == "w1"


def test_a_draining_worker_gets_no_new_request():
    with Fleet(2) as fleet:
        first = fleet.named(fleet.post().headers["X-Kvgate-Worker"])
        first.registration.state = "draining"
        wait_until(lambda: "draining" in [w["state"] for w in fleet.gateway.status()["models"][0]["workers"]], 10, "the drain seen")
        first.requests.clear()
        for _ in range(10):
            assert fleet.post().headers["X-Kvgate-Worker"] != first.name
        assert first.requests == []


def test_lasting_trouble_is_logged_once_and_not_each_request():
    """A failing script, a mismatch, refused addresses: whatever each request or each second's poll meets again."""
    with Fleet(1) as fleet:
        def lines(pattern):
            return sum(pattern in line for line in fleet.gateway.log().splitlines())

        client, base = fleet.redis.client(), "kvgate:{smollm2}:"
        client.delete(base + "load")
        client.set(base + "load", "text")
        wait_until(lambda: fleet.post().headers["X-Kvgate-Reason"] == "redis_error", 10, "the script failing")
        for _ in range(20):
            reply = fleet.post()
            assert reply.status_code == 200 and reply.headers["X-Kvgate-Worker"] == "w1"
        assert lines("route.lua: WRONGTYPE") == 1
        client.delete(base + "load")

        fleet.redis.cli("acl", "setuser", "default", "-evalsha", "-eval")
        time.sleep(2.2)  # two polls
        assert lines("workers.lua: NOPERM") == 1
        fleet.redis.cli("acl", "setuser", "default", "+evalsha", "+eval")

        client.hset(base + "meta", "block_size", "64")
        for _ in range(10):
            assert fleet.post().headers["X-Kvgate-Reason"] == "mismatch"
        assert lines("workers and gateway differ") == 1


def test_one_malformed_worker_blinds_nobody_and_stays_one_log_line():
    with Fleet(2) as fleet:
        bad = fleet.workers[0]
        bad.unregister()
        key = "kvgate:{smollm2}:w:w1"
        client = fleet.redis.client()
        client.persist(key)
        for field, value in (("addr", "x" * 200), ("addr", "127.0.0.1:1\nforged line"), ("backlog", "much")):
            client.hset(key, mapping={"addr": bad.addr, "backlog": 0, field: value})
            time.sleep(1.2)
            for _ in range(5):
                reply = fleet.post()
                assert reply.status_code == 200 and reply.headers["X-Kvgate-Reason"] in ROUTED
                assert reply.headers["X-Kvgate-Worker"] == "w2" or field == "backlog"
        assert "w2" in fleet.gateway.workers()
        log = fleet.gateway.log().splitlines()
        assert sum('workers.lua: the entry of worker "w1" is malformed and left out' in line for line in log) == 1
        assert [line for line in log if line.startswith("forged")] == []


NONSENSE = {
    "another protocol": (b"HTTP/1.1 400 Bad Request\r\n\r\n", {"redis_down"}),
    "unasked replies": (b"+OK\r\n" * 5, {"redis_down", "redis_error"}),
    "two billion elements": (b"*2147483647\r\n", {"redis_down", "redis_timeout"}),
    "negative lengths": (b"$-5\r\n*-7\r\n", {"redis_down"}),
    "depth": (b"*1\r\n" * 30, {"redis_down"}),
    "no end": (b"$500000000\r\nabc", {"redis_timeout", "redis_down"}),
    "nil arrays": (b"*-1\r\n", {"redis_error"}),
    "empty errors": (b"-\r\n", {"redis_error"}),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_from_redis_ends_no_process_and_no_request(name):
    answer, reasons = NONSENSE[name]
    with FakeRedis(answer) as redis, FakeWorker("w1") as worker, Gateway(redis, servers=[worker.addr]) as gateway:
        before = gateway.children()
        for _ in range(12):
            reply = requests.post(gateway.url + "/v1/chat/completions", json=chat(), timeout=120)
            assert reply.status_code == 200 and reply.headers["X-Kvgate-Reason"] in reasons
            time.sleep(0.1)
        assert gateway.children() == before
        with open(f"/proc/{before[0]}/statm", encoding="utf-8") as file:
            assert int(file.read().split()[1]) * 4096 < 200e6


def test_a_worker_survives_an_array_of_two_billion_elements():
    with FakeRedis(b"*2147483647\r\n") as redis, Worker(redis=redis, worker_id="w1", kv_cache_memory="64M") as worker:
        wait_until(lambda: redis.connections >= 3, 10, "tries to register")
        with open(f"/proc/{worker.pid}/statm", encoding="utf-8") as file:
            assert int(file.read().split()[0]) * 4096 < 8e9
        assert requests.get(worker.url + "/health", timeout=120).status_code == 200
