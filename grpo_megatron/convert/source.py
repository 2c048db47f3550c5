"""Source: a checked model in either format, as whole Hugging Face tensors; and the weight rows of a scalar head.

A model of any size needs the memory of a few tensors: they are read one after the other, in the order of the weight table.
"""

from __future__ import annotations

import contextlib
import json
import math
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
from grpo_megatron.models.heads.reward_folder import (
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
from grpo_megatron.models.weights.stream import model_rows
from grpo_megatron.models.weights.table import Replicated, WeightRow
from grpo_megatron.storage.files import Verification

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BLOCK_ELEMENTS = 1 << 22  # what is cast, compared or written at a time


def row_blocks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yields (first row, last row + 1) of each block of a tensor of this shape. A block has at least one row."""
    step = max(1, BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))
    for first in range(0, shape[0], step):
        yield first, min(first + step, shape[0])


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

    @property
    def weight_folders(self) -> tuple[Path, ...]:
        """The folders whose files make the weights."""
        return (self.data_folder,)

    def check_base(self) -> None:  # noqa: B027 - most models have none
        """Raise ConvertError unless the base of adapters is that of their training."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Reads a Hugging Face tensor in its stored dtype, on the CPU. Its memory is not written to; it may be a file's.

        Cheap only in the order of `shapes`. Raises ConvertError for a damaged file.
        """

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every Hugging Face tensor, in stream order."""
        return {name: shape for row in self.rows for name, shape in zip(row.hf, row.hf_shapes(self.arch), strict=True)}

    def config_text(self, dtype: torch.dtype) -> bytes:
        """Returns the config.json of a result in `dtype`: byte by byte as it is, unless its dtype has changed."""
        key = "dtype" if "dtype" in self.config else "torch_dtype"
        if self.config.get(key) in (None, dtype_name(dtype)):
            return (self.hf_folder / "config.json").read_bytes()
        return (json.dumps({**self.config, key: dtype_name(dtype)}, indent=2) + "\n").encode()

    @abstractmethod
    def check_content(self) -> bool:
        """Look for damage without a manifest; False where the format has no checksums. Raises ConvertError."""

    def complete(self, folder: Path) -> None:  # noqa: B027 - of a training step
        """Write the run's own settings into the exported folder, which has the companions. Raises ConfigError."""

    def dtype(self, wanted: str | None = None) -> torch.dtype:
        """Returns the dtype of the result: `wanted`, or that of the tensors. Raises ConvertError when these have several.

        Constants do not count: they are float32 in every result.
        """
        if wanted is not None:
            return FLOATS[wanted]
        constants = {name for row in self.rows if row.is_constant for name in row.hf}
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
        """Returns the dtype of every Hugging Face tensor of a result in `dtype`."""
        return {name: row.dtype(dtype) for row in self.rows for name in row.hf}

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Returns the size of all Hugging Face tensors in `dtype`."""
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


def dtype_name(dtype: torch.dtype | str) -> str:
    """Returns the name of a dtype in config.json: bfloat16."""
    return str(dtype).removeprefix("torch.")


# -- the scalar head of a critic or a reward model ---------------------------------------------------------------------
# A checkpoint has one row, score.weight [1, h], and for token classes score.bias [1], in float32. The Hugging Face folder of a
# process reward model has two labels, wrong and right: zeros, then this row (models/heads/reward_folder.py).


@dataclass(frozen=True)
class HeadRow(Replicated):
    """One row in Megatron's form; one row per label in the Hugging Face tensor, of which all but the last are zeros."""

    num_labels: int = 1

    def hf_shapes(self, arch: Architecture) -> tuple[tuple[int, ...], ...]:
        return ((self.num_labels, *self.local_shape(arch, 1)[1:]),)

    def local_shape(self, arch: Architecture, tp: int) -> tuple[int, ...]:
        return (1,) if self.hf[0] == HEAD_BIAS else (1, arch.hidden_size)

    def merge(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        out = shards[0].new_zeros(self.hf_shapes(arch)[0])
        out[-1:] = shards[0]
        return [out]


def head_rows(num_labels: int, *, has_bias: bool) -> list[WeightRow]:
    """Returns the rows of the head, which is float32 in a model of any dtype."""
    names = [HEAD, HEAD_BIAS] if has_bias else [HEAD]
    return [HeadRow(name, (name,), is_constant=True, num_labels=num_labels) for name in names]


def head_of_folder(config: dict[str, Any]) -> HeadKind | None:
    """Returns the kind of head of a Hugging Face folder, from the class that its config.json names."""
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if name.endswith(CLASSIFIER):
        return "outcome"
    if not name.endswith(TOKEN_CLASSIFIER):
        return None
    labels = config.get("id2label")
    return "value" if isinstance(labels, dict) and len(labels) == 1 else "process"


def read_start(folder: Path, kind: HeadKind, family: str | None) -> RewardFolder:
    """Reads the folder that a model with a head of this kind started from, or was exported to. Raises ConvertError."""
    if family is not None:
        raise ConvertError(f"--family {family}: {WHAT[kind]} has a family of this package; leave --family out")
    try:
        return read_reward_folder(folder, kind)
    except (ValueError, TypeError) as error:  # TypeError: id2label of another type
        raise ConvertError(f"{folder}: {error}") from error


def exported_text(start: RewardFolder) -> bytes:
    """Returns the config.json that the end of the run writes. Its dtype is that of the head, which a loader must not round."""
    config = exported_config(start)
    config.pop("torch_dtype", None)
    return (json.dumps({**config, "dtype": "float32"}, indent=2) + "\n").encode()
