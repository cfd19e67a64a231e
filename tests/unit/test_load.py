"""The load client against a server whose replies are written byte by byte here."""
import json
import os
import socket
import subprocess
import threading
import time

import pytest

from conftest import BUILD

LOAD = os.path.join(BUILD, "tests/tools/load")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Kvgate-Worker: w1\r\nX-Kvgate-Hit-Tokens: 64\r\nX-Kvgate-Reason: prefix\r\n"


def event(data):
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def delta(text, finish=None):
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


def chunked(*parts):
    return [b"%x\r\n%s\r\n" % (len(p), p) for p in parts]


STREAM = [delta(""), delta("a"), b": still here\n\n", delta("b"), delta("c", "stop"),
          event({"choices": [], "usage": {"prompt_tokens": 100, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 64}}}),
          event(b"[DONE]")]


class Server:
    """Reads requests; `reply(number, body)` gives the pieces to send, None closes the connection."""

    def __init__(self, reply):
        self.reply, self.bodies = reply, []
        self.connections = 0
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.socket.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client):
        with client, client.makefile("rb") as f:
            while f.readline():
                length = 0
                while (line := f.readline().strip()):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                self.bodies.append(f.read(length))
                for piece in self.reply(len(self.bodies), self.bodies[-1]):
                    if piece is None:
                        return
                    client.sendall(piece)
                    time.sleep(0.001)

    def load(self, requests, *options):
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        done = subprocess.run([LOAD, "--url", url, "--requests", "-", *options], input="\n".join(requests), capture_output=True, text=True,
                              timeout=60, check=True)
        self.socket.close()
        return json.loads(done.stdout)


@pytest.fixture
def details(tmp_path):
    return tmp_path / "details"


def test_a_stream_split_anywhere_gives_the_same_counts(details):
    whole = b"".join(STREAM)
    pieces = [whole[i:i + 7] for i in range(0, len(whole), 7)]
    server = Server(lambda n, body: [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *chunked(*(pieces if n % 2 else STREAM)), b"0\r\n\r\n"])
    got = server.load(['{"a":1}', '{"b":2}'], "--count", "4", "--details", str(details))
    assert (got["good"], got["failed"], got["events"], got["reconnects"]) == (4, 0, 12, 0)
    assert (got["prompt_tokens"], got["completion_tokens"], got["cached_tokens"]) == (400, 12, 256)
    assert got["ttft"]["n"] == 4 and got["inter_token"]["n"] == 8 and server.connections == 1
    assert 0 < got["ttft"]["min"] <= got["ttft"]["p50"] <= got["total"]["max"]
    assert server.bodies == [b'{"a":1}', b'{"b":2}', b'{"a":1}', b'{"b":2}']
    first = json.loads(details.read_text().splitlines()[0])
    assert (first["worker"], first["hit_tokens"], first["reason"], first["cached_tokens"]) == ("w1", 64, "prefix", 64)


def test_a_plain_reply_counts_its_usage():
    body = json.dumps({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}).encode()
    server = Server(lambda n, b: [b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body])
    got = server.load(["{}"], "--count", "6", "--connections", "3")
    assert (got["good"], got["prompt_tokens"], got["completion_tokens"], got["events"]) == (6, 30, 12, 0) and server.connections == 3


@pytest.mark.parametrize("reply, error", [
    ([b"HTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\n{}"], None),
    ([HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *chunked(delta("a")), None], "closed by the server"),
    ([HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *chunked(delta("a")), b"0\r\n\r\n"], "the reply ended early"),
    ([HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *chunked(event({"error": {"message": "x"}}), event(b"[DONE]")), b"0\r\n\r\n"],
     "error event"),
    ([b"nonsense\r\n\r\n"], "bad HTTP in the reply"),
    ([None], "closed by the server"),
], ids=["503", "cut", "no-finish", "error-frame", "nonsense", "closed"])
def test_what_is_no_good_reply_is_counted_as_failed(reply, error):
    got = Server(lambda n, body: reply).load(["{}"])
    assert (got["good"], got["failed"]) == (0, 1) and got["errors"] == ({error: 1} if error else {})


def test_an_idle_connection_that_the_server_closed_is_no_failure():
    body = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    server = Server(lambda n, b: [body, None])
    got = server.load(["{}"], "--count", "5")
    assert got["good"] == 5 and got["errors"] == {} and server.connections == 5


def test_open_loop_counts_waiting_from_when_a_request_was_due(details):
    body = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"

    def slow(n, _):
        time.sleep(0.05)
        return [body]

    got = Server(slow).load(["{}"], "--count", "6", "--rate", "1000", "--connections", "1", "--details", str(details))
    lines = [json.loads(line) for line in details.read_text().splitlines()]
    assert got["good"] == 6 and lines[5]["due"] == pytest.approx(0.005) and lines[5]["total"] > 0.2


def test_timed_requests_leave_at_their_times(details):
    body = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    server = Server(lambda n, b: [body])
    server.load(['0\t{"a":1}', '0.2\t{"b":2}'], "--timed", "--details", str(details))
    lines = [json.loads(line) for line in details.read_text().splitlines()]
    assert lines[1]["sent"] >= 0.2 and server.bodies == [b'{"a":1}', b'{"b":2}']


def test_nobody_listening_is_an_error_not_a_hang():
    server = Server(lambda n, b: [])
    server.socket.shutdown(socket.SHUT_RDWR)
    got = server.load(["{}"], "--count", "3")
    assert got["good"] == 0 and sum(got["errors"].values()) == 3
