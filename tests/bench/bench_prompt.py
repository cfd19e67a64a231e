#!/usr/bin/env python3
"""The prompt path beside `tokenizers` and `tiktoken`, alternating in one run, single-threaded.

usage: bench_prompt.py BUILD MODELS      prints a table and writes BUILD/bench-prompt.json (design section 6)

Peers are built from the model's own vocabulary with the family's published split; tiktoken takes part where token ids are
merge ranks (qwen2). Each value is the median of the rounds; spreads are printed.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"
HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "golden")]
import references  # noqa: E402
import table  # noqa: E402

ROUNDS = 7
FILES = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "qwen2": "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"}


class Ours:
    def __init__(self, build, model, text, body):
        self.process = subprocess.Popen([os.path.join(build, "tests/bench/bench_prompt"), model, text, body], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)

    def ask(self, what):
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        seconds, tokens = self.process.stdout.readline().split()
        return float(seconds), int(tokens)

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)


def timed(encode, text):
    start = time.perf_counter()
    n = len(encode(text))
    return time.perf_counter() - start, n


def peers(gguf):
    hugging_face = references.hugging_face(gguf)
    yield "tokenizers", lambda text: hugging_face.encode_batch_fast([text], add_special_tokens=False)[0].ids
    if gguf.get("pre") == "qwen2":
        tiktoken = references.tik_token(gguf, references.QWEN2)
        yield "tiktoken", lambda text: tiktoken.encode_ordinary(text)


def row(name, unit, values, peer=None, peer_values=None, limit=None, ratio=None):
    value = statistics.median(values)
    peer_value = statistics.median(peer_values) if peer_values else None
    if ratio is None:
        ratio = value / peer_value if peer_values else limit / value
    return {"row": name, "unit": unit, "value": value, "peer": peer, "peer_value": peer_value, "ratio": ratio, "limit": limit,
            "share": None, "runs": len(values), "spread": [min(values), max(values)]}


def measure(name, model, build, text_file, body_file, text):
    ours = Ours(build, model, text_file, body_file)
    others = list(peers(references.Gguf(model)))
    cold, warm, chain, theirs = [], [], [], {peer: [] for peer, _ in others}
    for _ in range(ROUNDS):
        cold.append(ours.ask("cold"))
        for peer, encode in others:
            theirs[peer].append(timed(encode, text))
        warm.append(ours.ask("warm"))
        chain.append(ours.ask("chain"))
    ours.close()
    rate = [tokens / seconds for seconds, tokens in cold]
    for peer, _ in others:
        yield row(f"{name}: cold tokenization", "tokens/s", rate, peer, [n / s for s, n in theirs[peer]], 5.0 if peer == "tokenizers" else None)
    yield row(f"{name}: 100,000 tokens cold", "ms", [1e8 * s / n for s, n in cold], limit=30.0)
    yield row(f"{name}: warm chat of {warm[0][1]} tokens, bytes to chain", "us", [1e6 * s for s, _ in warm], limit=50.0)
    yield row(f"{name}: chain hash", "ns/token", [1e9 * s / n for s, n in chain], limit=1.0)


def show(rows):
    print(f"{'':58}{'value':>14}{'peer':>26}{'ratio':>8}{'aim':>8}  spread")
    for r in rows:
        peer = f"{r['peer']} {r['peer_value']:,.0f}" if r["peer"] else ""
        low, high = r["spread"]
        print(f"{r['row'] + ', ' + r['unit']:58}{r['value']:14,.2f}{peer:>26}{r['ratio']:8.2f}{r['limit'] or '':>8}  {low:,.2f}–{high:,.2f}")


def main():
    build, models = table.arguments(__doc__, "BUILD", "MODELS")
    with open(os.path.join(models, "shakespeare.txt"), encoding="utf-8") as f:
        shakespeare = f.read()
    text = shakespeare[:420_000]
    chat = {"model": "bench", "messages": [{"role": "system", "content": shakespeare[1_000_000:1_006_600]},
                                           {"role": "user", "content": shakespeare[3_000_000:3_001_200]}]}
    rows = []
    with tempfile.TemporaryDirectory() as tmp:
        text_file, body_file = os.path.join(tmp, "text"), os.path.join(tmp, "body")
        with open(text_file, "w", encoding="utf-8", newline="") as f:
            f.write(text)
        with open(body_file, "w", encoding="utf-8") as f:
            json.dump(chat, f)
        for name, file in FILES.items():
            path = os.path.join(models, file)
            if os.path.exists(path):
                rows += measure(name, path, build, text_file, body_file, text)
            else:
                print(f"{name}: not reached, {file} is not at hand (make models-all)")
    show(rows)
    with open(os.path.join(build, "bench-prompt.json"), "w", encoding="utf-8") as f:
        json.dump(rows, f, indent=1)


if __name__ == "__main__":
    main()
