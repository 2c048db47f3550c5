"""A process as the operating system sees it: it limits itself, ends with its parent, and all that it has started ends
with it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
import signal
import sysconfig
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

MAX_TEXT_OF_ERROR = 500  # characters
# Files of this package, of Python and of installed packages; "<": code without a file.
_NOT_OF_USERS = (
    f"{Path(__file__).parents[1]}/",
    "<",
    *(sysconfig.get_path(of) for of in ("stdlib", "purelib", "platlib")),
)
_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)


def describe(error: BaseException) -> str:
    """Returns type and text of an exception, at most MAX_TEXT_OF_ERROR characters."""
    try:
        return valid_text(f"{type(error).__name__}: {error}"[:MAX_TEXT_OF_ERROR])
    except Exception:  # noqa: BLE001 - an exception whose __str__ raises
        return type(error).__name__


def describe_raised(error: BaseException) -> str:
    """Returns `describe(error)` and the last line of the user's code in its traceback: file name and number."""
    text = describe(error)
    with contextlib.suppress(Exception):  # a patched builtin
        places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        file, line = [place for place in places if not place[0].startswith(_NOT_OF_USERS)][-1]
        text += f" ({Path(file).name}, line {line})"
    return text


def describe_exit(code: int) -> str:
    """Says how a process ended. `code` is negative for a signal, as in `subprocess`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


# -- limits that a process sets on itself ------------------------------------------------------------------------------


def limit_memory(size: int | None) -> None:
    """Limits the address space to `size` bytes above what is mapped now, where the system can. None: no limit."""
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = hard
        if size is not None:
            with open("/proc/self/statm") as file:
                limit = int(file.read().split()[0]) * resource.getpagesize() + size
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


class _OutOfTime(BaseException):
    """No Exception: libraries such as sympy catch those in many places."""


@contextlib.contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Raises TimeoutError when the block takes more processor seconds; `what` begins the message.

    Processor time does not depend on how busy the machine is. Works on the main thread only, by SIGVTALRM. On another
    thread, or inside another limit, there is no limit.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        yield
        return

    def stop(*_: object) -> None:
        raise _OutOfTime

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.5)  # repeated, because an exception in a destructor is lost
    try:
        yield
    except _OutOfTime:
        raise TimeoutError(f"{what} took more than {seconds:g} s of processor time") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


# -- all processes that a worker has started, also those that have left its process group, session and parent -----------
# A worker is marked by a variable of its environment, which its descendants inherit. A descendant that replaces its
# environment is still found by its chain of parents while the worker runs, because the worker adopts the orphans below it.
# One that hides in both ways and outlives its worker is not found. Linux only (CONFIG_PROC_CHILDREN); elsewhere only the
# worker's process group is ended.

MARK = "GRPO_MEGATRON_WORKER"  # PID.START TIME of the worker's parent, then a random number
MAX_ROUNDS = 100  # of looking for new processes, which a fork bomb would start for ever


def new_mark() -> str:
    """Returns the value of MARK for a worker that this process starts."""
    return f"{os.getpid()}.{start_ticks(os.getpid())}.{uuid.uuid4().hex}"


def adopt_orphans() -> None:
    """Makes a worker the parent of the orphans below it."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Has the kernel send SIGKILL to this process when its parent ends, however that happens (Linux).

    Ends this process at once if the parent has ended already. On other systems there is only this check.
    """
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # the parent ended before the call above


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(option, value)


def end_family(worker_pid: int, mark: str) -> None:
    """Sends SIGKILL to a worker that has not been waited for yet, and to all that it has started."""
    _end(lambda: tree(worker_pid) | _marked(lambda value: value == mark))


def end_tree(root: int) -> None:
    """Sends SIGKILL to a child of this process that has not been waited for, and to everything below it."""
    _end(lambda: tree(root))


def end_adopted(known: Set[int]) -> bool:
    """Sends SIGKILL to the children of this process that are not `known`, and below them: orphans that it has adopted.

    Also waits for those that have ended. Returns True while there are any; they end a moment later.
    """
    _end(lambda: {pid for child in child_pids(os.getpid()) - known for pid in tree(child)})
    left = child_pids(os.getpid()) - known
    for child in left:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, os.WNOHANG)
    return bool(left)


def end_orphans() -> None:
    """Sends SIGKILL to the processes of this user that workers of a killed run have left behind."""
    _end(lambda: _marked(_is_orphaned))


def tree(root: int) -> set[int]:
    """Returns `root` and everything below it."""
    pids, pending = {root}, [root]
    while pending:
        below = child_pids(pending.pop()) - pids
        pids |= below
        pending += below
    return pids


def _end(find: Callable[[], set[int]]) -> None:
    """Stops all before it kills the first: a stopped process starts no other, and hands no child to another parent."""
    stopped: set[int] = set()
    for _ in range(MAX_ROUNDS):
        new = find() - stopped - {os.getpid()}
        if not new:
            break
        _send(new, signal.SIGSTOP)
        stopped |= new
    _send(stopped, signal.SIGKILL)


def _send(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def child_pids(pid: int) -> set[int]:
    """Returns the children of a process."""
    pids: set[int] = set()
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                pids.update(map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()))
    return pids


def _marked(is_wanted: Callable[[str], bool]) -> set[int]:
    """Returns the processes of this user whose MARK fulfils the condition."""
    pids = set()
    start = f"{MARK}=".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            for entry in path.read_bytes().split(b"\0"):
                if entry.startswith(start) and is_wanted(entry[len(start) :].decode(errors="replace")):
                    pids.add(int(path.parent.name))
    return pids


def _is_orphaned(mark: str) -> bool:
    pid, _, rest = mark.partition(".")
    return pid.isdigit() and str(start_ticks(int(pid)) or "") != rest.partition(".")[0]


def start_ticks(pid: int | str = "self") -> int:
    """Returns when a process was started, in clock ticks since the machine was; 0 without such a process.

    A process id can be given to another process later. Together with this number it belongs to one process.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


# -- what the user's code returns --------------------------------------------------------------------------------------

LARGEST_NUMBER = 3.4e38  # of float32, in which metrics are stored
MAX_REWARD = 1e9  # sums of squares of rewards stay far below LARGEST_NUMBER
MAX_NAME = 100  # characters of a metric's name


def finite_number(name: str, value: object, largest: float = LARGEST_NUMBER) -> float:
    """Reads a number that the user's code returned. Raises ValueError. Scalars of numpy and torch are numbers; a text is not."""
    if not (hasattr(type(value), "__float__") or hasattr(type(value), "__index__")):
        raise ValueError(f"{name} is {type(value).__name__}, not a number")
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:  # an integer
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}, not a finite number")
    if abs(number) > largest:
        raise ValueError(f"{name} is {number:g}; it must be between -{largest:g} and {largest:g}: scale it")
    return number


def metric_name(name: object) -> str:
    """Returns a name that every tracker and TensorBoard can write: letters, digits and ` ./:@-`, at most MAX_NAME characters."""
    text = re.sub(r"[^\w ./:@-]", "_", str(name)[:MAX_NAME])
    return "/".join(part for part in text.split("/") if part.strip(". ")) or "_"


def by_metric_name(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Returns the values by `metric_name`. Raises ValueError where two names become one."""
    written: dict[str, Any] = {}  # name -> what it was
    for key in values:
        if (other := written.setdefault(name := metric_name(key), key)) is not key:
            raise ValueError(
                f"{str(other)[:MAX_NAME]!r} and {str(key)[:MAX_NAME]!r} are both written as {name!r}; rename one"
            )
    return {name: values[key] for name, key in written.items()}


def valid_text(text: str) -> str:
    """Replaces lone surrogates, which JSON can spell and no file or tokenizer can encode, by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
