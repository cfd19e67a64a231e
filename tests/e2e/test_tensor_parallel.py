"""--tensor-parallel-size: a worker of several processes answers as one does, through nginx and Redis too, and ends as one."""
import concurrent.futures
import json
import os
import signal
import subprocess

import pytest
import requests

import toy_model
from conftest import BUILD
from gateway import Gateway
from stack import Redis, Worker, free_port, wait_until

MODEL = "toy"
BLOCK = 16
LONG = "one two three four five six seven eight nine ten eleven twelve " * 4  # some blocks
PROMPTS = [LONG + "a", LONG + "bright morning", "short", "something else altogether: " + LONG]
BOUND = 0.01  # by which log-probabilities may differ, with weights in f32; measured: a tenth of it


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("tp") / "toy.gguf")
    toy_model.random_model(path, shape=toy_model.Shape(hidden=128, layers=3, heads=8, kv_heads=4, ffn=192, context=1024), types="F32", seed=3)
    return path


def worker(toy, ranks, *args, **options):
    return Worker("--tensor-parallel-size", ranks, "--num-kv-blocks", 256, "--block-size", BLOCK, "--device", "cpu", *args, model=toy,
                  served=MODEL, **options)


def complete(url, prompt, **members):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 2, **members}
    reply = requests.post(url + "/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()


def said(completion):
    choice = completion["choices"][0]
    return choice["text"], choice["logprobs"]["token_logprobs"]


def ranks_of(process):
    """Pids of its children."""
    with open(f"/proc/{process.pid}/task/{process.pid}/children", encoding="ascii") as f:
        return [int(pid) for pid in f.read().split()]


def gone(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as f:
            return f.read().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def status_of(process, timeout=5):
    """The exit status of one that ends within that time."""
    wait_until(lambda: not process.running(), timeout, "the worker's end")
    return process.wait()


@pytest.fixture(scope="module")
def alone(toy):
    """What one process says: completions with the two likeliest of each token."""
    with worker(toy, 1, "--no-enable-prefix-caching", gateway=False) as one:
        return [complete(one.url, p) for p in PROMPTS]


@pytest.fixture(scope="module")
def pair(toy):
    with worker(toy, 2, gateway=False) as two:
        yield two


def check_beside_one_process(completions, alone):
    """The same tokens, up to a near tie, at the same log-probabilities within the bound."""
    compared = 0
    for mine, other in zip(completions, alone):
        mine, other = mine["choices"][0]["logprobs"], other["choices"][0]["logprobs"]
        for token, logprob, expected, expected_logprob, top in zip(mine["tokens"], mine["token_logprobs"], other["tokens"],
                                                                  other["token_logprobs"], other["top_logprobs"]):
            best, second = sorted(top.values(), reverse=True)[:2]
            if best - second <= 2 * BOUND:
                break
            assert token == expected and logprob == pytest.approx(expected_logprob, abs=BOUND)
            compared += 1
    assert compared >= 24, "too many near ties: take another seed for the toy"


def test_two_and_four_ranks_say_what_one_process_says(toy, alone, pair):
    check_beside_one_process([complete(pair.url, p) for p in PROMPTS], alone)
    assert pair.metric("kvgate_tensor_parallel_size") == 2
    assert "2 ranks of cpu" in pair.log()
    with worker(toy, 4, gateway=False) as four:  # kv heads: one each
        check_beside_one_process([complete(four.url, p) for p in PROMPTS], alone)
        assert len(ranks_of(four)) == 3


def test_an_answer_is_the_same_bits_cold_cached_and_in_company(toy, pair):
    cold = [said(complete(pair.url, p, max_tokens=20)) for p in PROMPTS]  # the first test has computed some of it
    hits = pair.metric("kvgate_prefix_cache_hits_total")
    assert [said(complete(pair.url, p, max_tokens=20)) for p in PROMPTS] == cold
    assert pair.metric("kvgate_prefix_cache_hits_total") > hits
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda p: said(complete(pair.url, p, max_tokens=20)), PROMPTS * 2))
    assert together == cold * 2
    with worker(toy, 2, "--no-enable-prefix-caching", "--max-num-batched-tokens", 20, "--max-num-seqs", 8, gateway=False) as chunked:
        assert [said(complete(chunked.url, p, max_tokens=20)) for p in PROMPTS] == cold


def test_a_seed_draws_the_same_and_a_stream_has_every_token(pair):
    draws = [said(complete(pair.url, PROMPTS[0], temperature=1.0, seed=7)) for _ in range(2)]
    assert draws[0] == draws[1]
    body = {"model": MODEL, "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 1.0, "seed": 7, "stream": True}
    text = ""
    with requests.post(pair.url + "/v1/completions", json=body, stream=True, timeout=120) as reply:
        for line in reply.iter_lines():
            if line.startswith(b"data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    assert text == draws[0][0]


@pytest.mark.parametrize("drafts", ["ngram", "model"])
def test_drafts_on_rank_0_change_no_answer(toy, pair, drafts):
    plain = [said(complete(pair.url, p, max_tokens=40)) for p in PROMPTS]
    with worker(toy, 2, "--speculative-model", toy if drafts == "model" else "ngram", gateway=False) as speculating:
        assert [said(complete(speculating.url, p, max_tokens=40)) for p in PROMPTS] == plain
        for _ in range(50):  # when drafts are made is the control's choice by measured time
            if drafts == "ngram" or speculating.metric("kvgate_spec_decode_num_draft_tokens_total") > 0:
                return
            assert said(complete(speculating.url, PROMPTS[0], max_tokens=40)) == plain[0]
        pytest.fail("no draft in 50 answers")


def test_through_nginx_and_redis(toy, alone):
    with Redis() as redis, worker(toy, 2, redis=redis, worker_id="w1") as two:
        wait_until(lambda: redis.cli("exists", f"kvgate:{{{MODEL}}}:w:w1") == "1", what="w1 in Redis")
        with Gateway(redis, servers=[two.gateway_addr], model=toy, served=MODEL) as gateway:
            check_beside_one_process([complete(gateway.url, p) for p in PROMPTS], alone)
            again = complete(gateway.url, PROMPTS[0])
            cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached >= 2 * BLOCK and cached % BLOCK == 0
            client = redis.client()
            claims = sum(client.hlen(key) for key in client.keys(f"kvgate:{{{MODEL}}}:own:*"))
            assert claims == two.metric("kvgate_kv_blocks_cached") > 0
            two.terminate()
            assert status_of(two, 30) == 0


def test_a_killed_rank_ends_the_worker_at_once_with_its_name(toy):
    with worker(toy, 2, gateway=False) as two:
        complete(two.url, "short")
        rank = ranks_of(two)[0]
        os.kill(rank, signal.SIGKILL)
        assert status_of(two) == 70  # seldom more than 0.1 s later; the machine may be busy
        assert f"rank 1 of 2 (process {rank}) was killed by signal 9" in two.log()


def test_a_killed_rank_ends_a_stream_that_runs(toy):
    two = worker(toy, 2, "--max-model-len", 1000, gateway=False)
    with two:
        body = {"model": MODEL, "prompt": LONG, "max_tokens": 800, "ignore_eos": True, "temperature": 0, "stream": True}
        with requests.post(two.url + "/v1/completions", json=body, stream=True, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(ranks_of(two)[0], signal.SIGKILL)
            with pytest.raises(requests.exceptions.RequestException):
                list(lines)
        assert status_of(two) == 70


def test_no_rank_outlives_a_killed_or_an_ended_worker(toy):
    with worker(toy, 4, gateway=False) as four:
        ranks = ranks_of(four)
        assert len(ranks) == 3
        four.kill()
        wait_until(lambda: all(map(gone, ranks)), what="the other ranks' end")
    with worker(toy, 2, gateway=False) as two:
        ranks = ranks_of(two)
        two.terminate()
        assert status_of(two, 30) == 0
        assert all(map(gone, ranks))


@pytest.mark.parametrize("flags, status, text", [
    (["--tensor-parallel-size", "3"], 1, "8 attention heads cannot be divided among 3 ranks"),
    (["--tensor-parallel-size", "0"], 2, "--tensor-parallel-size must be a whole number from 1 to 64"),
    (["--tensor-parallel-size", "2", "--num-kv-blocks", "1000000000"], 1, "KV blocks"),
    (["--tensor-parallel-size", "2", "--cpu-isa", "mmx"], 2, "--cpu-isa must be one of"),
])
def test_what_cannot_be_is_refused_in_one_line(toy, flags, status, text):
    done = subprocess.run([os.path.join(BUILD, "kvgate-worker"), "--model", toy, "--device", "cpu", "--port", str(free_port()), *flags],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == status
    faults = [line for line in done.stderr.splitlines() if " info " not in line]
    assert len(faults) == 1 and text in faults[0]


def test_a_plan_for_two_gpus_has_twice_the_memory(toy, tmp_path):
    wide = str(tmp_path / "wide.gguf")  # a feed-forward that 8 ranks can divide
    toy_model.random_model(wide, shape=toy_model.Shape(hidden=128, layers=3, heads=8, kv_heads=4, ffn=256, context=1024), types="F32", seed=3)

    def run(model, *flags):
        return subprocess.run([os.path.join(BUILD, "kvgate-worker"), "--plan", "--json", "--model", model, "--plan-machine", "h100", "--in",
                               "500", *flags], capture_output=True, text=True, timeout=60)

    def plan(*flags):
        done = run(wide, *flags)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
    one, two, eight = plan(), plan("--tensor-parallel-size", "2"), plan("--tensor-parallel-size", "8")
    assert two["machine"] == "2 x h100" and two["memory"] == 2 * one["memory"] and two["bytes_per_s"] == 2 * one["bytes_per_s"]
    assert two["block_bytes"] == one["block_bytes"]
    assert eight["block_bytes"] == 2 * one["block_bytes"]  # 4 kv heads, each held twice
    refused = run(toy, "--tensor-parallel-size", "8")  # as the worker refuses it
    assert refused.returncode == 1 and "a feed-forward of 192 in blocks of 32, or 259 ids, cannot be divided among 8 ranks" in refused.stderr
