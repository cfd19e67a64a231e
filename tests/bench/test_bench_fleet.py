"""The benchmarks run at small sizes, and the simulated worker does what a plain model of it does."""
import json
import os
import random
import subprocess
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
from bench_routing import FirstTwoBlocks, Kvgate, LeastLoaded, LongestPrefix, RoundRobin, block_hash, read_trace, replay  # noqa: E402
from fleet import Rates  # noqa: E402
from stack import Redis  # noqa: E402

SMALL = Rates(block=16, blocks=24, prefill=1.00071e-3, step=5.00313e-3, sequences=3)  # no two events of one instant


def random_requests(seed, n):
    """Prompts that share beginnings, at times that collide now and then."""
    rng = random.Random(seed)
    prompts, requests, at, names = [()], [], 0.0, 0
    for i in range(n):
        base = rng.choice(prompts[-12:])
        blocks = base[:rng.randint(0, len(base))]
        for _ in range(rng.randint(0, 4)):
            names += 1
            blocks += (names,)
        blocks = blocks[:9]
        prompts.append(blocks)
        at += rng.choice([0, 0, 0.01, 0.05, 0.2]) * rng.uniform(0.9, 1.1)
        requests.append({"id": i, "at": at, "blocks": blocks, "input": 16 * len(blocks) + rng.randint(1, 15), "output": rng.randint(1, 40)})
    return requests


def plain_worker(requests, rates):
    """One worker by the book: lists, no heap, no tree; time goes from event to event."""
    cached = {}  # name: [time of last use, parent, number of requests that use it]
    turn, used, queue, decoding, current, now = 0, 0, [], [], None, 0.0
    arriving = list(requests)
    out = {}
    while arriving or queue or decoding or current:
        times = [r["at"] for r in arriving[:1]] + [r["end"] for r in decoding] + ([current["first"]] if current else [])
        now = min(times)
        if current and current["first"] <= now:
            turn += 1
            parent = current["blocks"][current["depth"] - 1] if current["depth"] else None
            for name in current["blocks"][current["depth"]:]:
                cached[name] = [turn, parent, 1]
                parent = name
            decoding.append(current)
            current = None
        for r in [r for r in decoding if r["end"] <= now]:
            decoding.remove(r)
            for name in r["blocks"]:
                cached[name][2] -= 1
            used -= r["need"] - len(r["blocks"])
        while arriving and arriving[0]["at"] <= now:
            queue.append(dict(arriving.pop(0)))
        if current is None and queue and len(decoding) < rates.sequences:
            r = queue[0]
            depth = 0
            while depth < len(r["blocks"]) and r["blocks"][depth] in cached:
                depth += 1
            need = -(-(r["input"] + r["output"]) // rates.block)
            turn += 1
            for name in r["blocks"][:depth]:
                cached[name][0] = turn
                cached[name][2] += 1
            evictable = sum(c[2] == 0 for c in cached.values())
            if need - depth > rates.blocks - used - len(cached) + evictable:
                for name in r["blocks"][:depth]:
                    cached[name][2] -= 1
                continue
            while need - depth > rates.blocks - used - len(cached) and need:
                parents = {c[1] for c in cached.values()}
                leaf = min((name for name in cached if cached[name][2] == 0 and name not in parents), key=lambda name: cached[name][0])
                del cached[leaf]
            # its new whole blocks are in use without being cached until the prefill ends
            queue.pop(0)
            computed = max(1, r["input"] - 16 * depth)
            r.update(depth=depth, need=need, hit=r["input"] - computed, first=now + computed * rates.prefill)
            r["end"] = r["first"] + (r["output"] - 1) * rates.step
            current = r
            out[r["id"]] = r
            used += need - len(r["blocks"])
            reserved = len(r["blocks"]) - depth
            assert used + len(cached) + reserved <= rates.blocks
    return out, set(cached)


@pytest.mark.parametrize("seed", range(6))
def test_a_simulated_worker_agrees_with_a_plain_one(seed):
    requests = random_requests(seed, 250)
    expected, cached = plain_worker([dict(r) for r in requests], SMALL)
    fleet = replay(requests, RoundRobin(), SMALL, workers=1)
    assert sum(r["hit"] for r in requests) > 0
    for r in requests:
        e = expected[r["id"]]
        assert (r["hit"], round(r["first"], 9), round(r["end"], 9)) == (e["hit"], round(e["first"], 9), round(e["end"], 9)), r
    cache = fleet.workers[0].cache
    assert set(cache.nodes) == cached
    assert cache.free + len(cache.nodes) == SMALL.blocks and cache.locked == 0


def test_after_a_replay_the_claims_are_the_workers_trees():
    requests = random_requests(9, 300)
    with Redis() as redis:
        kvgate = Kvgate(redis, SMALL, gateways=3)
        fleet = replay(requests, kvgate, SMALL, workers=4)
        assert kvgate.routed == 300 and sum(kvgate.reasons.values()) == 300 and kvgate.reasons["prefix"] > 30
        assert sorted({r["worker"] for r in requests}) == [0, 1, 2, 3]
        for worker in fleet.workers:
            assert kvgate.schemas.claims(kvgate.lease[worker.number]) == {block_hash(name)[:20] for name in worker.cache.nodes}


def test_the_other_choices():
    requests = [{"id": i, "at": float(i), "blocks": (1, 2, 3 + i % 2), "input": 50, "output": 2} for i in range(8)]
    by = {}
    for policy in (RoundRobin(), LeastLoaded(), FirstTwoBlocks(), LongestPrefix()):
        replay(requests, policy, SMALL, workers=4)
        by[type(policy).__name__] = [r["worker"] for r in requests]
    assert by["RoundRobin"] == by["LeastLoaded"] == [0, 1, 2, 3, 0, 1, 2, 3], "idle workers in turn"
    assert len(set(by["FirstTwoBlocks"])) == 1 and by["LongestPrefix"] == [0] * 8


def run(script, **env):
    return subprocess.run([sys.executable, os.path.join(HERE, script)], env={**os.environ, **env}, capture_output=True, text=True, timeout=300)


def test_bench_routing_prints_its_rows(tmp_path):
    trace = os.path.join(HERE, "sample_trace.jsonl")
    assert all(len(r["blocks"]) == r["input"] // 512 for r in read_trace(trace, 512))
    done = run("bench_routing.py", TRACE=trace, LOAD="1 2", GATEWAYS="2", OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    for name in ("kvgate", "round robin", "least loaded", "first two blocks", "longest prefix", "LOAD 2", "p90 TTFT / least loaded"):
        assert name in done.stdout
    rows = json.loads((tmp_path / "bench-routing.json").read_text())
    assert {r["peer"] for r in rows} == {"round robin", "least loaded", "first two blocks", "longest prefix", None}
    assert {"row", "unit", "value", "peer", "peer_value", "ratio", "limit", "share", "runs"} == set(rows[0])


def test_bench_routing_replays_the_loss_of_redis(tmp_path):
    trace = os.path.join(HERE, "sample_trace.jsonl")
    done = run("bench_routing.py", TRACE=trace, LOAD="1", GATEWAYS="2", REDIS_LOST="25", OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    row, = json.loads((tmp_path / "bench-routing.json").read_text())
    assert row["peer"] == "before" and row["value"] > 0.05 and row["peer_value"] > 0.05
    assert run("bench_routing.py", TRACE=trace, LOAD="1", REDIS_LOST="5000", OUT=str(tmp_path)).returncode != 0


def test_bench_routing_says_when_there_is_no_trace(tmp_path):
    done = run("bench_routing.py", TRACE=str(tmp_path / "none.jsonl"))
    assert done.returncode != 0 and "no trace" in done.stderr


def test_bench_redis_prints_its_rows(tmp_path):
    done = run("bench_redis.py", CLAIMS="5000", CALLS="5", FLEETS="3", BLOCKS="1 40", OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "bench-redis.json").read_text())
    assert len(rows) == 1 + 8 and all(r["value"] > 0 for r in rows)
    assert "5,000" in done.stdout and "all, each to another depth" in done.stdout


def test_bench_gateway_prints_its_rows(tmp_path):
    done = run("bench_gateway.py", ROUNDS="1", RATE="60", SECONDS_EACH="0.5", LONG="2000", OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "bench-gateway.json").read_text())
    assert [r["row"].split(":")[0] for r in rows] == ["2,000-token chat, open loop"] * 2 + [
        "2,000-token chat, saturation"] + ["2,000-token chat, streamed"] * 2 + ["2,000 tokens, known prefix", "2,000 tokens, cold"] + [
        "client leaves in a stream", "client leaves before a reply"]
    assert all(r["peer"] == "proxy_pass" and r["peer_value"] > 0 for r in rows) and '"prefix"' in done.stdout
