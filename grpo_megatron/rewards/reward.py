"""What a reward function is: the registry, the check that a name can be used, and the check of what it returned.

A reward function gets what it names (signature.py): `f(completion: str, answer: str, difficulty: int) -> float | dict`, and
the keys of `reward.kwargs`. It may be `async`. A dict holds "score", which is the reward, and further numbers that become
metrics ({"score": 1.0, "acc": 1.0, "format": 0.0}). Entries that are not numbers are kept as text, beside the logged samples.
A reward has no unit; larger is better. Its absolute value is at most MAX_REWARD: sums of squares stay far from overflow, in
float32 too.

Where the prompt's template has opened the thought, `completion` begins with that `<think>` (format.py), so that a reward
reads the whole turn.

A batched reward, declared with `batch=True`, gets lists and returns a list. Its batches are made of the samples that are
ready, so a sample's reward must not depend on the others of its batch; `compares=True` is for one whose rewards do.

A step reward (a process reward model, or `rewards/steps.py`) also returns "steps": [(end, value), ...]. `end` is the
number of characters of the completion up to the end of the step. Ends increase; they are between 1 and its length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_megatron.registry import FactRegistry, Registry
from grpo_megatron.rewards.signature import read_signature

RewardFunction = Callable[..., Any]  # returns float or dict, or an awaitable of one; `parse_reward` checks that


@dataclass(frozen=True)
class RewardFacts:
    """What validation must know about a registered reward."""

    gives_steps: bool = False  # returns "steps": the rewards of single steps
    reads_prompt: bool = False  # its **kwargs get `prompt_text`, too; a function that names it gets it anyway
    takes_columns: bool = True  # its **kwargs get the row's columns
    batch: bool = False  # takes lists, and returns a list
    batch_size: int = 16  # the most samples of a batch; and of an async function, those in work at a time
    compares: bool = False  # of a batched one: its one batch is all that an engine has drawn, by prompt and sample
    reads_item: bool = False  # has a keyword argument `item`: all that is known of the sample

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise TypeError(f"batch_size={self.batch_size} must be at least 1")
        if self.compares and not self.batch:
            raise TypeError("compares=True is for a batched reward; add batch=True")


rewards: FactRegistry[RewardFunction, RewardFacts] = FactRegistry("reward", RewardFacts())

preloads: dict[str, Callable[[], None]] = {}  # name of a reward -> slow imports, run before its first item is timed

MAX_METRICS = 64  # a metric is one curve per name: a reward with more metrics has names that depend on the data
MAX_STEPS = 10_000
MAX_REWARD = 1e9
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
    """How a reward reads texts. Training, evaluation and `evaluate grade` share it."""

    extract: Callable[[str], str | None]  # completion -> prediction; linear time in any text
    read_answer: Callable[[str], object]  # raises ValueError for a reference answer that nothing can be compared with
    vote_key: Callable[[str], str] = str.strip  # predictions with one key are one vote in maj@k


extractors: Registry[Extractor] = Registry("extractor")  # by the name of the reward


def check_reward(name: str, kwargs: Kwargs | None = None, columns: Iterable[str] | None = None) -> RewardFunction:
    """The function called `name`, after checks that a worker can import it and call it with `kwargs`.

    `columns`: those of the rows; None: not known yet. A reward of this package must have its arguments from `kwargs`. Starts no
    process. Raises ValueError: unknown name, module that does not import, not callable, unsuitable kwargs, a parameter that
    nothing gives.
    """
    columns = () if columns is None and ":" not in name else columns
    if name.startswith("__main__:"):
        raise ValueError(f"reward {name!r}: a worker process cannot import __main__; move the function to a module")
    try:
        function = rewards.get(name)
    except ValueError:
        raise
    except Exception as error:  # whatever the user's module raises while it is imported
        raise ValueError(f"reward {name!r}: importing it raised {type(error).__name__}: {error}") from error
    if not callable(function):
        raise ValueError(f"reward {name!r} is {type(function).__name__}, not a function")
    try:
        problem = read_signature(function).problem(kwargs or {}, columns)
    except ValueError as error:
        problem = str(error)
    if problem is not None:
        raise ValueError(f"reward {name!r} cannot be called: {problem}")
    return function


def check_json(kwargs: object) -> None:
    """Raises ValueError unless `kwargs` can be written as JSON, which takes them to the workers."""
    try:
        json.dumps(kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"reward.kwargs cannot be passed to the workers as JSON: {error}") from None


def parse_reward(returned: object, length: int | None = None) -> RewardResult:
    """What a function returned for a completion of `length` characters.

    Raises ValueError unless the score is a number up to MAX_REWARD, and "steps" are (end, value) pairs with increasing ends.
    """
    if not isinstance(returned, Mapping):
        return RewardResult(_bounded_number("the reward", returned))
    if "score" not in returned:
        raise ValueError(f"the reward returned a dict without 'score' (keys: {', '.join(map(str, returned))})"[:500])
    if len(returned) > MAX_METRICS + 2:
        raise ValueError(f"the reward returned {len(returned)} entries; at most {MAX_METRICS} besides 'score'")
    entries = {str(key): value for key, value in returned.items()}
    steps = _parse_steps(entries.pop("steps", ()), length)
    score = _bounded_number("the reward's entry 'score'", entries.pop("score"))
    numbers: dict[str, float] = {}
    texts: dict[str, str] = {}
    for key, value in entries.items():
        try:
            numbers[key] = _finite_number(key, value)
        except Exception:  # noqa: BLE001 - whatever an object of the user raises when it is read as a number
            texts[key] = _text(value)
    return RewardResult(score, numbers, steps=steps, texts=texts)


def _text(value: object) -> str:
    try:
        return str(value)[:MAX_ENTRY].encode(errors="backslashreplace").decode()
    except Exception:  # noqa: BLE001 - an object whose __str__ raises
        return f"({type(value).__name__})"


def _bounded_number(what: str, value: object) -> float:
    number = _finite_number(what, value)
    if abs(number) > MAX_REWARD:
        raise ValueError(f"{what} is {number:g}; it must be between -{MAX_REWARD:g} and {MAX_REWARD:g}: scale it")
    return number


def _parse_steps(returned: object, length: int | None) -> Steps:
    if not isinstance(returned, Iterable) or isinstance(returned, str | bytes | Mapping):
        raise ValueError(f"the reward's entry 'steps' is {type(returned).__name__}, not a list of (end, value)")
    steps: list[tuple[int, float]] = []
    for step in returned:
        if not isinstance(step, Sequence) or len(step) != 2:
            raise ValueError(f"the reward's step {len(steps)} is {type(step).__name__}, not (end, value)")
        end, value = _finite_number("a step's end", step[0]), _bounded_number("a step's value", step[1])
        last = steps[-1][0] if steps else 0
        if end != int(end) or end <= last or (length is not None and end > length):
            bound = "" if length is None else f" and at most the completion's {length}"
            raise ValueError(f"the reward's step {len(steps)} ends at {end:g}; ends are integers above {last}{bound}")
        steps.append((int(end), value))
        if len(steps) > MAX_STEPS:
            raise ValueError(f"the reward returned more than {MAX_STEPS} steps")
    return tuple(steps)


def _finite_number(what: str, value: object) -> float:
    # str has no __float__; scalars of numpy and torch have one
    if not (hasattr(type(value), "__float__") or hasattr(type(value), "__index__")):
        raise ValueError(f"{what} is {type(value).__name__}, not a number")
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}, not a finite number")
    return number
