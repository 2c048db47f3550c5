"""Figures of the report as inline SVG: bars with intervals, and histograms. Plain functions from numbers to text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from grpo_megatron.evaluation.results import limited, score_columns, score_label

FIGURE_WIDTH = 520
BINS = 32


def _svg(height: float, parts: Sequence[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {FIGURE_WIDTH} {height:g}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def _svg_text(x: float, y: float, text: str, anchor: str = "start", css: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{css}">{escape(text)}</text>'


def bars(groups: dict[str, dict[str, float]], label: str) -> str:
    """One horizontal bar per group, 0 to 100 percent, with its 95 % interval, value and number of problems."""
    left, right, step = 150, 400, 24
    parts = []
    for row, (name, score) in enumerate(groups.items()):
        y = row * step + 4
        parts.append(_svg_text(left - 8, y + 12, name if len(name) <= 24 else name[:23] + "...", "end"))
        parts.append(f'<rect class="track" x="{left}" y="{y}" width="{right - left}" height="16" rx="2"/>')
        low, value, high = (left + score[key] * (right - left) for key in ("low", "value", "high"))
        parts.append(f'<rect class="bar" x="{left}" y="{y}" width="{value - left:.1f}" height="16" rx="2"/>')
        parts.append(
            f'<path class="whisker" d="M{low:.1f} {y + 8}H{high:.1f}M{low:.1f} {y + 4}v8M{high:.1f} {y + 4}v8"/>'
        )
        parts.append(_svg_text(right + 46, y + 12, f"{100 * score['value']:.1f}", "end"))
        parts.append(_svg_text(right + 54, y + 12, f"of {score['problems']:,}", css="soft"))
    return _svg(len(groups) * step + 6, parts, label)


def histogram(right: Sequence[int], wrong: Sequence[int], label: str) -> str:
    """Counts of whole numbers from 0; the right ones stand below the wrong ones."""
    most = max([*right, *wrong], default=0)
    size = max(1, -(-(most + 1) // BINS))
    count = most // size + 1
    columns = [[0, 0] for _ in range(count)]
    for column, values in enumerate((right, wrong)):
        for value in values:
            columns[value // size][column] += 1
    return _column_chart(
        columns, [str(size * i) for i in range(count)], str(size * count - 1) if size > 1 else "", label
    )


def right_counts(rights: Sequence[int], num_samples: int, label: str) -> str:
    """How many problems have 0, 1, ... `num_samples` right answers."""
    columns = [[rights.count(n), 0] for n in range(num_samples + 1)]
    columns[0].reverse()  # problems without a right answer are drawn like wrong ones
    return _column_chart(columns, [str(n) for n in range(num_samples + 1)], "", label)


def _column_chart(columns: list[list[int]], names: list[str], end: str, label: str) -> str:
    left, base, height = 52, 132, 120
    tallest = max(max(sum(column) for column in columns), 1)
    step = (FIGURE_WIDTH - left - 8) / len(columns)
    parts = [
        f'<path class="axis" fill="none" d="M{left} {base - height}H{FIGURE_WIDTH - 8}M{left} {base}H{FIGURE_WIDTH - 8}"/>',
        _svg_text(left - 6, base - height + 4, f"{tallest:,}", "end", "soft"),
        _svg_text(left - 6, base + 4, "0", "end", "soft"),
    ]
    every = -(-len(columns) // 8)
    for number, (right, wrong) in enumerate(columns):
        x, bottom = left + number * step, float(base)
        for css, value in (("right", right), ("wrong", wrong)):
            tall = value / tallest * height
            if value:
                bottom -= tall
                parts.append(
                    f'<rect class="{css}" x="{x + 0.08 * step:.1f}" y="{bottom:.1f}" width="{0.84 * step:.1f}"'
                    f' height="{tall:.1f}"><title>{escape(names[number])}: {right:,} right, {wrong:,} wrong</title></rect>'
                )
        if number % every == 0:
            parts.append(_svg_text(x + step / 2, base + 16, names[number], "middle", "soft"))
    if end and (len(columns) - 1) % every > every / 2:
        parts.append(_svg_text(FIGURE_WIDTH - 8, base + 16, end, "end", "soft"))
    return _svg(base + 22, parts, label)


def score_rows(tasks: dict[str, Any]) -> str:
    """The table of scores as HTML."""
    columns = score_columns(tasks)
    head = "".join(f"<th>{escape(name)}</th>" for name in ("task", "problems", *columns))
    lines = []
    for name, task in tasks.items():
        count = limited(task) or f"{task['num_problems']:,}"
        for label, scores in task["scores"].items():
            cells = "".join(f"<td>{_interval_cell(scores[c])}</td>" if c in scores else "<td></td>" for c in columns)
            lines.append(f"<tr><td>{escape(score_label(name, label))}</td><td>{count}</td>{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _interval_cell(score: dict[str, float]) -> str:
    low, high = 100 * score["low"], 100 * score["high"]
    return f'<b>{100 * score["value"]:.1f}</b><span class="ci">{low:.1f} to {high:.1f}</span>'
