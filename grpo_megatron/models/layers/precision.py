"""FP8: the hardware that a recipe needs, the TransformerConfig fields that it sets, and the padding of tokens.

Only the decoder's linear layers compute in FP8, through Transformer Engine. Embedding, attention core, router, output head and
log-probabilities stay in bfloat16 or float32, so the vocabulary has no FP8 requirement. The hardware is an argument, so that a
machine without a GPU can check a config for a machine with one. Nothing here was run on a GPU yet.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from grpo_megatron.config import Config, Fp8Config, MegatronConfig
from grpo_megatron.device import Hardware, read_hardware
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.transformer_engine import (
    FLASH_ATTENTION,
    TE_INSTALL,
    TE_REQUIREMENT,
    Version,
    packed_attention_problem,
)

FP8 = "actor.megatron.fp8"


@dataclass(frozen=True)
class Recipe:
    """The requirements of one way to compute in FP8. It runs on compute capabilities from `capability` to below `limit`.

    `alignment`: the rows and the columns of every matrix product must be multiples of it. `gathered_alignment`: the same for
    the local part of an activation that tensor-parallel ranks quantize and then gather (sequence parallelism); such a part
    must hold whole scale blocks.
    """

    capability: Version
    cuda_version: Version
    limit: Version | None = None
    alignment: int = 16
    gathered_alignment: int = 16
    format: Literal["e4m3", "hybrid"] = "hybrid"
    remedy: str = ""


RECIPES: dict[str, Recipe] = {  # the sizes are those that Transformer Engine 2.11 asserts
    # One scale per tensor: from the largest values of the last steps (arXiv:2209.05433), or from its current largest value.
    **dict.fromkeys(("delayed", "tensorwise"), Recipe((8, 9), (12, 1))),
    # One scale per 1 x 128 activations and per 128 x 128 weights, all e4m3 (DeepSeek-V3, arXiv:2412.19437).
    "blockwise": Recipe((9, 0), (12, 9), (10, 0), gathered_alignment=128, format="e4m3", remedy="mxfp8"),
    # One power-of-two scale per 32 values, in hardware (OCP microscaling, arXiv:2310.10537).
    "mxfp8": Recipe((10, 0), (12, 8), (12, 0), 32, 32, format="e4m3", remedy="tensorwise"),
}
# Requirements of vLLM to compute in FP8, per rollout.quantization. On older hardware it would only store weights in FP8.
QUANTIZATIONS: dict[str, Recipe] = {
    **dict.fromkeys(("fp8_per_tensor", "fp8_per_channel"), Recipe((8, 9), (12, 1))),
    "fp8_per_block": Recipe((9, 0), (12, 1), remedy="fp8_per_tensor"),
    "mxfp8": Recipe((10, 0), (12, 8), remedy="fp8_per_tensor"),
}
# Its kernels scale the inputs of a linear layer in groups of so many: a rank's inputs must be whole groups.
ENGINE_GROUPS = {"fp8_per_block": 128, "mxfp8": 32}
# vLLM's batch invariance replaces kernels of the whole process, so the trainer's, too. Below 9.0 these include `aten::linear`,
# whose replacement has no gradient (`enable_batch_invariant_mode` of model_executor/determinism/batch_invariant.py).
BATCH_INVARIANCE = Recipe((9, 0), (12, 1))
FIXED_ORDER = 2, 4, 6, 8  # GPUs over which its custom all-reduce adds, which is then independent of the message's size
_SAME_NAMES = (  # fields of TransformerConfig that are named fp8_<key>, and those that have the key's name
    ("wgrad", "margin", "amax_history_len", "amax_compute_algo"),
    ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
)


def fp8_settings(fp8: Fp8Config) -> dict[str, Any]:
    """Returns the TransformerConfig fields of a recipe. Empty without a recipe."""
    if fp8.recipe is None:
        return {}
    return {
        "fp8": fp8.format or RECIPES[fp8.recipe].format,
        "fp8_recipe": fp8.recipe,
        "fp8_param": fp8.param_gather,
        **{f"fp8_{name}": getattr(fp8, name) for name in _SAME_NAMES[0]},
        **{name: getattr(fp8, name) for name in _SAME_NAMES[1]},
    }


def batch_invariance() -> dict[str, Any]:
    """Returns the TransformerConfig fields of `actor.megatron.batch_invariant`; replaces the kernels of this process."""
    from megatron.core.transformer.custom_layers.batch_invariant_kernels import enable_batch_invariant_mode
    from megatron.core.transformer.enums import AttnBackend

    enable_batch_invariant_mode()
    return {"batch_invariant_mode": True, "attention_backend": AttnBackend.flash}


def row_alignment(megatron: MegatronConfig) -> int:
    """Returns the number that must divide the rows of a rank's activations. 1 without FP8."""
    if megatron.fp8.recipe is None:
        return 1
    recipe = RECIPES[megatron.fp8.recipe]
    return recipe.gathered_alignment if _gathers_activations(megatron) else recipe.alignment


def _gathers_activations(megatron: MegatronConfig) -> bool:
    return megatron.use_sequence_parallel and megatron.tensor_model_parallel_size > 1


def token_multiple(megatron: MegatronConfig) -> int:
    """Returns the multiple to which packs of tokens are padded. There is no other padding rule.

    Context parallelism cuts a pack into 2 cp chunks. Sequence parallelism cuts each rank's two chunks over tp ranks. FP8
    needs whole blocks of the remaining rows. The result is cp * lcm(2 if cp > 1, tp * row_alignment), where tp is 1 without
    sequence parallelism. (lcm(tp, 2 cp, alignment) would be too small with FP8. For tp 8, cp 1 and alignment 16 it is 16,
    which is two rows per rank, and Transformer Engine refuses fewer than 8.)
    """
    cp = megatron.context_parallel_size
    ways = megatron.tensor_model_parallel_size if _gathers_activations(megatron) else 1
    return cp * math.lcm(2 if cp > 1 else 1, ways * row_alignment(megatron))


# -- checks ------------------------------------------------------------------------------------------------------------


def precision_problems(config: Config, arch: Architecture | None) -> Iterator[str]:
    """Yields contradictions of FP8 in training or rollouts with other keys or the model, one line each, whatever the hardware."""
    megatron, fp8 = config.actor.megatron, config.actor.megatron.fp8
    if arch is not None and config.has_rollouts:
        yield from _engine_problems(config, arch)
    if fp8.recipe is None:
        changed = [name for name in fp8.model_fields_set if getattr(fp8, name) != type(fp8).model_fields[name].default]
        for name in sorted(changed):
            yield f"{FP8}.{name}={getattr(fp8, name)} has no effect without {FP8}.recipe; set it, or leave it out"
        return
    if config.model.dtype != "bfloat16":
        yield f"{FP8}.recipe={fp8.recipe} needs model.dtype=bfloat16, and it is {config.model.dtype}; set it"
    if megatron.transformer_impl == "local":
        yield (
            f"{FP8}.recipe={fp8.recipe} needs Transformer Engine's layers, and actor.megatron.transformer_impl=local;"
            " set transformer_impl=auto"
        )
    if fp8.recipe == "delayed" and fp8.first_last_layers_bf16:
        yield (
            f"{FP8}.first_last_layers_bf16=true: delayed scaling measures all layers together and cannot leave some out;"
            f" set {FP8}.recipe=tensorwise"
        )
    if fp8.param_gather and not megatron.use_distributed_optimizer:
        yield f"{FP8}.param_gather=true needs actor.megatron.use_distributed_optimizer=true; set it"
    if fp8.param_gather and fp8.recipe == "mxfp8":
        yield (
            f"{FP8}.param_gather=true with recipe=mxfp8: Megatron-Core gathers such weights inside its gradient buffers,"
            " which is not supported here; leave param_gather out"
        )
    if arch is not None:
        yield from _size_problems(megatron, arch)


def _engine_problems(config: Config, arch: Architecture) -> Iterator[str]:
    """Yields widths that vLLM's kernels refuse. It would fail at the first request. Experts are padded."""
    quantization, tp = config.rollout.quantization, config.rollout.tensor_model_parallel_size
    unit = ENGINE_GROUPS.get(quantization or "", 1)
    mlp = 0 if arch.num_experts else arch.ffn_hidden_size
    widths = (
        ("hidden_size", arch.hidden_size, 1),
        ("attention width", arch.attention_size, tp),
        ("MLP width", mlp, tp),
    )
    for name, size, ways in widths:
        if size % ways == 0 and size // ways % unit:
            yield (
                f"rollout.quantization={quantization} needs inputs that are multiples of {unit}; this model's {name}, {size} /"
                f" tp {ways} = {size // ways}, is not; set rollout.quantization=fp8_per_channel, or another"
                " rollout.tensor_model_parallel_size"
            )


def _size_problems(megatron: MegatronConfig, arch: Architecture) -> Iterator[str]:
    """Yields each width on one rank that is no multiple of the alignment; and recipes that leave no layer for FP8."""
    fp8, tp = megatron.fp8, megatron.tensor_model_parallel_size
    assert fp8.recipe is not None
    recipe = RECIPES[fp8.recipe]
    gathers = _gathers_activations(megatron)
    qkv = (arch.num_attention_heads + 2 * arch.num_query_groups) * arch.head_dim
    widths = (
        ("hidden_size", arch.hidden_size, 1, row_alignment(megatron)),
        ("query, key and value rows", qkv, tp, recipe.alignment),
        ("attention width", arch.attention_size, tp, recipe.alignment),
        ("MLP width", arch.ffn_hidden_size, tp, recipe.alignment),
    )
    for name, size, ways, unit in widths:
        if size % ways or size // ways % unit == 0:
            continue
        cut = f"{size} / tp {ways} = {size // ways}" if ways > 1 else f"{size}"
        needs, remedy = f"widths that are multiples of {unit}", "leave"
        if ways > 1:
            remedy = "lower actor.megatron.tensor_model_parallel_size or leave"
        elif gathers and size % recipe.alignment == 0:
            needs = f"a hidden_size that is a multiple of {unit} under sequence parallelism"
            remedy = "set actor.megatron.sequence_parallel=false or leave"
        yield f"{FP8}.recipe={fp8.recipe} needs {needs}; this model's {name}, {cut}, is not; {remedy} {FP8}.recipe out"
    if fp8.first_last_layers_bf16:
        ends = fp8.num_layers_at_start_in_bf16 + fp8.num_layers_at_end_in_bf16
        stage = arch.num_layers // megatron.pipeline_model_parallel_size
        if ends >= arch.num_layers:
            yield (
                f"{FP8}.num_layers_at_start_in_bf16 + num_layers_at_end_in_bf16 = {ends} leave none of"
                f" {arch.num_layers} layers for FP8; lower them"
            )
        elif max(fp8.num_layers_at_start_in_bf16, fp8.num_layers_at_end_in_bf16) > stage:
            yield (
                f"{FP8}.num_layers_at_start_in_bf16, num_layers_at_end_in_bf16: Megatron-Core keeps at most one pipeline"
                f" stage's {stage} layers in bf16 at an end; lower them"
            )


def hardware_problems(config: Config, hardware: Hardware | None = None) -> Iterator[str]:
    """Yields each feature that the config needs and the hardware lacks. `hardware` None: this machine, read if needed."""
    megatron, quantization = config.actor.megatron, config.rollout.quantization
    recipe, cp, impl = megatron.fp8.recipe, megatron.context_parallel_size, megatron.transformer_impl
    batch_invariant = config.has_rollouts and config.rollout.batch_invariant
    is_needed = megatron.deterministic or batch_invariant or impl == "transformer_engine"
    if recipe is None and quantization is None and cp == 1 and not is_needed:
        return
    hardware = hardware or read_hardware(config.trainer.device)
    for key, needed in _fp8_needs(config):
        yield from _lacks(key, needed, hardware)
    if batch_invariant:
        yield from _lacks("rollout.batch_invariant=true", BATCH_INVARIANCE, hardware)
        size, per_node = config.rollout.tensor_model_parallel_size, config.trainer.n_gpus_per_node
        if size > 1 and (size not in FIXED_ORDER or size > per_node):
            yield (
                f"rollout.batch_invariant=true with rollout.tensor_model_parallel_size={size} on nodes of {per_node}: vLLM adds"
                f" in a fixed order over {', '.join(map(str, FIXED_ORDER))} GPUs of one node only; set one of these, or leave"
                " batch_invariant out"
            )
    if megatron.batch_invariant:
        yield from _invariance_problems(config, hardware)
    if megatron.deterministic and not hardware.is_cuda:
        yield f"actor.megatron.deterministic=true {_NO_CUDA}"
    unfused = packed_attention_problem(hardware.capability, deterministic=megatron.deterministic)
    for key, is_set in (
        (f"{FP8}.recipe={recipe}", recipe is not None and hardware.is_cuda),  # without CUDA it was reported above
        # With trainer.device=cpu, checks/layout.py reports context parallelism.
        (f"actor.megatron.context_parallel_size={cp}", cp > 1 and config.trainer.device != "cpu"),
        ("actor.megatron.transformer_impl=transformer_engine", impl == "transformer_engine"),
    ):
        if is_set and not hardware.is_cuda:
            yield f"{key} {_NO_CUDA}"
        elif is_set and hardware.transformer_engine_problem is not None:
            yield f"{key} needs {TE_REQUIREMENT}, and {hardware.transformer_engine_problem}; {TE_INSTALL}, or leave it out"
        elif is_set and unfused is not None:
            yield f"{key} needs Transformer Engine, and {unfused}; pip install '{FLASH_ATTENTION}', or leave it out"


def _invariance_problems(config: Config, hardware: Hardware) -> Iterator[str]:
    """Yields problems of `actor.megatron.batch_invariant` (Megatron-Core: custom_layers/batch_invariant_kernels.py)."""
    key = "actor.megatron.batch_invariant=true"
    if hardware.is_cuda and importlib.util.find_spec("flash_attn") is None:
        yield f"{key} needs flash-attn, Megatron-Core's only attention of this kind; pip install '{FLASH_ATTENTION}'"
    if config.actor.megatron.fp8.recipe is not None:
        yield f"{key}: its products are of 16 and 32 bits; leave actor.megatron.fp8 out"
    if config.has_rollouts and config.rollout.batch_invariant and config.rollout.placement == "colocated":
        yield (
            f"{key} with rollout.batch_invariant=true: both replace torch's products in one process, which torch refuses; set"
            " rollout.placement=separate, or leave one of them out"
        )


_NO_CUDA = "needs a CUDA device, and this run has none; leave it out"


def _fp8_needs(config: Config) -> Iterator[tuple[str, Recipe]]:
    recipe, quantization = config.actor.megatron.fp8.recipe, config.rollout.quantization
    if recipe is not None:
        yield f"{FP8}.recipe={recipe}", RECIPES[recipe]
    if quantization is not None:
        yield f"rollout.quantization={quantization}", QUANTIZATIONS[quantization]


def capability_problems(config: Config, capability: Version) -> Iterator[str]:
    """Yields the FP8 settings that a device of this compute capability lacks, one line each."""
    for key, needed in _fp8_needs(config):
        yield from _lacks_capability(key, needed, capability)


def _lacks(key: str, recipe: Recipe, hardware: Hardware) -> Iterator[str]:
    if hardware.capability is None or hardware.cuda_version is None:
        yield f"{key} {_NO_CUDA}"
        return
    yield from _lacks_capability(key, recipe, hardware.capability)
    if hardware.cuda_version < recipe.cuda_version:
        yield (
            f"{key} needs CUDA {_dotted(recipe.cuda_version)}, torch was built with {_dotted(hardware.cuda_version)};"
            " install a newer torch, or leave it out"
        )


def _lacks_capability(key: str, recipe: Recipe, capability: Version) -> Iterator[str]:
    other = {**RECIPES, **QUANTIZATIONS}.get(recipe.remedy)
    runs = other is not None and capability >= other.capability
    remedy = f"set it to {recipe.remedy}, or leave it out" if runs else "leave it out"
    has = f"this device has {_dotted(capability)}; {remedy}"
    if capability < recipe.capability:
        yield f"{key} needs compute capability {_dotted(recipe.capability)}, {has}"
    elif recipe.limit is not None and capability >= recipe.limit:
        yield f"{key} is for compute capability below {_dotted(recipe.limit)}, {has}"


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
