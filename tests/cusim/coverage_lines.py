"""Line coverage of the kernels' sources, from gcov's JSON; a line of a template counts once, run by whichever instance."""
import collections
import glob
import gzip
import json
import os
import subprocess
import tempfile


def read_counts(folder, prefix):
    """{path: {line: times run}} of the sources below prefix."""
    counts = collections.defaultdict(lambda: collections.defaultdict(int))
    data = [os.path.abspath(p) for p in glob.glob(os.path.join(folder, "*.gcda"))]
    with tempfile.TemporaryDirectory() as out:
        for path in data:
            subprocess.run(["gcov", "--json-format", path], cwd=out, capture_output=True, check=True)
        for path in glob.glob(os.path.join(out, "*.gcov.json.gz")):
            with gzip.open(path, "rt") as f:
                report = json.load(f)
            for source in report["files"]:
                top = report["current_working_directory"]
                name = os.path.relpath(os.path.join(top, source["file"]), top)
                if name.startswith(prefix) and name.endswith((".cu", ".cuh")):
                    for line in source["lines"]:
                        counts[name][line["line_number"]] += line["count"]
    return counts


def ranges(lines):
    """[3, 4, 5, 9] -> "3-5 9"."""
    parts = []
    for n in sorted(lines):
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def measure(folder, prefix):
    """(lines run, lines, [(path, run, lines, missing)])."""
    rows = []
    for path, counts in sorted(read_counts(folder, prefix).items()):
        missing = [n for n, count in counts.items() if not count]
        rows.append((path, len(counts) - len(missing), len(counts), ranges(missing)))
    return sum(r[1] for r in rows), sum(r[2] for r in rows), rows
