#!/usr/bin/env python3
"""make bench-cache: time to the first token behind a shared prefix of 2,000 tokens through nginx, cold and warm.

Each round asks two questions behind a prefix that no round had before: the first is cold, the second warm. Beside them the time
of one decode step at the same depth, from the gaps between tokens in the same run. Aim: warm <= 2 decode steps + 3 ms.
"""
import json
import os
import statistics
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tools"))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from conftest import BUILD, ROOT  # noqa: E402
from gateway import Gateway  # noqa: E402
from stack import Redis, Worker, wait_until  # noqa: E402
import table  # noqa: E402

ROUNDS = int(os.environ.get("ROUNDS", "10"))
WORDS = "river stone lamp garden winter copper signal harbor meadow thunder violet anchor".split()


def prefix(number):
    """About 2,000 tokens of plain words that differ from the first block on."""
    return f"Notes {number}. " + " ".join(WORDS[(i * (number + 3) + i // 7) % len(WORDS)] for i in range(1980))


def body(system, question):
    return json.dumps({"model": "smollm2", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 24, "temperature": 0,
                       "ignore_eos": True, "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}]})


def measure(gateway, folder):
    """One details line a request: cold, warm, cold, warm …; a pause lets the claims reach Redis."""
    lines = []
    for n in range(ROUNDS):
        lines += [body(prefix(n), "What comes first?"), body(prefix(n), "And what comes last?")]
    details = os.path.join(folder, "details")
    out = []
    for line in lines:
        done = subprocess.run([os.path.join(BUILD, "tests/tools/load"), "--url", gateway.url + "/v1/chat/completions", "--requests", "-",
                               "--details", details], input=line, capture_output=True, text=True, check=True)
        result = json.loads(done.stdout)
        if result["failed"]:
            sys.exit(f"bench-cache: a request failed: {result['errors']}")
        with open(details, encoding="utf-8") as f:
            out.append({**json.loads(f.read()), "step": result["inter_token"]["p50"]})
    return out


def main():
    table.arguments(__doc__)
    with Redis() as redis:
        workers = [Worker("--max-model-len", "4096", redis=redis, worker_id=f"w{n}", kv_cache_memory="512M").start() for n in (1, 2)]
        gateway = Gateway(redis=redis, servers=[w.gateway_addr for w in workers], redis_timeout="100ms").start()
        try:
            for n in (1, 2):
                wait_until(lambda: redis.cli("exists", f"kvgate:{{smollm2}}:w:w{n}") == "1", what="workers in Redis")
            details = measure(gateway, redis.dir)
        finally:
            for part in (gateway, *workers):
                part.close()
    cold, warm = details[::2], details[1::2]
    median = lambda rows, key: 1000 * statistics.median(row[key] for row in rows)  # noqa: E731
    step, limit = median(details, "step"), 2 * median(details, "step") + 3
    c, w = median(cold, "ttft"), median(warm, "ttft")
    tokens = cold[0]["prompt_tokens"]
    rows = [{"row": "warm ttft", "unit": "ms", "value": w, "peer": "cold ttft", "peer_value": c, "ratio": c / w, "limit": limit,
             "share": limit / w, "runs": ROUNDS},
            {"row": "decode step", "unit": "ms", "value": step, "peer": None, "peer_value": None, "ratio": None, "limit": None, "share": None,
             "runs": 2 * ROUNDS},
            {"row": "tokens computed warm", "unit": "tokens", "value": statistics.median(r["prompt_tokens"] - r["cached_tokens"] for r in warm),
             "peer": "cold", "peer_value": statistics.median(r["prompt_tokens"] - r["cached_tokens"] for r in cold), "ratio": None, "limit": None,
             "share": None, "runs": ROUNDS}]
    print(f"prefix of {tokens} tokens, {ROUNDS} rounds, medians\n"
          f"  cold TTFT    {c:9.1f} ms\n  warm TTFT    {w:9.1f} ms   {c / w:.1f} times sooner\n  decode step  {step:9.2f} ms\n"
          f"  aim: warm <= 2 steps + 3 ms = {limit:.1f} ms: {'reached' if w <= limit else 'not reached'}\n"
          f"  computed warm: {rows[2]['value']:.0f} of {tokens} tokens; wrong worker: "
          f"{sum(a['worker'] != b['worker'] for a, b in zip(cold, warm))} of {ROUNDS}")
    with open(os.path.join(ROOT, "build", "bench-cache.json"), "w", encoding="utf-8") as f:
        json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
