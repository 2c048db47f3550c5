"""Isolation of programs of the tool `python` from the machine: by what this machine has, tried out before it is used.

bwrap      bubblewrap 0.7 or newer: namespaces, no capabilities, READABLE_PATHS, three devices, /tmp in memory, no /proc
landlock   Linux 5.13 or newer: Landlock opens the same files, and a temporary folder
none       only with `unsafe`, where the others are impossible: every file of its user
In all of them sandbox.py adds limits, a filter of system calls and, started as root, another user for each program, in no
group and with no files. Without bwrap that user must be able to read this Python.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from grpo_megatron.environments.tools import sandbox
from grpo_megatron.processes.process import MARK, describe_exit, end_tree
from grpo_megatron.storage.files import private_folder

VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
READABLE_PATHS = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime")  # and the folders of this Python
FOLDER_FILES = 4  # the folder has space for so many of the largest files
LOOK_S = 0.02  # between looks at the size of a folder on disk
MAX_FILES, MAX_PATH_LENGTH = 5000, 2000  # in a folder on disk: files and folders, characters
MIB = 1 << 20
MAX_PRINTED = 1 << 20  # bytes of output that the model is shown; of more, none is right
PROBE = "import fractions; print(fractions.Fraction(2, 4))"  # imports Python and C that sandbox.py does not
PROBE_S = 60.0


class ProgramLimits(NamedTuple):
    """Bounds of one program."""

    timeout_s: float = 10.0
    memory_mib: int = 1024
    file_mib: int = 16  # of each file, and of the output
    max_printed: int = MAX_PRINTED


@functools.cache
def find_isolation(unsafe: bool = False) -> str:
    """Returns the first kind that works on this machine. Raises ValueError: none does."""
    problems = []
    for kind in ("bwrap", "landlock", "none") if unsafe else ("bwrap", "landlock"):
        text, problem = run_program(PROBE, ProgramLimits(PROBE_S), kind)
        if (text, problem) == ("1/2\n", ""):
            return kind
        problems.append(f"{kind}: {' '.join((text or problem).split())[-120:]}")
    if closed := _closed_folder():
        problems.append(
            f"{closed} is closed to other users (mode {stat.S_IMODE(os.stat(closed).st_mode):04o}), and this Python is in"
            f" it: programs of root run as another user; chmod o+x {closed}, or install elsewhere"
        )
    raise ValueError(
        "the tool python cannot isolate programs on this machine; install bubblewrap 0.7 or newer, or use a kernel with"
        " Landlock and, as root, a Python that all users can read; or let programs read and change files here, with"
        " rollout.multi_turn.kwargs={python: {unsafe: true}}, or of a reward with reward.kwargs={unsafe: true} or --unsafe"
        f" ({'; '.join(problems)})"
    )


def run_program(code: str, limits: ProgramLimits, kind: str, stdin: str = "") -> tuple[str, str]:
    """Runs a program that may read `stdin`. Returns (its output, how it failed or "")."""
    uid = other_user(threading.get_native_id()) if os.geteuid() == 0 else None
    settings = {
        "cpu_s": int(limits.timeout_s) + 1,
        "memory": limits.memory_mib * MIB,
        "file": limits.file_mib * MIB,
        "uid": uid,
        "readable": _readable() if kind == "landlock" else None,
    }
    problem, bwrap = "", shutil.which("bwrap")
    if kind == "bwrap" and bwrap is None:
        return "", "bwrap is not installed"
    with contextlib.ExitStack() as opened:
        alive, writing = os.pipe()  # `writing` is closed when this process ends, however that happens
        opened.callback(os.close, writing)
        opened.callback(os.close, alive)
        given = opened.enter_context(tempfile.TemporaryFile())
        given.write(stdin.encode("utf-8", "replace"))
        given.flush()
        reading = os.open(f"/proc/self/fd/{given.fileno()}", os.O_RDONLY)
        opened.callback(os.close, reading)
        settings |= {"alive": alive, "stdin": reading}
        command = [sys.executable, "-I", "-u", sandbox.__file__, json.dumps(settings)]
        folder = "/tmp"
        if kind == "bwrap":
            command = [str(bwrap), *_bwrap_options(FOLDER_FILES * limits.file_mib * MIB), *command]
        else:
            folder = _working_folder(opened.enter_context(private_folder()), uid)
        # files: a program that prints without end meets the limit on files, and no pipe is waited for
        program, printed = (opened.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        program.write(code.encode("utf-8", "replace"))
        program.seek(0)
        process = subprocess.Popen(
            command,
            stdin=program,
            stdout=printed,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=VARIABLES | {"HOME": folder, "TMPDIR": folder, MARK: os.environ.get(MARK, "")},
            start_new_session=True,
            pass_fds=[alive, reading],
        )
        watched = "" if kind == "bwrap" else folder
        problem = _wait(process, limits.timeout_s, watched, FOLDER_FILES * limits.file_mib)
        ended = process.wait()
        size = printed.seek(0, os.SEEK_END)
        printed.seek(0)
        text = printed.read(limits.max_printed).decode("utf-8", "replace")
    if size > limits.max_printed:
        problem = f"the program has printed more than {limits.max_printed} bytes"
    if ended and not problem:  # bwrap returns 128 + signal
        problem = f"the program has ended: {describe_exit(128 - ended if 128 < ended <= 128 + 64 else ended)}"
    return text, problem


def _wait(process: subprocess.Popen[bytes], seconds: float, folder: str, max_mib: int) -> str:
    """Waits for the end, or ends it: late, or when its folder on disk is full. Returns why it was ended, or "".

    `Popen.wait` would sleep 32 ms where a program takes 40 ms. The size is read every LOOK_S, so more may be there then.
    """
    handle, poll, end = os.pidfd_open(process.pid), select.poll(), time.monotonic() + seconds
    poll.register(handle, select.POLLIN)
    try:
        while not poll.poll(1000 * min(LOOK_S, max(end - time.monotonic(), 0))):
            if time.monotonic() >= end:
                return f"the program has not ended after {seconds:g} s"
            if folder and (problem := _overfull(process.pid, folder, max_mib)):
                return problem
        return _overfull(process.pid, folder, max_mib) if folder else ""
    finally:
        os.close(handle)
        if process.poll() is None:
            end_tree(process.pid)


def _overfull(pid: int, folder: str, max_mib: int) -> str:
    """Says what is too much in a folder, or "". Files that are open and have no name count where the kernel shows them."""
    size, count, pending = 0, 0, [folder, f"/proc/{pid}/fd"]
    while pending:
        path = pending.pop()
        if len(path) > MAX_PATH_LENGTH:
            return "the program has nested its folders too deeply"
        if path.startswith(folder) and not os.access(path, os.R_OK) and os.path.lexists(path):
            return "the program has a folder that cannot be read"
        with contextlib.suppress(OSError):  # it may be gone
            for entry in os.scandir(path):
                with contextlib.suppress(OSError):
                    is_open = not entry.path.startswith(folder)
                    about = os.stat(entry.path) if is_open else entry.stat(follow_symlinks=False)
                    if is_open and (about.st_nlink or not stat.S_ISREG(about.st_mode)):
                        continue
                    size, count = size + 512 * about.st_blocks, count + 1
                    if stat.S_ISDIR(about.st_mode):
                        pending.append(entry.path)
        if size > max_mib * MIB or count > MAX_FILES:
            return f"the program has written more than {max_mib} MiB, or {MAX_FILES} files"
    return ""


def other_user(number: int) -> int:
    """Returns a user id at the end of those that this process may take.

    `number`: the id of the running thread or process that it is for.
    """
    maps = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first, _, count = max(maps, key=lambda one: one[2])
    return first + count - 3 - number % max(count // 16, 1)


def _readable() -> list[str]:
    python = [Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parents[1]]
    return [*READABLE_PATHS, *dict.fromkeys(str(path) for path in python if not path.is_relative_to("/usr"))]


def _closed_folder() -> Path | None:
    """Finds the first folder on the way to this Python that the other user of root's programs cannot enter."""
    folders = (folder for path in map(Path, (*_readable(), sandbox.__file__)) for folder in (*path.parents[::-1], path))
    closed = (folder for folder in folders if folder.is_dir() and not folder.stat().st_mode & stat.S_IXOTH)
    return next(closed, None) if os.geteuid() == 0 else None


def _bwrap_options(folder_bytes: int) -> list[str]:
    command = ["--die-with-parent", "--cap-drop", "ALL"]
    if os.geteuid():
        command += ["--unshare-user"]
    else:  # to become another user; with that, sandbox.py loses them
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    command += [f"--unshare-{name}" for name in ("pid", "net", "ipc", "uts", "cgroup-try")]
    files = [*_readable(), sandbox.__file__]
    for parent in sorted({str(parent) for path in (*files, *sandbox.DEVICES) for parent in Path(path).parents} - {"/"}):
        command += ["--perms", "0755", "--dir", parent]
    for path in files:
        command += ["--ro-bind-try", path, path]
    for path in sandbox.DEVICES:
        command += ["--dev-bind", path, path]
    return [
        *command,
        *("--perms", "1777", "--size", str(folder_bytes), "--tmpfs", "/tmp"),
        *("--remount-ro", "/", "--chdir", "/tmp"),
    ]


def _working_folder(private: Path, uid: int | None) -> str:
    """Makes a folder within one that stays this user's, so that the next start can remove it."""
    folder = private / "work"
    folder.mkdir(0o700)
    if uid is not None:
        private.chmod(0o711)
        os.chown(folder, uid, uid)
    return str(folder)
