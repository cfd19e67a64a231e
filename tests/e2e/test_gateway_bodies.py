"""How a body arrives must not matter: same ids, same routing, whole body forwarded; broken ones are refused and harm nobody."""
import http.client
import json
import os
import socket
import threading
import time

import httpx
import pytest
import requests

from gateway import Fleet, chat, raw_request
from stack import free_port

HTTP2_PORT = free_port()
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def fleet():
    with Fleet(1, http="client_body_timeout 2s; client_header_timeout 2s;", server=f"listen 127.0.0.1:{HTTP2_PORT} http2;",
               edits=[(r"client_body_buffer_size 64k", "client_body_buffer_size 8k")]) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def polite(fleet):
    fleet.reset()


def body_of(size, white=b""):
    """A chat body of exactly `size` bytes, with white space behind its brace."""
    empty = len(json.dumps(chat(""))) + len(white)
    words = "the quick brown fox jumps over the lazy dog; " * (size // 40 + 1)
    body = json.dumps(chat(words[:size - empty])).encode() + white
    assert len(body) == size
    return body


def post(fleet, body):
    return requests.post(fleet.url + "/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}, timeout=120)


def assert_forwarded(request, body):
    """The worker got the client's body with ids in place of its last brace, and nothing else. Returns the ids."""
    cut = body.rstrip()[:-1]
    assert request.body.startswith(cut + b',"prompt_token_ids":[') and request.body.endswith(b"]}")
    assert request.header("content-length") == str(len(request.body))
    assert request.header("transfer-encoding") is None
    sent = request.json()
    ids = sent.pop("prompt_token_ids")
    assert sent == json.loads(body) and ids
    return ids


def temp_files(fleet):
    return [name for _, _, names in os.walk(fleet.gateway.body_dir) for name in names]


@pytest.mark.parametrize("size", [200, 8191, 8192, 8193, 65536, 5_000_000])
def test_a_body_of_any_size_gives_the_same_ids_however_it_is_sent(fleet, size):
    body = body_of(size)
    plain = post(fleet, body)
    assert plain.status_code == 200
    ids = assert_forwarded(fleet.requests[-1], body)
    chunked = post(fleet, (body[at:at + 4001] for at in range(0, size, 4001)))
    assert chunked.status_code == 200 and assert_forwarded(fleet.requests[-1], body) == ids
    assert chunked.headers["X-Kvgate-Chain"] == plain.headers["X-Kvgate-Chain"]
    assert len(fleet.requests) == 2
    assert temp_files(fleet) == []


def test_bodies_kept_in_files_are_read_and_forwarded():
    with Fleet(1, http="client_body_in_file_only clean;") as fleet:
        for size in (200, 8193, 300_000):
            body = body_of(size)
            assert post(fleet, body).status_code == 200
            assert_forwarded(fleet.requests[-1], body)
        assert temp_files(fleet) == []


def test_a_body_in_single_bytes_is_put_together(fleet):
    body = body_of(300)
    status, _, _ = raw_request(fleet.gateway.port, HEAD + b"Content-Length: 300\r\n\r\n" + body, step=1, pause=0.0005)
    assert status == 200
    assert_forwarded(fleet.requests[-1], body)


@pytest.mark.parametrize("size, white", [(400, b" \r\n\t \n"), (8200, b"\n" * 30), (70_000, b"\n" * 9000)],
                         ids=["a few bytes", "over a buffer's end", "in a file"])
def test_white_space_behind_the_body_is_cut_off(fleet, size, white):
    body = body_of(size, white)
    assert post(fleet, body).status_code == 200
    assert_forwarded(fleet.requests[-1], body)


def test_a_body_over_the_limit_is_413_in_openai_shape(fleet):
    status, headers, text = raw_request(fleet.gateway.port, HEAD + b"Content-Length: 17000000\r\n\r\n")
    assert status == 413 and json.loads(text)["error"]["type"] == "invalid_request_error"
    assert headers["content-type"] == "application/json"
    chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    with socket.create_connection(("127.0.0.1", fleet.gateway.port), timeout=120) as s:
        s.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 16)
        s.sendall(b"100000\r\nx")
        reply = http.client.HTTPResponse(s)
        reply.begin()
        assert reply.status == 413 and json.loads(reply.read())["error"]["code"] == "request_too_large"
    assert fleet.requests == [] and temp_files(fleet) == []


def test_http2_without_a_length_is_the_same(fleet):
    body = body_of(20_000)
    ids = None
    with httpx.Client(http1=False, http2=True) as client:
        for content in (body, (body[at:at + 999] for at in range(0, len(body), 999))):
            reply = client.post(f"http://127.0.0.1:{HTTP2_PORT}/v1/chat/completions", content=content,
                                headers={"Content-Type": "application/json"})
            assert reply.status_code == 200 and reply.http_version == "HTTP/2"
            now = assert_forwarded(fleet.requests[-1], body)
            assert ids is None or now == ids
            ids = now


def test_expect_continue_is_answered_before_the_body_comes(fleet):
    body = body_of(2048)
    with socket.create_connection(("127.0.0.1", fleet.gateway.port), timeout=120) as s:
        s.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: 2048\r\nConnection: close\r\n\r\n")
        assert s.recv(1000).startswith(b"HTTP/1.1 100 ")
        s.sendall(body)
        assert s.recv(1000).startswith(b"HTTP/1.1 200 ")
    assert_forwarded(fleet.requests[-1], body)


def test_a_body_that_never_ends_reaches_no_worker(fleet):
    with socket.create_connection(("127.0.0.1", fleet.gateway.port), timeout=120) as s:
        s.sendall(HEAD + b'Content-Length: 1000\r\n\r\n{"model":')
        reply = s.recv(1000)  # nginx gives up after client_body_timeout: 408, or it just closes
        assert reply == b"" or reply.startswith(b"HTTP/1.1 408 ")
    assert fleet.requests == []


def test_length_and_chunked_together_are_refused(fleet):
    status, _, _ = raw_request(fleet.gateway.port, HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n")
    assert status == 400 and fleet.requests == []


BROKEN = {
    "deep array": b'{"x":' + b"[" * 10000 + b"0" + b"]" * 10000 + b"}",
    "deep tools": b'{"tools":' + b"[" * 3000 + b"]" * 3000 + b"}",
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "never closed": b"[" * 1_000_000,
    "deep in an unknown member": b'{"model":"smollm2","messages":[],"y":' + b"[" * 5000 + b"]" * 5000 + b"}",
    "empty": b"",
    "cut": b'{"model":"smollm2","messages":[{"role":"us',
    "two values": b'{"model":"smollm2"} {}',
    "bad utf-8": b'{"model":"smollm2","messages":[{"role":"user","content":"\xff\xfe"}]}',
    "NaN": b'{"model":"smollm2","messages":[],"temperature":NaN}',
    "no object": b'["model"]',
    "no model": b'{"messages":[]}',
    "model is no string": b'{"model":7,"messages":[]}',
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_json_is_400_in_openai_shape_and_kills_nothing(fleet, name):
    before = fleet.gateway.children()
    reply = post(fleet, BROKEN[name])
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    assert reply.headers["X-Kvgate-Reason"] == "refused"
    assert fleet.requests == [] and fleet.gateway.children() == before


MESSAGES = b'"messages":[{"role":"user","content":"x"}]'
FLAT = {
    "a million keys": b'{"model":"smollm2",' + b",".join(b'"k%d":1' % i for i in range(1_000_000)) + b"," + MESSAGES + b"}",
    "a million digits": b'{"model":"smollm2","x":' + b"7" * 1_000_000 + b"," + MESSAGES + b"}",
    "deep JSON in a string": b'{"model":"smollm2","x":"' + b"[" * 5000 + b'",' + MESSAGES + b"}",
}


@pytest.mark.parametrize("name", FLAT)
def test_large_flat_bodies_are_served(fleet, name):
    before = fleet.gateway.children()
    assert post(fleet, FLAT[name]).status_code == 200
    assert fleet.gateway.children() == before


def test_others_are_served_while_a_large_body_is_read(fleet):
    body = body_of(5_000_000)
    done = []
    thread = threading.Thread(target=lambda: done.append(post(fleet, body).status_code))
    thread.start()
    for _ in range(100):
        assert fleet.post("small").status_code == 200
        if not thread.is_alive():
            break
    thread.join()
    assert done == [200]


def test_unknown_model_is_404_with_its_code(fleet):
    reply = fleet.post("x", model="gpt-9")
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "model_not_found" and reply.json()["error"]["param"] == "model"
    assert "gpt-9" in reply.json()["error"]["message"]
    assert fleet.requests == []


def test_a_client_may_not_send_ids(fleet):
    reply = fleet.post("x", prompt_token_ids=[1, 2])
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "prompt_token_ids"
    assert fleet.requests == []


def test_json_that_cannot_be_rendered_goes_on_unchanged(fleet):
    body = b'{"model":"smollm2", "messages": 7 } '
    reply = post(fleet, body)
    assert reply.status_code == 200 and reply.headers["X-Kvgate-Reason"] == "unparsed"
    assert fleet.requests[-1].body == body


def test_several_prompts_are_routed_by_the_first_and_not_given_ids(fleet):
    body = {"model": "smollm2", "prompt": ["one two three " * 40, "four"]}
    reply = requests.post(fleet.url + "/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200 and reply.headers["X-Kvgate-Reason"] in ("tie", "load")
    assert fleet.requests[-1].json() == body
    one = requests.post(fleet.url + "/v1/completions", json={"model": "smollm2", "prompt": body["prompt"][0]}, timeout=120)
    assert one.headers["X-Kvgate-Chain"] == reply.headers["X-Kvgate-Chain"]
    assert fleet.requests[-1].json()["prompt_token_ids"]


def test_a_client_that_leaves_early_leaks_nothing(fleet):
    body = body_of(200_000)
    before = fleet.gateway.children()
    for cut in (0, 10, 100_000, len(body)):
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", fleet.gateway.port), timeout=120) as s:
                s.sendall(HEAD + b"Content-Length: 200000\r\n\r\n" + body[:cut])
    time.sleep(0.3)
    assert fleet.post("still there").status_code == 200
    assert fleet.gateway.children() == before
