"""Curves: one PNG of a run from its metrics.jsonl. `python -m grpo_megatron.observability.curves metrics.jsonl out.png`

The main panels of the run's page (pages/page/panels.yaml), and the seconds per phase. A panel is left out if the run has none
of its metrics, or if they are 0 in every step: KL without a reference, for example; a reward that stays at 0 is drawn. Red
lines mark steps where a metric of the panel was NaN or infinite. report.html shows more.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from grpo_megatron.pages.kit import PHASE, PagePanel, page_panels
from grpo_megatron.pages.run_folder import StepMetrics, read_metrics

NOT_RECORDED, COLUMNS = "not recorded", 3
logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it would list every font that it did not find


MAIN_PANELS = (  # their titles, in the order of the picture
    *("Training reward", "Validation accuracy", "Response length", "Entropy of the policy", "Gradient norm"),
    *("Engine against policy", "KL divergence", "Throughput"),
)


def plot(metrics_jsonl: Path, png: Path) -> None:
    """Draw the run in `metrics_jsonl` (see metrics.JsonlSink) into `png`. Raises ValueError if it has no steps."""
    rows = sorted(read_metrics(Path(metrics_jsonl)), key=lambda row: row["step"])
    if not rows:
        raise ValueError(
            f"{str(metrics_jsonl)!r} has no steps to plot; is it the metrics.jsonl of a run with trainer.logger jsonl?"
        )
    panels = [panel for panel in page_panels(_names(rows), {}) if panel.title in MAIN_PANELS]
    panels.sort(key=lambda panel: MAIN_PANELS.index(panel.title))
    drawn = [
        panel
        for panel in panels
        if panel.title == MAIN_PANELS[0] or any(row.get(name, 0) != 0 for row in rows for name, _ in panel.curves)
    ]
    num_rows = -(-(len(drawn) + 1) // COLUMNS)
    figure = Figure(figsize=(16, 3.8 * num_rows + 0.1), layout="constrained")
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    axes = figure.subplots(num_rows, COLUMNS, squeeze=False).flatten()
    for ax, panel in zip(axes, drawn, strict=False):
        _draw_panel(ax, rows, panel)
    _draw_phases(axes[len(drawn)], rows)
    for ax in axes[len(drawn) + 1 :]:
        ax.remove()
    folder = Path(metrics_jsonl).resolve().parent.name
    figure.suptitle(f"{folder}: steps {rows[0]['step']} to {rows[-1]['step']}", fontsize=14)
    figure.savefig(png, dpi=110)


def _names(rows: Sequence[StepMetrics]) -> list[str]:
    return sorted({name for row in rows for name in row})


def _smooth(values: Sequence[float]) -> list[float]:
    """Running median over a tenth of the run. It is centred, so it does not lag, and it is not moved by a single spike."""
    half = len(values) // 20
    return [statistics.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _draw_panel(ax: Axes, rows: Sequence[StepMetrics], panel: PagePanel) -> None:
    drawn, empty = 0, NOT_RECORDED
    for metric, label in panel.curves:
        points = [(row["step"], row[metric]) for row in rows if isinstance(row.get(metric), int | float)]
        finite = [(step, value) for step, value in points if math.isfinite(value)]
        shown = [(step, value) for step, value in finite if value > 0] if panel.log else finite
        if not shown:
            empty = "0 in every step" if finite else empty
            continue
        (steps, values), color = zip(*shown, strict=True), f"C{drawn}"
        drawn += 1
        if len(values) < 40:
            ax.plot(steps, values, color=color, marker="o", markersize=3, label=label)
        else:
            ax.plot(steps, values, color=color, alpha=0.3, linewidth=0.8)
            ax.plot(steps, _smooth(values), color=color, linewidth=1.8, label=label)
    if panel.log and drawn:
        ax.set_yscale("log")
    for row in rows:
        if any(metric in row and row[metric] is None for metric, _ in panel.curves):
            ax.axvline(row["step"], color="red", alpha=0.5, linewidth=0.8)
    _finish_axes(ax, rows, panel.title, panel.unit, None if drawn else empty)
    labels = ax.get_legend_handles_labels()[1]
    if len(labels) > 3:
        ax.legend(fontsize=8, framealpha=0.6)
    elif labels:  # a row under the title
        ax.legend(fontsize=8, frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 0.98))


def _draw_phases(ax: Axes, rows: Sequence[StepMetrics]) -> None:
    """Seconds per phase, stacked. "other" is the time that no phase covers. Each step is a bar of width 1."""
    phases = {
        name.removeprefix("timing_s/"): [float(row.get(name) or 0.0) for row in rows]
        for name in _names(rows)
        if PHASE.fullmatch(name)
    }
    phases = dict(sorted(phases.items(), key=lambda phase: -sum(phase[1])))
    covered = [sum(column) for column in zip(*phases.values(), strict=True)] or [0.0] * len(rows)
    colors = [f"C{number % 10}" for number in range(len(phases))]
    other = [max(0.0, (row.get("timing_s/step") or 0.0) - own) for row, own in zip(rows, covered, strict=True)]
    if any(other):
        phases["other"] = other
        colors.append("lightgray")
    edges = [row["step"] - 0.5 for row in rows] + [rows[-1]["step"] + 0.5]
    if phases:
        heights = [[*seconds, seconds[-1]] for seconds in phases.values()]
        ax.stackplot(edges, heights, labels=list(phases), colors=colors, step="post", linewidth=0)
    _finish_axes(ax, rows, "Where the time goes", "seconds per step", None if phases else NOT_RECORDED)
    if phases:  # a column beside the stack, in its order
        handles, labels = ax.get_legend_handles_labels()
        ax.legend(handles[::-1], labels[::-1], fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def _finish_axes(ax: Axes, rows: Sequence[StepMetrics], title: str, unit: str, empty: str | None) -> None:
    """Title and axes. `empty`: the text of a panel without curves; None if it has curves."""
    ax.set_title(title, fontsize=12, pad=22)
    ax.set_ylabel(unit)
    ax.set_xlabel("step")
    ax.set_xlim(rows[0]["step"] - 0.5, rows[-1]["step"] + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    if empty is not None:
        ax.set_yticks([])
        ax.text(0.5, 0.5, empty, transform=ax.transAxes, ha="center", va="center", color="gray")


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the picture that the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_megatron.observability.curves", description="Draw a run's learning curves."
    )
    parser.add_argument("metrics_jsonl", type=Path, help="OUTPUT_DIR/metrics.jsonl")
    parser.add_argument("png", type=Path, help="the picture to write")
    options = parser.parse_args(arguments)
    try:
        plot(options.metrics_jsonl, options.png)
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
