#!/usr/bin/env python3
"""make bench-latency: what waits for what in one worker, on SmolLM2 with all cores. ONLY="step streams" runs some parts.

  start    seconds from start to ready with the file in the page cache, and resident memory beside the weights; Qwen-0.5B as well
  step     32 streaming clients: tokens/s, and what the engine thread's time goes to
  streams  4 streams alone and beside 8,000-token prompts that come without a pause: their inter-token times, the prompts' rate
           with and without them, and the time of GET /health meanwhile
  hit      the first token behind 2,000 cached ones, the gateway's ids beside the body and without, on a kept connection
  busy     8 streams beside two processes that never sleep

Prints a table and writes build/bench-latency.json.
"""
import http.client
import json
import os
import statistics
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "tools"), os.path.join(HERE, "..")]
from conftest import BUILD, MODELS, ROOT  # noqa: E402
from stack import SMOLLM2, Worker  # noqa: E402
import table  # noqa: E402
from health import Health  # noqa: E402

QWEN = os.path.join(MODELS, "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf")
THREADS = int(os.environ.get("THREADS", os.cpu_count() or 2))
WORDS = "river stone lamp garden winter copper signal harbor meadow thunder violet anchor".split()
PROMPT = 8000
rows = []


def row(name, unit, value, peer=None, peer_value=None, limit=None):
    rows.append({"row": name, "unit": unit, "value": value, "peer": peer, "peer_value": peer_value,
                 "ratio": peer_value / value if peer_value and value else None, "limit": limit,
                 "share": limit / value if limit and value else None, "runs": 1})
    beside = f"   {peer} {peer_value:.4g}" if peer else ""
    print(f"  {name:44s} {value:10.4g} {unit:9s}{beside}{f'   aim {limit:.4g}' if limit else ''}", flush=True)


def text(number, n):
    return f"Notes {number}. " + " ".join(WORDS[(i * (number % 11 + 3) + i // 7 + number) % len(WORDS)] for i in range(n))


def body(number, shared, own, **members):
    return {"stream": True, "temperature": 0.7, "seed": number, "ignore_eos": True, **members,
            "messages": [{"role": "system", "content": text(0, shared)}, {"role": "user", "content": text(number + 1, own)}]}


def load(worker, bodies, connections):
    done = subprocess.run([os.path.join(BUILD, "tests/tools/load"), "--url", worker.url + "/v1/chat/completions", "--requests", "-",
                           "--connections", str(connections)], input="\n".join(map(json.dumps, bodies)), capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    if result["failed"]:
        sys.exit(f"bench-latency: {result['failed']} requests failed: {result['errors']}")
    return result


def memory(pid):
    with open(f"/proc/{pid}/status", encoding="utf-8") as f:
        return {line.split(":")[0]: int(line.split()[1]) / 1024 for line in f if line.startswith(("VmRSS", "RssAnon", "RssFile"))}


def start_part():
    for name, model in (("SmolLM2", SMOLLM2), ("Qwen-0.5B", QWEN)):
        if not os.path.exists(model):
            print(f"  {name}: not there (make models-test)")
            continue
        with open(model, "rb") as f:
            while f.read(1 << 24):
                pass
        times = []
        for _ in range(3):
            worker = Worker("--max-model-len", 4096, model=model, threads=THREADS)
            began = time.monotonic()
            worker.launch()
            while not worker.answers():
                time.sleep(0.002)
            times.append(time.monotonic() - began)
            resident = memory(worker.pid)["VmRSS"]
            worker.close()
        weights = os.path.getsize(model) / (1 << 20)
        row(f"{name}: start to ready", "s", statistics.median(times), limit=1)
        row(f"{name}: resident, idle", "MiB", resident, "the file", weights, limit=weights + 100)


def step_part(worker):
    load(worker, [body(n, 200, 50, max_tokens=4) for n in range(2)], 1)
    before, began = worker.metrics(), time.monotonic()
    result = load(worker, [body(n, 200, 50, max_tokens=64) for n in range(96)], 32)
    seconds, after = time.monotonic() - began, worker.metrics()
    parts = {k.split('part="')[1].split('"')[0]: after[k] - before[k] for k in after if k.startswith("kvgate_step_seconds_total")}
    total = sum(parts.values())
    row("32 clients: tokens a second", "tokens/s", 96 * 64 / seconds)
    row("32 clients: inter-token p50", "ms", 1000 * result["inter_token"]["p50"])
    for part, value in parts.items():
        row(f"32 clients: share of {part}", "%", 100 * value / total)
    row("32 clients: all but the forward", "%", 100 * (1 - parts["forward"] / total), limit=3)


def post(worker, path, members, headers=None, port=None):
    connection = http.client.HTTPConnection("127.0.0.1", port or worker.port, timeout=120)
    connection.request("POST", path, json.dumps(members), {"Content-Type": "application/json", **(headers or {})})
    reply = connection.getresponse()
    out = reply.read()
    connection.close()
    if reply.status != 200:
        sys.exit(f"bench-latency: {reply.status} {out[:300]}")
    return json.loads(out)


def prefill(worker, number):
    """Seconds that the first token of a new prompt takes."""
    ids = [200 + (i * 7919 + number * 104729) % 40000 for i in range(PROMPT)]
    began = time.monotonic()
    post(worker, "/v1/completions", {"prompt": ids, "max_tokens": 1, "temperature": 0})
    return time.monotonic() - began


def streams_part(worker):
    short, streams = ([body(n, 200, 50, max_tokens=many) for n in range(4)] for many in (200, 600))
    load(worker, short, 4)
    alone = load(worker, short, 4)["inter_token"]
    solo = [prefill(worker, n) for n in range(2)]
    beside = []
    again = threading.Event()

    def prompts():
        number = 10
        while not again.is_set():
            seconds = prefill(worker, number)
            beside.append((time.monotonic(), seconds))
            number += 1

    feeder = threading.Thread(target=prompts)
    with Health(worker.port) as health:
        feeder.start()
        time.sleep(0.2)
        began = time.monotonic()
        shared = load(worker, streams, 4)["inter_token"]
        ended = time.monotonic()
        again.set()
    feeder.join()
    together = [seconds for end, seconds in beside if end < ended]  # the last one ran on alone
    if not together:
        sys.exit(f"bench-latency: no prompt was done within the {ended - began:.0f} s of the streams")
    times = sorted(health.times)
    row("4 streams: inter-token p50", "ms", 1000 * shared["p50"], "alone", 1000 * alone["p50"])
    row("4 streams: inter-token p99", "ms", 1000 * shared["p99"], "alone", 1000 * alone["p99"], limit=2000 * alone["p99"])
    row("4 streams: longest gap", "ms", 1000 * shared["max"], "alone", 1000 * alone["max"])
    rate, solo_rate = PROMPT / statistics.median(together), PROMPT / min(solo)
    row("8,000-token prompt beside them", "tokens/s", rate, "solo", solo_rate)
    row("8,000-token prompt: share of its solo rate", "%", 100 * rate / solo_rate)
    row("GET /health meanwhile, p50", "ms", 1000 * times[len(times) // 2])
    row("GET /health meanwhile, longest", "ms", 1000 * times[-1], limit=10)


def first_token(connection, members, headers):
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(members), {"Content-Type": "application/json", **headers})
    reply = connection.getresponse()
    while b'"content":"' not in (line := reply.readline()) or b'"role"' in line:
        pass
    first = time.perf_counter() - began
    second = None
    for line in iter(reply.readline, b""):
        if b'"content":"' in line and second is None:
            second = time.perf_counter() - began - first
    return first, second


def hit_part(worker):
    connection = http.client.HTTPConnection("127.0.0.1", worker.gateway_port, timeout=60)
    fingerprint = post(worker, "/tokenize", {"messages": [{"role": "user", "content": "x"}]})["kvgate"]["fingerprint"]
    sums = lambda: {k: v for k, v in worker.metrics().items() if k.startswith(("kvgate_request_prefill_time_seconds_sum", "kvgate_request_queue_time_seconds_sum"))}  # noqa: E731,E501
    for kind in ("ids from the gateway", "tokenized here"):
        firsts, seconds = [], []
        for n in range(12):
            members = {**body(0, 1980, 0, max_tokens=3, temperature=0), "messages": [
                {"role": "system", "content": text(0, 1980)}, {"role": "user", "content": f"And what comes {n}th?"}]}
            headers = {}
            if kind.startswith("ids"):
                members["prompt_token_ids"] = post(worker, "/tokenize", {"messages": members["messages"]})["tokens"]
                headers = {"X-Kvgate-Fingerprint": fingerprint}
            first, second = first_token(connection, members, headers)
            if n == 0:
                before = sums()
            else:  # the first one is cold
                firsts.append(first)
                seconds.append(second)
        for name, value in sums().items():
            row(f"  of that {name.split('_')[2]}, mean", "ms", 1000 * (value - before[name]) / len(firsts))
        step = statistics.median(seconds)
        row(f"hit on 2,000 tokens, {kind}", "ms", 1000 * statistics.median(firsts), "one step", 1000 * step, limit=2000 * step + 3)


def busy_part(worker):
    streams = [body(n, 200, 50, max_tokens=60) for n in range(8)]
    quiet = load(worker, streams, 8)["inter_token"]
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        beside = load(worker, streams, 8)["inter_token"]
    finally:
        for p in neighbours:
            p.kill()
            p.wait()
    row("beside 2 busy processes: inter-token p50", "ms", 1000 * beside["p50"], "alone", 1000 * quiet["p50"])
    row("beside 2 busy processes: inter-token mean", "ms", 1000 * beside["mean"], "alone", 1000 * quiet["mean"])
    time.sleep(1)
    before = os.times(), worker_cpu(worker)
    time.sleep(2)
    row("processor time while idle", "% of one core", 100 * (worker_cpu(worker) - before[1]) / 2)


def worker_cpu(worker):
    with open(f"/proc/{worker.pid}/stat", encoding="utf-8") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main():
    table.arguments(__doc__)
    parts = {"start": start_part, "step": step_part, "streams": streams_part, "hit": hit_part, "busy": busy_part}
    wanted = os.environ.get("ONLY", " ".join(parts)).split()
    print(f"one worker, {THREADS} threads")
    if "start" in wanted:
        start_part()
    with Worker("--max-model-len", 8192, threads=THREADS, kv_cache_memory="1G", program=os.environ.get("PROGRAM")) as worker:
        for name in wanted:
            if name != "start":
                parts[name](worker)
    with open(os.path.join(ROOT, "build", "bench-latency.json"), "w", encoding="utf-8") as f:
        json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
