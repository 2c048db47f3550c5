"""Supervised learning, RFT and DPO in the unified view (DeepSeekMath, arXiv 2402.03300, section 5): a selection of samples.

The methods differ in the source of the responses (`algorithm.source`), in the reward, and in the coefficient of each
log-probability's gradient. The estimators here give the coefficients (of DPO: the sign; its loss determines the size). None is
not an advantage of 0: a row with None is left out, and counts in no denominator.
"""

from __future__ import annotations

import torch.nn.functional as functional
from torch import Tensor, ones_like

from grpo_megatron.algo.advantages import Advantages, advantage_estimators, is_informative, scorable_groups
from grpo_megatron.algo.losses import SEQUENCE_MEAN, LossInputs, LossMetrics, MetricSum, policy_losses
from grpo_megatron.algo.reinforce import policy_gradient
from grpo_megatron.config import ActorConfig, AlgorithmConfig
from grpo_megatron.shapes import Bool, Float
from grpo_megatron.types import GroupTable


@advantage_estimators.register("constant", needs_rewards=False, ignores_token_penalties=True)
def constant(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Gives 1 to every sample: SFT."""
    return [1.0] * len(table)


@advantage_estimators.register("zero", needs_rewards=False, ignores_token_penalties=True)
def zero(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Gives 0 to every sample: the teachers alone train the policy (distillation.py)."""
    return [0.0] * len(table)


@advantage_estimators.register("rft", ignores_token_penalties=True)
def rft(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Gives 1 where reward >= `rft_threshold`, else None, also without a reward: RFT, online RFT (arXiv 2308.01825)."""
    return [1.0 if reward >= config.rft_threshold else None for reward in table.reward]


@policy_losses.register("sft", is_proportional=True, is_likelihood=True)
def log_likelihood(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Computes -A logprobs on samples from any source. Where A = 1, this is maximum likelihood."""
    return policy_gradient(inputs, config)


@advantage_estimators.register("best_worst", compares_group=True, makes_pairs=True, ignores_token_penalties=True)
def best_worst(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Makes one pair per prompt, for DPO: +1 for the best and -1 for the worst sample by reward, None elsewhere.

    Of equal rewards the lowest index is taken; all equal: no pair. A response without a loss token has no gradient and cannot
    be part of a pair.
    """
    advantages: Advantages = [None] * len(table)
    num_loss_tokens = table.num_loss_tokens()
    for group in scorable_groups(table, table.reward):
        rows = [row for row in group if num_loss_tokens[row]]
        if is_informative([table.reward[row] for row in rows]):
            advantages[min(rows, key=lambda row: (-table.reward[row], table.index[row]))] = 1.0
            advantages[min(rows, key=lambda row: (table.reward[row], table.index[row]))] = -1.0
    return advantages


@policy_losses.register("dpo", is_likelihood=True, paired=True, needs_reference=True, aggregation=SEQUENCE_MEAN)
def dpo(inputs: LossInputs, config: ActorConfig) -> tuple[Float[Tensor, "B R"], LossMetrics]:
    """Computes -log sigmoid(dpo_beta * margin) of each pair (arXiv 2305.18290), at every token of both its rows.

    margin = sum of (logprobs - ref_logprobs) of the chosen response (row 2i, advantage 1) minus the same of the rejected one
    (row 2i + 1, advantage -1). Two sequences of weight 1/N each make 2/N = 1 over the number of pairs. Reports
    `actor/dpo_accuracy` (margin above 0) and `actor/dpo_margin` (nats, without beta), means over pairs.
    """
    assert inputs.ref_logprobs is not None, "the dpo loss needs ref_logprobs"
    assert len(inputs.mask) % 2 == 0, f"{len(inputs.mask)} rows are no pairs"
    side = ones_like(inputs.advantages)
    side[1::2] = -1.0
    assert bool(((inputs.advantages == side) | ~inputs.mask).all()), (
        "rows are not chosen (+1) and rejected (-1) in turn"
    )
    log_ratio = (inputs.logprobs - inputs.ref_logprobs).sum(-1)  # [B]
    margin = log_ratio[0::2] - log_ratio[1::2]  # [B / 2]
    return per_token(-functional.logsigmoid(config.dpo_beta * margin), inputs.mask), {
        "actor/dpo_accuracy": pair_mean(inputs, (margin > 0).to(margin.dtype)),
        "actor/dpo_margin": pair_mean(inputs, margin),
    }


def per_token(pair_values: Float[Tensor, " pairs"], mask: Bool[Tensor, "B R"]) -> Float[Tensor, "B R"]:
    """Repeats each pair's value at every token of both its rows: [B / 2] -> [B, R]."""
    return pair_values.repeat_interleave(2)[:, None].expand_as(mask)


def pair_mean(inputs: LossInputs, pair_values: Tensor) -> MetricSum:
    """Computes the mean over the pairs of the optimizer step: its share of this micro-batch."""
    return MetricSum((inputs.token_weights * per_token(pair_values.detach(), inputs.mask)).sum(), None)
