"""Files of a run by name: checkpoints, rollouts and events. A launcher reads them before it imports torch.

output_dir/checkpoints/step_000020/trainer.json
                                   critic/critic.json            in a run with a critic
                                   reward_model/pairs.json       in a run that trains a reward model
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from grpo_megatron.storage import StorageError
from grpo_megatron.storage.files import sync_path, write_file
from grpo_megatron.untrusted import ReadError, check_regular, read_json, reason_of, redacted

STEP_FILE = "trainer.json"
CRITIC_FOLDER, CRITIC_FILE = "critic", "critic.json"
REWARD_MODEL_FOLDER, PAIRS_FILE = "reward_model", "pairs.json"
STEP_FOLDER = re.compile(r"step_\d+")
TRACE_FOLDER = "trace"  # in the output folder (report/trace_file.py)
WARM_UP_FOLDER = "sft"  # in the output folder: a run of its own, with checkpoints


def on_disk(output_dir: Path) -> list[Path]:
    """List the complete checkpoints of a run, oldest first."""
    folders = (p for p in (output_dir / "checkpoints").glob("step_*") if STEP_FOLDER.fullmatch(p.name))
    return sorted(folders, key=steps_of)


def steps_of(checkpoint: Path) -> int:
    """Read the number of steps of a checkpoint from its name."""
    return int(checkpoint.name.removeprefix("step_"))


IN_STEP_FILE: dict[str, type] = {"step": int, "config": dict, "run": dict, "policy": dict, "world_size": int}


def read_step(checkpoint: Path, *keys: str) -> dict[str, Any]:
    """Read a checkpoint's trainer.json, with these keys of IN_STEP_FILE. Raises StorageError: damaged, or not there."""
    return read_stored(checkpoint / STEP_FILE, {key: IN_STEP_FILE[key] for key in keys})


def read_stored(path: Path, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Read the JSON object in a file of a checkpoint, with values of these kinds. Raises StorageError."""
    try:
        content = read_json(path)
    except (OSError, ReadError) as error:
        raise StorageError(
            f"{path} {f'cannot be read: {reason_of(error)}' if isinstance(error, OSError) else error}"
        ) from error
    for key, kind in kinds.items():
        if type(content.get(key) if isinstance(content, dict) else None) is not kind:
            raise StorageError(f"{path} is damaged: it lacks the key {key!r}, or its value is wrong")
    return content  # type: ignore[no-any-return]


# -- The folder of rollout files (trainer.rollout_data_dir). It belongs to one run -------------------------------------
# step_000012.jsonl   the samples of step 12
# run.json            the path from here to the run's trainer.output_dir, so that another run does not write over its files

ROLLOUT_FILE = re.compile(r"step_(\d{6,})\.jsonl")
OWNER_FILE = "run.json"


def rollout_file(folder: Path, step: int) -> Path:
    """Name the file with the samples of a step."""
    return folder / f"step_{step:06d}.jsonl"


def rollout_files(folder: Path) -> list[tuple[int, Path]]:
    """List (step, file), by step. Empty if there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted((int(match[1]), path) for path in folder.iterdir() if (match := ROLLOUT_FILE.fullmatch(path.name)))


def owner_problem(folder: Path, output_dir: Path) -> str | None:
    """Say why the run in `output_dir` must not write here: another run has."""
    if not rollout_files(folder):
        return None
    try:
        owner = read_json(folder / OWNER_FILE)["output_dir"]
    except (OSError, ValueError, KeyError, TypeError):
        owner = "an unknown run"
    if owner == _relative(output_dir, folder):
        return None
    return f"it holds the rollouts of another run ({owner}); choose another folder, or remove its files"


def claim_rollout_folder(folder: Path, output_dir: Path) -> None:
    """Record that the run in `output_dir` writes here. Raises OSError, and StorageError if another run does."""
    if problem := owner_problem(folder, output_dir):
        raise StorageError(problem)
    write_file(folder / OWNER_FILE, json.dumps({"output_dir": _relative(output_dir, folder)}) + "\n")


def _relative(output_dir: Path, folder: Path) -> str:
    """Write the path from `folder`. A run that is moved with its rollouts inside keeps it."""
    return os.path.relpath(output_dir.resolve(), folder.resolve())


def remove_rollouts_from(folder: Path, first_step: int) -> None:
    """Delete the files of `first_step` and all later steps: a run that resumes will write them again. Raises OSError."""
    for step, path in rollout_files(folder):
        if step >= first_step:
            path.unlink()
    sync_path(folder)


# -- Events of a run, one JSON line each, in output_dir/events.jsonl ---------------------------------------------------
# A run notes when it was started, resumed or stopped, and when something went wrong:
# {"time": 1700000000.0, "kind": "resumed", "step": 12, "text": "..."}
#
# The file is only appended to, over all attempts. `time` is Unix time in seconds; `step` counts from 0, or is null.
# `lost` has `who` and `layout`, as texts; `healed` has `seconds` until all ranks had ended, then until all parts were built, and
# of the sync.

EVENTS_FILE = "events.jsonl"
EVENT_KINDS = ("started", "resumed", "guard", "stopped", "stalled", "failed", "done", "lost", "healed", "grown")
LONGEST_TEXT = 2000  # characters
LONGEST_TIME = 2.0**37  # seconds: the year 6325, which every calendar has


def add_event(output_dir: Path, kind: str, step: int | None, text: str = "", **facts: Any) -> None:
    """Append an event. For one rank only. A full disk is not reported here: the next metrics or checkpoint report it."""
    assert kind in EVENT_KINDS, kind
    event = {"time": round(time.time(), 3), "kind": kind, "step": step, "text": redacted(text)[:LONGEST_TEXT], **facts}
    line = json.dumps(event) + "\n"
    with contextlib.suppress(OSError), (output_dir / EVENTS_FILE).open("a", encoding="utf-8") as file:
        file.write(line)


def read_events(output_dir: Path) -> list[dict[str, Any]]:
    """Read the events in file order. Damaged lines are left out; without a file there are none."""
    try:
        check_regular(output_dir / EVENTS_FILE)
        lines = (output_dir / EVENTS_FILE).read_bytes().splitlines()
    except (OSError, ReadError):
        return []
    events = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError, KeyError, TypeError, OverflowError):
            event = json.loads(line)
            is_event = isinstance(event, dict) and event.get("kind") in EVENT_KINDS
            if is_event and 0 <= float(event["time"]) < LONGEST_TIME and type(event.get("step")) in (int, NoneType):
                events.append({"step": None, "text": "", **event})
    return events
