"""Writes a distributed checkpoint in Megatron-Core's torch_dist format. torch plans it and writes the table of contents.

A tensor is stored as chunks of rows. Each chunk is a torch archive whose elements are copied from the source in blocks,
so that memory is a few blocks for a model of any size. Every tensor-, pipeline- and expert-parallel layout can read the
chunks: a rank reads those that overlap its part.
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

from grpo_megatron.convert.archive import archive_frame
from grpo_megatron.convert.hf import HFFolder
from grpo_megatron.convert.keys import extra_state_keys, whole_shape, written_places
from grpo_megatron.convert.load_layout import common_state
from grpo_megatron.convert.output import Output
from grpo_megatron.convert.progress import Progress
from grpo_megatron.convert.rows import hf_runs
from grpo_megatron.convert.span import row_blocks
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.weights.table import QKV, WeightRow

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
