#!/usr/bin/env python3
"""Prints llama.cpp's distance to a logit golden, from the file that its llama-perplexity writes.

    llama-perplexity -m MODEL.gguf -f TEXT -c 1002 -b 1002 --chunks 4 -t 2 -fa off --save-all-logits BASE
    python tests/golden/make_logits.py logits MODEL.gguf tests/golden/logits_NAME.npz BASE
    python tests/golden/peer_kl.py BASE tests/golden/logits_NAME.npz

The file holds each position's log-probabilities as 16-bit steps over the 16 nats below the highest.
"""
import struct
import sys

import numpy as np

from kl import Golden, distance


def main():
    base, golden = open(sys.argv[1], "rb"), Golden(sys.argv[2])
    magic, n_ctx, n_vocab, n_chunk = struct.unpack("<8sIii", base.read(20))
    ids = np.frombuffer(base.read(4 * n_ctx * n_chunk), "<i4").reshape(n_chunk, n_ctx)
    if magic != b"_logits_" or not np.array_equal(ids, golden.ids):
        sys.exit("the two files are not about the same tokens")
    padded, logprobs, best = (n_vocab + 1) // 2 * 2, [], []
    for picks in golden.top_ids:
        scale, low = struct.unpack("<ff", base.read(8))
        steps = np.frombuffer(base.read(2 * padded), "<u2")[:n_vocab]
        logprobs.append(scale * steps[picks].astype(np.float64) + low)
        best.append(int(np.argmax(steps)))
    kl, agree = distance(golden, np.array(logprobs), np.array(best))
    for sequences, positions in ((1, 10), (1, 50), (1, 500), (len(ids), 500)):
        keep = Golden(sys.argv[2]).limit(sequences, positions)
        print(f"{sequences}x{positions}: mean KL {kl[keep].mean():.6f}, top-1 {agree[keep].mean():.4f}")
    print(f"mean KL {kl.mean():.6f}, median {np.median(kl):.6f}, 99% {np.quantile(kl, .99):.4f}, top-1 {agree.mean():.4f}, {len(kl)} positions")


main()
