#!/usr/bin/env python3
"""make gpu-check: everything there is to learn about the CUDA backend from one short stay on a machine with a GPU.

Sections run in the order of their worth, each within a budget of its own and all within BUDGET seconds (540): what does not fit is
left out and named, first the profiler, then the sanitizer, then the largest products. A sanitizer or profiler that the machine
lacks or forbids is left out, too. Seven files go to OUT (build/gpu-check), anew after each section: environment.txt, ceilings.csv,
kernels.csv, decode.csv, goldens.tar.gz, logs.tar.gz, and summary.txt, which ends with what each section took and "N passed, N failed,
N left out".

Where only the binaries are brought along (build/cuda/tests, built by `make gpu-check-build`, with the libraries that they need), run
this file itself. If they do not start there and nvcc is at hand, they are built again for that device alone.

EMULATED=1 runs the same script on the emulator with tiny shapes; tools that are not on PATH are left out there.
"""
import csv
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import traceback

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("B", "build")
RESULTS = os.path.abspath(os.environ.get("OUT") or os.path.join(ROOT, BUILD, "gpu-check"))
OUT = RESULTS + "-work"  # where sections write, models too
BUDGET = float(os.environ.get("BUDGET", 540))
EMULATED = bool(os.environ.get("EMULATED"))
PROGRAMS = os.path.join(BUILD, "cusim/plain/tests" if EMULATED else "cuda/tests")
LANGUAGE, OPS = "cusim/test_language", "cusim/backend/test_cuda_ops"
# Under emulation all of them run in `make test-cuda`: here a part of each, to see that the script runs them.
TESTS = {LANGUAGE: "*", OPS: "test_head*", "cusim/backend/test_cuda_grouped": "test_orders*", "cusim/backend/test_cuda_sample": "test_greedy*",
         "cusim/backend/test_cuda_model": "none"}
BENCH = os.path.join(PROGRAMS, "device/bench_device")
PROFILED = {"gemv_quant_kernel": "Q4_K 14336x4096 n=1", "attention_decode_kernel": "bf16 32/8 heads of 128 n=16", "gemm_quant_kernel": "Q4_K 14336x4096 n=64"}


def program(name):
    return os.path.join(PROGRAMS, name)


class Check:
    def __init__(self):
        self.began = time.monotonic()
        self.until = self.began + BUDGET
        self.passed, self.failed, self.left_out = [], [], []
        self.lines, self.sections = [], []
        self.hopeless = False  # no kernel runs: no section after this one can say anything

    def say(self, text):
        self.lines.append(text)
        print(text, flush=True)

    def left(self):
        """Seconds of the section."""
        return self.until - time.monotonic()

    def section(self, name, function, budget):
        began = time.monotonic()
        self.until = min(began + budget, self.began + BUDGET)
        try:
            function(self)
        except Exception as e:  # the other sections and the summary must not be lost
            self.failed.append(name)
            self.say(f"FAIL {name}: {traceback.format_exc() if EMULATED else repr(e)}")
        self.sections.append((name, budget, time.monotonic() - began))
        self.deliver()

    def deliver(self):
        """What there is so far, as few files: should this be stopped, it is not lost."""
        with open(os.path.join(OUT, "summary.txt"), "w", encoding="utf-8") as f:
            f.write("\n".join(self.lines) + "\n")
        names = sorted(os.listdir(OUT))
        for name in names:
            if name.endswith((".txt", ".csv")):
                shutil.copy(os.path.join(OUT, name), RESULTS)
        for pack, members in (("logs", [n for n in names if n.endswith(".log")]), ("goldens", [n for n in names if n == "goldens"])):
            with tarfile.open(os.path.join(RESULTS, pack + ".tar.gz"), "w:gz") as tar:
                for member in members:
                    tar.add(os.path.join(OUT, member), member)

    def run(self, name, command, limit, failures=None, **env):
        """True when the command ended well; its output goes to NAME.log. failures: the codes that mean one; others: it could not run."""
        limit = min(limit * (4 if EMULATED else 1), self.left())
        if limit < 2:
            return self.skip(name, "no time")
        log, began = os.path.join(OUT, name.replace(" ", "-") + ".log"), time.monotonic()
        with open(log, "w", encoding="utf-8") as f:
            try:
                code = subprocess.run(command, cwd=ROOT, stdout=f, stderr=subprocess.STDOUT, timeout=limit, env=dict(os.environ, **env)).returncode
            except subprocess.TimeoutExpired:
                code = f"stopped after {limit:.0f} s"
            except OSError as e:
                code = str(e)
        if failures and code and code not in failures:
            with open(log, encoding="utf-8", errors="replace") as f:
                said = [line.strip() for line in f if line.strip()]
            return self.skip(name, f"ended with {code}: " + (next((s for s in said if "rror" in s), said[-1]) if said else "no output"))
        (self.failed if code else self.passed).append(name)
        self.say(f"{'FAIL' if code else 'ok  '} {name} {time.monotonic() - began:.1f} s" + (f" ({code}; see {os.path.basename(log)})" if code else ""))
        return not code

    def skip(self, name, why):
        self.left_out.append(name)
        self.say(f"left out: {name} ({why})")
        return False


STARTS = [program(LANGUAGE), "every_block*"]  # one plain kernel


def starts():
    """Whether the binaries find a device that they can run on."""
    try:
        return subprocess.run(STARTS, cwd=ROOT, capture_output=True, timeout=30).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def architectures():
    """What CUDA_ARCH is to the Makefile, for the devices here: nothing where nvidia-smi does not know them."""
    done = subprocess.run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], capture_output=True, text=True, timeout=20)
    versions = sorted({(int(major), int(minor)) for major, minor in re.findall(r"^(\d+)\.(\d+)$", done.stdout, re.MULTILINE)})
    names = " ".join(f"{major}{minor}{'a' if major >= 9 else ''}" for major, minor in versions)
    return [f"CUDA_ARCH={names}"] if names else []


def environment(check):
    commands = [["nvidia-smi"], ["nvidia-smi", "-q", "-d", "CLOCK,POWER,ECC"], ["nvcc", "--version"], ["uname", "-a"]]
    with open(os.path.join(OUT, "environment.txt"), "w", encoding="utf-8") as f:
        for command in commands:
            if shutil.which(command[0]):
                f.write(f"$ {' '.join(command)}\n{subprocess.run(command, capture_output=True, text=True, timeout=20).stdout}\n")
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not starts() and not EMULATED and shutil.which("nvidia-smi") and os.access(nvcc, os.X_OK):
        check.until = check.began + BUDGET  # without it nothing can be learnt
        shutil.rmtree(os.path.join(ROOT, BUILD, "cuda"), ignore_errors=True)  # make would find it up to date, for other devices
        check.run("build for this device", ["make", f"-j{os.cpu_count()}", "gpu-check-build", *architectures(), "NO_INSTALL=1", f"B={BUILD}"], 240)
    if not check.run("starts", STARTS, 30):
        check.hopeless = True


def rows_of(path):
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as f:
        return list(csv.DictReader(f))


def bench(check, what, *arguments):
    """The program itself leaves out what there is no time for; it stops some seconds before it would be stopped."""
    if check.left() < 5:
        check.skip(what, "no time")
        return
    env = {"BENCH_SECONDS": f"{check.left() * 0.85 - 2:.0f}", **({"SMALL": "1"} if EMULATED else {})}
    check.run(what, [BENCH, what, os.path.join(OUT, what + ".csv"), *arguments], check.left(), **env)
    with open(os.path.join(OUT, what + ".log"), encoding="utf-8") as f:
        for line in f:
            if line.startswith("left out: ") and not line.startswith("left out: 0 "):
                check.skip(f"{what}, {line.split()[2]} rows", "no time")


def ceilings(check):
    bench(check, "ceilings")


def goldens(check):
    """What the device gives, kept. On any machine, for whether the emulator gives the backend's values again, but for roundings:

    make build/cusim/plain/tests/cusim/backend/test_cuda_ops
    tar xzf build/gpu-check/goldens.tar.gz
    KVGATE_GOLDENS_FROM=goldens/test_cuda_ops build/cusim/plain/tests/cusim/backend/test_cuda_ops
    """
    folder = os.path.join(OUT, "goldens")
    os.makedirs(folder, exist_ok=True)
    for test in TESTS:
        name = os.path.basename(test)
        check.run(f"goldens of {name}", [program(test), TESTS[test] if EMULATED else "*"], 30, KVGATE_GOLDENS=os.path.join(folder, name))


def unit_tests(check):
    """Memory that a test allocates is poisoned first, see twin.h."""
    for test in TESTS:
        for seed in (1,) if EMULATED else (1, 2, 3):
            check.run(f"{os.path.basename(test)} {seed}", [program(test), TESTS[test] if EMULATED else "*"], 30, TWIN_SEED=str(seed))


def kernels(check):
    bench(check, "kernels")


def decode(check):
    bench(check, "decode", *model_paths())


def sanitizer(check):
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    for kind in ("memcheck", "racecheck", "initcheck"):
        if not os.access(tool, os.X_OK):
            check.skip(f"sanitizer {kind}", f"no {tool}")
            continue
        check.run(f"sanitizer {kind}", [tool, "--tool", kind, "--error-exitcode", "9", program(OPS), "test_head*" if EMULATED else "test_products_do*"], 30,
                  failures=[9])


def profiler(check):
    tool = shutil.which("ncu")
    for kernel, only in PROFILED.items():
        if not tool:
            check.skip(f"ncu {kernel}", "not on PATH")
            continue
        command = [tool, "-k", f"regex:{kernel}", "-c", "3", "--kill", "yes", "--set", "basic", "--csv"]
        check.run(f"ncu {kernel}", [*command, BENCH, "kernels", os.path.join(OUT, "ncu.rows")], 20, failures=["none"], BENCH_ONLY="none" if EMULATED else only)


def tables(check):
    limits = {row["what"]: float(row["per second"]) for row in rows_of(os.path.join(OUT, "ceilings.csv"))}
    for what, value in limits.items():
        check.say(f"ceiling {what:12}{value:12.4g} a second")
    check.say(f"\n{'kernel':20}{'shape':44}{'us':>10}{'GB/s':>9}{'TOPS':>8}{'ceiling':>10}{'share':>7}")
    for row in rows_of(os.path.join(OUT, "kernels.csv")):
        rate = float(row["bytes per second"] if row["ceiling"] == "copy" else row["operations per second"])
        share = 100 * rate / limits[row["ceiling"]] if row["ceiling"] in limits else float("nan")
        check.say(f"{row['kernel']:20}{row['shape']:44}{float(row['microseconds']):10.1f}{float(row['bytes per second']) / 1e9:9.0f}"
                  f"{float(row['operations per second']) / 1e12:8.1f}{row['ceiling']:>10}{share:6.0f}%")
    for row in rows_of(os.path.join(OUT, "decode.csv")):
        check.say(f"decode step of {row['model']}, {row['sequences']:>3} sequences, graphs {row['graphs']:4}{row['milliseconds a step']:>10} ms")


def shaped_model(name, kind, **shape):
    """A model of a known one's shape: each matrix is one piece of random weights over and over, which costs a step the same."""
    sys.path.insert(0, os.path.join(ROOT, "tests/tools"))
    import random

    import toy_model
    once, path = toy_model.random_bytes, os.path.join(OUT, name + ".gguf")

    def repeated(type_name, n, amplitude, rng):
        piece = next((p for p in (16384, 9216) if n % p == 0), n)
        return once(type_name, piece, amplitude, rng) * (n // piece)
    toy_model.random_bytes = repeated
    try:
        toy_model.random_model(path, shape=toy_model.Shape(tied=True, context=4096, **shape), types=kind, seed=random.randrange(1 << 30))
    finally:
        toy_model.random_bytes = once
    return path


def model_paths():
    """MODEL, or models of the shapes of SmolLM2 135M and of four layers of Llama 3 8B."""
    if os.environ.get("MODEL"):
        return [os.environ["MODEL"]]
    if EMULATED:
        return [shaped_model("toy", "Q8_0", layers=1, hidden=64, heads=2, kv_heads=1, head_dim=32, ffn=64)]
    return [shaped_model("smollm2-135m", "Q8_0", layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536, rows=49152),
            shaped_model("llama3-8b-4-layers", "Q4_K", layers=4, hidden=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, rows=128256)]


# In the order of their worth; seconds, 510 in all.
SECTIONS = [("environment", environment, 20), ("ceilings", ceilings, 30), ("goldens", goldens, 40), ("tests", unit_tests, 60), ("kernels", kernels, 120),
            ("decode", decode, 60), ("sanitizer", sanitizer, 90), ("profiler", profiler, 60), ("tables", tables, 30)]


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    for folder in (RESULTS, OUT):
        os.makedirs(folder, exist_ok=True)
    os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, [os.environ.get("LD_LIBRARY_PATH"), os.path.join(ROOT, PROGRAMS, "lib")]))
    check = Check()
    for name, function, budget in SECTIONS:
        if check.hopeless:
            check.skip(name, "no kernel runs here")
            continue
        check.section(name, function, budget * (4 if EMULATED else 1))
    check.say(f"\n{'section':14}{'budget':>8}{'took':>8} s")
    for name, budget, seconds in check.sections:
        check.say(f"{name:14}{budget:8.0f}{seconds:8.1f}")
    check.say(f"{'all':14}{BUDGET:8.0f}{time.monotonic() - check.began:8.1f}\n"
              f"{len(check.passed)} passed, {len(check.failed)} failed, {len(check.left_out)} left out")
    check.deliver()
    shutil.rmtree(OUT)
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
