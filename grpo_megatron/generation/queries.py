"""The prompts of `generate`, from the command line, standard input or a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.data.rows import Question, read_question, read_rows
from grpo_megatron.data.task import Task
from grpo_megatron.generation.style import PLAIN_TASK
from grpo_megatron.reading import ReadError, read_text

LINE_FILES = ("", ".txt", ".text")  # endings of files with one prompt per line
MAX_INPUT = 1 << 28  # bytes of standard input, or of a file of lines


def read_queries(prompt: str | None, file: Path | None, task: Task) -> list[Question]:
    """The questions in order: texts, or chats. Raises ConfigError."""
    if prompt is not None:
        text = sys.stdin.read(MAX_INPUT).rstrip("\n") if prompt == "-" else prompt
        if not text.strip():
            raise ConfigError(f"--prompt {prompt!r}: the prompt is empty")
        return [text]
    assert file is not None
    return _lines_of(file) if file.suffix in LINE_FILES else read_rows(file, lambda row: _question_of(task, row))


def _question_of(task: Task, row: dict[str, Any]) -> Question:
    """As the task reads the row. Without a task, a row may have its chat in "messages". Raises ValueError."""
    if task.name == PLAIN_TASK and "messages" in row and "prompt" not in row:
        return read_question(row, "messages")
    return task.read_unanswered(row)[0]


def _lines_of(file: Path) -> list[Question]:
    try:
        text = read_text(file, MAX_INPUT)
    except (OSError, ReadError) as error:
        raise ConfigError(f"cannot read --file {str(file)!r}: {error}") from error
    lines: list[Question] = [line for line in text.splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"--file {str(file)!r} has no prompts: each line that is not blank is one")
    return lines
