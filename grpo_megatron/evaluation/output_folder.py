"""Output folder of an evaluation: one process at a time, and one run for its whole life.

OUT/run.json holds the identity of the run: everything that decides the scores. A folder with another identity is refused,
so the completions in a folder are always of one run. Tasks may be added.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.storage.atomic import write_file

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
    """The folder is new, empty, or of a run with this identity. Raises ConfigError."""
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
