"""Architecture: the numbers of a decoder that both Hugging Face and Megatron-Core understand. No tensors, no imports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class UnsupportedModel(ValueError):
    """A config.json that asks for something Megatron-Core, or this project, cannot express; the message names it."""


@dataclass(frozen=True)
class Architecture:
    """A dense pre-norm decoder. `rope_factor` is llama3 scaling's, `rope_linear_factor` linear interpolation's."""

    family: str
    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_factor: float | None = None
    rope_linear_factor: float | None = None
    sliding_window: int | None = None  # sequences must not be longer: a window is not computed

    @property
    def attention_size(self) -> int:
        """Width of all query heads together; need not equal hidden_size."""
        return self.num_attention_heads * self.head_dim

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding when cut over `tp` ranks: a multiple of tp (and of 8, for tensor cores)."""
        multiple = 8 * tp
        return -(-self.vocab_size // multiple) * multiple

    def num_parameters(self) -> int:
        """Exact count; tied embeddings once."""
        d, h = self.head_dim, self.hidden_size
        qkv = (self.num_attention_heads + 2 * self.num_query_groups) * d
        layer = qkv * h + h * self.attention_size + 3 * h * self.ffn_hidden_size + 2 * h
        layer += (qkv if self.qkv_bias else 0) + (2 * d if self.qk_norm else 0)
        return self.num_layers * layer + h + self.vocab_size * h * (1 if self.tied else 2)


def rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Theta and scaling from either layout of config.json: `rope_parameters` (transformers 5) or the older keys.

    Returns Architecture keywords. Raises UnsupportedModel for a scaling that cannot be expressed.
    """
    merged = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = merged.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = merged.get("rope_type", merged.get("type", "default"))
    out: dict[str, Any] = {"rope_theta": float(theta)}
    if kind in (None, "default"):
        return out
    if kind == "linear":
        return {**out, "rope_linear_factor": float(merged["factor"])}
    if kind == "llama3":
        fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        for key, value in fixed.items():
            if merged.get(key, value) != value:
                raise UnsupportedModel(
                    f"llama3 RoPE scaling with {key}={merged[key]}: Megatron-Core has {value:g} built in and takes no other"
                )
        return {**out, "rope_factor": float(merged["factor"])}
    raise UnsupportedModel(f"RoPE scaling {kind!r} is not supported (supported: default, linear, llama3)")


def common_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Architecture keywords that every dense family reads alike. Raises UnsupportedModel."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act={activation!r} is not supported (supported: silu)")
    try:
        heads = config["num_attention_heads"]
        return {
            "hidden_size": config["hidden_size"],
            "ffn_hidden_size": config["intermediate_size"],
            "num_layers": config["num_hidden_layers"],
            "num_attention_heads": heads,
            "num_query_groups": config.get("num_key_value_heads") or heads,
            "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
            "vocab_size": config["vocab_size"],
            "norm_eps": config.get("rms_norm_eps", 1e-6),
            "max_position_embeddings": config.get("max_position_embeddings", 2048),
            **rope_settings(config),
        }
    except KeyError as error:
        raise UnsupportedModel(f"config.json has no {error.args[0]!r}") from None
