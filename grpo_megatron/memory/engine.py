"""What an engine's share of a GPU leaves for its KV cache, and how many sequences that is. Not run on a GPU yet.

    share      rollout.gpu_memory_utilization x device
    weights    parameters x bytes / tp; with `rollout.quantization` one byte for each weight but those of embedding and head
    workspace  estimated: vLLM runs max_num_batched_tokens tokens once and keeps what they needed free. Per token four
               hidden states and the MLP's projection and product; per sequence 12 bytes for each word of the vocabulary
    cache      share - weights - workspace; exactly `engine_kwargs.kv_cache_memory_bytes`, if set

    per token  layers x 2 x ceil(key-value heads / tp) x head size x bytes. Latent attention: layers x (latent + rotated
               part) x bytes, on every rank of the engine

A cache has whole blocks. vLLM refuses to start if it does not hold one sequence of the largest length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_megatron.config import Config
from grpo_megatron.models.architecture import Architecture

BLOCK_TOKENS = 16  # vLLM's default on CUDA
LOGIT_BYTES = 12  # of a logit and its log-probability while they are sampled from: bfloat16, float32, float32


@dataclass(frozen=True)
class EngineCache:
    """Bytes of one rank of an engine. `cache` may be negative: then the weights alone are too large."""

    weights: float
    workspace: float
    cache: float
    token_bytes: int
    block_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens in whole blocks."""
        return max(0, int(self.cache // (self.token_bytes * self.block_tokens))) * self.block_tokens

    def sequences(self, length: int) -> int:
        """Sequences of `length` tokens that are in the cache at once."""
        blocks = math.ceil(length / self.block_tokens)
        return self.tokens // self.block_tokens // blocks


def kv_token_bytes(arch: Architecture, rollout_tp: int, itemsize: int) -> int:
    """Bytes of one token in the cache of one rank of an engine."""
    if arch.latent is not None:
        return arch.num_layers * arch.latent.down_rows * itemsize
    return arch.num_layers * 2 * math.ceil(arch.num_query_groups / rollout_tp) * arch.head_dim * itemsize


def engine_weights(config: Config, arch: Architecture, itemsize: int) -> float:
    """Bytes of the engine's weights on one of its ranks."""
    tp = config.rollout.tensor_model_parallel_size
    if config.rollout.quantization is None:
        return arch.num_parameters() * itemsize / tp
    ends = arch.vocab_size * arch.hidden_size * (1 if arch.tied else 2)
    return (arch.num_parameters() - ends + ends * itemsize) / tp


def engine_cache(config: Config, arch: Architecture, itemsize: int, device: float) -> EngineCache:
    """The cache of an engine on a GPU of `device` bytes."""
    rollout = config.rollout
    tp, kwargs = rollout.tensor_model_parallel_size, rollout.engine_kwargs
    active = max(arch.experts_per_token, 1) * arch.ffn_hidden_size + arch.shared_ffn_hidden_size
    per_token = itemsize * (4 * arch.hidden_size + 3 * active / tp)
    workspace = rollout.max_num_batched_tokens * per_token + rollout.max_num_seqs * arch.vocab_size * LOGIT_BYTES
    weights = engine_weights(config, arch, itemsize)
    cache = rollout.gpu_memory_utilization * device - weights - workspace
    return EngineCache(
        weights=weights,
        workspace=workspace,
        cache=float(kwargs.get("kv_cache_memory_bytes") or cache),
        token_bytes=kv_token_bytes(arch, tp, 1 if str(kwargs.get("kv_cache_dtype")).startswith("fp8") else itemsize),
        block_tokens=int(kwargs.get("block_size") or BLOCK_TOKENS),
    )
