"""Aggregation as one weight per token, fixed before batching: loss = sum over tokens of weight * token loss.

The weights are known before anything is packed, so micro-batches, padding and parallel layouts cannot change the gradient.
Averaging the means of micro-batches, as several codebases do, makes the gradient depend on all three.
"""

from __future__ import annotations

from collections.abc import Callable

from grpo_megatron.registry import Registry

# (n_i of the responses that count: all > 0, at least one; L) -> one weight per response
TokenWeighting = Callable[[list[int], float], list[float]]

token_weightings: Registry[TokenWeighting] = Registry("loss aggregation mode")

_WEIGHTINGS: dict[str, TokenWeighting] = {
    "token-mean": lambda lengths, norm_length: [1.0 / sum(lengths)] * len(lengths),
    "seq-mean-token-mean": lambda lengths, norm_length: [1.0 / (len(lengths) * length) for length in lengths],
    "seq-mean-token-sum": lambda lengths, norm_length: [1.0 / len(lengths)] * len(lengths),
    "seq-mean-token-sum-norm": lambda lengths, norm_length: [1.0 / (len(lengths) * norm_length)] * len(lengths),
    "token-sum": lambda lengths, norm_length: [1.0] * len(lengths),
}
for _mode, _weighting in _WEIGHTINGS.items():
    token_weightings.register(_mode)(_weighting)


def token_weights(mode: str, num_loss_tokens: list[int], norm_length: float) -> list[float]:
    """Computes the weight of each response's loss tokens in the loss of ONE optimizer step.

        token-mean                1 / N_tok                DAPO, arXiv 2503.14476
        seq-mean-token-mean       1 / (N_seq * n_i)        DeepSeekMath, arXiv 2402.03300: 1/G sum 1/|o_i|
        seq-mean-token-sum        1 / N_seq
        seq-mean-token-sum-norm   1 / (N_seq * L)          Dr.GRPO, arXiv 2503.20783; L is constant through the run
        token-sum                 1

    n_i is the number of loss tokens of response i, N_tok = sum n_i and N_seq = #{n_i > 0}, both over the optimizer step: every
    micro-batch, every data-parallel rank. A response that is left out, or has no loss token, counts in neither.

    `num_loss_tokens[i]` is n_i of every response of the whole optimizer step, not of one rank's share; 0 leaves a response
    out. `norm_length` is L in tokens. Raises ValueError on an unknown mode.
    """
    weighting = token_weightings.get(mode)
    counts = [count for count in num_loss_tokens if count]
    weights = iter(weighting(counts, norm_length) if counts else [])
    return [next(weights) if count else 0.0 for count in num_loss_tokens]
