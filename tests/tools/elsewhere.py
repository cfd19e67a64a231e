#!/usr/bin/env python3
"""What another engine makes of a Hugging Face folder: log-probabilities of ids 0..63 after each token but the last.

usage: elsewhere.py transformers|vllm FOLDER IDS OUT     IDS: u32; OUT: f32 [tokens - 1, 64]

Runs under a Python that has the engine: transformers with torch, compressed-tensors, gptqmodel and optimum, computing in F32 where
its kernels do; or vLLM for CPUs, in BF16.
"""
import os
import sys

import numpy as np

PICKS = 64


def transformers(folder, ids):
    import torch
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu").eval()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return torch.log_softmax(logits, -1)[:, :PICKS].numpy()


def vllm(folder, ids):
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    import json
    from vllm import LLM, SamplingParams
    n = json.load(open(os.path.join(folder, "config.json"), encoding="utf-8"))["vocab_size"]
    engine = LLM(folder, dtype="bfloat16", max_model_len=128, enforce_eager=True, max_logprobs=n)
    out = engine.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=1, prompt_logprobs=n))
    return np.array([[row[i].logprob for i in range(PICKS)] for row in out[0].prompt_logprobs[1:]])


if __name__ == "__main__":
    if len(sys.argv) != 5 or sys.argv[1] not in ("transformers", "vllm"):
        sys.exit(__doc__)
    globals()[sys.argv[1]](sys.argv[2], np.fromfile(sys.argv[3], "<u4").tolist()).astype("<f4").tofile(sys.argv[4])
