"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: the decoder of Qwen2, Qwen3 or Qwen3-MoE, with M-RoPE, and a vision tower.

arXiv 2409.12191, 2502.13923, 2511.21631. The table has the decoder's names of Qwen2, and `visual.` before those of the tower.
Files of Qwen3-VL have other names (weights/file_names.py). The first two families' folders on the Hub have a decoder's
settings at the top, Qwen3-VL's and those of transformers 5 in `text_config`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.data.images import published_processor
from grpo_megatron.models.architecture import Architecture, UnsupportedModel, Vision, common_settings, expert_settings
from grpo_megatron.models.families.decoders import ModelFamily
from grpo_megatron.models.weights.table import Replicated, WeightRow, decoder_table
from grpo_megatron.untrusted import shown


@dataclass(frozen=True)
class _TowerRow(Replicated):
    """A tensor of the tower, which is whole on every rank of the first stage, under the name that it has in files."""

    shape: tuple[int, ...] = field(default=(), kw_only=True)

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return (self.shape,)


def _architecture(config: dict[str, Any]) -> Architecture:
    is_older, is_third = config["model_type"] == "qwen2_vl", config["model_type"].startswith("qwen3_vl")
    text = {"rms_norm_eps": 1e-6 if is_third else 1e-5, **config, **(config.get("text_config") or {})}
    vision = config["vision_config"]
    rope = {**(text.get("rope_scaling") or {}), **(text.get("rope_parameters") or {})}
    sections, head = rope.pop("mrope_section", None), text["hidden_size"] // text["num_attention_heads"]
    head = text.get("head_dim") or head
    if not isinstance(sections, list) or len(sections) != 3 or 2 * sum(sections) != head:
        raise UnsupportedModel(f"mrope_section={sections} must be three sizes with the sum {head} / 2 (half a head)")
    interleaved = rope.pop("mrope_interleaved", False)
    if interleaved is not is_third:  # transformers does not read it, vLLM does
        raise UnsupportedModel(
            f"mrope_interleaved={interleaved}: {config['model_type']} has {'true' if is_third else 'false'}"
        )
    rope = {name: "default" if value == "mrope" else value for name, value in rope.items()}
    settings = common_settings(
        {**text, "rope_scaling": None, "rope_parameters": {"rope_theta": text.get("rope_theta"), **rope}}
    )
    act = "quick_gelu" if is_older else "gelu_pytorch_tanh" if is_third else "silu"
    if vision.get("hidden_act", act) != act:
        raise UnsupportedModel(f"vision_config.hidden_act={vision['hidden_act']!r} is not supported")
    if vision.get("temporal_patch_size", 2) != 2 or vision.get("in_channels", vision.get("in_chans", 3)) != 3:
        raise UnsupportedModel(
            "vision_config: only RGB images in pairs of frames are supported (temporal_patch_size=2)"
        )
    width = vision["embed_dim" if is_older else "hidden_size"]
    out = vision.get("hidden_size" if is_older else "out_hidden_size", text["hidden_size"])
    if out != text["hidden_size"]:
        raise UnsupportedModel(f"the tower writes features of {out} numbers, and hidden_size is {text['hidden_size']}")
    levels = vision.get("deepstack_visual_indexes", [8, 16, 24]) if is_third else []
    if sorted({*levels} & {*range(vision["depth"])}) != list(levels) or len(levels) > text["num_hidden_layers"]:
        raise UnsupportedModel(
            f"deepstack_visual_indexes={shown(levels)} must be increasing layers of the tower, which has"
            f" {vision['depth']}, and no more than the decoder's {text['num_hidden_layers']} layers"
        )
    processor = published_processor(config["model_type"])
    tower = Vision(
        config=json.dumps(vision, sort_keys=True),
        gated=not is_older and not is_third,
        sections=tuple(sections),
        norm=(processor.mean, processor.std),
        depth=vision["depth"],
        width=width,
        ffn_width=int(width * vision["mlp_ratio"]) if is_older else vision["intermediate_size"],
        patch=vision.get("patch_size", processor.patch),
        merge=vision.get("spatial_merge_size", 2),
        token_id=config["image_token_id"],
        positions=vision.get("num_position_embeddings", 2304) if is_third else 0,
        levels=len(levels),
    )
    for key in ("use_sliding_window", *(["attention_bias"] if is_third else [])):
        if text.get(key):
            raise UnsupportedModel(f"{config['model_type']} with {key}=true is not supported")
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    settings |= {"qkv_bias": not is_third, "qk_norm": is_third}
    if config["model_type"] == "qwen3_vl_moe":
        settings |= expert_settings(text, width="moe_intermediate_size", renormalise=True)
    return Architecture(family=config["model_type"], tied=tied, vision=tower, **settings)


def _table(arch: Architecture) -> list[WeightRow]:
    assert arch.vision is not None
    shapes = arch.vision.shapes(arch.hidden_size)
    return [*decoder_table(arch), *(_TowerRow(name, (name,), shape=shape) for name, shape in shapes.items())]


VISION_MODELS = dict.fromkeys(
    ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), ModelFamily(_architecture, _table)
)
