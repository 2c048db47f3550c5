"""manifest.json: size and sha256 of every file of a folder, written last and verified before anything is believed."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

from grpo_megatron.convert import ConvertError, listed

NAME = "manifest.json"
VERSION = 1
READ_BYTES = 1 << 20


def sha256_of(path: Path) -> str:
    sha = hashlib.sha256()
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            sha.update(buffer[:count])
    return sha.hexdigest()


def write(folder: Path, kind: str, known: dict[str, str]) -> None:
    """Hash what is not `known` (relative path -> sha256) and write the manifest of every file."""
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / NAME):
        name = path.relative_to(folder).as_posix()
        files[name] = {"size": path.stat().st_size, "sha256": known.get(name) or sha256_of(path)}
    text = json.dumps({"version": VERSION, "kind": kind, "files": files}, indent=2) + "\n"
    with (folder / NAME).open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> dict[str, Any] | None:
    """file -> {size, sha256}, or None without a manifest. Raises ConvertError for one that is no manifest."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        files = content["files"]
        for name, entry in files.items():
            int(entry["size"]), str(entry["sha256"])
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"it names {name!r}, outside its folder")
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ConvertError(f"{path}: not a readable manifest ({type(error).__name__}: {error})") from error
    return dict(files)


def check_sizes(folder: Path) -> bool:
    """Compare presence and size of every file with the manifest; False without one. Raises ConvertError that lists all."""
    files = read(folder)
    if files is None:
        return False
    problems = []
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"missing {name}")
        elif path.stat().st_size != entry["size"]:
            problems.append(f"{name} has {path.stat().st_size} bytes, expected {entry['size']}")
    weights = (p.name for p in folder.glob("*") if p.suffix in (".safetensors", ".distcp") and p.name not in files)
    problems += [f"{name} is not in the manifest" for name in sorted(weights)]
    if problems:
        raise listed(f"{folder} is not what its {NAME} says:", problems)
    return True


class Verification:
    """Hashes of every file, compared in a thread while the caller works; `finish` before the result is published."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.problems = folder, list[str]()
        self.exists = check_sizes(folder)
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        if self.exists:
            self._thread.start()

    def _run(self) -> None:
        for name, entry in (read(self.folder) or {}).items():
            if self._stop:
                return
            try:
                if sha256_of(self.folder / name) != entry["sha256"]:
                    self.problems.append(f"{name}: sha256 differs, its content has changed since it was written")
            except OSError as error:
                self.problems.append(f"{name}: {error.strerror}")

    def finish(self) -> bool:
        """Wait. False when there is no manifest. Raises ConvertError that names every changed file."""
        if self.exists:
            self._thread.join()
        if self.problems:
            raise listed(f"{self.folder} is not what its {NAME} says:", self.problems)
        return self.exists

    def stop(self) -> None:
        """The answer is not needed any more."""
        self._stop = True
