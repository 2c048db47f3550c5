"""What a reward is: its registry, the check that a name can be used, and the reading of what it returned.

A reward is `fn(completion: str, answer: str, **kwargs) -> float | dict`; `kwargs` are `reward.kwargs`. A dict holds
"score" and further numbers for metrics ({"score": 1.0, "acc": 1.0, "format": 0.0}). No units; larger is better.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_megatron.registry import Registry

Reward = Callable[..., Any]  # float or dict; `read_result` holds it to that
rewards: Registry[Reward] = Registry("reward")

MAX_EXTRA_SCORES = 64  # metrics are one curve per name: a reward that returns more is keyed by its data


@dataclass(frozen=True)
class RewardResult:
    """One completion's verdict. `score` is NaN unless `status` is "ok"; `message` says why."""

    score: float
    scores: dict[str, float] = field(default_factory=dict)  # what the reward also reported, without "score"
    status: Literal["ok", "error", "timeout"] = "ok"
    message: str = ""


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


def read_result(returned: object) -> tuple[float, dict[str, float]]:
    """(score, other scores) of what a reward returned. Raises ValueError unless every entry is a finite number."""
    if not isinstance(returned, Mapping):
        return _number("the reward", returned), {}
    if "score" not in returned:
        raise ValueError(f"the reward returned a dict without 'score' (keys: {', '.join(map(str, returned))})"[:500])
    if len(returned) > MAX_EXTRA_SCORES + 1:
        raise ValueError(f"the reward returned {len(returned)} entries; at most {MAX_EXTRA_SCORES} besides 'score'")
    numbers = {str(key): _number(f"the reward's entry {str(key)!r}", value) for key, value in returned.items()}
    return numbers.pop("score"), numbers


def _number(what: str, value: object) -> float:
    # str has no __float__; numpy and torch scalars do
    if not (hasattr(type(value), "__float__") or hasattr(type(value), "__index__")):
        raise ValueError(f"{what} is {type(value).__name__}, not a number")
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}, not a finite number")
    return number
