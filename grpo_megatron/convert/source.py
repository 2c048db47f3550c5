"""Source: a checked model in either format, as Hugging Face tensors of which any rows can be read."""

from __future__ import annotations

import contextlib
import json
import math
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from grpo_megatron.models.weights.load import model_rows
from grpo_megatron.models.weights.table import Replicated, WeightRow
from grpo_megatron.storage.manifest import Verification

# -- A contiguous tensor at some offset of a file, of which rows are read on request -----------------------------------
# It uses plain reads into reused memory, not a memory map. The pages of a map count as memory of the process: a 70B model
# has 140 GB of them. Allocating memory for every block would take longer than reading the block.

BLOCK_ELEMENTS = 1 << 21  # 4 MiB of bfloat16: a few blocks fit into the processor's cache


def row_blocks(shape: tuple[int, ...], elements: int = 0) -> Iterator[tuple[int, int]]:
    """(first row, last row + 1) of each block of a tensor of this shape. A block has at least one row."""
    step = max(1, (elements or BLOCK_ELEMENTS) // max(1, math.prod(shape[1:])))
    for first in range(0, shape[0], step):
        yield first, min(first + step, shape[0])


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class ReusedMemory:
    """Memory for one tensor at a time, allocated once and reused."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous, uninitialised tensor. It overwrites the previous one."""
        nbytes = math.prod(shape) * dtype.itemsize
        if len(self._memory) < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8)
        return self._memory[:nbytes].view(dtype).view(shape)


@dataclass(frozen=True)
class Span:
    """A contiguous tensor at `offset` of a file."""

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read_into(self, first: int, last: int, out: Tensor) -> None:
        """Read rows first to last-1 into a contiguous tensor of this dtype. Raises ConvertError when the file is too short."""
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        view, done = as_bytes(out), 0
        assert len(view) == (last - first) * row_bytes and out.dtype == self.dtype
        try:
            with self.path.open("rb", buffering=0) as file:
                start = file.seek(self.offset + first * row_bytes)
                # most often the next read is of the next bytes: let the disk read them ahead
                os.posix_fadvise(file.fileno(), start + len(view), len(view), os.POSIX_FADV_WILLNEED)
                while done < len(view) and (count := file.readinto(view[done:])):
                    done += count
        except OSError as error:
            raise ConvertError(f"{self.path}: cannot read ({error.strerror})") from error
        if done < len(view):
            raise ConvertError(f"{self.path}: truncated, {len(view) - done} bytes short at byte {self.offset}")

    def rows(self, first: int, last: int) -> Tensor:
        """Rows first to last-1, in new memory."""
        out = torch.empty((last - first, *self.shape[1:]), dtype=self.dtype)
        self.read_into(first, last, out)
        return out

    # The methods of a safetensors slice that a weight table row uses.

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        if isinstance(index, slice) and index.step is None:
            first, last, _ = index.indices(self.shape[0])
            return self.rows(first, max(first, last))
        return self.rows(0, self.shape[0])[index]


@dataclass(frozen=True)
class Resident:
    """A tensor of an unpickled file, memory-mapped by torch, with the interface of a Span."""

    tensor: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def read_into(self, first: int, last: int, out: Tensor) -> None:
        out.copy_(self.tensor[first:last])

    def rows(self, first: int, last: int) -> Tensor:
        return self.tensor[first:last].contiguous()

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]


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


# -- The scalar head of a critic or a reward model: its weight rows, and the config.json with which it is exported -----
# A checkpoint has one row, score.weight [1, h], and for token classes score.bias [1], in float32. The Hugging Face folder of a
# process reward model has two labels, wrong and right: zeros, then this row (models/heads/folder.py).


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
