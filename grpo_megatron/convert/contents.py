"""The table of contents of a distributed checkpoint (.metadata). It is a pickle, read without running code from it.

The unpickler accepts the plain records of torch.distributed.checkpoint and refuses every other name.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch

from grpo_megatron.convert import ConvertError

_KNOWN = {
    "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint.filesystem",
}  # fmt: skip
_KNOWN_NAMES = {
    ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"), ("builtins", "set"),
    ("pathlib", "PosixPath"), ("pathlib", "Path"), *(("torch", str(d).removeprefix("torch.")) for d in (
        torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)),
}  # fmt: skip


class _Placeholder:
    """Replaces Megatron-Core's own classes, which older files contain and the reader does not need."""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "megatron.core.dist_checkpointing.strategies.torch" and name.startswith("MCore"):
            return _Placeholder
        if (module, name) in _KNOWN_NAMES:
            return super().find_class(module, name)
        if module in _KNOWN:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:  # defined in that module, not imported by it
                return found
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a table of contents")


def read_contents(path: Path) -> Any:
    """torch's Metadata: sizes and dtypes of the tensors, and the file and offset of every chunk. Raises ConvertError."""
    try:
        found = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        for table in (found.state_dict_metadata, found.storage_data):
            if not isinstance(table, dict):
                raise TypeError(f"a table is {type(table).__name__}, not a dict")
    except Exception as error:
        raise ConvertError(f"{path}: not a readable table of contents ({type(error).__name__}: {error})") from error
    return found
