"""nginx with the module, running the shipped conf/nginx.conf with other ports and paths.

    with Redis() as redis, Gateway(redis) as gateway:
        requests.post(gateway.url + "/v1/chat/completions", json=body)

Leaving the block fails on any alert, emerg or crit in the error log.
"""
import os
import re
import shutil
import signal
import socket
import subprocess
import urllib.request

from conftest import BUILD, ROOT
from stack import SMOLLM2, Process, Redis, free_port, wait_until

NGINX = shutil.which("nginx") or "/usr/sbin/nginx"
PRELOAD = os.environ.get("NGINX_PRELOAD")  # of a module that was built with a sanitizer: its libraries
ROUTED = ("prefix", "load", "tie")  # reasons of a request that Redis chose the worker for
WORDS = "hello world, " * 40  # some whole blocks, so that its worker is not drawn by lot


class Gateway(Process):
    """servers: addresses for the upstream's server lines. location, server, http, upstream, main: configuration added to the
    shipped one at that level. edits: (regex, replacement) pairs applied to the text, each of which must match. redis_timeout is longer
    than the shipped one: on a machine that does something else beside, an answer of Redis shall not be too late by chance."""

    name = "nginx"

    def __init__(self, redis=None, servers=(), model=SMOLLM2, served="smollm2", main="", http="", upstream="", server="", location="",
                 edits=(), redis_url=None, log_level="notice", redis_timeout="1s"):
        super().__init__()
        os.chmod(self.dir, 0o755)
        self.port = free_port()
        self.redis_url = redis_url or (redis.url if redis else "redis://127.0.0.1:1")
        self.conf = os.path.join(self.dir, "nginx.conf")
        self.body_dir = os.path.join(self.dir, "body")
        self.servers = servers
        self.added = {"main": main, "http": http, "upstream": upstream, "server": server, "location": location}
        self.edits, self.redis_timeout = edits, redis_timeout
        self.model, self.served, self.log_level = model, served, log_level
        self.expected = []
        self.write()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def render(self):
        with open(os.path.join(ROOT, "conf", "nginx.conf"), encoding="utf-8") as file:
            text = file.read()
        lines = "".join(f"        server {address} max_fails=0;\n" for address in self.servers) or "        server 127.0.0.1:1 max_fails=0;\n"
        replaced = [(r"(?m)^load_module .*$", f"load_module {BUILD}/ngx_http_kvgate_module.so;\n{self.added['main']}"),
                    (r"error_log stderr notice;", f"error_log stderr {self.log_level};"),
                    (r"listen 8080 reuseport;", f"listen 127.0.0.1:{self.port} reuseport;\n{self.added['server']}"),
                    (r"kvgate_model smollm2 \S+", f"kvgate_model {self.served} {self.model}"),
                    (r"client_body_temp_path \S+;", f"client_body_temp_path {self.body_dir};\n{self.added['http']}"),
                    (r"redis://127\.0\.0\.1:6380", self.redis_url),
                    (r"kvgate_redis_timeout 100ms;", f"kvgate_redis_timeout {self.redis_timeout};"),
                    (r"(?m)(^ *server 127\.0\.0\.1:\d+ max_fails=0;\n)+", lines),
                    (r"kvgate_balance;", f"kvgate_balance;\n{self.added['upstream']}"),
                    (r"kvgate on;", f"kvgate on;\n{self.added['location']}")]
        for pattern, new in replaced + list(self.edits):
            text, n = re.subn(pattern, lambda _: new, text, count=1)
            assert n == 1, f"conf/nginx.conf has no {pattern!r}"
        return text

    def write(self):
        with open(self.conf, "w", encoding="utf-8") as file:
            file.write(self.render())

    def command(self):
        preload = ["env", f"LD_PRELOAD={PRELOAD}", "ASAN_OPTIONS=detect_leaks=0", "UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1"] if PRELOAD else []
        return preload + [NGINX, "-p", self.dir, "-c", self.conf, "-e", "stderr", "-g", "daemon off;"]

    def test(self):
        """nginx -t: (exit status, what it printed)."""
        done = subprocess.run(self.command()[:-2] + ["-t"], capture_output=True, text=True, timeout=60, cwd=ROOT)
        return done.returncode, done.stderr

    def answers(self):
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as s:
                s.sendall(b"GET / HTTP/1.0\r\n\r\n")
                return s.recv(16).startswith(b"HTTP/")
        except OSError:
            return False

    def status(self):
        """The kvgate_status page."""
        import json
        with urllib.request.urlopen(self.url + "/kvgate", timeout=120) as reply:
            return json.load(reply)

    def workers(self):
        """Ids of the workers that the gateway has seen in Redis."""
        return sorted(w["id"] for m in self.status()["models"] for w in m["workers"])

    def children(self):
        """Pids of nginx's worker processes."""
        done = subprocess.run(["ps", "-o", "pid=", "--ppid", str(self.pid)], capture_output=True, text=True)
        return [int(p) for p in done.stdout.split()]

    def reload(self):
        self.terminate(signal.SIGHUP)

    def access_log(self):
        with open(os.path.join(self.dir, "access.log"), encoding="utf-8") as file:
            return file.read()

    def faults(self):
        """Lines of the error log that no nginx should ever write."""
        return [line for line in self.log().splitlines()
                if re.search(r"\[(alert|emerg|crit)\]|Sanitizer|runtime error:|signal 1?\d\b.*exited|worker process \d+ exited on signal", line)
                and not any(re.search(e, line) for e in self.expected)]

    def stop(self, timeout=20.0):
        """A graceful quit; by force where it takes longer."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                super().stop()
                raise AssertionError(f"nginx did not quit within {timeout} s")

    def close(self):
        try:
            self.stop()
            assert not self.faults(), "\n".join(self.faults())
        finally:
            super().close()


class Fleet:
    """A Redis, a gateway and fake workers w1, w2, … that are live in it. Leaving it fails on faults in nginx's log.

        with Fleet(2) as fleet:
            fleet.post(text="hello")
    """

    def __init__(self, n=2, redis_args=(), beat=0.5, register=True, **gateway):
        from fake_worker import FakeWorker
        self.redis = Redis(*redis_args)
        self.workers = [FakeWorker(f"w{i + 1}") for i in range(n)]
        self.options, self.beat, self.register = gateway, beat, register
        self.gateway = None

    def __enter__(self):
        self.redis.start()
        for worker in self.workers:
            worker.start()
        servers = self.options.pop("servers", [w.addr for w in self.workers])
        added = "add_header X-Kvgate-Chain $kvgate_chain always;\n" + self.options.pop("server", "")
        self.gateway = Gateway(self.redis, servers=servers, server=added, **self.options).start()
        if self.register:
            for worker in self.workers:
                worker.register(self.redis, self.fingerprint, interval=self.beat)
            self.wait_seen()
        return self

    def __exit__(self, kind, *_):
        try:
            if self.gateway:
                self.gateway.close()
        finally:
            for worker in self.workers:
                worker.close()
            self.redis.close()

    @property
    def fingerprint(self):
        return self.gateway.status()["models"][0]["fingerprint"]

    @property
    def url(self):
        return self.gateway.url

    def wait_seen(self, names=None, timeout=10):
        names = [w.name for w in self.workers] if names is None else names
        wait_until(lambda: self.gateway.workers() == sorted(names), timeout, f"workers {names} seen by the gateway")

    def settle(self):
        """As if time had passed: nothing is on its way to a worker, and no block is reserved."""
        client = self.redis.client()
        for worker in self.workers:
            client.delete("kvgate:{smollm2}:flight:" + worker.name)
        for key in client.keys("kvgate:{smollm2}:pred:*"):
            client.delete(key)
        for lease in client.zrange("kvgate:{smollm2}:load", 0, -1):
            client.zadd("kvgate:{smollm2}:load", {lease: 0}, xx=True)

    def reset(self):
        """What a test starts from: polite workers that have seen nothing."""
        for worker in self.workers:
            worker.mode, worker.delay, worker.idle_timeout = "ok", 0.0, None
            worker.requests.clear()

    def named(self, name):
        return next(w for w in self.workers if w.name == name)

    @property
    def requests(self):
        return [r for w in self.workers for r in w.requests]

    def post(self, text=WORDS, path="/v1/chat/completions", headers=None, **members):
        import requests
        return requests.post(self.url + path, json=chat(text, **members), headers=headers, timeout=120)


def chat(text=WORDS, **members):
    return {"model": "smollm2", "messages": [{"role": "user", "content": text}], **members}


def raw_request(port, data, timeout=120, step=None, pause=0.0):
    """Sends bytes (in pieces of `step`) and returns (status, headers, body) of the one reply, read to its end."""
    import http.client
    import time
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as s:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(data), step or len(data)):
            s.sendall(data[at:at + (step or len(data))])
            if pause:
                time.sleep(pause)
        reply = http.client.HTTPResponse(s, method="POST")
        reply.begin()
        return reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read()
