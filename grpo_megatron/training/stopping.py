"""Stopping early: how a run is asked to, how its ranks agree on it, and what it leaves to say how it ended.

After a step the run saves and leaves with exit code 75 (sysexits' EX_TEMPFAIL: start me again) when
    trainer.stop_file exists       a batch script's answer to its scheduler's signal, or a person's `touch`
    SIGUSR1 has reached a rank     the same, where there is no script: scancel --signal=USR1, torchrun
    trainer.stop_at is near        the longest step so far would end after it

Rank 0 looks at the file and the clock; one number a step is reduced over the world, so that all ranks stop at the same
step. SIGTERM keeps its meaning, an end at once: Slurm and torchrun send it to the peers of a rank that has died, which
can finish no step. SIGUSR2 writes every thread's stack to standard error and the run goes on: for one that hangs.

    output_dir/heartbeat       steps done, rewritten after every step: a watcher compares its age
    output_dir/outcome.json    {"state": "done" | "stopped", "steps_done": 12, "checkpoint": ..., "exit_code": ...};
                               absent while a run lasts and after a failure
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_megatron.config import TrainerConfig
from grpo_megatron.storage.atomic import write_file

if TYPE_CHECKING:
    from grpo_megatron.parallel.mesh import Mesh

EXIT_STOPPED = 75
HEARTBEAT, OUTCOME = "heartbeat", "outcome.json"
REASONS = ("", "SIGUSR1", "the stop file", "the time limit")

_signalled = False


class Stopped(Exception):
    """The run was asked to end, has saved and can be started again. Raised on every rank after the same step."""


def listen(output_dir: Path, is_first_rank: bool) -> None:
    """Take SIGUSR1 and SIGUSR2, and forget how the last run ended. Before anything slow: unheard, USR1 is deadly."""

    def note(number: int, frame: object) -> None:
        global _signalled
        _signalled = True

    signal.signal(signal.SIGUSR1, note)
    signal.siginterrupt(signal.SIGUSR1, False)  # no EINTR inside a collective
    faulthandler.register(signal.SIGUSR2)
    if is_first_rank:
        (output_dir / OUTCOME).unlink(missing_ok=True)


class Stopping:
    """The watch over one run. Call `after` on every rank after every step."""

    def __init__(self, config: TrainerConfig, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self._longest, self._last = 0.0, float("inf")

    def after(self, steps_done: int, save: Callable[[int], Path]) -> None:
        """Collective: when asked to, `save` and raise Stopped; else only note that the run lives."""
        import torch  # the launcher, which listens, starts without it
        import torch.distributed as dist

        now = time.monotonic()
        self._longest, self._last = max(self._longest, now - self._last), now
        if self.mesh.rank == 0:
            (self.config.output_dir / HEARTBEAT).write_text(f"{steps_done}\n")
        asked = torch.tensor(self._asked())
        dist.all_reduce(asked, op=dist.ReduceOp.MAX, group=self.mesh.control)
        if not asked:
            return
        checkpoint = save(steps_done)
        text = f"stopped by {REASONS[int(asked)]} after {steps_done} steps; saved in {checkpoint}"
        if self.mesh.rank == 0:
            record(self.config.output_dir, "stopped", steps_done, checkpoint, EXIT_STOPPED)
            print(text, flush=True)
        self.mesh.barrier()  # whoever starts the ranks ends them all when the first has left: rank 0 has spoken by now
        raise Stopped(text)

    def finished(self, steps_done: int, checkpoint: Path | None) -> None:
        """The run has done all its steps, and everything that it leaves is written."""
        if self.mesh.rank == 0:
            record(self.config.output_dir, "done", steps_done, checkpoint, 0)

    def _asked(self) -> int:
        """Index into REASONS."""
        config = self.config
        if self.mesh.rank == 0:
            if config.stop_at is not None and time.time() + self._longest > config.stop_at:
                return 3
            if config.stop_file is not None and config.stop_file.exists():
                return 2
        return int(_signalled)


def record(output_dir: Path, state: str, steps_done: int, checkpoint: Path | None, exit_code: int) -> None:
    """Write outcome.json at once or not at all."""
    content = {
        "state": state,
        "steps_done": steps_done,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "exit_code": exit_code,
    }
    with contextlib.suppress(OSError):  # a full disk must not turn a finished run into a failed one
        write_file(output_dir / OUTCOME, json.dumps(content) + "\n")
