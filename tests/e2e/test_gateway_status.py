"""What an operator sees: kvgate_status as JSON, for Prometheus and in a browser; the list of models; nginx's own errors as JSON."""
import html
import json
import os
import re
import shutil
import signal
import subprocess

import pytest
import requests

from gateway import ROUTED, Fleet, chat, raw_request
from stack import SMOLLM2, wait_until

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def fleet():
    extra = "location = /broken/ { kvgate on; error_page 500 @error; auth_request /none; proxy_pass http://workers; }\nlocation = /none { internal; return 502; }"
    with Fleet(2, http=f"kvgate_model other {SMOLLM2} alias=second alias=org/third;", server=extra) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def polite(fleet):
    fleet.reset()


def model(fleet, name="smollm2"):
    return next(m for m in fleet.gateway.status()["models"] if m["name"] == name)


# ---- JSON ----

def test_a_decision_is_shown_with_its_alternatives(fleet):
    text = "a decision to look at " * 30
    first = fleet.post(text)
    decision = model(fleet)["decisions"][0]
    assert decision["reason"] == first.headers["X-Kvgate-Reason"] == "tie"
    assert [c["worker"] for c in decision["choices"]][0] == first.headers["X-Kvgate-Worker"]
    assert sorted(c["worker"] for c in decision["choices"]) == ["w1", "w2"]
    assert decision["choices"][0]["cost"] >= 8 * decision["prompt_tokens"] > 8 * 100
    fleet.post(text)
    again = model(fleet)["decisions"][0]
    assert again["number"] == decision["number"] + 1 and again["reason"] == "prefix"
    assert again["choices"][0]["hit_tokens"] > 0 and again["choices"][0]["cost"] < again["choices"][1]["cost"]


def test_at_most_64_decisions_are_kept_newest_first(fleet):
    for i in range(70):
        fleet.post("short", max_tokens=i + 1)
    numbers = [d["number"] for d in model(fleet)["decisions"]]
    assert len(numbers) == 64 and numbers == list(range(numbers[0], numbers[0] - 64, -1))
    assert numbers[0] == model(fleet)["requests"] or numbers[0] <= model(fleet)["requests"]


def test_what_each_worker_served_is_counted(fleet):
    before = {w["id"]: w["served"] for w in model(fleet)["workers"]}
    replies = [fleet.post(f"conversation {i} " * 40) for i in range(12)]
    after = {w["id"]: w["served"] for w in model(fleet)["workers"]}
    for name in ("w1", "w2"):
        n = sum(r.headers["X-Kvgate-Worker"] == name for r in replies)
        assert after[name]["requests"] - before[name]["requests"] == n
        assert (after[name]["prompt_tokens"] > before[name]["prompt_tokens"]) == (n > 0)
        assert after[name]["failures"] == before[name]["failures"]
    assert all(w["in_flight"] == 0 for w in model(fleet)["workers"])


def test_failures_and_requests_in_flight_are_seen(fleet):
    failures = lambda: sum(w["served"]["failures"] for w in model(fleet)["workers"])  # noqa: E731
    before = failures()
    for worker in fleet.workers:
        worker.mode = "500"
    assert fleet.post().status_code == 500
    assert failures() == before + 1 == model(fleet)["served"]["failures"]
    for worker in fleet.workers:
        worker.mode, worker.events, worker.interval = "sse", 1000, 0.05
    with requests.post(fleet.url + "/v1/chat/completions", json=chat(stream=True), stream=True, timeout=120) as reply:
        pieces = reply.iter_content(None)
        next(pieces)
        assert sum(w["in_flight"] for w in model(fleet)["workers"]) == 1
    wait_until(lambda: sum(w["in_flight"] for w in model(fleet)["workers"]) == 0, 10, "the client's leaving counted")


def usage(cached):
    return {"prompt_tokens": 300, "completion_tokens": 1, "total_tokens": 301, "prompt_tokens_details": {"cached_tokens": cached}}


@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_what_the_worker_found_is_read_from_its_usage(fleet, step):
    """In whatever pieces the reply comes, and not from what the model wrote."""
    before = model(fleet)["served"]["told"]
    text = 'the text {"cached_tokens":99999} and the like'
    body = json.dumps({"choices": [{"message": {"content": text}}], "usage": usage(123)}, separators=(",", ":"))
    for worker in fleet.workers:
        worker.mode, worker.pieces = "pieces", [body[at:at + step].encode() for at in range(0, len(body), step)]
    assert fleet.post().json()["choices"][0]["message"]["content"] == text
    served = model(fleet)["served"]["told"]
    assert served["requests"] == before["requests"] + 1 and served["cached_tokens"] == before["cached_tokens"] + 123
    assert model(fleet)["decisions"][0]["cached_tokens"] == 123


def test_a_reply_that_does_not_tell_is_not_counted_as_zero(fleet):
    before = model(fleet)["served"]
    fleet.post()
    after = model(fleet)["served"]
    assert after["requests"] == before["requests"] + 1 and after["told"] == before["told"]
    assert model(fleet)["decisions"][0]["cached_tokens"] is None


# ---- Prometheus ----

def scrape(fleet, **kwargs):
    reply = requests.get(fleet.url + "/kvgate", timeout=120, **kwargs)
    assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    return reply.text


SAMPLE = re.compile(r'([a-z_]+)(\{[a-z_]+="(?:[^"\\\n]|\\.)*"(?:,[a-z_]+="(?:[^"\\\n]|\\.)*")*\})? ([-+0-9.e]+|\+Inf)')


def test_prometheus_reads_every_line(fleet):
    fleet.post()
    helped, typed, seen = set(), {}, set()
    for line in scrape(fleet, params={"format": "prometheus"}).splitlines():
        if line.startswith("# HELP "):
            helped.add(line.split()[2])
        elif line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            assert name not in typed and name in helped and kind in ("counter", "gauge", "histogram")
            typed[name] = kind
        else:
            name, labels, _ = SAMPLE.fullmatch(line).groups()
            base = re.sub("_(bucket|sum|count)$", "", name) if typed.get(re.sub("_(bucket|sum|count)$", "", name)) == "histogram" else name
            assert base in typed and (typed[base] != "counter" or base.endswith("_total"))
            assert (name, labels) not in seen
            seen.add((name, labels))
    status = fleet.gateway.status()
    text = scrape(fleet, headers={"Accept": "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"})
    for word, n in status["reasons"].items():
        assert f'kvgate_nginx_decisions_total{{reason="{word}"}} {n}\n' in text
    assert f'kvgate_nginx_requests_total{{model="smollm2"}} {model(fleet)["requests"]}\n' in text
    assert 'kvgate_nginx_worker_ready{model="smollm2",worker="w1"} 1\n' in text
    assert f'kvgate_nginx_lookup_seconds_count {sum(status["reasons"][w] for w in ROUTED)}\n' in text


def test_the_histogram_grows_monotonously(fleet):
    buckets = [int(n) for n in re.findall(r'kvgate_nginx_tokenize_seconds_bucket\{le="[^"]+"\} (\d+)', scrape(fleet, params={"format": "prometheus"}))]
    assert len(buckets) == 12 and buckets == sorted(buckets) and buckets[-1] > 0


def test_json_is_what_a_plain_client_gets(fleet):
    for headers in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
        reply = requests.get(fleet.url + "/kvgate", headers=headers, timeout=120)
        assert reply.headers["Content-Type"] == "application/json" and reply.json()["models"]
        assert reply.headers["Vary"] == "Accept" and reply.headers["Cache-Control"] == "no-store"
    assert requests.head(fleet.url + "/kvgate", timeout=120).status_code == 200


# ---- the page ----

def test_a_browser_gets_the_page(fleet):
    reply = requests.get(fleet.url + "/kvgate", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}, timeout=120)
    assert reply.headers["Content-Type"] == "text/html; charset=utf-8" and reply.text.startswith("<!doctype html>") and reply.text.endswith("</html>\n")
    assert requests.get(fleet.url + "/kvgate?format=html", timeout=120).text == reply.text


def test_an_unknown_format_is_refused_with_the_known_ones(fleet):
    for format in ("xml", "", "htm"):
        reply = requests.get(fleet.url + f"/kvgate?format={format}", timeout=120)
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["message"] == "format must be json, prometheus or html" and error["param"] == "format"


def chromium(folder, *args):
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={folder}/profile",
               "--disable-background-networking", "--window-size=1280,1100", "--virtual-time-budget=4000", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_the_page_in_chromium_shows_workers_and_why(fleet, tmp_path):
    """Also what others wrote into Redis stays text."""
    name = fleet.post("what the page shows " * 60).headers["X-Kvgate-Worker"]
    fleet.post("what the page shows " * 60)
    key, evil = "kvgate:{smollm2}:w:w2", fleet.workers[1].addr + "<img src=x onerror=document.title='hacked'>"
    fleet.redis.client().hset(key, "addr", evil)
    wait_until(lambda: evil in [w["addr"] for w in model(fleet)["workers"]], 10, "the forged address seen")
    dom = chromium(tmp_path, "--dump-dom", fleet.url + "/kvgate?format=html").stdout
    text = re.sub(r"\s+", " ", re.sub(r"<script>.*?</script>|<style>.*?</style>|<[^>]+>", " ", dom, flags=re.S))
    assert "loading" not in text and "no answer from the gateway" not in text, text
    assert "w1 ready 127.0.0.1:" in text and "w2 ready 127.0.0.1:" in text
    assert re.search(rf"{name} prefix [\d,]+ [\d,]+ – [\d.]+ [\d.]+ holds [\d,]+ of [\d,]+ tokens; cost [\d,]+, w[12] [\d,]+", text), text
    assert "rendezvous order among near-equals" in text
    assert "hacked" in html.unescape(text) and "hacked" not in re.search(r"<title>(.*?)</title>", dom).group(1)
    fleet.redis.client().hset(key, "addr", fleet.workers[1].addr)
    wait_until(lambda: evil not in [w["addr"] for w in model(fleet)["workers"]], 10, "the own address again")
    for scheme in ("light", "dark"):
        path = os.path.join(os.environ.get("SCREENSHOTS") or tmp_path, f"status-{scheme}.png")
        done = chromium(tmp_path, f"--blink-settings=preferredColorScheme={int(scheme == 'light')}", f"--screenshot={path}", fleet.url + "/kvgate?format=html")
        assert os.path.getsize(path) > 10_000, done.stderr


# ---- models ----

def test_all_models_are_listed_by_the_gateway_itself(fleet):
    os.kill(fleet.redis.pid, signal.SIGSTOP)
    try:
        reply = requests.get(fleet.url + "/v1/models", timeout=120).json()
    finally:
        os.kill(fleet.redis.pid, signal.SIGCONT)
    assert reply["object"] == "list" and fleet.requests == []
    assert [(m["id"], m["root"]) for m in reply["data"]] == [("other", "other"), ("second", "other"), ("org/third", "other"), ("smollm2", "smollm2")]
    assert all(m["object"] == "model" and m["created"] > 1e9 and m["owned_by"] == "kvgate" for m in reply["data"])


def test_one_model_by_its_name_or_alias(fleet):
    for name, root in (("smollm2", "smollm2"), ("org/third", "other")):
        reply = requests.get(f"{fleet.url}/v1/models/{name}", timeout=120)
        assert reply.status_code == 200 and (reply.json()["id"], reply.json()["root"]) == (name, root)
    for name in ("smollm", "smollm2x", "x" * 1000, "%22%3Cb%3E"):
        reply = requests.get(f"{fleet.url}/v1/models/{name}", timeout=120)
        assert reply.status_code == 404 and reply.json()["error"]["code"] == "model_not_found", name
    assert fleet.requests == []


def test_a_path_that_only_begins_so_goes_to_a_worker(fleet):
    assert requests.get(fleet.url + "/v1/modelsx", timeout=120).json()["worker"] in ("w1", "w2")
    assert requests.post(fleet.url + "/v1/models", timeout=120).json()["worker"] in ("w1", "w2")


# ---- nginx's own errors ----

def test_nginxs_own_errors_are_json(fleet):
    def error(status, reply):
        code, headers, body = reply
        assert code == status and headers["content-type"] == "application/json", (code, headers, body)
        return json.loads(body)["error"]
    post = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    big = error(413, raw_request(fleet.gateway.port, f"{post}Content-Length: 99999999\r\n\r\n".encode()))
    assert big == {"message": "the request body is larger than this gateway accepts", "type": "invalid_request_error", "param": None, "code": "request_too_large"}
    for worker in fleet.workers:
        worker.mode = "reset"
    body = json.dumps(chat())
    gone = error(502, raw_request(fleet.gateway.port, f"{post}Content-Length: {len(body)}\r\n\r\n{body}".encode()))
    assert gone["type"] == "server_error" and gone["code"] == "bad_gateway"
    chunked = error(400, raw_request(fleet.gateway.port, f"{post}Transfer-Encoding: chunked\r\n\r\nxyz\r\n".encode()))
    assert chunked["code"] == "bad_request"
    broken = error(500, raw_request(fleet.gateway.port, b"GET /broken/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
    assert broken == {"message": "the gateway failed", "type": "server_error", "param": None, "code": "internal_error"}
