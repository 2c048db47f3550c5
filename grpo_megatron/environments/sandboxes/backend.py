"""Sandbox: a place of its own for the agent of one trajectory, by a backend: local.py, containers.py, or a class of the user.

A backend implements `start`, `run` and `stop`; `read` and `write` are archives that tar makes and unpacks inside, so that no
link of an agent is ever followed outside. `SandboxError` is a failure of the machinery, never of the agent's commands.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import tarfile
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, TypeVar

from grpo_megatron.data.folders import FolderTask
from grpo_megatron.processes.process import describe_exit, end_tree
from grpo_megatron.registry import Registry, import_function

T = TypeVar("T")
ATTEMPTS, PAUSE_S = 3, 0.5  # of what fails in the machinery; seconds before the second one
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
EXCESS_LOOK_S = 0.03  # between looks at a running command, at least; a look takes at most a tenth of the time
TRANSFER_S = 120.0  # of a read or a write
ATTACHED_S = 600.0  # of a command that an agent of its own runs


class SandboxError(RuntimeError):
    """A failure of a sandbox. What the agent did is no reason for it."""


class SandboxContentError(SandboxError):
    """A file or folder that cannot be read: the agent's doing."""


@dataclass(frozen=True)
class SandboxLimits:
    """The bounds of one sandbox. A task's own bounds replace `cpus`, `memory_mib` and `disk_mib` where they are smaller."""

    cpus: int = 1  # cores
    memory_mib: int = 1024  # of all processes together
    disk_mib: int = 512  # of all files together; a single one may have all of it
    files: int = 20_000
    processes: int = 48
    network: bool = False


@dataclass(frozen=True)
class CommandResult:
    """The end of a command. `problem`: why the sandbox ended it ("": it ended itself); output beyond a bound is cut."""

    output: bytes
    exit_code: int
    problem: str = ""
    timed_out: bool = False

    def text(self) -> str:
        """Returns the output as text."""
        return self.output.decode("utf-8", "replace")


class Sandbox(ABC):
    """One sandbox, from `start` to `stop`. `options`: what the backend takes from `rollout.multi_turn.kwargs`."""

    options: ClassVar[dict[str, Any]] = {}  # name -> default
    runs_here = False  # True: the task's image is not used, but this machine's programs

    def __init__(self, task: FolderTask, limits: SandboxLimits, **options: Any) -> None:
        self.task, self.limits, self.chosen = task, limits, {**self.options, **options}
        self.folder = task.workdir  # the working one; None: the image's

    @classmethod  # noqa: B027 - optional
    def prepare(cls, limits: SandboxLimits, **options: Any) -> None:
        """Once per worker: checks that sandboxes can be started, and sweeps what killed runs left. Raises ValueError."""

    @abstractmethod
    def start(self) -> None:
        """Makes the task's environment. Raises SandboxError, and ValueError for a task that this backend cannot run."""

    @abstractmethod
    def run(
        self,
        command: Sequence[str],
        timeout_s: float,
        *,
        stdin: bytes = b"",
        variables: Mapping[str, str] | None = None,
        max_output: int = 1 << 20,
    ) -> CommandResult:
        """Runs a program in the working folder. Raises SandboxError where it could not be started."""

    @abstractmethod
    def stop(self) -> None:
        """Ends all and removes all. Idempotent."""

    def check_folder(self) -> None:
        """Raises ValueError where the task's image names no working folder."""
        if self.folder == "/":
            text = "its image has no WORKDIR, in which the agent works; add one to the Dockerfile"
            raise ValueError(f"task {self.task.name}: {text}")

    def end_processes(self) -> None:  # noqa: B027 - optional
        """Ends all that still runs; files stay."""

    def state(self) -> dict[str, Any]:
        """Returns what `attach` needs to run commands from another process of this machine."""
        raise NotImplementedError

    def attach(self, state: Mapping[str, Any]) -> None:
        """Takes over a started sandbox, which its owner stops."""
        raise NotImplementedError

    def read(self, path: str, max_bytes: int) -> bytes:
        """Reads a regular file. Raises FileNotFoundError: there is none; SandboxError: it is larger."""
        script = '[ -f "$1" ] && [ ! -L "$1" ] || exit 3; exec head -c "$2" "$1"'
        result = self.run(["sh", "-c", script, "sh", path, str(max_bytes + 1)], TRANSFER_S, max_output=max_bytes + 1)
        if result.exit_code == 3:
            raise FileNotFoundError(path)
        return self._complete(result, max_bytes, f"reading {path}")

    def read_folders(self, paths: Sequence[str], max_bytes: int) -> bytes:
        """Reads folders as an archive (tar) with paths from the root, links as links. One that is missing is left out."""
        script = 'for path; do shift; [ -d "$path" ] && set -- "$@" "${path#/}"; done; exec tar -C / -cf - -- "$@"'
        result = self.run(["sh", "-c", script, "sh", *paths], TRANSFER_S, max_output=max_bytes + 1)
        archive = self._complete(result, max_bytes, f"reading {', '.join(paths)}")
        try:  # an agent that is root in its container may have replaced tar
            for entry in tarfile.open(fileobj=io.BytesIO(archive), mode="r:"):  # noqa: SIM115
                for name in (entry.name, entry.linkname if entry.islnk() else entry.name):
                    path = PurePosixPath("/", name)
                    if ".." in path.parts or not any(path.is_relative_to(folder) for folder in paths):
                        raise SandboxContentError(f"the archive of {', '.join(paths)} has {name[:200]!r}")
        except tarfile.TarError as error:
            raise SandboxContentError(f"the archive of {', '.join(paths)} cannot be read: {error}") from error
        return archive

    def write(self, folders: Sequence[str], archive: bytes) -> None:
        """Empties folders, or makes them, and unpacks archives one behind the other at the root. Raises SandboxError."""
        script = 'mkdir -p -- "$@" && find "$@" -mindepth 1 -delete && exec tar -C / -xif - --no-same-owner'
        result = self.run(["sh", "-c", script, "sh", *folders], TRANSFER_S, stdin=archive)
        self._complete(result, 1 << 20, f"writing {', '.join(folders)}")

    def _complete(self, result: CommandResult, max_bytes: int, what: str) -> bytes:
        if result.exit_code or result.problem or len(result.output) > max_bytes:
            reason = result.problem or (
                f"exit code {result.exit_code}: {result.text()[-200:].strip()}" if result.exit_code else ""
            )
            is_full = not result.problem or self.run(["true"], TRANSFER_S).problem  # too much is there, whatever runs
            kind = SandboxContentError if is_full else SandboxError
            raise kind(f"{what}: {reason or f'it has more than {max_bytes} bytes'}")
        return result.output


backends: Registry[type[Sandbox]] = Registry(
    "sandbox",
    [f"grpo_megatron.environments.sandboxes.{name}" for name in ("local", "containers", "hosted")],
    "my_module:Class",
)


def run_attached(sandbox: Sequence[str], command: str, timeout_s: float = ATTACHED_S) -> CommandResult:
    """Runs a command in a sandbox that an environment has started. `sandbox`: the agent's `row["sandbox"]`.

    It is the same as to run the program [*sandbox, command], without the start of a Python.
    """
    state = json.loads(sandbox[-1])
    backend: Any = import_function(state["class"])
    attached: Sandbox = backend(FolderTask("attached", ""), SandboxLimits(**state["limits"]), **state["chosen"])
    attached.attach(state["state"])
    return attached.run(["bash", "-c", command], timeout_s, variables=state["variables"])


def make_archive(files: Mapping[str, Path | bytes]) -> bytes:
    """Makes an archive: path -> a file or folder of this machine, or content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, source in files.items():
            name = path.lstrip("/")
            if isinstance(source, bytes):
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(source), 0o755
                archive.addfile(entry, io.BytesIO(source))
            else:
                archive.add(source, name)
    return buffer.getvalue()


def run_bounded(
    start: Callable[[int, int], int],
    timeout_s: float,
    stdin: bytes,
    max_output: int,
    excess: Callable[[int], str] | None = None,
) -> CommandResult:
    """Runs a child process to its end, or ends it and all below it: late, or when `excess(pid)` says why.

    `start(stdin, output)` starts it on two descriptors, and returns its id. `excess` is called now and then, and once after
    the end with 0. Raises SandboxError where no process can be started.
    """
    output, problem, late, is_open = bytearray(), "", False, True
    with contextlib.ExitStack() as opened:
        given = opened.enter_context(tempfile.TemporaryFile())
        given.write(stdin)
        given.seek(0)
        pipe, writing = os.pipe()
        opened.callback(os.close, pipe)
        try:
            pid = start(given.fileno(), writing)
        except OSError as error:
            raise SandboxError(f"no process can be started: {error}") from error
        finally:
            os.close(writing)
        code = None
        try:
            handle, poll = os.pidfd_open(pid), select.poll()
            opened.callback(os.close, handle)
            poll.register(handle, select.POLLIN)
            poll.register(pipe, select.POLLIN)
            end, look = time.monotonic() + timeout_s, time.monotonic() + EXCESS_LOOK_S
            while is_open and not problem:
                ready = dict(poll.poll(1000 * max(min(look if excess else end, end) - time.monotonic(), 0)))
                if pipe in ready:
                    chunk = os.read(pipe, 1 << 16)
                    output += chunk[: max_output - len(output)]
                    is_open = bool(chunk)
                elif handle in ready:
                    break  # a pipe that something outside has open is not waited for
                now = time.monotonic()
                if late := is_open and now >= end:
                    problem = f"the command has not ended after {timeout_s:g} s"
                elif excess and now >= look:
                    problem = excess(pid)
                    look = time.monotonic() + max(EXCESS_LOOK_S, 10 * (time.monotonic() - now))
            if not problem:
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        finally:
            if code is None:
                end_tree(pid)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    problem = problem or (excess(0) if excess else "")
    if not problem and code < 0:
        problem = f"the command has ended: {describe_exit(code)}"
    return CommandResult(bytes(output), code, problem, late)


def try_again(what: str, call: Callable[[], T]) -> T:
    """Calls it up to ATTEMPTS times while it raises SandboxError. Raises the last one, with the number of attempts."""
    for attempt in range(ATTEMPTS):
        try:
            return call()
        except SandboxContentError:
            raise
        except SandboxError as error:
            if attempt == ATTEMPTS - 1:
                raise SandboxError(f"{what} has failed {ATTEMPTS} times; the last time: {error}") from error
            time.sleep(PAUSE_S * 2**attempt)
    raise AssertionError
