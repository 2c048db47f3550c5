"""Hugging Face safetensors shards, written tensor by tensor: the header of a shard is known before its first byte."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from grpo_megatron.convert.hf import INDEX
from grpo_megatron.convert.output import Output
from grpo_megatron.convert.progress import Progress
from grpo_megatron.convert.source import Source
from grpo_megatron.convert.span import blocks

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
    files = plan(source.shapes(), dtype, shard_bytes)
    with Output(folder, progress) as output:
        for file_name, held in files.items():
            with output.file(file_name):
                output.write(header(held, dtype))
                for name, shape in held.items():
                    for first, last in blocks(shape):
                        with output.block((last - first, *shape[1:]), dtype) as block:
                            source.read(name, first, last, block)
    if len(files) > 1:
        total = source.num_bytes(dtype)
        weight_map = {name: file_name for file_name, held in files.items() for name in held}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return output.hashes
