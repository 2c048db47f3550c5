"""Weights for an engine without a training model: whole tensors of a folder, in bounded buckets, as in a weight sync.

The folder is whatever the converter reads: a Hugging Face folder, a converted Megatron-Core checkpoint, a training step.
Nothing is written. Every rank reads every tensor; with the page cache, a machine reads its disk only once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch

from grpo_megatron.config import ConfigError
from grpo_megatron.convert import ConvertError
from grpo_megatron.convert.conversion import open_source
from grpo_megatron.convert.source import Source, dtype_name
from grpo_megatron.models.architecture import UnsupportedModel
from grpo_megatron.models.heads.folder import WHAT
from grpo_megatron.types import WeightBucket

EDGE_BYTES = 1 << 20  # read at the beginning and at the end of each file by `weights_sha256`


def open_model(path: Path, hf: Path | None, family: str | None = None) -> Source:
    """The model in `path`; names and shapes of its tensors are checked. Raises ConfigError."""
    try:
        source = open_source(path, hf=hf, family=family)
    except (ConvertError, UnsupportedModel) as error:
        raise ConfigError(
            f"--model: {error}\n  (a Hugging Face folder with weights, a converted checkpoint, or a training step such as"
            " outputs/run/checkpoints/step_000020)"
        ) from error
    if source.head is not None:
        raise ConfigError(
            f"--model: {str(path)!r} is {WHAT[source.head]}. It generates no text; name the folder of a policy"
        )
    return source


def engine_dtype(source: Source, requested: str | None) -> str:
    """The dtype of the engine's computation. Default: "float32" for a float32 model, "bfloat16" for all others."""
    if requested is not None:
        return requested
    return "float32" if set(source.dtypes.values()) == {torch.float32} else "bfloat16"


def stream_weights(source: Source, dtype: str, device: torch.device, bucket_bytes: int) -> Iterator[WeightBucket]:
    """Every tensor once, in `dtype` on `device` (constants in float32), in buckets of about `bucket_bytes`.

    Raises ConvertError at a tensor with non-finite values: no attestation follows, as it does in training.
    """
    dtypes = source.result_dtypes(getattr(torch, dtype))
    bucket: WeightBucket = []
    size = 0
    for name, shape in source.shapes().items():
        whole = torch.empty(shape, dtype=dtypes[name], device=device)
        filled = 0
        for block in source.blocks(name, shape):
            whole[filled : filled + len(block)] = block.to(dtypes[name])
            filled += len(block)
        if not torch.stack(torch.aminmax(whole)).isfinite().all():  # aminmax passes NaN on
            raise ConvertError(f"{name} has non-finite values")
        bucket.append((name, whole))
        size += whole.nbytes
        if size >= bucket_bytes:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def weights_sha256(source: Source) -> str:
    """sha256 of config.json, the dtypes, and every weight file's name, size, beginning and end."""
    digest = hashlib.sha256((source.hf_folder / "config.json").read_bytes())
    digest.update(repr(sorted((name, dtype_name(dtype)) for name, dtype in source.dtypes.items())).encode())
    files = [p for p in source.data_folder.iterdir() if p.suffix in (".safetensors", ".distcp")]
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(EDGE_BYTES))
            file.seek(max(0, size - EDGE_BYTES))
            digest.update(file.read(EDGE_BYTES))
    return digest.hexdigest()
