"""Tokenizers and configurations of Hugging Face folders: ids equal those of the `tokenizers` package, a folder and its cut have one
fingerprint, and what is not known is refused by name."""
import json
import os
import subprocess
import sys
import unicodedata

import pytest

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "tools"))
import hf_folder  # noqa: E402

BUILD = os.environ.get("B", "build")
CONFIG = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
          "max_position_embeddings": 2048, "vocab_size": 512}
TEXTS = ["The quick brown fox", " leading", "  two  spaces  ", "a\n\n\nb", "1234567 12", "It's we'LL they're", "Äpfel café " + unicodedata.normalize("NFD", "naïve é"),
         "🦙 日本語 \U0001f468\u200d\U0001f469", "def f(x):\n\treturn x+1\r\n", "▁mark", " ", "x", "end ", "<tool>call<tool>", "a <tool> b", "<|im_end|>\nnext", "</s> after", "<0x41>"]
KINDS = {
    "gpt2": (lambda: hf_folder.byte_level(), "<|bos|>"),
    "smollm": (lambda: hf_folder.byte_level(digits=True), "<|bos|>"),
    "llama3": (lambda: hf_folder.byte_level(hf_folder.LLAMA3, ignore_merges=True, bos=True), "<|bos|>"),
    "llama3 with merges": (lambda: hf_folder.byte_level(hf_folder.LLAMA3), "<|bos|>"),
    "qwen2": (lambda: hf_folder.byte_level(hf_folder.QWEN2, nfc=True), "<|bos|>"),
    "qwen2 without NFC": (lambda: hf_folder.byte_level(hf_folder.QWEN2), "<|bos|>"),
    "llama2 legacy": (lambda: hf_folder.fallback("legacy"), "<s>"),
    "mistral first": (lambda: hf_folder.fallback("first"), "<s>"),
    "always": (lambda: hf_folder.fallback("always"), "<s>"),
    "never": (lambda: hf_folder.fallback("never", bos=False), "<s>"),
    "gemma": (lambda: hf_folder.fallback("gemma"), "<s>"),
}


def prompt(*args, text=None):
    return subprocess.run([f"{BUILD}/kvgate-prompt", *map(str, args)], input=text, capture_output=True, timeout=60)


def make(folder, tokenizer, bos, config=CONFIG, **settings):
    hf_folder.write_tokenizer(folder, tokenizer, {"bos_token": bos, "eos_token": "<|im_end|>" if bos != "<s>" else {"content": "</s>"}, **settings})
    hf_folder.write_json(folder, "config.json", config)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_ids_equal_the_reference(kind, tmp_path):
    tokenizer, bos = KINDS[kind][0](), KINDS[kind][1]
    make(tmp_path, tokenizer, bos)
    for text in TEXTS:
        done = prompt("ids", "--model", tmp_path, "--text", text=text.encode())
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == tokenizer.encode(text).ids, text


def test_a_folder_and_its_cut_have_one_fingerprint(tmp_path):
    folder = make(tmp_path / "model", hf_folder.byte_level(hf_folder.QWEN2, nfc=True), "<|bos|>", chat_template="{{ messages[0]['content'] }}")
    assert prompt("cut", folder, tmp_path / "cut.gguf").returncode == 0
    a, b = (prompt("fingerprint", p).stdout for p in (folder, tmp_path / "cut.gguf"))
    assert a == b and len(a.strip()) == 32
    make(folder, hf_folder.byte_level(hf_folder.QWEN2), "<|bos|>", chat_template="{{ messages[0]['content'] }}")
    assert prompt("fingerprint", folder).stdout != a  # without NFC ids differ


@pytest.mark.parametrize("where", ["jinja", "string", "list"])
def test_the_chat_template_is_found(where, tmp_path):
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    settings = {"string": {"chat_template": template}, "list": {"chat_template": [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]}}
    make(tmp_path, hf_folder.byte_level(), "<|bos|>", **settings.get(where, {"chat_template": "not this"}))
    if where == "jinja":
        (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    done = prompt("text", "--model", tmp_path, text=b'{"messages":[{"role":"user","content":"hi"}]}')
    assert done.stdout.strip() == b"[user] hi", done.stderr


def edit(folder, name, change):
    path = os.path.join(folder, name)
    with open(path, encoding="utf-8") as f:
        value = json.load(f)
    change(value)
    hf_folder.write_json(folder, name, value)


TOKENIZER_LIES = {
    "Unigram": lambda t: t["model"].update(type="Unigram"),
    "WhitespaceSplit": lambda t: t.update(pre_tokenizer={"type": "WhitespaceSplit"}),
    "\\d+": lambda t: t.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": "\\d+"}, "behavior": "Isolated"}, {"type": "ByteLevel", "use_regex": False}]}),
    "Lowercase": lambda t: t.update(normalizer={"type": "Lowercase"}),
    "rstrip": lambda t: t["added_tokens"][0].update(rstrip=True),
    "no number below": lambda t: t["model"]["vocab"].update({"!": 1 << 40}),
    "occurs twice": lambda t: t["model"]["vocab"].update({"!": t["model"]["vocab"]['"']}),
    "model.vocab": lambda t: t["model"].pop("vocab"),
    "model.merges[3]": lambda t: t["model"]["merges"].__setitem__(3, ["a"]),
}


@pytest.mark.parametrize("says", TOKENIZER_LIES)
def test_an_unknown_tokenizer_is_refused_by_name(says, tmp_path):
    make(tmp_path, hf_folder.byte_level(), "<|bos|>")
    edit(tmp_path, "tokenizer.json", TOKENIZER_LIES[says])
    done = prompt("fingerprint", tmp_path)
    assert done.returncode == 1 and says in done.stderr.decode(), done.stderr


CONFIG_LIES = {
    "model_type \"mamba\"": {"model_type": "mamba"},
    "num_hidden_layers": {"num_hidden_layers": None},
    "hidden_size": {"hidden_size": -4},
    "hidden_act gelu": {"hidden_act": "gelu"},
    "longrope": {"rope_scaling": {"rope_type": "longrope"}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "partial_rotary_factor 0.5": {"partial_rotary_factor": 0.5},
    "layer_types has 1": {"layer_types": ["full_attention"]},
    "linear_attention": {"layer_types": ["full_attention", "linear_attention"]},
}


@pytest.mark.parametrize("says", CONFIG_LIES)
def test_an_unsupported_configuration_is_refused_by_name(says, tmp_path):
    make(tmp_path, hf_folder.byte_level(), "<|bos|>", config={**CONFIG, **CONFIG_LIES[says]})
    done = prompt("fingerprint", tmp_path)
    assert done.returncode == 1 and says in done.stderr.decode(), done.stderr


def test_a_missing_or_broken_file_is_named(tmp_path):
    make(tmp_path, hf_folder.byte_level(), "<|bos|>")
    text = (tmp_path / "tokenizer.json").read_bytes()
    for cut in (0, 1, len(text) // 2, len(text) - 2):
        (tmp_path / "tokenizer.json").write_bytes(text[:cut])
        done = prompt("fingerprint", tmp_path)
        assert done.returncode == 1 and b"tokenizer.json" in done.stderr
    (tmp_path / "config.json").unlink()
    assert b"has no config.json" in prompt("fingerprint", tmp_path).stderr
