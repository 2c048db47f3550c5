"""Tensor-parallel sizes that a model allows: plain arithmetic on its architecture, for the policy and for the engine."""

from __future__ import annotations

from collections.abc import Callable

from grpo_megatron.models.architecture import Architecture

ENGINE_VOCABULARY_MULTIPLE = 64  # vLLM pads the embedding to it, for every tp (Megatron-Core: to 8 x tp)


def split_problems(arch: Architecture, tp: int, *, has_whole_experts: bool = False) -> list[str]:
    """Why `tp` ranks cannot share a model; empty when they can. `has_whole_experts`: they do not cut experts."""
    mlp = ("rows of an expert's MLP" if arch.num_experts else "rows of the MLP", arch.ffn_hidden_size)
    sizes = (
        ("attention heads", arch.num_attention_heads),
        ("experts", arch.num_experts) if has_whole_experts and arch.num_experts else mlp,
        ("rows of a dense layer's MLP", arch.dense_ffn_hidden_size),
        ("rows of the shared experts' MLP", arch.shared_ffn_hidden_size),
    )
    problems = [f"{size} {what} over {tp} leave {size % tp}" for what, size in sizes if size % tp]
    groups = arch.num_query_groups
    if arch.post_norms and groups % tp:  # their norm is over all heads, and each key head is on one rank
        problems.append(f"{groups} key-value heads over {tp} leave {groups % tp}")
    elif groups % tp and tp % groups:
        problems.append(f"{groups} key-value heads and {tp} ranks: neither number divides the other")
    return problems


def engine_split_problems(arch: Architecture, tp: int, *, has_whole_experts: bool = False) -> list[str]:
    """`split_problems`, and why vLLM cannot cut the vocabulary over `tp` ranks."""
    problems = split_problems(arch, tp, has_whole_experts=has_whole_experts)
    multiple = ENGINE_VOCABULARY_MULTIPLE
    padded = -(-arch.vocab_size // multiple) * multiple
    if padded % tp:
        rows = f"{padded} rows of the vocabulary"
        if padded != arch.vocab_size:
            rows += f" ({arch.vocab_size}, padded to a multiple of {multiple})"
        problems.append(f"{rows} over {tp} leave {padded % tp}")
    return problems


def fitting_sizes(arch: Architecture, problems: Callable[[Architecture, int], list[str]]) -> str:
    """The sizes up to 64 without problems, for an error message."""
    return ", ".join(str(tp) for tp in range(1, 65) if not problems(arch, tp))
