"""Task: one benchmark, defined once. Training, validation and `grpo-megatron evaluate` read the same object.

A task says how a row of its file becomes a question and a reference answer, how the question becomes a prompt (a chat or
plain text), which reward scores a completion, and under which label and version the numbers are reported. The built-in
tasks are the YAML files in `tasks/`. A task in Python needs a name, `read_row` and a reward:

    TASK = Task("quiz", lambda row: (row["question"], row["answer"]), reward="math")  # data.task: my.module:TASK
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import math
import random
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, field_validator
from pydantic.dataclasses import dataclass as validated_dataclass

from grpo_megatron.config import ConfigError, MultiTurnConfig, Section
from grpo_megatron.config.problems import ProblemList
from grpo_megatron.config.section import VALUE_REMEDIES, reason_and_remedy
from grpo_megatron.config.tables import named_file, read_yaml_table, table_names
from grpo_megatron.data import folders
from grpo_megatron.data.rows import (
    Messages,
    Question,
    missing_field,
    open_rows,
    read_question,
    text_field,
    type_name,
)
from grpo_megatron.registry import import_function, no_exit
from grpo_megatron.rewards import extractors
from grpo_megatron.rewards.answers import box_start, last_boxed, tagged_answer
from grpo_megatron.untrusted import shown

LETTERS = string.ascii_uppercase  # of choices
PLACEHOLDER = re.compile(r"\{(\w+)\}")  # of a template; other braces are literal

ReadRow = Callable[[dict[str, Any]], tuple[Question, str]]


class TextFormat(Section):
    """The prompt without a chat template. Each worked example is `problem` + `example`; then follows `problem`.

    `stop`: texts that end a completion. The scripted evaluation cuts before them. In training, `rollout.stop` has them.
    """

    problem: str | None = None  # null: as `user_prompt`
    example: str = "{solution}\n\n"
    stop: list[Annotated[str, Field(min_length=1)]] = Field([])


@validated_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Example:
    """A worked example of a few-shot prompt."""

    question: Annotated[str, Field(min_length=1)]
    solution: Annotated[str, Field(min_length=1)]


class Fewshot(Section):
    """The worked examples of the scripted evaluation.

    `examples` are in the task itself: the first ones are used, in their order. Otherwise they are sampled from `files`.
    `fixed`: one sample for all problems. `per-problem`: one sample per problem, from one generator, in the order of the file
    (`random.Random(seed).sample`, as lm-evaluation-harness does).
    """

    files: list[str] = Field([])
    solution: str = "solution"  # the field that holds a worked solution
    examples: list[Example] = Field([])
    remove: str | None = None  # a regular expression, deleted from solutions
    rule: Literal["fixed", "per-problem"] = "fixed"
    default: int = Field(0, ge=0)
    seed: int | None = None  # null: that of evaluation/settings.py

    @field_validator("remove")
    @classmethod
    def _is_an_expression(cls, remove: str | None) -> str | None:
        try:
            re.compile(remove or "")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"not a regular expression ({error})") from None
        return remove


class Sampling(Section):
    """Sampling in the scripted evaluation, besides the greedy one."""

    temperature: float = Field(1.0, gt=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)


@validated_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Task:
    """A benchmark. `read_row(row)` returns (question, reference answer) and raises ValueError when the row is wrong.

    Only `name` and `read_row` are required. Raises ValueError when a field has a wrong type or value.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]  # the label in uids, metric names and result files
    read_row: ReadRow
    reward: str | None = None  # None: reward.function must be set
    rewards: dict[str, str] = field(default_factory=dict)  # "data_source" of a row (a pattern) -> its reward
    system_prompt: str | None = None  # data.system_prompt and --system-prompt override it
    user_prompt: str | None = "{question}"  # template of the user's turn; None: plain text only
    text: TextFormat = TextFormat()
    title: str = ""
    version: Annotated[int, Field(ge=1)] = 1  # raised when a change of the task changes its scores
    graders: dict[str, str] = field(default_factory=dict)  # score -> reward, headline first; empty: {accuracy: reward}
    files: list[str] = field(default_factory=list)  # relative to the data folder; the first one that exists is read
    subject: list[str] = field(default_factory=list)  # fields of a row; the first one that is there
    level: list[str] = field(default_factory=list)  # as `subject`
    fewshot: Fewshot | None = None
    sampling: Sampling = Sampling()
    max_tokens: Annotated[int, Field(ge=1)] = 2048  # of a completion, in the scripted evaluation
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None  # of an environment's reset; null: the longest prompt
    multi_turn: MultiTurnConfig = MultiTurnConfig()  # for the scripted evaluation; training has rollout.multi_turn
    read_question: Callable[[dict[str, Any]], Question] | None = None  # of rows without an answer; None: there are none
    sha256: str = ""  # of the source: the task file, or the Python module; set where the task is looked up

    def __post_init__(self) -> None:
        if self.reward is not None and not self.graders:
            object.__setattr__(self, "graders", {"accuracy": self.reward})

    def read_unanswered(self, row: dict[str, Any]) -> tuple[Question, str]:
        """Read (question, "") of a row that needs no reference answer. Raises ValueError when the row is wrong."""
        return (self.read_question(row) if self.read_question else self.read_row(row)[0]), ""

    @property
    def reward_names(self) -> list[str]:
        """The rewards of the task's rows."""
        return sorted({*self.rewards.values(), *([self.reward] if self.reward else [])})

    def check_columns(self, row: Mapping[str, Any]) -> None:
        """Raises ValueError where a prompt's template names a column: it would be shown to the model as {name}."""
        for template in filter(None, (self.user_prompt, self.text.problem)):
            if columns := [name for name in PLACEHOLDER.findall(template) if name != "question" and name in row]:
                raise ValueError(
                    f"the template {shown(template)} knows only {{question}}; name {{{columns[0]}}} in `question`"
                )

    def reward_of(self, row: Mapping[str, Any], answer: str) -> str:
        """Choose the reward of a row. Raises ValueError: none is for its source, or it cannot read the reference answer."""
        if not self.rewards:
            return self.reward or ""
        source = row.get("data_source")
        name = next((self.rewards[known] for known in self.rewards if fnmatch(str(source), known)), self.reward)
        if name is None:
            raise ValueError(f"data_source {shown(source)} has no reward here; set reward.function")
        if name in extractors.names():
            extractors.get(name).read_answer(answer)
        return name

    def labels(self, row: Mapping[str, Any]) -> tuple[str | None, str | None]:
        """Read (subject, level) of a row; None where it has none."""
        level = _first_value(self.level, row)
        if level is not None and level.isdigit():
            level = f"Level {level}"
        return _first_value(self.subject, row), level

    def messages(
        self, question: Question, examples: Sequence[Example] = (), system_prompt: str | None = None
    ) -> Messages:
        """Make the chat: system turn, worked examples as earlier turns, then the question.

        `system_prompt` replaces the task's own; "" means no system turn. A system turn in the row wins over both. In a
        row that is a chat itself, `user_prompt` applies to its last turn. Raises ValueError: the task has no chat form.
        """
        template = self.user_prompt
        if template is None:
            raise ValueError(f"task {self.name!r} has plain text prompts only")
        turns = [_user(question)] if isinstance(question, str) else list(question)
        if turns[-1]["role"] == "user":
            turns[-1] = _user(fill_template(template, {"question": turns[-1]["content"]}))
        if turns[0]["role"] == "system":
            head, turns = turns[:1], turns[1:]
        else:
            system = self.system_prompt if system_prompt is None else system_prompt
            head = [{"role": "system", "content": system}] if system else []
        for example in examples:
            head.append(_user(fill_template(template, {"question": example.question})))
            head.append({"role": "assistant", "content": example.solution.strip()})
        return head + turns

    def plain_text(self, question: Question, examples: Sequence[Example] = ()) -> str:
        """Write the prompt as text. Raises ValueError when the question is a list of chat messages."""
        if not isinstance(question, str):
            raise ValueError("the question is a list of chat messages, and the prompt is to be plain text")
        problem = self.text.problem or self.user_prompt or "{question}"
        parts = []
        for example in examples:
            parts.append(fill_template(problem, {"question": example.question}))
            parts.append(fill_template(self.text.example, {"solution": example.solution}))
        return "".join(parts) + fill_template(problem, {"question": question})


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """Replace the {fields} of a template, once: braces inside the values are kept."""
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), template)


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _first_value(fields: Sequence[str], row: Mapping[str, Any]) -> str | None:
    return next((str(row[name]) for name in fields if row.get(name) not in (None, "")), None)


# -- Rows -> questions and reference answers ---------------------------------------------------------------------------
# RowFormat reads every row of a run before the start, so its paths for plain rows are short.

AnswerRule = Literal[
    "hashes", "boxed", "unboxed", "tagged", "text", "verbatim", "number", "integer", "letter", "list", "any"
]


class AnswerField(Section):
    """The place of the reference answer in a row.

    `hashes`: after the last ####. `boxed`: in the last \\boxed{}. `unboxed`: text, or what its last \\boxed{} holds.
    `tagged`: in the last <answer>...</answer>. `text`: text or a number. `verbatim`: text as it stands, possibly empty.
    `number`, `integer`: of JSON or as text. `letter`: of a choice, or its index from 0, as MMLU has it. `list`: texts or
    numbers, each with or without $...$, joined by commas. `any`: text as it stands, other values as JSON.
    """

    field: str  # "a.b": field b of the object a
    rule: AnswerRule = "text"


def _as_fields(value: Any) -> Any:
    """Accepts the name of a field, or a list of names, as `text` fields."""
    values = value if isinstance(value, list) else [value]
    return [{"field": one} if isinstance(one, str) else one for one in values]


def _with_a_field(template: str) -> str:
    if not PLACEHOLDER.search(template):
        raise ValueError(
            f"names no {{field}}, so that every prompt would be the same; write '{{{template}}}' for a column"
        )
    return template


Templates = Annotated[
    list[Annotated[str, AfterValidator(_with_a_field)]],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


class Choices(Section):
    """The choices of a row, which `question` shows as {choices}, lettered; the field `letter` has the right one's letter."""

    fields: list[str] = Field(min_length=1)  # the column that has them as a list, or a column for each
    right: AnswerField | None = None  # where the right one's letter is; null: the first one is right
    shuffle_seed: int | None = (
        None  # their order is drawn from it and their texts, the same in every file; null: as it is
    )

    def lettered(self, row: dict[str, Any]) -> dict[str, Any]:
        """Returns the row with `choices` and `letter`. Raises ValueError."""
        first, *others = self.fields
        texts = [text_field(row, field) for field in self.fields] if others else row.get(first, [])
        if not isinstance(texts, list) or not _lettered(texts):
            raise ValueError(f"{', '.join(map(repr, self.fields))} is no list of 1 to {len(LETTERS)} texts")
        order = list(range(len(texts)))
        if self.shuffle_seed is not None:
            random.Random("\0".join([str(self.shuffle_seed), *texts])).shuffle(order)
        letter = "A" if self.right is None else _answer_of("letter", row, self.right.field)
        if letter not in LETTERS[: len(texts)]:
            raise ValueError(f"the right choice {letter!r} is none of the {len(texts)}")
        right = LETTERS[order.index(LETTERS.index(letter))]
        return {**row, "choices": [texts[place] for place in order], "letter": right}


class RowFormat(Section):
    """The keys of a task file for rows: question and reference answer."""

    choices: Choices | None = None
    lines: list[str] = Field([])  # columns with lists of texts, which `question` shows without letters
    system: str | None = (
        None  # template of a system turn; a column that is no text is shown as JSON. The row's own follows
    )
    question: Templates = Field(min_length=1)  # templates over the row's fields; the first whose fields are all there
    answer: Annotated[list[AnswerField], BeforeValidator(_as_fields)] = Field(min_length=1)  # the first that is there
    answer_is_optional: bool = False  # a row without any of the fields has the answer ""
    missing_answers: dict[str, str] = Field({})  # beginning of a question whose row holds no answer -> the answer

    def read(self, row: dict[str, Any]) -> tuple[Question, str]:
        """Read (question, reference answer). Raises ValueError."""
        row = self.choices.lettered(row) if self.choices else row
        question = self._with_system(self._read_question(row), row)
        answer_place = self._find_answer(row)
        if answer_place is None:
            return question, ""
        place, holder, field = answer_place
        answer = _answer_of(place.rule, holder, field)
        if answer or place.rule in ("verbatim", "any"):
            return question, answer
        for beginning, known in self.missing_answers.items():
            if isinstance(question, str) and question.startswith(beginning):
                return question, known
        raise ValueError(f"field {place.field!r} holds no answer ({place.rule})")

    def read_question(self, row: dict[str, Any]) -> Question:
        """Read the question of a row, with an answer or without. Raises ValueError."""
        return self._with_system(self._read_question(self.choices.lettered(row) if self.choices else row), row)

    def _with_system(self, question: Question, row: dict[str, Any]) -> Question:
        if self.system is None:
            return question
        names = PLACEHOLDER.findall(self.system)
        if missing := [name for name in names if name not in row]:
            raise missing_field(missing, row)
        values = {name: row[name] if isinstance(row[name], str) else json.dumps(row[name], indent=4) for name in names}
        turns = [_user(question)] if isinstance(question, str) else list(question)
        own = turns.pop(0)["content"] if turns[0]["role"] == "system" else ""
        text = fill_template(self.system, values) + (f"\n\n{own}" if own else "")
        return [{"role": "system", "content": text}, *turns]

    def _read_question(self, row: dict[str, Any]) -> Question:
        templates = _with_fields(tuple(self.question))
        row = {
            **row,
            **{name: "\n".join(map(str, row[name])) for name in self.lines if isinstance(row.get(name), list)},
        }
        for is_there in (_has_content, dict.__contains__):
            for template, fields in templates:
                if all(is_there(row, field) for field in fields):
                    return _filled_question(template, fields, row)
        raise missing_field([field for _, fields in templates for field in fields], row)

    def _find_answer(self, row: dict[str, Any]) -> tuple[AnswerField, dict[str, Any], str] | None:
        """Find the first field that is there and not null, or else null: itself, the object with it, its name there."""
        first = None
        for place in self.answer:
            holder, name = _holder_of(row, place.field)
            if name in holder:
                if holder[name] is not None:
                    return place, holder, name
                first = first or (place, holder, name)
        if self.answer_is_optional:
            return None
        if first is None:
            raise missing_field([place.field for place in self.answer], row)
        return first


@functools.cache  # it is called for each row
def _with_fields(templates: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    return [(template, PLACEHOLDER.findall(template)) for template in templates]


def _holder_of(row: dict[str, Any], field: str) -> tuple[dict[str, Any], str]:
    """Find the object with a field, and its name there: "a.b" is b of the object a."""
    if field in row:
        return row, field
    outer, _, inner = field.partition(".")
    return (row[outer], inner) if inner and isinstance(row.get(outer), dict) else (row, field)


def _has_content(row: dict[str, Any], field: str) -> bool:
    """Tell whether a field has a text that is not blank, or a list that is not empty."""
    value = row.get(field)
    return bool(value) and isinstance(value, str | list) and not (isinstance(value, str) and value.isspace())


def _filled_question(template: str, fields: Sequence[str], row: dict[str, Any]) -> Question:
    if len(fields) == 1 and template == f"{{{fields[0]}}}":
        return read_question(row, fields[0])
    # a single field keeps all its white space; where several fields are joined, each loses it at both ends
    values = {field: _choices(row, field) or text_field(row, field) for field in fields}
    if len(fields) > 1:
        values = {field: value.strip() for field, value in values.items()}
    return fill_template(template, values)


def _choices(row: dict[str, Any], field: str) -> str:
    """Letters the choices of a question, a line for each; "" where the field is no list of texts."""
    choices = row.get(field)
    return _lettered(choices) if isinstance(choices, list) else ""


def _lettered(choices: list[Any]) -> str:
    if not all(isinstance(one, str) for one in choices) or len(choices) > len(LETTERS):
        return ""
    return "\n".join(f"{letter}. {one.strip()}" for letter, one in zip(LETTERS, choices, strict=False))


def _answer_of(rule: AnswerRule, row: dict[str, Any], field: str) -> str:
    """Read the reference answer, "" where there is none. Raises ValueError where the field is wrong."""
    value = row[field]
    if rule == "verbatim" and (_is_number(value) or isinstance(value, list | dict)):
        text = (
            f"field {field!r} is {type_name(value)}, not a string; write it as text, or read it as JSON: data.task=trl"
        )
        raise ValueError(f"{text}, or a task file with `rule: any`")
    if rule == "verbatim" or (rule == "any" and isinstance(value, str)):
        return text_field(row, field, empty=True)
    if rule == "any":
        return json.dumps(value)
    if rule == "list":
        parts: list[Any] = value if isinstance(value, list) else [value]
        if value == [] or not all(_is_number(part) or isinstance(part, str) for part in parts):
            raise ValueError(f"field {field!r} is not a list of texts or numbers")
        return ", ".join(_number_text(part) if _is_number(part) else _without_dollars(part) for part in parts)
    if rule == "letter" and isinstance(value, int) and 0 <= value < len(LETTERS):
        return LETTERS[value]
    if _is_number(value) and rule in ("text", "number", "unboxed"):
        return _number_text(value)
    if rule == "number" and not isinstance(value, str):
        raise ValueError(f"field {field!r} is {type_name(value)}, not a number")
    text = text_field(row, field, empty=rule in ("text", "number", "unboxed"))
    if rule == "integer":
        if not text.removeprefix("-").isdecimal():
            raise ValueError(f"field {field!r} is {text[:40]!r}, not an integer")
        return text
    if rule == "hashes":
        _, mark, text = text.rpartition("####")
        if not mark:
            raise ValueError(f"field {field!r} has no #### before the final answer")
    elif rule == "boxed" or (rule == "unboxed" and box_start(text) >= 0):
        boxed = last_boxed(text)
        if boxed is None and rule == "boxed":
            raise ValueError(f"field {field!r} has no closed \\boxed{{...}}")
        text = boxed or ""
    elif rule == "tagged":
        text = tagged_answer(text) or ""
    return text.strip()


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


# -- Task files ---------------------------------------------------------------------------------------------------------
# A file may extend a built-in task: `extends: gsm8k` takes every key from there that the file does not set. So a variant
# of a benchmark (few-shot examples, the scores of another program) is a task with a name of its own. The sha256 of the
# bytes, with those of the extended file, is printed with every result. Only results with equal sha256 are compared.

TASKS_FOLDER = Path(__file__).parent / "tasks"
SET_HERE = ("read_row", "read_question", "sha256")  # fields of Task that a file may not set
OWN_KEYS = ("name", "version", "title")  # never taken from the extended file

KEYS = sorted({"extends", *RowFormat.model_fields, *(f.name for f in dataclasses.fields(Task))} - set(SET_HERE))


def read_task_file(path: Path) -> Task:
    """Read a task file. Raises ConfigError with every mistake of the file."""
    written, keys, hashed = _read_keys(path)
    problems = [f"{key}: {VALUE_REMEDIES['missing']}" for key in ("version", "title") if key not in written]
    problems += [f"{key}: not a key of a task file" for key in SET_HERE if key in written]
    rows = task = None
    try:
        rows = RowFormat.model_validate({key: keys[key] for key in RowFormat.model_fields if key in keys})
    except ValidationError as error:
        problems += _mistakes(error)
    fields = {key: value for key, value in keys.items() if key not in RowFormat.model_fields}
    try:
        task = TypeAdapter(Task).validate_python({**fields, "read_row": RowFormat.read, "sha256": ""})  # replaced below
    except ValidationError as error:
        problems += _mistakes(error)
    if rows is None or task is None or problems:
        raise ConfigError(f"task file {str(path)!r} is wrong:\n" + "\n".join(f"  {problem}" for problem in problems))
    names = sorted({*task.graders.values(), *([task.reward] if task.reward else [])} & {*extractors.names()})
    readers, read = [extractors.get(name).read_answer for name in names], rows.read

    def read_row(row: dict[str, Any]) -> tuple[Question, str]:
        question, answer = read(row)
        for read_answer in readers:  # they refuse a reference answer that the reward cannot read
            read_answer(answer)
        return question, answer

    sha256 = hashlib.sha256(hashed).hexdigest()
    return dataclasses.replace(task, read_row=read_row, read_question=rows.read_question, sha256=sha256)


def _read_keys(path: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Returns the keys of a task file, the same with those of the tasks that it extends, and the bytes of all files."""
    text, table = read_yaml_table(path, "task file")
    written = {str(key): value for key, value in table.items()}
    if "extends" not in written:
        return written, written, text.encode()
    if (name := written["extends"]) not in (known := task_names()):
        raise ConfigError(
            f"task file {str(path)!r}: extends {shown(name)} is not a built-in task; set one of {', '.join(known)}"
        )
    _, base, hashed = _read_keys(TASKS_FOLDER / f"{name}.yaml")
    replaced = ("graders",) if "reward" in written else ()  # its scores would be those of the other reward
    keys = {**{key: value for key, value in base.items() if key not in (*OWN_KEYS, *replaced)}, **written}
    del keys["extends"]
    return written, keys, hashed + b"\0" + text.encode()


def _mistakes(error: ValidationError) -> list[str]:
    unknown = {"unexpected_keyword_argument": f"unknown key (known: {', '.join(KEYS)})"}
    return [
        f"{'.'.join(map(str, one['loc']))}: {unknown.get(one['type'], reason_and_remedy(one))}"
        for one in error.errors()
    ]


_read_built_in = cache(read_task_file)


def task_names() -> list[str]:
    """List the built-in tasks."""
    return table_names(TASKS_FOLDER)


def get_task(name: str) -> Task:
    """Find the task called `name`. Raises ConfigError (a ValueError).

    "module:attribute" may be a Task, or a function without arguments that returns one. Exceptions raised by the import
    of the module are passed on.
    """
    if name.endswith((".yaml", ".yml")):
        return read_task_file(Path(name))
    if ":" in name:
        return _python_task(name)
    task = _read_built_in(named_file(TASKS_FOLDER, name, "task", "; or a .yaml file, or package.module:function"))
    return dataclasses.replace(task, read_row=folders.read_row, read_question=None) if name == "folders" else task


def get_tasks(names: list[str]) -> list[Task]:
    """Find several tasks. Raises one ConfigError for all that are wrong."""
    problems = ProblemList()
    imported = [problems.attempt("", _imported_task, name) for name in names]
    tasks = [task for task in imported if task is not None]
    labels = [task.name for task in tasks]
    repeated = sorted({label for label in labels if labels.count(label) > 1})
    problems.add(f"task {label!r} is given twice; name it once" for label in repeated)
    problems.add([] if names else [f"no task is named; choose from {', '.join(task_names())}"])
    problems.raise_if_any()
    return tasks


def _imported_task(name: str) -> Task:
    try:
        return get_task(name)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's module raises while it is imported
        text = f"task {name!r}: importing it raised {type(error).__name__}: {error}; correct the module"
        raise ConfigError(text) from error


def _python_task(name: str) -> Task:
    try:
        entry = import_function(name)
        with no_exit(f"task {name!r}: calling it"):
            task = entry() if callable(entry) else entry
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not isinstance(task, Task):
        raise ConfigError(f"task {name!r} is {type(task).__name__}, not a grpo_megatron.data.task.Task")
    return task if task.sha256 else dataclasses.replace(task, sha256=source_sha256(name.partition(":")[0]))


def source_sha256(module_name: str) -> str:
    """sha256 of the module's file. What the module imports is not part of it."""
    path = importlib.import_module(module_name).__file__
    return hashlib.sha256(Path(path).read_bytes() if path else module_name.encode()).hexdigest()


# -- The task of files where `data.task` is not set --------------------------------------------------------------------

FORMS = {"verl": "reward_model.ground_truth", "trl": "prompt, and no question"}  # task -> what its rows are known by


def recognised_task(files: Sequence[Path]) -> str | None:
    """Choose the task for the first row of the files; None: the default, or there is no row (which other checks report)."""
    for file in files:
        try:
            row = next(open_rows(file).rows(0, 1))
        except (ConfigError, StopIteration):
            continue
        return form_of_row(row) if isinstance(row, dict) else None
    return None


def form_of_row(row: Mapping[str, Any]) -> str | None:
    """Recognise a task of FORMS, or None."""
    rule = row.get("reward_model")
    if "prompt" in row and isinstance(rule, Mapping) and "ground_truth" in rule:
        return "verl"
    return "trl" if "prompt" in row and "question" not in row else None
