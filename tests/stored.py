"""What a run has stored: the rows of its metrics, and the tensors of its checkpoints, whole.

The files of a checkpoint differ from run to run in pickled parts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

TIMES = ("timing", "perf/")  # beginnings of metrics that differ from run to run


def metric_rows(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def rows_without(output_dir: Path, names: tuple[str, ...] = TIMES) -> list[dict[str, Any]]:
    """The rows without the metrics that begin with one of `names`."""
    return [{key: value for key, value in row.items() if not key.startswith(names)} for row in metric_rows(output_dir)]


def stored(checkpoint: Path) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(checkpoint / "state")
    wanted = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in wanted.items()
        if isinstance(about, TensorStorageMetadata)
    }
    load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def same_stored(one: Path, other: Path) -> None:
    """All tensors of two checkpoints are equal bit for bit, without the rows that pad the vocabulary to the layout."""
    first, second = stored(one), stored(other)
    assert first.keys() == second.keys() and any("exp_avg_sq" in name for name in first)
    for name, tensor in first.items():
        common = tuple(slice(min(sizes)) for sizes in zip(tensor.shape, second[name].shape, strict=True))
        assert torch.equal(tensor[common], second[name][common]), name


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))
