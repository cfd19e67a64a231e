"""kvgate-quantize on Hugging Face folders: its files are read by the safetensors package and mean what their formats say."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import gguf
import numpy as np
import pytest
import safetensors

import hf_folder
import toy_model
from conftest import BUILD, ROOT

QUANTIZE, SCORE = os.path.join(BUILD, "kvgate-quantize"), os.path.join(BUILD, "kvgate-score")
SHAPE = toy_model.Shape(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=256)
LINEARS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def quantize(*args):
    return subprocess.run([QUANTIZE, *map(str, args)], cwd=ROOT, capture_output=True, text=True, timeout=300)


def bf16(raw):
    return (np.asarray(raw).view("<u2").astype("<u4") << 16).view("<f4")


def load(folder):
    """name -> (dtype, array), BF16 as f32; checks the header as the package does."""
    with safetensors.safe_open(os.path.join(folder, "model.safetensors"), "np") as file:
        assert file.keys()
    data = open(os.path.join(folder, "model.safetensors"), "rb").read()
    n = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + n])
    header.pop("__metadata__")
    out, kinds = {}, {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "I8": "i1", "I32": "<i4"}
    for name, about in header.items():
        begin, end = about["data_offsets"]
        array = np.frombuffer(data[8 + n + begin:8 + n + end], kinds[about["dtype"]]).reshape(about["shape"])
        out[name] = (about["dtype"], bf16(array) if about["dtype"] == "BF16" else array)
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hf")
    toy_model.random_model(str(path / "toy.gguf"), shape=SHAPE, seed=3)
    subprocess.run([sys.executable, os.path.join(ROOT, "tests/tools/gguf_to_hf.py"), str(path / "toy.gguf"), str(path / "hf")], check=True, timeout=120)
    (path / "hf" / "tokenizer.json").write_text('{"kept": 1}')
    return str(path / "hf")


def test_slashes_at_the_end_of_names_are_no_part_of_them(folder, tmp_path):
    done = quantize(folder + "/", f"{tmp_path}/out//", "--format", "w8a8")
    assert done.returncode == 0, done.stderr
    again = quantize(folder, f"{tmp_path}/out/", "--format", "w8a8")
    assert again.returncode == 1 and "exists already" in again.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["out"] and (tmp_path / "out" / "model.safetensors").exists()


def names():
    return [f"model.layers.{layer}.{part}" for layer in range(2) for part in LINEARS]


def test_w8a8_has_a_scale_a_row_and_config_names_it(folder, tmp_path):
    done = quantize(folder, tmp_path / "out", "--format", "w8a8")
    assert done.returncode == 0, done.stderr
    source, out = load(folder), load(tmp_path / "out")
    assert set(out) == {n for n in source} | {f"{n}.weight_scale" for n in names()}
    for name in names():
        weight, (kind, q), (scale_kind, scale) = source[name + ".weight"][1], out[name + ".weight"], out[name + ".weight_scale"]
        assert (kind, scale_kind, scale.shape) == ("I8", "BF16", (weight.shape[0], 1))
        assert np.abs(q).max() == 127
        assert np.all(np.abs(q * scale - weight) <= 0.505 * scale + np.abs(weight).max(1, keepdims=True) / 250)
    for name in source:
        if name.removesuffix(".weight") not in names():
            assert out[name][0] == source[name][0] and np.array_equal(out[name][1], source[name][1])
    config, before = (json.load(open(os.path.join(d, "config.json"))) for d in (tmp_path / "out", folder))
    about = config.pop("quantization_config")
    assert config == before
    assert about["quant_method"] == "compressed-tensors" and about["format"] == "int-quantized" and about["ignore"] == ["lm_head"]
    group = about["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == "channel" and group["input_activations"]["dynamic"] and group["input_activations"]["strategy"] == "token"
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"kept": 1}'


def nibbles(words, axis, order=range(8)):
    """Codes of I32 words along an axis: code i of a word is nibble order[i]."""
    parts = np.stack([(words.view("<u4") >> 4 * i) & 15 for i in order], axis + 1).astype(int)
    return parts.reshape(*words.shape[:axis], -1, *words.shape[axis + 1:])


def unpack_gptq(out, name):
    """Weights [rows, cols] as the format means them: scale * (code - (stored zero + 1))."""
    qweight, qzeros, scales, g_idx = (out[f"{name}.{part}"][1] for part in ("qweight", "qzeros", "scales", "g_idx"))
    codes, zeros = nibbles(qweight, 0), nibbles(qzeros, 1) + 1
    return (scales.astype("f4")[g_idx] * (codes - zeros[g_idx])).T


def unpack_awq(out, name):
    """The same of AWQ: scale * (code - zero), a word's nibbles are rows 0 2 4 6 1 3 5 7."""
    qweight, qzeros, scales = (out[f"{name}.{part}"][1] for part in ("qweight", "qzeros", "scales"))
    codes, zeros = (nibbles(words, 1, (0, 4, 1, 5, 2, 6, 3, 7)) for words in (qweight, qzeros))
    group = len(codes) // len(scales)
    return (np.repeat(scales.astype("f4"), group, 0) * (codes - np.repeat(zeros, group, 0))).T


@pytest.mark.parametrize("group", [128, 32])
def test_gptq_int4_unpacks_to_the_nearest_numbers(group, folder, tmp_path):
    done = quantize(folder, tmp_path / "out", "--format", "gptq-int4", "--group", group)
    assert done.returncode == 0, done.stderr
    source, out = load(folder), load(tmp_path / "out")
    for name in names():
        weight = source[name + ".weight"][1]
        got = unpack_gptq(out, name)
        assert np.array_equal(out[name + ".g_idx"][1], np.arange(weight.shape[1]) // group)
        step = np.repeat(2 * np.abs(weight.reshape(weight.shape[0], -1, group)).max(2) / 15, group, 1)
        assert got.shape == weight.shape
        # -8 to 7 steps: the largest magnitude is 7.5 steps
        assert np.all(np.abs(got - weight) <= 0.51 * step + 1e-6)
    about = json.load(open(tmp_path / "out" / "config.json"))["quantization_config"]
    assert (about["quant_method"], about["bits"], about["group_size"], about["desc_act"], about["sym"]) == ("gptq", 4, group, False, True)
    packed = sum(out[f"{n}.{p}"][1].nbytes for n in names() for p in ("qweight", "qzeros", "scales"))
    assert group == 32 or packed <= 0.27 * sum(2 * source[n + ".weight"][1].size for n in names())


@pytest.mark.parametrize("group", [128, 32])
def test_awq_int4_unpacks_to_the_nearest_numbers(group, folder, tmp_path):
    done = quantize(folder, tmp_path / "out", "--format", "awq-int4", "--group", group)
    assert done.returncode == 0, done.stderr
    source, out = load(folder), load(tmp_path / "out")
    assert not any(name.endswith(".g_idx") for name in out)
    for name in names():
        weight = source[name + ".weight"][1]
        groups = weight.reshape(weight.shape[0], -1, group)
        step = np.repeat((np.maximum(groups.max(2), 0) - np.minimum(groups.min(2), 0)) / 15, group, 1)
        got = unpack_awq(out, name)
        # the zero point is whole: the ends are off by up to half a step
        assert got.shape == weight.shape and np.all(np.abs(got - weight) <= 1.01 * step + 1e-6)
        assert np.square(got - weight).mean() <= 1.2 * np.square(step).mean() / 12
    about = json.load(open(tmp_path / "out" / "config.json"))["quantization_config"]
    assert (about["quant_method"], about["bits"], about["group_size"], about["zero_point"], about["version"]) == ("awq", 4, group, True, "gemm")
    packed = sum(out[f"{n}.{p}"][1].nbytes for n in names() for p in ("qweight", "qzeros", "scales"))
    assert group == 32 or packed <= 0.27 * sum(2 * source[n + ".weight"][1].size for n in names())


def unpack_eight(out, name):
    """Weights [rows, cols] of 8 bits, zero points 128."""
    codes = out[name + ".qweight"][1].view("u1")
    rows = out[name + ".scales"][1].shape[1]
    codes = codes.reshape(-1, rows, 4).transpose(0, 2, 1).reshape(-1, rows)
    assert np.all(out[name + ".qzeros"][1].view("u1") == 127)
    return (out[name + ".scales"][1].astype("f4")[out[name + ".g_idx"][1]] * (codes.astype("f4") - 128)).T


def test_q8_0_of_a_folder_has_the_numbers_of_a_file(folder, tmp_path):
    assert quantize(os.path.join(folder, "..", "toy.gguf"), tmp_path / "toy.gguf", "--format", "q8_0").returncode == 0
    done = quantize(folder, tmp_path / "out", "--format", "q8_0")
    assert done.returncode == 0, done.stderr
    out, file = load(tmp_path / "out"), {t.name: t for t in gguf.GGUFReader(tmp_path / "toy.gguf").tensors}
    for layer in range(2):
        for part, name in (("mlp.down_proj", "ffn_down"), ("mlp.up_proj", "ffn_up"), ("self_attn.o_proj", "attn_output")):
            tensor = file[f"blk.{layer}.{name}.weight"]
            want = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            got = unpack_eight(out, f"model.layers.{layer}.{part}")
            assert tensor.tensor_type.name == "Q8_0" and np.abs(got - want).max() <= np.abs(want).max() / 60  # at most a step: BF16 lies between
            assert np.square(got - want).mean() < 1e-4 * np.square(want).mean()
    about = json.load(open(tmp_path / "out" / "config.json"))["quantization_config"]
    assert (about["quant_method"], about["bits"], about["group_size"], about["lm_head"]) == ("gptq", 8, 32, False) and "dynamic" not in about
    assert "lm_head.weight" in out


def test_lm_head_on_request(folder, tmp_path):
    assert quantize(folder, tmp_path / "a", "--format", "w8a8", "--lm-head").returncode == 0
    assert load(tmp_path / "a")["lm_head.weight"][0] == "I8"
    assert json.load(open(tmp_path / "a" / "config.json"))["quantization_config"]["ignore"] == []


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """A folder whose tokenizer is a real one, so that a text calibrates it (480 tokens: lm_head is packed in 8s); a text that does, and another."""
    path, vocab = tmp_path_factory.mktemp("spoken"), toy_model.Vocabulary(pieces=[f"piece{i}" for i in range(221)])
    toy_model.random_model(str(path / "toy.gguf"), vocab, SHAPE, seed=4)
    subprocess.run([sys.executable, os.path.join(ROOT, "tests/tools/gguf_to_hf.py"), str(path / "toy.gguf"), str(path / "hf")], check=True, timeout=120)
    hf_folder.write_tokenizer(path / "hf", hf_folder.byte_level(), {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"})
    text = "".join("abcdefgh ijk"[i * i * 7 % 11] for i in range(12000))
    (path / "seen.txt").write_text(text[:4000])
    (path / "unseen.txt").write_text(text[4001:])
    return path


def test_lm_head_beside_q8_0_is_another_of_its_matrices(spoken, tmp_path):
    assert quantize(spoken / "hf", tmp_path / "out", "--format", "q8_0", "--lm-head").returncode == 0
    out, weight = load(tmp_path / "out"), load(spoken / "hf")["lm_head.weight"][1]
    assert np.abs(unpack_eight(out, "lm_head") - weight).max() <= np.abs(weight).max() / 250
    about = json.load(open(tmp_path / "out" / "config.json"))["quantization_config"]
    assert (about["bits"], about["lm_head"]) == (8, True) and "dynamic" not in about
    kl = divergence(tmp_path / "out", spoken / "hf", spoken / "unseen.txt")
    assert 0 < kl < 1e-3, kl


def test_lm_head_beside_int4_has_8_bits(spoken, tmp_path):
    assert quantize(spoken / "hf", tmp_path / "out", "--format", "gptq-int4", "--group", 32, "--lm-head").returncode == 0
    out, weight = load(tmp_path / "out"), load(spoken / "hf")["lm_head.weight"][1]
    rows, cols = weight.shape
    codes = out["lm_head.qweight"][1].view("u1").reshape(cols // 4, rows, 4).transpose(0, 2, 1).reshape(cols, rows)
    g_idx, scales = out["lm_head.g_idx"][1], out["lm_head.scales"][1].astype("f4")
    assert np.all(out["lm_head.qzeros"][1].view("u1") == 127) and out["lm_head.qzeros"][1].shape == (cols // 32, rows // 4)
    got = (scales[g_idx] * (codes.astype("f4") - 128)).T
    assert np.all(np.abs(got - weight) <= 0.51 * scales[g_idx].T + 1e-6)
    about = json.load(open(tmp_path / "out" / "config.json"))["quantization_config"]
    assert about["bits"] == 4 and about["lm_head"] is True and about["dynamic"] == {"+:^lm_head$": {"bits": 8}}


def divergence(model, base, text):
    done = subprocess.run([SCORE, "--model", model, "--base", base, "--text", text, "--tokens", "500", "--context", "64", "--skip", "8"], capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()[1:]]
    return sum(line["kl"] for line in lines) / sum(line["tokens"] for line in lines)


def test_layers_are_calibrated_and_lm_head_is_rounded(spoken, tmp_path):
    flags = ["--format", "gptq-int4", "--group", 32, "--lm-head"]
    calibration = ["--calibration", spoken / "seen.txt", "--context", 64, "--tokens", 2048]
    for name, more in (("rounded", []), ("gptq", calibration), ("passes", [*calibration, "--memory", 1])):
        done = quantize(spoken / "hf", tmp_path / name, *flags, *more)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("calibrating layers") == {"rounded": 0, "gptq": 1, "passes": 2}[name]
    rounded, gptq, passes = (load(tmp_path / name) for name in ("rounded", "gptq", "passes"))
    for name in gptq:
        assert gptq[name][0] == rounded[name][0] and np.array_equal(gptq[name][1], passes[name][1])
        calibrated = name.endswith(".qweight") and not name.startswith("lm_head")
        assert calibrated or name.endswith(".scales") or np.array_equal(gptq[name][1], rounded[name][1])
    for name in names():
        assert not np.array_equal(gptq[name + ".qweight"][1], rounded[name + ".qweight"][1])
    assert np.array_equal(gptq["lm_head.scales"][1], rounded["lm_head.scales"][1])
    kl = {name: divergence(tmp_path / name, spoken / "hf", spoken / "unseen.txt") for name in ("rounded", "gptq")}
    assert 0 < kl["gptq"] < kl["rounded"], kl


def plain_twin(quantized, source, path, unpack):
    """The folder with the linear layers that `unpack` makes of the quantized one's codes, in F32."""
    shutil.copytree(source, path)
    out = load(quantized)
    tensors = {name: array for name, (_, array) in out.items() if name.rsplit(".", 1)[0] not in names()}
    hf_folder.write_weights(path, {**tensors, **{name + ".weight": unpack(out, name).astype("<f4") for name in names()}})
    return path


CALIBRATION = ["--context", 64, "--tokens", 2048, "--group", 32]


def test_act_order_is_read_as_it_is_written_and_beats_rounding(spoken, tmp_path):
    flags = ["--format", "gptq-int4", *CALIBRATION]
    for name, more in (("rounded", []), ("ordered", ["--calibration", spoken / "seen.txt", "--act-order"])):
        done = quantize(spoken / "hf", tmp_path / name, *flags, *more)
        assert done.returncode == 0, done.stderr
    out = load(tmp_path / "ordered")
    assert json.load(open(tmp_path / "ordered" / "config.json"))["quantization_config"]["desc_act"] is True
    for name in names():
        g_idx = out[name + ".g_idx"][1]
        assert not np.array_equal(g_idx, np.sort(g_idx)) and np.all(np.bincount(g_idx) == 32)
    at = "model.layers.0.self_attn."
    assert np.array_equal(out[at + "q_proj.g_idx"][1], out[at + "v_proj.g_idx"][1])  # one input, one order
    twin = plain_twin(tmp_path / "ordered", spoken / "hf", tmp_path / "twin", unpack_gptq)
    kl = {name: divergence(tmp_path / name, spoken / "hf", spoken / "unseen.txt") for name in ("rounded", "ordered")}
    assert 0 < kl["ordered"] < kl["rounded"], kl
    assert divergence(tmp_path / "ordered", twin, spoken / "unseen.txt") < 0.02 * kl["ordered"]


def bf16_norms(spoken, path):
    """The folder with its norms in BF16, as models have them, and no longer all alike."""
    shutil.copytree(spoken, path)
    rng = np.random.default_rng(5)
    tensors = {}
    for name, (_, array) in load(spoken).items():
        if "layernorm" in name:
            array = hf_folder.bf16(0.5 + rng.random(array.shape))
        tensors[name] = array
    hf_folder.write_weights(path, tensors)
    return path


def test_awq_scales_columns_divides_what_feeds_them_and_beats_rounding(spoken, tmp_path):
    source = bf16_norms(spoken / "hf", tmp_path / "source")
    flags = ["--format", "awq-int4", *CALIBRATION]
    for name, more in (("rounded", []), ("awq", ["--calibration", spoken / "seen.txt"]), ("passes", ["--calibration", spoken / "seen.txt", "--memory", 1])):
        done = quantize(source, tmp_path / name, *flags, *more)
        assert done.returncode == 0, done.stderr
    before, awq, passes = load(source), load(tmp_path / "awq"), load(tmp_path / "passes")
    assert all(np.array_equal(array, passes[name][1]) for name, (_, array) in awq.items())
    norms = [name for name in before if "layernorm" in name]
    assert all(awq[name][0] == "BF16" for name in norms)
    assert sum(not np.array_equal(awq[name][1], before[name][1]) for name in norms) >= 2
    for name in names():
        if "o_proj" in name or "down_proj" in name:
            continue
        # column by column the matrix has grown by what its norm has shrunk by
        norm = name.rsplit(".", 2)[0] + (".input_layernorm.weight" if "self_attn" in name else ".post_attention_layernorm.weight")
        scale, got, want = before[norm][1] / awq[norm][1], unpack_awq(awq, name), before[name + ".weight"][1]
        if "up_proj" in name:  # rows are divided for down_proj
            want = want * (np.abs(got / scale).sum(1) / np.abs(want).sum(1))[:, None]
        error = np.sqrt(np.square(got / scale - want).mean() / np.square(want).mean())
        assert error < 0.2, (name, error)
    twin = plain_twin(tmp_path / "awq", source, tmp_path / "twin", unpack_awq)
    kl = {name: divergence(tmp_path / name, source, spoken / "unseen.txt") for name in ("rounded", "awq")}
    assert 0 < kl["awq"] < kl["rounded"], kl
    assert divergence(tmp_path / "awq", twin, spoken / "unseen.txt") < 0.02 * kl["awq"]


def large_inputs(spoken, path):
    """The folder with every 16th column of what norms give 40 times as large, and the weights that meet it as much smaller: the same model."""
    shutil.copytree(spoken, path)
    tensors = {}
    for name, (_, array) in load(spoken).items():
        at = np.where(np.arange(array.shape[-1]) % 16 == 5, np.float32(40), np.float32(1))
        if "layernorm" in name:
            array = hf_folder.bf16(array * at)
        elif any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            array = (array / at).astype("<f4")
        tensors[name] = array
    hf_folder.write_weights(path, tensors)
    return path


def test_w8a8_with_a_calibration_divides_large_inputs_and_beats_rounding(spoken, tmp_path):
    source = large_inputs(spoken / "hf", tmp_path / "source")
    flags = ["--format", "w8a8", "--context", 64, "--tokens", 2048]
    seen = ["--calibration", spoken / "seen.txt"]
    for name, more in (("rounded", []), ("smooth", seen), ("passes", [*seen, "--memory", 1])):
        done = quantize(source, tmp_path / name, *flags, *more)
        assert done.returncode == 0, done.stderr
    before, rounded, smooth, passes = load(source), load(tmp_path / "rounded"), load(tmp_path / "smooth"), load(tmp_path / "passes")
    assert all(np.array_equal(array, passes[name][1]) for name, (_, array) in smooth.items())
    for name in names():
        got = smooth[name + ".weight"][1] * smooth[name + ".weight_scale"][1]
        if "o_proj" in name or "down_proj" in name:  # nothing that feeds them is divided
            assert np.array_equal(smooth[name + ".weight"][1], rounded[name + ".weight"][1])
            continue
        norm = name.rsplit(".", 2)[0] + (".input_layernorm.weight" if "self_attn" in name else ".post_attention_layernorm.weight")
        assert smooth[norm][0] == "BF16"
        scale, want = before[norm][1] / smooth[norm][1], before[name + ".weight"][1]
        assert scale[5] > 3 * scale[4]
        assert np.sqrt(np.square(got / scale - want).sum(0) / np.square(want).sum(0)).max() < 0.05, name
    kl = {name: divergence(tmp_path / name, source, spoken / "unseen.txt") for name in ("rounded", "smooth")}
    assert 0 < kl["smooth"] < 0.5 * kl["rounded"], kl


@pytest.mark.parametrize("args, words", [
    (["--format", "gptq-int4", "--act-order"], ["--act-order", "--calibration"]),
    (["--format", "awq-int4", "--calibration", "x", "--act-order"], ["--act-order", "gptq-int4"]),
    (["--format", "awq-int4", "--calibration", "x", "--awq"], ["--awq", "q4_0"]),
])
def test_flags_that_do_not_fit_are_refused(args, words, folder, tmp_path):
    done = quantize(folder, tmp_path / "out", *args)
    assert done.returncode == 2 and all(word in done.stderr for word in words), done.stderr


def test_long_names_are_kept_whole(spoken, tmp_path):
    shutil.copytree(spoken / "hf", tmp_path / "in")
    tensors = {name: array for name, (_, array) in load(spoken / "hf").items()}
    extra = {"x" * 300 + end: np.full(3, i, "<f4") for i, end in enumerate("ab")}
    hf_folder.write_weights(tmp_path / "in", {**tensors, **extra, "y" * 512: np.zeros(1, "<f4")})
    done = quantize(tmp_path / "in", tmp_path / "out", "--format", "w8a8")
    assert done.returncode == 0, done.stderr
    out = load(tmp_path / "out")
    assert "y" * 512 in out and all(np.array_equal(out[name][1], extra[name]) for name in extra)


def test_what_is_quantized_or_exists_is_refused_and_nothing_is_left(folder, tmp_path):
    assert quantize(folder, tmp_path / "a", "--format", "w8a8").returncode == 0
    again = quantize(folder, tmp_path / "a", "--format", "w8a8")
    assert again.returncode == 1 and "exists already" in again.stderr
    twice = quantize(tmp_path / "a", tmp_path / "b", "--format", "gptq-int4")
    assert twice.returncode == 1 and "quantized already" in twice.stderr
    odd = quantize(folder, tmp_path / "c", "--format", "gptq-int4", "--group", 100)
    assert odd.returncode == 2 and "--group" in odd.stderr
    missing = quantize("/nowhere", tmp_path / "d", "--format", "w8a8")
    assert missing.returncode == 1 and "/nowhere" in missing.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_columns_that_are_no_whole_groups_are_refused_by_name(tmp_path):
    toy_model.random_model(str(tmp_path / "toy.gguf"), shape=toy_model.Shape(hidden=64, layers=1, heads=2, kv_heads=1, head_dim=32, ffn=96))
    subprocess.run([sys.executable, os.path.join(ROOT, "tests/tools/gguf_to_hf.py"), str(tmp_path / "toy.gguf"), str(tmp_path / "hf")], check=True, timeout=120)
    done = quantize(tmp_path / "hf", tmp_path / "out", "--format", "gptq-int4")
    assert done.returncode == 1 and "model.layers.0." in done.stderr and "groups of 128" in done.stderr
    assert not (tmp_path / "out").exists()


def changed(folder, path, number=None, config=None):
    """A copy of the folder with a number in place of a q_proj's first, or other members of config.json."""
    shutil.copytree(folder, path)
    tensors = {name: array.copy() for name, (_, array) in load(folder).items()}
    if number is not None:
        tensors["model.layers.1.self_attn.q_proj.weight"][0, 0] = number
    hf_folder.write_weights(path, tensors)
    about = json.load(open(path / "config.json"))
    json.dump({**about, **(config or {})}, open(path / "config.json", "w"))
    return path


def test_a_family_whose_matrices_are_not_known_is_refused_by_name(folder, tmp_path):
    moe = changed(folder, tmp_path / "in", config={"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]})
    for format in ("w8a8", "gptq-int4", "awq-int4"):
        done = quantize(moe, tmp_path / "out", "--format", format)
        assert done.returncode == 1 and '"mixtral" is not supported' in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("number, formats, words", [
    (float("nan"), ["w8a8", "gptq-int4", "awq-int4"], "holds an infinity or NaN"), (-float("inf"), ["w8a8"], "holds an infinity or NaN"),
    (3e6, ["gptq-int4", "awq-int4"], "too large for scales of F16"),
])
def test_numbers_that_a_format_cannot_hold_are_refused_by_tensor(number, formats, words, folder, tmp_path):
    source = changed(folder, tmp_path / "in", number)
    for format in formats:
        done = quantize(source, tmp_path / "out", "--format", format)
        assert done.returncode == 1 and "model.layers.1.self_attn.q_proj.weight" in done.stderr and words in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_folder(number, spoken, tmp_path):
    command = [QUANTIZE, str(spoken / "hf"), str(tmp_path / "out"), "--format", "gptq-int4", "--calibration", str(spoken / "seen.txt"), "--tokens", "4000",
               "--context", "64", "--threads", "1"]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while child.poll() is None and not list(tmp_path.iterdir()):
        time.sleep(0.001)
    child.send_signal(number)
    status = child.wait(60)
    assert (status, [p.name for p in tmp_path.iterdir()]) in ((-number, []), (0, ["out"]))
