"""LossPass: forward and backward of one mini-batch. From the model's log-probabilities to gradients and metric sums."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_megatron.algo.losses import LossInputs, MetricSum
from grpo_megatron.device import Device
from grpo_megatron.models.forward import Pack, forward_backward, unpack
from grpo_megatron.types import Batch

MetricSums = dict[str, MetricSum]
LossFunction = Callable[[LossInputs], tuple[Tensor, MetricSums]]


class LossPass:
    """What the passes over the packs of one mini-batch leave behind, besides gradients in the model's buffers.

    `sums`: the metric sums of this rank. `logprobs`: for each pack, its rows and their log-probabilities [rows, R of the
    pack], on the device. Both are empty on other pipeline stages than the last.
    """

    def __init__(self, batch: Batch, loss: LossFunction) -> None:
        self.batch, self.loss = batch, loss
        self.sums: MetricSums = {}
        self.logprobs: list[tuple[list[int], Tensor]] = []

    def run(self, model: torch.nn.Module, packs: list[Pack], device: Device, num_forward_only: int = 0) -> None:
        """Add the gradients of `packs` to the model's buffers. Collective over the replica.

        The last `num_forward_only` packs have no gradient. They get a forward pass, for metrics and log-probabilities.
        """
        cut = len(packs) - num_forward_only
        if num_forward_only:
            forward_backward(model, packs[cut:], self._consume, device=device, forward_only=True)
        forward_backward(model, packs[:cut], self._consume, device=device, forward_only=False)

    def host_logprobs(self) -> Tensor:
        """Log-probability of every response token [B, R], float32 on the host; 0 in rows that were not in a pack."""
        out = torch.zeros(self.batch.response_mask.shape)
        for rows, part in self.logprobs:
            out[rows, : part.shape[1]] = part.float().cpu()
        return out

    def _consume(self, current: Pack, flat_logprobs: Tensor, flat_entropy: Tensor) -> tuple[Tensor, None]:
        if not current.rows:
            return flat_logprobs.sum() + flat_entropy.sum(), None  # zero, but connected to every parameter
        width = max(current.lengths)
        logprobs, entropy = (unpack(flat, current.lengths, width) for flat in (flat_logprobs, flat_entropy))
        self.logprobs.append((current.rows, logprobs.detach()))
        value, metrics = self.loss(loss_inputs(self.batch, current.rows, logprobs, entropy))
        add_sums(self.sums, metrics)
        return value, None


def add_sums(total: MetricSums, metrics: MetricSums) -> None:
    """Add the metric sums of one micro-batch to those of the mini-batch."""
    for name, part in metrics.items():
        total[name] = total[name].plus(part) if name in total else part


def loss_inputs(batch: Batch, rows: list[int], logprobs: Tensor, entropy: Tensor) -> LossInputs:
    """What a loss reads of `rows`. `logprobs` and `entropy` [len(rows), R] are the model's.

    Where the batch has no old log-probabilities, they are the model's own.
    """

    def of_rows(tensor: Tensor) -> Tensor:
        return tensor[rows, : logprobs.shape[1]].to(logprobs.device)

    return LossInputs(
        logprobs=logprobs,
        entropy=entropy,
        old_logprobs=logprobs.detach() if batch.old_logprobs is None else of_rows(batch.old_logprobs),
        rollout_logprobs=of_rows(batch.rollout_logprobs),
        ref_logprobs=None if batch.ref_logprobs is None else of_rows(batch.ref_logprobs),
        advantages=of_rows(batch.advantages),
        mask=of_rows(batch.loss_mask),
        token_weights=of_rows(batch.token_weights),
        correction=None if batch.correction is None else of_rows(batch.correction),
    )
