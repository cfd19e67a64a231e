"""Speculative decoding through the API: the same answers with and without drafts, on real models."""
import concurrent.futures
import functools
import math
import os
import subprocess

import pytest
import requests

import toy_model
from stack import MODELS, SMOLLM2, Worker, free_port

QWEN15 = os.path.join(MODELS, "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf")
QWEN05 = os.path.join(MODELS, "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf")
CODE = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n    return area(width, height) * depth\n"
TOPICS = ["sorting a list", "a binary tree", "reading a file", "prime numbers", "a bank account", "matrix products", "parsing dates", "a stack",
          "word counts", "a small web server", "Fibonacci numbers", "a linked list", "temperature units", "a chess board", "hash tables",
          "random walks", "a calculator", "text wrapping", "a to-do list", "graph search"]


def prompts(n):
    topics = [TOPICS[i % len(TOPICS)] + (f", part {i // len(TOPICS)}" if i >= len(TOPICS) else "") for i in range(n)]
    return [f"# Code about {topic}\n{CODE}\n# The same again, for {topic}:\n{CODE[:30]}" for topic in topics]


def answer(worker, prompt, tokens, **extra):
    body = {"model": worker.served, "prompt": prompt, "max_tokens": tokens, "logprobs": 1, "ignore_eos": True, **extra}
    reply = requests.post(worker.url + "/v1/completions", json=body, timeout=600)
    reply.raise_for_status()
    reply = reply.json()
    return reply["choices"], reply["usage"]["completion_tokens"]


def settings(i):
    return [{"temperature": 0}, {"temperature": 0.8, "seed": 5}, {"temperature": 0.8, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.3},
            {"temperature": 0, "repetition_penalty": 1.1, "min_p": 0.1, "logit_bias": {"11": 2}}][i % 4]


def counts(worker):
    names = ("num_draft_tokens_total", "num_accepted_tokens_total")
    return [worker.metric(f"kvgate_spec_decode_{name}") for name in names]


def compare(n, tokens, draft, **flags):
    with Worker("--max-model-len", "2048", gateway=False, **flags) as plain, \
            Worker("--max-model-len", "2048", "--speculative-model", draft, gateway=False, **flags) as drafting:
        for i, prompt in enumerate(prompts(n)):
            assert answer(plain, prompt, tokens, **settings(i)) == answer(drafting, prompt, tokens, **settings(i)), prompt
        assert counts(plain) == [0, 0]
        for _ in range(50):  # when drafts are made is the control's choice by measured time
            if counts(drafting)[0] > 0:
                break
            answer(drafting, prompts(1)[0], tokens, temperature=0)
        return counts(drafting)


def test_a_draft_model_changes_no_answer():
    drafted, accepted = compare(4, 32, SMOLLM2)
    assert drafted > 0 and accepted <= drafted


def test_a_draft_model_of_another_vocabulary_is_refused(build):
    if not os.path.exists(QWEN05):
        pytest.skip(f"{QWEN05} is not there")
    done = subprocess.run([os.path.join(build, "kvgate-worker"), "--model", SMOLLM2, "--speculative-model", QWEN05, "--port", str(free_port()),
                           "--max-model-len", "512", "--kv-cache-memory", "64M"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "another vocabulary: id 0 is" in done.stderr, done.stderr


def test_the_last_chunk_tells_what_drafts_did():
    with Worker("--max-model-len", "1024", "--speculative-model", "ngram", gateway=False) as worker:
        ask = dict(model=worker.served, messages=[{"role": "user", "content": "Repeat: " + "one two three four five " * 20}], max_tokens=60,
                   temperature=0, seed=1, stream=True, extra_body={"ignore_eos": True})
        for _ in range(50):  # which answers have drafts is the control's choice by measured time
            before = counts(worker)
            chunks = list(worker.openai().chat.completions.create(**ask, stream_options={"include_usage": True, "include_speculation": True}))
            usage, after = chunks[-1].usage, counts(worker)
            spec = usage.speculation
            if spec["accepted"]:
                break
        assert [spec["drafted"], spec["accepted"]] == [int(a - b) for a, b in zip(after, before)]
        assert 0 < spec["accepted"] <= spec["drafted"] and sum(spec["accepted_per_position"]) == spec["accepted"] and spec["runs"] > 0
        assert 2 <= spec["k"] <= 32 and spec["goodput_gain"] >= 1 and isinstance(spec["active"], bool)
        assert usage.completion_tokens == 60 and usage.completion_tokens_details.accepted_prediction_tokens == spec["accepted"]
        assert usage.completion_tokens_details.rejected_prediction_tokens == spec["drafted"] - spec["accepted"]
        undrafted = {**ask, "max_tokens": 1, "stream_options": {"include_usage": True, "include_speculation": True}}
        spec = list(worker.openai().chat.completions.create(**undrafted))[-1].usage.speculation
        assert (spec["runs"], spec["drafted"], spec["goodput_gain"]) == (0, 0, 1)
        chunks = list(worker.openai().chat.completions.create(**ask, stream_options={"include_usage": True}))
        assert chunks[-1].usage.completion_tokens_details is None and not hasattr(chunks[-1].usage, "speculation")


@pytest.mark.parametrize("rule", ["rejection", "argmax", "top-p"])
def test_other_rules_are_named_at_start_and_equal_at_temperature_0(rule):
    with Worker("--max-model-len", "1024", gateway=False) as plain, \
            Worker("--max-model-len", "1024", "--speculative-model", "ngram", "--spec-accept", rule, gateway=False) as drafting:
        assert f"--spec-accept {rule}" in drafting.log() and ("LOSSY" in drafting.log()) == (rule != "rejection")
        for prompt in prompts(2):
            assert answer(plain, prompt, 32, temperature=0) == answer(drafting, prompt, 32, temperature=0)
            assert answer(drafting, prompt, 32, temperature=1, seed=3, top_p=0.9, presence_penalty=0.5)[1] == 32
        repeated = "one two three four five " * 20
        want = answer(plain, repeated, 32, temperature=0)
        for _ in range(50):  # when drafts are made is the control's choice by measured time
            assert answer(drafting, repeated, 32, temperature=0) == want
            if counts(drafting)[1] > 0:
                break
        assert counts(drafting)[1] > 0


QWEN = dict(model=QWEN15, served="qwen", threads=2, kv_cache_memory="512M", gateway=False)
QWEN_LIMITS = ("--max-model-len", "2048", "--max-num-batched-tokens", "512")


def answers_of(worker, n, tokens, at_once):
    """Yields the answers in order, as they come: a wrong one ends a long test early."""
    asked = prompts(n)
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        waiting = [pool.submit(answer, worker, asked[i], tokens, **settings(i)) for i in range(n)]
        try:
            for future in waiting:
                yield future.result()
        finally:
            for future in waiting:
                future.cancel()


@functools.cache
def plain_answers(n, tokens):
    with Worker(*QWEN_LIMITS, **QWEN) as plain:
        return list(answers_of(plain, n, tokens, 16))


@pytest.mark.timeout(3600)  # 200 prompts of 200 tokens, twice, take a quarter of an hour on two cores that have nothing else to do
@pytest.mark.parametrize("n, tokens, at_once, draft", [(20, 64, 8, QWEN05), pytest.param(200, 200, 8, QWEN05, marks=pytest.mark.long),
                                                       pytest.param(200, 200, 3, "ngram", marks=pytest.mark.long)])
def test_the_real_pair(n, tokens, at_once, draft):
    """Qwen2.5-Coder 1.5B with 0.5B and prompt lookup: plain and drafting answers are the same, ids, text and log-probabilities."""
    if not os.path.exists(QWEN15) or not os.path.exists(QWEN05):
        pytest.skip(f"{QWEN15} or {QWEN05} is not there")
    want = plain_answers(n, tokens)
    with Worker(*QWEN_LIMITS, "--speculative-model", draft, **QWEN) as drafting:
        for i, got in enumerate(answers_of(drafting, n, tokens, at_once)):
            assert got == want[i], prompts(n)[i]
        for i in range(n):  # when drafts are made is the control's choice by measured time
            if counts(drafting)[1] > 0:
                break
            assert answer(drafting, prompts(n)[i], tokens, **settings(i)) == want[i]
        drafted, accepted = counts(drafting)
    print(f"{n} prompts x {tokens} tokens: {accepted:.0f} of {drafted:.0f} drafts accepted")
    assert 0 < accepted <= drafted  # how often is the control's choice by measured time


LETTERS = range(97, 107)  # "a" to "j"


def letters_model(path, logit):
    """After any of ten letters the same ten, by logit(j)."""
    toy_model.scripted(str(path), toy_model.Vocabulary(), {i: {97 + j: 10 + logit(j) for j in range(10)} for i in LETTERS}, floor=-20.0)
    return str(path)


def draw(session, worker, **params):
    body = {"model": worker.served, "prompt": "a", "temperature": 1, "ignore_eos": True, **params}
    reply = session.post(worker.url + "/v1/completions", json=body, timeout=120)
    reply.raise_for_status()
    return reply.json()["choices"][0]["text"]


def chi_square(texts, top_k=10):
    """Over all letters of all texts, of which the last top_k can come."""
    weights = {chr(97 + j): math.exp(0.2 * j) for j in range(10 - top_k, 10)}
    letters = "".join(texts)
    assert set(letters) <= set(weights)
    wants = {c: len(letters) * w / sum(weights.values()) for c, w in weights.items()}
    return sum((letters.count(c) - want) ** 2 / want for c, want in wants.items())


@pytest.mark.parametrize("rule", [None, "coupled", "rejection"])
def test_draws_without_a_seed_differ_and_seeds_decide(tmp_path, rule):
    """2,000 requests without a seed: their letters follow the model's distribution, the first, which nothing drafts, and the others,
    which a model with another distribution drafts. A seed gives its text whatever runs beside it. (A chi-square of 70 with nine
    degrees of freedom is one in 10^11.)"""
    model = letters_model(tmp_path / "target.gguf", lambda j: 0.2 * j)
    draft = letters_model(tmp_path / "draft.gguf", lambda j: 0.5 * abs(j - 5))
    flags = ("--speculative-model", draft, "--spec-accept", rule) if rule else ()
    with Worker("--max-model-len", "256", *flags, model=model, served="letters", gateway=False) as worker, requests.Session() as session, \
            concurrent.futures.ThreadPoolExecutor(8) as pool:
        alone = draw(session, worker, max_tokens=40, seed=7)
        mixed = pool.map(lambda i: draw(session, worker, max_tokens=40, seed=7) if i % 2 else draw(session, worker, max_tokens=3), range(40))
        seeded = [text for i, text in enumerate(mixed) if i % 2]
        if rule != "rejection":  # by rejection what is drafted decides, too
            assert draw(session, worker, max_tokens=40, seed=7) == alone and set(seeded) == {alone}
        texts = list(pool.map(lambda _: draw(session, worker, max_tokens=3), range(2000)))
        assert all(len(text) == 3 for text in texts) and len(set(texts)) > 500  # of 1,000
        assert chi_square([text[0] for text in texts]) < 70 and chi_square([text[1:] for text in texts]) < 70
        few = list(pool.map(lambda _: draw(session, worker, max_tokens=6, top_k=4), range(300)))
        assert chi_square(few, top_k=4) < 60
        # how much is drafted is the control's choice by measured time: on a slow machine a few tokens; test_accept draws 10^6
        assert (counts(worker)[0] > 0) == bool(rule)
