#!/usr/bin/env python3
"""GGUF files that lie, that no loader should accept, or that must load in one certain way.

    for case in hostile_gguf.refused(): ...   case.name, case.bytes, case.words (each must stand in the refusal), case.stage
    for case in hostile_gguf.loading(): ...   case.name, case.bytes, case.same_as / case.differs_from (another loading case, by its logits)

stage "header": reading metadata and tensor descriptions has to refuse it; "model": only loading the weights has to.

usage: hostile_gguf.py FOLDER    writes each as FOLDER/{refused,loading}/NAME.gguf and FOLDER/cases.json
"""
import dataclasses
import json
import math
import os
import struct
import sys
import tempfile
from typing import Optional

import toy_model
from toy_model import Shape, Tensor, encode, gguf_bytes

META = {"general.architecture": ("str", "llama")}
INT64_MAX = (1 << 63) - 1
I8 = 24


@dataclasses.dataclass
class Case:
    name: str
    bytes: bytes
    words: tuple = ()
    stage: str = "header"
    same_as: Optional[str] = None
    differs_from: Optional[str] = None


def one_tensor(dims, type="F32", type_id=None, n_bytes=256, name="b", offset=None):
    """A file with a good tensor a and a tensor b to be judged."""
    a = Tensor("a", [64], "F32", bytes(256))
    return gguf_bytes(META, [a, Tensor(name, dims, type, bytes(n_bytes), type_id=type_id, offset=offset)])


def model(**options):
    with tempfile.NamedTemporaryFile(suffix=".gguf") as f:
        toy_model.random_model(f.name, **options)
        return f.read()


def sizes():
    """Products and sums that wrap around 64 bits."""
    wraps = gguf_bytes(META, [Tensor("a", [64], "F32", bytes(256)), Tensor("b", [4, 1073741823, 1073741825], "F32", b"")])
    yield Case("size-wraps-to-zero", wraps, ("b",))
    yield Case("dims-int64-max-i8", one_tensor([INT64_MAX, 2], type_id=I8), ("b",))
    yield Case("dims-uint64-max", one_tensor([(1 << 64) - 1, 2]), ("b",))
    yield Case("dims-second-2-42", one_tensor([64, (1 << 42) + 1]), ("b",))
    yield Case("offset-near-2-64", one_tensor([64], offset=(1 << 64) - 32), ("b",))
    yield Case("offset-past-end", one_tensor([64], offset=1 << 20), ("b",))
    yield Case("offset-unaligned", one_tensor([64], offset=257), ("b",))
    yield Case("dims-five", one_tensor([2, 2, 2, 2, 2]), ("b", "5"))


def kinds():
    """Files of a kind that cannot be served."""
    good = gguf_bytes(META, [Tensor("a", [64], "F32", bytes(256))])
    yield Case("big-endian", gguf_bytes(META, [Tensor("a", [64], "F32", bytes(256))], order=">"), ("endian",))
    yield Case("version-1", gguf_bytes(META, [], version=1), ("version", "1"))
    yield Case("version-4", gguf_bytes(META, [], version=4), ("version", "4"))
    yield Case("magic", b"FUGG" + good[4:], ("GGUF",))
    yield Case("empty", b"", ())
    yield Case("magic-only", b"GGUF", ())
    for type_id in (4, 5, 36, 39, 42, 255, 0xFFFFFFFF):
        yield Case(f"type-{type_id}", one_tensor([64], type_id=type_id), ("b", str(type_id)))
    yield Case("q4_0-33-columns", one_tensor([33, 2], type="Q4_0"), ("b", "33"))
    yield Case("q4_k-128-columns", one_tensor([128, 2], type="Q4_K"), ("b", "128"))
    yield Case("dim-zero", one_tensor([64, 0]), ("b",))
    whole = model()
    for sixteenth in range(1, 16):
        yield Case(f"cut-{sixteenth}-16", whole[:len(whole) * sixteenth // 16], ())
    yield Case("cut-last-byte", whole[:-1].rstrip(b"\0")[:-1], ())


def metadata():
    """Metadata whose lengths, counts and types lie."""
    head = b"GGUF" + struct.pack("<I", 3)
    key = toy_model.pack_string("k")
    yield Case("values-2-62", head + struct.pack("<QQ", 0, 1 << 62), ())
    yield Case("tensors-2-62", head + struct.pack("<QQ", 1 << 62, 0), ())
    yield Case("tensors-one-too-many", gguf_bytes(META, [Tensor("a", [64], "F32", bytes(256))], n_tensors=2), ())
    yield Case("key-length-2-63", head + struct.pack("<QQQ", 0, 1, 1 << 63) + b"k" * 64, ())
    yield Case("string-length-2-64-8", head + struct.pack("<QQ", 0, 1) + key + struct.pack("<IQ", 8, (1 << 64) - 8) + b"x" * 64, ("k",))
    yield Case("value-type-13", head + struct.pack("<QQ", 0, 1) + key + struct.pack("<I", 13) + bytes(64), ("k", "13"))
    yield Case("array-2-61-of-u64", head + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 10, 1 << 61) + bytes(64), ("k",))
    nested = b"".join(struct.pack("<IQ", 9, 1) for _ in range(10000))
    yield Case("array-nested-10000", head + struct.pack("<QQ", 0, 1) + key + struct.pack("<I", 9) + nested + bytes(64), ("k",))
    yield Case("key-twice", head + struct.pack("<QQ", 0, 2) + 2 * (key + struct.pack("<II", 4, 7)), ("k",))
    twice = [Tensor("a", [64], "F32", bytes(256)), Tensor("a", [64], "F32", bytes(256))]
    yield Case("tensor-twice", gguf_bytes(META, twice), ("a",))
    for value in (0, 3, 1 << 31):
        yield Case(f"alignment-{value}", gguf_bytes({**META, "general.alignment": ("u32", value)}, []), ("alignment", str(value)))


def geometry():
    """Well-formed files whose model cannot be right."""
    def refuse(name, words, **options):
        return Case(name, model(**options), words, "model")

    yield refuse("heads-5-kv-2", ("5", "2"), shape=Shape(hidden=160, heads=5, kv_heads=2))
    yield refuse("kv-heads-0", ("head_count_kv",), metadata={"llama.attention.head_count_kv": ("u32", 0)})
    yield refuse("heads-0", ("head_count",), metadata={"llama.attention.head_count": ("u32", 0)})
    yield refuse("layers-missing", ("block_count",), metadata={"llama.block_count": None})
    yield refuse("layers-2-31", (), metadata={"llama.block_count": ("u32", 1 << 31)})
    yield refuse("rope-yarn", ("yarn",), shape=Shape(rope_scaling={"type": "yarn", "factor": 2.0}))
    yield refuse("rope-foo", ("foo",), shape=Shape(rope_scaling={"type": "foo", "factor": 2.0}))
    yield refuse("rope-linear-factor-0", ("factor",), shape=Shape(rope_scaling={"type": "linear", "factor": 0.0}))
    yield refuse("rope-freqs-short", ("rope_freqs",), shape=Shape(rope_freqs=[1.0, 2.0]))
    yield refuse("family", ("frob",), metadata={"general.architecture": ("str", "frob")})
    yield refuse("ffn-down-missing", ("blk.1.ffn_down.weight",), drop=("blk.1.ffn_down.weight",))
    yield refuse("embedding-missing", ("token_embd.weight",), drop=("token_embd.weight",))
    yield refuse("norm-missing", ("output_norm.weight",), drop=("output_norm.weight",))
    yield refuse("vocabulary-over-rows", ("token_embd.weight",), shape=Shape(rows=128))
    yield refuse("eps-nan", ("epsilon",), metadata={"llama.attention.layer_norm_rms_epsilon": ("f32", float("nan"))})

    def transpose(tensors):
        for t in tensors:
            if t.name == "blk.0.ffn_up.weight":
                t.dims = t.dims[::-1]
        return tensors

    yield refuse("ffn-up-transposed", ("blk.0.ffn_up.weight",), edit=transpose)

    def lengthen_norm(tensors):
        for t in tensors:
            if t.name == "blk.0.attn_norm.weight":
                t.dims = [t.dims[0] + 32]
                t.data = bytes(4 * t.dims[0])
        return tensors

    yield refuse("norm-long", ("blk.0.attn_norm.weight",), edit=lengthen_norm)


def values():
    """Whole files with one number in them that is none."""
    scale_at = {"Q6_K": 208}  # of a block; elsewhere 0, and the minimum's right behind
    shape = Shape(hidden=256, ffn=256, layers=1, rows=300)

    def put(tensor, row, at, number):
        def edit(tensors):
            for t in tensors:
                if t.name == tensor:
                    start = row * (len(t.data) // t.dims[-1]) + at
                    t.data = t.data[:start] + number + t.data[start + len(number):]
            return tensors
        return edit

    def refuse(name, tensor, row, at, number, **options):
        return Case(name, model(shape=shape, edit=put(tensor, row, at, number), **options), (tensor, f"row {row} "), "model")

    infinity, nan = struct.pack("<e", math.inf), struct.pack("<e", math.nan)
    for types, (_, group, size) in toy_model.TYPES.items():
        at = scale_at.get(types, 0) + (256 // group - 1) * size  # in the row's last block
        number = {"F32": b"\0\0\x80\xff", "BF16": b"\xc0\x7f"}.get(types, nan)
        yield refuse(f"nan-{types}", "blk.0.ffn_down.weight", 77, at, number, types=types)
        if types in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
            yield refuse(f"infinite-minimum-{types}", "blk.0.attn_q.weight", 40, at + 2, infinity, types=types)
    yield refuse("nan-embedding", "token_embd.weight", 299, 0, nan, types="Q8_0")
    yield refuse("nan-output", "output.weight", 0, 34, infinity, types="Q8_0")
    yield refuse("nan-norm", "output_norm.weight", 0, 16, b"\0\0\xc0\x7f")


def refused():
    yield from sizes()
    yield from kinds()
    yield from metadata()
    yield from geometry()
    yield from values()


def loading():
    """Files that load, and whose logits equal (or differ from) another one's."""
    tied = dict(shape=Shape(tied=True), seed=3)
    yield Case("tied", model(**tied))

    def add_output(tensors):
        embedding = next(t for t in tensors if t.name == "token_embd.weight")
        return tensors + [Tensor("output.weight", embedding.dims, embedding.type, embedding.data)]

    yield Case("tied-with-output", model(**tied, edit=add_output), same_as="tied")
    yield Case("extra-tensor", model(**tied, extra=[Tensor("frob.weight", [64], "F32", bytes(256))]), same_as="tied")
    yield Case("kv-heads-absent", model(shape=Shape(kv_heads=4), seed=4, metadata={"llama.attention.head_count_kv": None}), same_as="kv-heads-4")
    yield Case("kv-heads-4", model(shape=Shape(kv_heads=4), seed=4))
    yield Case("plain", model(shape=Shape(context=16384), seed=5))
    yield Case("head-dim-32", model(shape=Shape(hidden=64, heads=4, kv_heads=2, head_dim=32), seed=5))
    yield Case("rope-linear-2", model(shape=Shape(context=16384, rope_scaling={"type": "linear", "factor": 2.0}), seed=5), differs_from="plain")
    yield Case("rope-linear-1", model(shape=Shape(context=16384, rope_scaling={"type": "linear", "factor": 1.0}), seed=5), same_as="plain")
    yield Case("rope-none", model(shape=Shape(context=16384, rope_scaling={"type": "none"}), seed=5), same_as="plain")
    freqs = toy_model.llama3_rope_freqs(16, 10000.0)
    # The same random weights as "plain": the tensor is added afterwards, so that the generator is not disturbed.
    llama3 = [Tensor("rope_freqs.weight", [8], "F32", encode("F32", freqs))]
    ones = [Tensor("rope_freqs.weight", [8], "F32", encode("F32", [1.0] * 8))]
    yield Case("rope-llama3", model(shape=Shape(context=16384), seed=5, extra=llama3), differs_from="plain")
    yield Case("rope-freqs-one", model(shape=Shape(context=16384), seed=5, extra=ones), same_as="plain")
    yield Case("padded-rows", model(shape=Shape(rows=320), seed=6))
    yield Case("qwen2", model(shape=Shape(arch="qwen2"), seed=7))
    yield Case("version-2", whole_version_2())


def whole_version_2():
    raw = bytearray(model(seed=8))
    raw[4:8] = struct.pack("<I", 2)
    return bytes(raw)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    index = {}
    for kind, cases in (("refused", refused()), ("loading", loading())):
        os.makedirs(os.path.join(sys.argv[1], kind), exist_ok=True)
        for case in cases:
            with open(os.path.join(sys.argv[1], kind, case.name + ".gguf"), "wb") as f:
                f.write(case.bytes)
            about = {k: v for k, v in dataclasses.asdict(case).items() if k not in ("bytes", "name") and v}
            index.setdefault(kind, {})[case.name] = about
    with open(os.path.join(sys.argv[1], "cases.json"), "w", encoding="utf-8") as f:
        json.dump(index, f, indent=1)


if __name__ == "__main__":
    main()
