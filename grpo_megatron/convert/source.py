"""Source: a checked model in either format, as Hugging Face tensors of which any rows can be read."""

from __future__ import annotations

import contextlib
import json
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.convert import ConvertError
from grpo_megatron.convert.span import ReusedMemory, row_blocks
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.heads.folder import HeadKind
from grpo_megatron.models.weights.load import model_rows
from grpo_megatron.models.weights.table import WeightRow
from grpo_megatron.storage.manifest import Verification

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Source(ABC):
    """`folder` is the path that the user gave; `data_folder` has the weights, `hf_folder` has config.json.

    `head` is None for a language model. Otherwise `arch` has no output head, and `head_rows` are those of the scalar head.
    """

    kind: str
    folder: Path
    data_folder: Path
    hf_folder: Path
    tokenizer_folder: Path
    arch: Architecture
    config: dict[str, Any]
    dtypes: dict[str, torch.dtype]  # as stored, of every Hugging Face tensor
    num_files: int
    layout: str
    head: HeadKind | None = None
    head_rows: Sequence[WeightRow] = ()

    @property
    def rows(self) -> list[WeightRow]:
        """The weight table rows of the whole model, in stream order."""
        return [*model_rows(self.arch).values(), *self.head_rows]

    def __init__(self) -> None:
        self._stored, self._block = ReusedMemory(), ReusedMemory()

    @abstractmethod
    def fill(self, name: str, first: int, last: int, out: Tensor) -> None:
        """Read rows first to last-1 of a Hugging Face tensor into contiguous memory of the stored dtype."""

    def read(self, name: str, first: int, last: int, out: Tensor) -> None:
        """`fill`, with a cast if `out` has another dtype."""
        if out.dtype == self.dtypes[name]:
            self.fill(name, first, last, out)
            return
        stored = self._stored.tensor(tuple(out.shape), self.dtypes[name])
        self.fill(name, first, last, stored)
        out.copy_(stored)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every Hugging Face tensor, in stream order."""
        return {name: shape for row in self.rows for name, shape in zip(row.hf, row.hf_shapes(self.arch), strict=True)}

    def blocks(self, name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
        """The whole tensor, block by block (`row_blocks`). All blocks share memory: each overwrites the previous one."""
        for first, last in row_blocks(shape):
            out = self._block.tensor((last - first, *shape[1:]), self.dtypes[name])
            self.fill(name, first, last, out)
            yield out

    def config_text(self, dtype: torch.dtype) -> bytes:
        """The config.json of a result in `dtype`: byte by byte as it is, unless its dtype has changed."""
        key = "dtype" if "dtype" in self.config else "torch_dtype"
        if self.config.get(key) in (None, dtype_name(dtype)):
            return (self.hf_folder / "config.json").read_bytes()
        return (json.dumps({**self.config, key: dtype_name(dtype)}, indent=2) + "\n").encode()

    @abstractmethod
    def check_content(self) -> bool:
        """Look for damage without a manifest; False where the format has no checksums. Raises ConvertError."""

    def constants(self) -> set[str]:
        """The Hugging Face tensors that are float32 in a model of any dtype."""
        return {name for row in self.rows if row.is_constant for name in row.hf}

    def dtype(self, wanted: str | None = None) -> torch.dtype:
        """The dtype of the result: `wanted`, or that of the tensors. Raises ConvertError when these have several.

        Constants do not count: they are float32 in every result.
        """
        if wanted is not None:
            return FLOATS[wanted]
        constants = self.constants()
        dtypes = {name: dtype for name, dtype in self.dtypes.items() if name not in constants}
        counts = Counter(dtypes.values()).most_common()
        if len(counts) > 1:
            rare = [name for name, dtype in dtypes.items() if dtype == counts[-1][0]]
            shown = ", ".join(f"{dtype_name(dtype)} {count}" for dtype, count in counts)
            raise ConvertError(
                f"{self.folder}: tensors have several dtypes ({shown}; {rare[0]} is {dtype_name(counts[-1][0])});"
                " choose one with --dtype"
            )
        return counts[0][0]

    def result_dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Of every Hugging Face tensor of a result in `dtype`."""
        return {name: row.dtype(dtype) for row in self.rows for name in row.hf}

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Size of all Hugging Face tensors in `dtype`."""
        dtypes = self.result_dtypes(dtype)
        return sum(math.prod(shape) * dtypes[name].itemsize for name, shape in self.shapes().items())

    @contextlib.contextmanager
    def checked(self, wanted: bool = True) -> Iterator[None]:
        """Compare the hashes in a thread during the block. Raises StorageError at its end when one differs.

        Without a manifest the format's own checksums are compared before the block. `wanted` False: nothing is compared.
        """
        if not wanted:
            yield
            return
        verification = Verification(self.folder)
        try:
            if not verification.exists:
                self.check_content()
            yield
            verification.finish()
        finally:
            verification.stop()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
