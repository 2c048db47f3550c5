"""`grpo-megatron watch`: what it prints of a run from its files, and that a model's text cannot steer the terminal."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_megatron.processes.process import start_ticks
from grpo_megatron.report.kit import render_report
from grpo_megatron.report.run_folder import RunFolder
from grpo_megatron.report.watch import WatchOptions, sparkline, watch, watch_lines
from tests.report.material import HOSTILE, event, group, make_run, sample
from tests.runs import write_rows

WORDS = "first second third"


def lines_of(folder: Path, width: int = 100) -> list[str]:
    run = RunFolder(folder)
    run.update()
    return watch_lines(run, width)


def beat(folder: Path, **more: Any) -> None:
    (folder / "heartbeats").mkdir(exist_ok=True)
    content = {"phase": "step/gen", "phase_s": 2.0, "step": 30, "step_s": 4.0, **more}
    (folder / "heartbeats" / "rank_00000.json").write_text(json.dumps(content))


def test_a_running_run(tmp_path: Path) -> None:
    """Steps of 10 s, 4 s of one are over: 6 s are left of it, and 10 steps make 100 s."""
    samples = [group([sample(0, 0.0), sample(1, 1.0, WORDS)], "see " + "<|image_pad|>" * 64 + "?")]
    folder = make_run(
        tmp_path / "run", steps=30, samples=samples, events=[event("started", 0), event("guard", 7, "bad")]
    )
    beat(folder)
    lines = lines_of(folder)
    assert lines[0] == "run: running, 30 of 40 steps, 10 s per step, 1 min 40 s left"
    assert lines[2].startswith("step 30: gen for 2 s, about 6 s of the step left")
    (reward,) = [line for line in lines if line.startswith("Training reward")]
    assert "0.2 -> 0.49" in reward and reward.rstrip()[-1] == "\u2588"
    assert not any("KL" in line for line in lines)  # 0 in every step
    assert "step 29, the best of 2 samples of a prompt: reward 1, advantage 0.5, 3 tokens" in lines
    assert "  prompt     see <|image_pad|> x 64?" in lines
    assert "  response   first second third " in lines and "  reference  7" in lines
    assert lines[-1].endswith("guard    step 7    bad")

    folder = make_run(tmp_path / "warm", steps=0, config={"sft": {"steps": 50}}, events=[event("started", 0)])
    beat(folder, phase="step/update_actor")
    assert lines_of(folder)[2].startswith("warm-up, step 30 of 50: update_actor for 2 s")
    (folder / "warmup").mkdir()
    assert lines_of(folder)[2].startswith("step 30: update_actor")


def test_losses_of_ranks_are_summed(tmp_path: Path) -> None:
    """The loss in step 2 comes while the ranks start again; after the one in step 5 the steps 4 and 5 are made again."""
    lost = {"who": "lost rank 1", "layout": "2 ranks, then 1, in the layout of the config"}
    events = [event("started", 0), {**event("lost", 2), **lost}, {**event("lost", 2), **lost}]
    events += [{**event("healed", 2), "seconds": [0.2, 1.0, 0.3]}, {**event("lost", 5), **lost}]
    folder = make_run(
        tmp_path / "run", steps=8, events=[*events, {**event("healed", 4), "seconds": [8, 1.0, "x", 1e99]}]
    )
    rows = [{**json.loads(line), "perf/total_num_tokens": 100} for line in (folder / "metrics.jsonl").open()]
    write_rows(folder / "metrics.jsonl", rows)
    run = RunFolder(folder)
    run.update()
    assert [(one.steps_done, sum(one.seconds), one.steps_again, one.tokens_again) for one in run.recoveries()] == [
        (2, 0, 0, 0),
        (2, 1.5, 1, 100),
        (5, 9.0, 2, 200),
    ]
    assert "ranks lost 3 times: 10.5 s until the next samples, about 300 tokens made again" in lines_of(folder)
    assert '"recoveries":[{' in render_report([run]).replace(" ", "")


def test_a_run_that_was_killed_is_noticed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=3)
    beat(folder)
    os.utime(folder / "heartbeats" / "rank_00000.json", (1e9, 1e9))
    lines = lines_of(folder, 120)
    assert lines[0] == "run: no sign of life, 3 of 40 steps, 10 s per step"
    assert lines[2].startswith("no heartbeat since 2001-09-") and lines[2].endswith("killed; started again, it resumes")
    (folder / "events.jsonl").write_text(json.dumps(event("done", 3)) + "\n")
    assert lines_of(folder)[0].startswith("run: done, 3 of 40 steps")  # an end is an end, however old


def test_a_run_whose_launcher_was_killed_here_is_noticed_at_once(tmp_path: Path) -> None:
    """After 10 s, not 60: rank 0 and its launcher are gone. While one of them lives, or on another machine, nobody knows."""
    folder, here = make_run(tmp_path / "run", steps=3, events=[event("started", 0)]), socket.gethostname()
    living = {"node": here, "pid": os.getpid(), "started": start_ticks()}
    dead = {**living, "started": 1}

    def first_word(rank: dict[str, Any], launcher: dict[str, Any], age_s: float) -> str:
        beat(folder, **rank)
        (folder / "heartbeats/launcher_1.json").write_text(json.dumps(launcher))
        os.utime(folder / "heartbeats/rank_00000.json", (time.time() - age_s,) * 2)
        return lines_of(folder)[0].partition(",")[0]

    assert first_word(dead, dead, 12) == "run: no sign of life"
    assert first_word(dead, dead, 2) == first_word(dead, living, 12) == first_word(living, dead, 12) == "run: running"
    assert first_word({**dead, "node": "elsewhere"}, dead, 12) == first_word(dead, {}, 12) == "run: running"


def test_a_text_cannot_steer_the_terminal(tmp_path: Path) -> None:
    hostile = [group([sample(0, 1.0, HOSTILE)], HOSTILE)]
    folder = make_run(tmp_path / "run", samples=hostile, events=[event("failed", None, HOSTILE)])
    for width in (40, 100):
        text = "\n".join(lines := lines_of(folder, width))
        assert max(map(len, lines)) <= width
        assert not any(character in text for character in "\x1b\x00\u202e\ud800")
    assert "<U+001B>[31m<U+0000>" in text


def test_a_folder_with_damaged_files_is_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=2)
    (folder / "config.yaml").write_text("a: [")
    (folder / "events.jsonl").write_text('{"kind": "resum')
    (folder / "report_samples.jsonl").write_text("[")
    beat(folder, phase=None, phase_s="x")
    assert lines_of(folder)[0] == "run: running, 2 steps, 10 s per step"


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"),
        ([0, 0, 7, 7], 2, "\u2581\u2588"),  # two values per character
        ([1, None, 2], 3, "\u2581 \u2588"),
        ([3, 3], 2, "\u2581\u2581"),
        ([None], 5, ""),
    ],
)
def test_sparklines(values: list[float | None], width: int, line: str) -> None:
    assert sparkline(values, width) == line


def test_without_a_terminal_it_prints_once(tmp_path: Path) -> None:
    out = io.StringIO()
    assert watch(WatchOptions(run=make_run(tmp_path / "run")), stdout=out) == 0
    assert out.getvalue().startswith("run: running, 40 of 40 steps") and "\x1b" not in out.getvalue()


def test_on_a_terminal_it_follows_until_the_run_ends(tmp_path: Path) -> None:
    """The run is done already, so that one screen is drawn; the cursor is shown again afterwards."""
    folder = make_run(tmp_path / "run", events=[event("done", 40)])
    master, slave = pty.openpty()
    with open(slave, "w") as terminal:
        assert watch(WatchOptions(run=folder, every=0.1), stdin=io.StringIO(), stdout=terminal) == 0
    parts = []
    with contextlib.suppress(OSError):  # of Linux, where the other end is closed and everything has been read
        while part := os.read(master, 1 << 16):
            parts.append(part)
    os.close(master)
    text = b"".join(parts).decode()
    assert text.startswith("\x1b[?25l\x1b[H\x1b[Jrun: done, 40 of 40 steps") and text.endswith("\x1b[?25h")


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to every part of a value, but to the whole."""
    for key, part in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        yield (*place, key)
        yield from places(part, (*place, key))


def replaced(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    parts = {key: replaced(part, place[1:], new) if key == place[0] else part for key, part in pairs}
    return parts if isinstance(value, dict) else list(parts.values())


@pytest.mark.parametrize("name", ["events.jsonl", "report_samples.jsonl", "heartbeats/rank_00000.json", "config.yaml"])
def test_any_value_in_any_place_is_no_traceback(tmp_path: Path, name: str) -> None:
    samples, events = [group([sample(0, 1.0, "a")])], [event("guard", 2, "t")]
    config = {"trainer": {"experiment_name": "n"}, "guards": {"entropy": {"low": 0.1}}}
    folder = make_run(tmp_path / "run", steps=3, samples=samples, events=events, config=config)
    beat(folder)
    value = yaml.safe_load((folder / name).read_text())
    for place in places(value):
        for new in (None, -1, 10**400, "x", [], [1], {"a": 1}):
            (folder / name).write_text(json.dumps(replaced(value, place, new)) + "\n")
            run = RunFolder(folder)
            run.update()
            assert watch_lines(run, 80)
    assert render_report([run])


def test_files_that_would_block_are_passed_over(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    beat(folder)
    for name in ("events.jsonl", "report_samples.jsonl", "heartbeats/rank_00000.json", "config.yaml"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
    assert lines_of(folder)[0] == "run: running, 40 steps, 10 s per step"
