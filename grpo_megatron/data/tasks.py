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
from grpo_megatron.rewards.gsm8k import read_gold

Messages = list[dict[str, str]]  # [{"role": "user", "content": "..."}, ...]
Question = str | Messages


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
        read_gold(gold)
        return question, gold

    instruction = "Reason step by step. End with one line that holds only #### and the final number, as in: #### 42"
    return Task("gsm8k", read_row, reward="gsm8k", system_prompt=instruction)


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
