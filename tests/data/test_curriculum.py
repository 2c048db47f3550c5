"""Curricula: the shares of pieces on their schedules, ranges of pass rates, and the same order after a resume."""

from __future__ import annotations

import json
from typing import Any

import pytest

from grpo_megatron.config import ConfigError, CurriculumConfig, CurriculumPiece
from grpo_megatron.data.curriculum import Curriculum
from grpo_megatron.data.sampler import Mixture, SourcePrompts
from grpo_megatron.types import Prompt

RATES = [0.0, 0.25, 0.5, 0.75, 1.0, 0.5]


def mixture(rates: list[float] | None = RATES) -> Mixture:
    """Two sources, of two and four prompts."""
    prompts = [
        Prompt(f"p/{i}", (i,), "", "", "s", "r", pass_rate=None if rates is None else rates[i]) for i in range(6)
    ]
    return Mixture([SourcePrompts("a", prompts[:2], 1), SourcePrompts("b", prompts[2:], 1)])


def curriculum(*pieces: dict[str, Any], rates: str = "file", seed: int = 0, measured: bool = True) -> Curriculum:
    config = CurriculumConfig.model_validate({"pieces": list(pieces), "rates": rates})
    prompts = mixture(RATES if measured else None)
    return Curriculum(prompts, config, 4, True, seed, has_rates=measured, streams={})


def numbers(prompts: list[Prompt]) -> list[int]:
    return [int(prompt.uid[2:]) for prompt in prompts]


EASY = {"name": "easy", "min_pass_rate": 0.5, "weight": [[0, 1.0], [10, 0.0]]}
HARD = {"name": "hard", "max_pass_rate": 0.4, "weight": [[0, 0.0], [10, 1.0]]}


def test_shares_follow_the_schedule_and_bands_select() -> None:
    mixed = curriculum(EASY, HARD)
    counts = []
    for step in range(12):
        drawn = numbers(mixed.items_from(10 * step, 10, step))
        counts.append(sum(number in (0, 1) for number in drawn))
        assert (mixed.counts["easy"], mixed.counts["hard"]) == (10 - counts[-1], counts[-1])
    later = CurriculumPiece.model_validate({"name": "x", "weight": [[14, 6.0], [10, 2.0]]})
    assert [later.weight_at(step) for step in (0, 10, 11, 13, 14, 99)] == [2, 2, 3, 5, 6, 6]
    # step s wants 10 * s / 10 hard prompts, and no piece is a prompt away from its share
    assert counts == [*range(11), 10]


def test_counts_are_of_a_step() -> None:
    mixed = curriculum({"name": "a"}, {"name": "b"})
    for step, count in ((3, 4), (3, 2), (4, 2)):
        mixed.items_from(0, count, step)
        assert mixed.counts.total() == (6 if count == 2 and step == 3 else count)


def test_a_piece_is_one_source_and_has_epochs_of_its_own() -> None:
    mixed = curriculum({"name": "one", "source": "a", "weight": 1}, {"name": "rest", "weight": 3})
    drawn = numbers(mixed.items_from(0, 24))
    # 6 of 24 from `one`: three epochs of 0 and 1; 18 from `rest`: three epochs of all six
    assert [drawn.count(number) for number in range(6)] == [6, 6, 3, 3, 3, 3]
    assert mixed.epoch_at(24) == 4.0


def test_orders_by_pass_rate() -> None:
    easiest = curriculum({"name": "x", "order": "easiest"}).items_from(0, 6)
    assert [prompt.pass_rate for prompt in easiest] == sorted(RATES, reverse=True)
    assert [p.pass_rate for p in curriculum({"name": "x", "order": "hardest"}).items_from(0, 6)] == sorted(RATES)


def test_rates_of_the_run_move_prompts_between_pieces() -> None:
    """All fit at first, since nothing is measured. After step 0 every prompt has a rate."""
    band = {"name": "band", "min_pass_rate": 0.2, "max_pass_rate": 0.8}
    mixed = curriculum(band, rates="run", measured=False)
    assert sorted(numbers(mixed.items_from(0, 6))) == [*range(6)]
    mixed.learn({f"p/{i}": (i, 5) for i in range(6)})  # 0, 0.2, ..., 1
    assert sorted(numbers(mixed.items_from(6, 4))) == [1, 2, 3, 4]
    mixed.learn({"p/1": (0, 5), "p/2": (5, 5), "p/3": (5, 5), "p/unknown": (1, 5)})
    assert numbers(mixed.items_from(10, 3)) == [4, 4, 4]
    mixed.learn({"p/4": (0, 5)})
    assert len(set(numbers(mixed.items_from(13, 6)))) > 1  # no prompt fits: the ranges do not count


@pytest.mark.parametrize("rates", ["file", "run"])
def test_a_resumed_run_goes_on_with_the_same_prompts(rates: str) -> None:
    def steps(mixed: Curriculum, numbered: range) -> list[list[int]]:
        out = []
        for step in numbered:
            drawn = mixed.items_from(3 * step, 3, step)
            mixed.learn({prompt.uid: (5 - int(prompt.uid[2:]), 5) for prompt in drawn})
            out.append(numbers(drawn))
        return out

    pieces = {"name": "a", "source": "a", "weight": 0.3}, EASY, {**HARD, "max_pass_rate": 0.5}
    whole = steps(curriculum(*pieces, rates=rates), range(20))
    first = curriculum(*pieces, rates=rates)
    steps(first, range(7))
    later = curriculum(*pieces, rates=rates)
    later.load_state(json.loads(json.dumps(first.state())))
    assert steps(later, range(7, 20)) == whole[7:]
    assert steps(curriculum(*pieces, rates=rates, seed=1), range(20)) != whole
    if rates == "run":
        assert any(rate is not None for _, _, rate in first.state()["rates"])


def test_an_empty_piece_is_refused() -> None:
    with pytest.raises(ConfigError, match="hard has no prompt: none of source 'b' has a pass rate of 0 to 0.4; widen"):
        curriculum({**HARD, "source": "b"})
    with pytest.raises(ConfigError, match="none of source 'c' has"):
        curriculum({"name": "c", "source": "c"})
