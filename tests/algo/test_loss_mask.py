"""A token with loss mask 0 changes nothing: every number equals that of data from which the token has been removed.

Each test computes the same thing twice: on responses with masked tokens, which hold NaN or large numbers, and on
compact responses that consist of the loss tokens alone. The other files of this folder test the code on compact data.
Lengths that are not about the loss (packing, the overlong penalty) keep all tokens.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_megatron.algo.advantages import advantage_estimators, with_overlong_penalty
from grpo_megatron.algo.corrections import correction_weights, rejection_mask
from grpo_megatron.algo.losses import policy_losses
from grpo_megatron.algo.plan import make_plan, token_weightings, weigh
from grpo_megatron.config import ActorConfig, AlgorithmConfig, OverlongBuffer, RolloutCorrection
from grpo_megatron.types import GroupTable
from tests.algo.inputs import actor, make_inputs, run, value
from tests.algo.tables import make_table
from tests.algo.tables import run as run_estimator
from tests.algo.test_kl import numbers

Mask = list[int]
NAN = math.nan
POISON = 1e6  # a finite wrong number: NaN where a tensor may hold it

# Two prompts with four samples each: all ones, gaps, a masked beginning and end, ones only at the edges, and a row
# without a loss token.
MASKS: list[Mask] = [
    [1, 1, 1, 1],
    [1, 1, 0, 0, 1],
    [0, 0, 1, 1, 0],
    [1, 0, 1, 0, 1, 0, 0, 1],
    [0, 1, 1, 1, 1, 1],
    [0, 0, 0],
    [1],
    [1, 0, 0, 0, 0, 1],
]
NUM_LOSS_TOKENS = [4, 3, 2, 4, 5, 0, 1, 2]
REWARDS = [[1.0, 0.25, 0.0, 0.5], [0.0, 1.0, 0.75, 0.0]]


def kept(values: list[float], mask: Mask) -> list[float]:
    return [number for number, in_loss in zip(values, mask, strict=True) if in_loss]


def spans(mask: Mask) -> list[tuple[int, int]]:
    """One span per token. It is as valid as maximal spans, and does not depend on the code that finds those."""
    return [(t, t + 1) for t in range(len(mask)) if mask[t]]


def two_tables(*, penalties: bool = False, steps: bool = False) -> tuple[GroupTable, GroupTable]:
    """(masked, compact), of the same eight samples."""
    rng = random.Random(0)
    full_penalties = [[rng.random() if in_loss else POISON for in_loss in mask] for mask in MASKS]
    full_steps, compact_steps = [], []
    for mask in MASKS:
        positions = spans(mask)
        chosen = sorted(rng.sample(range(len(positions)), k=min(2, len(positions))))
        rewards = [rng.random() for _ in chosen]
        ends = []
        for i in chosen:  # a step may end at any masked token behind its last loss token
            following = positions[i + 1][0] if i + 1 < len(positions) else len(mask)
            ends.append(rng.randrange(positions[i][0], following))
        full_steps.append(list(zip(ends, rewards, strict=True)))
        compact_steps.append(list(zip(chosen, rewards, strict=True)))

    def table(masks: list[Mask], tokens: list[list[float]], step_rewards: list[list[tuple[int, float]]]) -> GroupTable:
        return make_table(
            REWARDS,
            lengths=[[len(mask) for mask in masks[:4]], [len(mask) for mask in masks[4:]]],
            steps=[step_rewards[:4], step_rewards[4:]] if steps else None,
            greedy=[0.25, 0.5],
            penalties=[tokens[:4], tokens[4:]] if penalties else None,
        )

    values = [[rng.random() if in_loss else POISON for in_loss in mask] for mask in MASKS]
    full = table(MASKS, full_penalties, full_steps)
    full = replace(full, loss_spans=[spans(mask) for mask in MASKS], values=values, score_norms=values)
    compact_penalties, compact_values = (
        [kept(row, mask) for row, mask in zip(rows, MASKS, strict=True)] for rows in (full_penalties, values)
    )
    compact = table([[1] * n for n in NUM_LOSS_TOKENS], compact_penalties, compact_steps)
    parts = [[reward, float(row % 2)] for row, reward in enumerate(full.reward)]
    columns = {"values": compact_values, "score_norms": compact_values, "reward_parts": parts}
    return replace(full, reward_parts=parts), replace(compact, **columns)


@pytest.mark.parametrize("penalties", [False, True])
@pytest.mark.parametrize("gamma", [1.0, 0.5])
@pytest.mark.parametrize("name", advantage_estimators.names())
def test_estimators(name: str, gamma: float, penalties: bool) -> None:
    steps = advantage_estimators.facts(name).needs_step_rewards
    full, compact = two_tables(penalties=penalties, steps=steps)
    got = run_estimator(full, name, gamma=gamma)
    want = run_estimator(compact, name, gamma=gamma)
    for row, mask in enumerate(MASKS):
        advantage, expected = got[row], want[row]
        if isinstance(advantage, list):
            assert len(advantage) == len(mask)
            assert expected == kept(advantage, mask) or not any(mask)  # without tokens: [] or 0.0
            if not steps:
                assert not any(number for number, in_loss in zip(advantage, mask, strict=True) if not in_loss)
        else:
            assert advantage == expected


# -- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", token_weightings.names())
def test_token_weights_of_the_plan(mode: str) -> None:
    full, compact = two_tables()

    def weights(table: GroupTable) -> list[float]:
        config = ActorConfig(loss_agg_mode=mode, ppo_mini_batch_size=1)
        plan = make_plan(table, AlgorithmConfig(), config, dp=2, train_batch_size=2, max_response_length=9)
        revised = weigh(plan, table, AlgorithmConfig(), config, max_response_length=9)
        assert revised.token_weights == plan.token_weights and revised.mini_batches == plan.mini_batches
        assert 5 not in plan.owner()  # no loss token
        return plan.token_weights

    assert weights(full) == weights(compact)
    assert weights(full)[5] == 0


def test_lengths_of_the_plan_count_all_tokens() -> None:
    # Prompts have 2 tokens: 6, 7, 7, 10, 8, 3, 8 without row 5. A cap of 10 holds 7 + 3 and no other two.
    full, _ = two_tables()
    config = ActorConfig(ppo_max_token_len_per_gpu=10)
    plan = make_plan(full, AlgorithmConfig(), config, dp=1, train_batch_size=2, max_response_length=9)
    assert plan.mini_batches == [[[[3], [4], [7], [1, 6], [2], [0]]]]
    shaped = with_overlong_penalty(full, OverlongBuffer(len=4), max_length=8)
    assert shaped.reward[3] == REWARDS[0][3] - 1  # 8 tokens, of which 4 are in the loss


def test_a_row_without_a_loss_token_is_a_sample_out_of_the_loss() -> None:
    """It stays in the statistics of its group, like an empty response."""
    masked = replace(make_table([[1, 0, 0]], lengths=[[2, 3, 4]]), loss_spans=[[(0, 2)], [], [(0, 4)]])
    empty = make_table([[1, 0, 0]], lengths=[[2, 0, 4]])
    plans = [
        make_plan(table, AlgorithmConfig(), ActorConfig(), dp=1, train_batch_size=1, max_response_length=4)
        for table in (masked, empty)
    ]
    assert plans[0].advantages == plans[1].advantages
    assert plans[0].token_weights == plans[1].token_weights == [1 / 6, 0, 1 / 6]
    assert plans[0].mini_batches == plans[1].mini_batches
    no_loss = replace(masked, loss_spans=[[], [], []])
    nothing = make_plan(no_loss, AlgorithmConfig(), ActorConfig(), dp=1, train_batch_size=1, max_response_length=4)
    assert nothing.mini_batches == [[]]


# -- tensors ----------------------------------------------------------------------------------------------------------

LOSS_MASKS = [mask for mask in MASKS if any(mask)] + [[1, 0, 0, 1]]  # eight rows, so four pairs for dpo
WIDTH = max(map(len, LOSS_MASKS))


def padded(rows: list[list[float]], fill: float, width: int = WIDTH) -> Tensor:
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=torch.float64)


MASK = padded(LOSS_MASKS, 0).bool()  # type: ignore[arg-type]
COMPACT_MASK = padded([[1.0] * sum(mask) for mask in LOSS_MASKS], 0).bool()


def two_tensors(seed: int, poison: float = NAN) -> tuple[Tensor, Tensor]:
    """(masked, compact): random log-probabilities; where the mask is 0 the first holds `poison`."""
    generator = torch.Generator().manual_seed(seed)
    full = torch.where(MASK, -2 * torch.rand(MASK.shape, generator=generator, dtype=torch.float64), poison)
    return full, compacted(full)


def compacted(full: Tensor) -> Tensor:
    return padded([row[mask].tolist() for row, mask in zip(full, MASK, strict=True)], 0.0)


POISONED = [("k3", NAN), ("k3+", -math.inf), ("k1", math.inf), ("k3", 1e30), ("k1", NAN)]  # one for each aggregation
CASES = [(mode, *poisoned) for mode, poisoned in zip(token_weightings.names(), POISONED, strict=True)]


@pytest.mark.parametrize(("mode", "kl", "poison"), CASES)
@pytest.mark.parametrize("name", policy_losses.names())
def test_losses(name: str, mode: str, kl: str, poison: float) -> None:
    config = actor(kl_loss_coef=0.1, entropy_coeff=0.05, clip_ratio_c=2.0)
    names = ("old", "rollout", "ref", "correction")
    columns = {column: two_tensors(seed, poison) for seed, column in enumerate(names)}
    columns["correction"] = tuple(tensor.abs() for tensor in columns["correction"])  # type: ignore[assignment]
    signs = torch.tensor([[1.0], [-1.0]] * 4, dtype=torch.float64)
    current = two_tensors(9, poison)
    results = []
    for side, mask in enumerate((MASK, COMPACT_MASK)):
        leaf = current[side].clone().requires_grad_()
        inputs = make_inputs(
            leaf,
            advantages=signs.expand(mask.shape).clone().masked_fill(~mask, poison),
            mask=mask,
            mode=mode,
            **{column: tensors[side] for column, tensors in columns.items()},  # type: ignore[arg-type]
        )
        loss, metrics = run(inputs, config, name, kl)
        (gradient,) = torch.autograd.grad(loss, leaf)
        results.append((loss, gradient, {metric: value(part) for metric, part in metrics.items()}))
    (loss, gradient, metrics), (want_loss, want_gradient, want_metrics) = results
    assert loss.item() == pytest.approx(want_loss.item(), rel=1e-12)
    assert (gradient[~MASK] == 0).all()
    torch.testing.assert_close(compacted(gradient), want_gradient, rtol=1e-12, atol=1e-15)
    assert (want_gradient[COMPACT_MASK] != 0).any()
    assert metrics == pytest.approx(want_metrics, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("kind", ["token", "sequence", "geometric", "icepop", "off_policy"])
def test_correction_and_rejection(kind: str) -> None:
    old, rollout = two_tensors(1), two_tensors(2)
    signs = torch.tensor([[1.0], [-1.0]] * 4, dtype=torch.float64).expand(MASK.shape)
    config = RolloutCorrection.model_validate(
        {"rollout_is": None if kind == "off_policy" else kind}
        | {"rollout_rs": None if kind == "icepop" else kind, "rollout_rs_threshold": 0.2 if "off" in kind else 1.5}
    )
    weights, records = correction_weights(old[0], rollout[0], MASK, config)
    want_weights, want_records = correction_weights(old[1], rollout[1], COMPACT_MASK, config)
    if weights is not None and want_weights is not None:
        assert (weights[~MASK] == 0).all()
        torch.testing.assert_close(compacted(weights.double()), want_weights.double(), rtol=1e-6, atol=0)
        assert numbers(records) == pytest.approx(numbers(want_records), rel=1e-9)
    stays, records = rejection_mask(old[0], rollout[0], MASK, signs, config)
    want_stays, want_records = rejection_mask(old[1], rollout[1], COMPACT_MASK, signs, config)
    if stays is not None and want_stays is not None:
        assert not (stays & ~MASK).any()
        assert torch.equal(compacted(stays.double()), want_stays.double())
        assert 0 < int(stays.sum()) < int(MASK.sum())
        assert numbers(records) == pytest.approx(numbers(want_records))
