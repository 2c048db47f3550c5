"""Fields of a row: texts, questions, and what identifies a problem. Raise ValueError with the field's name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from grpo_megatron.reading import surrogate_problem

MAX_ROW = 1 << 22  # bytes of a line, and characters of a field: a text of a million tokens

Messages = list[dict[str, Any]]  # [{"role": "user", "content": "..."}, ...]
Question = str | Messages


def text_field(row: dict[str, Any], field: str, empty: bool = False) -> str:
    """The string `row[field]`. Raises ValueError when it is missing, of another type, or blank (unless `empty`)."""
    value = row.get(field)
    if is_plain_text(value):
        return str(value)  # most fields, without the time of the rest
    if field not in row:
        raise missing_field([field], row)
    if not isinstance(value, str):
        raise ValueError(f"field {field!r} is {type_name(value)}, not a string")
    if len(value) > MAX_ROW:
        raise ValueError(f"field {field!r} has {len(value):,} characters; at most {MAX_ROW:,} are read")
    if problem := surrogate_problem(value):
        raise ValueError(f"field {field!r}: {problem}")
    if not empty and not value.strip():
        raise ValueError(f"field {field!r} is empty")
    return value


def is_plain_text(value: Any) -> bool:
    """Whether `text_field` certainly accepts a value. This test is quick, and false for some texts that are accepted too."""
    return type(value) is str and value.isascii() and 0 < len(value) <= MAX_ROW and not value.isspace()


def missing_field(fields: Sequence[str], row: dict[str, Any]) -> ValueError:
    """The error for a row that has none of `fields`."""
    shown = ", ".join(map(repr, dict.fromkeys(fields)))
    what = f"field {shown} is missing" if len(fields) == 1 else f"none of the fields {shown} is there"
    return ValueError(f"{what} (fields: {', '.join(map(repr, row)) or 'none'})"[:300])


def type_name(value: Any) -> str:
    """The type of a JSON value, for messages."""
    names = {dict: "an object", list: "a list", str: "a string", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def read_question(row: dict[str, Any], field: str = "prompt") -> Question:
    """`row[field]`: text, or chat messages that do not end with the assistant's turn. Raises ValueError."""
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
        raise ValueError(f"field {field!r} ends with the assistant's turn; the policy writes the response")
    return messages


def question_text(question: Question) -> str:
    """The question as text; of a chat, the contents of its messages."""
    if isinstance(question, str):
        return question
    return "\n\n".join(message["content"] for message in question)


def problem_digest(question: Question, answer: str) -> str:
    """Identifies a problem in data files, rollout files and evaluations: 32 hexadecimal digits.

    Row numbers change when a file is filtered, and an evaluation may render the same question by another template.
    The digest is equal for the same question as text and as a chat of one message.
    """
    content = json.dumps([question_text(question), answer])
    return hashlib.sha256(content.encode()).hexdigest()[:32]
