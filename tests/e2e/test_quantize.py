"""kvgate-quantize: what it writes is read by the gguf package and by the engine, and calibration beats rounding."""
import json
import os
import signal
import struct
import subprocess
import time

import gguf
import numpy as np
import pytest

import toy_model
from conftest import BUILD, MODELS, ROOT
from stack import SMOLLM2

QUANTIZE, SCORE = os.path.join(BUILD, "kvgate-quantize"), os.path.join(BUILD, "kvgate-score")
SHAPE = toy_model.Shape(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=96)


def quantize(*args, timeout=300):
    return subprocess.run([QUANTIZE, *map(str, args)], cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def written(*args, **options):
    done = quantize(*args, **options)
    assert done.returncode == 0, done.stderr
    return gguf.GGUFReader(args[1])


def values(reader, name):
    tensor = next(t for t in reader.tensors if t.name == name)
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type)


def types(reader):
    return {t.name: t.tensor_type.name for t in reader.tensors}


def divergence(model, base, text, tokens=2000, **flags):
    command = [SCORE, "--model", model, "--base", base, "--text", text, "--tokens", tokens]
    for name, value in flags.items():
        command += [f"--{name}", value]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()[1:]]
    return sum(w["kl"] for w in lines) / sum(w["tokens"] for w in lines)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    path, text = str(folder / "toy.gguf"), str(folder / "text.txt")
    toy_model.random_model(path, shape=SHAPE, seed=3)
    open(text, "w").write("".join("abcdefgh ijk"[i * i * 7 % 11] for i in range(20000)))
    return path, text


@pytest.mark.parametrize("format, type", [("q8_0", "Q8_0"), ("q4_0", "Q4_0"), ("bf16", "BF16")])
def test_matrices_of_layers_change_and_the_rest_stays(format, type, toy, tmp_path):
    source, out = gguf.GGUFReader(toy[0]), written(toy[0], tmp_path / "out.gguf", "--format", format)
    kinds = types(out)
    assert set(kinds) == {t.name for t in source.tensors}
    for tensor in source.tensors:
        layer = tensor.name.startswith("blk.") and len(tensor.shape) == 2
        assert kinds[tensor.name] == (type if layer or format == "bf16" and len(tensor.shape) == 2 else "F32")
        if kinds[tensor.name] == "F32":
            assert np.array_equal(values(out, tensor.name), values(source, tensor.name))
    for key, field in source.fields.items():
        if key not in ("general.file_type", "general.quantization_version") and not key.startswith("GGUF."):
            assert out.fields[key].contents() == field.contents(), key


def test_roundings_are_as_near_as_those_of_the_gguf_package(toy, tmp_path):
    source = values(gguf.GGUFReader(toy[0]), "blk.1.ffn_down.weight")
    for format, kind in (("q8_0", gguf.GGMLQuantizationType.Q8_0), ("q4_0", gguf.GGMLQuantizationType.Q4_0), ("bf16", gguf.GGMLQuantizationType.BF16)):
        ours = values(written(toy[0], tmp_path / f"{format}.gguf", "--format", format), "blk.1.ffn_down.weight")
        theirs = gguf.quants.dequantize(gguf.quants.quantize(source, kind), kind)
        assert np.square(ours - source).mean() <= 1.01 * np.square(theirs - source).mean()


def test_the_output_matrix_is_quantized_on_request(toy, tmp_path):
    assert types(written(toy[0], tmp_path / "out.gguf", "--format", "q4_0", "--lm-head"))["output.weight"] == "Q8_0"


def test_the_tied_embedding_is_the_output_matrix(tmp_path):
    toy_model.random_model(str(tmp_path / "in.gguf"), shape=toy_model.Shape(hidden=64, layers=1, heads=2, kv_heads=1, head_dim=32, ffn=96, tied=True))
    assert types(written(tmp_path / "in.gguf", tmp_path / "out.gguf", "--format", "q4_0", "--lm-head"))["token_embd.weight"] == "Q8_0"


def test_the_engine_runs_what_is_written_and_more_bits_lose_less(toy, tmp_path):
    kl = {}
    for format in ("q8_0", "q4_0", "bf16"):
        written(toy[0], tmp_path / f"{format}.gguf", "--format", format)
        kl[format] = divergence(tmp_path / f"{format}.gguf", toy[0], toy[1], 500, context=64, skip=8)
    assert kl["bf16"] < kl["q8_0"] < kl["q4_0"] / 10


@pytest.mark.long
def test_sizes_of_a_real_model(tmp_path):
    base = written(SMOLLM2, tmp_path / "bf16.gguf", "--format", "bf16")
    matrices = [t.name for t in base.tensors if t.name.startswith("blk.") and len(t.shape) == 2]
    whole = sum(t.n_bytes for t in base.tensors if t.name in matrices)
    for format, share in (("q8_0", 0.532), ("q4_0", 0.282)):
        out = written(tmp_path / "bf16.gguf", tmp_path / f"{format}.gguf", "--format", format)
        assert sum(t.n_bytes for t in out.tensors if t.name in matrices) <= share * whole


def test_calibration_beats_rounding(toy, tmp_path):
    (tmp_path / "seen.txt").write_text(open(toy[1]).read()[:4000])
    (tmp_path / "unseen.txt").write_text(open(toy[1]).read()[4001:])
    flags = ["--format", "q4_0", "--calibration", tmp_path / "seen.txt", "--context", 64, "--tokens", 2048]
    written(toy[0], tmp_path / "rounded.gguf", "--format", "q4_0")
    written(toy[0], tmp_path / "gptq.gguf", *flags)
    written(toy[0], tmp_path / "awq.gguf", *flags, "--awq")
    kl = {name: divergence(tmp_path / f"{name}.gguf", toy[0], tmp_path / "unseen.txt", 500, context=64, skip=8) for name in ("rounded", "gptq", "awq")}
    print(kl)
    assert 0 < kl["gptq"] < 0.9 * kl["rounded"], kl
    assert 0 < kl["awq"] < kl["rounded"], kl


@pytest.mark.long
def test_calibration_beats_rounding_on_a_text_it_has_not_seen(tmp_path):
    base, text = tmp_path / "bf16.gguf", open(os.path.join(MODELS, "shakespeare.txt"), encoding="utf-8").read()
    (tmp_path / "seen.jsonl").write_text("".join(json.dumps({"text": text[i:i + 4000]}) + "\n" for i in range(0, 40000, 4000)))
    (tmp_path / "unseen.txt").write_text(text[1000000:1040000])
    written(SMOLLM2, base, "--format", "bf16")
    written(base, tmp_path / "rounded.gguf", "--format", "q4_0")
    done = quantize(base, tmp_path / "gptq.gguf", "--format", "q4_0", "--calibration", tmp_path / "seen.jsonl", "--tokens", 4096, "--memory", 100,
                    timeout=800)
    assert done.returncode == 0, done.stderr
    assert "calibrating layers 0 to" in done.stderr and done.stderr.count("calibrating layers") >= 2
    kl = {name: divergence(tmp_path / f"{name}.gguf", base, tmp_path / "unseen.txt", 800) for name in ("rounded", "gptq")}
    print(kl)
    assert 0 < kl["gptq"] < 0.9 * kl["rounded"]


def test_calibration_is_the_same_in_one_pass_and_in_several(toy, tmp_path):
    line = json.dumps({"messages": [{"role": "user", "content": "abc " * 50}]}) + "\n" + json.dumps({"prompt": "hij " * 50}) + "\n\n"
    (tmp_path / "c.jsonl").write_text(line * 3)
    flags = ["--format", "q4_0", "--calibration", tmp_path / "c.jsonl", "--context", 64]
    one = written(toy[0], tmp_path / "one.gguf", *flags)
    several = written(toy[0], tmp_path / "several.gguf", *flags, "--memory", 1)
    assert open(tmp_path / "one.gguf", "rb").read() == open(tmp_path / "several.gguf", "rb").read()
    assert types(one) == types(several)


def interrupted(source, out, number, *flags):
    """Status of a run that gets the signal as soon as it has begun to write."""
    child = subprocess.Popen([QUANTIZE, str(source), str(out), "--threads", "1", *flags], stderr=subprocess.DEVNULL)
    while child.poll() is None and not list(out.parent.iterdir()):
        time.sleep(0.001)
    child.send_signal(number)
    return child.wait(60)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_leaves_nothing_under_the_name(number, tmp_path):
    status = interrupted(SMOLLM2, tmp_path / "out.gguf", number, "--format", "bf16")
    assert status in (-number, 0)
    left = [p.name for p in tmp_path.iterdir()]
    assert "out.gguf" not in left if status else left == ["out.gguf"]
    assert number == signal.SIGKILL or status == 0 or left == []


def test_a_signal_that_the_caller_ignores_ends_nothing(toy, tmp_path):
    """As under nohup."""
    done = subprocess.run([QUANTIZE, toy[0], str(tmp_path / "out.gguf"), "--format", "q8_0"], capture_output=True, timeout=60,
                          preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    assert done.returncode == 0
    child = subprocess.Popen([QUANTIZE, SMOLLM2, str(tmp_path / "other.gguf"), "--format", "q8_0"], stderr=subprocess.DEVNULL,
                             preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    while child.poll() is None and len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.001)
    child.send_signal(signal.SIGHUP)
    assert child.wait(120) == 0 and (tmp_path / "other.gguf").exists()


def test_what_has_got_the_name_meanwhile_is_not_replaced(tmp_path):
    out = tmp_path / "out.gguf"
    child = subprocess.Popen([QUANTIZE, SMOLLM2, str(out), "--format", "q8_0"], stderr=subprocess.PIPE, text=True)
    while child.poll() is None and not list(tmp_path.iterdir()):
        time.sleep(0.001)
    if not out.exists():
        out.write_text("mine")
        assert child.wait(120) == 1 and "File exists" in child.stderr.read()
        assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("out.gguf", "mine")]


def test_a_file_that_is_there_is_not_overwritten(toy, tmp_path):
    (tmp_path / "out.gguf").write_text("mine")
    done = quantize(toy[0], tmp_path / "out.gguf", "--format", "q4_0")
    assert done.returncode == 1 and f"{tmp_path}/out.gguf exists already" in done.stderr
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("out.gguf", "mine")]


@pytest.mark.parametrize("args, words", [
    (["IN", "OUT"], ["--format", "q8_0, q4_0, bf16, w8a8, gptq-int4, awq-int4"]),
    (["IN", "OUT", "--format", "q3"], ["--format"]),
    (["IN", "OUT", "--format", "q8_0", "--calibration", "x"], ["--calibration", "q4_0, w8a8, gptq-int4 and awq-int4 alone"]),
    (["IN", "OUT", "--format", "q4_0", "--awq"], ["--awq", "--calibration"]),
    (["IN", "OUT", "--format", "q4_0", "--calibration", "/nowhere"], ["/nowhere"]),
    (["/nowhere", "OUT", "--format", "q4_0"], ["/nowhere"]),
    (["IN", "IN", "--format", "q4_0"], ["is the file that is read"]),
    (["IN", "/dev/full", "--format", "q4_0"], ["no regular file"]),
    (["IN", "/nowhere/out", "--format", "q4_0"], ["/nowhere/out"]),
    (["IN", "OUT", "x", "--format", "q4_0"], ["third"]),
    (["IN", "OUT", "--format", "w8a8"], ["is a file", "Hugging Face folder"]),
    (["/usr", "OUT", "--format", "q4_0"], ["/usr", "is a folder", "GGUF file", "gptq-int4"]),
])
def test_what_cannot_be_done_is_refused_in_a_line(args, words, toy, tmp_path):
    done = quantize(*[{"IN": toy[0], "OUT": tmp_path / "out.gguf"}.get(a, a) for a in args])
    assert done.returncode in (1, 2) and len(done.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_rows_that_are_no_whole_groups_are_refused_by_name(tmp_path):
    toy_model.random_model(str(tmp_path / "in.gguf"), shape=toy_model.Shape(hidden=48, layers=1, heads=2, kv_heads=1, head_dim=32, ffn=96))
    done = quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", "--format", "q4_0")
    assert done.returncode == 1 and "blk.0.attn_q.weight" in done.stderr and "48" in done.stderr and "32" in done.stderr


def edited(path, edit):
    """The toy whose blk.1.attn_q is changed."""
    def apply(tensors):
        edit(next(t for t in tensors if t.name == "blk.1.attn_q.weight"))
        return tensors
    toy_model.random_model(str(path), shape=SHAPE, seed=3, edit=apply)
    return path


@pytest.mark.parametrize("layer", ["2147483647", "99999999999999", "4096"])
def test_a_layer_that_no_model_has_is_refused_at_once(layer, tmp_path):
    source = edited(tmp_path / "in.gguf", lambda t: setattr(t, "name", f"blk.{layer}.attn_q.weight"))
    done = quantize(source, tmp_path / "out.gguf", "--format", "q4_0", timeout=30)
    assert done.returncode == 1 and "layer" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["in.gguf"]


@pytest.mark.parametrize("number, format, words", [
    (float("nan"), "q4_0", "holds an infinity or NaN"), (float("inf"), "q8_0", "holds an infinity or NaN"), (float("nan"), "bf16", "holds an infinity or NaN"),
    (3e6, "q4_0", "too large for Q4_0"), (1e8, "q8_0", "too large for Q8_0"),
])
def test_numbers_that_a_format_cannot_hold_are_refused_by_tensor(number, format, words, tmp_path):
    source = edited(tmp_path / "in.gguf", lambda t: setattr(t, "data", struct.pack("<f", number) + t.data[4:]))
    done = quantize(source, tmp_path / "out.gguf", "--format", format)
    assert done.returncode == 1 and "blk.1.attn_q.weight" in done.stderr and words in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["in.gguf"]


def test_a_calibration_may_name_members_that_are_null(toy, tmp_path):
    line = {"text": None, "prompt": None, "messages": [{"role": "user", "content": "abc " * 50}]}
    (tmp_path / "c.jsonl").write_text((json.dumps(line) + "\n") * 3)
    written(toy[0], tmp_path / "out.gguf", "--format", "q4_0", "--calibration", tmp_path / "c.jsonl", "--context", 64)


@pytest.mark.parametrize("line, word", [("{", "c.jsonl:2"), ('{"x": 1}', '"messages"'), ('{"text": "a"}', "fewer than a sequence")])
def test_a_bad_calibration_file_is_refused_with_its_line(line, word, toy, tmp_path):
    (tmp_path / "c.jsonl").write_text('{"text": "abc"}\n' + line + "\n")
    done = quantize(toy[0], tmp_path / "out.gguf", "--format", "q4_0", "--calibration", tmp_path / "c.jsonl")
    assert done.returncode == 1 and word in done.stderr
    assert not os.path.exists(tmp_path / "out.gguf")
