#!/usr/bin/env python3
"""make bench-quant: one model in BF16, W8A8 and INT4 on the CPU: what each form weighs, how fast it is, what it loses.

The base is the GGUF file's weights dequantized to BF16 (they were Q4_K_M: what they lost before stays lost); the other forms are made of
it by kvgate-quantize. Folders are kept in build/bench-quant/MODEL. Every run asks each form once, another one first; printed are medians.
Of the limit of a decode row, all bytes that a step reads at the read bandwidth measured in the same run, `share` is reached.
Rows go into build/bench-quant.json one form after the other, so that the whole can be run in pieces:

    FORMS=w8a8 WHAT=speed make bench-quant

Variables: MODEL (a GGUF file; Qwen2.5-Coder-0.5B), FORMS (of: w8a8 w8a8-head int4 gptq awq; the first three), WHAT (of: bytes speed kl
task; all), RUNS (3), STEPS (15: decode steps of a run), THREADS (2), KL_TOKENS (4096; 100000 for a verdict), ITEMS (100: of the arithmetic
task), TEXT (of KL and calibration: shakespeare). w8a8-head: lm_head in INT8 too (of a base whose output matrix is not tied). int4: rounded;
gptq and awq: calibrated.
"""
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys

import table

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
BUILD = os.path.join(ROOT, os.environ.get("B", "build"))
FILE = os.environ.get("BENCH_FILE") or os.path.join(ROOT, "build", "bench-quant.json")
MODEL = os.environ.get("MODEL") or os.path.join(ROOT, "build", "models", "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf")
TEXT = os.environ.get("TEXT") or os.path.join(ROOT, "build", "models", "shakespeare.txt")
THREADS = os.environ.get("THREADS", "2")
READ_MB = os.environ.get("READ_MB", "400")  # how much is read again and again to measure the bandwidth: about what a step reads
WHAT = ("bytes", "speed", "kl", "task")
# flags of kvgate-quantize, which base, and the aims: share of BF16's bytes of quantized linears
FORMS = {"w8a8": (["--format", "w8a8"], "bf16", 0.51), "w8a8-head": (["--format", "w8a8", "--lm-head"], "bf16-untied", 0.51),
         "int4": (["--format", "gptq-int4"], "bf16", 0.27), "gptq": (["--format", "gptq-int4", "--calibration", TEXT], "bf16", 0.27),
         "awq": (["--format", "awq-int4", "--calibration", TEXT], "bf16", 0.27)}
LABELS = {"bf16": "BF16", "bf16-untied": "BF16, output matrix apart", "w8a8": "W8A8", "w8a8-head": "W8A8 --lm-head", "int4": "INT4, rounded", "gptq": "INT4, GPTQ",
          "awq": "INT4, AWQ"}


# ---- folders ----


def untie(source, folder):
    """A copy of a folder with an output matrix of its own, equal to the embedding."""
    os.makedirs(folder, exist_ok=True)
    for name in os.listdir(source):
        if name not in ("model.safetensors", "config.json"):
            shutil.copy(os.path.join(source, name), folder)
    with open(os.path.join(source, "config.json"), encoding="utf-8") as f:
        config = json.load(f)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump({**config, "tie_word_embeddings": False}, f)
    with open(os.path.join(source, "model.safetensors"), "rb") as f, open(os.path.join(folder, "model.safetensors"), "wb") as out:
        header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
        start, embedding = f.tell(), header["model.embed_tokens.weight"]
        size = max(t["data_offsets"][1] for name, t in header.items() if name != "__metadata__")
        begin, end = embedding["data_offsets"]
        if "lm_head.weight" not in header:
            header["lm_head.weight"] = {**embedding, "data_offsets": [size, size + end - begin]}
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        out.write(struct.pack("<Q", len(head)) + head)
        shutil.copyfileobj(f, out, 1 << 24)
        f.seek(start + begin)
        out.write(f.read(end - begin))


def fresh(folder, make):
    """The folder, made where it is not there whole."""
    if not os.path.exists(folder):
        print(f"  making {os.path.relpath(folder, ROOT)}", file=sys.stderr, flush=True)
        part = folder + ".part"
        shutil.rmtree(part, ignore_errors=True)
        make(part)
        os.rename(part, folder)
    return folder


class Forms:
    """Folders of one GGUF model's forms."""

    def __init__(self, model):
        self.model = model
        self.label = os.path.basename(model).removesuffix(".gguf").removesuffix(".Q4_K_M")
        self.folder = os.path.join(os.environ.get("FOLDERS") or os.path.join(ROOT, "build", "bench-quant"), self.label)
        os.makedirs(self.folder, exist_ok=True)

    def base(self, kind):
        if kind == "bf16-untied":
            return fresh(os.path.join(self.folder, kind), lambda out: untie(self.base("bf16"), out))
        convert = [sys.executable, os.path.join(ROOT, "tests/tools/gguf_to_hf.py"), self.model]
        return fresh(os.path.join(self.folder, kind), lambda out: subprocess.run([*convert, out, "--tokenizer"], check=True, stdout=subprocess.DEVNULL))

    def path(self, form):
        if form not in FORMS:
            return self.base(form)
        flags, base, _ = FORMS[form]
        make = [os.path.join(BUILD, "kvgate-quantize"), self.base(base)]
        return fresh(os.path.join(self.folder, form), lambda out: subprocess.run([*make, out, *flags], check=True, stdout=subprocess.DEVNULL))


# ---- what is measured ----


def speed(path, steps):
    done = subprocess.run([os.path.join(BUILD, "tests/bench/bench_quant"), path, THREADS, str(steps)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def bandwidth(megabytes):
    done = subprocess.run([os.path.join(BUILD, "tests/bench/limits"), THREADS, megabytes], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["read"][megabytes] * 1e9


def divergence(path, base, tokens):
    """Mean KL in nats and the share of equal first choices over the windows of the text."""
    done = subprocess.run([os.path.join(BUILD, "kvgate-score"), "--model", path, "--base", base, "--text", TEXT, "--tokens", str(tokens), "--threads", THREADS],
                          capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()][1:]
    total = sum(line["tokens"] for line in lines)
    return sum(line["kl"] for line in lines) / total, sum(line["same_top"] for line in lines) / total, total


def task(path, base, out, items):
    """Shares of right answers of the arithmetic task: form, base."""
    done = subprocess.run([os.path.join(BUILD, "kvgate-eval"), "--model", path, "--base", base, "--task", "arithmetic", "--items", str(items), "--out", out,
                           "--threads", THREADS], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"kvgate-eval: {done.stderr.strip()[-300:]}")
    with open(os.path.join(out, "report.json"), encoding="utf-8") as f:
        return json.load(f)


class Bench:
    def __init__(self, forms, names, runs, steps):
        self.forms, self.names, self.runs, self.steps, self.rows = forms, names, runs, steps, []
        self.bases = list(dict.fromkeys(["bf16"] + [FORMS[n][1] for n in names]))

    def add(self, form, what, unit, values, **more):
        self.rows.append(table.row(f"{self.forms.label} {LABELS[form]}: {what}", unit, values, **more))

    def flush(self):
        if self.rows:
            table.merge(FILE, self.rows)
            print(table.text(self.rows) + "\n", flush=True)
        self.rows = []

    def measure(self, steps, runs):
        contestants = {form: (lambda path=self.forms.path(form): speed(path, steps)) for form in self.bases + self.names}
        rates = []
        contestants["bandwidth"] = lambda: rates.append(bandwidth(READ_MB))
        out = table.alternate(contestants, runs, lambda run, name: print(f"  run {run + 1} of {runs}: {name}", file=sys.stderr, flush=True))
        out.pop("bandwidth")
        return out, statistics.median(rates)

    def bytes_rows(self, results):
        for form in self.bases + self.names:
            own, base = results[form][0], results[FORMS[form][1] if form in FORMS else form][0]
            aim = FORMS[form][2] if form in FORMS else 1
            linears = lambda r, head=form.endswith("-head"): r["layers"] + (r["output"] if head else 0)  # noqa: E731
            share = linears(own) / linears(base)
            self.add(form, "quantized linears, of BF16", "%", [100 * share], aim=None if aim == 1 else (f"<= {100 * aim:g} %", lambda r, a=aim: r["value"] <= 100 * a))
            self.add(form, "whole model, of BF16", "%", [100 * own["weights"] / base["weights"]])
            self.add(form, "resident memory", "MB", [r["resident"] / 1e6 for r in results[form]], high=False)

    def speed_rows(self, results, rate):
        for form in self.bases + self.names:
            own, base = results[form], results["bf16"]
            limit = rate / (own[0]["layers"] + own[0]["output"])
            for key, what in (("decode1", "decode, batch 1"), ("decode16", "decode, batch 16"), ("prefill1", "prefill, one of 512"), ("prefill16", "prefill, 16 of 32")):
                one = key == "decode1"
                self.add(form, what, "t/s", [r[key] for r in own], peer=None if form == "bf16" else "BF16", peer_values=[r[key] for r in base] if form != "bf16" else None,
                         limit=limit if one else None, aim=(">= 0.9 of its bytes' bound", lambda r: r["share"] >= 0.9) if one else None)

    def run(self, what, tokens, items):
        if "bytes" in what or "speed" in what:
            fast = "speed" in what
            results, rate = self.measure(self.steps if fast else 1, self.runs if fast else 1)
            if "bytes" in what:
                self.bytes_rows(results)
            if fast:
                self.rows.append(table.row(f"{self.forms.label}: read bandwidth", "GB/s", [rate / 1e9]))
                self.speed_rows(results, rate)
            self.flush()
        for form in self.names if "kl" in what else []:
            kl, same, total = divergence(self.forms.path(form), self.forms.path(FORMS[form][1]), tokens)
            self.add(form, f"KL to BF16, {total} tokens", "nat", [kl], high=False)
            self.add(form, f"same first choice, {total} tokens", "%", [100 * same])
            self.flush()
        for form in self.names if "task" in what else []:
            report = task(self.forms.path(form), self.forms.path(FORMS[form][1]), os.path.join(self.forms.folder, f"eval-{form}"), items)
            self.add(form, f"arithmetic, {items} items: right", "%", [100 * report["runs"]["model"]["score"]], peer="BF16", peer_values=[100 * report["runs"]["base"]["score"]])
            print(f"  {LABELS[form]}: {report['comparison']['verdict']}", flush=True)
            self.flush()


def main():
    table.arguments(__doc__)
    number = lambda name, default: int(os.environ.get(name, default))  # noqa: E731
    names = table.listed("FORMS", FORMS, ("w8a8", "w8a8-head", "int4"))
    bench = Bench(Forms(MODEL), names, number("RUNS", "3"), number("STEPS", "15"))
    bench.run(table.listed("WHAT", WHAT, WHAT), number("KL_TOKENS", "4096"), number("ITEMS", "100"))


if __name__ == "__main__":
    main()
