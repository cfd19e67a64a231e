"""nginx -s reload and graceful quit: no alert, no cut stream, no leaked connection."""
import json
import os
import signal
import socket
import subprocess
import threading
import time

import pytest
import requests

from conftest import BUILD
from gateway import ROUTED, Fleet, chat
from stack import SMOLLM2, wait_until


@pytest.fixture
def fleet():
    with Fleet(2, edits=[(r"worker_processes 1", "worker_processes 2")]) as fleet:
        yield fleet


def stream(fleet, results, events):
    with requests.post(fleet.url + "/v1/chat/completions", json=chat(stream=True), stream=True, timeout=120) as reply:
        text = b"".join(reply.iter_content(None)).decode()
    results.append(text.count("data: ") == events + 1 and text.endswith("data: [DONE]\n\n"))


def start_streams(fleet, n, events=40, interval=0.05):
    for worker in fleet.workers:
        worker.mode, worker.events, worker.interval = "sse", events, interval
    results = []
    threads = [threading.Thread(target=stream, args=(fleet, results, events)) for _ in range(n)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(fleet.requests) == n, 10, "streams running")
    return threads, results


def connections(fleet):
    """Pids of nginx workers that Redis has a connection of."""
    lines = fleet.redis.cli("client", "list").splitlines()
    return sorted(int(line.split("name=kvgate-gateway:")[1].split()[0]) for line in lines if "name=kvgate-gateway:" in line)


def test_reloads_cut_no_stream_and_leak_no_connection(fleet):
    threads, results = start_streams(fleet, 8)
    old = set(fleet.gateway.children())
    for _ in range(3):
        fleet.gateway.reload()
        time.sleep(0.3)
        for worker in fleet.workers:
            worker.mode = "ok"
        assert fleet.post().status_code == 200
    for thread in threads:
        thread.join()
    assert results == [True] * 8
    wait_until(lambda: len(fleet.gateway.children()) == 2 and not old & set(fleet.gateway.children()), 15, "old workers gone")
    wait_until(lambda: connections(fleet) == sorted(fleet.gateway.children()), 10, "one connection a worker")
    assert fleet.post().headers["X-Kvgate-Reason"] in ROUTED


def test_a_reload_keeps_the_counters_and_the_known_workers(fleet):
    fleet.post()
    count = sum(fleet.gateway.status()["reasons"][word] for word in ROUTED)
    assert count >= 1
    old = set(fleet.gateway.children())
    fleet.gateway.reload()
    wait_until(lambda: len(fleet.gateway.children()) == 2 and not old & set(fleet.gateway.children()), 15, "reloaded")
    assert sum(fleet.gateway.status()["reasons"][word] for word in ROUTED) == count
    assert fleet.gateway.workers() == ["w1", "w2"]


def test_a_reload_takes_up_new_directives(fleet):
    text = open(fleet.gateway.conf, encoding="utf-8").read()
    with open(fleet.gateway.conf, "w", encoding="utf-8") as file:
        file.write(text.replace("block_size=32", "block_size=32 alias=new-name"))
    assert fleet.post(model="new-name").status_code == 404
    fleet.gateway.reload()
    wait_until(lambda: fleet.post(model="new-name").status_code == 200, 15, "the alias known")


def test_a_broken_configuration_leaves_the_old_one_running(fleet):
    fleet.gateway.expected.append(r"\[emerg\].*cannot be opened")
    text = open(fleet.gateway.conf, encoding="utf-8").read()
    with open(fleet.gateway.conf, "w", encoding="utf-8") as file:
        file.write(text.replace("kvgate_model smollm2 ", "kvgate_model broken /etc/passwd; kvgate_model smollm2 "))
    fleet.gateway.reload()
    wait_until(lambda: "cannot be opened" in fleet.gateway.log(), 10, "the reload refused")
    assert fleet.post().status_code == 200


def test_a_graceful_quit_lets_streams_end(fleet):
    threads, results = start_streams(fleet, 4)
    fleet.gateway.terminate(signal.SIGQUIT)
    for thread in threads:
        thread.join()
    assert results == [True] * 4
    assert fleet.gateway.wait(20) == 0
    wait_until(lambda: connections(fleet) == [], 10, "Redis connections closed")


def test_a_quit_while_redis_hangs_is_as_quick(fleet):
    os.kill(fleet.redis.pid, signal.SIGSTOP)
    try:
        assert fleet.post().status_code == 200
        fleet.gateway.terminate(signal.SIGQUIT)
        assert fleet.gateway.wait(20) == 0
    finally:
        os.kill(fleet.redis.pid, signal.SIGCONT)


def test_a_quit_while_a_large_body_is_in_a_thread_answers_it(fleet):
    body = json.dumps(chat("some words " * 400_000)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", fleet.gateway.port), timeout=120) as s:
        s.sendall(head.encode() + body[:-1])  # megabytes are through only when nginx reads them: the request is accepted
        s.sendall(body[-1:])
        fleet.gateway.terminate(signal.SIGQUIT)
        reply = b"".join(iter(lambda: s.recv(65536), b""))
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert fleet.gateway.wait(20) == 0


def test_a_killed_nginx_worker_is_replaced_and_routes_again(fleet):
    fleet.gateway.expected.append(r"exited on signal 9")
    victim = fleet.gateway.children()[0]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: len(fleet.gateway.children()) == 2 and victim not in fleet.gateway.children(), 10, "a new worker")
    wait_until(lambda: connections(fleet) == sorted(fleet.gateway.children()), 10, "connected")
    for _ in range(10):
        assert fleet.post().headers["X-Kvgate-Reason"] in ROUTED


def test_models_that_come_and_go_do_not_fill_the_zone():
    with Fleet(1, edits=[(r"kvgate_zone kvgate:1m", "kvgate_zone kvgate:512k")]) as fleet:
        text = open(fleet.gateway.conf, encoding="utf-8").read()
        for i in range(8):  # the zone has room for three or four
            with open(fleet.gateway.conf, "w", encoding="utf-8") as file:
                file.write(text.replace("kvgate_model smollm2", f"kvgate_model version-{i}"))
            old = set(fleet.gateway.children())
            fleet.gateway.reload()
            wait_until(lambda: len(fleet.gateway.children()) == 1 and not old & set(fleet.gateway.children()), 15, f"reload {i}")
            assert fleet.post(model=f"version-{i}").status_code == 200


def test_a_zone_of_another_size_and_a_model_that_goes_and_comes_back():
    with Fleet(1) as fleet:
        text = open(fleet.gateway.conf, encoding="utf-8").read()
        for changed in (text.replace("kvgate:1m", "kvgate:2m"), text.replace("kvgate on;", "").replace("kvgate_model smollm2", "#"), text):
            with open(fleet.gateway.conf, "w", encoding="utf-8") as file:
                file.write(changed)
            old = set(fleet.gateway.children())
            fleet.gateway.reload()
            wait_until(lambda: len(fleet.gateway.children()) == 1 and not old & set(fleet.gateway.children()), 15, "reloaded")
            assert fleet.post().status_code == 200
        wait_until(lambda: fleet.post().headers["X-Kvgate-Reason"] in ROUTED, 10, "routed again")


def test_a_model_file_cut_short_under_nginx_harms_nothing(tmp_path):
    """An operator copies over the file in place: what runs goes on, a reload is refused with the reason."""
    model = str(tmp_path / "model.gguf")
    subprocess.run([os.path.join(BUILD, "kvgate-prompt"), "cut", SMOLLM2, model], check=True)
    with Fleet(1, model=model) as fleet:
        before = fleet.gateway.children()
        os.truncate(model, 1000)
        for i in range(5):
            assert fleet.post(f"häß {i} 你好 " * 50).headers["X-Kvgate-Reason"] in ROUTED
        fleet.gateway.expected.append(r'model "smollm2" cannot be opened')
        fleet.gateway.reload()
        wait_until(lambda: "the file ends inside" in fleet.gateway.log(), 10, "the reload refused")
        assert fleet.post().status_code == 200 and fleet.gateway.children() == before
