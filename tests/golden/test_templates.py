"""Chat prompts, byte for byte those of `transformers`: every public template at hand over a matrix of conversations.

The reference is transformers.utils.chat_template_utils.render_jinja_template itself. It gets the request as the design's
normalization leaves it: text parts joined, missing assistant content "", arguments as objects.
"""

import copy
import json
import os
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("B", "build")
MODELS = ROOT / "build" / "models"
NOW = 1753660800  # 2025-07-28 00:00:00 UTC
BOS, EOS = "<|bos|>", "<|eos|>"

jinja2 = pytest.importorskip("jinja2")
reference = pytest.importorskip("transformers.utils.chat_template_utils")
import datetime as _datetime  # noqa: E402


class FixedTime(_datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(NOW, _datetime.timezone.utc).replace(tzinfo=None)


TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "temp > 10 & humidity < 50 (user's a/b — é)\nsecond line",
        "parameters": {"type": "object", "properties": {
            "city": {"type": "string", "description": "The \"city\""},
            "unit": {"type": "string", "enum": ["c", "f"], "default": "c"},
            "days": {"type": ["integer", "null"], "minimum": 1, "default": 2.5},
            "tags": {"type": "array", "items": {"type": "string"}, "description": "labels"},
            "where": {"type": "object", "properties": {"lat": {"type": "number"}, "ok": {"type": "boolean"}}, "required": ["lat"]},
        }, "required": ["city"]}}},
    {"type": "function", "function": {"name": "noop", "description": "Does nothing", "parameters": {"type": "object", "properties": {}}}},
]
CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Zürich <b>", "days": 3, "b": [1, 2.5, null, true], "a": {"x": "it\'s"}}'}}
CALL2 = {"id": "call00002", "type": "function", "function": {"name": "noop", "arguments": "{}"}}
USER, SYSTEM = {"role": "user", "content": "  What's up, <|im_end|> dude?\n"}, {"role": "system", "content": "Be brief.\n"}
HELLO = {"role": "assistant", "content": "Hello! "}
THOUGHT = {"role": "assistant", "content": "<think>\nhm, well\n</think>\n\nIt is fine."}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": '{"t": 10.05}'}
RESULT2 = {"role": "tool", "tool_call_id": "call00002", "name": "noop", "content": "done"}


def conversations():
    asks = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    yield "user", {"messages": [USER]}
    yield "system", {"messages": [SYSTEM, USER]}
    yield "turns", {"messages": [SYSTEM, USER, HELLO, {"role": "user", "content": "And 你好 👋?"}]}
    yield "thought", {"messages": [USER, THOUGHT, USER]}
    yield "reasoning", {"messages": [USER, {"role": "assistant", "content": "Fine.", "reasoning_content": "Let me see\n"}, USER]}
    yield "reasoning-last", {"messages": [USER, {"role": "assistant", "reasoning": "Let me see", "content": "Fine."}]}
    yield "tools", {"messages": [USER], "tools": TOOLS}
    yield "tools-system", {"messages": [SYSTEM, USER], "tools": TOOLS[:1]}
    yield "calls", {"messages": [USER, asks, RESULT], "tools": TOOLS}
    yield "calls-no-tools", {"messages": [SYSTEM, USER, asks, RESULT, HELLO, USER]}
    yield "calls-two", {"messages": [USER, {"role": "assistant", "content": "I'll look.", "tool_calls": [CALL, CALL2]}, RESULT, RESULT2], "tools": TOOLS}
    yield "calls-then-user", {"messages": [SYSTEM, USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT, HELLO, USER], "tools": TOOLS}
    yield "calls-missing-content", {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT], "tools": TOOLS}
    yield "calls-thinking", {"messages": [USER, {"role": "assistant", "content": "", "reasoning_content": "I need it", "tool_calls": [CALL]}, RESULT], "tools": TOOLS}
    yield "parts", {"messages": [{"role": "system", "content": [{"type": "text", "text": "S"}]}, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}
    yield "parts-empty", {"messages": [{"role": "user", "content": []}]}
    yield "empty", {"messages": [{"role": "user", "content": ""}]}
    yield "no-prompt", {"messages": [USER, HELLO], "add_generation_prompt": False}
    yield "prefill", {"messages": [USER, HELLO]}
    yield "developer", {"messages": [{"role": "developer", "content": "Dev"}, USER]}
    yield "two-users", {"messages": [USER, USER]}
    yield "only-assistant", {"messages": [HELLO]}
    yield "system-later", {"messages": [USER, HELLO, SYSTEM, USER]}
    yield "function-role", {"messages": [USER, {"role": "function", "name": "f", "content": "1"}]}
    yield "thinking-on", {"messages": [SYSTEM, USER, THOUGHT, USER], "chat_template_kwargs": {"enable_thinking": True, "thinking": True}}
    yield "thinking-off", {"messages": [SYSTEM, USER], "chat_template_kwargs": {"enable_thinking": False, "thinking": False}}
    yield "thinking-off-tools", {"messages": [USER, asks, RESULT], "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low"}}
    yield "kwargs", {"messages": [USER], "chat_template_kwargs": {"reasoning_effort": "high", "date_string": "1 Jan 2025", "tools_in_user_message": False, "custom_tools": None, "builtin_tools": ["python"], "model_identity": "You are X."}}
    yield "documents", {"messages": [USER], "documents": [{"title": "T <1>", "text": "Some text\nmore", "doc_id": 1}, {"title": "U", "text": "other"}]}


def normalized(body):
    """What kvg_chat_render's rules make of a body, written down a second time."""
    body = copy.deepcopy(body)
    for message in body["messages"]:
        if isinstance(message.get("content"), list):
            message["content"] = "\n".join(part["text"] for part in message["content"])
        elif message.get("content") is None:
            message["content"] = ""
        for call in message.get("tool_calls") or []:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return body


def expected(template, body):
    body = normalized(body)
    kwargs = {"bos_token": BOS, "eos_token": EOS, **body.get("chat_template_kwargs", {})}
    try:
        rendered, _ = reference.render_jinja_template(
            [body["messages"]], tools=body.get("tools"), documents=body.get("documents"), chat_template=template,
            add_generation_prompt=body.get("add_generation_prompt", True), **kwargs)
        return rendered[0], None
    except Exception as error:  # whatever a template or jinja raises
        return None, f"{type(error).__name__}: {error}"


def gguf_template(path):
    """tokenizer.chat_template of a GGUF, found by its key: a string follows its type (8) and length."""
    with open(path, "rb") as file:
        head = file.read(24 << 20)
    key = b"tokenizer.chat_template"
    at = head.find(len(key).to_bytes(8, "little") + key)
    if at < 0:
        return None
    at += 8 + len(key)
    assert int.from_bytes(head[at:at + 4], "little") == 8
    length = int.from_bytes(head[at + 4:at + 12], "little")
    return head[at + 12:at + 12 + length].decode()


def templates():
    found = {path.stem: path.read_text() for path in sorted((MODELS / "vocabs" / "templates").glob("*.jinja"))}
    for path in [*sorted(MODELS.glob("*.gguf")), *sorted((MODELS / "vocabs").glob("*.gguf"))]:
        text = gguf_template(path)
        if text:
            found[path.name] = text
    return found


def render(cases):
    """Answers of build/tests/tools/render_chat, one a case, all from one process."""
    program = BUILD / "tests" / "tools" / "render_chat"
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    done = subprocess.run([program], input=lines.encode(), capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return [json.loads(line) for line in done.stdout.decode().split("\n")[:-1]]


CLIENT_WORDS = [b"dude", b"humidity", b"Z\xc3\xbcrich", b"Be brief", b"10.05"]


def template_bytes(answer):
    """What of the prompt counts as written by the template."""
    text, at, written = answer["text"].encode(), 0, b""
    for length, origin in answer["runs"]:
        written += text[at:at + length] + b"|" if origin == 0 else b""
        at += length
    assert at == len(text)
    return written


@pytest.fixture(autouse=True)
def fixed_time(monkeypatch):
    monkeypatch.setattr(reference, "datetime", FixedTime)


def test_every_template_renders_as_transformers_does():
    cases, wanted = [], []
    for name, template in templates().items():
        for label, body in conversations():
            cases.append({"template": template, "body": body, "bos_token": BOS, "eos_token": EOS, "now": NOW})
            wanted.append((f"{name} / {label}", *expected(template, body)))
    assert len(cases) > 1000, "run `make models-test` first"
    answers = render(cases)
    assert len(answers) == len(cases)
    wrong, raising = [], 0
    for (label, text, error), answer in zip(wanted, answers):
        raising += error is not None
        if (text is None) != ("error" in answer) or text != answer.get("text"):
            wrong.append(f"{label}: want {error or text!r}, got {answer.get('error') or answer.get('text')!r}")
        elif text is not None:
            written = template_bytes(answer)
            if any(word in written for word in CLIENT_WORDS):
                wrong.append(f"{label}: client text counts as the template's in {written!r}")
    print(f"{len(cases)} prompts, {raising} of them raise, {len(wrong)} differ")
    if wrong:
        pytest.fail(f"{len(wrong)} of {len(cases)} differ:\n" + "\n".join(line[:3000] for line in wrong[:20]))


VARIABLES = {
    "x": {"a": {"b": {"c": "deep"}}, "list": [3, 1, 2], "s": "multi\nline <é>", "big": 12345678901234567890123, "f": 1.0},
    "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}],
    "m": "v",
}


def test_every_construct_means_what_it_means_in_jinja():
    """One template a line of jinja_snippets.txt; `\\n` outside of tags stands for a newline where the line needs one."""
    lines = (pathlib.Path(__file__).parent / "jinja_snippets.txt").read_text().splitlines()
    snippets = [line.replace("\\n", "\n") if line.startswith("   {%") else line for line in lines]
    wrong = []
    for snippet, answer in zip(snippets, render([{"template": s, "vars": VARIABLES, "now": NOW} for s in snippets])):
        try:
            want, error = reference._compile_jinja_template(snippet).render(**copy.deepcopy(VARIABLES)), None
        except Exception as raised:
            want, error = None, f"{type(raised).__name__}: {raised}"
        if (want is None) != ("error" in answer) or want != answer.get("text"):
            wrong.append(f"{snippet}\n  want {error or want!r}\n  got  {answer.get('error') or answer.get('text')!r}")
    assert not wrong, f"{len(wrong)} of {len(snippets)} differ:\n" + "\n".join(wrong)
