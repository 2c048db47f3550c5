"""Policy: the trained model, with its updates. The references and other frozen models of its layout.

Algorithms are elsewhere: the loss is a function that the caller passes to `update` or `forward_backward`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from grpo_megatron.config import ActorConfig, OptimConfig
from grpo_megatron.device import Device
from grpo_megatron.exact.gradients import LeafGradients, order_free_norm
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.forward import (
    LanguageModel,
    LossFunction,
    LossPass,
    MetricSums,
    ShardedModel,
    loss_inputs,
)
from grpo_megatron.models.layers.routes import take_counts
from grpo_megatron.models.lora.layers import Factors, attach
from grpo_megatron.models.optimizer import (
    OffloadedTensors,
    build_lr_scheduler,
    build_optimizer,
    copy_main_parameters,
    state_tensors,
    wrap_ddp,
)
from grpo_megatron.models.vision import set_trainable
from grpo_megatron.models.weights.stream import sent_parameters, unwrapped
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.sync.digest import Expected
from grpo_megatron.sync.weight_sync import WeightSync
from grpo_megatron.types import Batch, WeightBucket


class TooManySkippedSteps(RuntimeError):
    """More than `actor.max_skipped_steps` updates in a row were skipped."""

    tells_what_to_do = True  # the command line prints it without a traceback


class Guard(Protocol):
    """Decides over an optimizer step (training/guards.py)."""

    def __call__(self, batch: Batch, micro_batches: list[list[int]], sums: MetricSums, norm: float) -> bool:
        """Returns whether the optimizer step on this mini-batch is made. Collective: the same on every rank.

        `sums` and `norm` are this rank's metric sums, and its gradient's norm before clipping.
        """
        ...


class Policy(LanguageModel):
    """The trained model. `load` builds it on every rank at the same point. Call `set_optimizer` before `update`."""

    section = "actor"  # of the metrics' names

    def __init__(
        self,
        model: torch.nn.Module,
        arch: Architecture,
        actor: ActorConfig,
        mesh: Mesh,
        device: Device,
        temperature: float = 1.0,
    ) -> None:
        if (tower := getattr(unwrapped(model), "visual", None)) is not None:
            set_trainable(tower, actor.vision)
        self.lora = attach(model, arch, actor.lora, mesh)
        self.ddp = wrap_ddp(model, actor.megatron, device)
        super().__init__(self.ddp, arch, actor, mesh, device, temperature)
        self.num_skipped_in_a_row = 0
        self._optimizer: MegatronOptimizer | None = None
        self._lr_scheduler: OptimizerParamScheduler | None = None
        self._offloaded = OffloadedTensors(device)
        self._period = 1
        self._sums: MetricSums = {}  # of the last pass
        # Called before each optimizer step, with the gradient's norm and the metric sums of its pass.
        self.on_gradients: Callable[[float, MetricSums], None] | None = None

    # -- optimizer -----------------------------------------------------------------------------------------------------

    def set_optimizer(self, optim: OptimConfig, total_steps: int, *, period: int = 1) -> None:
        """Build a new optimizer and learning-rate schedule over the current weights. Replaces any earlier one. Collective.

        `period`: updates per training step, or per outer iteration. `load_state` needs it if the config has changed.
        """
        self.onload()
        self._offloaded = OffloadedTensors(self.device)  # host copies of the old optimizer are useless to the new one
        old = self._optimizer if self.actor.megatron.fp8.param_gather else None
        self._optimizer, self._lr_scheduler = None, None  # frees the old optimizer before the new one is built
        self.ddp.config.grad_scale_func = None
        optimizer = build_optimizer(self.ddp, optim, self.actor.megatron, self.device, self.actor.vision.lr)
        if old is not None:
            copy_main_parameters(old, optimizer)
        self._optimizer = optimizer
        self._lr_scheduler = build_lr_scheduler(optimizer, optim, total_steps)
        self._period = period

    @property
    def optimizer(self) -> MegatronOptimizer:
        if self._optimizer is None:
            raise RuntimeError("the policy has no optimizer: call set_optimizer first")
        return self._optimizer

    @property
    def lr_scheduler(self) -> OptimizerParamScheduler:
        if self._lr_scheduler is None:
            raise RuntimeError("the policy has no learning-rate schedule: call set_optimizer first")
        return self._lr_scheduler

    def offload(self) -> None:
        """Move the optimizer states to the host and free the gradient buffers: only an update needs them."""
        if not self.actor.megatron.offload_optimizer or self._offloaded.is_offloaded:
            return
        with self._moving_gradients():
            self.ddp.offload_grad_buffers(empty_cache=False)
        self._offloaded.offload([] if self._optimizer is None else state_tensors(self._optimizer))

    def onload(self) -> None:
        """Undo `offload`. Does nothing if nothing is offloaded."""
        if self._offloaded.is_offloaded:
            self._offloaded.onload()
            with self._moving_gradients():
                self.ddp.restore_grad_buffers()

    @contextlib.contextmanager
    def _moving_gradients(self) -> Iterator[None]:
        """Allows Megatron's own offloading of gradient buffers, which uses a deprecated class of torch."""
        with self.device.megatron(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
            yield

    # -- weights -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def readable_weights(self) -> Iterator[None]:
        """Gathers updated weights, which `overlap_param_gather` would do in the next forward pass; once after an update."""
        if self.actor.megatron.overlap_param_gather:
            with self.device.megatron():
                for group in (*self.ddp.bucket_groups, *self.ddp.expert_parallel_bucket_groups):
                    if not group.param_gather_dispatched or group.param_gather_handle is not None:
                        group.start_param_sync(force_sync=True)
        yield

    # -- updates -------------------------------------------------------------------------------------------------------

    def update(
        self, batch: Batch, loss: LossFunction, *, epochs: int = 1, guard: Guard | None = None
    ) -> tuple[list[MetricSums], dict[str, float]]:
        """Make one optimizer step per mini-batch, `epochs` times over the batch. Collective.

        Returns this rank's metric sums, one dict per optimizer step, and numbers that are the same on every rank. All
        ranks skip and count a step that `guard` forbids; None: one whose gradient is not finite on any rank. Raises
        TooManySkippedSteps.
        """
        sums: list[MetricSums] = []
        norms: list[float] = []
        for _ in range(epochs):
            for micro_batches, num_forward_only in batch.updates():
                sums.append(self.forward_backward(batch, micro_batches, loss, num_forward_only).sums)
                allows = functools.partial(guard, batch, micro_batches, sums[-1]) if guard else None
                norms.append(self.optim_step(allows))
        return sums, self.update_metrics(norms)

    def update_metrics(self, norms: list[float]) -> dict[str, float]:
        """Returns the learning rate, the number of skipped optimizer steps, and the mean gradient norm of the others.

        With adapters: the share of their update that the rounded weights have, too. Collective.
        """
        finite, groups = [norm for norm in norms if math.isfinite(norm)], self.optimizer.param_groups
        metrics = {
            # On a rank whose shard of the optimizer is empty, the schedule's maximum.
            f"{self.section}/lr": float(groups[0]["lr"] if groups else self.lr_scheduler.max_lr),
            f"{self.section}/skipped_updates": float(len(norms) - len(finite)),
        }
        if finite:
            metrics[f"{self.section}/grad_norm"] = sum(finite) / len(finite)
        if self.lora is not None:
            served, update = map(sum, zip(*self.mesh.all_gather(self.lora.served_update()), strict=True))
            metrics |= {f"{self.section}/lora_served_share": served / update} if update else {}
        return metrics

    def forward_backward(
        self, batch: Batch, micro_batches: list[list[int]], loss: LossFunction, num_forward_only: int = 0
    ) -> LossPass:
        """Compute the gradients of one mini-batch, summed over all ranks, in place of earlier gradients. Collective.

        Rows of the last `num_forward_only` micro-batches have no gradient. The result has this rank's metric sums.
        """
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        take_counts(self.routers)  # those of earlier passes
        loss_pass = LossPass(batch, loss, self.loss_inputs)
        packs = self.packs(batch, micro_batches)
        if self.is_exact:
            with LeafGradients(self.ddp) as gradients:
                for leaf in gradients.leaves(packs):
                    loss_pass.run(self.model, leaf, self.device)
        else:
            with self.lora.updating() if self.lora is not None else contextlib.nullcontext():
                loss_pass.run(self.model, packs, self.device, num_forward_only)
        batch.route_counts, self._sums = take_counts(self.routers), loss_pass.sums
        return loss_pass

    def loss_inputs(self, batch: Batch, rows: list[int], logprobs: Tensor, entropy: Tensor, *teacher: Tensor) -> Any:
        """Returns the inputs of the loss on `rows`, from the model's outputs [len(rows), R]."""
        return loss_inputs(batch, rows, logprobs, entropy, *teacher)

    @torch.no_grad()
    def optim_step(self, allows: Callable[[float], bool] | None = None, *, scheduled: bool = True) -> float:
        """Clip the gradient and make the optimizer step if `allows(norm)`; None: if it is finite on every rank.

        `scheduled`: at the schedule's learning rate; else at that of the optimizer's groups. A skipped step leaves weights,
        optimizer and schedule as they are. Returns the norm before clipping, or infinity after a skipped step. Collective.
        Raises TooManySkippedSteps.
        """
        with self.device.megatron(), order_free_norm() if self.is_exact else contextlib.nullcontext():
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            if self.on_gradients is not None:
                self.on_gradients(norm, self._sums)
            if allows(norm) if allows is not None else all(self.mesh.all_gather(math.isfinite(norm))):
                if scheduled:
                    self.lr_scheduler.step(1)
                self.optimizer.step()
                self.num_skipped_in_a_row = 0
                return norm
        self.num_skipped_in_a_row += 1
        if self.num_skipped_in_a_row > self.actor.max_skipped_steps:
            raise TooManySkippedSteps(
                f"{self.num_skipped_in_a_row} updates in a row were skipped: a gradient was not finite, or a guard fired"
                f" (actor.max_skipped_steps={self.actor.max_skipped_steps}): lower actor.optim.lr or look at the data"
            )
        return math.inf

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        """Return the gradient of the last pass by global Megatron name: this rank's part of the sum, and zeros elsewhere.

        With the distributed optimizer a rank has the sum over all ranks of its part of each buffer. The rest of the buffer holds
        terms that nothing reads any more, and is set to zero here. Without it, every rank has all of the sum.
        """
        if self.actor.megatron.use_distributed_optimizer:
            for group in (*self.ddp.bucket_groups, *self.ddp.expert_parallel_bucket_groups):
                for bucket in group.buckets:
                    size = bucket.grad_data.numel() // group.intra_distributed_optimizer_instance_size
                    first = size * group.intra_distributed_optimizer_instance_rank
                    bucket.grad_data[:first].zero_()
                    bucket.grad_data[first + size :].zero_()
        parameters: dict[str, Any] = sent_parameters(self.model)
        return {name: one.main_grad for name, one in parameters.items() if one.requires_grad}

    @torch.no_grad()
    def has_finite_weights(self) -> bool:
        """Returns whether all weights of this rank are finite."""
        return bool(torch.stack([torch.isfinite(parameter).all() for parameter in self.ddp.parameters()]).all())

    def state(self) -> dict[str, Any]:
        """Returns the plain values of a checkpoint, besides the sharded tensors."""
        schedule = {"num_steps": self.lr_scheduler.num_steps, "period": self._period}
        return {"schedule": schedule, "num_skipped_in_a_row": self.num_skipped_in_a_row}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue in the schedule of the current config. With another `period`, at the same number of training steps."""
        schedule = state["schedule"]
        steps = schedule["num_steps"] * self._period / schedule.get("period", self._period)
        self.lr_scheduler.num_steps = round(steps)
        self.lr_scheduler.step(0)  # sets the learning rates
        self.num_skipped_in_a_row = state["num_skipped_in_a_row"]

    @property
    def num_updates(self) -> int:
        """Updates so far in the learning-rate schedule, without skipped ones."""
        return int(self.lr_scheduler.num_steps)


# -- frozen models in the policy's layout ------------------------------------------------------------------------------


class FrozenModel(ShardedModel):
    """A model that is never trained. `actor.megatron.offload_reference` keeps its weights on the host between passes."""

    def __init__(
        self,
        inner: torch.nn.Module,
        arch: Architecture,
        actor: ActorConfig,
        mesh: Mesh,
        device: Device,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(inner.requires_grad_(False), arch, actor, mesh, device, temperature)
        self._offloaded = OffloadedTensors(device)
        self._offload()

    def _offload(self, *, unchanged: bool = False) -> None:
        if self.actor.megatron.offload_reference:
            self._offloaded.offload(self.model.parameters(), unchanged=unchanged)

    @contextlib.contextmanager
    def readable_weights(self, *, unchanged: bool = True) -> Iterator[None]:
        """Keeps the weights on the device inside the block. `unchanged`: the block does not write to them."""
        was_offloaded = self._offloaded.is_offloaded
        self._offloaded.onload()
        try:
            yield
        finally:
            if was_offloaded:
                self._offload(unchanged=unchanged)

    def forward_batch(self, *arguments: Any, **options: Any) -> Tensor:
        """See ShardedModel."""
        with self.readable_weights():
            return super().forward_batch(*arguments, **options)


class Reference(FrozenModel, LanguageModel):
    """The reference of the KL term. `copy_from` replaces its weights with the policy's current ones."""

    is_frozen = True

    @torch.no_grad()
    def copy_from(self, policy: Policy) -> None:
        """Copy the policy's weights, shard by shard. No communication: the layouts are the same."""
        source = dict(unwrapped(policy.ddp).named_parameters())
        with self.readable_weights(unchanged=False):
            for name, parameter in unwrapped(self.model).named_parameters():
                parameter.copy_(source[name])


class AdapterReference:
    """The reference of a policy with LoRA: the policy's own model with earlier adapters. It costs a copy of the factors.

    `start`: its first adapters; empty: the base. It has a Reference's methods.
    """

    def __init__(self, policy: Policy, start: Factors) -> None:
        assert policy.lora is not None
        self.policy, self._factors = policy, start

    def copy_from(self, policy: Policy) -> None:
        """Take the current adapters of `policy`, whose reference this is."""
        assert policy is self.policy and policy.lora is not None
        self._factors = policy.lora.copies()

    def _reading(self) -> contextlib.AbstractContextManager[None]:
        assert self.policy.lora is not None
        return self.policy.lora.reading(self._factors)

    def logprobs(self, batch: Batch, temperature: float | None = None) -> Tensor:
        """See LanguageModel."""
        with self._reading():
            return self.policy.logprobs(replace(batch, recorded_routes=None), temperature)  # its routers decide

    def distribution(self, batch: Batch, *of_teacher: Any) -> tuple[Tensor, list[Tensor | None]]:
        """See LanguageModel."""
        with self._reading():
            return self.policy.distribution(replace(batch, recorded_routes=None), *of_teacher)

    def engine_weights(self, weight_sync: WeightSync, version: int) -> Iterator[WeightBucket]:
        """See ShardedModel."""
        with self._reading():
            yield from self.policy.engine_weights(weight_sync, version)

    def expected_digests(self, weight_sync: WeightSync) -> Expected:
        """See ShardedModel."""
        with self._reading():
            return self.policy.expected_digests(weight_sync)
