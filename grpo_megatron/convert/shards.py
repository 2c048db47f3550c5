"""Hugging Face safetensors shards, written tensor by tensor: the header of a shard is known before its first byte."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.convert.hf import INDEX
from grpo_megatron.convert.manifest import Follower
from grpo_megatron.convert.progress import Progress
from grpo_megatron.convert.source import Source
from grpo_megatron.convert.span import as_bytes, write_all

NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
Shapes = dict[str, tuple[int, ...]]


def plan(shapes: Shapes, dtype: torch.dtype, shard_bytes: int) -> dict[str, Shapes]:
    """File -> tensors, in stream order, at most `shard_bytes` a file (or one tensor)."""
    groups: list[Shapes] = [{}]
    filled = 0
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if groups[-1] and filled + nbytes > shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = shape
        filled += nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups)}


def header(shapes: Shapes, dtype: torch.dtype) -> bytes:
    """Length and JSON, padded so that the data begin at a multiple of 8."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(source: Source, folder: Path, dtype: torch.dtype, shard_bytes: int, progress: Progress) -> dict[str, str]:
    """All tensors of `source` as shards in `folder`, and the index of several. Returns file -> sha256."""
    shapes = {
        name: shape for row in source.rows for name, shape in zip(row.hf, row.hf_shapes(source.arch), strict=True)
    }
    files = plan(shapes, dtype, shard_bytes)
    stream = _stream(source)
    hashes = {}
    ahead: list[tuple[str, Tensor]] = []  # the block that belongs to the next file
    for file_name, held in files.items():
        hashes[file_name] = _write_file(folder / file_name, held, dtype, stream, ahead, progress)
    assert not ahead, "more tensors came than the plan has"
    if len(files) > 1:
        total = sum(math.prod(shape) for shape in shapes.values()) * dtype.itemsize
        weight_map = {name: file_name for file_name, held in files.items() for name in held}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return hashes


def _stream(source: Source) -> Iterator[tuple[str, Tensor]]:
    for row in source.rows:
        yield from source.blocks(row)


def _write_file(
    path: Path,
    held: Shapes,
    dtype: torch.dtype,
    stream: Iterator[tuple[str, Tensor]],
    ahead: list[tuple[str, Tensor]],
    progress: Progress,
) -> str:
    start = header(held, dtype)
    expected = len(start) + sum(math.prod(shape) for shape in held.values()) * dtype.itemsize
    order = {name: position for position, name in enumerate(held)}
    with path.open("wb", buffering=0) as file:
        follower = Follower(path)
        try:
            written, position = write_all(file, start), 0
            while True:
                name, block = ahead.pop() if ahead else next(stream, ("", torch.empty(0)))
                if name not in held:
                    if name:
                        ahead.append((name, block))
                    break
                assert order[name] >= position, f"{name} came out of order"
                position = order[name]
                written += write_all(file, as_bytes(block.to(dtype)))
                follower.advance(written)
                progress.add(block.numel() * dtype.itemsize)
                del block
            assert written == expected, f"{path.name}: {written} bytes instead of {expected}"
            follower.advance(written)
        finally:
            digest = follower.close()
    return digest
