"""Source: a checked model, whichever way it is stored, as a stream of Hugging Face tensors in blocks of rows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.convert import ConvertError, manifest
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.mapping import Row
from grpo_megatron.models.weights import bound_rows

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Source(ABC):
    """`folder` is what the user named, `data_folder` where the weights are, `hf_folder` where config.json is."""

    kind: str
    folder: Path
    data_folder: Path
    hf_folder: Path
    arch: Architecture
    config: dict[str, Any]
    dtypes: dict[str, torch.dtype]  # of every tensor that is stored
    num_files: int
    layout: str

    @property
    def rows(self) -> list[Row]:
        """The whole model's, in stream order."""
        return list(bound_rows(self.arch).values())

    @abstractmethod
    def blocks(self, row: Row) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, next block of its rows), name by name in the order of `row.hf`. Blocks are `span.blocks`."""

    @abstractmethod
    def check_content(self) -> bool:
        """Look for damage without a manifest; False where the format has no checksums. Raises ConvertError."""

    def dtype(self, wanted: str | None = None) -> torch.dtype:
        """The dtype of the result. Raises ConvertError when the tensors have several and none is `wanted`."""
        if wanted is not None:
            return FLOATS[wanted]
        counts = Counter(self.dtypes.values()).most_common()
        if len(counts) > 1:
            rare = [name for name, dtype in self.dtypes.items() if dtype == counts[-1][0]]
            shown = ", ".join(f"{short(dtype)} {count}" for dtype, count in counts)
            raise ConvertError(
                f"{self.folder}: tensors have several dtypes ({shown}; {rare[0]} is {short(counts[-1][0])});"
                " choose one with --dtype"
            )
        return counts[0][0]

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Of all Hugging Face tensors in `dtype`."""
        shapes = (shape for row in self.rows for shape in row.hf_shapes(self.arch))
        return sum(math.prod(shape) for shape in shapes) * dtype.itemsize

    def verification(self, wanted: bool = True) -> manifest.Verification | None:
        """Hashes being compared in a thread; without a manifest, what can be checked is checked now."""
        if not wanted:
            return None
        found = manifest.Verification(self.folder)
        if not found.exists:
            self.check_content()
        return found


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
