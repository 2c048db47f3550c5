"""`evaluate compare`: the paired comparison of two results on the same problems with the same prompts.

The difference B - A is taken per problem. The interval of its mean (`paired_interval`) is narrower than two separate intervals
suggest, and it does not collapse where the results are equal: other problems could differ.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from grpo_megatron.config import ConfigError
from grpo_megatron.config.options import Argument, Option, Options
from grpo_megatron.data.sampler import Z
from grpo_megatron.evaluation.results import MEAN_REWARD, grader_identity, limited, read_result, read_samples
from grpo_megatron.evaluation.settings import EvaluationSettings
from grpo_megatron.report.console import format_table
from grpo_megatron.untrusted import visible

MUST_BE_EQUAL = (
    *("task_sha256", "data_sha256", "fewshot_sha256", "num_problems"),
    *("format", "num_fewshot", "asked_sha256"),
    *("graders", "reward_sha256"),
)


class CompareOptions(Options):
    """The options of `evaluate compare`."""

    program, description = "evaluate compare", "Is B better than A? Paired, on the same problems."
    a: Annotated[Path, Argument("results.json of one evaluation, or its folder", "A")]
    b: Annotated[Path, Argument("and of the other", "B")]
    any_template: Annotated[bool, Option("compare although chat templates rendered the same questions differently")] = (
        False
    )
    as_json: Annotated[bool, Option("print JSON", flags=("--json",))] = False
    changed: Annotated[bool, Option("also list the problems whose answers changed from right to wrong, or back")] = (
        False
    )


def print_comparison(options: CompareOptions) -> int:
    """Print the paired comparison of two results; returns the exit code."""
    a, b = read_result(options.a), read_result(options.b)
    rows = compare_results(a, b, any_template=options.any_template)
    names = list(dict.fromkeys(row["task"] for row in rows))
    changes = {name: changed_problems(options.a, options.b, name) for name in names} if options.changed else {}
    if options.as_json:
        print(json.dumps({"rows": rows, "changed": changes} if options.changed else rows, indent=1))
        return 0
    print(visible(f"A: {a['model']['path']}\nB: {b['model']['path']}\n{paired_table(rows)}"))
    for name, changed in changes.items():
        print(visible(f"\n{changed_table(name, changed)}"))
    return 0


def check_against(base: Path, settings: EvaluationSettings) -> None:
    """Check that an evaluation, with the tasks that its folder has, can be compared with a base. Raises ConfigError."""
    kinds = {run.name: {"greedy": run.answers.greedy, "right": run.answers.samples > 0} for run in settings.runs}
    tasks = {run.name: {**run.identity(), **grader_identity(run), "problems": kinds[run.name]} for run in settings.runs}
    path = settings.options.folder / "results.json"
    earlier = read_result(path)["tasks"] if path.exists() else {}
    try:
        comparable_tasks(read_result(base), {"tasks": {**earlier, **tasks}}, any_template=True)
    except ConfigError as error:
        raise ConfigError(f"--against {base}: {error} (A is the base, B this evaluation)") from None


def print_against(base: Path, folder: Path) -> None:
    """Print the comparison of a base (A) with an evaluation (B), and what changed. Raises ConfigError."""
    print()
    print_comparison(CompareOptions(a=base, b=folder, changed=True, any_template=True))


# -- problem by problem ------------------------------------------------------------------------------------------------

MOST_SHOWN, QUESTION_SHOWN = 20, 60  # problems of a direction in a terminal, characters of a question


def changed_problems(a: Path, b: Path, task: str) -> list[dict[str, Any]]:
    """List the problems with another number of right answers in B, the most lost first. Raises ConfigError.

    `a`, `b`: shares of right answers among all samples, the greedy one too; `predictions`: of the first sample of each.
    """
    folders = (path if path.is_dir() else path.parent for path in (a, b))
    left, right = (
        {item.problem.uid: item for item in read_samples(folder / f"samples/{task}.jsonl")} for folder in folders
    )
    changed = [
        {
            "uid": uid,
            "question": one.problem.question_text,
            "answer": one.problem.answer,
            **{
                key: sum(s.correct for s in item.samples) / len(item.samples)
                for key, item in (("a", one), ("b", right[uid]))
            },
            "predictions": [item.samples[0].grades[0].prediction for item in (one, right[uid])],
        }
        for uid, one in left.items()
        if uid in right
    ]
    return sorted((row for row in changed if row["a"] != row["b"]), key=lambda row: row["b"] - row["a"])


def changed_table(task: str, changed: list[dict[str, Any]]) -> str:
    """Format the problems that B lost and those that it gained, at most MOST_SHOWN of each."""
    parts = []
    lost = [row for row in changed if row["b"] < row["a"]]
    gained = sorted(changed[len(lost) :], key=lambda row: row["a"] - row["b"])
    for word, rows in (("lost", lost), ("gained", gained)):
        cells = [
            (
                row["uid"],
                f"{100 * row['a']:.0f} -> {100 * row['b']:.0f} %",
                *(str(one)[:20] for one in (row["answer"], *row["predictions"])),
                " ".join(row["question"].split())[:QUESTION_SHOWN],
            )
            for row in rows[:MOST_SHOWN]
        ]
        more = (
            f"\n... and {len(rows) - MOST_SHOWN} more (compare --changed --json has all)"
            if len(rows) > MOST_SHOWN
            else ""
        )
        head = (f"{task}: {len(rows)} {word}", "right", "answer", "A", "B", "question")
        parts.append(format_table(cells, head) + more if rows else head[0])
    return "\n\n".join(parts)


def compare_results(a: dict[str, Any], b: dict[str, Any], *, any_template: bool = False) -> list[dict[str, Any]]:
    """Make one row per task and measure of both results; `limit` says that --limit has cut both short.

    Raises ConfigError where the two cannot be paired.
    """
    pairs = comparable_tasks(a, b, any_template=any_template)
    return [
        {"task": name, **row, "limit": limited(one)}
        for name, (one, other) in pairs.items()
        for row in _paired_rows(one, other)
    ]


def comparable_tasks(a: dict[str, Any], b: dict[str, Any], *, any_template: bool) -> dict[str, tuple[Any, Any]]:
    """Pair the tasks of both results. Raises ConfigError where one of them cannot be paired, or none is in both."""
    pairs = {name: (task, b["tasks"][name]) for name, task in a["tasks"].items() if name in b["tasks"]}
    if not pairs:
        raise ConfigError(f"no task in common: A has {', '.join(a['tasks'])}, B has {', '.join(b['tasks'])}")
    mismatches = {name: _mismatch(*pair, any_template) for name, pair in pairs.items()}
    if problems := [f"task {name!r}: {problem}" for name, problem in mismatches.items() if problem]:
        raise ConfigError("\n".join(problems))
    return pairs


def _mismatch(a: dict[str, Any], b: dict[str, Any], any_template: bool) -> str | None:
    def short(value: Any) -> str:
        return value[:12] if isinstance(value, str) else str(value)

    pairs = {key: (a.get(key) or None, b.get(key) or None) for key in MUST_BE_EQUAL}  # older results lack the last
    if different := [
        f"{key} {short(one)} against {short(other)}" for key, (one, other) in pairs.items() if one != other
    ]:
        return f"A and B have different settings ({'; '.join(different)}); evaluate both with one setting"
    if a["prompts_sha256"] != b["prompts_sha256"] and not any_template:
        return (
            "the questions are equal, but the chat templates of the two models made different prompts of them;"
            " --any-template compares them nevertheless"
        )
    if not any(a["problems"][kind] and b["problems"][kind] for kind in ("greedy", "right")):
        return "one result has only greedy samples, the other has none; evaluate both with one setting"
    return None


def _paired_rows(a: dict[str, Any], b: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    first, second = (task["problems"] for task in (a, b))
    is_reward = "is_reward" in first or "is_reward" in second
    if first["greedy"] and second["greedy"]:
        left, right = ([float(x) for x in of["greedy"]] for of in (first, second))
        row = _paired(f"{MEAN_REWARD} (greedy)" if is_reward else "pass@1 (greedy)", left, right)
        only_a, only_b = (sum(x > y for x, y in zip(*of, strict=True)) for of in ((left, right), (right, left)))
        exact = {} if is_reward else {"only_a": only_a, "only_b": only_b, "p": mcnemar(only_a, only_b)}
        rows.append({**row, **exact})
    if first["right"] and second["right"]:
        left, right = ([float(total) / of["samples"] for total in of["right"].split()] for of in (first, second))
        sizes = sorted({first["samples"], second["samples"]})
        rows.append(_paired(f"{MEAN_REWARD if is_reward else 'avg'}@" + "/".join(map(str, sizes)), left, right))
    return rows


def _paired(measure: str, left: list[float], right: list[float]) -> dict[str, Any]:
    differences, count = [y - x for x, y in zip(left, right, strict=True)], len(left)
    low, high = paired_interval(differences, max(1.0, max(left + right) - min(left + right)))
    means = {"a": sum(left) / count, "b": sum(right) / count, "difference": sum(differences) / count}
    return {"measure": measure, "problems": count, **means, "low": low, "high": high}


def paired_table(rows: list[dict[str, Any]]) -> str:
    """Format the rows of `compare_results` as a table, in percent; rewards as they are."""

    def number(row: dict[str, Any], key: str, sign: str = "") -> str:
        is_reward = row["measure"].startswith(MEAN_REWARD)
        return f"{row[key]:{sign}.3f}" if is_reward else f"{100 * row[key]:{sign}.2f}"

    cells = [
        (
            f"{row['task']} {row['measure']}",
            row["limit"] or str(row["problems"]),
            number(row, "a"),
            number(row, "b"),
            number(row, "difference", "+"),
            f"[{number(row, 'low', '+')}, {number(row, 'high', '+')}]",
            *((str(row["only_a"]), str(row["only_b"]), f"{row['p']:.3g}") if "p" in row else ("", "", "")),
        )
        for row in rows
    ]
    head = ("", "problems", "A", "B", "B - A", "95 % interval", "only A", "only B", "McNemar p")
    cut = dict.fromkeys(f"{row['task']} ({row['limit']})" for row in rows if row["limit"])
    note = f"\n--limit: not the whole benchmark: {', '.join(cut)}" if cut else ""
    return format_table(cells, head, 1) + note


def paired_interval(differences: Sequence[float], span: float = 1.0) -> tuple[float, float]:
    """Compute the 95 % interval of the mean of differences in [-span, span], one for each problem. It never collapses.

    It is the normal interval after two problems are added, one with the difference +e and one with -e. Where each difference
    is -1, 0 or 1, e is 1, and the interval is that of Bonett and Price (J. Educ. Behav. Stat. 37, 2012, p. 479), which
    Fagerland et al. (Stat. Med. 33, 2014, p. 2850) recommend for paired proportions. Averages over samples differ by less. So
    e^2 = (sum of d^2 + 1) / (m + 1) for m problems that differ: their mean squared difference, with one problem of 1 added.
    """
    d = [float(difference) / span for difference in differences]
    squares = math.fsum(one**2 for one in d)
    pseudo = (squares + 1) / (sum(one != 0 for one in d) + 1)  # e^2
    count = len(d) + 2
    centre = math.fsum(d) / count
    half = Z * math.sqrt(((squares + 2 * pseudo) / count - centre**2) / count)
    return span * max(-1.0, centre - half), span * min(1.0, centre + half)


def mcnemar(only_a: int, only_b: int) -> float:
    """Compute the exact two-sided p-value of McNemar's test, for b problems that are right only in A and c only in B.

    If A and B are equally good, each of these problems is A's or B's with probability 1/2. So the p-value is
    2 P(X <= min(b, c)) for X ~ Binomial(b + c, 1/2), at most 1.
    """
    n = only_a + only_b
    tail = term = 1  # C(n, 0), C(n, 1), ...
    for i in range(min(only_a, only_b)):
        term = term * (n - i) // (i + 1)
        tail += term
    return min(1.0, 2 * tail / 2**n)  # integers: 2.0**n would overflow
