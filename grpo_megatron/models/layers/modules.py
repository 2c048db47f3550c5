"""Modules of a layer that replace Megatron-Core's: norms, attention over packs and trees, gated delta nets, latent attention."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm import gated_delta_net
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from grpo_megatron.exact import rowwise
from grpo_megatron.imports import replaced
from grpo_megatron.shapes import Float


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (arXiv:1910.07467) in float32. Megatron's wrapper of torch's norm refuses sequence parallelism.

    The weight's attribute `sequence_parallel` makes Megatron sum its gradient over tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalises x [..., h] over h."""
        return rowwise.rms_norm(x, self.weight, self.eps)


class CentredRMSNorm(RMSNorm):
    """An RMSNorm that multiplies by 1 + its weight, in float32: Megatron's `layernorm_zero_centered_gamma`."""

    def forward(self, x: Tensor) -> Tensor:
        return (F.rms_norm(x.float(), (x.shape[-1],), eps=self.eps) * (1 + self.weight.float())).to(x.dtype)


class NormedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """A row-parallel linear layer, and a norm of its full output (OLMo-2, arXiv 2501.00656; Gemma 3)."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        norm = CentredRMSNorm if config.layernorm_zero_centered_gamma else RMSNorm
        self.post_norm = norm(config, output_size, config.layernorm_epsilon)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Maps [s, b, inputs / tp] to [s (/ tp under sequence parallelism), b, outputs]."""
        output, bias = super().forward(x)
        return self.post_norm(output), bias


class ExpertRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """The second linear layer of an expert with a bias, under any tensor parallelism.

    Every rank adds its bias to its part of a sum over the ranks, so each adds a share of it. With sequence parallelism, which
    experts need, Megatron sums the gradients of the shares.
    """

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Maps [tokens, inputs / tp] to this rank's part of the output [tokens, outputs], and its share of the bias."""
        output, bias = super().forward(x)
        if not self.explicit_expert_comm:  # a view, to which Megatron's MLP cannot add in place
            output = output.clone()
        return output, bias / parallel_state.get_expert_tensor_parallel_world_size()


class HeadsRMSNorm(torch.nn.Module):
    """An RMSNorm over all heads of a token, in float32. Each tensor-parallel rank has a part of the heads.

    The sum of squares is added up over the ranks. Every rank's result depends on it, so its gradient is too.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, num_heads: int, **unused: Any
    ) -> None:
        """Takes the `hidden_size` of one head, and `num_heads` of all ranks."""
        super().__init__()
        self.eps, self.width = eps, num_heads * hidden_size
        local = self.width // parallel_state.get_tensor_model_parallel_world_size()
        self.weight = torch.nn.Parameter(torch.ones(local, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises x [s, b, heads / tp, d] over heads and d of all ranks."""
        values = x.float()
        squares = reduce_from_tensor_model_parallel_region(values.square().sum((-2, -1), keepdim=True))
        mean = copy_to_tensor_model_parallel_region(squares) / self.width
        return (values * torch.rsqrt(mean + self.eps)).to(x.dtype) * self.weight.view(x.shape[-2:])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describes the checkpoint's tensors to Megatron: the weight is cut along dimension 0."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)  # type: ignore[no-any-return]


# -- attention over packs and prefix trees, by torch's fused kernels -----------------------------------------------------

QUERY_BLOCK = 128  # queries per kernel call with a mask: masked scores are computed for half a block per query and edge


@dataclass(frozen=True)
class Branch:
    """Tokens [start, end) of a pack, which follow its tokens [prefix_start, prefix_end)."""

    start: int
    end: int
    prefix_start: int
    prefix_end: int


@dataclass
class TreeParams(PackedSeqParams):
    """`PackedSeqParams` of a pack of trees, for the local attention. The pack is one sequence with positions of its own."""

    branches: list[Branch] = field(default_factory=list)


def tree_attention(
    query: Float[Tensor, "t H d"],
    key: Float[Tensor, "t G d"],
    value: Float[Tensor, "t G v"],
    branches: list[Branch],
    **options: Any,
) -> Float[Tensor, "t H v"]:
    """Causal attention of every branch over its prefix and itself: query [t, H, d], key [t, G, d], value [t, G, v].

    Neighbours of equal length with one prefix share their kernel calls. `options`: of `causal_attention`.
    """
    out = []
    for (size, prefix_start, prefix_end), neighbours in itertools.groupby(branches, _shape):
        run = list(neighbours)
        start, count = run[0].start, len(run)
        branch_tokens, prefix = slice(start, start + count * size), slice(prefix_start, prefix_end)
        q, k, v = (_heads_first(x[branch_tokens], count) for x in (query, key, value))
        if prefix_end > prefix_start:
            k, v = (
                torch.cat([_heads_first(x[prefix], 1).expand(count, -1, -1, -1), y], dim=2)
                for x, y in ((key, k), (value, v))
            )
        out.append(_flat(causal_attention(q, k, v, **options)))
    return torch.cat(out)  # [t, H, v]


def causal_attention(
    query: Float[Tensor, "n H s d"],
    key: Float[Tensor, "n G k d"],
    value: Float[Tensor, "n G k v"],
    *,
    window: int | None = None,
    **options: Any,
) -> Float[Tensor, "n H s v"]:
    """Attention of the last s of k tokens to those before them and to themselves.

    `window`: to so many tokens at most, itself among them, as in transformers. `options`: `scale`, None for 1 / sqrt(d), and
    `sinks` (see `_sink_kernel`).
    """
    size, length = query.shape[2], key.shape[2]
    if size == length and (window is None or window >= length):
        return _kernel(query, key, value, is_causal=True, **options)
    blocks = []
    for first in range(0, size, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, size)
        place = length - size + first  # of the block's first query among the keys
        start, end = 0 if window is None else max(0, place + 1 - window), length - size + last
        mask = torch.ones(last - first, end - start, dtype=torch.bool, device=query.device).tril(place - start)
        if window is not None:
            mask = mask.triu(place - start + 1 - window)
        keys, values = key[:, :, start:end], value[:, :, start:end]
        blocks.append(_kernel(query[:, :, first:last], keys, values, attn_mask=mask, **options))
    return torch.cat(blocks, dim=2)


def _kernel(q: Tensor, k: Tensor, v: Tensor, *, sinks: Tensor | None = None, **options: Any) -> Tensor:
    if sinks is not None:
        return _sink_kernel(q, k, v, sinks, **options)
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options)


def _sink_kernel(
    q: Float[Tensor, "n H s d"],
    k: Float[Tensor, "n G t d"],
    v: Float[Tensor, "n G t d"],
    sinks: Tensor,
    *,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Float[Tensor, "n H s d"]:
    """Attends also to a key before the others, whose logit is that of the head in `sinks` [H], and whose value is 0.

    Keys and queries have one more dimension for it: that key is 1 there, other keys are 0, and a query is logit / scale.
    The kernels want a multiple of 8. A causal mask wants a query before the others, too.
    """
    size, scale = q.shape[-1], scale or q.shape[-1] ** -0.5
    logits = (sinks / scale).view(-1, 1, 1).expand(*q.shape[:-1], 1)
    q = F.pad(torch.cat([q, logits], dim=-1), (0, 7, int(is_causal), 0))
    k, v = (F.pad(x, (0, 8, 1, 0)) for x in (k, v))
    k[:, :, 0, size] = 1
    if attn_mask is not None:
        attn_mask = F.pad(attn_mask, (1, 0), value=True)
    out = _kernel(q, k, v, is_causal=is_causal, attn_mask=attn_mask, scale=scale)
    return out[:, :, int(is_causal) :, :size]


def _shape(branch: Branch) -> tuple[int, int, int]:
    return branch.end - branch.start, branch.prefix_start, branch.prefix_end


def _heads_first(x: Tensor, count: int) -> Tensor:
    return x.view(count, -1, *x.shape[1:]).transpose(1, 2)  # [n * s, H, d] -> [n, H, s, d]


def _flat(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(0, 1)  # [n, H, s, d] -> [n * s, H, d]


def packed_attention(
    query: Float[Tensor, "t H d"],
    key: Float[Tensor, "t G d"],
    value: Float[Tensor, "t G v"],
    cuts: Tensor,
    attend: Callable[..., Tensor] = _kernel,
    **options: Any,
) -> Float[Tensor, "t H v"]:
    """Attends within each of the sequences that end at `cuts`, by one call per run of neighbours of equal length."""
    lengths = cuts.diff().tolist()
    runs = [(length, len(list(run))) for length, run in itertools.groupby(lengths)]
    sizes = [length * count for length, count in runs]
    out = []
    for q, k, v, (_, count) in zip(query.split(sizes), key.split(sizes), value.split(sizes), runs, strict=True):
        q, k, v = (_heads_first(x, count) for x in (q, k, v))
        out.append(_flat(attend(q, k, v, **options)))
    return torch.cat(out)


class PackedAttention(torch.nn.Module):
    """Causal attention over packed sequences, one fused kernel call per run of neighbours of equal length.

    torch's scaled_dot_product_attention never materialises the [S, S] attention scores. Each sequence is computed alone, so
    nothing is computed between two sequences or for padding between them. Values may have another size than keys. In a layer
    with a window, a sequence that is longer is computed in blocks of queries over the keys that these see.
    Megatron's DotProductAttention materialises the scores, computes padding and refuses packed sequences.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *args: Any,
        softmax_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale  # None: 1 / sqrt(d)
        has_window = config.window_size is not None and config.window_attn_skip_freq[layer_number - 1]  # type: ignore[index]
        self.window = config.window_size[0] + 1 if has_window else None  # type: ignore[index]
        self.softmax_offset: Tensor | None = None

    def forward(
        self,
        query: Float[Tensor, "t H d"],
        key: Float[Tensor, "t G d"],
        value: Float[Tensor, "t G v"],
        attention_mask: Tensor | None,
        *args: Any,
        packed_seq_params: PackedSeqParams,
        **kwargs: Any,
    ) -> Float[Tensor, "t H v"]:
        """Attends: query [t, H, d], key [t, G, d] and value [t, G, v], all sequences end to end -> [t, H, v]."""
        options: dict[str, Any] = {"window": self.window, "scale": self.softmax_scale, "sinks": self.softmax_offset}
        if isinstance(tree := packed_seq_params, TreeParams):
            return tree_attention(query, key, value, tree.branches, **options)
        cuts = packed_seq_params.cu_seqlens_q
        return packed_attention(query, key, value, cuts, causal_attention, **options)


class SinkAttention(PackedAttention):
    """Attention whose softmax is over the keys and a learned logit per head (Megatron-Core's `softmax_type=learnable`)."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        heads = config.num_attention_heads // parallel_state.get_tensor_model_parallel_world_size()
        self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describes the checkpoint's tensors to Megatron: the logits are cut along dimension 0."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)  # type: ignore[no-any-return]


class GatedAttention(SelfAttention):  # type: ignore[misc]
    """Megatron-Core's attention with an output gate, also where there are more tensor-parallel ranks than key heads.

    Ranks that share a key head compute its queries and gates together. Megatron-Core 0.16.1 then gives each rank its own
    queries, but all gates.
    """

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Returns query, key, value, and with `output_gate` gate [s, b, heads / tp, d]."""
        query, key, value, *gate = super().get_query_key_value_tensors(*args, **kwargs)
        ranks = max(1, self.world_size // self.config.num_query_groups)  # that share a key head
        own = parallel_state.get_tensor_model_parallel_rank() % ranks
        return (query, key, value, *(part.chunk(ranks, dim=2)[own] for part in gate))


# -- gated delta net -----------------------------------------------------------------------------------------------------


def _unit(x: Tensor) -> Tensor:
    """Scales x [..., d] to length 1 in float32, as fla and transformers do."""
    values = x.float()
    return (values * torch.rsqrt(values.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


class PackedGatedDeltaNet(GatedDeltaNet):  # type: ignore[misc]
    """Megatron-Core's gated delta net over packed sequences. Convolution and state begin anew in each of them.

    Megatron-Core refuses packs. Here neighbours of equal length are one call of the convolution and of the rule (Megatron's
    in torch, or fla's on a GPU that has it), and no call sees two sequences of a pack as one. The rows of `in_proj` and the
    channels of `conv1d` are in the order of key heads: then a rank's part is one block, in checkpoints too.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        with replaced(gated_delta_net, HAVE_FLA=True):  # it is needed on GPUs alone, and not there either
            super().__init__(config, *args, **kwargs)

    def forward(
        self,
        hidden_states: Float[Tensor, "t b h"],
        attention_mask: Tensor | None,
        *args: Any,
        packed_seq_params: PackedSeqParams,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "t b h"], Tensor | None]:
        """Maps hidden states [t, 1, h] of a pack; t is over tp under sequence parallelism."""
        assert not isinstance(packed_seq_params, TreeParams), "checks refuse trees"
        keys, values = self.num_key_heads // self.tp_size, self.num_value_heads // self.num_key_heads
        widths = (2 * self.key_head_dim + values * self.value_head_dim, values * self.value_head_dim, values, values)
        mixed, _ = self.in_proj(hidden_states)
        channels, gate, beta, alpha = mixed.view(len(mixed), keys, -1).split(widths, dim=-1)
        log_decay = -self.A_log.float().exp() * F.softplus(alpha.flatten(1).float() + self.dt_bias.float())
        parts = channels.flatten(1), log_decay, beta.flatten(1).sigmoid()  # [t, channels], [t, value heads] twice
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        runs = [(length, len(list(run))) for length, run in itertools.groupby(lengths)]
        sizes = [length * count for length, count in runs]
        out = [
            self._rule(*(part.unflatten(0, (count, -1)) for part in of_run)).flatten(0, 1)
            for (_, count), of_run in zip(runs, zip(*(part.split(sizes) for part in parts), strict=True), strict=True)
        ]
        by_head = gate.reshape(len(mixed), -1, self.value_head_dim)
        normed = self._apply_gated_norm(torch.cat(out), by_head)  # [t * value heads, d]
        output, bias = self.out_proj(normed.view(len(mixed), 1, -1))
        return output, bias

    def _rule(self, channels: Tensor, log_decay: Tensor, beta: Tensor) -> Float[Tensor, "n s H v"]:
        """Computes n sequences of s tokens: channels [n, s, channels], log_decay and beta [n, s, value heads]."""
        length, ratio = channels.shape[1], self.num_value_heads // self.num_key_heads
        mixed = self.act_fn(self.conv1d(channels.transpose(1, 2))[..., :length]).transpose(1, 2)
        by_head = mixed.unflatten(-1, (self.num_key_heads // self.tp_size, -1))
        query, key, value = by_head.split((self.key_head_dim, self.key_head_dim, ratio * self.value_head_dim), dim=-1)
        query, key = (_unit(part).repeat_interleave(ratio, dim=2) for part in (query, key))
        value = value.reshape(*value.shape[:2], -1, self.value_head_dim)
        is_fused = gated_delta_net.HAVE_FLA and value.is_cuda and not self.config.deterministic_mode
        rule = gated_delta_net.chunk_gated_delta_rule if is_fused else gated_delta_net.torch_chunk_gated_delta_rule
        return rule(query, key, value.contiguous(), g=log_decay, beta=beta)[0]  # type: ignore[no-any-return]

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
        **unused: Any,
    ) -> dict[str, Any]:
        """Describes the checkpoint's tensors to Megatron: each is cut in one block per rank."""
        metadata, axes = ensure_metadata_has_dp_cp_group(metadata), {"A_log": 0, "dt_bias": 0, "conv1d.weight": 0}
        own = {name: parameter for name, parameter in self.named_parameters() if name in axes}
        groups = {"tp_group": self.pg_collection.tp, "dp_cp_group": metadata["dp_cp_group"]}
        out: dict[str, Any] = make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets, **groups)
        for name in ("in_proj", "out_norm", "out_proj"):
            place = f"{prefix}{name}.", sharded_offsets, metadata
            out |= sharded_state_dict_default(getattr(self, name), *place, tp_group=self.pg_collection.tp)
        return out


# -- latent attention ----------------------------------------------------------------------------------------------------

# Prefixes of a layer's parameters -> those in a checkpoint, as Transformer Engine's fused modules have them.
LATENT_KEYS = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


class ReplicatedLinear(torch.nn.Module):
    """A linear layer without a bias that every tensor-parallel rank has in full.

    The weight's attribute `sequence_parallel` makes Megatron sum its gradient over tensor-parallel ranks.
    """

    def __init__(self, inputs: int, outputs: int, config: MLATransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Maps [s, b, inputs] to ([s, b, outputs], no bias), as Megatron's linear layers do."""
        return F.linear(x, self.weight), None


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Megatron-Core's multi-head latent attention, with projections to the latents replicated on every rank.

    Megatron-Core's local modules cut these projections over tensor-parallel ranks and gather the result. Each rank's heads
    use the rotated key. The backward pass of that gather does not sum its gradients over the ranks: each would have those of
    one rank's heads. Transformer Engine's modules have replicated projections, each rank on its part of the sequence, and
    their gradients are summed. This class does the same with the local modules. It needs sequence parallelism.
    """

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        # Without Transformer Engine, Megatron-Core 0.16.1 sets HAVE_TE here all the same, and TELinear is no class.
        with replaced(multi_latent_attention, HAVE_TE=isinstance(multi_latent_attention.TELinear, type)):
            super().__init__(config, *args, **kwargs)
        rows = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = ReplicatedLinear(config.hidden_size, rows, config)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = ReplicatedLinear(config.hidden_size, config.q_lora_rank, config)
