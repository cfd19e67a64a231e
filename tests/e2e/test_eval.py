"""kvgate-eval and kvgate-score as programs: scripted endpoints with a known loss, toy models with a planted one, a real model."""
import http.server
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import xml.dom.minidom

import numpy as np
import pytest

import toy_model
from conftest import BUILD, MODELS, ROOT
from stack import SMOLLM2

EVAL, SCORE = os.path.join(BUILD, "kvgate-eval"), os.path.join(BUILD, "kvgate-score")


class Endpoint:
    """Answers "item N" with the right word but for every item whose number is in `wrong`; counts what runs at once."""

    def __init__(self, wrong=(), delay=0.0, fail_after=None, raw=None):
        self.wrong, self.delay, self.fail_after, self.raw = set(wrong), delay, fail_after, raw  # raw: the bytes of every answer
        self.asked, self.running, self.most, self.lock = [], 0, 0, threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def reply(self, value, status=200):
                raw = outer.raw if outer.raw is not None and self.command == "POST" else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def do_GET(self):
                self.reply({"data": [{"id": "scripted"}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.running += 1
                    outer.most = max(outer.most, outer.running)
                    outer.asked.append(body)
                    refused = outer.fail_after is not None and len(outer.asked) > outer.fail_after
                time.sleep(outer.delay)
                with outer.lock:
                    outer.running -= 1
                if refused:
                    return self.reply({"error": {"message": "told to fail"}}, 400)
                if "messages" in body:  # as a judge
                    agrees = "Answer to judge:\nright" in body["messages"][0]["content"]
                    return self.reply({"choices": [{"message": {"content": "Yes." if agrees else "No."}}]})
                number = int(body["prompt"].split()[1])
                self.reply({"choices": [{"text": "wrong" if number in outer.wrong else "right"}]})

        class Server(http.server.ThreadingHTTPServer):
            request_queue_size = 128

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def task_file(folder, n):
    path = str(folder / "task.jsonl")
    with open(path, "w") as file:
        for i in range(n):
            file.write(json.dumps({"id": i, "prompt": f"item {i}", "answer": "right", "matcher": "exact"}) + "\n")
    return path


def evaluate(*flags, timeout=300, env=None):
    return subprocess.run([sys.executable, EVAL, *map(str, flags)], cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=env)


def report(folder):
    return json.load(open(folder / "report.json"))


@pytest.mark.parametrize("n, worse, verdict, words", [
    (600, range(0), "within 1 %", "Within 1 % of the base"),
    (600, range(30, 90), "worse", "Worse than the base"),
    (20, range(0), "cannot tell", "Cannot tell with this many items (20 items)"),
])
def test_the_verdict_follows_what_the_endpoints_answer(n, worse, verdict, words, tmp_path):
    with Endpoint(wrong=range(10)) as base, Endpoint(wrong=[*range(10), *worse]) as model:
        done = evaluate("--endpoint", model.url, "--base-endpoint", base.url, "--task", task_file(tmp_path, n), "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    out = report(tmp_path / "out")
    assert out["comparison"]["verdict"] == verdict
    assert out["runs"]["base"]["score"] == pytest.approx((n - 10) / n)
    assert out["runs"]["model"]["score"] == pytest.approx((n - 10 - len(worse)) / n)
    assert words in done.stdout and words in open(tmp_path / "out" / "report.md").read()
    svg = xml.dom.minidom.parse(str(tmp_path / "out" / "chart.svg"))
    assert svg.documentElement.tagName == "svg" and verdict in svg.toxml()
    assert re.search(rf"model \[#+\] {n}/{n}", done.stderr)


def test_requests_run_at_once(tmp_path):
    with Endpoint(delay=0.05) as endpoint:
        done = evaluate("--endpoint", endpoint.url, "--task", task_file(tmp_path, 64), "--out", tmp_path / "out", "--concurrency", 8)
    assert done.returncode == 0, done.stderr
    assert 5 <= endpoint.most <= 8


def test_an_interrupted_run_goes_on_where_it_ended(tmp_path):
    task = task_file(tmp_path, 100)
    flags = ["--task", task, "--out", tmp_path / "out", "--concurrency", 4]
    with Endpoint(fail_after=40) as endpoint:
        done = evaluate("--endpoint", endpoint.url, *flags)
        assert done.returncode == 3 and "60 of 100 requests have no answer" in done.stderr
        assert not os.path.exists(tmp_path / "out" / "report.json")
        endpoint.fail_after, endpoint.asked = None, []
        done = evaluate("--endpoint", endpoint.url, *flags)
    assert done.returncode == 0, done.stderr
    assert len(endpoint.asked) == 60 and report(tmp_path / "out")["runs"]["model"]["items"] == 100


def test_a_killed_run_goes_on_where_it_ended(tmp_path):
    flags = ["--task", task_file(tmp_path, 60), "--out", tmp_path / "out", "--concurrency", 4]
    with Endpoint(delay=0.05) as endpoint:
        child = subprocess.Popen([sys.executable, EVAL, "--endpoint", endpoint.url, *map(str, flags)], stderr=subprocess.DEVNULL)
        while len(endpoint.asked) < 20 and child.poll() is None:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
        kept = len(open(tmp_path / "out" / "model.jsonl").readlines()) - 1
        endpoint.asked = []
        done = evaluate("--endpoint", endpoint.url, *flags)
    assert done.returncode == 0, done.stderr
    assert 0 < kept < 60 and len(endpoint.asked) == 60 - kept


def test_another_run_in_the_folder_is_refused(tmp_path):
    with Endpoint() as endpoint:
        flags = ["--endpoint", endpoint.url, "--task", task_file(tmp_path, 4), "--out", tmp_path / "out"]
        assert evaluate(*flags).returncode == 0
        done = evaluate(*flags, "--seed", 2)
        assert done.returncode == 1 and "of another run (seed: 1 / 2)" in done.stderr
        assert evaluate(*flags, "--seed", 2, "--fresh").returncode == 0


def test_a_run_with_other_flags_of_its_worker_is_another_run(tmp_path):
    """Else its answers would be taken for those of the flags given now."""
    toy_model.scripted(str(tmp_path / "m.gguf"), *(lambda v: (v, toy_model.chain(v, ["\n", "right", v.eos])))(toy_model.Vocabulary(pieces=["right"])))
    flags = ["--model", tmp_path / "m.gguf", "--task", task_file(tmp_path, 3), "--out", tmp_path / "out", "--max-tokens", 4, "--threads", 1]
    assert evaluate(*flags).returncode == 0
    done = evaluate(*flags, "--worker-flags", "--kv-cache-dtype int8")
    assert done.returncode == 1 and "worker_flags: None / --kv-cache-dtype int8" in done.stderr


@pytest.mark.parametrize("raw", [b"<html>", b"[1]", b'{"choices": []}', b'{"choices": [{"text": 5}]}', b'{"error": "x"}', b"[" * 100000])
def test_a_reply_that_is_no_completion_leaves_the_item_unanswered(raw, tmp_path):
    with Endpoint(raw=raw) as endpoint:
        done = evaluate("--endpoint", endpoint.url, "--task", task_file(tmp_path, 3), "--out", tmp_path / "out")
    assert done.returncode == 3 and "3 of 3 requests have no answer" in done.stderr and "Traceback" not in done.stderr


def test_half_a_surrogate_in_an_answer_is_an_answer(tmp_path):
    with Endpoint(raw=b'{"choices": [{"text": "right \\ud83d"}]}') as endpoint:
        done = evaluate("--endpoint", endpoint.url, "--task", task_file(tmp_path, 2), "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert json.loads(open(tmp_path / "out" / "model.jsonl").readlines()[1])["output"] == "right \ufffd"


def test_damaged_results_are_refused_before_anything_is_asked(tmp_path):
    with Endpoint() as endpoint:
        flags = ["--endpoint", endpoint.url, "--task", task_file(tmp_path, 3), "--out", tmp_path / "out"]
        assert evaluate(*flags).returncode == 0
        for line in ('{"item": "7", "sample": 0, "score": 1.0}', '{"item": "1", "sample": 4, "score": 1.0}', '{"item": ["1"]}', '{"item": "1", "sample": 0}'):
            kept = open(tmp_path / "out" / "model.jsonl").read()
            open(tmp_path / "out" / "model.jsonl", "a").write(line + "\n")
            done = evaluate(*flags)
            assert done.returncode == 1 and "damaged" in done.stderr and "Traceback" not in done.stderr
            open(tmp_path / "out" / "model.jsonl", "w").write(kept)
        assert len(endpoint.asked) == 3


def test_several_samples_give_pass_at_k(tmp_path):
    with Endpoint(wrong=range(5)) as endpoint:
        done = evaluate("--endpoint", endpoint.url, "--task", task_file(tmp_path, 10), "--out", tmp_path / "out", "--samples", 3, "--k", "1,3")
    assert done.returncode == 0, done.stderr
    assert report(tmp_path / "out")["runs"]["model"]["pass"] == {"1": 0.5, "3": 0.5}
    assert sorted({body["seed"] for body in endpoint.asked}) == [1, 2, 3] and endpoint.asked[0]["temperature"] == 0.8


def test_a_judge_decides_by_yes_or_no(tmp_path):
    with Endpoint(wrong=[2]) as endpoint:
        path = tmp_path / "task.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"item {i}", "answer": "the right one", "matcher": {"type": "judge", "endpoint": endpoint.url}}) + "\n"
                                for i in (1, 2, 3)))
        done = evaluate("--endpoint", endpoint.url, "--task", path, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert report(tmp_path / "out")["runs"]["model"]["score"] == pytest.approx(2 / 3)
    asked = [body["messages"][0]["content"] for body in endpoint.asked if "messages" in body]
    assert len(asked) == 3 and all("Reference answer:\nthe right one" in text for text in asked)


@pytest.mark.parametrize("flags, word", [
    ([], "--task"),
    (["--task", "arithmetic"], "one of --model FILE and --endpoint URL"),
    (["--task", "kl", "--model", "x", "--text", "y"], "needs --base"),
    (["--task", "perplexity", "--endpoint", "http://x"], "needs --model"),
    (["--task", "arithmetic", "--endpoint", "http://x", "--samples", "0"], "--samples must be at least 1, got 0"),
    (["--task", "humaneval", "--endpoint", "http://x", "--k", "10"], "pass@10 needs --samples 10"),
])
def test_bad_flags_are_named(flags, word):
    done = evaluate(*flags)
    assert done.returncode == 2 and word in done.stderr


def test_a_model_that_is_no_file_ends_with_the_workers_own_words(tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"FUGG" * 10)
    done = evaluate("--model", tmp_path / "bad.gguf", "--task", "arithmetic", "--items", 2, "--out", tmp_path / "out")
    assert done.returncode == 1 and "did not start" in done.stderr and "bad.gguf" in done.stderr


def ask_own_worker(tmp_path, *flags, **variables):
    toy_model.script_text(str(tmp_path / "model.gguf"), "fo|ur")
    (tmp_path / "task.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "4?"}], "answer": "four"}) + "\n")
    return evaluate("--model", tmp_path / "model.gguf", "--task", tmp_path / "task.jsonl", "--max-tokens", 8, "--out", tmp_path / "out", "--worker-flags",
                    " ".join(["--kv-cache-memory 64M", *flags]), timeout=60, env={**os.environ, **variables})


def test_an_api_key_of_other_endpoints_does_not_lock_the_own_worker(tmp_path):
    done = ask_own_worker(tmp_path, KVGATE_API_KEY="secret")
    assert done.returncode == 0, done.stderr
    assert report(tmp_path / "out")["runs"]["model"]["score"] == 1.0


def test_an_own_worker_that_wants_a_key_is_refused_at_once(tmp_path):
    done = ask_own_worker(tmp_path, "--api-key secret")
    assert done.returncode == 1 and "401" in done.stderr and "--api-key" in done.stderr


# ---- log-probabilities -----------------------------------------------------------------------------------------------------

SHAPE = toy_model.Shape(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=96)


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """base and copies of it: the same weights, some of them disturbed."""
    folder = tmp_path_factory.mktemp("toys")

    def disturbed(amount):
        def edit(tensors):
            rng = np.random.default_rng(5)
            for t in tensors:
                if t.name.endswith("ffn_down.weight"):
                    values = np.frombuffer(t.data, "<f4")
                    t.data = (values + amount * values.std() * rng.standard_normal(values.size).astype("f4")).astype("<f4").tobytes()
            return tensors
        return edit
    paths = {}
    for name, amount in (("base", 0), ("slightly", 0.02), ("badly", 2.0)):
        paths[name] = str(folder / f"{name}.gguf")
        toy_model.random_model(paths[name], shape=SHAPE, seed=3, edit=disturbed(amount))
    rng = random.Random(1)
    paths["text"] = str(folder / "text.txt")
    open(paths["text"], "w").write("".join(rng.choice("abcdefgh ijk") for _ in range(20000)))
    return paths


def score(*flags):
    done = subprocess.run([SCORE, *map(str, flags)], capture_output=True, text=True, timeout=300)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def test_a_disturbed_model_diverges_by_how_much_it_is_disturbed(toys):
    kl = {}
    for name in ("base", "slightly", "badly"):
        code, lines, err = score("--model", toys[name], "--base", toys["base"], "--text", toys["text"], "--context", 64, "--skip", 8, "--tokens", 400)
        assert code == 0, err
        kl[name] = sum(line["kl"] for line in lines[1:]) / sum(line["tokens"] for line in lines[1:])
        if name == "base":
            assert all(line["same_top"] == line["tokens"] and line["nll"] == line["base_nll"] for line in lines[1:])
    assert abs(kl["base"]) < 1e-9 and 1e-9 < kl["slightly"] < kl["badly"] / 100


def test_several_models_share_a_base(toys):
    flags = ["--base", toys["base"], "--text", toys["text"], "--context", 64, "--skip", 8, "--tokens", 200]
    names = ["badly", "base", "slightly"]
    code, lines, err = score(*(word for name in names for word in ("--model", toys[name])), *flags)
    assert code == 0, err
    for i, name in enumerate(names):
        alone = score("--model", toys[name], *flags)[1]
        assert [{key: value for key, value in line.items() if key != "model"} for line in lines[1:] if line["model"] == i] == alone[1:]
    assert len(lines) == 1 + 3 * lines[0]["windows"]


def test_windows_can_be_had_one_by_one(toys):
    flags = ["--model", toys["base"], "--text", toys["text"], "--context", 64, "--skip", 8, "--tokens", 300]
    whole, rest = score(*flags)[1], score(*flags, "--from", 3)[1]
    assert whole[0]["windows"] == len(whole) - 1 == 6
    assert rest[1:] == whole[4:]


def test_log_probabilities_are_those_of_the_logits(toys, tmp_path):
    """Against tests/tools/logits, which sums in f64, on the ids that kvgate-score takes."""
    model = toys["base"]
    request = open(toys["text"], "rb").read()[:4000]
    encoded = subprocess.run([os.path.join(BUILD, "tests/tools/encode"), model], input=len(request).to_bytes(8, "little")[:4].join([b"\0\0\0\0", request]),
                             capture_output=True, check=True, timeout=60).stdout
    ids = np.frombuffer(encoded, "<u4")[1:]
    code, lines, err = score("--model", model, "--text", toys["text"], "--context", 40, "--skip", 9, "--tokens", 1, "--cpu-isa", "generic")
    assert code == 0, err
    bos = toy_model.Vocabulary().bos if lines and has_bos(model) else None
    window = np.array(([bos] if bos is not None else []) + ids[:40 - (bos is not None)].tolist(), "<u4")
    picks = np.zeros((31, 64), "<u4")
    picks[:30, 0] = window[10:40]
    window.tofile(tmp_path / "ids")
    picks.tofile(tmp_path / "picks")
    subprocess.run([os.path.join(BUILD, "tests/tools/logits"), model, tmp_path / "ids", tmp_path / "picks", tmp_path / "out", "40", "9", "generic"], check=True,
                   timeout=60)
    got = np.fromfile(tmp_path / "out", "<f4").reshape(-1, 66)[:30, 0]
    assert lines[1]["tokens"] == 30
    assert lines[1]["nll"] == pytest.approx(-float(got.sum()), abs=1e-3)


def has_bos(model):
    import gguf
    field = gguf.GGUFReader(model).fields.get("tokenizer.ggml.add_bos_token")
    return bool(field and field.contents())


@pytest.mark.parametrize("name, verdict", [("badly", "worse"), ("base", "within 1 %")])
def test_kl_of_a_planted_worse_model(name, verdict, toys, tmp_path):
    flags = ["--model", toys[name], "--base", toys["base"], "--task", "kl", "--text", toys["text"], "--context", 64, "--skip", 8, "--tokens", 1500, "--out",
             tmp_path / "out"]
    done = evaluate(*flags)
    assert done.returncode == 0, done.stderr
    out = report(tmp_path / "out")
    # Random weights predict nothing: a disturbed copy is as bad on the text, and the divergence alone shows it.
    assert out["comparison"]["kl"] > 0.01 if name == "badly" else out["comparison"]["kl"] < 1e-9
    assert out["comparison"]["windows"] >= 20 and "KL(base, model)" in done.stdout
    assert name == "badly" or out["comparison"]["verdict"] == verdict
    lines = open(tmp_path / "out" / "windows.jsonl").readlines()
    open(tmp_path / "out" / "windows.jsonl", "w").writelines(lines[:9])
    assert evaluate(*flags).returncode == 0
    assert open(tmp_path / "out" / "windows.jsonl").readlines() == lines


def test_models_of_other_vocabularies_are_not_compared(toys, tmp_path):
    other = str(tmp_path / "other.gguf")
    toy_model.random_model(other, toy_model.Vocabulary(pieces=["zz", "yy"]), SHAPE, seed=3)
    code, _, err = score("--model", toys["base"], "--base", other, "--text", toys["text"], "--context", 64, "--skip", 8)
    assert code == 1 and "not the same vocabulary" in err


def test_a_text_beyond_a_models_vocabulary_is_refused(tmp_path):
    """Its last token is a window's last as well: it is predicted and never read."""
    shape, bare = toy_model.Shape(layers=1), {"control": (), "eos": None}
    toy_model.random_model(str(tmp_path / "bytes.gguf"), toy_model.Vocabulary(**bare), shape)
    toy_model.random_model(str(tmp_path / "more.gguf"), toy_model.Vocabulary(words=["zz"], **bare), shape)
    (tmp_path / "text.txt").write_text("abczz" * 4)
    for flags in (["--model", "more.gguf", "--base", "bytes.gguf"], ["--model", "more.gguf", "--model", "bytes.gguf"]):
        command = [SCORE, *flags, "--text", "text.txt", "--context", "4", "--skip", "0", "--tokens", "6"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 1 and done.stdout == ""
        assert "bytes.gguf" in done.stderr and "token 256" in done.stderr and "not the same vocabulary" in done.stderr


def test_logits_that_are_no_numbers_end_the_run(toys, tmp_path):
    """Its weights are numbers, their products are not."""
    def edit(tensors):
        for t in tensors:
            if t.name in ("output.weight", "output_norm.weight"):
                t.data = np.full(len(t.data) // 4, 3e38, "<f4").tobytes()
        return tensors
    toy_model.random_model(str(tmp_path / "m.gguf"), shape=SHAPE, seed=3, edit=edit)
    code, lines, err = score("--model", tmp_path / "m.gguf", "--text", toys["text"], "--context", 64, "--skip", 8, "--tokens", 100)
    assert code == 1 and len(lines) == 1 and "no finite numbers" in err


def test_lines_that_cannot_be_written_are_a_failure(toys):
    command = [SCORE, "--model", toys["base"], "--text", toys["text"], "--context", "64", "--skip", "8", "--tokens", "100"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100)
    assert done.returncode == 1 and "stdout" in done.stderr


@pytest.mark.parametrize("flags, status, word", [
    (["--text", "/nowhere"], 1, "/nowhere"),
    (["--context", "64", "--skip", "63"], 2, "--skip"),
    (["--context", "x"], 2, "whole number"),
    (["--colour", "x"], 2, "--colour"),
    (["--tokens"], 2, "needs a value"),
    (["--model", "/nowhere"] * 16, 2, "one model too many"),
])
def test_score_names_what_is_wrong(flags, status, word, toys):
    code, _, err = score("--model", toys["base"], "--text", toys["text"], *flags)
    assert code == status and word in err and len(err.splitlines()) == 1


def test_score_without_flags_shows_them_and_ends_with_2():
    code, lines, err = score()
    assert code == 2 and not lines and "--model FILE" in err and "--text FILE" in err


def test_a_planted_worse_model_is_found_through_workers_of_its_own(tmp_path):
    paths = {}
    for name, text in (("base", "fo|ur"), ("worse", "fi|ve"), ("same", "fo|ur")):
        paths[name] = str(tmp_path / f"{name}.gguf")
        toy_model.script_text(paths[name], text)
    task = tmp_path / "task.jsonl"
    task.write_text("".join(json.dumps({"messages": [{"role": "user", "content": f"{i}?"}], "answer": "four"}) + "\n" for i in range(600)))
    for name, verdict in (("worse", "worse"), ("same", "within 1 %")):
        done = evaluate("--model", paths[name], "--base", paths["base"], "--task", task, "--max-tokens", 8, "--out", tmp_path / name, "--worker-flags",
                        "--kv-cache-memory 64M")
        assert done.returncode == 0, done.stderr
        assert report(tmp_path / name)["runs"]["base"]["score"] == 1.0
        assert report(tmp_path / name)["comparison"]["verdict"] == verdict


def test_a_real_model_through_a_worker_of_its_own(tmp_path):
    done = evaluate("--model", SMOLLM2, "--task", "arithmetic", "--items", 8, "--max-tokens", 16, "--out", tmp_path / "out", "--worker-flags",
                    "--kv-cache-memory 256M")
    assert done.returncode == 0, done.stderr
    out = report(tmp_path / "out")
    assert out["runs"]["model"]["items"] == 8 and set(out["runs"]["model"]["groups"]) == {"sum", "product", "chain", "word"}


@pytest.mark.long
def test_humaneval_on_a_coding_model(tmp_path):
    done = evaluate("--model", os.path.join(MODELS, "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"), "--task", "humaneval", "--items", 20, "--out", tmp_path / "out",
                    timeout=800)
    assert done.returncode == 0, done.stderr
    out = report(tmp_path / "out")
    assert out["runs"]["model"]["pass"]["1"] > 0.3
    assert {"network", "filter"} & set(out["protections"])
