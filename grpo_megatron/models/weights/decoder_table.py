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


def mlp_rows(size: str = "ffn_hidden_size") -> list[WeightRow]:
    """One SwiGLU MLP per layer. `size` names the Architecture field with its width."""
    hf, mcore = HF_LAYER + "mlp.", MCORE_LAYER + "mlp."
    return [
        GateUp(mcore + "linear_fc1.weight", (hf + "gate_proj.weight", hf + "up_proj.weight"), size),
        InputSplit(mcore + "linear_fc2.weight", (hf + "down_proj.weight",), size),
    ]


def expert_rows(block: str, gate: str, up: str, down: str) -> list[WeightRow]:
    """A router and SwiGLU experts in every layer. The arguments are Hugging Face names: the module and its linear layers."""
    hf, mcore = HF_LAYER + block + ".", MCORE_LAYER + "mlp."
    hf_expert, mcore_expert = hf + "experts.{expert}.", mcore + "experts.local_experts.{expert}."
    return [
        ReplicatedMatrix(mcore + "router.weight", (hf + "gate.weight",), "num_experts"),
        GateUp(mcore_expert + "linear_fc1.weight", (f"{hf_expert}{gate}.weight", f"{hf_expert}{up}.weight")),
        InputSplit(mcore_expert + "linear_fc2.weight", (f"{hf_expert}{down}.weight",)),
    ]


def shared_expert_rows() -> list[WeightRow]:
    """The MLP that every token passes through, beside its experts. Hugging Face has one, whatever the number of experts."""
    hf, mcore, size = HF_LAYER + "mlp.shared_experts.", MCORE_LAYER + "mlp.shared_experts.", "shared_ffn_hidden_size"
    return [
        GateUp(mcore + "linear_fc1.weight", (hf + "gate_proj.weight", hf + "up_proj.weight"), size),
        InputSplit(mcore + "linear_fc2.weight", (hf + "down_proj.weight",), size),
    ]


def decoder_table(
    *, qkv_bias: bool = False, qk_norm: bool = False, tied: bool = False, mlp: Sequence[WeightRow] | None = None
) -> list[WeightRow]:
    """The table of a pre-norm decoder with grouped-query attention. Megatron names are those of the local layer spec.

    `mlp`: rows in place of one SwiGLU MLP per layer.
    """
    hf, mcore = HF_LAYER, MCORE_LAYER
    attention = tuple(f"{hf}self_attn.{p}_proj." for p in "qkv")
    rows: list[WeightRow] = [Vocabulary("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))]
    rows.append(Replicated(mcore + "input_layernorm.weight", (hf + "input_layernorm.weight",)))
    rows.append(QKV(mcore + "self_attention.linear_qkv.weight", tuple(a + "weight" for a in attention)))
    if qkv_bias:
        rows.append(QKV(mcore + "self_attention.linear_qkv.bias", tuple(a + "bias" for a in attention), bias=True))
    if qk_norm:
        for p in "qk":
            name = f"self_attention.{p}_layernorm.weight"
            rows.append(Replicated(mcore + name, (f"{hf}self_attn.{p}_norm.weight",), "head_dim"))
    rows += [
        InputSplit(mcore + "self_attention.linear_proj.weight", (hf + "self_attn.o_proj.weight",), "attention_size"),
        Replicated(mcore + "pre_mlp_layernorm.weight", (hf + "post_attention_layernorm.weight",)),
        *(mlp_rows() if mlp is None else mlp),
        Replicated("decoder.final_layernorm.weight", ("model.norm.weight",)),
    ]
    if not tied:
        rows.append(Vocabulary("output_layer.weight", ("lm_head.weight",)))
    return rows


def post_norm_table(*, tied: bool) -> list[WeightRow]:
    """The table of a decoder whose norms follow attention and MLP (models/layers/modules.py)."""
    hf, mcore = HF_LAYER, MCORE_LAYER
    rows = [
        row
        for row in decoder_table(tied=tied)
        if not row.megatron.endswith(("input_layernorm.weight", "mlp_layernorm.weight"))
    ]
    last = next(place for place, row in enumerate(rows) if row.megatron.startswith("decoder.final"))
    return [
        *rows[:last],
        HeadsNorm(mcore + "self_attention.q_layernorm.weight", (hf + "self_attn.q_norm.weight",)),
        HeadsNorm(mcore + "self_attention.k_layernorm.weight", (hf + "self_attn.k_norm.weight",), "key_size"),
        Replicated(mcore + "self_attention.linear_proj.post_norm.weight", (hf + "post_attention_layernorm.weight",)),
        Replicated(mcore + "mlp.linear_fc2.post_norm.weight", (hf + "post_feedforward_layernorm.weight",)),
        *rows[last:],
    ]


def latent_table(arch: Architecture) -> list[WeightRow]:
    """The table of DeepSeek's decoders: latent attention, and dense MLPs before the layers of experts."""
    assert arch.latent is not None and arch.routing is not None
    mlp: list[WeightRow] = []
    if arch.num_dense_layers:
        mlp += (replace(row, layers="dense") for row in mlp_rows("dense_ffn_hidden_size"))
    experts = expert_rows("mlp", "gate_proj", "up_proj", "down_proj")
    if arch.shared_ffn_hidden_size:
        experts += shared_expert_rows()
    if arch.routing.is_sigmoid:
        names = MCORE_LAYER + "mlp.router.expert_bias", (HF_LAYER + "mlp.gate.e_score_correction_bias",)
        experts.append(Replicated(*names, "num_experts", is_constant=True))
    mlp += (replace(row, layers="experts") for row in experts)
    return [
        Vocabulary("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
        Replicated(MCORE_LAYER + "input_layernorm.weight", (HF_LAYER + "input_layernorm.weight",)),
        *_latent_attention(arch.latent.q_rank is not None),
        Replicated(MCORE_LAYER + "pre_mlp_layernorm.weight", (HF_LAYER + "post_attention_layernorm.weight",)),
        *mlp,
        Replicated("decoder.final_layernorm.weight", ("model.norm.weight",)),
        *([] if arch.tied else [Vocabulary("output_layer.weight", ("lm_head.weight",))]),
    ]


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
