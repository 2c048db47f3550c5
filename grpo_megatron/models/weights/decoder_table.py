"""Weight tables that families share. Megatron names are those of the local layer spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from grpo_megatron.models.architecture import Architecture
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
