"""Directives: what nginx -t refuses, what each mode changes, and that nothing else changes."""
import base64
import hashlib
import json
import os
import re
import subprocess

import pytest
import requests

from conftest import BUILD
from fake_worker import FakeWorker
from gateway import ROUTED, WORDS, Fleet, Gateway, chat, raw_request
from prompt_chain import chain
from stack import SMOLLM2, Redis, wait_until

MODULE = os.path.join(BUILD, "ngx_http_kvgate_module.so")


def test_the_module_exports_only_what_nginx_looks_up():
    done = subprocess.run(["nm", "-D", "--defined-only", MODULE], capture_output=True, text=True, check=True)
    assert sorted(line.split()[-1] for line in done.stdout.splitlines()) == ["ngx_module_names", "ngx_module_order", "ngx_modules"]


# ---- nginx -t ----

def conf_test(**gateway):
    g = Gateway(**gateway)
    try:
        return g.test()
    finally:
        g.close()


def test_the_shipped_configuration_is_valid():
    code, text = conf_test()
    assert code == 0, text


NO_MODEL = [(r"kvgate_model smollm2 [^;]*;", "")]
REFUSED = {
    "mode": (dict(edits=[(r"kvgate on;", "kvgate perhaps;")]), r'invalid value "perhaps"'),
    "mode twice": (dict(location="kvgate on;"), r'"kvgate" directive is duplicate'),
    "no model": (dict(edits=NO_MODEL), r'"kvgate" is on but there is no "kvgate_model"'),
    "missing file": (dict(model="/nowhere/model.gguf"), r'model "smollm2" cannot be opened: /nowhere/model\.gguf: \S+'),
    "no model file": (dict(model="/etc/passwd"), r'model "smollm2" cannot be opened: /etc/passwd: \S+'),
    "model name": (dict(served='"a b"'), r'model name "a b" must be 1 to 128 of A-Z'),
    "model name's length": (dict(served="m" * 129), r'model name "m+" must be 1 to 128'),
    "duplicate model": (dict(http="kvgate_model smollm2 {model};"), r'duplicate model "smollm2"'),
    "block size": (dict(http="kvgate_model other {model} block_size=33;"), r'"block_size=33" must be a power of two from 16 to 512'),
    "alias of two": (dict(http="kvgate_model other {model} alias=a alias=b; kvgate_model third {model} alias=b;"),
                     r'alias "b" of kvgate_model "other" is already a model\'s name or alias'),
    "alias twice": (dict(http="kvgate_model other {model} alias=a alias=a;"), r'alias "a" of kvgate_model "other" is already'),
    "alias of another's name": (dict(http="kvgate_model other {model} alias=smollm2;"), r'alias "smollm2" of kvgate_model "other" is already'),
    "alias of its own name": (dict(http="kvgate_model other {model} alias=other;"), r'alias "other" of kvgate_model "other" is already'),
    "model parameter": (dict(http="kvgate_model other {model} shard=2;"), r'invalid parameter "shard=2"'),
    "redis scheme": (dict(redis_url="http://x"), r"kvgate_redis: \S+"),
    "redis host": (dict(redis_url="redis://no.such.host.invalid:1"), r"host not found in kvgate_redis"),
    "redis port": (dict(redis_url="redis://127.0.0.1:99999"), r"kvgate_redis: \S+"),
    "duplicate redis": (dict(http="kvgate_redis redis://127.0.0.1;"), r'"kvgate_redis" directive is duplicate'),
    "timeout": (dict(redis_timeout="soon"), r'"kvgate_redis_timeout" directive invalid value'),
    "timeout of 0": (dict(redis_timeout="0"), r'"kvgate_redis_timeout" must be over 0'),
    "prefix": (dict(http='kvgate_redis_prefix "a{b";'), r'key prefix "a\{b" must be at most'),
    "zone": (dict(edits=[(r"kvgate_zone kvgate:1m", "kvgate_zone kvgate")]), r'kvgate_zone "kvgate" must be name:size'),
    "zone's size": (dict(edits=[(r"kvgate_zone kvgate:1m", "kvgate_zone kvgate:16k")]), r'kvgate_zone "kvgate:16k" is too small'),
    "allow": (dict(http="kvgate_allow 10.0.0.0/8 everywhere;"), r'invalid parameter "everywhere"'),
    "alpha": (dict(http="kvgate_alpha many;"), r'kvgate_alpha "many" must be a number'),
    "limit without a key": (dict(location="kvgate_limit requests=1r/s;"), r'"kvgate_limit" directive needs a "key="'),
    "limit of nothing": (dict(location="kvgate_limit key=$uri;"), r'"kvgate_limit" directive needs "requests=" or "tokens="'),
    "limit's rate": (dict(location="kvgate_limit key=$uri requests=1r/y;"), r'invalid parameter "requests=1r/y" of kvgate_limit: the unit must be /s, /m, /h or /d'),
    "limit's number": (dict(location="kvgate_limit key=$uri tokens=0/m;"), r'invalid parameter "tokens=0/m" of kvgate_limit: the number before the unit must be whole and over 0'),
    "limit's burst": (dict(location="kvgate_limit key=$uri tokens=5/m burst_tokens=x;"), r'invalid parameter "burst_tokens=x" of kvgate_limit: a burst must be a whole number over 0'),
    "limit's parameter": (dict(location="kvgate_limit key=$uri speed=5;"), r'invalid parameter "speed=5" of kvgate_limit: expected key=, requests=, '),
    "limit's shape": (dict(location="kvgate_limit key=$uri requests=60;"), r'invalid parameter "requests=60" of kvgate_limit: a rate is a number and a unit'),
    "limit twice": (dict(location="kvgate_limit key=$uri requests=1r/s; kvgate_limit off;"), r'"kvgate_limit" directive is duplicate'),
    "certificate twice": (dict(http="kvgate_redis_certificate a.pem a.key; kvgate_redis_certificate b.pem b.key;"), r'"kvgate_redis_certificate" directive is duplicate'),
    "certificate without its key": (dict(http="kvgate_redis_certificate a.pem;"), r'invalid number of arguments in "kvgate_redis_certificate"'),
    "balance twice": (dict(upstream="kvgate_balance;"), r'"kvgate_balance" directive is duplicate'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nginx_t_refuses_and_says_why(name):
    options, pattern = REFUSED[name]
    options = {k: v.replace("{model}", SMOLLM2) if isinstance(v, str) else v for k, v in options.items()}
    code, text = conf_test(**options)
    assert code != 0 and re.search(pattern, text) and "[emerg]" in text, text


@pytest.mark.parametrize("options", [dict(redis_url="redis://[::1]:1/2"), dict(redis_url="redis://localhost"), dict(redis_url="unix:/x/y.sock?db=1"),
                                     dict(redis_url="redis://ann:pw@127.0.0.1"), dict(http="kvgate_allow 10.0.0.0/8 fe80::/10 unix:;"),
                                     dict(http="kvgate_alpha 2.5;"), dict(location="kvgate_priority on; kvgate_salt $remote_user; kvgate_bypass $arg_x;")], ids=str)
def test_nginx_t_accepts(options):
    code, text = conf_test(**options)
    assert code == 0, text


def test_a_certificate_that_no_connection_would_use_is_said():
    code, text = conf_test(http="kvgate_redis_ca ca.pem;")
    assert code == 0 and "[warn]" in text and "no address in kvgate_redis is a rediss://" in text
    assert "[warn]" not in conf_test()[1]


def test_a_zone_too_small_for_its_models_is_said():
    code, text = conf_test(edits=[(r"kvgate_zone kvgate:1m", "kvgate_zone kvgate:64k")])
    assert code != 0 and 'kvgate_zone "kvgate" of 65536 bytes is too small' in text


# ---- modes ----

@pytest.fixture(scope="module")
def fleet():
    observe = """
        location /observe/ {
            kvgate observe;
            proxy_pass http://workers/;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
        }
        location /off/ {
            proxy_pass http://workers/;
        }
        location /bypass/ {
            kvgate on;
            kvgate_bypass $http_x_bypass $arg_bypass;
            proxy_pass http://workers/;
        }
        location /salted/ {
            kvgate on;
            kvgate_salt $http_x_tenant;
            proxy_pass http://workers/;
        }
        location /priority/ {
            kvgate on;
            kvgate_priority on;
            proxy_pass http://workers/;
        }
        location /fails/ {
            kvgate on;
            proxy_pass http://127.0.0.1:1/;
            error_page 502 = @plain;
        }
        location @plain {
            proxy_pass http://workers;
        }
        location /redirects/ {
            kvgate on;
            proxy_pass http://127.0.0.1:1/;
            error_page 502 = @again;
        }
        location @again {
            kvgate on;
            proxy_pass http://workers;
        }
        location /outer/ {
            kvgate on;
            kvgate_salt outer;
            kvgate_bypass $http_x_bypass;
            kvgate_limit key=$http_x_key requests=1r/d name=nested;
            proxy_pass http://workers/;
            location /outer/same/ {
                proxy_pass http://workers/;
            }
            location /outer/own/ {
                kvgate_salt inner;
                kvgate_bypass 0;
                kvgate_limit off;
                kvgate_priority on;
                proxy_pass http://workers/;
                location /outer/own/deeper/ {
                    kvgate_salt "";
                    proxy_pass http://workers/;
                }
            }
            location /outer/off/ {
                kvgate off;
                proxy_pass http://workers/;
            }
        }
    """
    with Fleet(2, server=observe, edits=[(r"block_size=32", "alias=gpt-4o alias=small block_size=32")]) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def polite(request):
    if "fleet" in request.fixturenames:
        request.getfixturevalue("fleet").reset()


BODY = json.dumps(chat()).encode()
JSON = {"Content-Type": "application/json"}


def kvgate_headers(request):
    return {name for name, _ in request.headers if name.startswith("x-kvgate")}


def test_observe_computes_and_changes_nothing(fleet):
    for i in range(4):
        reply = requests.post(fleet.url + "/observe/v1/chat/completions", data=BODY, headers={**JSON, "X-Kvgate-Test": "mine"}, timeout=120)
        assert reply.headers["X-Kvgate-Reason"] in ROUTED and len(reply.headers["X-Kvgate-Chain"]) == 32
    assert [r.body for r in fleet.requests] == [BODY] * 4
    assert {r.header("x-kvgate-test") for r in fleet.requests} == {"mine"}
    assert [len(w.requests) for w in fleet.workers] == [2, 2]  # round robin, as without kvgate


def test_observe_lets_even_broken_requests_pass(fleet):
    reply = requests.post(fleet.url + "/observe/v1/chat/completions", data=b"{", headers=JSON, timeout=120)
    assert reply.status_code == 200 and fleet.requests[-1].body == b"{"
    assert reply.headers["X-Kvgate-Reason"] == "refused"


def test_off_is_plain_nginx(fleet):
    for _ in range(4):
        reply = requests.post(fleet.url + "/off/v1/chat/completions", data=BODY, headers={**JSON, "X-Kvgate-Test": "mine"}, timeout=120)
        assert not any(h.startswith("X-Kvgate") for h in reply.headers)
    assert [r.body for r in fleet.requests] == [BODY] * 4
    assert [len(w.requests) for w in fleet.workers] == [2, 2]


@pytest.mark.parametrize("path, salt, priority, bypassed, limited", [
    ("/outer", "outer", 0, True, True), ("/outer/same", "outer", 0, True, True), ("/outer/own", "inner", -5, False, False),
    ("/outer/own/deeper", None, -5, False, False), ("/outer/off", None, -5, False, False)])
def test_nested_locations_inherit_what_they_do_not_set(fleet, path, salt, priority, bypassed, limited):
    def post(**headers):
        fleet.reset()
        reply = requests.post(fleet.url + path + "/v1/chat/completions", json=chat(priority=-5), headers=headers, timeout=120)
        return reply, (fleet.requests or [None])[-1]

    reply, request = post()
    assert reply.status_code == 200 and request.header("x-kvgate-salt") == salt and request.json()["priority"] == priority
    assert ("prompt_token_ids" in request.json()) == (path != "/outer/off")
    assert ("prompt_token_ids" in post(**{"X-Bypass": "1"})[1].json()) == (path != "/outer/off" and not bypassed)
    assert [post(**{"X-Key": path})[0].status_code for _ in range(2)] == [200, 429 if limited else 200]


def test_bypass_follows_its_variables(fleet):
    for headers, query, bypassed in (({}, "", False), ({"X-Bypass": "0"}, "", False), ({"X-Bypass": "1"}, "", True), ({}, "?bypass=yes", True)):
        fleet.reset()
        reply = requests.post(fleet.url + "/bypass/v1/chat/completions" + query, data=BODY, headers={**JSON, **headers}, timeout=120)
        assert reply.headers["X-Kvgate-Reason"] in (("bypass",) if bypassed else ROUTED)
        assert (fleet.requests[-1].body == BODY) == bypassed


@pytest.mark.parametrize("method, path, headers", [
    ("GET", "/v1/health", {}),
    ("POST", "/v1/chat/completions", {"Content-Type": "text/plain"}),
    ("POST", "/v1/chat/completions", {"Content-Type": "application/jsonx"}),
    ("POST", "/v1/chat/completions", {}),
    ("PUT", "/v1/chat/completions", JSON),
    ("POST", "/v1/tokenize", JSON),
    ("POST", "/v1/completions/x", JSON),
], ids=lambda v: str(v)[:30])
def test_other_requests_pass_untouched(fleet, method, path, headers):
    reply = requests.request(method, fleet.url + path, data=BODY, headers=headers, timeout=120)
    assert reply.status_code == 200 and "X-Kvgate-Reason" not in reply.headers
    added = {"x-kvgate-priority"} if method == "POST" else set()
    assert fleet.requests[-1].body == BODY and kvgate_headers(fleet.requests[-1]) == added


@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8", "Application/JSON ;x"])
def test_json_is_recognized_with_parameters(fleet, content_type):
    reply = requests.post(fleet.url + "/v1/chat/completions", data=BODY, headers={"Content-Type": content_type}, timeout=120)
    assert reply.headers["X-Kvgate-Reason"] in ROUTED


@pytest.mark.parametrize("path, data", [("/v1/chat/completions", BODY), ("/v1/health", b"x"), ("/bypass/v1/chat/completions?bypass=1", BODY)])
def test_clients_kvgate_headers_are_removed(fleet, path, data):
    fleet.settle()
    head = (f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nX-KVGATE-Salt: other\r\nx-kvgate-hit-tokens: 7\r\nx-kvgate-fingerprint: {'0' * 32}\r\n"
            + "".join(f"X-Filler-{i}: {i}\r\n" for i in range(30)) + "X-Kvgate-Priority: -1\r\nX-Kvgate-: x\r\nX-Kept: yes\r\n"
            + f"Content-Length: {len(data)}\r\n\r\n").encode()
    assert raw_request(fleet.gateway.port, head + data)[0] == 200
    request = fleet.requests[-1]
    assert request.header("x-kept") == "yes" and request.header("x-filler-29") == "29"
    assert kvgate_headers(request) <= {"x-kvgate-fingerprint", "x-kvgate-hit-tokens", "x-kvgate-priority"}
    assert request.header("x-kvgate-priority") == "off"
    assert request.header("x-kvgate-fingerprint") in (None, fleet.fingerprint)
    assert request.header("x-kvgate-hit-tokens") in (None, "0")


def hashed(salt):
    return b"sha1:" + hashlib.sha1(salt.encode()).hexdigest().encode()


def test_the_salt_separates_tenants_and_travels(fleet):
    chains = set()
    for tenant, sent in (("a", b"a"), ("b", b"b"), ("two words", hashed("two words")), ("t" * 129, hashed("t" * 129)),
                         (None, b"")):
        reply = requests.post(fleet.url + "/salted/v1/chat/completions", data=BODY, headers={**JSON, "X-Kvgate-Salt": "forged",
                                                                                            **({"X-Tenant": tenant} if tenant else {})}, timeout=120)
        request = fleet.requests[-1] if len(fleet.requests) == 1 else next(r for r in fleet.requests)
        assert request.header("x-kvgate-salt") == (sent.decode() or None)
        assert reply.headers["X-Kvgate-Chain"] == chain(request.json()["prompt_token_ids"], "smollm2", fleet.fingerprint, salt=sent)[-1]
        chains.add(reply.headers["X-Kvgate-Chain"])
        fleet.reset()
    assert len(chains) == 5


def test_a_clients_cache_salt_refines_the_operators(fleet):
    body = json.dumps(chat(cache_salt="mine")).encode()
    for headers, salt in (({}, b"\x1fmine"), ({"X-Tenant": "a"}, b"a\x1fmine")):
        reply = requests.post(fleet.url + "/salted/v1/chat/completions", data=body, headers={**JSON, **headers}, timeout=120)
        ids = next(r for r in fleet.requests).json()["prompt_token_ids"]
        assert reply.headers["X-Kvgate-Chain"] == chain(ids, "smollm2", fleet.fingerprint, salt=salt)[-1]
        fleet.reset()


def test_priority_passes_only_where_it_is_on(fleet):
    assert requests.post(fleet.url + "/v1/chat/completions", json=chat(priority=-5), timeout=120).status_code == 200
    assert fleet.requests[-1].json()["priority"] == 0
    fleet.reset()
    assert requests.post(fleet.url + "/priority/v1/chat/completions", json=chat(priority=-5), timeout=120).status_code == 200
    assert fleet.requests[-1].json()["priority"] == -5
    fleet.reset()
    unparsed = {"model": "smollm2", "messages": 1, "priority": -5}
    assert fleet.post(**{}).status_code == 200
    fleet.reset()
    assert requests.post(fleet.url + "/v1/chat/completions", json=unparsed, timeout=120).status_code == 200
    assert fleet.requests[-1].json()["priority"] == 0


@pytest.mark.parametrize("path, headers", [("/v1/chat/completions", {"Content-Type": "text/plain"}), ("/v1/chat/completions", {}),
                                           ("/v1/other", JSON), ("/bypass/v1/chat/completions?bypass=1", JSON), ("/v1/chat/completions", JSON)])
def test_no_way_of_sending_a_body_brings_a_priority_past_the_gateway(fleet, path, headers):
    body = json.dumps(chat(priority=-5)).encode()
    reply = requests.post(fleet.url + path, data=body, headers={"X-Kvgate-Priority": "on", **headers}, timeout=120)
    assert reply.status_code == 200 and fleet.requests[-1].header("X-Kvgate-Priority") == "off"
    fleet.reset()
    assert requests.post(fleet.url + "/priority" + path, data=body, headers={"X-Kvgate-Priority": "off", **headers}, timeout=120).status_code == 200
    assert fleet.requests[-1].header("X-Kvgate-Priority") is None


def test_an_alias_is_the_model_under_its_own_name(fleet):
    plain = fleet.post()
    for alias in ("gpt-4o", "small"):
        fleet.reset()
        reply = fleet.post(model=alias)
        assert reply.headers["X-Kvgate-Chain"] == plain.headers["X-Kvgate-Chain"]
        assert fleet.requests[-1].json()["model"] == "smollm2"


def test_an_internal_redirect_out_of_kvgate_sends_the_clients_own_body(fleet):
    reply = requests.post(fleet.url + "/fails/v1/chat/completions", data=BODY, headers=JSON, timeout=120)
    assert reply.status_code == 200
    assert len(fleet.requests) == 1 and fleet.requests[0].body == BODY and kvgate_headers(fleet.requests[0]) == set()


def test_an_internal_redirect_within_kvgate_adds_the_ids_once(fleet):
    for size in (1, 400):  # in memory and in a file
        fleet.reset()
        body = json.dumps(chat(WORDS * size)).encode()
        reply = requests.post(fleet.url + "/redirects/v1/chat/completions", data=body, headers=JSON, timeout=120)
        assert reply.status_code == 200 and reply.headers["X-Kvgate-Reason"] in ROUTED
        request, = fleet.requests
        assert request.body.startswith(body[:-1] + b',"prompt_token_ids":[') and request.body.count(b"prompt_token_ids") == 1
        assert request.header("x-kvgate-fingerprint") == fleet.fingerprint


def test_unbuffered_request_bodies_and_another_balancer_work():
    with Fleet(2, location="proxy_request_buffering off;", edits=[(r"kvgate_balance;", "least_conn; kvgate_balance;")]) as fleet:
        for body in (BODY, json.dumps(chat(WORDS * 400)).encode()):
            for data in (body, (body[at:at + 1000] for at in range(0, len(body), 1000))):
                reply = requests.post(fleet.url + "/v1/chat/completions", data=data, headers=JSON, timeout=120)
                assert reply.status_code == 200 and reply.headers["X-Kvgate-Reason"] in ROUTED
        assert all(r.body.startswith(b'{"model"') and r.json()["prompt_token_ids"] for r in fleet.requests) and len(fleet.requests) == 4


def test_the_status_page_counts(fleet):
    before = fleet.gateway.status()
    fleet.post()
    requests.post(fleet.url + "/v1/chat/completions", data=b"{", headers=JSON, timeout=120)
    after = fleet.gateway.status()
    assert sum(after["reasons"][word] for word in ROUTED) == sum(before["reasons"][word] for word in ROUTED) + 1
    assert after["reasons"]["refused"] == before["reasons"]["refused"] + 1
    model, = after["models"]
    assert model["requests"] == before["models"][0]["requests"] + 1
    assert model["prompt_tokens"] > before["models"][0]["prompt_tokens"]
    assert [w["id"] for w in model["workers"]] == ["w1", "w2"] and model["block_size"] == 32
    assert requests.post(fleet.url + "/kvgate", timeout=120).status_code == 405


def test_the_log_has_the_times(fleet):
    fleet.post()
    wait_until(lambda: "/v1/chat/completions" in fleet.gateway.access_log(), 5, "the log line")
    line = [x for x in fleet.gateway.access_log().splitlines() if set(x.split()) & set(ROUTED)][-1].split()
    assert all(re.fullmatch(r"\d+\.\d{6}", field) for field in line[-3:-1]) and re.fullmatch(r"[0-9a-f]{32}|-", line[-1])


# ---- neighbours ----

NEIGHBOURS_HTTP = """
    gzip on; gzip_types application/json application/octet-stream; gzip_min_length 20;
    limit_req_zone $binary_remote_addr zone=slow:1m rate=1r/m;
    upstream other { server 127.0.0.1:OTHER; keepalive 4; }
"""
NEIGHBOURS = """
    location /private/ { auth_basic "x"; auth_basic_user_file PASSWORDS; kvgate on; proxy_pass http://workers/; }
    location /limited/ { limit_req zone=slow; kvgate on; proxy_pass http://workers/; }
    location /other/ { proxy_pass http://other/; error_page 503 = @sorry; proxy_intercept_errors on; }
    location @sorry { return 200 "sorry\\n"; }
    location /static/ { alias STATIC/; try_files $uri =404; }
    location /mirrored/ { mirror /mirror; kvgate on; proxy_pass http://workers/; }
    location /mirror { internal; proxy_pass http://other/mirror; }
"""


def test_neighbours_work_as_without_kvgate(tmp_path):
    os.chmod(tmp_path, 0o755)
    for folder in tmp_path.parents:
        if str(folder).startswith("/tmp/pytest"):
            os.chmod(folder, 0o755)
    (tmp_path / "passwords").write_text("ann:{PLAIN}secret\n")
    (tmp_path / "page.txt").write_text("a page " * 100)
    with FakeWorker("other") as other:
        server = NEIGHBOURS.replace("PASSWORDS", str(tmp_path / "passwords")).replace("STATIC", str(tmp_path))
        with Fleet(2, server=server, http=NEIGHBOURS_HTTP.replace("OTHER", str(other.port))) as fleet:
            url = fleet.url
            # authentication comes before any tokenizing
            before = fleet.gateway.status()
            assert requests.post(url + "/private/v1/chat/completions", json=chat(), timeout=120).status_code == 401
            assert fleet.gateway.status()["models"][0]["requests"] == before["models"][0]["requests"] and fleet.requests == []
            ann = {"Authorization": "Basic " + base64.b64encode(b"ann:secret").decode()}
            assert requests.post(url + "/private/v1/chat/completions", json=chat(), headers=ann, timeout=120).headers["X-Kvgate-Reason"] in ROUTED
            # so do limits
            codes = [requests.post(url + "/limited/v1/chat/completions", json=chat(), timeout=120).status_code for _ in range(3)]
            assert codes == [200, 503, 503] and len(fleet.requests) == 2
            # other upstreams and their error pages
            assert requests.post(url + "/other/v1/chat/completions", json=chat(), timeout=120).json()["worker"] == "other"
            assert other.requests[-1].json() == chat() and kvgate_headers(other.requests[-1]) == set()
            other.mode = "503"
            assert requests.get(url + "/other/x", timeout=120).text == "sorry\n"
            other.mode = "ok"
            # files, compression
            page = requests.get(url + "/static/page.txt", timeout=120)
            assert page.text == "a page " * 100 and page.headers["Content-Encoding"] == "gzip"
            assert requests.get(url + "/static/none", timeout=120).status_code == 404
            routed = requests.post(url + "/v1/chat/completions", json=chat(), timeout=120)
            assert routed.headers["Content-Encoding"] == "gzip" and routed.json()["object"] == "chat.completion"
            # subrequests
            assert requests.post(url + "/mirrored/v1/chat/completions", json=chat(), timeout=120).status_code == 200
            wait_until(lambda: other.requests[-1].path == "/mirror", 5, "the mirrored request")


def test_a_module_without_kvgate_directives_changes_nothing():
    with FakeWorker("w") as worker:
        edits = NO_MODEL + [(r"kvgate_zone [^;]*;", ""), (r"kvgate_redis [^;]*;", ""), (r"kvgate_redis_timeout [^;]*;", ""), (r"kvgate on;", ""),
                            (r"kvgate_balance;", ""), (r"kvgate_status;", "return 204;")]
        with Gateway(servers=[worker.addr], edits=edits) as gateway:
            assert requests.post(gateway.url + "/v1/chat/completions", data=BODY, headers=JSON, timeout=120).status_code == 200
            assert worker.requests[-1].body == BODY


def test_a_status_page_without_a_model_is_empty():
    with FakeWorker("w") as worker:
        edits = NO_MODEL + [(r"kvgate_zone [^;]*;", ""), (r"kvgate on;", "")]
        with Gateway(servers=[worker.addr], edits=edits) as gateway:
            assert gateway.status()["models"] == [] and gateway.status()["reasons"] == {}


def test_several_models_are_kept_apart():
    with Redis() as redis, FakeWorker("w1") as one, FakeWorker("w2") as two:
        with Gateway(redis, http=f"kvgate_model other {SMOLLM2} block_size=64;") as gateway:
            fingerprint = gateway.status()["models"][0]["fingerprint"]
            one.register(redis, fingerprint)
            two.register(redis, fingerprint, model="other", block=64)
            wait_until(lambda: gateway.workers() == ["w1", "w2"], 10, "both seen")
            for model, worker in (("smollm2", one), ("other", two)):
                reply = requests.post(gateway.url + "/v1/chat/completions", json={**chat(), "model": model}, timeout=120)
                assert reply.json()["worker"] == worker.name
                assert worker.requests[-1].json()["model"] == model
