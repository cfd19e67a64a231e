#!/usr/bin/env python3
"""make bench-spec: speculative decoding against plain decoding, two workers on one machine, in alternation.

Workloads: `edit` asks for a piece of this repository's code again with one change; `chat` asks open questions. Batches of 1, 4 and
16 requests at once. Each pair of runs asks both workers the same, prompts cached, in the order plain, drafts, drafts, plain, ...;
its ratio is of tokens a second. Printed: the geometric mean of the ratios with its 95 % interval, what was accepted, and K.
Both must give the same ids. Aims: edit alone >= 3, and no interval below 0.98.

Variables: MODEL, DRAFT (ngram; or the file of a draft model), PAIRS (9), BATCHES (1,4,16), TOKENS (160), WORKLOADS (edit,chat), THREADS (2).
"""
import concurrent.futures
import json
import math
import os
import statistics
import sys
import time

import requests

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tools"))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from conftest import BUILD, ROOT  # noqa: E402
from stack import Worker  # noqa: E402

MODEL = os.environ.get("MODEL", os.path.join(BUILD, "models", "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf"))
DRAFT = os.environ.get("DRAFT", "ngram")
PAIRS = int(os.environ.get("PAIRS", "9"))
BATCHES = [int(n) for n in os.environ.get("BATCHES", "1,4,16").split(",")]
TOKENS = int(os.environ.get("TOKENS", "160"))
WORKLOADS = os.environ.get("WORKLOADS", "edit,chat").split(",")
T95 = {1: 12.7, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 15: 2.13, 20: 2.09}
LIMITS = {("edit", 1): 3.0}
QUESTIONS = ["Why is the sky blue?", "Tell a short story about a lighthouse.", "How do I learn to play chess?", "What makes a good leader?",
             "Describe a walk through an old town.", "Explain how a bicycle stays upright.", "Plan a weekend in the mountains.",
             "What should I cook tonight?", "Why do people dream?", "Write a poem about rain.", "How does a refrigerator work?",
             "What is the history of tea?", "Give advice for a job interview.", "Why do cats purr?", "Describe the sea at night.",
             "How are bridges built?"]


def pieces():
    """Sixteen pieces of 30 lines of this repository's Python."""
    with open(os.path.join(ROOT, "tests", "tools", "toy_model.py"), encoding="utf-8") as f:
        lines = f.read().splitlines()
    return ["\n".join(lines[n:n + 30]) for n in range(60, 60 + 16 * 20, 20)]


PROMPTS = {"chat": QUESTIONS, "edit": [f"Repeat this code exactly, but rename the variable `out` to `result`. Answer with the code only."
                                       f"\n\n```python\n{piece}\n```" for piece in pieces()]}


def ask(worker, prompt, tokens):
    body = {"model": worker.served, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0,
            "ignore_eos": False}
    reply = requests.post(worker.url + "/v1/chat/completions", json=body, timeout=600)
    reply.raise_for_status()
    reply = reply.json()
    return reply["choices"][0]["message"]["content"], reply["usage"]["completion_tokens"]


def run(worker, prompts, pool):
    """Tokens a second of all prompts at once, and the texts."""
    start = time.perf_counter()
    answers = list(pool.map(lambda p: ask(worker, p, TOKENS), prompts))
    return sum(n for _, n in answers) / (time.perf_counter() - start), [text for text, _ in answers]


def interval(ratios):
    logs = [math.log(r) for r in ratios]
    n = len(logs)
    mean = statistics.fmean(logs)
    t = T95[max(k for k in T95 if k <= max(n - 1, 1))]
    half = t * statistics.stdev(logs) / math.sqrt(n) if n > 1 else math.inf
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def compare(plain, drafting, workload, batch, pool):
    prompts = PROMPTS[workload][:batch]
    for worker in (plain, drafting):
        list(pool.map(lambda p: ask(worker, p, 1), prompts))  # the prompts are cached from here on
    names = ("kvgate_spec_decode_num_draft_tokens_total", "kvgate_spec_decode_num_accepted_tokens_total")
    before = [drafting.metric(n) for n in names]
    speeds = {plain: [], drafting: []}
    for pair in range(PAIRS):
        texts = {}
        for worker in (plain, drafting) if pair % 2 == 0 else (drafting, plain):
            speed, texts[worker] = run(worker, prompts, pool)
            speeds[worker].append(speed)
        if texts[plain] != texts[drafting]:
            sys.exit(f"bench-spec: {workload} x {batch}: the answers differ")
    drafted, accepted = (drafting.metric(n) - b for n, b in zip(names, before))
    ratio, low, high = interval([d / p for d, p in zip(speeds[drafting], speeds[plain])])
    value, peer = statistics.median(speeds[drafting]), statistics.median(speeds[plain])
    limit = LIMITS.get((workload, batch), 0.98)
    print(f"  {workload:5} x {batch:2}  plain {peer:7.1f}  drafts {value:7.1f} tokens/s   ratio {ratio:5.2f}  [{low:.2f}, {high:.2f}]"
          f"   accepted {accepted:.0f} of {drafted:.0f} ({100 * accepted / max(drafted, 1):.0f} %)"
          f"   K {drafting.metric('kvgate_spec_decode_draft_limit'):.0f}   aim {limit}", flush=True)
    return {"row": f"{workload} x {batch}", "unit": "tokens/s", "value": value, "peer": "plain decoding", "peer_value": peer, "ratio": ratio,
            "interval": [low, high], "limit": limit, "share": ratio / limit, "runs": PAIRS, "drafted": drafted, "accepted": accepted}


def main():
    flags = dict(model=MODEL, served="target", gateway=False, threads=int(os.environ.get("THREADS", "2")), kv_cache_memory="1G")
    rows = []
    print(f"{os.path.basename(MODEL)}, drafts from {os.path.basename(DRAFT)}, {PAIRS} pairs, up to {TOKENS} tokens an answer")
    with Worker("--max-model-len", "4096", **flags) as plain, \
            Worker("--max-model-len", "4096", "--speculative-model", DRAFT, **flags) as drafting, \
            concurrent.futures.ThreadPoolExecutor(max(BATCHES)) as pool:
        for workload in WORKLOADS:
            for batch in BATCHES:
                rows.append(compare(plain, drafting, workload, batch, pool))
    with open(os.path.join(ROOT, "build", "bench-spec.json"), "w", encoding="utf-8") as f:
        json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
