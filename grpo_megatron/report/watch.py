"""A run in a terminal, from its files: curves of one line each, the phase, the time left, a sample, and the last events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from grpo_megatron.pages.kit import visible, visible_line
from grpo_megatron.pages.panels import page_panels
from grpo_megatron.pages.run_folder import RunFolder

BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
MAIN = (  # titles of panels whose curves are shown
    *("Training reward", "Validation accuracy", "Reward by source", "Loss on held-out rows", "Preferences"),
    *("Response length", "Entropy of the policy", "Gradient norm", "KL divergence", "Clipped tokens"),
    *("Engine against policy", "Explained variance", "Throughput"),
)
ONE_CURVE = {  # title -> the label of its curve that is shown
    "Training reward": "before penalties",
    "Throughput": "whole step",
    "Response length": "mean",
    "Engine against policy": "mean",
}
MAX_ROWS, MAX_EVENTS_SHOWN, SAMPLE_LINES = 16, 4, 6
NARROWEST = 40


def watch_lines(run: RunFolder, width: int) -> list[str]:
    """Draw the run in lines of at most `width` characters. `run` is up to date."""
    width = max(width, NARROWEST)
    parts = [_head(run), list(_now(run)), list(_curve_lines(run, width)), list(_sample(run, width)), list(_events(run))]
    lines = [line for part in parts if part for line in (*part, "")]
    return [line if len(line) <= width else f"{line[: width - 3]}..." for line in lines[:-1]]


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Draw one character per value, from the lowest to the highest; a blank for None. More values than `width` are averaged."""
    known = [value for value in values if value is not None]
    if not known or width < 1:
        return ""
    size = -(-len(values) // width)
    cells = [_mean(values[first : first + size]) for first in range(0, len(values), size)]
    low, high = min(known), max(known)
    return "".join(" " if cell is None else BLOCKS[_level(cell, low, high)] for cell in cells)


def _level(value: float, low: float, high: float) -> int:
    return min(len(BLOCKS) - 1, int((value - low) / (high - low) * len(BLOCKS))) if high > low else 0


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _head(run: RunFolder) -> list[str]:
    total, each, left = run.total_steps(), run.step_seconds(), run.seconds_left()
    steps = f"{run.steps_done():,}" + ("" if total is None else f" of {total:,}")
    is_silent = run.silent_since() is not None
    words = [f"{visible_line(run.name)}: {'no sign of life' if is_silent else run.state()}", f"{steps} steps"]
    words += [f"{each:.3g} s per step"] if each is not None else []
    words += [f"{time_text(left)} left"] if left is not None and not is_silent else []
    return [", ".join(words)]


def _now(run: RunFolder) -> Iterator[str]:
    now = run.now()
    if now is None or run.state() != "running":
        return
    if (since := run.silent_since()) is not None:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(since))
        yield f"no heartbeat since {when}, {time_text(now.age_s)} ago: the run was probably killed; started again, it resumes"
        return
    where = f"step {now.step}" if now.step is not None else "start"
    phase = f"{where}: {visible_line(now.phase)} for {time_text(now.phase_s + now.age_s)}" if now.phase else where
    each, passed = run.step_seconds(), now.step_s + now.age_s
    if now.step_s and each is not None and each > passed:
        phase += f", about {time_text(each - passed)} of the step left"
    yield phase


def _curve_lines(run: RunFolder, width: int) -> Iterator[str]:
    rows = []
    for panel in page_panels(run.curves.names(), {}):
        if panel.title not in MAIN:
            continue
        curves = panel.curves
        if panel.title in ONE_CURVE:
            curves = [curve for curve in curves if curve[1] == ONE_CURVE[panel.title]] or curves[:1]
        for name, label in curves:
            if run.curves.constant(name) != 0 or panel.always:
                title = panel.title if len(curves) == 1 else f"{panel.title}, {label}"
                rows.append((visible_line(title), run.curves.means(name)))
    rows = rows[:MAX_ROWS]
    longest = min(max((len(title) for title, _ in rows), default=0), width // 3)
    for title, values in rows:
        known = [value for value in values if value is not None]
        if known:
            numbers = f"{known[0]:>9.3g} -> {known[-1]:<9.3g}"
            space = width - longest - len(numbers) - 4
            yield f"{title[:longest]:<{longest}}  {numbers}  {sparkline(values, space)}"


def _sample(run: RunFolder, width: int) -> Iterator[str]:
    kept = run.samples()
    if not kept or not kept[-1]["groups"]:
        return
    group = kept[-1]["groups"][0]
    samples = [sample for sample in group["samples"] if sample["reward"] is not None] or group["samples"]
    best = max(samples, key=lambda sample: sample["reward"] if sample["reward"] is not None else 0.0)
    yield f"step {kept[-1]['step']}, the best of {len(group['samples'])} samples of a prompt: {_numbers(best)}"
    yield from _folded("prompt", group["prompt"], width, 2)
    yield from _folded("response", "".join(piece[0] for piece in best["pieces"]), width, SAMPLE_LINES)
    yield from _folded("reference", group["answer"], width, 1)


def _numbers(sample: dict[str, Any]) -> str:
    words = [f"{name} {sample[name]:.3g}" for name in ("reward", "advantage") if sample[name] is not None]
    return ", ".join([*words, f"{sample['tokens']:,} tokens"])


def _folded(name: str, text: str, width: int, most: int) -> Iterator[str]:
    """The first `most` lines of a text, indented under its name."""
    lines, space = [], width - 13
    for line in visible(text).split("\n"):
        lines += [line[first : first + space] for first in range(0, max(1, len(line)), space)]
    for number, line in enumerate(lines[:most]):
        mark = " ..." if number + 1 == most < len(lines) else ""
        yield f"  {name if number == 0 else '':<9}  {line[: space - len(mark)]}{mark}"


def _events(run: RunFolder) -> Iterator[str]:
    for event in run.events[-MAX_EVENTS_SHOWN:]:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(event["time"]))
        step = "" if event["step"] is None else f"step {event['step']}"
        yield f"{when}  {event['kind']:<8} {step:<9} {visible_line(str(event['text']))}".rstrip()


def time_text(seconds: float) -> str:
    """Format seconds as "34 s", "2 min" or "3 h 12 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
