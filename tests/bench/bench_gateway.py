#!/usr/bin/env python3
"""make bench-gateway: what routing adds to plain proxy_pass, to the same fake worker, in one run, alternating.

One nginx with conf/nginx.conf and a location without kvgate beside it; behind both one more nginx that answers every request at
once. Chats of 2,000 tokens behind one system prompt and prompts of 100,000 tokens, warm; the latter once more cold, each with
another beginning; the chats also as a stream of 21 events. Open loop at RATE requests a second (300; long prompts at a thirtieth of it), and chats at saturation with 16
connections. Also how long after a client left its upstream connection is closed, while it waits for a reply or reads a stream. Lengths are about right: words are counted, not tokens. Added latency is the difference of the medians (of the 99th percentiles) of all rounds. Prints a table and writes
build/bench-gateway.json.
"""
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "..", "tools"), os.path.join(HERE, "..")]
from conftest import BUILD  # noqa: E402
from fake_worker import FakeWorker  # noqa: E402
from gateway import NGINX, Gateway, chat  # noqa: E402
from stack import Process, Redis, free_port, wait_until  # noqa: E402
import table  # noqa: E402

WORDS = "river stone lamp garden winter copper signal harbor meadow thunder violet anchor".split()
REPLY = json.dumps({"id": "x", "object": "chat.completion", "created": 1, "model": "smollm2", "choices": [
    {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}})
EVENT = "data: " + json.dumps({"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "smollm2", "choices": [
    {"index": 0, "delta": {"content": "word "}, "finish_reason": None}]}) + "\\n\\n"
STREAM = EVENT * 20 + EVENT.replace("null", '"stop"') + "data: [DONE]\\n\\n"
PLAIN = """
        location /s/ {
            kvgate "on";
            proxy_pass http://workers;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
        }
        location /plain/ {
            proxy_pass http://plain/;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
        }
"""


class InstantWorker(Process):
    """An nginx that answers each request with one fixed reply."""

    name = "instant"

    def __init__(self):
        super().__init__()
        os.chmod(self.dir, 0o755)
        self.port = free_port()
        self.addr = f"127.0.0.1:{self.port}"
        with open(os.path.join(self.dir, "nginx.conf"), "w", encoding="utf-8") as file:
            file.write(f"""worker_processes 1; pid nginx.pid; error_log stderr warn; events {{ worker_connections 2048; }}
http {{ access_log off; client_max_body_size 64m; client_body_temp_path body; proxy_temp_path proxy; keepalive_requests 1000000000;
server {{ listen {self.addr}; location / {{ default_type application/json; return 200 '{REPLY}'; }}
location /s/ {{ default_type text/event-stream; return 200 '{STREAM}'; }} }} }}""")

    def command(self):
        return [NGINX, "-p", self.dir, "-c", os.path.join(self.dir, "nginx.conf"), "-e", "stderr", "-g", "daemon off;"]

    answers = Gateway.answers


class Leaving:
    """A worker that never ends its replies: when() is the moment at which its client's connection was closed."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.addr = "127.0.0.1:%d" % self.listener.getsockname()[1]
        self.asked, self.closed = threading.Event(), threading.Event()
        self.at = None
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            connection, _ = self.listener.accept()
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(65536)
            if b"X-Stream: 1" in head:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {}\n\n")
            self.asked.set()
            while connection.recv(65536):
                pass
            self.at = time.perf_counter()
            connection.close()
            self.closed.set()

    def when(self, gateway, path, stream):
        """Milliseconds from a client's close to the worker's end of file."""
        self.asked.clear()
        self.closed.clear()
        body = json.dumps(chat("hello world " * 200)).encode()
        with socket.create_connection(("127.0.0.1", gateway.port)) as client:
            client.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nX-Stream: %d\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                           % (path.encode(), stream, len(body), body))
            if stream:
                client.recv(4096)
            if not self.asked.wait(10):
                sys.exit("bench-gateway: a request did not reach its worker")
            time.sleep(0.02)
            left = time.perf_counter()
        if not self.closed.wait(10):
            return 10e3
        return 1e3 * (self.at - left)


def leaving(gateway, worker, runs):
    for stream, name in ((1, "in a stream"), (0, "before a reply")):
        times = {path: [worker.when(gateway, path, stream) for _ in range(runs)] for path in ("/plain-leave/chat/completions", "/leave/chat/completions")}
        plain, ours = (max(values) for values in times.values())
        yield {**row(f"client leaves {name}: upstream closed after, longest of {runs}", "ms", ours, plain, 50), "runs": runs}


def text(number, tokens):
    return " ".join(WORDS[(i * (number % 11 + 3) + i // 7 + number) % len(WORDS)] for i in range(tokens))


def load(url, bodies, count, *options):
    done = subprocess.run([os.path.join(BUILD, "tests/tools/load"), "--url", url, "--requests", "-", "--count", str(count), *options],
                          input="\n".join(map(json.dumps, bodies)), capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    if result["failed"]:
        sys.exit(f"bench-gateway: {result['failed']} of {count} requests to {url} failed: {result['errors']}")
    return result


def compare(gateway, bodies, count, options, rounds, path=""):
    """[(plain, kvgate)] of load results, alternating."""
    paths = (f"/plain{path}/v1/chat/completions", f"{path}/v1/chat/completions")
    for path in paths:
        load(gateway.url + path, bodies, len(bodies))
    return [tuple(load(gateway.url + path, bodies, count, *options) for path in paths) for _ in range(rounds)]


def row(name, unit, value, plain, limit, higher=False):
    share = value / limit if higher else limit / value if value > 0 else None
    return {"row": name, "unit": unit, "value": value, "peer": "proxy_pass", "peer_value": plain, "ratio": None, "limit": limit, "share": share,
            "runs": ROUNDS}


def added(name, pairs, limits, of="total"):
    for what, limit in limits.items():
        plain, ours = (1e3 * statistics.median(pair[i][of][what] for pair in pairs) for i in (0, 1))
        yield row(f"{name}: added {what}", "ms", ours - plain, plain, limit)


ROUNDS = int(os.environ.get("ROUNDS") or 3)
RATE = float(os.environ.get("RATE") or 300)
SECONDS = float(os.environ.get("SECONDS_EACH") or 3)
LONG = int(os.environ.get("LONG") or 100_000)


def measure(gateway, leave):
    system = text(1, 1900)
    chats = [{**chat(f"question {i}: " + text(i, 60)), "max_tokens": 1} for i in range(32)]
    for body in chats:
        body["messages"].insert(0, {"role": "system", "content": system})
    count = max(10, int(RATE * SECONDS))
    pairs = compare(gateway, chats, count, ("--rate", str(RATE), "--connections", "256"), ROUNDS)
    yield from added("2,000-token chat, open loop", pairs, {"p50": 0.3, "p99": 1.5})
    pairs = compare(gateway, chats, 10 * count, ("--connections", "16"), ROUNDS)
    plain, ours = (statistics.median(pair[i]["requests_per_second"] for pair in pairs) for i in (0, 1))
    yield row("2,000-token chat, saturation: share of proxy_pass", "share", ours / plain, plain, 0.5, higher=True)
    streams = [{**body, "stream": True} for body in chats]
    pairs = compare(gateway, streams, count, ("--rate", str(RATE), "--connections", "256"), ROUNDS, "/s")
    yield from added("2,000-token chat, streamed: first text", pairs, {"p50": 1, "p99": 1.5}, "ttft")
    warm = [chat(text(3, LONG) + f" {i}") for i in range(4)]
    yield from added(f"{LONG:,} tokens, known prefix", compare(gateway, warm, max(5, count // 30), ("--rate", str(RATE / 30)), ROUNDS), {"p99": 5})
    cold = [[chat(f"{i} {n} " + " ".join(f"{w}{(i * 7 + n + k // 12) % 1000}" for k, w in enumerate(WORDS * (LONG // 60)))) for i in range(5)]
            for n in range(ROUNDS)]
    pairs = [(load(gateway.url + "/plain/v1/chat/completions", bodies, 5), load(gateway.url + "/v1/chat/completions", bodies, 5)) for bodies in cold]
    yield from added(f"{LONG:,} tokens, cold", pairs, {"p99": 30})
    yield from leaving(gateway, leave, 20)


def main():
    table.arguments(__doc__)
    with Redis() as redis, InstantWorker() as worker:
        leave = Leaving()
        locations = PLAIN + f"""
        location /leave/ {{ kvgate "on"; proxy_pass http://leave; proxy_buffering off; }}
        location /plain-leave/ {{ proxy_pass http://{leave.addr}; proxy_buffering off; }}"""
        upstreams = f"upstream plain {{ server {worker.addr}; keepalive 64; }} upstream leave {{ server {leave.addr}; }}"
        gateway = Gateway(redis, servers=[worker.addr], server=locations, http=upstreams, redis_timeout="100ms").start()
        fleet = FakeWorker("w1")
        try:
            fleet.register(redis, gateway.status()["models"][0]["fingerprint"], addr=worker.addr)
            wait_until(lambda: gateway.workers() == ["w1"], 10, "the worker seen by the gateway")
            rows = list(measure(gateway, leave))
            reasons = {k: v for k, v in gateway.status()["reasons"].items() if v}
        finally:
            fleet.unregister()
            gateway.close()
    print(f"{'':50}{'value':>10}{'proxy_pass':>12}{'aim':>8}")
    for r in rows:
        reached = r["value"] >= r["limit"] if r["unit"] == "share" else r["value"] <= r["limit"]
        print(f"{r['row'] + ', ' + r['unit']:50}{r['value']:10.3f}{r['peer_value']:12.3f}{r['limit']:8g}  {'reached' if reached else 'not reached'}")
    print(f"reasons: {json.dumps(reasons)}")
    with open(os.path.join(os.environ.get("OUT") or BUILD, "bench-gateway.json"), "w", encoding="utf-8") as f:
        json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
