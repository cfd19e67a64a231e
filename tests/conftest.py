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


def pytest_unconfigure(config):
    """The last line of a run, behind pytest's own summary."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter and not config.option.collectonly:
        count = lambda *kinds: sum(len(reporter.stats.get(kind, [])) for kind in kinds)  # noqa: E731
        print(f"{count('passed')} passed, {count('failed', 'error')} failed")


@pytest.fixture(scope="session")
def build():
    return BUILD


@pytest.fixture(scope="session")
def models():
    return MODELS
