"""The backend `e2b`: a sandbox of the service E2B per trajectory, by its own client (`pip install "e2b>=2.63,<3"`; E2B_API_KEY).

A template is built once per content of a task's folder, or from its image. Commands run as root, in the service's virtual
machine. Output is read as a file, because the client's own is text. The service ends what outlives `lifetime_s`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.data.folders import FolderTask, read_folder
from grpo_megatron.data.rows import task_folders
from grpo_megatron.environments.sandboxes.backend import CommandResult, Sandbox, SandboxError, SandboxLimits, backends
from grpo_megatron.environments.sandboxes.containers import image_of_task
from grpo_megatron.processes.process import describe

# ends all but the processes of the start, by the shell alone: an agent that is root may have replaced any program
END_ALL = (
    'for p in /proc/[0-9]*; do case " {0} /proc/$$ " in *" $p "*) ;; *) kill -9 "${{p#/proc/}}";; esac; done; true'
)


@backends.register("e2b")
class E2BSandbox(Sandbox):
    """A hosted sandbox. `lifetime_s`: the service ends it then. `prewarm`: task folders whose templates a worker builds."""

    options = {"lifetime_s": 3600, "prewarm": None}  # noqa: RUF012
    _sandbox: Any = None

    @classmethod
    def prepare(cls, limits: SandboxLimits, **options: Any) -> None:
        """See Sandbox."""
        if importlib.util.find_spec("e2b") is None or not os.environ.get("E2B_API_KEY"):
            raise ValueError(
                'the sandbox backend e2b needs its client (pip install "e2b>=2.63,<3") and a key in the variable E2B_API_KEY;'
                f" or set rollout.multi_turn.kwargs.backend to another one ({', '.join(backends.names())})"
            )
        for folder in task_folders(Path(options["prewarm"])) if options.get("prewarm") else ():
            cls._template_of(read_folder(folder), limits)

    @classmethod
    def _template_of(cls, task: FolderTask, limits: SandboxLimits) -> str:
        """Returns the name of the task's template, which is built where there is none. Raises SandboxError, ValueError."""
        image = re.sub("[^a-z0-9]+", "-", image_of_task(task, "e2b").lower())
        name = f"{image}-{limits.cpus}-{limits.memory_mib}"
        with _client() as e2b:
            if not e2b.Template.exists(name):
                template = e2b.Template(file_context_path=str(task.context or "."))
                template = (
                    template.from_image(task.image) if task.image else template.from_dockerfile(str(task.dockerfile))
                )
                e2b.Template.build(template, name, cpu_count=limits.cpus, memory_mb=limits.memory_mib)
        return name

    def start(self) -> None:
        """See Sandbox."""
        name, options = self._template_of(self.task, self.limits), {"allow_internet_access": self.limits.network}
        try:
            with _client() as e2b:
                self._sandbox = e2b.Sandbox.create(name, timeout=int(self.chosen["lifetime_s"]), **options)
                printed = self._sandbox.commands.run("pwd; echo /proc/[0-9]*", user="root").stdout
            here, self._begun = printed.strip().split("\n")
            self.folder = self.folder or here
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
        """See Sandbox. A command that is late ends with all that runs there; the end of its output is lost."""
        given = f"/tmp/.{uuid.uuid4().hex}"
        line = f"{shlex.join(command)} < {given} 2>&1 | head -c {max_output} > {given}.out; exit ${{PIPESTATUS[0]}}"
        words, code, late = f"bash -c {shlex.quote(line)}", 0, False
        options: dict[str, Any] = {"user": "root", "cwd": str(self.folder), "envs": dict(variables or {})}
        with _client() as e2b:
            self._sandbox.files.write(given, stdin, user="root")
            try:
                self._sandbox.commands.run(words, timeout=timeout_s, **options)
            except e2b.CommandExitException as error:
                code = int(error.exit_code)
            except e2b.TimeoutException:  # also of a sandbox that is gone, where the next call raises again
                late = True
                self.end_processes()
            output = bytes(self._sandbox.files.read(f"{given}.out", format="bytes", user="root"))
        problem = f"the command has not ended after {timeout_s:g} s" if late else ""
        return CommandResult(output, code, problem, late)

    def end_processes(self) -> None:
        """See Sandbox."""
        with _client():
            self._sandbox.commands.run(END_ALL.format(self._begun), user="root")

    def stop(self) -> None:
        """See Sandbox."""
        if self._sandbox is not None:
            with contextlib.suppress(SandboxError), _client():
                self._sandbox.kill()

    def state(self) -> dict[str, Any]:
        """See Sandbox."""
        return {"id": self._sandbox.sandbox_id, "folder": self.folder, "begun": self._begun}

    def attach(self, state: Mapping[str, Any]) -> None:
        """See Sandbox."""
        with _client() as e2b:
            self._sandbox = e2b.Sandbox.connect(state["id"])
        self.folder, self._begun = state["folder"], state["begun"]


@contextlib.contextmanager
def _client() -> Iterator[Any]:
    """Gives the client's module. What it raises in the block becomes a SandboxError."""
    try:
        yield importlib.import_module("e2b")
    except Exception as error:
        raise SandboxError(f"e2b: {describe(error)}") from error
