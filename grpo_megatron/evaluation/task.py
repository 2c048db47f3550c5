"""Task: what a benchmark asks, how examples are chosen, when an answer stops and who grades it. Data, not code.

One YAML file a task in `tasks/`, or the user's own. Every line of it decides numbers, so a file carries a version, and
its sha256 is printed with every result and compared before two results are.
"""

from __future__ import annotations

import difflib
import hashlib
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from grpo_megatron.config import ConfigError, Section

FOLDER = Path(__file__).parent / "tasks"
AnswerRule = Literal["hashes", "boxed", "text", "number", "list"]


class AnswerField(Section):
    """Where the gold answer stands: `hashes` after the last ####, `boxed` in the last \\boxed, `text` as it is,
    `number` of JSON, `list` of strings in $...$, joined by commas."""

    field: str
    rule: AnswerRule = "text"


class ChatFormat(Section):
    """For models with a chat template. Few-shot examples are earlier turns."""

    user: str = "{question}"
    system: str | None = None


class TextFormat(Section):
    """For base models. Each example is `problem` + `example`; then comes `problem`. `stop`: text that ends an answer,
    which is cut before it; what is one token of the model's stops the engine, the rest is cut afterwards."""

    problem: str
    example: str
    stop: list[str] = Field([])


class Fewshot(Section):
    """`fixed`: one draw of examples for all problems. `per-problem`: a draw for each, from one generator, in the order
    of the file (`random.Random(seed).sample`, as lm-evaluation-harness draws)."""

    files: list[str]
    solution: str  # the field that holds a worked solution
    remove: str | None = None  # a regular expression, deleted from solutions
    rule: Literal["fixed", "per-problem"] = "fixed"
    default: int = Field(0, ge=0)
    seed: int | None = None  # null: --fewshot-seed


class Sampling(Section):
    """For the samples beside the greedy one."""

    temperature: float = Field(1.0, gt=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)


class TaskFile(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    version: int = Field(ge=1)
    title: str
    files: list[str]  # relative to --data; the first that exists
    question: list[str]  # templates over the row's fields; the first whose fields are all there
    answer: list[AnswerField]  # the first whose field is there
    subject: list[str] = Field([])
    level: list[str] = Field([])
    graders: dict[str, str] = Field(min_length=1)  # name of the score -> grader; the first is the headline
    reward: str | None = None  # for validation in training; null: not possible there
    chat: ChatFormat | None = None
    text: TextFormat
    fewshot: Fewshot | None = None
    sampling: Sampling = Sampling()
    max_tokens: int = Field(ge=1)

    @property
    def headline(self) -> str:
        return next(iter(self.graders))


class Task:
    """A task file as read: `spec`, and the `sha256` of its bytes."""

    def __init__(self, path: Path) -> None:
        try:
            content = path.read_bytes()
            raw: Any = yaml.safe_load(content.decode("utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read task file {str(path)!r}: {error.strerror}") from error
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"task file {str(path)!r} is not YAML: {error}") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"task file {str(path)!r} must be a mapping, not {type(raw).__name__}")
        try:
            self.spec = TaskFile.model_validate(raw)
        except ValidationError as error:
            lines = [f"  {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise ConfigError(f"task file {str(path)!r} is wrong:\n" + "\n".join(lines)) from None
        self.sha256 = hashlib.sha256(content).hexdigest()

    @property
    def name(self) -> str:
        return self.spec.name


def task_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_tasks(names: list[str]) -> list[Task]:
    """Tasks by name, or by the path of a YAML file. Raises one ConfigError for all that are wrong."""
    found: list[Task] = []
    problems: list[str] = []
    for name in names:
        try:
            found.append(_read(name))
        except ConfigError as error:
            problems.append(str(error))
    seen = [task.name for task in found]
    problems += [
        f"task {name!r} is given twice; name it once" for name in sorted({n for n in seen if seen.count(n) > 1})
    ]
    if not names:
        problems.append(f"no task is named; choose from {', '.join(task_names())}")
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def _read(name: str) -> Task:
    if name.endswith((".yaml", ".yml")):
        return Task(Path(name))
    if name not in task_names():
        close = difflib.get_close_matches(name, task_names(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"unknown task {name!r}{hint} (known: {', '.join(task_names())}; or the path of a .yaml file)"
        )
    return Task(FOLDER / f"{name}.yaml")
