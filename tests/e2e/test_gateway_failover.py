"""Redis moves: a list of servers, Sentinel, a user with few rights, TLS. Real Redis, real workers, real nginx."""
import os
import re
import subprocess
import time

import pytest
import redis as redis_library
import requests

from conftest import ROOT
from fake_worker import FakeWorker
from gateway import ROUTED, Gateway, chat
from stack import Process, Redis, Worker, free_port, wait_until

QUICK = {"max_tokens": 2, "temperature": 0}


def post(gateway, text="hello there, " * 20):
    return requests.post(gateway.url + "/v1/chat/completions", json={**chat(text), **QUICK}, timeout=120)


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


def certify(folder, name, subject, issuer=None):
    """(key, certificate) files; without an issuer it is a CA."""
    key, certificate, request = (str(folder / f"{name}.{end}") for end in ("key", "pem", "csr"))
    openssl = lambda *args: subprocess.run(["openssl", *args], check=True, capture_output=True)  # noqa: E731
    fresh = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", key, "-subj", f"/CN={name}")
    if issuer is None:
        openssl("req", "-x509", *fresh, "-out", certificate, "-days", "2", "-addext", "basicConstraints=critical,CA:TRUE")
    else:
        (folder / f"{name}.ext").write_text(f"subjectAltName={subject}\n")
        openssl("req", *fresh, "-out", request)
        openssl("x509", "-req", "-in", request, "-CA", issuer[1], "-CAkey", issuer[0], "-CAcreateserial", "-days", "2", "-out", certificate,
                "-extfile", str(folder / f"{name}.ext"))
    return key, certificate


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pki")
    ca = certify(folder, "ca", "")
    return {"ca": ca[1], "address": certify(folder, "address", "IP:127.0.0.1", ca), "name": certify(folder, "name", "DNS:localhost", ca),
            "other": certify(folder, "other", "DNS:redis.example", ca), "client": certify(folder, "client", "DNS:gateway", ca)}


def tls_redis(pki, served, clients="no", port=None):
    port = port or free_port()
    redis = Redis("--tls-port", port, "--tls-cert-file", pki[served][1], "--tls-key-file", pki[served][0], "--tls-ca-cert-file", pki["ca"],
                  "--tls-auth-clients", clients)
    redis.tls = port
    return redis


@pytest.mark.parametrize("host, served", [("127.0.0.1", "address"), ("localhost", "name")])
def test_tls_with_a_certificate_for_the_address_or_the_name(pki, host, served):
    with tls_redis(pki, served) as redis, FakeWorker("w1") as worker:
        redis.cli("acl", "setuser", "kvgate", "on", ">pa:ss", "~*", "+@all")
        url = f"rediss://kvgate:pa%3ass@{host}:{redis.tls}/1"
        with Gateway(servers=[worker.addr], redis_url=url, http=f"kvgate_redis_ca {pki['ca']};") as gateway:
            redis.client = lambda: redis_library.Redis(port=redis.port, db=1, decode_responses=True)
            worker.register(redis, gateway.status()["models"][0]["fingerprint"])
            wait_until(lambda: gateway.workers() == ["w1"] and routed(gateway), 20, "routed through TLS")
            for words in (10, 4000, 60_000):  # of which the last is many TLS records to Redis
                assert post(gateway, "word " * words).headers["X-Kvgate-Reason"] in ROUTED
            for _ in range(3):  # reloads and lost connections leave nothing behind
                gateway.reload()
                redis.cli("client", "kill", "type", "normal", "skipme", "yes")
                wait_until(lambda: routed(gateway), 20, "connected again")
            clients = [c for c in redis.client().client_list() if c["name"].startswith("kvgate-gateway")]
            assert clients and all(c["user"] == "kvgate" and c["laddr"].endswith(f":{redis.tls}") for c in clients)


@pytest.mark.parametrize("served, ca, says", [
    ("other", True, r"TLS: (hostname|IP address) mismatch"), ("address", False, "TLS: (self-signed certificate in certificate chain|unable to get local issuer certificate) .SSL: error"),
    (None, True, "no answer for two seconds")])
def test_tls_that_cannot_be_trusted_is_not_used_and_said_once(pki, served, ca, says):
    with tls_redis(pki, served or "address") as redis, FakeWorker("w1") as worker:
        port = redis.tls if served else redis.port
        with Gateway(servers=[worker.addr], redis_url=f"rediss://127.0.0.1:{port}", http=f"kvgate_redis_ca {pki['ca']};" if ca else "") as gateway:
            wait_until(lambda: re.search(f"redis tls 127.0.0.1:{port} db 0: {says}", gateway.log()), 20, "the log says why")
            for _ in range(4):
                reply = post(gateway)
                assert reply.status_code == 200 and reply.headers["X-Kvgate-Reason"] in ("redis_down", "redis_timeout")
                time.sleep(0.5)
            assert gateway.log().count("routed without it") == 1


def test_tls_with_a_certificate_of_the_client(pki):
    with tls_redis(pki, "address", clients="yes") as redis, FakeWorker("w1") as worker:
        certificate = f"kvgate_redis_ca {pki['ca']};\nkvgate_redis_certificate {pki['client'][1]} {pki['client'][0]};"
        with Gateway(servers=[worker.addr], redis_url=f"rediss://127.0.0.1:{redis.tls}", http=certificate) as gateway:
            worker.register(redis, gateway.status()["models"][0]["fingerprint"])
            wait_until(lambda: gateway.workers() == ["w1"] and routed(gateway), 20, "routed through TLS")
        with Gateway(servers=[worker.addr], redis_url=f"rediss://127.0.0.1:{redis.tls}", http=f"kvgate_redis_ca {pki['ca']};") as gateway:
            wait_until(lambda: "TLS: " in gateway.log(), 20, "refused without one")
            assert post(gateway).headers["X-Kvgate-Reason"] == "redis_down"


def test_files_of_tls_that_are_not_there_fail_the_configuration(pki):
    for http in ("kvgate_redis_ca /no/such/ca.pem;", f"kvgate_redis_certificate {pki['client'][1]} {pki['other'][0]};"):
        gateway = Gateway(redis_url="rediss://127.0.0.1:6379", http=http)
        code, text = gateway.test()
        gateway.close()
        assert code != 0 and ("/no/such/ca.pem" in text or "key values mismatch" in text)


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
