"""Where a row of the weight table lives in a Megatron-Core distributed checkpoint.

Megatron stacks layers (and experts): decoder.layers.7.mlp.linear_fc2.weight [h, f] is index 7 of the tensor
decoder.layers.mlp.linear_fc2.weight [layers, h, f]. A norm has the name that Transformer Engine gives it, whichever
modules have written it. Checkpoints of models whose layers differ have one tensor a layer instead; both are read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.mapping import TE_NAMES, Vocabulary, WeightRow

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class Place:
    """Index `index` along the stacked axes, whose lengths are `stack`, of the tensor `key`."""

    key: str
    index: tuple[int, ...] = ()
    stack: tuple[int, ...] = ()


def whole_shape(row: WeightRow, arch: Architecture) -> tuple[int, ...]:
    """Megatron's shape of a row over all ranks; a vocabulary has no padding here."""
    return row.hf_shapes(arch)[0] if isinstance(row, Vocabulary) else row.local_shape(arch, 1)


def places(row: WeightRow, arch: Architecture) -> list[Place]:
    """Where the bound row may be, the place that Megatron-Core writes today first."""
    layered = _LAYER.match(row.megatron)
    if layered is None:
        return [Place(row.megatron)]
    layer, rest = int(layered[1]), layered[2]
    expert = _EXPERT.match(rest)
    if expert is not None:
        e, rest = int(expert[1]), expert[2]
        return [
            Place(f"decoder.layers.mlp.experts.experts.{rest}", (layer, e), (arch.num_layers, arch.num_experts)),
            Place(f"decoder.layers.{layer}.mlp.experts.experts.{rest}", (e,), (arch.num_experts,)),
            Place(f"decoder.layers.{layer}.mlp.experts.experts.{e}.{rest}"),
        ]
    names = [TE_NAMES[rest], rest] if rest in TE_NAMES else [rest]
    return [
        *(Place(f"decoder.layers.{name}", (layer,), (arch.num_layers,)) for name in names),
        *(Place(f"decoder.layers.{layer}.{name}") for name in names),
    ]


def written_places(row: WeightRow, arch: Architecture) -> list[Place]:
    """Where a converted checkpoint has the row. A mixture's second norm has two names: local specs ask for one of them,
    Transformer Engine's for the other."""
    here = places(row, arch)
    is_norm = row.megatron.endswith(".pre_mlp_layernorm.weight")
    return here[:2] if is_norm and arch.num_experts else here[:1]


def extra_states(rows: list[WeightRow], arch: Architecture) -> list[str]:
    """Objects that modules ask for beside their weights. They hold FP8 scales; a converted checkpoint has none to tell.

    Local specs ask for those of the linears; the rest is what Transformer Engine's modules are known to ask for.
    """
    found: dict[str, None] = {}
    for row in rows:
        if row.megatron.endswith(".weight") and row.megatron.startswith("decoder."):
            bare = next(p for p in places(row, arch) if not p.key.endswith("layer_norm_weight"))
            found[_object(bare.key.removesuffix("weight"), bare)] = None
    for layer in range(arch.num_layers):
        found[_object("decoder.layers.self_attention.core_attention.", Place("", (layer,), (arch.num_layers,)))] = None
    return list(found)


def _object(module: str, place: Place) -> str:
    index = ".".join(map(str, place.index or (0,)))
    return f"{module}_extra_state/shard_{index}_{'.'.join(map(str, place.stack or (1,)))}"
