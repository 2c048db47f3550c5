"""WeightRow: how one Megatron parameter, full or cut for tensor parallelism, relates to Hugging Face tensors.

A weight table has one row per kind of parameter, with the placeholders {layer} and {expert} in its names. An expanded row is one
parameter of the model. A kind of row defines the shapes of its Hugging Face tensors, and the order of their parts in Megatron's
tensor (`segments`, `slices`). Loading (`shard`), export (`merge`), the converter and the plan of the engine sync follow from
these, so they cannot disagree.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.sync.plan import Shard

# Name -> an object that can be sliced like a tensor: a safetensors slice, or a tensor.
Read = Callable[[str], Any]


@dataclass(frozen=True)
class WeightRow(ABC):
    """`megatron` may contain {layer} and {expert}. `hf` are the Hugging Face names, with the same placeholders.

    `expert` is set in an expanded row of an expert: only one expert-parallel rank has that parameter.
    `layers`: of a model whose first layers have no experts, or whose layers have different attention, those that have this
    parameter.
    `is_constant`: a buffer, which no optimizer changes. It is float32 wherever it is stored or sent.
    """

    megatron: str
    hf: tuple[str, ...]
    expert: int | None = field(default=None, kw_only=True)
    layers: Literal["all", "dense", "experts", "linear", "full"] = field(default="all", kw_only=True)
    is_constant: bool = field(default=False, kw_only=True)
    split_dim: ClassVar[int | None] = 0  # the dimension that tensor parallelism cuts; None: the parameter is replicated

    @property
    def axis(self) -> int:
        """The dimension along which parts of the Hugging Face tensors are counted."""
        return self.split_dim or 0

    def is_in(self, layer: int, arch: Architecture) -> bool:
        """Returns whether a layer has the parameter of this row of a table."""
        if self.layers in ("linear", "full"):
            return (self.layers == "linear") == arch.is_linear(layer)
        return self.layers == "all" or (self.layers == "dense") == (layer < arch.num_dense_layers)

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype of this parameter in a model whose weights are `model_dtype`."""
        return torch.float32 if self.is_constant else model_dtype

    def expand(self, layer: int, expert: int | None = None) -> Self:
        """Returns the row of one layer (and expert). Both numbers count from 0 over the whole model."""
        assert (expert is not None) == is_expert(self), self.megatron
        names = [name.format(layer=layer, expert=expert) for name in (self.megatron, *self.hf)]
        return replace(self, megatron=names[0], hf=tuple(names[1:]), expert=expert)

    def ep_rank(self, arch: Architecture, ep: int) -> int | None:
        """Returns the expert-parallel rank that has an expanded row. None: all of them."""
        return None if self.expert is None else self.expert // (arch.num_experts // ep)

    @abstractmethod
    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the Hugging Face tensors, in the order of `hf`."""

    def local_shape(self, arch: Architecture, tp: int) -> tuple[int, ...]:
        """Returns the shape of one tensor-parallel rank's parameter: the Hugging Face tensors stacked, cut evenly."""
        shapes = self.hf_shapes(arch)
        sizes = [sum(shape[0] for shape in shapes), *shapes[0][1:]]
        if self.split_dim is not None:
            sizes[self.split_dim] //= tp
        return tuple(sizes)

    def segments(self, arch: Architecture) -> Iterator[tuple[int, int, int]]:
        """Returns (index in `hf`, first row there, number of rows) from top to bottom of the full Megatron tensor.

        That is of tp 1, without padding rows.
        """
        return ((i, 0, shape[0]) for i, shape in enumerate(self.hf_shapes(arch)))

    def slices(self, arch: Architecture, tp_rank: int, tp: int) -> tuple[Shard, ...]:
        """Returns the parts of the Hugging Face tensors in this rank's parameter, along the dimension that is cut.

        Padding rows are in none.
        """
        if self.split_dim is None:
            return (Shard(0, 0, self.hf_shapes(arch)[0][0], 0),)
        size = self.local_shape(arch, tp)[self.split_dim]
        if self.split_dim == 1:
            return (Shard(0, tp_rank * size, (tp_rank + 1) * size, 0),)
        return tuple(self.slices_within(arch, tp_rank * size, (tp_rank + 1) * size))

    def slices_within(self, arch: Architecture, first: int, last: int) -> Iterator[Shard]:
        """Yields the slices in rows [first, last) of the full Megatron tensor, which `segments` describes."""
        row = 0  # of the Megatron tensor
        for tensor, begin, length in self.segments(arch):
            low, high = max(first, row), min(last, row + length)
            if low < high:
                start = begin + low - row
                yield Shard(tensor, start, start + high - low, low - first)
            row += length

    def shard(self, read: Read, arch: Architecture, tp_rank: int, tp: int) -> Tensor:
        """Builds this rank's parameter from Hugging Face tensors. Reads only its part of them. Padding rows are zeros."""
        shape, axis = self.local_shape(arch, tp), self.split_dim or 0
        out = None
        for shard in self.slices(arch, tp_rank, tp):
            cut = (slice(None),) * axis + (slice(shard.start, shard.stop),)
            part = read(self.hf[shard.tensor])[cut]
            if tuple(part.shape) == shape:
                return part  # type: ignore[no-any-return]
            out = part.new_zeros(shape) if out is None else out
            out.narrow(axis, shard.local_start, shard.stop - shard.start).copy_(part)
        return read(self.hf[0])[0:0].new_zeros(shape) if out is None else out  # None: nothing but padding

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        """Merges all ranks' parameters to full Hugging Face tensors, in the order of `hf`. They own their memory."""
        out, axis, tp = [shards[0].new_empty(shape) for shape in self.hf_shapes(arch)], self.split_dim or 0, len(shards)
        for tp_rank in range(tp) if self.split_dim is not None else (0,):
            for shard in self.slices(arch, tp_rank, tp):
                length = shard.stop - shard.start
                part = shards[tp_rank].narrow(axis, shard.local_start, length)
                out[shard.tensor].narrow(axis, shard.start, length).copy_(part)
        return out


@dataclass(frozen=True)
class Replicated(WeightRow):
    """[size], the same on all tensor-parallel ranks: norms. `size` names the Architecture field with its length."""

    size: str = "hidden_size"
    split_dim: ClassVar[int | None] = None

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return ((attrgetter(self.size)(arch),),)


@dataclass(frozen=True)
class ReplicatedMatrix(Replicated):
    """A replicated weight [size, hidden]: a router, whose logits select and weight the experts of a token, and the
    projections to the latents of attention."""

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return ((attrgetter(self.size)(arch), arch.hidden_size),)


@dataclass(frozen=True)
class HeadsVector(WeightRow):
    """Numbers [size] of all heads, cut by heads."""

    size: str = "attention_size"

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return ((attrgetter(self.size)(arch),),)


@dataclass(frozen=True)
class HeadsNorm(HeadsVector):
    """The weight [size] of a norm over all heads, cut by heads. An engine has it whole: it gathers the heads before it."""


@dataclass(frozen=True)
class Vocabulary(WeightRow):
    """Embedding and output head [vocabulary, hidden], cut by rows: tokens, and zeros up to `arch.padded_vocab_size(tp)`."""

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return ((arch.vocab_size, arch.hidden_size),)

    def local_shape(self, arch: Architecture, tp: int) -> tuple[int, ...]:
        """[padded vocabulary / tp, hidden]."""
        return (arch.padded_vocab_size(tp) // tp, arch.hidden_size)


@dataclass(frozen=True)
class InputSplit(WeightRow):
    """A linear layer [hidden, size] that is cut along its input, dimension 1: attention output, MLP down projection."""

    size: str = "ffn_hidden_size"
    split_dim: ClassVar[int | None] = 1

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return ((arch.hidden_size, attrgetter(self.size)(arch)),)


@dataclass(frozen=True)
class OutputSplit(WeightRow):
    """A linear layer [heads x rows_per_head, columns] that is cut along its output, head by head."""

    rows_per_head: str = "head_dim"
    columns: str = "hidden_size"

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return ((arch.num_attention_heads * attrgetter(self.rows_per_head)(arch), attrgetter(self.columns)(arch)),)


@dataclass(frozen=True)
class GateUp(WeightRow):
    """The first linear layer of SwiGLU, [size, hidden] twice; or its bias, [size] twice.

    Every rank has [its part of gate; its part of up].
    """

    size: str = "ffn_hidden_size"
    bias: bool = False

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return ((getattr(arch, self.size), *(() if self.bias else (arch.hidden_size,))),) * 2

    def slices(self, arch: Architecture, tp_rank: int, tp: int) -> tuple[Shard, ...]:
        size = getattr(arch, self.size) // tp
        return tuple(Shard(i, tp_rank * size, (tp_rank + 1) * size, i * size) for i in (0, 1))


@dataclass(frozen=True)
class QKV(WeightRow):
    """Fused attention input, group by group: weight [(H+2G)d, h] or bias [(H+2G)d].

    H query heads in G groups (n = H / G heads per group), head size d, hidden size h. For each group: n*d query rows, then
    d key rows, then d value rows. There may be more ranks than groups. With an output gate, the n*d rows of the gates come
    after those of the queries; in the file each head has its query, then its gate.
    """

    bias: bool = False

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        q, kv = (1 + arch.output_gate) * arch.num_attention_heads * arch.head_dim, arch.num_query_groups * arch.head_dim
        tail = () if self.bias else (arch.hidden_size,)
        return tuple((rows, *tail) for rows in (q, kv, kv))

    def segments(self, arch: Architecture) -> Iterator[tuple[int, int, int]]:
        d, heads = arch.head_dim, arch.num_attention_heads // arch.num_query_groups
        for group in range(arch.num_query_groups):
            if arch.output_gate:
                for part, head in itertools.product((0, 1), range(group * heads, (group + 1) * heads)):
                    yield 0, (2 * head + part) * d, d
            else:
                yield 0, group * heads * d, heads * d
            yield 1, group * d, d
            yield 2, group * d, d


@dataclass(frozen=True)
class DeltaInput(WeightRow):
    """The input projection of a gated delta net, key head by key head: its q, k, values v, their gates z, then b and a.

    Qwen3-Next's two tensors have this order, the first q, k, v and z, the second b and a. Qwen3.5's four have all q, then all
    k, then all v; z; b; a.
    """

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        delta = arch.delta
        assert delta is not None
        sizes = (delta.conv_size, delta.value_size, delta.value_heads, delta.value_heads)
        if delta.is_fused:
            sizes = (sizes[0] + sizes[1], 2 * delta.value_heads)  # type: ignore[assignment]
        return tuple((size, arch.hidden_size) for size in sizes)

    def segments(self, arch: Architecture) -> Iterator[tuple[int, int, int]]:
        delta = arch.delta
        assert delta is not None
        for head in range(delta.key_heads):
            if delta.is_fused:
                for tensor, (size, _) in enumerate(self.hf_shapes(arch)):
                    yield tensor, head * size // delta.key_heads, size // delta.key_heads
            else:
                yield from _delta_channels(arch, head)
                for tensor, size in ((1, delta.value_dim), (2, 1), (3, 1)):
                    yield tensor, head * delta.values_per_key * size, delta.values_per_key * size


@dataclass(frozen=True)
class DeltaConvolution(WeightRow):
    """The convolution's weight [channels, 1, kernel], key head by key head; in the file all q, then all k, then all v."""

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        assert arch.delta is not None
        return ((arch.delta.conv_size, 1, arch.delta.kernel),)

    def segments(self, arch: Architecture) -> Iterator[tuple[int, int, int]]:
        assert arch.delta is not None
        return (segment for head in range(arch.delta.key_heads) for segment in _delta_channels(arch, head))


def _delta_channels(arch: Architecture, head: int) -> Iterator[tuple[int, int, int]]:
    """Returns the segments of q, k and v of a key head, in a tensor 0 that has all q, then all k, then all v."""
    delta = arch.delta
    assert delta is not None
    values = delta.values_per_key * delta.value_dim
    yield 0, head * delta.key_dim, delta.key_dim
    yield 0, delta.key_size + head * delta.key_dim, delta.key_dim
    yield 0, 2 * delta.key_size + head * values, values


def is_delta_channels(row: WeightRow, index: int) -> bool:
    """Returns whether tensor `index` of a row has all q, then all k, then all v of a gated delta net."""
    return isinstance(row, DeltaConvolution) or (isinstance(row, DeltaInput) and len(row.hf) == 4 and index == 0)


def is_layered(row: WeightRow) -> bool:
    """Returns whether a row of a table is one parameter per layer."""
    return "{layer}" in row.megatron


def is_expert(row: WeightRow) -> bool:
    """Returns whether a row of a table is one parameter per expert."""
    return "{expert}" in row.megatron


def expand_table(table: Sequence[WeightRow], arch: Architecture) -> Iterator[WeightRow]:
    """Yields every parameter of the model, in stream order: embedding, layers (experts last, one by one), final norm, head."""
    yield from (row for row in table if not is_layered(row) and "embedding" in row.megatron)
    shared = [row for row in table if is_layered(row) and not is_expert(row)]
    experts = [row for row in table if is_expert(row)]
    for layer in range(arch.num_layers):
        yield from (row.expand(layer) for row in shared if row.is_in(layer, arch))
        expert_rows = [row for row in experts if row.is_in(layer, arch)]
        yield from (row.expand(layer, expert) for expert in range(arch.num_experts) for row in expert_rows)
    yield from (row for row in table if not is_layered(row) and "embedding" not in row.megatron)


# -- the table of a decoder --------------------------------------------------------------------------------------------

_HF, _MCORE = "model.layers.{layer}.", "decoder.layers.{layer}."
EXPERT_NAMES = ("mlp", "gate_proj", "up_proj", "down_proj")


def decoder_table(arch: Architecture, expert_names: tuple[str, str, str, str] = EXPERT_NAMES) -> list[WeightRow]:
    """Returns the table of a decoder, from its Architecture. Megatron names are those of the local layer spec.

    `expert_names`: in Hugging Face's model, the module with router and experts, and the linear layers of an expert.
    """
    attention = _grouped_query(arch) if arch.latent is None else _latent_attention(arch.latent.q_rank is not None)
    if arch.delta is not None:
        attention = [replace(row, layers="full") for row in attention] + _delta_net(arch.delta.is_fused)
    layer = [*attention, *_mlp(arch, *expert_names)]
    if arch.has_norms_after:  # models/layers/modules.py
        norms = {
            "self_attention.linear_proj.post_norm.weight": "post_attention_layernorm.weight",
            "mlp.linear_fc2.post_norm.weight": "post_feedforward_layernorm.weight",
        }
        layer += [Replicated(_MCORE + mcore, (_HF + hf,)) for mcore, hf in norms.items()]
    if not arch.post_norms:
        layer.insert(0, Replicated(_MCORE + "input_layernorm.weight", (_HF + "input_layernorm.weight",)))
        hf_name = "pre_feedforward_layernorm" if arch.sandwich_norms else "post_attention_layernorm"
        before_mlp = Replicated(_MCORE + "pre_mlp_layernorm.weight", (_HF + hf_name + ".weight",))
        layer.insert(1 + len(attention), before_mlp)
    embedding = Vocabulary("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
    head = [] if arch.tied else [Vocabulary("output_layer.weight", ("lm_head.weight",))]
    return [embedding, *layer, Replicated("decoder.final_layernorm.weight", ("model.norm.weight",)), *head]


def _grouped_query(arch: Architecture) -> list[WeightRow]:
    """Returns grouped-query attention: with biases, or with norms of queries and keys per head or over all heads."""
    hf, mcore = _HF + "self_attn.", _MCORE + "self_attention."
    rows: list[WeightRow] = [QKV(mcore + "linear_qkv.weight", tuple(f"{hf}{p}_proj.weight" for p in "qkv"))]
    if arch.qkv_bias:
        rows.append(QKV(mcore + "linear_qkv.bias", tuple(f"{hf}{p}_proj.bias" for p in "qkv"), bias=True))
    for part, size in (("q", "attention_size"), ("k", "key_size")):
        names = f"{mcore}{part}_layernorm.weight", (f"{hf}{part}_norm.weight",)
        if arch.post_norms:
            rows.append(HeadsNorm(*names, size))
        elif arch.qk_norm:
            rows.append(Replicated(*names, "head_dim"))
    if arch.sinks:
        rows.append(HeadsVector(mcore + "core_attention.softmax_offset", (hf + "sinks",), "num_attention_heads"))
    rows.append(InputSplit(mcore + "linear_proj.weight", (hf + "o_proj.weight",), "attention_size"))
    return rows + ([Replicated(mcore + "linear_proj.bias", (hf + "o_proj.bias",))] if arch.linear_bias else [])


def _delta_net(is_fused: bool) -> list[WeightRow]:
    """Returns a gated delta net. It is cut by key heads, with their value heads."""
    hf, mcore = _HF + "linear_attn.", _MCORE + "self_attention."
    parts = ("in_proj_qkvz", "in_proj_ba") if is_fused else ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    rows: list[WeightRow] = [
        DeltaInput(mcore + "in_proj.weight", tuple(f"{hf}{part}.weight" for part in parts)),
        DeltaConvolution(mcore + "conv1d.weight", (hf + "conv1d.weight",)),
        HeadsVector(mcore + "dt_bias", (hf + "dt_bias",), "delta.value_heads"),
        HeadsVector(mcore + "A_log", (hf + "A_log",), "delta.value_heads"),
        Replicated(mcore + "out_norm.weight", (hf + "norm.weight",), "delta.value_dim"),
        InputSplit(mcore + "out_proj.weight", (hf + "out_proj.weight",), "delta.value_size"),
    ]
    return [replace(row, layers="linear") for row in rows]


def _latent_attention(has_query_latent: bool) -> list[WeightRow]:
    """Returns latent attention. Projections to the latents are replicated; those from them are cut by heads."""
    hf, mcore = _HF + "self_attn.", _MCORE + "self_attention."
    query: list[WeightRow] = [OutputSplit(mcore + "linear_q_proj.weight", (hf + "q_proj.weight",), "latent.key_dim")]
    if has_query_latent:
        up = mcore + "linear_q_up_proj.weight", (hf + "q_b_proj.weight",)
        query = [
            ReplicatedMatrix(mcore + "linear_q_down_proj.weight", (hf + "q_a_proj.weight",), "latent.q_rank"),
            Replicated(mcore + "q_layernorm.weight", (hf + "q_a_layernorm.weight",), "latent.q_rank"),
            OutputSplit(*up, "latent.key_dim", "latent.q_rank"),
        ]
    return [
        *query,
        ReplicatedMatrix(mcore + "linear_kv_down_proj.weight", (hf + "kv_a_proj_with_mqa.weight",), "latent.down_rows"),
        Replicated(mcore + "kv_layernorm.weight", (hf + "kv_a_layernorm.weight",), "latent.kv_rank"),
        OutputSplit(mcore + "linear_kv_up_proj.weight", (hf + "kv_b_proj.weight",), "latent.up_rows", "latent.kv_rank"),
        InputSplit(mcore + "linear_proj.weight", (hf + "o_proj.weight",), "attention_size"),
    ]


def _mlp(arch: Architecture, block: str, gate: str, up: str, down: str) -> list[WeightRow]:
    """Returns one SwiGLU MLP, or a router with routed experts and one MLP that every token passes through."""
    if not arch.num_experts:
        return _swiglu("ffn_hidden_size", "mlp.")
    hf, mcore = _HF + block + ".", _MCORE + "mlp."
    hf_expert, mcore_expert = hf + "experts.{expert}.", mcore + "experts.local_experts.{expert}."
    rows = [
        ReplicatedMatrix(mcore + "router.weight", (hf + "gate.weight",), "num_experts"),
        GateUp(mcore_expert + "linear_fc1.weight", (f"{hf_expert}{gate}.weight", f"{hf_expert}{up}.weight")),
        InputSplit(mcore_expert + "linear_fc2.weight", (f"{hf_expert}{down}.weight",)),
    ]
    if arch.linear_bias:
        rows += [
            Replicated(mcore + "router.bias", (hf + "gate.bias",), "num_experts"),
            GateUp(mcore_expert + "linear_fc1.bias", (f"{hf_expert}{gate}.bias", f"{hf_expert}{up}.bias"), bias=True),
            Replicated(mcore_expert + "linear_fc2.bias", (f"{hf_expert}{down}.bias",)),
        ]
    if arch.shared_ffn_hidden_size:
        rows += _swiglu(
            "shared_ffn_hidden_size", "mlp.shared_experts.", "mlp.shared_expert." if arch.shared_gates else None
        )
    if arch.shared_gates:
        gate_names = mcore + "shared_experts.gate_weight", (hf + "shared_expert_gate.weight",)
        rows.append(ReplicatedMatrix(*gate_names, "shared_gates"))
    if arch.routing is not None and arch.routing.is_sigmoid:
        names = mcore + "router.expert_bias", (hf + "gate.e_score_correction_bias",)
        rows.append(Replicated(*names, "num_experts", is_constant=True))
    if not arch.num_dense_layers:
        return rows
    dense = [replace(row, layers="dense") for row in _swiglu("dense_ffn_hidden_size", "mlp.")]
    return dense + [replace(row, layers="experts") for row in rows]


def _swiglu(size: str, module: str, hf_module: str | None = None) -> list[WeightRow]:
    """Returns a SwiGLU MLP. `size` names the Architecture field with its width, `module` the MLP in either model.

    `hf_module`: the MLP in Hugging Face's model, if its name differs.
    """
    hf, mcore = _HF + (hf_module or module), _MCORE + module
    return [
        GateUp(mcore + "linear_fc1.weight", (hf + "gate_proj.weight", hf + "up_proj.weight"), size),
        InputSplit(mcore + "linear_fc2.weight", (hf + "down_proj.weight",), size),
    ]
