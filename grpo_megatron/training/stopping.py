"""Stopping early: the requests to stop, the ranks' agreement on one step, and the record of how the run ended.

After a step the run saves and ends, with exit code 75 or, after Ctrl-C, 130, when
    trainer.stop_file exists              created by a batch script on its scheduler's signal, or by hand
    SIGUSR1, SIGTERM or SIGINT has come   to the launcher or to a rank (stop_signals.py); the second one ends the run at once
    trainer.stop_at is near               a step as long as the longest so far would end after it

Rank 0 checks the file and the clock. One number per step is reduced over the world, so that all ranks stop at the same
step.

    output_dir/heartbeat       steps done, rewritten after every step; its age shows whether the run makes progress
    output_dir/outcome.json    {"state": "done" | "stopped", "steps_done": 12, "checkpoint": ..., "exit_code": ...};
                               absent during a run and after a failure
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_megatron.config import TrainerConfig
from grpo_megatron.storage.atomic import write_file
from grpo_megatron.storage.run_files import add_event, on_disk, steps_of
from grpo_megatron.training.stop_signals import EXIT_INTERRUPTED, EXIT_STOPPED, requested

if TYPE_CHECKING:
    from grpo_megatron.parallel.mesh import Mesh

HEARTBEAT, OUTCOME = "heartbeat", "outcome.json"
REASONS = ("", "SIGUSR1", "SIGTERM", "SIGINT", "the stop file", "the time limit")


class Stopped(Exception):
    """The run has saved after a request to stop, and can be started again. Raised on every rank after the same step."""

    def __init__(self, text: str, exit_code: int = EXIT_STOPPED) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def forget_outcome(output_dir: Path) -> None:
    """Remove the last run's outcome.json."""
    (output_dir / OUTCOME).unlink(missing_ok=True)


def is_done(config: TrainerConfig) -> bool:
    """Whether an earlier attempt has done all steps and written its results, so that nothing is left to do."""
    if config.resume_mode != "auto":
        return False
    try:
        outcome = json.loads((config.output_dir / OUTCOME).read_text())
        done = (outcome["state"], outcome["steps_done"]) == ("done", config.total_training_steps)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    checkpoints = [steps_of(path) for path in on_disk(config.output_dir)]
    has_model = not config.save_hf_at_end or (config.output_dir / "hf").is_dir()
    return done and has_model and max(checkpoints, default=-1) == config.total_training_steps


class Stopping:
    """Decides after every step whether the run stops. Call `after` on every rank after every step."""

    def __init__(self, config: TrainerConfig, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self._longest, self._last = 0.0, float("inf")

    def after(self, steps_done: int, save: Callable[[int], Path]) -> None:
        """Collective: write the heartbeat; if a stop was requested, call `save(steps_done)` and raise Stopped."""
        now = time.monotonic()
        self._longest, self._last = max(self._longest, now - self._last), now
        if self.mesh.rank == 0:
            with contextlib.suppress(OSError):  # a full disk: the metrics or the save report it
                (self.config.output_dir / HEARTBEAT).write_text(f"{steps_done}\n")
        reason = max(self.mesh.all_gather(self._reason()))
        if not reason:
            return
        checkpoint = save(steps_done)
        name = REASONS[reason]
        exit_code = EXIT_INTERRUPTED if name == "SIGINT" else EXIT_STOPPED
        text = (
            f"stopped by {name} after {steps_done} steps; saved in {checkpoint}; the same command continues from there"
        )
        if self.mesh.rank == 0:
            record(self.config.output_dir, "stopped", steps_done, checkpoint, exit_code)
            add_event(self.config.output_dir, "stopped", steps_done, text)
            print(text, flush=True)
        self.mesh.barrier()  # torchrun ends all ranks when the first one ends: let rank 0 print and record first
        raise Stopped(text, exit_code)

    def finished(self, steps_done: int, checkpoint: Path | None) -> None:
        """Record that the run has done all its steps. Call it after everything else is written."""
        if self.mesh.rank == 0:
            record(self.config.output_dir, "done", steps_done, checkpoint, 0)
            add_event(self.config.output_dir, "done", steps_done)

    def _reason(self) -> int:
        """This rank's reason to stop, as an index into REASONS; 0 means none."""
        config = self.config
        if self.mesh.rank == 0:
            if config.stop_at is not None and time.time() + self._longest > config.stop_at:
                return REASONS.index("the time limit")
            if config.stop_file is not None and config.stop_file.exists():
                return REASONS.index("the stop file")
        return REASONS.index(requested())


def record(output_dir: Path, state: str, steps_done: int, checkpoint: Path | None, exit_code: int) -> None:
    """Write outcome.json, complete or not at all."""
    content = {
        "state": state,
        "steps_done": steps_done,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "exit_code": exit_code,
    }
    with contextlib.suppress(OSError):  # a full disk must not make a finished run fail
        write_file(output_dir / OUTCOME, json.dumps(content) + "\n")
