"""What one worker's clients wait for, with bounds that only a fault passes; make bench-latency measures the times themselves."""
import http.client
import os
import threading
import time

import pytest
import requests

from stack import SMOLLM2, Worker

PROMPT = 6000


@pytest.fixture(scope="module")
def worker():
    with Worker("--max-model-len", 8192, kv_cache_memory="512M") as w:
        yield w


def prefill(worker, number, out):
    ids = [200 + (i * 7919 + number * 104729) % 40000 for i in range(PROMPT)]
    out.append(requests.post(worker.url + "/v1/completions", json={"prompt": ids, "max_tokens": 1}, timeout=120).json()["usage"])


def resident(pid):
    with open(f"/proc/{pid}/status", encoding="utf-8") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("VmRSS")) / 1024


def cpu_seconds(pid):
    with open(f"/proc/{pid}/stat", encoding="utf-8") as f:
        fields = f.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_idle_worker_holds_one_copy_of_the_weights(worker, record_property):
    weights, found = os.path.getsize(SMOLLM2) / (1 << 20), resident(worker.pid)
    record_property("resident_mib", round(found))
    print(f"weights {weights:.0f} MiB, resident {found:.0f} MiB")
    assert found < weights + 100


def test_an_idle_worker_sleeps(worker):
    before = cpu_seconds(worker.pid)
    time.sleep(1.5)
    assert cpu_seconds(worker.pid) - before < 0.15


def test_health_is_answered_and_a_stream_goes_on_during_a_long_prefill(worker):
    before, usage, times = worker.metrics(), [], []
    long = threading.Thread(target=prefill, args=(worker, 1, usage))
    stream = requests.post(worker.url + "/v1/completions", stream=True, timeout=120,
                           json={"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True})
    lines = stream.iter_lines()
    next(lines)
    long.start()
    connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=30)
    seen = 0
    while long.is_alive():
        began = time.monotonic()
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b'{"status":"ok"}'
        times.append(time.monotonic() - began)
        seen += bool(next(lines))  # blocks no longer than a step or two
    long.join()
    stream.close()
    connection.close()
    assert usage[0]["prompt_tokens"] == PROMPT and seen > 20 and len(times) > 20
    times.sort()
    print(f"/health: median {1000 * times[len(times) // 2]:.2f} ms, longest {1000 * times[-1]:.1f} ms")
    assert times[len(times) // 2] < 0.1
    after = worker.metrics()
    steps = after['kvgate_engine_steps_total{model_name="smollm2"}'] - before['kvgate_engine_steps_total{model_name="smollm2"}']
    assert steps > 20  # the prompt came in chunks, with a token of the stream beside each


def test_the_parts_of_a_step_are_counted(worker):
    requests.post(worker.url + "/v1/completions", json={"prompt": "Once", "max_tokens": 8, "ignore_eos": True}, timeout=60)
    total = worker.metric("kvgate_step_seconds_total")
    for part in ("intake", "schedule", "forward", "sample", "emit", "report"):
        assert 0 < worker.metric("kvgate_step_seconds_total", part=part) < total
    assert worker.metric("kvgate_step_seconds_total", part="forward") > total / 2
