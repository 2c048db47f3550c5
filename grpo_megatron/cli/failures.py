"""How a failed run reports its reason: once, and with a traceback unless the class of the error has `tells_what_to_do`.

A rank that fails writes a report into torchrun's error file. Who prints it depends on who started the ranks:

    our launcher    prints one report, after it has ended all ranks (`explain_failure`); the ranks print nothing
    torchrun        the first rank to fail prints; a lock on a shared file makes the other ranks wait meanwhile
    srun            ranks share no folder: all print, except that only rank 0 prints what is wrong with the config
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from grpo_megatron.config import ConfigError
from grpo_megatron.untrusted import cut, visible

LAUNCHER_PID = "GRPO_MEGATRON_LAUNCHER_PID"  # in the environment of ranks: the process that ends them, and prints
PF_EXITING = 0x4  # include/linux/sched.h: the kernel sets this flag before it closes the sockets of a dying process
ENDED_BY_AGENT = (-signal.SIGTERM, 128 + signal.SIGTERM)  # by default, and where training/stopping.py listens
END_FILE = "end"  # in the launcher's folder: written before it ends all ranks
AGENT_S = 60.0  # the agent needs about 0.1 s to find a dead rank; the limit is for an agent that never does
LOST_CONNECTION = re.compile("^(DistBackendError|DistNetworkError):|gloo/transport/")  # NCCL's errors, and gloo's
MAX_LINE, MAX_LINES = 2000, 200  # of an expected error: a value from a file may have megabytes
SRUN_S = 2.0  # srun --kill-on-bad-exit needs this time to end the ranks that would only report symptoms


@dataclass(frozen=True)
class FailureReport:
    """Why a rank has failed."""

    rank: int
    code: int  # exit code of the rank
    message: str  # the exception in short
    text: str  # what the user sees
    is_expected: bool
    is_symptom: bool  # another rank of this machine had died before
    time_ns: int  # of the monotonic clock, which all processes of a machine share
    is_loss: bool = False  # a rank has stalled, or a connection was lost
    ranks: tuple[int, ...] = ()  # the lost ones, where they are known


class Cause(NamedTuple):
    """Why the ranks have ended, for the user and for healing (cli/healing.py)."""

    code: int  # exit code of the run
    text: str  # "": nothing to report
    is_loss: bool = False  # a rank was lost; the program is not to blame
    ranks: tuple[int, ...] = ()  # the lost ones, where they are known
    is_final: bool = True  # the user has to do something, or has asked for the end
    message: str = ""  # the exception in one line


# -- in a rank ---------------------------------------------------------------------------------------------------------


def mark_started() -> None:
    """Write this rank's process id to a file, so that the other ranks can tell whether it has died."""
    folder = _torchrun_folder()
    if folder is not None:
        (folder / "pid").write_text(str(os.getpid()))


def has_started(folder: Path) -> bool:
    """Says if a rank has marked its start in `folder`, that of the launcher."""
    return any(folder.glob("*/*/*/pid"))


def mark_finished() -> None:
    """Removes that file: the rank has done its work, and its end is no failure."""
    folder = _torchrun_folder()
    if folder is not None:
        (folder / "pid").unlink(missing_ok=True)


def report_failure(error: Exception) -> int:
    """Report `error` once over all ranks of this machine; returns the exit code.

    An error is only a symptom when another rank of this machine had died before it, for instance "connection closed by
    peer". A rank with a symptom waits until torchrun's agent ends it, so that the agent finds the dead rank, not this one.
    """
    folder = _torchrun_folder()
    report = _describe(error, folder)
    is_written = folder is not None and _write(report, folder)
    if not is_one_of_several():
        print_error(report.text)
    elif folder is None:
        if not report.is_expected:
            time.sleep(SRUN_S)
        if report.code != 2 or report.rank == 0:
            print_error(report.text)
    else:
        if report.is_symptom:
            time.sleep(AGENT_S)
        if not (LAUNCHER_PID in os.environ and is_written):
            _print_once(report.text, folder.parent / "reported")
    return report.code


def is_lost() -> bool:
    """Says if a rank of this machine has failed or died, or the launcher ends all: no step can finish any more."""
    folder = _torchrun_folder()
    if folder is None:
        return False
    reported = any(folder.parent.glob("*/error.json"))
    return reported or (folder.parents[2] / END_FILE).exists() or _has_dead_rank(folder.parent)


def is_first() -> bool:
    """Says if this process is rank 0, or no rank at all."""
    return os.environ.get("RANK", "0") == "0"


def is_one_of_several() -> bool:
    """Says if this process is a rank that others may be ranks beside: of a larger world, or of our launcher."""
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (
        rank.isdecimal()
        and size.isdecimal()
        and int(rank) < int(size)
        and (int(size) > 1 or LAUNCHER_PID in os.environ)
    )


def is_debugging() -> bool:
    """Reads GRPO_DEBUG, which shows the traceback of every error, and the warnings of Megatron-Core and torch."""
    return os.environ.get("GRPO_DEBUG", "0") not in ("", "0")


def _torchrun_folder() -> Path | None:
    """Finds the folder of this rank among torchrun's logs, beside those of the machine's other ranks."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file).parent if file else None


def _describe(error: Exception, folder: Path | None) -> FailureReport:
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    is_limited = isinstance(error, OSError) and error.errno == errno.EFBIG
    is_expected = is_full or is_limited or getattr(error, "tells_what_to_do", False)
    message = str(error) if is_expected else f"{type(error).__name__}: {error}"
    message += "; make room, and start again" if is_full else ""
    message += "; raise the limit of a file's size (ulimit -f), and start again" if is_limited else ""
    text = ""
    if is_debugging() or not is_expected:
        text += "".join(traceback.format_exception(error))
    if is_expected:
        lines = message.splitlines()
        for line in lines[:MAX_LINES]:
            text += f"{cut(line, MAX_LINE)}\n" if line.startswith(" ") else f"error: {cut(line, MAX_LINE)}\n"
        if len(lines) > MAX_LINES:
            text += f"error: and {len(lines) - MAX_LINES:,} more lines\n"
    rank = os.environ.get("RANK", "0")
    return FailureReport(
        rank=int(rank) if rank.isdecimal() else 0,
        code=2 if isinstance(error, ConfigError) else 1,
        message=message,
        text=visible(text),
        is_expected=is_expected,
        is_symptom=folder is not None and _has_dead_rank(folder.parent),
        time_ns=time.monotonic_ns(),
        is_loss=getattr(error, "is_loss", False) or bool(LOST_CONNECTION.search(f"{type(error).__name__}: {error}")),
        ranks=tuple(getattr(error, "ranks", ())),
    )


def _has_dead_rank(folder: Path) -> bool:
    """Says if a rank of this machine has ended without a report and without having finished."""
    for file in folder.glob("*/pid"):
        with contextlib.suppress(OSError):  # the rank has just finished, or reported
            if not _is_alive(int(file.read_text())) and file.exists():
                return True
    return False


def _is_alive(pid: int) -> bool:
    """Says if a process lives: False as soon as other ranks can see that its connections are closed."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return sys.platform != "linux"
    state, flags = fields[0], int(fields[6])
    return state not in "ZX" and not flags & PF_EXITING


def _write(report: FailureReport, folder: Path) -> bool:
    """Write the file in which torchrun looks for the reason. Complete or absent: the agent may end this rank meanwhile."""
    content = {
        "message": {"message": report.message, "extraInfo": {"timestamp": int(time.time())}},
        "report": asdict(report),
    }
    try:
        (folder / "error.partial").write_text(json.dumps(content))
        os.replace(folder / "error.partial", os.environ["TORCHELASTIC_ERROR_FILE"])
        if not report.is_symptom:
            mark_finished()  # what breaks on other ranks from here on is explained by this report
    except OSError:
        return False
    return True


def _print_once(text: str, file: Path) -> None:
    """Print unless another rank has. The lock makes the others wait, since torchrun ends all when the first rank exits."""
    try:
        with file.open("a") as shared:
            fcntl.flock(shared, fcntl.LOCK_EX)
            if os.fstat(shared.fileno()).st_size == 0:
                print_error(text)
                shared.write("yes\n")
                shared.flush()
    except OSError:
        print_error(text)


def print_error(text: str) -> None:
    """Prints in one write, so that lines of several processes do not mix."""
    sys.stderr.write(text)
    sys.stderr.flush()


class _VisibleFormatter(logging.Formatter):
    """A warning may quote a file or an answer."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def quieten(is_rank: bool, starts_ranks: bool) -> None:
    """Show warnings in one process only: rank 0, or the only process."""
    shows_warnings = not starts_ranks and (not is_rank or os.environ["RANK"] == "0")
    handler = logging.StreamHandler()
    handler.setFormatter(_VisibleFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING if shows_warnings else logging.ERROR, handlers=[handler])
    silence_libraries()


def silence_libraries() -> None:
    """Hide warnings of libraries that the user cannot act on."""
    if not is_debugging():
        warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed\.")
        warnings.filterwarnings("ignore", message=".*deprecating ShardedTensor")  # Megatron-Core's checkpoints use it


# -- in the launcher ---------------------------------------------------------------------------------------------------


def last_place(output_dir: Path, rank: int) -> str:
    """Describes role, phase and step of a rank's last heartbeat, where ranks have roles; else ""."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        beat = json.loads((output_dir / "heartbeats" / f"rank_{rank:05d}.json").read_text())
        step = "" if beat["step"] is None else f" of step {beat['step']}"
        return f" ({beat['role']}, phase {beat['phase'] or 'start'}{step})" if beat["role"] else ""
    return ""


def explain_failure(
    error: Any, folder: Path, place: Callable[[int], str] = lambda rank: "", first_rank: int = 0
) -> Cause:
    """Finds why the run has failed, after all ranks have ended.

    `error` is torch's ChildFailedError and `folder` its log folder. The earliest report that is no symptom is the
    reason; without one, it is a rank that has died without a report. `place(rank)`: what such a rank was doing.
    `first_rank`: of this launcher.
    """
    from grpo_megatron.training.stopping import EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_TO_GROW

    failures = {first_rank + rank: failure for rank, failure in error.failures.items()}
    for code in (EXIT_STOPPED, EXIT_INTERRUPTED, EXIT_TO_GROW):
        if any(failure.exitcode == code for failure in failures.values()):
            return Cause(code, "")
    reports = []
    for file in folder.rglob("error.json"):
        with contextlib.suppress(OSError, ValueError, KeyError):  # torch's own report, of an error outside this program
            reports.append(FailureReport(**json.loads(file.read_text())["report"]))
    reports.sort(key=lambda report: report.time_ns)
    reasons = [report for report in reports if not report.is_symptom]
    silent = failures.keys() - {report.rank for report in reports}
    if silent and not reasons:
        # The agent ends the other ranks by SIGTERM: one that ended in another way is the reason.
        rank = min(silent, key=lambda rank: (failures[rank].exitcode in ENDED_BY_AGENT, rank))
        code = int(failures[rank].exitcode)
        if code >= 0:
            why = " and gave no reason" + (", or the server that forks the ranks was ended" if code == 255 else "")
            return Cause(code, f"error: rank {rank}{place(rank)} ended with exit code {code}{why}\n", is_final=False)
        name = failures[rank].signal_name()
        hint = " (the machine may have run out of memory: see dmesg)" if name == "SIGKILL" else ""
        text = f"error: rank {rank}{place(rank)} was ended by {name}{hint}\n"
        return Cause(128 - code, text, is_loss=True, ranks=(rank,), is_final=False)
    reason = (reasons or reports)[0]
    text, first_line = reason.text, reason.message.partition("\n")[0]
    if not reason.is_expected:
        text += f"error: rank {reason.rank}: {first_line} (its traceback is above)\n"
    is_final = reason.is_expected and not reason.is_loss
    return Cause(reason.code, text, reason.is_loss, tuple(reason.ranks), is_final=is_final, message=first_line)
