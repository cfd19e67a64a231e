"""The publisher against a real Redis that is flushed, restarted, stalled, full, read-only or gone: at quiet, the claims in Redis
are exactly the blocks that the worker holds, and no claim of a dead worker counts."""
import os
import random
import select
import signal
import subprocess
import time

import pytest

from conftest import BUILD
from schemas import BLOCK, FakeWorker, Schemas, random_chain
from stack import Redis, wait_until

ACL = "~kvgate:* +@connection +info +evalsha +eval +@hash +@sortedset +@string +@keyspace +time".split()  # as the README says
DRIVER = os.path.join(BUILD, "tests/tools/publish_driver")


class Driver:
    """tests/tools/publish_driver.c as a child process."""

    def __init__(self, url, worker="w1", model="m", addr="127.0.0.1:9000", block=BLOCK, queue=0, stall_ms=0, log=None):
        self.worker = worker
        self.log = open(log, "wb") if log else subprocess.DEVNULL
        self.log_path = log
        self.process = subprocess.Popen([DRIVER, url, model, worker, addr, str(block), str(queue), str(stall_ms)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=self.log, text=True, bufsize=1)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()
        if self.log_path:
            self.log.close()

    def tell(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], 20)
        assert ready, f"{command}: no answer; the engine thread is blocked"
        return self.process.stdout.readline().strip()

    def held(self):
        return set(self.tell("held").split())

    def stats(self):
        return {k: int(v) for k, v in (item.split("=") for item in self.tell("stats").split())}

    def lines(self):
        with open(self.log_path, encoding="utf-8") as f:
            return [line.rstrip("\n").split(" ", 1)[1] for line in f]

    def kill9(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)


@pytest.fixture
def redis():
    with Redis("--enable-debug-command", "local") as server:
        yield server


@pytest.fixture
def schemas(redis):
    return Schemas(redis.client())


def live_claims(schemas, worker):
    """What the worker's live lease claims, by the script that operators use; None while it is not live."""
    found, cursor = set(), "0"
    while cursor != "end":
        chunk = schemas.call("holds", worker, cursor)
        if chunk == ["not live"]:
            return None
        cursor = chunk[0]
        found |= set(chunk[1:])
    return found


def wait_equal(schemas, driver, timeout=15.0):
    held = driver.held()
    wait_until(lambda: live_claims(schemas, driver.worker) == held, timeout, "claims equal to the blocks held", interval=0.05)
    return held


def test_claims_follow_stores_and_evictions(redis, schemas):
    with Driver(redis.url) as driver:
        assert driver.tell("store 1000") == "1000"
        wait_equal(schemas, driver)
        driver.tell("evict 300")
        driver.tell("churn 3000 1")
        wait_equal(schemas, driver)
        stats = driver.stats()
        assert stats["registered"] and stats["connected"] and stats["lease"] == 1 and stats["resyncs"] == 0 and stats["dropped"] == 0
        assert redis.cli("CLIENT", "LIST").count("name=kvgate-worker:w1") == 1
        assert schemas.claims(1) == driver.held()


def test_load_travels_with_the_heartbeat_and_draining_at_once(redis, schemas):
    with Driver(redis.url) as driver:
        driver.tell("store 40")
        driver.tell("load 12345")
        wait_until(lambda: schemas.client.hget(schemas.base + "w:w1", "backlog") == "12345", what="backlog")
        assert schemas.client.zscore(schemas.base + "load", 1) == 12345
        worker = schemas.client.hgetall(schemas.base + "w:w1")
        assert (worker["addr"], worker["state"], worker["blocks_total"], worker["version"]) == ("127.0.0.1:9000", "ready", "1000", "0.1.0")
        before = int(worker["beat"])
        driver.tell("drain")
        wait_until(lambda: schemas.client.hget(schemas.base + "w:w1", "state") == "draining", what="draining")
        assert int(schemas.client.hget(schemas.base + "w:w1", "beat")) >= before
        assert schemas.client.zcard(schemas.base + "load") == 0


def test_leaving_ends_the_lease_at_once(redis, schemas):
    with Driver(redis.url) as driver:
        driver.tell("store 10")
        wait_equal(schemas, driver)
        assert driver.tell("leave") == "ok"
        assert not schemas.client.exists(schemas.base + "w:w1", schemas.base + "load", schemas.base + "leases", schemas.base + "meta")


def test_a_killed_worker_loses_every_claim_and_its_successor_starts_empty(redis, schemas):
    with Driver(redis.url) as first:
        first.tell("store 500")
        wait_equal(schemas, first)
        first.kill9()
    with Driver(redis.url) as second:
        wait_until(lambda: live_claims(schemas, "w1") == set(), what="the successor's empty lease")
        assert second.stats()["lease"] == 2
        second.tell("store 5")
        wait_equal(schemas, second)


def test_a_killed_worker_alone_is_gone_when_its_ttl_ends(redis, schemas):
    with Driver(redis.url) as driver:
        driver.tell("store 5")
        wait_equal(schemas, driver)
        driver.kill9()
        wait_until(lambda: schemas.call("workers") == [] and live_claims(schemas, "w1") is None, 8, "expiry")


def test_of_two_processes_under_one_id_the_second_wins(redis, schemas):
    with Driver(redis.url) as first:
        first.tell("store 20")
        wait_equal(schemas, first)
        with Driver(redis.url) as second:
            second.tell("store 3")
            assert first.process.wait(10) == 3, "the first one's superseded callback ran"
            wait_equal(schemas, second)
            assert second.stats()["resyncs"] == 0 and second.process.poll() is None


def test_after_flushall_the_index_fills_again(redis, schemas):
    with Driver(redis.url) as driver:
        driver.tell("store 700")
        wait_equal(schemas, driver)
        schemas.client.flushall()
        driver.tell("store 3")
        held = wait_equal(schemas, driver)
        assert len(held) == 703 and driver.stats()["resyncs"] == 1
        assert schemas.claims(driver.stats()["lease"]) == held


def test_after_script_flush_publishing_goes_on(redis, schemas):
    with Driver(redis.url) as driver:
        driver.tell("store 10")
        wait_equal(schemas, driver)
        schemas.client.script_flush()
        driver.tell("store 10")
        wait_equal(schemas, driver)
        assert driver.stats()["resyncs"] == 0 and driver.stats()["errors"] == 0


def test_after_a_restart_of_redis_the_index_fills_again(redis, schemas, tmp_path):
    with Driver(redis.url, log=tmp_path / "log") as driver:
        driver.tell("store 300")
        wait_equal(schemas, driver)
        redis.stop()
        driver.tell("churn 200 5")
        time.sleep(1.5)
        redis.start()
        wait_equal(schemas, driver)
        lines = driver.lines()
        refused = [line for line in lines if "refused" in line]
        assert len(refused) <= 1, "a state is logged once, not at each retry"
        assert [line for line in lines if "connected again after" in line]


def test_a_worker_started_before_redis_joins_when_it_comes(redis, schemas):
    redis.stop()
    with Driver(redis.url, queue=64) as driver:
        driver.tell("store 200")
        assert driver.stats()["dropped"] > 0
        redis.start()
        wait_equal(schemas, driver)


def test_killed_connections_lose_nothing(redis, schemas):
    with Driver(redis.url) as driver:
        driver.tell("store 2000")
        for i in range(8):
            redis.cli("CLIENT", "KILL", "TYPE", "normal")
            driver.tell(f"churn 2000 {i}")
            time.sleep(0.1)
        wait_equal(schemas, driver)
        assert driver.stats()["resyncs"] == 0, "the batch in flight is sent again under its number"


def test_a_sequence_gap_is_healed_by_a_snapshot(redis, schemas):
    with Driver(redis.url) as driver:
        driver.tell("store 100")
        wait_equal(schemas, driver)
        schemas.client.hincrby(schemas.base + "w:w1", "seq", -1)
        driver.tell("store 1")
        wait_until(lambda: driver.stats()["lease"] == 2, what="a new lease")
        wait_equal(schemas, driver)


def test_an_overflowing_queue_is_healed_by_a_snapshot(redis, schemas):
    with Driver(redis.url, queue=128) as driver:
        driver.tell("store 10")
        wait_equal(schemas, driver)
        driver.tell("store 5000")
        driver.tell("churn 2000 3")
        wait_equal(schemas, driver)
        stats = driver.stats()
        assert stats["dropped"] > 0 and stats["resyncs"] >= 1


def test_a_lost_worker_key_or_lease_is_healed(redis, schemas):
    with Driver(redis.url) as driver:
        driver.tell("store 50")
        for key in ("w:w1", "leases", "meta"):
            wait_equal(schemas, driver)
            lease = driver.stats()["lease"]
            schemas.client.delete(schemas.base + key)
            wait_until(lambda: driver.stats()["lease"] > lease, what=f"a new lease after {key} went")
        wait_equal(schemas, driver)


def test_a_mismatch_serves_loudly_without_publishing_and_joins_later(redis, schemas, tmp_path):
    other = FakeWorker(schemas, "other")
    other.register(block=16)
    other.publish(live=True)
    with Driver(redis.url, log=tmp_path / "log") as driver:
        driver.tell("store 5")
        for _ in range(3):
            assert other.beat() == ["ok"]
            time.sleep(0.4)
        assert driver.stats()["mismatch"] == 1 and driver.stats()["registered"] == 0
        loud = [line for line in driver.lines() if "MISMATCH" in line]
        assert len(loud) == 1 and "block size is 32 here and 16 at the live workers" in loud[0]
        schemas.call("forget", "other")
        wait_equal(schemas, driver)
        assert driver.stats()["mismatch"] == 0


def test_heartbeats_stop_when_no_step_ends(redis, schemas, tmp_path):
    with Driver(redis.url, stall_ms=600, log=tmp_path / "log") as driver:
        driver.tell("store 5")
        wait_equal(schemas, driver)
        driver.tell("report off")
        wait_until(lambda: schemas.call("workers") == [], 25, "the lease's end")
        assert [line for line in driver.lines() if "no step ended for 0.6 s" in line]
        driver.tell("report on")
        wait_equal(schemas, driver)


def test_a_read_only_replica_publishes_after_its_promotion(redis, schemas, tmp_path):
    with Driver(redis.url, log=tmp_path / "log") as driver:
        driver.tell("store 50")
        wait_equal(schemas, driver)
        schemas.client.execute_command("REPLICAOF", "127.0.0.1", "1")
        driver.tell("churn 300 2")
        wait_until(lambda: any("READONLY" in line for line in driver.lines()), what="a line about READONLY")
        schemas.client.execute_command("REPLICAOF", "NO", "ONE")
        wait_equal(schemas, driver)


def test_out_of_memory_evictions_go_through_and_stores_come_back(redis, schemas):
    with Driver(redis.url) as driver:
        driver.tell("store 500")
        before = wait_equal(schemas, driver)
        schemas.client.config_set("maxmemory", "1")
        driver.tell("evict 100")
        driver.tell("store 40")
        driver.tell("evict 240")
        held = driver.held()
        wait_until(lambda: live_claims(schemas, "w1") == before & held, what="claims without what was evicted")
        schemas.client.config_set("maxmemory", "0")

        def caught_up():
            driver.tell("store 1")
            return live_claims(schemas, "w1") is not None and driver.stats()["resyncs"] == 1
        wait_until(caught_up, 25, "the resync", interval=0.2)
        wait_equal(schemas, driver)


@pytest.mark.parametrize("stall", [("CLIENT", "PAUSE", "1500", "ALL"), ("DEBUG", "SLEEP", "4")], ids=["1.5s", "4s"])
def test_a_stalled_redis_never_blocks_the_engine_thread(redis, schemas, stall):
    with Driver(redis.url) as driver:
        driver.tell("store 300")
        wait_equal(schemas, driver)
        stalled = subprocess.Popen(["redis-cli", "-p", str(redis.port), *stall], stdout=subprocess.DEVNULL)
        time.sleep(0.2)
        for i in range(10):
            driver.tell(f"churn 500 {i}")
        assert stall[0] != "DEBUG" or stalled.poll() is None, "the engine thread went on while Redis slept"
        stalled.wait(20)
        wait_equal(schemas, driver)


def test_a_wrong_url_or_name_is_refused_at_open(redis):
    for url, worker, why in (("http://x", "w", "expected redis://"), ("redis://h:99999", "w", "port"), (redis.url, "a b", "worker id")):
        done = subprocess.run([DRIVER, url, "m", worker], capture_output=True, text=True, timeout=20)
        assert done.returncode == 1 and why in done.stderr


def test_password_user_db_and_unix_socket(tmp_path):
    path = str(tmp_path / "redis.sock")
    with Redis("--unixsocket", path, "--requirepass", "s3:cr@t", "--user", "u1", "on", ">pw%20", *ACL) as server:
        import redis as client
        for url, db in ((f"redis://:s3%3Acr%40t@127.0.0.1:{server.port}/2", 2), (f"redis://u1:pw%2520@127.0.0.1:{server.port}/3", 3)):
            with Driver(url) as driver:
                schemas = Schemas(client.Redis(port=server.port, password="s3:cr@t", db=db, decode_responses=True))
                driver.tell("store 5")
                wait_equal(schemas, driver)
                driver.tell("leave")
        with Driver(f"redis://:wrong@127.0.0.1:{server.port}", log=tmp_path / "log") as driver:
            wait_until(lambda: driver.stats()["errors"] >= 2, what="two refused tries")
            assert sum("WRONGPASS" in line for line in driver.lines()) == 1
    with Redis("--unixsocket", path) as server:
        with Driver(f"unix:{path}?db=4") as driver:
            driver.tell("store 5")
            wait_equal(Schemas(client.Redis(port=server.port, db=4, decode_responses=True)), driver)


def test_an_eviction_policy_is_warned_about(tmp_path):
    with Redis("--maxmemory-policy", "allkeys-lru") as server, Driver(server.url, log=tmp_path / "log") as driver:
        wait_until(lambda: driver.stats()["registered"], what="registration")
        assert [line for line in driver.lines() if "maxmemory-policy is allkeys-lru" in line]


def test_three_workers_route_by_what_they_hold(redis, schemas):
    """Warm one, kill it: the next answer names another; restart it empty: it is not chosen for what it lost."""
    with Driver(redis.url, "w1", addr="127.0.0.1:1") as w1, Driver(redis.url, "w2", addr="127.0.0.1:2") as w2:
        w1.tell("store 200")
        wait_equal(schemas, w1)
        wait_equal(schemas, w2)
        tails = random_chain(1)
        chain = [h + "0" * 12 for h in w1.tell("held").split()] + tails
        assert schemas.route(chain)[1][:4] == ["w1", "127.0.0.1:1", schemas.client.hget(schemas.base + "w:w1", "lease"), "200"]
        w1.kill9()
        with Driver(redis.url, "w1", addr="127.0.0.1:1") as again:
            wait_until(lambda: live_claims(schemas, "w1") == set(), what="restart")
            assert [row[3] for row in schemas.route(chain)[1:]] == ["0", "0"]
            again.tell("store 1")
            wait_equal(schemas, again)


def disturb(rng, redis, schemas):
    """One of the things that happen to a Redis."""
    key = schemas.base + rng.choice(["w:w1", "w:w2", "leases", "load", "meta"])
    what = rng.choice(["kill", "kill", "delete", "flush", "scripts", "gap", "pause", "full", "replica", "restart"])
    client = schemas.client
    if what == "kill":
        redis.cli("CLIENT", "KILL", "TYPE", "normal")
    elif what == "delete":
        client.delete(key)
    elif what == "flush":
        client.flushall()
    elif what == "scripts":
        client.script_flush()
    elif what == "gap" and client.exists(schemas.base + "w:w1"):
        client.hincrby(schemas.base + "w:w1", "seq", rng.choice([-2, -1]))
    elif what == "pause":
        redis.cli("CLIENT", "PAUSE", rng.choice([300, 1500]), "ALL")
    elif what == "full":
        client.config_set("maxmemory", "1")
        time.sleep(0.5)
        client.config_set("maxmemory", "0")
    elif what == "replica":
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        time.sleep(0.5)
        client.execute_command("REPLICAOF", "NO", "ONE")
    elif what == "restart":
        redis.stop()
        time.sleep(rng.choice([0, 0.5]))
        redis.start()


def survives(redis, schemas, seed, rounds):
    """Two workers with common blocks, random trouble, then quiet: the claims are the blocks held, and no others."""
    rng = random.Random(seed)
    with Driver(redis.url, "w1", queue=2048) as w1, Driver(redis.url, "w2", queue=2048) as w2:
        for driver in (w1, w2):
            driver.tell(f"seed {seed}")
            driver.tell("store 300")
        for _ in range(rounds):
            for driver in (w1, w2):
                driver.tell(f"churn {rng.choice([10, 300, 3000])} {rng.getrandbits(32)}")
            disturb(rng, redis, schemas)
            time.sleep(rng.choice([0, 0.05, 0.3]))
        # Whatever was left out while Redis was full comes back with the next stored blocks.
        def quiet():
            for driver in (w1, w2):
                driver.tell("store 1")
            time.sleep(0.2)
            return all(live_claims(schemas, driver.worker) == driver.held() for driver in (w1, w2))
        wait_until(quiet, 40, f"claims equal to the blocks held (seed {seed})", interval=0.3)
        wait_equal(schemas, w1)
        wait_equal(schemas, w2)


def test_random_trouble(redis, schemas):
    survives(redis, schemas, seed=1, rounds=12)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 22))
def test_much_random_trouble(redis, schemas, seed):
    survives(redis, schemas, seed, rounds=25)
