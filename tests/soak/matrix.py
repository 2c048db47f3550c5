"""The faults of a soak: what happens, at which point, and the exit code that the user must get."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """`action` and `point` are of injection.py. `damage` changes the output folder before the attempt starts.

    In an attempt with `background`, the point "save: files" is in the thread that writes.
    """

    name: str
    action: str
    point: str
    exit_code: int
    rank: int = 1
    damage: str = ""
    background: bool = False  # trainer.async_save


KILLED = 128 + signal.SIGKILL
STOPPED = 75
STEP_POINTS = ("update_weights", "gen", "reward", "adv", "old_log_prob", "ref", "update_actor", "log")
SAVE_POINTS = ("save: state", "save: files", "save: manifest", "save: rename", "save: prune")

MATRIX: list[Fault] = [
    *(Fault("a rank is killed", "kill rank", point, KILLED) for point in ("start", *STEP_POINTS)),
    *(Fault("a rank is killed", "kill rank", point, KILLED) for point in ("save: state", "save: files")),
    *(Fault("rank 0 is killed", "kill rank", point, KILLED, rank=0) for point in SAVE_POINTS[2:]),
    *(Fault("the launcher is killed", "kill launcher", p, -signal.SIGKILL) for p in ("update_actor", "save: files")),
    Fault("all processes are killed", "kill all", "gen", -signal.SIGKILL),
    Fault("all processes are killed", "kill all", "save: rename", -signal.SIGKILL, rank=0),
    Fault("SIGTERM", "SIGTERM", "gen", STOPPED),
    Fault("SIGUSR1", "SIGUSR1", "update_actor", STOPPED),
    Fault("Ctrl-C", "SIGINT", "reward", 128 + signal.SIGINT),
    Fault("Ctrl-C twice", "SIGINT twice", "update_actor", 128 + signal.SIGINT),
    Fault("no space for a checkpoint", "full disk", "save: state", 1),
    Fault("a rank is killed, saving in the background", "kill rank", "save: files", KILLED, background=True),
    Fault("SIGUSR1, saving in the background", "SIGUSR1", "save: files", STOPPED, background=True),
    Fault("no space, saving in the background", "full disk", "save: files", 1, background=True),
    Fault("no space for metrics", "full disk", "log", 1, rank=0),
    *(
        Fault(f"newest checkpoint: {damage}, then SIGUSR1", "SIGUSR1", "gen", STOPPED, damage=damage)
        for damage in ("a bit flipped", "a file truncated", "a file lost")
    ),
    Fault("metrics.jsonl: garbage, then SIGUSR1", "SIGUSR1", "gen", STOPPED, damage="garbage"),
]
FIRST = Fault("output folder deleted", "delete folder", "update_actor", 1, rank=0)  # all steps are lost
LAST = Fault("a rank is killed", "kill rank", "export", KILLED)  # all steps are done


def _newest_file(output: Path) -> Path:
    """The largest file of the newest checkpoint."""
    newest = max((output / "checkpoints").glob("step_??????"))
    return max((newest / "state").glob("*.distcp"), key=lambda file: file.stat().st_size)


def _flip(output: Path, rng: random.Random) -> None:
    file = _newest_file(output)
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def _truncate(output: Path, rng: random.Random) -> None:
    file = _newest_file(output)
    os.truncate(file, rng.randrange(file.stat().st_size))


def _lose(output: Path, rng: random.Random) -> None:
    _newest_file(output).unlink()


def _garbage(output: Path, rng: random.Random) -> None:
    with (output / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": \xff\xfe' + rng.randbytes(100))


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "a bit flipped": _flip,
    "a file truncated": _truncate,
    "a file lost": _lose,
    "garbage": _garbage,
}
