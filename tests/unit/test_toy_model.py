"""toy_model.py and hostile_gguf.py against the public `gguf` package: what they write is what an independent reader reads."""
import random
import struct

import gguf
import numpy
import pytest

import hostile_gguf
import toy_model
from toy_model import Shape, Vocabulary

CODED = sorted(set(toy_model.TYPES) - {"Q4_K", "Q5_K", "Q6_K"})


def weights(path):
    reader = gguf.GGUFReader(path)
    return {t.name: gguf.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]) for t in reader.tensors}


def strings(path, key):
    field = gguf.GGUFReader(path).get_field(key)
    return field.contents()


@pytest.mark.parametrize("kind", CODED)
def test_encoded_weights_are_near_their_values(kind):
    rng = random.Random(2)
    values = [rng.uniform(-1, 1) for _ in range(256)] + [0.0] * 32
    raw = numpy.frombuffer(toy_model.encode(kind, values), dtype=numpy.uint8)
    got = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]) if kind not in ("F32", "F16") else numpy.frombuffer(
        raw, dtype=numpy.float32 if kind == "F32" else numpy.float16)
    step = {"F32": 1e-7, "F16": 1e-3, "BF16": 8e-3, "Q8_0": 1 / 127, "Q5_0": 1 / 15, "Q5_1": 1 / 31, "Q4_0": 1 / 7, "Q4_1": 1 / 15}[kind]
    assert numpy.abs(got - values).max() <= step + 1e-3


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_random_k_weights_are_centred_and_bounded(kind):
    raw = numpy.frombuffer(toy_model.random_bytes(kind, 256 * 64, 0.5, random.Random(3)), dtype=numpy.uint8)
    got = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert got.size == 256 * 64 and numpy.abs(got).max() <= 0.51
    assert abs(got.mean()) < 0.02 and got.std() > 0.1


def test_bytes_alone_and_words_are_the_vocabulary():
    vocab = Vocabulary(words=["the"], pieces=["own f"])
    assert [vocab.texts[b] for b in b" A\n"] == ["Ġ", "A", "Ċ"] and vocab.merges == ["t h", "th e"]
    assert vocab.texts[256:258] == ["th", "the"] and vocab.texts[vocab.id("own f")] == "ownĠf"
    assert vocab.types[vocab.eos] == toy_model.CONTROL and vocab.texts[vocab.eos] == "<|im_end|>"


def test_the_scripted_table_is_what_the_weights_compute(tmp_path):
    vocab = Vocabulary(pieces=["The", " fox"])
    table = toy_model.chain(vocab, ["\n", "The", " fox", vocab.eos])
    table[7] = {1: 2.5, 2: -1.0}
    path = tmp_path / "toy.gguf"
    toy_model.scripted(path, vocab, table, floor=-3.0, rows=300, pad_logit=50.0)
    w = weights(path)
    assert not w["blk.0.attn_output.weight"].any() and not w["blk.0.ffn_down.weight"].any()
    x = w["token_embd.weight"]
    logits = (x / numpy.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5) * w["output_norm.weight"]) @ w["output.weight"].T
    assert logits[vocab.id("\n")][:len(vocab)].argmax() == vocab.id("The")
    assert abs(logits[7][1] - 2.5) < 1e-4 and abs(logits[7][2] + 1) < 1e-4 and abs(logits[7][3] + 3) < 1e-4
    assert abs(logits[9][vocab.eos] - 20) < 1e-3 and abs(logits[9][299] - 50) < 1e-3


def test_a_token_twice_in_a_chain_is_refused():
    with pytest.raises(ValueError, match="twice"):
        toy_model.chain(Vocabulary(), ["a", "b", "a", "c"])


@pytest.mark.parametrize("shape", [Shape(), Shape(arch="qwen2", tied=True), Shape(head_dim=32, rows=320, rope_freqs=[1.0] * 16)])
def test_random_models_have_the_tensors_of_their_shape(tmp_path, shape):
    path = tmp_path / "toy.gguf"
    vocab = toy_model.random_model(path, shape=shape)
    got = {t.name: [int(d) for d in t.shape] for t in gguf.GGUFReader(path).tensors}
    assert got["token_embd.weight"] == [64, shape.rows or len(vocab)] and ("output.weight" in got) == (not shape.tied)
    assert got["blk.1.attn_q.weight"] == [64, 4 * shape.head] and got["blk.1.attn_k.weight"] == [64, 2 * shape.head]
    assert got["blk.1.attn_output.weight"] == [4 * shape.head, 64] and ("blk.0.attn_q.bias" in got) == (shape.arch == "qwen2")
    assert strings(path, "tokenizer.ggml.tokens") == vocab.texts


def test_the_same_arguments_give_the_same_file(tmp_path):
    for name in ("a", "b"):
        toy_model.random_model(tmp_path / name, types="Q4_K", shape=Shape(hidden=256, ffn=256), seed=9)
    toy_model.random_model(tmp_path / "c", types="Q4_K", shape=Shape(hidden=256, ffn=256), seed=10)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b and a != c


def test_the_size_that_wraps_does_wrap():
    case = next(c for c in hostile_gguf.refused() if c.name == "size-wraps-to-zero")
    size = 4 * 4 * 1073741823 * 1073741825
    assert size == 2**64 - 16 and (size + 31) // 32 * 32 == 2**64 and len(case.bytes) < 1024


def test_every_hostile_case_has_its_own_name_and_bytes():
    cases = [*hostile_gguf.refused(), *hostile_gguf.loading()]
    assert len({c.name for c in cases}) == len(cases) >= 70
    loading = {c.name: c for c in hostile_gguf.loading()}
    for case in loading.values():
        other = case.same_as or case.differs_from
        assert other is None or other in loading and case.bytes != loading[other].bytes
    assert struct.unpack_from("<I", loading["version-2"].bytes, 4) == (2,)
