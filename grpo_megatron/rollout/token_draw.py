"""Drawing one token for each row by inverting its cumulative distribution: one uniform number per token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_megatron.rollout.engine import Request

_BELOW_ONE = 1 - 2.0**-50  # times a sum, it stays below the sum


def draw_tokens(
    logits: Tensor, requests: Sequence[Request], uniform: Sequence[Callable[[], float]]
) -> tuple[list[int], list[float]]:
    """(tokens, their log-probabilities) for logits [n, V], by the temperature, top_k and top_p of each row's request.

    `uniform[row]` gives the next number of the row's generator in [0, 1). It is not called for a greedy row (temperature
    0), whose token is the most likely one and whose log-probability is that at temperature 1. A row is computed for
    itself: what it draws does not depend on the others. The sums are in float64, so that a vocabulary of 10^5 tokens
    loses nothing.
    """
    temperatures = [request.temperature or 1.0 for request in requests]
    if set(temperatures) != {1.0}:
        logits = logits / torch.tensor(temperatures).unsqueeze(1)
    if any(request.top_k > 0 or request.top_p < 1 for request in requests):
        logits = torch.stack([_cut(row, request) for row, request in zip(logits, requests, strict=True)])
    logprobs = logits.log_softmax(-1)
    sums = logprobs.double().exp_().cumsum(-1)
    is_greedy = [request.temperature == 0 for request in requests]
    numbers = [0.0 if g else min(u(), _BELOW_ONE) for g, u in zip(is_greedy, uniform, strict=True)]
    targets = torch.tensor(numbers, dtype=torch.float64).unsqueeze(1) * sums[:, -1:]
    tokens = torch.searchsorted(sums, targets, right=True)  # the first sum above: never a token of probability 0
    if any(is_greedy):
        tokens = torch.where(torch.tensor(is_greedy).unsqueeze(1), logprobs.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0].tolist(), logprobs.gather(1, tokens)[:, 0].tolist()


def _cut(logits: Tensor, request: Request) -> Tensor:
    """Logits [V] with minus infinity outside the top_k most likely, then outside the fewest that have top_p together."""
    if 0 < request.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(request.top_k).values[-1], float("-inf"))
    if request.top_p < 1:
        ordered, order = logits.sort(descending=True, stable=True)
        probabilities = ordered.double().softmax(0)
        is_out = probabilities.cumsum(0) - probabilities >= request.top_p
        is_out[0] = False
        logits = logits.masked_fill(torch.zeros_like(is_out).scatter_(0, order, is_out), float("-inf"))
    return logits
