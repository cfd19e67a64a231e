"""conf/stack.sh, as `make run` and `make stop` call it: on other ports and in its own folder."""
import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest

from conftest import BUILD, ROOT
from stack import free_port, wait_until


class Demo:
    def __init__(self, folder):
        self.run = folder
        self.port, self.redis_port = free_port(), free_port()
        self.worker_port = free_port()
        self.env = {**os.environ, "RUN": str(folder), "PORT": str(self.port), "REDIS_PORT": str(self.redis_port),
                    "WORKER_PORT": str(self.worker_port), "B": os.path.relpath(BUILD, ROOT)}

    def stack(self, command, **more):
        return subprocess.run([os.path.join(ROOT, "conf/stack.sh"), command], env={**self.env, **more}, capture_output=True, text=True,
                              timeout=180)

    def pids(self):
        return {name[:-5]: int(open(os.path.join(self.run, name), encoding="utf-8").read().split()[0])
                for name in os.listdir(self.run) if name.endswith(".proc")}


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    demo = Demo(tmp_path_factory.mktemp("run"))
    started = demo.stack("start")
    assert started.returncode == 0, started.stdout + started.stderr
    demo.printed = started.stdout
    yield demo
    demo.stack("stop")


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def shell(line):
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_printed_commands_work(demo):
    lines = [line for line in demo.printed.splitlines() if line.startswith(("curl", "redis-cli"))]
    streamed, first, second, workers, owners, status = (shell(line) for line in lines)
    assert streamed.startswith("data: ") and streamed.rstrip().endswith("data: [DONE]")
    owner = re.search(r"^X-Kvgate-Worker: (\w+)", first, re.M | re.I).group(1)
    assert re.search(rf"^X-Kvgate-Worker: {owner}\b", second, re.M | re.I)
    hit = int(re.search(r"^X-Kvgate-Hit-Tokens: (\d+)", second, re.M | re.I).group(1))
    assert hit >= 1024 and int(re.search(r'"cached_tokens": ?(\d+)', second).group(1)) == hit
    assert "w1" in workers and "w2" in workers and owners.startswith(owner + " 127.0.0.1:")
    assert {w["id"] for w in json.loads(status)["models"][0]["workers"]} == {"w1", "w2"} and json.loads(status)["models"][0]["requests"] == 3


def test_start_again_starts_nothing(demo):
    before = demo.pids()
    again = demo.stack("start")
    assert again.returncode == 0 and "already running" in again.stdout and demo.pids() == before


def test_other_ports_than_those_of_what_runs_are_refused(demo):
    before = demo.pids()
    refused = demo.stack("start", REDIS_PORT=str(free_port()))
    assert refused.returncode == 1 and f"REDIS_PORT={demo.redis_port} " in refused.stdout and "make stop" in refused.stdout
    assert demo.pids() == before and demo.stack("start").returncode == 0


def test_a_taken_port_is_named_and_nothing_is_started(demo, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused = demo.stack("start", RUN=str(tmp_path), PORT=str(port), REDIS_PORT=str(free_port()), WORKER_PORT=str(free_port()))
    assert refused.returncode == 1 and f"port {port}" in refused.stdout and "python" in refused.stdout
    assert not list(tmp_path.glob("*.proc"))


def test_a_part_that_died_is_started_again_and_the_others_stay(demo):
    before = demo.pids()
    os.kill(before["w2"], signal.SIGKILL)
    wait_until(lambda: not alive(before["w2"]), what="w2 gone")
    assert demo.stack("status").returncode == 1
    assert demo.stack("start").returncode == 0
    after = demo.pids()
    assert after["w2"] != before["w2"] and {k: v for k, v in after.items() if k != "w2"} == {k: v for k, v in before.items() if k != "w2"}


def test_stop_ends_all_it_started_and_nothing_else(demo, tmp_path):
    pids = demo.pids()
    assert set(pids) == {"redis", "w1", "w2", "nginx"}
    with subprocess.Popen(["sleep", "60"]) as innocent:
        # A pid file whose process has ended and whose number another process has now.
        with open(os.path.join(demo.run, "w2.proc"), "r+", encoding="utf-8") as f:
            kept = f.read()
            f.seek(0)
            f.truncate()
            f.write(f"{innocent.pid} 1\n")
        assert demo.stack("stop").returncode == 0
        assert innocent.poll() is None and alive(pids["w2"])
        assert not any(alive(pid) for name, pid in pids.items() if name != "w2")
        with open(os.path.join(demo.run, "w2.proc"), "w", encoding="utf-8") as f:
            f.write(kept)
        assert demo.stack("stop").returncode == 0 and not alive(pids["w2"])
        innocent.kill()
    assert demo.pids() == {} and demo.stack("status").returncode == 1


def test_a_test_that_fails_leaves_no_server():
    failing = "import sys; sys.path[:0] = sys.argv[1:]; from stack import Redis; print(Redis().start().pid, flush=True); raise SystemExit(7)"
    done = subprocess.run([sys.executable, "-c", failing, os.path.join(ROOT, "tests"), os.path.join(ROOT, "tests/tools")],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 7, done.stderr
    assert not alive(int(done.stdout))


def test_a_killed_test_run_leaves_no_server():
    killed = ("import sys; sys.path[:0] = sys.argv[1:]; from stack import Redis; from gateway import Gateway; redis = Redis().start(); "
              "gateway = Gateway(redis).start(); print(redis.pid, gateway.pid, *gateway.children(), flush=True); sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", killed, os.path.join(ROOT, "tests"), os.path.join(ROOT, "tests/tools")],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        pids = [int(pid) for pid in run.stdout.readline().split()]
        assert len(pids) >= 3 and all(alive(pid) for pid in pids)
        run.kill()
    wait_until(lambda: not any(alive(pid) for pid in pids), what="its servers gone")
