"""vLLM on the policy's own GPU: weights pushed, memory given back, log-probabilities compared. Not run on a GPU yet.

The gate of the project for dense models in bf16 is a mean difference of 0.012; weights that are one update old show how
much larger it is when they are not the policy's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import Config
from grpo_megatron.device import read_hardware
from grpo_megatron.models.precision import hardware_problems
from tests.gpu import conftest, gpu_ranks

UTILIZATION = 0.3


def report(name: str, got: dict[str, Any]) -> str:
    gaps = ", ".join(f"{mean:.4f} (max {worst:.3f})" for mean, worst in got["gaps"])
    freed = [asleep - awake for awake, asleep in zip(got["awake_gib"], got["asleep_gib"], strict=True)]
    return (
        f"{name}: log-probability gap {gaps}; stale weights {got['stale']:.3f}; sleep frees"
        f" {', '.join(f'{gib:.1f}' for gib in freed)} of {got['total_gib']:.0f} GiB; sync"
        f" {', '.join(f'{seconds:.2f}' for seconds in got['sync_s'])} s"
    )


@pytest.mark.parametrize(
    ("rollout", "name"),
    [
        ({"enforce_eager": True, "engine_options": {"sleep_level": 1}}, "eager, sleep level 1"),
        ({}, "CUDA graphs, sleep level 2"),
    ],
    ids=["eager-level-1", "graphs-level-2"],
)
def test_the_engine_holds_the_policy_and_gives_its_memory_back(
    medium: Path, figure: Callable[[str], None], rollout: dict[str, Any], name: str
) -> None:
    """Three rounds of push, draw, sleep and update. Of its 30 percent of the device more than half is
    free again while it sleeps, with the optimizer back (the rest is workspace that vLLM keeps)."""
    conftest.needs_vllm()
    (got,) = conftest.run(
        gpu_ranks.cycles, folder=medium, count=3, tolerance=0.1, gpu_memory_utilization=UTILIZATION, **rollout
    )
    figure(report(f"engine, {name}", got))
    means = [mean for mean, _ in got["gaps"]]
    assert max(means) <= 0.012
    assert got["stale"] >= 5 * max(means)  # the comparison would have seen old weights
    for awake, asleep in zip(got["awake_gib"], got["asleep_gib"], strict=True):
        assert asleep - awake >= UTILIZATION / 2 * got["total_gib"]
    settled = got["asleep_gib"][2:]  # the first update has made the optimizer
    assert max(settled) - min(settled) <= 1.0  # nothing is left behind round by round


@pytest.mark.parametrize("quantization", ["fp8_per_tensor", "fp8_per_block", "mxfp8"])
def test_a_quantized_engine_is_near_the_policy(medium: Path, figure: Callable[[str], None], quantization: str) -> None:
    """bfloat16 weights pushed into an FP8 engine, each time anew: further away than bf16, far nearer than stale ones."""
    conftest.needs_vllm()
    rollout = {"quantization": quantization, "enforce_eager": True}
    asked = Config.model_validate({"model": {"path": "x"}, "rollout": rollout})
    if problems := list(hardware_problems(asked, read_hardware("cuda"))):
        pytest.skip(problems[0])
    (got,) = conftest.run(
        gpu_ranks.cycles, folder=medium, count=2, tolerance=0.3, gpu_memory_utilization=UTILIZATION, **rollout
    )
    figure(report(f"engine, {quantization}", got))
    means = [mean for mean, _ in got["gaps"]]
    assert max(means) <= 0.2
    assert got["stale"] >= 2 * max(means)
