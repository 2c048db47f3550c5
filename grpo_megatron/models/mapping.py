"""Weight table rows: how one Megatron parameter relates to Hugging Face tensors, whole or cut for tensor parallelism.

Each kind of row owns three functions: `hf_shapes` (the census), `shard` (read this rank's part from Hugging Face tensors,
reading no more than it needs) and `merge` (all ranks' parts -> whole Hugging Face tensors). Loading, export and the
engine sync use the same rows, so they cannot disagree.

H query heads in G groups (n = H / G heads a group), head size d, hidden size h. Megatron fuses attention group by group:
for each group its n*d query rows, then d key rows, then d value rows. It stores [gate; up] per tensor-parallel rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from grpo_megatron.models.architecture import Architecture

# name -> something that can be sliced like a tensor and knows its shape (a safetensors slice, or a tensor)
Read = Callable[[str], Any]


@dataclass(frozen=True)
class WeightRow(ABC):
    """`megatron` may contain {layer}, and {expert} beside it; `hf` are the Hugging Face names, same placeholders.

    `expert` is set in a bound row: that expert's own parameter, which only one expert-parallel rank holds.
    """

    megatron: str
    hf: tuple[str, ...]
    expert: int | None = field(default=None, kw_only=True)

    def at(self, layer: int, expert: int | None = None) -> Self:
        """The row of one layer (and expert), placeholders filled in; both count from 0 over the whole model."""
        assert (expert is not None) == is_expert(self), self.megatron
        names = [name.format(layer=layer, expert=expert) for name in (self.megatron, *self.hf)]
        return replace(self, megatron=names[0], hf=tuple(names[1:]), expert=expert)

    def ep_rank(self, arch: Architecture, ep: int) -> int | None:
        """The one expert-parallel rank that holds a bound row; None: all of them."""
        return None if self.expert is None else self.expert // (arch.num_experts // ep)

    @abstractmethod
    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        """Shapes of the Hugging Face tensors, in the order of `hf`."""

    @abstractmethod
    def local_shape(self, arch: Architecture, tp: int) -> tuple[int, ...]:
        """Shape of one tensor-parallel rank's parameter."""

    @abstractmethod
    def shard(self, read: Read, arch: Architecture, tp_rank: int, tp: int) -> Tensor:
        """This rank's parameter from Hugging Face tensors."""

    @abstractmethod
    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        """Whole Hugging Face tensors, in the order of `hf`, from every rank's parameter. They own their memory."""

    def runs(self, arch: Architecture) -> Iterator[tuple[int, int]]:
        """(which of `hf`, how many of its next rows), top to bottom of the Megatron tensor of one rank, without padding."""
        return ((i, shape[0]) for i, shape in enumerate(self.hf_shapes(arch)))

    @property
    def split_dim(self) -> int | None:
        """Dimension that tensor parallelism cuts, None for a replicated parameter."""
        return 0


def _rows(read: Read, name: str, tp_rank: int, tp: int) -> Tensor:
    tensor = read(name)
    size = tensor.get_shape()[0] // tp if hasattr(tensor, "get_shape") else tensor.shape[0] // tp
    return tensor[tp_rank * size : (tp_rank + 1) * size]


@dataclass(frozen=True)
class Whole(WeightRow):
    """Replicated over tensor-parallel ranks: norms. `size` names the Architecture field with its length."""

    size: str = "hidden_size"

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return ((getattr(arch, self.size),),)

    def local_shape(self, arch: Architecture, tp: int) -> tuple[int, ...]:
        return self.hf_shapes(arch)[0]

    def shard(self, read: Read, arch: Architecture, tp_rank: int, tp: int) -> Tensor:
        return read(self.hf[0])[:]

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        return [shards[0].clone()]

    @property
    def split_dim(self) -> int | None:
        return None


@dataclass(frozen=True)
class Router(Whole):
    """The router's weight [experts, hidden], replicated. Its logits choose and weigh the experts of a token."""

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return ((arch.num_experts, arch.hidden_size),)


@dataclass(frozen=True)
class Vocabulary(WeightRow):
    """Embedding and output head: rows are tokens, padded with zero rows to `arch.padded_vocab_size(tp)`, cut by rows."""

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return ((arch.vocab_size, arch.hidden_size),)

    def local_shape(self, arch: Architecture, tp: int) -> tuple[int, ...]:
        return (arch.padded_vocab_size(tp) // tp, arch.hidden_size)

    def shard(self, read: Read, arch: Architecture, tp_rank: int, tp: int) -> Tensor:
        size = arch.padded_vocab_size(tp) // tp
        first, last = tp_rank * size, min((tp_rank + 1) * size, arch.vocab_size)
        part = read(self.hf[0])[min(first, arch.vocab_size) : max(last, min(first, arch.vocab_size))]
        out = part.new_zeros(size, arch.hidden_size)
        out[: len(part)] = part
        return out

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        return [torch.cat(list(shards))[: arch.vocab_size].clone()]


@dataclass(frozen=True)
class InputSplit(WeightRow):
    """A row-parallel linear (attention output, MLP down projection): cut along its input, dim 1."""

    size: str = "ffn_hidden_size"

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return ((arch.hidden_size, getattr(arch, self.size)),)

    def local_shape(self, arch: Architecture, tp: int) -> tuple[int, ...]:
        return (arch.hidden_size, getattr(arch, self.size) // tp)

    def shard(self, read: Read, arch: Architecture, tp_rank: int, tp: int) -> Tensor:
        size = getattr(arch, self.size) // tp
        return read(self.hf[0])[:, tp_rank * size : (tp_rank + 1) * size]

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        return [torch.cat(list(shards), dim=1)]

    @property
    def split_dim(self) -> int | None:
        return 1


@dataclass(frozen=True)
class GateUp(WeightRow):
    """SwiGLU's first linear: every rank holds [its part of gate; its part of up]."""

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return ((arch.ffn_hidden_size, arch.hidden_size),) * 2

    def local_shape(self, arch: Architecture, tp: int) -> tuple[int, ...]:
        return (2 * arch.ffn_hidden_size // tp, arch.hidden_size)

    def shard(self, read: Read, arch: Architecture, tp_rank: int, tp: int) -> Tensor:
        return torch.cat([_rows(read, name, tp_rank, tp) for name in self.hf])

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[i] for half in halves]) for i in (0, 1)]


@dataclass(frozen=True)
class QKV(WeightRow):
    """Fused attention input, weight [(H+2G)d, h] or bias [(H+2G)d], group by group. Works for more ranks than groups."""

    bias: bool = False

    def _tail(self, arch: Architecture) -> tuple[int, ...]:
        return () if self.bias else (arch.hidden_size,)

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        q, kv = arch.num_attention_heads * arch.head_dim, arch.num_query_groups * arch.head_dim
        return tuple((rows, *self._tail(arch)) for rows in (q, kv, kv))

    def local_shape(self, arch: Architecture, tp: int) -> tuple[int, ...]:
        rows = (arch.num_attention_heads + 2 * arch.num_query_groups) * arch.head_dim
        return (rows // tp, *self._tail(arch))

    def runs(self, arch: Architecture) -> Iterator[tuple[int, int]]:
        d = arch.head_dim
        return iter(
            [(0, arch.num_attention_heads // arch.num_query_groups * d), (1, d), (2, d)] * arch.num_query_groups
        )

    def shard(self, read: Read, arch: Architecture, tp_rank: int, tp: int) -> Tensor:
        if arch.num_query_groups % tp == 0:  # whole groups: read just this rank's
            return self._fuse([_rows(read, name, tp_rank, tp) for name in self.hf], arch, arch.num_query_groups // tp)
        fused = self._fuse([read(name)[:] for name in self.hf], arch, arch.num_query_groups)
        return fused.chunk(tp)[tp_rank]

    def _fuse(self, qkv: list[Tensor], arch: Architecture, groups: int) -> Tensor:
        tail = self._tail(arch)
        parts = [part.reshape(groups, -1, *tail) for part in qkv]  # [G, n*d, h], [G, d, h], [G, d, h]
        return torch.cat(parts, dim=1).reshape(-1, *tail)

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        d, tail = arch.head_dim, self._tail(arch)
        n = arch.num_attention_heads // arch.num_query_groups
        fused = torch.cat(list(shards)).reshape(arch.num_query_groups, (n + 2) * d, *tail)
        parts = fused.split([n * d, d, d], dim=1)
        return [part.reshape(-1, *tail).clone() for part in parts]


LAYER = "model.layers.{layer}."
MCORE = "decoder.layers.{layer}."


def mlp_rows() -> list[WeightRow]:
    """One SwiGLU MLP a layer."""
    return [
        GateUp(MCORE + "mlp.linear_fc1.weight", (LAYER + "mlp.gate_proj.weight", LAYER + "mlp.up_proj.weight")),
        InputSplit(MCORE + "mlp.linear_fc2.weight", (LAYER + "mlp.down_proj.weight",)),
    ]


def expert_rows(block: str, gate: str, up: str, down: str) -> list[WeightRow]:
    """A router and SwiGLU experts in every layer. `block` is the module's Hugging Face name, the others its linears'."""
    hf, mcore = LAYER + block + ".", MCORE + "mlp.experts.local_experts.{expert}."
    one = hf + "experts.{expert}."
    return [
        Router(MCORE + "mlp.router.weight", (hf + "gate.weight",)),
        GateUp(mcore + "linear_fc1.weight", (f"{one}{gate}.weight", f"{one}{up}.weight")),
        InputSplit(mcore + "linear_fc2.weight", (f"{one}{down}.weight",)),
    ]


def decoder_table(
    *, qkv_bias: bool = False, qk_norm: bool = False, tied: bool = False, mlp: Sequence[WeightRow] | None = None
) -> list[WeightRow]:
    """The table of a pre-norm decoder with grouped-query attention, in local-spec Megatron names; `mlp`: SwiGLU."""
    mcore = MCORE
    attention = tuple(f"{LAYER}self_attn.{p}_proj." for p in "qkv")
    rows: list[WeightRow] = [Vocabulary("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))]
    rows.append(Whole(mcore + "input_layernorm.weight", (LAYER + "input_layernorm.weight",)))
    rows.append(QKV(mcore + "self_attention.linear_qkv.weight", tuple(a + "weight" for a in attention)))
    if qkv_bias:
        rows.append(QKV(mcore + "self_attention.linear_qkv.bias", tuple(a + "bias" for a in attention), bias=True))
    if qk_norm:
        for p in "qk":
            name = f"self_attention.{p}_layernorm.weight"
            rows.append(Whole(mcore + name, (f"{LAYER}self_attn.{p}_norm.weight",), "head_dim"))
    rows += [
        InputSplit(mcore + "self_attention.linear_proj.weight", (LAYER + "self_attn.o_proj.weight",), "attention_size"),
        Whole(mcore + "pre_mlp_layernorm.weight", (LAYER + "post_attention_layernorm.weight",)),
        *(mlp_rows() if mlp is None else mlp),
        Whole("decoder.final_layernorm.weight", ("model.norm.weight",)),
    ]
    if not tied:
        rows.append(Vocabulary("output_layer.weight", ("lm_head.weight",)))
    return rows


def is_layered(row: WeightRow) -> bool:
    return "{layer}" in row.megatron


def is_expert(row: WeightRow) -> bool:
    """Whether an unbound row stands for one parameter an expert."""
    return "{expert}" in row.megatron


def bind_table(table: Sequence[WeightRow], arch: Architecture) -> Iterator[WeightRow]:
    """Every row of the whole model, bound, in stream order: embedding, layers (experts last, one by one), norm, head."""
    yield from (row for row in table if not is_layered(row) and "embedding" in row.megatron)
    shared = [row for row in table if is_layered(row) and not is_expert(row)]
    experts = [row for row in table if is_expert(row)]
    for layer in range(arch.num_layers):
        yield from (row.at(layer) for row in shared)
        yield from (row.at(layer, expert) for expert in range(arch.num_experts) for row in experts)
    yield from (row for row in table if not is_layered(row) and "embedding" not in row.megatron)


# Transformer Engine fuses a norm into the linear behind it; the tensor is the same under another name.
TE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def local_name(megatron_name: str) -> str:
    """The local-spec name of a parameter that a Transformer Engine spec may have named otherwise."""
    for local, fused in TE_NAMES.items():
        if megatron_name.endswith(fused):
            return megatron_name.removesuffix(fused) + local
    return megatron_name
