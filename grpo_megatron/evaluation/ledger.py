"""Ledger: the completions of a run on disk, appended as batches finish, so that a killed run continues.

    OUT/completions/TASK/block_0000.jsonl   one completion per line, one file per rollout block

A batch is one write, flushed and synced. A kill may leave a last line without its end; opening the file for writing cuts
it off. Reading takes every file, whatever layout wrote it, and the first of two lines for the same sample.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.storage.files import write_file

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
    (sampling/trajectory.py) and the sum of its rewards.
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
    """The completions of one task."""

    def __init__(self, output: Path, task: str) -> None:
        self.folder = output / "completions" / task

    def read(self) -> dict[Key, LedgerEntry]:
        """Read every complete line. A last line without its end is skipped; any other wrong line raises ConfigError."""
        entries: dict[Key, LedgerEntry] = {}
        for path in sorted(self.folder.glob("block_*.jsonl")):
            content = path.read_bytes()
            for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
                try:
                    entry = _read_entry(json.loads(line))
                except (ValueError, TypeError, AttributeError) as error:
                    raise ConfigError(
                        f"{path} line {number} is no completion ({error}); remove the file to draw its samples again"
                    ) from error
                entries.setdefault(entry.key, entry)
        return entries

    def append(self, block: int, completions: list[LedgerEntry]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"block_{block:04d}.jsonl"
        data = "".join(json.dumps(asdict(drawn), ensure_ascii=True) + "\n" for drawn in completions).encode()
        with path.open("a+b") as file:
            _cut_torn_line(file.fileno())
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def _read_entry(row: dict[str, Any]) -> LedgerEntry:
    return LedgerEntry(**{**row, "turns": [PlayedTurn(**turn) for turn in row.get("turns", [])]})


def _cut_torn_line(descriptor: int) -> None:
    size = os.fstat(descriptor).st_size
    end = size
    while end:
        start = max(0, end - 65536)
        place = os.pread(descriptor, end - start, start).rfind(b"\n")
        if place >= 0:
            end = start + place + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)


# -- the output folder: one process at a time, and one run for its whole life ------------------------------------------
# OUT/run.json holds the identity of the run: everything that decides the scores. A folder with another identity is refused,
# so the completions in a folder are always of one run. Tasks may be added.

RUN_FILE = "run.json"


@contextmanager
def claim_output(output: Path) -> Iterator[None]:
    """Lock the output folder for this process. Raises ConfigError when another evaluation holds the lock."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"--output {str(output)!r} is in use by another evaluation; wait for it, or choose another folder"
            ) from error
        yield


def write_identity(output: Path, identity: dict[str, Any]) -> None:
    """Write run.json, and keep the tasks that it holds already."""
    path = output / RUN_FILE
    if path.exists():
        identity = {**identity, "tasks": {**json.loads(path.read_text())["tasks"], **identity["tasks"]}}
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
        recorded = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not readable ({error}); remove the folder, or choose another --output") from error
    different = _differences(recorded, identity, "")
    if different:
        raise ConfigError(
            f"--output {str(output)!r} holds a run with other settings ({'; '.join(different[:6])}); choose another"
            " --output, or remove that folder"
        )


def _differences(recorded: Any, current: Any, where: str) -> list[str]:
    """The keys whose values differ. A task that only one of the two has is no difference."""
    if isinstance(recorded, dict) and isinstance(current, dict):
        keys = recorded.keys() & current.keys() if where == "tasks" else recorded.keys() | current.keys()
        found = []
        for key in sorted(keys):
            found += _differences(recorded.get(key), current.get(key), f"{where}.{key}".removeprefix("."))
        return found
    if recorded == current:
        return []
    return [f"{where}: {_abbreviated(recorded)} there, {_abbreviated(current)} here"]


def _abbreviated(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:12].rstrip('"') + "..."
