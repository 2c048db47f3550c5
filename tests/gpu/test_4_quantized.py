"""Quantised engines on the policy's own GPU. Not run on a GPU yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_megatron.config import Config
from grpo_megatron.device import read_hardware
from grpo_megatron.models.layers.precision import hardware_problems
from grpo_megatron.sync.attest import FLOOR
from tests.gpu import conftest, engine_ranks
from tests.gpu.building import ON_CPU


@pytest.mark.parametrize("quantization", ["fp8_per_tensor", "fp8_per_block", "mxfp8"])
def test_a_quantized_engine_is_near_the_policy(
    medium: Path, record_figure: Callable[..., None], quantization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 weights in an FP8 engine, synced each cycle: closer to the policy than old weights are.

    The probes pass a run's own bounds for FP8; above bfloat16's floor, they are of an engine that does compute in FP8. Blocks are
    multiplied by DeepGEMM, as in a run, where nvcc can compile it. Without it vLLM never makes scales powers of two.
    """
    conftest.needs_vllm()
    rollout: dict[str, Any] = {"quantization": quantization, "enforce_eager": True}
    wanted = Config.model_validate({"model": {"path": "x"}, "rollout": rollout})
    if problems := list(hardware_problems(wanted, read_hardware("cpu" if ON_CPU else "cuda"))):
        pytest.skip(problems[0])
    from torch.utils.cpp_extension import CUDA_HOME

    if compiles := quantization == "fp8_per_block" and CUDA_HOME is not None:
        monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
        monkeypatch.setenv("VLLM_DEEP_GEMM_WARMUP", "skip")  # only kernels of the shapes that come
    (got,) = conftest.run(engine_ranks.cycles, folder=medium, count=2, tolerance=None, **rollout)
    conftest.record_cycles(record_figure, got)
    record_figure("probes", got["probes"])
    record_figure("DeepGEMM", got["DeepGEMM"])
    assert len(got["probes"]) == 2 and min(got["probes"]) > FLOOR["bfloat16"]
    means = [mean for mean, _ in got["gaps"]]
    assert max(means) <= 0.2
    assert got["stale"] >= 1.5 * max(means)
    if quantization == "fp8_per_block" and torch.cuda.get_device_capability()[0] == 9:
        assert got["powers of two"] < 0.1 and (got["DeepGEMM"] or not compiles)


def test_the_engines_blocks_are_the_trainers(record_figure: Callable[..., None]) -> None:
    """On Hopper. tests/models/test_precision.py derives the bounds."""
    conftest.needs_vllm()
    conftest.needs_transformer_engine()
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("blockwise FP8 is for compute capability 9.0")
    (got,) = conftest.run(engine_ranks.blocks, shape=(1024, 2048))
    share = (got["trained"] != got["served"]).float().mean().item()
    record_figure("share of other bytes", share)
    torch.testing.assert_close(got["trained scales"], got["served scales"], rtol=2**-22, atol=0)
    assert share < 2e-3
