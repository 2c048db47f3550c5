"""The sandbox backend `e2b`, with a stand-in for its client whose sandboxes are local ones. The service itself is not reached."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.data.folders import FolderTask, read_folder
from grpo_megatron.environments.sandboxes import backend
from grpo_megatron.environments.sandboxes.backend import SandboxError, SandboxLimits
from grpo_megatron.environments.sandboxes.hosted import E2BSandbox
from grpo_megatron.environments.sandboxes.local import LocalSandbox, walls_problem
from tests.environments.test_folders import played, row_of

pytestmark = pytest.mark.skipif(bool(walls_problem()), reason="the stand-in runs commands in local sandboxes")


class FakeE2B(types.ModuleType):
    """Stands for what hosted.py calls, with the names and signatures of e2b 2.63, and what it was called with."""

    class SandboxException(Exception):
        pass

    class TimeoutException(SandboxException):
        pass

    class SandboxNotRunningException(TimeoutException):
        pass

    class CommandExitException(SandboxException):
        def __init__(self, exit_code: int) -> None:
            self.exit_code = exit_code

    def __init__(self) -> None:
        super().__init__("e2b")
        self.built: dict[str, Path] = {}
        self.running: dict[str, Any] = {}
        self.created: list[dict[str, Any]] = []
        self.failures = 0
        outer = self

        class Template:
            def __init__(self, file_context_path: str | None = None) -> None:
                self.context = Path(file_context_path or ".")

            def from_dockerfile(self, dockerfile_content_or_path: str) -> Any:
                self.dockerfile = Path(dockerfile_content_or_path)
                return self

            @staticmethod
            def exists(name: str) -> bool:
                return name in outer.built

            @staticmethod
            def build(template: Any, name: str, *, cpu_count: int, memory_mb: int) -> None:
                outer.built[name] = template

        class Sandbox:
            def __init__(self, sandbox_id: str) -> None:
                self.sandbox_id = sandbox_id
                self.commands = self.files = self

            @classmethod
            def create(cls, template: str, timeout: int, allow_internet_access: bool) -> Any:
                outer.created.append({"timeout": timeout, "network": allow_internet_access})
                if len(outer.created) <= outer.failures:
                    raise outer.SandboxException("503: no capacity")
                built = outer.built[template]
                local = LocalSandbox(FolderTask("x", "", built.context, built.dockerfile), SandboxLimits())
                local.start()
                local._make_folder("/tests")
                outer.running[str(len(outer.created))] = local
                return cls(str(len(outer.created)))

            connect = classmethod(lambda cls, sandbox_id: cls(sandbox_id))

            def _local(self) -> Any:
                if self.sandbox_id not in outer.running:
                    raise outer.SandboxNotRunningException("not found")
                return outer.running[self.sandbox_id]

            def run(self, cmd: str, timeout: float = 60, user: str = "", cwd: str = "", envs: Any = None) -> Any:
                assert user == "root" and cwd in ("", "/app")
                result = self._local().run(["bash", "-c", cmd], timeout, variables=envs)
                if result.timed_out:
                    raise outer.TimeoutException("deadline_exceeded")
                if result.exit_code:
                    raise outer.CommandExitException(result.exit_code)
                return types.SimpleNamespace(stdout=result.text(), exit_code=0)

            def write(self, path: str, data: bytes, user: str) -> None:
                self._local().run(["sh", "-c", f"cat > {path}"], 60.0, stdin=data)

            def read(self, path: str, format: str, user: str) -> bytearray:
                return bytearray(self._local().run(["cat", path], 60.0).output)

            def kill(self) -> None:
                outer.running.pop(self.sandbox_id).stop()

        self.Template, self.Sandbox = Template, Sandbox


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeE2B:
    fake = FakeE2B()
    fake.__spec__ = sys.__spec__
    monkeypatch.setitem(sys.modules, "e2b", fake)
    monkeypatch.setenv("E2B_API_KEY", "key")
    monkeypatch.setattr(backend, "PAUSE_S", 0.0)
    return fake


@pytest.mark.soak
def test_a_trajectory_in_a_hosted_sandbox(service: FakeE2B, tmp_path: Path) -> None:
    """One template for the folder; a sandbox for the agent and one for the verifier, neither of which is left."""
    row = row_of(tmp_path / "task")
    service.failures = 1  # the first start is tried again
    assert played(row, "cat word > out.txt", backend="e2b", lifetime_s=900)[0] == 1.0
    assert played(row, "echo x > out.txt", backend="e2b")[0] == 0.0
    assert len(service.built) == 1 and not service.running
    assert service.created[:3] == [{"timeout": 900, "network": False}] * 3 and len(service.created) == 5


def test_commands_of_a_hosted_sandbox(service: FakeE2B, tmp_path: Path) -> None:
    one = E2BSandbox(read_folder(Path(row_of(tmp_path)["folder"])), SandboxLimits())
    one.start()
    result = one.run(["sh", "-c", 'cat; printf "\\377 $A"; exit 3'], 60.0, stdin=b"x", variables={"A": "b c"})
    assert (result.output, result.exit_code, result.problem) == (b"x\xff b c", 3, "")
    assert one.run(["sh", "-c", "yes"], 60.0, max_output=9).output == b"y\ny\ny\ny\ny"
    late = one.run(["sleep", "60"], 1.0)
    assert late.timed_out and late.problem == "the command has not ended after 1 s"
    other = E2BSandbox(FolderTask("attached", ""), SandboxLimits())
    other.attach(one.state())
    assert other.run(["pwd"], 60.0).output == b"/app\n"
    one.stop()
    with pytest.raises(SandboxError, match="e2b: SandboxNotRunningException"):
        one.run(["true"], 60.0)


def test_no_key(service: FakeE2B, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY")
    with pytest.raises(ValueError, match="needs its client .* and a key in the variable E2B_API_KEY; or set"):
        E2BSandbox.prepare(SandboxLimits())
