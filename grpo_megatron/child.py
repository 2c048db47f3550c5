"""Child processes that end when their parent ends. Standard library only: reward workers start with it."""

from __future__ import annotations

import os
import signal
import sys

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
