"""Accuracy, calibration error and bins of a reward model's predictions, by hand."""

from __future__ import annotations

import math

import pytest

from grpo_megatron.algo.scores import calibration, calibration_table


def log_odds(p: float) -> float:
    return math.log(p / (1 - p))


def test_bins_compare_confidence_with_accuracy() -> None:
    """0.52 and 0.54 are in the first bin of ten from 0.5 to 1; 0.93 and, for the other side, 0.07 in the ninth."""
    found = calibration([log_odds(p) for p in (0.52, 0.54, 0.93, 0.07)], [True, False, True, True])
    assert found.count == 4 and found.accuracy == 0.5
    first, ninth = found.bins[0], found.bins[8]
    assert (first.count, first.accuracy, first.confidence) == (2, 0.5, pytest.approx(0.53))
    assert (ninth.count, ninth.accuracy, ninth.confidence) == (2, 0.5, pytest.approx(0.93))
    assert found.ece == pytest.approx(0.5 * 0.03 + 0.5 * 0.43)
    assert found.log_loss == pytest.approx(-sum(map(math.log, (0.52, 0.46, 0.93, 0.07))) / 4)
    assert found.brier == pytest.approx((0.48**2 + 0.54**2 + 0.07**2 + 0.93**2) / 4)
    assert [b.count for b in found.bins] == [2, 0, 0, 0, 0, 0, 0, 0, 2, 0] and math.isnan(found.bins[1].accuracy)
    assert calibration_table(found).splitlines()[2].split() == ["0.900", "-", "0.950", "2", "0.500", "0.930"]


def test_ties_and_large_scores() -> None:
    found = calibration([0.0, 900.0, -900.0], [True, True, True])
    assert found.accuracy == pytest.approx(0.5) and found.log_loss == pytest.approx((math.log(2) + 900) / 3)
    assert (found.bins[0].count, found.bins[9].count) == (1, 2)
    assert found.brier == pytest.approx((0.25 + 0 + 1) / 3)


def test_the_order_changes_no_bit() -> None:
    odds = [0.1 * i - 3 for i in range(61)]
    labels = [i % 3 == 0 for i in range(61)]
    assert calibration(odds, labels) == calibration(odds[::-1], labels[::-1])
