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
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_megatron.convert import ConvertError, listing_error
from grpo_megatron.convert.output import HashedFiles, Progress
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import architecture_of, read_config
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
from grpo_megatron.models.weights.file_names import file_tensors
from grpo_megatron.models.weights.hf_folder import INDEX_FILE, SafetensorsFolder, tensor_problems
from grpo_megatron.models.weights.mxfp4 import is_mxfp4
from grpo_megatron.models.weights.stream import WeightsError, model_rows
from grpo_megatron.models.weights.table import Replicated, WeightRow
from grpo_megatron.storage.files import Verification

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
Shapes = dict[str, tuple[int, ...]]
Dtypes = dict[str, torch.dtype]
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EXTRAS_FILE = "extras.safetensors"  # beside the config.json of a converted checkpoint
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

    @cached_property
    def extras(self) -> SafetensorsFolder | None:
        """The files with the tensors of layers after the last one, which go along as they are; None: there are none."""
        if self.head is not None or not self.arch.has_extras or not any(self.hf_folder.glob("*.safetensors")):
            return None
        try:
            files = SafetensorsFolder(self.hf_folder)
        except WeightsError as error:
            raise ConvertError(str(error)) from error
        files.tensors = {name: tensor for name, tensor in files.tensors.items() if self.arch.is_extra(name)}
        return files if files.tensors else None

    def config_text(self, dtype: torch.dtype) -> bytes:
        """Returns the config.json of a result in `dtype`: byte by byte as it is, unless its dtype has changed."""
        key = "dtype" if "dtype" in self.config else "torch_dtype"
        if self.config.get(key) in (None, dtype_name(dtype)) and not is_mxfp4(self.config):
            return (self.hf_folder / "config.json").read_bytes()
        plain = {name: value for name, value in self.config.items() if name != "quantization_config"}
        return (json.dumps({**plain, key: dtype_name(dtype)}, indent=2) + "\n").encode()

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

    @property
    def extra_bytes(self) -> int:
        """The size of the tensors of layers after the last one."""
        tensors = self.extras.tensors.values() if self.extras is not None else ()
        return sum(math.prod(tensor.shape) * TORCH_DTYPES[tensor.dtype].itemsize for tensor in tensors)

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


# -- A Hugging Face folder. Headers and index must agree with each other and the weight table before anything is read --


class _Stored(NamedTuple):
    """`dtype` is a name where torch does not have it."""

    dtype: torch.dtype | str
    shape: tuple[int, ...]


class HFFolder(Source):
    """Reads headers only. Raises ConvertError, which names every tensor that is wrong, or UnsupportedModel."""

    kind = "hf"

    def __init__(self, folder: Path, family: str | None = None) -> None:
        self.folder = self.data_folder = self.hf_folder = self.tokenizer_folder = folder
        try:
            self.config = read_config(folder)
        except ValueError as error:
            raise ConvertError(str(error)) from error
        self.head = head_of_folder(self.config)
        start = None if self.head is None else read_start(folder, self.head, family)
        self.arch = architecture_of(self.config, family) if start is None else start.arch
        quantized = self.config.get("quantization_config")
        if quantized and not is_mxfp4(self.config):
            method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
            raise ConvertError(
                f"{folder}: quantization_config ({method}) is not supported; convert the unquantized model"
            )
        self.tensors = self._safetensors()
        if start is not None:  # transformers writes token classes without a bias, too
            self.head_rows = head_rows(start.num_labels, has_bias=start.has_bias and HEAD_BIAS in self.tensors)
        self._check()
        self.dtypes = {name: self.tensors[name].dtype for name in self.shapes()}  # type: ignore[misc] # `_check` has seen them
        self.layout = f"{self.num_files} file{'s' if self.num_files > 1 else ''}"
        self.layout += ", experts in MXFP4 (read as bfloat16)" if quantized else ""

    def read(self, name: str) -> Tensor:
        try:
            return self._files.read(name)
        except WeightsError as error:
            raise ConvertError(str(error)) from error

    def check_content(self) -> bool:
        return False  # safetensors has no checksums

    def _safetensors(self) -> dict[str, _Stored]:
        try:
            self._files = files = SafetensorsFolder(self.folder)
        except WeightsError as error:
            raise ConvertError(str(error)) from error
        if problems := files.index_problems():
            raise listing_error(f"{self.folder}: its safetensors files do not belong together:", problems)
        self.num_files = len(files.files)
        return {n: _Stored(TORCH_DTYPES.get(t.dtype, t.dtype), t.shape) for n, t in files.tensors.items()}

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        expected, stored = self.shapes(), {name: tensor.shape for name, tensor in self.tensors.items()}
        problems = tensor_problems(stored, expected, ["lm_head.weight"] if self.arch.tied else [], self.arch.is_extra)
        for name in expected.keys() & stored.keys():
            if (dtype := self.tensors[name].dtype) not in FLOATS.values():
                problems.append(f"{name} has dtype {dtype_name(dtype)}, supported: {', '.join(FLOATS)}")
        if problems:
            raise listing_error(f"{self.folder} does not hold the model of its config.json:", problems)
        has_copy = self.arch.tied and self.head is None and "lm_head.weight" in self.tensors
        if has_copy and not torch.equal(self.read("lm_head.weight"), self.read("model.embed_tokens.weight")):
            raise ConvertError(
                f"{self.folder}: config.json ties the embeddings, but lm_head.weight differs from"
                " model.embed_tokens.weight; set tie_word_embeddings=false, or remove lm_head.weight"
            )


# -- writing -----------------------------------------------------------------------------------------------------------


def plan_shards(shapes: Shapes, dtypes: Dtypes, shard_bytes: int) -> dict[str, Shapes]:
    """File -> tensors, in stream order. A file has at most `shard_bytes`, or one tensor."""
    groups, filled = list[Shapes]([{}]), 0
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * dtypes[name].itemsize
        if groups[-1] and filled + nbytes > shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = shape
        filled += nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups)}


def safetensors_header(shapes: Shapes, dtypes: Dtypes) -> bytes:
    """Returns the start of a safetensors file: the length of the JSON, then the JSON, padded to a multiple of 8 bytes."""
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtypes[name].itemsize
        entries[name] = {
            "dtype": names[dtypes[name]],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shards(
    source: Source, folder: Path, dtype: torch.dtype, shard_bytes: int, progress: Progress, *, only_extras: bool = False
) -> dict[str, str]:
    """Write all tensors of `source` as shards into `folder`, with an index if there are several. Returns file -> sha256.

    Those of layers after the last one keep their bits. `only_extras`: they alone are written. The library's own writer needs all
    tensors of a shard in memory. Here a shard's header is computed before its first byte is written.
    """
    family = str(source.config["model_type"])
    extras = source.extras.tensors if source.extras is not None else {}
    of_table = source.result_dtypes(dtype) | {name: TORCH_DTYPES[tensor.dtype] for name, tensor in extras.items()}
    tensors = ({} if only_extras else source.shapes()) | {name: tensor.shape for name, tensor in extras.items()}
    in_files = file_tensors(tensors, family)
    shapes = {name: tensor.shape for name, tensor in in_files.items()}
    dtypes = {name: of_table[tensor.parts[0]] for name, tensor in in_files.items()}

    def read(name: str) -> Tensor:
        return source.read(name) if name not in extras else source.extras.read(name)  # type: ignore[union-attr]

    shards = {EXTRAS_FILE: shapes} if only_extras else plan_shards(shapes, dtypes, shard_bytes)
    with HashedFiles(folder) as files:
        for file_name, shard in shards.items():
            files.begin(file_name)
            files.write(safetensors_header(shard, dtypes))
            for name, shape in shard.items():
                tensor = in_files[name].join(read)
                for first, last in row_blocks(shape):
                    block = tensor[first:last].to(dtypes[name]).contiguous().view(-1).view(torch.uint8)
                    files.write(memoryview(block.numpy()))  # type: ignore[arg-type]
                    progress.add(block.nbytes)
                files.wait()
                del tensor, block  # before the next one is read
    if len(shards) > 1:
        total = sum(math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items())
        weight_map = {name: file_name for file_name, shard in shards.items() for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return files.hashes
