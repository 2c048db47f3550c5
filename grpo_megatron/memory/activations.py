"""Estimated device memory of one packed micro-batch in a forward and backward pass: activations and logits, in bytes.

Counted from what the local layers of models/layers/spec.py keep for the backward pass; tests/memory/test_activations.py compares
the counts with measured peaks. Transformer Engine's fused layers keep less. h is the hidden size, q and k the sizes of all
query and all key heads, f the MLP's, s the bytes of a number. One layer keeps, per token:

    two norms       h (4 + 2 s) each: float32 input, result, result times weight; over tp under sequence parallelism
    attention       s (6 q + 3 k) / tp: projection, rotated queries and keys, results; with norms of q and k
                    (4 + s) (q + k) / tp more
    MLP             s 5 f / tp: projection 2 f, activation, gate, product. With experts: of those that a token visits,
                    and 2 s h for each copy of the token that is sent to an expert and back

    latents         of latent attention: (4 + 3 s) for each element of a latent; its heads count as attention above, with
                    as many key heads as query heads (not compared with measured peaks)

Full recomputation keeps the input of each unit of layers only, and computes one unit again at a time. Selective
recomputation is not subtracted. Pipeline stage i of pp keeps the activations of pp - i micro-batches.
"""

from __future__ import annotations

import math

from grpo_megatron.config import ActorConfig, MegatronConfig
from grpo_megatron.models.architecture import Architecture


def recomputes_all(megatron: MegatronConfig) -> bool:
    """Whether the layers compute their activations again in the backward pass."""
    return megatron.override_transformer_config.get("recompute_granularity") == "full"


def kept_bytes(arch: Architecture, actor: ActorConfig, itemsize: int, *, stage: int, layers: int) -> float:
    """What a stage of `layers` layers keeps from its forward to its backward passes."""
    megatron = actor.megatron
    layer, recomputed = layer_bytes(arch, actor, itemsize), 0
    units = 0.0
    if recomputes_all(megatron):
        number = _recompute_number(megatron, layers)
        is_block = megatron.override_transformer_config.get("recompute_method") == "block"
        recomputed = number if is_block else layers  # block: the first `number` layers, each a unit of its own
        units = recomputed if is_block else math.ceil(layers / number)
    in_flight = megatron.pipeline_model_parallel_size - stage
    return in_flight * (units * _layer_input(arch, actor, itemsize) + (layers - recomputed) * layer)


def working_bytes(arch: Architecture, actor: ActorConfig, itemsize: int, *, layers: int) -> float:
    """What the backward pass of one layer needs besides: gradients, and the unit of layers that is computed again."""
    tp = actor.megatron.tensor_model_parallel_size
    # Of the layer's output, and of the MLP's projection and product.
    gradients = _layer_input(arch, actor, itemsize) + _tokens(actor) * itemsize * 3 * arch.ffn_hidden_size / tp
    if not recomputes_all(actor.megatron):
        return gradients
    unit = _recompute_number(actor.megatron, layers)
    if actor.megatron.override_transformer_config.get("recompute_method") == "block":
        unit = int(unit == layers)  # the other layers' activations are used up before the first is computed again
    return gradients + unit * layer_bytes(arch, actor, itemsize)


def layer_bytes(arch: Architecture, actor: ActorConfig, itemsize: int) -> float:
    """What one layer keeps of one micro-batch on one rank, without recomputation."""
    tp = actor.megatron.tensor_model_parallel_size
    queries, keys = arch.num_attention_heads * arch.head_dim, arch.num_query_groups * arch.head_dim
    copies = arch.experts_per_token if arch.num_experts else 1
    shared = max(arch.shared_ffn_hidden_size, arch.dense_ffn_hidden_size - copies * arch.ffn_hidden_size)
    per_token = 2 * arch.hidden_size * (4 + 2 * itemsize) / _sequence_cut(actor.megatron)
    per_token += itemsize * (6 * queries + 3 * keys + 5 * (copies * arch.ffn_hidden_size + shared)) / tp
    if arch.qk_norm or arch.post_norms:
        per_token += (4 + itemsize) * (queries + keys) / tp
    if arch.latent is not None:  # projections, float32 inputs of their norms, results, products
        latents = arch.latent.down_rows + (arch.latent.q_rank or 0)
        per_token += latents * (4 + 3 * itemsize) / _sequence_cut(actor.megatron)
    if arch.num_experts:
        per_token += 2 * itemsize * copies * arch.hidden_size
    return _tokens(actor) * per_token


def forward_bytes(arch: Architecture, actor: ActorConfig, itemsize: int) -> float:
    """The peak of a layer in a pass without gradients: about half of what it would keep for a backward pass."""
    return layer_bytes(arch, actor, itemsize) / 2


def head_bytes(arch: Architecture, actor: ActorConfig, itemsize: int, *, backward: bool) -> float:
    """What the output head (models/logprobs.py) needs on the last stage: logits of a chunk, and its weight's gradient.

    The forward pass has three float32 copies of a chunk's logits at a time; the backward pass has four, or six with an
    entropy bonus. The weight's gradient is summed in float32, beside the chunk's part in the weight's type and in float32.
    """
    tp = actor.megatron.tensor_model_parallel_size
    rows = arch.padded_vocab_size(tp) / tp
    tokens = actor.ppo_max_token_len_per_gpu
    logits = 4 * min(actor.logprob_chunk_size, tokens) * rows
    hidden = itemsize * tokens * arch.hidden_size  # of the tokens with a target, from all tensor-parallel ranks
    if not backward:
        return hidden + 3 * logits
    weight = rows * arch.hidden_size
    in_chunk = (6 if actor.entropy_coeff else 4) * logits
    in_product = (2 + itemsize / 4) * logits + weight * (4 if itemsize == 4 else itemsize + 4)
    return 2 * hidden + 4 * weight + max(in_chunk, in_product)


def _recompute_number(megatron: MegatronConfig, layers: int) -> int:
    """`recompute_num_layers`, at most the layers of a stage."""
    return min(layers, int(megatron.override_transformer_config.get("recompute_num_layers") or 1))


def _layer_input(arch: Architecture, actor: ActorConfig, itemsize: int) -> float:
    return _tokens(actor) * itemsize * arch.hidden_size / _sequence_cut(actor.megatron)


def _tokens(actor: ActorConfig) -> float:
    """Tokens of a full micro-batch on one rank."""
    return actor.ppo_max_token_len_per_gpu / actor.megatron.context_parallel_size


def _sequence_cut(megatron: MegatronConfig) -> int:
    """The ranks over which the activations outside attention and MLP are divided."""
    return megatron.tensor_model_parallel_size if megatron.use_sequence_parallel else 1
