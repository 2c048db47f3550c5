"""Which files of a model folder are read: those that its index names, and none outside the folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from grpo_megatron.models.weights.load import SafetensorsFolder, WeightsError

INDEX = "model.safetensors.index.json"


def model(folder: Path, index: object) -> Path:
    folder.mkdir()
    for path in (folder / "model.safetensors", folder.parent / "outside.safetensors"):
        save_file({"weight": torch.ones(2)}, path)
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def test_an_index_names_files_of_its_folder(tmp_path: Path) -> None:
    folder = model(tmp_path / "model", {"weight_map": {"weight": "model.safetensors"}})
    with SafetensorsFolder(folder) as files:
        assert torch.equal(files.slice("weight")[:], torch.ones(2))


@pytest.mark.parametrize("name", ["../outside.safetensors", "{}/outside.safetensors", "config.json"])
def test_an_index_that_names_another_file(tmp_path: Path, name: str) -> None:
    folder = model(tmp_path / "model", {"weight_map": {"weight": name.format(tmp_path)}})
    with pytest.raises(WeightsError, match=rf"{INDEX}: weight_map names .* no \*.safetensors file of this folder"):
        SafetensorsFolder(folder)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {"weight": ["model.safetensors"]}}])
def test_an_index_that_is_none(tmp_path: Path, index: object) -> None:
    with pytest.raises(WeightsError, match="not a readable index"):
        SafetensorsFolder(model(tmp_path / "model", index))
