"""bench-cpu's arithmetic, and its rows on a toy model without any peer, so that it works when somebody needs its numbers."""
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import bench_cpu  # noqa: E402
import engines  # noqa: E402
import gguf_to_hf  # noqa: E402
import table  # noqa: E402
import toy_model  # noqa: E402

TOY = engines.Model("toy", "toy", "toy.gguf", 512)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("bench") / "toy.gguf")
    toy_model.random_model(path, shape=toy_model.Shape(layers=2, heads=4, kv_heads=2), types="Q8_0", seed=3)
    return type("ToyModel", (), {"key": "toy", "label": "toy", "context": 512, "path": path})()


@pytest.fixture(scope="module")
def worker(toy):
    engine = engines.Kvgate(toy)
    engine.KV = "16M"
    with engine:
        yield engine


def test_a_ratio_above_one_is_better_for_rates_and_for_times():
    assert table.row("r", "t/s", [10, 20, 30], "p", [10, 10, 10])["ratio"] == 2
    assert table.row("r", "ms", [10, 20, 30], "p", [100, 100, 100], high=False)["ratio"] == 5
    assert table.row("r", "ms", [4], limit=2, high=False)["share"] == 0.5
    assert table.row("r", "t/s", [4], limit=8)["share"] == 0.5


def test_an_aim_against_a_missing_peer_is_not_reached():
    aim = table.at_least(1.5)
    assert table.row("r", "t/s", [30], "p", [10], aim=aim)["reached"] is True
    assert table.row("r", "t/s", [30], "p", [25], aim=aim)["reached"] is False
    row = table.row("r", "t/s", [30], "p", None, aim=aim)
    assert row["reached"] is False and row["ratio"] is None
    assert table.cells(row)[3] == "not reached"
    assert "MISSED" in table.text([row])


def test_every_contestant_is_first_in_turn():
    order = []
    out = table.alternate({name: lambda name=name: order.append(name) or len(order) for name in "abc"}, 3)
    assert "".join(order) == "abcbcacab"
    assert out == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_a_slow_peer_has_one_turn_and_the_ratio_is_of_the_runs_both_have():
    now = iter(range(0, 1000, 5))  # each contestant's turn takes five seconds
    out = table.alternate({name: lambda: 1 for name in "abc"}, 3, slow=4, clock=lambda: next(now))
    assert out == {"a": [1, 1, 1], "b": [1], "c": [1]}
    row = table.row("r", "t/s", [10, 20, 30], "b", [10], aim=table.at_least(1))
    assert row["ratio"] == 1 and row["peer_value"] == 10 and row["peer_runs"] == 1 and row["reached"] is True


def test_what_was_best_for_a_peer_is_remembered(tmp_path):
    path = str(tmp_path / "run" / "choices.json")
    engines.Choices(path).put("llama, decode", "off")
    engines.Choices(path).put("llama, prompts", "on")
    assert engines.Choices(path).get("llama, decode") == "off" and engines.Choices(path).get("other") is None


def sleeper():
    """A process in a group of its own, with a child."""
    return subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)


def test_a_held_server_stops_and_goes_on_with_its_children():
    with sleeper() as process:
        try:
            deadline = time.monotonic() + 10
            while len(engines.tree(process.pid)) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            members = engines.signal_tree(process.pid, signal.SIGSTOP)
            assert len(members) == 2
            state = lambda pid: open(f"/proc/{pid}/stat", encoding="utf-8").read().rsplit(")", 1)[1].split()[0]  # noqa: E731
            while {state(pid) for pid in members} != {"T"} and time.monotonic() < deadline:
                time.sleep(0.01)
            assert {state(pid) for pid in members} == {"T"}
            engines.signal_tree(process.pid, signal.SIGCONT)
        finally:
            engines.signal_tree(process.pid, signal.SIGKILL)
    assert engines.signal_tree(process.pid, signal.SIGKILL) == []


def test_rows_of_a_later_piece_replace_the_earlier_ones(tmp_path):
    path = str(tmp_path / "out" / "bench.json")
    table.merge(path, [table.row("x", "ms", [1]), table.row("y", "ms", [2], "p", [3])])
    rows = table.merge(path, [table.row("y", "ms", [5], "p", [6]), table.row("y", "ms", [5], "q", [6])])
    assert [(r["row"], r["peer"], r["value"]) for r in rows] == [("x", None, 1), ("y", "p", 5), ("y", "q", 5)]
    with open(path, encoding="utf-8") as f:
        assert json.load(f) == rows
    assert {"row", "unit", "value", "peer", "peer_value", "ratio", "limit", "share", "runs"} <= set(rows[0])


def test_the_wide_table_has_a_column_for_each_peer():
    rows = [{**table.row("x", "ms", [2, 2], "p", [4], high=False, limit=1, aim=table.at_least(3)), "commit": "abc"},
            {**table.row("x", "ms", [2], "q", None, high=False), "commit": "abc"}, table.row("y", "GB/s", [50])]
    assert table.markdown(rows).splitlines()[2:] == ["| x | 2 ms | 4 (2.00x), 1 run | not reached | 0.50 | >= 3x p: **missed** | abc, 2; abc, 1 |",
                                                     "| y | 50 GB/s |  |  |  |  | earlier, 1 |"]


def test_the_results_have_a_table_for_each_model_in_a_fixed_order(tmp_path):
    rows = [table.row("b: start", "s", [1]), table.row("a: 4 streams beside 9: p99", "ms", [2]), table.row("a: decode", "t/s", [3])]
    text = table.sections(rows, ("decode", "beside"))
    assert [line for line in text.splitlines() if line.startswith("####")] == ["#### a", "#### b"]
    assert text.index("| decode |") < text.index("| 4 streams beside 9: p99 |") < text.index("| start |")
    path = tmp_path / "RESULTS.md"
    path.write_text("before\n<!-- x -->\nold\n<!-- end -->\nafter\n")
    for _ in range(2):
        table.replace_between(str(path), "<!-- x -->", "<!-- end -->", "new")
        assert path.read_text() == "before\n<!-- x -->\nnew\n<!-- end -->\nafter\n"
    with pytest.raises(ValueError, match="has no lines"):
        table.replace_between(str(path), "<!-- y -->", "<!-- end -->", "new")


def test_gaps_are_counted_by_stream_within_the_span():
    events = ["1.00 0", "1.01 1", "1.10 0", "1.21 1", "1.50 0", "9.00 1"]
    assert bench_cpu.gaps(events, 1.05, 2.0) == pytest.approx([100, 200, 400])
    assert bench_cpu.p99(list(range(1, 201))) == 198
    assert bench_cpu.p99([]) is None


def test_stream_rate_leaves_out_the_first_token():
    assert bench_cpu.stream_rate([{"completion_tokens": 11, "total": 3.0, "ttft": 1.0}] * 2) == 10


def test_limits_are_measured_and_a_step_reads_every_matrix_once(toy):
    limits = bench_cpu.Limits(toy)
    step, total, macs = bench_cpu.weights(toy.path)
    assert 0 < step <= total and macs > 0
    assert limits.bandwidth > 0 and limits.decode() == pytest.approx(limits.bandwidth * 1e9 / step)
    assert all(rate > 0 for name, rate in limits.rates.items() if name != "read")


def test_rows_are_measured_on_a_running_engine(worker):
    ids = [[3 + (7 * i + k) % 40 for i in range(20)] for k in range(4)]
    assert bench_cpu.decode(worker, ids) > 0
    seconds, _ = bench_cpu.first_token(worker, ids[0])
    assert seconds > 0
    out = bench_cpu.clients(worker, 4, ids[0], ids, 16)
    assert out["rate"] > 0 and out["ttft_p50"] <= out["ttft_p95"]
    out = bench_cpu.prefix(worker, ids[1] * 5, ids[2], ids[3])
    assert out["cold"] > 0 and out["warm"] > 0 and out["step"] >= 0  # the toy writes several tokens within one read
    assert worker.resident() > 1 << 20 and worker.ready > 0 and worker.cpu_seconds() > 0


def test_streams_run_on_beside_a_long_prompt(worker, monkeypatch):
    monkeypatch.setattr(worker, "body", lambda ids, n: engines.Engine.body(worker, ids, min(n, 440)))
    out = bench_cpu.beside(worker, [[5, 6, 7]] * 2, list(range(3, 43)) * 8, list(range(4, 44)) * 8, pause=0.05)
    assert out["kept"] > 0 and out["health"] > 0 and out["timer"] >= 0


def test_a_peer_that_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(engines.Llama, "bin", str(tmp_path))
    with pytest.raises(engines.Missing, match="make peers"):
        engines.Llama(TOY, 1, 512).start()
    with pytest.raises(engines.Missing, match="make peers"):
        engines.llama_bench(TOY, 1, 1, engines.Choices(str(tmp_path / "choices")))


def test_bf16_rounds_to_nearest_even():
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5, 3.0e38], dtype=np.float32)
    assert [hex(v) for v in gguf_to_hf.bf16(values)] == ["0x3f80", "0x3f80", "0x3f82", "0xc020", "0x7f62"]


def test_interleaved_rows_become_halves():
    rows = np.array([[0], [10], [1], [11], [2], [12], [3], [13]])
    assert gguf_to_hf.halves(rows, 2).ravel().tolist() == [0, 1, 10, 11, 2, 3, 12, 13]


def test_a_gguf_becomes_a_folder_for_transformers(toy, tmp_path):
    subprocess.run([sys.executable, gguf_to_hf.__file__, toy.path, str(tmp_path)], check=True)
    raw = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, config = json.loads(raw[8:8 + size]), json.loads((tmp_path / "config.json").read_text())
    embed = header["model.embed_tokens.weight"]
    assert embed["shape"] == [config["vocab_size"], config["hidden_size"]] and embed["dtype"] == "BF16"
    assert len(raw) == 8 + size + max(t["data_offsets"][1] for n, t in header.items() if n != "__metadata__")
    assert "model.layers.1.self_attn.q_proj.weight" in header


@pytest.mark.parametrize("name", sorted(f for f in os.listdir(HERE) if f.startswith("bench_") and f.endswith(".py")))
def test_a_benchmark_says_what_it_does_and_refuses_what_it_does_not_know(name):
    run = lambda *more: subprocess.run([sys.executable, os.path.join(HERE, name), *more], capture_output=True, text=True, timeout=240)  # noqa: E731
    told, refused = run("--help"), run("--nonsense")
    assert told.returncode == 0 and len(told.stdout.splitlines()) > 3 and not told.stderr
    assert refused.returncode == 1 and not refused.stdout and len(refused.stderr.splitlines()) == 1 and "--nonsense" in refused.stderr
