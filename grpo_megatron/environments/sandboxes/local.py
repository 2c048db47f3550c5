"""The backend `local`: this machine's programs, read only, and a folder per sandbox, in namespaces of its own per command.

A command sees /usr and the like as they are here, what is in the sandbox's folder at the top of its root (/app, /tmp, ...), and
no other file, process, user, socket or variable of this machine (tools/sandbox.py). All its processes end with it, so an idle
sandbox is a folder: it takes no memory. The image of a task is not used: of its Dockerfile, COPY, ADD, ENV, WORKDIR and RUN are
followed, and RUN has no network and cannot write to /usr.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shlex
import shutil
import stat
import subprocess
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from grpo_megatron.data.folders import FolderTask
from grpo_megatron.environments.sandboxes.backend import (
    PATH,
    CommandResult,
    Sandbox,
    SandboxError,
    SandboxLimits,
    backends,
    run_bounded,
)
from grpo_megatron.environments.sandboxes.containers import digest_of
from grpo_megatron.environments.tools import sandbox
from grpo_megatron.environments.tools.isolation import MIB, other_user
from grpo_megatron.processes.process import MARK, child_pids, tree
from grpo_megatron.storage.files import private_folder, remove_leftovers, shared_folder

SYSTEM_PATHS = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime"),
    *("/etc/ssl/certs", "/etc/ca-certificates", "/etc/mime.types", "/etc/protocols", "/etc/services"),
)
SYSTEM = {Path(path).parts[1] for path in SYSTEM_PATHS} | {"dev", "proc", "sys"}  # no folder of a sandbox is called so
TOP_FOLDERS = ("tmp", "root", "logs")  # folders that each sandbox has, besides those of its files
NESTING = 2000  # characters of a path
RUN_S = 300.0  # of a RUN of a Dockerfile


@backends.register("local")
class LocalSandbox(Sandbox):
    """A sandbox of this machine's programs. `readable`: further paths that commands can read, such as /opt/conda."""

    options = {"readable": ()}  # noqa: RUF012
    runs_here = True

    @classmethod
    def prepare(cls, limits: SandboxLimits, **options: Any) -> None:
        """See Sandbox."""
        remove_leftovers()
        if problem := walls_problem(limits.network):
            raise ValueError(
                f"the sandbox backend local cannot isolate programs on this machine: {problem}; allow user namespaces"
                " (sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; in a container:"
                " --privileged, or --cap-add SYS_ADMIN), or set rollout.multi_turn.kwargs.backend to docker or podman"
            )

    def start(self) -> None:
        """See Sandbox."""
        self._opened = contextlib.ExitStack()
        self._private = self._opened.enter_context(private_folder())
        self._uid = other_user(os.getpid()) if os.geteuid() == 0 else None
        self._files = self._private / "files"
        for folder in (self._private / "root", self._files):
            folder.mkdir(0o755)
        self._variables: dict[str, str] = {}
        try:
            self.folder = self._make_folder(self.task.workdir or "/app")
            for top in TOP_FOLDERS:
                self._make_folder(f"/{top}")
            steps = dockerfile_steps(self.task.dockerfile) if self.task.dockerfile else []
            if any(word == "RUN" for _, word, _ in steps):
                self._take_built(steps)
            else:
                self._follow(steps)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """See Sandbox."""
        self._opened.close()

    def state(self) -> dict[str, Any]:
        """See Sandbox."""
        return {"private": str(self._private), "uid": self._uid, "variables": self._variables, "folder": self.folder}

    def attach(self, state: Mapping[str, Any]) -> None:
        """See Sandbox."""
        self._opened = contextlib.ExitStack()
        self._private, self._uid, self._variables = Path(state["private"]), state["uid"], state["variables"]
        self._files, self.folder = self._private / "files", state["folder"]

    def write(self, folders: Sequence[str], archive: bytes) -> None:
        """See Sandbox."""
        for path in folders:
            self._make_folder(f"/{PurePosixPath(path).parts[1]}")
        super().write(folders, archive)

    def run(
        self,
        command: Sequence[str],
        timeout_s: float,
        *,
        stdin: bytes = b"",
        variables: Mapping[str, str] | None = None,
        max_output: int = 1 << 20,
    ) -> CommandResult:
        """See Sandbox."""
        names = {entry.name: entry.path for entry in os.scandir(self._files)}
        user = os.getuid() if self._uid is None else self._uid
        root = {
            "at": str(self._private / "root"),
            "readable": [*SYSTEM_PATHS, *self.chosen["readable"]],
            "writable": {f"/{name}": path for name, path in names.items()},
            "files": {
                "/etc/passwd": f"root:x:0:0::/root:/bin/sh\nagent:x:{user}:{user}::/root:/bin/bash\n",
                "/etc/group": f"root:x:0:\nagent:x:{user}:\n",
                "/etc/hosts": "127.0.0.1 localhost sandbox\n",
            },
            "folder": self.folder,
            "network": self.limits.network,
        }
        limits = self.limits
        settings = {"root": root, "uid": self._uid, "cores": limits.cpus, "cpu_s": int(timeout_s * limits.cpus) + 2}
        settings |= {"file": limits.disk_mib * MIB, "processes": limits.processes}
        environment = {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8", "TMPDIR": "/tmp"}
        environment |= {"OMP_NUM_THREADS": str(self.limits.cpus)}
        environment |= {**self._variables, **(variables or {}), MARK: os.environ.get(MARK, "")}
        alive, writing = os.pipe()  # `writing` is closed when this process ends, however that happens
        try:
            start = functools.partial(_fork, list(command), {**settings, "alive": alive, "variables": environment})
            result = run_bounded(start, timeout_s, stdin, max_output, self._excess)
        finally:
            os.close(alive)
            os.close(writing)
        if result.exit_code == sandbox.SETUP_FAILED and result.output.startswith(b"the program was not run: "):
            raise SandboxError(result.text().strip())
        return result

    def _excess(self, pid: int) -> str:
        """Says which limit the processes below `pid` (0: none) or the files exceed, or ""."""
        pages, size, count = 0, 0, 0
        # not the fork of this process and the first one in its namespaces, which are this process's memory until they execute
        for process in tree(pid) - {pid} - child_pids(pid) if pid else ():
            with contextlib.suppress(OSError, ValueError, IndexError):
                pages += int(Path(f"/proc/{process}/statm").read_text().split()[1])
                for entry in os.scandir(f"/proc/{process}/fd"):
                    about = os.stat(entry.path)
                    size += 512 * about.st_blocks if stat.S_ISREG(about.st_mode) and not about.st_nlink else 0
        if (used := pages * os.sysconf("SC_PAGE_SIZE")) > self.limits.memory_mib * MIB:
            return f"the command has used {used // MIB} MiB of memory; at most {self.limits.memory_mib} are allowed"
        pending = [str(self._files)]
        while pending:
            folder = pending.pop()
            if len(folder) > NESTING:
                return "the command has nested its folders too deeply"
            if not os.access(folder, os.R_OK | os.X_OK) and os.path.lexists(folder):
                return "the command has a folder that cannot be read"
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                for entry in os.scandir(folder):
                    with contextlib.suppress(FileNotFoundError):
                        about = entry.stat(follow_symlinks=False)
                        size, count = size + 512 * about.st_blocks, count + 1
                        if stat.S_ISDIR(about.st_mode):
                            pending.append(entry.path)
        if size > self.limits.disk_mib * MIB or count > self.limits.files:
            return (
                f"the sandbox has {count} files of {size // MIB} MiB; at most {self.limits.files} files and"
                f" {self.limits.disk_mib} MiB are allowed"
            )
        return ""

    def _make_folder(self, path: str) -> str:
        """Makes a folder at the top of the root, and those below it while nothing of an agent is there."""
        parts = PurePosixPath(path).parts[1:]
        if not parts or ".." in parts or parts[0] in SYSTEM:
            raise ValueError(
                f"task {self.task.name}: {path} cannot be written with the sandbox backend local, which has this machine's"
                f" /{parts[0] if parts else ''}; use another folder, or docker or podman"
            )
        top = self._files / parts[0]
        folder = top.joinpath(*parts[1:])
        if top.exists() and folder == top:
            return path
        folder.mkdir(0o755, parents=True, exist_ok=True)
        self._own(top)
        return path

    def _own(self, path: Path) -> None:
        if self._uid is not None:
            for folder, _, names in os.walk(path):
                for name in ("", *names):
                    os.chown(os.path.join(folder, name), self._uid, self._uid, follow_symlinks=False)

    def _take_built(self, steps: Sequence[tuple[int, str, str]]) -> None:
        """Follows the steps once for all sandboxes of this environment that exist at the same time. Raises as `_follow`."""
        assert self.task.context and self.task.dockerfile

        def build(folder: Path) -> None:
            self._follow(steps)
            (folder / "state").write_text(json.dumps([self.folder, self._variables]))
            self._files.rename(folder / "files")
            self._files.mkdir(0o755)

        parts = digest_of(self.task.context), self.task.dockerfile.read_text(), self.folder, self.limits, self.chosen
        name = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
        built = self._opened.enter_context(shared_folder(name, build))
        self.folder, self._variables = json.loads((built / "state").read_text())
        _copy_tree(built / "files", self._files)
        for top in self._files.iterdir():
            self._own(top)

    def _follow(self, steps: Sequence[tuple[int, str, str]]) -> None:
        """Copies the files of the environment, and runs its RUNs. Raises ValueError for what `local` cannot follow."""
        for number, word, rest in steps:
            where = f"{self.task.dockerfile}, line {number}"
            if word == "WORKDIR" and not self.task.workdir:
                path = rest.strip().strip("\"'")
                self.folder = self._make_folder(str(PurePosixPath(str(self.folder)) / path))
            elif word == "ENV":
                pairs = shlex.split(rest) if "=" in rest.split()[0] else ["=".join(rest.split(None, 1))]
                self._variables |= dict(pair.split("=", 1) for pair in pairs)
            elif word in ("COPY", "ADD"):
                self._copy(rest, where)
            elif word == "RUN":
                result = self.run(["sh", "-c", rest], RUN_S, variables={"HOME": "/root"})
                if result.exit_code or result.problem:
                    said = result.problem or f"exit code {result.exit_code}: {' '.join(result.text().split())[-200:]}"
                    raise ValueError(
                        f"{where}: RUN {rest[:80]!r} fails with the sandbox backend local, which has this machine's programs, no"
                        f" network and a /usr that is read only ({said}); use docker or podman"
                    )

    def _copy(self, rest: str, where: str) -> None:
        words = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
        if any(word.startswith("--") and not word.startswith("--chown") for word in words):
            raise ValueError(f"{where}: the sandbox backend local does not know {words[0]}; use docker or podman")
        *sources, target = [word for word in words if not word.startswith("--")]
        path = PurePosixPath(str(self.folder)) / target
        is_folder = target.endswith(("/", ".")) or len(sources) > 1
        for source in sources:
            base = Path(self.task.context or ".").resolve()
            matches = sorted(base.glob(source.lstrip("/"))) if source not in (".", "./") else [base]
            for match in matches:
                if not match.resolve().is_relative_to(base):
                    raise ValueError(f"{where}: {source} leads out of {base}")
                inside = path / match.name if is_folder and not match.is_dir() else path
                parent = self._files / Path(self._make_folder(str(inside if match.is_dir() else inside.parent))[1:])
                if match.is_dir():
                    shutil.copytree(match, parent, symlinks=True, dirs_exist_ok=True)
                else:
                    shutil.copy2(match, parent / inside.name, follow_symlinks=False)
                self._own(self._files / inside.parts[1])
            if not matches:
                raise ValueError(f"{where}: there is no {source} in {base}")


def _copy_tree(source: Path, target: Path) -> None:
    """Copies what is in a folder, links as links. Blocks are shared where the file system can. Raises SandboxError."""
    command = ["cp", "-a", "--reflink=auto", f"{source}/.", f"{target}/"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SandboxError(f"copying {source}: {done.stderr.strip()[-200:]}")


def _fork(arguments: list[str], settings: dict[str, Any], stdin: int, output: int) -> int:
    """Starts a sandbox in a fork: a new Python would take three times as long. The child runs nothing but run_in_root."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: this process has threads
        pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        alive = os.dup(settings["alive"])
        os.dup2(stdin, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        settings["alive"] = os.dup2(alive, 3, inheritable=False)
        os.closerange(4, max(map(int, os.listdir("/proc/self/fd"))) + 1)
        os.chdir("/")
        sandbox.run_in_root(arguments, **settings)
    finally:
        os._exit(sandbox.SETUP_FAILED)


def dockerfile_steps(path: Path) -> list[tuple[int, str, str]]:
    """Reads (line, instruction, rest). Raises ValueError for what needs a builder."""
    steps, text, first = [], "", 0
    for number, line in enumerate([*path.read_text().split("\n"), ""], start=1):
        if line.lstrip().startswith("#"):  # also within an instruction
            continue
        text, first = f"{text} {line.strip()}".strip(), first or number
        if text.endswith("\\"):
            text = text[:-1]
            continue
        word, _, rest = text.partition(" ")
        if word:
            steps.append((first, word.upper(), rest.strip()))
        text, first = "", 0
    if sum(word == "FROM" for _, word, _ in steps) > 1 or any(
        "<<" in rest for _, word, rest in steps if word == "COPY"
    ):
        raise ValueError(
            f"{path} has several stages, or files in itself, which the sandbox backend local does not know; use docker or podman"
        )
    return steps


@functools.cache
def walls_problem(network: bool = False) -> str:
    """Tries a sandbox out. Returns why it cannot be started, or ""."""
    one = LocalSandbox(FolderTask("probe", ""), SandboxLimits(network=network))
    try:
        one.start()
        result = one.run(["sh", "-c", "echo works > file && cat file"], 60.0)
        return "" if result.output == b"works\n" else (result.problem or result.text()[-200:])
    except (SandboxError, OSError) as error:
        return str(error)
    finally:
        one.stop()
