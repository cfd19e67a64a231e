#!/usr/bin/env python3
"""make bench-cpu: the CPU engine and its peers side by side: one client, the same files, token ids and threads, greedy, ignore_eos.

Each run of a row asks every engine once, one after the other, the first one changing from run to run; printed are the medians, the
median ratio (above 1 = kvgate is better) and the share of what the machine could do, measured in the same run. Results go into
build/bench-cpu.json row by row, so that the whole can be run in pieces:

    ROWS=decode MODELS=smol make bench-cpu

Variables: ROWS (of: decode prefill clients prefix beside start), MODELS (of: smol qwen05 qwen15), PEERS (of: llama bench vllm), RUNS (3),
THREADS (2), CLIENTS (1,4,16,32), TOKENS (128: of a decode row), PROMPTS (512,2048: of the prefill rows), FLASH (on or off: llama-server's
attention; otherwise the better one of both, tried at the first use and remembered in build/peers/run), LONG (8128: tokens of the prompt
beside streams), PEERS_DIR (another folder that `make peers` filled). vLLM needs minutes to start: `bench_cpu.py hold MODEL` leaves it behind
for such pieces, stopped in between, `release MODEL` ends it; `table` writes what the file holds into tests/bench/RESULTS.md.
"""
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time

import gguf

import table
from engines import BUILD, MODELS, ROOT, THREADS, Choices, Kvgate, Llama, Missing, Prompts, Vllm, llama_bench
from health import Health
from table import at_least

ROWS = ("decode", "prefill", "clients", "prefix", "beside", "start")
NEW = int(os.environ.get("TOKENS", "128"))  # of a decode row
LONG = int(os.environ.get("LONG", "8128"))  # tokens of the prompt beside streams
SLOW = 8  # seconds: a peer whose turn takes longer has only one
FILE = os.path.join(ROOT, "build", "bench-cpu.json")
RESULTS = os.path.join(ROOT, "tests", "bench", "RESULTS.md")
ORDER = ("bandwidth", "limit", "decode", "prefill 512", "prefill 2048", "TTFT behind", "1 clients", "4 clients", "16 clients", "32 clients", "beside",
         "ready", "resident")
DECODE_AIMS = {"smol": 1.5, "qwen05": 2, "qwen15": 1.8}
CLIENT_AIMS = {"smol": 2, "qwen05": 1.5}


def numbers(name, default):
    return [int(n) for n in os.environ.get(name, default).replace(",", " ").split()]


# ---- limits ----


def weights(path):
    """Bytes of weights that a decode step reads, bytes of all weights, and multiply-adds of a token in all matrices but the vocabulary's."""
    tensors = gguf.GGUFReader(path).tensors
    untied = any(t.name == "output.weight" for t in tensors)
    total = sum(int(t.n_bytes) for t in tensors)
    step = sum(int(t.n_bytes) for t in tensors if not (untied and t.name == "token_embd.weight"))
    macs = sum(int(t.n_elements) for t in tensors if t.name.startswith("blk.") and len(t.shape) == 2)
    return step, total, macs


class Limits:
    """What the machine could do with a model, from rates measured just now."""

    def __init__(self, model):
        self.step_bytes, self.total_bytes, self.macs = weights(model.path)
        self.megabytes = max(1, self.step_bytes // 1000000)
        done = subprocess.run([os.path.join(BUILD, "tests/bench/limits"), str(THREADS), str(self.megabytes)], capture_output=True, text=True,
                              check=True)
        self.rates = json.loads(done.stdout)
        self.bandwidth = self.rates["read"][str(self.megabytes)]
        self.ops = max(self.rates.get(k, 0) for k in ("vnni", "amx_int8"))

    def decode(self):
        """Tokens a second when each reads all weights once."""
        return self.bandwidth * 1e9 / self.step_bytes

    def prefill(self):
        """Tokens a second when only the matrices' 8-bit products take time."""
        return self.ops * 1e9 / (2 * self.macs) if self.ops else None

    def company(self, clients, own, new):
        """Tokens a second of `clients` streams: every step reads the weights once, every token takes its products."""
        if not self.ops:
            return None
        seconds = new * self.step_bytes / (self.bandwidth * 1e9) + clients * (own + new) * 2 * self.macs / (self.ops * 1e9)
        return clients * new / seconds

    def rows(self, model):
        out = [table.row(f"{model.label}: read bandwidth, {self.megabytes} MB", "GB/s", [self.bandwidth])]
        return out + [table.row(f"limit: {name}", "Gop/s", [self.rates[name]]) for name in ("vnni", "amx_int8", "amx_bf16") if name in self.rates]


# ---- what one engine does once ----


def stream_rate(details):
    """Tokens a second of streams that ran at once, the first token of each left out."""
    return sum((d["completion_tokens"] - 1) / (d["total"] - d["ttft"]) for d in details)


def decode(engine, prompts):
    _, details = engine.load([engine.body(ids, NEW) for ids in prompts], len(prompts))
    return stream_rate(details)


def first_token(engine, ids, n=1):
    """Seconds to the first token, and the details of the whole load."""
    result, details = engine.load([engine.body(ids, n)], 1)
    return details[0]["ttft"], result


def clients(engine, n, shared, own, new=64):
    """n clients at once behind a prefix that is cached; one client asks four times in a row."""
    first_token(engine, shared + own[0][::-1])
    result, _ = engine.load([engine.body(shared + ids, new) for ids in own], n)
    out = {"rate": result["completion_tokens"] / result["seconds"]}
    for name, key in (("ttft", "ttft"), ("gap", "inter_token")):
        out.update({f"{name}_p50": 1000 * result[key]["p50"], f"{name}_p95": 1000 * result[key]["p95"]})
    return out


def prefix(engine, shared, cold, warm):
    c, result = first_token(engine, shared + cold, 16)
    w, _ = first_token(engine, shared + warm, 16)
    return {"cold": 1000 * c, "warm": 1000 * w, "step": 1000 * result["inter_token"]["p50"]}


def gaps(events, start, end):
    """Gaps (ms) between a stream's events that end within [start, end]; events are lines of load --events."""
    last, out = {}, []
    for line in events:
        at, stream = line.split()
        at = float(at)
        if stream in last and start <= at <= end:
            out.append(1000 * (at - last[stream]))
        last[stream] = at
    return out


def p99(values):
    return sorted(values)[int(0.99 * (len(values) - 1) + 0.5)] if values else None


def beside(engine, streams, long_ids, other_ids, pause=2.0):
    """A long prefill alone, and the same length beside running streams with /health asked all along."""
    alone, _ = first_token(engine, long_ids)
    path = os.path.join(engine.dir, "events")
    command = engine.load_command(len(streams), "--events", path)
    with open(path, "w", encoding="utf-8"):
        pass
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as load:
        load.stdin.write("\n".join(engine.body(ids, 4000) for ids in streams))
        load.stdin.close()
        wait_for_streams(path, len(streams))
        quiet = time.monotonic()
        time.sleep(pause)
        with Health(engine.port) as health:
            start = time.monotonic()
            together, _ = first_token(engine, other_ids)
            end = time.monotonic()
        load.kill()  # the streams are far from their end; the server sees their clients go
    with open(path, encoding="utf-8") as f:
        events = [line for line in f if line.endswith("\n")]
    own = p99(gaps(events, quiet, start) or gaps(events, 0, start) or [0])
    during = p99(gaps(events, start, end) or [1000 * (end - start)])  # none: the streams stood still all along
    return {"p99 alone": own, "p99 during": during, "slowdown": during / own if own else 0, "kept": alone / together,
            "health": max(health.times or [1000 * (end - start)]), "timer": max(health.late or [0])}


def wait_for_streams(path, n, limit=60):
    end = time.monotonic() + limit
    while time.monotonic() < end:
        with open(path, encoding="utf-8") as f:
            if len({line.split()[1] for line in f if line.endswith("\n")}) == n:
                return
        time.sleep(0.05)
    raise RuntimeError(f"{n} streams did not all begin within {limit} s")


# ---- the rows ----


class Bench:
    """One model's rows. Engines start when first needed; at most one llama-server with one setting runs at a time."""

    def __init__(self, model, peers, runs):
        self.model, self.peers, self.runs, self.rows = model, peers, runs, []
        self.prompts, self.limits, self.missing = Prompts(model), Limits(model), {}
        self.stack, self.started, self.choices = contextlib.ExitStack(), {}, Choices()

    def close(self):
        self.stack.close()

    def say(self, text):
        print(f"  {self.model.label}: {text}", file=sys.stderr, flush=True)

    def engine(self, key, make):
        """A running engine by key; None when it is missing."""
        if key in self.missing:
            return None
        if key not in self.started:
            if key[0] == "llama":
                for other in [k for k in self.started if k[0] == "llama"]:
                    self.started.pop(other).close()
            engine = make()
            self.say(f"starting {engine.label}")
            try:
                engine.start()
            except Missing as why:
                self.say(f"not reached: {why}")
                self.missing[key] = str(why)
                return None
            self.stack.callback(engine.close)
            self.started[key] = engine
        return self.started[key]

    def llama(self, sequences, context, trial, kind):
        """llama-server with that kind of attention that does better in trial(engine), which is tried at the first use of all."""
        name = f"llama-server {self.model.key} -np {sequences}, {kind}"
        flash = os.environ.get("FLASH") or self.choices.get(name)
        if not flash:
            rates = {}
            for flash in ("on", "off"):
                engine = self.engine(("llama", sequences, context, flash), lambda flash=flash: Llama(self.model, sequences, context, flash))
                if engine is None:
                    return None
                self.settle()
                trial(engine)  # the first pass of all faults its memory in
                rates[flash] = trial(engine)
            flash = max(rates, key=rates.get)
            self.choices.put(name, flash)
            self.say(f"{name}: -fa on {rates['on']:.4g}, off {rates['off']:.4g}")
        return self.engine(("llama", sequences, context, flash), lambda: Llama(self.model, sequences, context, flash))

    def engines(self, sequences, context, kind, trial):
        """{label: engine} of kvgate and the server peers that run, and the labels of those wanted but missing.

        llama-server runs with so many sequences of so much context, and with what makes trial(engine), a rate, higher; what that is
        for this kind of work is remembered.
        """
        out = {"kvgate": self.engine(("kvgate",), lambda: Kvgate(self.model))}
        if out["kvgate"] is None:
            sys.exit(f"bench-cpu: kvgate does not start: {self.missing[('kvgate',)]}")
        wanted = {}
        if "llama" in self.peers:
            wanted["llama-server"] = self.llama(sequences, context, trial, kind)
        if "vllm" in self.peers:
            wanted["vLLM-CPU"] = self.engine(("vllm",), lambda: Vllm(self.model))
        out.update({k: v for k, v in wanted.items() if v})
        return out, [k for k, v in wanted.items() if v is None]

    def settle(self, limit=10):
        """Waits until every engine is idle: vLLM's worker polls on for a second after an answer, which would slow down the next one's."""
        end = time.monotonic() + limit
        while True:
            before = {k: e.cpu_seconds() for k, e in self.started.items()}
            time.sleep(0.1)
            busy = [e.label for k, e in self.started.items() if e.cpu_seconds() - before[k] > 0.01]
            if not busy:
                return
            if time.monotonic() > end:
                self.say(f"note: {', '.join(busy)} will not idle")
                return

    def measure(self, what, contestants):
        def settled(work):
            self.settle()
            return work()

        start = time.monotonic()
        out = table.alternate({k: (lambda work=w: settled(work)) for k, w in contestants.items()}, self.runs,
                              lambda run, name: self.say(f"{what}, run {run + 1} of {self.runs}: {name}"), SLOW)
        self.say(f"{what}: {time.monotonic() - start:.0f} s")
        return out

    def add(self, name, unit, results, metric, missing, settings, high=True, limit=None, aims=None, own_aim=None):
        """Rows of one metric: one for each peer, one without peer when there is none or kvgate alone has an aim."""
        pick = lambda values: [v[metric] if isinstance(v, dict) else v for v in values]  # noqa: E731
        name, own = f"{self.model.label}: {name}", pick(results["kvgate"])
        peers = [p for p in results if p != "kvgate"]
        for peer in peers + missing:
            values = pick(results[peer]) if peer in results else None
            self.rows.append(table.row(name, unit, own, peer, values, high, limit, (aims or {}).get(peer), settings.get(peer)))
        if own_aim or not peers + missing:
            self.rows.append(table.row(name, unit, own, None, None, high, limit, own_aim))

    def flush(self):
        """Prints and keeps what was measured so far."""
        if self.rows:
            table.merge(FILE, self.rows)
            print(table.text(self.rows) + "\n", flush=True)
        self.rows = []

    def against_all(self, labels, ratio):
        return {label: at_least(ratio) for label in labels}

    def decode(self):
        limit, rates = self.limits.decode(), {}
        for n in (1, 8):
            engines, missing = self.engines(n, 512, "decode", lambda e: decode(e, [self.prompts.take(32) for _ in range(n)]))
            batch = [[self.prompts.take(32) for _ in range(n)] for _ in range(self.runs)]
            contestants = {k: self.once(lambda run, e=e: decode(e, batch[run])) for k, e in engines.items()}
            settings = {k: e.settings for k, e in engines.items()}
            if n == 1 and "bench" in self.peers:
                self.bench_contestant(contestants, missing, 0, NEW)
            results = self.measure(f"decode x{n}", contestants)
            rates[n] = results["kvgate"]
            aims = self.against_all(("llama-server", "llama-bench"), DECODE_AIMS[self.model.key]) if n == 1 else None
            own = (">= 0.85 of read bandwidth", lambda r: r["share"] >= 0.85) if n == 1 else None
            self.add(f"decode x{n}", "tokens/s", results, None, missing, settings, limit=limit if n == 1 else self.limits.company(n, 0, NEW),
                     aims=aims, own_aim=own)
            self.flush()
        aim = (">= 4x", lambda r: r["value"] >= 4) if self.model.key == "qwen05" else None
        self.rows.append(table.row(f"{self.model.label}: decode x8 / x1", "x", [b / a for a, b in zip(rates[1], rates[8])], aim=aim))

    def once(self, work):
        """work(run) with run counting up from 0 at each call."""
        calls = iter(range(self.runs))
        return lambda: work(next(calls))

    def bench_contestant(self, contestants, missing, n_prompt, n_new):
        if not os.path.exists(os.path.join(Llama.bin, "llama-bench")):
            missing.append("llama-bench")
            return
        contestants["llama-bench"] = lambda: llama_bench(self.model, n_prompt, n_new, self.choices)

    def prefill(self):
        for n in numbers("PROMPTS", "512,2048"):
            engines, missing = self.engines(1, 4608, "prompts", lambda e: 1 / first_token(e, self.prompts.take(n))[0])
            batch = [self.prompts.take(n) for _ in range(self.runs)]
            contestants = {k: self.once(lambda run, e=e: n / first_token(e, batch[run])[0]) for k, e in engines.items()}
            if "bench" in self.peers:
                self.bench_contestant(contestants, missing, n, 0)
            results = self.measure(f"prefill {n}", contestants)
            self.add(f"prefill {n}", "tokens/s", results, None, missing, {k: e.settings for k, e in engines.items()}, limit=self.limits.prefill(),
                     aims={"vLLM-CPU": at_least(1.2)} if n == 2048 else None)
            self.flush()

    def clients(self):
        for n in numbers("CLIENTS", "1,4,16,32"):
            engines, missing = self.engines(32, 512, "decode", lambda e: decode(e, [self.prompts.take(64) for _ in range(8)]))
            shared = [self.prompts.take(256) for _ in range(self.runs)]
            own = [[self.prompts.take(64) for _ in range(max(n, 4))] for _ in range(self.runs)]
            contestants = {k: self.once(lambda run, e=e: clients(e, n, shared[run], own[run])) for k, e in engines.items()}
            results = self.measure(f"{n} clients", contestants)
            settings = {k: e.settings for k, e in engines.items()}
            key = self.model.key
            aims = {"vLLM-CPU": at_least(CLIENT_AIMS[key])} if n == 32 and key in CLIENT_AIMS else None
            self.add(f"{n} clients", "tokens/s", results, "rate", missing, settings, limit=self.limits.company(n, 64, 64), aims=aims)
            for metric, label in (("ttft_p50", "TTFT p50"), ("ttft_p95", "TTFT p95"), ("gap_p50", "inter-token p50"), ("gap_p95", "inter-token p95")):
                self.add(f"{n} clients, {label}", "ms", results, metric, missing, settings, high=False)
            self.flush()

    def prefix(self):
        engines, missing = self.engines(2, 4096, "prompts", lambda e: 1 / first_token(e, self.prompts.take(2048))[0])
        sets = [(self.prompts.take(2048), self.prompts.take(16), self.prompts.take(16)) for _ in range(self.runs)]
        results = self.measure("2k prefix", {k: self.once(lambda run, e=e: prefix(e, *sets[run])) for k, e in engines.items()})
        settings = {k: e.settings for k, e in engines.items()}
        limit = 2 * statistics.median(r["step"] for r in results["kvgate"]) + 3
        self.add("TTFT behind 2,048 tokens, cold", "ms", results, "cold", missing, settings, high=False)
        self.add("TTFT behind 2,048 tokens, warm", "ms", results, "warm", missing, settings, high=False, limit=limit,
                 aims=self.against_all(("llama-server", "vLLM-CPU"), 2), own_aim=("<= 2 steps + 3 ms", lambda r: r["value"] <= limit))

    def beside(self):
        engines, missing = self.engines(5, self.model.context, "prompts", lambda e: 1 / first_token(e, self.prompts.take(2048))[0])
        n = min(LONG, self.model.context - 64)
        sets = [([self.prompts.take(32) for _ in range(4)], self.prompts.take(n), self.prompts.take(n)) for _ in range(self.runs)]
        results = self.measure(f"4 streams beside a prefill of {n}", {k: self.once(lambda run, e=e: beside(e, *sets[run])) for k, e in engines.items()})
        settings = {k: e.settings for k, e in engines.items()}
        name = f"4 streams beside a prefill of {n:,}"
        for metric, label, unit, high, aim in (
                ("p99 alone", "inter-token p99 alone", "ms", False, None),
                ("p99 during", "inter-token p99 during it", "ms", False, None),
                ("slowdown", "p99 during it / alone", "x", False, ("<= 2x", lambda r: r["value"] <= 2)),
                ("kept", "prefill's rate / alone", "x", True, (">= 0.5", lambda r: r["value"] >= 0.5)),
                ("health", "slowest /health", "ms", False, ("< 10 ms", lambda r: r["value"] < 10)),
                ("timer", "latest timer of the process that asks for it", "ms", False, None)):
            self.add(f"{name}: {label}", unit, results, metric, missing, settings, high=high, own_aim=aim)

    def start(self):
        """Ready after exec with the file in the page cache; memory after a prompt of 2,048 tokens."""
        with open(self.model.path, "rb") as f:
            while f.read(1 << 24):
                pass
        engines, missing = self.engines(1, 4608, "prompts", lambda e: 1)
        ids = self.prompts.take(2048)
        kvgate_kv = 1 << 30

        def fresh(engine, make):
            if isinstance(engine, Vllm):  # its start takes minutes: the one start of this session counts
                first_token(engine, ids)
                return {"ready": engine.ready, "resident": engine.resident() / 1e6}
            with make() as new:
                first_token(new, ids)
                return {"ready": new.ready, "resident": new.resident() / 1e6}

        makers = {"kvgate": lambda: Kvgate(self.model), "llama-server": lambda: Llama(self.model, 1, 4608), "vLLM-CPU": None}
        results = self.measure("start", {k: (lambda e=e, k=k: fresh(e, makers[k])) for k, e in engines.items()})
        settings = {k: e.settings for k, e in engines.items()}
        limit = (self.limits.total_bytes + kvgate_kv) / 1e6 + 100
        self.add("ready after start", "s", results, "ready", missing, settings, high=False, limit=1, own_aim=("< 1 s", lambda r: r["value"] < 1))
        self.add("resident after 2,048 tokens", "MB", results, "resident", missing, settings, high=False, limit=limit,
                 own_aim=("<= weights + KV + 100 MB", lambda r: r["value"] <= limit))


def run():
    start = time.monotonic()
    models, rows = table.listed("MODELS", MODELS), table.listed("ROWS", ROWS)
    peers, runs = table.listed("PEERS", ("llama", "bench", "vllm")), int(os.environ.get("RUNS", "3"))
    for key in models:
        bench = Bench(MODELS[key], peers, runs)
        bench.rows = bench.limits.rows(bench.model)
        bench.flush()
        try:
            for name in rows:
                getattr(bench, name)()
                bench.flush()
        finally:
            bench.close()
    print(f"bench-cpu: {time.monotonic() - start:.0f} s; {os.path.relpath(FILE, ROOT)}")


def main():
    match sys.argv[1:]:
        case []:
            run()
        case ["hold", key]:
            Vllm(MODELS[key]).hold()
        case ["release", key]:
            Vllm(MODELS[key]).release()
        case ["table"]:
            rows = table.merge(FILE, [])
            table.replace_between(RESULTS, "<!-- bench-cpu -->", "<!-- end -->", table.sections(rows, ORDER))
            print(f"bench-cpu: {len(rows)} rows of {os.path.relpath(FILE, ROOT)} are in {os.path.relpath(RESULTS, ROOT)}")
        case ["--help" | "-h"]:
            print(__doc__.strip())
        case given:
            sys.exit(f"bench_cpu.py: takes nothing, hold MODEL, release MODEL or table, not {' '.join(given)} (--help says more)")


if __name__ == "__main__":
    main()
