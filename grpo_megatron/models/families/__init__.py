"""Model families, one file each, with two functions: `architecture_from(config)` and `weight_table(arch)`.

`config` is the contents of config.json. To add a family, write the file and list it in `FAMILIES`: loader, converter,
export, sync and tests use that table.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_megatron.models.architecture import Architecture, UnsupportedModel, check_bounds
from grpo_megatron.models.families import llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from grpo_megatron.models.mapping import WeightRow, expand_table
from grpo_megatron.reading import ReadError
from grpo_megatron.reading.bounds import cut, shown
from grpo_megatron.reading.json_text import read_json

SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob")
MAX_CONFIG = 1 << 24  # bytes of a config.json

FAMILIES: dict[str, ModuleType] = {  # model_type of config.json -> family
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder. Raises ValueError that names what is wrong with it."""
    path = Path(folder) / "config.json"
    try:
        config = read_json(path, MAX_CONFIG)
    except OSError as error:
        raise ValueError(f"model folder {str(folder)!r}: cannot read config.json ({error.strerror})") from error
    except ReadError as error:
        raise ValueError(f"model folder {str(folder)!r}: config.json {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"model folder {str(folder)!r}: config.json is not an object")
    return config


def read_architecture(folder: Path) -> Architecture:
    """The architecture of a Hugging Face folder. Raises ValueError; UnsupportedModel for a family or feature."""
    return architecture_of(read_config(folder))


def architecture_of(config: dict[str, Any]) -> Architecture:
    """The architecture that a config.json describes, with sizes and numbers in their bounds. Raises UnsupportedModel."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnsupportedModel(
            f"model_type={shown(model_type)} is not supported (supported: {', '.join(sorted(FAMILIES))})"
        )
    for key in SWITCHES:
        if config.get(key) not in (None, True, False):  # bool("false") is true
            raise UnsupportedModel(f"config.json gives {key}={shown(config[key])}, not true or false")
    try:
        arch: Architecture = FAMILIES[model_type].architecture_from(config)
    except UnsupportedModel:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError, KeyError) as error:  # of a value of another type
        raise UnsupportedModel(f"config.json has a value that cannot be used ({cut(str(error))})") from error
    check_bounds(arch)
    return arch


def table_of(arch: Architecture) -> list[WeightRow]:
    """The weight table, in Megatron's names of the local layer spec, with {layer} and {expert} placeholders."""
    return FAMILIES[arch.family].weight_table(arch)  # type: ignore[no-any-return]


def hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face tensor of the model with its shape: what a folder or a weight stream must contain."""
    shapes: dict[str, tuple[int, ...]] = {}
    for row in expand_table(table_of(arch), arch):
        shapes.update(zip(row.hf, row.hf_shapes(arch), strict=True))
    return shapes
