"""--device: the worker with its CUDA backend on the emulator, and without one."""
import os
import subprocess
import sys

import pytest
import toy_model

from conftest import BUILD
from stack import Worker

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../golden"))
import test_families as families  # noqa: E402
import test_quantized as quantized  # noqa: E402

EMULATED = os.path.join(BUILD, "kvgate-cuda-emulated.so")
emulated = pytest.mark.skipif(not os.path.exists(EMULATED), reason="make test-cuda builds the emulated backend")
PROMPTS = ["river stone lamp", "garden winter copper signal harbor meadow thunder", "a"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("device") / "toy.gguf")
    toy_model.random_model(path, shape=toy_model.Shape(heads=2, kv_heads=1, head_dim=64, context=256), types="Q8_0", seed=5)
    return path


def worker(toy, device, file, monkeypatch, *args):
    monkeypatch.setenv("KVGATE_CUDA", file)
    return Worker("--device", device, "--num-kv-blocks", "64", *args, model=toy, served="toy", gateway=False)


def answers(worker):
    """Greedy continuations, as text."""
    ask = worker.openai(timeout=120).completions.create
    return [ask(model="toy", prompt=p, max_tokens=6, temperature=0).choices[0].text for p in PROMPTS]


def devices_said(worker):
    return [line for line in worker.log().splitlines() if "cuda" in line.lower()]


@emulated
def test_the_emulated_device_answers_as_the_cpu_does(toy, monkeypatch):
    with worker(toy, "cpu", "", monkeypatch) as cpu:
        expected = answers(cpu)
    with worker(toy, "cuda", EMULATED, monkeypatch) as cuda:
        assert answers(cuda) == expected
        assert answers(cuda) == expected  # from the cache now
    assert len(set(expected)) > 1


@emulated
def test_two_emulated_devices_answer_as_the_cpu_does(tmp_path, monkeypatch):
    path = str(tmp_path / "toy.gguf")
    toy_model.scripted(path, vocab := toy_model.Vocabulary(pieces=["left ", "right ", "up ", "down "]),
                       toy_model.chain(vocab, ["a", "left ", "right ", "up ", "down ", vocab.eos]), heads=2, kv_heads=2, head_dim=32, ffn=64,
                       layers=2, history=0.05)
    said = []
    monkeypatch.setenv("CUSIM_DEVICES", "2")
    for device, args in (("cpu", ()), ("cuda", ("--tensor-parallel-size", "2"))):
        with worker(path, device, EMULATED, monkeypatch, *args) as one:
            said += [one.openai(timeout=240).completions.create(model="toy", prompt="a", max_tokens=8, temperature=0, logprobs=1)
                     for _ in range(2)]
            assert device == "cpu" or "2 ranks of cuda" in one.log()
    assert [s.choices[0].text for s in said] == ["left right up down "] * 4
    for s in said[2:]:  # history shifts log-probabilities: a wrong sum of the ranks would, too
        assert s.choices[0].logprobs.token_logprobs == pytest.approx(said[0].choices[0].logprobs.token_logprobs, abs=0.02)


@emulated
def test_more_ranks_than_devices_are_refused_in_one_line(toy, monkeypatch):
    process = worker(toy, "cuda", EMULATED, monkeypatch, "--tensor-parallel-size", "2")
    monkeypatch.setenv("CUSIM_DEVICES", "1")
    try:
        done = subprocess.run(process.command(), capture_output=True, text=True, timeout=60)
    finally:
        process.close()
    assert done.returncode == 1
    faults = [line for line in done.stderr.splitlines() if " info " not in line]
    assert len(faults) == 1 and "--tensor-parallel-size 2 needs as many GPUs, and there is 1" in faults[0]


@emulated
@pytest.mark.parametrize("chunk", [17, 1])
@pytest.mark.parametrize("name", families.CASES)
def test_each_family_on_the_emulated_device_says_what_transformers_says(name, chunk, tmp_path, monkeypatch):
    """Windows, head norms, post-norms and gelu among them, in prompts and token by token; keys and values are bf16."""
    monkeypatch.setenv("KVGATE_CUDA", EMULATED)
    case = families.CASES[name]
    done, scores = families.run(families.make(tmp_path / "model", case), case["ids"], tmp_path, "cuda", chunk, kv="bf16")
    assert done.returncode == 0, done.stderr
    families.check(name, scores, 0.08)


@emulated
@pytest.mark.parametrize("scheme", ["gptq act-order", "gptq act-order asymmetric", "awq", "w8a8"])
def test_quantized_folders_on_the_emulated_device_say_what_the_cpu_says(scheme, tmp_path, monkeypatch):
    """But for keys and values, queries and probabilities in bf16; a column that is not gathered moves results by their own spread."""
    monkeypatch.setenv("KVGATE_CUDA", EMULATED)
    folder = quantized.make(tmp_path / "model", quantized.qf.quantize(quantized.tensors(), scheme)[0], quantized.qf.SCHEMES[scheme][0])
    for chunk in (17, 1):
        (_, want), (done, got) = (quantized.run(folder, tmp_path, isa, chunk) for isa in ("auto", "cuda"))
        assert done.returncode == 0, done.stderr
        error, spread = abs(got - want), want.std()
        assert error.max() < 0.2 * spread and error.mean() < 0.05 * spread, (error.max(), error.mean(), spread)


def started(toy, monkeypatch, *args):
    """(exit code, what it says beside its progress) of a worker that cannot start."""
    process = worker(toy, "cuda", EMULATED, monkeypatch, *args)
    try:
        done = subprocess.run(process.command(), capture_output=True, text=True, timeout=60)
    finally:
        process.close()
    return done.returncode, [line for line in done.stderr.splitlines() if " info " not in line]


@emulated
def test_a_device_with_little_shared_memory_runs_what_fits(tmp_path, monkeypatch):
    """Compute capability 8.6 and 8.9 give a block 99 KiB: enough for all but heads of 256 with int8 scales."""
    monkeypatch.setenv("CUSIM_SM", "86")
    path = str(tmp_path / "toy.gguf")
    toy_model.random_model(path, shape=toy_model.Shape(heads=2, kv_heads=1, head_dim=256, context=256), types="Q8_0", seed=5)
    with worker(path, "cuda", EMULATED, monkeypatch) as cuda:
        assert len(answers(cuda)) == len(PROMPTS)
    code, faults = started(path, monkeypatch, "--kv-cache-dtype", "int8")
    assert code == 1 and len(faults) == 1
    assert "heads of 256 in int8 takes 101888 bytes of shared memory" in faults[0] and "has 101376" in faults[0]


@emulated
def test_too_little_memory_at_start_says_what_takes_it(toy, monkeypatch):
    """Weights in numbers, activations with the flags that set their rows; with fewer rows the worker starts."""
    monkeypatch.setenv("CUSIM_MEMORY", "7")
    code, faults = started(toy, monkeypatch)
    assert code == 1 and len(faults) == 1
    assert "activations of 2048 rows (--max-num-batched-tokens, --max-num-seqs) beside 0.1 MiB of weights: " in faults[0]
    assert "of 7.0 MiB free" in faults[0]
    with worker(toy, "cuda", EMULATED, monkeypatch, "--max-num-batched-tokens", "64", "--max-num-seqs", "8") as cuda:
        assert answers(cuda)
    monkeypatch.setenv("CUSIM_FAIL", "malloc:28")
    code, faults = started(toy, monkeypatch)
    assert code == 1 and len(faults) == 1 and "no memory for weights, beside 0.1 MiB of the model's: " in faults[0]


@emulated
def test_kernels_are_launched_one_by_one_where_a_graph_cannot_be_made(toy, monkeypatch):
    with worker(toy, "cuda", EMULATED, monkeypatch) as cuda:
        expected = answers(cuda)
    monkeypatch.setenv("CUSIM_FAIL", "instantiate:1")
    with worker(toy, "cuda", EMULATED, monkeypatch) as cuda:
        assert answers(cuda) == expected


def test_auto_without_a_device_says_so_once_and_runs_on_the_cpu(toy, tmp_path, monkeypatch):
    missing = str(tmp_path / "none.so")
    with worker(toy, "auto", missing, monkeypatch) as auto:
        assert answers(auto)
        said = devices_said(auto)
    assert len(said) == 1 and "running on the CPU" in said[0] and missing in said[0]


def test_cuda_without_its_file_ends_the_worker_with_status_1(toy, tmp_path, monkeypatch):
    missing = str(tmp_path / "none.so")
    process = worker(toy, "cuda", missing, monkeypatch)
    try:
        done = subprocess.run(process.command(), capture_output=True, text=True, timeout=60)
    finally:
        process.close()
    assert done.returncode == 1
    assert missing in done.stderr
