"""The commands of redis-schemas/README.md, run exactly as they are printed (a redis-cli on PATH adds the test's port)."""
import hashlib
import json
import os
import re
import shutil
import subprocess
import threading

import pytest

from conftest import ROOT
from schemas import FakeWorker, Schemas, random_chain, source
from stack import Redis

README = open(os.path.join(ROOT, "redis-schemas/README.md"), encoding="utf-8").read()
COOKBOOK = README[README.index("## Cookbook"):README.index("## Sizing")]
BLOCKS = re.findall(r"```sh\n(.*?)```", COOKBOOK, re.S)
SETUP = BLOCKS[0]
ran = set()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two live workers of the README's model; w1 holds the README's chain and more, w2 its first block."""
    with Redis() as server:
        bin_dir = tmp_path_factory.mktemp("bin")
        cli = bin_dir / "redis-cli"
        cli.write_text(f'#!/bin/sh\nexec {shutil.which("redis-cli")} -p {server.port} "$@"\n')
        cli.chmod(0o755)
        env = {**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}"}
        schemas = Schemas(server.client(), model="smollm2")
        chain = sh(env, SETUP + 'echo "$CHAIN"').split(",")
        extra = random_chain(3000)
        w1 = FakeWorker(schemas, "w1", backlog=70, addr="127.0.0.1:9001").up(chain + extra)
        w2 = FakeWorker(schemas, "w2", backlog=5, addr="127.0.0.1:9002").up(chain[:1])
        named = server.client()
        named.client_setname("kvgate-worker:w1")
        done = threading.Event()

        def beat():
            while not done.wait(0.5):
                w1.beat()
                w2.beat()
        thread = threading.Thread(target=beat)
        thread.start()
        yield {"env": env, "chain": chain, "extra": extra, "schemas": schemas}
        done.set()
        thread.join()


def sh(env, script):
    ran = subprocess.run(["sh", "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    return ran.stdout


def run(world, containing):
    """Runs the one block that contains this text."""
    found = [block for block in BLOCKS[1:] if containing in block]
    assert len(found) == 1, containing
    ran.add(found[0])
    return sh(world["env"], SETUP + found[0])


def test_who_is_alive(world):
    lines = run(world, "workers.lua").splitlines()
    assert lines[0].split()[:2] == ["worker", "addr"] and len(lines) == 3
    assert lines[1].split()[:3] == ["w1", "127.0.0.1:9001", "1"] and lines[2].split()[:3] == ["w2", "127.0.0.1:9002", "2"]
    assert lines[1].split()[7:9] == ["30", "100"]


def test_who_owns_this_prompt(world):
    assert run(world, "owners.lua") == "w1 127.0.0.1:9001 1\n"
    assert run(world, 'HGET "$M:leases"').split() == ["1", "w1", world["schemas"].client.hget("kvgate:{smollm2}:w:w1", "nonce"), "1"]


def test_why_would_it_go_there(world):
    explained = json.loads(run(world, "explain"))
    by_worker = {c["worker"]: c for c in explained["candidates"]}
    assert by_worker["w1"]["hit_blocks"] == 3 and by_worker["w2"]["hit_blocks"] == 1
    assert explained["blocks"] == 3 and explained["prompt_tokens"] == 96
    assert by_worker["w1"]["cost"] == 8 * 1 + 70 and by_worker["w2"]["cost"] == 8 * 64 + 5


def test_what_does_a_worker_hold(world):
    held = run(world, "printf '%s\\n' \"$@\"").split()
    assert sorted(held) == sorted(h[:20] for h in world["chain"] + world["extra"])
    assert run(world, "count)") == f"{len(held)}\n"


def test_how_full_is_it(world):
    lines = run(world, "blocks_used blocks_total").splitlines()
    assert lines[:2] == ["30", "100"] and "127.0.0.1:9001" in lines


def test_what_is_agreed_on_and_who_is_connected(world):
    out = run(world, "CLIENT LIST")
    assert "block_size\n32\n" in out and "name=kvgate-worker:w1" in out


def test_is_redis_set_up_well(world):
    lines = run(world, "maxmemory-policy").splitlines()
    assert lines[:3] == ["maxmemory-policy", "noeviction", "listpack"] and int(lines[3]) > 0


def test_what_has_a_key_used(world):
    key = "kvgate:limit:{%s}" % hashlib.sha1(b":Bearer sk-1").hexdigest()
    world["schemas"].client.eval(source("limit"), 1, key, 300, 1, 60, 100, 6000, "1000")
    assert run(world, "kvgate:limit").split() == ["at", "1000.000000", "requests", "1", "tokens", "300"]


def test_watch(world):
    assert run(world, "XGROUP").split() == ["OK", "1"]


def test_forget_a_worker(world):
    assert run(world, "forget.lua") == "1\n"
    assert run(world, "owners.lua").strip() == ""


def test_every_block_of_the_cookbook_was_run():
    if len(ran) < 3:
        pytest.skip("needs the other tests of this file")
    assert ran == set(BLOCKS[1:])
