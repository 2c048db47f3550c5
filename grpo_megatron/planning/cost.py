"""StepSeconds: the estimated seconds of a training step in a layout. Arithmetic alone: a layout takes microseconds.

Not counted: rewards, environments, validation, checkpoints, the exchange of tokens, and the host's part of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_megatron.planning import speeds
from grpo_megatron.planning.generation_cost import generation_seconds
from grpo_megatron.planning.layout import Layout
from grpo_megatron.planning.machine import PlannedMachine
from grpo_megatron.planning.training_cost import scoring_seconds, update_seconds
from grpo_megatron.planning.workload import Workload


@dataclass(frozen=True)
class StepSeconds:
    generate: float
    score: float
    update: float
    sync: float

    @property
    def step(self) -> float:
        return self.generate + self.score + self.update + self.sync


def step_seconds(work: Workload, layout: Layout, machine: PlannedMachine, cache_tokens: float) -> StepSeconds:
    """`cache_tokens`: what the cache of one engine holds; not read if nothing is drawn."""
    return StepSeconds(
        generate=generation_seconds(work, layout, machine, cache_tokens) if work.draws else 0.0,
        score=scoring_seconds(work, layout, machine),
        update=update_seconds(work, layout, machine),
        sync=sync_seconds(work, layout, machine) if work.draws else 0.0,
    )


def sync_seconds(work: Workload, layout: Layout, machine: PlannedMachine) -> float:
    """Of one weight sync: each engine's shard over NVLink; over the network what no rank of the node holds, once per node.

    Network and NVLink work at the same time, so the slower one counts (sync/plan.py; checks/weight_sync.py is exact).
    """
    size = work.arch.num_parameters() * work.itemsize
    per_node = min(machine.per_node, machine.world_size)
    ranks_of_stage = machine.world_size // layout.pp
    stages_in_node = max(1, per_node // ranks_of_stage)
    missing = 1 - min(1.0, stages_in_node / layout.pp)
    network = size * missing / per_node / (machine.gpu.network_bytes_per_s * speeds.NETWORK)
    within = size / layout.rollout_tp / (machine.gpu.nvlink_bytes_per_s * speeds.LINK)
    return max(network, within) + speeds.SWITCH_S
