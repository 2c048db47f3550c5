"""Which fused kernels a rank uses, and what it does without Transformer Engine or Apex. No kernel runs here.

A rank with a GPU is a `Device("cpu")` that says it is CUDA; an installed Apex is Megatron-Core's own flag for it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe import moe_utils

from grpo_megatron.config import ActorConfig, Config, ConfigError, MegatronConfig
from grpo_megatron.device import Device, Hardware
from grpo_megatron.models import build
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import architecture_of
from grpo_megatron.models.layers import spec
from grpo_megatron.models.layers.precision import hardware_problems
from grpo_megatron.models.layers.spec import Kernels, choose_kernels, fused_without_apex, transformer_config
from grpo_megatron.models.weights import sharded_state
from tests import tiny
from tests.models.policies import LAYOUTS
from tests.models.test_layouts import update
from tests.worlds import ranks

LOCAL, ENGINE = MegatronConfig(transformer_impl="local"), MegatronConfig(transformer_impl="transformer_engine")


@contextlib.contextmanager
def chosen(kernels: Kernels) -> Iterator[None]:
    """Models are built with `kernels`, and with Transformer Engine's as on a GPU."""
    config = build.transformer_config
    is_engine = kernels.transformer_engine
    with (
        mock.patch.object(build, "choose_kernels", lambda *args, **options: kernels),
        mock.patch.object(build, "transformer_config", lambda a, m, dtype, _, k: config(a, m, dtype, is_engine, k)),
    ):
        yield


@ranks(1)
def apex_gradients(folder: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """An update without and with Apex's weight gradients, in plain torch, and how often their product was computed."""
    calls: list[int] = []

    def accumulate(inputs: torch.Tensor, gradient: torch.Tensor, main_grad: torch.Tensor) -> None:
        """What `wgrad_gemm_accum_fp32` computes. inputs [t, in], gradient [t, out], main_grad [out, in] in float32."""
        calls.append(1)
        main_grad.add_(gradient.float().T @ inputs.float())

    parts = folder, tiny.make_sequences(6), LAYOUTS["1"], 2, True
    plain = update(*parts)
    fake = SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    with (
        chosen(Kernels(fused_gradients=True)),
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", fake, create=True),
    ):
        fused = update(*parts)
    return plain, fused, len(calls)


@pytest.fixture(scope="module")
def arch() -> Architecture:
    return architecture_of({**tiny.COMMON, **tiny.FAMILIES["qwen3"]})


@pytest.fixture
def gpu() -> Device:
    device = Device("cpu")
    device.kind = "cuda"
    return device


def installed(monkeypatch: pytest.MonkeyPatch, *, engine: bool, apex: bool, triton: bool = True) -> None:
    monkeypatch.setattr(
        spec, "examine_transformer_engine", lambda: ((2, 11), None) if engine else (None, "2.20.2 is installed")
    )
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", apex)
    module = ModuleType("triton") if triton else None
    if module is not None:
        module.__spec__ = ModuleSpec("triton", None)
    monkeypatch.setitem(sys.modules, "triton", module)


FUSIONS = ("gradient_accumulation_fusion", "apply_rope_fusion", "bias_activation_fusion", "bias_dropout_fusion")


@pytest.mark.parametrize(
    ("kernels", "on"),
    [
        (Kernels(), ()),
        (Kernels(compiled=True), FUSIONS[2:]),
        (Kernels(compiled=True, fused_gradients=True), (FUSIONS[0], *FUSIONS[2:])),
        (Kernels(transformer_engine=True, compiled=True), FUSIONS[1:]),
        (Kernels(transformer_engine=True, compiled=True, fused_gradients=True), FUSIONS),
    ],
)
def test_fused_kernels_are_those_that_are_installed(arch: Architecture, kernels: Kernels, on: tuple[str, ...]) -> None:
    with mock.patch.object(rope_utils, "fused_apply_rotary_pos_emb_thd", object()):  # Megatron requires it
        built = transformer_config(arch, MegatronConfig(), "bfloat16", True, kernels)
    assert [name for name in FUSIONS if getattr(built, name)] == list(on)
    assert not (built.masked_softmax_fusion or built.persist_layer_norm or built.cross_entropy_loss_fusion)
    assert built.transformer_impl == ("transformer_engine" if kernels.transformer_engine else "local")


def test_no_fused_rope_under_yarn() -> None:
    """Transformer Engine's kernel for packed sequences drops the factor on cosine and sine."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    arch = architecture_of({**tiny.COMMON, "model_type": "qwen2", "rope_scaling": yarn})
    config = transformer_config(arch, ENGINE, "float32", False, Kernels(transformer_engine=True))
    assert not config.apply_rope_fusion
    assert (config.yarn_mscale, config.yarn_mscale_all_dim) == (pytest.approx(1.0), 0.0)


def test_the_users_table_is_applied_last(arch: Architecture) -> None:
    megatron = MegatronConfig(override_transformer_config={"bias_dropout_fusion": False})
    assert not transformer_config(arch, megatron, "bfloat16", True, Kernels(compiled=True)).bias_dropout_fusion


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"transformer_impl": "transformer_engine"}, "transformer_impl=transformer_engine"),
        ({"fp8": {"recipe": "delayed"}}, "fp8.recipe=delayed"),
        ({"context_parallel_size": 2}, "context_parallel_size=2"),
    ],
)
def test_a_cpu_rank_refuses_what_it_cannot_build(changes: dict[str, Any], key: str) -> None:
    assert choose_kernels(MegatronConfig(), Device("cpu")) == Kernels()
    with pytest.raises(
        ConfigError, match=f"actor.megatron.{key} needs Transformer Engine on a GPU, but this run is on"
    ):
        choose_kernels(MegatronConfig.model_validate(changes), Device("cpu"))


AUTO, BF16, TE = MegatronConfig(), "bfloat16", Kernels(True, True, True, True)


@pytest.mark.parametrize(
    ("megatron", "dtype", "engine", "apex", "has_gradients", "expected", "words"),
    [
        (AUTO, BF16, True, False, True, TE, "Engine's layers, with fused weight"),
        (AUTO, BF16, True, False, False, Kernels(True, True, False, True), "Transformer Engine's layers"),
        (AUTO, BF16, False, True, True, Kernels(False, True, True, True), "(Apex); no Transformer Engine: 2.20.2"),
        (AUTO, BF16, False, True, False, Kernels(False, True, False, True), "no Transformer Engine: 2.20.2 is"),
        (AUTO, BF16, False, False, True, Kernels(False, True, False, True), "no fused weight gradients (they"),
        (AUTO, "float32", True, True, True, Kernels(False, True, True, True), "model.dtype=float32, which its"),
        (
            LOCAL,
            BF16,
            True,
            False,
            True,
            Kernels(False, True, False, True),
            "no Transformer Engine: transformer_impl=local",
        ),
        (ENGINE, BF16, True, False, True, TE, "Transformer Engine's layers"),
        (ENGINE, BF16, False, True, True, TE, "_impl=transformer_engine needs .*, but 2.20.2 is installed"),
    ],
)
def test_a_gpu_uses_what_is_installed(
    monkeypatch: pytest.MonkeyPatch,
    gpu: Device,
    megatron: MegatronConfig,
    dtype: str,
    engine: bool,
    apex: bool,
    has_gradients: bool,
    expected: Kernels,
    words: str,
) -> None:
    """Fused weight gradients need a kernel, Transformer Engine's or Apex's, and gradient buffers."""
    installed(monkeypatch, engine=engine, apex=apex)
    if megatron is ENGINE and not engine:
        with pytest.raises(ConfigError, match=words):
            choose_kernels(megatron, gpu, dtype)
        return
    kernels = choose_kernels(megatron, gpu, dtype, has_gradients=has_gradients)
    assert kernels == expected
    assert words in kernels.describe()
    assert kernels.settings()["gradient_accumulation_fusion"] is expected.fused_gradients


@pytest.mark.parametrize(
    ("capability", "deterministic", "flash", "has_engine"),
    [
        ((9, 0), False, None, True),
        ((9, 0), True, None, True),
        ((10, 0), False, None, True),
        ((10, 0), True, None, False),
        ((10, 0), True, "2.8.1", True),
        ((12, 0), False, None, False),
        ((8, 0), False, None, False),
        ((8, 0), False, "2.8.3.post1", True),
        ((8, 9), False, "2.6.1", False),
        ((8, 9), False, "2.9.0", False),
    ],
)
def test_a_gpu_without_packed_attention_of_cudnn_needs_flash_attention(
    monkeypatch: pytest.MonkeyPatch,
    gpu: Device,
    capability: tuple[int, int],
    deterministic: bool,
    flash: str | None,
    has_engine: bool,
) -> None:
    """Else it has local layers, and what needs Transformer Engine is refused, by the checks too."""

    def version(package: str) -> str:
        if flash is None or package != "flash-attn":
            raise importlib.metadata.PackageNotFoundError(package)
        return flash

    installed(monkeypatch, engine=True, apex=False)
    monkeypatch.setattr(importlib.metadata, "version", version)
    hardware = Hardware(capability, (13, 0))
    monkeypatch.setattr(spec, "read_hardware", lambda kind: hardware)
    kernels = choose_kernels(MegatronConfig(deterministic=deterministic), gpu)
    assert kernels.transformer_engine is has_engine
    engine = MegatronConfig(transformer_impl="transformer_engine", deterministic=deterministic)
    raw = {"model": {"path": "x"}, "actor": {"megatron": engine.model_dump()}, "trainer": {"device": "cuda"}}
    problems = list(hardware_problems(Config.model_validate(raw), hardware))
    assert bool(problems) is not has_engine
    if not has_engine:
        words = "attention over packed sequences with compute capability"
        assert words in str(kernels.reason) and words in problems[0]
        assert "pip install 'flash-attn>=2.7.3,<=2.8.3', or leave it out" in problems[0]
        with pytest.raises(ConfigError, match=words):
            choose_kernels(engine, gpu)


@pytest.mark.parametrize(
    ("changes", "triton", "is_fused", "words"),
    [
        ({}, True, True, "; fused output head (Triton)"),
        ({}, False, False, "; no fused output head: Triton is not installed"),
        ({"fused_head": False}, True, False, "; no fused output head: fused_head=false"),
    ],
)
@pytest.mark.parametrize("engine", [True, False])
def test_the_output_head_is_fused_on_a_gpu_with_triton(
    monkeypatch: pytest.MonkeyPatch,
    gpu: Device,
    changes: dict[str, Any],
    triton: bool,
    is_fused: bool,
    words: str,
    engine: bool,
) -> None:
    installed(monkeypatch, engine=engine, apex=False, triton=triton)
    kernels = choose_kernels(MegatronConfig.model_validate(changes), gpu)
    assert kernels.fused_head is is_fused
    assert words in kernels.describe()


def test_only_models_with_gradient_buffers_are_built_with_fused_gradients() -> None:
    """The policy and a learning reward model have them; the reference and a frozen reward model do not."""
    from grpo_megatron.models import policy
    from grpo_megatron.models.heads import scalar
    from grpo_megatron.models.heads.reward_folder import RewardFolder

    class Stop(Exception):
        pass

    asked = mock.Mock(side_effect=Stop)
    mesh: Any = None
    arch = architecture_of({**tiny.COMMON, **tiny.FAMILIES["qwen3"]})
    actor, device = ActorConfig(), Device("cpu")
    folder = RewardFolder(Path("x"), arch, has_head=False, pad_token_id=None)
    with mock.patch.object(build, "choose_kernels", asked):
        for make in (
            lambda: policy.Policy.load(Path("x"), "float32", arch, actor, mesh, device),
            lambda: scalar.ScalarPolicy(folder, "float32", actor, mesh, device),
            lambda: policy.Reference.load(Path("x"), "float32", arch, actor, mesh, device),
            lambda: scalar.FrozenScalar(folder, "float32", actor, mesh, device),
        ):
            with pytest.raises(Stop):
                make()
    assert [call.kwargs["has_gradients"] for call in asked.call_args_list] == [True, True, False, False]


def test_the_output_head_accepts_the_engines_fusion_without_apex() -> None:
    """Megatron-Core's linear layers read the flag when they are built. Local layers without Apex stay refused."""
    with mock.patch.object(layers, "_grad_accum_fusion_available", False):
        with fused_without_apex(Kernels(transformer_engine=True, fused_gradients=True)):
            assert layers._grad_accum_fusion_available
        for kernels in (Kernels(fused_gradients=True), Kernels(transformer_engine=True)):
            with fused_without_apex(kernels):
                assert not layers._grad_accum_fusion_available


@pytest.mark.slow
def test_gradients_are_the_same_with_apex(tmp_path: Path) -> None:
    """Fused products of the 4 layers' 4 linear layers, in 3 micro-batches; the output head's gradient is added by DDP."""
    folder = tiny.make_model(tmp_path / "model", "qwen2-tied")
    ((plain, fused, calls),) = apex_gradients(folder=folder)
    assert calls == 4 * 4 * 3
    for kind in ("gradients", "weights"):
        for name, tensor in plain[kind].items():
            torch.testing.assert_close(
                fused[kind][name], tensor, rtol=0, atol=1e-6 * float(tensor.abs().max()), msg=name
            )


def test_fp8_state_that_a_checkpoint_lacks_is_not_asked_for(tmp_path: Path) -> None:
    """A checkpoint of local layers has none for norms. A missing weight stays an error."""
    names = ("norm._extra_state", "linear._extra_state", "norm.weight")
    model = {name: SimpleNamespace(unique_key=f"decoder.{name}/shard_0_1") for name in names}
    stored = {"decoder.linear._extra_state/shard_0_1": None}
    with mock.patch.object(sharded_state, "load_sharded_metadata", lambda folder: stored):
        assert list(sharded_state._without_unknown_extra_state(model, tmp_path)) == [
            "linear._extra_state",
            "norm.weight",
        ]


# -- mixtures of experts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_router_runs_without_transformer_engine(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Megatron-Core 0.16 leaves the name undefined: NameError in the first forward pass, on every device."""
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)
    device = Device("cpu")
    device.kind = kind  # type: ignore[assignment]
    tokens, weight = torch.randn(5, 8), torch.randn(4, 8)
    with pytest.raises(NameError):
        moe_utils.router_gating_linear(tokens, weight, None, torch.float32)
    with device.megatron():
        logits = moe_utils.router_gating_linear(tokens, weight, None, torch.float32)
    torch.testing.assert_close(logits, tokens @ weight.T)
