"""StepReport: reduces all metrics of a step over the ranks in one exchange, and writes them to the sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_megatron.config import ActorConfig, DataConfig
from grpo_megatron.data.tasks import get_task
from grpo_megatron.device import Device
from grpo_megatron.models.flops import ModelShape, mfu_metrics, throughput
from grpo_megatron.models.packing import num_padding_tokens, packed_lengths
from grpo_megatron.observability.metrics import Metrics, group_table_metrics
from grpo_megatron.observability.sinks import Sinks
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.sampling.generator import record_reward_metrics, record_source_metrics
from grpo_megatron.sampling.trajectory_metrics import record_trajectory_metrics
from grpo_megatron.training.guards import Guards
from grpo_megatron.training.rollout_files import RolloutWriter
from grpo_megatron.training.shown_samples import ShownSamples
from grpo_megatron.types import Batch, GroupTable, Plan, Sample


class StepReport:
    """`peaks`: the device arguments of `mfu_metrics`. Micro-batches are padded to a multiple of `multiple` tokens."""

    def __init__(
        self,
        data: DataConfig,
        actor: ActorConfig,
        mesh: Mesh,
        device: Device,
        sinks: Sinks,
        guards: Guards,
        has_finite_weights: Callable[[], bool],
        rollouts: RolloutWriter,
        shown: ShownSamples,
        *,
        shape: ModelShape,
        peaks: Mapping[str, Any],
        multiple: int,
    ) -> None:
        self.mesh, self.device, self.sinks = mesh, device, sinks
        self.guards, self.has_finite_weights, self.rollouts, self.shown = guards, has_finite_weights, rollouts, shown
        self.shape, self.peaks, self.multiple = shape, peaks, multiple
        self.max_response_length, self.num_epochs = data.max_response_length, actor.ppo_epochs
        self.has_sources = bool(data.sources or get_task(data.task).rewards)
        self.kl_coef = actor.kl_loss_coef if actor.use_kl_loss else 0.0

    def log(
        self,
        step: int,
        metrics: Metrics,
        samples: Sequence[Sample],
        table: GroupTable,
        plan: Plan,
        batch: Batch,
        *,
        epoch: float,
    ) -> dict[str, float]:
        """Write the step's samples; complete its `metrics`, reduce them over the ranks, write and return them. Collective.

        Raises GuardStop when the step has made weights that are not finite, after its metrics are written.
        """
        self.rollouts.write(step, metrics, samples, table, plan)
        self._record_batch(metrics.when(self.mesh.is_first_replica_rank), batch)
        record_reward_metrics(metrics.when(self.mesh.is_block_leader), samples)
        if self.has_sources:
            record_source_metrics(metrics.when(self.mesh.is_block_leader), samples)
        record_trajectory_metrics(metrics.when(self.mesh.is_block_leader), samples)
        group_table_metrics(metrics, table, self.max_response_length)
        for name, value in {**plan.metrics, **self.device.memory_gib()}.items():
            if name.startswith("perf/"):
                metrics.max(name, value)
            else:
                metrics.constant(name, value)
        metrics.constant("training/global_step", step)
        metrics.constant("training/epoch", epoch)
        metrics.constant("actor/kl_coef", self.kl_coef)
        self.guards.record(metrics, self.has_finite_weights())
        reduced = metrics.reduce(self.mesh.all_gather)
        if (groups := self.shown.gather(samples, table, plan, batch)) is not None:
            self.sinks.show(step, groups)
        self.sinks.log(step, reduced | self._speed(reduced, table, plan))
        self.guards.check_weights(reduced)
        return reduced

    def _record_batch(self, metrics: Metrics, batch: Batch) -> None:
        metrics.mean_of("critic/advantages/mean", batch.advantages[batch.loss_mask])
        packs = [packed_lengths(batch, rows) for mini in batch.mini_batches for rows in mini]
        padding = sum(num_padding_tokens(lengths, self.multiple, self.mesh.cp) for lengths in packs)
        metrics.mean("perf/padding_ratio", padding, padding + sum(map(sum, packs)))

    def _speed(self, reduced: Mapping[str, float], table: GroupTable, plan: Plan) -> dict[str, float]:
        lengths = [p + r for p, r in zip(table.prompt_length, table.response_length, strict=True)]
        num_devices = self.mesh.world_size
        tokens = throughput(reduced, sum(lengths), num_devices)
        return tokens | mfu_metrics(
            reduced,
            self.shape,
            lengths,
            num_devices=num_devices,
            num_epochs=self.num_epochs,
            forward_only_lengths=[lengths[row] for row in plan.rows_without_backward()],
            **self.peaks,
        )
