"""The page of an evaluation: scores, distributions, and problems with their completions.

The template (report/page/evaluation.html) has the scores. The browser draws the figures and lists the problems, 20 at a
time, from the data of `task_data`: the grades of every problem, but only some texts. These are the texts of `num_texts`
problems per task, evenly spread; of each, `SAMPLES_SHOWN` samples of at most `LONGEST` characters; in all, `BUDGET`
characters per task, those of thumbnails included. Each different thumbnail is there once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_megatron.evaluation.ledger import LedgerEntry
from grpo_megatron.evaluation.results import (
    GradedProblem,
    GradedSample,
    gives_fractions,
    limited,
    rate_text,
    sampling_text,
    score_columns,
    score_label,
    score_text,
)
from grpo_megatron.report.kit import html_page
from grpo_megatron.types import GREEDY

SAMPLES_SHOWN, LONGEST, BUDGET = 4, 12_000, 8_000_000
BINS = 32  # of the histogram of tokens
FORMAT_ERROR, TRUNCATED, FAILED = 1, 2, 4  # bits of a row's flags, and of a sample's


def render_page(result: dict[str, Any], graded: dict[str, list[GradedProblem]], num_texts: int = 400) -> str:
    """Make the page of `result`. `graded` has the problems of each task, `num_texts` is per task."""
    tasks = result["tasks"]
    return html_page(
        "evaluation",
        f"{result['model']['path']}: {', '.join(tasks)}",
        {name: task_data(task, graded[name], num_texts) for name, task in tasks.items()},
        result=result,
        columns=score_columns(tasks),
        label=score_label,
        limited=limited,
        sampling=sampling_text,
        facts=_facts,
        score=score_text,
    )


def _facts(task: dict[str, Any]) -> dict[str, str]:
    rates, tokens = task["rates"], task["tokens"]
    facts = {
        "format errors": rate_text(rates["format_error"]),
        "truncated": rate_text(rates["truncated"]),
        "grader timeouts": rate_text(rates["grader_timeout"]),
        "grader errors": rate_text(rates["grader_error"]),
        "tokens per completion": f"{tokens['mean']:,.0f}",
        "median": f"{tokens['median']:,.0f}",
        "95th percentile": f"{tokens['p95']:,.0f}",
    }
    if played := task.get("trajectories"):
        facts["turns per trajectory"] = f"{played['turns']:.2f}"
        facts |= {f"ended: {status}": f"{100 * share:.2f} %" for status, share in played["statuses"].items()}
    return facts


# -- Data of the script ----------------------------------------------------------------------------------------------------


def task_data(task: dict[str, Any], graded: list[GradedProblem], num_texts: int) -> dict[str, Any]:
    """Collect the data of one task for the script of the page."""
    subjects = sorted({item.problem.subject for item in graded if item.problem.subject is not None})
    levels = sorted({item.problem.level for item in graded if item.problem.level is not None})
    pictures: dict[str, int] = {}  # thumbnail -> its place
    texts = _problem_texts(graded, num_texts, pictures)
    samples = [sample for problem in graded for sample in problem.samples]
    rights, is_mean = [problem.num_right() for problem in graded], gives_fractions(graded)
    rows = []
    for number, item in enumerate(graded):
        greedy = item.greedy()
        rows.append(
            [
                number,
                None if item.problem.subject is None else subjects.index(item.problem.subject),
                None if item.problem.level is None else levels.index(item.problem.level),
                None if greedy is None else int(greedy.correct),
                rights[number],
                _flags(item.samples),
                texts.get(number),
                *([round(sum(one.grades[0].score for one in item.samples) / len(item.samples), 3)] if is_mean else []),
            ]
        )
    return {
        "subjects": subjects,
        "levels": levels,
        "samples": task["samples"],
        "greedy": task["greedy"],
        "isMean": is_mean,
        "prompt": graded[0].prompt,
        "histogram": histogram(samples),
        "counts": [rights.count(n) for n in range(task["samples"] + 1)] if task["samples"] > 1 else None,
        "rows": rows,
        "pictures": list(pictures),
    }


def histogram(samples: Sequence[GradedSample]) -> dict[str, Any]:
    """Count tokens of the right and the wrong samples in at most BINS bins of `size` tokens, from 0."""
    most = max((sample.entry.num_tokens for sample in samples), default=0)
    size = max(1, -(-(most + 1) // BINS))
    bins = {name: [0] * (most // size + 1) for name in ("right", "wrong")}
    for sample in samples:
        bins["right" if sample.correct else "wrong"][sample.entry.num_tokens // size] += 1
    return {"size": size, **bins}


def _problem_texts(graded: list[GradedProblem], num_texts: int, pictures: dict[str, int]) -> dict[int, dict[str, Any]]:
    """Collect the texts of problems by number, for evenly spread problems within the budget."""
    count = min(num_texts, len(graded))
    while count:
        numbers = [place * len(graded) // count for place in range(count)]
        size = sum(_text_size(graded[number]) for number in numbers)
        if size <= BUDGET:
            return {number: _texts(graded[number], pictures) for number in numbers}
        count = min(count - 1, int(0.95 * count * BUDGET / size))
    return {}


def _text_size(item: GradedProblem) -> int:
    """Count the characters that the page would show of a problem."""
    lengths = (_length(sample.entry) for sample in item.samples[:SAMPLES_SHOWN])
    shown = sum(min(length, LONGEST) for length in (len(item.problem.question_text), *lengths))
    return shown + sum(map(len, item.thumbnails))


def _texts(item: GradedProblem, pictures: dict[str, int]) -> dict[str, Any]:
    return {
        "images": [pictures.setdefault(one, len(pictures)) for one in item.thumbnails],
        "question": item.problem.question_text[:LONGEST],
        "answer": item.problem.answer[:LONGEST],
        "numSamples": len(item.samples),
        "samples": [_sample(sample) for sample in item.samples[:SAMPLES_SHOWN]],
    }


def _sample(sample: GradedSample) -> dict[str, Any]:
    """Make one sample: `text` of a single turn, or `turns`: pairs of a kind and a text. `cut`: characters that are not shown."""
    entry, verdict, left = sample.entry, sample.grades[0], LONGEST
    turns = []
    for turn in entry.turns:
        turns.append([turn.kind, turn.text[:left]])
        left = max(0, left - len(turn.text))
    return {
        "index": -1 if entry.index == GREEDY else entry.index,
        "right": int(verdict.correct),
        "prediction": None if verdict.prediction is None else verdict.prediction[:500],
        "reward": verdict.reward,
        "tokens": entry.num_tokens,
        "flags": _flags([sample]),
        "status": entry.status,
        **({"turns": turns} if turns else {"text": entry.text[:LONGEST]}),
        "cut": max(0, _length(entry) - LONGEST),
    }


def _length(entry: LedgerEntry) -> int:
    return sum(len(turn.text) for turn in entry.turns) if entry.turns else len(entry.text)


def _flags(samples: Sequence[GradedSample]) -> int:
    flags = 0
    for sample in samples:
        if not sample.grades[0].format_ok:
            flags |= FORMAT_ERROR
        if sample.entry.finish_reason == "length":
            flags |= TRUNCATED
        if sample.grades[0].status != "ok":
            flags |= FAILED
    return flags
