"""Task: one benchmark, defined once. Training, validation and `tools/evaluate.py` read the same object.

A task says how a row of its file becomes a question and a reference answer, how the question becomes a prompt (a chat or
plain text), which reward scores a completion, and under which label and version the numbers are reported. The built-in
tasks are the YAML files in `tasks/`. A task in Python needs a name, `read_row` and a reward:

    TASK = Task("quiz", lambda row: (row["question"], row["answer"]), reward="math")  # data.task: my.module:TASK
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator
from pydantic.dataclasses import dataclass as validated_dataclass

from grpo_megatron.config import MultiTurnConfig, Section
from grpo_megatron.data.rows import Messages, Question

PLACEHOLDER = re.compile(r"\{(\w+)\}")  # of a template; other braces are literal

ReadRow = Callable[[dict[str, Any]], tuple[Question, str]]


class TextFormat(Section):
    """The prompt without a chat template. Each worked example is `problem` + `example`; then follows `problem`.

    `stop`: texts that end a completion. The scripted evaluation cuts before them. In training, `rollout.stop` has them.
    """

    problem: str = "{question}"
    example: str = "{solution}\n\n"
    stop: list[Annotated[str, Field(min_length=1)]] = Field([])


class GivenExample(Section):
    """A worked example in a task file."""

    question: str = Field(min_length=1)
    solution: str = Field(min_length=1)


class Fewshot(Section):
    """Where the scripted evaluation finds worked examples, and how it draws them.

    `examples` are in the task itself: the first ones are used, in their order. Otherwise they are drawn from `files`.
    `fixed`: one draw for all problems. `per-problem`: one draw per problem, from one generator, in the order of the file
    (`random.Random(seed).sample`, as lm-evaluation-harness draws).
    """

    files: list[str] = Field([])
    solution: str = "solution"  # the field that holds a worked solution
    examples: list[GivenExample] = Field([])
    remove: str | None = None  # a regular expression, deleted from solutions
    rule: Literal["fixed", "per-problem"] = "fixed"
    default: int = Field(0, ge=0)
    seed: int | None = None  # null: --fewshot-seed

    @field_validator("remove")
    @classmethod
    def _is_an_expression(cls, remove: str | None) -> str | None:
        try:
            re.compile(remove or "")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"not a regular expression ({error})") from None
        return remove


class Sampling(Section):
    """For the scripted evaluation's samples besides the greedy one."""

    temperature: float = Field(1.0, gt=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)


@dataclass(frozen=True)
class Example:
    """A worked example of a few-shot prompt."""

    question: str
    solution: str


@validated_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Task:
    """`read_row(row)` returns (question, reference answer) and raises ValueError when the row is wrong.

    Only `name` and `read_row` are required. Raises ValueError when a field has a wrong type or value.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]  # the label in uids, metric names and result files
    read_row: ReadRow
    reward: str | None = None  # None: reward.function must be set
    system_prompt: str | None = None  # data.system_prompt and --system-prompt override it
    user_prompt: str | None = "{question}"  # template of the user's turn; None: plain text only
    text: TextFormat = TextFormat()
    title: str = ""
    version: Annotated[int, Field(ge=1)] = 1  # raised when a change of the task changes its scores
    graders: dict[str, str] = field(
        default_factory=dict
    )  # score -> reward, headline first; empty: accuracy by `reward`
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
        """(question, "") of a row that needs no reference answer. Raises ValueError when the row is wrong."""
        return (self.read_question(row) if self.read_question else self.read_row(row)[0]), ""

    def labels(self, row: Mapping[str, Any]) -> tuple[str | None, str | None]:
        """(subject, level) of a row; None where it has none."""
        level = _first_value(self.level, row)
        if level is not None and level.isdigit():
            level = f"Level {level}"
        return _first_value(self.subject, row), level

    def messages(
        self, question: Question, examples: Sequence[Example] = (), system_prompt: str | None = None
    ) -> Messages:
        """The chat: system turn, worked examples as earlier turns, then the question.

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
        """The prompt as text. Raises ValueError when the question is a list of chat messages."""
        if not isinstance(question, str):
            raise ValueError("the question is a list of chat messages, and the prompt is to be plain text")
        parts = []
        for example in examples:
            parts.append(fill_template(self.text.problem, {"question": example.question}))
            parts.append(fill_template(self.text.example, {"solution": example.solution}))
        return "".join(parts) + fill_template(self.text.problem, {"question": question})


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """The template with its {fields} replaced, once: braces inside the values are kept."""
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), template)


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _first_value(fields: Sequence[str], row: Mapping[str, Any]) -> str | None:
    return next((str(row[name]) for name in fields if row.get(name) not in (None, "")), None)
