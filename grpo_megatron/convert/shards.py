"""Writes Hugging Face safetensors shards tensor by tensor. A shard's header is computed before its first byte is written."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from grpo_megatron.convert.hf import INDEX_FILE
from grpo_megatron.convert.output import Output
from grpo_megatron.convert.progress import Progress
from grpo_megatron.convert.source import Source
from grpo_megatron.convert.span import row_blocks

SAFETENSORS_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
Shapes = dict[str, tuple[int, ...]]
Dtypes = dict[str, torch.dtype]


def plan_shards(shapes: Shapes, dtypes: Dtypes, shard_bytes: int) -> dict[str, Shapes]:
    """File -> tensors, in stream order. A file has at most `shard_bytes`, or one tensor."""
    groups: list[Shapes] = [{}]
    filled = 0
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
    """The length of the JSON, then the JSON, padded so that the data begins at a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtypes[name].itemsize
        entries[name] = {"dtype": SAFETENSORS_DTYPES[dtypes[name]], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shards(
    source: Source, folder: Path, dtype: torch.dtype, shard_bytes: int, progress: Progress
) -> dict[str, str]:
    """Write all tensors of `source` as shards into `folder`, with an index if there are several. Returns file -> sha256."""
    dtypes = source.result_dtypes(dtype)
    files = plan_shards(source.shapes(), dtypes, shard_bytes)
    with Output(folder, progress) as output:
        for file_name, held in files.items():
            with output.file(file_name):
                output.write(safetensors_header(held, dtypes))
                for name, shape in held.items():
                    for first, last in row_blocks(shape):
                        with output.block((last - first, *shape[1:]), dtypes[name]) as block:
                            source.read(name, first, last, block)
    if len(files) > 1:
        total = source.num_bytes(dtype)
        weight_map = {name: file_name for file_name, held in files.items() for name in held}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return output.hashes
