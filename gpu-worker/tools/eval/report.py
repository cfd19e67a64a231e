"""report.json, report.md and chart.svg of one run."""
import html
import json
import os


def percent(x, digits=2):
    return f"{100 * x:.{digits}f} %"


def sentence(comparison):
    """The verdict in plain words."""
    low, high, word = comparison["low"], comparison["high"], comparison["verdict"]
    span = f"the loss is {percent(comparison['loss'])}, between {percent(low)} and {percent(high)} (95 %)"
    if word == "cannot tell":
        more = f"; about {comparison['items_needed']} items would do" if "items_needed" in comparison else ""
        count = f"{comparison['items']} items" if "items" in comparison else f"{comparison['windows']} windows"
        return f"Cannot tell with this many items ({count}): {span}{more}."
    if word == "worse":
        return f"Worse than the base: {span}."
    return f"{word[0].upper()}{word[1:]} of the base: {span}."


def _table(rows):
    head, *body = rows
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in body)])


def _score_rows(report):
    names = [n for n in ("base", "model") if n in report["runs"]]
    rows = [["", *names], ["score", *(percent(report["runs"][n]["score"]) for n in names)]]
    first = report["runs"][names[0]]
    rows += [[f"score, {g}", *(percent(report["runs"][n]["groups"][g]) for n in names)] for g in first.get("groups", {})]
    rows += [[f"pass@{k}", *(percent(report["runs"][n]["pass"][k]) for n in names)] for k in first.get("pass", {})]
    return rows


def _window_rows(c):
    rows = [["", "base", "model"], ["perplexity", f"{c['base_perplexity']:.4f}", f"{c['perplexity']:.4f}"]]
    if "kl" in c:
        rows += [["KL(base, model), nats a token", "", f"{c['kl']:.6f} ({c['kl_low']:.6f} to {c['kl_high']:.6f})"],
                 ["same most probable token", "", percent(c["same_top"])]]
    return rows


def markdown(report):
    lines = [f"# {report['task']}", "", *(f"- {key}: `{value}`" for key, value in report["setup"].items()), ""]
    comparison = report.get("comparison")
    if "runs" in report:
        lines += [_table(_score_rows(report)), ""]
    elif comparison:
        lines += [_table(_window_rows(comparison)), "", f"{comparison['tokens']} tokens in {comparison['windows']} windows.", ""]
    else:
        lines += [f"Perplexity {report['perplexity']:.4f} ({report['tokens']} tokens).", ""]
    if comparison:
        lines += [f"**{sentence(comparison)}**", ""]
        if "mcnemar_p" in comparison:
            lines += [f"Only the base is right on {comparison['worse_items']} items, only the model on {comparison['better_items']}: McNemar's exact p = "
                      f"{comparison['mcnemar_p']:.3g}.", ""]
    if report.get("protections"):
        lines += [f"Generated code ran confined: {', '.join(report['protections'])}.", ""]
    return "\n".join(lines)


def chart(report):
    """The loss with its interval beside the bounds 1 % and 3 %; without a base the scores by group."""
    width, height, left, right = 640, 150, 60, 600
    comparison = report.get("comparison")
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
             f'<rect width="{width}" height="{height}" fill="white"/>']
    if comparison:
        low, high = min(comparison["low"], -0.01), max(comparison["high"], 0.04)
        at = lambda x: left + (x - low) / (high - low) * (right - left)
        parts.append(f'<text x="{left}" y="20">{html.escape(report["task"])}: loss against the base, 95 % interval — {comparison["verdict"]}</text>')
        parts.append(f'<line x1="{left}" y1="100" x2="{right}" y2="100" stroke="#999"/>')
        for bound, colour in ((0, "#000"), (0.01, "#2a2"), (0.03, "#c80")):
            parts.append(f'<line x1="{at(bound):.1f}" y1="40" x2="{at(bound):.1f}" y2="105" stroke="{colour}" stroke-dasharray="4 3"/>')
            parts.append(f'<text x="{at(bound):.1f}" y="120" text-anchor="middle">{100 * bound:.0f} %</text>')
        parts.append(f'<line x1="{at(comparison["low"]):.1f}" y1="70" x2="{at(comparison["high"]):.1f}" y2="70" stroke="#06c" stroke-width="4"/>')
        parts.append(f'<circle cx="{at(comparison["loss"]):.1f}" cy="70" r="6" fill="#06c"/>')
    elif "runs" in report:
        run = report["runs"]["model"]
        bars = {"all": run["score"], **run.get("groups", {}), **{f"pass@{k}": v for k, v in run.get("pass", {}).items()}}
        step = (right - left) / len(bars)
        parts.append(f'<text x="{left}" y="20">{html.escape(report["task"])}: scores</text>')
        for i, (name, value) in enumerate(bars.items()):
            x, tall = left + i * step, 80 * value
            parts.append(f'<rect x="{x:.1f}" y="{120 - tall:.1f}" width="{step * .7:.1f}" height="{tall:.1f}" fill="#06c"/>')
            parts.append(f'<text x="{x:.1f}" y="138">{html.escape(name)} {100 * value:.0f} %</text>')
    else:
        parts.append(f'<text x="{left}" y="60">perplexity {report["perplexity"]:.4f}</text>')
    return "\n".join(parts + ["</svg>", ""])


def write(folder, report):
    for name, text in (("report.json", json.dumps(report, indent=1) + "\n"), ("report.md", markdown(report)), ("chart.svg", chart(report))):
        path = os.path.join(folder, name)
        with open(path + ".part", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(path + ".part", path)
