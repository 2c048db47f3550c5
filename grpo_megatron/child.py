"""Child processes that end when their parent ends. Standard library only: reward workers start with it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

PR_SET_PDEATHSIG = 1  # of prctl(2)


def die_with_parent(parent_pid: int) -> None:
    """Called by the child. On Linux the kernel sends it SIGKILL when its parent ends, however that happens.

    Ends this process at once if the parent has ended already. On other systems there is only this check.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # the parent ended before the call above


_forks_end_with: int | None = None  # a process id: the forks of that process end with it


@contextlib.contextmanager
def forks_end_with_this_process() -> Iterator[None]:
    """Inside, every process that the main thread forks ends when this one ends. For libraries that fork."""
    global _forks_end_with
    _forks_end_with = os.getpid()
    try:
        yield
    finally:
        _forks_end_with = None


def _after_fork() -> None:
    if _forks_end_with is not None:
        die_with_parent(_forks_end_with)


os.register_at_fork(after_in_child=_after_fork)
