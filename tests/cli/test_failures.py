"""Which of several failures is reported as the reason: cases without processes (test_main.py has the real ones)."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_megatron.cli import failures
from grpo_megatron.config import ConfigError

FIRST, SECOND = 1_000, 2_000  # times of reports


class Ended(SimpleNamespace):
    """A rank's end as torchrun's agent reports it."""

    def signal_name(self) -> str:
        return signal.Signals(-self.exitcode).name


def explain(folder: Path, exit_codes: dict[int, int]) -> int:
    ended = SimpleNamespace(failures={rank: Ended(exitcode=code) for rank, code in exit_codes.items()})
    cause = failures.explain_failure(ended, folder)
    failures.print_error(cause.text)
    return cause.code


def report(folder: Path, rank: int, time_ns: int, *, is_expected: bool = False, is_symptom: bool = False) -> None:
    """Makes the report of rank `rank`: its message is its number."""
    content = failures.FailureReport(rank, 1, f"E{rank}", f"text {rank}\n", is_expected, is_symptom, time_ns)
    (folder / str(rank)).mkdir()
    (folder / str(rank) / "error.json").write_text(json.dumps({"report": vars(content)}))


RAISED, TERM, EXPECTED, SYMPTOM = (
    "error: rank {0}: E{0} (its traceback is above)\n",
    -signal.SIGTERM,
    "expected",
    "symptom",
)


@pytest.mark.parametrize(
    ("reports", "exit_codes", "code", "printed"),
    [
        # the earliest report is the reason: the agent may notice a later one first, and may end a rank that has reported
        ([(0, SECOND), (1, FIRST)], {0: 1, 1: TERM}, 1, "text 1\n" + RAISED.format(1)),
        ([(0, FIRST, EXPECTED)], {0: 1}, 1, "text 0\n"),  # an expected error is its own explanation
        # a symptom gives way to the dead rank; with GPUs the agent also lists the ranks that it has ended itself: rank 2
        ([(0, FIRST, SYMPTOM)], {0: TERM, 2: TERM, 3: -signal.SIGSEGV}, 139, "error: rank 3 was ended by SIGSEGV\n"),
        # a library may abort a rank when another one has raised: the exception is the reason, not the abort
        ([(0, FIRST), (2, SECOND, SYMPTOM)], {1: -signal.SIGABRT}, 1, "text 0\n" + RAISED.format(0)),
        ([(0, FIRST, SYMPTOM)], {0: 1}, 1, "text 0\n" + RAISED.format(0)),  # a symptom is better than nothing
        ([], {1: 3}, 3, "error: rank 1 ended with exit code 3 and gave no reason\n"),
        ([], {1: 75}, 75, ""),  # a run that was stopped
        ([], {0: 143, 1: 130}, 130, ""),
    ],
)
def test_which_failure_is_reported(
    reports: list[tuple[Any, ...]],
    exit_codes: dict[int, int],
    code: int,
    printed: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for rank, time_ns, *kinds in reports:
        report(tmp_path, rank, time_ns, is_expected=EXPECTED in kinds, is_symptom=SYMPTOM in kinds)
    assert explain(tmp_path, exit_codes) == code and capsys.readouterr().err == printed


def test_a_report_that_is_not_ours_and_a_killed_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "error.json").write_text('{"message": "not ours"}')
    assert explain(tmp_path, {0: 143, 1: -signal.SIGKILL}) == 137  # 143: a rank that the agent has ended
    assert "error: rank 1 was ended by SIGKILL (the machine may" in capsys.readouterr().err


def test_a_rank_with_a_role_is_reported_with_it(tmp_path: Path) -> None:
    beat = {"role": "rollout", "phase": "step/gen", "step": 3}
    (tmp_path / "heartbeats").mkdir()
    (tmp_path / "heartbeats/rank_00001.json").write_text(json.dumps(beat))
    (tmp_path / "heartbeats/rank_00002.json").write_text(json.dumps({**beat, "role": ""}))
    places = [failures.last_place(tmp_path, rank) for rank in range(3)]
    assert places == ["", " (rollout, phase step/gen of step 3)", ""]


@pytest.fixture
def rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process as rank 0 of 2 under torchrun; returns the folder of rank 1."""
    attempt = tmp_path / "run" / "attempt_0"
    environment = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(attempt / "0" / "error.json")}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(failures, "AGENT_S", 0.0)
    for rank in "01":
        (attempt / rank).mkdir(parents=True)
    failures.mark_started()
    return attempt / "1"


@pytest.mark.parametrize(("size", "launcher", "several"), [("2", None, True), ("1", None, False), ("1", "5", True)])
def test_the_only_rank_of_our_launcher_ends_with_its_exit_code(
    size: str, launcher: str | None, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank of several ends its process; the agent would take a forked function's return for success."""
    monkeypatch.delenv(failures.LAUNCHER_PID, raising=False)
    for name, value in {"RANK": "0", "WORLD_SIZE": size, failures.LAUNCHER_PID: launcher}.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    assert failures.is_one_of_several() == several


def fail(folder: Path) -> failures.FailureReport:
    """Report an error of rank 0, and read it back."""
    assert failures.report_failure(RuntimeError("closed")) == 1
    content = json.loads((folder.parent / "0" / "error.json").read_text())
    assert content["message"]["message"] == "RuntimeError: closed"
    return failures.FailureReport(**content["report"])


def test_an_error_after_the_death_of_another_rank_is_a_symptom(rank_0: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        (rank_0 / "pid").write_text(str(other.pid))
        assert not fail(rank_0).is_symptom
        failures.mark_started()
        other.kill()
        while failures._is_alive(other.pid):  # until the kernel has delivered the signal
            time.sleep(0.01)
        assert fail(rank_0).is_symptom
    (rank_0 / "pid").unlink()  # as mark_finished does, and as a report does
    assert not fail(rank_0).is_symptom


def test_a_rank_that_has_finished_or_reported_is_not_dead(rank_0: Path) -> None:
    own = rank_0.parent / "0" / "pid"
    assert int(own.read_text()) == os.getpid()
    fail(rank_0)
    assert not own.exists()
    failures.mark_started()
    failures.mark_finished()
    assert not own.exists()


def test_a_run_is_lost_when_a_rank_has_reported_or_the_launcher_ends_it(rank_0: Path) -> None:
    assert not failures.is_lost()
    (rank_0 / "error.json").write_text("{}")
    assert failures.is_lost()
    (rank_0 / "error.json").unlink()
    (rank_0.parents[2] / failures.END_FILE).touch()
    assert failures.is_lost()


def test_without_a_launcher_the_first_rank_prints(rank_0: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert failures.report_failure(ConfigError("a=1\n  and b=2")) == 2
    assert capsys.readouterr().err == "error: a=1\n  and b=2\n"


def test_a_report_that_cannot_be_written_is_printed(rank_0: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (rank_0.parent / "0" / "error.partial").mkdir()
    assert failures.report_failure(ConfigError("a=1")) == 2
    assert capsys.readouterr().err == "error: a=1\n"


def test_a_full_disk_is_no_traceback_and_no_text_steers(capsys: pytest.CaptureFixture[str]) -> None:
    assert failures.report_failure(OSError(errno.ENOSPC, "No space left on device", "out/a.txt")) == 1
    message = "error: [Errno 28] No space left on device: 'out/a.txt'; make room, and start again\n"
    assert capsys.readouterr().err == message
    assert failures.report_failure(ConfigError("the key \x1b[31m\x9b")) == 2
    assert capsys.readouterr().err == "error: the key <U+001B>[31m<U+009B>\n"
