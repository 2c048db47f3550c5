"""Estimates against numbers derived by hand, McNemar against binomial tails, and the comparison's refusals.

pass@k: 8 samples, 3 right: pass@1 = 3/8; pass@4 = 1 - C(5,4)/C(8,4) = 1 - 5/70 = 0.9285714. McNemar with 1 and 9 discordant
pairs: 2 (1 + 10) / 2^10 = 0.021484375; with 5 and 15: 2 (1 + 20 + 190 + 1140 + 4845 + 15504) / 2^20 = 0.041389465
(scipy.stats.binomtest(5, 20) says the same).
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_megatron.config import ConfigError
from grpo_megatron.evaluation import comparison
from grpo_megatron.evaluation.comparison import mcnemar, paired_interval
from grpo_megatron.evaluation.estimates import (
    estimate,
    interval,
    majority,
    pass_at_k,
    reported_ks,
    vote_classes,
)
from grpo_megatron.evaluation.ledger import Ledger, LedgerEntry


def test_pass_at_k_is_the_mean_over_all_draws_of_k() -> None:
    assert pass_at_k(8, 3, 1) == pytest.approx(0.375)
    assert pass_at_k(8, 3, 4) == pytest.approx(0.9285714, abs=1e-7)
    for n, k in product((3, 5), (1, 2, 3)):
        for c in range(n + 1):
            draws = [any(i < c for i in chosen) for chosen in combinations(range(n), k)]
            assert pass_at_k(n, c, k) == pytest.approx(sum(draws) / len(draws))
    for k in (0, 9):
        with pytest.raises(ValueError, match=f"pass@{k} of 3 right of 8"):
            pass_at_k(8, 3, k)
    assert reported_ks(1) == [1] and reported_ks(16) == [1, 2, 4, 8, 16] and reported_ks(12) == [1, 2, 4, 8, 12]


def test_majority() -> None:
    assert majority([0, 1, 0]) == 1 and majority([1, 1, 0]) == 0
    assert majority([0, 1]) == 0.5 and majority([0, 1, 2]) == pytest.approx(1 / 3)  # ties share the chance
    assert majority([None, None, 0]) == 1 and majority([None, None]) == 0


def test_equal_wrong_answers_vote_together_and_the_grader_is_called_only_where_it_matters() -> None:
    compared: list[tuple[str, str]] = []

    def equal(pairs: list[tuple[str, str]]) -> list[bool]:
        compared.extend(pairs)
        return [set(pair) == {"1/2", "0.5"} for pair in pairs]

    right, half, decimal, other = (True, "7"), (False, "1/2"), (False, "0.5"), (False, "3")
    close = [right, right, half, decimal, (False, "0. 5"), other]  # two right; three wrong that are equal, and one
    problems = [close, [right, right, half, other], [half, decimal, other], [right, half, half, decimal]]
    votes = vote_classes(problems, equal)
    assert majority(votes[0]) == 0 and Counter(votes[0]).most_common(1)[0][1] == 3
    assert majority(votes[1]) == 1 and majority(votes[2]) == 0 and majority(votes[3]) == 0
    assert set(compared) == {("0.5", "1/2"), ("0.5", "3"), ("1/2", "3")}  # the other problems need no comparison
    assert vote_classes([[(False, None), right]], equal) == [[None, 0]]


def test_intervals_are_seeded_and_shrink_with_the_root_of_the_problems() -> None:
    values = [1.0, 0.0, 0.0, 1.0] * 25
    assert interval(values) == interval(values)
    low, high = interval(values)
    normal = 1.96 * math.sqrt(0.25 / 100)  # of a mean of 100 coin flips
    assert low == pytest.approx(0.5 - normal, abs=0.02) and high == pytest.approx(0.5 + normal, abs=0.02)
    assert interval([1.0] * 7) == (1, 1) and interval([0.25]) == (0.25, 0.25)
    many = interval(values * 16)
    assert (many[1] - many[0]) == pytest.approx((high - low) / 4, rel=0.15)
    assert estimate([1.0, 0.0])["problems"] == 2 and estimate([1.0, 0.0])["value"] == 0.5


@pytest.mark.parametrize("right, n", [(0, 10), (1, 10), (50, 100), (99, 100), (100, 100)])
def test_the_interval_of_a_share_never_collapses(right: int, n: int) -> None:
    """Wilson's ends are the shares from which the observed one is 1.96 of their own standard errors away."""
    value = estimate([1.0] * right + [0.0] * (n - right))
    low, high = value["low"], value["high"]
    assert high - low > 1 / n
    for end in {low, high} - {0.0, 1.0}:
        assert abs(right / n - end) == pytest.approx(1.96 * math.sqrt(end * (1 - end) / n), rel=1e-3)
    assert (low == 0) == (right == 0) and (high == 1) == (right == n)
    assert estimate([0.25] * 8)["low"] < 0.25 < estimate([0.25] * 8)["high"]  # of equal averages, too


def test_mcnemar() -> None:
    assert mcnemar(1, 9) == pytest.approx(0.021484375, abs=1e-12)
    assert mcnemar(15, 5) == pytest.approx(0.041389465, abs=1e-9)
    assert mcnemar(0, 0) == 1 and mcnemar(4, 4) == 1
    assert 0 < mcnemar(3000, 3300) < 0.001  # 2**6300 is no float


def _result(greedy: str, right: str = "", **changes: Any) -> dict[str, Any]:
    task = dict.fromkeys(comparison.MUST_BE_EQUAL, "x") | {"prompts_sha256": "p", "num_problems": len(greedy)}
    task["problems"] = {"greedy": greedy, "right": right, "samples": 4}
    return {"format": 2, "tasks": {"gsm8k": {**task, **changes}}}


def test_a_paired_difference() -> None:
    a, b = _result("1100000000", "4 2 0 0 0 0 0 0 0 0"), _result("1011000000", "4 2 4 0 0 0 0 0 0 0")
    greedy, average = comparison.compare_results(a, b)
    assert (greedy["a"], greedy["b"], greedy["only_a"], greedy["only_b"], greedy["p"]) == (0.2, 0.3, 1, 2, 1.0)
    assert greedy["difference"] == pytest.approx(0.1) and greedy["low"] <= 0.1 <= greedy["high"]
    assert average["measure"] == "avg@4" and average["difference"] == pytest.approx(0.1) and "p" not in average
    same = comparison.compare_results(a, copy.deepcopy(a))[0]
    assert (same["difference"], same["p"]) == (0, 1)
    assert same["high"] == -same["low"] == pytest.approx(1.959964 * math.sqrt(2) / 12)  # equal, and yet not certain
    assert "+10.00" in comparison.paired_table([greedy, average])


@pytest.mark.parametrize(
    "only_a, only_b, problems, low, high",
    [(7, 1, 21, 0.013, 0.508), (1, 7, 21, -0.508, -0.013), (0, 0, 1319, -0.0021, 0.0021)],
)
def test_the_interval_of_paired_shares(only_a: int, only_b: int, problems: int, low: float, high: float) -> None:
    """Bonett and Price by hand, for 1 and 7 discordant pairs of 21, Fagerland et al.'s example (2014, Table V): p12 = 2/23,
    p21 = 8/23, (p21 - p12) +- 1.96 sqrt((p12 + p21 - (p21 - p12)^2) / 23) = 0.2609 +- 0.2475. 0 of 1319: +- 1.96 sqrt(2) / 1321
    """
    equal = problems - only_a - only_b
    found = paired_interval([1.0] * only_a + [-1.0] * only_b + [0.0] * equal)
    assert found == pytest.approx((low, high), abs=6e-4)


def test_the_interval_of_paired_averages_covers_the_truth() -> None:
    """400 samples of 30 problems with 16 samples each: at least 92 % of the intervals hold the true mean difference, and they
    are at most 15 % wider than the normal interval, which has no width where all differences are equal."""
    generator = np.random.default_rng(0)
    p = generator.beta(0.5, 0.5, (400, 30))
    q = 0.9 * p + 0.05  # the mean difference is 0: both means are 0.5
    d = (generator.binomial(16, q) - generator.binomial(16, p)) / 16
    found = np.array([paired_interval(row) for row in d])
    assert np.mean((found[:, 0] <= 0) & (found[:, 1] >= 0)) > 0.92
    normal = 2 * 1.96 * d.std(axis=1, ddof=1) / math.sqrt(30)
    assert np.mean(found[:, 1] - found[:, 0]) < 1.15 * np.mean(normal)
    same = paired_interval([0.25] * 30)
    assert same[0] < 0.25 < same[1] and paired_interval([1.0] * 30)[1] == 1.0


def test_results_with_different_settings_are_not_compared() -> None:
    a = _result("10")
    with pytest.raises(
        ConfigError, match="have different settings .data_sha256 x against y.; evaluate both with one setting"
    ):
        comparison.compare_results(a, _result("10", data_sha256="y"))
    with pytest.raises(ConfigError, match="chat templates of the two models made different prompts.*--any-template"):
        comparison.compare_results(a, _result("10", prompts_sha256="q"))
    assert comparison.compare_results(a, _result("10", prompts_sha256="q"), any_template=True)
    with pytest.raises(ConfigError, match="no task in common: A has gsm8k, B has math"):
        comparison.compare_results(a, {"tasks": {"math": {}}})


def test_the_ledger_survives_a_torn_line(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, "gsm8k")
    entries = [LedgerEntry(f"gsm8k/{n}", 0, f"text {n}\n\u2028", n, "stop") for n in range(3)]
    ledger.append(0, entries[:2])
    file = tmp_path / "completions" / "gsm8k" / "block_0000.jsonl"
    with file.open("ab") as handle:
        handle.write(b'{"uid": "gsm8k/2", "ind')  # killed here
    assert ledger.read() == {entry.key: entry for entry in entries[:2]}
    ledger.append(0, entries[2:])
    ledger.append(1, entries[:1])  # another layout drew it again
    assert ledger.read() == {entry.key: entry for entry in entries} and file.read_bytes().count(b"\n") == 3
    file.write_bytes(b"{}\n" + file.read_bytes())
    with pytest.raises(ConfigError, match="block_0000.jsonl line 1 is no completion"):
        ledger.read()
