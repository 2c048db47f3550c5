"""The data from which the report's page makes its list of problems (page/page.js), as JSON.

It has the grades of every problem, but only some texts: those of `num_texts` problems per task, evenly spread; of each,
`SAMPLES_SHOWN` samples of at most `LONGEST` characters; in all, about `BUDGET` characters per task with the MathML of
their formulas. A text is a list of pieces: a string, a formula [TeX, number of its MathML or null], or {"drawing": code}.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from grpo_megatron.evaluation.formulas import FormulaTable, TextPiece, split_formulas
from grpo_megatron.evaluation.ledger import LedgerEntry
from grpo_megatron.evaluation.results import GradedProblem, GradedSample
from grpo_megatron.types import GREEDY

SAMPLES_SHOWN, LONGEST, BUDGET = 4, 12_000, 8_000_000
MARKUP_PER_TEX = 8  # characters of MathML per character of TeX, measured on MATH
FORMAT_ERROR, TRUNCATED, FAILED = 1, 2, 4  # bits of a row's flags, and of a sample's


def script_json(value: Any, formulas: FormulaTable) -> str:
    """JSON that can stand in a script element, whatever strings it has. Renders the formulas into the table."""

    def encode(piece: TextPiece) -> Any:
        if piece.kind == "text":
            return piece.text
        return {"drawing": piece.text} if piece.kind == "drawing" else [piece.text, formulas.number(piece)]

    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), default=encode)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def task_data(task: dict[str, Any], graded: list[GradedProblem], num_texts: int) -> dict[str, Any]:
    """The data of one task; its texts are lists of `TextPiece`."""
    subjects = sorted({item.problem.subject for item in graded if item.problem.subject is not None})
    levels = sorted({item.problem.level for item in graded if item.problem.level is not None})
    texts = _problem_texts(graded, num_texts, dollars="math" in task["graders"].values())
    rows = []
    for number, item in enumerate(graded):
        problem, greedy = item.problem, item.greedy()
        rows.append(
            [
                number,
                None if problem.subject is None else subjects.index(problem.subject),
                None if problem.level is None else levels.index(problem.level),
                None if greedy is None else int(greedy.correct),
                item.num_right(),
                _flags(item.samples),
                texts.get(number),
            ]
        )
    return {
        "subjects": subjects,
        "levels": levels,
        "samples": task["samples"],
        "greedy": task["greedy"],
        "prompt": _without_surrogates(graded[0].prompt),
        "rows": rows,
    }


def _problem_texts(graded: list[GradedProblem], num_texts: int, dollars: bool) -> dict[int, dict[str, Any]]:
    """Number of a problem -> its texts, for evenly spread problems within the budget."""

    @functools.cache
    def texts_of(number: int) -> dict[str, Any]:
        return _texts(graded[number], dollars)

    count = min(num_texts, len(graded))
    while count:
        numbers = [place * len(graded) // count for place in range(count)]
        size = sum(_plain_size(graded[number]) for number in numbers)
        if size <= BUDGET:  # finding the formulas takes time: only for texts that can fit
            texts = {number: texts_of(number) for number in numbers}
            size = _estimated_size(texts)
            if size <= BUDGET:
                return texts
        count = min(count - 1, int(0.95 * count * BUDGET / size))
    return {}


def _plain_size(item: GradedProblem) -> int:
    """Characters of the texts that the page would show of a problem."""
    entries = [sample.entry for sample in item.samples[:SAMPLES_SHOWN]]
    lengths = [sum(len(turn.text) for turn in entry.turns) or len(entry.text) for entry in entries]
    return sum(min(length, LONGEST) for length in (len(item.problem.question_text), *lengths))


def _estimated_size(texts: dict[int, dict[str, Any]]) -> int:
    """Characters of the JSON, and of the MathML of the formulas in it."""
    formulas: set[TextPiece] = set()

    def encode(piece: TextPiece) -> str:
        if piece.kind in ("inline", "block"):
            formulas.add(piece)
        return piece.text

    json_size = len(json.dumps(texts, default=encode))
    return json_size + MARKUP_PER_TEX * sum(len(formula.text) for formula in formulas)


def _texts(item: GradedProblem, dollars: bool) -> dict[str, Any]:
    return {
        "question": _pieces(item.problem.question_text[:LONGEST], dollars),
        "answer": _answer_pieces(item.problem.answer[:LONGEST], dollars),
        "numSamples": len(item.samples),
        "samples": [_sample(sample, dollars) for sample in item.samples[:SAMPLES_SHOWN]],
    }


def _sample(sample: GradedSample, dollars: bool) -> dict[str, Any]:
    entry, verdict = sample.entry, sample.grades[0]
    return {
        "index": -1 if entry.index == GREEDY else entry.index,
        "right": int(verdict.correct),
        "prediction": None if verdict.prediction is None else _answer_pieces(verdict.prediction[:500], dollars),
        "tokens": entry.num_tokens,
        "flags": _flags([sample]),
        "status": entry.status,
        **_completion(entry, dollars),
    }


def _completion(entry: LedgerEntry, dollars: bool) -> dict[str, Any]:
    """`text` of a single turn, or `turns`: pairs of a kind and a text. `cut`: characters that are not shown."""
    if not entry.turns:
        return {"text": _pieces(entry.text[:LONGEST], dollars), "cut": max(0, len(entry.text) - LONGEST)}
    turns, left = [], LONGEST
    for turn in entry.turns:
        turns.append([turn.kind, _pieces(turn.text[:left], dollars)])
        left = max(0, left - len(turn.text))
    return {"turns": turns, "cut": max(0, sum(len(turn.text) for turn in entry.turns) - LONGEST)}


def _pieces(text: str, dollars: bool) -> list[TextPiece]:
    return split_formulas(_without_surrogates(text), dollars)


def _answer_pieces(text: str, dollars: bool) -> list[TextPiece]:
    """An answer of a task in mathematics is a formula as a whole."""
    return _pieces(f"${text}$" if dollars else text, dollars)


def _without_surrogates(text: str) -> str:
    """Half of a surrogate pair is no character; some browsers fail on it."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _flags(samples: list[GradedSample]) -> int:
    flags = 0
    for sample in samples:
        if not sample.grades[0].format_ok:
            flags |= FORMAT_ERROR
        if sample.entry.finish_reason == "length":
            flags |= TRUNCATED
        if sample.grades[0].status != "ok":
            flags |= FAILED
    return flags
