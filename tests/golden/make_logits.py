#!/usr/bin/env python3
"""Writes the logit goldens: what `transformers` computes in f32 on a GGUF file's dequantized weights.

    python tests/golden/make_logits.py logits build/models/MODEL.gguf tests/golden/logits_NAME.npz [--sizes SEQUENCES,LENGTH,POSITIONS] TEXT...
    python tests/golden/make_logits.py greedy build/models/MODEL.gguf tests/golden/greedy_NAME.json

needs torch, transformers and gguf. `logits` takes SEQUENCES sequences of LENGTH tokens from the texts and keeps, at the POSITIONS
last positions of each that have a next token, the 64 most probable ids with their log-probabilities (f16 offsets from the first) and
the logsumexp. A text may also be llama-perplexity's --kl-divergence-base file of that length: its token ids are taken as they are, so
that tests/golden/peer_kl.py can compare the two.

`greedy` keeps prompts and the 24 tokens that the reference continues them with, and each step's margin to the second best logit.
"""
import json
import os
import struct
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SEQUENCES, LENGTH, POSITIONS, TOP = 4, 1002, 500, 64
PROMPTS = [
    "The capital of France is", "Once upon a time, there was a little", "def fibonacci(n):\n    ", "The three laws of motion are",
    "To be, or not to be, that is the", "Water boils at a temperature of", "<|im_start|>user\nName a color.<|im_end|>\n<|im_start|>assistant\n",
    "1, 2, 3, 4, 5, 6,", "Dear Sir or Madam,\n\nI am writing to", "#include <stdio.h>\n\nint main(void)\n{\n",
]


def load(path):
    folder, name = os.path.split(path)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, torch_dtype=torch.float32, attn_implementation="eager").eval()
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=name)


def base_file_ids(data):
    """Token ids of llama-perplexity's base file: "_logits_", n_ctx, n_vocab, n_chunk, then the ids of all chunks as i32."""
    n_ctx, _, n_chunk = struct.unpack_from("<Iii", data, 8)
    if n_ctx != LENGTH:
        sys.exit(f"the base file has chunks of {n_ctx} tokens, not {LENGTH}")
    return np.frombuffer(data, "<i4", n_ctx * n_chunk, 20).reshape(n_chunk, n_ctx)


def sequences(tokenizer, texts):
    rows = []
    for path in texts:
        data = open(path, "rb").read()
        if data[:8] == b"_logits_":
            rows += list(base_file_ids(data))
        else:
            ids = tokenizer(data[:200000].decode("utf-8", "replace"), add_special_tokens=False)["input_ids"]
            rows += [np.array(ids[i * LENGTH:(i + 1) * LENGTH]) for i in range(SEQUENCES // len(texts))]
    return np.stack(rows[:SEQUENCES]).astype(np.uint32)


def make_logits(model_path, out, texts):
    model, tokenizer = load(model_path)
    ids = sequences(tokenizer, texts)
    first = LENGTH - 1 - POSITIONS
    top_ids, top_logprobs, totals = [], [], []
    with torch.no_grad():
        for row in ids:
            logits = model(torch.tensor(row[None].astype(np.int64))).logits[0, first:LENGTH - 1].double()
            total = torch.logsumexp(logits, -1)
            values, picks = torch.topk(logits - total[:, None], TOP)
            top_ids.append(picks.numpy())
            top_logprobs.append(values.numpy())
            totals.append(total.numpy())
    np.savez_compressed(out, ids=ids, first=first, top_ids=np.stack(top_ids).astype(np.uint32),
                        top_logprobs=np.stack(top_logprobs).astype(np.float32), logsumexp=np.stack(totals).astype(np.float32))


def make_greedy(model_path, out, n=24):
    model, tokenizer = load(model_path)
    rows = []
    with torch.no_grad():
        for prompt in PROMPTS:
            ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            length, margins, past = len(ids), [], None
            for _ in range(n):
                output = model(torch.tensor([ids if past is None else ids[-1:]]), past_key_values=past, use_cache=True)
                past = output.past_key_values
                best = torch.topk(output.logits[0, -1].double(), 2)
                margins.append(round(float(best.values[0] - best.values[1]), 4))
                ids.append(int(best.indices[0]))
            rows.append({"prompt": prompt, "ids": ids[:length], "next": ids[length:], "margins": margins})
    with open(out, "w", encoding="utf-8") as f:
        f.write("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    if "--sizes" in sys.argv:
        at = sys.argv.index("--sizes")
        SEQUENCES, LENGTH, POSITIONS = map(int, sys.argv[at + 1].split(","))
        del sys.argv[at:at + 2]
    if sys.argv[1] == "logits":
        make_logits(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        make_greedy(sys.argv[2], sys.argv[3])
