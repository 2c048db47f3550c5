"""A reward of several components: sum of weight x value over the components whose gate is open (`reward.components`).

A component is a dict {"name", "function", "weight", "kwargs", "gate"}. A gate {"component", "min", "max"} is open where the
value of the named component is within the bounds. A component behind a closed gate is not called and adds 0. It closes
the gates that depend on it. So does a component that does not apply to a sample (TRL's None), and it adds 0. Where none
applies, the sum does not either.

The result has one metric per component, under its name. What the function itself reports is under "name/key". The first
"acc" is also the "acc" of the sum: validation then shows accuracy. "name/open": 1 where the gate of `name` was open.
A component that fails, or whose value is not finite, fails the sample. Components that wait, such as judges, wait together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_megatron.rewards.calling import BoundReward
from grpo_megatron.rewards.reward import ItemFields, Kwargs, RewardResult, preloads, rewards

COMPOSITE = "composite"

Component = Mapping[str, Any]
Components = Sequence[Component]
Values = dict[str, float | None]  # name of a component -> its value; None: its gate was closed


def functions_of(name: str, kwargs: Kwargs) -> list[str]:
    """The names of the functions that a reward calls: those of its components, or its own."""
    return [component["function"] for component in kwargs["components"]] if name == COMPOSITE else [name]


@rewards.register(COMPOSITE, reads_item=True, batch_size=1)
async def composite_reward(
    completion: str, answer: str, *, components: Components, item: ItemFields
) -> dict[str, Any] | None:
    """The weighted sum and the values of all components. `components` has no circle of gates. Raises what a component raises.

    None: no component applies to the sample. A batched component gets lists of one.
    """
    import asyncio

    values: Values = {}
    results: dict[str, RewardResult] = {}
    applies = True
    waiting = list(components)
    while waiting:
        ready = [part for part in waiting if not part["gate"] or part["gate"]["component"] in values]
        opened = [part for part in ready if _is_open(part["gate"], values)]
        calls = [_value(part, item) for part in opened]
        returned = await asyncio.gather(*calls, return_exceptions=True)  # no call is left behind when another one fails
        values.update({part["name"]: None for part in ready})
        for part, result in zip(opened, returned, strict=True):
            if isinstance(result, BaseException):
                raise result
            applies = applies and result.status != "none"
            if result.status == "ok":
                results[part["name"]] = result
                values[part["name"]] = result.reward
        waiting = [part for part in waiting if part["name"] not in values]
    if not applies and not results:
        return None
    score = math.fsum(part["weight"] * (values[part["name"]] or 0.0) for part in components)
    return {**_entries(components, results), "score": score}


def _import_asyncio() -> None:
    import asyncio  # noqa: F401


preloads[COMPOSITE] = _import_asyncio  # takes as long as the start of a worker


def _is_open(gate: Mapping[str, Any] | None, values: Values) -> bool:
    if not gate:
        return True
    value = values[gate["component"]]
    low = -math.inf if gate["min"] is None else gate["min"]
    high = math.inf if gate["max"] is None else gate["max"]
    return value is not None and low <= value <= high


async def _value(component: Component, item: ItemFields) -> RewardResult:
    try:
        return await BoundReward(component["function"], component["kwargs"]).grade(item)
    except TimeoutError as error:
        raise TimeoutError(f"component {component['name']!r}: {error}") from error
    except Exception as error:
        raise RuntimeError(f"component {component['name']!r}: {type(error).__name__}: {error}") from error


def _entries(components: Components, results: Mapping[str, RewardResult]) -> dict[str, Any]:
    """The metrics and texts of all components, in their order."""
    entries: dict[str, Any] = {}
    for part in components:
        name, result = part["name"], results.get(part["name"])
        if result is not None:
            entries |= {f"{name}/{key}": value for key, value in {**result.texts, **result.metrics}.items()}
            entries[name] = result.reward
        if part["gate"]:
            entries[f"{name}/open"] = float(result is not None)
    reported = next((r.metrics["acc"] for r in results.values() if "acc" in r.metrics), None)
    return entries if reported is None else {**entries, "acc": reported}
