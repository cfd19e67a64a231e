#!/usr/bin/env python3
"""make bench-quant: one model in BF16, W8A8 and INT4 on the CPU: what each form weighs, how fast it is, what it loses.

The base is the GGUF file's weights dequantized to BF16 (they were Q4_K_M: what they lost before stays lost); the other forms are made of
it by kvgate-quantize. Folders are kept in build/bench-quant/MODEL. Every run asks each form once, another one first; printed are medians.
Of the limit of a decode row, all bytes that a step reads at the read bandwidth measured in the same run, `share` is reached.
Rows go into build/bench-quant.json one form after the other, so that the whole can be run in pieces:

    FORMS=w8a8 WHAT=speed make bench-quant

Variables: MODEL (a GGUF file; Qwen2.5-Coder-0.5B), FORMS (of: w8a8 smooth w8a8-head int4 gptq awq int4-head gptq-head; w8a8 smooth int4 gptq awq gptq-head), WHAT (of:
bytes speed kl task; all), RUNS (3), STEPS (15: decode steps of a run), THREADS (2), KL_TOKENS (4096; 100000 for a verdict), TEXT (of KL: judged_text below),
CALIBRATION_TOKENS (8192), TASKS (of kvgate-eval, or files; arithmetic humaneval), ITEMS (100, of each task). *-head: lm_head in INT8 (of a base whose
output matrix is not tied). int4: rounded; smooth, gptq and awq: calibrated, by other text than KL is taken over. At the end the table of all that is in the file.
"""
import glob
import itertools
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import sysconfig

import table

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "gpu-worker", "tools", "eval"))
import stats  # noqa: E402

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
BUILD = os.path.join(ROOT, os.environ.get("B", "build"))
FILE = os.environ.get("BENCH_FILE") or os.path.join(ROOT, "build", "bench-quant.json")
MODEL = os.environ.get("MODEL") or os.path.join(ROOT, "build", "models", "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf")
SHAKESPEARE = os.path.join(ROOT, "build", "models", "shakespeare.txt")
THREADS = os.environ.get("THREADS", "2")
CALIBRATION_TOKENS = os.environ.get("CALIBRATION_TOKENS", "8192")
READ_MB = os.environ.get("READ_MB", "400")  # how much is read again and again to measure the bandwidth: about what a step reads
WHAT = ("bytes", "speed", "kl", "task")
CALIBRATED = "CALIBRATED"  # becomes --calibration and its text
# flags of kvgate-quantize, which base, and the aims: share of BF16's bytes of quantized linears
FORMS = {"w8a8": (["--format", "w8a8"], "bf16", 0.51), "smooth": (["--format", "w8a8", CALIBRATED], "bf16", 0.51), "w8a8-head": (["--format", "w8a8", "--lm-head"], "bf16-untied", 0.51),
         "int4": (["--format", "gptq-int4"], "bf16", 0.27), "gptq": (["--format", "gptq-int4", CALIBRATED], "bf16", 0.27),
         "awq": (["--format", "awq-int4", CALIBRATED], "bf16", 0.27),
         "int4-head": (["--format", "gptq-int4", "--lm-head"], "bf16-untied", 0.27),
         "gptq-head": (["--format", "gptq-int4", "--lm-head", CALIBRATED], "bf16-untied", 0.27)}
LABELS = {"bf16": "BF16", "bf16-untied": "BF16, output matrix apart", "w8a8": "W8A8", "smooth": "W8A8, SmoothQuant", "w8a8-head": "W8A8 --lm-head", "int4": "INT4, rounded", "gptq": "INT4, GPTQ",
          "awq": "INT4, AWQ", "int4-head": "INT4, rounded --lm-head", "gptq-head": "INT4, GPTQ --lm-head"}


# ---- texts ----


def pieces(paths, size=3000):
    """The files' texts, one after the other, in pieces."""
    for path in paths:
        with open(path, encoding="utf-8", errors="ignore") as f:
            text = f.read()
        yield from (text[i:i + size] for i in range(0, len(text), size))


def prose(first, end):
    with open(SHAKESPEARE, encoding="utf-8") as f:
        text = f.read()
    yield from (text[i:i + 3000] for i in range(int(len(text) * first), int(len(text) * end), 3000))


def judged_text(path):
    """What KL is taken over: Python's standard library and the second half of Shakespeare, taking turns."""
    code = pieces(sorted(glob.glob(os.path.join(sysconfig.get_path("stdlib"), "*.py"))))
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(a + b for a, b in itertools.islice(zip(code, prose(0.5, 1)), 150))


def calibration_text(path):
    """What weights are rounded by: this project's C and the first half of Shakespeare, taking turns."""
    code = pieces(sorted(glob.glob(os.path.join(ROOT, "libprompt", "*.c"))))
    with open(path, "w", encoding="utf-8") as f:
        for a, b in itertools.islice(zip(code, prose(0, 0.5)), 150):
            f.write(json.dumps({"text": a}) + "\n" + json.dumps({"text": b}) + "\n")


# ---- folders ----


def has_output(folder):
    with open(os.path.join(folder, "model.safetensors"), "rb") as f:
        return "lm_head.weight" in json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))


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
        header["lm_head.weight"] = {**embedding, "data_offsets": [size, size + end - begin]}
        head = json.dumps(header).encode()
        head += b" " * (-len(head) % 8)
        out.write(struct.pack("<Q", len(head)) + head)
        shutil.copyfileobj(f, out, 1 << 24)
        f.seek(start + begin)
        out.write(f.read(end - begin))


def fresh(folder, make):
    """The folder or file, made where it is not there whole."""
    if not os.path.exists(folder):
        print(f"  making {os.path.relpath(folder, ROOT)}", file=sys.stderr, flush=True)
        part = folder + ".part" + os.path.splitext(folder)[1]
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

    def calibration(self):
        return fresh(os.path.join(self.folder, "calibration.jsonl"), calibration_text)

    def text(self):
        return os.environ.get("TEXT") or fresh(os.path.join(self.folder, "judged.txt"), judged_text)

    def base_of(self, form):
        """"bf16", or "bf16-untied" where the form needs an output matrix that bf16 has not."""
        kind = FORMS[form][1] if form in FORMS else form
        return "bf16" if kind != "bf16" and has_output(self.base("bf16")) else kind

    def path(self, form):
        if form not in FORMS:
            return self.base(form)
        flags, base = FORMS[form][0], self.base_of(form)
        flags = [f for flag in flags for f in (["--calibration", self.calibration(), "--tokens", CALIBRATION_TOKENS] if flag == CALIBRATED else [flag])]
        make = [os.path.join(BUILD, "kvgate-quantize"), self.base(base)]
        return fresh(os.path.join(self.folder, form), lambda out: subprocess.run([*make, out, *flags], check=True, stdout=subprocess.DEVNULL))


# ---- what is measured ----


def speed(path, steps):
    done = subprocess.run([os.path.join(BUILD, "tests/bench/bench_quant"), path, THREADS, str(steps)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def bandwidth(megabytes):
    done = subprocess.run([os.path.join(BUILD, "tests/bench/limits"), THREADS, megabytes], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["read"][megabytes] * 1e9


def identity(paths):
    """What tells folders from others under the same names."""
    return [[os.path.abspath(path), max(int(os.stat(os.path.join(path, name)).st_mtime) for name in os.listdir(path))] for path in paths]


def windows_of(command, of, n_models, kept):
    """The lines of kvgate-score, n_models a window, kept in a file so that an interrupted run goes on where it ended."""
    lines = []
    if os.path.exists(kept):
        with open(kept, encoding="utf-8") as f:
            whole = [line for line in f if line.endswith("\n")]
        if whole and json.loads(whole[0]) == of:
            lines = whole[1:1 + (len(whole) - 1) // n_models * n_models]
    with open(kept, "w", encoding="utf-8") as f:
        f.writelines([json.dumps(of) + "\n", *lines])
        f.flush()
        child = subprocess.Popen([*command, "--from", str(len(lines) // n_models)], stdout=subprocess.PIPE, text=True)
        windows = json.loads(child.stdout.readline() or "{}").get("windows", 0)
        for line in child.stdout:
            f.write(line)
            f.flush()
            lines.append(line)
            if len(lines) % n_models == 0:
                print(f"\r  KL: window {len(lines) // n_models} of {windows}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
    if child.wait() != 0:
        raise RuntimeError(f"kvgate-score ended with {child.returncode}")
    return [json.loads(line) for line in lines[:windows * n_models]]


def divergences(paths, base, text, tokens, kept):
    """For each folder what kvgate-eval says of its windows: KL with its interval, the share of equal first choices. The base runs once for all."""
    models = [word for path in paths for word in ("--model", path)]
    command = [os.path.join(BUILD, "kvgate-score"), *models, "--base", base, "--text", text, "--tokens", str(tokens), "--threads", THREADS]
    lines = windows_of(command, {"models": identity([*paths, base]), "text": os.path.abspath(text)}, len(paths), kept)
    return [stats.compare_windows([line for line in lines if line.get("model", 0) == i]) for i in range(len(paths))]


def task(name, path, base, out, items):
    """The report of kvgate-eval on a task: arithmetic, humaneval or a file."""
    done = subprocess.run([sys.executable, os.path.join(BUILD, "kvgate-eval"), "--model", path, "--base", base, "--task", name, "--items", str(items), "--out", out,
                           "--threads", THREADS], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"kvgate-eval: {done.stderr.strip()[-300:]}")
    with open(os.path.join(out, "report.json"), encoding="utf-8") as f:
        return json.load(f)


def task_label(name):
    return os.path.basename(name).removesuffix(".jsonl")


def loss_text(row):
    return f"{row['loss']:+.1f} [{row['loss_low']:+.1f}, {row['loss_high']:+.1f}]: {row['verdict']}"


def summary(rows, label):
    """One line for each form, of all rows of this model that were ever measured into the file."""
    found = {r["row"]: r for r in rows if r["row"].startswith(label + " ")}
    lines = [["", "linears", "whole", "decode x1 (of its bytes' bound)", "x16", "prompt of 512", "16 of 32", "KL, nat [95 %]", "same first", "task: % lost [95 %]"]]
    lines.append(["---"] * len(lines[0]))
    for form in LABELS.values():
        of = lambda what, form=form: found.get(f"{label} {form}: {what}")  # noqa: E731
        value = lambda what, unit="", of=of: "" if of(what) is None else table.number(of(what)["value"]) + unit  # noqa: E731
        if not any(name.startswith(f"{label} {form}: ") for name in found):
            continue
        starting = lambda what, form=form: [r for name, r in found.items() if name.startswith(f"{label} {form}: {what}")]  # noqa: E731
        decode, kl = of("decode, batch 1"), starting("KL to BF16")
        lines.append([form, value("quantized linears, of BF16", " %"), value("whole model, of BF16", " %"),
                      "" if decode is None else f"{table.number(decode['value'])} ({decode['share']:.2f})", value("decode, batch 16"),
                      value("prefill, one of 512"), value("prefill, 16 of 32"),
                      "; ".join(f"{r['value']:.4f} [{r['kl_low']:.4f}, {r['kl_high']:.4f}]" for r in kl),
                      "; ".join(f"{r['value']:.1f} %" for r in starting("same first choice")),
                      "; ".join(f"{r['task']}, {r['items']}: {loss_text(r)}" for r in found.values() if r["row"].startswith(f"{label} {form}: ") and "loss" in r)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


class Bench:
    def __init__(self, forms, names, runs, steps, tasks):
        self.forms, self.names, self.runs, self.steps, self.tasks, self.rows = forms, names, runs, steps, tasks, []
        self.bases = list(dict.fromkeys(["bf16"] + [forms.base_of(n) for n in names]))

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
            own, base = results[form][0], results[self.forms.base_of(form)][0]
            aim = FORMS[form][2] if form in FORMS else 1
            linears = lambda r, head=form == "w8a8-head": r["layers"] + (r["output"] if head else 0)  # noqa: E731
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
        if "kl" in what:
            self.kl_rows(tokens)
        for name in self.tasks if "task" in what else []:
            for form in self.names:
                self.task_row(name, form, items)
        print(summary(table.merge(FILE, []), self.forms.label), flush=True)

    def kl_rows(self, tokens):
        """The bases differ in where they keep the output matrix, not in what it is."""
        found = divergences([self.forms.path(n) for n in self.names], self.forms.path("bf16"), self.forms.text(), tokens,
                            os.path.join(self.forms.folder, f"windows-{'-'.join(self.names)}.jsonl"))
        for form, d in zip(self.names, found):
            self.add(form, f"KL to BF16, {d['tokens']} tokens", "nat", [d["kl"]], high=False)
            self.rows[-1].update(kl_low=d["kl_low"], kl_high=d["kl_high"], perplexity=d["perplexity"], base_perplexity=d["base_perplexity"])
            self.add(form, f"same first choice, {d['tokens']} tokens", "%", [100 * d["same_top"]])
        self.flush()

    def task_row(self, name, form, items):
        """The base answers once for all forms: whichever comes first leaves its answers for the others."""
        label = task_label(name)
        out, answers = os.path.join(self.forms.folder, f"eval-{label}-{items}-{form}"), f"eval-{label}-{items}-base.jsonl"
        os.makedirs(out, exist_ok=True)
        if not os.path.islink(os.path.join(out, "base.jsonl")):
            os.symlink(os.path.join("..", answers), os.path.join(out, "base.jsonl"))
        report = task(name, self.forms.path(form), self.forms.path("bf16"), out, items)
        found = report["comparison"]
        self.add(form, f"{label}, {found['items']} items: right", "%", [100 * found["model"]], peer="BF16", peer_values=[100 * found["base"]])
        self.rows[-1].update(task=label, items=found["items"], loss=100 * found["loss"], loss_low=100 * found["low"], loss_high=100 * found["high"],
                             verdict=found["verdict"])
        print(f"  {LABELS[form]}, {label}: {loss_text(self.rows[-1])}", flush=True)
        self.flush()


def main():
    table.arguments(__doc__)
    number = lambda name, default: int(os.environ.get(name, default))  # noqa: E731
    names = table.listed("FORMS", FORMS, ("w8a8", "smooth", "int4", "gptq", "awq", "gptq-head"))
    bench = Bench(Forms(MODEL), names, number("RUNS", "3"), number("STEPS", "15"), os.environ.get("TASKS", "arithmetic humaneval").split())
    bench.run(table.listed("WHAT", WHAT, WHAT), number("KL_TOKENS", "4096"), number("ITEMS", "100"))


if __name__ == "__main__":
    main()
