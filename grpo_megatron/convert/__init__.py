"""Hugging Face safetensors <-> Megatron-Core distributed checkpoints, on a CPU, in bounded memory, without a model.

options.py      the options of the actions
conversion.py   to-megatron, to-hf and merge; inspection.py: verify and inspect, and the command
source.py       a model in either format as Hugging Face tensors; the kinds HFFolder and megatron.py, which write them too
adapters.py     adapters and their base, as a third kind
family.py       verify of one folder: a model family and transformers, the one file with a model
layout.py       names and places of the tensors in a distributed checkpoint
output.py       the output folder and its files, hashed while they are written; progress
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["ConvertError", "listing_error", "to_hf", "to_megatron"]


class ConvertError(ValueError):
    """A mistake that the user can correct. The message names every mistake of the same kind. Nothing was written."""


def listing_error(heading: str, problems: list[str]) -> ConvertError:
    """Returns one error that names every problem."""
    return ConvertError(heading + "".join(f"\n  {problem}" for problem in problems))


def to_megatron(source: Path | str, target: Path | str, **options: Any) -> None:
    """Does `convert to-megatron`, with its options as keywords: tp=2, dtype="bfloat16". Raises ConvertError, StorageError."""
    from grpo_megatron.convert.conversion import hf_to_megatron
    from grpo_megatron.convert.options import ToMegatronOptions

    hf_to_megatron(ToMegatronOptions(source=Path(source), target=Path(target), **options))


def to_hf(source: Path | str, target: Path | str, **options: Any) -> None:
    """Does `convert to-hf`, with its options as keywords: shard_size=1 << 30. Raises ConvertError, StorageError."""
    from grpo_megatron.convert.conversion import megatron_to_hf
    from grpo_megatron.convert.options import ToHfOptions

    megatron_to_hf(ToHfOptions(source=Path(source), target=Path(target), **options))
