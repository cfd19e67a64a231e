"""A real worker on SmolLM2, as OpenAI's client and as hostile clients see it. Ids such as S4 name rows of public bug reports."""
import http.client
import json
import os
import re
import signal
import socket
import threading

import openai
import pytest
import requests

from stack import SMOLLM2, Redis, Worker, wait_until

BLOCK = 32
STORY = "Once upon a time, in a village by the sea, there lived a"


@pytest.fixture(scope="module")
def worker():
    with Worker("--max-model-len", 2048, gateway="unix") as w:
        yield w
        assert w.running(), w.log()


@pytest.fixture(scope="module")
def client(worker):
    return worker.openai()


def post(worker, path, body, **kwargs):
    data = body if isinstance(body, (str, bytes)) else json.dumps(body)
    return requests.post(worker.url + path, data=data, headers={"Content-Type": "application/json"}, timeout=60, **kwargs)


def complete(worker, **body):
    reply = post(worker, "/v1/completions", {"temperature": 0, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(worker, path, body):
    """The data lines of a stream, each parsed as strict UTF-8 JSON; the last is "[DONE]"."""
    reply = post(worker, path, {**body, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["x-accel-buffering"] == "no" and reply.headers["cache-control"] == "no-cache"
    lines = [line for line in reply.content.decode("utf-8").split("\n") if line]
    assert all(line.startswith(("data: ", ":")) for line in lines)
    data = [line[6:] for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]" and data.count("[DONE]") == 1
    return [json.loads(line) for line in data[:-1]]


def streamed_text(worker, **body):
    chunks = events(worker, "/v1/completions", {"temperature": 0, **body})
    return "".join(c["choices"][0]["text"] for c in chunks if c["choices"]), chunks[-1]["choices"][0]["finish_reason"]


def idle(worker):
    m = worker.metrics()
    quiet = lambda name: all(v == 0 for k, v in m.items() if k.startswith(name + "{"))
    return quiet("kvgate_num_requests_running") and quiet("kvgate_num_requests_waiting")


# ---- answers ----------------------------------------------------------------------------------------------------------------


def test_chat_streamed_equals_whole(client):
    ask = dict(model="smollm2", messages=[{"role": "user", "content": "Name three colours."}], temperature=0, max_tokens=24)
    whole = client.chat.completions.create(**ask)
    assert whole.id.startswith("chatcmpl-") and whole.object == "chat.completion" and whole.model == "smollm2"
    assert whole.choices[0].message.role == "assistant" and whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    deltas = []
    for chunk in client.chat.completions.create(**ask, stream=True):
        assert chunk.object == "chat.completion.chunk" and len(chunk.choices) == 1
        deltas.append(chunk.choices[0].delta.content or "")
    assert "".join(deltas) == whole.choices[0].message.content != ""


def test_the_second_question_says_what_was_cached(client):
    ask = dict(model="smollm2", temperature=0, max_tokens=4,
               messages=[{"role": "system", "content": "You are a patient teacher. " * 20}, {"role": "user", "content": "Hello."}])
    client.chat.completions.create(**ask)
    ask["messages"][1]["content"] = "Good evening to you."
    usage = client.chat.completions.create(**ask).usage
    assert usage.prompt_tokens - 2 * BLOCK <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens % BLOCK == 0


# S4
@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"include_usage": False}], ids=["none", "usage", "no-usage"])
@pytest.mark.parametrize("limit", [1, 120], ids=["length", "stop"])
def test_final_chunks_are_in_shape(worker, options, limit):
    body = {"messages": [{"role": "user", "content": "What is 2+2? Answer with one number."}], "temperature": 0, "max_tokens": limit}
    whole = post(worker, "/v1/chat/completions", body).json()
    reason = "length" if limit == 1 else "stop"
    assert whole["choices"][0]["finish_reason"] == reason
    chunks = events(worker, "/v1/chat/completions", {**body, **({"stream_options": options} if options else {})})
    usage_wanted = bool(options and options["include_usage"])
    if usage_wanted:
        usage = chunks.pop()
        assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert all(c["usage"] is None for c in chunks)
    else:
        assert not any("usage" in c for c in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons[-1] == reason and reasons[:-1] == [None] * (len(reasons) - 1)
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert len({c["id"] for c in chunks}) == 1


def test_completions_take_text_and_ids_alone_and_in_arrays(worker):
    ids = post(worker, "/tokenize", {"prompt": STORY}).json()["tokens"]
    text = complete(worker, prompt=STORY, max_tokens=6)["choices"][0]["text"]
    assert complete(worker, prompt=ids, max_tokens=6)["choices"][0]["text"] == text
    both = complete(worker, prompt=[STORY, STORY + " very"], max_tokens=6)
    assert [c["index"] for c in both["choices"]] == [0, 1] and both["choices"][0]["text"] == text
    assert both["usage"]["completion_tokens"] == 12
    assert [c["text"] for c in complete(worker, prompt=[ids, ids], max_tokens=6)["choices"]] == [text, text]


def test_echo_puts_the_prompt_first(worker):
    text = complete(worker, prompt=STORY, max_tokens=6)["choices"][0]["text"]
    assert complete(worker, prompt=STORY, max_tokens=6, echo=True)["choices"][0]["text"] == STORY + text
    assert streamed_text(worker, prompt=STORY, max_tokens=6, echo=True) == (STORY + text, "length")
    alone = complete(worker, prompt=STORY, max_tokens=0, echo=True)
    assert alone["choices"][0]["text"] == STORY and alone["usage"]["completion_tokens"] == 0
    ids = post(worker, "/tokenize", {"prompt": STORY}).json()["tokens"]
    assert complete(worker, prompt=ids, max_tokens=0, echo=True)["choices"][0]["text"] == STORY


def test_choices_differ_and_a_seed_repeats_them(worker):
    ask = dict(prompt=STORY, max_tokens=8, temperature=1, n=3, seed=7)
    first, again = complete(worker, **ask), complete(worker, **ask)
    texts = [c["text"] for c in first["choices"]]
    assert [c["index"] for c in first["choices"]] == [0, 1, 2] and len(set(texts)) > 1
    assert [c["text"] for c in again["choices"]] == texts
    assert first["usage"]["prompt_tokens"] == complete(worker, prompt=STORY, max_tokens=1)["usage"]["prompt_tokens"]
    parts = {}
    for chunk in events(worker, "/v1/completions", ask):
        choice = chunk["choices"][0]
        parts[choice["index"]] = parts.get(choice["index"], "") + choice["text"]
    assert [parts[i] for i in range(3)] == texts
    unseeded = {complete(worker, prompt=STORY, max_tokens=8, temperature=1)["choices"][0]["text"] for _ in range(4)}
    assert len(unseeded) > 1


def test_log_probabilities(client, worker):
    chat = client.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": "Hi"}], temperature=0, max_tokens=4,
                                          logprobs=True, top_logprobs=3)
    content = chat.choices[0].logprobs.content
    assert "".join(t.token for t in content) == chat.choices[0].message.content and len(content) == 4
    for token in content:
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].logprob == token.logprob <= 0
        assert bytes(token.bytes).decode() == token.token
    text = complete(worker, prompt=STORY, max_tokens=4, logprobs=2)["choices"][0]
    assert "".join(text["logprobs"]["tokens"]) == text["text"]
    assert len(text["logprobs"]["token_logprobs"]) == len(text["logprobs"]["top_logprobs"]) == 4
    offsets = [sum(map(len, text["logprobs"]["tokens"][:i])) for i in range(4)]
    assert text["logprobs"]["text_offset"] == offsets
    chunks = events(worker, "/v1/completions", dict(prompt=STORY, max_tokens=4, logprobs=2, temperature=0))
    tokens = [t for c in chunks if c["choices"][0]["logprobs"] for t in c["choices"][0]["logprobs"]["tokens"]]
    assert tokens == text["logprobs"]["tokens"]


def test_parameters_act(worker):
    base = complete(worker, prompt=STORY, max_tokens=8)["choices"][0]["text"]
    one = complete(worker, prompt=STORY, max_tokens=1)["choices"][0]["text"]
    first = post(worker, "/tokenize", {"prompt": one}).json()["tokens"][0]
    assert complete(worker, prompt=STORY, max_tokens=1, logit_bias={first: -100})["choices"][0]["text"] != one
    assert complete(worker, prompt=STORY, max_tokens=8, temperature=2, top_k=1)["choices"][0]["text"] == base
    assert complete(worker, prompt=STORY, max_tokens=8, temperature=2, top_p=0)["choices"][0]["text"] == base
    assert complete(worker, prompt=STORY, max_tokens=8, temperature=1e-6)["choices"][0]["text"] == base
    stopped = complete(worker, prompt=STORY, max_tokens=8, stop_token_ids=[first])
    assert stopped["choices"][0]["finish_reason"] == "stop"


# S1
def test_characters_over_several_tokens_come_whole(worker):
    family = "👨‍👩‍👧‍👦 🦙 잠깐 "
    whole = complete(worker, prompt=family * 6, max_tokens=48)["choices"][0]["text"]
    text, _ = streamed_text(worker, prompt=family * 6, max_tokens=48)
    assert text == whole
    for chunk in events(worker, "/v1/completions", dict(prompt=family * 6, max_tokens=48, temperature=0)):
        delta = chunk["choices"][0]["text"]
        assert "\ufffd" not in delta or "\ufffd" in whole
    tokens = post(worker, "/tokenize", {"prompt": family}).json()["tokens"]
    assert len(tokens) > len(family.split())
    assert post(worker, "/detokenize", {"tokens": tokens}).json()["prompt"] == family


# S3
def test_stop_strings_over_token_borders(worker):
    ask = dict(prompt=STORY, max_tokens=24)
    plain = complete(worker, **ask, logprobs=0)["choices"][0]
    text, tokens = plain["text"], plain["logprobs"]["tokens"]
    at = next(i for i in range(4, len(tokens) - 1) if len(tokens[i]) > 3 and len(tokens[i + 1]) > 3)
    before = "".join(tokens[:at])
    stop = tokens[at][-2:] + tokens[at + 1][:2]
    cut = text[:text.index(stop)]
    assert len(cut) <= len(before) + len(tokens[at]) - 2
    for stops, expected, reason in [
        (stop, cut, "stop"),
        (["z" * 200], text, "length"),
        ([text[-3:] + "zzz"], text, "length"),
        ([stop + "never", stop, stop + "neverever", "zzzz"], cut, "stop"),
    ]:
        choice = complete(worker, **ask, stop=stops)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (expected, reason), stops
        assert streamed_text(worker, **ask, stop=stops) == (expected, reason), stops
    kept = complete(worker, **ask, stop=stop, include_stop_str_in_output=True)["choices"][0]["text"]
    assert kept.startswith(cut + stop)


# P1
@pytest.mark.parametrize("blocks", [1, 2, 8])
def test_prompts_of_whole_blocks(worker, blocks):
    ids = [1000 + (i * 37 + blocks) % 4000 for i in range(blocks * BLOCK + 1)]
    exact = ids[:-1]
    answers = [complete(worker, prompt=exact, max_tokens=5) for _ in range(3)]
    assert len({a["choices"][0]["text"] for a in answers}) == 1
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert cached[0] == 0 and all(c <= len(exact) - 1 for c in cached)
    assert cached[1] == cached[2] >= (blocks - 1) * BLOCK
    longer = complete(worker, prompt=ids, max_tokens=5)
    assert longer["usage"]["prompt_tokens_details"]["cached_tokens"] == blocks * BLOCK
    shorter = complete(worker, prompt=exact[:-1], max_tokens=5)
    assert shorter["usage"]["prompt_tokens_details"]["cached_tokens"] == (blocks - 1) * BLOCK
    assert complete(worker, prompt=[exact, exact], max_tokens=5)["choices"][1]["text"] == answers[0]["choices"][0]["text"]


# C1
def test_content_parts_are_joined(worker):
    def ids(content, system="S"):
        return post(worker, "/tokenize", {"messages": [{"role": "system", "content": system}, {"role": "user", "content": content}]})
    part = lambda text: {"type": "text", "text": text}
    assert ids([part("a"), part("b")], [part("S")]).json()["tokens"] == ids("a\nb").json()["tokens"]
    bad = ids([part("a"), {"type": "image_url", "image_url": {"url": "data:,"}}])
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "messages[1].content[1].type"
    chat = post(worker, "/v1/chat/completions", {"messages": [{"role": "user", "content": [part("a"), {"type": "image_url"}]}]})
    assert chat.status_code == 400 and chat.json()["error"]["param"] == "messages[0].content[1].type"


# C2
def test_null_content_beside_tool_calls(worker):
    call = {"id": "c1", "type": "function", "function": {"name": "sqrt", "arguments": "{\"x\":101}"}}
    prompts = []
    for content in ({"content": None}, {}, {"content": ""}):
        body = {"messages": [{"role": "user", "content": "root of 101?"}, {"role": "assistant", **content, "tool_calls": [call]},
                             {"role": "tool", "tool_call_id": "c1", "content": "10.05"}], "max_tokens": 2}
        assert post(worker, "/v1/chat/completions", body).status_code == 200
        tokens = post(worker, "/tokenize", body).json()["tokens"]
        prompts.append(post(worker, "/detokenize", {"tokens": tokens}).json()["prompt"])
    assert prompts[0] == prompts[1] == prompts[2]
    assert "None" not in prompts[0] and "null" not in prompts[0]


# ---- bad input --------------------------------------------------------------------------------------------------------------

RAW = '{"prompt":"x","max_tokens":2,%s}'
NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]


# M4
def test_numbers_that_are_none_are_refused(worker):
    for name in NUMBERS:
        for value in ("NaN", "Infinity", "-Infinity", "1e999", '"nan"', "-1e300", "[]", "true"):
            reply = post(worker, "/v1/completions", RAW % f'"{name}":{value}')
            assert reply.status_code == 400, (name, value, reply.text)
            assert reply.json()["error"]["type"] == "invalid_request_error"
    for field in ('"temperature":1e-5', '"temperature":1e-38', '"temperature":2', '"top_p":1', '"top_p":0', '"top_k":0', '"top_k":-1',
                  '"top_k":1000000000'):
        assert post(worker, "/v1/completions", RAW % field).status_code == 200, field
    for field in ('"temperature":100', '"top_p":1.0000001', '"top_k":-2'):
        assert post(worker, "/v1/completions", RAW % field).status_code == 400, field
    assert complete(worker, prompt="x", max_tokens=2)["usage"]["completion_tokens"] == 2


# M2
def test_degenerate_sizes_are_refused_or_exact(worker):
    refused = [('{"prompt":%s,"max_tokens":2}' % p, "prompt") for p in ('""', '[""]', "[]", "[[]]", "null", "5", '[5,"x"]', "[-1]", "[999999]", "{}")]
    refused += [('{"prompt":"x","max_tokens":%s}' % m, "max_tokens") for m in ("0", "-1", "9223372036854775808", "1.5", '"5"')]
    refused += [('{"prompt":"x","max_tokens":1,"n":%s}' % n, "n") for n in ("0", "-1", "1000000000", "1.5")]
    for body, param in refused:
        reply = post(worker, "/v1/completions", body)
        assert reply.status_code == 400, (body, reply.text)
        assert reply.json()["error"]["param"].startswith(param), (body, reply.text)
    for messages in ("[]", "null", "5", "[5]", '[{"role":"user"}]', '[{"role":"villain","content":"x"}]', '[{"content":"x"}]'):
        reply = post(worker, "/v1/chat/completions", '{"messages":%s,"max_tokens":2}' % messages)
        assert reply.status_code == 400 and reply.json()["error"]["param"].startswith("messages"), (messages, reply.text)
    for n in (1, 2):
        assert complete(worker, prompt=STORY, max_tokens=n, ignore_eos=True)["usage"]["completion_tokens"] == n
    assert complete(worker, prompt=STORY, max_tokens=100000000, stop=[" ", "e", "a"])["choices"][0]["finish_reason"] == "stop"


def test_prompts_over_the_context_are_refused_with_both_numbers(worker):
    for path, body in (("/v1/completions", {"prompt": [5] * 3000}), ("/v1/completions", {"prompt": [5] * 3000, "stream": True}),
                       ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one two " * 2000}]})):
        reply = post(worker, path, body)
        assert reply.status_code == 400
        assert "2048" in reply.json()["error"]["message"] and re.search(r"\b[3-9]\d{3}\b", reply.json()["error"]["message"])


def test_clients_raise_the_right_exceptions(client):
    hello = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=hello)
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="smollm2", messages=hello, temperature=3)
    assert raised.value.param == "temperature" and "3" in raised.value.message
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="smollm2", messages=hello, response_format={"type": "json_object"})
    assert raised.value.param == "response_format"
    assert [m.id for m in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").id == "smollm2"


# W4
def test_deep_or_wide_json_does_no_harm(worker):
    for body in ('{"x":' + "[" * 10000 + "0" + "]" * 10000 + "}", '{"x":' * 100000 + "1" + "}" * 100000, "[" * 1000000,
                 '{"prompt":"x","max_tokens":1,"seed":' + "9" * 1000000 + "}", '{"prompt":"x"', "", "null", '"x"', '{"prompt":"\\ud800"}'):
        reply = post(worker, "/v1/completions", body)
        assert reply.status_code == 400 and "error" in reply.json(), body[:80]
    wide = "{" + ",".join(f'"k{i}":0' for i in range(20000)) + ',"prompt":"x","max_tokens":1}'
    before = worker.metric("kvgate_unknown_fields_total")
    assert post(worker, "/v1/completions", wide).status_code == 200
    assert worker.metric("kvgate_unknown_fields_total") == before + 20000


# ---- connections ------------------------------------------------------------------------------------------------------------


def raw(worker):
    return socket.create_connection(("127.0.0.1", worker.port), timeout=30)


def request_bytes(body, path="/v1/completions", headers=""):
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(data)}\r\n\r\n".encode() + data


# W2
def test_bodies_may_come_chunked_or_expected(worker):
    body = {"prompt": STORY, "max_tokens": 3, "temperature": 0}
    text = complete(worker, **body)["choices"][0]["text"]
    data = json.dumps(body).encode()
    chunked = requests.post(worker.url + "/v1/completions", data=(data[i:i + 7] for i in range(0, len(data), 7)), timeout=60)
    assert chunked.json()["choices"][0]["text"] == text
    with raw(worker) as s:
        s.sendall(request_bytes(body, headers="Expect: 100-continue\r\n")[:-len(data)])
        assert s.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        s.sendall(data)
        reply = http.client.HTTPResponse(s)
        reply.begin()
        assert json.loads(reply.read())["choices"][0]["text"] == text


def test_pipelined_requests_on_one_connection(worker):
    with raw(worker) as s:
        s.sendall(b"".join(request_bytes({"prompt": STORY, "max_tokens": n, "temperature": 0, "ignore_eos": True}) for n in (1, 2, 3)))
        stream = s.makefile("rb")
        for n in (1, 2, 3):
            length = 0
            while (line := stream.readline().strip()):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            assert json.loads(stream.read(length))["usage"]["completion_tokens"] == n


# S5
def test_clients_that_leave_free_everything(worker):
    wait_until(lambda: idle(worker), 30, "idle before")
    left = worker.metric("kvgate_clients_left_total")
    long_one = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0}
    sockets = []
    for i in range(24):
        s = raw(worker)
        prompt = f"{i} " + ("word " * 900 if i % 4 == 3 else STORY)  # some leave in prefill
        s.sendall(request_bytes({**long_one, "prompt": prompt, "stream": i % 2 == 0}))
        sockets.append(s)
    wait_until(lambda: not idle(worker), 30, "running")
    for s in sockets:
        s.close()
    wait_until(lambda: idle(worker), 30, "idle after all left")
    wait_until(lambda: worker.metric("kvgate_clients_left_total") == left + 24, 30, "24 clients counted")
    wait_until(lambda: idle(worker), 30, "idle after the last one")
    wait_until(lambda: worker.metric("kvgate_kv_blocks_used") == 0, 10, "blocks given back")
    assert complete(worker, prompt=STORY, max_tokens=2)["usage"]["completion_tokens"] == 2


def test_health_answers_beside_heavy_bodies(worker):
    heavy = json.dumps({"prompt": "lorem ipsum dolor sit amet " * 100000, "max_tokens": 1})
    threads = [threading.Thread(target=post, args=(worker, "/v1/completions", heavy)) for _ in range(3)]
    for t in threads:
        t.start()
    for _ in range(20):
        assert requests.get(worker.url + "/health", timeout=10).status_code == 200
    for t in threads:
        t.join()


def test_over_32_mib_is_413_in_json(worker):
    with raw(worker) as s:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 40000000\r\n\r\n" + b"x" * 100000)
        reply = http.client.HTTPResponse(s)
        reply.begin()
        assert reply.status == 413 and "33554432" in json.loads(reply.read())["error"]["message"]


# ---- the gateway's listener -------------------------------------------------------------------------------------------------


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost", timeout=60)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(self.path)


def ask_gateway(worker, body, **headers):
    connection = UnixConnection(worker.gateway_path)
    connection.request("POST", "/v1/completions", json.dumps({"temperature": 0, "max_tokens": 3, **body}),
                       {name.replace("_", "-"): value for name, value in headers.items()})
    reply = connection.getresponse()
    data = json.loads(reply.read())
    connection.close()
    assert reply.status == 200, data
    return data


def test_salts_isolate_tenants(worker):
    def cached(salt, cache_salt=None):
        body = {"prompt": "A secret of one tenant. " * 12, **({"cache_salt": cache_salt} if cache_salt else {})}
        return ask_gateway(worker, body, X_Kvgate_Salt=salt)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached("red") == 0 and cached("red") >= BLOCK
    assert cached("blue") == 0
    assert cached("red", "mine") == 0 and cached("red", "mine") >= BLOCK and cached("blue", "mine") == 0


def test_ids_count_only_under_the_own_fingerprint(worker):
    info = post(worker, "/tokenize", {"prompt": STORY}).json()
    fingerprint, ids = info["kvgate"]["fingerprint"], info["tokens"]
    text = complete(worker, prompt=STORY, max_tokens=3)["choices"][0]["text"]
    used = worker.metric("kvgate_gateway_ids_used_total")
    mismatches = worker.metric("kvgate_gateway_fingerprint_mismatches_total")
    body = {"prompt": STORY, "prompt_token_ids": ids}
    assert ask_gateway(worker, body, X_Kvgate_Fingerprint=fingerprint)["choices"][0]["text"] == text
    assert worker.metric("kvgate_gateway_ids_used_total") == used + 1
    other = {"prompt": STORY, "prompt_token_ids": [5, 6, 7]}
    assert ask_gateway(worker, other, X_Kvgate_Fingerprint="0" * 32)["usage"]["prompt_tokens"] == len(ids)
    assert worker.metric("kvgate_gateway_fingerprint_mismatches_total") == mismatches + 1
    assert post(worker, "/v1/completions", body).json()["error"]["param"] == "prompt_token_ids"


# ---- operators --------------------------------------------------------------------------------------------------------------


def test_metrics_carry_vllms_suffixes(worker):
    complete(worker, prompt=STORY, max_tokens=3)
    names = {series.partition("{")[0] for series in worker.metrics()}
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total", "prefix_cache_hits_total",
                 "prompt_tokens_total", "generation_tokens_total", "num_preemptions_total", "request_success_total", "http_requests_total",
                 "clients_left_total"):
        assert "kvgate_" + name in names, sorted(names)
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
                 "request_decode_time_seconds", "e2e_request_latency_seconds", "rows_per_forward", "batch_utilization"):
        assert worker.metric(f"kvgate_{name}_count") > 0, name
    assert worker.metric("kvgate_http_requests_total", handler="/v1/completions", status="2xx") > 0


def test_tokenize_gives_the_chain(worker):
    text = "The quick brown fox jumps over the lazy dog. " * 10
    reply = post(worker, "/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"]) and reply["max_model_len"] == 2048
    kvgate = reply["kvgate"]
    assert kvgate["block_size"] == BLOCK and len(kvgate["chain"]) == reply["count"] // BLOCK
    assert all(re.fullmatch("[0-9a-f]{32}", h) for h in kvgate["chain"])
    longer = post(worker, "/tokenize", {"prompt": text + text}).json()["kvgate"]["chain"]
    assert longer[:len(kvgate["chain"]) - 1] == kvgate["chain"][:-1]
    salted = post(worker, "/tokenize", {"prompt": text, "cache_salt": "s"}).json()["kvgate"]["chain"]
    assert not set(salted) & set(kvgate["chain"])


def run_flags(worker_path, *flags):
    import subprocess
    return subprocess.run([worker_path, *map(str, flags)], capture_output=True, text=True, timeout=60)


def test_flags_are_checked(build, models):
    program, model = os.path.join(build, "kvgate-worker"), os.path.join(models, "SmolLM2-135M-Instruct.Q4_1.gguf")
    help_text = run_flags(program, "--help")
    assert help_text.returncode == 0
    for flag in ("--max-num-seqs", "--kv-cache-memory", "--kv-cache-dtype", "--gateway-listen", "--scheduling-policy", "--cpu-isa", "--no-enable-prefix-caching",
                 "--speculative-model", "--spec-accept"):
        assert flag in help_text.stdout
    assert run_flags(program, "--version").stdout.startswith("kvgate-worker ")
    for flags in ([], ["--nonsense"], ["--model"], ["--model", model, "--port", "70000"], ["--model", model, "--block-size", "33"],
                  ["--model", model, "--kv-cache-memory", "lots"], ["--model", model, "--kv-cache-memory", "0.5 "],
                  ["--model", model, "--device", "tpu"], ["--model", model, "--cpu-arithmetic", "int9"], ["--model", model, "stray"],
                  ["--model", model, "--redis", "redis://127.0.0.1"], ["--model", model, "--served-model-name", "a b"],
                  ["--model", model, "--kv-cache-dtype", "fp4"], ["--model", model, "--max-num-seqs=0"], ["--model", model, "--speculative-model", ""],
                  ["--model", model, "--num-speculative-tokens", "5"], ["--model", model, "--spec-accept", "rejection"],
                  ["--model", model, "--speculative-config", "{"], ["--model", model, "--speculative-config", "[]"],
                  ["--model", model, "--speculative-config", "{}"],
                  ["--model", model, "--speculative-config", '{"method": "medusa"}'],
                  ["--model", model, "--speculative-config", '{"method": "ngram", "draft_tensor_parallel_size": 2}'],
                  ["--model", model, "--speculative-config", '{"num_speculative_tokens": 5}'],
                  ["--model", model, "--speculative-config", '{"method": "draft_model"}'],
                  ["--model", model, "--speculative-config", '{"method": "draft_model", "model": "ngram"}'],
                  ["--model", model, "--speculative-config", '{"model": ""}'], ["--model", model, "--speculative-config", '{"model": "a\\u0000b"}'],
                  ["--model", model, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 17}'],
                  ["--model", model, "--speculative-config", '{"method": "ngram", "prompt_lookup_max": 0}'],
                  ["--model", model, "--speculative-config", '{"method": "ngram", "prompt_lookup_max": 65}'],
                  ["--model", model, "--speculative-config", '{"method": "ngram", "prompt_lookup_min": 2.5}'],
                  ["--model", model, "--speculative-config", '{"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 4}'],
                  ["--model", model, "--speculative-model", "ngram", "--speculative-config", '{"method": "ngram"}']):
        done = run_flags(program, *flags)
        assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, (flags, done)
    for flags in (["--model", "/nonexistent"], ["--model", model, "--device", "cuda"],
                  ["--model", model, "--speculative-model", "/nonexistent"],
                  ["--model", model, "--speculative-model", "/nonexistent,ngram"],
                  ["--model", model, "--speculative-config", '{"model": "/nonexistent"}'],
                  ["--model", model, "--speculative-config", '{"method": "ngram", "model": "/nonexistent"}']):
        done = run_flags(program, *flags)
        assert done.returncode not in (0, 2) and "error" in done.stderr.splitlines()[-1], (flags, done)


def test_a_start_names_what_is_wrong_with_the_tokenizer_before_the_weights(build, tmp_path):
    """They are read at the same time."""
    with open(SMOLLM2, "rb") as f:
        good = f.read()
    pre, family = (b"tokenizer.ggml.pre", b"smollm", b"smallm"), (b"general.architecture", b"llama", b"lxama")
    for changes, said in (([pre], "this pre-tokenizer is not known"), ([family], "lxama"), ([pre, family], "this pre-tokenizer is not known")):
        bad = bytearray(good)
        for key, old, new in changes:
            at = bad.index(old, bad.index(key) + len(key))
            bad[at:at + len(old)] = new
        path = tmp_path / "bad.gguf"
        path.write_bytes(bad)
        done = run_flags(os.path.join(build, "kvgate-worker"), "--model", path)
        assert done.returncode == 1 and "cannot start: " in done.stderr.splitlines()[-1] and said in done.stderr.splitlines()[-1], done.stderr
    path.unlink()


def test_speculation_changes_no_answer_and_is_counted():
    ask = {"model": "smollm2", "prompt": STORY + STORY, "max_tokens": 60, "temperature": 0.3, "seed": 5, "logprobs": 2}
    config = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 6, "prompt_lookup_min": 3}'
    with Worker("--max-model-len", 2048, gateway=False) as plain, \
            Worker("--max-model-len", 2048, "--speculative-config", config, gateway=False) as drafting:
        want = requests.post(plain.url + "/v1/completions", json=ask, timeout=120).json()
        for _ in range(50):  # when drafts are made is the control's choice by measured time
            got = requests.post(drafting.url + "/v1/completions", json=ask, timeout=120).json()
            assert got["choices"] == want["choices"]
            assert all(got["usage"][name] == want["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens"))
            if drafting.metric("kvgate_spec_decode_num_draft_tokens_total"):
                break
        counts = [[w.metric(f"kvgate_spec_decode_num_{name}_tokens_total") for name in ("draft", "accepted")] for w in (plain, drafting)]
        assert counts[0] == [0, 0] and 0 <= counts[1][1] <= counts[1][0] and counts[1][0] > 0


def test_a_drain_finishes_streams_and_exits_0():
    with Worker("--api-key", "sesame", "--max-model-len", 2048, gateway=False) as w:
        with pytest.raises(openai.AuthenticationError):
            w.openai(api_key="wrong").completions.create(model="smollm2", prompt="x")
        assert requests.get(w.url + "/health").status_code == requests.get(w.url + "/metrics").status_code == 200
        stream = w.openai(api_key="sesame").completions.create(model="smollm2", prompt=STORY, max_tokens=250, stream=True, temperature=0,
                                                              extra_body={"ignore_eos": True})
        first = next(iter(stream))
        with raw(w) as kept:
            kept.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in kept.recv(1000)
            w.terminate()
            wait_until(lambda: "draining" in w.log(), 10, "drain")
            kept.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
            reply = kept.recv(1000)
            assert b" 503 " in reply and b"Connection: close" in reply
        chunks = list(stream)
        assert first is not None and chunks[-1].choices[0].finish_reason == "length"
        assert w.wait() == 0


# M1
def test_a_pool_smaller_than_the_context_blocks_nobody():
    with Worker("--num-kv-blocks", 64, "--block-size", 16, "--max-model-len", 2048, "--scheduling-policy", "priority", "--max-num-seqs", 4) as w:
        over = post(w, "/v1/completions", {"prompt": [5] * 1500, "max_tokens": 1})
        assert over.status_code == 400 and "1500" in over.json()["error"]["message"] and "1024" in over.json()["error"]["message"]
        assert complete(w, prompt=[5] * 10, max_tokens=1, ignore_eos=True)["usage"]["completion_tokens"] == 1
        tight = complete(w, prompt=list(range(100, 1000)), max_tokens=400, ignore_eos=True)
        assert tight["choices"][0]["finish_reason"] == "length" and 100 <= tight["usage"]["completion_tokens"] <= 125
        assert "64 blocks" in w.log() and "16 tokens" in w.log()
        assert post(w, "/v1/completions", {"prompt": "x", "priority": 1}).json()["error"]["param"] == "priority"


def test_a_second_signal_exits_at_once():
    with Worker("--max-model-len", 2048, gateway=False) as w:
        s = raw(w)
        s.sendall(request_bytes({"prompt": STORY, "max_tokens": 1900, "ignore_eos": True, "stream": True}))
        s.recv(10)
        w.terminate(signal.SIGHUP)  # drains as SIGTERM does
        wait_until(lambda: "SIGHUP: draining" in w.log(), 10, "drain")
        w.terminate(signal.SIGINT)
        assert w.wait(10) not in (0, None)
        s.close()


def test_a_second_process_under_one_id_takes_over():
    with Redis() as redis, Worker(redis=redis, worker_id="twin") as first:
        with Worker(redis=redis, worker_id="twin"):
            assert first.wait(30) == 3
            assert "twin" in first.log()
