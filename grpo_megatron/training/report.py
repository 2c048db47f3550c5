"""StepReport: reduces all metrics of a step over the ranks in one exchange, and writes them to the sinks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import ActorConfig, Config, DataConfig
from grpo_megatron.data.task import get_task
from grpo_megatron.device import Device
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.flops import mfu_metrics, peaks, throughput
from grpo_megatron.models.forward import MetricSums, num_padding_tokens, packed_lengths
from grpo_megatron.models.policy import Policy
from grpo_megatron.observability.metrics import Metrics, Sinks, group_table_metrics
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.sampling.trajectory import ENDINGS
from grpo_megatron.training.guards import Guards
from grpo_megatron.training.samples import RolloutWriter, ShownSamples, build_rollout_files
from grpo_megatron.types import GREEDY, Batch, GroupTable, Plan, Sample

# -- Metrics of trajectories -------------------------------------------------------------------------------------------
# Metrics of trajectories: means over the step's samples of all ranks, without greedy ones and single turns.
#
# trajectory/turns                turns of the assistant: mean and max
# trajectory/generated_tokens     tokens that the policy wrote (in the loss, unless the trajectory is masked)
# trajectory/observation_tokens   tokens that environments wrote
# trajectory/observation_share    of all response tokens
# trajectory/status/<status>      share of the trajectories that ended so
# trajectory/<name>/mean          what the environment reports, summed over a trajectory (tool_calls, tool_errors, ...)


def record_trajectory_metrics(metrics: Metrics, samples: Sequence[Sample]) -> None:
    """Records the metrics above. Samples of a single turn add nothing."""
    for sample in samples:
        if sample.index == GREEDY or not (sample.turns or sample.status != "ok"):
            continue
        lengths = {
            kind: sum(t.end - t.start for t in sample.turns if t.kind == kind) for kind in ("assistant", "observation")
        }
        turns = sum(turn.kind == "assistant" for turn in sample.turns)
        metrics.mean("trajectory/turns/mean", turns, 1)
        metrics.max("trajectory/turns/max", turns)
        metrics.mean("trajectory/generated_tokens/mean", lengths["assistant"], 1)
        metrics.mean("trajectory/observation_tokens/mean", lengths["observation"], 1)
        metrics.mean("trajectory/observation_share", lengths["observation"], len(sample.response_ids))
        for status in ENDINGS:
            metrics.mean(f"trajectory/status/{status}", float(sample.status == status), 1)
        for name, value in sample.trajectory_metrics.items():
            metrics.mean(f"trajectory/{name}/mean", value, 1)


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
        arch: Architecture,
        peaks: Mapping[str, Any],
        multiple: int,
    ) -> None:
        self.mesh, self.device, self.sinks = mesh, device, sinks
        self.guards, self.has_finite_weights, self.rollouts, self.shown = guards, has_finite_weights, rollouts, shown
        self.arch, self.peaks, self.multiple = arch, peaks, multiple
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
            self.arch,
            lengths,
            num_devices=num_devices,
            num_epochs=self.num_epochs,
            forward_only_lengths=[lengths[row] for row in plan.rows_without_backward()],
            **self.peaks,
        )


def record_reward_metrics(metrics: Metrics, samples: Sequence[Sample]) -> None:
    """Means of what the reward functions reported besides the reward, and the shares of samples that they failed on."""
    for sample in samples:
        if sample.index == GREEDY:
            continue
        for name, value in sample.reward_metrics.items():
            if name == "ok":
                metrics.mean("reward/failed_ratio", 1.0 - value, 1)
            elif name == "timeout":
                metrics.mean("reward/timeout_ratio", value, 1)
            else:
                metrics.mean(f"reward/{name}/mean", value, 1)


def record_source_metrics(metrics: Metrics, samples: Sequence[Sample]) -> None:
    """For each source: the mean reward, the number of samples, the mean length of responses in tokens."""
    for sample in samples:
        if sample.index == GREEDY:
            continue
        source = sample.prompt.source
        metrics.sum(f"data/source/{source}/samples", 1)
        metrics.mean(f"response_length/source/{source}/mean", len(sample.response_ids), 1)
        if not math.isnan(sample.reward):
            metrics.mean(f"reward/source/{source}/mean", sample.reward, 1)


# -- Metrics of an update ----------------------------------------------------------------------------------------------
# What an update reports, as metrics of the step: the policy's, the critic's, the warm-up's.


def record_update(metrics: Metrics, sums: Sequence[MetricSums], constants: dict[str, float], contributes: bool) -> None:
    """Record what `Policy.update` returned: token means, and sums averaged over the optimizer steps.

    `sums` has one dict per optimizer step. `contributes` is true on one rank per replica.
    """
    local = metrics.when(contributes)
    for step_sums in sums:
        for name, part in step_sums.items():
            if part.num_tokens is None:
                local.sum(name, part.total / len(sums))
            else:
                local.mean(name, part.total, part.num_tokens)
    for name, value in constants.items():
        metrics.constant(name, value)


def build_report(config: Config, checked: Checked, policy: Policy, sinks: Sinks, guards: Guards) -> StepReport:
    """The report of a run, or of its warm-up, which has a config of its own."""
    return StepReport(
        config.data,
        config.actor,
        policy.mesh,
        policy.device,
        sinks,
        guards,
        policy.has_finite_weights,
        build_rollout_files(config.trainer, policy.mesh, checked.tokenizer),
        ShownSamples(policy.mesh, checked.tokenizer, config.draws),
        arch=checked.arch,
        peaks=peaks(config, policy.device.name, checked.arch.num_layers),
        multiple=policy.multiple,
    )
