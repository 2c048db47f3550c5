"""Tables for the terminal: scores in percent with their 95 % intervals, and the settings that they depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def percent(score: dict[str, float]) -> str:
    """`71.3 [68.9, 73.7]`."""
    return f"{100 * score['value']:.1f} [{100 * score['low']:.1f}, {100 * score['high']:.1f}]"


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right; a line below the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([lines[0], rule, *lines[1:]])


def result_tables(result: dict[str, Any]) -> str:
    """The scores, and all that is needed to judge and to repeat them."""
    tasks = result["tasks"]
    parts = [_score_table(tasks), _rate_table(tasks)]
    for name, task in tasks.items():
        parts += [_group_table(name, kind, groups) for kind, groups in task["by"].items()]
    parts.append(_provenance(result))
    return "\n\n".join(parts)


def _score_table(tasks: dict[str, Any]) -> str:
    columns = score_columns(tasks)
    rows = [("", "problems", *columns)]
    for name, task in tasks.items():
        for label, scores in task["scores"].items():
            cells = (percent(scores[column]) if column in scores else "" for column in columns)
            rows.append((score_label(name, label), limited(task) or str(task["num_problems"]), *cells))
    return grid(rows)


def limited(task: dict[str, Any]) -> str:
    """`first 100 of 1,319` for a task of results.json that --limit has cut short, otherwise ""."""
    in_file = task.get("num_in_file", task["num_problems"])
    return "" if task["num_problems"] == in_file else f"first {task['num_problems']:,} of {in_file:,}"


def score_columns(tasks: dict[str, Any]) -> list[str]:
    """The measures (pass@1, avg@8, ...) of all tasks, in order of their first appearance."""
    columns: dict[str, None] = {}
    for task in tasks.values():
        for scores in task["scores"].values():
            columns |= dict.fromkeys(scores)
    return list(columns)


def score_label(task: str, label: str) -> str:
    """The name of a row of scores. "accuracy" is the label of the only grader of a task."""
    return task if label == "accuracy" else f"{task} {label}"


def _rate_table(tasks: dict[str, Any]) -> str:
    head = ("", "format errors", "truncated", "grader timeouts", "grader errors", "tokens: mean", "median", "p95")
    rows = []
    for name, task in tasks.items():
        rates, tokens = task["rates"], task["tokens"]
        shares = (
            f"{100 * rates[key]:.2f} %" for key in ("format_error", "truncated", "grader_timeout", "grader_error")
        )
        rows.append((name, *shares, *(f"{tokens[key]:.0f}" for key in ("mean", "median", "p95"))))
    return grid([head, *rows])


def _group_table(name: str, kind: str, groups: dict[str, Any]) -> str:
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
        sampling = f", {task['samples']} samples at temperature {task['temperature']:g}, top_p {task['top_p']:g}"
        lines.append(
            f"{name} version {task['version']}: {shots}{sampling if task['samples'] else ''}, up to {task['max_tokens']} tokens;"
            f" sha256 of task file {task['task_sha256'][:12]}, data {task['data_sha256'][:12]},"
            f" prompts {task['prompts_sha256'][:12]}"
        )
    cut = [f"{name} ({limited(task)})" for name, task in result["tasks"].items() if limited(task)]
    if cut:
        lines.append(f"--limit: not the scores of the whole benchmark: {', '.join(cut)}")
    lines.append("95 % intervals over problems; they do not cover other prompts, seeds or models")
    return "\n".join(lines)
