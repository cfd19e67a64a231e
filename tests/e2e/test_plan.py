"""kvgate-worker --plan on real model files: its bytes are those that a worker allocates."""
import json
import os
import re
import subprocess

import pytest

import toy_model
from conftest import BUILD, MODELS, ROOT
from stack import SMOLLM2, Worker

WORKER = os.path.join(BUILD, "kvgate-worker")
RATES = ["--plan-bandwidth", "40G", "--plan-compute", "500G"]


def plan(*flags, model=SMOLLM2):
    done = subprocess.run([WORKER, "--plan", "--model", model, *flags], cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done


def plan_json(*flags, model=SMOLLM2):
    done = plan("--json", *flags, model=model)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("dtype", ["f16", "int8"])
def test_block_bytes_are_those_of_a_worker(dtype):
    with Worker("--kv-cache-dtype", dtype) as worker:
        allocated = int(re.search(r"(\d+) bytes a block of 32 tokens", worker.log()).group(1))
    assert plan_json("--memory", "4G", "--kv-cache-dtype", dtype, *RATES)["block_bytes"] == allocated


def test_bytes_of_a_real_model_by_hand():
    out = plan_json("--memory", "80G", "--qps", "10", "--in", "800", "--out", "300", "--plan-machine", "h100")
    # 30 layers, 3 kv heads of 64 dimensions, keys and values, 2 bytes each, 32 tokens
    assert out["block_bytes"] == 30 * 3 * 64 * 2 * 2 * 32
    assert out["blocks"] == int(80 * 2**30 * 0.9 - out["weight_bytes"]) // out["block_bytes"]
    assert out["blocks_a_request"] == 35
    assert 90e6 < out["step_bytes"] <= out["weight_bytes"] < os.path.getsize(SMOLLM2)
    assert out["weights"] == pytest.approx(134.5e6, rel=0.01)


def test_the_table_names_what_was_asked():
    done = plan("--memory", "8G", "--qps", "10", "--in", "800", "--out", "300", *RATES)
    assert done.returncode == 0, done.stderr
    for line in ("KV block", "KV blocks", "requests at once", "workers", "40 GB/s"):
        assert line in done.stdout


def test_this_cpu_is_measured_where_no_rates_are_given():
    out = plan_json("--qps", "0.1")
    assert out["machine"] == "cpu" and out["measured"]
    assert 1e8 < out["bytes_per_s"] < 1e13 and 1e8 < out["ops_per_s"] < 1e15


def test_more_load_needs_more_workers():
    numbers = [plan_json("--memory", "4G", "--qps", str(qps), *RATES)["workers"] for qps in (1, 10, 100)]
    assert numbers[0] < numbers[1] < numbers[2]


def test_a_load_beyond_any_number_of_workers_is_said_to_be_one():
    done = plan("--memory", "4G", "--qps", "1e15", *RATES)
    assert done.returncode == 0 and "none suffice: the load takes" in done.stdout


@pytest.mark.parametrize("flags, words", [
    (["--memory", "64M"], ["weights take", "--memory"]),
    (["--memory", "8G", "--in", "9000"], ["9256", "8192"]),
    (["--plan-machine", "gtx1"], ["gtx1", "h100"]),
    (["--plan-machine", "h100", "--kv-cache-dtype", "f16"], ["--kv-cache-dtype f16", "bf16, fp8 or int8"]),
    (["--kv-cache-dtype", "fp8"], ["--kv-cache-dtype fp8", "f16, bf16 or int8"]),
    (["--qps", "0"], ["--qps"]),
    (["--plan-cached", "1"], ["--plan-cached"]),
])
def test_what_cannot_be_planned_is_refused_in_a_line(flags, words):
    done = plan(*flags, *(RATES if "--plan-machine" not in flags else []))
    assert done.returncode in (1, 2)
    assert len(done.stderr.splitlines()) == 1
    for word in words:
        assert word in done.stderr


def test_an_unknown_architecture_is_refused_in_the_workers_words(tmp_path):
    path = str(tmp_path / "model.gguf")
    toy_model.random_model(path, metadata={"general.architecture": ("str", "mamba")})
    done = plan("--memory", "8G", *RATES, model=path)
    assert done.returncode == 1 and 'architecture "mamba" is not supported (llama, ' in done.stderr


def test_plan_flags_without_plan_are_refused():
    done = subprocess.run([WORKER, "--model", SMOLLM2, "--memory", "8G"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--memory belongs to --plan" in done.stderr


def test_a_cut_file_has_no_tensors_to_plan_with(tmp_path):
    cut = str(tmp_path / "cut.gguf")
    subprocess.run([os.path.join(BUILD, "kvgate-prompt"), "cut", SMOLLM2, cut], check=True, timeout=60)
    done = plan("--memory", "8G", *RATES, model=cut)
    assert done.returncode == 1 and "no tensors" in done.stderr
