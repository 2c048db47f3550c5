"""Ledger: the completions of a run on disk, appended as batches finish, so that a killed run continues.

    OUT/completions/TASK/block_0000.jsonl   one completion per line, one file per engine replica

A batch is one write, flushed and synced. A kill may leave a last line without its end; opening the file for writing cuts
it off. Reading takes every file, whatever layout wrote it, and the first of two lines for the same sample.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from grpo_megatron.config import ConfigError
from grpo_megatron.report.run_folder import flat_config
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.files import FolderLock, write_file
from grpo_megatron.untrusted import check_regular, read_json

Key = tuple[str, int]  # the problem's uid, the sample's index


@dataclass(frozen=True)
class PlayedTurn:
    """A turn of a trajectory as the model reads it, special tokens included. `kind`: "assistant" or "observation"."""

    kind: str
    text: str


@dataclass(frozen=True)
class LedgerEntry:
    """One completion: its text before the stop, its tokens with the stop, and why it ended ("stop" or "length").

    With an environment: the last turn's text, all generated tokens, all turns, how the trajectory ended
    (sampling/multi_turn.py) and the sum of its rewards.
    """

    uid: str
    index: int
    text: str
    num_tokens: int
    finish_reason: str
    turns: list[PlayedTurn] = field(default_factory=list)
    status: str = "ok"
    reward: float = 0.0

    @property
    def key(self) -> Key:
        return self.uid, self.index


class Ledger:
    """The completions of one task on disk."""

    def __init__(self, output: Path, task: str) -> None:
        self.folder = output / "completions" / task

    def read(self) -> dict[Key, LedgerEntry]:
        """Read every complete line. A last line without its end is skipped; any other wrong line raises ConfigError."""
        entries: dict[Key, LedgerEntry] = {}
        for path in sorted(self.folder.glob("block_*.jsonl")):
            check_regular(path)
            content = path.read_bytes()
            for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
                try:
                    entry = _read_entry(json.loads(line))
                except (ValueError, TypeError, AttributeError) as error:
                    raise ConfigError(
                        f"{path} line {number} is no completion ({error}); remove the file to generate its samples again"
                    ) from error
                entries.setdefault(entry.key, entry)
        return entries

    def append(self, block: int, completions: list[LedgerEntry]) -> None:
        append_lines(self.folder / f"block_{block:04d}.jsonl", map(asdict, completions))


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows behind the last complete line of a file, which need not exist: one write, flushed and synced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    with path.open("a+b") as file:
        _cut_torn_line(file)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read_entry(row: dict[str, Any]) -> LedgerEntry:
    return LedgerEntry(**{**row, "turns": [PlayedTurn(**turn) for turn in row.get("turns", [])]})


def _cut_torn_line(file: BinaryIO) -> None:
    size = file.seek(0, os.SEEK_END)
    if size:
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as content:
            size = content.rfind(b"\n") + 1
    file.truncate(size)


# -- The output folder -------------------------------------------------------------------------------------------------
# OUT/run.json has the identity of the run: everything that decides the scores. A folder with another identity is refused,
# so the completions in a folder are always of one run. Tasks may be added.

RUN_FILE = "run.json"


def claim_output(output: Path) -> FolderLock:
    """Lock the output folder for this process. Raises ConfigError when another evaluation has the lock."""
    output.mkdir(parents=True, exist_ok=True)
    try:
        return FolderLock(output)
    except StorageError as error:
        raise ConfigError(f"--output {str(output)!r}: {error}") from error


def write_identity(output: Path, identity: dict[str, Any]) -> None:
    """Write run.json, and keep the tasks in it."""
    path = output / RUN_FILE
    if path.exists():
        identity = {**identity, "tasks": {**read_json(path)["tasks"], **identity["tasks"]}}
    write_file(path, json.dumps(identity, indent=1, sort_keys=True) + "\n")


def check_output(output: Path, identity: dict[str, Any]) -> None:
    """Check that the folder is new, empty, or of a run with this identity. Raises ConfigError."""
    if not output.exists():
        return
    if not output.is_dir():
        raise ConfigError(f"--output {str(output)!r} is a file; choose a folder")
    path = output / RUN_FILE
    if not path.exists():
        if any(not entry.name.startswith(".") for entry in output.iterdir()):
            raise ConfigError(
                f"--output {str(output)!r} holds something else (it has no {RUN_FILE}); choose another folder"
            )
        return
    try:
        recorded = read_json(path)
        shared = recorded.get("tasks", {}).keys() & identity["tasks"].keys()  # tasks may be added
        old, new = (
            flat_config({**one, "tasks": {name: one["tasks"][name] for name in shared}}) for one in (recorded, identity)
        )
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not readable ({error}); remove the folder, or choose another --output") from error
    keys = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    if keys:
        different = (
            f"{key}: {_abbreviated(old.get(key))} there, {_abbreviated(new.get(key))} here" for key in keys[:6]
        )
        raise ConfigError(
            f"--output {str(output)!r} holds a run with other settings ({'; '.join(different)}); choose another"
            " --output, or remove that folder"
        )


def _abbreviated(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:12].rstrip('"') + "..."
