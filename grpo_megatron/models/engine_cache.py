"""The KV cache that fits an engine's share of a GPU, and the number of sequences that the engine decodes at a time.

A cache has whole blocks. vLLM refuses to start if it is too small for one sequence of the largest length. Not run on a GPU yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from grpo_megatron.config import RolloutConfig
from grpo_megatron.models.architecture import Architecture, Vision
from grpo_megatron.parallel.mesh import Mesh

BLOCK_TOKENS = 16  # vLLM's default on CUDA
LOGIT_BYTES = 12  # of a logit and its log-probability while they are sampled from: bfloat16, float32, float32
FEWEST_SEQUENCES, MOST_SEQUENCES, SEQUENCES_STEP = 16, 1024, 8


@dataclass(frozen=True)
class EngineCache:
    """Bytes of one rank of an engine. `cache` may be negative: then the weights alone are too large.

    `max_num_seqs`: sequences that the engine decodes at a time. `derivation`: how it was derived; "" if the config sets it.
    """

    weights: float
    workspace: float
    cache: float
    token_bytes: int
    block_tokens: int
    max_num_seqs: int = MOST_SEQUENCES
    derivation: str = ""

    @property
    def tokens(self) -> int:
        """Tokens in whole blocks."""
        return max(0, int(self.cache // (self.token_bytes * self.block_tokens))) * self.block_tokens

    def sequences(self, length: int) -> int:
        """Sequences of `length` tokens that are in the cache at once."""
        blocks = math.ceil(length / self.block_tokens)
        return self.tokens // self.block_tokens // blocks


def kv_token_bytes(arch: Architecture, rollout_tp: int, itemsize: int) -> int:
    """Returns the bytes of one token in the cache of one rank of an engine.

    layers with attention x 2 x ceil(key-value heads / tp) x head size x bytes
    layers x (latent + rotated part) x bytes                       latent attention, on every rank of the engine
    """
    if arch.latent is not None:
        return arch.num_layers * arch.latent.down_rows * itemsize
    layers = arch.num_layers - arch.num_linear_layers
    return layers * 2 * math.ceil(arch.num_query_groups / rollout_tp) * arch.head_dim * itemsize


def state_bytes(arch: Architecture, rollout_tp: int, itemsize: int) -> int:
    """Returns the bytes of a sequence's states in gated delta nets on one rank of an engine, whatever its length.

    layers x (value heads x key size x value size x 4 + channels x (taps - 1) x bytes) / tp
    """
    if (delta := arch.delta) is None:
        return 0
    state = 4 * delta.value_heads * delta.key_dim * delta.value_dim + delta.conv_size * (delta.kernel - 1) * itemsize
    return arch.num_linear_layers * state // rollout_tp


def tower_layer_bytes(vision: Vision, itemsize: int) -> int:
    """Returns the bytes that a layer of transformers' tower keeps of a token for a backward pass. A forward pass needs less.

    For each patch: inputs, results and norms of both halves (norms in float32, where the MLP is gated), queries, keys, values,
    three copies of the attention's results, and the MLP's. tests/planning/test_parameters.py compares it with measured peaks.
    """
    wide = (
        4 if vision.gated else 2 if vision.positions else 3
    )  # results of the MLP: its product and activation, or less
    per_patch = itemsize * (11 * vision.width + wide * vision.ffn_width)
    return vision.merge**2 * (per_patch + 8 * vision.width * vision.gated)


def engine_weights(rollout: RolloutConfig, arch: Architecture, itemsize: int) -> float:
    """Returns the bytes of the engine's weights on one rank: parameters x bytes / tp.

    With `rollout.quantization`, one byte for each weight but those of embedding and head. Each rank has the full tower.
    """
    tp = rollout.tensor_model_parallel_size
    if rollout.quantization is None:
        tower = arch.vision.num_parameters(arch.hidden_size) if arch.vision else 0
        return (arch.num_parameters() + (tp - 1) * tower) * itemsize / tp
    ends = arch.vocab_size * arch.hidden_size * (1 if arch.tied else 2)
    return (arch.num_parameters() - ends + ends * itemsize) / tp


def engine_cache(rollout: RolloutConfig, arch: Architecture, itemsize: int, device: float, length: int) -> EngineCache:
    """Returns the cache of an engine on a GPU of `device` bytes. `length`: tokens of the longest sequence.

        share      rollout.gpu_memory_utilization x device
        workspace  estimated: vLLM runs max_num_batched_tokens tokens once and keeps their memory free. Per token four hidden
                   states and the MLP's projection and product; per sequence 12 bytes for each word of the vocabulary.
                   A vision tower computes as many tokens of images at a time, and keeps their features; those of
                   DeepStack are twice there, for the tokens of a step too
        cache      share - weights - workspace; exactly `engine_kwargs.kv_cache_memory_bytes`, if set; less the states of all
                   sequences, of a model with gated delta nets

    Where `rollout.max_num_seqs` is null, it is the number of sequences of half the largest length, the expected mean, that
    fit at once with their part of the workspace: a multiple of 8, from 16 to 1,024 (vLLM's own number on GPUs of 70 GiB and
    more). On the CPU it is CPU_SEQUENCES.
    """
    tp, kwargs = rollout.tensor_model_parallel_size, rollout.engine_kwargs
    active = max(arch.experts_per_token, 1) * arch.ffn_hidden_size + arch.shared_ffn_hidden_size
    per_token = itemsize * (4 * arch.hidden_size + 3 * active / tp)
    if arch.vision is not None:
        per_token += itemsize * (1 + 2 * arch.vision.levels) * arch.hidden_size + tower_layer_bytes(
            arch.vision, itemsize
        )
    weights = engine_weights(rollout, arch, itemsize)
    left = rollout.gpu_memory_utilization * device - weights - rollout.max_num_batched_tokens * per_token
    states = state_bytes(arch, tp, itemsize)
    logits, given = arch.vocab_size * LOGIT_BYTES, float(kwargs.get("kv_cache_memory_bytes") or 0)
    token_bytes = kv_token_bytes(arch, tp, 1 if str(kwargs.get("kv_cache_dtype")).startswith("fp8") else itemsize)
    block_tokens = int(kwargs.get("block_size") or BLOCK_TOKENS)
    sequences, derivation = rollout.max_num_seqs, ""
    if sequences is None:
        mean = math.ceil(math.ceil(length / 2) / block_tokens) * block_tokens
        per_sequence = mean * token_bytes + states
        room, each = (given, per_sequence) if given else (left, per_sequence + logits)
        at_once = max(0, int(room // each))
        bounded = max(FEWEST_SEQUENCES, min(MOST_SEQUENCES, at_once // SEQUENCES_STEP * SEQUENCES_STEP))
        sequences = min(bounded, rollout.max_num_batched_tokens)
        derivation = (
            f"{room / 2**30:.2f} GiB / ({mean:,} tokens x {token_bytes / 1024:g} KiB"
            f"{f' + states of {states / 2**20:.2f} MiB' if states else ''}"
            f"{'' if given else f' + {arch.vocab_size:,} words x {LOGIT_BYTES} bytes'}) = {at_once:,}"
        )
    workspace = rollout.max_num_batched_tokens * per_token + sequences * logits
    return EngineCache(
        weights=weights,
        workspace=workspace,
        cache=(given or left - sequences * logits) - sequences * states,
        token_bytes=token_bytes,
        block_tokens=block_tokens,
        max_num_seqs=sequences,
        derivation=derivation,
    )


def with_sequences(
    rollout: RolloutConfig, arch: Architecture, dtype: str, length: int, mesh: Mesh, device: float | None
) -> RolloutConfig:
    """Returns `rollout` with a number as `max_num_seqs`, the same on every rank. Collective. `device`: bytes; None: the CPU."""
    sequences = rollout.sequences
    if rollout.max_num_seqs is None and device is not None:
        local = engine_cache(rollout, arch, getattr(torch, dtype).itemsize, device, length).max_num_seqs
        sequences = min(mesh.all_gather(local))
    return rollout.with_values({"max_num_seqs": sequences})
