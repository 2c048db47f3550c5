"""What a manifest records of a folder, and that every difference from it is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.storage import StorageError, files
from grpo_megatron.storage.files import (
    MANIFEST_FILE,
    Verification,
    check_sizes,
    read_manifest,
    sha256_of,
    write_manifest,
)

ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc", FIPS 180-2
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "sub" / "empty").write_text("")
    write_manifest(tmp_path, "test", {})
    return tmp_path


def test_every_file_is_in_it(folder: Path) -> None:
    assert json.loads((folder / MANIFEST_FILE).read_text()) == {
        "version": 1,
        "kind": "test",
        "files": {"a.txt": {"size": 3, "sha256": ABC}, "sub/empty": {"size": 0, "sha256": EMPTY}},
    }
    assert check_sizes(folder) and Verification(folder).finish()


def test_known_hashes_are_not_computed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "READ_BYTES", 2)
    assert sha256_of(folder / "a.txt") == ABC  # of several blocks
    write_manifest(folder, "test", {"a.txt": "known"})
    listed = read_manifest(folder)
    assert listed is not None and listed["a.txt"]["sha256"] == "known" and listed["sub/empty"]["sha256"] == EMPTY


def test_without_a_manifest_nothing_is_compared(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None and not check_sizes(tmp_path) and not Verification(tmp_path).finish()


def test_all_that_differs_is_named(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = shutil.copytree(folder, tmp_path_factory.mktemp("copy"), dirs_exist_ok=True)
    (copy / "a.txt").write_text("abd")  # of the same size
    (folder / "a.txt").write_text("abcd")
    (folder / "sub" / "empty").unlink()
    (folder / "extra.safetensors").write_text("")
    verification = Verification(copy)
    with pytest.raises(StorageError, match=r"a\.txt: sha256 differs"):
        verification.finish()
    with pytest.raises(StorageError) as error:
        check_sizes(folder)
    assert str(error.value).splitlines() == [
        f"{folder} is not what its manifest.json says:",
        "  a.txt has 4 bytes, expected 3",
        "  missing sub/empty",
        "  extra.safetensors is not in the manifest",
    ]


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("files"),
        lambda content: content["files"].update({"../secret": {"size": 1, "sha256": ABC}}),
        lambda content: content["files"].update({"/etc/passwd": {"size": 1, "sha256": ABC}}),
    ],
)
def test_what_is_no_manifest_is_refused(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads((folder / MANIFEST_FILE).read_text())
    change(content)
    (folder / MANIFEST_FILE).write_text(json.dumps(content))
    with pytest.raises(StorageError, match="not a readable manifest"):
        read_manifest(folder)
