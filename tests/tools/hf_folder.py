"""Small Hugging Face folders for tests: tokenizers trained on a few lines, config.json, safetensors with seeded weights."""
import json
import os

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
