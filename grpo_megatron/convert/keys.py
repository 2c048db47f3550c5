"""The key, and the index in its tensor, of a row of the weight table in a Megatron-Core distributed checkpoint.

Megatron stacks layers (and experts): decoder.layers.7.mlp.linear_fc2.weight [h, f] is index 7 of the tensor
decoder.layers.mlp.linear_fc2.weight [layers, h, f]. A norm has the name that Transformer Engine gives it, even when other
modules have written it. Models whose layers differ (dense ones, then experts) have one tensor per layer instead. Both forms
can be read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.weights.table import TE_NAMES, Vocabulary, WeightRow

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class Place:
    """Index `index` along the stacked axes, whose lengths are `stack`, of the tensor `key`."""

    key: str
    index: tuple[int, ...] = ()
    stack: tuple[int, ...] = ()


def whole_shape(row: WeightRow, arch: Architecture) -> tuple[int, ...]:
    """The shape of a row's Megatron tensor over all ranks, without the padding of a vocabulary."""
    return row.hf_shapes(arch)[0] if isinstance(row, Vocabulary) else row.local_shape(arch, 1)


def places(row: WeightRow, arch: Architecture) -> list[Place]:
    """Every place where the row may be. The first is the one that the current Megatron-Core writes."""
    layered = _LAYER.match(row.megatron)
    if layered is None:
        return [Place(row.megatron)]
    layer, rest = int(layered[1]), layered[2]
    expert = _EXPERT.match(rest)
    if expert is not None:
        e, rest = int(expert[1]), expert[2]
        stacked = [Place(f"decoder.layers.mlp.experts.experts.{rest}", (layer, e), (arch.num_layers, arch.num_experts))]
        single = [
            Place(f"decoder.layers.{layer}.mlp.experts.experts.{rest}", (e,), (arch.num_experts,)),
            Place(f"decoder.layers.{layer}.mlp.experts.experts.{e}.{rest}"),
        ]
    else:
        names = _names(rest, arch)
        stacked = [Place(f"decoder.layers.{name}", (layer,), (arch.num_layers,)) for name in names]
        single = [Place(f"decoder.layers.{layer}.{name}") for name in names]
    return single if arch.num_dense_layers else [*stacked, *single]


def _names(rest: str, arch: Architecture) -> list[str]:
    """The names of a layer's parameter, that of Transformer Engine's fused modules first.

    Latent attention begins with several linear layers, so the norm before it is not fused. Norms of query heads are not.
    """
    unfused = "self_attention.q_layernorm.weight" if arch.latent is None else "input_layernorm.weight"
    return [TE_NAMES[rest], rest] if rest in TE_NAMES and rest != unfused else [rest]


def written_places(row: WeightRow, arch: Architecture) -> list[Place]:
    """The places where a converted checkpoint stores the row.

    The second norm of an MoE layer is stored under two names: local specs read one of them, Transformer Engine's specs
    the other.
    """
    known = places(row, arch)
    is_norm = row.megatron.endswith(".pre_mlp_layernorm.weight")
    return known[:2] if is_norm and arch.num_experts else known[:1]


def extra_state_keys(rows: list[WeightRow], arch: Architecture) -> list[str]:
    """Keys of the objects that modules read besides their weights: FP8 scales, which are empty after a conversion.

    Local specs read those of the linear layers; Transformer Engine's modules also read the others.
    """
    found: dict[str, None] = {}
    for row in rows:
        if row.megatron.endswith(".weight") and row.megatron.startswith("decoder."):
            bare = next(p for p in places(row, arch) if not p.key.endswith("layer_norm_weight"))
            found[_object(bare.key.removesuffix("weight"), bare)] = None
    for layer in range(arch.num_layers):
        if arch.num_dense_layers:
            found[_object(f"decoder.layers.{layer}.self_attention.core_attention.", Place(""))] = None
        else:
            found[_object("decoder.layers.self_attention.core_attention.", Place("", (layer,), (arch.num_layers,)))] = (
                None
            )
    return list(found)


def _object(module: str, place: Place) -> str:
    index = ".".join(map(str, place.index or (0,)))
    return f"{module}_extra_state/shard_{index}_{'.'.join(map(str, place.stack or (1,)))}"
