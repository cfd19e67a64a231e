"""Rows of a benchmark that sets kvgate beside peers: alternating runs, medians, ratios, the printed table and its JSON file."""
import json
import os
import statistics
import subprocess
import sys
import time


def arguments(doc, *names):
    """The program's arguments, one for each name. --help prints `doc` and ends; any other number of them ends with one line."""
    given = sys.argv[1:]
    if "--help" in given or "-h" in given:
        print(doc.strip())
        sys.exit(0)
    if len(given) != len(names) or any(a.startswith("-") for a in given):
        sys.exit(f"{os.path.basename(sys.argv[0])}: takes {' '.join(names) or 'no arguments'}, not {' '.join(given) or 'none'} (--help says more)")
    return given


def listed(name, known, default=None):
    """The words of the variable `name`, each one of `known`; where it is not set `default`, or all."""
    values = os.environ.get(name, " ".join(default or known)).replace(",", " ").split()
    for value in values:
        if value not in known:
            sys.exit(f"{os.path.basename(sys.argv[0])}: {name}: {value} is none of {' '.join(known)}")
    return values


def better(value, other, high):
    """How many times better value is than other: above 1 = better."""
    if not value or not other:
        return None
    return value / other if high else other / value


def alternate(contestants, runs, progress=lambda *_: None, slow=None, clock=time.monotonic):
    """{name: [what the contestant returned in run 0, 1, ...]}: each in turn, and in each run another one first.

    contestants is {name: function without arguments}. One but the first of them whose turn took more than `slow` seconds has no other.
    """
    names, out, done = list(contestants), {name: [] for name in contestants}, set()
    for run in range(runs):
        first = run % len(names)
        for name in names[first:] + names[:first]:
            if name in done:
                continue
            progress(run, name)
            start = clock()
            out[name].append(contestants[name]())
            if slow and clock() - start > slow and name != names[0]:
                done.add(name)
    return out


def row(name, unit, values, peer=None, peer_values=None, high=True, limit=None, aim=None, settings=None):
    """One row of the table; values are kvgate's of each run, peer_values the peer's of the same runs.

    ratio: median over the runs of how many times better kvgate was (above 1 = better). share: how much of the limit the median
    reaches. aim: (text, function of the row that says whether it is reached); without the peer's values it counts as not reached.
    A slow peer may have fewer values than kvgate: the ratios are of the runs that both have.
    """
    value = statistics.median(values)
    ratios = [better(a, b, high) for a, b in zip(values, peer_values or [])]
    out = {"row": name, "unit": unit, "value": value, "peer": peer, "peer_value": statistics.median(peer_values) if peer_values else None,
           "ratio": statistics.median(ratios) if ratios and None not in ratios else None, "limit": limit,
           "share": better(value, limit, high) if limit else None, "runs": len(values), "low": min(values), "high": max(values)}
    if aim:
        text, reached = aim
        out["aim"], out["reached"] = text, bool((peer is None or peer_values) and reached(out))
    if peer_values and len(peer_values) < len(values):
        out["peer_runs"] = len(peer_values)
    if settings:
        out["peer_settings"] = settings
    return out


def at_least(ratio):
    """An aim: so many times better than the peer."""
    return f">= {ratio:g}x", lambda row: row["ratio"] is not None and row["ratio"] >= ratio


def commit():
    """The commit of the tree that was measured, with a plus when files differ from it."""
    run = lambda *args: subprocess.run(["git", *args], cwd=os.path.dirname(__file__), capture_output=True, text=True, check=False).stdout  # noqa: E731
    changed = run("status", "--porcelain", "--untracked-files=no", ":/gpu-worker", ":/libprompt", ":/redis-schemas")
    return run("rev-parse", "--short", "HEAD").strip() + ("+" if changed else "")


def merge(path, rows):
    """Puts rows into the file, each in the place of the earlier one of its name and peer; returns all rows of the file."""
    try:
        with open(path, encoding="utf-8") as f:
            old = json.load(f)
    except (OSError, ValueError):
        old = []
    now, tree = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), commit() if rows else ""
    place = {(r["row"], r["peer"]): i for i, r in enumerate(old)}
    for new in rows:
        new = {**new, "at": now, "commit": tree}
        key = (new["row"], new["peer"])
        if key in place:
            old[place[key]] = new
        else:
            place[key] = len(old)
            old.append(new)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".part", "w", encoding="utf-8") as f:
        json.dump(old, f, indent=1)
    os.replace(path + ".part", path)
    return old


def number(value):
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def cells(row):
    aim = f"{row['aim']}: {'reached' if row['reached'] else 'MISSED'}" if "aim" in row else ""
    missing = row["peer"] is not None and row["peer_value"] is None
    return [row["row"], f"{number(row['value'])} {row['unit']}", "" if row["peer"] is None else row["peer"],
            "" if row["peer"] is None else "not reached" if missing else number(row["peer_value"]),
            "" if row["ratio"] is None else f"{row['ratio']:.2f}x", "" if row["limit"] is None else number(row["limit"]),
            "" if row["share"] is None else f"{row['share']:.2f}", aim]


HEAD = ["row", "kvgate", "peer", "peer's", "ratio", "limit", "share", "aim"]


def text(rows):
    """The table for a terminal."""
    lines = [HEAD] + [cells(r) for r in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def beside(row):
    """A peer's cell of the wide table: its value, and in brackets how many times better kvgate is."""
    if row["peer_value"] is None:
        return "not reached"
    ratio = f" ({row['ratio']:.2f}x)" if row["ratio"] is not None else ""
    return number(row["peer_value"]) + ratio + (f", {row['peer_runs']} run" if "peer_runs" in row else "")


def origin(rows):
    """What rows of one name are of: commit and runs, most first."""
    return "; ".join(dict.fromkeys(f"{r.get('commit') or 'earlier'}, {r['runs']}" for r in sorted(rows, key=lambda r: -r["runs"])))


def markdown(rows):
    """One line a row's name, a column for each peer, what became of its aims, and which commit in how many runs was measured."""
    peers = list(dict.fromkeys(r["peer"] for r in rows if r["peer"]))
    lines = [["", "kvgate"] + peers + ["share of its limit", "aims", "commit, runs"]]
    lines.append(["---"] * len(lines[0]))
    for name in dict.fromkeys(r["row"] for r in rows):
        mine = [r for r in rows if r["row"] == name]
        cell = {r["peer"]: beside(r) for r in mine}
        aims = [f"{r['aim']} {r['peer'] or ''}".strip() + (": reached" if r["reached"] else ": **missed**") for r in mine if "aim" in r]
        share = mine[0]["share"]
        lines.append([name, f"{number(mine[0]['value'])} {mine[0]['unit']}"] + [cell.get(p, "") for p in peers]
                     + ["" if share is None else f"{share:.2f}", "; ".join(aims), origin(mine)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def sections(rows, order):
    """Rows by the model before their colon, one table each, in the order of the words of `order` that their names hold."""
    place = lambda row: next((i for i, word in enumerate(order) if word in row["row"]), len(order))  # noqa: E731
    groups = {}
    for row in rows:
        group, _, name = row["row"].partition(": ")
        groups.setdefault(group, []).append({**row, "row": name})
    return "\n\n".join(f"#### {group}\n\n{markdown(sorted(groups[group], key=place))}" for group in sorted(groups))


def replace_between(path, begin, end, text):
    """Puts text between the lines begin and end of a file, which must have both."""
    with open(path, encoding="utf-8") as f:
        head, found, rest = f.read().partition(begin + "\n")
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{path} has no lines {begin} and {end}")
    with open(path, "w", encoding="utf-8") as f:
        f.write(f"{head}{begin}\n{text}\n{end}{tail}")
