"""Source: a checked model, whichever way it is stored, as Hugging Face tensors of which any rows can be read."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.convert import ConvertError, manifest
from grpo_megatron.convert.span import Memory, blocks
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.mapping import WeightRow
from grpo_megatron.models.weights import model_rows

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
    def rows(self) -> list[WeightRow]:
        """The whole model's, in stream order."""
        return list(model_rows(self.arch).values())

    def __init__(self) -> None:
        self._stored, self._block = Memory(), Memory()

    @abstractmethod
    def fill(self, name: str, first: int, last: int, out: Tensor) -> None:
        """Read rows first to last-1 of a Hugging Face tensor into contiguous memory of the stored dtype."""

    def read(self, name: str, first: int, last: int, out: Tensor) -> None:
        """`fill`, and the cast when `out` has another dtype."""
        if out.dtype == self.dtypes[name]:
            self.fill(name, first, last, out)
            return
        stored = self._stored.tensor(tuple(out.shape), self.dtypes[name])
        self.fill(name, first, last, stored)
        out.copy_(stored)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every Hugging Face tensor, in stream order."""
        return {name: shape for row in self.rows for name, shape in zip(row.hf, row.hf_shapes(self.arch), strict=True)}

    def blocks(self, name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
        """The whole tensor in `span.blocks`. Each is gone when the next one comes."""
        for first, last in blocks(shape):
            out = self._block.tensor((last - first, *shape[1:]), self.dtypes[name])
            self.fill(name, first, last, out)
            yield out

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
        return sum(math.prod(shape) for shape in self.shapes().values()) * dtype.itemsize

    @contextlib.contextmanager
    def checked(self, wanted: bool = True) -> Iterator[None]:
        """Hashes are compared in a thread while the caller works; raises ConvertError at the end when one differs.

        Without a manifest, what can be checked is checked before.
        """
        if not wanted:
            yield
            return
        verification = manifest.Verification(self.folder)
        try:
            if not verification.exists:
                self.check_content()
            yield
            verification.finish()
        finally:
            verification.stop()


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
