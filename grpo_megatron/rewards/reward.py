"""What a reward is: its registry, the check that a name can be used, and the reading of what it returned.

A reward is `fn(completion: str, answer: str, **kwargs) -> float | dict`; `kwargs` are `reward.kwargs`. A dict holds
"score" and further numbers for metrics ({"score": 1.0, "acc": 1.0, "format": 0.0}). No units; larger is better.

A step reward (a process reward model, or `rewards/steps.py`) also returns "steps": [(end, value), ...], where `end` is
the character of the completion behind the step's last one; ends increase, from at least 1 to at most its length.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_megatron.registry import FactRegistry, Registry

Reward = Callable[..., Any]  # float or dict; `read_result` holds it to that


@dataclass(frozen=True)
class RewardFacts:
    """What validation must know about a registered reward."""

    gives_steps: bool = False  # returns "steps": the rewards of single steps


rewards: FactRegistry[Reward, RewardFacts] = FactRegistry("reward", RewardFacts())

preloads: dict[str, Callable[[], None]] = {}  # reward name -> slow imports, run before its first item's clock starts

MAX_EXTRA_SCORES = 64  # metrics are one curve per name: a reward that returns more is keyed by its data
MAX_STEPS = 10_000

Steps = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RewardResult:
    """One completion's verdict. `score` is NaN unless `status` is "ok"; `message` says why."""

    score: float
    scores: dict[str, float] = field(default_factory=dict)  # what the reward also reported, without "score"
    status: Literal["ok", "error", "timeout"] = "ok"
    message: str = ""
    steps: Steps = ()  # (end of the step in the completion, its reward), increasing


@dataclass(frozen=True)
class Answers:
    """How a reward reads answers: the one extractor that training, evaluation and `grade` share."""

    extract: Callable[[str], str | None]  # completion -> answer; linear time in any text
    read_gold: Callable[[str], object]  # raises ValueError for a reference that nothing could be compared with
    vote_key: Callable[[str], str] = str.strip  # extracted answers of one key are one vote in maj@k


answers: Registry[Answers] = Registry("extractor")  # by the reward's name


def check_reward(name: str, kwargs: Mapping[str, Any] | None = None) -> Reward:
    """The function called `name`, once it is certain that a worker can import it and call it with `kwargs`.

    Starts no process. Raises ValueError: unknown name, module that does not import, not callable, unsuitable kwargs.
    """
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
        inspect.signature(function).bind("completion", "answer", **(kwargs or {}))
    except TypeError as error:
        given = ", ".join(kwargs or {}) or "none"
        raise ValueError(
            f"reward {name!r} cannot be called as fn(completion, answer, **reward.kwargs) with kwargs {given}: {error}"
        ) from None
    except ValueError:
        pass  # a builtin without a signature: the first call will tell
    return function


def read_result(returned: object, length: int | None = None) -> tuple[float, dict[str, float], Steps]:
    """(score, other scores, steps) of what a reward returned for a completion of `length` characters.

    Raises ValueError unless every entry is a finite number, and "steps" increasing (end, value) pairs.
    """
    if not isinstance(returned, Mapping):
        return _number("the reward", returned), {}, ()
    if "score" not in returned:
        raise ValueError(f"the reward returned a dict without 'score' (keys: {', '.join(map(str, returned))})"[:500])
    if len(returned) > MAX_EXTRA_SCORES + 2:
        raise ValueError(f"the reward returned {len(returned)} entries; at most {MAX_EXTRA_SCORES} besides 'score'")
    entries = {str(key): value for key, value in returned.items()}
    steps = _steps(entries.pop("steps", ()), length)
    numbers = {key: _number(f"the reward's entry {key!r}", value) for key, value in entries.items()}
    return numbers.pop("score"), numbers, steps


def _steps(returned: object, length: int | None) -> Steps:
    if not isinstance(returned, Iterable) or isinstance(returned, str | bytes | Mapping):
        raise ValueError(f"the reward's entry 'steps' is {type(returned).__name__}, not a list of (end, value)")
    steps: list[tuple[int, float]] = []
    for step in returned:
        if not isinstance(step, Sequence) or len(step) != 2:
            raise ValueError(f"the reward's step {len(steps)} is {type(step).__name__}, not (end, value)")
        end, value = _number("a step's end", step[0]), _number("a step's value", step[1])
        last = steps[-1][0] if steps else 0
        if end != int(end) or end <= last or (length is not None and end > length):
            bound = "" if length is None else f" and at most the completion's {length}"
            raise ValueError(f"the reward's step {len(steps)} ends at {end:g}; ends are integers above {last}{bound}")
        steps.append((int(end), value))
        if len(steps) > MAX_STEPS:
            raise ValueError(f"the reward returned more than {MAX_STEPS} steps")
    return tuple(steps)


def _number(what: str, value: object) -> float:
    # str has no __float__; numpy and torch scalars do
    if not (hasattr(type(value), "__float__") or hasattr(type(value), "__index__")):
        raise ValueError(f"{what} is {type(value).__name__}, not a number")
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}, not a finite number")
    return number
