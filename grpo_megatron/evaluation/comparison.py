"""Paired comparison of two results on the same problems with the same prompts.

The difference B - A is taken per problem. The interval of its mean (`paired_interval`) is narrower than two separate intervals
suggest, and it does not collapse where the results are equal: other problems could differ. McNemar's exact test uses the greedy
answers. Let b problems be right only in A, and c only in B. If A and B are equally good, each of these problems is A's or B's
with probability 1/2. So the two-sided p-value is 2 P(X <= min(b, c)) for X ~ Binomial(b + c, 1/2), at most 1.
"""

from __future__ import annotations

from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.evaluation.estimates import paired_interval
from grpo_megatron.evaluation.results import grid, limited

MUST_BE_EQUAL = (
    "task_sha256",
    "data_sha256",
    "fewshot_sha256",
    "num_problems",
    "format",
    "num_fewshot",
    "asked_sha256",
)


def mcnemar(only_a: int, only_b: int) -> float:
    """The exact two-sided p-value of McNemar's test."""
    n, least = only_a + only_b, min(only_a, only_b)
    if n == 0:
        return 1.0
    tail = term = 1  # C(n, 0), C(n, 1), ...
    for i in range(least):
        term = term * (n - i) // (i + 1)
        tail += term
    return min(1.0, 2 * tail / 2**n)  # integers: 2.0**n would overflow


def compare_results(a: dict[str, Any], b: dict[str, Any], *, any_template: bool = False) -> list[dict[str, Any]]:
    """One row per task and measure of both results; `limit` says that --limit has cut both short.

    Raises ConfigError where the two cannot be paired.
    """
    tasks = [name for name in a["tasks"] if name in b["tasks"]]
    if not tasks:
        raise ConfigError(f"no task in common: A has {', '.join(a['tasks'])}, B has {', '.join(b['tasks'])}")
    problems = []
    for name in tasks:
        problems += _mismatches(name, a["tasks"][name], b["tasks"][name], any_template)
    if problems:
        raise ConfigError("\n".join(problems))
    rows = []
    for name in tasks:
        limit = limited(a["tasks"][name])
        rows += [{**row, "limit": limit} for row in _task_rows(name, a["tasks"][name], b["tasks"][name])]
    return rows


def _mismatches(name: str, a: dict[str, Any], b: dict[str, Any], any_template: bool) -> list[str]:
    different = [f"{key} {_short(a[key])} against {_short(b[key])}" for key in MUST_BE_EQUAL if a[key] != b[key]]
    if different:
        return [
            f"task {name!r}: A and B have different settings ({'; '.join(different)}); evaluate both with one setting"
        ]
    if a["prompts_sha256"] != b["prompts_sha256"] and not any_template:
        return [
            f"task {name!r}: the questions are equal, but the chat templates of the two models made different prompts of"
            " them; --any-template compares them nevertheless"
        ]
    return []


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) else str(value)


def _task_rows(name: str, a: dict[str, Any], b: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    first, second = (task["problems"]["greedy"] for task in (a, b))
    if first and second:
        left, right = [float(x) for x in first], [float(x) for x in second]
        only_a = sum(x > y for x, y in zip(left, right, strict=True))
        only_b = sum(x < y for x, y in zip(left, right, strict=True))
        row = _paired(name, "pass@1 (greedy)", left, right)
        rows.append({**row, "only_a": only_a, "only_b": only_b, "p": mcnemar(only_a, only_b)})
    if a["problems"]["right"] and b["problems"]["right"]:
        left, right = _right_shares(a), _right_shares(b)
        sizes = {task["problems"]["samples"] for task in (a, b)}
        rows.append(_paired(name, "avg@" + "/".join(map(str, sorted(sizes))), left, right))
    if not rows:
        raise ConfigError(
            f"task {name!r}: one result has only greedy samples, the other has none; evaluate both with one setting"
        )
    return rows


def _right_shares(task: dict[str, Any]) -> list[float]:
    return [int(count) / task["problems"]["samples"] for count in task["problems"]["right"].split()]


def _paired(name: str, measure: str, left: list[float], right: list[float]) -> dict[str, Any]:
    differences = [y - x for x, y in zip(left, right, strict=True)]
    low, high = paired_interval(differences)
    count = len(differences)
    return {
        "task": name,
        "measure": measure,
        "problems": count,
        "a": sum(left) / count,
        "b": sum(right) / count,
        "difference": sum(differences) / count,
        "low": low,
        "high": high,
    }


def paired_table(rows: list[dict[str, Any]]) -> str:
    """Format the rows of `compare_results` as a table, in percent."""
    head = ("", "problems", "A", "B", "B - A", "95 % interval", "only A", "only B", "McNemar p")
    lines = [head]
    for row in rows:
        exact = (str(row["only_a"]), str(row["only_b"]), f"{row['p']:.3g}") if "p" in row else ("", "", "")
        lines.append(
            (
                f"{row['task']} {row['measure']}",
                row["limit"] or str(row["problems"]),
                f"{100 * row['a']:.2f}",
                f"{100 * row['b']:.2f}",
                f"{100 * row['difference']:+.2f}",
                f"[{100 * row['low']:+.2f}, {100 * row['high']:+.2f}]",
                *exact,
            )
        )
    cut = dict.fromkeys(f"{row['task']} ({row['limit']})" for row in rows if row["limit"])
    note = f"\n--limit: not the whole benchmark: {', '.join(cut)}" if cut else ""
    return grid(lines) + note
