"""Grading of completions: the rewards and extractors of training, in the same worker processes with a time limit.

Evaluation and the command `grade` use it. Here `task` is a built-in task, which is graded by its reward, or a reward:
gsm8k, math, gsm8k_strict, gsm8k_cot_strict and gsm8k_flexible (as lm-evaluation-harness), module:function.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from grpo_megatron.config import ConfigError
from grpo_megatron.data.prompts import source_of_row
from grpo_megatron.data.rows import read_rows, text_field
from grpo_megatron.data.task import get_task, task_names
from grpo_megatron.rewards import check_reward, extractors, rewards
from grpo_megatron.rewards.pool import KNOWN_REWARDS, RewardPool
from grpo_megatron.rewards.reward import RewardItem
from grpo_megatron.storage.atomic import write_file

CHUNK = 512  # completions between two updates of the progress bar
IN_PROCESS = (
    "gsm8k",
    "gsm8k_strict",
    "gsm8k_cot_strict",
    "gsm8k_flexible",
    "graded",
    "graded_answer",
    "arithmetic",
)  # linear time in any text: no worker needed
# how a completion writes an answer, per grader
SPELLING = {
    "math": "\\boxed{%s}",
    "gsm8k": "#### %s",
    "graded": "#### %s",
    "graded_answer": "<answer>%s</answer>",
}


@dataclass(frozen=True)
class Grade:
    """The grade of one completion. Where the grader failed, `correct` is False and `status` is not "ok"."""

    correct: bool
    prediction: str | None  # the prediction as the grader reads it; None: the completion has none
    status: Literal["ok", "error", "timeout", "none"] = "ok"
    message: str = ""

    @property
    def format_ok(self) -> bool:
        """Whether the completion has a prediction in the form that the task requires."""
        return bool(self.prediction)


def grader_of(task: str) -> str:
    """The reward that grades a task. Raises ConfigError: unknown, or without a reward of its own."""
    try:
        name = get_task(task).reward if task in task_names() else task
        if name is None:
            raise ValueError(f"task {task!r} has no reward of its own; name a reward")
        check_reward(name)
    except ValueError as error:
        raise ConfigError(f"cannot grade task {task!r}: {error}") from None
    return name


def grade(
    task: str,
    answers: Sequence[str],
    completions: Sequence[str],
    *,
    workers: int = 1,
    timeout_s: float = 10.0,
    quiet: bool = True,
    pool: RewardPool | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
    prompts: Sequence[str] = (),
) -> list[Grade]:
    """Grade every completion, in order. `answers` are the reference answers, `pool` has running workers.

    `rows` and `prompts`, of each completion if given, are for rewards that read them.

    Raises ConfigError for a task that has no grader, RuntimeError when the workers cannot run.
    """
    if len(answers) != len(completions):
        raise ValueError(f"{len(answers)} answers for {len(completions)} completions")
    name = grader_of(task)
    if pool is None and workers == 1 and name in IN_PROCESS:
        return _grade_in_process(name, answers, completions, quiet)
    extract = extractors.get(name).extract if name in extractors.names() else None
    predictions = [extract(completion) if extract else None for completion in completions]
    grades: list[Grade | None] = [
        Grade(True, prediction) if name == "math" and prediction == answer else None  # equal strings need no worker
        for answer, prediction in zip(answers, predictions, strict=True)
    ]
    todo = [index for index, verdict in enumerate(grades) if verdict is None]
    with contextlib.ExitStack() as stack:
        if pool is None and todo:
            pool = stack.enter_context(RewardPool(workers, timeout_s))
        bar = stack.enter_context(
            tqdm(total=len(answers), initial=len(answers) - len(todo), unit="answers", disable=quiet or None)
        )
        for start in range(0, len(todo), CHUNK):
            assert pool is not None
            chunk = todo[start : start + CHUNK]
            items = [
                RewardItem(
                    name,
                    completions[index],
                    answers[index],
                    prompt=prompts[index] if prompts else "",
                    columns=rows[index] if rows else {},
                    data_source=source_of_row(rows[index]) if rows else "",
                )
                for index in chunk
            ]
            for index, result in zip(chunk, pool.grade(items), strict=True):
                correct = result.metrics.get("acc", result.reward) == 1.0
                grades[index] = Grade(correct, predictions[index], result.status, result.message)
            bar.update(len(chunk))
    return grades  # type: ignore[return-value]


def same_answers(task: str, pairs: Sequence[tuple[str, str]], **options: Any) -> list[bool]:
    """Whether the task's grader finds the two predictions of each pair equal. `options` are those of `grade`."""
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
    """Grade a .jsonl file of {"answer", "completion", ...}: the same rows with "correct" and "prediction", in order.

    The older name "gold" for the reference answer is accepted too, and wins where a row has both. A row whose grader
    failed also gets "status". The output file is complete or absent. Returns the numbers of rows, of correct ones, and
    of each failure. Raises ConfigError that names the wrong lines.
    """
    name, output = grader_of(task), Path(output_path)
    if output.is_dir() or not output.parent.is_dir():
        reason = "it is a folder" if output.is_dir() else "it is not in a folder"
        raise ConfigError(f"cannot write {str(output)!r}: {reason}")
    reader = extractors.get(name) if name in extractors.names() else None

    def parse(row: dict[str, Any]) -> dict[str, Any]:
        text_field(row, "completion", empty=True)
        answer = _reference_answer(row)
        if reader and (answer or name != "math"):  # two reference answers of MATH are empty boxes
            reader.read_answer(answer)
        return row

    rows = read_rows(rows_path, parse)
    answers = [_reference_answer(row) for row in rows]
    if not all(answers):
        print(f"{answers.count('')} of {len(answers)} reference answers are empty", file=sys.stderr)
    completions = [row["completion"] for row in rows]
    try:
        check_reward(name, {}, rows[0])
    except ValueError as error:
        raise ConfigError(f"cannot grade task {task!r}: {error}") from None
    prompts = [_prompt_of(row) for row in rows]
    speed: dict[str, Any] = {"workers": workers, "timeout_s": timeout_s, "quiet": quiet}
    grades = grade(task, answers, completions, rows=rows, prompts=prompts, **speed)
    lines = (json.dumps(_graded(row, verdict)) + "\n" for row, verdict in zip(rows, grades, strict=True))
    write_file(output, lines)
    failures = Counter(verdict.status for verdict in grades if verdict.status != "ok")
    return {
        "rows": len(rows),
        "correct": sum(verdict.correct for verdict in grades),
        "without_answer": sum(not verdict.format_ok for verdict in grades),
        "timeout": failures["timeout"],
        "error": failures["error"],
    }


def _grade_in_process(name: str, answers: Sequence[str], completions: Sequence[str], quiet: bool) -> list[Grade]:
    function, extract = rewards.get(name), extractors.get(name).extract
    for completion, answer, reward in KNOWN_REWARDS.get(name, []):
        if function(completion, answer)["score"] != reward:
            raise RuntimeError(
                f"the reward {name!r} fails its self-test on completion {completion!r}, answer {answer!r}"
            )
    grades = []
    for answer, completion in zip(answers, tqdm(completions, unit="answers", disable=quiet or None), strict=True):
        try:
            correct = function(completion, answer)["acc"] == 1.0
            grades.append(Grade(correct, extract(completion)))
        except ValueError as error:  # a reference answer that is not a number
            grades.append(Grade(False, extract(completion), "error", f"reward {name!r}: ValueError: {error}"))
    return grades


def _reference_answer(row: dict[str, Any]) -> str:
    """The field "gold" (older files) or "answer" as text; a JSON number is accepted. Raises ValueError."""
    field = "gold" if "gold" in row else "answer"
    value = row.get(field)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(int(value)) if value == int(value) else str(value)
    return text_field(row, field, empty=True).strip()


def _prompt_of(row: dict[str, Any]) -> str:
    """The field "prompt", if it is a text."""
    prompt = row.get("prompt")
    return prompt if isinstance(prompt, str) else ""


def _graded(row: dict[str, Any], verdict: Grade) -> dict[str, Any]:
    failed = {} if verdict.status == "ok" else {"status": verdict.status}
    return {**row, "correct": verdict.correct, "prediction": verdict.prediction, **failed}
