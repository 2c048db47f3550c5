"""The terminal's tables: scores in percent with their 95 % intervals, and what they were measured with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def percent(score: dict[str, float]) -> str:
    """`71.3 [68.9, 73.7]`."""
    return f"{100 * score['value']:.1f} [{100 * score['low']:.1f}, {100 * score['high']:.1f}]"


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they must be: the first to the left, the others to the right; a rule below the head."""
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(w) if c == 0 else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0].rstrip(), "-" * (sum(widths) + 2 * (len(widths) - 1)), *(x.rstrip() for x in lines[1:])])


def describe(result: dict[str, Any]) -> str:
    """Everything a reader of the terminal needs to trust and to repeat the numbers."""
    tasks = result["tasks"]
    parts = [_scores(tasks), _rates(tasks)]
    for name, task in tasks.items():
        parts += [_breakdown(name, kind, groups) for kind, groups in task["by"].items()]
    parts.append(_provenance(result))
    return "\n\n".join(parts)


def _scores(tasks: dict[str, Any]) -> str:
    rows = []
    for name, task in tasks.items():
        for label, scores in task["scores"].items():
            shown = name if label == "accuracy" else f"{name} {label}"
            rows.append((shown, str(task["num_problems"]), {key: percent(value) for key, value in scores.items()}))
    columns = list(dict.fromkeys(key for *_, scores in rows for key in scores))
    return grid([("", "problems", *columns), *((n, p, *(s.get(c, "") for c in columns)) for n, p, s in rows)])


def _rates(tasks: dict[str, Any]) -> str:
    head = ("", "format errors", "truncated", "grader timeouts", "grader errors", "tokens: mean", "median", "p95")
    rows = []
    for name, task in tasks.items():
        rates, tokens = task["rates"], task["tokens"]
        shares = (
            f"{100 * rates[key]:.2f} %" for key in ("format_error", "truncated", "grader_timeout", "grader_error")
        )
        rows.append((name, *shares, *(f"{tokens[key]:.0f}" for key in ("mean", "median", "p95"))))
    return grid([head, *rows])


def _breakdown(name: str, kind: str, groups: dict[str, Any]) -> str:
    columns = list(next(iter(groups.values())))
    rows = [
        (label, str(scores[columns[0]]["problems"]), *(percent(scores[c]) for c in columns))
        for label, scores in groups.items()
    ]
    return grid([(f"{name} by {kind}", "problems", *columns), *rows])


def _provenance(result: dict[str, Any]) -> str:
    model = result["model"]
    lines = [f"model {model['path']} ({model['dtype']}, sha256 {model['sha256'][:12]}), seed {result['seed']}"]
    for name, task in result["tasks"].items():
        shots = f"{task['num_fewshot']}-shot {task['format']}"
        drawn = f", {task['samples']} samples at temperature {task['temperature']:g}, top_p {task['top_p']:g}"
        lines.append(
            f"{name} version {task['version']}: {shots}{drawn if task['samples'] else ''}, up to {task['max_tokens']} tokens;"
            f" sha256 of task file {task['task_sha256'][:12]}, data {task['data_sha256'][:12]},"
            f" prompts {task['prompts_sha256'][:12]}"
        )
    lines.append("95 % intervals: bootstrap over problems; they say nothing of other prompts, seeds or models")
    return "\n".join(lines)
