"""Hugging Face safetensors <-> Megatron-Core distributed checkpoints, on a CPU, in bounded memory, without a model.

cli.py          the command line: to-megatron, to-hf, verify, inspect
conversion.py   to-megatron and to-hf; inspection.py: verify and inspect
source.py       a model in either format as Hugging Face tensors; hf.py and megatron.py are its two kinds, and write them too
layout.py       names and places of the tensors in a distributed checkpoint
output.py       the output folder and its files, hashed while they are written; progress

From Python: `convert.to_megatron(hf_folder, out)` and `convert.to_hf(checkpoint, out)`, with the command's options as keywords.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_megatron.convert.conversion import to_hf, to_megatron

__all__ = ["ConvertError", "listing_error", "to_hf", "to_megatron"]


class ConvertError(ValueError):
    """A mistake that the user can correct. The message names every mistake of the same kind. Nothing was written."""


def listing_error(heading: str, problems: list[str]) -> ConvertError:
    """One error that names every problem."""
    return ConvertError(heading + "".join(f"\n  {problem}" for problem in problems))


def __getattr__(name: str) -> Any:
    """`to_hf` and `to_megatron` are imported when they are asked for: the modules behind them import this one."""
    if name not in ("to_hf", "to_megatron"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("grpo_megatron.convert.conversion"), name)
