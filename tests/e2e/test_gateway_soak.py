"""make soak: real workers and Redis killed at random and started again, nginx reloaded, for SOAK_SECONDS (600). Each request ends in
exactly one of: a full answer, an error status with a JSON error, an SSE error frame. None hangs, none runs twice, nothing leaks, and
nginx logs no alert.

Two real workers are killed; a fake one beside them counts what it is sent, and refuses or drops in turn. Clients open a connection for
each request, since one that a quitting nginx worker closes is the client's to retry.

Whether one hangs is told by the time that this process ran, not by the clock's: a machine that is suspended, or that keeps everybody
waiting, is nobody's fault.
"""
import collections
import json
import os
import random
import threading
import time

import pytest
import requests

from fake_worker import FakeWorker
from gateway import ROUTED, Gateway, chat
from stack import Redis, Worker, wait_until

SECONDS = float(os.environ.get("SOAK_SECONDS") or 600)
HANGS = 120  # seconds after which a request counts as hung: far over what any takes here
LOST = 1200  # seconds after which a client gives up, over nginx's own proxy_read_timeout


class Watch:
    """Seconds in which this process was let run: a step of the clock that is longer than two ticks counts as two."""

    def __init__(self, tick=0.25):
        self.tick, self.ran = tick, 0.0
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        before = time.monotonic()
        while True:
            time.sleep(self.tick)
            now = time.monotonic()
            self.ran += min(now - before, 2 * self.tick)
            before = now


def ending(reply):
    """What a reply amounts to; anything else than full, error or frame is a fault."""
    if reply.headers.get("Content-Type", "").startswith("text/event-stream"):
        events = [e[6:] for e in reply.text.split("\n\n") if e.startswith("data: ")]
        errors = [e for e in events if e.startswith('{"error"')]
        done = reply.text.endswith("data: [DONE]\n\n")
        return "full" if done and not errors else "frame" if errors and not done and events[-1] == errors[0] else "cut stream"
    body = reply.json()
    if reply.status_code == 200:
        return "full" if body["choices"][0]["finish_reason"] else "no end"
    return f"error {reply.status_code}" if body["error"]["message"] and reply.status_code in (500, 502, 503, 504) else f"odd {reply.status_code}"


class Soak:
    def __init__(self, seconds):
        self.until = time.monotonic() + seconds
        self.watch = Watch()
        self.redis = Redis().start()
        self.workers = [Worker("--max-num-seqs", "8", redis=self.redis, worker_id=f"w{i}", kv_cache_memory="32M").start() for i in (1, 2)]
        self.fake = FakeWorker("fake").start()
        self.gateway = Gateway(self.redis, servers=[w.gateway_addr for w in self.workers], edits=[("worker_processes 1", "worker_processes 2")],
                               location="kvgate_limit key=$http_x_key requests=100000/s;", redis_timeout="100ms").start()
        self.fake.register(self.redis, self.gateway.status()["models"][0]["fingerprint"])
        self.ends, self.served, self.done = [], {}, collections.Counter()

    def on(self):
        return time.monotonic() < self.until

    def client(self, number):
        rng, n = random.Random(number), 0
        while self.on():
            n += 1
            key = f"{number}-{n}"
            body = {**chat(f"conversation {rng.randrange(8)} " * rng.choice((3, 40, 200)), user=key), "max_tokens": rng.randint(1, 24),
                    "stream": rng.random() < 0.5}
            begun = self.watch.ran
            try:
                reply = requests.post(self.gateway.url + "/v1/chat/completions", json=body, headers={"Connection": "close", "X-Key": "k"}, timeout=LOST)
                end = ending(reply)
                self.served[key] = reply.headers.get("X-Kvgate-Worker")
            except (requests.RequestException, ValueError, KeyError) as error:
                end = f"{type(error).__name__}: {error}"
            self.ends.append((key, end, self.watch.ran - begun))
            time.sleep(0.02)

    def kills(self):
        rng = random.Random(3)
        while self.on():
            time.sleep(rng.uniform(0.5, 3))
            what = rng.choice(("worker", "redis", "fake mode", "fake gone", "reload", "hang", "scripts", "flush"))
            self.done[what] += 1
            if what == "worker":
                worker = rng.choice(self.workers)
                worker.kill()
                time.sleep(rng.uniform(0, 4))
                worker.start()
            elif what == "redis":
                self.redis.kill()
                time.sleep(rng.uniform(0, 4))
                self.redis.start()
            elif what == "fake mode":
                self.fake.mode = rng.choice(("ok", "sse", "503", "early", "early_middle", "reset", "500"))
            elif what == "fake gone":
                self.fake.stop()
                time.sleep(0.5)
                self.fake.start()
            elif what == "reload":
                self.gateway.reload()
            elif what == "hang":
                os.kill(self.redis.pid, 19)
                time.sleep(rng.uniform(0.1, 3))
                os.kill(self.redis.pid, 18)
            else:
                self.redis.cli(*(("script", "flush") if what == "scripts" else ("flushall",)), check=False)

    def run(self, clients=6):
        threads = [threading.Thread(target=self.client, args=(i,)) for i in range(clients)] + [threading.Thread(target=self.kills)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self):
        try:
            self.gateway.close()  # fails on any alert
        finally:
            self.fake.close()
            for worker in self.workers:
                worker.close()
            self.redis.close()


def memory(pid):
    """Resident bytes that are its own, and open descriptors."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        fields = dict(line.split()[:2] for line in file if line.startswith(("Private_Dirty", "Private_Clean")))
    return sum(map(int, fields.values())) * 1024, len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.long
@pytest.mark.timeout(SECONDS + LOST + 600)
def test_soak():
    soak = Soak(SECONDS)
    try:
        soak.run()
        counted = collections.Counter(end for _, end, _ in soak.ends)
        longest = max(t for _, _, t in soak.ends)
        print(f"\nsoak: {len(soak.ends)} requests in {SECONDS:g} s, longest {longest:.1f} s; {dict(counted)}; done: {dict(soak.done)}")
        faults = [e for e in soak.ends if (e[1] not in ("full", "frame") and not e[1].startswith("error ")) or e[2] > HANGS]
        assert faults == [] and counted["full"] > len(soak.ends) / 2
        ran = collections.Counter(r.json()["user"] for r in soak.fake.requests if r.answered != "503")
        assert [k for k, n in ran.items() if n > 1] == [], "ran twice at the fake worker"
        assert [k for k in ran if k in soak.served and soak.served[k] != "fake"] == [], "ran at the fake worker and at another"

        soak.fake.mode = "ok"
        wait_until(lambda: len(soak.gateway.workers()) == 3, 60, "all workers seen again")
        post = lambda i=0: requests.post(soak.gateway.url + "/v1/chat/completions", json={**chat(f"after {i % 8}"), "max_tokens": 1}, timeout=120)  # noqa: E731
        wait_until(lambda: post().headers["X-Kvgate-Reason"] in ROUTED, 30, "routed again")
        wait_until(lambda: len(soak.gateway.children()) == 2, 60, "old nginx workers gone")
        assert all(w["in_flight"] == 0 for w in soak.gateway.status()["models"][0]["workers"])
        for i in range(300):
            post(i)
        before = {pid: memory(pid) for pid in soak.gateway.children()}
        for i in range(1500):
            post(i)
        for pid, (size, open_files) in before.items():
            now = memory(pid)
            assert now[0] - size < 1 << 20 and now[1] - open_files < 16, (size, open_files, now)
    finally:
        soak.close()
