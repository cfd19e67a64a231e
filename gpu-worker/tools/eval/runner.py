"""Runs a task against an endpoint, many requests at once, or kvgate-score over a text; both go on where an earlier run ended."""
import concurrent.futures
import json
import os
import subprocess

import matchers
import stats
from client import Unanswered
from progress import Bar
from results import Store
from worker import NotStarted, find_program


class Incomplete(Exception):
    """Some items have no answer; what was answered is kept."""


def request_of(item, sample, options):
    """The body of an item's sample. The seed follows from item and sample, so that a restarted run asks the same."""
    body = {"max_tokens": item.get("max_tokens", options.max_tokens), "temperature": options.temperature, "seed": options.seed + sample}
    for key in ("prompt", "messages", "stop"):
        if key in item:
            body[key] = item[key]
    return body


def kept_items(store, items, options):
    """{(id, sample)} of the store's lines. Raises OtherRun where one is none of these items' or has no score."""
    known, ids = set(), {item["id"] for item in items}
    for line in store.lines:
        item, sample, score = (line.get(member) for member in ("item", "sample", "score"))
        if not (isinstance(item, str) and item in ids and isinstance(sample, int) and 0 <= sample < options.samples and isinstance(score, (int, float))):
            store.close()
            raise store.damaged()
        known.add((item, sample))
    return known


def run_items(name, items, endpoint, header, options):
    """{id: [score of each sample]}. Raises Incomplete where the endpoint left items unanswered."""
    store = Store(os.path.join(options.out, name + ".jsonl"), header, options.fresh)
    known = kept_items(store, items, options)
    todo = [(item, sample) for item in items for sample in range(options.samples) if (item["id"], sample) not in known]
    bar, unanswered = Bar(name, len(items) * options.samples, len(known)), []

    def one(work):
        item, sample = work
        try:
            text = endpoint.complete(request_of(item, sample, options))
            store.add({"item": item["id"], "sample": sample, "score": matchers.score(item, text), "output": text})
            bar.advance()
        except Unanswered as error:
            unanswered.append(f"{item['id']}: {error}")

    pool = concurrent.futures.ThreadPoolExecutor(options.concurrency)
    try:
        for done in concurrent.futures.as_completed([pool.submit(one, work) for work in todo]):
            done.result()
    finally:
        pool.shutdown(cancel_futures=True)
        bar.close()
        store.close()
    if unanswered:
        raise Incomplete(f"{name}: {len(unanswered)} of {len(todo)} requests have no answer; the rest is kept, run again to go on. First: {unanswered[0]}")
    scores = {item["id"]: [0.0] * options.samples for item in items}
    for line in store.lines:
        scores[line["item"]][line["sample"]] = line["score"]
    return scores


def run_score(header, options):
    """Windows of kvgate-score over --text."""
    command = [find_program("kvgate-score"), "--model", options.model, "--text", options.text, "--context", str(options.context),
               "--tokens", str(options.tokens), "--skip", str(options.skip)]
    if options.base:
        command += ["--base", options.base]
    if options.threads:
        command += ["--threads", str(options.threads)]
    store = Store(os.path.join(options.out, "windows.jsonl"), header, options.fresh)
    if [line.get("window") for line in store.lines] != list(range(len(store.lines))):
        store.close()
        raise store.damaged()
    command += ["--from", str(len(store.lines))]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    bar = None
    try:
        for line in child.stdout:
            value = json.loads(line)
            if "windows" in value:
                bar = Bar(options.task, value["windows"], len(store.lines))
                continue
            store.add(value)
            bar.advance()
        why = child.stderr.read()
    finally:
        if child.poll() is None:
            child.kill()
        code = child.wait()
        store.close()
        if bar:
            bar.close()
    if code != 0:
        raise NotStarted(why.strip().splitlines()[-1] if why.strip() else f"kvgate-score ended with {code}")
    return store.lines


def summarize(items, scores, options):
    """Mean score, the same by group, and pass@k where there are several samples."""
    means = {item["id"]: stats.mean(scores[item["id"]]) for item in items}
    out = {"items": len(items), "samples": options.samples, "score": stats.mean(list(means.values()))}
    groups = sorted({item["group"] for item in items if "group" in item})
    if groups:
        out["groups"] = {g: stats.mean([means[i["id"]] for i in items if i.get("group") == g]) for g in groups}
    if options.k:
        out["pass"] = {str(k): stats.mean([stats.pass_at_k(options.samples, sum(s > 0.5 for s in scores[i["id"]]), k) for i in items])
                       for k in options.k}
    return out, means
