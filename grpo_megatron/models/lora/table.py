"""The adapted weights, and the two factors of each as rows of a weight table. The factors are canonical, as PEFT has them.

weight of this rank    lora_a of this rank                      lora_b of this rank
linear_qkv             [A of q; A of k; A of v]  [3 r, n]       row i belongs to row i of the weight  [m / tp, r]
linear_fc1             [A of gate; A of up]      [2 r, n]       the same
linear_proj, fc2       A's columns               [r, n / tp]    B  [m, r]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_megatron.config import LoraConfig
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.weights.stream import model_rows
from grpo_megatron.models.weights.table import (
    QKV,
    DeltaInput,
    GateUp,
    InputSplit,
    OutputSplit,
    ReplicatedMatrix,
    WeightRow,
)
from grpo_megatron.sync.plan import Shard

LORA_A, LORA_B = "lora_a", "lora_b"  # names of a module's parameters
PEFT_PREFIX = "base_model.model."  # of every name in an adapter_model.safetensors
ROUTER_NAMES = ("gate", "router")


@dataclass(frozen=True)
class Factor(WeightRow):
    """A row of factors. `base`: the row of the weight; `targets`: its adapted parts, as indices in its `hf`.

    A fused weight may have adapters for some of its parts only. `lora_a` then has no rows for the others, and the others' rows
    of `lora_b` are never read.
    """

    base: WeightRow
    targets: tuple[int, ...]
    rank: int

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Hugging Face names of the adapted linear layers: `model.layers.0.self_attn.q_proj`."""
        return tuple(self.base.hf[index].removesuffix(".weight") for index in self.targets)


class FactorA(Factor):
    """A [r, inputs] of every adapted part, on top of each other."""

    @property
    def split_dim(self) -> int | None:  # type: ignore[override]
        return 1 if self.base.split_dim == 1 else None

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return tuple((self.rank, self.base.hf_shapes(arch)[index][1]) for index in self.targets)

    def slices(self, arch: Architecture, tp_rank: int, tp: int) -> tuple[Shard, ...]:
        if self.split_dim is not None:
            return super().slices(arch, tp_rank, tp)
        return tuple(Shard(number, 0, self.rank, number * self.rank) for number in range(len(self.targets)))


class FactorB(Factor):
    """B [outputs, r] of every adapted part, in the rows of the weight."""

    @property
    def split_dim(self) -> int | None:  # type: ignore[override]
        return 0 if self.base.split_dim == 0 else None

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return tuple((self.base.hf_shapes(arch)[index][0], self.rank) for index in self.targets)

    def local_shape(self, arch: Architecture, tp: int) -> tuple[int, ...]:
        return (self.base.local_shape(arch, tp)[0], self.rank)

    def slices(self, arch: Architecture, tp_rank: int, tp: int) -> tuple[Shard, ...]:
        if self.split_dim is None:
            return super().slices(arch, tp_rank, tp)
        return tuple(
            Shard(self.targets.index(shard.tensor), shard.start, shard.stop, shard.local_start)
            for shard in self.base.slices(arch, tp_rank, tp)
            if shard.tensor in self.targets
        )


def lora_rows(arch: Architecture, lora: LoraConfig) -> dict[str, Factor]:
    """Global Megatron name of `lora_a` and `lora_b` -> its row, for the whole model, in the order of its weights.

    Empty without LoRA. The Hugging Face names are PEFT's, as in adapter_model.safetensors.
    """
    if lora.rank is None:
        return {}
    rows: dict[str, Factor] = {}
    for base in model_rows(arch).values():
        if not _can_adapt(base):
            continue
        targets = tuple(i for i, name in enumerate(base.hf) if _is_target(name.removesuffix(".weight"), lora))
        if not targets:
            continue
        module = base.megatron.removesuffix("weight")
        for kind, parameter, suffix in ((FactorA, LORA_A, "lora_A"), (FactorB, LORA_B, "lora_B")):
            names = (f"{PEFT_PREFIX}{base.hf[i].removesuffix('weight')}{suffix}.weight" for i in targets)
            rows[module + parameter] = kind(module + parameter, tuple(names), base, targets, lora.rank)
    return rows


def factors_of_weights(arch: Architecture, lora: LoraConfig) -> dict[str, tuple[str, str]]:
    """Maps each adapted weight to its A and B, by their Hugging Face names."""
    rows = list(lora_rows(arch, lora).values())  # A and B in turn
    return {
        f"{layer}.weight": (a, b)
        for row_a, row_b in zip(rows[::2], rows[1::2], strict=True)
        for layer, a, b in zip(row_a.layer_names, row_a.hf, row_b.hf, strict=True)
    }


def _can_adapt(row: WeightRow) -> bool:
    """Experts have no adapters: PEFT adapts transformers' fused experts in a form without canonical factors."""
    is_linear = isinstance(row, (QKV, DeltaInput, GateUp, InputSplit, OutputSplit, ReplicatedMatrix))
    return is_linear and row.expert is None and row.megatron.endswith(".weight")


def _is_target(name: str, lora: LoraConfig) -> bool:
    if matches(name, lora.exclude_modules):
        return False
    if lora.target_modules == "all-linear":
        return name.rpartition(".")[2] not in ROUTER_NAMES
    return matches(name, lora.target_modules)


def matches(name: str, wanted: str | Sequence[str]) -> bool:
    """Applies PEFT's rule: a text is a regular expression for the whole name; a list has names, or the ends of names."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in wanted)


def adaptable_layers(arch: Architecture) -> list[str]:
    """Returns the Hugging Face names of the linear layers that may have adapters."""
    return [name.removesuffix(".weight") for row in model_rows(arch).values() if _can_adapt(row) for name in row.hf]


def target_problem(key: str, arch: Architecture, lora: LoraConfig) -> str | None:
    """Returns a name in `target_modules` or `exclude_modules` that no layer has, or None. `key`: of the section."""
    linear = adaptable_layers(arch)
    last = sorted({name.rpartition(".")[2] for name in linear})
    for field in ("target_modules", "exclude_modules"):
        wanted: Any = getattr(lora, field)
        if wanted == "all-linear" and field == "target_modules":
            continue
        for one in [wanted] if isinstance(wanted, str) else [[name] for name in wanted]:
            try:
                if not any(matches(name, one) for name in linear):
                    text = one if isinstance(one, str) else one[0]
                    hint = (
                        " (experts have no adapters: PEFT's own form for them has no A and B per layer)"
                        if arch.num_experts
                        else ""
                    )
                    if text in ("lm_head", "embed_tokens"):
                        hint = " that has adapters (head and embedding have none)"
                    given = f", of {lora.path}/adapter_config.json" if lora.path is not None else ""
                    return f"{key}.{field}{given}: {text!r} matches no linear layer{hint}; this model has {', '.join(last)}"
            except re.error as error:
                return f"{key}.{field}={one!r} is no regular expression ({error}); correct it, or set a list of names"
    if not lora_rows(arch, lora):
        return f"{key}.exclude_modules={lora.exclude_modules!r} leaves no layer with an adapter; exclude less"
    return None
