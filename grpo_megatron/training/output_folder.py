"""OutputFolder: trainer.output_dir while a run writes into it. One run at a time; an earlier run's files are kept.

.lock         held by rank 0 (storage/files.py)
earlier_001/  with trainer.resume_mode=disable: the files of the run that was here before
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.checks.resume import differences
from grpo_megatron.config import ConfigError, TrainerConfig
from grpo_megatron.parallel.mesh import Mesh, on_first_rank
from grpo_megatron.report.console import OUTPUTS
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.files import FolderLock, check_space, clear_leftovers, remove_folder, sync_path, write_file
from grpo_megatron.untrusted import parse_yaml, yaml_text

EARLIER = re.compile(r"earlier_(\d+)")
# What a run writes besides what its summary names. Everything else in the folder is the user's, or slurm/train_70b.sh's.
OTHER_OUTPUTS = (
    *("iterations", "reward_model", "heartbeat", "heartbeats", "stalls", "dumps", "outcome.json", "config_attempts"),
    *("critic", "profile", "events.jsonl", "report_samples.jsonl"),
    *("wandb", "wandb_run_id", "swanlog", "swanlab_run_id", "mlflow.db", "mlflow_run_id"),
)
WRITTEN_INTO = (".", "checkpoints", "iterations")  # where temporary names may be left


class OutputFolder:
    """The output folder of this run: it exists, is locked, and has no temporary names of a killed run. Collective.

    With resume_mode=disable it holds nothing of an earlier run; `moved_to` is where that is. `inputs` are the paths that
    the run reads. A context manager: leaving it releases the lock. Raises ConfigError on every rank.
    """

    def __init__(self, config: TrainerConfig, mesh: Mesh, inputs: Sequence[Path | None] = ()) -> None:
        self.path, self.mesh, self.rollouts = config.output_dir, mesh, config.rollout_data_dir
        self.lock: FolderLock | None = None
        self.moved_to: Path | None = None
        problem = None
        if mesh.rank == 0:
            try:
                self._open(config.resume_mode == "disable", [path for path in inputs if path is not None])
            except (OSError, StorageError) as error:
                problem = f"trainer.output_dir={str(self.path)!r}: {error}"
        problem = mesh.broadcast(problem)
        if problem is not None:
            self.close()
            raise ConfigError(problem)

    def _open(self, move_aside: bool, inputs: list[Path]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = FolderLock(self.path)
        for name in WRITTEN_INTO:
            clear_leftovers(self.path / name)
        if move_aside:
            self._move_aside(inputs)

    def _move_aside(self, inputs: list[Path]) -> None:
        found = [self.path / name for name in (*OUTPUTS, *OTHER_OUTPUTS) if (self.path / name).exists()]
        if self.rollouts is not None and self.rollouts.resolve().is_relative_to(self.path.resolve()):
            found += [self.rollouts] if self.rollouts.exists() else []
        if not found:
            return
        for path in inputs:
            if any(path.resolve().is_relative_to(output.resolve()) for output in found):
                raise StorageError(
                    f"trainer.resume_mode=disable moves an earlier run's files aside, and the run reads {str(path)!r},"
                    " which is one of them; use another folder"
                )
        numbers = [int(match[1]) for path in self.path.iterdir() if (match := EARLIER.fullmatch(path.name))]
        target = self.path / f"earlier_{max(numbers, default=0) + 1:03d}"
        target.mkdir()
        for path in found:
            path.rename(target / path.name)
        sync_path(target)
        sync_path(self.path)
        self.moved_to = target

    def check_space(self, needed: int) -> None:
        """Raise RankError on every rank when a checkpoint of `needed` bytes does not fit. Collective."""
        task = f"cannot save in {self.path}; set another trainer.output_dir, or trainer.save_freq=-1"
        on_first_rank(self.mesh, task, lambda: check_space(self.path, needed, "a checkpoint"))

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()
            self.lock = None

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


# -- The record of configs ---------------------------------------------------------------------------------------------
# The configs of a run's attempts: the first one whole, later ones as differences from it.
#
# config.yaml               of the first start, the one whose weights the run goes on with
# config_attempts/002.yaml  what the second attempt, the first resumed one, has changed; {} if nothing
#
# A start without a checkpoint is a first start: it replaces the records of earlier ones, of which nothing is left.

CONFIG_FILE, ATTEMPTS_FOLDER = "config.yaml", "config_attempts"


def record_config(output_dir: Path, mesh: Mesh, config: dict[str, Any], *, resumed: bool) -> None:
    """Write the config, plain JSON. Collective. Raises RankError on every rank when rank 0 cannot write."""
    first = output_dir / CONFIG_FILE

    def write_first() -> None:
        if (output_dir / ATTEMPTS_FOLDER).exists():
            remove_folder(output_dir / ATTEMPTS_FOLDER)
        write_file(first, yaml_text(config))

    if resumed and first.exists():
        on_first_rank(mesh, f"cannot write into {output_dir / ATTEMPTS_FOLDER}", lambda: _write_attempt(first, config))
    else:
        on_first_rank(mesh, f"cannot write {first}", write_first)


def _write_attempt(first: Path, config: dict[str, Any]) -> None:
    try:
        original = parse_yaml(first.read_text(encoding="utf-8"))
    except ValueError:  # damaged: record the whole config
        original = None
    folder = first.parent / ATTEMPTS_FOLDER
    folder.mkdir(exist_ok=True)
    numbers = [int(path.stem) for path in folder.glob("*.yaml") if path.stem.isdecimal()]
    changed = _nested(original, config) if isinstance(original, dict) else config
    write_file(folder / f"{max(numbers, default=1) + 1:03d}.yaml", yaml_text(changed))


def _nested(original: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Returns the differences as sections, so that they can be laid over the original. A removed key is null."""
    changed: dict[str, Any] = {}
    for difference in differences(original, config):
        *sections, name = difference.key.split(".")
        section = changed
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = difference.new
    return changed
