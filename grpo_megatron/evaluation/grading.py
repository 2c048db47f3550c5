"""Grading of completions: the rewards and extractors of training, in the same worker processes with a time limit.

Evaluation and the command `grade` use it. Here `task` is a built-in task, which is graded by its reward, or a reward:
gsm8k, math, gsm8k_strict, gsm8k_cot_strict and gsm8k_flexible (as lm-evaluation-harness), module:function. As in validation,
the score of a completion is `acc` where the reward reports it, or else the reward itself.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from grpo_megatron.config import ConfigError
from grpo_megatron.data.prompts import source_of_row
from grpo_megatron.data.rows import read_rows, text_field
from grpo_megatron.data.task import get_task, source_sha256, task_names
from grpo_megatron.evaluation.ledger import append_lines
from grpo_megatron.imports import sources_digest
from grpo_megatron.rewards import check_reward, extractors, rewards
from grpo_megatron.rewards.answers import answer_form
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rewards.reward import RewardItem, read_signature
from grpo_megatron.rewards.services import result_key
from grpo_megatron.storage.files import write_file

GRADER_TIMEOUT_S = 10.0
CHUNK = 512  # completions between two updates of the progress bar


@dataclass(frozen=True)
class Grade:
    """The grade of one completion. Where the grader failed, `correct` is False and `status` is not "ok".

    `reward` is that of a grader which reads no prediction: any number; None for the others.
    """

    correct: bool
    prediction: str | None  # the prediction as the grader reads it; None: the completion has none
    status: Literal["ok", "error", "timeout", "none"] = "ok"
    message: str = ""
    reward: float | None = None
    weight: float = 1.0  # in a mean over problems: the grader's "acc_weight", such as the number of instructions

    @property
    def format_ok(self) -> bool:
        """The completion has a prediction in the form that the task requires, if it requires one."""
        return self.reward is not None or bool(self.prediction)

    @property
    def score(self) -> float:
        """The reward, or else 1 for a right answer and 0 for a wrong one."""
        return float(self.correct) if self.reward is None else self.reward


class KeptGrades:
    """The grades of one task on disk, until results.json has them: a command that is killed while it grades goes on.

    A line is {"key": digest of all that the grade depends on, "grade": {...}}. Failed ones and unreadable lines are graded again.
    """

    def __init__(self, output: Path, task: str) -> None:
        self.path, self.grades = output / "grades" / f"{task}.jsonl", dict[str, Grade]()
        content = self.path.read_bytes() if self.path.exists() else b""
        for line in content[: content.rfind(b"\n") + 1].splitlines():
            with contextlib.suppress(ValueError, TypeError, LookupError):
                row = json.loads(line)
                self.grades[row["key"]] = Grade(**row["grade"])

    def add(self, grades: Mapping[str, Grade]) -> None:
        """Append the grades of graders that did not fail."""
        append_lines(
            self.path, [{"key": k, "grade": asdict(g)} for k, g in grades.items() if g.status in ("ok", "none")]
        )


@functools.cache
def _grading_code() -> str:
    """Returns the digest of what any grader runs: this program's files, and every installed package with its version."""
    return result_key(sources_digest(), sorted({f"{one.name} {one.version}" for one in distributions()}))


def kwargs_of(name: str, unsafe: bool) -> dict[str, Any]:
    """Make the arguments of a grader: `unsafe`, if it has that one."""
    return {"unsafe": True} if unsafe and "unsafe" in read_signature(rewards.get(name)).names else {}


def grader_of(task: str, row: Mapping[str, Any] | None = None, *, unsafe: bool = False) -> str:
    """Find the reward that grades a task. Raises ConfigError: unknown, without a reward of its own, or not here.

    `row`: the first one, for checks that depend on rows. `unsafe`: programs need no sandbox.
    """
    try:
        name = get_task(task).reward if task in task_names() else task
        if name is None:
            raise ValueError(f"task {task!r} has no reward of its own; name a reward")
        check_reward(name, kwargs_of(name, unsafe), row)
    except ValueError as error:
        what = "grade task" if task in task_names() else "grade with"
        raise ConfigError(f"cannot {what} {task!r}: {error}") from None
    return name


def grade(
    task: str,
    answers: Sequence[str],
    completions: Sequence[str],
    pool: RewardPool,
    *,
    rows: Sequence[Mapping[str, Any]] = (),
    prompts: Sequence[str] = (),
    shows_progress: bool = False,
    kept: KeptGrades | None = None,
) -> list[Grade]:
    """Grade every completion, in order. `answers` are the reference answers.

    `rows` and `prompts`, of each completion if given, are for rewards that read them. Raises ConfigError for a task that has
    no grader, RuntimeError when the workers cannot run. `kept`: those that are known, which gets the others.
    """
    name = grader_of(task, unsafe="unsafe" in pool.kwargs)
    reader = extractors.get(name) if name in extractors.names() else None
    predictions = [reader.extract(completion) if reader else None for completion in completions]
    grades = {  # equal strings need no worker
        number: Grade(True, prediction)
        for number, (answer, prediction) in enumerate(zip(answers, predictions, strict=True))
        if name == "math" and prediction == answer
    }
    if kept is not None:
        code = [_grading_code(), pool.kwargs, source_sha256(name.partition(":")[0]) if ":" in name else ""]
        columns = zip(answers, completions, prompts or [""] * len(answers), rows or [{}] * len(answers), strict=True)
        keys = [result_key(name, code, *column) for column in columns]
        grades |= {number: kept.grades[key] for number, key in enumerate(keys) if key in kept.grades}
    todo = [number for number in range(len(answers)) if number not in grades]
    disable = None if shows_progress else True  # None: where there is no terminal
    with tqdm(total=len(answers), initial=len(grades), unit="answers", disable=disable) as bar:
        for chunk in (todo[start : start + CHUNK] for start in range(0, len(todo), CHUNK)):
            items = [
                RewardItem(
                    name,
                    completions[number],
                    answers[number],
                    prompt=prompts[number] if prompts else "",
                    columns=rows[number] if rows else {},
                    data_source=source_of_row(rows[number]) if rows else "",
                )
                for number in chunk
            ]
            for number, result in zip(chunk, pool.grade(items), strict=True):
                score = result.metrics.get("acc", result.reward) if result.status == "ok" else 0.0
                reward = None if reader else score
                weight = result.metrics.get("acc_weight", 1.0)
                grades[number] = Grade(score == 1.0, predictions[number], result.status, result.message, reward, weight)
            if kept is not None:
                kept.add({keys[number]: grades[number] for number in chunk})
            bar.update(len(chunk))
    return [grades[number] for number in range(len(answers))]


def same_answers(task: str, pairs: Sequence[tuple[str, str]], pool: RewardPool) -> list[bool]:
    """Tell for each pair of predictions whether the task's grader finds them equal."""
    form = answer_form("", [grader_of(task, unsafe="unsafe" in pool.kwargs)])
    grades = grade(task, [one for one, _ in pairs], [form.response(other, "") for _, other in pairs], pool)
    return [verdict.correct for verdict in grades]


def grade_file(
    task: str, rows_path: Path | str, output_path: Path | str, workers: int = 1, *, unsafe: bool = False
) -> dict[str, int]:
    """Grade a .jsonl file of {"answer", "completion", ...}: the same rows with "correct" and "prediction", in order.

    A row whose grader failed also gets "status". The output file is complete or absent. Returns the numbers of rows, of
    correct ones, and of each failure. Raises ConfigError that names the wrong lines.
    """
    name, output = grader_of(task, unsafe=unsafe), Path(output_path)
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
    grader_of(task, rows[0], unsafe=unsafe)
    prompts = [row["prompt"] if isinstance(row.get("prompt"), str) else "" for row in rows]
    with RewardPool(workers, GRADER_TIMEOUT_S, kwargs_of(name, unsafe)) as pool:
        grades = grade(task, answers, completions, pool, rows=rows, prompts=prompts, shows_progress=True)
    graded = (
        {
            **row,
            "correct": one.correct,
            "prediction": one.prediction,
            **({} if one.reward is None else {"reward": one.reward}),
            **({} if one.status == "ok" else {"status": one.status}),
        }
        for row, one in zip(rows, grades, strict=True)
    )
    write_file(output, (json.dumps(row) + "\n" for row in graded))
    failures = Counter(verdict.status for verdict in grades if verdict.status != "ok")
    return {
        "rows": len(rows),
        "correct": sum(verdict.correct for verdict in grades),
        "without_answer": sum(not verdict.format_ok for verdict in grades),
        "timeout": failures["timeout"],
        "error": failures["error"],
    }


def _reference_answer(row: dict[str, Any]) -> str:
    """Read the field "answer" as text; a JSON number is accepted. Raises ValueError."""
    value = row.get("answer")
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(int(value)) if value == int(value) else str(value)
    return text_field(row, "answer", empty=True).strip()
