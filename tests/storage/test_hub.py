"""Models by their ids of the Hub, in a cache as huggingface_hub keeps it."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow as pa
import pytest
from huggingface_hub import constants

from grpo_megatron.config import ConfigError
from grpo_megatron.data.rows import RowSet
from grpo_megatron.storage.hub import data_files, model_folder
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


# -- Data sets: a module in place of the package `datasets`, which has an Arrow file of each commit in its cache ---------

COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def load_dataset(path: str, name: str | None, *, split: str, revision: str) -> Any:
        calls.append((path, name, split, revision))
        if path == "someone/absent":
            raise ConnectionError("Couldn't reach 'someone/absent' on the Hub (LocalEntryNotFoundError)")
        folder = tmp_path / path.replace("/", "___") / (name or "default") / "0.0.0" / COMMIT
        folder.mkdir(parents=True, exist_ok=True)
        table = pa.table({"prompt": ["1 + 1 =", "2 + 1 ="], "answer": ["2", "3"]})
        file = folder / f"sums-{split}.arrow"
        with pa.OSFile(str(file), "wb") as out, pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table)
        return types.SimpleNamespace(cache_files=[{"filename": str(file)}])

    data_files.cache_clear()
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_a_data_set_is_its_arrow_files_at_a_commit(sets: list[Any]) -> None:
    rows = RowSet([Path(f"hub:someone/sums/train@{COMMIT}"), Path(f"hub:someone/sums/main/test@{COMMIT}")], "task")
    assert sets == [("someone/sums", None, "train", COMMIT), ("someone/sums", "main", "test", COMMIT)]
    assert len(rows) == 4 and rows.row(3) == {"prompt": "2 + 1 =", "answer": "3"}
    assert (rows.uid(1), rows.uid(2)) == ("task/train/1", "task/test/0")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hub:someone/sums/train@main", "names 'main', which may move; write hub:OWNER/NAME/SPLIT@COMMIT"),
        ("hub:someone/sums", "has another form; write hub:OWNER/NAME/SPLIT@COMMIT"),
        (f"hub:someone/absent/train@{COMMIT}", "cannot be fetched: Couldn't reach .*; without a network, run it once"),
        (
            f"hub:someone/sums/train@{'f' * 40}",
            "is of another commit in the cache .*; run it once where the network is",
        ),
    ],
)
def test_a_data_set_that_cannot_be_had_is_named(sets: list[Any], name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"data file '{name}' {message}"):
        RowSet([Path(name)])


def test_the_package_is_asked_for(sets: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError, match="is read by the package datasets, which is not installed; pip install datasets"
    ):
        RowSet([Path(f"hub:someone/sums/train@{COMMIT}")])
