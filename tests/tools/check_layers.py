#!/usr/bin/env python3
"""Fails on an #include against the direction of dependencies:

nginx-module -> redis-schemas -> libprompt
gpu-worker: main -> server -> engine -> {model -> backend -> quant, kv -> redis-schemas}; all -> libprompt, log, metrics
"""
import os
import re
import subprocess
import sys

ALLOWED = {
    "libprompt": set(),
    "redis-schemas": {"libprompt"},
    "nginx-module": {"redis-schemas", "libprompt"},
    "gpu-worker/quant": {"libprompt"},
    "gpu-worker/backend": {"gpu-worker/quant", "libprompt", "gpu-worker"},
    "gpu-worker/model": {"gpu-worker/backend", "gpu-worker/quant", "libprompt", "gpu-worker"},
    "gpu-worker/kv": {"redis-schemas", "libprompt", "gpu-worker"},
    "gpu-worker/engine": {"gpu-worker/model", "gpu-worker/backend", "gpu-worker/kv", "libprompt", "gpu-worker"},
    "gpu-worker/server": {"gpu-worker/engine", "gpu-worker/kv", "gpu-worker/backend", "libprompt", "gpu-worker"},
    "gpu-worker/tools": {"gpu-worker/model", "gpu-worker/backend", "gpu-worker/quant", "libprompt", "gpu-worker"},
    "gpu-worker": {"gpu-worker/server", "gpu-worker/engine", "gpu-worker/model", "gpu-worker/kv", "libprompt"},
}
# Leaves that sit beside main.c and know nothing of the layers.
LEAVES = {"gpu-worker/log.h", "gpu-worker/metrics.h"}


def layer(path):
    parts = os.path.dirname(path).split("/")
    if parts[0] == "gpu-worker" and len(parts) > 1:
        return "/".join(parts[:2])
    return parts[0]


def main():
    files = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.c", "*.h", "*.cu", "*.cuh"],
                           capture_output=True, text=True, check=True).stdout.split()
    bad = 0
    for path in files:
        here = layer(path)
        if here not in ALLOWED or not os.path.exists(path):
            continue
        for number, line in enumerate(open(path, encoding="utf-8", errors="replace"), 1):
            found = re.match(r'\s*#\s*include\s+"([^"]+)"', line)
            if not found:
                continue
            target = found.group(1)
            there = layer(target) if "/" in target else here
            if there == here or there in ALLOWED[here] and (there != "gpu-worker" or target in LEAVES) or path == "gpu-worker/metrics.h":
                continue
            if there not in ALLOWED:
                continue
            print(f"{path}:{number}: {here} may not include {target}")
            bad += 1
    sys.exit(1 if bad else 0)


main()
