"""Tasks: a task owns the reading of its rows, its default system prompt, its reward and the label of its samples.

A task names its reward, so training and evaluation share one extractor. To add one: a registered function without
arguments that returns a `Task`, or "my.module:function" (or "my.module:TASK") as `data.task`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_megatron.data.rows import text_field
from grpo_megatron.registry import Registry
from grpo_megatron.rewards.gsm8k import numeric_answer
from grpo_megatron.rewards.math.boxed import last_boxed
from grpo_megatron.rewards.math.grader import latex_answer

Messages = list[dict[str, str]]  # [{"role": "user", "content": "..."}, ...]
Question = str | Messages

HASHES = "Reason step by step. End with one line that holds only #### and the final number, as in: #### 42"
EMPTY_BOXES = (  # two problems of MATH's training split whose solution ends with \boxed{}; the answer to both is 0
    "For any integer $n>1$, the number of prime numbers greater than $n!+1$ and less than $n!+n$ is:",
    "You are given a sequence of $58$ terms; each term has the form $P+n$",
)


@dataclass(frozen=True)
class Task:
    """`read_row(row)` gives (question, answer) and raises ValueError when the row is wrong."""

    name: str  # the source label: in uids and metric names
    read_row: Callable[[dict[str, Any]], tuple[Question, str]]
    reward: str | None = None  # None: reward.function must be set
    system_prompt: str | None = None  # for the chat template; data.system_prompt overrides it


tasks: Registry[Callable[[], Task]] = Registry("task")


def get_task(name: str) -> Task:
    """The task called `name` (`data.task`). Raises ValueError when there is none, or it is something else."""
    entry: object = tasks.get(name)
    task = entry() if callable(entry) else entry
    if not isinstance(task, Task):
        raise ValueError(f"data.task={name!r} gives {type(task).__name__}, not a grpo_megatron.data.tasks.Task")
    return task


def read_question(row: dict[str, Any], field: str = "prompt") -> Question:
    """`row[field]`: text, or chat messages that end with the user's turn. Raises ValueError."""
    if not isinstance(row.get(field), list):
        return text_field(row, field)
    messages: list[Any] = row[field]
    if not messages:
        raise ValueError(f"field {field!r} is empty")
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError(f"field {field!r}: a message must be an object with role and content")
        text_field(message, "role")
        text_field(message, "content")
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"field {field!r} ends with the assistant's turn; the response is for the policy to give")
    return messages


@tasks.register("gsm8k")
def gsm8k() -> Task:
    """Grade school word problems, rows {"question", "answer"}, the reference after `####` (arXiv 2110.14168)."""

    def read_row(row: dict[str, Any]) -> tuple[Question, str]:
        question, solution = text_field(row, "question"), text_field(row, "answer")
        _, mark, gold = map(str.strip, solution.rpartition("####"))
        if not mark:
            raise ValueError("field 'answer' has no #### before the final answer")
        numeric_answer(gold)
        return question, gold

    return Task("gsm8k", read_row, reward="gsm8k", system_prompt=HASHES)


def _boxed_task(name: str, read_row: Callable[[dict[str, Any]], tuple[Question, str]]) -> Task:
    return Task(
        name, read_row, reward="math", system_prompt="Reason step by step, and put the final answer in \\boxed{}."
    )


def _read_math(row: dict[str, Any]) -> tuple[Question, str]:
    """The reference is the field "answer", or else what the last box of "solution" holds."""
    problem = text_field(row, "problem")
    gold = text_field(row, "answer", empty=True) if "answer" in row else last_boxed(text_field(row, "solution"))
    if gold is None:
        raise ValueError("field 'solution' has no closed \\boxed{...}")
    if not gold.strip() and problem.startswith(EMPTY_BOXES):
        gold = "0"
    return problem, latex_answer(gold)


@tasks.register("math")
def math() -> Task:
    """Competition problems, rows {"problem", "solution" or "answer"}; equivalent answers count (arXiv 2103.03874)."""
    return _boxed_task("math", _read_math)


@tasks.register("math500")
def math500() -> Task:
    """The 500 of MATH's test problems that "Let's Verify Step by Step" (arXiv 2305.20050) held out; as math."""
    return _boxed_task("math500", _read_math)


@tasks.register("olympiadbench")
def olympiadbench() -> Task:
    """Rows {"question", "final_answer": ["$...$", ...]}, text-only and in English (arXiv 2402.14008); graded as math."""

    def read_row(row: dict[str, Any]) -> tuple[Question, str]:
        final = row.get("final_answer")
        if not isinstance(final, list) or not final or not all(isinstance(part, str) for part in final):
            raise ValueError("field 'final_answer' is not a list of strings")
        return text_field(row, "question"), latex_answer(", ".join(final))

    return _boxed_task("olympiadbench", read_row)


@tasks.register("boxed")
def boxed() -> Task:
    """Your own mathematics (AIME, AMC, Minerva), rows {"problem", "question" or "prompt"; "answer"}; graded as math."""

    def read_row(row: dict[str, Any]) -> tuple[Question, str]:
        field = next((name for name in ("problem", "question", "prompt") if name in row), "problem")
        answer = row.get("answer")
        if isinstance(answer, int) and not isinstance(answer, bool):
            return read_question(row, field), str(answer)
        return read_question(row, field), latex_answer(text_field(row, "answer"))

    return _boxed_task("boxed", read_row)


@tasks.register("svamp")
def svamp() -> Task:
    """Short word problems, rows {"Body", "Question", "Answer": number} (arXiv 2103.07191); graded as gsm8k."""

    def read_row(row: dict[str, Any]) -> tuple[Question, str]:
        answer = row.get("Answer")
        if isinstance(answer, bool) or not isinstance(answer, int | float | str):
            raise ValueError("field 'Answer' is not a number")
        gold = str(int(answer)) if isinstance(answer, float) and answer == int(answer) else str(answer)
        numeric_answer(gold)
        return f"{text_field(row, 'Body')} {text_field(row, 'Question')}", gold

    return Task("svamp", read_row, reward="gsm8k", system_prompt=HASHES)


@tasks.register("arithmetic")
def arithmetic() -> Task:
    """The quickstart's sums, rows {"prompt", "answer"}; see data/arithmetic.py; for data.apply_chat_template=false."""

    def read_row(row: dict[str, Any]) -> tuple[Question, str]:
        prompt, answer = text_field(row, "prompt"), text_field(row, "answer")
        if not answer.lstrip("-").isdecimal():
            raise ValueError(f"field 'answer' is {answer[:40]!r}, not an integer")
        return prompt, answer

    return Task("arithmetic", read_row, reward="arithmetic")


@tasks.register("jsonl")
def jsonl() -> Task:
    """Your own rows {"prompt": text or chat messages, "answer": text}; reward.function says how they are scored."""
    return Task("jsonl", lambda row: (read_question(row), text_field(row, "answer", empty=True)))
