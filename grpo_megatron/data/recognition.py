"""Recognises the form of data files where `data.task` is not set: verl's rows, TRL's rows, or those of the default task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.data.row_file import open_rows

FORMS = {"verl": "reward_model.ground_truth", "trl": "prompt, and no question"}  # task -> what its rows are known by


def recognised_task(files: Sequence[Path]) -> str | None:
    """The task for the first row of the files; None: the default, or there is no row (which other checks report)."""
    for file in files:
        try:
            row = next(open_rows(file).rows(0, 1))
        except (ConfigError, StopIteration):
            continue
        return form_of_row(row) if isinstance(row, dict) else None
    return None


def form_of_row(row: Mapping[str, Any]) -> str | None:
    """A task of FORMS, or None."""
    rule = row.get("reward_model")
    if "prompt" in row and isinstance(rule, Mapping) and "ground_truth" in rule:
        return "verl"
    return "trl" if "prompt" in row and "question" not in row else None
