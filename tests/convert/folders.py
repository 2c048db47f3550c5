"""Hugging Face folders for the converter's tests, made from the weight table alone: fast, any dtype, any config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from grpo_megatron.cli.main import main
from grpo_megatron.models.families import architecture_of, hf_shapes, table_of
from grpo_megatron.models.weights.file_names import file_tensors
from grpo_megatron.models.weights.table import expand_table
from tests import tiny
from tests.models.test_moe import MODELS

FAMILIES: dict[str, dict[str, Any]] = {**tiny.FAMILIES, **MODELS}  # dense, and mixtures of experts
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    config = {**tiny.COMMON, **FAMILIES[family], "hidden_act": "silu", "rms_norm_eps": 1e-6, **changes}
    config.setdefault("tie_word_embeddings", False)
    return config


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """The same architecture with small sizes, unquantised."""
    if "text_config" in config and "vision_config" in config:  # Qwen3-VL and Qwen3.5
        text = shrunk(config["text_config"])
        if "rope_scaling" in text:
            text["rope_scaling"] = {"mrope_interleaved": True, "mrope_section": [4, 2, 2]}
        tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 64}
        tower |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
        return {**config, "text_config": text, "vision_config": {**config["vision_config"], **tower}}
    changes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 48, "vocab_size": 101, "head_dim": 16}
    changes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    for key, size in (
        ("moe_intermediate_size", 24),
        ("num_experts", 4),
        ("num_local_experts", 4),
        ("num_experts_per_tok", 2),
        ("full_attention_interval", 2),
    ):
        if key in config:
            changes[key] = size
    if "kv_lora_rank" in config:
        del changes["head_dim"]
        changes |= {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "n_routed_experts": 8}
        changes |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12, "n_group": 4, "topk_group": 2}
        changes |= {"num_experts_per_tok": 3, "first_k_dense_replace": 1}
    if "vision_config" in config:
        tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 64}
        changes |= {"vision_config": {**config["vision_config"], **tower, "fullatt_block_indexes": [1]}}
        changes["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    return {key: value for key, value in {**config, **changes}.items() if key != "quantization_config"}


def write(
    folder: Path, config: dict[str, Any], dtype: str = "float32", num_files: int = 1, family: str | None = None
) -> Path:
    """A folder with random tensors of the shapes that the config needs, in `num_files` files."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(3)
    arch = architecture_of(config, family)
    constants = {name for row in expand_table(table_of(arch), arch) if row.is_constant for name in row.hf}
    tensors = {
        name: torch.randn(shape, generator=generator).to(torch.float32 if name in constants else DTYPES[dtype])
        for name, shape in hf_shapes(arch).items()
    }
    in_files = file_tensors(hf_shapes(arch), config["model_type"])
    tensors = {name: tensor.join(tensors.__getitem__) for name, tensor in in_files.items()}
    (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    put(folder, tensors, num_files)
    return folder


def put(folder: Path, tensors: dict[str, torch.Tensor], num_files: int = 1) -> None:
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {
        name: f"model-{i % num_files + 1:05d}-of-{num_files:05d}.safetensors" for i, name in enumerate(tensors)
    }
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        out |= load_file(file)
    return out


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert sorted(a) == sorted(b)
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


def convert(*arguments: Any) -> int:
    """Run the command line in this process."""
    return main(["convert", *map(str, arguments)])
