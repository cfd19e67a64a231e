"""Quantized Hugging Face folders from seeded codes, and what the codes mean in plain numpy. A scheme draws a matrix as
(tensors in place of NAME.weight, the weights in f64)."""
import zlib

import numpy as np

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble i of a word is output AWQ_ORDER[i] of its eight
LINEARS = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]


def words(codes, axis, bits=4, order=None):
    """Codes along an axis into I32 words, lowest bits first."""
    per = 32 // bits
    codes = np.moveaxis(np.asarray(codes, np.uint64), axis, -1)
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per)])
    codes = codes.reshape(*codes.shape[:-1], -1, per)[..., order or range(per)]
    packed = (codes << np.arange(0, 32, bits, dtype=np.uint64)).sum(-1).astype(np.uint32).view(np.int32)
    return np.ascontiguousarray(np.moveaxis(packed, -1, axis))


class Draw:
    """Codes, zeros, scales and groups of a matrix."""

    def __init__(self, name, shape, bits=4, group=64, symmetric=True, act_order=False, odd_groups=False, scale=1.0):
        rows, cols = shape
        rng = np.random.Generator(np.random.PCG64([7, zlib.crc32(name.encode())]))
        middle, self.bits = 1 << (bits - 1), bits
        groups = cols // group if group else 1
        self.codes = rng.integers(0, 1 << bits, shape)
        self.zeros = np.full((rows, groups), middle) if symmetric else rng.integers(1, 1 << bits, (rows, groups))
        self.scales = ((0.5 + rng.random((rows, groups))) * scale * 2 / (middle * cols ** 0.5)).astype(np.float16)
        self.g_idx = np.arange(cols) // (group or cols)
        if act_order:
            # the q, k, v and the gate, up of a layer see one input, and so have one order
            at = zlib.crc32(name.split("_proj")[0].rsplit(".", 1)[0].encode()) + cols
            self.g_idx = self.g_idx[np.random.Generator(np.random.PCG64(at)).permutation(cols)]
        if odd_groups:
            self.g_idx[self.g_idx == 1] = 0
        self.weights = self.scales.astype(np.float64)[:, self.g_idx] * (self.codes - self.zeros[:, self.g_idx])


def gptq(draw, second=False):
    stored = draw.zeros if second else draw.zeros - 1
    return {"qweight": words(draw.codes.T, 0, draw.bits), "qzeros": words(stored.T, 1, draw.bits), "scales": draw.scales.T,
            "g_idx": draw.g_idx.astype(np.int32)}


def awq(draw):
    return {"qweight": words(draw.codes.T, 1, order=AWQ_ORDER), "qzeros": words(draw.zeros.T, 1, order=AWQ_ORDER), "scales": draw.scales.T}


def packed(draw, symmetric=True, act_order=False):
    out = {"weight_packed": words(draw.codes, 1, draw.bits), "weight_scale": draw.scales, "weight_shape": np.array(draw.codes.shape, np.int64)}
    out.update({} if symmetric else {"weight_zero_point": words(draw.zeros, 0, draw.bits)})
    return {**out, **({"weight_g_idx": draw.g_idx.astype(np.int32)} if act_order else {})}


def int8(draw):
    return {"weight": (draw.codes - 128).astype(np.int8), "weight_scale": draw.scales}


def gptq_config(bits=4, group=64, **more):
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, "checkpoint_format": "gptq", **more}


def awq_config(group=64, **more):
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm", "modules_to_not_convert": None, **more}


def compressed_config(form, bits=4, group=64, symmetric=True, activations=None, **more):
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel", "group_size": group or None, "dynamic": False}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}}, **more}


DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
# name: (quantization_config, how matrices are drawn, how they are stored)
SCHEMES = {
    "gptq": (gptq_config(), {}, gptq),
    "gptq, one group a row": (gptq_config(group=-1), {"group": 0}, gptq),
    "gptq, groups of 128": (gptq_config(group=128), {"group": 128}, gptq),
    "gptq, scales below f16": (gptq_config(), {}, lambda d: {**gptq(d), "scales": d.scales.T.astype(np.float32)}),
    "gptq asymmetric": (gptq_config(sym=False), {"symmetric": False}, gptq),
    "gptq_v2 asymmetric": (gptq_config(sym=False, checkpoint_format="gptq_v2"), {"symmetric": False}, lambda d: gptq(d, True)),
    "gptq act-order": (gptq_config(desc_act=True), {"act_order": True}, gptq),
    "gptq act-order asymmetric": (gptq_config(desc_act=True, sym=False), {"act_order": True, "symmetric": False}, gptq),
    "gptq uneven groups": (gptq_config(group=32, desc_act=True), {"group": 32, "act_order": True, "odd_groups": True}, gptq),
    "gptq 8 bits": (gptq_config(bits=8), {"bits": 8}, gptq),
    "gptq 8 bits asymmetric": (gptq_config(bits=8, sym=False), {"bits": 8, "symmetric": False}, gptq),
    "awq": (awq_config(), {"symmetric": False}, awq),
    "awq, groups of 128": (awq_config(group=128), {"symmetric": False, "group": 128}, awq),
    "awq, short names": ({"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True}, {"symmetric": False, "group": 32}, awq),
    "w4a16": (compressed_config("pack-quantized"), {}, packed),
    "w4a16 asymmetric": (compressed_config("pack-quantized", symmetric=False), {"symmetric": False}, lambda d: packed(d, False)),
    "w4a16 act-order": (compressed_config("pack-quantized"), {"act_order": True}, lambda d: packed(d, act_order=True)),
    "w4a16 a scale a row": (compressed_config("pack-quantized", group=0), {"group": 0}, packed),
    "w4a16 asymmetric, groups of 128": (compressed_config("pack-quantized", symmetric=False, group=128), {"symmetric": False, "group": 128}, lambda d: packed(d, False)),
    "w8a16": (compressed_config("pack-quantized", bits=8), {"bits": 8}, packed),
    "w8a8": (compressed_config("int-quantized", bits=8, group=0, activations=DYNAMIC), {"bits": 8, "group": 0}, int8),
    "w8a16, a scale a row": (compressed_config("int-quantized", bits=8, group=0), {"bits": 8, "group": 0}, int8),
    "w8a8, scales below f16": (compressed_config("int-quantized", bits=8, group=0, activations=DYNAMIC), {"bits": 8, "group": 0},
                               lambda d: {**int8(d), "weight_scale": d.scales.astype(np.float32)}),
}


def is_linear(name):
    return name.endswith(".weight") and any(f".{part}." in name for part in LINEARS)


def quantize(tensors, scheme, also=()):
    """Two folders' tensors: the linear layers as the scheme stores them, and as the F32 that they mean; `also` names further ones."""
    _, options, store = SCHEMES[scheme]
    stored, plain = {}, {}
    for name, values in tensors.items():
        if not is_linear(name) and name not in also:
            stored[name] = plain[name] = values
            continue
        draw = Draw(name, values.shape, **options)
        base = name.removesuffix("weight")
        if "below f16" in scheme:  # exact in F32 alone; what the residual sees stays of its size
            tiny = 2.0 ** -20 if "v_proj" in name else 1.0
            draw.scales = draw.scales.astype(np.float32) * np.float32(tiny)
            draw.weights *= tiny
        stored.update({base + part: array for part, array in store(draw).items()})
        plain[name] = draw.weights.astype(np.float32)
    return stored, plain
