"""A Megatron-Core distributed checkpoint as a source: converted, or written by training in any layout.

The tensors are read from the files chunk by chunk, without Megatron and without a model. contents.py reads the table of
contents and unpickles only torch's own records.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import json
import math
import os
import pickle
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from grpo_megatron.convert import ConvertError, listing_error
from grpo_megatron.convert.hf import HFFolder
from grpo_megatron.convert.layout import (
    Place,
    common_state,
    extra_state_keys,
    hf_runs,
    megatron_runs,
    places,
    tracked_folder,
    whole_shape,
    written_places,
)
from grpo_megatron.convert.output import Output, Progress
from grpo_megatron.convert.source import (
    FLOATS,
    HeadRow,
    ReusedMemory,
    Source,
    Span,
    as_bytes,
    dtype_name,
    exported_text,
    head_rows,
    read_start,
    row_blocks,
)
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import architecture_of, read_config
from grpo_megatron.models.heads.folder import HEAD, HEAD_BIAS, HeadKind
from grpo_megatron.models.weights import plain_data
from grpo_megatron.models.weights.table import QKV, Vocabulary, WeightRow
from grpo_megatron.reading import read_json
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.run_files import CRITIC_FILE, PAIRS_FILE, STEP_FILE

# -- A torch archive (a zip file that holds one tensor) at some offset of a file: where the elements of the tensor are -

FRAMED_BYTES = 32 << 20  # larger tensors are not compared with `archive_frame`, which makes the whole archive in memory


class _View(io.RawIOBase):
    """A file object that shows only the bytes of one archive within a file."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning of the archive")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        self._file.seek(self._start + self._at)
        count = int(self._file.readinto(view[: max(0, min(len(view), self._length - self._at))]))
        self._at += count
        return count


def _data_entry(view: _View) -> zipfile.ZipInfo:
    with zipfile.ZipFile(view) as archive:
        found = [info for info in archive.infolist() if "/data/" in info.filename]
    if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"an archive of {len(found)} storages")
    return found[0]


def _data_start(view: _View, info: zipfile.ZipInfo) -> int:
    view.seek(info.header_offset + 26)  # lengths of name and extra field, then both, then the data
    name_length, extra_length = (int.from_bytes(view.read(2), "little") for _ in range(2))
    return info.header_offset + 30 + name_length + extra_length


@functools.lru_cache(maxsize=64)
def archive_frame(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """The bytes that torch.save writes before and after the elements of a tensor of this shape and dtype.

    Without checksums they do not depend on the elements, so that elements can be copied from file to file without torch.save.
    """
    checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # the manifest's sha256 is stronger
    try:
        whole = io.BytesIO()
        torch.save(torch.zeros(shape, dtype=dtype), whole)
    finally:
        torch.serialization.set_crc32_options(checksums)
    view = _View(whole, 0, len(whole.getbuffer()))
    start, count = _data_start(view, _data_entry(view)), math.prod(shape) * dtype.itemsize
    return bytes(whole.getbuffer()[:start]), bytes(whole.getbuffer()[start + count :])


def _is_framed(file: Any, start: int, length: int, frame: tuple[bytes, bytes]) -> bool:
    before, after = frame
    file.seek(start)
    if file.read(len(before)) != before:
        return False
    file.seek(start + length - len(after))
    return bool(file.read(len(after)) == after)


def locate_tensor(path: Path, start: int, length: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Span:
    """The elements of the archive. Only its structure is read. Raises ConvertError when it is damaged."""
    nbytes = math.prod(sizes) * dtype.itemsize
    try:
        with path.open("rb") as file:
            if nbytes <= FRAMED_BYTES:  # the common and fast case: the archive has exactly torch's bytes
                expected = archive_frame(sizes, dtype)
                if length == nbytes + sum(map(len, expected)) and _is_framed(file, start, length, expected):
                    return Span(path, start + len(expected[0]), dtype, sizes)
            view = _View(file, start, length)
            info = _data_entry(view)
            view.seek(0)
            tensor = torch.load(view, map_location="meta", weights_only=True)  # type: ignore[arg-type]
            if not isinstance(tensor, Tensor) or tensor.storage_offset() or tensor.nbytes != info.file_size:
                raise ValueError("the archive does not hold exactly one whole tensor")
            if tuple(tensor.shape) != sizes or not tensor.is_contiguous():
                raise ValueError(f"the archive holds a tensor of shape {list(tensor.shape)} instead of {list(sizes)}")
            offset = start + _data_start(view, info)
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise ConvertError(f"{path}: damaged at byte {start} ({str(error).splitlines()[0]})") from error
    return Span(path, offset, tensor.dtype, sizes)


def has_valid_checksum(path: Path, start: int, length: int, span: Span) -> bool:
    """Whether the archive's checksum agrees with its data. True as well when the writer left the checksum out."""
    with path.open("rb") as file:
        expected = _data_entry(_View(file, start, length)).CRC
    flat = replace(span, dtype=torch.uint8, shape=(span.nbytes,))
    crc = 0
    for first, last in row_blocks(flat.shape):
        crc = zlib.crc32(as_bytes(flat.rows(first, last)), crc)
    return not expected or crc == expected


# -- The table of contents of a distributed checkpoint, read without running code from it (models/weights/plain_data.py) -------


def read_contents(path: Path) -> Any:
    """As `plain_data.read_table`; raises ConvertError."""
    try:
        return plain_data.read_table(path)
    except StorageError as error:
        raise ConvertError(str(error)) from error


# -- Origin: the training step that a checkpoint belongs to, and which of its models the checkpoint holds --------------
# step_000020/state                 policy          beside trainer.json
# step_000020/critic/state          critic          beside critic.json
# step_000020/reward_model/state    reward_model    beside pairs.json

PartName = Literal["policy", "critic", "reward_model"]
MARK_FILES: dict[PartName, str] = {"policy": STEP_FILE, "critic": CRITIC_FILE, "reward_model": PAIRS_FILE}


@dataclass(frozen=True)
class Origin:
    """`folder` is the part's. `config` is the run's; empty where trainer.json cannot be read."""

    folder: Path
    part: PartName | None
    config: dict[str, Any]

    def start(self) -> Path | None:
        """The Hugging Face folder that the model started from. None: the config does not say."""
        keys = {"critic": "critic", "reward_model": "reward_model"}
        path = self._path(keys[self.part], "path") if self.part in keys else None
        return path or (None if self.part == "reward_model" else self._path("model", "path"))

    def tokenizer(self) -> Path | None:
        """The folder whose tokenizer the run exports. None: the config does not say."""
        return self._path("model", "tokenizer_path") or self._path("model", "path")

    def family(self) -> str | None:
        """`model.family`. None: the key is not set."""
        family = self._value("model", "family")
        return family if isinstance(family, str) else None

    def head(self, keys: set[str]) -> HeadKind | None:
        """The kind of scalar head of a checkpoint with these tensors. None: a language model. Raises ConvertError."""
        if self.part == "critic":
            return "value"
        if self.part == "reward_model":
            return "outcome"
        if HEAD not in keys:
            return None
        if HEAD_BIAS not in keys:
            return "outcome"
        if self.part == "policy":
            return "process"
        raise ConvertError(
            f"{self.folder} has neither {CRITIC_FILE} nor {STEP_FILE}: its scalar head may be of a critic or of a process"
            " reward model, which are exported differently; put back the file that the run wrote beside state/"
        )

    def _value(self, section: str, key: str) -> Any:
        values = self.config.get(section)
        return values.get(key) if isinstance(values, dict) else None

    def _path(self, section: str, key: str) -> Path | None:
        value = self._value(section, key)
        return self._resolved(Path(value)) if isinstance(value, str) else None

    def _resolved(self, path: Path) -> Path:
        """A relative path belongs to the folder that the run was started in, which may not be the current one.

        That folder is found where `trainer.output_dir` is relative too: it is above the checkpoint.
        """
        output_dir = self._value("trainer", "output_dir")
        if path.is_absolute() or not isinstance(output_dir, str) or Path(output_dir).is_absolute():
            return path
        for folder in self.folder.resolve().parents:
            if (started_in := _without_end(folder, Path(output_dir))) is not None and (started_in / path).is_dir():
                return Path(os.path.relpath(started_in / path))
        return path


def _without_end(folder: Path, end: Path) -> Path | None:
    """`folder` without its last parts, if they are those of `end`."""
    parts = [part for part in end.parts if part != "."]
    if not parts or ".." in parts or list(folder.parts[-len(parts) :]) != parts:
        return None
    return Path(*folder.parts[: -len(parts)])


def read_origin(data_folder: Path) -> Origin:
    """Of a checkpoint whose files are in `data_folder`."""
    folder = data_folder.parent if data_folder.name == "state" else data_folder
    part = next((part for part, mark in MARK_FILES.items() if (folder / mark).exists()), None)
    step = folder.parent if part in ("critic", "reward_model") else folder
    try:
        config = read_json(step / STEP_FILE)["config"]
    except (OSError, ValueError, KeyError, TypeError):
        config = None
    return Origin(folder, part, config if isinstance(config, dict) else {})


FORMAT_FILE, TRAINER_FILE = "metadata.json", "trainer.json"


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """A stored part of a tensor. `offsets` and `sizes` include the stacked axes; `start` and `length` are bytes in the file."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    start: int
    length: int


class MegatronFolder(Source):
    """`folder` is a distributed checkpoint, or has one: in state/ a training step, or its critic/ or reward_model/, and in
    release/ or iter_*/ a folder of Megatron-LM.

    `hf` has config.json and the tokenizer, if the checkpoint does not. `family` None: that of the training run, or the one
    that config.json names. Raises ConvertError, which names every wrong tensor.
    """

    kind = "megatron"

    def __init__(self, folder: Path, hf: Path | None = None, family: str | None = None) -> None:
        super().__init__()
        self.folder = folder
        self.data_folder = folder
        if not (folder / FORMAT_FILE).exists():
            self.data_folder = tracked_folder(folder) or folder / "state"
        origin = read_origin(self.data_folder)
        self.hf_folder = self.tokenizer_folder = hf or self._find_hf(origin)
        try:
            self.config = read_config(self.hf_folder)
        except ValueError as error:
            raise ConvertError(f"{error}; name the Hugging Face folder with --hf") from error
        self._check_format()
        metadata = read_contents(self.data_folder / ".metadata")
        self._sizes = {k: v for k, v in metadata.state_dict_metadata.items() if isinstance(v, TensorStorageMetadata)}
        self.head = origin.head(set(self._sizes))
        if self.head is None:
            self.arch = architecture_of(self.config, family or origin.family())
        else:
            self._start = read_start(self.hf_folder, self.head, family)
            self.arch = self._start.arch
            self.head_rows = head_rows(2 if self.head == "process" else 1, has_bias=self._start.has_bias)
            self.tokenizer_folder = hf or self._find_tokenizer(origin)
        self._chunks: dict[str, list[_Chunk]] = {}
        for where, info in metadata.storage_data.items():
            if where.fqn in self._sizes:
                chunk = self._chunk_of(where, info)
                self._chunks.setdefault(where.fqn, []).append(chunk)
        self._where: dict[str, Place] = {}
        self._spans: dict[_Chunk, Span] = {}
        self._columns = ReusedMemory()
        self._owners = {name: (row, part) for row in self.rows for part, name in enumerate(row.hf)}
        self._check()
        self._layer_chunks = self._chunks_by_layer()

    def _find_hf(self, origin: Origin) -> Path:
        if (self.folder / "hf" / "config.json").exists():
            return self.folder / "hf"
        if (start := origin.start()) is None:
            raise ConvertError(
                f"{self.folder} has neither hf/config.json nor a {TRAINER_FILE} that names its model; give --hf FOLDER"
            )
        return start

    def _find_tokenizer(self, origin: Origin) -> Path:
        folder = origin.tokenizer() or self.hf_folder
        if not folder.is_dir():
            raise ConvertError(
                f"{str(folder)!r} has the tokenizer of the run, and is not there; name a folder with tokenizer and"
                " config.json with --hf"
            )
        return folder

    def _check_format(self) -> None:
        try:
            found = read_json(self.data_folder / FORMAT_FILE)
            backend, version = found["sharded_backend"], found["sharded_backend_version"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConvertError(
                f"{self.folder}: no Megatron-Core distributed checkpoint ({FORMAT_FILE}: {error})"
            ) from error
        if (backend, version) != ("torch_dist", 1):
            raise ConvertError(
                f"{self.data_folder}: format {backend} {version} is not supported (supported: torch_dist 1)"
            )

    def _chunk_of(self, where: Any, info: Any) -> _Chunk:
        stored = self._sizes[where.fqn].chunks
        sizes = next(tuple(c.sizes) for c in stored if where.offset is None or c.offsets == where.offset)
        offsets = tuple(where.offset) if where.offset is not None else (0,) * len(sizes)
        if Path(info.relative_path).name != info.relative_path:
            raise ConvertError(
                f"{self.data_folder}: {where.fqn} is in {info.relative_path!r} according to .metadata, outside the folder"
            )
        return _Chunk(where.fqn, offsets, sizes, self.data_folder / info.relative_path, info.offset, info.length)

    # -- checks --------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        problems: list[str] = []
        used: set[str] = set()
        for row in self.rows:
            place = next((p for p in places(row, self.arch) if p.key in self._sizes), None)
            if place is None:
                problems.append(f"missing {row.megatron}")
                continue
            used |= {p.key for p in places(row, self.arch)}
            self._where[row.megatron] = place
            problems += self._wrong_shape(row, place)
        of_model = {key for key in self._sizes if key.startswith(("decoder.", "embedding.", "output_layer.", "score."))}
        problems += [f"unexpected {key}" for key in sorted(of_model - used)]
        for path, end in self._ends().items():
            size = path.stat().st_size if path.exists() else -1
            if size < end:
                problems.append(
                    f"missing file {path.name}" if size < 0 else f"{path.name} is truncated: {size} of {end} bytes"
                )
        if problems:
            raise listing_error(
                f"{self.folder} does not hold the model of {self.hf_folder / 'config.json'}:", _unique(problems)
            )
        self.num_files = len(self._ends())
        self.dtypes = {}
        for row in self.rows:
            dtype = self._sizes[self._where[row.megatron].key].properties.dtype
            self.dtypes.update(dict.fromkeys(row.hf, dtype))
        wrong = {d for d in self.dtypes.values() if d not in FLOATS.values()}
        if wrong:
            raise ConvertError(
                f"{self.folder}: dtype {', '.join(map(dtype_name, wrong))}; supported: {', '.join(FLOATS)}"
            )
        self.layout = self._layout()

    def _wrong_shape(self, row: WeightRow, place: Place) -> list[str]:
        size, wanted = tuple(self._sizes[place.key].size), (*place.stack, *whole_shape(row, self.arch))
        compared = size
        if isinstance(row, Vocabulary) and len(size) == len(wanted) and size[0] >= wanted[0]:
            compared = (wanted[0], *size[1:])  # without the padding of the layout that wrote it
        if compared != wanted:
            return [f"{place.key} has shape {list(size)}, expected {list(wanted)}"]
        volume = sum(torch.Size(chunk.sizes).numel() for chunk in self._chunks.get(place.key, []))
        if volume != torch.Size(size).numel():
            return [f"{place.key} has chunks of {volume} elements in total, expected {torch.Size(size).numel()}"]
        return []

    def _chunks_by_layer(self) -> dict[tuple[str, tuple[int, ...]], list[_Chunk]]:
        """(key, index along the stacked axes) -> the chunks that overlap it."""
        found: dict[tuple[str, tuple[int, ...]], list[_Chunk]] = {}
        for key, depth in {place.key: len(place.stack) for place in self._where.values()}.items():
            for chunk in self._chunks[key]:
                ranges = (range(o, o + s) for o, s in zip(chunk.offsets[:depth], chunk.sizes[:depth], strict=True))
                for index in itertools.product(*ranges):
                    found.setdefault((key, index), []).append(chunk)
        return found

    def _ends(self) -> dict[Path, int]:
        """File -> the byte after its last chunk: the least size that it can have."""
        ends: dict[Path, int] = {}
        for place in self._where.values():
            for chunk in self._chunks.get(place.key, []):
                ends[chunk.path] = max(ends.get(chunk.path, 0), chunk.start + chunk.length)
        return ends

    def _layout(self) -> str:
        cut = Counter(len(self._chunks[p.key]) // max(1, torch.Size(p.stack).numel()) for p in self._where.values())
        objects = "with optimizer" if any(key.startswith("optimizer") for key in self._sizes) else "weights only"
        return f"{self.num_files} files, {objects}, up to {max(cut)} chunks per tensor; loads in any layout"

    # -- reading -------------------------------------------------------------------------------------------------------

    def config_text(self, dtype: torch.dtype) -> bytes:
        return super().config_text(dtype) if self.head is None else exported_text(self._start)

    def fill(self, name: str, first: int, last: int, out: Tensor) -> None:
        row, part = self._owners[name]
        if isinstance(row, HeadRow):
            out.zero_()
            if last == row.num_labels:
                self._fill(self._where[row.megatron], 0, 1, out[-1:])
            return
        done = 0
        for low, high in megatron_runs(row, self.arch, part, first, last):
            self._fill(self._where[row.megatron], low, high, out[done : done + high - low])
            done += high - low

    def _fill(self, place: Place, first: int, last: int, out: Tensor) -> None:
        """Read rows of a Megatron tensor of all ranks from the chunks that overlap them."""
        depth = len(place.stack)
        filled = 0
        for chunk in self._layer_chunks.get((place.key, place.index), []):
            low, high = chunk.offsets[depth], chunk.offsets[depth] + chunk.sizes[depth]
            a, b = max(first, low), min(last, high)
            if a >= b:
                continue
            inner = tuple(
                slice(o, o + s) for o, s in zip(chunk.offsets[depth + 1 :], chunk.sizes[depth + 1 :], strict=True)
            )
            target = out[(slice(a - first, b - first), *inner)]
            span, start = self._rows_of(chunk, place.index)
            if target.is_contiguous():
                span.read_into(start + a - low, start + b - low, target)
            else:  # columns of a tensor-parallel rank
                columns = self._columns.tensor(tuple(target.shape), span.dtype)
                span.read_into(start + a - low, start + b - low, columns)
                target.copy_(columns)
            filled += target.numel()
        if filled != out.numel():
            raise ConvertError(
                f"{self.folder}: the chunks of {place.key} leave gaps or overlap at rows {first} to {last}"
            )

    def _rows_of(self, chunk: _Chunk, index: tuple[int, ...]) -> tuple[Span, int]:
        """A chunk, which may span several layers (and experts), as rows; and the row at which this layer begins."""
        span = self._span(chunk)
        flat = 0
        for i, offset, size in zip(index, chunk.offsets, chunk.sizes, strict=False):
            flat = flat * size + i - offset
        tail = chunk.sizes[len(index) + 1 :]
        rows = math.prod(chunk.sizes[: len(index) + 1])
        return dataclasses.replace(span, shape=(rows, *tail)), flat * chunk.sizes[len(index)]

    def _span(self, chunk: _Chunk) -> Span:
        if chunk not in self._spans:
            dtype = self._sizes[chunk.key].properties.dtype
            self._spans[chunk] = locate_tensor(chunk.path, chunk.start, chunk.length, chunk.sizes, dtype)
        return self._spans[chunk]

    def check_content(self) -> bool:
        """Compare every chunk's checksum, which finds flipped bits without a manifest."""
        if self.hf_folder == self.folder / "hf":
            raise ConvertError(
                f"{self.folder} has no manifest.json any more, and no other checksums; --no-hashes reads it unchecked"
            )
        problems = [
            f"{chunk.path.name}: the checksum of {key} at byte {chunk.start} differs"
            for key in {place.key: None for place in self._where.values()}
            for chunk in self._chunks[key]
            if not has_valid_checksum(chunk.path, chunk.start, chunk.length, self._span(chunk))
        ]
        if problems:
            raise listing_error(f"{self.folder} is damaged:", problems)
        return True


def _unique(problems: list[str]) -> list[str]:
    return list(dict.fromkeys(problems))


# -- Writes a distributed checkpoint in Megatron-Core's torch_dist format. torch plans it and writes the table of conten
# A tensor is stored as chunks of rows. Each chunk is a torch archive whose elements are copied from the source in blocks,
# so that memory is a few blocks for a model of any size. Every tensor-, pipeline- and expert-parallel layout can read the
# chunks: a rank reads those that overlap its part.

FILE_BYTES = 4 << 30
CHUNK_ELEMENTS = 1 << 22  # a reader must read a whole chunk to get any part of it
CHECKPOINT_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows, from row `first`, of the Megatron tensor of a weight table row. `shape` is the chunk's."""

    row: WeightRow
    first: int
    shape: tuple[int, ...]


def cut_into_chunks(row: WeightRow, arch: Architecture) -> Iterator[Chunk]:
    """Cut a Megatron tensor into chunks. A chunk lies within one Hugging Face tensor, or holds whole query groups."""
    if isinstance(row, QKV):  # equal parts, as tensor parallelism of size `count` would cut it
        shape, groups = row.local_shape(arch, 1), arch.num_query_groups
        wanted = -(-math.prod(shape) // CHUNK_ELEMENTS)
        count = next(n for n in range(1, groups + 1) if groups % n == 0 and (n >= wanted or n == groups))
        size = shape[0] // count
        yield from (Chunk(row, part * size, (size, *shape[1:])) for part in range(count))
        return
    start = 0
    for shape in row.hf_shapes(arch):
        for first, last in row_blocks(shape, CHUNK_ELEMENTS):
            yield Chunk(row, start + first, (last - first, *shape[1:]))
        start += shape[0]


class _WritePlan:
    """The items of every file: chunks of tensors with their sources, and extra states, which are empty objects."""

    def __init__(self, source: HFFolder, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.chunks: dict[MetadataIndex, Chunk] = {}
        self._items: list[tuple[WriteItem, int]] = []
        for key in extra_state_keys(source.rows, source.arch):
            self._items.append((WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO), 2048))
        for row in source.rows:
            dtype = row.dtype(self.dtype)
            for place in written_places(row, source.arch):
                size = torch.Size((*place.stack, *whole_shape(row, source.arch)))
                for chunk in cut_into_chunks(row, source.arch):
                    self._add(place.key, place.index, size, chunk, dtype)

    def _add(self, key: str, index: tuple[int, ...], size: torch.Size, chunk: Chunk, dtype: torch.dtype) -> None:
        shape = torch.Size((1,) * len(index) + chunk.shape)
        where = MetadataIndex(key, torch.Size((*index, chunk.first) + (0,) * (len(chunk.shape) - 1)))
        assert where.offset is not None
        data = TensorWriteData(ChunkStorageMetadata(where.offset, shape), TensorProperties(dtype=dtype), size)
        self.chunks[where] = chunk
        item = WriteItem(where, WriteItemType.SHARD, tensor_data=data)
        self._items.append((item, shape.numel() * dtype.itemsize))

    def files(self) -> list[SavePlan]:
        plans: list[list[WriteItem]] = [[]]
        filled = 0
        for item, nbytes in self._items:
            if plans[-1] and filled + nbytes > FILE_BYTES:
                plans.append([])
                filled = 0
            plans[-1].append(item)
            filled += nbytes
        return [SavePlan(plan) for plan in plans]


def write_chunks(source: HFFolder, folder: Path, dtype: torch.dtype, progress: Progress) -> dict[str, str]:
    """Write the whole model as a distributed checkpoint into the existing `folder`. Returns file -> sha256."""
    plan = _WritePlan(source, dtype)
    files, metadata = create_default_global_save_plan(plan.files())
    results: list[list[WriteResult]] = []
    with Output(folder, progress) as output:
        for i, file in enumerate(files):
            name = f"__0_{i}.distcp"
            with output.file(name):
                results.append([])
                for item in file.items:
                    start = output.tell()
                    _write_item(item, plan, source, output)
                    length = output.tell() - start
                    results[-1].append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
    FileSystemWriter(folder, sync_files=False).finish(metadata, results)  # fsync comes before the folder's rename
    torch.save(common_state(source.arch), folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(CHECKPOINT_FORMAT))
    return output.hashes


def _write_item(item: WriteItem, plan: _WritePlan, source: HFFolder, output: Output) -> None:
    if item.tensor_data is None:
        empty = io.BytesIO()
        torch.save([None], empty)
        output.write(empty.getvalue())
        return
    chunk = plan.chunks[MetadataIndex(item.index.fqn, item.index.offset)]
    dtype = chunk.row.dtype(plan.dtype)
    before, after = archive_frame(tuple(item.tensor_data.chunk.sizes), dtype)
    output.write(before)
    for first, last in row_blocks(chunk.shape):
        with output.block((last - first, *chunk.shape[1:]), dtype) as block:
            filled = 0
            for part, low, high in hf_runs(chunk.row, source.arch, chunk.first + first, chunk.first + last):
                source.read(chunk.row.hf[part], low, high, block[filled : filled + high - low])
                filled += high - low
            assert filled == len(block), f"{chunk}: {filled} of {len(block)} rows"
    output.write(after)
