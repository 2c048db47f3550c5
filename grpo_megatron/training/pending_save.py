"""PendingSave: a checkpoint whose files a thread writes while the run goes on (trainer.async_save).

The thread of each rank writes that rank's files from copies, and does not communicate. Between steps the ranks compare whether
all threads are done; the main thread then finishes the checkpoint. Until then it has a hidden name, and the one before it stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from grpo_megatron.models.weights.sharded_state import Writes
from grpo_megatron.parallel.mesh import Mesh, RankError


class PendingSave:
    """Starts its thread at once. `complete` is called once, by the main thread of every rank, when all files are written."""

    def __init__(self, step: int, writes: Writes, mesh: Mesh, task: str, complete: Callable[[], None]) -> None:
        self.step, self.mesh, self.task, self.complete = step, mesh, task, complete
        self._writes, self._error = writes, ""
        self._thread = threading.Thread(target=self._run, name="checkpoint writer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._writes.write()
        except Exception as error:  # it must reach all ranks: a thread's error is only printed
            self._error = f"{self.task}: {type(error).__name__}: {error}"

    def poll(self) -> bool:
        """Collective: True once the checkpoint is complete. Raises RankError on every rank when any rank could not write."""
        is_done = not self._thread.is_alive()
        try:
            self.mesh.agree(self._problem())
        except RankError:
            self._thread.join()  # nothing is written after the error
            raise
        if not all(self.mesh.all_gather(is_done)):
            return False
        self.complete()
        return True

    def wait(self) -> None:
        """Collective: as `poll`, and returns when the checkpoint is complete."""
        self._thread.join()
        self.poll()

    def _problem(self) -> str | None:
        return self._error or self._writes.problem()
