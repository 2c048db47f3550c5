"""What a process is doing: the main thread of this one, and the state of another process of this machine. Linux only.

A main thread is *idle* when it works on nothing that could end its wait. All of this must hold:

    the whole process used less than 2 % of a core since the last look (the time of the thread that looks is left out)
    the kernel says that the main thread sleeps (S); a thread that waits for a disk (D) or for a core (R) is not idle
    it waits for no other rank, no other process, no connection and no prompt of a debugger: none of its innermost
    Python frames is in one of the modules of WAITS

A thread that waits for a GPU is not idle either: CUDA waits by spinning, unless it was told otherwise.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

FOR_RANKS = ("torch.distributed", "megatron.core.distributed", "megatron.core.pipeline_parallel.p2p_communication")
FOR_CONTROL = ("grpo_megatron.parallel.neighbours",)
FOR_ENGINES = ("vllm.distributed", "transformer_engine.pytorch.distributed")
FOR_PROCESSES = ("multiprocessing", "subprocess", "concurrent", "queue", "asyncio", "zmq")
FOR_CONNECTIONS = ("selectors", "socket", "ssl", "http", "urllib", "urllib3", "pdb", "bdb", "cmd")
WAITS = FOR_RANKS + FOR_CONTROL + FOR_ENGINES + FOR_PROCESSES + FOR_CONNECTIONS
INNERMOST = 4  # frames; a deeper one has called the code that does not return
BUSY = 0.02  # share of a core


class MainThread:
    """Looks at the main thread of this process, from another thread."""

    def __init__(self) -> None:
        thread = threading.main_thread()
        self._ident, self._stat = thread.ident, Path(f"/proc/self/task/{thread.native_id}/stat")
        self._last, self._cpu = time.monotonic(), self._cpu_seconds()

    def look(self) -> tuple[str, bool]:
        """Where the main thread is, "function (file.py:12)", and whether it was idle at this look and since the last one."""
        now, cpu = time.monotonic(), self._cpu_seconds()
        is_busy = cpu - self._cpu > BUSY * (now - self._last)
        self._last, self._cpu = now, cpu
        frame = sys._current_frames().get(self._ident or 0)
        if frame is None:
            return "", False
        where = f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        return where, not is_busy and not _waits(frame) and _state(self._stat) == "S"

    @staticmethod
    def _cpu_seconds() -> float:
        return time.process_time() - time.thread_time()


def _waits(frame: FrameType | None) -> bool:
    for _ in range(INNERMOST):
        if frame is None:
            return False
        module = str(frame.f_globals.get("__name__", ""))
        if any(module == name or module.startswith(f"{name}.") for name in WAITS):
            return True
        frame = frame.f_back
    return False


def _state(stat: Path) -> str:
    """The state in a stat file of /proc, as one letter; "" if there is none."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def start_ticks(pid: int | str = "self") -> int:
    """When a process was started, in clock ticks since the machine was; 0 without such a process.

    A process id can be given to another process later. Together with this number it belongs to one process.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def describe_process(pid: int) -> str:
    """What the kernel says about a process of this machine, for a report."""
    state = _state(Path(f"/proc/{pid}/stat"))
    if state in ("T", "t"):
        return f"the process is stopped, by SIGSTOP or a debugger, and cannot write its stack (`kill -CONT {pid}` continues it)"
    if state == "D":
        return "the process waits in the kernel, for a disk, a network file system or a driver (state D)"
    if state in ("", "Z", "X"):
        return "the process has ended"
    return "the process runs, but none of its Python threads does: code in C keeps Python's lock"


def same_process(pid: int, ticks: int) -> bool:
    """Whether process `pid` of this machine is the one that was started at `ticks`."""
    return ticks != 0 and start_ticks(pid) == ticks and pid != os.getpid()
