"""kvgate-eval's statistics against known values, and what each verdict needs."""
import math
import os
import random
import sys

import pytest

from conftest import ROOT

sys.path.insert(0, os.path.join(ROOT, "gpu-worker", "tools", "eval"))
import stats  # noqa: E402


def losses(worse, better, n):
    return [1.0] * worse + [-1.0] * better + [0.0] * (n - worse - better)


# scipy.stats.binomtest(min, sum).pvalue
@pytest.mark.parametrize("worse, better, p", [(10, 4, 0.179565429687500), (15, 5, 0.041389465332031), (3, 7, 0.34375), (40, 10, 2.3861331676755526e-05), (0, 6, 0.03125)])
def test_mcnemar_is_the_exact_binomial_test(worse, better, p):
    got = stats.mcnemar(losses(worse, better, 60))
    assert got[:2] == (worse, better)
    assert got[2] == pytest.approx(p, rel=1e-6)


def test_mcnemar_without_disagreement_is_no_evidence():
    assert stats.mcnemar([0.0] * 50) == (0, 0, 1.0)


def test_bonett_price_by_hand():
    # 100 items, 10 worse, 4 better: p12 = 11/102, p21 = 5/102, se = sqrt((16/102 - (6/102)^2) / 102)
    half = 1.959963985 * math.sqrt((16 / 102 - (6 / 102) ** 2) / 102)
    assert stats.bonett_price(losses(10, 4, 100)) == pytest.approx((6 / 102 - half, 6 / 102 + half), abs=1e-9)


def test_bootstrap_agrees_with_scipy():
    values = [((i * 37) % 101) / 50 - 1 for i in range(200)]
    # scipy.stats.bootstrap((values,), np.mean, n_resamples=20000, method="percentile")
    low, high = stats.bootstrap(values, rounds=8000)
    assert low == pytest.approx(-0.0792, abs=0.006) and high == pytest.approx(0.0817, abs=0.006)


def test_bootstrap_is_the_same_each_time():
    values = [math.sin(i) for i in range(50)]
    assert stats.bootstrap(values) == stats.bootstrap(values)


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Items whose true loss is 2 points: 6 % only the base, 4 % only the model; 300 sets of 400 items. 95 % of 300 is 285 +- 4."""
    rng, held = random.Random(7), 0
    for _ in range(300):
        draws = [rng.random() for _ in range(400)]
        low, high = stats.bonett_price([1.0 if u < 0.06 else -1.0 if u < 0.10 else 0.0 for u in draws])
        held += low <= 0.02 <= high
    assert 273 <= held <= 298


@pytest.mark.parametrize("n, c, k, want", [(10, 3, 1, 0.3), (5, 2, 2, 0.7), (5, 0, 3, 0.0), (5, 5, 1, 1.0), (20, 1, 20, 1.0), (200, 10, 10, 0.4085479)])
def test_pass_at_k(n, c, k, want):
    assert stats.pass_at_k(n, c, k) == pytest.approx(want, abs=1e-6)


def test_pass_at_k_needs_k_samples():
    with pytest.raises(ValueError, match="pass@10 needs at least 10 samples"):
        stats.pass_at_k(5, 1, 10)


def scores(worse, better, n):
    base = [1.0] * worse + [0.0] * better + [1.0] * (n - worse - better)
    return base, [b - d for b, d in zip(base, losses(worse, better, n))]


@pytest.mark.parametrize("worse, better, n, verdict", [
    (0, 0, 1000, stats.WITHIN_1),
    (10, 12, 4000, stats.WITHIN_1),
    (12, 8, 600, stats.WITHIN_3),
    (60, 8, 600, stats.WORSE),
    (9, 0, 24, stats.WORSE),
    (0, 0, 20, stats.UNKNOWN),
    (0, 0, 5, stats.UNKNOWN),
    (6, 4, 50, stats.UNKNOWN),
    (0, 30, 300, stats.WITHIN_1),
])
def test_each_verdict(worse, better, n, verdict):
    out = stats.compare_scores(*scores(worse, better, n))
    assert out["verdict"] == verdict, out
    assert out["loss"] == pytest.approx((worse - better) / n)
    assert out["low"] <= out["loss"] <= out["high"]


def test_cannot_tell_says_how_many_items_would_do():
    needed = stats.compare_scores(*scores(2, 2, 60))["items_needed"]
    assert stats.compare_scores(*scores(round(2 * needed / 60), round(2 * needed / 60), needed))["verdict"] == stats.WITHIN_1


def test_scores_between_right_and_wrong_are_compared_too():
    rng = random.Random(3)
    base = [rng.random() * 0.5 + 0.5 for _ in range(800)]
    assert stats.compare_scores(base, [b - 0.2 for b in base])["verdict"] == stats.WORSE
    assert stats.compare_scores(base, [b - 0.001 for b in base])["verdict"] == stats.WITHIN_1
    assert stats.compare_scores(base[:10], base[:10])["verdict"] == stats.UNKNOWN


def windows(growth, spread, n, rng):
    return [{"tokens": 447, "nll": 447 * (3 + growth + rng.gauss(0, spread)), "base_nll": 447 * 3.0, "kl": 447 * 0.01, "same_top": 440} for _ in range(n)]


@pytest.mark.parametrize("growth, spread, n, verdict", [
    (0.001, 0.01, 200, stats.WITHIN_1), (0.02, 0.01, 200, stats.WITHIN_3), (0.08, 0.02, 200, stats.WORSE), (0.01, 0.2, 30, stats.UNKNOWN),
    (0.001, 0.001, 4, stats.UNKNOWN)])
def test_verdicts_on_windows_of_text(growth, spread, n, verdict):
    out = stats.compare_windows(windows(growth, spread, n, random.Random(1)))
    assert out["verdict"] == verdict, out
    assert out["kl"] == pytest.approx(0.01) and out["same_top"] == pytest.approx(440 / 447)
    assert out["base_perplexity"] == pytest.approx(math.exp(3))
