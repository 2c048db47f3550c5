"""The history of pairs and the batches of pairs. Both are pure functions of numbers, so no ranks are needed."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.config import ActorConfig
from grpo_megatron.training.reward_model import PairHistory, PreferencePair, mixed_batch, pair_batch


def pair(number: int, chosen: int = 3, rejected: int = 4) -> PreferencePair:
    """A pair with a number in its tokens. The prompt has two more tokens."""
    return PreferencePair(
        2,
        torch.full((2 + chosen,), 2 * number, dtype=torch.int32),
        torch.full((2 + rejected,), 2 * number + 1, dtype=torch.int32),
    )


def numbers(pairs: list[PreferencePair]) -> list[int]:
    return [int(p.chosen[0]) // 2 for p in pairs]


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.sampled_from([None, 1, 2, 5]),
    st.integers(10, 100),
)
def test_a_pair_is_never_split_and_comes_once(
    lengths: list[tuple[int, int]], dp: int, sequences: int | None, cap: int
) -> None:
    """Rows 2i and 2i + 1 are neighbours in one micro-batch of one rank, within the limits. All ranks have equally many."""
    pairs = [pair(i, *both) for i, both in enumerate(lengths)]
    actor = ActorConfig(ppo_micro_batch_size_per_gpu=sequences, ppo_max_token_len_per_gpu=cap)
    batches = [pair_batch(pairs, actor, rank, dp) for rank in range(dp)]
    assert len({tuple(len(mini) for mini in batch.mini_batches) for batch in batches}) == 1
    seen = []
    for batch in batches:
        (mini,) = batch.mini_batches
        for micro in mini:
            assert [row + 1 for row in micro[0::2]] == micro[1::2]
            assert len(micro) <= max(2, sequences or len(micro))
            assert sum(len(batch.tokens[row]) for row in micro) <= cap or len(micro) <= 2
            for chosen, rejected in zip(micro[0::2], micro[1::2], strict=True):
                number = int(batch.tokens[chosen][0]) // 2
                seen.append(number)
                assert torch.equal(batch.tokens[chosen], pairs[number].chosen.long())
                assert torch.equal(batch.tokens[rejected], pairs[number].rejected.long())
    assert sorted(seen) == list(range(len(pairs)))


def test_history_is_bounded_and_uniform_however_pairs_are_added() -> None:
    """Each of 40 pairs is among the 10 kept with probability 1/4: 50 of 200 seeds, standard deviation 6.1."""
    counts = [0] * 40
    for seed in range(200):
        whole = PairHistory(10, seed)
        whole.add([pair(i) for i in range(40)])
        cut = PairHistory(10, seed)
        for start in range(0, 40, 8):
            cut.add([pair(i) for i in range(start, start + 8)])
        assert numbers(cut.pairs) == numbers(whole.pairs) == sorted(numbers(whole.pairs)) and len(whole) == 10
        for number in numbers(whole.pairs):
            counts[number] += 1
    assert all(25 <= count <= 75 for count in counts)


def test_history_continues_after_json() -> None:
    history = PairHistory(5, seed=1)
    history.add([pair(i) for i in range(7)])
    copy = PairHistory(5, seed=1)
    copy.load_state(json.loads(json.dumps(history.state())))
    for one in (history, copy):
        one.add([pair(i) for i in range(7, 20)])
    assert copy.state() == history.state()
    assert copy.pairs[0].chosen.dtype == torch.int32


@pytest.mark.parametrize("size", [3, 10, 32])
def test_replay_is_a_tenth_in_the_long_run_and_fresh_pairs_come_once_an_epoch(size: int) -> None:
    fresh, history = [pair(i) for i in range(100)], [pair(1000 + i) for i in range(20)]
    batches = [
        numbers(mixed_batch(fresh, history, size=size, replay_ratio=0.1, seed=3, iteration=2, step=step))
        for step in range(100)
    ]
    assert all(len(batch) == size for batch in batches)
    replayed = [number for batch in batches for number in batch if number >= 1000]
    assert len(replayed) == 10 * size and len(set(replayed)) > 10
    new = [number for batch in batches for number in batch if number < 1000]
    for start in range(0, len(new) // 100 * 100, 100):
        assert sorted(new[start : start + 100]) == list(range(100))


def test_batches_are_pure_functions_and_differ_by_seed_iteration_and_step() -> None:
    fresh, history = [pair(i) for i in range(50)], [pair(1000 + i) for i in range(50)]

    def draw(**changes: int) -> list[int]:
        place = {"seed": 0, "iteration": 1, "step": 4, **changes}
        return numbers(mixed_batch(fresh, history, size=20, replay_ratio=0.5, **place))

    assert draw() == draw()
    others = [draw(seed=1), draw(iteration=2), draw(step=5)]
    assert all(other[:10] != draw()[:10] and other[10:] != draw()[10:] for other in others)


def test_without_history_all_are_fresh_and_few_fresh_ones_make_a_small_batch() -> None:
    fresh, history = [pair(i) for i in range(9)], [pair(1000 + i) for i in range(50)]
    alone = mixed_batch(fresh, [], size=4, replay_ratio=0.5, seed=0, iteration=0, step=0)
    assert len(alone) == 4 and max(numbers(alone)) < 9
    small = [mixed_batch(fresh, history, size=64, replay_ratio=0.1, seed=0, iteration=1, step=s) for s in range(5)]
    for batch in small:  # 9 / (1 - 0.1) = 10: nine fresh, one replayed
        assert sorted(numbers(batch))[:9] == list(range(9)) and len(batch) == 10
    assert math.isclose(sum(number >= 1000 for batch in small for number in numbers(batch)) / 50, 0.1)
