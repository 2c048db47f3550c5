"""Reward models: scores from a decoder with a scalar head (scalar_head.py), per sequence or per step. Training on pairs.

SequenceScorer reads at the sequence's last token that is not padding. This is what transformers'
`*ForSequenceClassification` computes, pad_token_id included: if a response ends in that id, the score is read at the token
before it. StepScorer reads at the last token of each step, where transformers' `*ForTokenClassification` has that token's
logits; its score is the log-odds that the step is right (arXiv:2312.08935).

The training loss of `RewardModel` is -log sigmoid(chosen - rejected), summed over pairs and divided by the number of pairs of
the whole step. The divisor is fixed before batching, so the layout cannot change the gradient. Both sequences of a pair are
always in one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_megatron.algo.scores import pairwise_loss
from grpo_megatron.config import ActorConfig, RewardModelConfig
from grpo_megatron.device import Device
from grpo_megatron.models.forward import Pack, forward_backward, unpack
from grpo_megatron.models.offload import OffloadedTensors
from grpo_megatron.models.reward_folder import RewardFolder, read_reward_folder
from grpo_megatron.models.scalar_head import ScalarPolicy, load_scalar_model, read_at
from grpo_megatron.models.sharded import ShardedModel
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.types import Batch


class SequenceScorer(ShardedModel):
    """A sharded model with one score per sequence, the same on every rank of the replica."""

    folder: RewardFolder

    def packs(self, batch: Batch, micro_batches: list[list[int]], temperature: float | None = None) -> list[Pack]:
        packs = super().packs(batch, micro_batches, temperature)
        return [read_at(self, batch, pack, [[self._last(batch.tokens[row])] for row in pack.rows]) for pack in packs]

    def _last(self, tokens: Tensor) -> int:
        """Index of the last token that is not padding; 0 if there is none."""
        if self.folder.pad_token_id is None:
            return len(tokens) - 1
        is_token = tokens != self.folder.pad_token_id
        return int(is_token.nonzero().max()) if is_token.any() else 0

    def score(self, batch: Batch) -> Tensor:
        """One score per sequence [B], float32 on the host. Collective over the replica."""
        return self.forward_batch(batch, torch.zeros(len(batch)), lambda current, scores: scores)


class StepScorer(ShardedModel):
    """A sharded model with one score per step, the same on every rank of the replica."""

    folder: RewardFolder

    def score_steps(self, batch: Batch, ends: Sequence[Sequence[int]]) -> Tensor:
        """The log-odds that each step is right: [B, most steps], float32 on the host, 0 behind a row's last step.

        `ends[row]`: the last response token of each step. Collective over the replica.
        """
        width = max((len(steps) for steps in ends), default=0)
        self._ends = [[batch.prompt_lengths[row] + end for end in steps] for row, steps in enumerate(ends)]
        out = torch.zeros(len(batch), width)
        return self.forward_batch(batch, out, lambda current, scores: unpack(scores, current.lengths, width))

    def packs(self, batch: Batch, micro_batches: list[list[int]], temperature: float | None = None) -> list[Pack]:
        packs = super().packs(batch, micro_batches, temperature)
        return [read_at(self, batch, pack, [self._ends[row] for row in pack.rows]) for pack in packs]


class _Frozen(ShardedModel):
    """No gradients, no optimizer. With `actor.megatron.offload_reference` its weights are on the host between two batches."""

    def __init__(self, folder: RewardFolder, dtype: str, actor: ActorConfig, mesh: Mesh, device: Device) -> None:
        self.folder = folder
        inner = load_scalar_model(folder, actor.megatron, dtype, mesh, device, has_gradients=False)
        super().__init__(inner.requires_grad_(False), folder.arch, actor, mesh, device)
        self._offloaded = OffloadedTensors(device)
        self._offload()

    def _offload(self, *, unchanged: bool = False) -> None:
        if self.actor.megatron.offload_reference:
            self._offloaded.offload(self.model.parameters(), unchanged=unchanged)

    def forward_batch(
        self, batch: Batch, out: Tensor, read: Callable[[Pack, Tensor], Tensor], temperature: float | None = None
    ) -> Tensor:
        self._offloaded.onload()
        try:
            return super().forward_batch(batch, out, read, temperature)
        finally:
            self._offload(unchanged=True)


class FrozenRewardModel(SequenceScorer, _Frozen):
    """A reward model that is not trained."""


class FrozenStepModel(StepScorer, _Frozen):
    """A process reward model that is not trained."""


class RewardModel(ScalarPolicy, SequenceScorer):
    """A reward model that learns from pairs."""

    def __init__(self, config: RewardModelConfig, dtype: str, actor: ActorConfig, mesh: Mesh, device: Device) -> None:
        assert config.path is not None
        with_optim = actor.model_copy(update={"optim": config.optim})
        super().__init__(read_reward_folder(config.path), dtype, with_optim, mesh, device)

    def update_pairs(self, batch: Batch, num_pairs: int) -> dict[str, float]:
        """One optimizer step on the batch's one mini-batch. Collective; the same metrics on every rank.

        Rows 2i (chosen) and 2i + 1 (rejected) are neighbours in one micro-batch. `num_pairs` counts the pairs of all ranks.
        Like `Policy.update`, skips the step if the gradient on any rank is not finite. Raises TooManySkippedSteps.
        """
        totals = self.backward_pairs(batch, num_pairs)
        norm = self._step()
        loss, correct, margin = (total / num_pairs for total in self.mesh.total(totals.tolist()))
        metrics = {"loss": loss, "accuracy": correct, "margin": margin, "grad_norm": norm}
        return {f"reward_model/{name}": value for name, value in metrics.items()}

    def backward_pairs(self, batch: Batch, num_pairs: int) -> Tensor:
        """Gradients into the model's buffers, summed over all ranks. Returns this rank's sums: loss, correct pairs, margins."""
        totals = torch.zeros(3, dtype=torch.float64)

        def consume(current: Pack, scores: Tensor, _: Tensor) -> tuple[Tensor, None]:
            chosen, rejected = scores[0::2], scores[1::2]
            assert [row + 1 for row in current.rows[0::2]] == current.rows[1::2], f"a pair is split: {current.rows}"
            losses = pairwise_loss(chosen, rejected)  # without rows: empty, but connected to every parameter
            if self.mesh.is_first_replica_rank:
                margins = (chosen - rejected).detach().double()
                correct = (margins > 0).double() + 0.5 * (margins == 0).double()
                totals.add_(torch.stack([losses.detach().double().sum(), correct.sum(), margins.sum()]).cpu())
            return losses.sum() / num_pairs, None

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        (micro_batches,) = batch.mini_batches
        packs = self.packs(batch, micro_batches)
        forward_backward(self.model, packs, consume, device=self.device, forward_only=False)
        return totals
