"""The scalar head of a critic or a reward model: its weight rows, and the config.json with which it is exported.

A checkpoint has one row, score.weight [1, h], and for token classes score.bias [1], in float32. The Hugging Face folder of a
process reward model has two labels, wrong and right: zeros, then this row (models/heads/folder.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.convert import ConvertError
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.heads.folder import (
    CLASSIFIER,
    HEAD,
    HEAD_BIAS,
    TOKEN_CLASSIFIER,
    WHAT,
    HeadKind,
    RewardFolder,
    exported_config,
    read_reward_folder,
)
from grpo_megatron.models.weights.table import Replicated, WeightRow


@dataclass(frozen=True)
class HeadRow(Replicated):
    """One row in Megatron's form; one row per label in the Hugging Face tensor, of which all but the last are zeros."""

    num_labels: int = 1

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return ((self.num_labels, *self.local_shape(arch, 1)[1:]),)

    def local_shape(self, arch: Architecture, tp: int) -> tuple[int, ...]:
        return (1,) if self.hf[0] == HEAD_BIAS else (1, arch.hidden_size)


def head_rows(num_labels: int, *, has_bias: bool) -> list[WeightRow]:
    """The rows of the head, which is float32 in a model of any dtype."""
    names = [HEAD, HEAD_BIAS] if has_bias else [HEAD]
    return [HeadRow(name, (name,), is_constant=True, num_labels=num_labels) for name in names]


def head_of_folder(config: dict[str, Any]) -> HeadKind | None:
    """The kind of head of a Hugging Face folder, from the class that its config.json names."""
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if name.endswith(CLASSIFIER):
        return "outcome"
    if not name.endswith(TOKEN_CLASSIFIER):
        return None
    labels = config.get("id2label")
    return "value" if isinstance(labels, dict) and len(labels) == 1 else "process"


def read_start(folder: Path, kind: HeadKind, family: str | None) -> RewardFolder:
    """The folder that a model with a head of this kind started from, or was exported to. Raises ConvertError."""
    if family is not None:
        raise ConvertError(f"--family {family}: {WHAT[kind]} has a family of this package; leave --family out")
    try:
        return read_reward_folder(folder, kind)
    except (ValueError, TypeError) as error:  # TypeError: id2label of another type
        raise ConvertError(f"{folder}: {error}") from error


def exported_text(start: RewardFolder) -> bytes:
    """The config.json that the end of the run writes. Its dtype is that of the head, which a loader must not round."""
    config = exported_config(start)
    config.pop("torch_dtype", None)
    return (json.dumps({**config, "dtype": "float32"}, indent=2) + "\n").encode()
