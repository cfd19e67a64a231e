"""The failures that an operator meets, on real workers, Redis and nginx: what nginx-module/README.md says of each."""
import ctypes
import os
import signal
import socket
import subprocess
import threading
import time

import pytest
import requests

from fake_worker import FakeWorker
from gateway import ROUTED, Fleet, Gateway, chat
from stack import Redis, Worker, wait_until

QUICK = {"max_tokens": 2, "temperature": 0}
SYSTEM = "You are the keeper of a long and careful list of rules. " * 30


class Stack:
    def __init__(self, n=2, worker=Worker, **gateway):
        self.redis = Redis().start()
        self.workers = [worker(redis=self.redis, worker_id=f"w{i + 1}", kv_cache_memory="64M").start() for i in range(n)]
        self.gateway = Gateway(self.redis, servers=[w.gateway_addr for w in self.workers], **gateway).start()
        self.wait_seen([w.worker_id for w in self.workers])

    def wait_seen(self, names, timeout=20):
        wait_until(lambda: self.gateway.workers() == names, timeout, f"workers {names} seen")

    def ask(self, question, **members):
        body = {"model": "smollm2", "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}], **QUICK, **members}
        return requests.post(self.gateway.url + "/v1/chat/completions", json=body, timeout=120)

    def lease(self, name):
        return self.redis.client().hget("kvgate:{smollm2}:w:" + name, "lease")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self.gateway.close()
        finally:
            for worker in self.workers:
                worker.close()
            self.redis.close()


def cached(reply):
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def warm(stack):
    """The worker that holds SYSTEM, and is chosen for it."""
    stack.ask("first")
    reply = wait_until(lambda: r if (r := stack.ask("again")).headers["X-Kvgate-Reason"] == "prefix" and cached(r) > 300 else None, 20, "the prefix known")
    return next(w for w in stack.workers if w.worker_id == reply.headers["X-Kvgate-Worker"])


def test_a_restart_under_the_same_name_gives_no_stale_credit():
    """The new process has a new lease, so that what the old one held counts for nothing, at once and without a scan."""
    with Stack(1) as stack:
        worker = warm(stack)
        old = stack.lease("w1")
        worker.kill()
        worker.start()
        wait_until(lambda: stack.lease("w1") not in (None, old), 20, "a new lease")
        client = stack.redis.client()
        for key in client.keys("kvgate:{smollm2}:pred:*"):
            client.delete(key)  # what was sent to the old process: ten seconds
        wait_until(lambda: stack.gateway.status()["models"][0]["workers"][0]["lease"] == int(stack.lease("w1")), 10, "the new lease seen")
        reply = stack.ask("first")
        assert reply.headers["X-Kvgate-Hit-Tokens"] == "0" and cached(reply) == 0 and reply.headers["X-Kvgate-Worker"] == "w1"


def test_of_two_processes_under_one_name_the_second_serves():
    with Stack(1) as stack:
        first = stack.workers[0]
        with Worker(redis=stack.redis, worker_id="w1", kv_cache_memory="64M") as second:
            wait_until(lambda: not first.running(), 20, "the first ended")
            stack.wait_seen(["w1"])
            wait_until(lambda: stack.gateway.status()["models"][0]["workers"][0]["addr"] == second.gateway_addr, 20, "the second's address")
            for i in range(5):
                reply = stack.ask(f"question {i}")
                assert reply.status_code == 200 and reply.headers["X-Kvgate-Worker"] == "w1"
            first.wait()


def test_a_worker_that_stands_still_is_routed_around_once_its_lease_ends():
    """SIGSTOP: connections are taken by the kernel, but no heartbeat is sent. After its 3 seconds nobody goes there."""
    with Stack(2, edits=[(r"proxy_read_timeout 600s", "proxy_read_timeout 5s")]) as stack:
        worker = warm(stack)
        other = next(w for w in stack.workers if w is not worker)
        os.kill(worker.pid, signal.SIGSTOP)
        try:
            stack.wait_seen([other.worker_id])
            for i in range(5):
                reply = stack.ask(f"question {i}")
                assert reply.status_code == 200 and reply.headers["X-Kvgate-Worker"] == other.worker_id
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        stack.wait_seen(["w1", "w2"])
        assert stack.ask("after all").status_code == 200


BLOCKING = r"""
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

/* The thread that is sent SIGUSR2 stands still as long as the file is there. */
static void stand_still(int number)
{
    (void)number;
    while (!access(BLOCKED_WHILE, F_OK))
        usleep(10000);
}

__attribute__((constructor)) static void install(void)
{
    struct sigaction action = {.sa_handler = stand_still, .sa_flags = SA_RESTART};
    sigaction(SIGUSR2, &action, 0);
}
"""


def spent(pid):
    """{thread: clock ticks it has computed}."""
    ticks = {}
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/stat", encoding="ascii") as file:
            ticks[int(thread)] = int(file.read().rpartition(")")[2].split()[11])
    return ticks


def test_a_worker_whose_engine_alone_stands_still_stops_beating_and_is_routed_around(tmp_path):
    """Its other threads live: it takes connections, answers /metrics, and could beat for ever."""
    gate, source, shim = tmp_path / "gate", tmp_path / "blocking.c", str(tmp_path / "blocking.so")
    source.write_text(BLOCKING)
    subprocess.run(["gcc", "-shared", "-fPIC", f'-DBLOCKED_WHILE="{gate}"', "-o", shim, str(source)], check=True)

    class Blockable(Worker):
        def command(self):
            return ["env", f"LD_PRELOAD={shim}", *super().command()]

    with Stack(2, Blockable) as stack:
        worker = warm(stack)
        other = next(w for w in stack.workers if w is not worker)
        before = spent(worker.pid)
        assert stack.ask("a question for the engine", max_tokens=60).headers["X-Kvgate-Worker"] == worker.worker_id
        after = spent(worker.pid)
        engine = max(after, key=lambda thread: after[thread] - before.get(thread, 0))
        gate.touch()
        ended = []
        try:
            tgkill = {"x86_64": 234, "aarch64": 131}[os.uname().machine]
            assert ctypes.CDLL(None).syscall(tgkill, worker.pid, engine, signal.SIGUSR2) == 0
            asking = threading.Thread(target=lambda: ended.append(stack.ask("who is there", max_tokens=3)))
            asking.start()
            stack.wait_seen([other.worker_id], 60)
            assert "no step ended for 10.0 s: heartbeats stop" in worker.log() and not ended
            assert requests.get(worker.url + "/health", timeout=120).status_code == 503 and worker.metrics()
            for i in range(3):
                reply = stack.ask(f"question {i}")
                assert reply.status_code == 200 and reply.headers["X-Kvgate-Worker"] == other.worker_id
        finally:
            gate.unlink()
        asking.join(60)
        assert ended and ended[0].status_code == 200, "the request that it had is answered after all"
        stack.wait_seen(["w1", "w2"])
        assert requests.get(worker.url + "/health", timeout=120).status_code == 200


def test_a_drained_worker_ends_its_streams_and_gets_nothing_new():
    with Stack(2) as stack:
        worker = warm(stack)
        other = next(w for w in stack.workers if w is not worker)
        with requests.post(stack.gateway.url + "/v1/chat/completions", json={**chat(SYSTEM), "max_tokens": 60, "stream": True, "ignore_eos": True},
                           stream=True, timeout=60) as stream:
            pieces = stream.iter_content(None)
            text = next(pieces)
            name = stream.headers["X-Kvgate-Worker"]
            serving = next(w for w in stack.workers if w.worker_id == name)
            rest = worker if serving is other else other
            serving.terminate()
            for i in range(4):
                reply = stack.ask(f"meanwhile {i}")
                assert reply.status_code == 200 and reply.headers["X-Kvgate-Worker"] == rest.worker_id
            text += b"".join(pieces)
        assert text.endswith(b"data: [DONE]\n\n") and b'"error"' not in text
        assert serving.wait() == 0


def test_out_of_memory_routes_by_what_is_known():
    with Stack(2) as stack:
        holder = warm(stack)
        client = stack.redis.client()
        client.config_set("maxmemory", 1)
        replies = [stack.ask(f"question {i}") for i in range(6)]
        assert [r.status_code for r in replies] == [200] * 6 and {r.headers["X-Kvgate-Reason"] for r in replies} <= set(ROUTED)
        assert replies[0].headers["X-Kvgate-Worker"] == holder.worker_id and int(replies[0].headers["X-Kvgate-Hit-Tokens"]) > 300
        time.sleep(4)  # longer than a lease: heartbeats go on
        stack.wait_seen(["w1", "w2"])
        client.config_set("maxmemory", 0)


def test_a_single_redis_that_becomes_a_replica_fails_no_request():
    with Stack(2) as stack:
        warm(stack)
        client = stack.redis.client()
        client.replicaof("127.0.0.1", 1)  # a master that cannot be reached: it keeps what it has, and refuses writes
        replies = [stack.ask(f"question {i}") for i in range(6)]
        assert [r.status_code for r in replies] == [200] * 6
        client.replicaof("NO", "ONE")
        wait_until(lambda: stack.ask("back").headers["X-Kvgate-Reason"] in ROUTED, 30, "routed again")
        stack.wait_seen(["w1", "w2"])


class LoadingRedis(Redis):
    """Is started once it answers at all."""

    def answers(self):
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as s:
                s.sendall(b"PING\r\n")
                return s.recv(64).startswith((b"+PONG", b"-LOADING"))
        except OSError:
            return False


def test_a_redis_that_loads_its_data_fails_no_request():
    with LoadingRedis() as redis, FakeWorker("w1") as worker:
        with Gateway(redis, servers=[worker.addr]) as gateway:
            worker.register(redis, gateway.status()["models"][0]["fingerprint"])
            wait_until(lambda: gateway.workers() == ["w1"], 10, "the worker seen")
            client = redis.client()
            client.mset({f"filler:{i}": "x" * 200 for i in range(8000)})
            client.save()
            redis.kill()
            redis.args += ["--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024"]
            redis.start()
            seen = set()
            for _ in range(20):
                reply = requests.post(gateway.url + "/v1/chat/completions", json=chat(), timeout=120)
                assert reply.status_code == 200
                seen.add(reply.headers["X-Kvgate-Reason"])
                time.sleep(0.1)
            assert "redis_error" in seen
            assert sum("LOADING" in line for line in gateway.log().splitlines()) <= 3  # once each script
            wait_until(lambda: requests.post(gateway.url + "/v1/chat/completions", json=chat(), timeout=120).headers["X-Kvgate-Reason"] in ROUTED, 60, "loaded")


def test_redis_absent_at_start_is_used_when_it_comes():
    redis = Redis()
    with Worker(redis=redis, worker_id="w1", kv_cache_memory="64M") as worker, Gateway(redis, servers=[worker.gateway_addr]) as gateway:
        ask = lambda: requests.post(gateway.url + "/v1/chat/completions", json={**chat(SYSTEM), **QUICK}, timeout=120)  # noqa: E731
        reply = ask()
        assert reply.status_code == 200 and reply.headers["X-Kvgate-Reason"] == "redis_down"
        with redis:
            wait_until(lambda: gateway.workers() == ["w1"] and ask().headers["X-Kvgate-Reason"] in ROUTED, 30, "Redis used")


def place(fleet, texts):
    """Sends each text to a worker of its own turn, as if by load: {text: that worker's name}. For many it is not the one that rendezvous
    would choose."""
    rendezvous, placed = {}, {}
    for text in texts:
        fleet.settle()
        rendezvous[text] = fleet.post(text).headers["X-Kvgate-Worker"]
    for i, text in enumerate(texts):
        fleet.settle()
        target = fleet.workers[i % len(fleet.workers)]
        client = fleet.redis.client()
        for worker in fleet.workers:
            client.zadd("kvgate:{smollm2}:load", {worker.registration.lease: 0 if worker is target else 10_000_000}, xx=True)
        placed[text] = fleet.post(text).headers["X-Kvgate-Worker"]
    assert sum(placed[text] != rendezvous[text] for text in texts) >= len(texts) / 3
    return placed


def test_without_redis_a_conversation_stays_with_its_worker():
    """Who was sent what is remembered, in shared memory for all nginx workers and over a reload."""
    with Fleet(4, edits=[("worker_processes 1", "worker_processes 2")]) as fleet:
        texts = [f"conversation {i}: " + f"word{i} " * 90 for i in range(16)]
        placed = place(fleet, texts)
        fleet.redis.kill()
        fleet.gateway.reload()
        wait_until(lambda: fleet.post().headers["X-Kvgate-Reason"] == "redis_down", 20, "Redis seen gone")
        without = [fleet.post(text + " and the next turn of it") for text in texts]
        assert {r.headers["X-Kvgate-Reason"] for r in without} <= {"redis_down", "redis_timeout"}
        kept = sum(r.headers["X-Kvgate-Worker"] == placed[text] for text, r in zip(texts, without))
        assert kept >= 0.85 * len(texts), (kept, len(texts))
        assert int(without[0].headers["X-Kvgate-Hit-Tokens"]) > 64


def test_while_workers_and_gateway_differ_a_conversation_stays_with_its_worker():
    with Fleet(4) as fleet:
        texts = [f"conversation {i}: " + f"word{i} " * 90 for i in range(12)]
        placed = place(fleet, texts)
        fleet.redis.client().hset("kvgate:{smollm2}:meta", "block_size", "64")
        replies = {text: fleet.post(text + " and the next turn of it") for text in texts}
        assert {r.headers["X-Kvgate-Reason"] for r in replies.values()} == {"mismatch"}
        kept = sum(replies[text].headers["X-Kvgate-Worker"] == placed[text] for text in texts)
        assert kept >= 0.85 * len(texts), (kept, len(texts))


def test_without_redis_a_prompt_stays_with_who_served_it_after_a_failover():
    """Not with its first choice, which answered 503 and holds nothing of it."""
    with Fleet(2) as fleet:
        served = {}
        for text in (f"conversation {i}: " + f"word{i} " * 90 for i in range(6)):
            fleet.settle()
            first = fleet.named(fleet.post(text).headers["X-Kvgate-Worker"])
            first.mode = "503"
            fleet.settle()
            served[text] = fleet.post(text).headers["X-Kvgate-Worker"]
            assert served[text] != first.name
            fleet.reset()
        fleet.redis.kill()
        wait_until(lambda: fleet.post().headers["X-Kvgate-Reason"] == "redis_down", 20, "Redis seen gone")
        for text, worker in served.items():
            assert fleet.post(text + " and the next turn of it").headers["X-Kvgate-Worker"] == worker


def test_without_redis_a_prompt_stays_with_who_has_it_when_nobody_could_be_reached_meanwhile():
    """Not with the last of those that were tried then, which was never sent a byte of it."""
    with Fleet(2, servers=["127.0.0.1:1"]) as fleet:
        texts = [f"conversation {i}: " + f"word{i} " * 90 for i in range(6)]
        served = {}
        for text in texts:
            fleet.settle()
            served[text] = fleet.post(text).headers["X-Kvgate-Worker"]
        for worker in fleet.workers:
            worker.stop()
        for text in texts:
            fleet.settle()
            assert fleet.post(text + " and the next turn of it").status_code == 502
        for worker in fleet.workers:
            worker.start()
        wait_until(lambda: all(w["reachable"] for w in fleet.gateway.status()["models"][0]["workers"]), 10, "marks cleared")
        fleet.redis.kill()
        wait_until(lambda: fleet.post().headers["X-Kvgate-Reason"] == "redis_down", 20, "Redis seen gone")
        for text, worker in served.items():
            assert fleet.post(text + " and the next turn of it").headers["X-Kvgate-Worker"] == worker


def test_without_redis_a_head_that_many_share_follows_the_order_of_all_gateways():
    """Of a prompt over 1,024 tokens, of which only the beginning was sent before: rendezvous, not the worker that had it last."""
    with Fleet(4) as fleet:
        head = "system prompt " * 700
        order = fleet.post(head + "first question " * 60).headers["X-Kvgate-Worker"]
        fleet.settle()
        other = next(w for w in fleet.workers if w.name != order)
        for worker in fleet.workers:  # moved by load
            load = 0 if worker is other else 10_000_000
            fleet.redis.client().zadd("kvgate:{smollm2}:load", {worker.registration.lease: load}, xx=True)
        assert fleet.post(head + "second question " * 60).headers["X-Kvgate-Worker"] == other.name
        fleet.redis.kill()
        wait_until(lambda: fleet.post().headers["X-Kvgate-Reason"] == "redis_down", 20, "Redis seen gone")
        new = fleet.post(head + "third question " * 60)
        assert new.headers["X-Kvgate-Worker"] == order and new.headers["X-Kvgate-Reason"] == "redis_down"
        assert fleet.post(head + "second question " * 60 + "and its next turn").headers["X-Kvgate-Worker"] == other.name


def test_traceparent_is_passed_on_unchanged():
    with Fleet(1) as fleet:
        trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
        fleet.post(headers={"traceparent": trace, "tracestate": "a=b"})
        assert fleet.requests[-1].header("traceparent") == trace and fleet.requests[-1].header("tracestate") == "a=b"
        fleet.post()
        assert fleet.requests[-1].header("traceparent") is None


def test_a_client_that_leaves_closes_the_upstream_streaming_or_not():
    with Fleet(1) as fleet:
        worker = fleet.workers[0]
        for stream, mode in ((True, "sse"), (False, "silent")):
            fleet.reset()
            worker.mode, worker.events, worker.interval = mode, 1000, 0.05
            leave = threading.Event()

            def ask():
                with requests.post(fleet.url + "/v1/chat/completions", json=chat(stream=stream), stream=True, timeout=(10, None if stream else 0.5)) as reply:
                    next(pieces := reply.iter_content(10))
                    leave.wait(10)
                    pieces.close()
            thread = threading.Thread(target=lambda: ask() if stream else pytest.raises(requests.ReadTimeout, ask))
            thread.start()
            wait_until(lambda: worker.requests, 10, "the request there")
            leave.set()
            thread.join()
            wait_until(lambda: sum(w["in_flight"] for w in fleet.gateway.status()["models"][0]["workers"]) == 0, 10, "the request given up")
