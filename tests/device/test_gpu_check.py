"""gpu_check.py's bookkeeping; the whole of it runs in `make test-cuda`."""
import os
import subprocess
import sys
import tarfile

import gpu_check
import pytest

SAYS_NO = [sys.executable, "-c", "import sys; print('== tool'); print('== Error: Device not supported'); sys.exit(int(sys.argv[1]))"]


@pytest.fixture
def check(tmp_path, monkeypatch):
    for name in ("RESULTS", "OUT"):
        monkeypatch.setattr(gpu_check, name, str(tmp_path / name))
        os.makedirs(tmp_path / name)
    return gpu_check.Check()


def test_a_tool_that_the_machine_forbids_is_left_out_and_says_why(check):
    assert not check.run("sanitizer memcheck", [*SAYS_NO, "1"], 20, failures=[9])
    assert check.left_out == ["sanitizer memcheck"] and not check.failed
    assert "ended with 1: == Error: Device not supported" in check.lines[0]


def test_what_a_tool_finds_has_failed(check):
    assert not check.run("sanitizer memcheck", [*SAYS_NO, "9"], 20, failures=[9])
    assert check.failed == ["sanitizer memcheck"] and not check.left_out


def test_a_program_that_ends_badly_has_failed(check):
    assert not check.run("tests", [*SAYS_NO, "1"], 20)
    assert check.failed == ["tests"]


def test_where_no_kernel_runs_it_ends_at_once_and_builds_nothing(tmp_path):
    """No nvcc, no binaries."""
    out = tmp_path / "out"
    done = subprocess.run([sys.executable, gpu_check.__file__], capture_output=True, text=True, timeout=60,
                          env=dict(os.environ, OUT=str(out), B=str(tmp_path / "none"), EMULATED="1"))
    assert done.returncode == 1 and "1 failed, 8 left out" in done.stdout.splitlines()[-1]
    assert "left out: kernels (no kernel runs here)" in (out / "summary.txt").read_text()
    assert not os.path.exists(str(out) + "-work")


@pytest.mark.parametrize("said, arguments", [("8.6", ["CUDA_ARCH=86"]), ("9.0\\n9.0", ["CUDA_ARCH=90a"]), ("10.0\\n8.0", ["CUDA_ARCH=80 100a"]),
                                             ("No devices were found", [])])
def test_it_builds_for_the_devices_that_there_are(said, arguments, tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{said}\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert gpu_check.architectures() == arguments


def test_after_each_section_the_results_are_few_files(check):
    os.makedirs(os.path.join(gpu_check.OUT, "goldens"))
    for name in ("a.log", "b.log", "kernels.csv", "model.gguf", "goldens/ops"):
        with open(os.path.join(gpu_check.OUT, name), "w", encoding="utf-8") as f:
            f.write(name)
    check.section("first", lambda c: c.say("said so far"), 10)
    assert sorted(os.listdir(gpu_check.RESULTS)) == ["goldens.tar.gz", "kernels.csv", "logs.tar.gz", "summary.txt"]
    with open(os.path.join(gpu_check.RESULTS, "summary.txt"), encoding="utf-8") as f:
        assert f.read() == "said so far\n"
    with tarfile.open(os.path.join(gpu_check.RESULTS, "logs.tar.gz")) as tar:
        assert sorted(tar.getnames()) == ["a.log", "b.log"]
