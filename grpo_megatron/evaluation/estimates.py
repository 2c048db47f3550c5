"""Estimates over problems that were each answered n times: pass@k, avg@n, maj@n, with 95 % intervals.

pass@k = 1 - C(n - c, k) / C(n, k) for c right answers of n: the unbiased estimate of "one of k is right" (arXiv:2107.03374).
maj@n is the chance that the most frequent of n answers is right. Answers of equal frequency share the chance. Samples without
a prediction do not vote. Where each problem is right or wrong, the interval is Wilson's. Otherwise it is the bootstrap's:
percentiles over `RESAMPLES` resamplings of the problems, seeded, so that the same numbers give the same interval.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from grpo_megatron.data.sampler import wilson

RESAMPLES = 2000
RIGHT = 0  # the vote for the right answer, in `majority`


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate pass@k from c right answers of n. Raises ValueError unless 0 <= c <= n and 1 <= k <= n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} right of {n} is not defined")
    wrong = 1.0
    for i in range(k):
        wrong *= max(0, n - c - i) / (n - i)
    return 1.0 - wrong


def majority(votes: Sequence[int | None]) -> float:
    """Compute the chance that the winner is RIGHT. Equal answers have equal votes; None is no vote."""
    counts = Counter(vote for vote in votes if vote is not None)
    if not counts:
        return 0.0
    best = max(counts.values())
    winners = [vote for vote, count in counts.items() if count == best]
    return (RIGHT in winners) / len(winners)


def reported_ks(n: int) -> list[int]:
    """List the k of the pass@k that are reported for n samples: powers of two up to n, and n."""
    return sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})


def interval(values: Sequence[float], weights: Sequence[float] = ()) -> tuple[float, float]:
    """Compute the 95 % bootstrap interval of the (weighted) mean. Of equal values, both ends are that value."""
    if len(set(values)) == 1:
        return float(values[0]), float(values[0])
    generator, array = np.random.default_rng(0), np.asarray(values, dtype=np.float64)
    weight = np.asarray(weights or [1.0] * len(array))
    rows, means = max(1, 1_000_000 // len(array)), []  # resamplings that are in memory together
    for first in range(0, RESAMPLES, rows):
        chosen = generator.integers(0, len(array), (min(rows, RESAMPLES - first), len(array)), dtype=np.int32)
        means.append((array * weight)[chosen].sum(axis=1) / weight[chosen].sum(axis=1))
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(low), float(high)


def estimate(values: Sequence[float], weights: Sequence[float] = ()) -> dict[str, float]:
    """Estimate {"value", "low", "high", "problems"} of the mean over problems, rounded to 6 digits.

    `weights`, of each problem: of the weighted mean, such as one over all instructions of all prompts.
    """
    weights = weights or [1.0] * len(values)
    mean = sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
    all_equal = len(set(values)) == 1 and 0 <= mean <= 1
    is_share = all_equal or (set(values) <= {0.0, 1.0} and len(set(weights)) == 1)
    low, high = wilson(mean, len(values)) if is_share else interval(values, weights)
    return {"value": round(mean, 6), "low": round(low, 6), "high": round(high, 6), "problems": len(values)}


# -- Votes: which samples of a problem have the same prediction --------------------------------------------------------
# Right predictions are one class, since each equals the answer. Wrong predictions are classes by their text without white
# space. Texts that differ can still be equal (1/2 and 0.5), which would split their vote. Where a union of wrong
# predictions could change the winner, and only there, the grader compares them pair by pair, for all problems in one call.

Vote = tuple[bool, str | None]  # whether the sample is right, its prediction
Equal = Callable[[list[tuple[str, str]]], list[bool]]  # whether the predictions of each pair are equal
MAX_PAIRS = 200  # per problem; with more pairs, only equal texts share a class


def vote_classes(problems: Sequence[Sequence[Vote]], equal: Equal) -> list[list[int | None]]:
    """Turn each problem's samples into the votes of `majority`."""
    pairs = [(number, *pair) for number, samples in enumerate(problems) for pair in _deciding_pairs(samples)]
    verdicts = equal([(one, other) for _, one, other in pairs]) if pairs else []
    classes: list[dict[str, str]] = [{} for _ in problems]  # text -> another one of its class
    for (number, one, other), is_equal in zip(pairs, verdicts, strict=True):
        if is_equal:
            classes[number][_root(classes[number], other)] = _root(classes[number], one)
    votes = []
    for samples, union in zip(problems, classes, strict=True):
        wrong: dict[str, int] = {}
        numbers: list[int | None] = []
        for right, text in samples:
            if right or text is None:
                numbers.append(RIGHT if right else None)
            else:
                numbers.append(wrong.setdefault(_root(union, _without_spaces(text)), len(wrong) + 1))
        votes.append(numbers)
    return votes


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _root(union: dict[str, str], text: str) -> str:
    while union.get(text, text) != text:
        text = union[text]
    return text


def _deciding_pairs(samples: Sequence[Vote]) -> list[tuple[str, str]]:
    """Find pairs of wrong predictions that as one class could change the winner."""
    num_right = sum(1 for right, _ in samples if right)
    wrong = Counter(_without_spaces(text) for right, text in samples if not right and text is not None)
    most = max(wrong.values(), default=0)
    if len(wrong) < 2 or sum(wrong.values()) < num_right or num_right == 0 or most > num_right:
        return []
    pairs = list(itertools.combinations(sorted(wrong), 2))
    return pairs if len(pairs) <= MAX_PAIRS else []
