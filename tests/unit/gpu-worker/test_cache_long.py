"""Ten million random operations on the KV cache against a plain model, under AddressSanitizer and UBSan."""
import os
import subprocess

import pytest

from conftest import ROOT


@pytest.mark.long
def test_ten_million_operations_under_sanitizers():
    program = "build-asan/tests/unit/gpu-worker/test_cache"
    subprocess.run(["make", "-s", "B=build-asan", "SAN=address,undefined", program], cwd=ROOT, check=True, timeout=800)
    done = subprocess.run([program], cwd=ROOT, env=dict(os.environ, CACHE_OPS="10000000"), capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "10000000 operations" in done.stdout
