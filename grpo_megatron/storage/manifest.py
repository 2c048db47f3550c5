"""manifest.json: size and sha256 of every file of a folder. It is written last, and compared before a folder is used."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_megatron.storage import StorageError
from grpo_megatron.storage.atomic import write_file

MANIFEST_FILE = "manifest.json"
MANIFEST_VERSION = 1
READ_BYTES = 1 << 20


def sha256_of(path: Path) -> str:
    """The digest of a file's content in hexadecimal digits. Raises OSError."""
    sha = hashlib.sha256()
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            sha.update(buffer[:count])
    return sha.hexdigest()


def write_manifest(folder: Path, kind: str, known: Mapping[str, str]) -> None:
    """Write the manifest of every file of `folder`. Files that are not in `known` (relative path -> sha256) are hashed."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST_FILE):
        name = path.relative_to(folder).as_posix()
        files[name] = {"size": path.stat().st_size, "sha256": known.get(name) or sha256_of(path)}
    content = {"version": MANIFEST_VERSION, "kind": kind, "files": files}
    write_file(folder / MANIFEST_FILE, json.dumps(content, indent=2) + "\n")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """File -> {size, sha256}, or None when there is no manifest. Raises StorageError when it cannot be read."""
    path = folder / MANIFEST_FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        return {name: _checked_entry(name, entry) for name, entry in content["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise StorageError(f"{path}: not a readable manifest ({type(error).__name__}: {error})") from error


def _checked_entry(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"it names {name!r}, outside its folder")
    return {"size": int(entry["size"]), "sha256": str(entry["sha256"])}


def check_sizes(folder: Path) -> bool:
    """Compare presence and size of every file with the manifest. False when there is no manifest.

    Raises StorageError that lists every difference.
    """
    return _files_of_right_size(folder) is not None


def _files_of_right_size(folder: Path) -> dict[str, Any] | None:
    """As `read_manifest`; raises as `check_sizes`."""
    files = read_manifest(folder)
    if files is None:
        return None
    problems = []
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"missing {name}")
        elif path.stat().st_size != entry["size"]:
            problems.append(f"{name} has {path.stat().st_size} bytes, expected {entry['size']}")
    weights = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.suffix in (".safetensors", ".distcp"))
    problems += [f"{name} is not in the manifest" for name in sorted(weights) if name not in files]
    if problems:
        raise _differs(folder, problems)
    return files


def _differs(folder: Path, problems: list[str]) -> StorageError:
    return StorageError("\n  ".join([f"{folder} is not what its {MANIFEST_FILE} says:", *problems]))


class Verification:
    """Compares the hash of every file in a thread while the caller works. Call `finish` before publishing a result."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.problems = folder, list[str]()
        files = _files_of_right_size(folder)
        self.exists, self._files = files is not None, files or {}
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        if self.exists:
            self._thread.start()

    def _run(self) -> None:
        for name, entry in self._files.items():
            if self._stop:
                return
            try:
                if sha256_of(self.folder / name) != entry["sha256"]:
                    self.problems.append(f"{name}: sha256 differs, its content has changed since it was written")
            except OSError as error:
                self.problems.append(f"{name}: {error.strerror}")

    def finish(self) -> bool:
        """Wait for the thread. False when there is no manifest. Raises StorageError that names every changed file."""
        if self.exists:
            self._thread.join()
        if self.problems:
            raise _differs(self.folder, self.problems)
        return self.exists

    def stop(self) -> None:
        """End the thread early: its result is not needed."""
        self._stop = True
