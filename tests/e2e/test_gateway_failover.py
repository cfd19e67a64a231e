"""Redis moves: a list of servers, Sentinel, a user with few rights, TLS through a proxy. Real Redis, real workers, real nginx."""
import os
import re
import subprocess

import pytest
import redis as redis_library
import requests

from conftest import ROOT
from fake_worker import FakeWorker
from gateway import ROUTED, Gateway, chat
from stack import Process, Redis, Worker, free_port, wait_until

QUICK = {"max_tokens": 2, "temperature": 0}


def post(gateway, text="hello there, " * 20):
    return requests.post(gateway.url + "/v1/chat/completions", json={**chat(text), **QUICK}, timeout=60)


def routed(gateway):
    reply = post(gateway)
    assert reply.status_code == 200, reply.text
    return reply.headers["X-Kvgate-Reason"] in ROUTED


class Sentinel(Process):
    name = "sentinel"

    def __init__(self, master_port):
        super().__init__()
        self.port = free_port()
        self.conf = os.path.join(self.dir, "sentinel.conf")
        with open(self.conf, "w", encoding="utf-8") as file:
            file.write(f"port {self.port}\nbind 127.0.0.1\ndir {self.dir}\nsentinel monitor fleet 127.0.0.1 {master_port} 1\n"
                       "sentinel down-after-milliseconds fleet 500\nsentinel failover-timeout fleet 5000\n")

    def command(self):
        return ["redis-sentinel", self.conf]

    def answers(self):
        try:
            return redis_library.Redis(port=self.port).ping()
        except redis_library.RedisError:
            return False


def replica_of(master):
    replica = Redis("--replicaof", f"127.0.0.1 {master.port}", "--repl-diskless-sync-delay", 0)
    replica.start()
    wait_until(lambda: replica.client().info("replication").get("master_link_status") == "up", 20, "the replica in step")
    return replica


def test_a_sentinel_leads_worker_and_gateway_to_the_new_master():
    with Redis("--repl-diskless-sync-delay", 0) as master, replica_of(master) as replica, Sentinel(master.port) as sentinel:
        watch = redis_library.Redis(port=sentinel.port, decode_responses=True)
        wait_until(lambda: len(watch.sentinel_slaves("fleet")) == 1, 20, "the replica known to the Sentinel")
        url = f"sentinel://127.0.0.1:1,127.0.0.1:{sentinel.port}/fleet"
        with Worker(redis=url, worker_id="w1", kv_cache_memory="64M") as worker, Gateway(redis_url=url, servers=[worker.gateway_addr]) as gateway:
            wait_until(lambda: gateway.workers() == ["w1"] and routed(gateway), 20, "routed by the first master")
            assert worker.gateway_addr in [master.client().hget("kvgate:{smollm2}:w:w1", "addr")]
            master.kill()
            wait_until(lambda: post(gateway).status_code == 200 and replica.client().info("replication")["role"] == "master", 30, "the failover")
            replica.client().flushall()  # nothing old can be what is seen
            wait_until(lambda: routed(gateway) and replica.client().exists("kvgate:{smollm2}:w:w1"), 30, "routed by the new master")
            assert f"fleet at 127.0.0.1:{replica.port}" in gateway.log() and f"fleet at 127.0.0.1:{replica.port}" in worker.log()


def test_a_master_that_becomes_a_replica_is_left_for_the_next_of_the_list():
    with Redis() as one, replica_of(one) as two:
        with Worker(redis=f"{one.url},{two.url}", worker_id="w1", kv_cache_memory="64M") as worker:
            with Gateway(redis_url=f"{one.url} {two.url}", servers=[worker.gateway_addr]) as gateway:
                wait_until(lambda: gateway.workers() == ["w1"] and routed(gateway), 20, "routed by the first")
                two.cli("replicaof", "no", "one")
                one.cli("replicaof", "127.0.0.1", two.port)
                two.client().delete("kvgate:{smollm2}:w:w1")
                wait_until(lambda: routed(gateway) and two.client().hget("kvgate:{smollm2}:w:w1", "addr"), 30, "routed by the second")
                named = lambda redis: [c["name"] for c in redis.client().client_list() if c["name"].startswith("kvgate-")]  # noqa: E731
                wait_until(lambda: len(named(two)) == 2 and not named(one), 10, "nobody stays with the replica")
                assert f"redis 127.0.0.1:{one.port} db 0 is a replica" in gateway.log()


def test_two_dead_addresses_cost_no_second():
    """Each of the list is tried at once; only a whole round without success waits."""
    with Redis() as redis, FakeWorker("w1") as worker:
        with Gateway(servers=[worker.addr], redis_url=f"redis://127.0.0.1:1 redis://127.0.0.1:1 {redis.url}") as gateway:
            worker.register(redis, gateway.status()["models"][0]["fingerprint"])
            wait_until(lambda: gateway.workers() == ["w1"], 10, "the third in use")
            assert gateway.log().count("Connection refused") == 1  # an outage is said once


def test_the_user_of_the_readme_suffices():
    with open(os.path.join(ROOT, "redis-schemas", "README.md"), encoding="utf-8") as file:
        rights = re.search(r"ACL SETUSER kvgate on '>PASSWORD' ([^`]*)`", file.read()).group(1)
    with Redis() as redis:
        redis.cli("acl", "setuser", "kvgate", "on", ">se:cret", *rights.split())
        redis.cli("acl", "setuser", "default", "-@all", "+acl", "+ping", "+client")
        url = f"redis://kvgate:se%3acret@127.0.0.1:{redis.port}"
        limit = 'kvgate_limit key=$http_host requests=1000/s;'
        with Worker(redis=url, worker_id="w1", kv_cache_memory="64M") as worker, \
                Gateway(redis_url=f"{url} {url}", servers=[worker.gateway_addr], location=limit) as gateway:
            wait_until(lambda: gateway.workers() == ["w1"], 20, "the worker seen")
            wait_until(lambda: post(gateway).headers["X-Kvgate-Reason"] == "prefix", 20, "claims published")
            assert gateway.status()["limits"]["unchecked"] == 0 and gateway.status()["limits"]["passed"] > 0
            worker.stop()
            assert redis.cli("acl", "log") == "" and "NOPERM" not in gateway.log() + worker.log()
        user = redis_library.Redis(port=redis.port, username="kvgate", password="se:cret")
        for command in (["FLUSHALL"], ["KEYS", "*"], ["CONFIG", "GET", "*"], ["SET", "other", "1"], ["GET", "other"], ["SHUTDOWN"]):
            with pytest.raises(redis_library.exceptions.NoPermissionError):
                user.execute_command(*command)


def test_rediss_is_refused_by_name():
    gateway = Gateway(redis_url="rediss://127.0.0.1:6379")
    code, text = gateway.test()
    gateway.close()
    assert code != 0 and re.search(r"rediss:// \(TLS\) is not supported, its client library hiredis \d+\.\d+ has none: run a TLS proxy such as stunnel", text)


class Stunnel(Process):
    """TLS outwards: what the READMEs recommend beside worker and gateway."""

    name = "stunnel"

    def __init__(self, port, ca):
        super().__init__()
        os.chmod(self.dir, 0o755)
        self.socket = os.path.join(self.dir, "redis.sock")
        self.conf = os.path.join(self.dir, "stunnel.conf")
        with open(self.conf, "w", encoding="utf-8") as file:
            file.write(f"foreground = yes\npid =\n[redis]\nclient = yes\naccept = {self.socket}\nconnect = 127.0.0.1:{port}\nCAfile = {ca}\nverifyChain = yes\n")

    def command(self):
        return ["stunnel", self.conf]

    def answers(self):
        if os.path.exists(self.socket):
            os.chmod(self.socket, 0o777)
            return True
        return False


def test_tls_through_a_proxy(tmp_path):
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=127.0.0.1"],
                   check=True, capture_output=True)
    tls = free_port()
    with Redis("--tls-port", tls, "--tls-cert-file", certificate, "--tls-key-file", key, "--tls-auth-clients", "no") as redis:
        with Stunnel(tls, certificate) as proxy, FakeWorker("w1") as worker:
            with Gateway(servers=[worker.addr], redis_url=f"unix:{proxy.socket}") as gateway:
                worker.register(redis, gateway.status()["models"][0]["fingerprint"])
                wait_until(lambda: gateway.workers() == ["w1"] and routed(gateway), 20, "routed through TLS")
