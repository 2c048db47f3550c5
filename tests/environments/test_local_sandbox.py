"""The sandbox backend `local`: what commands can do, and what hostile ones cannot."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_megatron.data.folders import FolderTask
from grpo_megatron.environments.sandboxes.backend import SandboxContentError, SandboxError, SandboxLimits, make_archive
from grpo_megatron.environments.sandboxes.local import LocalSandbox, walls_problem
from grpo_megatron.environments.tools import sandbox as walls
from grpo_megatron.storage import files
from tests.environments import hostile_programs
from tests.environments.test_sandbox import ROOT, X86, folder_for_all, keys_in_another_process, state_of_this_process
from tests.rewards.waiting import processes_with, wait_until

pytestmark = pytest.mark.skipif(bool(walls_problem()), reason=f"no namespaces here: {walls_problem()}")
LIMITS = SandboxLimits(memory_mib=256, disk_mib=16, files=1000, processes=24)
# what a shell's programs may do, to themselves and to files that they can read
ALLOWED = {
    *(
        "write into the parent's memory",
        "the root of process 1",
        "choose its signal",
        "be told of a folder by a signal",
    ),
    *(
        "lock a shared file",
        "lease a file",
        "outlive the caller",
        "limit the parent",
        "fork",
        "fork in C",
        "clone",
        "spawn",
    ),
    *(
        "subprocess",
        "multiprocessing",
        "a filter of its own",
        "watch folders",
        "TCP",
        "UDP",
        "unix socket",
        "socket pair",
    ),
    *("abstract socket", "netlink", "shared memory", "a file in /dev/shm", "System V memory", "System V semaphores"),
    *(
        "System V messages",
        "POSIX messages",
        "the root folder by ..",
        "another program",
        "trace itself",
        "a file in memory",
    ),
}


@pytest.fixture
def sandbox() -> Iterator[LocalSandbox]:
    """Yields a started sandbox."""
    one = LocalSandbox(FolderTask("test", ""), LIMITS)
    one.start()
    yield one
    one.stop()


def run(sandbox: LocalSandbox, command: str, timeout_s: float = 60.0) -> tuple[str, int, str]:
    result = sandbox.run(["bash", "-c", command], timeout_s)
    return result.text(), result.exit_code, result.problem


@X86
def test_attempts_are_refused(sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts of the tests of the tool `python`, but for what programs with processes need, in one start."""
    attempts = {name: code for name, code in hostile_programs.ATTEMPTS.items() if name not in ALLOWED}
    monkeypatch.setattr(hostile_programs, "ATTEMPTS", attempts)
    before = state_of_this_process()
    with folder_for_all() as folder, keys_in_another_process():
        secret = folder / "key"
        secret.write_text("x")
        program = hostile_programs.all_attempts(os.getpid(), str(secret), str(Path.home()))
        result = sandbox.run(["/usr/bin/python3", "-c", program], 60.0)
        assert (os.listdir(folder), secret.read_text(), secret.stat().st_mode & 0o777) == (["key"], "x", 0o644)
    outcomes = dict(map(json.loads, result.text().splitlines()))
    assert outcomes == dict.fromkeys(attempts, "refused") and len(attempts) > 50
    assert state_of_this_process() == before


def test_commands(sandbox: LocalSandbox) -> None:
    """Files stay from one command to the next, and nothing else does."""
    assert run(sandbox, "pwd; echo x > a; mkdir -p /tmp/b; cd /tmp; export A=1") == ("/app\n", 0, "")
    assert run(sandbox, 'cat a; ls -d /tmp/b; pwd; echo "$A"') == ("x\n/tmp/b\n/app\n\n", 0, "")
    assert run(sandbox, "seq 3 | awk '{s += $1} END {print s}'; exit 3") == ("6\n", 3, "")
    assert run(sandbox, "kill -SEGV $$")[1] == 139
    assert run(sandbox, "whoami; hostname; ls /proc | grep -c '^[0-9]'")[0].split()[:2] == ["agent", "sandbox"]
    server = "python3 -m http.server -b 127.0.0.1 8123 2> /dev/null & for i in $(seq 50); do sleep 0.1; "
    client = "python3 -c 'from urllib.request import *; print(urlopen(\"http://127.0.0.1:8123\").status)' 2> /dev/null && break"
    assert run(sandbox, f"{server}{client}; done") == ("200\n", 0, "")  # its own loopback, which no other sandbox sees


def test_secrets_of_the_run_are_out_of_sight(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Variables, the home, other sandboxes, and other processes; and nothing can be written outside."""
    monkeypatch.setenv("API_KEY", "hostile-key")
    (tmp_path / "secret").write_text("hostile-key")
    other = LocalSandbox(FolderTask("other", ""), LIMITS)
    other.start()
    run(other, "echo hostile-key > mine")
    places = ["/", str(Path.home()), str(tmp_path), str(other._private), str(ROOT), tempfile.gettempdir()]
    command = "env; cat /proc/*/environ; cat /proc/*/cmdline; grep -rs hostile-key " + " ".join(
        f"'{place}'" for place in places[1:]
    )
    text = run(
        sandbox,
        f"echo hello; {command}; for d in / /usr /etc /proc /dev /dev/shm/..; do touch $d/made && echo made $d; done",
    )[0]
    assert (
        text.startswith("hello")
        and "hostile-key" not in text.replace("grep -rs hostile-key", "")
        and "made /" not in text.replace("/made", "")
    )
    assert run(other, "cat mine") == ("hostile-key\n", 0, "")
    other.stop()


def test_services_and_mounts_of_this_machine(sandbox: LocalSandbox) -> None:
    """A port of this machine is out of reach unless `network` is set; all that is mounted from here is read only."""
    code = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5).close(); print('reached')"
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = ["/usr/bin/python3", "-c", code, str(server.getsockname()[1])]
        assert "ConnectionRefusedError" in sandbox.run(command, 60.0).text()
        open_one = LocalSandbox(FolderTask("t", ""), dataclasses.replace(LIMITS, network=True))
        open_one.start()
        assert open_one.run(command, 60.0).text() == "reached\n"
        open_one.stop()
    lines = run(sandbox, "cat /proc/self/mountinfo")[0].splitlines()
    mounts = {line.split()[4]: line.split()[5].split(",") for line in lines}
    writable = {path for path, options in mounts.items() if "ro" not in options}
    assert writable == {"/app", "/tmp", "/root", "/logs", "/proc", *walls.DEVICES} and "/usr" in mounts
    assert all("nosuid" in options for options in mounts.values())
    status = dict(line.split(":\t") for line in run(sandbox, "cat /proc/self/status")[0].splitlines() if ":\t" in line)
    assert {int(value, 16) for name, value in status.items() if name.startswith("Cap")} == {0}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_the_memory_of_this_process_does_not_count(sandbox: LocalSandbox) -> None:
    """A sandbox begins as a fork of its environment, with all that has been loaded there."""
    large = bytearray(os.urandom(1 << 20) * 300)
    for _ in range(10):
        assert run(sandbox, "sleep 0.1") == ("", 0, "")
    del large


BOMBS = {  # command -> a part of what is said
    "sleep 99": "has not ended after 2 s",
    "trap '' TERM INT HUP; while :; do :; done": "has not ended after 2 s",
    "python3 -c 'x = bytearray(1 << 29); import time; time.sleep(9)'": "MiB of memory; at most 256",
    "for n in $(seq 9); do head -c 10000000 /dev/zero > f$n; done": "files of 1[6-9] MiB|files of [2-9]. MiB",
    "seq 1 2000 | xargs touch": "at most 1000 files",
    "mkdir d; chmod 0 d": "cannot be read|^$",  # as root, everything can be read from outside
    "python3 -c \"import os\nfor n in range(1500): os.mkdir('d'); os.chdir('d')\"": "nested|at most 1000 files",
}


@pytest.mark.parametrize("command", BOMBS)
def test_a_bomb_is_ended(command: str, sandbox: LocalSandbox) -> None:
    import re

    problem = run(sandbox, command, 2.0 if "2 s" in BOMBS[command] else 60.0)[2]
    assert re.search(BOMBS[command], problem), problem


def test_forks_are_bounded_and_background_processes_end(sandbox: LocalSandbox) -> None:
    """No more than `processes` run, one that leaves its session ends with its command, and the output is cut."""
    bomb = "import os, time\nn = 0\ntry:\n while True: n += 1; os.fork() or time.sleep(9)\nexcept OSError: print(n, flush=True)"
    text, _, problem = run(sandbox, f'timeout 5 python3 -c "{bomb}"')
    assert not problem and 5 < int(text.split()[0]) <= LIMITS.processes
    marker = f"{os.getpid()}.25"
    began = time.monotonic()
    assert run(sandbox, f"setsid nohup sleep 10{marker} & disown; echo done")[0].endswith("done\n")
    assert time.monotonic() - began < 60 and not processes_with(f"10{marker}", "cmdline")
    result = sandbox.run(["bash", "-c", "seq 1 1000000"], 60.0, max_output=1000)
    assert len(result.output) == 1000 and (result.exit_code, result.problem) == (0, "")


def test_what_is_read_back_follows_no_link(sandbox: LocalSandbox) -> None:
    """Links stay links in an archive; files that are links or large, and folders with what nobody can archive, are refused."""
    run(
        sandbox, "ln -s /etc/passwd l; ln -s / root; mkfifo pipe; mkdir d; echo x > d/f; head -c 5000 /dev/zero > large"
    )
    assert sandbox.read("/app/d/f", 10) == b"x\n"
    for path in ("/app/l", "/app/pipe", "/app/root/etc/passwd/x", "/app/missing"):
        with pytest.raises(FileNotFoundError):
            sandbox.read(path, 100)
    with pytest.raises(SandboxContentError, match="more than 100 bytes"):
        sandbox.read("/app/large", 100)
    archive = sandbox.read_folders(["/app", "/missing"], 1 << 20)
    other = LocalSandbox(FolderTask("other", ""), LIMITS)
    other.start()
    other.write(["/app", "/tests"], archive + make_archive({"/tests/a": b"content"}))
    assert run(other, "cat d/f /tests/a; readlink l root; ls") == (
        "x\ncontent/etc/passwd\n/\nd\nl\nlarge\npipe\nroot\n",
        0,
        "",
    )
    with pytest.raises(SandboxContentError):
        sandbox.read_folders(["/app"], 100)
    other.stop()


def test_an_archive_that_leaves_its_folder_is_refused(sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an agent could make it that is root in its container and has replaced tar."""
    for path in ("/tests/test.sh", "app/../usr/bin/bash"):
        made = make_archive({path: b"poison"})
        monkeypatch.setattr(sandbox, "_complete", lambda *_, made=made: made)
        with pytest.raises(SandboxContentError, match="has '"):
            sandbox.read_folders(["/app"], 1 << 20)


def test_a_dockerfile_is_followed_or_refused(tmp_path: Path) -> None:
    def started(text: str) -> LocalSandbox:
        (tmp_path / "Dockerfile").write_text(text)
        one = LocalSandbox(FolderTask("t", "", context=tmp_path, dockerfile=tmp_path / "Dockerfile"), LIMITS)
        one.start()
        return one

    (tmp_path / "src").mkdir()
    (tmp_path / "src/a").write_text("a\n")
    (tmp_path / "b").write_text("b\n")
    one = started(
        "# comment\nFROM debian\nWORKDIR /work/x\nENV KEY=value OTHER='two words'\nCOPY src/ ./src/\nCOPY b .\n"
        'RUN cat src/a \\\n  # within\n  b > c && \\\n  echo $KEY >> c\nCMD ["bash"]\n'
    )
    assert run(one, "pwd; cat c; echo $OTHER") == ("/work/x\na\nb\nvalue\ntwo words\n", 0, "")
    one.stop()
    for text, problem in {
        "FROM debian\nRUN apt-get install -y x": r"line 2: RUN 'apt-get install -y x' fails .* use docker or podman",
        "FROM debian\nCOPY ../x .": "there is no ../x|leads out",
        "FROM debian\nCOPY missing .": "line 2: there is no missing",
        "FROM debian\nCOPY b /usr/b": "/usr cannot be written",
        "FROM a\nFROM b": "several stages",
        "FROM debian\nCOPY --from=a b .": "does not know --from=a",
    }.items():
        with pytest.raises(ValueError, match=problem):
            started(text)


def test_sandboxes_that_exist_at_the_same_time_share_what_a_run_has_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One RUN for both, files of their own, and nothing is left; also where the RUN fails. A third one runs it anew."""

    def started() -> LocalSandbox:
        one = LocalSandbox(FolderTask("t", "", context=tmp_path, dockerfile=tmp_path / "Dockerfile"), LIMITS)
        one.start()
        return one

    (tmp_path / "Dockerfile").write_text(
        "FROM a\nWORKDIR /work\nENV A=b\nRUN head -c 9 /dev/urandom | base64 > drawn\n"
    )
    with folder_for_all() as folder:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        first, second = started(), started()
        drawn = run(first, "cat drawn; pwd; echo $A; echo x > new; echo y > drawn")
        assert drawn[1:] == (0, "") and drawn == run(second, "cat drawn; pwd; echo $A")
        assert run(second, "cat drawn new; rm drawn; ls")[0].startswith(drawn[0].split("\n")[0])
        first.stop()
        third = started()
        assert run(third, "cat drawn; pwd; echo $A") == drawn
        second.stop()
        third.stop()
        assert os.listdir(folder) == []
        fourth = started()
        assert run(fourth, "cat drawn")[0].strip() not in drawn[0]
        fourth.stop()
        (tmp_path / "Dockerfile").write_text("FROM a\nRUN false\n")
        with pytest.raises(ValueError, match="RUN 'false' fails"):
            started()
        assert os.listdir(folder) == []


WORKER = """
from grpo_megatron.environments.sandboxes.local import *
one = LocalSandbox(FolderTask("t", ""), SandboxLimits())
one.start()
one.run(["sleep", "{seconds}"], 999.0)
"""


def test_a_killed_run_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a sandbox end with the process that owns it, and its folder goes at the next start of a worker."""
    seconds = str(1000 + os.getpid() / 1e8)
    with folder_for_all() as folder:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.setattr(files, "MIN_AGE_S", -1.0)
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
        with subprocess.Popen([sys.executable, "-c", WORKER.format(seconds=seconds)], env=variables) as worker:
            wait_until(lambda: bool(processes_with(f"sleep\0{seconds}", "cmdline")))
            worker.kill()
        wait_until(lambda: not processes_with(f"sleep\0{seconds}", "cmdline"))
        assert len(os.listdir(folder)) == 1
        LocalSandbox.prepare(LIMITS)
        assert os.listdir(folder) == []


def test_a_sandbox_that_cannot_start_says_so(sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a SandboxError, never the exit code of a command; and a worker refuses to start."""
    monkeypatch.setattr(walls, "PIVOT_ROOT", {os.uname().machine: 999})
    with pytest.raises(SandboxError, match="the program was not run"):
        run(sandbox, "true")
    walls_problem.cache_clear()
    with pytest.raises(ValueError, match="cannot isolate programs on this machine.*unprivileged_userns_clone"):
        LocalSandbox.prepare(LIMITS)
    walls_problem.cache_clear()


def test_a_command_of_an_agent_does_not_import_the_config() -> None:
    """Each command of an agent that is a program starts a Python: 0.12 s of a processor, and 0.56 s with the config."""
    code = "import sys, grpo_megatron.environments.sandboxes.local; assert 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
