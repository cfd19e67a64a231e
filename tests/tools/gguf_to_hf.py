#!/usr/bin/env python3
"""Writes a GGUF model as a folder that transformers and vLLM read: the same weights, dequantized to BF16.

usage: gguf_to_hf.py MODEL.gguf DIR [--tokenizer]     architectures: llama, qwen2

    DIR/model.safetensors, config.json, generation_config.json    and with --tokenizer the file's tokenizer: qwen2's,
                                                                  of others what transformers makes of it (needs torch)

Matrices are dequantized to f32 and rounded once, to nearest even. llama.cpp keeps the rows of llama's Q and K interleaved for its
rotary embedding; they are put back in the order of the paper's halves.
"""
import json
import os
import struct
import sys

import gguf
import numpy as np

NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
PARTS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
         "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
         "ffn_down": "mlp.down_proj"}
QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CLASSES = {"llama": ("LlamaForCausalLM", "llama"), "qwen2": ("Qwen2ForCausalLM", "qwen2")}


def bf16(values):
    """f32 -> the upper halves, rounded to nearest even, as uint16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def hf_name(name):
    """The name in a transformers checkpoint; None for a tensor that has none (rotary factors)."""
    if name in NAMES:
        return NAMES[name]
    prefix, layer, part, kind = (name.split(".") + ["", ""])[:4]
    return f"model.layers.{layer}.{PARTS[part]}.{kind}" if prefix == "blk" and part in PARTS else None


def halves(rows, n_heads):
    """Rows of each head from interleaved pairs (x0 y0 x1 y1 …) to halves (x0 x1 … y0 y1 …)."""
    return rows.reshape(n_heads, rows.shape[0] // n_heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


class Model:
    def __init__(self, path):
        self.reader = gguf.GGUFReader(path)
        self.arch = self.field("general.architecture")
        if self.arch not in CLASSES:
            sys.exit(f"gguf_to_hf: architecture {self.arch}; known: {', '.join(CLASSES)}")
        self.tensors = {t.name: t for t in self.reader.tensors}
        self.n_heads = self.of("attention.head_count")
        self.n_kv = self.of("attention.head_count_kv", self.n_heads)

    def field(self, name, default=None):
        field = self.reader.fields.get(name)
        return default if field is None else field.contents()

    def of(self, name, default=None):
        return self.field(f"{self.arch}.{name}", default)

    def config(self):
        head, kind = CLASSES[self.arch]
        vocab, hidden = (int(n) for n in reversed(self.tensors["token_embd.weight"].shape))
        return {"architectures": [head], "model_type": kind, "hidden_size": hidden, "vocab_size": vocab,
                "intermediate_size": self.of("feed_forward_length"), "num_hidden_layers": self.of("block_count"),
                "num_attention_heads": self.n_heads, "num_key_value_heads": self.n_kv,
                "max_position_embeddings": self.of("context_length"), "rope_theta": self.of("rope.freq_base", 10000.0),
                "rms_norm_eps": self.of("attention.layer_norm_rms_epsilon"), "hidden_act": "silu", "torch_dtype": "bfloat16",
                "tie_word_embeddings": "output.weight" not in self.tensors, "attention_bias": False, "use_sliding_window": False,
                "bos_token_id": self.field("tokenizer.ggml.bos_token_id"), "eos_token_id": self.field("tokenizer.ggml.eos_token_id")}

    def values(self, tensor):
        """One tensor in f32, in transformers' order."""
        rows = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[2:3]
        if self.arch == "llama" and part in (["attn_q"], ["attn_k"]):
            rows = halves(rows, self.n_heads if part == ["attn_q"] else self.n_kv)
        return rows


def write_safetensors(path, model):
    header, at, todo = {"__metadata__": {"format": "pt"}}, 0, []
    for tensor in model.reader.tensors:
        name = hf_name(tensor.name)
        if name is None:
            continue
        shape = [int(n) for n in reversed(tensor.shape)]
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
        todo.append(tensor)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with open(path + ".part", "wb") as f:
        f.write(struct.pack("<Q", len(head)) + head)
        for tensor in todo:
            f.write(bf16(model.values(tensor)).tobytes())
    os.replace(path + ".part", path)


def write_qwen2_tokenizer(model, folder):
    """tokenizer.json and tokenizer_config.json of a file whose tokenizer is qwen2's byte-level BPE."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    tokens, kinds = model.field("tokenizer.ggml.tokens"), model.field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in model.field("tokenizer.ggml.merges")]
    added = [i for i, kind in enumerate(kinds) if kind in (3, 4)]  # control, user-defined; 5 = unused
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens) if kinds[i] == 1}, merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(tokens[i], normalized=False) for i in added])
    if any(tokenizer.token_to_id(tokens[i]) != i for i in added):
        sys.exit("gguf_to_hf: special tokens do not follow the others")
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    name = lambda key: None if model.field(key) is None else tokens[model.field(key)]  # noqa: E731
    write_json(folder, "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer", "eos_token": name("tokenizer.ggml.eos_token_id"),
                                                 "pad_token": name("tokenizer.ggml.padding_token_id"), "add_bos_token": False,
                                                 "chat_template": model.field("tokenizer.chat_template")})


def write_json(folder, name, value):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as f:
        json.dump(value, f, indent=1)


def main():
    args = [a for a in sys.argv[1:] if a != "--tokenizer"]
    if len(args) != 2:
        sys.exit(__doc__)
    path, folder = args
    os.makedirs(folder, exist_ok=True)
    model = Model(path)
    config = model.config()
    write_json(folder, "config.json", config)
    write_json(folder, "generation_config.json", {k: config[k] for k in ("bos_token_id", "eos_token_id")})
    if "--tokenizer" in sys.argv and model.field("tokenizer.ggml.pre") == "qwen2":
        write_qwen2_tokenizer(model, folder)
    elif "--tokenizer" in sys.argv:
        import transformers
        transformers.AutoTokenizer.from_pretrained(os.path.dirname(os.path.abspath(path)), gguf_file=os.path.basename(path)).save_pretrained(folder)
    write_safetensors(os.path.join(folder, "model.safetensors"), model)


if __name__ == "__main__":
    main()
