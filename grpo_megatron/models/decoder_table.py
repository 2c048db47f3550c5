"""The weight table of a pre-norm decoder, shared by all families. Megatron names are those of the local layer spec."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_megatron.models.mapping import QKV, GateUp, InputSplit, Replicated, Router, Vocabulary, WeightRow

HF_LAYER = "model.layers.{layer}."
MCORE_LAYER = "decoder.layers.{layer}."


def mlp_rows() -> list[WeightRow]:
    """One SwiGLU MLP per layer."""
    hf, mcore = HF_LAYER + "mlp.", MCORE_LAYER + "mlp."
    return [
        GateUp(mcore + "linear_fc1.weight", (hf + "gate_proj.weight", hf + "up_proj.weight")),
        InputSplit(mcore + "linear_fc2.weight", (hf + "down_proj.weight",)),
    ]


def expert_rows(block: str, gate: str, up: str, down: str) -> list[WeightRow]:
    """A router and SwiGLU experts in every layer. The arguments are Hugging Face names: the module and its linear layers."""
    hf, mcore = HF_LAYER + block + ".", MCORE_LAYER + "mlp."
    hf_expert, mcore_expert = hf + "experts.{expert}.", mcore + "experts.local_experts.{expert}."
    return [
        Router(mcore + "router.weight", (hf + "gate.weight",)),
        GateUp(mcore_expert + "linear_fc1.weight", (f"{hf_expert}{gate}.weight", f"{hf_expert}{up}.weight")),
        InputSplit(mcore_expert + "linear_fc2.weight", (f"{hf_expert}{down}.weight",)),
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
