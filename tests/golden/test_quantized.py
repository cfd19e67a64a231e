"""Quantized Hugging Face folders give what the same folder gives with the weights that plain numpy makes of the codes; folders that
lie are refused by name."""
import copy
import json
import os
import subprocess
import sys

import numpy as np
import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "tools"))
import hf_folder  # noqa: E402
import quantized_folder as qf  # noqa: E402

BUILD = os.environ.get("B", "build")
IDS = [(i * 37 + 11) % 256 for i in range(40)]
HIDDEN, FFN, HEADS, KV, DIM, LAYERS = 128, 256, 4, 2, 32, 2
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
          "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": DIM, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
          "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False}


def tokenizer():
    return hf_folder.byte_level()


def tensors():
    rows = tokenizer().get_vocab_size()
    shapes = {"model.embed_tokens.weight": (rows, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": ((rows + 7) // 8 * 8, HIDDEN)}
    shapes["model.embed_tokens.weight"] = shapes["lm_head.weight"]
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        shapes.update({at + "self_attn.q_proj.weight": (HEADS * DIM, HIDDEN), at + "self_attn.k_proj.weight": (KV * DIM, HIDDEN),
                       at + "self_attn.v_proj.weight": (KV * DIM, HIDDEN), at + "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
                       at + "mlp.gate_proj.weight": (FFN, HIDDEN), at + "mlp.up_proj.weight": (FFN, HIDDEN), at + "mlp.down_proj.weight": (HIDDEN, FFN),
                       at + "input_layernorm.weight": (HIDDEN,), at + "post_attention_layernorm.weight": (HIDDEN,)})
    return {name: hf_folder.weight(name, shape) for name, shape in shapes.items()}


def make(folder, weights, quantization=None):
    hf_folder.write_tokenizer(folder, tokenizer(), {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"})
    hf_folder.write_json(folder, "config.json", {**CONFIG, "vocab_size": len(weights["model.embed_tokens.weight"]),
                                                 **({} if quantization is None else {"quantization_config": quantization})})
    hf_folder.write_weights(folder, weights)
    return folder


def run(folder, tmp_path, isa="auto", chunk=17, threads=2):
    """The finished process and log-probabilities of ids 0..63 [positions, 64]."""
    files = [str(tmp_path / name) for name in ("ids", "picks", "out")]
    np.asarray(IDS, "<u4").tofile(files[0])
    np.tile(np.arange(64, dtype="<u4"), len(IDS)).tofile(files[1])
    done = subprocess.run([f"{BUILD}/tests/tools/logits", str(folder), *files, str(len(IDS)), "0", isa, str(threads), str(chunk), "bf16" if isa == "cuda" else "f16"], capture_output=True,
                          text=True, timeout=300)
    return done, np.fromfile(files[2], "<f4").reshape(-1, 66)[:, :64].astype(np.float64) if done.returncode == 0 else None


def compare(scheme, tmp_path, also=()):
    """Log-probabilities of the quantized folder and of its plain twin."""
    stored, plain = qf.quantize(tensors(), scheme, also)
    done, got = run(make(tmp_path / "quantized", stored, qf.SCHEMES[scheme][0]), tmp_path)
    assert done.returncode == 0, done.stderr
    twin, want = run(make(tmp_path / "plain", plain), tmp_path)
    assert twin.returncode == 0, twin.stderr
    return done, got, want


def limit(scheme):
    """Of the results' spread. 8-bit weights meet activations of 8 bits, the others activations of 16; in blocks of 32 the product of
    scale and zero is rounded to f16."""
    return 0.15 if "w8" in scheme or "8 bits" in scheme else 0.06 if scheme == "awq, short names" else 0.02


@pytest.mark.parametrize("scheme", qf.SCHEMES)
def test_codes_mean_what_their_format_says(scheme, tmp_path):
    done, got, want = compare(scheme, tmp_path)
    assert np.abs(got - want).max() < limit(scheme) * want.std(), (np.abs(got - want).max(), want.std())
    assert ("kept as F32" in done.stderr) == (scheme == "gptq, scales below f16")  # W8A8 keeps scales of f32


@pytest.mark.parametrize("scheme", ["gptq", "awq", "w8a8"])
def test_an_output_matrix_may_be_quantized(scheme, tmp_path):
    _, got, want = compare(scheme, tmp_path, ("lm_head.weight",))
    assert np.abs(got - want).max() < limit(scheme) * want.std()


def test_an_output_matrix_may_have_bits_of_its_own(tmp_path):
    """GPTQ's `dynamic`: layers of 4 bits, lm_head of 8."""
    weights, head = tensors(), "lm_head.weight"
    stored, plain = qf.quantize(weights, "gptq")
    eight, eight_plain = qf.quantize({head: weights[head]}, "gptq 8 bits", (head,))
    for tensors_of, own in ((stored, eight), (plain, eight_plain)):
        del tensors_of[head]
        tensors_of.update(own)
    done, got = run(make(tmp_path / "quantized", stored, qf.gptq_config(lm_head=True, dynamic={"+:^lm_head$": {"bits": 8}})), tmp_path)
    assert done.returncode == 0, done.stderr
    twin, want = run(make(tmp_path / "plain", plain), tmp_path)
    assert twin.returncode == 0, twin.stderr
    assert np.abs(got - want).max() < limit("gptq 8 bits") * want.std()
    assert "lm_head.qweight is [32," in refused(make(tmp_path / "four", stored, qf.gptq_config(lm_head=True)), tmp_path)


@pytest.mark.parametrize("scheme", ["gptq", "gptq act-order asymmetric", "awq", "w8a8"])
def test_each_instruction_set_gives_its_own_bits_at_any_chunk(scheme, tmp_path):
    folder = make(tmp_path / "model", qf.quantize(tensors(), scheme)[0], qf.SCHEMES[scheme][0])
    for isa in ("generic", "avx2", "avx512", "amx"):
        done, scores = run(folder, tmp_path, isa)
        if "CPU" in done.stderr and done.returncode:
            continue
        assert done.returncode == 0, done.stderr
        for chunk, threads in ((1, 1), (40, 2)):
            assert np.array_equal(run(folder, tmp_path, isa, chunk, threads)[1], scores), isa


def refused(folder, tmp_path):
    done, _ = run(folder, tmp_path)
    assert done.returncode == 1, (done.returncode, done.stderr)
    return done.stderr


AT = "model.layers.1.mlp.down_proj."


def drop(part):
    return lambda t: t.pop(AT + part)


def put(part, change):
    return lambda t: t.update({AT + part: np.ascontiguousarray(change(t[AT + part]))})


def with_value(index, value):
    def change(array):
        array = array.copy()
        array.reshape(-1)[index] = value
        return array
    return change


FAULTS = [
    ("gptq", drop("qzeros"), AT + "qzeros is missing"),
    ("gptq", drop("scales"), AT + "scales is missing"),
    ("gptq act-order", drop("g_idx"), AT + "g_idx is missing"),
    ("gptq", drop("qweight"), AT + "weight is missing"),
    ("gptq", put("qweight", lambda a: a[:-1]), AT + "qweight is [31, 128] of 2 dimensions, expected [32, 128]"),
    ("gptq", put("qweight", lambda a: a[:, :64]), AT + "qweight is [32, 64] of 2 dimensions, expected [32, 128]"),
    ("gptq", put("qzeros", lambda a: a[:, :8]), AT + "qzeros is [4, 8] of 2 dimensions, expected [4, 16]"),
    ("gptq", put("scales", lambda a: a[:2]), AT + "scales is [2, 128] of 2 dimensions, expected [4, 128] of 2: a matrix [128, 256] of 4 bits in groups of 64"),
    ("gptq", put("scales", lambda a: a.astype(np.int32)), AT + "scales has type I32, expected F16, BF16 or F32"),
    ("gptq", put("qweight", lambda a: a.astype(np.float32)), AT + "qweight has type F32, expected I32"),
    ("gptq", put("scales", with_value(130, np.inf)), AT + "weight: the scale of row 2, group 1 is inf"),
    ("gptq", put("g_idx", lambda a: a[:-1]), AT + "g_idx is [255, 1] of 1 dimensions, expected [256, 1]"),
    ("gptq act-order", put("g_idx", with_value(5, 4)), AT + "g_idx: column 5 is of group 4, outside 0..3"),
    ("gptq act-order", put("g_idx", with_value(7, -1)), AT + "g_idx: column 7 is of group -1, outside 0..3"),
    ("gptq", lambda t: t.update({AT + "weight": np.zeros((128, 256), np.float32)}), AT + "weight is not part of"),
    ("awq", put("qweight", lambda a: a[:, :-1]), AT + "qweight is [256, 15] of 2 dimensions, expected [256, 16]"),
    ("awq", drop("qzeros"), AT + "qzeros is missing"),
    ("w4a16", put("weight_packed", lambda a: a[:, :-1]), AT + "weight_packed is [128, 31] of 2 dimensions, expected [128, 32]"),
    ("w4a16", put("weight_shape", with_value(1, 255)), AT + "weight_shape says [128, 255], expected [128, 256]"),
    ("w4a16", put("weight_scale", lambda a: a[:, :2]), AT + "weight_scale is [128, 2] of 2 dimensions, expected [128, 4]"),
    ("w4a16 asymmetric", drop("weight_zero_point"), AT + "weight_zero_point is missing"),
    ("w8a8", drop("weight_scale"), AT + "weight_scale is missing"),
    ("w8a8", put("weight_scale", lambda a: a[:-1]), AT + "weight_scale is [127, 1] of 2 dimensions, expected [128, 1]"),
    ("w8a8", put("weight", lambda a: a[:, :-1]), AT + "weight is [128, 255] of 2 dimensions, expected [128, 256]"),
    ("w8a8", lambda t: t.update({AT + "input_scale": np.ones((1,), np.float32)}), AT + "input_scale is not part of"),
]


@pytest.mark.parametrize("scheme, change, says", FAULTS, ids=[f"{s}: {w.removeprefix(AT)}"[:70] for s, _, w in FAULTS])
def test_f4_a_matrix_that_lies_is_refused_by_name(scheme, change, says, tmp_path):
    stored, _ = qf.quantize(tensors(), scheme)
    change(stored)
    text = refused(make(tmp_path / "model", stored, qf.SCHEMES[scheme][0]), tmp_path)
    assert says in text, text


def scheme_of(config, **change):
    config = copy.deepcopy(config)
    config["config_groups"]["group_0"]["weights"].update(change)
    return config


INT8 = qf.SCHEMES["w8a8"][0]
CONFIGS = [
    ({"quant_method": "bitsandbytes"}, 'quant_method "bitsandbytes"'),
    ({}, 'quant_method ""'),
    (qf.gptq_config(bits=3), "bits is 3, outside 4..8"),
    (qf.gptq_config(bits=5), "bits is 5: 4 and 8 are served"),
    (qf.gptq_config(bits="4"), "bits is missing or not a whole number"),
    (qf.gptq_config(group=16), "group_size is 16: multiples of 32"),
    (qf.gptq_config(group=0), "group_size is 0"),
    (qf.gptq_config(group=-2), "group_size is -2"),
    (qf.gptq_config(group=96), "[128, 128]: columns must come in groups of 96"),
    (qf.gptq_config(group=128), "q_proj.qzeros is [2, 16] of 2 dimensions, expected [1, 16] of 2: a matrix [128, 128] of 4 bits in groups of 128"),
    (qf.gptq_config(checkpoint_format="marlin"), 'checkpoint_format "marlin"'),
    *((qf.gptq_config(dynamic=d), "dynamic: nothing but bits of lm_head, 4 or 8, is served")
      for d in ({"-:lm_head": {}}, {"+:lm_head": {"bits": 5}}, {"+:lm_head": {"bits": 8, "group_size": 32}}, {"+:lm_head": {}},
                {"+:mlp.*": {"bits": 8}}, {"+:lm_head": {"bits": 8}, "+:mlp.*": {"bits": 8}}, [])),
    (qf.awq_config(version="gemv"), 'version "gemv"'),
    (qf.awq_config(bits=8), "awq of 8 bits"),
    (qf.compressed_config("float-quantized"), 'format "float-quantized"'),
    (qf.compressed_config("int-quantized", bits=4, group=0), "int-quantized with 4 bits"),
    (qf.compressed_config("int-quantized", bits=8, group=0, activations={**qf.DYNAMIC, "dynamic": False}), "input_activations are not dynamic"),
    (scheme_of(INT8, type="float"), 'type "float"'),
    (scheme_of(INT8, strategy="block"), 'strategy "block"'),
    ({**INT8, "config_groups": {}}, "config_groups of 0 schemes"),
    ({**INT8, "config_groups": {"a": {**INT8["config_groups"]["group_0"], "targets": ["re:.*mlp.*"]}}}, "targets other than"),
]


@pytest.mark.parametrize("config, says", CONFIGS, ids=[w[:40] for _, w in CONFIGS])
def test_a_configuration_that_is_not_served_is_refused_by_its_word(config, says, tmp_path):
    text = refused(make(tmp_path / "model", qf.quantize(tensors(), "gptq")[0], config), tmp_path)
    assert says in text, text


@pytest.mark.parametrize("form, most", [("w8a8", 0.15), ("gptq-int4", 1.0), ("q8_0", 0.1)])
def test_what_kvgate_quantize_writes_loads_and_is_near_its_source(form, most, tmp_path):
    source = make(tmp_path / "source", tensors())
    done = subprocess.run([f"{BUILD}/kvgate-quantize", str(source), str(tmp_path / form), "--format", form, "--group", "32"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    _, want = run(source, tmp_path)
    done, got = run(tmp_path / form, tmp_path)
    assert done.returncode == 0, done.stderr
    assert 0 < np.abs(got - want).mean() < most * want.std(), (np.abs(got - want).mean(), want.std())
    assert json.load(open(tmp_path / form / "config.json"))["quantization_config"]


# Bytes of the layers' matrices of each scheme, by their weights and their rows.
BYTES = {"gptq": lambda n, r: n / 2 + n / 64 * 2, "gptq, groups of 128": lambda n, r: n / 2 + n / 128 * 2, "gptq asymmetric": lambda n, r: n / 2 + n / 64 * 3,
         "awq": lambda n, r: n / 2 + n / 64 * 3, "awq, short names": lambda n, r: n * 20 / 32, "w4a16": lambda n, r: n / 2 + n / 64 * 2,
         "w8a8": lambda n, r: n + 8 * r, "w8a16": lambda n, r: n * 34 / 32, None: lambda n, r: 4 * n}


@pytest.mark.parametrize("scheme", BYTES)
def test_a_plan_counts_the_bytes_of_a_folder_in_memory(scheme, tmp_path):
    weights = qf.quantize(tensors(), scheme)[0] if scheme else tensors()
    folder = make(tmp_path / "model", weights, qf.SCHEMES[scheme][0] if scheme else None)
    done = subprocess.run([f"{BUILD}/kvgate-worker", "--plan", "--json", "--model", str(folder), "--memory", "1G", "--in", "200", "--out", "50", "--plan-bandwidth", "40G", "--plan-compute", "500G"],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    out, ends = json.loads(done.stdout), weights["model.embed_tokens.weight"].size
    layers = LAYERS * (2 * (HEADS + KV) * DIM * HIDDEN + 3 * HIDDEN * FFN)
    rows = LAYERS * ((HEADS + 2 * KV) * DIM + HIDDEN + 2 * FFN + HIDDEN)
    assert out["weights"] == layers + ends
    assert out["step_bytes"] == BYTES[scheme](layers, rows) + 4 * ends
    assert out["weight_bytes"] == out["step_bytes"] + 4 * ends
    assert out["block_bytes"] == LAYERS * KV * DIM * 2 * 2 * 32


@pytest.mark.parametrize("scheme", ["gptq act-order asymmetric", "awq", "w4a16", "w8a8"])
def test_two_ranks_say_what_one_process_says(scheme, tmp_path):
    """Rows of a folder's matrix are cut in its own form; where columns are cut, it is first made of blocks of 32."""
    from stack import Worker
    folder = str(make(tmp_path / "model", qf.quantize(tensors(), scheme)[0], qf.SCHEMES[scheme][0]))
    said = []
    for ranks in (1, 2):
        with Worker("--tensor-parallel-size", ranks, "--device", "cpu", "--num-kv-blocks", 16, model=folder, served="q", gateway=False) as worker:
            made = worker.openai().completions.create(model="q", prompt="a lamp and a river, a copper river", max_tokens=1, temperature=0, logprobs=20)
            said.append(made.choices[0].logprobs.top_logprobs[0])
    both = said[0].keys() & said[1].keys()
    assert len(both) >= 15
    worst = max(abs(said[0][token] - said[1][token]) for token in both)
    assert worst < (0.2 if scheme == "w8a8" else 0.02)  # measured 0.08, where activations of 8 bits get other scales; 0.004
