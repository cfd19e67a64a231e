"""The compose files are valid, and what they say fits the programs. No container runs here."""
import os
import re
import shutil
import subprocess

import pytest
import yaml

from conftest import BUILD, ROOT

COMPOSE = shutil.which("docker-compose")
FILES = {"cpu": ["docker-compose.yml"], "gpu": ["docker-compose.yml", "docker-compose.gpu.yml"]}


def config(kind):
    files = [word for name in FILES[kind] for word in ("-f", name)]
    done = subprocess.run([COMPOSE, *files, "config"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


@pytest.mark.skipif(not COMPOSE, reason="no docker-compose")
@pytest.mark.parametrize("kind", FILES)
def test_the_files_are_valid(kind):
    services = config(kind)["services"]
    assert set(services) == {"redis", "worker-1", "worker-2", "gateway"}
    for name in ("worker-1", "worker-2"):
        assert ("deploy" in services[name]) == (kind == "gpu")


@pytest.mark.skipif(not COMPOSE, reason="no docker-compose")
def test_addresses_ports_and_flags_agree():
    services = config("cpu")["services"]
    redis = services["redis"]["networks"]["kvgate"]["ipv4_address"]
    port = re.search(r"^port (\d+)", open(os.path.join(ROOT, "conf/redis.conf"), encoding="utf-8").read(), re.M).group(1)
    assert services["gateway"]["environment"]["REDIS"] == f"redis://{redis}:{port}"
    help_text = subprocess.run([os.path.join(BUILD, "kvgate-worker"), "--help"], capture_output=True, text=True, check=True).stdout
    ids = set()
    for name in ("worker-1", "worker-2"):
        flags = dict(flag.split("=", 1) for flag in services[name]["command"])
        assert flags["--redis"] == f"redis://{redis}:{port}"
        assert flags["--gateway-listen"].split(":")[0] == services[name]["networks"]["kvgate"]["ipv4_address"]
        ids.add(flags["--worker-id"])
        for flag in flags:
            assert re.search(rf"{flag}\b", help_text), f"{name}: kvgate-worker has no {flag}"
    assert len(ids) == 2


@pytest.mark.parametrize("path", ["nginx-module/Dockerfile", "gpu-worker/Dockerfile"])
def test_what_dockerfiles_copy_from_the_tree_exists(path):
    for line in open(os.path.join(ROOT, path), encoding="utf-8"):
        words = line.split()
        if words[:1] == ["COPY"] and not words[1].startswith("--"):
            for source in words[1:-1]:
                assert os.path.exists(os.path.join(ROOT, source)), f"{path}: COPY {source}"
