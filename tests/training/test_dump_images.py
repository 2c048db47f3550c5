"""A dump of rows with images: each image once, in its place, and the replayed loss is that of these pixels.

A Dump that reads back is recomputed with the weights of a tiny model. There is no recorded loss to compare with: the same
pixels give the same number, and others give another one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_megatron.config import Config
from grpo_megatron.training.dump import Dump, Incident, _batch, mini_batch_tensors
from tests import vision, worlds
from tests.models.test_vision import batch_of


def read_back(folder: Path, *batches: Any) -> Any:
    """The batch of a dump in which each of `batches` is that of a rank."""
    parts = []
    for rank, batch in enumerate(batches):
        save_file(mini_batch_tensors(batch, [[row] for row in range(len(batch))]), folder / f"{rank}.safetensors")
        parts.append(load_file(folder / f"{rank}.safetensors"))
    return _batch(parts, Config.model_validate({"model": {"path": "m"}, "data": {"train_files": ["t"]}}))


def test_the_images_of_all_ranks_come_back_in_their_places(tmp_path: Path) -> None:
    """Rows with 1, 0, 2, 1 images; the second rank has the image of row 0 again, in another place; the third has none."""
    first, second, third = batch_of([[[0]]]), batch_of([[[0]]], [2, 1]), batch_of([[[0]]], [1])
    [again] = first.images[0]
    second.images[1] = (replace(again, first=1),)
    batch = read_back(tmp_path, first, second, third)
    expected = [*first.images, *second.images, ()]
    shown = [[(one.first, one.size, one.pixels) for one in row] for row in batch.images]
    assert shown == [[(one.first, one.size, one.pixels) for one in row] for row in expected]
    assert len(batch) == 7 and len({one.digest for row in batch.images[:4] for one in row}) == 4
    first.images[1] = (replace(again, first=2),)  # in one rank an image is stored once
    assert len(mini_batch_tensors(first, [[0, 1]])["pixel_counts"]) == 1
    assert "images" not in mini_batch_tensors(third, [[0]]) and "images" not in mini_batch_tensors(first, [])


def test_kept_ids_come_back_in_their_rows(tmp_path: Path) -> None:
    """The first rank has rows of offline responses alone, whose tokens are of the full vocabulary."""
    first, second = batch_of([[[0]]]), batch_of([[[0]]], [1])
    first.kept, second.kept = (
        None,
        [torch.tensor([1, *[0] * (len(second.tokens[0]) - second.prompt_lengths[0] - 1), 7])],
    )
    batch = read_back(tmp_path, first, second)
    sizes = [len(tokens) - prompt for tokens, prompt in zip(batch.tokens, batch.prompt_lengths, strict=True)]
    assert [ids.tolist() for ids in batch.kept] == [*([0] * size for size in sizes[:-1]), second.kept[0].tolist()]


def losses(folder: Path, batches: list[Any]) -> list[tuple[float, float]]:
    """The loss and the gradient's norm of each batch, recomputed by one rank."""
    from grpo_megatron.training.dump import recompute

    config = Config.model_validate({"model": {"path": folder, "dtype": "float32"}, "actor": {"optim": {"lr": 1e-3}}})
    incident = Incident(3, 1, "gradients", {}, 0.0)
    found = [recompute(Dump(folder, incident, config, {"loss": 0.0}, batch)) for batch in batches]
    return [(rows[0].recomputed, rows[1].recomputed) for rows in found]


@pytest.mark.slow
def test_the_loss_is_that_of_the_pixels(tmp_path: Path) -> None:
    vision.make_model(tmp_path / "weights", max_position_embeddings=2048)
    whole = batch_of([[[0], [1], [2], [3]]])
    again = read_back(tmp_path, whole)
    dark = read_back(tmp_path, whole)
    dark.images[3] = tuple(replace(one, pixels=bytes(len(one.pixels))) for one in dark.images[3])
    [(first, same, other)] = worlds.run(losses, 1, folder=tmp_path, batches=[whole, again, dark])
    assert first == same and all(torch.isfinite(torch.tensor(first)))
    assert abs(first[0] - other[0]) > 1e-4
