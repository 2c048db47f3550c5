"""Models by their ids of the Hub, in a cache as huggingface_hub keeps it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from grpo_megatron.storage.hub import model_folder
from grpo_megatron.untrusted import ReadError

NAME = Path("someone/tiny-1.5b")


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the model in an otherwise empty cache: config.json, an index, one of two weight files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model_folder.cache_clear()
    model, commit = tmp_path / "hub" / "models--someone--tiny-1.5b", "0123456789abcdef" * 2 + "01234567"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    folder = model / "snapshots" / commit
    folder.mkdir(parents=True)
    files = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for name in ("config.json", "model-1.safetensors"):
        (folder / name).write_text("{}")
    return folder


def test_an_id_is_its_folder_in_the_cache(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []
    look = huggingface_hub.snapshot_download

    def download(name: str, **options: Any) -> str:
        fetched.extend(options.get("allow_patterns", []))
        return look(name, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert model_folder(NAME, weights=False) == cached and not fetched
    assert model_folder(NAME) == cached and "*.safetensors" in fetched  # its download was interrupted: it goes on
    fetched.clear()
    model_folder.cache_clear()
    (cached / "model-2.safetensors").touch()
    assert model_folder(NAME) == cached and not fetched
    with pytest.raises(ReadError, match="it is not a folder, and as an id .* cannot be fetched: .*HF_HUB_OFFLINE"):
        model_folder(Path("someone/else"))


def test_a_path_is_left_as_it_is(cached: Path, tmp_path: Path) -> None:
    (tmp_path / "someone" / "tiny-1.5b").mkdir(parents=True)
    assert model_folder(NAME) == NAME
    for path in (Path("nowhere"), Path("../x"), Path("a/b/c"), tmp_path / "nowhere"):
        assert model_folder(path) == path
