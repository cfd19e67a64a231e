"""The engine for ten minutes under load, and its threads under ThreadSanitizer."""
import os
import subprocess

import pytest

from conftest import ROOT


def run(program, timeout, **env):
    done = subprocess.run([program], cwd=ROOT, env=dict(os.environ, **env), capture_output=True, text=True, timeout=timeout,
                          errors="replace")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]


@pytest.mark.long
def test_ten_minutes_of_shared_prefixes_and_cancellations(build):
    run(os.path.join(build, "tests/unit/gpu-worker/test_engine_soak"), 880, SOAK_SECONDS="600")


@pytest.mark.long
@pytest.mark.parametrize("name", ["test_engine", "test_engine_text", "test_engine_soak", "test_engine_publish", "test_server", "test_publish_queue",
                                  "test_thread_pool"])
def test_threads_under_thread_sanitizer(name):
    program = f"build-tsan/tests/unit/gpu-worker/{name}"
    subprocess.run(["make", "-s", "B=build-tsan", "SAN=thread", program], cwd=ROOT, check=True, timeout=880)
    run(program, 600, SOAK_SECONDS="20")
