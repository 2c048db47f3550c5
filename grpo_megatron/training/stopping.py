"""Stopping early: requests to stop, the ranks' agreement on one step, the record of how the run ended; and the calendar.

After a step the run saves and ends, with exit code 75 (130 after Ctrl-C), when `trainer.stop_file` exists, a signal has
come (SIGUSR1, SIGTERM, SIGINT; the second one ends the run at once), or a step as large as the largest so far would end
after `trainer.stop_at` or could exceed `reward.budget`. One number per step is reduced over the world, so that all ranks
stop at the same step.

    output_dir/heartbeat       steps done, rewritten after every step
    output_dir/outcome.json    state, steps_done, checkpoint, exit_code; absent during a run and after a failure
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_megatron.config import BudgetConfig, TrainerConfig
from grpo_megatron.rewards.services import exceeded, record_step, spent
from grpo_megatron.storage.files import write_file
from grpo_megatron.storage.run_files import add_event, on_disk, steps_of

if TYPE_CHECKING:
    from grpo_megatron.parallel.mesh import Mesh
    from grpo_megatron.storage.files import FolderLock


# -- Signals -----------------------------------------------------------------------------------------------------------
# Signals that ask a rank to stop: the first SIGINT, SIGTERM or SIGUSR1 is a request, the second ends the process at once.
#
# Python runs a signal's handler in the main thread, and not before the C code there returns: a rank that waits in a
# collective for a dead one would never end. So the number of every signal is written to a pipe (signal.set_wakeup_fd), and a
# thread reads it. A request is remembered until the step is over (stopping.py).
#
# torchrun's agent sends SIGTERM to the ranks of a machine when one of them has died, and they cannot finish the step any
# more: `must_end` recognises that. Under srun a rank cannot know it, and Slurm sends SIGKILL after its KillWait (30 s), also to
# the batch script. So there a rank that has received SIGTERM ends itself after TERM_SECONDS (slurm/ranks.sh) if the step is not
# over, and the script can still record how the attempt ended. SIGUSR2 shows where a run hangs: it writes the stack of every
# thread to standard error, and the run continues.

REQUESTS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
STOP_FILE = "GRPO_MEGATRON_STOP_FILE"  # set for the ranks of our launcher, which writes the name of its signal there
RESTART_FILE = "GRPO_MEGATRON_RESTART_FILE"  # set for the ranks of our launcher: how they were started (cli/ranks.py)
TERM_SECONDS = "GRPO_MEGATRON_TERM_SECONDS"  # set by slurm/ranks.sh
EXIT_STOPPED, EXIT_INTERRUPTED = 75, 128 + signal.SIGINT  # 75: EX_TEMPFAIL of sysexits.h, it can be started again
EXIT_TO_GROW = 76  # for our launcher
ANNOUNCEMENT = "{}: the run stops after this step and saves; a second signal ends it at once\n"


class _Listener:
    """The signals of this process. The lock is held while signals are read, by the thread or by `requested`."""

    def __init__(self, must_end: Callable[[], bool], announces: bool) -> None:
        self.must_end, self.announces = must_end, announces
        self.request = ""
        self._lock = threading.Lock()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def start(self) -> None:
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in REQUESTS:
            signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)  # no EINTR inside a collective
        threading.Thread(target=self._listen, name="stop signals", daemon=True).start()

    def read(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):
            for number in os.read(self._reader, 1 << 12):
                if number in REQUESTS:
                    self._receive(signal.Signals(number))

    def _listen(self) -> None:
        while True:
            select.select([self._reader], [], [])
            self.read()

    def _receive(self, number: signal.Signals) -> None:
        if self.request or self.must_end():
            sys.stdout.flush()
            os._exit(128 + number)
        self.request = number.name
        if number == signal.SIGTERM and TERM_SECONDS in os.environ:
            timer = threading.Timer(float(os.environ[TERM_SECONDS]), os._exit, [128 + number])
            timer.daemon = True
            timer.start()
        if self.announces:
            os.write(2, ANNOUNCEMENT.format(number.name).encode())


_listener: _Listener | None = None


def listen(must_end: Callable[[], bool] = lambda: False, announces: bool = False) -> None:
    """Make signals requests, from now on. Call this in the main thread before anything slow: by default they end a process.

    `must_end` says that the run is lost, so that a signal ends the process at once. `announces`: print the first request.
    """
    global _listener
    _listener = _Listener(must_end, announces)
    _listener.start()
    faulthandler.register(signal.SIGUSR2)


def requested() -> str:
    """Returns the name of the signal that has reached this process, or our launcher; "" if there was none."""
    if _listener is not None:
        _listener.read()
        if _listener.request:
            return _listener.request
    with contextlib.suppress(OSError, KeyError):
        return Path(os.environ[STOP_FILE]).read_text()
    return ""


def read_restart() -> dict[str, Any]:
    """Reads how our launcher has started this rank (Restart of cli/ranks.py); {} under another launcher."""
    file = os.environ.get(RESTART_FILE)
    return {} if file is None else json.loads(Path(file).read_text())  # type: ignore[no-any-return]


HEARTBEAT, OUTCOME = "heartbeat", "outcome.json"
GROWTH = "other devices"  # more of them, or without nodes that leave: our launcher starts the ranks again
REASONS = ("", GROWTH, "SIGUSR1", "SIGTERM", "SIGINT", "the stop file", "the time limit", "reward.budget")


class Stopped(Exception):
    """The run has saved after a request to stop, and can be started again. Raised on every rank after the same step."""

    def __init__(self, text: str, exit_code: int = EXIT_STOPPED) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def forget_outcome(output_dir: Path) -> None:
    """Remove the last run's outcome.json."""
    (output_dir / OUTCOME).unlink(missing_ok=True)


def is_done(config: TrainerConfig) -> bool:
    """Returns whether an earlier attempt has done all steps and written its results, so that nothing is left to do."""
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
    """The decision after every step whether the run stops. Call `after` on every rank after every step.

    `lock`: of the output folder, on the rank that holds it. A run whose folder is gone ends with an error. `steps` names what
    `steps_done` counts.
    """

    def __init__(
        self,
        config: TrainerConfig,
        mesh: Mesh,
        lock: FolderLock | None = None,
        steps: str = "steps",
        budget: BudgetConfig | None = None,
    ) -> None:
        self._ledger = budget.folder if budget is not None and mesh.rank == 0 else None
        self._limits = budget.limits if budget is not None else {}
        self._spent = self._spending()  # before this step
        self.config, self.mesh, self.lock, self.steps = config, mesh, lock, steps
        self._longest, self._last = 0.0, float("inf")
        self._steps_until_growth: int | None = read_restart().get("grow_after")

    def after(self, steps_done: int, save: Callable[[int], Path]) -> None:
        """Write the heartbeat; if a stop was requested, call `save(steps_done)` and raise Stopped. Collective.

        Raises RankError on every rank when the output folder was deleted or replaced since the run began.
        """
        lost = (
            f"cannot go on in {self.config.output_dir}: the folder was deleted or replaced while the run was writing into"
            " it, and earlier metrics and checkpoints with it; put it back, or start again"
        )
        self.mesh.agree(lost if self.lock is not None and not self.lock.is_in_place() else None)
        now = time.monotonic()
        self._longest, self._last = max(self._longest, now - self._last), now
        if self.mesh.rank == 0:
            with contextlib.suppress(OSError):  # a full disk: the metrics or the save report it
                (self.config.output_dir / HEARTBEAT).write_text(f"{steps_done}\n")
        if self._steps_until_growth is not None and steps_done < self.config.total_training_steps:
            self._steps_until_growth -= 1
        reason = max(self.mesh.all_gather(self._reason(steps_done)))
        if not reason:
            return
        checkpoint = save(steps_done)
        name = REASONS[reason]
        if name == GROWTH:
            if self.mesh.rank == 0:
                add_event(self.config.output_dir, "grown", steps_done, f"the ranks start again, with {GROWTH}")
            self.mesh.barrier()
            raise Stopped("", EXIT_TO_GROW)
        exit_code = EXIT_INTERRUPTED if name == "SIGINT" else EXIT_STOPPED
        text = (
            f"stopped by {name} after {steps_done} {self.steps}; saved in {checkpoint}; the same command continues from"
            f" there, or: grpo-megatron train {shlex.quote(str(self.config.output_dir / 'config.yaml'))}"
        )
        if self.mesh.rank == 0:
            record(self.config.output_dir, "stopped", steps_done, checkpoint, exit_code)
            of_run = steps_done if self.steps == "steps" else None  # those of the warm-up have numbers of their own
            add_event(self.config.output_dir, "stopped", of_run, text)
            print(text, flush=True)
        self.mesh.barrier()  # torchrun ends all ranks when the first one ends: let rank 0 print and record first
        raise Stopped(text, exit_code)

    def finished(self, steps_done: int, checkpoint: Path | None) -> None:
        """Record that the run has done all its steps. Call it after everything else is written."""
        if self.mesh.rank == 0:
            record(self.config.output_dir, "done", steps_done, checkpoint, 0)
            add_event(self.config.output_dir, "done", steps_done)

    def _reason(self, steps_done: int) -> int:
        """Returns this rank's reason to stop, as an index into REASONS; 0 means none."""
        config = self.config
        if self.mesh.rank == 0:
            if config.stop_at is not None and time.time() + self._longest > config.stop_at:
                return REASONS.index("the time limit")
            if self._exceeds_budget() and steps_done < config.total_training_steps:
                return REASONS.index("reward.budget")
            if config.stop_file is not None and config.stop_file.exists():
                return REASONS.index("the stop file")
        request = requested() or (GROWTH if self._steps_until_growth == 0 else "")
        return REASONS.index("" if request == GROWTH and steps_done >= config.total_training_steps else request)

    def _spending(self) -> dict[str, float]:
        return {} if self._ledger is None else spent(self._ledger)[0]

    def _exceeds_budget(self) -> bool:
        """Returns whether a step that spends as much as the largest so far could exceed `reward.budget`."""
        if self._ledger is None:
            return False
        record_step(self._ledger, self._spent)
        self._spent = self._spending()
        return bool(exceeded(self._ledger, self._limits))


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


# -- Cadence -----------------------------------------------------------------------------------------------------------
# Cadence: what happens at which step. Pure functions of the step number, so that all ranks decide the same.
#
# Steps count from 0. "Before step s" means with the weights after s steps. `steps_done` counts completed steps, from 1: after
# step s it is s + 1. An outer iteration of iterative GRPO (arXiv:2402.03300, algorithm 1) is `iteration_steps` steps:
#
#     step                     0   1   2 | 3   4   5 | 6 ...          iteration_steps = 3
#     renew the reference                  *           *              before the first step of each iteration but the first
#     reward model learns              *           *                  after the last step of each iteration


class Cadence:
    """The calendar of a run. `iteration_steps` None: it has no outer iterations."""

    def __init__(self, trainer: TrainerConfig, iteration_steps: int | None) -> None:
        self.trainer, self.iteration_steps = trainer, iteration_steps

    def validates_before(self, step: int) -> bool:
        """Returns every `test_freq` steps, and before step 0 if `val_before_train`."""
        if step == 0:
            return self.trainer.val_before_train
        return self.trainer.test_freq > 0 and step % self.trainer.test_freq == 0

    def validates_at_end(self) -> bool:
        """Returns whether the final weights are validated: in every run that validates at all."""
        return self.trainer.test_freq > 0 or self.trainer.val_before_train

    def saves_after(self, steps_done: int) -> bool:
        """Returns every `save_freq` steps and after the last one; never if `save_freq` is -1."""
        if self.trainer.save_freq == -1:
            return False
        return steps_done % self.trainer.save_freq == 0 or steps_done == self.trainer.total_training_steps

    def renews_reference_before(self, step: int) -> bool:
        return self.iteration_steps is not None and step > 0 and step % self.iteration_steps == 0

    def reward_model_learns_after(self, step: int) -> bool:
        return self.iteration_steps is not None and (step + 1) % self.iteration_steps == 0

    def iteration_start(self, step: int) -> int:
        """Returns the first step of the outer iteration that holds `step`; 0 without outer iterations."""
        return 0 if self.iteration_steps is None else step - step % self.iteration_steps
