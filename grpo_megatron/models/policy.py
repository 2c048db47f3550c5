"""Policy: the model that learns. Scores, updates, streams its weights; knows layouts, not algorithms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from grpo_megatron.algo.losses import LossInputs, MetricSum
from grpo_megatron.config import ActorConfig, ModelConfig, OptimConfig
from grpo_megatron.device import Device
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.build import load_model
from grpo_megatron.models.forward import Pack, run, unpack
from grpo_megatron.models.offload import Offloaded
from grpo_megatron.models.optimizer import (
    build_optimizer,
    build_schedule,
    keep_main_parameters,
    state_tensors,
    wrap_ddp,
)
from grpo_megatron.models.scorer import Scorer
from grpo_megatron.models.weights import hf_weights, stage_owners
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.types import Batch, WeightBucket

MetricSums = dict[str, MetricSum]
LossFunction = Callable[[LossInputs], tuple[Tensor, MetricSums]]


class TooManySkippedSteps(RuntimeError):
    """Updates stayed non-finite for `actor.max_skipped_steps` in a row."""


class Policy(Scorer):
    """Built on every rank at the same point; weights come from `model.path`."""

    def __init__(
        self,
        model: ModelConfig,
        actor: ActorConfig,
        arch: Architecture,
        mesh: Mesh,
        device: Device,
        *,
        temperature: float = 1.0,
    ) -> None:
        self.actor, self.arch = actor, arch
        inner = self._load(model, mesh, device)
        self.stage_of = stage_owners(inner, arch, mesh)
        self.ddp = wrap_ddp(inner, actor.megatron, device)
        super().__init__(self.ddp, actor.megatron, mesh, device, temperature, actor.logprob_chunk_size)
        self.num_skipped_in_a_row = 0
        self.optim = actor.optim
        self._learning: tuple[MegatronOptimizer, OptimizerParamScheduler] | None = None
        self._away = Offloaded(device)

    def _load(self, model: ModelConfig, mesh: Mesh, device: Device) -> torch.nn.Module:
        """This rank's part of the model, with its weights. What learns something else loads another (`RewardModel`)."""
        return load_model(Path(model.path), self.arch, self.actor.megatron, model.dtype, mesh, device)

    def set_optimizer(self, optim: OptimConfig, total_steps: int) -> None:
        """A fresh optimizer and schedule over the present weights (between the warm-up and GRPO). Collective."""
        self.onload()
        self._away = Offloaded(self.device)  # the last one's copies are of no use to the next
        before = self._learning if self.actor.megatron.fp8.param_gather else None
        self._learning, self.ddp.config.grad_scale_func = None, None  # the old one is gone before the new one comes
        optimizer = build_optimizer(self.ddp, optim, self.actor.megatron, self.device)
        if before is not None:
            keep_main_parameters(before[0], optimizer)
        self.optim = optim
        self._learning = optimizer, build_schedule(optimizer, optim, total_steps)

    @property
    def optimizer(self) -> MegatronOptimizer:
        """The last that was set; if none was, one for `actor.optim` is built, by all ranks together."""
        return self._learner()[0]

    @property
    def lr_scheduler(self) -> OptimizerParamScheduler:
        return self._learner()[1]

    def _learner(self) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
        if self._learning is None:
            self.set_optimizer(self.actor.optim, 1)
        assert self._learning is not None
        return self._learning

    def offload(self) -> None:
        """What only an update needs leaves the device: optimizer states, and gradients, which are forgotten."""
        if not self.actor.megatron.offload_optimizer or self._away.is_away:
            return
        with self.device.megatron():
            self.ddp.offload_grad_buffers(empty_cache=False)
        self._away.leave([] if self._learning is None else state_tensors(self._learning[0]))

    def onload(self) -> None:
        """The inverse of `offload`. Nothing happens when nothing is away."""
        if self._away.is_away:
            self._away.come_back()
            with self.device.megatron():
                self.ddp.restore_grad_buffers()

    def hf_weights(self, bucket_megabytes: int = 512) -> Iterator[WeightBucket]:
        """Collective stream of every Hugging Face tensor, whole, on every rank (see `weights.hf_weights`)."""
        if self.actor.megatron.overlap_param_gather:
            with self.device.megatron():
                self.ddp.start_param_sync(force_sync=True)
        return hf_weights(self.ddp, self.arch, self.mesh, bucket_megabytes << 20, self.stage_of)

    def update(self, batch: Batch, loss: LossFunction, *, epochs: int = 1) -> tuple[list[MetricSums], dict[str, float]]:
        """One optimizer step a mini-batch, `epochs` times over the batch. Collective.

        Returns this rank's metric sums, one dict a mini-batch, and numbers that are the same on every rank. A step whose
        gradient is not finite on any rank is skipped on all, and counted. Raises TooManySkippedSteps.
        """
        sums: list[MetricSums] = []
        norms: list[float] = []
        skipped = 0
        for _ in range(epochs):
            for micro_batches in batch.mini_batches:
                self.backward(batch, micro_batches, loss, sums)
                norm = self._step()
                norms.append(norm)
                skipped += not math.isfinite(norm)
        finite = [norm for norm in norms if math.isfinite(norm)]
        metrics = {
            "actor/lr": float(self.optimizer.param_groups[0]["lr"]) if self.optimizer.param_groups else self.optim.lr,
            "actor/skipped_updates": float(skipped),
        }
        if finite:
            metrics["actor/grad_norm"] = sum(finite) / len(finite)
        return sums, metrics

    def backward(
        self, batch: Batch, micro_batches: list[list[int]], loss: LossFunction, sums: list[MetricSums]
    ) -> None:
        """Gradients of one mini-batch into the model's buffers, summed over all ranks. Appends its metric sums."""
        total: MetricSums = {}

        def consume(current: Pack, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, None]:
            if not current.rows:
                return logprobs.sum() + entropy.sum(), None  # nothing, but connected to every parameter
            value, metrics = loss(self._loss_inputs(batch, current, logprobs, entropy))
            for name, part in metrics.items():
                total[name] = total[name].plus(part) if name in total else part
            return value, None

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        run(self.model, self.packs(batch, micro_batches), consume, device=self.device, forward_only=False)
        sums.append(total)

    def _loss_inputs(self, batch: Batch, current: Pack, logprobs: Tensor, entropy: Tensor) -> LossInputs:
        width = max(current.lengths)

        def rows(tensor: Tensor) -> Tensor:
            return tensor[current.rows, :width].to(logprobs.device)

        new = unpack(logprobs, current.lengths, width)
        return LossInputs(
            logprobs=new,
            entropy=unpack(entropy, current.lengths, width),
            old_logprobs=new.detach() if batch.old_logprobs is None else rows(batch.old_logprobs),
            rollout_logprobs=rows(batch.rollout_logprobs),
            ref_logprobs=None if batch.ref_logprobs is None else rows(batch.ref_logprobs),
            advantages=rows(batch.advantages),
            mask=rows(batch.loss_mask),
            token_weights=rows(batch.token_weights),
            correction=None if batch.correction is None else rows(batch.correction),
        )

    @torch.no_grad()
    def _step(self) -> float:
        """Clip and step if every rank's gradient is finite, else do nothing. The gradient norm before clipping."""
        with self.device.megatron():
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            if self._all_finite(norm):
                self.lr_scheduler.step(1)
                self.optimizer.step()
                self.num_skipped_in_a_row = 0
                return norm
        self.num_skipped_in_a_row += 1
        if self.num_skipped_in_a_row > self.actor.max_skipped_steps:
            raise TooManySkippedSteps(
                f"{self.num_skipped_in_a_row} updates in a row had a non-finite gradient "
                f"(actor.max_skipped_steps={self.actor.max_skipped_steps}): lower actor.optim.lr or look at the data"
            )
        return math.inf

    def _all_finite(self, norm: float) -> bool:
        flag = torch.tensor(math.isfinite(norm))
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN, group=self.mesh.control)
        return bool(flag)

    def named_gradients(self) -> dict[str, Tensor]:
        """This rank's summed gradients by global Megatron name (tests and debugging; after `backward`)."""
        from grpo_megatron.models.weights import bind

        return {name: p.main_grad.clone() for name, (_, p) in bind(self.ddp, self.arch).items()}  # type: ignore[attr-defined]

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beyond the sharded tensors."""
        return {"schedule": self.lr_scheduler.state_dict(), "num_skipped_in_a_row": self.num_skipped_in_a_row}

    def load_state(self, state: dict[str, Any]) -> None:
        self.lr_scheduler.load_state_dict(state["schedule"])
        self.num_skipped_in_a_row = state["num_skipped_in_a_row"]
