"""The backends `docker` and `podman`: a container per sandbox, by the command-line program of that name.

Images are built once and named by the content of their folder. A container has no network, no more rights than its root needs
for files and users, and the limits. Its label names the process that started it, by which leftovers are found.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from grpo_megatron.data.folders import FolderTask, read_folder
from grpo_megatron.environments.sandboxes.backend import (
    CommandResult,
    Sandbox,
    SandboxError,
    SandboxLimits,
    backends,
    run_bounded,
)
from grpo_megatron.environments.tools.sandbox import MAX_OPEN_FILES
from grpo_megatron.processes.process import start_ticks

LABEL = "grpo-megatron.owner"
CALL_S, BUILD_S = 120.0, 3600.0  # of a call of the program, and of the build or pull of an image
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
WAIT_FOREVER = "while :; do sleep 3600; done"


@backends.register("docker")
class DockerSandbox(Sandbox):
    """A container. `prewarm`: a folder of task folders, whose images are built or pulled when a worker starts."""

    options = {"prewarm": None}  # noqa: RUF012
    engine: ClassVar[str] = "docker"
    _id = ""

    @classmethod
    def prepare(cls, limits: SandboxLimits, **options: Any) -> None:
        """See Sandbox."""
        from grpo_megatron.data.rows import task_folders

        cls._check_engine()
        containers = cls._call("ps", "-a", "-q", "--no-trunc", "--filter", f"label={LABEL}").split()
        for container in containers:
            with contextlib.suppress(SandboxError):  # another worker removes it, too
                owner = cls._call("inspect", "--format", f'{{{{index .Config.Labels "{LABEL}"}}}}', container)
                host, _, process = owner.rpartition("/")
                pid, _, ticks = process.partition(".")
                if host == platform.node() and str(start_ticks(pid) or "") != ticks:
                    cls._call("rm", "-f", "-v", container)
        for folder in task_folders(Path(options.get("prewarm") or "")) if options.get("prewarm") else ():
            cls._image_of(read_folder(folder))

    @classmethod
    @functools.cache
    def _check_engine(cls) -> None:
        remedy = f"start its service, or set rollout.multi_turn.kwargs.backend to another one ({', '.join(backends.names())})"
        if shutil.which(cls.engine) is None:
            raise ValueError(
                f"the sandbox backend {cls.engine}: there is no program {cls.engine}; install it, {remedy}"
            )
        try:
            cls._call("info", "--format", "{{.ID}}" if cls.engine == "docker" else "{{.Host.Arch}}")
        except SandboxError as error:
            raise ValueError(f"the sandbox backend {cls.engine} does not answer ({error}); {remedy}") from error

    @classmethod
    def _call(cls, *arguments: str, timeout_s: float = CALL_S) -> str:
        result = run_bounded(_spawned([cls.engine, *arguments]), timeout_s, b"", 1 << 20)
        if result.exit_code or result.problem:
            raise SandboxError(f"{cls.engine} {arguments[0]}: {result.problem or result.text().strip()[-300:]}")
        return result.text().strip()

    @classmethod
    def _image_of(cls, task: FolderTask) -> str:
        """Returns the name of the task's image, which is built or pulled once. Raises SandboxError, ValueError."""
        image = image_of_task(task, cls.engine)
        try:
            cls._call("image", "inspect", image, "--format", "{{.Id}}")
        except SandboxError:
            if task.image:
                cls._call("pull", "-q", image, timeout_s=BUILD_S)
            else:
                cls._call("build", "-q", "-t", image, "-f", str(task.dockerfile), str(task.context), timeout_s=BUILD_S)
        return image

    def start(self) -> None:
        """See Sandbox."""
        image, limits = self._image_of(self.task), self.limits
        owner = f"{platform.node()}/{os.getpid()}.{start_ticks()}"
        bounds = {"cpus": limits.cpus, "memory": f"{limits.memory_mib}m", "memory-swap": f"{limits.memory_mib}m"}
        bounds |= {"pids-limit": limits.processes, "name": f"grpo-megatron-{uuid.uuid4().hex}"}
        bounds |= {} if limits.network else {"network": "none"}
        walls = [
            "--security-opt",
            "no-new-privileges",
            "--cap-drop",
            "ALL",
            *(f"--cap-add={name}" for name in CAPABILITIES),
        ]
        chosen = [f"--{name}={value}" for name, value in bounds.items()]
        chosen += [f"--ulimit=fsize={limits.disk_mib << 20}", f"--ulimit=nofile={MAX_OPEN_FILES}"]
        self._id = str(bounds["name"])
        try:
            label = ("--label", f"{LABEL}={owner}")
            self._call("run", "-d", "--init", *label, *chosen, *walls, "--entrypoint", "sh", image, "-c", WAIT_FOREVER)
            self.folder = self.folder or self._call("inspect", "--format", "{{.Config.WorkingDir}}", self._id) or "/"
            self.check_folder()
        except BaseException:
            self.stop()
            raise

    def run(
        self,
        command: Sequence[str],
        timeout_s: float,
        *,
        stdin: bytes = b"",
        variables: Mapping[str, str] | None = None,
        max_output: int = 1 << 20,
    ) -> CommandResult:
        """See Sandbox. A command that is late ends with all that runs in the container."""
        given = [part for name, value in (variables or {}).items() for part in ("-e", f"{name}={value}")]
        program = [self.engine, "exec", "-i", "-w", str(self.folder), *given, self._id, *command]
        result = run_bounded(_spawned(program), timeout_s, stdin, max_output)
        if result.timed_out:
            self.end_processes()
        elif result.exit_code and (not result.output.strip() or result.output.startswith(b"Error response")):
            self._call("inspect", "--format", "{{.Id}}", self._id)  # raises where the container is gone
        used = int(self._call("inspect", "--size", "--format", "{{.SizeRw}}", self._id) or 0) >> 20
        if used > self.limits.disk_mib:
            problem = f"the sandbox has {used} MiB of files; at most {self.limits.disk_mib} are allowed"
            return CommandResult(result.output, result.exit_code, result.problem or problem, result.timed_out)
        return result

    def end_processes(self) -> None:
        """See Sandbox."""
        self._call("restart", "-t", "0", self._id)

    def stop(self) -> None:
        """See Sandbox."""
        if self._id:
            subprocess.run([self.engine, "rm", "-f", "-v", self._id], capture_output=True, timeout=CALL_S, check=False)

    def state(self) -> dict[str, Any]:
        """See Sandbox."""
        return {"id": self._id, "folder": self.folder}

    def attach(self, state: Mapping[str, Any]) -> None:
        """See Sandbox."""
        self._id, self.folder = state["id"], state["folder"]


@backends.register("podman")
class PodmanSandbox(DockerSandbox):
    """As docker, without a daemon."""

    engine = "podman"


def _spawned(command: list[str]) -> Callable[[int, int], int]:
    def start(stdin: int, output: int) -> int:
        actions = [(os.POSIX_SPAWN_DUP2, stdin, 0), (os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, output, 2)]
        return os.posix_spawnp(command[0], command, os.environ, file_actions=actions, setsid=True)

    return start


def image_of_task(task: FolderTask, backend: str) -> str:
    """Returns the name of the task's image: its own, or one for the content of its folder. Raises ValueError."""
    if task.image is None and task.dockerfile is None:
        raise ValueError(
            f"task {task.name}: the sandbox backend {backend} needs an image, and there is no {task.context}/Dockerfile;"
            " write one, or name environment.docker_image in task.toml"
        )
    return task.image or f"grpo-megatron/{digest_of(task.context)[:24]}"  # type: ignore[arg-type]


def digest_of(folder: Path) -> str:
    """Hashes names, modes and contents of all files of a folder, in their order."""
    sha = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        sha.update(f"{path.relative_to(folder)}\0{path.lstat().st_mode & 0o777}\0{len(content)}\0".encode() + content)
    return sha.hexdigest()
