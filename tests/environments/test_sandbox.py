"""The tool `python`: what programs can do, and what hostile ones cannot, in each kind of isolation that this machine has."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_megatron.environments.tool import ToolError
from grpo_megatron.environments.tools import isolation
from grpo_megatron.environments.tools.isolation import PROBE, ProgramLimits, find_isolation, run_program
from grpo_megatron.environments.tools.python import prepare_isolation, python
from grpo_megatron.environments.tools.sandbox import build_filter
from grpo_megatron.storage import files
from tests.environments.hostile_programs import ATTEMPTS, BOMBS, ON_DISK, all_attempts
from tests.rewards.waiting import processes_with, wait_until

SYSTEM_PYTHON, EXECUTABLE = "/usr/bin/python3", sys.executable
ROOT = Path(__file__).resolve().parents[2]
X86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are those of x86-64")


@pytest.fixture(scope="module", params=["bwrap", "landlock"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yields a kind of isolation. As root, Landlock needs a Python that another user can read, such as the system's."""
    with pytest.MonkeyPatch.context() as patch:
        ended = run_program(PROBE, ProgramLimits(60.0), request.param)
        if ended != ("1/2\n", "") and os.geteuid() == 0 and Path(SYSTEM_PYTHON).exists():
            for name, value in (("executable", SYSTEM_PYTHON), ("prefix", "/usr"), ("base_prefix", "/usr")):
                patch.setattr(sys, name, value)
            ended = run_program(PROBE, ProgramLimits(60.0), request.param)
        if ended != ("1/2\n", ""):
            pytest.skip(f"{request.param} does not work here: {ended}")
        yield request.param


def state_of_this_process() -> list[object]:
    limits = [resource.getrlimit(kind) for kind in range(16)]
    scheduling = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
    return [*scheduling, Path("/proc/self/oom_score_adj").read_text(), limits, os.uname()]


@contextlib.contextmanager
def folder_for_all() -> Iterator[Path]:
    """Makes a temporary folder that other users can read, too."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@contextlib.contextmanager
def keys_in_another_process() -> Iterator[None]:
    """Starts a process of this user, as a service of it would be."""
    with subprocess.Popen(["sleep", "1000"], env={"API_KEY": "hostile-key"}) as process:
        yield
        process.kill()


@pytest.fixture(scope="module")
def attempted(kind: str) -> dict[str, str]:
    """Runs all attempts as one program. The file that it wants is readable for all, as its folders are."""
    before = state_of_this_process()
    with folder_for_all() as folder, keys_in_another_process():
        secret = folder / "key"
        secret.write_text("x")
        text, _ = run_program(all_attempts(os.getpid(), str(secret), str(Path.home())), ProgramLimits(60.0), kind)
        assert (os.listdir(folder), secret.read_text(), secret.stat().st_mode & 0o777) == (["key"], "x", 0o644)
    assert state_of_this_process() == before
    return dict(map(json.loads, text.splitlines()))


@X86
@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt_is_refused(name: str, attempted: dict[str, str]) -> None:
    assert attempted[name] == "refused"


@pytest.fixture(scope="module")
def bombed(kind: str) -> Iterator[dict[str, Future[tuple[str, str]]]]:
    """Runs all at once, with a folder for temporary files, in which nothing may be left."""
    with folder_for_all() as folder, pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(4) as threads:
        patch.setattr(tempfile, "tempdir", str(folder))
        yield {
            name: threads.submit(run_program, code, ProgramLimits(2.0 if "2 s" in words else 60.0), kind)
            for name, (code, words) in BOMBS.items()
        }
        threads.shutdown()
        assert os.listdir(folder) == []


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_harms_nobody(name: str, kind: str, bombed: dict[str, Future[tuple[str, str]]]) -> None:
    words = BOMBS[name][1] if kind == "bwrap" else ON_DISK.get(name, BOMBS[name][1])
    text, problem = bombed[name].result()
    assert words in text + problem if words else (text, problem) == ("done\n", "")


PROGRAMS = {  # code -> (printed, problem)
    "print(6 * 7)": ("42\n", ""),
    "import os; print(os.listdir('.'), os.environ.get('SECRET'))": ("[] None\n", ""),
    "open('a', 'w').write('x'); print(open('a').read())": ("x\n", ""),
    "import shutil; open('a', 'w').write('x'); shutil.copyfile('a', 'b'); shutil.move('b', 'c'); print(open('c').read())": (
        *("x\n", ""),
    ),
    "import tempfile; print(tempfile.TemporaryFile().write(b'x'))": ("1\n", ""),
    "import os; os.makedirs('a/b'); os.rename('a', 'c'); os.removedirs('c/b'); print(os.listdir())": ("[]\n", ""),
    "import resource as r; r.setrlimit(r.RLIMIT_STACK, (1 << 20, -1)); print(r.getrlimit(r.RLIMIT_STACK)[0])": (
        *("1048576\n", ""),
    ),
    "import sqlite3; print(sqlite3.connect('a').execute('select 1').fetchall())": ("[(1,)]\n", ""),
    "import os; print(os.getuid() != 0, os.isatty(1), os.cpu_count() > 0)": ("True False True\n", ""),
    "from threading import *; t = Thread(target=print, args=(1,)); t.start(); t.join()": ("1\n", ""),
    "import sys; sys.exit(3)": ("", "the program has ended: exit code 3"),
    "raise KeyboardInterrupt": (
        'Traceback (most recent call last):\n  File "main.py", line 1, in <module>\nKeyboardInterrupt\n',
        "the program has ended: exit code 1",
    ),
    "x = 1\nprint(x)\n1 / 0": (
        '1\nTraceback (most recent call last):\n  File "main.py", line 3, in <module>\nZeroDivisionError: division by zero\n',
        "the program has ended: exit code 1",
    ),
}


@pytest.mark.parametrize("code", PROGRAMS)
def test_a_program(code: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "key")
    assert run_program(code, ProgramLimits(60.0), kind) == PROGRAMS[code]


def test_the_folder_is_bounded(kind: str) -> None:
    """It takes four of the largest files. One on disk is looked at, and takes more before the program is ended."""
    code = "for n in range(9): open(str(n), 'wb').write(b'x' * (1 << 20))"
    text, problem = run_program(code, ProgramLimits(60.0, file_mib=1), kind)
    if kind == "bwrap":
        assert "No space left on device" in text and problem == "the program has ended: exit code 1"
    else:
        assert "the program has written more than 4 MiB" in problem


WORKER = """
import sys
sys.executable, sys.prefix, sys.base_prefix = {python!r}
from grpo_megatron.environments.tools.isolation import ProgramLimits, run_program
run_program("import time; open('a', 'w'); time.sleep(99)", ProgramLimits({seconds}), {kind!r})
"""


def test_a_killed_worker_leaves_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program ends with it. What is left of the folder goes at the next start of a worker."""
    seconds = 1000 + os.getpid()

    def running() -> list[int]:
        return processes_with(f'"cpu_s": {seconds + 1},', "cmdline")

    with folder_for_all() as folder:
        monkeypatch.setenv("TMPDIR", str(folder))
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        monkeypatch.setattr(files, "MIN_AGE_S", -1.0)
        python = sys.executable, sys.prefix, sys.base_prefix
        code = WORKER.format(python=python, seconds=seconds, kind=kind)
        with subprocess.Popen([EXECUTABLE, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}) as worker:
            wait_until(lambda: bool(running()) and (kind == "bwrap" or bool(list(folder.glob("*/work/a")))))
            worker.kill()
        wait_until(lambda: not running())
        files.remove_leftovers()
        assert os.listdir(folder) == []


def test_where_nothing_isolates_the_tool_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start of a worker, which the check of a config does, and in a call."""
    broken = {
        "bwrap": ("", "bwrap is not installed"),
        "landlock": ("the program was not run: no Landlock\n", "exit code 1"),
    }
    monkeypatch.setattr(isolation, "run_program", lambda code, limits, kind: broken.get(kind, ("1/2\n", "")))
    monkeypatch.setattr("grpo_megatron.environments.tools.python.find_isolation", find_isolation.__wrapped__)
    problem = (
        r"install bubblewrap 0.7 .* \(bwrap: bwrap is not installed; landlock: the program was not run: no Landlock"
    )
    for refused in (prepare_isolation, lambda: python("print(1)")):
        with pytest.raises(ValueError, match=problem):
            refused()
    home = tmp_path / "home"
    home.mkdir(0o700)
    monkeypatch.setattr(isolation, "_readable", lambda: ["/usr", str(home / "venv")])
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(ValueError, match=r"closed to other users \(mode 0700\).*; chmod o\+x /") as error:
        find_isolation.__wrapped__()
    assert home.is_relative_to(str(error.value).rpartition("chmod o+x ")[2].partition(",")[0])
    prepare_isolation(unsafe=True)
    assert find_isolation.__wrapped__(unsafe=True) == "none"


def test_the_tool_says_how_a_program_failed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_megatron.environments.tools.python.find_isolation", lambda unsafe: kind)
    assert python("print(1)") == "1\n"
    with pytest.raises(ToolError, match="^1\n\nthe program has ended: exit code 3$"):
        python("print(1); raise SystemExit(3)")


def test_only_known_machines_run_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="riscv64"))
    with pytest.raises(OSError, match="code cannot be isolated on riscv64; only on x86_64, aarch64"):
        build_filter()
