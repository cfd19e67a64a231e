"""The gate on what nvcc made of the kernels: no spills, and the instructions that a kernel is written for.

Reads ptxas' report (build/cuda/**/*.ptxas) for registers and spills and, where cuobjdump and nvdisasm are at hand, the machine
code of every architecture.
"""
import collections
import glob
import os
import re
import shutil
import subprocess
import sys

# Kernel (regular expression on its plain name) -> instructions that must occur, on every architecture.
EXPECTED = [
    (r"gemm_float_kernel", ["mma", "ldmatrix", "cp.async"]),
    (r"gemm_quant_kernel", ["mma"]),
    (r"gemv_quant_kernel", ["dp4a", "load128"]),
    (r"gemv_float_kernel", ["load128"]),
    (r"gemv_grouped_kernel", ["dp4a", "load128"]),
    (r"gemm_grouped_kernel", ["mma", "cp.async"]),
    (r"attention_decode_kernel", ["load128"]),
    (r"attention_tile_kernel", ["mma", "ldmatrix"]),
]
# What must not occur: decoding reads keys and values of every form 16 bytes at a time.
FORBIDDEN = [(r"attention_decode_kernel", ["load64"])]
INSTRUCTIONS = {
    "mma": r"\b(HMMA|IMMA|OMMA|QMMA)\b",
    "ldmatrix": r"\bLDSM\b",
    "cp.async": r"\bLDGSTS\b",
    "load128": r"\bLDG\.E\.(\w+\.)*128\b",
    "load64": r"\bLDG\.E\.(\w+\.)*64\b",
    "store128": r"\bSTG\.E\.(\w+\.)*128\b",
    "dp4a": r"\bIDP\.4A\b",
}


def find_tool(name, cuda_home):
    """From CUDA itself, the Python package, or PATH."""
    places = [os.path.join(cuda_home, "bin", name), *glob.glob(os.path.join(sys.prefix, "lib/python3*/site-packages/nvidia/*/bin", name))]
    return next((p for p in places if os.access(p, os.X_OK)), shutil.which(name))


def plain_name(mangled):
    """gemv_kernel out of _Z11gemv_kernelILi4EEv…; of a nested name the last part."""
    match = re.match(r"_Z(N?)", mangled)
    rest, name = mangled[match.end():] if match else "", mangled
    while number := re.match(r"\d+", rest):
        end = number.end() + int(number.group())
        name, rest = rest[number.end():end], rest[end:]
        if not match.group(1):
            break
    return name


def read_ptxas(folder):
    """[(kernel, mangled, architecture, registers, spilled bytes)]"""
    rows = []
    for path in sorted(glob.glob(folder + "/**/*.ptxas", recursive=True)):
        with open(path, encoding="utf-8") as f:
            text = f.read()
        entries = re.split(r"Compiling entry function '", text)[1:]
        for entry in entries:
            mangled, arch = re.match(r"([^']+)' for '(\w+)'", entry).groups()
            spills = sum(map(int, re.findall(r"(\d+) bytes spill", entry)))
            registers = int(re.search(r"Used (\d+) registers", entry).group(1))
            rows.append((plain_name(mangled), mangled, arch, registers, spills))
    return rows


def count_instructions(folder, cuobjdump, nvdisasm):
    """{(mangled, architecture): Counter}"""
    counts = {}
    env = dict(os.environ, PATH=os.path.dirname(nvdisasm) + ":" + os.environ["PATH"])
    for path in sorted(glob.glob(folder + "/**/*.o", recursive=True)):
        if not os.path.exists(path + ".ptxas"):
            continue
        text = subprocess.run([cuobjdump, "-sass", path], env=env, capture_output=True, text=True, check=True).stdout
        arch = name = None
        for line in text.splitlines():
            found = re.match(r"\s*code for (\w+)|\s*Function : (\S+)", line)
            if found and found.group(1):
                arch = found.group(1)
            elif found:
                name = found.group(2)
                counts[name, arch] = collections.Counter()
            elif name and "/*" in line:
                for what, pattern in INSTRUCTIONS.items():
                    counts[name, arch][what] += bool(re.search(pattern, line))
    return counts


def gate(folder, sources, cuda_home, results):
    if not find_tool("nvcc", cuda_home):
        print("skipped: the nvcc build (no nvcc)")
        return
    for source in sources:
        good = os.path.exists(os.path.join(folder, source + ".o"))
        results.add(f"nvcc {source}", good, "" if good else "(did not compile: see above)")
    rows = read_ptxas(folder)
    cuobjdump, nvdisasm = find_tool("cuobjdump", cuda_home), find_tool("nvdisasm", cuda_home)
    counts = count_instructions(folder, cuobjdump, nvdisasm) if cuobjdump and nvdisasm else {}
    groups = collections.defaultdict(list)
    for name, mangled, arch, registers, spills in rows:
        groups[name, arch].append((registers, spills, counts.get((mangled, arch), {})))
    print(f"     {'kernel':32}{'arch':10}{'variants':>8}{'registers':>10}{'spills':>8}" + "".join(f"{w:>10}" for w in INSTRUCTIONS))
    for (name, arch), variants in sorted(groups.items()):
        fewest = {what: min(v[2].get(what, 0) for v in variants) for what in INSTRUCTIONS}
        spilled = max(v[1] for v in variants)
        most = {what: max(v[2].get(what, 0) for v in variants) for what in INSTRUCTIONS}
        missing = [what for pattern, whats in EXPECTED if re.fullmatch(pattern, name) for what in whats if counts and not fewest[what]]
        wrong = [what for pattern, whats in FORBIDDEN if re.fullmatch(pattern, name) for what in whats if most[what]]
        detail = f"(lacks {', '.join(missing)})" if missing else f"(has {', '.join(wrong)})" if wrong else ""
        row = f"{name:32}{arch:10}{len(variants):8}{max(v[0] for v in variants):10}{spilled:8}"
        row += "".join(f"{fewest[w] if counts else '-':>10}" for w in INSTRUCTIONS)
        results.add(row, not spilled and not missing and not wrong, detail)
    if not counts:
        print("skipped: counts of instructions (no cuobjdump or no nvdisasm)")
