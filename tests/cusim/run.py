#!/usr/bin/env python3
"""make test-cuda: the CUDA backend and its emulator on a machine without a GPU.

Programs run in several builds and orders of threads, planted mistakes must be found, device code must be covered, and what nvcc
made of it must keep to the gate of sass.py. Prints a table for each; the last line is "N passed, N failed".
"""
import concurrent.futures
import csv
import glob
import os
import subprocess
import sys
import tarfile
import tempfile
import time

import coverage_lines
import mutants
import sass

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.environ.get("B", "build")
ORDERS = ["fwd", "rev", "rand1"]
BUILDS = [("plain", order) for order in ORDERS] + [("check", "fwd"), ("check", "rand2"), ("asan", "rev")]
# The whole model takes half a minute in the plain build and ten times as long in the CHECK build: a part of it in the slow builds, by
# the names of tests, and all of it in all builds and orders with FULL=1 (make test-long).
SLOW = {"backend/test_cuda_group": [("plain", "rev"), ("check", "fwd", "*refused*"), ("asan", "rev", "*refused*")],
        "backend/test_cuda_engine": [("plain", "rev"), ("check", "fwd", "*penalties*"), ("asan", "rev", "*penalties*")],
        "backend/test_cuda_model": [("plain", "rev"), ("check", "fwd", "test_logits_of_q4_k*"), ("asan", "rev", "test_logits_of_q8_0*")]}
FULL = bool(os.environ.get("FULL"))
PROFILED = [("backend/test_cuda_ops", "check", "fwd"), ("backend/test_cuda_grouped", "check", "fwd")]
LIMIT = 480  # seconds for one program; the slowest takes a fifth of it on an idle machine


class Results:
    def __init__(self):
        self.passed = self.failed = 0

    def add(self, name, good, detail="", output=""):
        self.passed += good
        self.failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {name} {detail}".rstrip(), flush=True)
        if not good and output:
            print("    " + "\n    ".join(output.strip().splitlines()[-25:]), flush=True)


def run(command, limit=LIMIT, **env):
    """(exit code, output, seconds); code None: the time limit."""
    began = time.monotonic()
    env = dict(os.environ, ASAN_OPTIONS="detect_leaks=0:detect_stack_use_after_return=0", **env)
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, timeout=limit, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return done.returncode, done.stdout.decode(errors="replace"), time.monotonic() - began
    except subprocess.TimeoutExpired as e:
        return None, (e.stdout or b"").decode(errors="replace") + f"\nstopped after {limit} s", time.monotonic() - began


def program(flavour, name):
    return os.path.join(BUILD, "cusim", flavour, "tests/cusim", name)


def test_programs():
    sources = sorted(glob.glob(os.path.join(ROOT, "tests/cusim/test_*.cu")) + glob.glob(os.path.join(ROOT, "tests/cusim/backend/test_*.c")))
    return [os.path.splitext(os.path.relpath(s, os.path.join(ROOT, "tests/cusim")))[0] for s in sources]


def run_programs(results, pool, profiles):
    """Those of PROFILED write which memory accesses their kernels do, to the files `profiles`."""
    print("\nprograms, in builds and orders of threads")
    builds = {name: BUILDS if FULL else SLOW.get(name, BUILDS) for name in test_programs()}
    todo = [(name, *build) for name in builds for build in builds[name]]
    env = {build: {"CUSIM_PROF": path} for build, path in zip(PROFILED, profiles)}
    env.update({("test_runtime", "check", order): {"CUSIM_PROF": os.devnull} for order in ("fwd", "rand2")})  # it tests the profiler too

    def run_build(build):
        name, flavour, order, *tests = build
        return run([program(flavour, name), *tests], CUSIM_ORDER=order, **env.get(build, {}))
    done = pool.map(run_build, todo)
    for build, (code, output, seconds) in zip(todo, done):
        results.add(" ".join(build), code == 0, f"{seconds:.1f} s", output)


def planted_found(flavour, name, orders):
    """Was the mistake found in any order? And is the program without it silent in all of them?"""
    found = any(run([program(flavour, "planted"), name, "wrong"], 60, CUSIM_ORDER=o)[0] not in (0, None) for o in orders)
    silent = all(run([program(flavour, "planted"), name, "right"], 60, CUSIM_ORDER=o)[0] == 0 for o in orders)
    return found, silent


def run_planted(results, pool):
    """Each mistake must be found by the builds that planted.cu names, and no build may complain without it."""
    print("\nplanted mistakes: found by (plain: in any of the orders %s)" % ", ".join(ORDERS))
    _, listing, _ = run([program("plain", "planted"), "list"])
    rows = [line.split("\t") for line in listing.splitlines()]
    if not rows:
        results.add("planted mistakes", False, "(it lists none)")
    flavours = {"plain": ORDERS, "check": ["fwd"], "asan": ["fwd", "rev"]}
    todo = [(name, flavour) for name, _, _ in rows for flavour in flavours]

    def find(pair):
        name, flavour = pair
        return planted_found(flavour, name, flavours[flavour])
    found = dict(zip(todo, pool.map(find, todo)))
    print(f"     {'mistake':28}{'plain':8}{'check':8}{'asan':8}what it is")
    for name, must, what in rows:
        cells = {f: found[name, f] for f in flavours}
        good = all(silent for _, silent in cells.values()) and all(cells[f][0] for f in must.split())
        marks = "".join(f"{('found' if hit else '-') if silent else 'ALARM':8}" for hit, silent in cells.values())
        results.add(f"{name:28}{marks}{what}", good, "" if good else f"(must be found by {must}; ALARM: false alarm)")
    counts = {f: sum(found[name, f][0] for name, _, _ in rows) for f in flavours}
    print(f"     of {len(rows)}: " + ", ".join(f"{f} {n}" for f, n in counts.items()))


def mutant(program_name):
    return os.path.join(BUILD, "cusim/mutants", program_name)


def mutant_found(number, tests):
    """The first order in which these tests fail; None: they pass in all."""
    binary, _, tests = tests.rpartition(":")
    for order in ("rev", "fwd"):
        if run([mutant(binary or "test_cuda_ops"), tests], CUSIM_ORDER=order, CUSIM_MISTAKE=str(number))[0] not in (0, None):
            return order
    return None


def run_mutants(results, pool):
    """The mistakes in the kernels themselves: a test fails in one of two orders; without a mistake all pass."""
    print("\nmistakes in the kernels themselves, in plain emulation")
    for name in ("test_cuda_ops", "test_cuda_grouped"):
        clean = run([mutant(name)], CUSIM_ORDER="rev")
        results.add(f"none of them, {name}", clean[0] == 0, f"{clean[2]:.1f} s", clean[1])
    found = list(pool.map(lambda row: mutant_found(mutants.MISTAKES.index(row), row[4]), mutants.MISTAKES))
    for (name, file, _, _, _, what), order in zip(mutants.MISTAKES, found):
        results.add(f"{name:28}{file:16}{what}", order is not None, f"({order})" if order else "(NOT FOUND)")


def read_profile(path, lines):
    """Adds a CSV that a CHECK build wrote to {(file, line, memory, bytes): [asked bytes, sector bytes, best share, worst passes]}."""
    with open(path, encoding="utf-8") as f:
        for row in csv.DictReader(f, delimiter=";"):
            place, number = row["where"].rsplit(":", 1)
            entry = lines.setdefault((place, int(number), row["memory"], int(row["bytes"])), [0, 0, 0, 0])
            moved, used = float(row["sectors"]) * int(row["requests"]) * 32, float(row["used"])
            entry[0] += moved * used
            entry[1] += moved
            entry[2], entry[3] = max(entry[2], used), max(entry[3], float(row["passes"]))


def says_half_sectors(place, number):
    """A line may say that it reads 16 bytes of each sector and the next load, from the L1 cache, the other 16."""
    with open(os.path.join(ROOT, "gpu-worker/backend/cuda", place), encoding="utf-8") as f:
        return "half sectors" in f.read().splitlines()[number - 1]


def run_profile(results, paths):
    """16-byte accesses of global memory use whole sectors (but for the tails of odd shapes), banks conflict at most twice."""
    print("\nmemory accesses of the hot kernels (gemv, gemm, attention), by source line")
    lines = {}
    for build, path in zip(PROFILED, paths):
        if os.path.exists(path):
            read_profile(path, lines)
        else:
            results.add("profile", False, f"({' '.join(build)} wrote none)")
    for (place, number, memory, size), (asked, moved, best, passes) in sorted(lines.items()):
        if not place.startswith(("gemv", "gemm", "grouped", "attention")):
            continue
        if memory == "global" and size == 16:
            detail = f"16-byte global: {100 * asked / moved:.0f} % of the sectors' bytes used, at best {100 * best:.0f}"
            share = 0.5 if says_half_sectors(place, number) else 1
            results.add(f"{place}:{number}", best > 0.95 * share and asked >= 0.8 * share * moved, detail)
        elif memory == "shared" and passes > 1:
            results.add(f"{place}:{number}", passes <= 2, f"{size}-byte shared: {passes:.2f} passes for each that is needed")


def run_coverage(results):
    print("\nlines of device code run under emulation")
    folder = os.path.join(ROOT, BUILD, "cusim/cov")
    for path in glob.glob(folder + "/**/*.gcda", recursive=True):
        os.remove(path)
    for name in test_programs():
        if name.startswith("backend/"):
            code, output, seconds = run([program("cov", name)])
            results.add(f"{name} cov", code == 0, f"{seconds:.1f} s", output)
    covered, total, rows = coverage_lines.measure(os.path.join(folder, "gpu-worker/backend/cuda"), "gpu-worker/backend/cuda")
    for path, hit, lines, missing in rows:
        print(f"     {os.path.basename(path):24}{hit:5} of {lines:5}  {'not run: ' + missing if missing else ''}")
    if total:
        results.add("coverage", covered >= 0.95 * total, f"{100 * covered / total:.1f} % of {total} lines (at least 95)")
    else:
        print("skipped: coverage (no device code was built for it)")


# Takes options, each but --csv with a value, and runs the command behind them: in place of a GPU's tools.
FAKE_TOOL = '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do [ "$1" = --csv ] || shift; shift; done\nexec "$@"\n'
KERNELS = {"matmul", "decode attention", "prefill attention", "rmsnorm", "silu_mul", "head_rmsnorm", "sampling"}


def run_gpu_check(results):
    """The script for a machine with a GPU, on the emulator; and its goldens, of which one that is wrong must be found."""
    print("\nmake EMULATED=1 gpu-check")
    with tempfile.TemporaryDirectory() as folder:
        for tool in ("compute-sanitizer", "ncu", "nvidia-smi"):
            with open(os.path.join(folder, tool), "w", encoding="utf-8") as f:
                f.write(FAKE_TOOL)
            os.chmod(f.name, 0o755)
        out = os.path.join(folder, "out")
        code, output, seconds = run([sys.executable, "tests/device/gpu_check.py"], EMULATED="1", OUT=out, PATH=folder + ":" + os.environ["PATH"])
        results.add("gpu-check", code == 0 and output.rstrip().endswith(" 0 failed, 0 left out"), f"{seconds:.1f} s", output)
        table = os.path.join(out, "kernels.csv")
        with open(table if os.path.exists(table) else os.devnull, encoding="utf-8") as f:
            missing = KERNELS - {row["kernel"] for row in csv.DictReader(f)}
        results.add("its table has all kernels", not missing, ", ".join(missing))
        files = sorted(os.listdir(out))
        results.add("it leaves seven files", len(files) == 7 and "summary.txt" in files, ", ".join(files))
        with tarfile.open(os.path.join(out, "goldens.tar.gz")) as tar:
            tar.extractall(folder)
        golden = os.path.join(folder, "goldens/test_cuda_ops")
        command, env = [program("plain", "backend/test_cuda_ops"), "test_head*"], {"KVGATE_GOLDENS_FROM": golden, "TWIN_SEED": "1"}
        code, output, _ = run(command, **env)
        results.add("its goldens are given again", code == 0, output=output)
        if os.path.exists(golden):
            with open(golden, "r+b") as f:
                f.seek(402)
                f.write(b"\xff")
        results.add("a wrong golden is found", run(command, **env)[0] not in (0, None))


def run_worker(results):
    """The worker itself with the emulated device; skipped tests count as failed."""
    print("\nthe worker")
    code, output, seconds = run([sys.executable, "-m", "pytest", "-q", "tests/e2e/test_device.py"])
    results.add("tests/e2e/test_device.py", code == 0 and "skipped" not in output, f"{seconds:.1f} s", output)


def main():
    results, began = Results(), time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool, tempfile.TemporaryDirectory() as folder:
        profiles = [os.path.join(folder, f"profile{i}.csv") for i in range(len(PROFILED))]
        run_programs(results, pool, profiles)
        run_planted(results, pool)
        run_mutants(results, pool)
        run_profile(results, profiles)
    run_coverage(results)
    run_gpu_check(results)
    run_worker(results)
    print("\nwhat nvcc made")
    kernels = sorted(glob.glob("gpu-worker/backend/cuda/*.cu", root_dir=ROOT))
    sass.gate(os.path.join(ROOT, BUILD, "cuda"), kernels, os.environ.get("CUDA_HOME", ""), results)
    print(f"\n{time.monotonic() - began:.0f} s\n{results.passed} passed, {results.failed} failed")
    return 1 if results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
