"""The tensors of a checkpoint: weights and optimizer state, whole. (Its files differ from run to run in pickled parts.)"""

from __future__ import annotations

from pathlib import Path

import torch


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
