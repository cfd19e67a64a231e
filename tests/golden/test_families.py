"""Each family as a Hugging Face folder against `transformers` in f32 (make_families.py), and folders that must be refused."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "tools"))
import hf_folder  # noqa: E402

BUILD = os.environ.get("B", "build")
CASES = json.load(open(os.path.join(HERE, "families.json"), encoding="utf-8"))
EXPECTED = np.load(os.path.join(HERE, "families.npz"))
DTYPES = {"BF16": hf_folder.bf16, "F16": lambda x: x.astype(np.float16), "F32": lambda x: x}


def tensors_of(case, dtype="F32"):
    """BF16 values in each dtype, so that results are equal."""
    return {name: DTYPES[dtype](hf_folder.from_bf16(hf_folder.bf16(hf_folder.weight(name, shape, case["seed"])))) for name, shape in case["tensors"].items()}


def make(folder, case, config="config", dtype="F32", shards=1, change=None):
    hf_folder.write_tokenizer(folder, hf_folder.byte_level(), {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"})
    hf_folder.write_json(folder, "config.json", case[config])
    tensors = tensors_of(case, dtype)
    if change:
        change(tensors)
    hf_folder.write_weights(folder, tensors, shards)
    return folder


def run(folder, ids, tmp_path, isa="auto", chunk=17, threads=2, kv="f16"):
    """The finished process and log-probabilities of ids 0..63 [positions, 64]."""
    files = [str(tmp_path / name) for name in ("ids", "picks", "out")]
    np.asarray(ids, "<u4").tofile(files[0])
    np.tile(np.arange(64, dtype="<u4"), len(ids)).tofile(files[1])
    done = subprocess.run([f"{BUILD}/tests/tools/logits", str(folder), *files, str(len(ids)), "0", isa, str(threads), str(chunk), kv], capture_output=True,
                          text=True, timeout=300)
    return done, np.fromfile(files[2], "<f4").reshape(-1, 66)[:, :64] if done.returncode == 0 else None


def check(name, scores, most=0.02):
    """Errors are those of KV in f16, and grow with the spread of the results (tied embeddings make it large)."""
    error, spread = np.abs(scores[::3] - EXPECTED[name]), EXPECTED[name].std()
    assert error.max() < most * spread and error.mean() < 0.15 * most * spread, (name, error.max(), error.mean(), spread)


@pytest.mark.parametrize("config", ["config", "saved"])
@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_equal_transformers(name, config, tmp_path):
    done, scores = run(make(tmp_path / "model", CASES[name], config), CASES[name]["ids"], tmp_path)
    assert done.returncode == 0, done.stderr
    check(name, scores)


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512", "amx"])
@pytest.mark.parametrize("name, dtype", [("gemma3", "F32"), ("qwen3", "F32"), ("mistral", "F32"), ("gemma3", "BF16"), ("qwen3", "BF16"), ("llama", "BF16")])
def test_each_instruction_set_and_cut_gives_its_own_bits_at_any_chunk(name, dtype, isa, tmp_path):
    folder = make(tmp_path / "model", CASES[name], dtype=dtype)
    done, scores = run(folder, CASES[name]["ids"], tmp_path, isa)
    if "CPU" in done.stderr and done.returncode:
        pytest.skip(done.stderr.strip())
    check(name, scores, 0.08 if isa == "amx" and dtype == "BF16" else 0.02)  # AMX rounds what meets BF16 weights
    for chunk, threads in ((1, 1), (64, 2)):
        assert np.array_equal(run(folder, CASES[name]["ids"], tmp_path, isa, chunk, threads)[1], scores)


@pytest.mark.parametrize("dtype, shards", [("F32", 2), ("F16", 3), ("BF16", 2)])
def test_dtypes_and_shards_give_the_same(dtype, shards, tmp_path):
    scores = [run(make(tmp_path / str(i), CASES["llama"], dtype=d, shards=n), CASES["llama"]["ids"], tmp_path, "generic")[1] for i, (d, n) in enumerate(((dtype, shards), ("F32", 1)))]
    assert np.abs(scores[0] - scores[1]).max() < 1e-4


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral", "gemma3"])
def test_awq_divides_the_norms_of_each_family(name, tmp_path):
    """A norm divided wrongly, or another than the one that feeds the scaled columns, would cost far more than rounding does."""
    source, ids = make(tmp_path / "model", CASES[name], dtype="BF16"), CASES[name]["ids"]
    (tmp_path / "text.txt").write_text("".join(hf_folder.CORPUS))
    for out, more in (("rounded", []), ("awq", ["--calibration", str(tmp_path / "text.txt"), "--context", "64"])):
        done = subprocess.run([f"{BUILD}/kvgate-quantize", str(source), str(tmp_path / out), "--format", "awq-int4", "--group", "32", *more], capture_output=True,
                              text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    want, rounded, awq = (run(tmp_path / folder, ids, tmp_path)[1] for folder in ("model", "rounded", "awq"))
    error = {out: np.sqrt(np.square(scores - want).mean()) for out, scores in (("rounded", rounded), ("awq", awq))}
    print(error, want.std())
    assert 0 < error["awq"] < 1.2 * error["rounded"], error


def refused(folder, tmp_path):
    done, _ = run(folder, [1, 2, 3], tmp_path)
    assert done.returncode == 1, done.stderr
    return done.stderr


def test_f6_tied_embeddings_go_by_the_configuration(tmp_path):
    tied, untied = CASES["qwen2"], CASES["llama"]
    _, alone = run(make(tmp_path / "a", tied), tied["ids"], tmp_path)
    embedding = "model.embed_tokens.weight"
    _, beside = run(make(tmp_path / "b", tied, change=lambda t: t.update({"lm_head.weight": t[embedding][::-1].copy()})), tied["ids"], tmp_path)
    assert np.array_equal(alone, beside)
    assert "lm_head.weight is missing" in refused(make(tmp_path / "c", untied, change=lambda t: t.pop("lm_head.weight")), tmp_path)


FAULTS = {
    "model.layers.1.mlp.down_proj.weight is missing": lambda t: t.pop("model.layers.1.mlp.down_proj.weight"),
    "model.layers.0.extra.weight is not part of": lambda t: t.update({"model.layers.0.extra.weight": t["model.norm.weight"]}),
    "model.layers.7.input_layernorm.weight is not part of": lambda t: t.update({"model.layers.7.input_layernorm.weight": t["model.norm.weight"]}),
    "model.layers.0.self_attn.q_proj.weight is [96, 64, 1, 1], expected [96, 128]":
        lambda t: t.update({"model.layers.0.self_attn.q_proj.weight": t["model.layers.0.self_attn.q_proj.weight"][:64]}),
    "model.norm.weight has type I32": lambda t: t.update({"model.norm.weight": np.zeros(96, np.int32)}),
    "has 300 rows": lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"][:300]}),
}


@pytest.mark.parametrize("says", FAULTS)
def test_a_wrong_tensor_is_refused_by_name(says, tmp_path):
    assert says in refused(make(tmp_path / "model", CASES["llama"], change=FAULTS[says]), tmp_path)


def test_a_folder_of_unknown_quantization_is_refused_by_its_method(tmp_path):
    case = {**CASES["llama"], "config": {**CASES["llama"]["config"], "quantization_config": {"quant_method": "fp8", "bits": 8}}}
    assert 'quant_method "fp8"' in refused(make(tmp_path / "model", case), tmp_path)


def test_a_tensor_outside_the_layers_is_warned_about(tmp_path):
    done, _ = run(make(tmp_path / "model", CASES["qwen3"], change=lambda t: t.update({"other.weight": t["model.norm.weight"]})), CASES["qwen3"]["ids"], tmp_path)
    assert done.returncode == 0 and "other.weight is not used" in done.stderr
