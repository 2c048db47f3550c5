"""RowFormat: how a row becomes a question and a reference answer, as the keys of a task file say.

It reads every row of a run before the start, so its paths for plain rows are short.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from pydantic import Field

from grpo_megatron.config import Section
from grpo_megatron.data.rows import Question, is_plain_text, missing_field, read_question, text_field, type_name
from grpo_megatron.data.task import PLACEHOLDER, fill_template
from grpo_megatron.rewards.answers import box_start, last_boxed

AnswerRule = Literal["hashes", "boxed", "unboxed", "text", "verbatim", "number", "integer", "list", "any"]


class AnswerField(Section):
    """Where the reference answer stands.

    `hashes`: after the last ####. `boxed`: in the last \\boxed{}. `unboxed`: text, or what its last \\boxed{} holds.
    `text`: text or a number. `verbatim`: text as it stands, possibly empty. `number`, `integer`: of JSON or as text.
    `list`: texts or numbers, each with or without $...$, joined by commas. `any`: text as it stands, other values as JSON.
    """

    field: str  # "a.b": field b of the object a
    rule: AnswerRule = "text"


class RowFormat(Section):
    """How a row becomes a question and a reference answer."""

    question: list[str] = Field(min_length=1)  # templates over the row's fields; the first whose fields are all there
    answer: list[AnswerField] = Field(min_length=1)  # the first whose field is there
    answer_is_optional: bool = False  # a row without any of the fields has the answer ""
    missing_answers: dict[str, str] = Field({})  # beginning of a question whose row holds no answer -> the answer

    def read(self, row: dict[str, Any]) -> tuple[Question, str]:
        """(question, reference answer). Raises ValueError."""
        question = self.read_question(row)
        found = self._find_answer(row)
        if found is None:
            return question, ""
        place, holder, field = found
        answer = ANSWER_RULES[place.rule](holder, field)
        if answer or place.rule in ("verbatim", "any"):
            return question, answer
        for beginning, known in self.missing_answers.items():
            if isinstance(question, str) and question.startswith(beginning):
                return question, known
        raise ValueError(f"field {place.field!r} holds no answer ({place.rule})")

    def read_question(self, row: dict[str, Any]) -> Question:
        """The question of a row, with an answer or without. Raises ValueError."""
        templates = _with_fields(tuple(self.question))
        template, fields = templates[0]
        if len(fields) == 1 and template == f"{{{fields[0]}}}" and is_plain_text(row.get(fields[0])):
            return str(row[fields[0]])  # most rows, without the time of the rest
        for is_there in (_has_content, _has_field):
            for template, fields in templates:
                if is_there(row, fields):
                    return _filled_question(template, fields, row)
        raise missing_field([field for _, fields in templates for field in fields], row)

    def _find_answer(self, row: dict[str, Any]) -> tuple[AnswerField, dict[str, Any], str] | None:
        """The first field that is there and not null, or else null: itself, the object that holds it, its name there."""
        found = None
        for place in self.answer:
            holder, name = _holder_of(row, place.field)
            if name in holder:
                if holder[name] is not None:
                    return place, holder, name
                found = found or (place, holder, name)
        if self.answer_is_optional:
            return None
        if found is None:
            raise missing_field([place.field for place in self.answer], row)
        return found


@functools.cache  # it is called for each row
def _with_fields(templates: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    return [(template, PLACEHOLDER.findall(template)) for template in templates]


def _holder_of(row: dict[str, Any], field: str) -> tuple[dict[str, Any], str]:
    """The object that holds a field, and its name there: "a.b" is b of the object a."""
    if field in row:
        return row, field
    outer, _, inner = field.partition(".")
    return (row[outer], inner) if inner and isinstance(row.get(outer), dict) else (row, field)


def _has_field(row: dict[str, Any], fields: Sequence[str]) -> bool:
    return row.keys() >= set(fields)


def _has_content(row: dict[str, Any], fields: Sequence[str]) -> bool:
    """Whether all fields are there, each with a text that is not blank, or with a list that is not empty."""
    for field in fields:
        value = row.get(field)
        if not value or not isinstance(value, str | list) or (isinstance(value, str) and value.isspace()):
            return False
    return True


def _filled_question(template: str, fields: Sequence[str], row: dict[str, Any]) -> Question:
    if len(fields) == 1 and template == f"{{{fields[0]}}}":
        return read_question(row, fields[0])
    # a single field keeps all its white space; where several fields are joined, each loses it at both ends
    values = {field: text_field(row, field) for field in fields}
    if len(fields) > 1:
        values = {field: value.strip() for field, value in values.items()}
    return fill_template(template, values)


# -- answer rules: (row, field) -> the reference answer, "" where there is none; ValueError where the field is wrong ----


def _after_hashes(row: dict[str, Any], field: str) -> str:
    _, mark, answer = text_field(row, field).rpartition("####")
    if not mark:
        raise ValueError(f"field {field!r} has no #### before the final answer")
    return answer.strip()


def _boxed_answer(row: dict[str, Any], field: str) -> str:
    answer = last_boxed(text_field(row, field))
    if answer is None:
        raise ValueError(f"field {field!r} has no closed \\boxed{{...}}")
    return answer.strip()


def _unboxed_answer(row: dict[str, Any], field: str) -> str:
    answer = _text_answer(row, field)
    return (last_boxed(answer) or "").strip() if box_start(answer) >= 0 else answer


def _text_answer(row: dict[str, Any], field: str) -> str:
    value = row[field]
    return _number_text(value) if _is_number(value) else text_field(row, field, empty=True).strip()


def _verbatim_answer(row: dict[str, Any], field: str) -> str:
    return text_field(row, field, empty=True)


def _number_answer(row: dict[str, Any], field: str) -> str:
    value = row[field]
    if not _is_number(value) and not isinstance(value, str):
        raise ValueError(f"field {field!r} is {type_name(value)}, not a number")
    return _text_answer(row, field)


def _integer_answer(row: dict[str, Any], field: str) -> str:
    answer = text_field(row, field)
    if not answer.removeprefix("-").isdecimal():
        raise ValueError(f"field {field!r} is {answer[:40]!r}, not an integer")
    return answer


def _joined_answer(row: dict[str, Any], field: str) -> str:
    value = row[field]
    parts: Iterable[Any] = value if isinstance(value, list) else [value]
    if value == [] or not all(_is_number(part) or isinstance(part, str) for part in parts):
        raise ValueError(f"field {field!r} is not a list of texts or numbers")
    return ", ".join(_number_text(part) if _is_number(part) else _without_dollars(part) for part in parts)


def _any_answer(row: dict[str, Any], field: str) -> str:
    return text_field(row, field, empty=True) if isinstance(row[field], str) else json.dumps(row[field])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number_text(value: float) -> str:
    if not math.isfinite(value):
        raise ValueError(f"the answer is {value}, not a finite number")
    return str(int(value)) if value == int(value) else repr(value)


def _without_dollars(text: str) -> str:
    text = text.strip()
    is_one_formula = len(text) > 1 and text.startswith("$") and text.endswith("$") and text.count("$") == 2
    return text[1:-1] if is_one_formula else text


ANSWER_RULES: dict[str, Callable[[dict[str, Any], str], str]] = {
    "hashes": _after_hashes,
    "boxed": _boxed_answer,
    "unboxed": _unboxed_answer,
    "text": _text_answer,
    "verbatim": _verbatim_answer,
    "number": _number_answer,
    "integer": _integer_answer,
    "list": _joined_answer,
    "any": _any_answer,
}
