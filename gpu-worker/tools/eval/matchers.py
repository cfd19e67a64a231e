"""How an answer is judged: score(item, text) -> a number from 0 to 1. An item names its matcher by a word, or an object with "type"."""
import json
import math
import re
import subprocess

import client
import confine

NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
CODE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.S)
JUDGE = ("Question:\n{prompt}\n\nReference answer:\n{answer}\n\nAnswer to judge:\n{output}\n\n"
         "Does the answer to judge agree with the reference answer? Reply with yes or no only.")


class BadTask(Exception):
    """The task file is wrong; the message names item and member."""


def answers(item):
    value = item.get("answers", item.get("answer"))
    return [str(a) for a in (value if isinstance(value, list) else [value])]


def exact(item, text, options):
    return float(text.strip() in [a.strip() for a in answers(item)])


def contains(item, text, options):
    return float(any(a in text for a in answers(item)))


def regex(item, text, options):
    return float(any(re.search(a, text) for a in answers(item)))


def last_number(text):
    """The last number in a text, thousands separators allowed; None without one."""
    found = NUMBER.findall(text)
    return float(found[-1].rstrip(",").replace(",", "")) if found else None


def number(item, text, options):
    got = last_number(text)
    return float(got is not None and any(math.isclose(got, float(a.replace(",", "")), rel_tol=1e-6, abs_tol=1e-9) for a in answers(item)))


def command(item, text, options):
    """The user's own program, with {"item", "output"} on stdin; status 0 is right."""
    try:
        done = subprocess.run(options["command"], input=json.dumps({"item": item, "output": text}).encode(), stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, timeout=options.get("timeout", 60))
    except subprocess.TimeoutExpired:
        return 0.0
    return float(done.returncode == 0)


def prompt_of(item):
    return item["prompt"] if "prompt" in item else "\n".join(str(m.get("content", "")) for m in item["messages"])


def judge(item, text, options):
    question = options.get("template", JUDGE).format(prompt=prompt_of(item), answer=" / ".join(answers(item)), output=text)
    endpoint = client.Endpoint(options["endpoint"], options.get("api_key"), options.get("model"))
    reply = endpoint.complete({"messages": [{"role": "user", "content": question}], "max_tokens": 8, "temperature": 0})
    return float(reply.strip().lower().startswith("yes"))


def program(item, text):
    """The whole program of a HumanEval item: a fenced block replaces the prompt where it defines the function again."""
    fenced = CODE.search(text)
    body = fenced.group(1) if fenced else text
    whole = body if f"def {item['entry_point']}(" in body else item["prompt"] + body
    if whole is body:
        whole = item["prompt"].split(f"def {item['entry_point']}(")[0] + body
    return f"{whole}\n{item['test']}\ncheck({item['entry_point']})\n"


def humaneval(item, text, options):
    return float(confine.run(program(item, text), options.get("timeout", 10)).passed)


KINDS = {"exact": exact, "regex": regex, "number": number, "contains": contains, "command": command, "judge": judge,
         "humaneval": humaneval}


def options_of(item):
    matcher = item.get("matcher", "exact")
    return {"type": matcher} if isinstance(matcher, str) else matcher


def is_kind(item, kind):
    return options_of(item)["type"] == kind


def check_options(options, item, where):
    """Raises BadTask where a matcher's members are not what it takes."""
    kind = options["type"]
    if kind == "command" and not (isinstance(options.get("command"), list) and options["command"] and all(isinstance(a, str) for a in options["command"])):
        raise BadTask(f"{where}: matcher \"command\" needs \"command\": [program, argument ...], strings all")
    if kind == "judge" and not isinstance(options.get("endpoint"), str):
        raise BadTask(f"{where}: matcher \"judge\" needs \"endpoint\", a string")
    if kind == "humaneval" and not all(isinstance(item.get(m), str) for m in ("prompt", "test", "entry_point")):
        raise BadTask(f"{where}: matcher \"humaneval\" needs \"prompt\", \"test\" and \"entry_point\", strings all")
    seconds = options.get("timeout", 1)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 1 <= seconds <= 86400:
        raise BadTask(f"{where}: \"timeout\" is {seconds!r}, not seconds from 1 to 86400")
    try:
        client.Endpoint(options["endpoint"]) if kind == "judge" else None
        options.get("template", JUDGE).format(prompt="", answer="", output="")
    except client.Unanswered as error:
        raise BadTask(f"{where}: {error}") from None
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise BadTask(f"{where}: \"template\" takes {{prompt}}, {{answer}}, {{output}}, and {{{{ for a brace: {error!r}") from None


def check_answers(item, where):
    value = item.get("answers", item.get("answer"))
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(a, (str, int, float)) and not isinstance(a, bool) for a in values):
        raise BadTask(f"{where}: matcher \"{options_of(item)['type']}\" needs \"answer\" or \"answers\": strings or numbers, at least one")


def check(item, where):
    """Raises BadTask where an item cannot be judged."""
    options = options_of(item)
    kind = options.get("type") if isinstance(options, dict) else options
    if not isinstance(kind, str) or kind not in KINDS or not isinstance(options, dict):
        raise BadTask(f"{where}: matcher \"{kind}\" is not known ({', '.join(KINDS)})")
    if kind in ("exact", "regex", "number", "contains", "judge"):
        check_answers(item, where)
    check_options(options, item, where)
    try:
        if kind == "number":
            [float(a.replace(",", "")) for a in answers(item)]
        if kind == "regex":
            [re.compile(a) for a in answers(item)]
    except (ValueError, re.error) as error:
        raise BadTask(f"{where}: {error}") from None


def score(item, text):
    options = options_of(item)
    return KINDS[options["type"]](item, text, options)
