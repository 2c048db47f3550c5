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

from grpo_megatron.registry import Registry

# (n_i of the responses that count: all > 0, at least one; L) -> one weight per response
TokenWeighting = Callable[[list[int], float], list[float]]

token_weightings: Registry[TokenWeighting] = Registry("loss aggregation mode")


@token_weightings.register("token-mean")
def token_mean(lengths: list[int], norm_length: float) -> list[float]:
    return [1.0 / sum(lengths)] * len(lengths)


@token_weightings.register("seq-mean-token-mean")
def seq_mean_token_mean(lengths: list[int], norm_length: float) -> list[float]:
    return [1.0 / (len(lengths) * length) for length in lengths]


@token_weightings.register("seq-mean-token-sum")
def seq_mean_token_sum(lengths: list[int], norm_length: float) -> list[float]:
    return [1.0 / len(lengths)] * len(lengths)


@token_weightings.register("seq-mean-token-sum-norm")
def seq_mean_token_sum_norm(lengths: list[int], norm_length: float) -> list[float]:
    return [1.0 / (len(lengths) * norm_length)] * len(lengths)


@token_weightings.register("token-sum")
def token_sum(lengths: list[int], norm_length: float) -> list[float]:
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
