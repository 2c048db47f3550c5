"""The ranks' part of healing: the seconds of a recovery (cli/healing.py decides, and starts the ranks again)."""

from __future__ import annotations

import time
from pathlib import Path

from grpo_megatron.parallel.mesh import Mesh, on_first_rank
from grpo_megatron.report.metrics import Metrics, Sinks
from grpo_megatron.storage.files import check_space
from grpo_megatron.storage.run_files import add_event, steps_of
from grpo_megatron.training.checkpoint import Checkpoints
from grpo_megatron.training.stopping import read_restart


class Mirror:
    """The state after the last steps in memory, in the files of a checkpoint, which outlive the ranks but not the launcher.

    A step's state is copied to the host after it, written beside the next one, and valid once `poll` finds it written
    on all ranks. `checkpoints` is None where nothing is mirrored. Building one of states of `size` bytes is collective. Raises
    RankError on every rank where two have no room.
    """

    def __init__(self, mesh: Mesh, size: int) -> None:
        restart, self.checkpoints = read_restart(), None
        if (folder := restart.get("mirror")) is None:
            return
        self.checkpoints = Checkpoints(Path(folder), mesh, 1, "sizes", in_background=True)
        if not restart["lost_at"]:
            task = "cannot keep the state in memory; set trainer.healing.memory=false"
            on_first_rank(mesh, task, lambda: check_space(Path(folder), 2 * size, "the state of two steps"))

    def newer(self, saved: Path | None) -> Path | None:
        """Returns the newest mirrored state, or `saved` if that has as many steps. Collective."""
        mirrored = None if self.checkpoints is None else self.checkpoints.newest()
        return max((path for path in (saved, mirrored) if path is not None), key=steps_of, default=None)

    def poll(self) -> None:
        """Completes the state that is under way, if all ranks have written it. Collective."""
        if self.checkpoints is not None:
            self.checkpoints.poll()


class Recovery:
    """The seconds from the last sign of life of a lost rank to the first sample of the step that is repeated."""

    def __init__(self, lost_at: float, ended_at: float) -> None:
        self.lost_at, self.ended_at, self.built_at = lost_at, ended_at, time.time()

    @classmethod
    def of_restart(cls) -> Recovery | None:
        """Call it when all parts are built. None: the ranks of this launcher were not started again."""
        restart = read_restart()
        return cls(restart["lost_at"], restart["ended_at"]) if restart.get("lost_at") else None

    def end(self, step: int, output_dir: Path, metrics: Metrics, sinks: Sinks, *, is_first: bool) -> None:
        """Logs the seconds by phase; the engine has its weights, and generates next."""
        now = time.time()
        metrics.constant("timing_s/healing", now - self.lost_at)
        seconds = [self.ended_at - self.lost_at, self.built_at - self.ended_at, now - self.built_at]
        ended, built, synced = seconds = [round(each, 1) for each in seconds]
        text = (
            f"{now - self.lost_at:.1f} s after the last sign of the lost rank: {ended} until all ranks"
            f" had ended, {built} until all parts were built, {synced} for the sync"
        )
        if is_first:
            add_event(output_dir, "healed", step, text, seconds=seconds)
        sinks.note(f"healed: step {step} generates {text}")
