"""Quantised engines on the policy's own GPU. Not run on a GPU yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import Config
from grpo_megatron.device import read_hardware
from grpo_megatron.models.layers.precision import hardware_problems
from tests.gpu import conftest, engine_ranks
from tests.gpu.building import ON_CPU


@pytest.mark.parametrize("quantization", ["fp8_per_tensor", "fp8_per_block", "mxfp8"])
def test_a_quantized_engine_is_near_the_policy(
    medium: Path, record_figure: Callable[..., None], quantization: str
) -> None:
    """bfloat16 weights in an FP8 engine, synced each cycle: closer to the policy than old weights are."""
    conftest.needs_vllm()
    rollout: dict[str, Any] = {"quantization": quantization, "enforce_eager": True}
    wanted = Config.model_validate({"model": {"path": "x"}, "rollout": rollout})
    if problems := list(hardware_problems(wanted, read_hardware("cpu" if ON_CPU else "cuda"))):
        pytest.skip(problems[0])
    (got,) = conftest.run(engine_ranks.cycles, folder=medium, count=2, tolerance=0.3, **rollout)
    conftest.record_cycles(record_figure, got)
    means = [mean for mean, _ in got["gaps"]]
    assert max(means) <= 0.2
    assert got["stale"] >= 1.5 * max(means)
