"""What all Python tests share: where things are built, and markers."""
import os
import sys

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BUILD = os.path.join(ROOT, os.environ.get("B", "build"))
MODELS = os.path.join(ROOT, "build", "models")
sys.path.insert(0, os.path.join(ROOT, "tests", "tools"))


def pytest_configure(config):
    config.addinivalue_line("markers", "long: takes minutes; runs in make test-long only")


@pytest.fixture(scope="session")
def build():
    return BUILD


@pytest.fixture(scope="session")
def models():
    return MODELS
