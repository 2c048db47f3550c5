"""`reward.components`: the functions that they stand for, and what is wrong with them before a run starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from grpo_megatron.checks.problems import Problems
from grpo_megatron.checks.sources import sources_of
from grpo_megatron.config import Config, RewardComponent, RewardConfig
from grpo_megatron.data.tasks import get_task
from grpo_megatron.rewards import check_reward, rewards
from grpo_megatron.rewards.composite import COMPOSITE

ACCURACY = "accuracy"  # the name of a component that is the task's own reward
TAKEN = ("acc", "score", "steps", "ok", "timeout")  # names of other metrics, and entries of a result
MAX_COMPONENTS = 16


def reward_name(reward: RewardConfig) -> str | None:
    """The reward of the run's samples; None: the task's own."""
    return COMPOSITE if reward.components else reward.function


def resolved_components(config: Config) -> list[dict[str, Any]]:
    """The components as `rewards/composite.py` reads them. Raises ValueError for a task that cannot be used."""
    if not config.reward.components:
        return []
    own = _own_reward(config)
    return [{**part.model_dump(), "function": _function(part, own)} for part in config.reward.components]


def _own_reward(config: Config) -> str | None:
    """That of the tasks; sources.py refuses sources whose tasks have different ones."""
    return get_task(sources_of(config)[0].data.task).reward


def _function(part: RewardComponent, of_the_task: str | None) -> str:
    return part.function or (of_the_task or "" if part.name == ACCURACY else part.name)


def component_problems(config: Config) -> Problems:
    """Names, functions, weights and gates of the components. The task is known to be usable."""
    reward = config.reward
    if not reward.components:
        return
    if reward.function is not None:
        yield (
            f"reward.function={reward.function!r} beside reward.components: a run has one or the other; write it as a"
            f" component, {{name: NAME, function: {reward.function}}}, or leave the components out"
        )
    if reward.kwargs:
        yield "reward.kwargs has no effect on reward.components; set the kwargs of each component"
    if len(reward.components) > MAX_COMPONENTS:
        yield f"reward.components has {len(reward.components)} entries; at most {MAX_COMPONENTS} are accepted"
        return
    if not any(part.weight for part in reward.components):
        yield "reward.components: all weights are 0, and the reward would be 0 for every sample; set one"
    names = [part.name for part in reward.components]
    for number, part in enumerate(reward.components):
        key = f"reward.components[{number}] ({part.name})"
        if part.name in TAKEN:
            yield f"{key}: the name is taken by another metric; choose another one"
        if part.name in names[:number]:
            yield f"{key}: the name is given twice; choose another one"
        yield from (f"{key}: {problem}" for problem in _function_problems(part, config))
        yield from (f"{key}: {problem}" for problem in _gate_problems(part, names))
    yield from _circles({part.name: part.gate.component for part in reward.components if part.gate})


def _function_problems(part: RewardComponent, config: Config) -> Iterator[str]:
    name = _function(part, _own_reward(config))
    if not name:
        yield f"it is the task's own reward, and data.task={config.data.task!r} has none; set its function"
    elif name == COMPOSITE:
        yield "a sum of components cannot be a component; list its components here"
    else:
        try:
            check_reward(name, part.kwargs)
        except ValueError as error:
            yield str(error)
            return
        if rewards.facts(name).compares:
            yield f"the reward {name!r} compares samples, and a component gets them one by one; set reward.function to it"
        if rewards.facts(name).gives_steps:
            yield (
                f"the reward {name!r} gives rewards of single steps, which a sum has no place for; set reward.function to"
                " it, or choose a reward of the whole response"
            )
        yield from judge_problems(name, part.kwargs, config.reward)


def judge_problems(name: str, kwargs: Mapping[str, Any], reward: RewardConfig) -> Iterator[str]:
    """A judge must give up before its worker is killed: a killed worker loses its cache."""
    limit = kwargs.get("timeout_s", 8.0)
    if name == "judge" and isinstance(limit, int | float) and limit >= reward.timeout_s:
        yield (
            f"the judge's timeout_s={limit:g} is not below reward.timeout_s={reward.timeout_s:g}, after which its worker is"
            f" killed; set reward.timeout_s={limit * 1.25:g}"
        )


def _gate_problems(part: RewardComponent, names: list[str]) -> Iterator[str]:
    gate = part.gate
    if gate is None:
        return
    if gate.component not in names:
        yield f"gate.component={gate.component!r} is none of the components {', '.join(names)}"
    if gate.min is None and gate.max is None:
        yield "a gate needs a bound; set gate.min or gate.max"
    elif gate.min is not None and gate.max is not None and gate.min > gate.max:
        yield f"gate.min={gate.min:g} is above gate.max={gate.max:g}, so that it is never open; exchange them"


def _circles(gates: Mapping[str, str]) -> Iterator[str]:
    """Gates that wait for each other. Each circle is reported once."""
    done: set[str] = set()
    for start in gates:
        path = [start]
        while path[-1] in gates and path[-1] not in done:
            done.add(path[-1])
            path.append(gates[path[-1]])
            if path[-1] in path[:-1]:
                circle = path[path.index(path[-1]) :]
                yield f"reward.components: the gates {' -> '.join(circle)} wait for each other; remove one of them"
                break
