"""Qwen2-VL and Qwen2.5-VL: Qwen2's decoder with M-RoPE, and a vision tower (arXiv 2409.12191, 2502.13923).

Their files have Qwen2's names for the decoder, and `visual.` before those of the tower. transformers 5 writes a decoder's
settings into `text_config`; the folders on the Hub have them at the top. Qwen3-VL interleaves the sections of its angles and
adds features behind several layers, which no table expresses: it is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.models.architecture import Architecture, UnsupportedModel, Vision, common_settings
from grpo_megatron.models.families.decoders import ModelFamily
from grpo_megatron.models.weights.table import Replicated, WeightRow, decoder_table


@dataclass(frozen=True)
class _TowerRow(Replicated):
    """A tensor of the tower, which is whole on every rank of the first stage, under the name that it has in files."""

    shape: tuple[int, ...] = field(default=(), kw_only=True)

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return (self.shape,)


def _architecture(config: dict[str, Any]) -> Architecture:
    text, vision = {**config, **(config.get("text_config") or {})}, config["vision_config"]
    rope = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    sections, head = rope.pop("mrope_section", None), text["hidden_size"] // text["num_attention_heads"]
    if not isinstance(sections, list) or len(sections) != 3 or 2 * sum(sections) != head:
        raise UnsupportedModel(f"mrope_section={sections} must be three sizes with the sum {head} / 2 (half a head)")
    rope = {name: "default" if value == "mrope" else value for name, value in rope.items()}
    settings = common_settings(
        {**text, "rope_scaling": None, "rope_parameters": {"rope_theta": text.get("rope_theta"), **rope}}
    )
    is_older = config["model_type"] == "qwen2_vl"
    if vision.get("hidden_act", "quick_gelu" if is_older else "silu") != ("quick_gelu" if is_older else "silu"):
        raise UnsupportedModel(f"vision_config.hidden_act={vision['hidden_act']!r} is not supported")
    if vision.get("temporal_patch_size", 2) != 2 or vision.get("in_channels", vision.get("in_chans", 3)) != 3:
        raise UnsupportedModel(
            "vision_config: only RGB images in pairs of frames are supported (temporal_patch_size=2)"
        )
    width = vision["embed_dim" if is_older else "hidden_size"]
    out = vision.get("hidden_size" if is_older else "out_hidden_size", text["hidden_size"])
    if out != text["hidden_size"]:
        raise UnsupportedModel(f"the tower writes features of {out} numbers, and hidden_size is {text['hidden_size']}")
    tower = Vision(
        config=json.dumps(vision, sort_keys=True),
        gated=not is_older,
        sections=tuple(sections),
        depth=vision["depth"],
        width=width,
        ffn_width=int(width * vision["mlp_ratio"]) if is_older else vision["intermediate_size"],
        patch=vision.get("patch_size", 14),
        merge=vision.get("spatial_merge_size", 2),
        token_id=config["image_token_id"],
    )
    window = text.get("sliding_window") if text.get("use_sliding_window") else None
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    return Architecture(
        family=config["model_type"], tied=tied, qkv_bias=True, sliding_window=window, vision=tower, **settings
    )


def _table(arch: Architecture) -> list[WeightRow]:
    assert arch.vision is not None
    shapes = arch.vision.shapes(arch.hidden_size)
    return [*decoder_table(arch), *(_TowerRow(name, (name,), shape=shape) for name, shape in shapes.items())]


def _refuse(config: dict[str, Any]) -> Architecture:
    raise UnsupportedModel(
        f"model_type={config['model_type']}: its angles are interleaved and its tower adds features behind several layers"
        " (DeepStack), which is not supported; use a Qwen2.5-VL or Qwen2-VL model"
    )


VISION_MODELS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), ModelFamily(_architecture, _table)),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), ModelFamily(_refuse, _table)),
}
