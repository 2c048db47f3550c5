"""Ledger: the completions of a run on disk, appended as batches finish, so that a killed run continues.

    OUT/completions/TASK/block_0000.jsonl   one line a completion; every rollout block appends to a file of its own

A batch is one write, flushed and synced. A line that a kill has torn is cut off when its file is opened again. Readers
take every file, whatever the layout that wrote it, and the first of two lines for the same sample.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_megatron.config import ConfigError

Key = tuple[str, int]  # problem's uid, sample's index
GREEDY = -1  # the index of the greedy sample; the drawn ones count from 0


@dataclass(frozen=True)
class LedgerEntry:
    """One completion: its text up to the stop, the tokens it took, and why it ended ("stop" or "length")."""

    uid: str
    index: int
    text: str
    num_tokens: int
    finish_reason: str

    @property
    def key(self) -> Key:
        return self.uid, self.index


class Ledger:
    """The completions of one task."""

    def __init__(self, output: Path, task: str) -> None:
        self.folder = output / "completions" / task

    def read(self) -> dict[Key, LedgerEntry]:
        """Everything complete. Raises ConfigError for a line that is neither complete nor the torn last one."""
        found: dict[Key, LedgerEntry] = {}
        for path in sorted(self.folder.glob("block_*.jsonl")):
            content = path.read_bytes()
            for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), start=1):
                try:
                    drawn = LedgerEntry(**json.loads(line))
                except (ValueError, TypeError) as error:
                    raise ConfigError(
                        f"{path} line {number} is no completion ({error}); remove the file to draw its samples again"
                    ) from error
                found.setdefault(drawn.key, drawn)
        return found

    def append(self, block: int, completions: list[LedgerEntry]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"block_{block:04d}.jsonl"
        data = "".join(json.dumps(asdict(drawn), ensure_ascii=True) + "\n" for drawn in completions).encode()
        with path.open("a+b") as file:
            _cut_torn_line(file.fileno())
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


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
