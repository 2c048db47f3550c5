"""The loss of trajectories, from samples to the scalar, against formulas in plain torch over the generated tokens alone.

Two prompts with four trajectories each: observations in the middle, one turn only, a trajectory whose environment failed
and that is masked. Every loss and every aggregation; the second epoch's ratios are not 1.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_megatron.algo.losses import LossInputs, policy_losses, total_loss
from grpo_megatron.algo.plan import make_plan, token_weightings
from grpo_megatron.config import ActorConfig, AlgorithmConfig
from grpo_megatron.parallel.exchange import build_batch, gather_groups
from grpo_megatron.types import Batch, Sample, Turn
from tests.sampling.fakes import LoneMesh, prompt

LENGTHS = [  # tokens of the turns: assistant, observation, assistant, ...
    [[3, 4, 2], [2, 1, 2, 5, 1], [6], [1, 3, 1]],
    [[2, 2, 2], [4], [1, 1, 1, 1, 1, 1, 4], [5, 2, 3]],
]
REWARDS = [[1.0, 0.0, 0.5, 0.25], [0.0, 1.0, 0.75, 1.0]]
MASKED = (1, 3)  # (prompt, sample) of a trajectory that is not in the loss
L = 40  # data.max_response_length
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 2.0}


def samples() -> list[Sample]:
    """An observation's log-probability is 7: a number that would show in every loss."""
    found = []
    for p, group in enumerate(LENGTHS):
        for i, lengths in enumerate(group):
            ends = torch.tensor(lengths).cumsum(0).tolist()
            kinds = ["observation" if k % 2 else "assistant" for k in range(len(lengths))]
            turns = [Turn(e - n, e, kind, 0, 0) for e, n, kind in zip(ends, lengths, kinds, strict=True)]
            mask = [int(turn.kind == "assistant") for turn in turns for _ in range(turn.start, turn.end)]
            logprobs = [-1.0 if in_loss else 7.0 for in_loss in mask]
            mask = [0] * len(mask) if (p, i) == MASKED else mask
            sample = Sample(prompt(p), p, i, list(range(len(mask))), logprobs, "stop", 0, loss_mask=mask, turns=turns)
            sample.reward = REWARDS[p][i]
            found.append(sample)
    return found


def generated(sample: Sample) -> list[int]:
    """Places of the tokens in the loss, from the turns."""
    if (sample.prompt_index, sample.index) == MASKED:
        return []
    return [t for turn in sample.turns if turn.kind == "assistant" for t in range(turn.start, turn.end)]


def batch_of(drawn: list[Sample], config: ActorConfig, estimator: str) -> Batch:
    mesh = LoneMesh()
    table = gather_groups(drawn, mesh)
    algorithm = AlgorithmConfig(adv_estimator=estimator)
    plan = make_plan(table, algorithm, config, dp=1, train_batch_size=2, max_response_length=L)
    rows = plan.rows(0)
    return build_batch(
        rows,
        plan,
        0,
        tokens=[torch.tensor([*drawn[row].prompt.prompt_ids, *drawn[row].response_ids]) for row in rows],
        prompt_lengths=[1] * len(rows),
        rollout_logprobs=[torch.tensor(drawn[row].rollout_logprobs) for row in rows],
        loss_spans=[table.spans_of(row) for row in rows],
    )


def sequence_loss(name: str, new: Tensor, old: Tensor, advantage: float) -> Tensor:
    """Per generated token [n], from the papers' formulas."""
    low, high = 1 - CLIP["clip_ratio_low"], 1 + CLIP["clip_ratio_high"]
    ratio = (new - old).exp()
    if name == "vanilla":
        surrogate = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(low, high))
        return surrogate if advantage >= 0 else surrogate.minimum(torch.tensor(-advantage * CLIP["clip_ratio_c"]))
    if name == "cispo":
        return -ratio.detach().clamp(0, high) * advantage * new
    if name == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        return -advantage * 4 / tau * torch.sigmoid(tau * (ratio - 1))
    if name in ("gpg", "sft"):
        return -advantage * new
    if name in ("gspo", "gspo_token"):
        whole = (new - old).mean().exp()
        if name == "gspo_token":
            whole = whole.detach() * (new - new.detach()).exp()
        return torch.maximum(-advantage * whole, -advantage * whole.clamp(low, high)).expand(len(new))
    assert name in ("gmpo", "geo_mean"), f"write the formula of {name}"
    log_ratio = new - old
    bounded = log_ratio.clamp(-CLIP["clip_ratio_low"], CLIP["clip_ratio_high"])
    pessimistic = torch.minimum(log_ratio, bounded) if advantage > 0 else torch.maximum(log_ratio, bounded)
    return (-advantage * pessimistic.mean().exp()).expand(len(new))


def aggregated(mode: str, losses: list[Tensor]) -> Tensor:
    """`losses`: one tensor per sequence that has generated tokens."""
    count, tokens = len(losses), sum(map(len, losses))
    sums = [loss.sum() for loss in losses]
    if mode == "token-mean":
        return torch.stack(sums).sum() / tokens
    if mode == "seq-mean-token-mean":
        return torch.stack([loss.mean() for loss in losses]).sum() / count
    scale = {"seq-mean-token-sum": count, "seq-mean-token-sum-norm": count * L, "token-sum": 1}[mode]
    return torch.stack(sums).sum() / scale


@pytest.mark.parametrize("mode", token_weightings.names())
@pytest.mark.parametrize("name", [name for name in policy_losses.names() if not policy_losses.facts(name).scores])
def test_loss_and_gradient_equal_the_formulas_over_generated_tokens(name: str, mode: str) -> None:
    drawn = samples()
    paired = policy_losses.facts(name).paired
    config = ActorConfig(use_kl_loss=False, loss_mode=name, loss_agg_mode=mode, ppo_max_token_len_per_gpu=40, **CLIP)
    batch = batch_of(drawn, config, "best_worst" if paired else "grpo")
    shape = batch.loss_mask.shape
    generator = torch.Generator().manual_seed(0)
    columns = {
        c: -1 + 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64) for c in ("new", "old", "ref")
    }
    new = columns["new"].clone().requires_grad_()
    total = new.new_zeros(())
    for rows in (micro for mini in batch.mini_batches for micro in mini):
        inputs = LossInputs(
            logprobs=new[rows],
            entropy=torch.zeros(len(rows), shape[1]),
            old_logprobs=columns["old"][rows],
            rollout_logprobs=batch.rollout_logprobs[rows],
            ref_logprobs=columns["ref"][rows],
            advantages=batch.advantages[rows],
            mask=batch.loss_mask[rows],
            token_weights=batch.token_weights[rows].double(),
        )
        total = total + total_loss(inputs, config, policy_losses.get(name), None)[0]
    (gradient,) = torch.autograd.grad(total, new)

    leaf = columns["new"].clone().requires_grad_()
    in_loss = {batch.rows[i]: (i, generated(drawn[batch.rows[i]])) for i in range(len(batch))}
    losses = []
    if paired:
        for p, group in enumerate(REWARDS):
            rows = [4 * p + i for i in range(4) if (p, i) != MASKED]
            best, worst = (pick(rows, key=lambda row: group[row % 4]) for pick in (max, min))
            chosen, rejected = (
                (leaf - columns["ref"])[in_loss[row][0], in_loss[row][1]].sum() for row in (best, worst)
            )
            value = -torch.log(torch.sigmoid(config.dpo_beta * (chosen - rejected)))
            losses += [value.expand(len(in_loss[row][1])) for row in (best, worst)]
    else:
        for row, (i, places) in in_loss.items():
            group = REWARDS[row // 4]
            mean = sum(group) / 4
            std = math.sqrt(sum((reward - mean) ** 2 for reward in group) / 3)
            advantage = (group[row % 4] - mean) / (std + 1e-6)
            losses.append(sequence_loss(name, leaf[i, places], columns["old"][i, places], advantage))
    want = aggregated(mode, losses)
    (want_gradient,) = torch.autograd.grad(want, leaf)
    assert total.item() == pytest.approx(want.item(), rel=1e-6)
    torch.testing.assert_close(gradient, want_gradient, rtol=1e-6, atol=1e-9)
    observed = torch.ones(shape, dtype=torch.bool)
    for i, places in in_loss.values():
        observed[i, places] = False
    assert not gradient[observed].any() and gradient[~observed].any()


def test_a_masked_trajectory_counts_in_its_group_and_nowhere_else() -> None:
    batch = batch_of(samples(), ActorConfig(), "grpo")
    assert 4 * MASKED[0] + MASKED[1] not in batch.rows
    counted = sum(len(generated(sample)) for sample in samples())
    assert batch.token_weights[batch.loss_mask].tolist() == pytest.approx([1 / counted] * counted)
