"""Aggregation as one weight per token, fixed before batching: loss = sum over tokens of weight * token loss.

    mode                      weight of each token of response i
    token-mean                1 / N_tok                DAPO, arXiv 2503.14476
    seq-mean-token-mean       1 / (N_seq * n_i)        DeepSeekMath, arXiv 2402.03300: 1/G sum 1/|o_i|
    seq-mean-token-sum        1 / N_seq
    seq-mean-token-sum-norm   1 / (N_seq * L)          Dr.GRPO, arXiv 2503.20783; L is constant through the run
    token-sum                 1

n_i is the number of loss tokens of response i, N_tok = sum n_i and N_seq = #{n_i > 0}. Both are over **one optimizer
step**: every micro-batch, every data-parallel rank. A response that is left out, or has no loss token, counts in
neither. The weights are known before anything is packed, so micro-batches, padding and parallel layouts cannot change
the gradient. Averaging the means of micro-batches, as several codebases do, makes the gradient depend on all three.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from grpo_megatron.algo.advantages import informative_groups
from grpo_megatron.config import OverlongBuffer
from grpo_megatron.importing import Registry
from grpo_megatron.types import GroupTable

# (n_i of the responses that count: all > 0, at least one; L) -> one weight per response
TokenWeighting = Callable[[list[int], float], list[float]]

token_weightings: Registry[TokenWeighting] = Registry("loss aggregation mode")


@token_weightings.register("token-mean")
def token_mean(lengths: list[int], norm_length: float) -> list[float]:
    """Every loss token of the step has the same weight."""
    return [1.0 / sum(lengths)] * len(lengths)


@token_weightings.register("seq-mean-token-mean")
def seq_mean_token_mean(lengths: list[int], norm_length: float) -> list[float]:
    """Every response has the same weight, divided equally among its loss tokens."""
    return [1.0 / (len(lengths) * length) for length in lengths]


@token_weightings.register("seq-mean-token-sum")
def seq_mean_token_sum(lengths: list[int], norm_length: float) -> list[float]:
    """Every loss token counts 1 over the number of responses."""
    return [1.0 / len(lengths)] * len(lengths)


@token_weightings.register("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(lengths: list[int], norm_length: float) -> list[float]:
    """Every loss token counts 1 over the number of responses times `norm_length`."""
    return [1.0 / (len(lengths) * norm_length)] * len(lengths)


@token_weightings.register("token-sum")
def token_sum(lengths: list[int], norm_length: float) -> list[float]:
    """Every loss token counts 1."""
    return [1.0] * len(lengths)


def token_weights(mode: str, num_loss_tokens: list[int], in_loss: list[bool], norm_length: float) -> list[float]:
    """The weight of each response's loss tokens in the loss of ONE optimizer step.

    `num_loss_tokens[i]` is n_i; `in_loss[i]` false leaves the response out (weight 0); `norm_length` is L in tokens. The
    lists cover the whole optimizer step, not one rank's share. Raises ValueError on an unknown mode.
    """
    weighting = token_weightings.get(mode)
    rows = [row for row, count in enumerate(num_loss_tokens) if in_loss[row] and count > 0]
    weights = [0.0] * len(num_loss_tokens)
    if rows:
        for row, weight in zip(rows, weighting([num_loss_tokens[row] for row in rows], norm_length), strict=True):
            weights[row] = weight
    return weights


# -- Penalties and copies ----------------------------------------------------------------------------------------------
# Changes to a step's rewards and groups, after the reward function and before the advantages.
#
#     soft overlong penalty   0 below L - c, -(n - (L - c)) / c up to L, -1 beyond       DAPO, arXiv 2503.14476
#     copies                  groups with different rewards take the places of the rest   DUPO, arXiv 2507.02592
#
# n response tokens (in the loss or not), L the longest response allowed, c the buffer.


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """The (negative) reward of a response of `length` tokens: 0 to -1."""
    return max(-1.0, min(0.0, (max_length - buffer - length) / buffer))


def with_overlong_penalty(table: GroupTable, config: OverlongBuffer, max_length: int) -> GroupTable:
    """The table with the penalty in `reward`; `raw_reward` keeps the rewards before it. Unchanged if there is no buffer."""
    if config.len is None:
        return table
    penalties = [config.penalty_factor * overlong_penalty(n, max_length, config.len) for n in table.response_length]
    rewards = [reward + penalty for reward, penalty in zip(table.reward, penalties, strict=True)]
    return replace(table, reward=rewards, raw_reward=table.raw_reward or table.reward)


def dupo_copies(table: GroupTable) -> list[int]:
    """Counts how often each row is trained on: 0 in groups whose rewards are equal, 1 or more in the others.

    The places are given to the other groups in turn, in prompt order: the copies of two groups differ by at most one. All
    counts are 0 when every group's rewards are equal. The advantages stay those of the original group: copies are not
    part of its statistics.
    """
    copies = [0] * len(table)
    informative = {table.prompt_index[rows[0]] for rows in informative_groups(table)}
    groups = table.groups()
    kept = [rows for rows in groups if table.prompt_index[rows[0]] in informative]
    for place in range(len(groups) if kept else 0):
        for row in kept[place % len(kept)]:
            copies[row] += 1
    return copies
