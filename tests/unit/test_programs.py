"""Runs every compiled unit test (tests/unit/*/test_*.c) as one test each."""
import glob
import os
import subprocess

import pytest

from conftest import BUILD, ROOT

SOURCES = sorted(glob.glob(os.path.join(ROOT, "tests/unit/*/test_*.c")))


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: os.path.relpath(s, os.path.join(ROOT, "tests/unit"))[:-2])
def test_program(source):
    program = os.path.join(BUILD, os.path.relpath(source, ROOT)[:-2])
    done = subprocess.run([program], cwd=ROOT, capture_output=True, text=True, timeout=600, errors="replace")
    assert done.returncode == 0, f"{program} ended with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
