"""Failed rewards: a run whose reward function fails on most samples must stop, because it would train on nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_megatron.parallel.mesh import Mesh, RankError
from grpo_megatron.types import BY_MODEL, Sample


def check_failures(what: str, samples: Sequence[Sample], max_failed_ratio: float, mesh: Mesh) -> None:
    """Compare the share of samples without a reward, over all ranks, with `reward.max_failed_ratio`. Collective.

    `samples`: those whose rewards this rank knows. Those that only a reward model scores do not count, and a reward that does
    not apply to a sample has not failed on it. `what` they are begins the message. Raises RankError on every rank.
    """
    samples = [sample for sample in samples if sample.prompt.reward != BY_MODEL]
    failed = [sample for sample in samples if math.isnan(sample.reward) and not is_declined(sample)]
    reports = mesh.all_gather((len(samples), len(failed), failed[0].reward_failure if failed else ""))
    total, num_failed = sum(report[0] for report in reports), sum(report[1] for report in reports)
    if num_failed > max_failed_ratio * total:
        first = next(report[2] for report in reports if report[1])
        raise RankError(  # on every rank: all have the same reports
            f"{what}: {num_failed:,} of {total:,} samples ({100 * num_failed / total:.0f} %) have no reward, more than"
            f" reward.max_failed_ratio={max_failed_ratio:g} allows; the first failure: {first or 'no reason is known'};"
            " correct the reward function, or raise reward.max_failed_ratio"
        )


def is_declined(sample: Sample) -> bool:
    """Whether the reward function has declined to score the sample (TRL's None). That is no failure."""
    return math.isnan(sample.reward) and sample.reward_metrics.get("ok") == 1.0
