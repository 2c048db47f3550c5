"""WeightRow: how one Megatron parameter relates to Hugging Face tensors, whole or cut for tensor parallelism.

A weight table is a list of rows. Each kind of row has three functions: `hf_shapes` (for the census), `shard` (one rank's
part from Hugging Face tensors, reading no more than it needs) and `merge` (all ranks' parts -> whole Hugging Face
tensors). Loading, export and the engine sync use the same rows, so they cannot disagree.

A table has one row per kind of parameter, with the placeholders {layer} and {expert} in its names. In an expanded row the
placeholders are filled in: it is one parameter of the model.

Megatron stores [gate; up] per tensor-parallel rank. How it fuses queries, keys and values is in qkv.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal, Self

import torch
from torch import Tensor

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.sync.tensors import Piece

# Name -> an object that can be sliced like a tensor and knows its shape: a safetensors slice, or a tensor.
Read = Callable[[str], Any]


@dataclass(frozen=True)
class WeightRow(ABC):
    """`megatron` may contain {layer} and {expert}. `hf` are the Hugging Face names, with the same placeholders.

    `expert` is set in an expanded row of an expert: only one expert-parallel rank has that parameter.
    `layers`: of a model whose first layers have no experts, the layers that have this parameter.
    `is_constant`: a buffer, which no optimizer changes. It is float32 wherever it is stored or sent.
    """

    megatron: str
    hf: tuple[str, ...]
    expert: int | None = field(default=None, kw_only=True)
    layers: Literal["all", "dense", "experts"] = field(default="all", kw_only=True)
    is_constant: bool = field(default=False, kw_only=True)

    def is_in(self, layer: int, arch: Architecture) -> bool:
        """Whether a layer has the parameter of this row of a table."""
        return self.layers == "all" or (self.layers == "dense") == (layer < arch.num_dense_layers)

    def dtype(self, of_model: torch.dtype) -> torch.dtype:
        """In a model whose weights are `of_model`."""
        return torch.float32 if self.is_constant else of_model

    def expand(self, layer: int, expert: int | None = None) -> Self:
        """The row of one layer (and expert). Both numbers count from 0 over the whole model."""
        assert (expert is not None) == is_expert(self), self.megatron
        names = [name.format(layer=layer, expert=expert) for name in (self.megatron, *self.hf)]
        return replace(self, megatron=names[0], hf=tuple(names[1:]), expert=expert)

    def ep_rank(self, arch: Architecture, ep: int) -> int | None:
        """The expert-parallel rank that has an expanded row. None: all of them."""
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
        """Whole Hugging Face tensors, in the order of `hf`, from all ranks' parameters. They own their memory."""

    def segments(self, arch: Architecture) -> Iterator[tuple[int, int]]:
        """The whole Megatron tensor (tp 1, no padding rows) from top to bottom: (index in `hf`, number of rows)."""
        return ((i, shape[0]) for i, shape in enumerate(self.hf_shapes(arch)))

    @property
    def split_dim(self) -> int | None:
        """The dimension that tensor parallelism cuts. None: the parameter is replicated."""
        return 0

    def pieces(self, arch: Architecture, tp_rank: int, tp: int) -> tuple[Piece, ...]:
        """Which parts of the Hugging Face tensors are where in this rank's parameter. Padding rows are in none."""
        size = self.local_shape(arch, tp)[0]
        return tuple(self._pieces_within(arch, tp_rank * size, (tp_rank + 1) * size))

    def _pieces_within(self, arch: Architecture, first: int, last: int) -> Iterator[Piece]:
        """The pieces in rows [first, last) of the whole Megatron tensor, which `segments` describes."""
        row, done = 0, [0] * len(self.hf)  # rows passed: of the Megatron tensor, of each Hugging Face tensor
        for tensor, length in self.segments(arch):
            low, high = max(first, row), min(last, row + length)
            if low < high:
                start = done[tensor] + low - row
                yield Piece(tensor, start, start + high - low, low - first)
            row, done[tensor] = row + length, done[tensor] + length


def read_part(read: Read, name: str, tp_rank: int, tp: int) -> Tensor:
    """This rank's equal part of the rows of a Hugging Face tensor."""
    tensor = read(name)
    size = tensor.get_shape()[0] // tp if hasattr(tensor, "get_shape") else tensor.shape[0] // tp
    return tensor[tp_rank * size : (tp_rank + 1) * size]


@dataclass(frozen=True)
class Replicated(WeightRow):
    """The same on all tensor-parallel ranks: norms. `size` names the Architecture field with its length."""

    size: str = "hidden_size"

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return ((attrgetter(self.size)(arch),),)

    def local_shape(self, arch: Architecture, tp: int) -> tuple[int, ...]:
        return self.hf_shapes(arch)[0]

    def shard(self, read: Read, arch: Architecture, tp_rank: int, tp: int) -> Tensor:
        return read(self.hf[0])[:]

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        return [shards[0].clone()]

    def pieces(self, arch: Architecture, tp_rank: int, tp: int) -> tuple[Piece, ...]:
        return (Piece(0, 0, self.hf_shapes(arch)[0][0], 0),)

    @property
    def split_dim(self) -> int | None:
        return None


@dataclass(frozen=True)
class HeadsNorm(WeightRow):
    """The weight of a norm over all heads, cut by heads. An engine has it whole: it gathers the heads before the norm."""

    size: str = "attention_size"

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return ((getattr(arch, self.size),),)

    def local_shape(self, arch: Architecture, tp: int) -> tuple[int, ...]:
        return (getattr(arch, self.size) // tp,)

    def shard(self, read: Read, arch: Architecture, tp_rank: int, tp: int) -> Tensor:
        return read_part(read, self.hf[0], tp_rank, tp)

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        return [torch.cat(list(shards))]


@dataclass(frozen=True)
class ReplicatedMatrix(Replicated):
    """A replicated weight [size, hidden]: a router, whose logits select and weight the experts of a token, and the
    projections to the latents of attention."""

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return ((attrgetter(self.size)(arch), arch.hidden_size),)


@dataclass(frozen=True)
class Vocabulary(WeightRow):
    """Embedding and output head, cut by rows. Rows are tokens, padded with zeros to `arch.padded_vocab_size(tp)` rows."""

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
    """A linear layer that is cut along its input, dimension 1: attention output, MLP down projection."""

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

    def pieces(self, arch: Architecture, tp_rank: int, tp: int) -> tuple[Piece, ...]:
        size = getattr(arch, self.size) // tp
        return (Piece(0, tp_rank * size, (tp_rank + 1) * size, 0),)

    @property
    def split_dim(self) -> int | None:
        return 1


@dataclass(frozen=True)
class OutputSplit(WeightRow):
    """A linear layer that is cut along its output, head by head: rows_per_head rows for each attention head."""

    rows_per_head: str = "head_dim"
    columns: str = "hidden_size"

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return ((arch.num_attention_heads * attrgetter(self.rows_per_head)(arch), attrgetter(self.columns)(arch)),)

    def local_shape(self, arch: Architecture, tp: int) -> tuple[int, ...]:
        rows, columns = self.hf_shapes(arch)[0]
        return (rows // tp, columns)

    def shard(self, read: Read, arch: Architecture, tp_rank: int, tp: int) -> Tensor:
        return read_part(read, self.hf[0], tp_rank, tp)

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        return [torch.cat(list(shards))]


@dataclass(frozen=True)
class GateUp(WeightRow):
    """The first linear layer of SwiGLU. Every rank has [its part of gate; its part of up]."""

    size: str = "ffn_hidden_size"

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return ((getattr(arch, self.size), arch.hidden_size),) * 2

    def local_shape(self, arch: Architecture, tp: int) -> tuple[int, ...]:
        return (2 * getattr(arch, self.size) // tp, arch.hidden_size)

    def shard(self, read: Read, arch: Architecture, tp_rank: int, tp: int) -> Tensor:
        return torch.cat([read_part(read, name, tp_rank, tp) for name in self.hf])

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([half[i] for half in halves]) for i in (0, 1)]

    def pieces(self, arch: Architecture, tp_rank: int, tp: int) -> tuple[Piece, ...]:
        size = getattr(arch, self.size) // tp
        return tuple(Piece(i, tp_rank * size, (tp_rank + 1) * size, i * size) for i in (0, 1))


def is_layered(row: WeightRow) -> bool:
    return "{layer}" in row.megatron


def is_expert(row: WeightRow) -> bool:
    """Whether a row of a table is one parameter per expert."""
    return "{expert}" in row.megatron


def expand_table(table: Sequence[WeightRow], arch: Architecture) -> Iterator[WeightRow]:
    """Every parameter of the model, in stream order: embedding, layers (experts last, one by one), final norm, head."""
    yield from (row for row in table if not is_layered(row) and "embedding" in row.megatron)
    shared = [row for row in table if is_layered(row) and not is_expert(row)]
    experts = [row for row in table if is_expert(row)]
    for layer in range(arch.num_layers):
        yield from (row.expand(layer) for row in shared if row.is_in(layer, arch))
        own = [row for row in experts if row.is_in(layer, arch)]
        yield from (row.expand(layer, expert) for expert in range(arch.num_experts) for row in own)
    yield from (row for row in table if not is_layered(row) and "embedding" not in row.megatron)


# Transformer Engine fuses a norm into the linear layer that follows. Only the name of the tensor differs.
TE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}


def local_name(megatron_name: str) -> str:
    """The name of a parameter in the local layer spec. Transformer Engine's spec may use another name."""
    for local, fused in TE_NAMES.items():
        if megatron_name.endswith(fused):
            return megatron_name.removesuffix(fused) + local
    return megatron_name


# -- QKV: the row of a fused attention input ---------------------------------------------------------------------------
# There are H query heads in G groups (n = H / G heads per group), head size d, hidden size h. Megatron fuses attention
# group by group: for each group n*d query rows, then d key rows, then d value rows.


@dataclass(frozen=True)
class QKV(WeightRow):
    """Fused attention input, group by group: weight [(H+2G)d, h] or bias [(H+2G)d]. There may be more ranks than groups."""

    bias: bool = False

    def _tail(self, arch: Architecture) -> tuple[int, ...]:
        return () if self.bias else (arch.hidden_size,)

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        q, kv = arch.num_attention_heads * arch.head_dim, arch.num_query_groups * arch.head_dim
        return tuple((rows, *self._tail(arch)) for rows in (q, kv, kv))

    def local_shape(self, arch: Architecture, tp: int) -> tuple[int, ...]:
        rows = (arch.num_attention_heads + 2 * arch.num_query_groups) * arch.head_dim
        return (rows // tp, *self._tail(arch))

    def segments(self, arch: Architecture) -> Iterator[tuple[int, int]]:
        d = arch.head_dim
        for _ in range(arch.num_query_groups):
            yield 0, arch.num_attention_heads // arch.num_query_groups * d
            yield 1, d
            yield 2, d

    def shard(self, read: Read, arch: Architecture, tp_rank: int, tp: int) -> Tensor:
        if arch.num_query_groups % tp == 0:  # every rank has whole groups: read only this rank's
            return self._fuse(
                [read_part(read, name, tp_rank, tp) for name in self.hf], arch, arch.num_query_groups // tp
            )
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
