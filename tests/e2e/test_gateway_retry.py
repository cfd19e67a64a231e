"""What happens when a worker fails: never a generation twice, never a worker's own error replaced, never a random 502."""
import http.client
import json
import socket
import threading
import time

import openai
import pytest
import requests

from gateway import WORDS, Fleet, chat
from stack import wait_until


@pytest.fixture(scope="module")
def fleet():
    quick = """
        location /impatient/ {
            kvgate on;
            error_page 504 @error;
            proxy_pass http://workers/;
            proxy_http_version 1.1;
            proxy_buffering off;
            proxy_next_upstream error timeout http_503 non_idempotent;
            proxy_read_timeout 1s;
        }
    """
    with Fleet(2, server=quick) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def polite(fleet):
    fleet.reset()
    wait_until(lambda: all(w["reachable"] for m in fleet.gateway.status()["models"] for w in m["workers"]), 10, "marks cleared")


def both(fleet, mode):
    for worker in fleet.workers:
        worker.mode = mode


def preferred(fleet, text=WORDS):
    """The worker that this prompt goes to, and the other one."""
    name = fleet.post(text).headers["X-Kvgate-Worker"]
    first = fleet.named(name)
    other = next(w for w in fleet.workers if w is not first)
    first.requests.clear()
    return first, other


def fresh(fleet):
    """No kept connection is left: the next request opens one."""
    for worker in fleet.workers:
        with worker.lock:
            for connection in list(worker.open):
                connection.shutdown(2)
    time.sleep(0.05)


def test_a_reset_before_the_reply_is_an_error_and_one_execution(fleet):
    both(fleet, "reset")
    for _ in range(5):
        fleet.reset()
        both(fleet, "reset")
        fresh(fleet)
        reply = fleet.post()
        assert reply.status_code == 502 and reply.json()["error"]["code"] == "bad_gateway"
        assert len(fleet.requests) == 1


def test_a_reset_on_a_kept_connection_is_one_execution_too(fleet):
    first, _ = preferred(fleet)
    first.mode = "reset"
    assert fleet.post().status_code == 502
    assert len(fleet.requests) == 1


@pytest.mark.parametrize("status", [500, 400, 429])
def test_a_workers_error_reaches_the_client_unchanged(fleet, status):
    both(fleet, str(status))
    reply = fleet.post()
    assert reply.status_code == status
    assert reply.json()["error"]["message"].endswith(f"says {status}")
    assert len(fleet.requests) == 1


def test_a_silent_worker_is_504_and_one_execution(fleet):
    both(fleet, "silent")
    reply = fleet.post(path="/impatient/v1/chat/completions")
    assert reply.status_code == 504 and reply.json()["error"]["code"] == "gateway_timeout"
    assert len(fleet.requests) == 1


def test_a_503_goes_to_the_next_worker(fleet):
    first, other = preferred(fleet)
    first.mode = "503"
    reply = fleet.post()
    assert reply.status_code == 200 and reply.json()["worker"] == other.name
    assert reply.headers["X-Kvgate-Worker"] == other.name
    assert [len(first.requests), len(other.requests)] == [1, 1]
    assert first.requests[0].body == other.requests[0].body


def test_a_503_with_a_body_in_a_file_is_sent_whole_to_the_next(fleet):
    text = "word " * 60_000
    first, other = preferred(fleet, text)
    first.mode = "503"
    other.requests.clear()
    reply = fleet.post(text)
    assert reply.status_code == 200 and reply.json()["worker"] == other.name
    assert other.requests[0].body == first.requests[0].body
    assert other.requests[0].json()["messages"][0]["content"] == text


def test_the_last_workers_503_is_passed_on_whole(fleet):
    both(fleet, "503")
    reply = fleet.post()
    assert reply.status_code == 503 and reply.json()["error"]["message"].endswith("says 503")
    assert sorted(len(w.requests) for w in fleet.workers) == [1, 1]


@pytest.mark.parametrize("tries, asked", [("", 5), ("proxy_next_upstream_tries 4;", 4), ("proxy_next_upstream_tries 2;", 2)])
def test_behind_redis_three_choices_come_the_other_known_workers(tries, asked):
    with Fleet(5, location=tries) as fleet:
        both(fleet, "503")
        reply = fleet.post()
        assert reply.status_code == 503 and reply.json()["error"]["message"].endswith("says 503")
        assert len(fleet.requests) == asked and max(len(w.requests) for w in fleet.workers) == 1
        choices = [c["worker"] for c in fleet.gateway.status()["models"][0]["decisions"][0]["choices"]]
        assert len(choices) == 3 and all(fleet.named(name).requests for name in choices[:asked])


def test_503_then_reset_is_no_third_execution(fleet):
    first, other = preferred(fleet)
    first.mode, other.mode = "503", "reset"
    assert fleet.post().status_code == 502
    assert [len(first.requests), len(other.requests)] == [1, 1]


def test_503_then_refused_is_502_and_one_execution(fleet):
    first, other = preferred(fleet)
    first.mode = "503"
    other.stop()
    try:
        assert fleet.post().status_code in (502, 503)
        assert len(first.requests) == 1
    finally:
        other.start()


def test_a_refused_connection_goes_to_the_next_worker_and_is_remembered(fleet):
    first, other = preferred(fleet)
    first.stop()
    try:
        reply = fleet.post()
        assert reply.status_code == 200 and reply.json()["worker"] == other.name
        assert len(other.requests) == 1
        warnings = fleet.gateway.log().count("cannot be reached")
        assert warnings >= 1
        assert [w["reachable"] for m in fleet.gateway.status()["models"] for w in m["workers"] if w["id"] == first.name] in ([False], [True])
        for _ in range(20):
            assert fleet.post().status_code == 200
    finally:
        first.start()


def test_a_dead_worker_costs_no_failed_request_and_disappears(fleet):
    """kill -9: it neither answers nor beats."""
    first, other = preferred(fleet)
    first.unregister()
    first.stop()
    try:
        for _ in range(20):
            reply = fleet.post()
            assert reply.status_code == 200 and reply.headers["X-Kvgate-Worker"] == other.name
        fleet.wait_seen([other.name])
        tries = fleet.gateway.log().count("cannot be reached")
        assert fleet.post().status_code == 200
        assert fleet.gateway.log().count("cannot be reached") == tries
    finally:
        first.start()
        first.register(fleet.redis, fleet.fingerprint)
        fleet.wait_seen()


def test_where_redis_names_unreachable_addresses_the_server_lines_serve():
    """A worker that advertises its own loopback from another host, say: Redis never decides whether a request is served."""
    with Fleet(2, register=False) as fleet:
        for worker, addr in zip(fleet.workers, ("127.0.0.1:1", "unix:/nowhere/w.sock")):
            worker.register(fleet.redis, fleet.fingerprint, addr=addr)
        fleet.wait_seen()
        fleet.gateway.expected.append("unix:/nowhere/w.sock failed")
        for stream in (False, True, False):
            fleet.reset()
            reply = fleet.post(stream=stream)
            assert reply.status_code == 200 and len(fleet.requests) == 1
            assert "X-Kvgate-Worker" not in reply.headers and reply.headers["X-Kvgate-Hit-Tokens"] == "0"
            assert fleet.requests[0].json()["prompt_token_ids"]
        assert requests.get(fleet.url + "/v1/health", timeout=120).status_code == 200


def test_no_other_status_than_503_moves_a_request_whatever_nginx_is_told():
    told = "proxy_next_upstream error timeout invalid_header http_500 http_502 http_503 http_504 http_403 http_404 http_429 non_idempotent;"
    with Fleet(2, edits=[(r"proxy_next_upstream [^;]*;", told)]) as fleet:
        for status in ("500", "502", "504", "403", "404", "429"):
            fleet.reset()
            both(fleet, status)
            assert fleet.post().status_code == int(status) and len(fleet.requests) == 1
        fleet.reset()
        both(fleet, "503")
        assert fleet.post().status_code == 503 and len(fleet.requests) == 2


def test_the_server_lines_are_within_proxy_next_upstream_tries():
    with Fleet(1, register=False, location="proxy_next_upstream_tries 1;") as fleet:
        fleet.workers[0].register(fleet.redis, fleet.fingerprint, addr="127.0.0.1:1")
        fleet.wait_seen()
        assert fleet.post().status_code == 502 and fleet.requests == []


def test_all_workers_dead_is_a_502_in_openai_shape(fleet):
    for worker in fleet.workers:
        worker.stop()
    try:
        reply = fleet.post()
        assert reply.status_code == 502 and reply.json()["error"]["code"] == "bad_gateway"
    finally:
        for worker in fleet.workers:
            worker.start()
    wait_until(lambda: fleet.post().status_code == 200, 10, "service again")


def test_a_kept_connection_that_the_worker_closed_is_no_error(fleet):
    for _ in range(20):
        assert fleet.post().status_code == 200
        fresh(fleet)
    assert len(fleet.requests) == 20


def test_a_drain_by_connection_close_is_no_error(fleet):
    both(fleet, "close")
    for _ in range(20):
        assert fleet.post().status_code == 200


def idle_race(fleet, rounds, idle):
    """Requests at the moment when the worker's idle time ends, over a gateway whose own is shorter."""
    for worker in fleet.workers:
        worker.idle_timeout = idle
    failures = []

    def client(n):
        for i in range(rounds):
            reply = fleet.post(f"client {n} " * 40)
            if reply.status_code != 200:
                failures.append((n, i, reply.status_code))
            time.sleep(max(0.0, idle + (i % 11 - 5) * 0.002))

    threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(fleet.requests) == 8 * rounds


@pytest.fixture(scope="module")
def idle_fleet():
    with Fleet(2, edits=[(r"keepalive_timeout 60s", "keepalive_timeout 150ms")]) as fleet:
        yield fleet


def test_idle_connections_ending_at_the_moment_of_a_request_give_no_502(idle_fleet):
    idle_fleet.reset()
    idle_race(idle_fleet, 10, 0.2)


@pytest.mark.long
def test_a_thousand_idle_connections_give_no_502(idle_fleet):
    idle_fleet.reset()
    idle_race(idle_fleet, 125, 0.2)


# ---- streams ----

def events(text):
    return [line[6:] for line in text.split("\n") if line.startswith("data: ")]


def test_a_whole_stream_is_passed_as_it_is(fleet):
    both(fleet, "sse")
    reply = fleet.post(stream=True)
    assert events(reply.text)[-1] == "[DONE]" and len(events(reply.text)) == 6
    assert "error" not in reply.text


@pytest.mark.parametrize("mode", ["early", "early_middle"])
def test_a_stream_that_ends_early_gets_an_error_frame(fleet, mode):
    both(fleet, mode)
    reply = fleet.post(stream=True)
    assert reply.status_code == 200
    assert reply.text.endswith("\n\n")
    last = reply.text[:-2].rsplit("\n\n", 1)[1]
    assert json.loads(last[len("data: "):])["error"]["code"] == "upstream_ended_early"
    assert reply.text.count("upstream_ended_early") == 1
    assert len(fleet.requests) == 1


@pytest.mark.parametrize("mode", ["early", "early_middle"])
def test_behind_an_error_frame_the_connection_serves_the_next_request(fleet, mode):
    """It was announced as kept, so that a client uses it again: closed by then, that request would be lost."""
    connection = http.client.HTTPConnection("127.0.0.1", fleet.gateway.port, timeout=120)
    connection.connect()
    connection.auto_open = 0
    for worker_mode, stream in ((mode, True), ("ok", False), (mode, True), ("ok", False)):
        both(fleet, worker_mode)
        connection.request("POST", "/v1/chat/completions", json.dumps(chat(stream=stream)), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        assert reply.status == 200 and (b"upstream_ended_early" in reply.read()) == stream
        time.sleep(0.1)
    connection.request("POST", "/v1/chat/completions", json.dumps(chat()), {"Content-Type": "application/json", "Connection": "close"})
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_behind_an_error_frame_the_connection_ends_where_that_was_asked_for(fleet, version):
    both(fleet, "early")
    body = json.dumps(chat(stream=True)).encode()
    with socket.create_connection(("127.0.0.1", fleet.gateway.port), timeout=30) as s:
        s.sendall(b"POST /v1/chat/completions HTTP/%s\r\nHost: a\r\nConnection: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                  % (version.encode(), b"close" if version == "1.1" else b"keep-alive", len(body), body))
        text = b"".join(iter(lambda: s.recv(65536), b""))
    assert text.count(b"upstream_ended_early") == 1 and b"Connection: close" in text


def test_buffered_streams_get_their_error_frame_too():
    with Fleet(1, edits=[(r"proxy_buffering off", "proxy_buffering on")]) as fleet:
        fleet.workers[0].mode = "early"
        reply = fleet.post(stream=True)
        assert reply.status_code == 200 and json.loads(events(reply.text)[-1])["error"]["code"] == "upstream_ended_early"
        fleet.workers[0].mode = "sse"
        assert events(fleet.post(stream=True).text)[-1] == "[DONE]"


def test_openais_client_raises_where_the_stream_ends_early(fleet):
    both(fleet, "early")
    client = openai.OpenAI(base_url=fleet.url + "/v1", api_key="none", max_retries=0, timeout=120)
    seen = []
    with pytest.raises(openai.APIError, match="ended early"):
        for chunk in client.chat.completions.create(**chat(), stream=True):
            seen.append(chunk.choices[0].delta.content)
    assert seen == ["t0 ", "t1 ", "t2 ", "t3 ", "t4 "]


def test_a_silent_stream_ends_with_an_error_frame(fleet):
    both(fleet, "sse")
    for worker in fleet.workers:
        worker.interval = 3.0  # over proxy_read_timeout
    try:
        reply = fleet.post(path="/impatient/v1/chat/completions", stream=True)
        assert reply.status_code == 200 and json.loads(events(reply.text)[-1])["error"]["type"] == "server_error"
    finally:
        for worker in fleet.workers:
            worker.interval = 0.01


def test_a_client_that_leaves_closes_the_upstream(fleet):
    both(fleet, "sse")
    for worker in fleet.workers:
        worker.events, worker.interval = 200, 0.05
    try:
        with requests.post(fleet.url + "/v1/chat/completions", json=chat(stream=True), stream=True, timeout=120) as reply:
            next(reply.iter_content(100))
        worker = next(w for w in fleet.workers if w.requests)
        wait_until(lambda: not worker.open, 5, "the worker's connection closed")
    finally:
        for worker in fleet.workers:
            worker.events, worker.interval = 5, 0.01
