"""Replay: the loss and the gradient's norm of a dumped mini-batch, computed again by one process on the CPU.

The model is the policy of the run, with the weights before the update, in the run's dtype and without any parallelism. In
float32 the loss differs from the run's by rounding, about 1e-7. Where the run had NaN and the replay has it too, the data
or the weights are the cause; where the replay is finite, look for the cause in the machine, its kernels or the layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from grpo_megatron.algo.losses import MetricSum
from grpo_megatron.config import ActorConfig, MegatronConfig
from grpo_megatron.device import Device
from grpo_megatron.models.families import read_architecture
from grpo_megatron.models.policy import Policy
from grpo_megatron.parallel.mesh import build_mesh, destroy_mesh
from grpo_megatron.training.build import build_loss
from grpo_megatron.training.dump import WEIGHTS, Dump, metric_values
from grpo_megatron.types import Batch

TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2}  # of the loss


class Comparison(NamedTuple):
    """One number of the run, and of the replay."""

    name: str
    recorded: float
    replayed: float

    def is_equal(self, tolerance: float) -> bool:
        """Within `tolerance`, relative above 1; NaN equals NaN, and infinities equal themselves."""
        if not math.isfinite(self.recorded) or not math.isfinite(self.replayed):
            return str(self.recorded) == str(self.replayed)
        return abs(self.replayed - self.recorded) <= tolerance * max(1.0, abs(self.recorded))


def replay(dump: Dump) -> list[Comparison]:
    """The loss first, then the gradient's norm and the other metrics. Needs a process without process groups."""
    device = Device("cpu")
    mesh = build_mesh(device, tp=1, pp=1, rollout_tp=1, seed=dump.config.trainer.seed)
    try:
        values, norm = _compute(
            dump,
            Policy(
                dump.config.model.model_copy(update={"path": dump.folder / WEIGHTS}),
                _without_layout(dump.config.actor),
                read_architecture(dump.folder / WEIGHTS, dump.config.model.family),
                mesh,
                device,
                temperature=dump.config.rollout.temperature,
            ),
        )
    finally:
        destroy_mesh()
    rest = [Comparison(name, dump.metrics[name], values.get(name, math.nan)) for name in dump.metrics if name != "loss"]
    return [
        Comparison("loss", dump.metrics["loss"], values["loss"]),
        Comparison("grad_norm", dump.incident.norm, norm),
        *rest,
    ]


def _without_layout(actor: ActorConfig) -> ActorConfig:
    """The same loss on one CPU rank: no parallelism, no FP8, nothing offloaded, one skipped update allowed."""
    overrides = actor.megatron.override_transformer_config
    megatron = MegatronConfig(transformer_impl="local", override_transformer_config=overrides)
    return actor.model_copy(update={"megatron": megatron, "max_skipped_steps": 1})


def _compute(dump: Dump, policy: Policy) -> tuple[dict[str, float], float]:
    norms: list[float] = []

    def measure(batch: Batch, micro_batches: list[list[int]], sums: Mapping[str, MetricSum], norm: float) -> bool:
        norms.append(norm)
        return False

    policy.set_optimizer(dump.config.actor.optim, 1)
    (sums,), _ = policy.update(dump.batch, build_loss(policy.actor), guard=measure)
    totals = {
        name: (float(part.total), None if part.num_tokens is None else float(part.num_tokens))
        for name, part in sums.items()
    }
    return metric_values([totals], policy.actor), norms[0]
