"""Paired comparisons: intervals, tests, verdicts. A loss is base minus model: above 0 the model is worse."""
import math
import random
from statistics import NormalDist

WITHIN_1, WITHIN_3, WORSE, UNKNOWN = "within 1 %", "within 3 %", "worse", "cannot tell"
LEVEL = 0.95


def mean(values):
    return math.fsum(values) / len(values)


def pass_at_k(n, correct, k):
    """Unbiased estimate from n samples of which `correct` passed (Chen et al., 2021): 1 - C(n-c, k) / C(n, k)."""
    if k > n:
        raise ValueError(f"pass@{k} needs at least {k} samples, there are {n}")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mcnemar(losses):
    """(worse, better, p): how many items only the base, only the model got right, and the exact two-sided p of that split under a
    fair coin. Items with equal scores say nothing."""
    worse, better = sum(d > 0 for d in losses), sum(d < 0 for d in losses)
    n = worse + better
    tail = sum(math.comb(n, i) for i in range(min(worse, better) + 1))
    return worse, better, min(1.0, float(2 * tail / 2 ** n)) if n else 1.0


def bonett_price(losses, level=LEVEL):
    """Interval of the difference of paired proportions (Bonett and Price, 2012): one pair is added to each kind of disagreement, so
    that few items without one do not look certain."""
    n = len(losses) + 2
    worse, better = (sum(d > 0 for d in losses) + 1) / n, (sum(d < 0 for d in losses) + 1) / n
    half = NormalDist().inv_cdf(0.5 + level / 2) * math.sqrt((worse + better - (worse - better) ** 2) / n)
    return max(-1.0, worse - better - half), min(1.0, worse - better + half)


def bootstrap(values, level=LEVEL, rounds=4000, seed=1):
    """Percentile interval of the mean (Efron), from `rounds` resamples of whole items."""
    rng, n = random.Random(seed), len(values)
    means = sorted(math.fsum(rng.choices(values, k=n)) / n for _ in range(rounds))
    cut = (1 - level) / 2
    return means[int(cut * (rounds - 1))], means[math.ceil((1 - cut) * (rounds - 1))]


def interval(losses, level=LEVEL):
    """Interval of the mean loss of scores from 0 to 1. Of items that are right or wrong the wider of Bonett-Price and bootstrap; of
    others the bootstrap. Each resamples beside the items one that is wholly worse and one wholly better: see bonett_price."""
    low, high = bootstrap(losses + [1.0, -1.0], level)
    if all(d in (-1, 0, 1) for d in losses):
        exact = bonett_price(losses, level)
        low, high = min(low, exact[0]), max(high, exact[1])
    return low, high


def verdict(low, high):
    """What an interval of the loss (0.01 = 1 %) allows to say. Worse: the interval is above 0, and not within 3 %."""
    if high <= 0.01:
        return WITHIN_1
    if high <= 0.03:
        return WITHIN_3
    return WORSE if low > 0 else UNKNOWN


def items_for(losses, low, high, bound=0.01):
    """About how many items would bring the interval below `bound` were the true loss 0: its width falls with the root."""
    return math.ceil(len(losses) * ((high - low) / 2 / bound) ** 2)


def compare_scores(base, model):
    """base, model: scores of the same items, 0 to 1, in the same order."""
    losses = [float(b) - float(m) for b, m in zip(base, model, strict=True)]
    low, high = interval(losses)
    worse, better, p = mcnemar(losses)
    out = {"items": len(losses), "base": mean(base), "model": mean(model), "loss": mean(losses), "low": low, "high": high,
           "worse_items": worse, "better_items": better, "mcnemar_p": p, "verdict": verdict(low, high)}
    if out["verdict"] == UNKNOWN:
        out["items_needed"] = items_for(losses, low, high)
    return out


def compare_windows(windows):
    """windows: {"tokens", "nll", "base_nll", "kl"?, "same_top"?}, sums in nats. The loss is the relative growth of perplexity; whole
    windows are resampled, because the tokens of one depend on each other."""
    tokens = sum(w["tokens"] for w in windows)
    nll, base = (math.fsum(w[key] for w in windows) / tokens for key in ("nll", "base_nll"))
    growth = [(w["nll"] - w["base_nll"]) / w["tokens"] for w in windows]
    low, high = (math.expm1(x) for x in bootstrap(growth))
    out = {"windows": len(windows), "tokens": tokens, "perplexity": math.exp(nll), "base_perplexity": math.exp(base),
           "loss": math.expm1(nll - base), "low": low, "high": high,
           "verdict": verdict(low, high) if len(windows) >= 10 else UNKNOWN}
    if "kl" in windows[0]:
        out["kl"] = math.fsum(w["kl"] for w in windows) / tokens
        out["kl_low"], out["kl_high"] = bootstrap([w["kl"] / w["tokens"] for w in windows])
        out["same_top"] = sum(w["same_top"] for w in windows) / tokens
    return out
