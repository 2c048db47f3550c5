"""Model families: from config.json to an Architecture (`architecture_from`) and its weights (`weight_table`).

`decoders.py` has the decoders that differ in a few fields, `deepseek.py` latent attention, `qwen_vl.py` images. To add a
family, write a `ModelFamily` and list it in `FAMILIES`: loader, converter, export, sync and tests use that table. A family of
the user's own is named by `model.family: my.module:FAMILY`, where FAMILY is a `ModelFamily`, or a module with the two functions.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_megatron.models.architecture import Architecture, UnsupportedModel, check_bounds
from grpo_megatron.models.families import deepseek, qwen_vl
from grpo_megatron.models.families.decoders import DECODERS, ModelFamily
from grpo_megatron.models.weights.table import WeightRow, expand_table
from grpo_megatron.registry import import_function
from grpo_megatron.untrusted import ReadError, cut, read_json, reason_of, shown

SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob")
MAX_CONFIG = 1 << 24  # bytes of a config.json

FAMILIES: dict[str, ModelFamily] = {  # model_type of config.json -> family
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), ModelFamily(deepseek.architecture_from)),
    **DECODERS,
    **qwen_vl.VISION_MODELS,
}


def find_family(name: str) -> ModelFamily:
    """Returns a family of this package by its model_type, or `package.module:FAMILY`. Raises UnsupportedModel."""
    if name in FAMILIES or ":" not in name:
        return _family_of(name)
    try:
        family: Any = import_function(name)
    except ValueError as error:
        raise UnsupportedModel(f"model family {error}") from error
    except Exception as error:  # whatever the user's module raises while it is imported
        raise UnsupportedModel(
            f"model family {name!r}: importing it raised {type(error).__name__}: {cut(str(error))}; fix the module"
        ) from error
    lacking = [part for part in ("architecture_from", "weight_table") if not callable(getattr(family, part, None))]
    if lacking:
        raise UnsupportedModel(
            f"model family {name!r} has no function {' and no '.join(lacking)}; name a"
            " grpo_megatron.models.families.ModelFamily"
        )
    return family  # type: ignore[no-any-return]


def _family_of(model_type: object) -> ModelFamily:
    """Returns the family that a config.json names. A file that came with weights must not import a module."""
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    raise UnsupportedModel(
        f"model_type={shown(model_type)} is not supported (supported: {', '.join(sorted(FAMILIES))}; or one of your own:"
        " model.family=my.module:FAMILY)"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the config.json of a Hugging Face folder. Raises ValueError that names what is wrong with it."""
    path = Path(folder) / "config.json"
    try:
        config = read_json(path, MAX_CONFIG)
    except OSError as error:
        raise ValueError(f"model folder {str(folder)!r}: cannot read config.json ({reason_of(error)})") from error
    except ReadError as error:
        raise ValueError(f"model folder {str(folder)!r}: config.json {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"model folder {str(folder)!r}: config.json is not an object")
    return config


def read_architecture(folder: Path, family: str | None = None) -> Architecture:
    """Reads the architecture of a Hugging Face folder. Raises ValueError; UnsupportedModel for a family or feature."""
    return architecture_of(read_config(folder), family)


def architecture_of(config: dict[str, Any], family: str | None = None) -> Architecture:
    """Returns the architecture that a config.json describes, with sizes and numbers in their bounds. Raises UnsupportedModel.

    `family`: `package.module:FAMILY`, or None for the one that model_type names.
    """
    reader = _family_of(config.get("model_type")) if family is None else find_family(family)
    for key in SWITCHES:
        if config.get(key) not in (None, True, False):  # bool("false") is true
            raise UnsupportedModel(f"config.json gives {key}={shown(config[key])}, not true or false")
    try:
        arch = reader.architecture_from(config)
    except UnsupportedModel:
        raise
    except KeyError as error:
        raise UnsupportedModel(f"config.json has no {error.args[0]!r}") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:  # of a value of another type
        sizes = {key: value for key, value in config.items() if re.match("num_|hidden_size|.*_(size|dim)$", key)}
        odd = [f"{key}={shown(v)}" for key, v in sizes.items() if v is not None and (type(v) is not int or v < 1)]
        where = f"a value that cannot be used{': ' if odd else ''}{', '.join(odd)}"
        raise UnsupportedModel(f"config.json has {where} ({cut(str(error))})") from error
    if not isinstance(arch, Architecture):
        raise UnsupportedModel(
            f"model family {family!r}: architecture_from returned a {type(arch).__name__}, not a"
            " grpo_megatron.models.architecture.Architecture"
        )
    if family is not None:
        arch = replace(arch, family=family)  # by which `table_of` finds it again
    check_bounds(arch)
    return arch


def table_of(arch: Architecture) -> list[WeightRow]:
    """Returns the weight table, in Megatron's names of the local layer spec, with {layer} and {expert} placeholders."""
    return find_family(arch.family).weight_table(arch)  # type: ignore[no-any-return]


def hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Returns every Hugging Face tensor of the model with its shape. A folder and a weight stream have exactly these."""
    shapes: dict[str, tuple[int, ...]] = {}
    for row in expand_table(table_of(arch), arch):
        shapes.update(zip(row.hf, row.hf_shapes(arch), strict=True))
    return shapes
