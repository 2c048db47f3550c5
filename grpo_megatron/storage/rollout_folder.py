"""The folder of rollout files (trainer.rollout_data_dir). It belongs to one run.

step_000012.jsonl   the samples of step 12
run.json            the path from here to the run's trainer.output_dir, so that another run does not write over its files
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from grpo_megatron.storage import StorageError
from grpo_megatron.storage.atomic import sync_path, write_file

ROLLOUT_FILE = re.compile(r"step_(\d{6,})\.jsonl")
OWNER_FILE = "run.json"


def rollout_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.jsonl"


def rollout_files(folder: Path) -> list[tuple[int, Path]]:
    """(step, file), by step. Empty if there is no such folder."""
    if not folder.is_dir():
        return []
    return sorted((int(match[1]), path) for path in folder.iterdir() if (match := ROLLOUT_FILE.fullmatch(path.name)))


def owner_problem(folder: Path, output_dir: Path) -> str | None:
    """Why the run in `output_dir` must not write here: another run has."""
    if not rollout_files(folder):
        return None
    try:
        owner = json.loads((folder / OWNER_FILE).read_text(encoding="utf-8"))["output_dir"]
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
    """The path from `folder`. A run that is moved with its rollouts inside keeps it."""
    return os.path.relpath(output_dir.resolve(), folder.resolve())


def remove_rollouts_from(folder: Path, first_step: int) -> None:
    """Delete the files of `first_step` and all later steps: a run that resumes will write them again. Raises OSError."""
    for step, path in rollout_files(folder):
        if step >= first_step:
            path.unlink()
    sync_path(folder)
