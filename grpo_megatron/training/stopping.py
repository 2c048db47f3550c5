"""Stopping early: the requests to stop, the ranks' agreement on one step, and the record of how the run ended.

After a step the run saves and ends with exit code 75 (EX_TEMPFAIL of sysexits.h: it can be started again) when
    trainer.stop_file exists       created by a batch script on its scheduler's signal, or by hand
    SIGUSR1 has reached a rank     the same without a script: scancel --signal=USR1, torchrun
    trainer.stop_at is near        a step as long as the longest so far would end after it

Rank 0 checks the file and the clock. One number per step is reduced over the world, so that all ranks stop at the same
step. SIGTERM ends a run at once: Slurm and torchrun send it to the other ranks when a rank has died, and those ranks
cannot finish a step. SIGUSR2 shows where a run hangs: it writes the stack of every thread to standard error, and the run
continues.

    output_dir/heartbeat       steps done, rewritten after every step; its age shows whether the run makes progress
    output_dir/outcome.json    {"state": "done" | "stopped", "steps_done": 12, "checkpoint": ..., "exit_code": ...};
                               absent during a run and after a failure
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
    """The run has saved after a request to stop, and can be started again. Raised on every rank after the same step."""


def listen(output_dir: Path, is_first_rank: bool) -> None:
    """Handle SIGUSR1 and SIGUSR2, and remove the last run's outcome.json.

    Call this before anything slow: without a handler SIGUSR1 ends the process.
    """

    def remember(number: int, frame: object) -> None:
        global _signalled
        _signalled = True

    signal.signal(signal.SIGUSR1, remember)
    signal.siginterrupt(signal.SIGUSR1, False)  # no EINTR inside a collective
    faulthandler.register(signal.SIGUSR2)
    if is_first_rank:
        (output_dir / OUTCOME).unlink(missing_ok=True)


class Stopping:
    """Decides after every step whether the run stops. Call `after` on every rank after every step."""

    def __init__(self, config: TrainerConfig, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self._longest, self._last = 0.0, float("inf")

    def after(self, steps_done: int, save: Callable[[int], Path]) -> None:
        """Collective: write the heartbeat; if a stop was requested, call `save(steps_done)` and raise Stopped."""
        import torch  # imported late: cli/main.py calls `listen` before torch is loaded
        import torch.distributed as dist

        now = time.monotonic()
        self._longest, self._last = max(self._longest, now - self._last), now
        if self.mesh.rank == 0:
            (self.config.output_dir / HEARTBEAT).write_text(f"{steps_done}\n")
        reason = torch.tensor(self._reason())
        dist.all_reduce(reason, op=dist.ReduceOp.MAX, group=self.mesh.control)
        if not reason:
            return
        checkpoint = save(steps_done)
        text = f"stopped by {REASONS[int(reason)]} after {steps_done} steps; saved in {checkpoint}"
        if self.mesh.rank == 0:
            record(self.config.output_dir, "stopped", steps_done, checkpoint, EXIT_STOPPED)
            print(text, flush=True)
        self.mesh.barrier()  # torchrun ends all ranks when the first one ends: let rank 0 print and record first
        raise Stopped(text)

    def finished(self, steps_done: int, checkpoint: Path | None) -> None:
        """Record that the run has done all its steps. Call it after everything else is written."""
        if self.mesh.rank == 0:
            record(self.config.output_dir, "done", steps_done, checkpoint, 0)

    def _reason(self) -> int:
        """This rank's reason to stop, as an index into REASONS; 0 means none."""
        config = self.config
        if self.mesh.rank == 0:
            if config.stop_at is not None and time.time() + self._longest > config.stop_at:
                return 3
            if config.stop_file is not None and config.stop_file.exists():
                return 2
        return int(_signalled)


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
