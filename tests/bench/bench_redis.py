#!/usr/bin/env python3
"""make bench-redis [CLAIMS=n …]: what the index costs: bytes a claim, and the time of a call of route.lua.

Bytes a claim: a Redis of its own with the shipped conf/redis.conf (its maxmemory raised), filled by publish.lua from 16 workers
with CLAIMS claims on different blocks (1000000; CLAIMS="1000000 10000000" takes about twenty minutes and 500 MB), and what
INFO says about memory before and after; and how many of 64 buckets are listpacks.

Route call: EVALSHA from one client that waits for each reply, at 1 to 6,250 blocks and 16 and 256 workers (BLOCKS, FLEETS, CALLS),
that nobody holds; that one worker holds; of which every worker holds the first block, each to another depth; that all hold. The time
in Redis is its own measure (SLOWLOG); beside it what this client sees over a unix socket. Aim: p50 <= 0.3 ms at 256 workers, 40 bytes a claim. Prints tables and writes build/bench-redis.json.
"""
import json
import os
import random
import re
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "tools"), os.path.join(HERE, "..")]
from conftest import BUILD, ROOT  # noqa: E402
from schemas import BLOCK, FINGERPRINT, SCHEMA, Schemas, grid_of, source  # noqa: E402
from stack import Redis  # noqa: E402
import table  # noqa: E402

BATCH, WORKERS = 256, 16
BLOCKS = (1, 64, 512, 6250)
FLEETS = (16, 256)


class ShippedRedis(Redis):
    """conf/redis.conf with another port, folder and maxmemory, and a unix socket."""

    def command(self):
        self.socket = os.path.join(self.dir, "redis.sock")
        with open(os.path.join(ROOT, "conf", "redis.conf"), encoding="utf-8") as file:
            text = file.read()
        for pattern, new in ((r"(?m)^port .*$", f"port {self.port}\nunixsocket {self.socket}\ndir {self.dir}"), (r"(?m)^maxmemory .*$", "maxmemory 4gb")):
            text, n = re.subn(pattern, new, text)
            assert n == 1, f"conf/redis.conf has no {pattern}"
        conf = os.path.join(self.dir, "redis.conf")
        with open(conf, "w", encoding="utf-8") as file:
            file.write(text)
        return ["redis-server", conf, *self.args]

    def client(self):
        import redis
        return redis.Redis(unix_socket_path=self.socket, decode_responses=True)


class Index:
    """One model's workers, spoken for by one pipelining client. They never beat: PERSIST keeps them alive while this fills."""

    def __init__(self, redis, model="m"):
        self.client = redis.client()
        self.base = Schemas(self.client, model).base
        self.sha = {name: self.client.script_load(source(name)) for name in ("route", "register", "publish", "heartbeat")}
        self.leases, self.seq = {}, {}

    def call(self, client, name, *args):
        return client.evalsha(self.sha[name], 1, self.base + "meta", *args)

    def worker(self, number, backlog=0):
        name = f"w{number}"
        self.leases[number] = self.call(self.client, "register", name, "n", "first", BLOCK, FINGERPRINT, SCHEMA, f"10.0.0.{number}:8000", "0", "")[1]
        self.seq[number] = 0
        self.publish([(number, [], "live")])
        self.call(self.client, "heartbeat", name, "n", self.leases[number], "ready", 0, 0, 0, 100, backlog, "")
        self.client.persist(self.base + "w:" + name)
        self.client.persist(self.base + "meta")

    def publish(self, batches):
        """[(worker, hashes, 'live' or '')], in one pipeline."""
        pipe = self.client.pipeline(transaction=False)
        for number, hashes, live in batches:
            self.seq[number] += 1
            self.call(pipe, "publish", f"w{number}", "n", self.leases[number], self.seq[number], live, "".join("+" + h[:20] for h in hashes))
        for reply in pipe.execute():
            assert reply == ["ok"], reply

    def claim(self, chain, leases, depths):
        """The fields that publish.lua would have written, had each lease stored the chain to its depth."""
        pipe = self.client.pipeline(transaction=False)
        for at, block in enumerate(chain[:max(depths)]):
            pipe.hset(f"{self.base}own:{block[:4]}", block[4:20], ",".join(lease for lease, depth in zip(leases, depths) if depth > at))
            if at % 1000 == 999:
                pipe.execute()
        pipe.execute()


def hashes(n, rng):
    """n random block hashes, 20 hex digits of each."""
    digits = rng.getrandbits(80 * n).to_bytes(10 * n, "big").hex()
    return [digits[at:at + 20] for at in range(0, 20 * n, 20)]


def bytes_a_claim(counts):
    """Fills one Redis up to each of the counts."""
    rng = random.Random(1)
    with ShippedRedis() as redis:
        index = Index(redis)
        for number in range(WORKERS):
            index.worker(number)
        empty = index.client.info("memory")
        claims, turn, busy = 0, 0, 0.0
        for goal in sorted(counts):
            while claims < goal:
                batches = []
                for _ in range(16):
                    n = min(BATCH, goal - claims)
                    if n:
                        batches.append((turn % WORKERS, hashes(n, rng), ""))
                        claims, turn = claims + n, turn + 1
                started = time.perf_counter()
                index.publish(batches)
                busy += time.perf_counter() - started
            info = index.client.info("memory")
            buckets = ["%sown:%04x" % (index.base, rng.getrandbits(16)) for _ in range(64)]
            encodings = [index.client.object("encoding", b) for b in buckets if index.client.exists(b)]
            yield {"claims": goal, "bytes": (info["used_memory"] - empty["used_memory"]) / goal,
                   "rss": (info["used_memory_rss"] - empty["used_memory_rss"]) / goal, "total_mb": info["used_memory"] / 1e6,
                   "listpacks": encodings.count("listpack") / max(1, len(encodings)), "us": 1e6 * busy / claims}


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def route_times(fleets, lengths, calls):
    """Rows {workers, blocks, owners, p50, p99 (in Redis), client (p50 of the round trip)}, in ms."""
    rng = random.Random(2)
    for workers in fleets:
        with ShippedRedis("--slowlog-log-slower-than", 20, "--slowlog-max-len", 100_000) as redis:
            index = Index(redis)
            for number in range(workers):
                index.worker(number, backlog=rng.randrange(100_000))
            leases = [index.leases[n] for n in range(workers)]
            for blocks in lengths:
                cases = {"none": lambda number: 0, "one": lambda number: blocks if number == 0 else 0,
                         "all, each to another depth": lambda number: max(1, blocks * (number + 1) // workers),
                         "all, to the end": lambda number: blocks}
                for case, depth in cases.items():
                    chain = [h + "0" * 12 for h in hashes(blocks, rng)]
                    depths = [depth(number) for number in range(workers)]
                    index.claim(chain, leases, depths)
                    sent = [chain[p - 1] for p in grid_of(blocks)]
                    args = ("".join(sent), blocks * BLOCK, "", "", BLOCK, FINGERPRINT, SCHEMA, "", blocks)
                    assert index.call(index.client, "route", *args)[0] == "ok"
                    index.client.slowlog_reset()
                    trips = []
                    for _ in range(calls):
                        started = time.perf_counter()
                        index.call(index.client, "route", *args)
                        trips.append(1e3 * (time.perf_counter() - started))
                    inside = [row["duration"] / 1e3 for row in index.client.slowlog_get(100_000) if row["command"].upper().startswith(b"EVALSHA")]
                    inside += [0.02] * (calls - len(inside))  # those too quick for the log
                    yield {"workers": workers, "blocks": blocks, "owners": case, "p50": percentile(inside, 0.5), "p99": percentile(inside, 0.99),
                           "client": percentile(trips, 0.5)}


def main():
    table.arguments(__doc__)
    counts = [int(float(x)) for x in (os.environ.get("CLAIMS") or "1000000").split()]
    fleets = [int(x) for x in (os.environ.get("FLEETS") or "").split()] or FLEETS
    lengths = [int(x) for x in (os.environ.get("BLOCKS") or "").split()] or BLOCKS
    calls = int(os.environ.get("CALLS") or 400)
    out = []
    print("    claims   bytes a claim   of RSS   MB in all   listpacks   us a claim to publish")
    for m in bytes_a_claim(counts) if counts else ():
        print(f"{m['claims']:10,}{m['bytes']:16.1f}{m['rss']:9.1f}{m['total_mb']:12.1f}{100 * m['listpacks']:11.0f}%{m['us']:12.1f}", flush=True)
        out.append({"row": f"bytes a claim at {m['claims']}", "unit": "bytes", "value": m["bytes"], "peer": None, "peer_value": None, "ratio": None,
                    "limit": 40, "share": 40 / m["bytes"], "runs": 1})
    print("\n   workers   blocks  owners of the first block     p50 in Redis       p99   p50 with transport, ms")
    for m in route_times(fleets, lengths, calls):
        print(f"{m['workers']:10}{m['blocks']:9}  {m['owners']:28}{m['p50']:14.3f}{m['p99']:10.3f}{m['client']:16.3f}", flush=True)
        out.append({"row": f"route call, {m['workers']} workers, {m['blocks']} blocks, owners: {m['owners']}", "unit": "ms", "value": m["p50"],
                    "peer": None, "peer_value": None, "ratio": None, "limit": 0.3, "share": 0.3 / m["p50"], "runs": calls})
    with open(os.path.join(os.environ.get("OUT") or BUILD, "bench-redis.json"), "w", encoding="utf-8") as f:
        json.dump(out, f, indent=1)


if __name__ == "__main__":
    main()
