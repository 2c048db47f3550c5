"""A reward function: the registry, the check that a name can be used, and the check of what it returned.

A reward function gets what it names, `f(completion: str, answer: str, difficulty: int) -> float | dict`, and the keys
of `reward.kwargs`. It may be `async`. A dict has "score", the reward, and further numbers that become metrics; other
entries are kept as text. Larger is better; the absolute value is at most MAX_REWARD, so that sums of squares stay far
from overflow. A batched reward (`batch=True`) gets and returns lists: the samples that are ready, so a sample's reward
must not depend on the others unless it is declared with `compares=True`. docs/rewards.md has examples.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from grpo_megatron.processes.process import MAX_REWARD, by_metric_name, finite_number
from grpo_megatron.registry import FactRegistry, Registry, did_you_mean


class RewardItem(NamedTuple):
    """One sample to grade. `name`: of the reward function. A worker gets only the columns that the function reads."""

    name: str
    completion: str  # with the `<think>` that the prompt has opened, if it has
    answer: str  # the reference answer, as the task reads it from the row
    prompt: str = ""  # as the model reads it
    messages: Sequence[Mapping[str, Any]] | None = None  # the chat that was rendered; None: a plain text prompt
    columns: Mapping[str, Any] = {}  # the row of the data file
    data_source: str = ""
    completion_ids: Sequence[int] = ()  # tokens of the response
    step: int = 0  # the training step; validation: the step that follows; 0 where nothing is trained
    is_chat: bool = False  # TRL calls such a row conversational


ItemFields = dict[str, Any]  # an item as a worker gets it: field -> value

PROMPT_END = 64  # characters of a prompt that are searched
# an open <think>, or an empty thought: Qwen3's template with enable_thinking=false
_OPENED = re.compile(r"<think>\s*(?:</think>\s*)?\Z")


def opened_thought(prompt: str) -> str:
    """Returns the end of the prompt from the `<think>` on that opens the response; "" where it opens none.

    `completion` begins with it, so that a reward reads the whole turn.
    """
    match = _OPENED.search(prompt, max(0, len(prompt) - PROMPT_END))
    return match[0] if match else ""


# -- how a reward function is called: it gets what it names ------------------------------------------------------------
# form       recognised by            called as
# ours       (anything else)          f(completion=..., answer=..., COLUMN=..., step=...), each only if it is named
# position   neither of ours' names   f(completion, answer, ...): the first two parameters, by any name
# verl       solution_str             f(data_source=, solution_str=, ground_truth=, extra_info=)
# verl list  solution_strs            f(data_sources=, solution_strs=, ground_truths=, extra_infos=), lists
# TRL        completions              f(prompts=, completions=, completion_ids=, COLUMN=, trainer_state=), lists
#
# `reward.kwargs` come first, then the names of the form; a form's name wins over a column's, except in TRL's form. A name
# that nothing gives keeps its default. `**kwargs` gets all other columns; with verl's form nothing, and with TRL's all that
# TRL's trainer passes. verl: verl/workers/reward_manager/naive.py, batch.py. TRL: GRPOTrainer._calculate_rewards.

Form = Literal["ours", "position", "verl", "verl list", "TRL"]

OURS = (
    *("completion", "answer", "prompt", "messages", "extra_info", "data_source", "completion_ids", "step"),
    "prompt_text",  # the same as `prompt`, for a function whose own argument has that name
)
TRL_PASSES = ("prompts", "completion_ids", "trainer_state", "log_extra", "log_metric")  # to **kwargs, too
FORM_NAMES: dict[Form, tuple[str, ...]] = {
    "ours": OURS,
    "position": OURS,
    "verl": ("data_source", "solution_str", "ground_truth", "extra_info"),
    "verl list": ("data_sources", "solution_strs", "ground_truths", "extra_infos"),
    "TRL": (*TRL_PASSES, "completions", "completions_ids"),
}
PIXELS = "image_pixels"  # a column that only who names it gets: base64 of 8-bit RGB [height, width, 3] of each image
OF_TRL_ROW = ("prompt", "completion", "completion_ids")  # columns that TRL's trainer does not pass
COLUMNS_OF = {  # name -> the column that it is made of
    "extra_info": "extra_info",
    "extra_infos": "extra_info",
    "ground_truth": "reward_model",
    "ground_truths": "reward_model",
    "prompts": "prompt",
}
ADAPTED = {
    "verl": "called as verl's compute_score(data_source, solution_str, ground_truth, extra_info)",
    "verl list": "called as verl's batched compute_score(data_sources, solution_strs, ground_truths, extra_infos)",
    "TRL": "called as TRL's reward(prompts, completions, **columns), with lists",
}


@dataclass(frozen=True)
class RewardSignature:
    """The parameters of a reward function. `names`: given by name, or by position in form `position`."""

    form: Form
    names: tuple[str, ...]
    required: frozenset[str]  # of `names`, those without a default
    takes_others: bool  # has **kwargs
    takes_lists: bool  # one call for several samples

    @property
    def adaptation(self) -> str:
        """Says how another trainer's function is called; "" for one of ours."""
        return ADAPTED.get(self.form, "")

    def columns(self, kwargs: Iterable[str]) -> set[str] | None:
        """Returns the columns that must be sent to the function's worker; None: all."""
        if self.takes_others and not self.form.startswith("verl"):
            return None
        given = FORM_NAMES[self.form]
        return {COLUMNS_OF.get(n, n) for n in self.names if n not in kwargs and (n in COLUMNS_OF or n not in given)}

    def problem(self, kwargs: Iterable[str], columns: Iterable[str] | None = None) -> str | None:
        """Says why `reward.kwargs` and rows of these `columns` do not suffice. `columns` None: not known yet."""
        given = [*FORM_NAMES[self.form], *(OURS if self.form in ("TRL", "verl", "verl list") else ())]
        kwargs = list(kwargs)
        named = self.names[2:] if self.form == "position" else self.names
        if taken := [name for name in kwargs if name in ("completion", "completions", "solution_str", "solution_strs")]:
            return f"the kwargs hold {taken[0]!r}, which is the response; take it out"
        if not self.takes_others and (unknown := [name for name in kwargs if name not in named]):
            hint = did_you_mean(unknown[0], named) or "; take it out"
            return f"it has no parameter {unknown[0]!r}, which the kwargs hold{hint}"
        if columns is None:
            return None
        columns = sorted(set(columns) - set(given))
        available = [*given, *columns, *kwargs]
        if missing := [name for name in self.names if name in self.required and name not in available]:
            of_row = f", the row's columns {', '.join(columns)}" if columns else ""
            return (
                f"nothing gives its parameter {missing[0]!r}, which has no default; there are {', '.join(given)}{of_row}"
                f"{', and the kwargs ' + ', '.join(kwargs) if kwargs else ''}{did_you_mean(missing[0], available)}"
            )
        return None


def read_signature(function: Callable[..., Any], *, batch: bool = False) -> RewardSignature:
    """Reads a reward function's signature; `batch`: one declared so. Raises ValueError: it reads no completion."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature: only the first call can tell
        return RewardSignature("position", ("completion", "answer"), frozenset(), False, batch)
    names = _names(parameters)
    others = any(p.kind == p.VAR_KEYWORD for p in parameters)
    required = frozenset(p.name for p in parameters if p.name in names and p.default is p.empty)
    recognised: dict[str, Form] = {"solution_str": "verl", "solution_strs": "verl list", "completions": "TRL"}
    for name, form in recognised.items():
        if name in names:
            return RewardSignature(form, names, required, others, batch or form != "verl")
    only_by_position = any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in parameters)
    if not only_by_position and {"completion", "completion_ids"} & set(names):
        return RewardSignature("ours", names, required, others, batch)
    named = _names(_after_two(parameters))
    return RewardSignature("position", ("completion", "answer", *named), required & {*named}, others, batch)


@functools.cache
def reads_answer(name: str) -> bool:
    """Says whether a reward may read the reference answer; only a user's function that names what it reads need not."""
    if ":" not in name:
        return True
    signature = read_signature(rewards.get(name))
    return signature.form != "ours" or signature.takes_others or "answer" in signature.names


def _names(parameters: Sequence[inspect.Parameter]) -> tuple[str, ...]:
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def _after_two(parameters: Sequence[inspect.Parameter]) -> Sequence[inspect.Parameter]:
    """Returns the parameters after the two that get completion and answer by position. Raises ValueError."""
    for number, p in enumerate(parameters[:2]):
        if p.kind == p.VAR_POSITIONAL:
            return parameters[number:]
        is_another = p.name in OURS and p.name != ("completion", "answer")[number]
        if is_another or p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            break
    else:
        if len(parameters) > 1:
            return parameters[2:]
    listed = ", ".join(map(str, parameters)) or "none"
    remedy = "name one `completion` (and `answer`, or what else it reads)"
    raise ValueError(f"it reads no completion (its parameters: {listed}); {remedy}")


RewardFunction = Callable[..., Any]  # returns float or dict, or an awaitable of one; `parse_reward` checks that


@dataclass(frozen=True)
class RewardFacts:
    """Facts of a registered reward that validation reads."""

    gives_steps: bool = False  # returns "steps": the rewards of single steps
    takes_columns: bool = True  # its **kwargs get the row's columns
    batch: bool = False  # takes lists, and returns a list
    batch_size: int = 16  # the most samples of a batch; and of an async function, those in work at a time
    compares: bool = False  # of a batched one: its one batch is all that an engine has generated, by prompt and sample
    reads_item: bool = False  # has a keyword argument `item`: all that is known of the sample
    preload: Callable[[], None] | None = None  # slow imports, run before the first sample is timed
    # of `reward.kwargs`, and `row`, empty or the first one; raises ValueError where the machine lacks something
    check: Callable[..., None] | None = None
    least_timeout_s: float = 0.0  # per sample, where reward.timeout_s is less

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise TypeError(f"batch_size={self.batch_size} must be at least 1")
        if self.compares and not self.batch:
            raise TypeError("compares=True is for a batched reward; add batch=True")


rewards: FactRegistry[RewardFunction, RewardFacts] = FactRegistry(
    "reward", RewardFacts(), [f"grpo_megatron.environments.{name}" for name in ("programs", "call_matching")]
)

MAX_METRICS = 64  # a metric is one curve per name: a reward with more metrics has names that depend on the data
MAX_STEPS = 10_000
MAX_ENTRY = 500  # characters of an entry that is not a number

Steps = tuple[tuple[int, float], ...]
Kwargs = Mapping[str, Any]


@dataclass(frozen=True)
class RewardResult:
    """The reward of one completion. `reward` is NaN unless `status` is "ok"; `message` then says why.

    Status "none": the function does not apply to the completion (TRL's None). That is no failure.
    """

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)  # what the function reports besides "score"
    status: Literal["ok", "error", "timeout", "none"] = "ok"
    message: str = ""
    steps: Steps = ()  # (end of the step in the completion, its reward), increasing
    texts: dict[str, str] = field(default_factory=dict)  # what the function reports that is not a finite number
    seconds: float = field(default=0.0, compare=False)  # that the function took


@dataclass(frozen=True)
class Extractor:
    """The readers of a reward. Training, evaluation and `evaluate grade` share them."""

    extract: Callable[[str], str | None]  # completion -> prediction; linear time in any text
    read_answer: Callable[[str], object]  # raises ValueError for a reference answer that nothing can be compared with
    vote_key: Callable[[str], str] = str.strip  # predictions with one key are one vote in maj@k


extractors: Registry[Extractor] = Registry("extractor")  # by the name of the reward


def check_reward(name: str, kwargs: Kwargs | None = None, columns: Iterable[str] | None = None) -> RewardFunction:
    """Returns the function called `name`, after checks that a worker can import it and call it with `kwargs`.

    `columns`: those of the rows, or the first row; None: not known yet. A reward of this package must have its arguments from
    `kwargs`. Starts no process, but `programs` tries out the sandbox.
    Raises ValueError: unknown name, module that does not import, not callable, unsuitable kwargs.
    """
    columns = () if columns is None and ":" not in name else columns
    if name.startswith("__main__:"):
        raise ValueError(f"reward {name!r}: a worker process cannot import __main__; move the function to a module")
    try:
        function = rewards.get(name)
    except ValueError:
        raise
    except Exception as error:  # any error of the user's module
        raise ValueError(f"reward {name!r}: importing it raised {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ValueError(f"reward {name!r} is {type(function).__name__}, not a function")
    try:
        problem = read_signature(function).problem(kwargs or {}, columns)
        if problem is None and (check := rewards.facts_of(function).check):
            check(**(kwargs or {}), row=columns if isinstance(columns, Mapping) else {})
    except ValueError as error:
        problem = str(error)
    if problem is not None:
        raise ValueError(f"reward {name!r} cannot be called: {problem}")
    return function


def parse_reward(returned: object, length: int | None = None) -> RewardResult:
    """Checks what a function returned for a completion of `length` characters.

    Raises ValueError unless the score is a number up to MAX_REWARD, and "steps" are (end, value) pairs with increasing
    ends between 1 and `length`: `end` counts the characters of the completion up to the end of the step.
    """
    if not isinstance(returned, Mapping):
        return RewardResult(finite_number("the reward", returned, MAX_REWARD))
    if "score" not in returned:
        raise ValueError(f"the reward returned a dict without 'score' (keys: {', '.join(map(str, returned))})"[:500])
    if len(returned) > MAX_METRICS + 2:
        raise ValueError(f"the reward returned {len(returned)} entries; at most {MAX_METRICS} besides 'score'")
    entries = by_metric_name(returned)
    steps = _parse_steps(entries.pop("steps", ()), length)
    score = finite_number("the reward's entry 'score'", entries.pop("score"), MAX_REWARD)
    numbers: dict[str, float] = {}
    texts: dict[str, str] = {}
    for key, value in entries.items():
        try:
            numbers[key] = finite_number(key, value)
        except Exception:  # noqa: BLE001 - whatever an object of the user raises when it is read as a number
            texts[key] = _text(value)
    return RewardResult(score, numbers, steps=steps, texts=texts)


def _text(value: object) -> str:
    try:
        return str(value)[:MAX_ENTRY].encode(errors="backslashreplace").decode()
    except Exception:  # noqa: BLE001 - an object whose __str__ raises
        return f"({type(value).__name__})"


def _parse_steps(returned: object, length: int | None) -> Steps:
    if not isinstance(returned, Iterable) or isinstance(returned, str | bytes | Mapping):
        raise ValueError(f"the reward's entry 'steps' is {type(returned).__name__}, not a list of (end, value)")
    steps: list[tuple[int, float]] = []
    for step in returned:
        if not isinstance(step, Sequence) or len(step) != 2:
            raise ValueError(f"the reward's step {len(steps)} is {type(step).__name__}, not (end, value)")
        end, value = finite_number("a step's end", step[0]), finite_number("a step's value", step[1], MAX_REWARD)
        last = steps[-1][0] if steps else 0
        if end != int(end) or end <= last or (length is not None and end > length):
            bound = "" if length is None else f" and at most the completion's {length}"
            raise ValueError(f"the reward's step {len(steps)} ends at {end:g}; ends are integers above {last}{bound}")
        steps.append((int(end), value))
        if len(steps) > MAX_STEPS:
            raise ValueError(f"the reward returned more than {MAX_STEPS} steps")
    return tuple(steps)
