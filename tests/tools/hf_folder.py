"""Small Hugging Face folders for tests: tokenizers trained on a few lines, config.json, safetensors with seeded weights."""
import json
import os
import struct
import zlib

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
CORPUS = ["The quick brown fox jumps over the lazy dog. It's 1234567 o'clock!\n\n", "def f(x):\n    return x + 1  # done\n",
          "Der süße Bär isst schöne Äpfel, naïve café.\r\n", "日本語のテキスト 🦙 and some more words, words, words.\n"] * 4
MARK = "▁"


def byte_level(split=None, digits=False, nfc=False, ignore_merges=False, bos=False):
    t = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        t.normalizer = normalizers.NFC()
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    first = [pre_tokenizers.Split(Regex(split), "isolated")] if split else [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    t.pre_tokenizer = pre_tokenizers.Sequence([*first, last]) if first else last
    t.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=["<|bos|>", "<|im_end|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    t.train_from_iterator(CORPUS, trainer)
    t.add_tokens([AddedToken("<tool>", normalized=False)])
    if bos:
        t.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", t.token_to_id("<|bos|>"))])
    return t


def fallback(scheme, bos=True):
    """BPE with byte fallback. scheme: a Metaspace's prepend_scheme, "legacy" (Llama 2's normalizer) or "gemma"."""
    t = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    t.pre_tokenizer = pre_tokenizers.Metaspace(replacement=MARK, prepend_scheme="always", split=True)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    t.train_from_iterator(CORPUS[:3], trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False))
    model = json.loads(t.to_str())
    model["added_tokens"] = [a for a in model["added_tokens"] if not a["content"].startswith("<0x")]
    model["model"]["byte_fallback"] = True
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
    model["normalizer"], model["pre_tokenizer"] = None, None
    if scheme == "legacy":
        model["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": MARK}, replace]}
    elif scheme == "gemma":
        model["normalizer"] = replace
        model["pre_tokenizer"] = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    else:
        model["pre_tokenizer"] = {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": False}
    t = Tokenizer.from_str(json.dumps(model))
    if bos:
        t.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", t.token_to_id("<s>"))])
    return t


def write_json(folder, name, value):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
        json.dump(value, f)


def write_tokenizer(folder, tokenizer, settings):
    os.makedirs(folder, exist_ok=True)
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    write_json(folder, "tokenizer_config.json", settings)


# ---- weights ---------------------------------------------------------------------------------------------------------------


def weight(name, shape, seed=1):
    """Deterministic values of a tensor: norms near 1 (near 0 where a family keeps them less 1: "gemma" is said by seed < 0)."""
    rng = np.random.Generator(np.random.PCG64([abs(seed), zlib.crc32(name.encode())]))
    u = 2 * rng.random(shape) - 1
    if len(shape) == 1:
        return (0.3 * u + (0 if seed < 0 or "bias" in name else 1)).astype(np.float32)
    scale = {"embed": 1.0, "q_proj": 2.0 * (3 / shape[-1]) ** 0.5, "k_proj": 2.0 * (3 / shape[-1]) ** 0.5}
    return (u * next((s for key, s in scale.items() if key in name), (3 / shape[-1]) ** 0.5)).astype(np.float32)


def bf16(values):
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int32": "I32", "int8": "I8", "int64": "I64"}


def safetensors_bytes(tensors, metadata=None):
    """{name: array} as a file; uint16 arrays are BF16."""
    header, data = {"__metadata__": metadata or {"format": "pt"}}, bytearray()
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": DTYPES[array.dtype.name], "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + bytes(data)


def write_weights(folder, tensors, shards=1):
    """model.safetensors, or that many shards and their index."""
    if shards == 1:
        with open(os.path.join(folder, "model.safetensors"), "wb") as f:
            f.write(safetensors_bytes(tensors))
        return
    names, index = list(tensors), {}
    for i in range(shards):
        shard = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i::shards]
        index.update({name: shard for name in part})
        with open(os.path.join(folder, shard), "wb") as f:
            f.write(safetensors_bytes({name: tensors[name] for name in part}))
    write_json(folder, "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
