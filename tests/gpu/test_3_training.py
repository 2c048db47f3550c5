"""Layers, FP8 and speed on one GPU. Not run on a GPU yet.

Tolerances are derived from the number of bits, not measured: bfloat16 has a relative step of 2**-8 = 0.004, FP8 e4m3 one of
2**-3. The compared numbers are results of 8 layers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_megatron.config import Config
from grpo_megatron.device import read_hardware
from grpo_megatron.models.families import read_architecture
from grpo_megatron.models.precision import RECIPES, hardware_problems
from grpo_megatron.models.shape import model_shape
from grpo_megatron.observability import flops
from tests.gpu import conftest, gpu_ranks

TE, LOCAL = {"transformer_impl": "transformer_engine"}, {"transformer_impl": "local"}


def mean_error(got: dict[str, Any], exact: dict[str, Any]) -> float:
    return float((got["logprobs"] - exact["logprobs"])[exact["mask"]].abs().mean())


def worst_angle(got: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The smallest cosine between two gradients of one parameter, and the parameter's name."""
    assert got.keys() == exact.keys()
    cosines = {n: torch.cosine_similarity(got[n].flatten(), exact[n].flatten(), dim=0).item() for n in exact}
    name = min(cosines, key=lambda n: cosines[n])
    return cosines[name], name


@pytest.fixture(scope="module")
def exact(medium: Path) -> dict[str, Any]:
    return conftest.run(gpu_ranks.logprobs_and_gradients, folder=medium, megatron=LOCAL, dtype="float32")[0]


@pytest.fixture(scope="module")
def local(medium: Path) -> dict[str, Any]:
    return conftest.run(gpu_ranks.logprobs_and_gradients, folder=medium, megatron=LOCAL, dtype="bfloat16")[0]


@pytest.fixture(scope="module")
def te(medium: Path) -> dict[str, Any]:
    conftest.needs_transformer_engine()
    return conftest.run(gpu_ranks.logprobs_and_gradients, folder=medium, megatron=TE, dtype="bfloat16")[0]


@pytest.fixture(scope="module")
def bf16(medium: Path) -> dict[str, Any]:
    """The bf16 run that FP8 runs are compared with. It has Transformer Engine's layers if installed."""
    return conftest.run(gpu_ranks.loss_curve, folder=medium, megatron={}, steps=30)[0]


def test_local_layers_in_bf16_follow_float32(
    exact: dict[str, Any], local: dict[str, Any], figure: Callable[[str], None]
) -> None:
    error, (cosine, name) = mean_error(local, exact), worst_angle(local["gradients"], exact["gradients"])
    figure(
        f"local layers, bf16 against float32: log-probabilities mean {error:.2e}, gradients' least cosine {cosine:.5f}"
    )
    assert local["layers"] == "ColumnParallelLinear"
    assert error <= 0.02
    assert cosine >= 0.98, name


def test_transformer_engine_in_bf16_is_as_exact_as_local_layers(
    exact: dict[str, Any], local: dict[str, Any], te: dict[str, Any], figure: Callable[[str], None]
) -> None:
    """Its error against float32 is at most twice that of the local layers. Its gradients have the same direction."""
    assert te["layers"] == "TELayerNormColumnParallelLinear"
    errors = mean_error(te, exact), mean_error(local, exact)
    cosine, name = worst_angle(te["gradients"], local["gradients"])
    figure(f"TE / local in bf16 against float32: mean {errors[0]:.2e} / {errors[1]:.2e}; least cosine {cosine:.5f}")
    assert errors[0] <= 2 * errors[1] + 1e-3
    assert cosine >= 0.98, name


def test_bf16_learns(bf16: dict[str, Any], figure: Callable[[str], None]) -> None:
    losses = bf16["losses"]
    figure(f"bf16 ({bf16['layers']}): loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    assert bf16["finite"] and losses[-1] <= losses[0] - 1.0


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        *((recipe, {}) for recipe in RECIPES),
        ("tensorwise", {"first_last_layers_bf16": True}),
        ("tensorwise", {"param_gather": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_fp8_follows_bf16(
    medium: Path, bf16: dict[str, Any], figure: Callable[[str], None], recipe: str, options: dict[str, Any]
) -> None:
    """Every step's loss within a tenth of a nat and 3 percent of the bf16 run's."""
    conftest.needs_transformer_engine()
    megatron = {"fp8": {"recipe": recipe, **options}}
    wanted = Config.model_validate({"model": {"path": "x"}, "actor": {"megatron": megatron}})
    if problems := list(hardware_problems(wanted, read_hardware("cuda"))):
        pytest.skip(problems[0])
    (fp8,) = conftest.run(gpu_ranks.loss_curve, folder=medium, megatron=megatron, steps=30)
    pairs = list(zip(fp8["losses"], bf16["losses"], strict=True))
    worst = max(abs(a - b) for a, b in pairs)
    figure(
        f"FP8 {recipe} {options or ''}: loss {pairs[-1][0]:.3f} against {pairs[-1][1]:.3f}, at most {worst:.3f} apart"
    )
    assert fp8["finite"] and fp8["names"] == bf16["names"]
    assert all(abs(a - b) <= 0.1 + 0.03 * b for a, b in pairs)
    assert any(a != b for a, b in pairs)  # it did not compute in bf16


@pytest.mark.parametrize("recipe", [None, "tensorwise"], ids=["bf16", "fp8"])
def test_step_time_and_mfu(large: Path, figure: Callable[[str], None], recipe: str | None) -> None:
    """64 sequences of 2048 tokens. With Transformer Engine's layers, MFU is at least 0.2 in bf16 and 0.1 in FP8."""
    megatron: dict[str, Any] = {"fp8": {"recipe": recipe}} if recipe else {}
    if recipe is not None:
        conftest.needs_transformer_engine()
        wanted = Config.model_validate({"model": {"path": "x"}, "actor": {"megatron": megatron}})
        if problems := list(hardware_problems(wanted, read_hardware("cuda"))):
            pytest.skip(problems[0])
    length, count = 2048, 64
    (got,) = conftest.run(gpu_ranks.throughput, folder=large, megatron=megatron, length=length, count=count, steps=3)
    shape = model_shape(read_architecture(large))
    work = flops.flops_per_pass(shape, [length] * count)
    device = torch.cuda.get_device_name(0)
    peak, fp8_peak = flops.peak_tflops(device), flops.peak_tflops(device, "fp8")
    rate = length * count / got["seconds"]
    line = (
        f"{recipe or 'bf16'} update ({got['layers']}): {got['seconds']:.3f} s, {rate:.0f} tokens/s,"
        f" {work / got['seconds'] / 1e12:.0f} TFLOP/s; logprobs {got['logprob_seconds']:.3f} s; {got['peak_gib']:.1f} GiB"
    )
    if peak is None:
        figure(f"{line}; no peak known for {device}")
        return
    if recipe is None:
        reached = flops.mfu(work, got["seconds"], 1, peak)
        figure(f"{line}; MFU {reached:.3f} of {peak:g} TFLOP/s")
    else:
        in_fp8 = flops.linear_flops_per_pass(shape, [length] * count)
        reached = flops.mfu(work, got["seconds"], 1, peak, fp8_flops=in_fp8, fp8_peak=fp8_peak)
        figure(f"{line}; MFU {reached:.3f} of {peak:g} (bf16) and {fp8_peak:g} (FP8) TFLOP/s")
    if got["layers"].startswith("TE"):
        assert reached >= (0.2 if recipe is None else 0.1)


def test_context_parallel_ranks_compute_what_one_does(medium: Path, te: dict[str, Any]) -> None:
    """Two GPUs: log-probabilities and summed gradients of CP 2 against CP 1, in bf16."""
    conftest.needs_devices(2)
    split = {**TE, "context_parallel_size": 2}
    both = conftest.run(gpu_ranks.logprobs_and_gradients, 2, folder=medium, megatron=split, dtype="bfloat16")
    assert torch.equal(both[0]["logprobs"], both[1]["logprobs"])
    for got in both:
        assert mean_error(got, te) <= 0.02
        cosine, name = worst_angle(got["gradients"], te["gradients"])
        assert cosine >= 0.98, name
