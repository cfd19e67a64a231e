#!/usr/bin/env python3
"""make bench-spec: speculative decoding against plain decoding, two workers on one machine, in alternation.

Workloads: `humaneval` completes functions of HumanEval with a draft model; `edit` asks for a piece of this repository's code again
with one change, drafts by prompt lookup; `chat` asks open questions, once with each kind of draft (`chat`, `chat-draft`). Batches of
1, 4 and 16 requests at once. Each pair of runs asks both workers the same, prompts cached, in the order plain, drafts, drafts,
plain, ..., and each pair of a row something else (spec_prompts.py); its ratio is of tokens a second. Before it, the worker with
drafts answers the beginning, so that its draft model has the prompts, too; and when it was just started, some prompts that are not
measured, as its control knows nothing yet. Both must give the same texts.

Printed: the geometric mean of the ratios with its 95 % interval, what was accepted, drafts a verification, and K, the most drafts a
sequence could have at the end. Beside them, where `make peers` was run, llama.cpp's own speculative modes against its own plain
decoding at batch 1. Aims: edit alone >= 3, humaneval alone >= 1.3, no interval that lies below 0.98.

The whole takes about 25 minutes. In pieces: SECONDS (no pair begins that would end later) and APPEND=1 (go on where
build/bench-spec.json ends); the exit status is 75 while pairs are missing. Further variables: ROWS (humaneval:1 edit:4 ...,
with :llama behind it for the peer's), PAIRS (9), TOKENS (of each answer; by row), TUNING (1: prompts that are not measured, kept in
build/bench-spec-tuning.json), THREADS (2), MODEL, DRAFT, PROGRAM (the worker with drafts, if another one), LLAMA_BIN.
"""
import concurrent.futures
import dataclasses
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
from spec_prompts import prompts  # noqa: E402
from stack import Process, Worker, free_port  # noqa: E402
import table  # noqa: E402

MODELS = os.path.join("build", "models")
MODEL = os.environ.get("MODEL", os.path.join(MODELS, "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf"))
DRAFT = os.environ.get("DRAFT", os.path.join(MODELS, "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"))
PROGRAM = os.environ.get("PROGRAM")
PAIRS = int(os.environ.get("PAIRS", "9"))
THREADS = int(os.environ.get("THREADS", "2"))
TUNING = bool(os.environ.get("TUNING"))
LLAMA_BIN = os.environ.get("LLAMA_BIN", os.path.join(ROOT, "build", "peers", "llama.cpp", "bin"))
START = time.monotonic()
SECONDS = float(os.environ.get("SECONDS", "1e9"))
RESULTS = os.path.join(ROOT, "build", "bench-spec-tuning.json" if TUNING else "bench-spec.json")
T95 = {1: 12.7, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 15: 2.13, 20: 2.09}
LIMITS = {"edit:1": 3.0, "humaneval:1": 1.3}
LEAST = 0.98
ANSWERS = {1: 64, 4: 48, 16: 32}  # tokens, by batch: what makes nine pairs a minute or two each
WARM_UP = 16                      # tokens
PAIR_COST, START_COST = {1: 8, 4: 15, 16: 35}, 6  # seconds, until they are measured
STARTS = 3    # of each pair of engines, at least
MISSING = 75  # exit status


@dataclasses.dataclass(frozen=True)
class Row:
    workload: str
    batch: int
    peer: bool = False

    @property
    def name(self):
        return f"{self.workload}:{self.batch}" + (" llama.cpp" if self.peer else "")

    @property
    def draft(self):
        return DRAFT if self.workload in ("humaneval", "chat-draft") else "ngram"

    @property
    def tokens(self):
        return int(os.environ.get("TOKENS", 96 if self.workload == "edit" and self.batch == 1 and not self.peer else ANSWERS[self.batch]))

    @property
    def limit(self):
        return None if self.peer else LIMITS.get(self.name, LEAST)


def all_rows():
    rows = [Row(workload, batch) for workload in ("humaneval", "chat-draft", "edit", "chat") for batch in (1, 4, 16)]
    if os.path.exists(os.path.join(LLAMA_BIN, "llama-server")):
        return rows + [Row("humaneval", 1, True), Row("edit", 1, True)]
    print("llama.cpp: not installed (make peers)")
    return rows


def row_of(text):
    workload, batch, *peer = text.split(":")
    return Row(workload, int(batch), bool(peer))


# ---- engines ----

class LlamaServer(Process):
    """The peer: llama-server on a free port, plain or with its own drafts; its attention as it decodes fastest."""

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
        self.args = ["-m", MODEL, "-t", str(THREADS), "-c", "4096", "-np", "1", "-fa", "off", "--host", "127.0.0.1", "--port", str(self.port), *how]

    def command(self):
        return ["env", f"LD_LIBRARY_PATH={LLAMA_BIN}", os.path.join(LLAMA_BIN, "llama-server"), *self.args]

    def answers(self):
        try:
            return requests.get(self.url + "/health", timeout=2).status_code == 200
        except requests.RequestException:
            return False


def engines(row):
    """(plain, drafts), not started."""
    if row.peer:
        return LlamaServer(), LlamaServer(row.draft)
    flags = dict(model=MODEL, served="target", gateway=False, threads=THREADS, kv_cache_memory="1500M")
    limits = ("--max-model-len", "4096", "--max-num-batched-tokens", "512")
    return Worker(*limits, **flags), Worker(*limits, "--speculative-model", row.draft, program=PROGRAM, **flags)


def ask(server, prompt, tokens):
    text, chat = prompt
    body = {"model": server.served, "max_tokens": tokens, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    reply = requests.post(server.url + ("/v1/chat/completions" if chat else "/v1/completions"), json=body, timeout=600)
    reply.raise_for_status()
    reply = reply.json()
    choice = reply["choices"][0]
    return choice["message"]["content"] if chat else choice["text"], reply["usage"]["completion_tokens"]


def run(server, batch, pool, tokens):
    """Tokens a second of all prompts at once, and the texts."""
    start = time.perf_counter()
    answers = list(pool.map(lambda p: ask(server, p, tokens), batch))
    return sum(n for _, n in answers) / (time.perf_counter() - start), [text for text, _ in answers]


NAMES = {"drafted": "num_draft_tokens_total", "accepted": "num_accepted_tokens_total", "runs": "num_drafts_total"}


def counts(server):
    if not isinstance(server, Worker):
        return {name: 0 for name in NAMES}
    series = server.metrics()
    return {name: sum(v for k, v in series.items() if k.partition("{")[0] == f"kvgate_spec_decode_{metric}") for name, metric in NAMES.items()}


def measure_pair(pair, row, number, pool):
    """One alternation: its samples."""
    start = time.monotonic()
    asked = prompts(row.workload, row.batch, number, TUNING)
    run(pair[0], asked, pool, 1)
    run(pair[1], asked, pool, WARM_UP)
    before, speeds, texts = counts(pair[1]), {}, {}
    for server in pair if number % 2 == 0 else pair[::-1]:
        speeds[server], texts[server] = run(server, asked, pool, row.tokens)
    if texts[pair[0]] != texts[pair[1]] and not row.peer:
        sys.exit(f"bench-spec: {row.name}: the answers of pair {number} differ")
    after = counts(pair[1])
    return {"plain": [speeds[pair[0]]], "drafts": [speeds[pair[1]]], **{name: after[name] - before[name] for name in NAMES},
            "k": 0 if row.peer else pair[1].metric("kvgate_spec_decode_draft_limit"), "seconds": [time.monotonic() - start]}


# ---- results ----

def interval(ratios):
    """The geometric mean and its 95 % interval, by Student's t of the logarithms."""
    logs = [math.log(r) for r in ratios]
    n = len(logs)
    mean = statistics.fmean(logs)
    t = T95[max(k for k in T95 if k <= max(n - 1, 1))]
    half = t * statistics.stdev(logs) / math.sqrt(n) if n > 1 else math.inf
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def verdict(row, ratio, high):
    if row.limit is None:
        return None
    if row.limit == LEAST:
        return "reached" if high >= LEAST else "MISSED"
    return "reached" if ratio >= row.limit else "MISSED"


def finish(row, samples):
    """A result in the form that all benchmarks write, its samples beside it for further pieces."""
    ratio, low, high = interval([d / p for d, p in zip(samples["drafts"], samples["plain"])])
    value, peer = statistics.median(samples["drafts"]), statistics.median(samples["plain"])
    return {"row": row.name, "unit": "tokens/s", "value": value, "peer": "plain decoding", "peer_value": peer, "ratio": ratio,
            "interval": [low, high], "limit": row.limit, "share": ratio / row.limit if row.limit else None, "runs": len(samples["plain"]),
            "verdict": verdict(row, ratio, high), "drafted": samples["drafted"], "accepted": samples["accepted"],
            "drafts_a_run": samples["drafted"] / max(samples["runs"], 1), "k": samples["k"], "samples": samples}


def show(r):
    low, high = r["interval"]
    aim = f"   aim {r['limit']}: {r['verdict']}" if r["limit"] else ""
    drafts = f"   accepted {100 * r['accepted'] / r['drafted']:.0f} % of {r['drafted']:.0f}, {r['drafts_a_run']:.1f} a run, K {r['k']:.0f}" if r["drafted"] else ""
    print(f"  {r['row']:22} plain {r['peer_value']:6.1f}  drafts {r['value']:6.1f} tokens/s   {r['ratio']:5.2f}x [{low:.2f}, {high:.2f}]"
          f"   {r['runs']} pairs{aim}{drafts}", flush=True)


def add_pair(results, row, samples):
    old = results.get(row.name, {}).get("samples")
    if old:
        samples = {k: v if k == "k" else old[k] + v for k, v in samples.items()}
    results[row.name] = finish(row, samples)
    with open(RESULTS + ".part", "w", encoding="utf-8") as f:
        json.dump(list(results.values()), f, indent=1)
    os.replace(RESULTS + ".part", RESULTS)


def load():
    if not os.environ.get("APPEND") or not os.path.exists(RESULTS):
        return {}
    with open(RESULTS, encoding="utf-8") as f:
        return {r["row"]: r for r in json.load(f)}


# ---- the run ----

def done(results, row):
    return results[row.name]["runs"] if row.name in results else 0


def pair_cost(results, row):
    """Seconds that a pair of the row will take."""
    return statistics.fmean(results[row.name]["samples"]["seconds"]) if row.name in results else PAIR_COST[row.batch]


def time_left(results, rows):
    return sum((PAIRS - done(results, row)) * pair_cost(results, row) for row in rows)


def has_time(results, row):
    return time.monotonic() - START + pair_cost(results, row) <= SECONDS


def measure(pair, row, goal, rows, results, pool):
    """The row's pairs up to `goal`, while there is time."""
    if not row.peer and row.batch <= 4 and done(results, row) < goal and has_time(results, row):
        run(pair[1], prompts(row.workload, row.batch, 0, tuning=True), pool, ANSWERS[row.batch])
    while done(results, row) < goal and has_time(results, row):
        number = done(results, row)
        samples = measure_pair(pair, row, number, pool)
        add_pair(results, row, samples)
        print(f"    {row.name}: pair {number + 1} of {PAIRS}: {samples['drafts'][0] / samples['plain'][0]:.2f}x, {samples['seconds'][0]:.0f} s;"
              f" about {time_left(results, rows) / 60:.0f} min left", flush=True)


def start(pair, second_first):
    """Of two equal workers one may be faster by some percent, as their memory happens to lie; so they are started anew now and then."""
    for server in pair[::-1] if second_first else pair:
        server.start()


def measure_some(rows, mine, goal, results, pool):
    """The pairs of one kind of drafts up to `goal`, with two engines started for them."""
    mine = [row for row in mine if done(results, row) < goal]
    if not mine or time.monotonic() - START + START_COST + pair_cost(results, mine[0]) > SECONDS:
        return
    pair = engines(mine[0])
    try:
        start(pair, sum(done(results, row) for row in rows) % 2)
        for row in mine:
            measure(pair, row, goal, rows, results, pool)
    finally:
        for server in pair:
            server.close()


def main():
    table.arguments(__doc__)
    rows = [row_of(text) for text in os.environ["ROWS"].split()] if "ROWS" in os.environ else all_rows()
    results = load()
    print(f"{os.path.basename(MODEL)}, drafts by {os.path.basename(DRAFT)} or ngram, {PAIRS} pairs a row; {PROGRAM or BUILD};"
          f" about {time_left(results, rows) / 60:.0f} min", flush=True)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for goal in [PAIRS * n // STARTS for n in range(1, STARTS + 1)]:
            for kind in dict.fromkeys((row.peer, row.draft) for row in rows):
                measure_some(rows, [row for row in rows if (row.peer, row.draft) == kind], goal, results, pool)
    for row in rows:
        if row.name in results:
            show(results[row.name])
    missing = sum(PAIRS - done(results, row) for row in rows)
    if missing:
        print(f"{missing} pairs are missing, about {time_left(results, rows) / 60:.0f} min; APPEND=1 goes on")
    return MISSING if missing else 0


if __name__ == "__main__":
    sys.exit(main())
