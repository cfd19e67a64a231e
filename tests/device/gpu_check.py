#!/usr/bin/env python3
"""make gpu-check: everything there is to learn about the CUDA backend from one short stay on a machine with a GPU.

Steps run in the order of their worth, each with its own time limit, within BUDGET seconds (540); what does not fit is left out and
named. Tables and logs go to OUT (build/gpu-check): environment.txt, ceilings.csv, kernels.csv, decode.csv, goldens/, *.log, and
summary.txt, which ends with "N passed, N failed, N left out". EMULATED=1 runs the same script on the emulator with tiny shapes.
"""
import csv
import os
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("B", "build")
OUT = os.path.abspath(os.environ.get("OUT") or os.path.join(ROOT, BUILD, "gpu-check"))
BUDGET = float(os.environ.get("BUDGET", 540))
EMULATED = bool(os.environ.get("EMULATED"))
PROGRAMS = os.path.join(BUILD, "cusim/plain/tests" if EMULATED else "cuda/tests")
TESTS = ["cusim/backend/test_cuda_ops", "cusim/backend/test_cuda_sample", "cusim/backend/test_cuda_model"]
BENCH = os.path.join(PROGRAMS, "device/bench_device")


class Check:
    def __init__(self):
        self.began = time.monotonic()
        self.passed, self.failed, self.left_out = [], [], []
        self.lines = []

    def say(self, text):
        self.lines.append(text)
        print(text, flush=True)

    def left(self):
        return BUDGET - (time.monotonic() - self.began)

    def run(self, name, command, limit, **env):
        """True when the command ended well; its output goes to NAME.log."""
        limit = min(limit, self.left())
        if limit < 2:
            self.left_out.append(name)
            self.say(f"left out: {name} (no time)")
            return False
        log, began = os.path.join(OUT, name.replace(" ", "-") + ".log"), time.monotonic()
        with open(log, "w", encoding="utf-8") as f:
            try:
                code = subprocess.run(command, cwd=ROOT, stdout=f, stderr=subprocess.STDOUT, timeout=limit, env=dict(os.environ, **env)).returncode
            except subprocess.TimeoutExpired:
                code = f"stopped after {limit:.0f} s"
            except OSError as e:
                code = str(e)
        (self.failed if code else self.passed).append(name)
        self.say(f"{'FAIL' if code else 'ok  '} {name} {time.monotonic() - began:.1f} s" + (f" ({code}; see {log})" if code else ""))
        return not code

    def skip(self, name, why):
        self.left_out.append(name)
        self.say(f"left out: {name} ({why})")


def environment(check):
    commands = [["nvidia-smi"], ["nvidia-smi", "-q", "-d", "CLOCK,POWER,ECC"], ["nvcc", "--version"], ["uname", "-a"]]
    with open(os.path.join(OUT, "environment.txt"), "w", encoding="utf-8") as f:
        for command in commands:
            if shutil.which(command[0]):
                f.write(f"$ {' '.join(command)}\n{subprocess.run(command, capture_output=True, text=True, timeout=20).stdout}\n")
    check.run("starts", [os.path.join(PROGRAMS, TESTS[0]), "test_embedding*"], 30)


def rows_of(path):
    if not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as f:
        return list(csv.DictReader(f))


def bench(check, what, limit, *arguments):
    return check.run(what, [BENCH, what, os.path.join(OUT, what + ".csv"), *arguments], limit, **({"SMALL": "1"} if EMULATED else {}))


def golden_tests(check):
    """The tests, with the device's outputs kept. On any machine, for whether the emulator gives them again, but for roundings:

    make build/cusim/plain/tests/cusim/backend/test_cuda_ops
    KVGATE_GOLDENS_FROM=build/gpu-check/goldens/ops build/cusim/plain/tests/cusim/backend/test_cuda_ops
    """
    folder = os.path.join(OUT, "goldens")
    os.makedirs(folder, exist_ok=True)
    check.run("goldens", [os.path.join(PROGRAMS, TESTS[0]), "test_*"], 60, KVGATE_GOLDENS=os.path.join(folder, "ops"))


def unit_tests(check):
    for test in TESTS:
        for seed in (1,) if EMULATED and test.endswith("model") else (1, 2, 3):
            check.run(f"{os.path.basename(test)} {seed}", [os.path.join(PROGRAMS, test)], 240 if EMULATED else 40, TWIN_SEED=str(seed))


def sanitizer(check):
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if EMULATED or not os.access(tool, os.X_OK):
        check.skip("compute-sanitizer", "not here")
        return
    for kind in ("memcheck", "racecheck"):
        check.run(f"sanitizer {kind}", [tool, "--tool", kind, "--error-exitcode", "9", os.path.join(PROGRAMS, TESTS[0]), "test_products_do*"], 45)


def profiler(check):
    tool = shutil.which("ncu")
    if EMULATED or not tool:
        check.skip("ncu", "not here")
        return
    for kernel in ("gemv_quant_kernel", "attention_decode_kernel", "gemm_quant_kernel"):
        check.run(f"ncu {kernel}", [tool, "-k", f"regex:{kernel}", "-c", "3", "--set", "basic", "--csv", BENCH, "kernels", os.path.join(OUT, "ncu.csv")], 20)


def tables(check):
    ceilings = {row["what"]: float(row["per second"]) for row in rows_of(os.path.join(OUT, "ceilings.csv"))}
    for what, value in ceilings.items():
        check.say(f"ceiling {what:12}{value:12.4g} a second")
    check.say(f"\n{'kernel':20}{'shape':44}{'us':>10}{'GB/s':>9}{'TOPS':>8}{'ceiling':>10}{'share':>7}")
    for row in rows_of(os.path.join(OUT, "kernels.csv")):
        rate = float(row["bytes per second"] if row["ceiling"] == "copy" else row["operations per second"])
        share = 100 * rate / ceilings[row["ceiling"]] if row["ceiling"] in ceilings else float("nan")
        check.say(f"{row['kernel']:20}{row['shape']:44}{float(row['microseconds']):10.1f}{float(row['bytes per second']) / 1e9:9.0f}"
                  f"{float(row['operations per second']) / 1e12:8.1f}{row['ceiling']:>10}{share:6.0f}%")
    for row in rows_of(os.path.join(OUT, "decode.csv")):
        check.say(f"decode step, {row['sequences']:>3} sequences, graphs {row['graphs']:4}{row['milliseconds a step']:>10} ms")


def toy_model():
    path = os.path.join(OUT, "toy.gguf")
    subprocess.run([sys.executable, "tests/tools/toy_model.py", path, "random", "--type", "Q8_0", "--layers", "2", "--tied"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return path


def model_path():
    """MODEL, or the small model where there is one, or a made-up one."""
    small = os.path.join(ROOT, "build/models/SmolLM2-135M-Instruct-Q8_0.gguf")
    return os.environ.get("MODEL") or (small if os.path.exists(small) and not EMULATED else toy_model())


def main():
    os.makedirs(OUT, exist_ok=True)
    check = Check()
    environment(check)
    bench(check, "ceilings", 30)
    golden_tests(check)
    unit_tests(check)
    bench(check, "kernels", 240 if EMULATED else 150)
    bench(check, "decode", 60, model_path())
    sanitizer(check)
    profiler(check)
    tables(check)
    check.say(f"\n{time.monotonic() - check.began:.0f} s of {BUDGET:.0f}\n{len(check.passed)} passed, {len(check.failed)} failed, {len(check.left_out)} left out")
    with open(os.path.join(OUT, "summary.txt"), "w", encoding="utf-8") as f:
        f.write("\n".join(check.lines) + "\n")
    return 1 if check.failed else 0


if __name__ == "__main__":
    sys.exit(main())
