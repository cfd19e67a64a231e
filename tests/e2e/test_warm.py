"""--warm FILE: prompts that are computed before the worker is ready, and evicted last."""
import json
import os
import signal
import subprocess
import urllib.error
import urllib.request

import pytest

from stack import Redis, Worker, wait_until

WORDS = "river stone lamp garden winter copper signal harbor meadow thunder violet anchor".split()
BLOCK = 32


def text(number, n):
    return f"Notes {number}. " + " ".join(WORDS[(i * (number + 3) + i // 7) % len(WORDS)] for i in range(n))


def chat(system, question):
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": question}], "max_tokens": 2, "temperature": 0}


def write(folder, *lines):
    path = os.path.join(folder, "warm.jsonl")
    with open(path, "w", encoding="utf-8") as f:
        f.writelines((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    return path


def usage(worker, path, body):
    request = urllib.request.Request(worker.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)["usage"]


def cached(worker, body, path="/v1/chat/completions"):
    return usage(worker, path, body)["prompt_tokens_details"]["cached_tokens"]


def ready(worker):
    """(status, word) of /ready; (0, "") while nobody listens."""
    try:
        with urllib.request.urlopen(worker.url + "/ready", timeout=5) as reply:
            return reply.status, json.load(reply)["status"]
    except urllib.error.HTTPError as e:
        return e.code, json.load(e)["status"]
    except OSError:
        return 0, ""


def test_the_first_request_behind_a_warm_prompt_finds_it_cached(tmp_path):
    path = write(tmp_path, chat(text(1, 150), "What comes first?"), "", {"prompt": [text(2, 80), text(3, 80)]}, {"prompt": text(4, 80), "cache_salt": "s"})
    with Worker("--max-model-len", 2048, "--warm", path) as worker:
        assert cached(worker, chat(text(1, 150), "And what comes last?")) >= 4 * BLOCK
        for body, hit in (({"prompt": text(2, 80)}, True), ({"prompt": text(3, 80)}, True), ({"prompt": text(4, 80)}, False),
                          ({"prompt": text(4, 80), "cache_salt": "s"}, True)):
            assert (cached(worker, body, "/v1/completions") >= 2 * BLOCK) == hit, body
        assert worker.metric("kvgate_kv_blocks_warm") > 10
        assert "warm: 4 prompts of " in worker.log()


def test_warm_blocks_outlive_others_and_yield_to_a_request_that_needs_all(tmp_path):
    path = write(tmp_path, {"prompt": text(0, 300)})
    with Worker("--max-model-len", 1400, "--num-kv-blocks", 44, "--warm", path) as worker:
        for n in range(1, 6):  # each takes most of what is left
            usage(worker, "/v1/completions", {"prompt": text(n, 800), "max_tokens": 1})
        assert worker.metric("kvgate_evicted_blocks_total") > 44
        assert cached(worker, {"prompt": text(0, 300), "max_tokens": 1}, "/v1/completions") >= 9 * BLOCK
        whole = usage(worker, "/v1/completions", {"prompt": text(9, 1300), "max_tokens": 1})
        assert whole["prompt_tokens"] > 40 * BLOCK and whole["completion_tokens"] == 1
        assert worker.metric("kvgate_kv_blocks_warm") < 5


def test_a_warming_worker_answers_but_is_not_ready_and_unknown_to_redis(tmp_path):
    path = write(tmp_path, *({"prompt": text(n, 1500)} for n in range(4)))
    with Redis() as redis:
        worker = Worker("--max-model-len", 2048, "--warm", path, redis=redis, worker_id="w1")
        try:
            worker.launch()
            wait_until(lambda: ready(worker) == (503, "warming"), 60, "warming", 0.005)
            listed = redis.cli("exists", "kvgate:{smollm2}:w:w1")
            with urllib.request.urlopen(worker.url + "/health", timeout=5) as reply:
                assert reply.status == 200
            still = ready(worker)
            assert still != (503, "warming") or listed == "0"
            wait_until(lambda: ready(worker) == (200, "ready"), 60, "ready")
            wait_until(lambda: redis.cli("exists", "kvgate:{smollm2}:w:w1") == "1", 10, "the heartbeat")
            client = redis.client()
            held = int(worker.metric("kvgate_kv_blocks_warm"))
            assert held >= 4 * 40
            wait_until(lambda: sum(client.hlen(k) for k in client.keys("kvgate:{smollm2}:own:*")) >= held, 10, "the warm blocks' claims")
        finally:
            worker.close()


def test_prompts_without_a_block_and_repeated_ones_are_left_out(tmp_path):
    path = write(tmp_path, {"prompt": "short"}, {"prompt": text(1, 80)}, {"prompt": text(1, 80)}, {"prompt": text(1, 80), "cache_salt": "s"})
    with Worker("--max-model-len", 2048, "--warm", path) as worker:
        assert "warm: left out: 1 prompts shorter than a block of 32 tokens, 1 whose blocks another has" in worker.log()
        assert "warm: 2 prompts of " in worker.log()
        assert worker.metric("kvgate_engine_steps_total") <= 2
    with Worker("--max-model-len", 2048, "--warm", write(tmp_path, {"prompt": "short"})) as worker:
        assert "warm: 0 prompts of 0 tokens" in worker.log()


def test_warming_and_clients_do_not_refuse_each_other_where_little_may_wait(tmp_path):
    path = write(tmp_path, *({"prompt": text(n, 700)} for n in range(12)))
    worker = Worker("--max-model-len", 2048, "--max-num-seqs", 1, "--max-waiting", 1, "--warm", path)
    try:
        worker.launch()
        wait_until(lambda: ready(worker) == (503, "warming"), 60, "warming", 0.005)
        for n in range(3):  # one at a time: never more than may wait
            assert usage(worker, "/v1/completions", {"prompt": f"Client {n}", "max_tokens": 1})["completion_tokens"] == 1
        wait_until(lambda: ready(worker) == (200, "ready"), 60, "ready")
        assert "warm: 12 prompts of " in worker.log() and "not computed" not in worker.log()
    finally:
        worker.close()


def test_a_signal_ends_the_warming(tmp_path):
    worker = Worker("--max-model-len", 2048, "--warm", write(tmp_path, *({"prompt": text(n, 1500)} for n in range(30))))
    try:
        worker.launch()
        wait_until(lambda: ready(worker) == (503, "warming"), 60, "warming", 0.005)
        worker.terminate(signal.SIGTERM)
        assert worker.wait(30) == 0
        assert "ready:" not in worker.log() and "warm: 30 prompts" not in worker.log()
    finally:
        worker.close()


@pytest.mark.parametrize("line, said", [
    ('{"messages": [', "line 2: JSON ends too early"),
    ("[1, 2]", "line 2: a request body is a JSON object"),
    ('{"max_tokens": 3}', "line 2: neither messages nor a prompt"),
    ('{"prompt": "a", "messages": []}', "line 2: messages and prompt exclude each other"),
    ('{"prompt": 5}', "line 2: 'prompt' must be"),
    ('{"messages": [{"role": "pirate", "content": "a"}]}', "line 2: messages[0].role: must be one of"),
    ('{"prompt": "a", "temperature": 9}', "line 2: temperature must be a number from 0 to 2, got 9"),
    ('{"prompt": "a", "model": "other"}', 'line 2: the model "other" does not exist'),
    ('{"prompt": "a", "prompt_token_ids": [1]}', "line 2: prompt_token_ids may only come from the gateway"),
    (json.dumps({"prompt": [[1] * 600]}), "line 2: the prompt has 600 tokens; with one more it exceeds the context of 512"),
])
def test_a_bad_line_is_refused_at_start(tmp_path, line, said):
    path = write(tmp_path, {"prompt": "fine"}, line)
    worker = Worker("--max-model-len", 512, "--warm", path)
    try:
        done = subprocess.run(worker.command(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and f"cannot start: --warm {path}, {said}" in done.stderr, done.stderr
    finally:
        worker.close()


def test_a_file_without_requests_and_one_that_is_not_there_are_refused(tmp_path):
    for path, said in ((write(tmp_path, "", "  "), "it holds no request"), (str(tmp_path / "none"), "No such file or directory")):
        worker = Worker("--warm", path)
        try:
            done = subprocess.run(worker.command(), capture_output=True, text=True, timeout=60)
            assert done.returncode == 1 and f"--warm {path}: {said}" in done.stderr, done.stderr
        finally:
            worker.close()


def test_warm_without_prefix_caching_is_a_contradiction(tmp_path):
    worker = Worker("--warm", write(tmp_path, {"prompt": "a"}), "--no-enable-prefix-caching")
    try:
        done = subprocess.run(worker.command(), capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "--warm fills the prefix cache" in done.stderr
    finally:
        worker.close()
