"""The Lua scripts in a real Redis and a real Valkey: the routing rule against a plain model, leases, batches, sweeping."""
import json
import math
import os
import random
import threading

import pytest
import redis as redis_library

from conftest import ROOT
from schemas import BLOCK, FINGERPRINT, FakeWorker, Schemas, random_chain, rendezvous, route_model
from stack import Redis, redis_programs, wait_until


@pytest.fixture(scope="module", params=redis_programs())
def redis(request):
    program = redis_programs()[request.param]
    if not program:
        pytest.skip(f"no {request.param} installed")
    with Redis(program=program) as server:
        yield server


@pytest.fixture
def schemas(redis):
    client = redis.client()
    client.flushall()
    return Schemas(client)


# ---- route.lua ---------------------------------------------------------------------------------------------------------
def test_without_workers_the_answer_is_none(schemas):
    assert schemas.route(random_chain(3)) == ["none"]


def test_the_worker_that_holds_the_prompt_is_chosen_with_its_depth(schemas):
    chain = random_chain(100)
    FakeWorker(schemas, "a", addr="127.0.0.1:1").up(chain[:77])
    FakeWorker(schemas, "b", addr="127.0.0.1:2").up()
    reply = schemas.route(chain)
    assert reply[0] == "ok"
    assert reply[1][:4] == ["a", "127.0.0.1:1", "1", "77"] and reply[1][6] == "prefix"
    assert reply[2][0] == "b" and reply[2][3] == "0" and reply[2][6] == "load"


@pytest.mark.parametrize("length", [1, 2, 3, 31, 32, 33, 511, 512])
def test_depth_is_exact_for_the_deepest_owner(schemas, length):
    rng = random.Random(length)
    chain = random_chain(length, rng)
    worker = FakeWorker(schemas, "a").up()
    held = 0
    for depth in sorted({0, 1, length} | {rng.randint(0, length) for _ in range(25)}):
        assert worker.publish(stored=chain[held:depth]) == ["ok"]
        held = depth
        explained = json.loads(schemas.route(chain, explain="explain"))
        assert explained["candidates"][0]["hit_blocks"] == depth
        assert explained["fields"] <= 64


@pytest.mark.parametrize("length", [1, 511, 512, 513, 516, 600, 1023, 1024, 1025, 3000, 6250, 8192, 20_000])
def test_of_a_long_chain_the_grid_suffices(schemas, length):
    """Never too deep, at most a 128th too shallow, exact at its end and to 512 blocks."""
    rng = random.Random(length)
    chain = random_chain(length, rng)
    worker, held = FakeWorker(schemas, "a").up(), 0
    for key in ("w:a", "meta"):
        schemas.client.persist(schemas.base + key)  # nobody beats here
    for depth in sorted({1, min(512, length), length} | {rng.randint(0, length) for _ in range(6)}):
        for at in range(held, depth, 5000):
            assert worker.publish(stored=chain[at:min(at + 5000, depth)]) == ["ok"]
        held = depth
        best = json.loads(schemas.route(chain, explain="explain", grid=True))
        hit = best["candidates"][0]["hit_blocks"]
        assert best["blocks"] == length and best["fields"] <= 64
        assert hit <= depth and hit >= depth - depth / 128 and (hit == depth or 512 < depth < length)
        assert not best["candidates"][0]["hit_exact"] or hit == depth
    for key in schemas.client.keys("*pred*"):
        schemas.client.delete(key)
    schemas.route(chain, grid=True)
    assert schemas.route(chain)[1][3] == str(length) == schemas.route(chain, grid=True)[1][3]  # the same marks


def test_who_cannot_be_chosen_is_not_narrowed_and_the_choice_is_the_same(schemas):
    rng = random.Random(5)
    for _ in range(30):
        schemas.client.flushall()
        chain = random_chain(rng.randint(2, 400), rng)
        for i in range(12):
            FakeWorker(schemas, f"w{i}", rng.randint(0, 60_000)).up(chain[:rng.randint(0, len(chain))])
        explained = json.loads(schemas.route(chain, explain="explain"))["candidates"]
        first = schemas.route(chain, explain="observe")[1]
        assert first[0] == explained[0]["worker"] and first[3] == str(explained[0]["hit_blocks"])


def test_random_states_agree_with_the_model(schemas):
    """Never too deep for anyone, exact for the deepest owner, choices and costs as the rule says."""
    rng = random.Random(7)
    for turn in range(60):
        schemas.client.flushall()
        length = rng.choice([rng.randint(1, 40), rng.randint(41, 512)])
        chain = random_chain(length, rng)
        depths, backlogs = {}, {}
        for i in range(rng.randint(1, 14)):
            name = f"w{i}"
            depths[name] = rng.choice([0, 0, rng.randint(0, length), length])
            backlogs[name] = rng.randint(0, 20000) + i / 16
            FakeWorker(schemas, name, backlogs[name]).up(chain[:depths[name]])
        tokens = length * BLOCK + rng.randint(0, BLOCK - 1)
        alpha = rng.choice([1, 4, 5])
        explained = json.loads(schemas.route(chain, tokens, "explain", alpha))
        seen = {c["worker"]: c["hit_blocks"] for c in explained["candidates"]}
        assert all(seen[w] <= depths[w] for w in seen)
        deepest = max(depths.values())
        assert max(seen.values()) == deepest
        assert all(seen[w] == deepest for w in depths if depths[w] == deepest and (deepest or w in seen))
        assert explained["fields"] <= 64
        assert set(seen) == {w for w in depths if depths[w]} | set(sorted(backlogs, key=backlogs.get)[:8])

        expected, cost = route_model({w: (seen.get(w, 0), backlogs[w]) for w in depths}, chain, tokens, alpha)
        reply = schemas.route(chain, tokens, alpha=alpha)
        assert reply[1][0] == expected[0] and len(reply) == 1 + len(expected)
        assert math.isclose(float(reply[1][5]), cost[reply[1][0]], abs_tol=1e-6) and int(reply[1][3]) == seen[reply[1][0]]
        for row in reply[2:]:  # of those that cannot be chosen the depth is not worked out
            assert float(row[5]) >= cost[row[0]] - 1e-6 and int(row[3]) <= seen[row[0]]
        schemas.client.hset(schemas.base + "meta", "mean_prompt", 1024)


@pytest.mark.parametrize("length", [1000, 8191, 40000])
def test_long_prompts_stay_within_the_probes_and_are_never_too_deep(schemas, length):
    rng = random.Random(length)
    chain = random_chain(length, rng)
    depths = {f"w{i}": rng.randint(0, length) for i in range(6)}
    for name, depth in depths.items():
        worker = FakeWorker(schemas, name).up()
        for start in range(0, depth, 2000):
            worker.publish(stored=chain[start:min(start + 2000, depth)])
    explained = json.loads(schemas.route(chain, explain="explain"))
    assert explained["fields"] <= 64
    seen = {c["worker"]: c["hit_blocks"] for c in explained["candidates"]}
    assert all(seen[w] <= depths[w] for w in seen)
    if length <= 8191:
        assert max(seen.values()) == max(depths.values())


def test_candidates_are_16_owners_with_the_deepest_and_the_8_least_loaded(schemas):
    chain = random_chain(40)
    for i in range(30):
        FakeWorker(schemas, f"o{i:02}", backlog=1000 + i).up(chain[:40 if i == 25 else 2])
    for i in range(12):
        FakeWorker(schemas, f"idle{i:02}", backlog=i).up()
    explained = json.loads(schemas.route(chain, explain="explain"))
    names = {c["worker"] for c in explained["candidates"]}
    assert names == {"o25"} | {f"o{i:02}" for i in range(15)} | {f"idle{i:02}" for i in range(8)}
    assert {c["worker"]: c["hit_blocks"] for c in explained["candidates"]}["o25"] == 40


def test_alpha_weighs_a_miss_against_backlog(schemas):
    chain = random_chain(200)
    FakeWorker(schemas, "holder", backlog=20000).up(chain)
    FakeWorker(schemas, "idle", backlog=0).up()
    assert schemas.route(chain, explain="observe", alpha=1)[1][0] == "idle"
    assert schemas.route(chain, explain="observe", alpha=8)[1][0] == "holder"


def test_among_near_equals_the_rendezvous_order_decides(schemas):
    names = ["a", "b", "c", "d"]
    for i, name in enumerate(names):
        FakeWorker(schemas, name, backlog=i * 10).up()
    firsts = set()
    for seed in range(30):
        chain = random_chain(50, random.Random(seed))
        order = sorted(names, key=lambda w: -rendezvous(chain[1024 // BLOCK - 1], w))
        explained = json.loads(schemas.route(chain, explain="explain"))["candidates"]
        assert [c["worker"] for c in explained] == order
        assert {c["reason"] for c in explained} == {"tie"}
        firsts.add(order[0])
    assert firsts == set(names), "ties spread"


def serve(schemas, workers, chain, tokens):
    """Routes a prompt and does what its worker then would: queue the uncached tokens, hold the blocks, say so (and later than in the
    half second in which the request counts as being on its way)."""
    choice = schemas.route(chain, tokens)[1]
    worker, held = workers[choice[0]], int(choice[3])
    worker.backlog += tokens - held * BLOCK
    worker.publish(stored=chain[held:])
    schemas.client.delete(schemas.base + "flight:" + worker.name)
    worker.beat()
    return worker, held


def test_one_hot_prefix_does_not_overload_its_owner(schemas):
    """96 requests at once behind one 1,000-token system prompt: every worker gets a fair share, and most requests still hit."""
    rng = random.Random(3)
    workers = {name: FakeWorker(schemas, name).up() for name in ("w1", "w2", "w3")}
    prefix = random_chain(31, rng)
    hits = 0
    for _ in range(96):
        _, held = serve(schemas, workers, prefix + random_chain(6, rng), 37 * BLOCK + 5)
        hits += held >= 31
    loads = [w.backlog for w in workers.values()]
    assert max(loads) < 1.5 * sum(loads) / 3 and hits >= 90


def test_two_hot_prefixes_settle_apart(schemas):
    """Two groups behind two prefixes of 4,000 tokens, two workers: each group finds its own, most requests hit."""
    rng = random.Random(5)
    workers = {name: FakeWorker(schemas, name).up() for name in ("w1", "w2")}
    groups = [random_chain(125, rng), random_chain(125, rng)]
    at, hits = [{}, {}], 0
    for turn in range(60):
        group = rng.randint(0, 1)
        worker, held = serve(schemas, workers, groups[group] + random_chain(3, rng), 128 * BLOCK)
        at[group][worker.name] = at[group].get(worker.name, 0) + 1
        hits += held >= 125
        for w in workers.values():
            w.backlog = max(0, w.backlog - 200)
            w.beat()
    assert hits >= 55
    homes = [max(counts, key=counts.get) for counts in at]
    assert homes[0] != homes[1] and all(max(counts.values()) >= 0.8 * sum(counts.values()) for counts in at), at


def test_unique_prompts_avoid_a_busy_worker_and_spread_over_the_others(schemas):
    workers = {name: FakeWorker(schemas, name, backlog).up() for name, backlog in (("busy", 60000), ("b", 0), ("c", 0))}
    served = [serve(schemas, workers, random_chain(20, random.Random(i)), 20 * BLOCK)[0].name for i in range(30)]
    assert "busy" not in served and min(served.count("b"), served.count("c")) >= 8


def test_what_is_on_its_way_counts_until_a_heartbeat_has_seen_it(schemas):
    """A prompt of 3 blocks and 4 tokens goes to the only worker, which holds its first block."""
    load = lambda: float(schemas.client.zscore(schemas.base + "load", worker.lease))  # noqa: E731
    chain = random_chain(3)
    worker = FakeWorker(schemas, "a", backlog=50).up(chain[:1], now="999.9")
    tokens = 3 * BLOCK + 4
    schemas.route(chain, tokens, explain="explain", now="1000.0")
    assert schemas.route(chain, tokens, explain="observe", now="1000.0")[1][:5] == ["a", "127.0.0.1:9000", worker.lease, "1", "50"]
    assert load() == 50, "neither of them places anything"
    for number in (1, 2):
        schemas.client.delete(*[f"{schemas.base}pred:{block[:20]}" for block in chain])
        assert schemas.route(chain, tokens, now="1000.0")[1][4] == str(50 + (number - 1) * (2 * BLOCK + 4))
        assert load() == 50 + number * (2 * BLOCK + 4)
    worker.backlog = 7
    worker.beat(now="1000.4")
    assert load() == 7 + 2 * (2 * BLOCK + 4), "too recent for the backlog of that moment"
    schemas.client.delete(*[f"{schemas.base}pred:{block[:20]}" for block in chain])
    schemas.route(chain, tokens, now="1000.7")
    worker.beat(now="1000.8")
    assert load() == 7 + 2 * BLOCK + 4
    worker.beat(now="1001.5")
    assert load() == 7 and schemas.client.exists(schemas.base + "flight:a") == 0


def test_a_burst_between_two_heartbeats_spreads(schemas):
    """128 different prompts of one length, no heartbeat between them, from four connections: no worker gets far more than its share."""
    workers = [FakeWorker(schemas, f"w{i}").up() for i in range(8)]
    rng, counts, lock = random.Random(8), {}, threading.Lock()
    chains = [random_chain(40, rng) for _ in range(128)]

    def gateway(share):
        own = Schemas(schemas.client, "m")
        for chain in share:
            name = own.route(chain)[1][0]
            with lock:
                counts[name] = counts.get(name, 0) + 1

    gateways = [threading.Thread(target=gateway, args=(chains[i::4],)) for i in range(4)]
    for thread in gateways:
        thread.start()
    for thread in gateways:
        thread.join()
    assert sorted(counts) == sorted(w.name for w in workers) and max(counts.values()) <= 1.3 * 16, counts


def test_equal_cold_prompts_at_once_are_prefilled_by_at_most_two_workers(schemas):
    """16 callers with one prompt of 6,000 tokens, none of it held by anybody."""
    for i in range(8):
        FakeWorker(schemas, f"w{i}", backlog=i).up()
    chain = random_chain(187)
    chosen, threads = [], []
    for _ in range(16):
        threads.append(threading.Thread(target=lambda: chosen.append(Schemas(schemas.client, "m").route(chain, 6000)[1])))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(chosen) == 16 and len({row[0] for row in chosen}) <= 2
    explained = json.loads(schemas.route(chain[:100], explain="explain"))["candidates"][0]
    assert (explained["hit_blocks"], explained["reserved_blocks"], explained["hit_exact"]) == (64, 64, False)
    assert 9000 < schemas.client.pttl(schemas.base + "pred:" + chain[-1][:20]) <= 10000


def test_a_reservation_ends_when_its_block_is_stored(schemas):
    """So that an eviction right after it is believed."""
    chain = random_chain(32)
    worker = FakeWorker(schemas, "a").up()
    schemas.route(chain)
    hit = lambda: schemas.route(chain, explain="observe")[1][3]  # noqa: E731
    assert hit() == "32"
    worker.publish(stored=chain[:20])
    assert hit() == "32", "the rest is still on its way"
    worker.publish(stored=chain[20:])
    assert hit() == "32" and not schemas.client.keys(schemas.base + "pred:*")
    worker.publish(evicted=chain[:3:-1])
    assert hit() == "4"


def test_a_reservation_ends_with_its_lease(schemas):
    chain = random_chain(50)
    FakeWorker(schemas, "a").up()
    schemas.route(chain)
    FakeWorker(schemas, "a").up()
    assert schemas.route(chain, explain="observe")[1][3] == "0"


def test_a_new_process_starts_without_what_was_sent_to_the_old_one(schemas):
    FakeWorker(schemas, "a").up()
    schemas.route(random_chain(3))
    assert schemas.client.zcard(schemas.base + "flight:a") == 1
    again = FakeWorker(schemas, "a").up()
    assert schemas.client.zscore(schemas.base + "load", again.lease) == 0


def test_many_owners_of_many_depths(schemas):
    """200 owners of the first block, each to another depth: the candidates are the deepest, the least loaded owners and the
    least loaded workers, at bounded cost, and no one is taken for deeper than it is."""
    chain = random_chain(512)
    depths = {f"w{i:03}": 1 + i * 511 // 199 for i in range(200)}
    workers = {name: FakeWorker(schemas, name, backlog=1000 + (i * 37) % 200).up() for i, name in enumerate(depths)}
    for i in range(8):
        FakeWorker(schemas, f"idle{i}", backlog=i).up()
    for at, block in enumerate(chain):
        leases = [workers[name].lease for name in depths if depths[name] > at]
        schemas.client.hset(f"{schemas.base}own:{block[:4]}", block[4:20], ",".join(leases))
    explained = json.loads(schemas.route(chain, explain="explain"))
    seen = {c["worker"]: c["hit_blocks"] for c in explained["candidates"]}
    deepest = sorted((w for w in depths if depths[w] >= 512), key=lambda w: workers[w].backlog)
    by_load = sorted(depths, key=lambda w: workers[w].backlog)
    assert set(seen) == set((deepest + [w for w in by_load if w not in deepest])[:16]) | {f"idle{i}" for i in range(8)}
    assert all(seen[w] <= depths.get(w, 0) for w in seen) and seen["w199"] == 512
    best = explained["candidates"][:3]
    assert schemas.route(chain)[1][0] == best[0]["worker"], "as without explain"


def test_rendezvous_scores_equal_the_vectors(schemas):
    with open(os.path.join(ROOT, "tests/golden/rendezvous.json"), encoding="utf-8") as f:
        vectors = json.load(f)
    for v in vectors:
        assert rendezvous(v["hash"], v["worker"]) == v["score"]
        FakeWorker(schemas, v["worker"]).up()
        explained = json.loads(schemas.route([v["hash"]], explain="explain"))
        assert {c["worker"]: c["rendezvous"] for c in explained["candidates"]}[v["worker"]] == v["score"]
        schemas.call("forget", v["worker"])


def test_the_mean_prompt_follows_the_prompts_but_not_in_explain_mode(schemas):
    FakeWorker(schemas, "a").up()
    mean = lambda: float(schemas.client.hget(schemas.base + "meta", "mean_prompt"))
    assert mean() == 1024
    schemas.route(random_chain(2), 3024, "explain")
    assert mean() == 1024
    schemas.route(random_chain(2), 3024)
    assert mean() == 1044
    for _ in range(600):
        schemas.route([], 100)
    assert abs(mean() - 100) < 10


def test_without_a_whole_block_the_least_loaded_wins_and_ties_are_drawn(schemas):
    for name, backlog in (("a", 5), ("b", 5), ("c", 900)):
        FakeWorker(schemas, name, backlog).up()
    chosen = {}
    for _ in range(60):
        reply = schemas.route([], 20)
        chosen[reply[1][0]] = chosen.get(reply[1][0], 0) + 1
        assert reply[3][0] == "c" and reply[3][6] == "load"
    assert set(chosen) == {"a", "b"} and min(chosen.values()) > 5


def test_a_mismatch_is_told_with_both_values(schemas):
    FakeWorker(schemas, "a").up()
    chain = random_chain(2)
    assert schemas.route(chain, block=64) == ["mismatch", "block size is 64 here and 32 at the workers"]
    assert schemas.route(chain, schema="2") == ["mismatch", "schema version is 2 here and 1 at the workers"]
    other = "f" * 32
    assert schemas.route(chain, fingerprint=other) == ["mismatch", f"fingerprint is {other} here and {FINGERPRINT} at the workers"]
    assert schemas.call("route", "".join(chain))[0] == "ok", "an operator need not give any"


def test_separators_between_hashes_change_nothing(schemas):
    chain = random_chain(9)
    FakeWorker(schemas, "a").up(chain[:5])
    for separator in (",", " "):
        assert schemas.call("route", separator.join(chain), "", "observe")[1][3] == "5"
    assert schemas.call("route", chain[0])[1][3] == "1"


def test_claims_of_a_dead_worker_do_not_count(schemas):
    chain = random_chain(64)
    FakeWorker(schemas, "dead").up(chain)
    FakeWorker(schemas, "b").up(chain[:3])
    schemas.client.delete(schemas.base + "w:dead")
    reply = schemas.route(chain)
    assert [row[0] for row in reply[1:]] == ["b"] and reply[1][3] == "3"


def test_a_worker_without_heartbeats_expires(schemas):
    chain = random_chain(4)
    FakeWorker(schemas, "a").up(chain)
    assert 0 < schemas.client.pttl(schemas.base + "w:a") <= 3000
    assert 0 < schemas.client.pttl(schemas.base + "meta") <= 3000
    wait_until(lambda: schemas.route(chain) == ["none"], timeout=8)
    assert schemas.client.exists(schemas.base + "meta") == 0, "meta ends with the last live worker"


def test_draining_workers_get_no_new_work_but_stay_listed(schemas):
    chain = random_chain(8)
    a = FakeWorker(schemas, "a").up(chain)
    FakeWorker(schemas, "b").up()
    a.state = "draining"
    a.beat()
    assert [row[0] for row in schemas.route(chain)[1:]] == ["b"]
    assert json.loads(schemas.route(chain, explain="explain"))["excluded"] == [{"worker": "a", "state": "draining"}]
    assert [(w[0], w[4]) for w in schemas.call("workers")] == [("a", "draining"), ("b", "ready")]


def test_now_replays_a_trace(schemas):
    chain = random_chain(4)
    FakeWorker(schemas, "a").up(chain, now="1000.0")
    assert schemas.route(chain, now="1002.5")[1][0] == "a"
    assert schemas.route(chain, now="1003.5") == ["none"]
    assert schemas.call("workers", "", "1003.5") == []


def test_routing_reads_when_writes_fail(schemas):
    chain = random_chain(4)
    FakeWorker(schemas, "a").up(chain)
    try:
        schemas.client.config_set("maxmemory", "1")
        assert schemas.route(chain)[1][0] == "a"
        schemas.client.config_set("maxmemory", "0")
        schemas.client.config_set("min-replicas-to-write", "1")
        assert schemas.route(chain)[1][0] == "a"
    finally:
        schemas.client.config_set("maxmemory", "0")
        schemas.client.config_set("min-replicas-to-write", "0")


# ---- leases and batches ------------------------------------------------------------------------------------------------
def test_leases_are_small_integers_and_a_new_one_ends_the_claims_of_the_old(schemas):
    chain = random_chain(10)
    FakeWorker(schemas, "a").up(chain)
    again = FakeWorker(schemas, "a").up(chain[:2])
    assert again.lease == "2"
    assert schemas.route(chain)[1][2:4] == ["2", "2"]
    assert schemas.client.hgetall(schemas.base + "leases").keys() == {"2"}
    assert schemas.client.zrange(schemas.base + "load", 0, -1) == ["2"]


def test_the_second_process_of_an_id_wins(schemas):
    first = FakeWorker(schemas, "a").up()
    second = FakeWorker(schemas, "a").up()
    assert first.beat() == ["superseded"]
    assert first.publish(stored=random_chain(1)) == ["superseded"]
    assert first.register("again") == ["superseded"]
    assert second.beat() == ["ok"]


def test_store_store_evict_leaves_nothing(schemas):
    chain = random_chain(1)
    a = FakeWorker(schemas, "a").up()
    a.publish(events=[("+", chain[0]), ("+", chain[0]), ("-", chain[0])])
    assert schemas.claims(a.lease) == set()
    a.publish(events=[("+", chain[0])])
    a.publish(events=[("-", chain[0]), ("-", chain[0]), ("+", chain[0])])
    assert schemas.claims(a.lease) == {chain[0][:20]}


def test_a_batch_delivered_twice_is_applied_once(schemas):
    h = random_chain(1)[0]
    a = FakeWorker(schemas, "a").up()
    a.publish(stored=[h])
    stored = a.seq
    a.publish(evicted=[h])
    assert a.publish(stored=[h], seq=stored) == ["ok"]
    assert schemas.claims(a.lease) == set()


def test_a_gap_is_answered_by_resync(schemas):
    a = FakeWorker(schemas, "a").up()
    reply = a.publish(stored=random_chain(1), seq=a.seq + 2)
    assert reply == ["resync", "batch 3 came after batch 1"]
    assert schemas.claims(a.lease) == set()


def test_unknown_leases_and_flushed_keys_are_answered_by_resync(schemas):
    a = FakeWorker(schemas, "a").up()
    old, a.lease = a.lease, "99"
    assert a.beat()[0] == "resync" and a.publish()[0] == "resync"
    a.lease = old
    assert a.beat() == ["ok"]
    for key in ("leases", "meta", "w:a"):
        schemas.client.delete(schemas.base + key)
        assert a.beat()[0] == "resync"
        a = FakeWorker(schemas, "a").up()
    schemas.client.flushall()
    assert a.publish()[0] == "resync"


def test_a_snapshot_switches_live_with_its_last_batch(schemas):
    chain = random_chain(20)
    a = FakeWorker(schemas, "a").up(chain[:5])
    assert a.register("again") == ["ok", "2"]
    assert a.publish(stored=chain[:10]) == ["ok"]
    assert a.beat() == ["ok"]
    assert schemas.route(chain)[1][2:4] == ["1", "5"], "the old lease counts until the new one is complete"
    assert a.publish(stored=chain[10:12], live=True) == ["ok"]
    assert schemas.route(chain)[1][2:4] == ["2", "12"]
    assert schemas.client.hgetall(schemas.base + "leases").keys() == {"2"}


def test_claims_of_a_pending_lease_survive_other_writers(schemas):
    h = random_chain(1)[0]
    a, b = FakeWorker(schemas, "a"), FakeWorker(schemas, "b").up()
    a.register()
    a.publish(stored=[h])
    b.publish(stored=[h])
    b.publish(evicted=[h])
    assert schemas.claims(a.lease) == {h[:20]}


def test_whoever_writes_a_field_drops_dead_leases(schemas):
    h, other = random_chain(2)
    dead = FakeWorker(schemas, "dead").up([h, other])
    b = FakeWorker(schemas, "b").up()
    schemas.client.delete(schemas.base + "w:dead")
    b.publish(stored=[h])
    assert schemas.client.hget(schemas.base + "own:" + h[:4], h[4:20]) == b.lease
    b.publish(evicted=[other])
    assert schemas.claims(dead.lease) == set()


def test_heartbeats_sweep_dead_claims_and_stale_members(schemas):
    chain = random_chain(300)
    FakeWorker(schemas, "dead").up(chain)
    b = FakeWorker(schemas, "b").up(chain[:7])
    schemas.client.delete(schemas.base + "w:dead")
    for _ in range(65536 // 64 + 1):
        assert b.beat() == ["ok"]
    assert schemas.claims("1") == set()
    assert schemas.claims(b.lease) == {h[:20] for h in chain[:7]}
    assert schemas.client.zrange(schemas.base + "load", 0, -1) == [b.lease]
    assert schemas.client.hkeys(schemas.base + "leases") == [b.lease]


def test_registration_refuses_what_counts_blocks_otherwise(schemas):
    FakeWorker(schemas, "a").up()
    b = FakeWorker(schemas, "b")
    assert b.register(block=16) == ["mismatch", "block size is 16 here and 32 at the live workers"]
    assert b.register(fingerprint="0" * 32)[0] == "mismatch"
    assert b.register(schema="9")[0] == "mismatch"
    assert schemas.call("forget", "a") == 1
    assert b.register(block=16)[0] == "ok", "with the last live worker, meta ended"


def test_when_memory_is_full_workers_still_live_and_evict(schemas):
    chain = random_chain(6)
    a = FakeWorker(schemas, "a").up(chain)
    late = FakeWorker(schemas, "late")
    try:
        schemas.client.config_set("maxmemory", "1")
        assert a.beat() == ["ok"]
        with pytest.raises(Exception, match="OOM|maxmemory"):
            a.publish(stored=random_chain(1))
        a.seq -= 1
        assert a.publish(evicted=chain[4:]) == ["ok"]
        assert late.register()[0] == "ok" and late.publish(live=True) == ["ok"]
    finally:
        schemas.client.config_set("maxmemory", "0")
    assert schemas.claims(a.lease) == {h[:20] for h in chain[:4]}


def test_forget_ends_every_lease_of_a_worker(schemas):
    chain = random_chain(3)
    a = FakeWorker(schemas, "a").up(chain)
    b = FakeWorker(schemas, "b").up()
    assert schemas.call("forget", "a", "not its nonce") == 0
    assert schemas.call("forget", "a") == 1
    assert [row[0] for row in schemas.route(chain)[1:]] == ["b"]
    assert a.beat()[0] == "resync"
    assert schemas.call("forget", "b", b.nonce) == 1
    assert schemas.client.exists(schemas.base + "meta") == 0


def test_holds_lists_exactly_the_claims_in_bounded_chunks(schemas):
    chain = random_chain(5000)
    a = FakeWorker(schemas, "a").up(chain[:3000])
    for key in ("w:a", "meta"):
        schemas.client.persist(schemas.base + key)  # nobody beats here
    FakeWorker(schemas, "b").up(chain[2000:])
    found, counted, cursor, calls = [], 0, "0", 0
    while cursor != "end":
        chunk = schemas.call("holds", "a", cursor)
        counted += int(schemas.call("holds", "a", cursor, "count")[1])
        cursor, calls = chunk[0], calls + 1
        found += chunk[1:]
        assert len(chunk) < 2300
    assert sorted(found) == sorted(h[:20] for h in chain[:3000]) and counted == 3000
    assert 16 <= calls <= 40
    assert schemas.call("holds", "nobody", 0) == ["not live"]
    assert a.lease == "1"


# ---- what others wrote under our names -----------------------------------------------------------------------------------
def test_foreign_values_harm_nobody_else(schemas):
    """A lease without a worker, a worker's key of another type, a bucket of another type, a meta without its mean."""
    chain = random_chain(4)
    a = FakeWorker(schemas, "a").up(chain)
    client, base = schemas.client, schemas.base
    for lease, name in (("77", ""), ("78", " x"), ("x", "nobody"), ("79", "text n")):
        client.hset(base + "leases", lease, name)
    client.set(base + "w:text", "text")
    client.zadd(base + "load", {"79": 0, "zzz": 0, "": 0})
    client.hdel(base + "meta", "mean_prompt")
    assert schemas.route(chain)[1][:4] == ["a", "127.0.0.1:9000", a.lease, "4"]
    assert [w[0] for w in schemas.call("workers")] == ["a"]
    bucket = base + "own:" + chain[1][:4]
    client.delete(bucket)
    client.set(bucket, "text")
    assert schemas.route(chain)[1][0] == "a"
    for _ in range(30):  # samples of leases and load among them
        assert a.beat() == ["ok"]
    assert a.publish(evicted=chain[1:2]) == ["ok"]
    assert a.publish(stored=chain[1:2]) == ["ok"]
    assert client.hget(bucket, chain[1][4:20]) == a.lease
    assert schemas.call("forget", "nobody") in (0, 1)
    assert schemas.call("owners", chain[0]) == [f"a 127.0.0.1:9000 {a.lease}"]


def test_the_sweep_goes_on_past_a_bucket_of_another_type(schemas):
    a = FakeWorker(schemas, "a").up()
    schemas.client.hset(schemas.base + "meta", "sweep", 16)
    schemas.client.set(schemas.base + "own:0011", "text")
    assert a.beat() == ["ok"]
    assert int(schemas.client.hget(schemas.base + "meta", "sweep")) == 16 + 64
    assert schemas.client.exists(schemas.base + "own:0011") == 0


def test_models_and_prefixes_are_apart(redis):
    client = redis.client()
    client.flushall()
    one, two = Schemas(client, "m1"), Schemas(client, "m1", prefix="other:")
    chain = random_chain(3)
    FakeWorker(one, "a").up(chain)
    assert two.route(chain) == ["none"]
    FakeWorker(two, "b").up(chain)
    assert one.route(chain)[1][0] == "a" and two.route(chain)[1][0] == "b"
    assert all(key.startswith(("kvgate:{m1}:", "other:{m1}:")) for key in client.keys())


@pytest.mark.parametrize("hash", ["", "abc", "0" * 19, "x" * 32, "0123456789abcdef 123456789abcdef"])
def test_owners_says_what_is_no_hash(schemas, hash):
    with pytest.raises(redis_library.ResponseError, match="is no block hash"):
        schemas.call("owners", hash)


def test_the_stream_for_observers_is_written_while_it_exists(schemas):
    key = schemas.base + "events"
    chain = random_chain(5)
    worker = FakeWorker(schemas, "a").up(chain)
    schemas.route(chain)
    assert not schemas.client.exists(key)
    schemas.client.xgroup_create(key, "watch", "$", mkstream=True)
    schemas.route(chain, explain="explain")
    schemas.route(chain, explain="observe")
    assert schemas.client.xlen(key) == 0
    schemas.route(chain, 170)
    assert worker.publish(stored=random_chain(3), evicted=chain[4:]) == ["ok"]
    (_, route), (_, publish) = schemas.client.xrange(key)
    assert route.items() >= {"event": "route", "worker": "a", "reason": "prefix", "prompt_tokens": "170", "hit_blocks": "5"}.items()
    assert publish == {"event": "publish", "worker": "a", "stored": "3", "evicted": "1"}
    for _ in range(1500):
        schemas.route(chain)
    assert 1000 <= schemas.client.xlen(key) <= 1200
    schemas.client.delete(key)
    schemas.client.set(key, "somebody else's")
    assert schemas.route(chain)[0] == "ok" and worker.publish(stored=random_chain(1)) == ["ok"]
