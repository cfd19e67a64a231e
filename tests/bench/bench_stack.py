#!/usr/bin/env python3
"""make bench-stack: what prefix cache, chunked prefill, continuous batching and speculation give alone and together.

Workloads: `shared`, requests of 800 prompt tokens, of which all share the first 600, and 300 answered ones; `chats`, conversations
of several turns, each of which brings the whole history again. A fixed number of clients asks at once. Each configuration is a
worker of its own; the order of configurations is reversed from round to round. Printed: tokens answered a second and its ratio to
`none` (all four off) with a 95 % interval, time to the first token, the gap between tokens that 99 % stay below, the share of
prompt tokens found in the cache, and the most KV blocks in use.

Variables: MODEL, CONFIGS ("none prefix chunked batching speculation all-speculation all"; all), WORKLOADS (shared chats), ROUNDS (5),
CLIENTS (4), REQUESTS (4), TURNS (3), ANSWER (300), THREADS (2); for a run in pieces: SECONDS (no round of a workload begins that
would end later) and APPEND=1 (go on where build/bench-stack.json ends); the exit status is 75 while rounds are missing.
"""
import concurrent.futures
import json
import os
import statistics
import sys
import threading
import time

import requests

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tools"))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from bench_spec import MISSING, interval  # noqa: E402
from conftest import ROOT  # noqa: E402
from stack import SMOLLM2, Worker  # noqa: E402
import table  # noqa: E402

MODEL = os.environ.get("MODEL", SMOLLM2)
ROUNDS = int(os.environ.get("ROUNDS", "5"))
CLIENTS, REQUESTS, TURNS = (int(os.environ.get(k, v)) for k, v in (("CLIENTS", "4"), ("REQUESTS", "4"), ("TURNS", "3")))
ANSWER = int(os.environ.get("ANSWER", "300"))
THREADS = int(os.environ.get("THREADS", "2"))
WORKLOADS = os.environ.get("WORKLOADS", "shared chats").split()
START = time.monotonic()
SECONDS = float(os.environ.get("SECONDS", "1e9"))
RESULTS = os.path.join(ROOT, "build", "bench-stack.json")
# What each switch takes away; speculation is added instead.
OFF = {"prefix": ["--no-enable-prefix-caching"], "chunked": ["--no-enable-chunked-prefill"], "batching": ["--max-num-seqs", "1"]}
CONFIGS = {"none": set(), "prefix": {"prefix"}, "chunked": {"chunked"}, "batching": {"batching"}, "speculation": {"speculation"},
           "all-speculation": {"prefix", "chunked", "batching"}, "all": {"prefix", "chunked", "batching", "speculation"}}
WORDS = "river stone lamp garden winter copper signal harbor meadow thunder violet anchor".split()


def words(n, seed):
    return " ".join(WORDS[(i * (seed % 11 + 1) + i // 7 + seed) % len(WORDS)] for i in range(n))


def worker_of(config):
    flags = [flag for switch, off in OFF.items() if switch not in CONFIGS[config] for flag in off]
    if "speculation" in CONFIGS[config]:
        flags += ["--speculative-model", "ngram"]
    return Worker("--max-model-len", "4096", "--max-num-batched-tokens", "4096", *flags, model=MODEL, served="stack", gateway=False,
                  threads=THREADS, kv_cache_memory="512M")


class Watch:
    """The most blocks in use, asked for ten times a second."""

    def __init__(self, worker):
        self.worker, self.most, self.done = worker, 0, threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        while not self.done.wait(0.1):
            series = self.worker.metrics()
            self.most = max([self.most] + [v for k, v in series.items() if k.startswith("kvgate_kv_blocks_used")])

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()


def ask(worker, messages, tokens):
    """The answer's text, its tokens, the prompt's cached and all tokens, seconds to the first token, gaps between further ones."""
    body = {"model": "stack", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}
    start = last = time.perf_counter()
    text, gaps, usage = "", [], None
    with requests.post(worker.url + "/v1/chat/completions", json=body, stream=True, timeout=600) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            delta = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else None
            if delta:
                text += delta
                now = time.perf_counter()
                gaps.append(now - last)
                last = now
    return {"text": text, "tokens": usage["completion_tokens"], "prompt": usage["prompt_tokens"],
            "cached": usage["prompt_tokens_details"]["cached_tokens"], "ttft": gaps[0] if gaps else last - start, "gaps": gaps[1:]}


def shared(worker, client, number):
    """One request of about 800 tokens; the first 600 are everybody's in this round."""
    out = []
    for i in range(REQUESTS // CLIENTS or 1):
        seed = 1000 * number + 10 * client + i
        out.append(ask(worker, [{"role": "system", "content": f"Notes {number}. " + words(580, number)},
                                {"role": "user", "content": f"Question {seed}: " + words(180, seed)}], ANSWER))
    return out


def chats(worker, client, number):
    """A conversation: each turn brings all before it."""
    out, messages = [], [{"role": "system", "content": f"Round {number}. " + words(150, number)}]
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"Turn {turn} of {client}: " + words(40, 100 * number + 10 * client + turn)})
        out.append(ask(worker, messages, ANSWER // TURNS))
        messages.append({"role": "assistant", "content": out[-1]["text"]})
    return out


def measure(worker, workload, number):
    with Watch(worker) as watch, concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        start = time.perf_counter()
        answers = sum(pool.map(lambda client: {"shared": shared, "chats": chats}[workload](worker, client, number), range(CLIENTS)), [])
        seconds = time.perf_counter() - start
    gaps = sorted(gap for a in answers for gap in a["gaps"])
    return {"speed": sum(a["tokens"] for a in answers) / seconds, "seconds": seconds, "ttft": statistics.median(a["ttft"] for a in answers),
            "gap99": gaps[int(0.99 * (len(gaps) - 1))], "cached": sum(a["cached"] for a in answers) / sum(a["prompt"] for a in answers),
            "blocks": watch.most, "texts": [a["text"] for a in answers]}


def rows_of(samples):
    """One row a workload and configuration; the ratio is to `none` of the same round."""
    rows = []
    for workload in sorted({w for w, _ in samples}):
        base = samples.get((workload, "none"))
        for config in CONFIGS:
            own = samples.get((workload, config))
            if not own:
                continue
            median = lambda key: statistics.median(s[key] for s in own)  # noqa: E731
            ratios = [a["speed"] / b["speed"] for a, b in zip(own, base)] if base else []
            ratio, low, high = interval(ratios) if ratios else (None, None, None)
            rows.append({"row": f"{workload}, {config}", "unit": "tokens/s", "value": median("speed"), "peer": "none of the four",
                         "peer_value": statistics.median(s["speed"] for s in base) if base else None, "ratio": ratio,
                         "interval": [low, high] if len(ratios) > 1 else None, "limit": None, "share": None, "runs": len(own),
                         "ttft": median("ttft"), "gap99": median("gap99"), "cached": median("cached"), "blocks": median("blocks"), "samples": own})
    return rows


def show(rows):
    for r in rows:
        between = "[%.2f, %.2f]" % tuple(r["interval"]) if r["interval"] else ""
        print(f"  {r['row']:24} {r['value']:7.1f} tokens/s   {r['ratio'] or 0:5.2f} x {between:14}   first token {1000 * r['ttft']:7.0f} ms   "
              f"99 % of gaps < {1000 * r['gap99']:6.0f} ms   {100 * r['cached']:3.0f} % cached   {r['blocks']:4.0f} blocks   {r['runs']} rounds")


def load_samples():
    if not os.environ.get("APPEND") or not os.path.exists(RESULTS):
        return {}
    with open(RESULTS, encoding="utf-8") as f:
        return {tuple(r["row"].split(", ")): r["samples"] for r in json.load(f)}


def save(samples):
    with open(RESULTS + ".part", "w", encoding="utf-8") as f:
        json.dump(rows_of(samples), f, indent=1)
    os.replace(RESULTS + ".part", RESULTS)


def round_of(workers, workload, number):
    """Each configuration once, {configuration: result}; all must answer the same."""
    results, texts = {}, None
    for config in workers if number % 2 == 0 else reversed(workers):
        results[config] = measure(workers[config], workload, number)
        own = results[config].pop("texts")
        texts = texts or own
        if own != texts:
            sys.exit(f"bench-stack: {workload}: {config} answers something else")
    return results


def missing_rounds(samples, configs):
    """[(number, workload)] in the order in which they are run."""
    done = {w: min(len(samples.get((w, config), [])) for config in configs) for w in WORKLOADS}
    return [(number, w) for number in range(ROUNDS) for w in WORKLOADS if number >= done[w]]


def main():
    table.arguments(__doc__)
    samples = load_samples()
    configs = os.environ.get("CONFIGS", " ".join(CONFIGS)).split()
    todo = missing_rounds(samples, configs)
    workers = {config: worker_of(config) for config in configs} if todo else {}
    print(f"{os.path.basename(MODEL)}, {CLIENTS} clients at once, {len(todo)} rounds of a workload to go")
    longest = {w: sum(s[-1].get("seconds", 5) for (own, _), s in samples.items() if own == w) for w in WORKLOADS}
    try:
        for worker in workers.values():
            worker.start()
        while todo and time.monotonic() - START + longest[todo[0][1]] <= SECONDS:
            number, workload = todo.pop(0)
            start = time.monotonic()
            for config, result in round_of(workers, workload, number).items():
                samples.setdefault((workload, config), []).append(result)
            save(samples)
            longest[workload] = max(longest[workload], time.monotonic() - start)
            left = sum(longest[w] or longest[workload] for _, w in todo)
            print(f"    {workload}: round {number + 1} of {ROUNDS}: {time.monotonic() - start:.0f} s; about {left / 60:.0f} min left", flush=True)
    finally:
        for worker in workers.values():
            worker.close()
    show(rows_of(samples))
    return MISSING if todo else 0


if __name__ == "__main__":
    sys.exit(main())
