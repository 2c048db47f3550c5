"""The Megatron side, written: Megatron-Core's torch_dist format. torch plans it and writes the table of contents.

A tensor is stored as chunks of rows, each a torch archive whose elements are copied from the source a block at a time:
memory is a few blocks, whatever the model. Any tensor-, pipeline- and expert-parallel layout reads such chunks; it asks
for the parts it needs.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from grpo_megatron.convert.archive import frame
from grpo_megatron.convert.hf import HFFolder
from grpo_megatron.convert.keys import extra_states, whole_shape, written_places
from grpo_megatron.convert.output import Output
from grpo_megatron.convert.progress import Progress
from grpo_megatron.convert.rows import hf_runs
from grpo_megatron.convert.span import blocks
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.mapping import QKV, WeightRow

FILE_BYTES = 4 << 30
CHUNK_ELEMENTS = 1 << 22  # of an archive: a reader takes all of one to get any of it
FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class Piece:
    """Rows `first` and on of a row's Megatron tensor."""

    row: WeightRow
    first: int
    shape: tuple[int, ...]


def pieces(row: WeightRow, arch: Architecture) -> Iterator[Piece]:
    """Cut a Megatron tensor into chunks: within a Hugging Face tensor; query, key and value in whole groups."""
    if isinstance(row, QKV):  # as many equal parts as ranks of that tensor-parallel size would hold
        shape, groups = row.local_shape(arch, 1), arch.num_query_groups
        wanted = -(-math.prod(shape) // CHUNK_ELEMENTS)
        count = next(n for n in range(1, groups + 1) if groups % n == 0 and (n >= wanted or n == groups))
        size = shape[0] // count
        yield from (Piece(row, part * size, (size, *shape[1:])) for part in range(count))
        return
    start = 0
    for shape in row.hf_shapes(arch):
        for first, last in blocks(shape, CHUNK_ELEMENTS):
            yield Piece(row, start + first, (last - first, *shape[1:]))
        start += shape[0]


class _Plan:
    """What to write: tensors' chunks with where they come from, and objects without content, in files."""

    def __init__(self, source: HFFolder, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.pieces: dict[MetadataIndex, Piece] = {}
        self._items: list[tuple[WriteItem, int]] = []
        for key in extra_states(source.rows, source.arch):
            self._items.append((WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO), 2048))
        for row in source.rows:
            for place in written_places(row, source.arch):
                size = torch.Size((*place.stack, *whole_shape(row, source.arch)))
                for piece in pieces(row, source.arch):
                    self._add(place.key, place.index, size, piece)

    def _add(self, key: str, index: tuple[int, ...], size: torch.Size, piece: Piece) -> None:
        shape = torch.Size([*[1] * len(index), *piece.shape])
        where = MetadataIndex(key, torch.Size([*index, piece.first, *[0] * (len(piece.shape) - 1)]))
        assert where.offset is not None
        data = TensorWriteData(ChunkStorageMetadata(where.offset, shape), TensorProperties(dtype=self.dtype), size)
        self.pieces[where] = piece
        item = WriteItem(where, WriteItemType.SHARD, tensor_data=data)
        self._items.append((item, shape.numel() * self.dtype.itemsize))

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


def write(source: HFFolder, folder: Path, dtype: torch.dtype, progress: Progress) -> dict[str, str]:
    """The whole model as a distributed checkpoint in the existing `folder`. Returns file -> sha256."""
    plan = _Plan(source, dtype)
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
    FileSystemWriter(folder, sync_files=False).finish(metadata, results)  # all is synchronised before the rename
    torch.save({}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(FORMAT))
    return output.hashes


def _write_item(item: WriteItem, plan: _Plan, source: HFFolder, output: Output) -> None:
    if item.tensor_data is None:
        nothing = io.BytesIO()
        torch.save([None], nothing)
        output.write(nothing.getvalue())
        return
    piece = plan.pieces[MetadataIndex(item.index.fqn, item.index.offset)]
    before, after = frame(tuple(item.tensor_data.chunk.sizes), plan.dtype)
    output.write(before)
    for first, last in blocks(piece.shape):
        with output.block((last - first, *piece.shape[1:]), plan.dtype) as block:
            filled = 0
            for part, low, high in hf_runs(piece.row, source.arch, piece.first + first, piece.first + last):
                source.read(piece.row.hf[part], low, high, block[filled : filled + high - low])
                filled += high - low
            assert filled == len(block), f"{piece}: {filled} of {len(block)} rows"
    output.write(after)
