"""The commands `report` and `watch`. Both read the files of a run, on any machine, while the run goes on and afterwards."""

from __future__ import annotations

import re
import select
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, TextIO

from grpo_megatron.config import ConfigError
from grpo_megatron.config.options import Argument, Option, Options
from grpo_megatron.config.problems import counted
from grpo_megatron.report.kit import page_panels, render_report
from grpo_megatron.report.progress import duration
from grpo_megatron.report.run_folder import METRICS_FILE, RunFolder
from grpo_megatron.storage.files import write_file
from grpo_megatron.untrusted import reason_of, visible, visible_line

PLAIN_WIDTH = 100  # characters of a line where there is no terminal
CLEAR, HIDE, SHOW = "\x1b[H\x1b[J", "\x1b[?25l", "\x1b[?25h"  # the screen; the cursor


class ReportOptions(Options):
    """The options of `report`."""

    program, description = "report", "Write the page of a run, or of two runs beside each other."
    run: Annotated[tuple[Path, ...], Argument("a run's output folder; at most two")]
    output: Annotated[Path, Option("the HTML file to write (default: report.html)")] = Path("report.html")

    def problems(self) -> Iterator[str]:
        """Yields that there are more runs than a page shows."""
        if len(self.run) > 2:
            yield f"a page shows one run or two, not {len(self.run)}"


class WatchOptions(Options):
    """The options of `watch`."""

    program = "watch"
    description = "Show a run in the terminal, from its files. Ctrl-C, or q and Enter, end it."
    run: Annotated[Path, Argument("the run's output folder")]
    once: Annotated[bool, Option("print once; the default where there is no terminal")] = False
    every: Annotated[float, Option("between two looks (default: 2)", "SECONDS")] = 2.0


def report(options: ReportOptions) -> int:
    """Writes the page of the runs; returns the exit code. Raises ConfigError."""
    runs = [_opened(folder) for folder in options.run]
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_file(options.output, render_report(runs))
    except OSError as error:
        raise ConfigError(f"cannot write --output {options.output}: {reason_of(error)}") from error
    print(f"wrote {options.output}")
    return 0


def watch(options: WatchOptions, stdin: TextIO | None = None, stdout: TextIO | None = None) -> int:
    """Shows the run until it ends, or until q and Enter; returns the exit code. Raises ConfigError."""
    stdin, stdout = stdin or sys.stdin, stdout or sys.stdout
    run = _opened(options.run)
    if options.once or not stdout.isatty():
        print("\n".join(watch_lines(run, PLAIN_WIDTH)), file=stdout)
        return 0
    stdout.write(HIDE)
    try:
        while True:
            size = shutil.get_terminal_size()
            lines = watch_lines(run, size.columns)[: size.lines - 1]
            stdout.write(CLEAR + "\n".join(lines) + "\n")
            stdout.flush()
            if run.state() != "running":
                return 0
            readable, _, _ = select.select([stdin], [], [], max(0.1, options.every))
            if readable and stdin.readline()[:1] in ("q", ""):
                return 0
            run.update()
    except KeyboardInterrupt:
        return 0
    finally:
        stdout.write(SHOW)
        stdout.flush()


def _opened(folder: Path) -> RunFolder:
    if not folder.is_dir():
        raise ConfigError(
            f"there is no folder {folder}; name the trainer.output_dir of a run, which makes it when its checks have passed"
        )
    run = RunFolder(folder)
    run.update()
    if not run.curves.num_rows and not run.settings and not run.events:
        raise ConfigError(
            f"{folder} has neither {METRICS_FILE} nor config.yaml: it is not the output folder of a run; name the"
            " trainer.output_dir itself, not a folder above or below it"
        )
    return run


# -- a run in a terminal: curves of one line each, the phase, the time left, a sample, and the last events -------------

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
MAIN = {  # titles of the panels whose curves are shown -> the label of the only curve that is shown, or "" for all
    "Training reward": "before penalties",
    **dict.fromkeys(
        ("Validation reward", "Reward by source", "Loss on held-out rows", "Preferences", "Distance to the teacher"), ""
    ),
    "Response length": "mean",
    **dict.fromkeys(("Entropy of the policy", "Gradient norm", "KL divergence", "Clipped tokens"), ""),
    "Engine against policy": "mean",
    "Explained variance": "",
    "Throughput": "whole step",
}
MAX_ROWS, MAX_EVENTS_SHOWN, SAMPLE_LINES = 16, 4, 6
NARROWEST = 40


def watch_lines(run: RunFolder, width: int) -> list[str]:
    """Draws the run in lines of at most `width` characters. `run` is up to date."""
    width = max(width, NARROWEST)
    parts = [_head(run), _now(run), _curve_lines(run, width), _sample(run, width), _losses(run), _events(run)]
    lines = [line for part in map(list, parts) if part for line in (*part, "")]
    return [line if len(line) <= width else f"{line[: width - 3]}..." for line in lines[:-1]]


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Draws one character per value, from the lowest to the highest; a blank for None. More values than `width` are averaged."""
    known = [value for value in values if value is not None]
    if not known or width < 1:
        return ""
    size, low, high = -(-len(values) // width), min(known), max(known)
    line = ""
    for first in range(0, len(values), size):
        cell = [value for value in values[first : first + size] if value is not None]
        share = (sum(cell) / len(cell) - low) / (high - low) if cell and high > low else 0.0
        line += BLOCKS[min(len(BLOCKS) - 1, int(share * len(BLOCKS)))] if cell else " "
    return line


def _head(run: RunFolder) -> Iterator[str]:
    total, each, left = run.total_steps(), run.step_seconds(), run.seconds_left()
    steps = f"{run.steps_done():,}" + ("" if total is None else f" of {total:,}")
    is_silent = run.silent_since() is not None
    words = [f"{visible_line(run.name)}: {'no sign of life' if is_silent else run.state()}", f"{steps} steps"]
    words += [f"{each:.3g} s per step"] if each is not None else []
    words += [f"{duration(left)} left"] if left is not None and not is_silent else []
    yield ", ".join(words)


def _now(run: RunFolder) -> Iterator[str]:
    now = run.now()
    if now is None or run.state() != "running":
        return
    if (since := run.silent_since()) is not None:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(since))
        yield f"no heartbeat since {when}, {duration(now.age_s)} ago: the run was probably killed; started again, it resumes"
        return
    where = f"step {now.step}" if now.step is not None else "start"
    if steps := run.warm_up_steps():
        where = f"warm-up, {where} of {steps}" if now.step is not None else "start"
    phase = f"{where}: {visible_line(now.phase)} for {duration(now.phase_s + now.age_s)}" if now.phase else where
    each, passed = run.step_seconds(), now.step_s + now.age_s
    if now.step_s and each is not None and each > passed:
        phase += f", about {duration(each - passed)} of the step left"
    yield phase


def _curve_lines(run: RunFolder, width: int) -> Iterator[str]:
    rows = []
    for panel in page_panels(run.curves.names(), {}):
        if panel.title not in MAIN:
            continue
        curves = panel.curves
        if only := MAIN[panel.title]:
            curves = [curve for curve in curves if curve[1] == only] or curves[:1]
        for name, label in curves:
            if run.curves.constant(name) != 0 or panel.always:
                title = panel.title if len(curves) == 1 else f"{panel.title}, {label}"
                rows.append((visible_line(title), run.curves.means(name)))
    longest = min(max((len(title) for title, _ in rows[:MAX_ROWS]), default=0), width // 3)
    for title, values in rows[:MAX_ROWS]:
        known = [value for value in values if value is not None]
        if known:
            numbers = f"{known[0]:>9.3g} -> {known[-1]:<9.3g}"
            space = width - longest - len(numbers) - 4
            yield f"{title[:longest]:<{longest}}  {numbers}  {sparkline(values, space)}"


def _sample(run: RunFolder, width: int) -> Iterator[str]:
    steps = run.samples()
    if not steps or not steps[-1]["groups"]:
        return
    group = steps[-1]["groups"][0]
    samples = [sample for sample in group["samples"] if sample["reward"] is not None] or group["samples"]
    best = max(samples, key=lambda sample: sample["reward"] or 0.0)
    numbers = [f"{name} {best[name]:.3g}" for name in ("reward", "advantage") if best[name] is not None]
    text = ", ".join([*numbers, counted(best["tokens"], "token")])
    yield f"step {steps[-1]['step']}, the best of {counted(len(group['samples']), 'sample')} of a prompt: {text}"
    yield from _folded("prompt", group["prompt"], width, 2)
    yield from _folded("response", "".join(piece[0] for piece in best["pieces"]), width, SAMPLE_LINES)
    yield from _folded("reference", group["answer"], width, 1)


def _folded(name: str, text: str, width: int, most: int) -> Iterator[str]:
    """Yields the first `most` lines of a text, indented under its name."""
    lines, space = [], width - 13
    text = re.sub(r"(<[^<>\s]+>)\1{3,}", lambda run: f"{run[1]} x {len(run[0]) // len(run[1])}", text)  # of an image
    for line in visible(text).split("\n"):
        lines += [line[first : first + space] for first in range(0, max(1, len(line)), space)]
    for number, line in enumerate(lines[:most]):
        mark = " ..." if number + 1 == most < len(lines) else ""
        yield f"  {name if number == 0 else '':<9}  {line[: space - len(mark)]}{mark}"


def _losses(run: RunFolder) -> Iterator[str]:
    if losses := run.recoveries():
        spent, tokens = sum(sum(one.seconds) for one in losses), sum(one.tokens_again for one in losses)
        times = "once" if len(losses) == 1 else f"{len(losses):,} times"
        yield f"ranks lost {times}: {spent:.1f} s until the next samples, about {tokens:,} tokens made again"


def _events(run: RunFolder) -> Iterator[str]:
    for event in run.events[-MAX_EVENTS_SHOWN:]:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(event["time"]))
        step = "" if event["step"] is None else f"step {event['step']}"
        yield f"{when}  {event['kind']:<8} {step:<9} {visible_line(str(event['text']))}".rstrip()
