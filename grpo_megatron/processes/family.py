"""All processes that a worker has started, also those that have left its process group, session and parent.

A worker is marked by a variable of its environment, which its descendants inherit. A descendant that replaces its
environment is still found by its chain of parents, as long as the worker runs: the worker adopts the orphans below it
(PR_SET_CHILD_SUBREAPER). A process that hides in both ways and outlives its worker is not found. Linux only; on other
systems only the worker's process group is ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import uuid
from collections.abc import Callable, Set
from pathlib import Path

MARK = "GRPO_MEGATRON_WORKER"  # PID.START TIME of the worker's parent, then a random number
PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)
MAX_ROUNDS = 100  # of looking for new processes, which a fork bomb would start for ever


def new_mark() -> str:
    """The value of MARK for a worker that this process starts."""
    return f"{os.getpid()}.{_start_time(os.getpid())}.{uuid.uuid4().hex}"


def adopt_orphans() -> None:
    """Called by a worker."""
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_family(worker_pid: int, mark: str) -> None:
    """SIGKILL to the descendants of a worker that has not been waited for yet, and to the worker."""
    _end(lambda: _descendants(worker_pid) | _marked(lambda value: value == mark))


def end_tree(root: int) -> None:
    """SIGKILL to a child of this process that has not been waited for, and to everything below it."""
    _end(lambda: _tree(root))


def end_adopted(known: Set[int]) -> None:
    """SIGKILL to the children of this process that are not `known`, and below them: orphans that it has adopted."""
    _end(lambda: {pid for child in _children(os.getpid()) - known for pid in _tree(child)})


def count_below(root: int) -> int:
    """How many processes run below `root`. 0 where the kernel does not tell."""
    return len(_tree(root)) - 1


def end_orphans() -> None:
    """SIGKILL to the processes of this user that workers of a killed run have left behind."""
    _end(lambda: _marked(_is_orphaned))


def _end(find: Callable[[], set[int]]) -> None:
    """Stop all before killing the first: a stopped process starts no other, and hands no child to another parent."""
    found: set[int] = set()
    for _ in range(MAX_ROUNDS):
        new = find() - found - {os.getpid()}
        if not new:
            break
        _send(new, signal.SIGSTOP)
        found |= new
    _send(found, signal.SIGKILL)


def _send(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _processes() -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return []


def _descendants(root: int) -> set[int]:
    """`root` and everything below it."""
    children: dict[int, list[int]] = {}
    for pid in _processes():
        if fields := _stat(pid):
            children.setdefault(int(fields[1]), []).append(pid)
    found, pending = {root}, [root]
    while pending:
        below = children.get(pending.pop(), [])
        found.update(below)
        pending += below
    return found


def _tree(root: int) -> set[int]:
    """As `_descendants`, but reads nothing of other processes; the kernel must list children (CONFIG_PROC_CHILDREN)."""
    found, pending = {root}, [root]
    while pending:
        below = _children(pending.pop()) - found
        found |= below
        pending += below
    return found


def _children(pid: int) -> set[int]:
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found.update(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))
    return found


def _marked(is_wanted: Callable[[str], bool]) -> set[int]:
    """The processes whose MARK fulfils the condition. Only those of this user can be read."""
    found = set()
    start = f"{MARK}=".encode()
    for pid in _processes():
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if entry.startswith(start) and is_wanted(entry[len(start) :].decode(errors="replace")):
                    found.add(pid)
    return found


def _is_orphaned(mark: str) -> bool:
    pid, _, rest = mark.partition(".")
    return pid.isdigit() and _start_time(int(pid)) != rest.partition(".")[0]


def _start_time(pid: int) -> str:
    """In clock ticks since boot; with the number of the process it names a process for ever. "" if there is none."""
    fields = _stat(pid)
    return fields[19] if fields else ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent, ... Empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


# -- children that end when their parent ends --------------------------------------------------------------------------

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
