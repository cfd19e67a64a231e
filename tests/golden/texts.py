"""Mixed text for tokenizer tests: prose, code, CJK, emoji, combining marks, digits, white space runs, random code points."""
import glob
import os
import random
import sysconfig

CJK = ("我想在苹果公司工作1314151天～今天天气很好。日本語のテキストもあります、カタカナとひらがな。한국어 텍스트도 있습니다. 繁體中文：測試「引號」。"
       "第12条 本規約は、ＡＢＣ１２３を含む。")
OTHER = ("Быстрая коричневая лиса прыгает через ленивую собаку. Der süße Bär isst schöne Äpfel. Ça coûte 12,50 € à l'été. "
         "שלום עולם, مرحبا بالعالم ١٢٣٤٥, नमस्ते दुनिया १२३, สวัสดีชาวโลก, Γειά σου Κόσμε, I'LL they'Ve DON'T 'ſ l'été ")
EMOJI = "😀 😁🦙👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇯🇵 ❤️ 1️⃣ 👍🏽 ½ ² ₃ Ⅷ ①"
MARKS = ["\u0301", "\u0308", "\u0323", "\u0327", "\u0345", "\u3099", "\u0f71", "\u0f72", "\u1161", "\u11a8", "\u093c", "\u0483",
         "\u20dd", "\ufe0f", "\u0b57", "\u1dce", "\U00011938", "\u0338"]
SPACES = [" ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n", "\n ", "\u00a0", "\u3000", "\u2028", "\x0b", "\x0c", "\x85", "\r", "    "]
PIECES = ["'s", "'S", "'ll", "'LL", "'re", "'d", "''", "->", "(x):\n", "==", "!!!", "...", "<0x40>", "<0x0A>", "▁", "▁▁x", "</s>", "<s>",
          "Ġ", "{{", "/*", "\x00", "\x7f", "\ufeff", "\ufffd", "http://a.b/c?d=e&f=1", "e=mc^2", "$5", "50%", "_x_", "#!/bin/sh"]


def sources():
    folder = sysconfig.get_paths()["stdlib"]
    return sorted(glob.glob(os.path.join(folder, "*.py")))


def prose(models):
    with open(os.path.join(models, "shakespeare.txt"), encoding="utf-8") as f:
        return f.read()


def random_character(rng):
    while True:
        c = rng.randrange(rng.choice((0x80, 0x800, 0x3000, 0x10000, 0x20000, 0x110000)))
        if not 0xD800 <= c < 0xE000:
            return chr(c)


def one(rng, shakespeare, code, specials):
    """A text of some hundred characters of one sort, or a mix of all."""
    def piece(kind):
        if kind == 0:
            at = rng.randrange(len(shakespeare) - 700)
            return shakespeare[at:at + rng.randrange(20, 700)]
        if kind == 1:
            at = rng.randrange(max(1, len(code) - 700))
            return code[at:at + rng.randrange(20, 700)]
        if kind == 2:
            source = rng.choice((CJK, OTHER, EMOJI))
            at = rng.randrange(len(source))
            return (source[at:] + source)[:rng.randrange(5, 120)]
        if kind == 3:
            return "".join(rng.choice("aeoncAEONСеあがかक한ㄱﬁ") + rng.choice(MARKS) * rng.randrange(3) for _ in range(rng.randrange(2, 60)))
        if kind == 4:
            return "".join(str(rng.randrange(10 ** rng.randrange(1, 12))) + rng.choice(("", " ", ",", ".", "٣", "४", "²")) for _ in range(20))
        if kind == 5:
            return "".join(rng.choice(SPACES) * rng.randrange(1, 4) + rng.choice(("", "x", "é", "1", "!", "的")) for _ in range(30))
        if kind == 6:
            return "".join(random_character(rng) + rng.choice(("", "", " ", "a", "1", "\n")) for _ in range(rng.randrange(5, 100)))
        if kind == 7:
            return rng.choice("aA =-é的\n0 ") * rng.randrange(1, 200)
        return "".join(rng.choice(PIECES + specials) + rng.choice(("", " ", "\n", "a")) for _ in range(12))

    kind = rng.randrange(10)
    if kind < 9:
        return piece(kind)
    return "".join(piece(rng.randrange(9))[:rng.randrange(1, 60)] for _ in range(10))


def mixed(seed, n_bytes, models, specials=()):
    """Texts of together about n_bytes of UTF-8, the same for the same seed."""
    rng = random.Random(seed)
    shakespeare, files, total = prose(models), sources(), 0
    with open(rng.choice(files), encoding="utf-8", errors="ignore") as f:
        code = f.read()
    while total < n_bytes:
        text = one(rng, shakespeare, code, list(specials))
        total += len(text.encode())
        yield text
        if rng.random() < 0.02:
            with open(rng.choice(files), encoding="utf-8", errors="ignore") as f:
                code = f.read()
