"""Hugging Face safetensors <-> Megatron-Core distributed checkpoints, on a CPU, in bounded memory, without a model.

span.py              a tensor in a file, read in blocks of rows
hf.py, megatron.py   the two sources: what they hold, checked, as streams of Hugging Face tensors
shards.py, chunks.py the two writers
keys.py              where a row of the weight table lives in a distributed checkpoint
folder.py manifest.py what makes an output trustworthy: written beside, hashed, renamed
conversion.py comparison.py inspection.py cli.py   the four commands
"""

from __future__ import annotations


class ConvertError(ValueError):
    """Something the user can change: the message names it, and all of its kind. Nothing was written."""


def listed(heading: str, problems: list[str]) -> ConvertError:
    """One error that names every problem."""
    return ConvertError(heading + "".join(f"\n  {problem}" for problem in problems))
