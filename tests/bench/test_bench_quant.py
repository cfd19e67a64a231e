"""bench-quant's rows on a small model, so that it works when somebody needs its numbers; and the aims that hold on every machine."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import bench_quant
import hf_folder
from conftest import BUILD, ROOT

HIDDEN, FFN, LAYERS = 256, 512, 2
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
          "hidden_act": "silu", "tie_word_embeddings": True}
PARTS = {"self_attn.q_proj": (256, HIDDEN), "self_attn.k_proj": (128, HIDDEN), "self_attn.v_proj": (128, HIDDEN), "self_attn.o_proj": (HIDDEN, 256),
         "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN)}


def write_base(folder):
    tokenizer = hf_folder.byte_level()
    rows = (tokenizer.get_vocab_size() + 7) // 8 * 8
    shapes = {"model.embed_tokens.weight": (rows, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        shapes.update({f"model.layers.{i}.{part}.weight": shape for part, shape in PARTS.items()})
        shapes.update({f"model.layers.{i}.{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")})
    hf_folder.write_tokenizer(folder, tokenizer, {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"})
    hf_folder.write_json(folder, "config.json", {**CONFIG, "vocab_size": rows})
    hf_folder.write_weights(folder, {name: hf_folder.bf16(hf_folder.weight(name, shape)) for name, shape in shapes.items()})


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench-quant")
    write_base(path / "toy" / "bf16")
    (path / "text").write_text("".join(hf_folder.CORPUS) * 40, encoding="utf-8")
    env = {**os.environ, "FOLDERS": str(path), "BENCH_FILE": str(path / "rows.json"), "MODEL": "toy.gguf", "TEXT": str(path / "text"), "RUNS": "1", "STEPS": "1",
           "WHAT": "bytes speed kl", "TASKS": "", "KL_TOKENS": "400", "READ_MB": "16", "B": os.path.relpath(BUILD, ROOT)}
    for forms in ("w8a8", "w8a8-head int4 int4-head"):  # in pieces
        done = subprocess.run([sys.executable, os.path.join(ROOT, "tests/bench/bench_quant.py")], env={**env, "FORMS": forms}, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    assert "| INT4, rounded --lm-head |" in done.stdout and "| W8A8 |" in done.stdout  # the table is of all pieces
    with open(path / "rows.json", encoding="utf-8") as f:
        return {row["row"]: row for row in json.load(f)}


def test_an_interrupted_divergence_goes_on_where_it_ended(tmp_path):
    """What score printed is kept by window; a torn line and a window that lacks a model are taken again."""
    program = tmp_path / "score"
    program.write_text("#!/bin/sh\nfrom=$2; echo '{\"windows\": 3}'; echo asked $from >> " + str(tmp_path / "asked") +
                       "\nwhile [ $from -lt 3 ]; do for m in 0 1; do echo \"{\\\"model\\\": $m, \\\"window\\\": $from}\"; done; from=$((from + 1)); done\n")
    program.chmod(0o755)
    kept, whole = tmp_path / "windows.jsonl", [{"model": m, "window": w} for w in range(3) for m in (0, 1)]
    assert bench_quant.windows_of([str(program)], {"of": 1}, 2, str(kept)) == whole
    lines = kept.read_text().splitlines(keepends=True)
    kept.write_text("".join(lines[:4]) + '{"model": 1, "wi')
    assert bench_quant.windows_of([str(program)], {"of": 1}, 2, str(kept)) == whole and kept.read_text() == "".join(lines)
    assert bench_quant.windows_of([str(program)], {"of": 2}, 2, str(kept)) == whole  # other models: nothing is kept
    assert (tmp_path / "asked").read_text().split() == ["asked", "0", "asked", "1", "asked", "0"]


@pytest.mark.parametrize("form, most", [("W8A8", 52), ("W8A8 --lm-head", 52), ("INT4, rounded", 27), ("INT4, rounded --lm-head", 27)])
def test_bytes_of_the_linears_keep_to_their_aim(rows, form, most):
    """A narrow matrix pays more for its rows' eight bytes: 256 columns 51.6 %."""
    assert 25 < rows[f"toy {form}: quantized linears, of BF16"]["value"] <= most


@pytest.mark.parametrize("form", ["BF16", "W8A8", "W8A8 --lm-head", "INT4, rounded", "INT4, rounded --lm-head"])
def test_every_form_has_its_rows(rows, form):
    for what in ("whole model, of BF16", "resident memory", "decode, batch 1", "decode, batch 16", "prefill, one of 512", "prefill, 16 of 32"):
        assert rows[f"toy {form}: {what}"]["value"] > 0
    if form != "BF16":
        kl = next(row["value"] for name, row in rows.items() if name.startswith(f"toy {form}: KL to BF16"))
        assert 0 < kl < 1 and np.isfinite(kl)
    assert rows[f"toy {form}: decode, batch 1"]["limit"] > 0
