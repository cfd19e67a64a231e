"""Reference tokenizers built from a GGUF's own vocabulary: Hugging Face `tokenizers`, `sentencepiece`, `tiktoken`.

A GGUF lacks the split patterns and the normalizer, so those are written here as the families published them in their
tokenizer.json (or tiktoken source), independently of the C code. They are trusted because test_tokenizers.py first holds each
against the ids that the vocabulary's .out file lists.
"""
import mmap
import struct

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
FORMATS = dict(zip(SIZES, "BbHhIifBQqd"))


class Gguf:
    """The metadata of a GGUF file as a dictionary."""

    def __init__(self, path):
        with open(path, "rb") as f:
            self.map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        self.at = 16
        self.merges = None  # derived from scores once
        self.values = {}
        for _ in range(self.number("Q", 8)):
            key = self.string()
            self.values[key] = self.value(self.number("I", 4))

    def number(self, fmt, size):
        self.at += size
        return struct.unpack_from("<" + fmt, self.map, self.at - size)[0]

    def string(self):
        n = self.number("Q", 8)
        self.at += n
        return self.map[self.at - n:self.at].decode("utf-8", "surrogateescape")

    def value(self, kind):
        if kind == 8:
            return self.string()
        if kind == 9:
            item, n = self.number("I", 4), self.number("Q", 8)
            if item == 8:
                return [self.string() for _ in range(n)]
            self.at += n * SIZES[item]
            return list(struct.unpack_from(f"<{n}{FORMATS[item]}", self.map, self.at - n * SIZES[item]))
        return self.number(FORMATS[kind], SIZES[kind])

    def get(self, key, default=None):
        return self.values.get("tokenizer.ggml." + key, default)


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
QWEN35 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")
DEEPSEEK_LETTERS = (
    r"\s?["
    r"\x{41}-\x{5a}\x{61}-\x{7a}\x{b5}\x{c0}-\x{d6}\x{d8}-\x{f6}\x{f8}-\x{1ba}\x{1bc}-\x{1bf}\x{1c4}-\x{293}"
    r"\x{295}-\x{2af}\x{370}-\x{373}\x{376}\x{377}\x{37b}-\x{37d}\x{37f}\x{386}\x{388}-\x{38a}\x{38c}\x{38e}-\x{3a1}"
    r"\x{3a3}-\x{3f5}\x{3f7}-\x{481}\x{48a}-\x{52f}\x{531}-\x{556}\x{10a0}-\x{10c5}\x{13a0}-\x{13f5}\x{13f8}-\x{13fd}"
    r"\x{1c90}-\x{1cba}\x{1cbd}-\x{1cbf}\x{1d00}-\x{1d2b}\x{1d6b}-\x{1d77}\x{1d79}-\x{1d9a}\x{1e00}-\x{1f15}"
    r"\x{1f18}-\x{1f1d}\x{1f20}-\x{1f45}\x{1f48}-\x{1f4d}\x{1f50}-\x{1f57}\x{1f59}\x{1f5b}\x{1f5d}\x{1f5f}-\x{1f7d}"
    r"\x{1f80}-\x{1fb4}\x{1fb6}-\x{1fbc}\x{1fbe}\x{1fc2}-\x{1fc4}\x{1fc6}-\x{1fcc}\x{1fd0}-\x{1fd3}\x{1fd6}-\x{1fdb}"
    r"\x{1fe0}-\x{1fec}\x{1ff2}-\x{1ff4}\x{1ff6}-\x{1ffc}\x{2102}\x{2107}\x{210a}-\x{2113}\x{2115}\x{2119}-\x{211d}"
    r"\x{2124}\x{2126}\x{2128}\x{212a}-\x{212d}\x{212f}-\x{2134}\x{2139}\x{213c}-\x{213f}\x{2145}-\x{2149}\x{214e}"
    r"\x{2183}\x{2184}\x{2c00}-\x{2c7b}\x{2c7e}-\x{2ce4}\x{2ceb}-\x{2cee}\x{2cf2}\x{2cf3}\x{a640}-\x{a66d}"
    r"\x{a680}-\x{a69b}\x{a722}-\x{a76f}\x{a771}-\x{a787}\x{a78b}-\x{a78e}\x{ab70}-\x{abbf}\x{fb00}-\x{fb06}"
    r"\x{fb13}-\x{fb17}\x{ff21}-\x{ff3a}\x{ff41}-\x{ff5a}\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}"
    r"\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
    "]+")
DEEPSEEK_LLM = ["[\r\n]", DEEPSEEK_LETTERS, r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+", r"\s+$", r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+"]
DEEPSEEK_CODER = ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\x{4e00}-\x{9fa5}\x{800}-\x{4e00}\x{ac00}-\x{d7ff}]+"]


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def byte_level(use_regex=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def digits():
    return pre_tokenizers.Digits(individual_digits=True)


def pre_tokenizer(pre, architecture):
    """The pre-tokenizer, and whether the family normalizes to NFC."""
    falcon = [pre_tokenizers.Punctuation("contiguous"), byte_level(True), pre_tokenizers.Digits(individual_digits=False),
              split("[0-9][0-9][0-9]")]
    families = {
        "llama-bpe": ([split(LLAMA3), byte_level()], False),
        "qwen2": ([split(QWEN2), byte_level()], True),
        "qwen35": ([split(QWEN35), byte_level()], False),
        "smollm": ([digits(), byte_level(True)], False),
        "starcoder": ([digits(), byte_level(True)], False),
        "refact": ([digits(), byte_level(True)], False),
        "command-r": ([digits(), byte_level(True)], True),
        "falcon": (falcon, False),
        "mpt": ([byte_level(True)], True),
        "deepseek-llm": ([*map(split, DEEPSEEK_LLM), digits(), byte_level()], False),
        "deepseek-coder": ([*map(split, DEEPSEEK_CODER), digits(), byte_level()], False),
        "gpt-2": ([byte_level(True)], False),
        None: ([byte_level(True)], architecture == "gptneox"),
    }
    stages, nfc = families[pre]
    return pre_tokenizers.Sequence(stages), nfc


def added_tokens(gguf, control):
    """The texts that match whole: USER_DEFINED ones, and CONTROL ones where the text is trusted."""
    phi3 = gguf.values.get("general.architecture") == "phi3"
    for text, kind in zip(gguf.get("tokens"), gguf.get("token_type")):
        if kind == USER_DEFINED or (control and kind == CONTROL):
            rstrip = phi3 and text not in ("<unk>", "<s>", "<|endoftext|>")
            yield AddedToken(text, normalized=False, special=kind == CONTROL, rstrip=rstrip)


def merges_of(gguf):
    """A BPE merge list from SentencePiece scores, as converters make it: every cut of a piece into two pieces, best piece first."""
    pieces = {t: i for i, (t, k) in enumerate(zip(gguf.get("tokens"), gguf.get("token_type"))) if k == NORMAL}
    scores = gguf.get("scores")
    for text, _ in sorted(pieces.items(), key=lambda item: (-scores[item[1]], item[1])):
        cuts = [(text[:i], text[i:]) for i in range(1, len(text)) if text[:i] in pieces and text[i:] in pieces]
        yield from sorted(cuts, key=lambda cut: (pieces[cut[0]], pieces[cut[1]]))


def hugging_face(gguf, control=False):
    tokens = gguf.get("tokens")
    vocab = {}
    for i, text in enumerate(tokens):
        vocab.setdefault(text, i)
    if gguf.get("model") == "gpt2":
        merges = [cut(m) for m in gguf.get("merges")]
        model = models.BPE(vocab, merges, ignore_merges=gguf.get("pre") == "llama-bpe")
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer, nfc = pre_tokenizer(gguf.get("pre"), gguf.values.get("general.architecture"))
        if nfc:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.decoder = decoders.ByteLevel()
    else:
        if not gguf.merges:
            gguf.merges = [cut(m) for m in gguf.get("merges")] if gguf.get("merges") else list(merges_of(gguf))
        kinds = gguf.get("token_type")
        usable = {t: i for t, i in vocab.items() if kinds[i] != CONTROL or control}
        model = models.BPE(usable, gguf.merges, byte_fallback=True, fuse_unk=True, unk_token=tokens[gguf.get("unknown_token_id", 0)])
        tokenizer = Tokenizer(model)
        steps = [normalizers.Replace(" ", "▁")]
        if gguf.get("add_space_prefix", True):
            steps.insert(0, normalizers.Prepend("▁"))
        tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.add_tokens(list(added_tokens(gguf, control)))
    return tokenizer


def cut(merge):
    """"LEFT RIGHT" -> (LEFT, RIGHT); the separator is the first space that is not the first character."""
    at = merge.index(" ", 1)
    return merge[:at], merge[at + 1:]


def sentence_piece(gguf):
    """sentencepiece itself on a model file made of the GGUF's pieces, scores and types."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as pb

    model = pb.ModelProto()
    for text, score, kind in zip(gguf.get("tokens"), gguf.get("scores"), gguf.get("token_type")):
        model.pieces.add(piece=text, score=score, type=kind)
    model.trainer_spec.model_type = pb.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = bool(gguf.get("add_space_prefix", True))
    model.normalizer_spec.remove_extra_whitespaces = False
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def stand_ins():
    """character -> byte of byte-level vocabularies"""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {**{chr(b): b for b in printable}, **{chr(256 + i): b for i, b in enumerate(others)}}


def tik_token(gguf, pattern):
    import tiktoken

    table = stand_ins()
    ranks = {bytes(table[c] for c in text): i for i, (text, kind) in enumerate(zip(gguf.get("tokens"), gguf.get("token_type")))
             if kind == NORMAL}
    return tiktoken.Encoding("reference", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
