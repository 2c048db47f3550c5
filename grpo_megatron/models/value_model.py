"""ValueModel: the critic of PPO, a decoder with a scalar head (scalar_head.py) and one value per response token.

V_t is read at the hidden state before response token t, as the policy's log-probability of that token is. It is the number
that transformers' `*ForTokenClassification` with one label computes at the token before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_megatron.algo.losses import MetricSum, ValueInputs, value_loss
from grpo_megatron.config import ActorConfig, CriticConfig
from grpo_megatron.device import Device
from grpo_megatron.models.forward import Pack, forward_backward, unpack
from grpo_megatron.models.loss_pass import add_sums
from grpo_megatron.models.offload import OffloadedTensors
from grpo_megatron.models.reward_folder import RewardFolder
from grpo_megatron.models.scalar_head import ScalarPolicy
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.types import Batch


class ValueModel(ScalarPolicy):
    """See ScalarPolicy. With `critic.offload` its weights are on the device only inside `in_use` and `values`."""

    def __init__(
        self, config: CriticConfig, folder: RewardFolder, dtype: str, actor: ActorConfig, mesh: Mesh, device: Device
    ) -> None:
        offloads = config.offload or actor.megatron.offload_optimizer
        megatron = actor.megatron.model_copy(update={"offload_optimizer": offloads})
        super().__init__(
            folder, dtype, actor.model_copy(update={"optim": config.optim, "megatron": megatron}), mesh, device
        )
        self.config = config
        self._weights = OffloadedTensors(device)

    # -- memory --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, everything is on the device. Afterwards, what `critic.offload` or `offload_optimizer` names is not."""
        self._weights.onload()
        self.onload()
        yield
        self.offload()
        self._offload_weights()

    def _offload_weights(self, *, unchanged: bool = False) -> None:
        if self.config.offload:
            self._gather_parameters()
            self._weights.offload(self._weight_tensors(), unchanged=unchanged)

    def _weight_tensors(self) -> Iterator[Tensor]:
        """The distributed optimizer's buffers, of which the parameters are views, or else the parameters."""
        for buffer in (*self.ddp.buffers, *self.ddp.expert_parallel_buffers):
            if buffer.param_data is not None:
                yield buffer.param_data
        yield from self.ddp.parameters()

    # -- values --------------------------------------------------------------------------------------------------------

    def values(self, batch: Batch) -> Tensor:
        """The value before every response token [B, R], float32 on the host, 0 after the end. Collective."""
        width = batch.response_mask.shape[1]

        def read(current: Pack, values: Tensor) -> Tensor:
            return unpack(values, current.lengths, width)

        self._weights.onload()
        values = self.forward_batch(batch, torch.zeros(len(batch), width), read)
        self._offload_weights(unchanged=True)
        return values

    def update_values(self, batch: Batch, *, epochs: int) -> tuple[list[dict[str, MetricSum]], dict[str, float]]:
        """One optimizer step per mini-batch of a batch with `values` and `returns`, `epochs` times. Collective.

        Returns metrics as `Policy.update` does. Skips a step whose gradient is not finite on any rank. Raises
        TooManySkippedSteps.
        """
        sums: list[dict[str, MetricSum]] = []
        norms: list[float] = []
        for _ in range(epochs):
            for micro_batches in batch.mini_batches:
                sums.append(self.backward_values(batch, micro_batches))
                norms.append(self._step())
        return sums, self._update_metrics("critic", norms)

    def backward_values(self, batch: Batch, micro_batches: list[list[int]]) -> dict[str, MetricSum]:
        """Gradients of one mini-batch into the model's buffers, summed over all ranks. Returns this rank's metric sums."""
        total: dict[str, MetricSum] = {}

        def consume(current: Pack, values: Tensor, _: Tensor) -> tuple[Tensor, None]:
            if not current.rows:
                return values.sum(), None  # zero, but connected to every parameter
            loss, metrics = value_loss(self._inputs(batch, current, values), self.config.cliprange_value)
            add_sums(total, metrics)
            return loss, None

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        packs = self.packs(batch, micro_batches)
        forward_backward(self.model, packs, consume, device=self.device, forward_only=False)
        return total

    def _inputs(self, batch: Batch, current: Pack, values: Tensor) -> ValueInputs:
        assert batch.values is not None and batch.returns is not None
        width = max(current.lengths)

        def rows(tensor: Tensor) -> Tensor:
            return tensor[current.rows, :width].to(values.device)

        return ValueInputs(
            values=unpack(values, current.lengths, width),
            old_values=rows(batch.values),
            returns=rows(batch.returns),
            mask=rows(batch.loss_mask),
            token_weights=rows(batch.token_weights),
        )
