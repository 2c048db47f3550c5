"""FP8 and padding options: every TransformerConfig field that they set, and every refusal.

Computing in FP8 needs a GPU (tests/gpu). These tests need none: they show that Megatron-Core accepts the settings, and
that they mean the same there.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.fp8_utils import get_fp8_align_size, is_first_last_bf16_layer

from grpo_megatron.checks.validate import validate
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import Config, ConfigError, MegatronConfig
from grpo_megatron.device import Hardware
from grpo_megatron.models import optimizer
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import architecture_of
from grpo_megatron.models.layers import precision
from grpo_megatron.models.layers.precision import (
    QUANTIZATIONS,
    RECIPES,
    hardware_problems,
    precision_problems,
    token_multiple,
)
from grpo_megatron.models.layers.spec import transformer_config
from grpo_megatron.models.weights.stream import dequantized, set_parameter
from grpo_megatron.training.colocation import build_probe
from tests import tiny
from tests.runs import make_run
from tests.worlds import ranks

A100 = Hardware((8, 0), (13, 0))
L40S = Hardware((8, 9), (13, 0))
H100 = Hardware((9, 0), (13, 0))
B200 = Hardware((10, 0), (13, 0))
RTX5090 = Hardware((12, 0), (13, 0))
CPU = Hardware(None, None, "it is not installed")


@pytest.fixture(scope="module")
def arch() -> Architecture:
    return architecture_of({**tiny.COMMON, **tiny.FAMILIES["qwen3"]})


INVARIANT = {"batch_invariant": True, "transformer_impl": "transformer_engine"}


def config(megatron: dict[str, Any] | None = None, **sections: Any) -> Config:
    return Config.model_validate({"model": {"path": "x"}, "actor": {"megatron": megatron or {}}, **sections})


def fp8(recipe: str) -> dict[str, Any]:
    return {"megatron": {"fp8": {"recipe": recipe}}}


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("param_gather", [False, True])
def test_every_field_of_a_recipe_reaches_megatron(arch: Architecture, recipe: str, param_gather: bool) -> None:
    options = {"param_gather": param_gather, "wgrad": False, "margin": 2, "amax_history_len": 16}
    options |= {"amax_compute_algo": "most_recent"}
    built = transformer_config(
        arch, MegatronConfig.model_validate({"fp8": {"recipe": recipe, **options}}), "bfloat16", True
    )
    assert built.fp8 == ("e4m3" if recipe in ("blockwise", "mxfp8") else "hybrid")
    assert built.fp8_recipe == recipe and RECIPES[recipe].alignment == get_fp8_align_size(recipe)
    assert (built.fp8_param, built.fp8_wgrad, built.fp8_margin) == (param_gather, False, 2)
    assert (built.fp8_amax_history_len, built.fp8_amax_compute_algo) == (16, "most_recent")
    assert not built.first_last_layers_bf16 and built.bf16 and built.params_dtype is torch.bfloat16


def test_ends_in_bf16_and_a_chosen_format(arch: Architecture) -> None:
    fp8 = {"recipe": "tensorwise", "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 2, "format": "e4m3"}
    built = transformer_config(arch, MegatronConfig.model_validate({"fp8": fp8}), "bfloat16", True)
    kept = [is_first_last_bf16_layer(built, layer) for layer in range(arch.num_layers)]
    assert kept == [True, True, False, True] and built.fp8 == "e4m3"
    plain = transformer_config(arch, MegatronConfig(context_parallel_size=4), "bfloat16", True)
    assert plain.fp8 is None and not plain.fp8_param and plain.context_parallel_size == 4


# -- the padding rule --------------------------------------------------------------------------------------------------


TP, CP = (1, 2, 3, 4, 8), (1, 2, 3, 4, 8)
# What Transformer Engine 2.11 asserts of the rows of a rank's part of an activation, without and with a gather:
#   assert_dim_for_fp8_exec            rows % 8; the product of a weight gradient sums over the rows, which needs 16
#   MXFP8Quantizer.make_empty          rows % 32
#   assert_dim_for_all_gather          under sequence parallelism, by Quantizer.is_quantizable: blockwise rows % 128
ROWS = {"delayed": (16, 16), "tensorwise": (16, 16), "blockwise": (16, 128), "mxfp8": (32, 32), None: (1, 1)}


def fits(tokens: int, recipe: str | None, tp: int, cp: int, gathers: bool) -> bool:
    """Whether every rank gets an equal part of a pack that it can compute with."""
    if tokens % (2 * cp if cp > 1 else 1) or tokens // cp % (tp if gathers else 1):
        return False
    return tokens // cp // (tp if gathers else 1) % ROWS[recipe][gathers] == 0


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tokens_are_padded_to_the_smallest_multiple_that_fits(recipe: str | None, sequence_parallel: bool) -> None:
    for tp, cp in itertools.product(TP, CP):
        gathers = sequence_parallel and tp > 1
        megatron = MegatronConfig.model_validate(
            {
                "tensor_model_parallel_size": tp,
                "context_parallel_size": cp,
                "sequence_parallel": gathers,
                "fp8": {"recipe": recipe},
            }
        )
        smallest = next(n for n in itertools.count(1) if fits(n, recipe, tp, cp, gathers))
        assert token_multiple(megatron) == smallest, (tp, cp)
        assert fits(3 * smallest, recipe, tp, cp, gathers)


# -- refusals ----------------------------------------------------------------------------------------------------------

ALLOWED = {
    "delayed": (L40S, H100, B200, RTX5090),
    "tensorwise": (L40S, H100, B200, RTX5090),
    "blockwise": (H100,),
    "mxfp8": (B200,),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("hardware", [A100, L40S, H100, B200, RTX5090], ids=["A100", "L40S", "H100", "B200", "5090"])
def test_hardware_without_the_recipe_is_refused(
    monkeypatch: pytest.MonkeyPatch, recipe: str, hardware: Hardware
) -> None:
    """Where flash-attn is installed (tests/models/test_kernels.py: where it is not)."""
    monkeypatch.setattr(precision, "packed_attention_problem", lambda *_, **__: None)
    problems = list(hardware_problems(config(megatron={"fp8": {"recipe": recipe}}), hardware))
    assert (problems == []) == (hardware in ALLOWED[recipe]), problems
    assert all(f"actor.megatron.fp8.recipe={recipe}" in problem and "leave it out" in problem for problem in problems)


FOUR = {"n_gpus_per_node": 4}
NO_ENGINE = {"transformer_engine_problem": "2.20.2 is installed"}
NEEDED = "needs Transformer Engine >=2.9,<2.12, and 2.20.2 is installed"


@pytest.mark.parametrize(
    ("changes", "hardware", "words"),
    [
        (fp8("blockwise"), B200, "below 10.0, this device has 10.0; set it to mxfp8"),
        (fp8("blockwise"), replace(H100, cuda_version=(12, 8)), "needs CUDA 12.9, torch was built with 12.8"),
        (fp8("blockwise"), replace(H100, **NO_ENGINE), f"recipe=blockwise {NEEDED}; pip install --no-build-isolation"),
        (fp8("delayed"), CPU, "needs a CUDA device, and this run has none"),
        ({"rollout": {"quantization": "mxfp8"}}, H100, "10.0, this device has 9.0; set it to fp8_per_tensor"),
        (
            {"rollout": {"batch_invariant": True}},
            A100,
            "batch_invariant=true needs compute capability 9.0, this device has",
        ),
        (
            {"rollout": {"batch_invariant": True, "tensor_model_parallel_size": 5}},
            H100,
            "over 2, 4, 6, 8 GPUs of one node",
        ),
        (
            {"rollout": {"batch_invariant": True, "tensor_model_parallel_size": 8}, "trainer": FOUR},
            H100,
            "nodes of 4: vLLM",
        ),
        ({"rollout": {"batch_invariant": True}}, CPU, "batch_invariant=true needs a CUDA device"),
        ({"megatron": {**INVARIANT, "fp8": {"recipe": "delayed"}}}, H100, "its products are of 16 and 32 bits"),
        ({"megatron": INVARIANT, "rollout": {"batch_invariant": True}}, H100, "set rollout.placement=separate"),
        ({"megatron": INVARIANT}, CPU, "transformer_impl=transformer_engine needs a CUDA device"),
        ({"megatron": {"deterministic": True}}, CPU, "deterministic=true needs a CUDA device"),
        ({"megatron": {"context_parallel_size": 2}}, CPU, "context_parallel_size=2 needs a CUDA device"),
        ({"megatron": {"transformer_impl": "transformer_engine"}}, replace(H100, **NO_ENGINE), f"_engine {NEEDED}"),
    ],
)
def test_what_a_machine_lacks_is_named(changes: dict[str, Any], hardware: Hardware, words: str) -> None:
    with mock.patch("importlib.util.find_spec", return_value=True):
        (problem,) = hardware_problems(config(**changes), hardware)
    assert words in problem


def test_batch_invariance_is_megatrons(arch: Architecture) -> None:
    """The mode is on before a layer is built. Its kernels are Triton's: here only the call is seen."""
    pytest.importorskip("triton", reason="Triton is not installed, which the kernels are written in")
    kernels = "megatron.core.transformer.custom_layers.batch_invariant_kernels.enable_batch_invariant_mode"
    with mock.patch(kernels) as enable:
        built = transformer_config(arch, MegatronConfig.model_validate(INVARIANT), "bfloat16", True)
    assert enable.call_count == 1
    assert (built.batch_invariant_mode, built.attention_backend.name) == (True, "flash")
    with mock.patch("importlib.util.find_spec", return_value=None):
        assert any("needs flash-attn" in text for text in hardware_problems(config(INVARIANT), H100))


def test_the_hardware_is_read_only_if_needed() -> None:
    """And quantized rollouts need no Transformer Engine."""
    without_engine = replace(B200, transformer_engine_problem="it is not installed")
    for quantization in QUANTIZATIONS:
        assert not list(hardware_problems(config(rollout={"quantization": quantization}), without_engine))
    with mock.patch("grpo_megatron.models.layers.precision.read_hardware", side_effect=AssertionError):
        assert not list(hardware_problems(config()))
    assert list(hardware_problems(config(megatron={"fp8": {"recipe": "delayed"}}, trainer={"device": "cpu"})))


ENDS = {"recipe": "tensorwise", "first_last_layers_bf16": True}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fp8": {"recipe": "delayed"}, "transformer_impl": "local"}, "actor.megatron.transformer_impl=local"),
        ({"fp8": {"recipe": "delayed", "first_last_layers_bf16": True}}, "cannot leave some out"),
        ({"fp8": {"recipe": "delayed", "param_gather": True}, "use_distributed_optimizer": False}, "_optimizer=true"),
        ({"fp8": {"recipe": "mxfp8", "param_gather": True}}, "leave param_gather out"),
        ({"fp8": {"margin": 1}}, "fp8.margin=1 has no effect without actor.megatron.fp8.recipe"),
        ({"fp8": {"recipe": "mxfp8"}, "tensor_model_parallel_size": 2}, "MLP width, 112 / tp 2 = 56, is not; lower"),
        ({"fp8": {"recipe": "mxfp8"}}, "needs widths that are multiples of 32; this model's MLP width, 112, is not"),
        ({"fp8": {**ENDS, "num_layers_at_end_in_bf16": 3}}, "in_bf16 = 4 leave none of 4 layers"),
        (
            {"fp8": {**ENDS, "num_layers_at_end_in_bf16": 2}, "pipeline_model_parallel_size": 4},
            "at most one pipeline stage's 1 layers",
        ),
    ],
)
def test_contradictions_are_refused(arch: Architecture, changes: dict[str, Any], words: str) -> None:
    assert any(words in problem for problem in precision_problems(config(megatron=changes), arch))


def test_blockwise_gathers_whole_blocks_of_the_hidden_size(arch: Architecture) -> None:
    """hidden_size 192 = 1.5 blocks of 128. Only what is quantized before a gather must consist of whole blocks."""
    narrow = replace(arch, hidden_size=192, ffn_hidden_size=256)
    megatron: dict[str, Any] = {"fp8": {"recipe": "blockwise"}, "tensor_model_parallel_size": 2}
    (problem,) = precision_problems(config(megatron=megatron), narrow)
    assert "needs a hidden_size that is a multiple of 128 under sequence parallelism" in problem
    assert "hidden_size, 192, is not; set actor.megatron.sequence_parallel=false or leave" in problem
    assert not list(precision_problems(config(megatron={**megatron, "sequence_parallel": False}), narrow))
    assert not list(precision_problems(config(megatron={**megatron, "fp8": {"recipe": "tensorwise"}}), narrow))
    assert not list(precision_problems(config(megatron={"fp8": {"recipe": "delayed"}}), arch))


def test_fp8_on_either_side_gets_a_wider_probe(arch: Architecture) -> None:
    probes = [
        build_probe(config(**sections), arch)
        for sections in (
            {"megatron": {"fp8": {"recipe": "blockwise"}}},
            {"rollout": {"quantization": "fp8_per_block"}},
            {},
        )
    ]
    assert [probe.dtype for probe in probes] == ["fp8", "fp8", "bfloat16"]
    assert [probe.tolerance for probe in probes] == [None, None, None]
    assert build_probe(config(rollout={"quantization": "mxfp8", "probe_tolerance": 0.2}), arch).tolerance == 0.2


def test_a_start_reports_all_problems(tmp_path: Path) -> None:
    """Through `validate`, as the command line calls it, before any rank starts. On a CPU none of these can run."""
    run = make_run(tmp_path)
    overrides = ["actor.megatron.fp8.recipe=mxfp8", "rollout.quantization=fp8_per_block"]
    overrides += ["actor.megatron.context_parallel_size=4", "rollout.engine_kwargs.quantization=fp8"]
    overrides += ["actor.megatron.override_transformer_config.fp8_recipe=delayed"]
    with pytest.raises(ConfigError) as error:
        validate(load_config(run / "run.yaml", overrides), world_size=2)
    for words in (
        "actor.megatron.fp8.recipe=mxfp8 needs model.dtype=bfloat16",
        "actor.megatron.fp8.recipe=mxfp8 needs a CUDA device",
        "rollout.quantization=fp8_per_block needs a CUDA device",
        "context_parallel_size=4 does not divide the 2 ranks that world size / (tp x pp) leaves",
        "context_parallel_size=4 on the CPU: only Transformer Engine's attention can cut a sequence",
        "rollout.engine_kwargs.quantization='fp8' cannot be set here: set rollout.quantization",
        "override_transformer_config.fp8_recipe='delayed' cannot be set here: set actor.megatron.fp8.recipe",
    ):
        assert words in str(error.value), words


def test_a_dry_run_needs_no_hardware(tmp_path: Path) -> None:
    """A laptop can check the config of a cluster."""
    run = make_run(tmp_path)
    overrides = ["actor.megatron.fp8.recipe=blockwise", "model.dtype=bfloat16", "trainer.device=cuda"]
    validate(load_config(run / "run.yaml", overrides), world_size=2, dry_run=True)


# -- weights stored in FP8 ---------------------------------------------------------------------------------------------


def test_setting_a_parameter_sets_its_exact_values() -> None:
    """Transformer Engine's parameters have them until the optimizer has copied them to float32."""
    parameter, exact, values = torch.nn.Parameter(torch.zeros(3)), torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])
    set_parameter(parameter, values)
    assert torch.equal(parameter, values) and torch.equal(dequantized(parameter), values)
    parameter.get_high_precision_init_val = lambda: exact  # type: ignore[attr-defined]
    set_parameter(parameter, 2 * values)
    assert torch.equal(exact, 2 * values)
    parameter.get_high_precision_init_val = lambda: None  # type: ignore[attr-defined]
    set_parameter(parameter, values)
    assert torch.equal(exact, 2 * values) and torch.equal(parameter, values)


def test_a_new_optimizer_gets_the_float32_copies() -> None:
    groups = [[torch.zeros(2), torch.zeros(3)], [None]]
    old: Any = SimpleNamespace(shard_fp32_from_float16_groups=[[torch.ones(2), torch.full((3,), 2.0)], [None]])
    optimizer.copy_main_parameters(old, SimpleNamespace(shard_fp32_from_float16_groups=groups))  # type: ignore[arg-type]
    assert groups[0][0] is not None and groups[0][1] is not None
    assert groups[0][0].tolist() == [1, 1] and groups[0][1].tolist() == [2, 2, 2]


# -- one quantiser ---------------------------------------------------------------------------------------------------------


@ranks(1)
def blocks_of_vllm(weight: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(bytes, scales) with float32 scales, and with scales that are powers of two, as vLLM makes them by default."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    with torch.compiler.set_stance("force_eager"):  # compiling takes a minute
        first, again = per_block_cast_to_fp8(weight), per_block_cast_to_fp8(weight)
        requant_weight_ue8m0_inplace(*again)
    return [(values.view(torch.uint8), scales) for values, scales in (first, again)]


def test_the_engines_blocks_have_the_trainers_scales() -> None:
    """Transformer Engine's blocks by `compute_scale_from_amax` (common/recipe/recipe_common.cuh), vLLM's by its own code.

    448 / amax and 1 / (amax / 448) differ by a rounding of float32, 2**-23, and so do few bytes, by one step. With scales that
    are powers of two (VLLM_USE_DEEP_GEMM_E8M0=1, see `runner_environment`) vLLM rounds twice: 1.4 times the error.
    """
    weight = (0.02 * torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))).bfloat16()
    tiles = weight.float().view(4, 128, 8, 128)
    scale = 448.0 / tiles.abs().amax((1, 3), keepdim=True)
    trained = (tiles * scale).to(torch.float8_e4m3fn).view_as(weight).view(torch.uint8)
    [(served, scales), (coarse, powers)] = blocks_of_vllm(weight=weight)[0]
    torch.testing.assert_close(scales, (1 / scale)[:, 0, :, 0], rtol=2**-22, atol=0)
    steps = (served.int() - trained.int()).abs()
    assert steps.max() <= 1 and (steps > 0).float().mean() < 2e-3
    assert torch.equal(torch.frexp(powers).mantissa, torch.full_like(powers, 0.5)) and (powers / scales).max() > 1.4

    def error(values: torch.Tensor, scales: torch.Tensor) -> float:
        whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return float((values.view(torch.float8_e4m3fn).float() * whole - weight.float()).pow(2).mean().sqrt())

    assert error(coarse, powers) > 1.3 * error(served, scales)
