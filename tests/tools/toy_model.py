#!/usr/bin/env python3
"""Small Llama-shaped GGUF files for tests, written with nothing but the standard library.

Two kinds of weights:
  scripted  a next-token table: after token t the logits are exactly what the table says for t, whatever came before.
            So a test decides what the model answers, with which margin, and when it ends.
  random    seeded uniform weights of any shape: every part of the forward pass matters.

    vocab = toy_model.Vocabulary(pieces=["The", " quick", " br", "own f", "ox"])
    toy_model.scripted(path, vocab, toy_model.chain(vocab, ["\\n", "The", " quick", " br", "own f", "ox", vocab.eos]))
    toy_model.random_model(path, vocab, toy_model.Shape(layers=2, heads=4, kv_heads=2), types="Q4_0", seed=1)

usage: toy_model.py OUT random [--seed N] [--type NAME] [--arch llama|qwen2] [--hidden N] [--layers N] [--heads N] [--kv-heads N]
                               [--head-dim N] [--ffn N] [--context N] [--rows N] [--tied]
       toy_model.py OUT script TEXT   answers a chat (last prompt token "\\n") with TEXT, cut into pieces at each '|', then ends
       toy_model.py OUT cycle TEXT    the same pieces for ever
"""
import argparse
import dataclasses
import random
import struct
from typing import Optional

# ---- GGUF ----------------------------------------------------------------------------------------------------------------

SCALARS = {"u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"),
           "bool": (7, "?"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d")}
STRING, ARRAY = 8, 9

# name: (type id, weights a group, bytes a group)
TYPES = {"F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24),
         "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210), "BF16": (30, 1, 2)}


@dataclasses.dataclass
class Tensor:
    """dims[0] varies fastest, as in the file. type_id and offset override what is written, for files that lie."""
    name: str
    dims: list
    type: str
    data: bytes
    type_id: Optional[int] = None
    offset: Optional[int] = None


def pack_string(text, order="<"):
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack(order + "Q", len(raw)) + raw


def pack_value(kind, value, order="<"):
    """kind: a scalar's name, "str", or "[kind]" for an array; returns type id and bytes."""
    if kind == "str":
        return STRING, pack_string(value, order)
    if kind.startswith("["):
        items = [pack_value(kind[1:-1], item, order) for item in value]
        item_type = items[0][0] if items else (STRING if kind == "[str]" else SCALARS[kind[1:-1]][0])
        return ARRAY, struct.pack(order + "IQ", item_type, len(items)) + b"".join(raw for _, raw in items)
    number, code = SCALARS[kind]
    return number, struct.pack(order + code, value)


def gguf_bytes(metadata, tensors, version=3, magic=b"GGUF", order="<", alignment=32, n_tensors=None, n_values=None):
    """A whole file. metadata: {key: (kind, value)}; tensors: [Tensor]. order ">" writes a big-endian file."""
    out = bytearray(magic + struct.pack(order + "I", version))
    out += struct.pack(order + "QQ", len(tensors) if n_tensors is None else n_tensors, len(metadata) if n_values is None else n_values)
    for key, (kind, value) in metadata.items():
        type_id, raw = pack_value(kind, value, order)
        out += pack_string(key, order) + struct.pack(order + "I", type_id) + raw
    data = bytearray()
    for t in tensors:
        offset = len(data) if t.offset is None else t.offset
        type_id = TYPES[t.type][0] if t.type_id is None else t.type_id
        out += pack_string(t.name, order) + struct.pack(order + "I", len(t.dims))
        out += struct.pack(order + "Q" * len(t.dims), *t.dims) + struct.pack(order + "IQ", type_id, offset)
        data += t.data + bytes(-len(t.data) % alignment)
    out += bytes(-len(out) % alignment)
    return bytes(out + data)


def write_gguf(path, metadata, tensors, **options):
    with open(path, "wb") as f:
        f.write(gguf_bytes(metadata, tensors, **options))


# ---- weight formats ------------------------------------------------------------------------------------------------------


def clamp(value, low, high):
    return low if value < low else high if value > high else value


def f16(value):
    return struct.unpack("<e", struct.pack("<e", value))[0]


def nibbles(q):
    """32 values of 4 bits: element i in the low half of byte i, element i + 16 in the high half."""
    return bytes((q[i] & 15) | (q[i + 16] & 15) << 4 for i in range(16))


def fifth_bits(q):
    return struct.pack("<I", sum((q[i] >> 4 & 1) << i for i in range(32)))


def group_symmetric(x, bits):
    """Q4_0, Q5_0: one scale a group, taken from the value of largest magnitude, which maps to the lowest code."""
    half = 1 << (bits - 1)
    d = f16(max(x, key=abs) / -half)
    q = [clamp(int(v / d + half + 0.5), 0, 2 * half - 1) if d else half for v in x]
    return struct.pack("<e", d) + (fifth_bits(q) if bits == 5 else b"") + nibbles(q)


def group_affine(x, bits):
    """Q4_1, Q5_1: scale and minimum."""
    low = f16(min(x))
    d = f16((max(x) - min(x)) / ((1 << bits) - 1))
    q = [clamp(int((v - low) / d + 0.5), 0, (1 << bits) - 1) if d else 0 for v in x]
    return struct.pack("<ee", d, low) + (fifth_bits(q) if bits == 5 else b"") + nibbles(q)


def group_q8_0(x):
    d = f16(max(abs(v) for v in x) / 127)
    return struct.pack("<e32b", d, *(clamp(round(v / d), -127, 127) if d else 0 for v in x))


GROUP_ENCODERS = {"Q4_0": lambda x: group_symmetric(x, 4), "Q5_0": lambda x: group_symmetric(x, 5), "Q4_1": lambda x: group_affine(x, 4),
                  "Q5_1": lambda x: group_affine(x, 5), "Q8_0": group_q8_0}


def encode(type_name, values):
    """Floats -> bytes of a format that has an encoder here (all but the K formats)."""
    if type_name == "F32":
        return struct.pack(f"<{len(values)}f", *values)
    if type_name == "F16":
        return struct.pack(f"<{len(values)}e", *values)
    if type_name == "BF16":
        words = struct.unpack(f"<{len(values)}I", struct.pack(f"<{len(values)}f", *values))
        return struct.pack(f"<{len(values)}H", *((w + 0x7FFF + (w >> 16 & 1)) >> 16 for w in words))
    if type_name not in GROUP_ENCODERS:
        raise ValueError(f"{type_name}: no encoder; random_bytes makes weights of this format")
    if len(values) % 32:
        raise ValueError(f"{type_name}: {len(values)} weights are no whole number of groups of 32")
    group = GROUP_ENCODERS[type_name]
    return b"".join(group(values[i:i + 32]) for i in range(0, len(values), 32))


def random_k_scales(rng):
    """The 12 bytes of eight 6-bit scales and eight 6-bit minima of Q4_K and Q5_K; each minimum equals its scale."""
    sc = [rng.randrange(16, 64) for _ in range(8)]
    head = bytes(sc[j] | (sc[j + 4] >> 4) << 6 for j in range(4))
    return head + head + bytes((sc[j + 4] & 15) * 17 for j in range(4))


def random_bytes(type_name, n, amplitude, rng):
    """n weights of a format, spread evenly over about [-amplitude, amplitude]."""
    group = TYPES[type_name][1]
    if n % group:
        raise ValueError(f"{type_name}: {n} weights are no whole number of groups of {group}")
    if type_name in ("Q4_K", "Q5_K"):
        half = 7.5 if type_name == "Q4_K" else 15.5
        d = amplitude / (63 * half)
        rest = 128 if type_name == "Q4_K" else 160
        return b"".join(struct.pack("<ee", d, d * half) + random_k_scales(rng) + rng.randbytes(rest) for _ in range(n // 256))
    if type_name == "Q6_K":
        d = amplitude / (127 * 32)
        return b"".join(rng.randbytes(192) + struct.pack("<16b", *(rng.randrange(-127, 128) for _ in range(16))) + struct.pack("<e", d)
                        for _ in range(n // 256))
    return encode(type_name, [(2 * rng.random() - 1) * amplitude for _ in range(n)])


# ---- vocabulary ----------------------------------------------------------------------------------------------------------

CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def byte_letters():
    """Byte-level BPE writes each byte as a printable character: itself where it is one, else one from U+0100 up."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in plain}
    for b in range(256):
        letters.setdefault(b, chr(256 + len(letters) - len(plain)))
    return letters


LETTERS = byte_letters()


class Vocabulary:
    """Byte-level BPE: ids 0-255 are the bytes, then the merges of `words`, then `pieces`, then control tokens.

    words:   each becomes one token that text reaches by merges, left to right ("the" adds "th" and "the").
    pieces:  tokens without merges: a model can generate them, text never encodes to them.
    control: their texts; the first is BOS (not added by default) and pads, `eos` ends a generation.
    """

    def __init__(self, words=(), pieces=(), control=("<|endoftext|>", "<|im_start|>", "<|im_end|>"), eos="<|im_end|>", user_defined=(),
                 n=None, pre="gpt-2", add_bos=False, template=CHATML):
        self.texts = [LETTERS[b] for b in range(256)]
        self.types = [NORMAL] * 256
        self.merges = []
        self.pre, self.add_bos, self.template = pre, add_bos, template
        self.known = {text: id_ for id_, text in enumerate(self.texts)}
        for word in words:
            self._add_word(word)
        for piece in pieces:
            self._add(self.spell(piece), NORMAL)
        self.control = list(control)
        for text in control:
            self._add(text, CONTROL)
        for text in user_defined:
            self._add(text, USER_DEFINED)
        while n and len(self.texts) < n:
            self._add(f"<|unused_{len(self.texts)}|>", UNUSED)
        self.bos = self.known[control[0]] if control else None
        self.eos = self.known[eos] if eos else None

    @staticmethod
    def spell(text):
        raw = text if isinstance(text, bytes) else text.encode()
        return "".join(LETTERS[b] for b in raw)

    def _add(self, text, kind):
        if text not in self.known:
            self.known[text] = len(self.texts)
            self.texts.append(text)
            self.types.append(kind)

    def _add_word(self, word):
        spelled = self.spell(word)
        for end in range(2, len(spelled) + 1):
            left, right, whole = spelled[:end - 1], spelled[end - 1], spelled[:end]
            if whole not in self.known:
                self.merges.append(f"{left} {right}")
            self._add(whole, NORMAL)

    def __len__(self):
        return len(self.texts)

    def id(self, token):
        """Of an id, a control token's text, or the text of a word, piece or single byte."""
        if isinstance(token, int):
            return token
        return self.known[token] if token in self.control else self.known[self.spell(token)]

    def metadata(self):
        meta = {"tokenizer.ggml.model": ("str", "gpt2"), "tokenizer.ggml.pre": ("str", self.pre), "tokenizer.ggml.tokens": ("[str]", self.texts),
                "tokenizer.ggml.token_type": ("[i32]", self.types), "tokenizer.ggml.merges": ("[str]", self.merges),
                "tokenizer.ggml.add_bos_token": ("bool", self.add_bos)}
        if self.bos is not None:
            meta["tokenizer.ggml.bos_token_id"] = ("u32", self.bos)
            meta["tokenizer.ggml.padding_token_id"] = ("u32", self.bos)
        if self.eos is not None:
            meta["tokenizer.ggml.eos_token_id"] = ("u32", self.eos)
        if self.template is not None:
            meta["tokenizer.chat_template"] = ("str", self.template)
        return meta


# ---- models --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Shape:
    arch: str = "llama"  # "qwen2" has biases on q, k, v
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: Optional[int] = None  # written as key_length where it is given; else hidden / heads
    ffn: int = 128
    context: int = 2048
    rows: Optional[int] = None  # rows of the embedding and output; more than the vocabulary = padding
    tied: bool = False  # no output.weight
    rope_base: float = 10000.0
    rope_scaling: Optional[dict] = None  # {"type": "linear", "factor": 2.0}, {"type": "yarn", ...}: the file's rope.scaling.* keys
    rope_freqs: Optional[list] = None  # [head_dim / 2] divisors, as the rope_freqs.weight tensor (Llama 3's scaling)
    eps: float = 1e-5

    @property
    def head(self):
        return self.head_dim or self.hidden // self.heads


def llama3_rope_freqs(head_dim, base, factor=8.0, low=1.0, high=4.0, original=8192):
    """The divisors that Llama 3.1 applies to its rotary frequencies (model card: low and high frequency factors)."""
    out = []
    for i in range(head_dim // 2):
        wave = 2 * 3.141592653589793 * base ** (2 * i / head_dim)
        smooth = (original / wave - low) / (high - low)
        out.append(1.0 if wave < original / high else factor if wave > original / low else 1 / ((1 - smooth) / factor + smooth))
    return out


def shape_metadata(shape):
    a = shape.arch
    meta = {"general.architecture": ("str", a), "general.name": ("str", "toy"), f"{a}.context_length": ("u32", shape.context),
            f"{a}.embedding_length": ("u32", shape.hidden), f"{a}.block_count": ("u32", shape.layers),
            f"{a}.feed_forward_length": ("u32", shape.ffn), f"{a}.attention.head_count": ("u32", shape.heads),
            f"{a}.attention.head_count_kv": ("u32", shape.kv_heads), f"{a}.attention.layer_norm_rms_epsilon": ("f32", shape.eps),
            f"{a}.rope.dimension_count": ("u32", shape.head), f"{a}.rope.freq_base": ("f32", shape.rope_base)}
    if shape.head_dim:
        meta[f"{a}.attention.key_length"] = meta[f"{a}.attention.value_length"] = ("u32", shape.head_dim)
    for key, value in (shape.rope_scaling or {}).items():
        meta[f"{a}.rope.scaling.{key}"] = ("str" if isinstance(value, str) else "u32" if isinstance(value, int) else "f32", value)
    return meta


def layer_shapes(shape):
    """(name, dims) of one layer's tensors, in the order of the forward pass."""
    q, kv = shape.heads * shape.head, shape.kv_heads * shape.head
    out = [("attn_norm.weight", [shape.hidden])]
    for name, rows in (("attn_q", q), ("attn_k", kv), ("attn_v", kv)):
        out.append((f"{name}.weight", [shape.hidden, rows]))
        if shape.arch == "qwen2":
            out.append((f"{name}.bias", [rows]))
    out += [("attn_output.weight", [q, shape.hidden]), ("ffn_norm.weight", [shape.hidden]), ("ffn_gate.weight", [shape.hidden, shape.ffn]),
            ("ffn_up.weight", [shape.hidden, shape.ffn]), ("ffn_down.weight", [shape.ffn, shape.hidden])]
    return out


def random_layers(shape, types, rng, silent=0.0):
    """All layers' tensors. types: a format's name or a function of the tensor's name. silent: what the weights that write to
    the residual stream are multiplied by, when not 0 (0 keeps them as they are)."""
    tensors = []
    for layer in range(shape.layers):
        for name, dims in layer_shapes(shape):
            full = f"blk.{layer}.{name}"
            if len(dims) == 1:
                centre = 1.0 if name.endswith("norm.weight") else 0.0
                tensors.append(Tensor(full, dims, "F32", encode("F32", [centre + (rng.random() - 0.5) / 5 for _ in range(dims[0])])))
                continue
            kind = types(full) if callable(types) else types
            amplitude = 1.7 / dims[0] ** 0.5
            if silent and name in ("attn_output.weight", "ffn_down.weight"):
                amplitude *= silent
            tensors.append(Tensor(full, dims, kind, random_bytes(kind, dims[0] * dims[1], amplitude, rng)))
    return tensors


def random_model(path, vocab=None, shape=None, types="F32", seed=1, metadata=None, drop=(), extra=(), edit=None):
    """Writes a random model; the same arguments give the same bytes.

    metadata: {key: (kind, value)} to add, or {key: None} to remove; drop: names of tensors to leave out; extra: tensors to add;
    edit: a function of the list of tensors, which returns the list to write.
    """
    vocab, shape, rng = vocab or Vocabulary(), shape or Shape(), random.Random(seed)
    rows = shape.rows or len(vocab)
    kind = (types("token_embd.weight") if callable(types) else types)
    tensors = [Tensor("token_embd.weight", [shape.hidden, rows], kind, random_bytes(kind, shape.hidden * rows, 1.0, rng))]
    if shape.rope_freqs:
        tensors.append(Tensor("rope_freqs.weight", [len(shape.rope_freqs)], "F32", encode("F32", shape.rope_freqs)))
    tensors += random_layers(shape, types, rng)
    tensors.append(Tensor("output_norm.weight", [shape.hidden], "F32", encode("F32", [1 + (rng.random() - 0.5) / 5 for _ in range(shape.hidden)])))
    if not shape.tied:
        kind = types("output.weight") if callable(types) else types
        amplitude = 4 / shape.hidden ** 0.5
        tensors.append(Tensor("output.weight", [shape.hidden, rows], kind, random_bytes(kind, shape.hidden * rows, amplitude, rng)))
    tensors = [t for t in tensors if t.name not in drop] + list(extra)
    meta = {**shape_metadata(shape), **vocab.metadata(), **(metadata or {})}
    write_gguf(path, {k: v for k, v in meta.items() if v is not None}, edit(tensors) if edit else tensors)
    return vocab


def chain(vocab, tokens, margin=20.0):
    """The table of a script: each token is followed by the next one."""
    ids = [vocab.id(token) for token in tokens]
    if len(set(ids[:-1])) != len(ids) - 1:
        raise ValueError("a token stands twice in the chain: its successor would not be unique")
    return {a: {b: margin} for a, b in zip(ids, ids[1:])}


def scripted(path, vocab, table, default=None, floor=0.0, rows=None, pad_logit=0.0, layers=1, heads=2, kv_heads=1, head_dim=32, ffn=32,
             context=2048, type="F32", history=0.0, seed=1, metadata=None):
    """Writes a model whose logits after token t are table[t] = {id: logit}, all others `floor`.

    default: the row of tokens that the table lacks; None = EOS with a margin of 20. An int in place of a row means that id with
    a margin of 20. rows, pad_logit: rows over the vocabulary's size and the logit they always get.
    history: 0 = logits depend on the last token alone; above it (say 0.05) everything before shifts them a little, so that wrong
    KV shows in the log-probabilities while the script still decides the text.

    How: the embedding of t is the t-th unit vector, long enough that RMS norm leaves it alone, so the output matrix's column t is
    the table's row t. Its layers write nothing (or `history` of what random layers would) to the residual stream.
    """
    n = rows or len(vocab)
    group = TYPES[type][1]
    hidden = -(-n // max(group, 32)) * max(group, 32)
    shape = Shape(hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, context=context)
    rng = random.Random(seed)
    length = hidden ** 0.5
    normed = length / (1 + shape.eps) ** 0.5
    embedding, output = bytearray(), [[floor / normed] * hidden for _ in range(n)]
    fallback = default if default is not None else vocab.eos
    for t in range(n):
        row = [0.0] * hidden
        row[t] = length
        embedding += encode(type, row)
        logits = table.get(t, fallback)
        for id_, logit in ({logits: 20.0} if isinstance(logits, int) else logits).items():
            output[id_][t] = logit / normed
    for id_ in range(len(vocab), n):
        output[id_] = [pad_logit / normed] * hidden
    tensors = [Tensor("token_embd.weight", [hidden, n], type, bytes(embedding))]
    tensors += random_layers(shape, "F32", rng, silent=history or 0.0)
    if not history:
        for t in tensors:
            if t.name.endswith(("attn_output.weight", "ffn_down.weight")):
                t.data = bytes(len(t.data))
    tensors.append(Tensor("output_norm.weight", [hidden], "F32", encode("F32", [1.0] * hidden)))
    tensors.append(Tensor("output.weight", [hidden, n], type, b"".join(encode(type, row) for row in output)))
    write_gguf(path, {**shape_metadata(shape), **vocab.metadata(), **(metadata or {})}, tensors)
    return vocab


def script_text(path, text, cycle=False, **options):
    """A model that answers any chat with `text`, cut into tokens at each '|', then ends (or starts again: cycle)."""
    parts = [p for p in text.split("|") if p]
    vocab = Vocabulary(pieces=parts)
    table = chain(vocab, ["\n", *parts, parts[0] if cycle else vocab.eos])
    return scripted(path, vocab, table, **options)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    kinds = parser.add_subparsers(dest="kind", required=True)
    rand = kinds.add_parser("random")
    for flag in ("hidden", "layers", "heads", "kv-heads", "head-dim", "ffn", "context", "rows"):
        rand.add_argument("--" + flag, type=int)
    rand.add_argument("--arch", choices=("llama", "qwen2"))
    rand.add_argument("--tied", action="store_true")
    rand.add_argument("--seed", type=int, default=1)
    rand.add_argument("--type", default="F32", choices=TYPES)
    for kind in ("script", "cycle"):
        kinds.add_parser(kind).add_argument("text")
    args = parser.parse_args()
    if args.kind == "random":
        fields = {f.name for f in dataclasses.fields(Shape)}
        shape = Shape(**{k: v for k, v in vars(args).items() if k in fields and v is not None})
        random_model(args.out, shape=shape, types=args.type, seed=args.seed)
    else:
        script_text(args.out, args.text, cycle=args.kind == "cycle")


if __name__ == "__main__":
    main()
