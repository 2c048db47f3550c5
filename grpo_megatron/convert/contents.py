"""The table of contents of a distributed checkpoint, read without running code from it (models/weights/plain_data.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_megatron.convert import ConvertError
from grpo_megatron.models.weights import plain_data
from grpo_megatron.storage import StorageError


def read_contents(path: Path) -> Any:
    """As `plain_data.read_table`; raises ConvertError."""
    try:
        return plain_data.read_table(path)
    except StorageError as error:
        raise ConvertError(str(error)) from error
