#!/usr/bin/env python3
"""Writes tests/golden/families.json and families.npz: small random models of each family and what `transformers` (f32, torch) makes
of them. Weights are made from their names (tests/tools/hf_folder.py), so that only names, shapes and results are kept.

usage: make_families.py        needs torch and transformers
"""
import json
import os
import sys

import numpy as np
import torch
import transformers

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "tools"))
import hf_folder  # noqa: E402

LENGTH, PICKS = 64, 64
BASE = {"vocab_size": 512, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CASES = {
    "llama": {"model_type": "llama", **BASE, "head_dim": 32, "rope_theta": 1000.0, "rope_scaling": LLAMA3, "attention_bias": True},
    "llama-linear": {"model_type": "llama", **BASE, "head_dim": 48, "rope_scaling": {"type": "linear", "factor": 2.0}, "tie_word_embeddings": True},
    "llama-yarn": {"model_type": "llama", **BASE, "head_dim": 32, "rope_scaling": YARN},
    "mistral": {"model_type": "mistral", **BASE, "head_dim": 32, "sliding_window": 17},
    "mistral-full": {"model_type": "mistral", **BASE, "head_dim": 32, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", **BASE, "hidden_size": 128, "rope_theta": 1e6, "tie_word_embeddings": True},
    "qwen2-window": {"model_type": "qwen2", **BASE, "hidden_size": 128, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", **BASE, "head_dim": 64, "rope_theta": 1e6},
    "gemma3": {"model_type": "gemma3_text", **BASE, "num_hidden_layers": 7, "num_key_value_heads": 1, "head_dim": 32, "query_pre_attn_scalar": 48,
               "sliding_window": 12, "rope_theta": 1e6, "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
}


def run(name, config):
    settings = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
    settings._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(settings).float().eval()
    seed = -1 if "gemma" in name else 1
    tensors = {key: list(value.shape) for key, value in model.state_dict().items()}
    if settings.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    state = {key: torch.from_numpy(hf_folder.from_bf16(hf_folder.bf16(hf_folder.weight(key, shape, seed)))) for key, shape in tensors.items()}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    ids = np.random.Generator(np.random.PCG64(5)).integers(0, 420, LENGTH)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids)[None]).logits[0].double()
    scores = torch.log_softmax(logits, -1)[:, :PICKS].float().numpy()
    saved = settings.to_dict()  # as save_pretrained writes it today
    print(name, scores.std(), saved.get("rope_parameters"), saved.get("layer_types"))
    return {"config": config, "saved": saved, "tensors": tensors, "seed": seed, "ids": ids.tolist()}, scores


def main():
    cases, results = {}, {}
    for name, config in CASES.items():
        cases[name], results[name] = run(name, config)
    with open(os.path.join(HERE, "families.json"), "w", encoding="utf-8") as f:
        json.dump(cases, f, indent=None, separators=(",", ":"))
        f.write("\n")
    np.savez_compressed(os.path.join(HERE, "families.npz"), **{name: value[::3] for name, value in results.items()})


if __name__ == "__main__":
    main()
