"""The Megatron side, written: Megatron-Core's torch_dist format through torch's own checkpoint writer, lazily.

A tensor is stored as chunks of rows, each read from the source when its turn comes: memory is a block, whatever the
model. Any tensor-, pipeline- and expert-parallel layout reads such chunks; it asks for the parts it needs.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from grpo_megatron.convert.hf import HFFolder
from grpo_megatron.convert.keys import extra_states, whole_shape, written_places
from grpo_megatron.convert.manifest import Follower
from grpo_megatron.convert.progress import Progress
from grpo_megatron.convert.span import BLOCK_ELEMENTS, blocks, write_all
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.mapping import QKV, GateUp, InputSplit, Row, Vocabulary, Whole

FILE_BYTES = 4 << 30
SMALL_BYTES = 1 << 16
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class Piece:
    """Rows `first` and on of a row's Megatron tensor; `make` reads them."""

    first: int
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


def pieces(row: Row, arch: Architecture, read: Callable[[str], Any]) -> Iterator[Piece]:
    """Cut a Megatron tensor into rows, about a block each. Query, key and value interleave: whole groups at a time."""
    if isinstance(row, (Whole, Vocabulary, InputSplit, GateUp)):  # over one rank: the Hugging Face tensors, end to end
        start = 0
        for name, shape in zip(row.hf, row.hf_shapes(arch), strict=True):
            for first, last in blocks(shape):
                make = _rows(read, name, first, last)
                yield Piece(start + first, (last - first, *shape[1:]), make)
            start += shape[0]
        return
    shape = row.local_shape(arch, 1)
    count = 1
    if isinstance(row, QKV):  # as many equal parts as ranks of that tensor-parallel size would hold
        wanted = -(-math.prod(shape) // BLOCK_ELEMENTS)
        count = next(n for n in range(1, arch.num_query_groups + 1) if arch.num_query_groups % n == 0 and (
            n >= wanted or n == arch.num_query_groups))  # fmt: skip
    size = shape[0] // count
    for part in range(count):
        yield Piece(part * size, (size, *shape[1:]), _shard(row, read, arch, part, count))


def _rows(read: Callable[[str], Any], name: str, first: int, last: int) -> Callable[[], Tensor]:
    return lambda: read(name)[first:last]


def _shard(row: Row, read: Callable[[str], Any], arch: Architecture, part: int, count: int) -> Callable[[], Tensor]:
    return lambda: row.shard(read, arch, part, count)


class _Planner(SavePlanner):
    """Answers the writer's questions from the source. Everything else about the plan is fixed before."""

    def __init__(self, dtype: torch.dtype, progress: Progress) -> None:
        self.dtype, self.progress = dtype, progress
        self.tensors: dict[MetadataIndex, Piece] = {}
        self.items: list[tuple[WriteItem, int]] = []

    def add(self, key: str, index: tuple[int, ...], size: tuple[int, ...], piece: Piece) -> None:
        shape = torch.Size([*[1] * len(index), *piece.shape])
        offset = torch.Size([*index, piece.first, *[0] * (len(piece.shape) - 1)])
        where = MetadataIndex(key, offset)
        chunk = ChunkStorageMetadata(offset, shape)
        data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), torch.Size(size))
        self.tensors[where] = piece
        self.items.append(
            (WriteItem(where, WriteItemType.SHARD, tensor_data=data), shape.numel() * self.dtype.itemsize)
        )

    def add_object(self, key: str) -> None:
        self.items.append((WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO), 2048))

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        piece = self.tensors.get(MetadataIndex(write_item.index.fqn, write_item.index.offset))
        if piece is None:
            nothing = io.BytesIO()
            torch.save([None], nothing)
            return nothing
        assert write_item.tensor_data is not None
        tensor = piece.make().to(self.dtype)
        assert tuple(tensor.shape) == piece.shape, f"{write_item.index.fqn}: {tuple(tensor.shape)} is not {piece.shape}"
        self.progress.add(tensor.nbytes)
        return tensor.reshape(write_item.tensor_data.chunk.sizes)

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None: ...

    def create_local_plan(self) -> SavePlan:
        return SavePlan([item for item, _ in self.items])

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan


class _HashingFiles(FileSystem):
    """Hashes what is written, file by file. Keeps the system's own error, which torch's archive writer hides."""

    def __init__(self) -> None:
        self.hashes: dict[str, str] = {}
        self.error: OSError | None = None

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with Path(path).open(mode, buffering=0) as file:
            if "w" not in mode:
                yield file
                return
            follower = Follower(Path(path))
            try:
                stream = _Stream(file, follower, self)
                yield stream
                stream.flush()
            finally:
                self.hashes[Path(path).name] = follower.close()


class _Stream(io.IOBase):
    """Gathers an archive's many small writes; large ones go straight to the file."""

    def __init__(self, file: Any, follower: Follower, files: _HashingFiles) -> None:
        self._file, self._follower, self._files = file, follower, files
        self._small, self._written = bytearray(), 0

    def write(self, data: Any) -> int:
        if len(data) < SMALL_BYTES:
            self._small += data
            if len(self._small) >= SMALL_BYTES:
                self.flush()
        else:
            self.flush()
            self._out(data)
        return len(data)

    def tell(self) -> int:
        return self._written + len(self._small)

    def flush(self) -> None:
        small, self._small = self._small, bytearray()
        self._out(small)

    def fileno(self) -> int:
        return int(self._file.fileno())

    def _out(self, data: Any) -> None:
        try:
            self._written += write_all(self._file, data)
        except OSError as error:
            self._files.error = error
            raise
        self._follower.advance(self._written)


def write(source: HFFolder, folder: Path, dtype: torch.dtype, progress: Progress) -> dict[str, str]:
    """The whole model as a distributed checkpoint in the existing `folder`. Returns file -> sha256."""
    planner = _Planner(dtype, progress)
    for row in source.rows:
        for place in written_places(row, source.arch):
            size = (*place.stack, *whole_shape(row, source.arch))
            for piece in pieces(row, source.arch, source.tensors.__getitem__):
                planner.add(place.key, place.index, size, piece)
    for key in extra_states(source.rows, source.arch):
        planner.add_object(key)
    files = _HashingFiles()
    writer = FileSystemWriter(folder, sync_files=False)  # the folder is synchronised as a whole, before its rename
    writer.fs = files
    checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # the manifest's sha256 says more, and the pass over the data counts
    try:
        _run(writer, planner)
    except Exception as error:
        if files.error is not None:
            raise files.error from error
        raise
    finally:
        torch.serialization.set_crc32_options(checksums)
    torch.save({}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(FORMAT))
    return files.hashes


def _run(writer: FileSystemWriter, planner: _Planner) -> None:
    """What torch.distributed.checkpoint.save does in one process, with a plan for each file."""
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan(_cut(planner.items))
    results = []
    for plan in writer.prepare_global_plan(plans):
        future = writer.write_data(writer.prepare_local_plan(plan), planner)
        results.append(future.wait())
    writer.finish(metadata, results)


def _cut(items: list[tuple[WriteItem, int]]) -> list[SavePlan]:
    plans: list[list[WriteItem]] = [[]]
    filled = 0
    for item, nbytes in items:
        if plans[-1] and filled + nbytes > FILE_BYTES:
            plans.append([])
            filled = 0
        plans[-1].append(item)
        filled += nbytes
    return [SavePlan(plan) for plan in plans]
