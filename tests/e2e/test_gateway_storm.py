"""Many clients, failing workers, a failing Redis and reloads at once: each request ends properly, and no generation ran twice."""
import collections
import json
import os
import random
import signal
import threading
import time

import pytest
import requests

from gateway import Fleet, chat
from stack import wait_until


def client(fleet, number, on, ends):
    """Sends requests that carry their own number, so that executions can be counted."""
    rng = random.Random(number)
    session = requests.Session()
    n = 0
    while on():
        n += 1
        key = f"{number}-{n}"
        body = json.dumps(chat(f"prefix {rng.randrange(6)} " * rng.choice((5, 60, 9000)), user=key, stream=rng.random() < 0.5)).encode()
        try:
            reply = session.post(fleet.url + "/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}, timeout=120)
        except requests.RequestException as error:
            ends.append((key, repr(error)))
            continue
        if reply.headers.get("Content-Type") == "text/event-stream":
            whole = reply.text.endswith("data: [DONE]\n\n") or "upstream_ended_early" in reply.text
            ends.append((key, 200 if whole else "cut stream"))
        else:
            reply.json()
            ends.append((key, reply.status_code))


def trouble(fleet, on):
    rng = random.Random(7)
    while on():
        worker = rng.choice(fleet.workers)
        what = rng.choice(("503", "reset", "early", "500", "close", "sse", "ok", "refuse", "redis"))
        if what == "refuse":
            worker.stop()
            time.sleep(0.2)
            worker.start()
        elif what == "redis":
            os.kill(fleet.redis.pid, signal.SIGSTOP)
            time.sleep(0.15)
            os.kill(fleet.redis.pid, signal.SIGCONT)
        else:
            worker.mode = what
            time.sleep(0.1)
            worker.mode = rng.choice(("ok", "sse"))


def storm(seconds, clients):
    """For so long, and until there was something to see: a busy machine is slow."""
    with Fleet(3, edits=[(r"worker_processes 1", "worker_processes 2")], redis_timeout="100ms") as fleet:
        until = time.monotonic() + seconds
        ends = []
        on = lambda: time.monotonic() < until or (len(ends) <= 50 and time.monotonic() < until + 120)  # noqa: E731
        threads = [threading.Thread(target=client, args=(fleet, i, on, ends)) for i in range(clients)]
        threads.append(threading.Thread(target=trouble, args=(fleet, on)))
        for thread in threads:
            thread.start()
        while on():
            time.sleep(1.5)
            fleet.gateway.reload()
        for thread in threads:
            thread.join()
        assert len(ends) > 50
        # A keep-alive connection that an old nginx worker closes while it quits is HTTP's own race, and the client's to retry.
        broken = [e for e in ends if e[1] not in (200, 500, 502, 503) and "Remote" not in str(e[1]) and "reset" not in str(e[1])]
        assert broken == []
        generations = collections.Counter(r.json()["user"] for r in fleet.requests if r.answered != "503")
        assert [key for key, n in generations.items() if n > 1] == []
        for worker in fleet.workers:
            worker.mode = "ok"
        wait_until(lambda: fleet.post().headers.get("X-Kvgate-Reason") in ("tie", "prefix"), 20, "all well again")
        wait_until(lambda: len(fleet.gateway.children()) == 2, 20, "old nginx workers gone")


def test_a_short_storm():
    storm(4, 8)


@pytest.mark.long
def test_a_long_storm():
    storm(60, 24)
