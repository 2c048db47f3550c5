"""Metrics of trajectories: means over the step's samples of all ranks, without greedy ones and single turns.

trajectory/turns                turns of the assistant: mean and max
trajectory/generated_tokens     tokens that the policy wrote (in the loss, unless the trajectory is masked)
trajectory/observation_tokens   tokens that environments wrote
trajectory/observation_share    of all response tokens
trajectory/status/<status>      share of the trajectories that ended so
trajectory/<name>/mean          what the environment reports, summed over a trajectory (tool_calls, tool_errors, ...)
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.trajectories.trajectory import ENDINGS
from grpo_megatron.types import GREEDY, Sample


def record_trajectory_metrics(metrics: Metrics, samples: Sequence[Sample]) -> None:
    """See the module's header. Records nothing for samples of a single turn."""
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
