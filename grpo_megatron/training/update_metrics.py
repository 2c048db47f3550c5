"""What an update reports, as metrics of the step: the policy's, the critic's, the warm-up's."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_megatron.models.forward import MetricSums
from grpo_megatron.observability.metrics import Metrics


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
