"""The time left within a step, the bar, the lines of a log, and how often the report is written. Clocks are set by hand."""

from __future__ import annotations

import io
import json
import re
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

from grpo_megatron.report import console
from grpo_megatron.report import metrics as sinks_module
from grpo_megatron.report import progress as progress_module
from grpo_megatron.report.console import ConsoleSink
from grpo_megatron.report.metrics import JsonlSink, ReportSink
from grpo_megatron.report.progress import StepProgress, awaited, duration
from grpo_megatron.report.run_folder import METRICS_FILE
from tests.report.material import make_run


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_time_left_is_that_of_the_last_steps() -> None:
    """Steps of 90, 100 and 300 s: the median is 100. 70 s of this one are over, 34 of them in `gen`."""
    clock = Clock()
    progress = StepProgress(clock)
    assert progress.text() == ""
    clock.now = 10.0
    progress.enter(3, ["step"])
    clock.now = 46.0
    progress.enter(3, ["step", "gen"])
    clock.now = 80.0
    assert progress.text() == "gen 34 s"  # nothing is known of earlier steps
    for seconds in (90.0, 100.0, 300.0):
        progress.finished(seconds)
    assert progress.text() == progress.text(1) == "gen 34 s, about 30 s of the step left"
    assert progress.text(4) == "gen 34 s, about 30 s of the step and 5 min 30 s of the run left"  # 4 x 100 s - 70 s
    assert progress.line() == "step 3: gen 34 s, about 30 s of the step left; 1 min 10 s of it are over"
    clock.now = 200.0
    assert progress.text() == "gen 2 min 34 s, longer than the last steps"
    progress.enter(3, [])
    assert (progress.text(), progress.step_seconds()) == ("", 0.0)
    assert duration(3 * 3600 + 60) == "3 h 1 min"


def test_what_is_no_part_of_a_step_has_its_own_name_and_no_estimate() -> None:
    clock = Clock()
    progress = StepProgress(clock)
    progress.finished(100.0)
    progress.enter(4, ["save_checkpoint"])
    clock.now = 20.0
    assert progress.text(6) == "save_checkpoint 20 s"
    progress.enter(12, [])
    progress.enter(12, ["warm-up", "step", "update_actor"])
    clock.now = 23.0
    assert progress.text(6) == "warm-up: update_actor 3 s"
    assert progress.line() == "step 12: warm-up: update_actor 3 s; 3 s of it are over"


class Followed(io.StringIO):
    """A stream that knows when a text was written to it."""

    def __init__(self, wanted: str, is_terminal: bool) -> None:
        super().__init__()
        self.wanted, self.is_terminal, self.written = wanted, is_terminal, threading.Event()

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        if self.wanted in text:
            self.written.set()
        return super().write(text)


@pytest.mark.parametrize(
    ("is_terminal", "wanted"), [(True, "gen 0 s"), (False, "step 4: gen ")], ids=["terminal", "log"]
)
def test_a_long_step_is_followed(is_terminal: bool, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BAR_PERIOD_S", "LOG_PERIOD_S", "FIRST_LINE_S"):
        monkeypatch.setattr(console, name, 0.01)
    stream = Followed(wanted, is_terminal)
    sink = ConsoleSink(10, 4, stream)
    sink.enter(4, ["step", "gen"])
    assert stream.written.wait(60)
    sink.close()


def test_a_long_wait_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with awaited("building the engine", True, first_s=0.01):
        threading.Event().wait(0.05)
    with awaited("nothing", False, first_s=0.0):
        pass
    lines = capsys.readouterr().out.splitlines()
    assert lines and all(line == "building the engine: 0 s so far" for line in lines)


def steps_in(page: str) -> list[int]:
    """The last step that the page was written with, and those that were appended to it."""
    data, *appended = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    return [json.loads(data)["runs"][0]["steps"][-1], *(json.loads(row)["step"] for row in appended)]


def test_a_wait_is_counted_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is erased at the end, and it ends by itself when what is awaited is there."""
    monkeypatch.setattr(progress_module, "COUNT_PERIOD_S", 0.01)
    stream = Followed("importing: 0 s", is_terminal=True)
    monkeypatch.setattr(sys, "stdout", stream)
    with awaited("importing", True):
        assert stream.written.wait(60)
    assert stream.getvalue().startswith("\r\x1b[K  importing: 0 s\r") and stream.getvalue().endswith("\r\x1b[K")
    asked = threading.Event()
    with awaited("never shown", True, is_over=lambda: asked.set() or True):
        assert asked.wait(60)
    assert "never" not in stream.getvalue()


def test_every_step_is_in_the_report_which_takes_a_hundredth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing takes 0.2 s, so that it is due again 20 s later. The steps between are appended; start and end are written."""
    clock, written = Clock(), []

    def write(path: Path, text: str) -> None:
        clock.now += 0.2
        written.append(clock.now)
        path.write_text(text)

    folder = make_run(tmp_path / "run", steps=0)
    rows, page = JsonlSink(folder / METRICS_FILE), folder / "report.html"
    monkeypatch.setattr(sinks_module, "write_file", write)
    sink = ReportSink(folder, clock=clock)
    assert len(written) == 1 and "report.html" not in [path.name for path in folder.glob(".*")]
    seen = []
    for step in range(10):
        clock.now = 5.0 + 5.0 * step
        metrics = {"critic/score/mean": 0.1 * step}
        rows.log(step, metrics)
        sink.log(step, metrics)
        seen.append(steps_in(page.read_text()))
    # written at 5 s and, due at 25.2, at 30 s; the next one is due at 50.2, after step 9 at 50 s
    assert seen == [list(range(first, last + 1)) for first in (0, 5) for last in range(first, first + 5)]
    assert len(written) == 3
    page.unlink()  # by its user: it is not begun in its middle
    sink.log(10, {})
    assert not page.exists()
    sink.log(11, {})
    assert steps_in(page.read_text()) == [9]
    sink.close()
    rows.close()
    assert len(written) == 5


def test_the_steps_whose_samples_are_kept_are_the_first_the_newest_and_some_between(tmp_path: Path) -> None:
    sink = ReportSink(make_run(tmp_path / "run"))
    for step in range(40):
        sink.samples.add(step, [])
    steps = [kept["step"] for kept in sink.samples.steps]
    assert len(steps) == 12 and steps[0] == 0 and steps[-5:] == [35, 36, 37, 38, 39]
    gaps = [after - before for before, after in zip(steps[:7], steps[1:8], strict=True)]
    assert max(gaps) <= 4 * min(gaps), steps
    resumed = ReportSink(sink.run.folder, first_step=20)
    assert all(kept["step"] < 20 for kept in resumed.samples.steps) and resumed.samples.steps


def test_a_report_that_cannot_be_written_ends_no_run_and_is_whole_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_run(tmp_path / "run")
    sink, full = ReportSink(folder), mock.Mock(side_effect=OSError("no space left"))
    sink.log(0, {})
    with monkeypatch.context() as disk:
        disk.setattr(sinks_module, "appended_step", full)
        sink.log(1, {})
        disk.setattr(sinks_module, "write_file", full)
        sink.log(2, {})
    assert "cannot write" in caplog.text and "report.html" in caplog.text
    (folder / "report.html").write_text("a part of a line")
    sink.log(3, {})
    assert "a part of a line" not in (folder / "report.html").read_text()
