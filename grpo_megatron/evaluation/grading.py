"""Grading of completions that came from anywhere: the rewards and extractors of training, in the same killable workers.

`grade` is what evaluation and the command `grade` call. A task here is a task of `data/tasks.py` (its reward grades),
or the name of a reward: gsm8k, math, gsm8k_strict and gsm8k_flexible (as lm-evaluation-harness), module:function.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from grpo_megatron.config import ConfigError
from grpo_megatron.data.rows import read_rows, text_field
from grpo_megatron.data.tasks import get_task, tasks
from grpo_megatron.rewards import check_reward, extractors, rewards
from grpo_megatron.rewards.known import KNOWN_REWARDS
from grpo_megatron.rewards.workers.pool import RewardPool
from grpo_megatron.storage.atomic import write_file

CHUNK = 512  # completions between two movements of the bar
IN_PROCESS = ("gsm8k", "gsm8k_strict", "gsm8k_flexible", "graded", "arithmetic")  # linear in any text: no worker needed
SPELLING = {"math": "\\boxed{%s}", "gsm8k": "#### %s"}  # how an answer is written for its own grader


@dataclass(frozen=True)
class Grade:
    """One completion's verdict. Where the grader failed, `correct` is False and `status` says so."""

    correct: bool
    extracted: str | None  # the answer as the grader reads it; None: the completion gives none
    status: Literal["ok", "error", "timeout"] = "ok"
    message: str = ""

    @property
    def format_ok(self) -> bool:
        """Whether there was an answer where the task wants it."""
        return bool(self.extracted)


def grader_of(task: str) -> str:
    """The reward that grades a task. Raises ConfigError: unknown, or without a reward of its own."""
    try:
        name = get_task(task).reward if task in tasks.names() else task
        if name is None:
            raise ValueError(f"task {task!r} has no reward of its own; name a reward")
        check_reward(name)
    except ValueError as error:
        raise ConfigError(f"cannot grade task {task!r}: {error}") from None
    return name


def grade(
    task: str,
    golds: Sequence[str],
    completions: Sequence[str],
    *,
    workers: int = 1,
    timeout_s: float = 10.0,
    quiet: bool = True,
    pool: RewardPool | None = None,
) -> list[Grade]:
    """A grade for every completion, in order. `pool`: workers that are already running.

    Raises ConfigError for a task that has no grader, RuntimeError when the workers cannot run.
    """
    if len(golds) != len(completions):
        raise ValueError(f"{len(golds)} golds for {len(completions)} completions")
    name = grader_of(task)
    if pool is None and workers == 1 and name in IN_PROCESS:
        return _grade_here(name, golds, completions, quiet)
    extract = extractors.get(name).extract if name in extractors.names() else None
    extracted = [extract(completion) if extract else None for completion in completions]
    grades: list[Grade | None] = [
        Grade(True, text) if name == "math" and text == gold else None  # one string: no worker needed
        for gold, text in zip(golds, extracted, strict=True)
    ]
    todo = [index for index, verdict in enumerate(grades) if verdict is None]
    with contextlib.ExitStack() as stack:
        if pool is None and todo:
            pool = stack.enter_context(RewardPool(workers, timeout_s))
        bar = stack.enter_context(
            tqdm(total=len(golds), initial=len(golds) - len(todo), unit="answers", disable=quiet or None)
        )
        for start in range(0, len(todo), CHUNK):
            assert pool is not None
            chunk = todo[start : start + CHUNK]
            for index, result in zip(chunk, pool.grade([(name, completions[i], golds[i]) for i in chunk]), strict=True):
                correct = result.metrics.get("acc", result.reward) == 1.0
                grades[index] = Grade(correct, extracted[index], result.status, result.message)
            bar.update(len(chunk))
    return grades  # type: ignore[return-value]


def same_answers(task: str, pairs: Sequence[tuple[str, str]], **options: Any) -> list[bool]:
    """Whether the two extracted answers of each pair are one answer to the task's grader; `options` are `grade`'s."""
    spelling = SPELLING.get(grader_of(task), "%s")
    grades = grade(task, [one for one, _ in pairs], [spelling % other for _, other in pairs], **options)
    return [verdict.correct for verdict in grades]


def grade_file(
    task: str,
    rows_path: Path | str,
    output_path: Path | str,
    workers: int = 1,
    timeout_s: float = 10.0,
    quiet: bool = False,
) -> dict[str, int]:
    """Rows {"gold", "completion", ...} of a .jsonl file -> the same with "correct" and "extracted", in order.

    A row whose grader failed also gets "status". The output appears at once and whole, or not at all. Returns the
    numbers of rows, of correct ones, and of each failure. Raises ConfigError naming the lines that are wrong.
    """
    name, output = grader_of(task), Path(output_path)
    if output.is_dir() or not output.parent.is_dir():
        raise ConfigError(f"cannot write {str(output)!r}: {'it is' if output.is_dir() else 'it is not in'} a folder")
    reader = extractors.get(name) if name in extractors.names() else None

    def parse(row: dict[str, Any]) -> dict[str, Any]:
        text_field(row, "completion", empty=True)
        gold = _gold(row)
        if reader and (gold or name != "math"):  # two references of MATH are empty boxes
            reader.read_answer(gold)
        return row

    rows = read_rows(rows_path, parse)
    golds = [_gold(row) for row in rows]
    if not all(golds):
        print(f"{sum(not gold for gold in golds)} of {len(golds)} golds are empty", file=sys.stderr)
    grades = grade(task, golds, [row["completion"] for row in rows], workers=workers, timeout_s=timeout_s, quiet=quiet)
    write_file(output, (json.dumps(_graded(row, verdict)) + "\n" for row, verdict in zip(rows, grades, strict=True)))
    failures = Counter(verdict.status for verdict in grades if verdict.status != "ok")
    return {
        "rows": len(rows),
        "correct": sum(verdict.correct for verdict in grades),
        "without_answer": sum(not verdict.format_ok for verdict in grades),
        "timeout": failures["timeout"],
        "error": failures["error"],
    }


def _grade_here(name: str, golds: Sequence[str], completions: Sequence[str], quiet: bool) -> list[Grade]:
    function, extract = rewards.get(name), extractors.get(name).extract
    for completion, answer, score in KNOWN_REWARDS.get(name, []):
        if function(completion, answer)["score"] != score:
            raise RuntimeError(
                f"the reward {name!r} fails its self-test on completion {completion!r}, answer {answer!r}"
            )
    grades = []
    for gold, completion in zip(golds, tqdm(completions, unit="answers", disable=quiet or None), strict=True):
        try:
            correct = function(completion, gold)["acc"] == 1.0
            grades.append(Grade(correct, extract(completion)))
        except ValueError as error:  # a gold that is no number
            grades.append(Grade(False, extract(completion), "error", f"reward {name!r}: ValueError: {error}"))
    return grades


def _gold(row: dict[str, Any]) -> str:
    """The gold answer as text; a JSON number is one too. Raises ValueError."""
    gold = row.get("gold")
    if isinstance(gold, int | float) and not isinstance(gold, bool) and math.isfinite(gold):
        return str(int(gold)) if gold == int(gold) else str(gold)
    return text_field(row, "gold", empty=True).strip()


def _graded(row: dict[str, Any], verdict: Grade) -> dict[str, Any]:
    failed = {} if verdict.status == "ok" else {"status": verdict.status}
    return {**row, "correct": verdict.correct, "extracted": verdict.extracted, **failed}
