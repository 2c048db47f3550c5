"""The program that runs code of the tool `python`: limits itself, then executes the code. Standard library only.

    python -I sandbox.py LIMITS < code       LIMITS: {"cpu_s": 10, "memory": bytes, "file": bytes}

Where the kernel permits, it enters new namespaces: of the network, which has no interface, and of processes, which
shows it no process of others to signal. Elsewhere an audit hook refuses sockets and signals; code that calls C can evade it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import traceback
from typing import Any

CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWIPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
_PR_SET_PDEATHSIG = 1
OPEN_FILES = 64
REFUSED = ("socket.", "os.kill", "os.killpg", "signal.pthread_kill")  # beginnings of audit events


def main() -> None:
    """Run the code on stdin; the exit code is that of the code."""
    limits = json.loads(sys.argv[1])
    code = sys.stdin.buffer.read()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    is_isolated = _enter_namespaces()
    child = os.fork()  # the first process of the new namespace of processes; the others end with it
    if child:
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(ended if ended >= 0 else 128 - ended)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    _limit(limits)
    if not is_isolated:
        sys.addaudithook(_refuse)
    sys.argv = ["main.py"]
    sys.path.insert(0, os.getcwd())
    try:
        exec(compile(code, "main.py", "exec"), {"__name__": "__main__"})
    except Exception as error:  # noqa: BLE001 - the code's own; a traceback without this file
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace and trace.tb_next)
        sys.exit(1)


def _enter_namespaces() -> bool:
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    wanted = CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC
    return any(unshare(flags) == 0 for flags in (wanted, wanted | CLONE_NEWUSER))


def _limit(limits: dict[str, int]) -> None:
    bounds = {
        resource.RLIMIT_CPU: limits["cpu_s"],
        resource.RLIMIT_AS: limits["memory"],
        resource.RLIMIT_FSIZE: limits["file"],
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, bound in bounds.items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, (bound, bound))


def _refuse(event: str, _: Any) -> None:
    if event.startswith(REFUSED):
        raise PermissionError(f"{event} is not permitted here")


if __name__ == "__main__":
    main()
