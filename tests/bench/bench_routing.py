#!/usr/bin/env python3
"""make bench-routing TRACE=file [GATEWAYS=n] [LOAD=x …] [REDIS_LOST=seconds]: a trace through the real route.lua, beside other ways to choose.

The trace is JSON lines in the Mooncake format: timestamp (ms), input_length, output_length (tokens), hash_ids (names of 512-token
blocks; equal ids mean equal prefixes). It is replayed open loop, with its timestamps divided by LOAD, on eight simulated workers
(fleet.py). The kvgate row goes through the scripts that gateway and workers call, on a Redis of its own, with the trace's time
as their argument; requests of one instant come from GATEWAYS connections at once. Workers publish what they store and evict, and
beat once a second. The other rows know every worker's state at every instant, so they are better than real ones:

    round robin             each in turn
    least loaded            fewest prompt tokens to compute
    first two blocks        rendezvous hashing of the prefix of two blocks
    longest prefix          the worker that holds most of the prompt, the least loaded among equals

hit ratio: prompt tokens found in a cache, of all. max/mean: busiest worker's computed tokens over the mean. TTFT: arrival until the
first token. Prints a table and writes build/bench-routing.json.

REDIS_LOST: instead, Redis is gone for the five minutes from that second of the replay, and gateways choose as they do then
(fallback.py); compared are the hit ratios of the five minutes before and of those.
"""
import hashlib
import itertools
import json
import os
import statistics
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "tools"), os.path.join(HERE, "..")]
from conftest import BUILD  # noqa: E402
from fallback import Gateway  # noqa: E402
from fleet import Fleet, Rates  # noqa: E402
from schemas import FINGERPRINT, SCHEMA, Schemas, source  # noqa: E402
from stack import Redis  # noqa: E402
import table  # noqa: E402

WORKERS = 8
LOST_SECONDS = 300
BATCH = 256   # events a call of publish.lua, as publish.c sends them


def read_trace(path, block):
    """Requests as fleet.py wants them, with `at` in seconds. A last block that is not full has no name there."""
    requests = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file):
            row = json.loads(line)
            whole = row["input_length"] // block
            requests.append({"id": number, "at": row["timestamp"] / 1000, "input": row["input_length"], "output": max(1, row["output_length"]),
                             "blocks": tuple(row["hash_ids"][:whole])})
    return sorted(requests, key=lambda r: r["at"])


_hex = {}


def block_hash(name):
    """32 hex digits for a block's name, spread as real ones."""
    if name not in _hex:
        _hex[name] = hashlib.md5(str(name).encode()).hexdigest()
    return _hex[name]


# ---- the choices that kvgate is compared with ----

class RoundRobin:
    def __init__(self):
        self.turn = itertools.count()

    def choose(self, fleet, request):
        return next(self.turn) % len(fleet.workers)


def least_loaded(fleet, request):
    turn = request["id"] % len(fleet.workers)  # equals in turn
    return min(fleet.workers, key=lambda w: (w.backlog(fleet.now), (w.number - turn) % len(fleet.workers))).number


class LeastLoaded:
    choose = staticmethod(least_loaded)


class FirstTwoBlocks:
    def choose(self, fleet, request):
        if not request["blocks"]:
            return least_loaded(fleet, request)
        head = block_hash(request["blocks"][:2][-1])
        return max(fleet.workers, key=lambda w: hashlib.sha1(f"{head}w{w.number}".encode()).digest()).number


class LongestPrefix:
    def choose(self, fleet, request):
        depth = {w.number: w.cache.depth(request["blocks"]) for w in fleet.workers}
        return min(fleet.workers, key=lambda w: (-depth[w.number], w.backlog(fleet.now), w.number)).number


# ---- kvgate: the real scripts ----

class Channel:
    """One connection that sends many commands before it reads their replies."""

    def __init__(self, client):
        self.connection = client.connection_pool.get_connection()
        self.pending = []

    def send(self, *command):
        self.pending.append(command)

    def flush(self):
        """Sends what is pending; replies() reads the answers."""
        if self.pending:
            self.connection.send_packed_command(self.connection.pack_commands(self.pending))

    def replies(self):
        count, self.pending = len(self.pending), []
        return [self.connection.read_response() for _ in range(count)]


class Kvgate:
    """Gateways and workers on one Redis."""

    def __init__(self, redis, rates, gateways, model="m", extra=()):
        self.redis, self.rates, self.extra = redis, rates, extra
        self.schemas = Schemas(redis.client(), model)
        self.sha = {name: self.schemas.client.script_load(source(name)) for name in ("route", "register", "publish", "heartbeat")}
        self.gateways = [Channel(redis.client()) for _ in range(gateways)]
        self.link = Channel(redis.client())  # all workers
        self.lease, self.seq = {}, {}
        self.routed, self.seconds = 0, 0.0
        self.reasons = {}
        self.lost = False
        self.memories = [Gateway(WORKERS, rates.block, block_hash) for _ in range(gateways)]

    def script(self, channel, name, *args):
        channel.send("EVALSHA", self.sha[name], 1, self.schemas.base + "meta", *args)

    def sync(self):
        """What workers have sent is in Redis from here on."""
        if self.lost:
            self.link.pending.clear()
        self.link.flush()
        for reply in self.link.replies():
            if reply[0] != "ok":
                raise RuntimeError(f"a worker was answered {reply}: did this machine stall for a worker's 3 seconds of life?")

    def up(self, fleet):
        for worker in fleet.workers:
            self.script(self.link, "register", f"w{worker.number}", f"n{worker.number}", "first", self.rates.block, FINGERPRINT, SCHEMA,
                        f"127.0.0.1:{9000 + worker.number}", "bench", "0.0")
            self.link.flush()
            self.lease[worker.number] = self.link.replies()[-1][1]
            self.seq[worker.number] = 0
            self.publish(worker, [], [], "live")
            self.beat(worker, 0.0)
        self.sync()

    def publish(self, worker, stored, evicted, live=""):
        events = ["+" + block_hash(b)[:20] for b in stored] + ["-" + block_hash(b)[:20] for b in evicted]
        for at in range(0, max(1, len(events)), BATCH):
            self.seq[worker.number] += 1
            self.script(self.link, "publish", f"w{worker.number}", f"n{worker.number}", self.lease[worker.number], self.seq[worker.number], live,
                        "".join(events[at:at + BATCH]))

    def beat(self, worker, now):
        for memory in self.memories:
            memory.backlogs[worker.number] = memory.backlogs[worker.number] if self.lost else worker.backlog(now)
        self.script(self.link, "heartbeat", f"w{worker.number}", f"n{worker.number}", self.lease[worker.number], "ready",
                    worker.decoding, len(worker.queue), worker.rates.blocks - worker.cache.free, worker.rates.blocks,
                    round(worker.backlog(now)), f"{now:.6f}")

    def choose_all(self, fleet, requests):
        """Requests of one instant, from all gateways at once."""
        self.sync()
        shares = [requests[i::len(self.gateways)] for i in range(len(self.gateways))]
        chosen = self.choose_without(fleet, shares) if self.lost else self.ask(fleet, shares)
        for memory, share in zip(self.memories, shares):
            for request in share:
                memory.sent(request, chosen[request["id"]], fleet.now)
        return chosen

    def choose_without(self, fleet, shares):
        return {r["id"]: memory.choose(r, fleet.now) for memory, share in zip(self.memories, shares) for r in share}

    def ask(self, fleet, shares):
        started = time.perf_counter()
        for gateway, share in zip(self.gateways, shares):
            for request in share:
                chain = "".join(map(block_hash, request["blocks"]))
                self.script(gateway, "route", chain, request["input"], "", "", self.rates.block, FINGERPRINT, SCHEMA, f"{fleet.now:.6f}", *self.extra)
            gateway.flush()
        chosen = {}
        for gateway, share in zip(self.gateways, shares):
            for request, reply in zip(share, gateway.replies()):
                if reply[0] != "ok":
                    raise RuntimeError(f"route.lua answered {reply}: did this machine stall for a worker's 3 seconds of life?")
                worker, reason = reply[1][0], reply[1][6]
                chosen[request["id"]] = int(worker[1:])
                self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.seconds += time.perf_counter() - started
        self.routed += len(chosen)
        return chosen


# ---- replay ----

def replay(requests, policy, rates, load=1.0, workers=WORKERS, lost=None):
    """Plays the whole trace; returns the fleet. policy: one of the above. lost: when Redis goes, in seconds of the replay."""
    kvgate = policy if isinstance(policy, Kvgate) else None
    fleet = Fleet(workers, rates, kvgate and kvgate.publish, kvgate and kvgate.beat)
    if kvgate:
        kvgate.up(fleet)
    for at, group in itertools.groupby(requests, key=lambda r: r["at"]):
        group = list(group)
        fleet.run(at / load)
        if kvgate:
            kvgate.lost = lost is not None and at / load >= lost
        chosen = kvgate.choose_all(fleet, group) if kvgate else None
        for request in group:
            fleet.submit(request, chosen[request["id"]] if kvgate else policy.choose(fleet, request))
    fleet.drain()
    if kvgate:
        kvgate.sync()
    return fleet


def without_redis(requests, rates, load, gateways, lost):
    """Replays until LOST_SECONDS after Redis went: rows for the JSON file."""
    requests = [r for r in requests if r["at"] / load < lost + LOST_SECONDS]
    with Redis() as redis:
        replay(requests, Kvgate(redis, rates, gateways), rates, load, lost=lost)
    before, during = ([r for r in requests if at <= r["at"] / load < at + LOST_SECONDS] for at in (lost - LOST_SECONDS, lost))
    if not before or not during:
        sys.exit(f"bench-routing: the trace has no requests within {LOST_SECONDS} s before and after {lost:g} s")
    ratio = [sum(r["hit"] for r in part) / sum(r["input"] for r in part) for part in (before, during)]
    share = ratio[1] / ratio[0]
    print(f"LOAD {load:g}, {gateways} gateway(s), Redis lost at {lost:g} s: hit ratio {ratio[0]:.4f} in {LOST_SECONDS} s before ({len(before)} requests), "
          f"{ratio[1]:.4f} in {LOST_SECONDS} s without ({len(during)}): {share:.3f}   aim >= 0.85: {'reached' if share >= 0.85 else 'not reached'}")
    yield {"row": f"hit ratio without Redis at LOAD {load:g}", "unit": "share", "value": ratio[1], "peer": "before", "peer_value": ratio[0],
           "ratio": share, "limit": 0.85, "share": share / 0.85, "runs": len(during)}


def measure(requests, fleet, load):
    ttft = sorted(r["first"] - r["at"] / load for r in requests)
    computed = [w.computed for w in fleet.workers]
    return {"hit ratio": sum(r["hit"] for r in requests) / sum(r["input"] for r in requests),
            "max/mean": max(computed) / statistics.mean(computed), "TTFT mean": statistics.mean(ttft),
            "TTFT p90": ttft[int(0.9 * len(ttft))], "TTFT p99": ttft[int(0.99 * len(ttft))]}


UNITS = {"hit ratio": "share", "max/mean": "ratio", "TTFT mean": "s", "TTFT p90": "s", "TTFT p99": "s"}


def compare(results, load, n):
    """Rows of the JSON file: every value of kvgate beside every peer's, with the aims."""
    aims = {("hit ratio", "first two blocks"): 0.95, ("TTFT p90", "first two blocks"): 1 / 0.4, ("TTFT p90", "least loaded"): 1 / 0.85}
    ours = results["kvgate"]
    for what, value in ours.items():
        for peer in [p for p in results if p != "kvgate"]:
            theirs = results[peer][what]
            ratio = value / theirs if what == "hit ratio" and theirs else theirs / value if what != "hit ratio" else None
            limit = aims.get((what, peer))
            yield {"row": f"{what} at LOAD {load:g}", "unit": UNITS[what], "value": value, "peer": peer, "peer_value": theirs, "ratio": ratio,
                   "limit": limit, "share": ratio / limit if limit and ratio is not None else None, "runs": n}
    yield {"row": f"max/mean at LOAD {load:g}", "unit": "ratio", "value": ours["max/mean"], "peer": None, "peer_value": None, "ratio": None,
           "limit": 1.3, "share": 1.3 / ours["max/mean"], "runs": n}


def show(results, load, kvgate, took):
    print(f"LOAD {load:g}{'':22}hit ratio  max/mean   TTFT mean      p90      p99   (seconds)")
    for name, m in results.items():
        print(f"  {name:24}{m['hit ratio']:10.4f}{m['max/mean']:10.2f}{m['TTFT mean']:12.2f}{m['TTFT p90']:9.2f}{m['TTFT p99']:9.2f}")
    ours, hashed, least = results["kvgate"], results["first two blocks"], results["least loaded"]
    for text, value, aim, good in (
            ("hit ratio / first two blocks", ours["hit ratio"] / max(hashed["hit ratio"], 1e-9), 0.95, float.__ge__),
            ("p90 TTFT / first two blocks", ours["TTFT p90"] / hashed["TTFT p90"], 0.4, float.__le__),
            ("p90 TTFT / least loaded", ours["TTFT p90"] / least["TTFT p90"], 0.85, float.__le__),
            ("max/mean", ours["max/mean"], 1.3, float.__le__)):
        print(f"    {text:30}{value:8.3f}   aim {'>=' if good is float.__ge__ else '<='} {aim:g}: {'reached' if good(value, aim) else 'not reached'}")
    print(f"    {kvgate.routed} calls of route.lua, {1e3 * kvgate.seconds / kvgate.routed:.2f} ms each with their transport; "
          f"reasons {json.dumps(kvgate.reasons)}; replayed in {took:.0f} s\n")


def main():
    table.arguments(__doc__)
    trace = os.environ.get("TRACE", "")
    gateways = int(os.environ.get("GATEWAYS") or 1)
    loads = [float(x) for x in (os.environ.get("LOAD") or "1 1.4").split()]
    if not os.path.exists(trace):
        sys.exit(f"bench-routing: no trace{f' at {trace}' if trace else ''}: give one in the Mooncake JSONL format by TRACE=FILE")
    rates = Rates()
    requests = read_trace(trace, rates.block)
    print(f"{len(requests)} requests, {WORKERS} workers, {gateways} gateway(s)\n")
    rows = []
    lost = float(os.environ.get("REDIS_LOST") or 0)
    for load in loads if lost else ():
        rows += without_redis(requests, rates, load, gateways, lost)
    for load in loads if not lost else ():
        results = {}
        with Redis() as redis:
            started = time.monotonic()
            kvgate = Kvgate(redis, rates, gateways)
            results["kvgate"] = measure(requests, replay(requests, kvgate, rates, load), load)
            took = time.monotonic() - started
        for name, policy in (("round robin", RoundRobin()), ("least loaded", LeastLoaded()), ("first two blocks", FirstTwoBlocks()),
                             ("longest prefix", LongestPrefix())):
            results[name] = measure(requests, replay(requests, policy, rates, load), load)
        show(results, load, kvgate, took)
        rows += compare(results, load, len(requests))
    with open(os.path.join(os.environ.get("OUT") or BUILD, "bench-routing.json"), "w", encoding="utf-8") as f:
        json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
