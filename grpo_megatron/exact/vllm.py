"""vLLM's CPU layers with the expressions of `model.exact` (exact/rowwise.py), in any tensor-parallel layout.

vLLM has batch invariance for GPUs alone: its linear method asks `VLLM_BATCH_INVARIANT` on CUDA and XPU only
(model_executor/layers/linear.py), and its attention on the CPU chooses the order of its sums by the lengths of all requests
of a step. So the classes are changed before an engine is built. Weights stay unpacked, and pages of the KV cache hold plain
keys and values. Written for vLLM 0.32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_megatron.exact import rowwise


@functools.cache  # a class is changed once, for all engines of the process
def use_exact_layers() -> None:
    """Change vLLM's classes. To be called before an engine is built."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import RowParallelLinear, UnquantizedLinearMethod
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        method.process_weights_after_loading = _keep_weights
        method.apply = _product
    RowParallelLinear.forward = _cut_product
    RMSNorm.forward_cpu = RMSNorm.forward_native = _norm
    SiluAndMul.forward_cpu = SiluAndMul.forward_native = _gated
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native = _rotated
    CPUAttentionBackendImpl.do_kv_cache_update = _store
    CPUAttentionBackendImpl.forward = _attention
    Sampler.compute_logprobs = staticmethod(_logprobs)
    TopKTopPSampler.forward_cpu = functools.partialmethod(_sample, TopKTopPSampler.forward_cpu)


def _keep_weights(method: Any, layer: Any) -> None:
    """vLLM's own methods pack the weight for the processor, and empty the parameter."""


def _product(method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return rowwise.product(x, layer.weight, bias)


def _cut_product(layer: Any, x: Tensor) -> Any:
    """Computes one rank's share of a row-parallel product. None of the families has a bias there."""
    parts = [rowwise.partial_product(x, layer.weight, rowwise.NUM_BLOCKS // layer.tp_size)]
    if layer.tp_size > 1:
        from vllm.distributed.parallel_state import get_tp_group

        own, parts = parts[0], [torch.empty_like(parts[0]) for _ in range(layer.tp_size)]
        dist.all_gather(parts, own, group=get_tp_group().device_group)
    whole = rowwise.tree_sum(parts).to(x.dtype)
    return (whole, None) if layer.return_bias else whole


def _norm(layer: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    if residual is None:
        return rowwise.rms_norm(x, layer.weight, layer.variance_epsilon)
    x = x + residual
    return rowwise.rms_norm(x, layer.weight, layer.variance_epsilon), x


def _gated(layer: Any, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return rowwise.silu(gate) * up


def _rotated(layer: Any, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """query [t, H * d] and key [t, G * d], whose dimensions i and d / 2 + i are turned together."""
    angles = layer.cos_sin_cache[positions].to(query.dtype).unsqueeze(1)  # [t, 1, d]: cosines, then sines
    cos, sin = (torch.cat([half, half], -1) for half in angles.chunk(2, -1))

    def turned(x: Tensor) -> Tensor:
        heads = x.view(len(positions), -1, layer.head_size)
        first, second = heads.chunk(2, -1)
        return (heads * cos + torch.cat([-second, first], -1) * sin).view_as(x)

    return turned(query), turned(key)


# -- Attention. The cache is [pages, G, tokens of a page, 2 d], keys before values ---------------------------------------


def _store(impl: Any, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """key and value [t, G, d] of a step's tokens; a slot below 0 is padding."""
    is_real = slot_mapping >= 0
    slots, count = slot_mapping[is_real].long(), len(slot_mapping)
    pages, places = slots // kv_cache.shape[2], slots % kv_cache.shape[2]
    kv_cache[pages, :, places] = torch.cat([key[:count], value[:count]], -1)[is_real]


def _read(kv_cache: Tensor, table: Tensor, length: int) -> list[Tensor]:
    """Keys and values [n, G, >= the aligned length, d] of rows whose pages are `table` [n, pages]."""
    groups, size = kv_cache.shape[1:3]
    pages = table[:, None, : -(-rowwise.aligned(length) // size)] * groups + torch.arange(groups).unsqueeze(1)
    sides = kv_cache.flatten(0, 1).chunk(2, -1)
    return [side.index_select(0, pages.flatten()).view(len(table), groups, -1, side.shape[-1]) for side in sides]


def _attention(
    impl: Any,
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    attn_metadata: Any,
    output: Tensor,
    **scales: Any,  # of a quantized output
) -> Tensor:
    """query and output [t, H, d], the new tokens of all requests of a step, end to end."""
    if attn_metadata is None:  # vLLM warms up
        return output
    starts, lengths, table = attn_metadata.query_start_loc, attn_metadata.seq_lens, attn_metadata.block_table
    counts = starts.diff()
    decoded = (counts == 1).nonzero().squeeze(1)
    if len(decoded):
        tokens, positions = starts[decoded].long(), lengths[decoded].long() - 1
        keys, values = _read(kv_cache, table[decoded], int(positions.max()) + 1)
        of_tokens = query[tokens].unsqueeze(2)  # [n, H, 1, d]
        output[tokens] = rowwise.decoding_attention(of_tokens, keys, values, positions, impl.scale).squeeze(2)
    for row in (counts > 1).nonzero().squeeze(1).tolist():
        own, length = slice(int(starts[row]), int(starts[row + 1])), int(lengths[row])
        keys, values = _read(kv_cache, table[row : row + 1], length)
        whole = query[own].transpose(0, 1).unsqueeze(0)  # [1, H, s, d]
        prefilled = rowwise.attention(whole, keys, values, length - whole.shape[2], impl.scale)
        output[own] = prefilled.squeeze(0).transpose(0, 1)
    return output


# -- Sampling ----------------------------------------------------------------------------------------------------------


def _logprobs(logits: Tensor) -> Tensor:
    return rowwise.log_softmax(logits.float())


def _sample(sampler: Any, plain: Any, logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor | None]:
    """vLLM's own sample, with these log-probabilities."""
    drawn, logprobs = plain(sampler, logits, *arguments)
    return drawn, None if logprobs is None else _logprobs(logits)
