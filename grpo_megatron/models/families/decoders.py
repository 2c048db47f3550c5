"""Decoders with grouped-query attention, which differ in a few fields of config.json.

family      model_type   beside common_settings
Llama       llama        2, 3, 3.1, 3.2, 3.3; from 3.1 on with llama3 RoPE scaling
Mistral     mistral      Llama's shapes; v0.1 has a sliding window: sequences longer than it are refused
Mixtral     mixtral      Mistral's attention, and few large experts in place of every MLP; a softmax over the logits of the
                         selected experts gives their weights
OLMo-2      olmo2        arXiv 2501.00656: norms after attention and MLP, inside the residual, and none before them; queries
                         and keys have a norm over all heads together
Qwen2, 2.5  qwen2        biases on query, key and value; the small sizes have tied embeddings
Qwen3       qwen3        no biases, RMSNorm on every query and key head, a head size given in config.json
Qwen3-MoE   qwen3_moe    Qwen3's attention, and routed experts in place of every MLP; no shared expert
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_megatron.models.architecture import Architecture, UnsupportedModel, common_settings, expert_settings
from grpo_megatron.models.weights.table import (
    QKV,
    GateUp,
    HeadsNorm,
    InputSplit,
    OutputSplit,
    Replicated,
    ReplicatedMatrix,
    Vocabulary,
    WeightRow,
)

# -- Weight tables that families share. Megatron names are those of the local layer spec -------------------------------

HF_LAYER = "model.layers.{layer}."
MCORE_LAYER = "decoder.layers.{layer}."


def mlp_rows(size: str = "ffn_hidden_size", module: str = "mlp.") -> list[WeightRow]:
    """One SwiGLU MLP per layer. `size` names the Architecture field with its width, `module` the MLP in either model."""
    hf, mcore = HF_LAYER + module, MCORE_LAYER + module
    return [
        GateUp(mcore + "linear_fc1.weight", (hf + "gate_proj.weight", hf + "up_proj.weight"), size),
        InputSplit(mcore + "linear_fc2.weight", (hf + "down_proj.weight",), size),
    ]


def expert_rows(
    block: str = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> list[WeightRow]:
    """A router and SwiGLU experts in every layer. The arguments are Hugging Face names: the module and its linear layers."""
    hf, mcore = HF_LAYER + block + ".", MCORE_LAYER + "mlp."
    hf_expert, mcore_expert = hf + "experts.{expert}.", mcore + "experts.local_experts.{expert}."
    return [
        ReplicatedMatrix(mcore + "router.weight", (hf + "gate.weight",), "num_experts"),
        GateUp(mcore_expert + "linear_fc1.weight", (f"{hf_expert}{gate}.weight", f"{hf_expert}{up}.weight")),
        InputSplit(mcore_expert + "linear_fc2.weight", (f"{hf_expert}{down}.weight",)),
    ]


def _model(layer: Sequence[WeightRow], *, tied: bool) -> list[WeightRow]:
    """The rows of a layer between those of embedding, last norm and head."""
    embedding = Vocabulary("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
    head = [] if tied else [Vocabulary("output_layer.weight", ("lm_head.weight",))]
    return [embedding, *layer, Replicated("decoder.final_layernorm.weight", ("model.norm.weight",)), *head]


def _pre_norm(attention: Sequence[WeightRow], mlp: Sequence[WeightRow]) -> list[WeightRow]:
    """The rows of a layer with a norm before attention and one before the MLP."""
    return [
        Replicated(MCORE_LAYER + "input_layernorm.weight", (HF_LAYER + "input_layernorm.weight",)),
        *attention,
        Replicated(MCORE_LAYER + "pre_mlp_layernorm.weight", (HF_LAYER + "post_attention_layernorm.weight",)),
        *mlp,
    ]


def _attention(*, bias: bool = False, norm: bool = False) -> list[WeightRow]:
    """Grouped-query attention, with biases or with norms of the heads."""
    hf, mcore = HF_LAYER + "self_attn.", MCORE_LAYER + "self_attention."
    rows: list[WeightRow] = [QKV(mcore + "linear_qkv.weight", tuple(f"{hf}{p}_proj.weight" for p in "qkv"))]
    if bias:
        rows.append(QKV(mcore + "linear_qkv.bias", tuple(f"{hf}{p}_proj.bias" for p in "qkv"), bias=True))
    if norm:
        rows += [Replicated(f"{mcore}{p}_layernorm.weight", (f"{hf}{p}_norm.weight",), "head_dim") for p in "qk"]
    return [*rows, InputSplit(mcore + "linear_proj.weight", (hf + "o_proj.weight",), "attention_size")]


def decoder_table(
    *, qkv_bias: bool = False, qk_norm: bool = False, tied: bool = False, mlp: Sequence[WeightRow] | None = None
) -> list[WeightRow]:
    """The table of a pre-norm decoder with grouped-query attention. Megatron names are those of the local layer spec.

    `mlp`: rows in place of one SwiGLU MLP per layer.
    """
    attention = _attention(bias=qkv_bias, norm=qk_norm)
    return _model(_pre_norm(attention, mlp_rows() if mlp is None else mlp), tied=tied)


def post_norm_table(*, tied: bool) -> list[WeightRow]:
    """The table of a decoder whose norms follow attention and MLP (models/layers/modules.py)."""
    hf, mcore = HF_LAYER, MCORE_LAYER
    norms = [
        HeadsNorm(mcore + "self_attention.q_layernorm.weight", (hf + "self_attn.q_norm.weight",)),
        HeadsNorm(mcore + "self_attention.k_layernorm.weight", (hf + "self_attn.k_norm.weight",), "key_size"),
        Replicated(mcore + "self_attention.linear_proj.post_norm.weight", (hf + "post_attention_layernorm.weight",)),
        Replicated(mcore + "mlp.linear_fc2.post_norm.weight", (hf + "post_feedforward_layernorm.weight",)),
    ]
    return _model([*_attention(), *mlp_rows(), *norms], tied=tied)


def latent_table(arch: Architecture) -> list[WeightRow]:
    """The table of DeepSeek's decoders: latent attention, and dense MLPs before the layers of experts."""
    assert arch.latent is not None and arch.routing is not None
    dense = mlp_rows("dense_ffn_hidden_size") if arch.num_dense_layers else []
    experts = expert_rows()
    if arch.shared_ffn_hidden_size:  # one MLP for every token; Hugging Face has one, whatever the number of experts
        experts += mlp_rows("shared_ffn_hidden_size", "mlp.shared_experts.")
    if arch.routing.is_sigmoid:
        names = MCORE_LAYER + "mlp.router.expert_bias", (HF_LAYER + "mlp.gate.e_score_correction_bias",)
        experts.append(Replicated(*names, "num_experts", is_constant=True))
    mlp = [replace(row, layers="dense") for row in dense] + [replace(row, layers="experts") for row in experts]
    return _model(_pre_norm(_latent_attention(arch.latent.q_rank is not None), mlp), tied=arch.tied)


def _latent_attention(has_query_latent: bool) -> list[WeightRow]:
    """The projections to the latents are whole on every rank; those from them are cut by heads."""
    hf, mcore = HF_LAYER + "self_attn.", MCORE_LAYER + "self_attention."
    query: list[WeightRow] = [OutputSplit(mcore + "linear_q_proj.weight", (hf + "q_proj.weight",), "latent.key_dim")]
    if has_query_latent:
        query = [
            ReplicatedMatrix(mcore + "linear_q_down_proj.weight", (hf + "q_a_proj.weight",), "latent.q_rank"),
            Replicated(mcore + "q_layernorm.weight", (hf + "q_a_layernorm.weight",), "latent.q_rank"),
            OutputSplit(
                mcore + "linear_q_up_proj.weight", (hf + "q_b_proj.weight",), "latent.key_dim", "latent.q_rank"
            ),
        ]
    return [
        *query,
        ReplicatedMatrix(mcore + "linear_kv_down_proj.weight", (hf + "kv_a_proj_with_mqa.weight",), "latent.down_rows"),
        Replicated(mcore + "kv_layernorm.weight", (hf + "kv_a_layernorm.weight",), "latent.kv_rank"),
        OutputSplit(mcore + "linear_kv_up_proj.weight", (hf + "kv_b_proj.weight",), "latent.up_rows", "latent.kv_rank"),
        InputSplit(mcore + "linear_proj.weight", (hf + "o_proj.weight",), "attention_size"),
    ]


@dataclass(frozen=True)
class ModelFamily:
    """A model family: config.json -> Architecture -> weight table.

    `architecture_from` raises UnsupportedModel for what it cannot express. The names in `weight_table` are those of
    Megatron-Core's modules, and of the tensors in the Hugging Face folder.
    """

    architecture_from: Callable[[dict[str, Any]], Architecture]
    weight_table: Callable[[Architecture], list[WeightRow]]


def _family(
    name: str = "",
    refused: Sequence[str] = (),
    *,
    window: str | None = None,
    experts: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    table: Callable[[Architecture], list[WeightRow]] | None = None,
    **fields: Any,
) -> ModelFamily:
    """A family whose Architecture is `common_settings` and `fields`. Keys in `refused` must not be set.

    `window`: the key that switches `sliding_window` on; "": it is always on. `experts`: config.json -> the fields of experts.
    """

    def architecture_from(config: dict[str, Any]) -> Architecture:
        for key in refused:
            if config.get(key):
                raise UnsupportedModel(f"{name} with {key}=true is not supported")
        settings = {"tied": bool(config.get("tie_word_embeddings", False)), **fields}
        if window is not None:
            settings["sliding_window"] = config.get("sliding_window") if not window or config.get(window) else None
        moe = experts(config) if experts is not None else {}
        return Architecture(family=config["model_type"], **{**common_settings(config), **settings, **moe})

    return ModelFamily(architecture_from, table or _plain_table)


def _plain_table(arch: Architecture) -> list[WeightRow]:
    mlp = expert_rows() if arch.num_experts else None
    return decoder_table(qkv_bias=arch.qkv_bias, qk_norm=arch.qk_norm, tied=arch.tied, mlp=mlp)


def _mixtral_table(arch: Architecture) -> list[WeightRow]:
    return decoder_table(tied=arch.tied, mlp=expert_rows("block_sparse_moe", "w1", "w3", "w2"))


def _mixtral_experts(config: dict[str, Any]) -> dict[str, Any]:
    return expert_settings(config, width="intermediate_size", renormalise=True)


def _qwen_experts(config: dict[str, Any]) -> dict[str, Any]:
    renormalise = bool(config.get("norm_topk_prob", False))
    return expert_settings(config, width="moe_intermediate_size", renormalise=renormalise)


# Qwen's config.json gives a window that is in use only with `use_sliding_window`.
_QWEN3: dict[str, Any] = {"refused": ["attention_bias"], "window": "use_sliding_window", "qk_norm": True}
DECODERS = {
    "llama": _family("Llama", ["attention_bias", "mlp_bias"]),
    "mistral": _family(window=""),
    "mixtral": _family(window="", experts=_mixtral_experts, table=_mixtral_table),
    "olmo2": _family("OLMo-2", ["attention_bias"], post_norms=True, table=lambda arch: post_norm_table(tied=arch.tied)),
    "qwen2": _family(window="use_sliding_window", qkv_bias=True),
    "qwen3": _family("Qwen3", **_QWEN3),
    "qwen3_moe": _family("Qwen3-MoE", **_QWEN3, experts=_qwen_experts),
}
