"""Names in the config: each must stand for a function that can be called."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.divergence import kl_penalties
from grpo_megatron.algo.losses import policy_losses
from grpo_megatron.algo.plan import token_weightings
from grpo_megatron.checks.environment import grades_itself
from grpo_megatron.checks.model_folders import has_critic
from grpo_megatron.config import Config, DataConfig, RewardComponent, RewardConfig, SamplingConfig
from grpo_megatron.config.problems import Findings, check, keys_of, marked
from grpo_megatron.data.task import FORMS, get_task, recognised_task
from grpo_megatron.importing import Registry
from grpo_megatron.rewards import check_reward, rewards
from grpo_megatron.rewards.calling import COMPOSITE

# -- `reward.components` -----------------------------------------------------------------------------------------------

ACCURACY = "accuracy"  # the name of a component that is the task's own reward
TAKEN = ("acc", "score", "steps", "ok", "timeout")  # names of other metrics, and entries of a result
MAX_COMPONENTS = 16


def reward_name(reward: RewardConfig) -> str | None:
    """The reward of the run's samples; None: the task's own."""
    return COMPOSITE if reward.components else reward.function


def resolved_components(config: Config) -> list[dict[str, Any]]:
    """The components as `rewards/calling.py` reads them. Raises ValueError for a task that cannot be used."""
    if not config.reward.components:
        return []
    own = _own_reward(config)
    return [{**part.model_dump(), "function": _component_function(part, own)} for part in config.reward.components]


def _own_reward(config: Config) -> str | None:
    """That of the tasks; sources.py refuses sources whose tasks have different ones."""
    return get_task(sources_of(config)[0].data.task).reward


def _component_function(part: RewardComponent, of_the_task: str | None) -> str:
    return part.function or (of_the_task or "" if part.name == ACCURACY else part.name)


@check
def component_problems(config: Config) -> Findings:
    """Names, functions, weights and gates of the components. The task is known to be usable."""
    k = keys_of(config)
    reward = config.reward
    if not reward.components:
        return
    if reward.function is not None:
        yield (
            f"{k.reward.function!r} beside {k.reward.components:key}: a run has one or the other; write it as a"
            f" component, {{name: NAME, function: {reward.function}}}, or leave the components out"
        )
    if reward.kwargs:
        yield (f"{k.reward.kwargs:key} has no effect on {k.reward.components:key}; set the kwargs of each component")
    if len(reward.components) > MAX_COMPONENTS:
        yield (f"{k.reward.components:key} has {len(reward.components)} entries; at most {MAX_COMPONENTS} are accepted")
        return
    if not any(part.weight for part in reward.components):
        yield (f"{k.reward.components:key}: all weights are 0, and the reward would be 0 for every sample; set one")
    names = [part.name for part in reward.components]
    for number, part in enumerate(reward.components):
        key = f"{k.reward.components:key}[{number}] ({part.name})"
        if part.name in TAKEN:
            yield f"{key}: the name is taken by another metric; choose another one"
        if part.name in names[:number]:
            yield f"{key}: the name is given twice; choose another one"
        yield from (f"{key}: {problem}" for problem in _function_problems(part, config))
        yield from (f"{key}: {problem}" for problem in _gate_problems(part, names))
    yield from _circles({part.name: part.gate.component for part in reward.components if part.gate})


def _function_problems(part: RewardComponent, config: Config) -> Iterator[str]:
    name = _component_function(part, _own_reward(config))
    if not name:
        yield f"it is the task's own reward, and {keys_of(config).data.task!r} has none; set its function"
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
            f"the judge's timeout_s={limit:g} is not below {marked('reward.timeout_s')}={reward.timeout_s:g}, after which its"
            f" worker is killed; set reward.timeout_s={limit * 1.25:g}"
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
                yield f"{marked('reward.components')}: the gates {' -> '.join(circle)} wait for each other; remove one of them"
                break


# -- Names of functions; a user's own is judged by its signature, without a call ---------------------------------------

CALLED_WITH = {  # kind of a registry -> the arguments, which are given by position
    "policy loss": ("inputs: LossInputs", "config: ActorConfig"),
    "advantage estimator": ("table: GroupTable", "config: AlgorithmConfig"),
    "loss aggregation mode": ("lengths: list[int]", "norm_length: float"),
    "KL estimator": ("logprobs: Tensor", "ref_logprobs: Tensor"),
}


def signature_problem(function: Any, kind: str) -> str | None:
    """Why the function cannot be called as one of this kind; None: it can, or only a call would tell."""
    arguments = CALLED_WITH[kind]
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        return f"it is async or a generator; a {kind} is a plain function"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return f"its signature is {signature}, and it is called with ({', '.join(arguments)}): {error}"
    return None


@check
def name_problems(config: Config) -> Findings:
    """Estimator, loss, aggregation and KL penalties."""
    actor = config.actor
    registries: list[tuple[str, str, Registry[Any]]] = [
        ("algorithm.adv_estimator", config.algorithm.adv_estimator, advantage_estimators),
        ("actor.loss_mode", actor.loss_mode, policy_losses),
        ("actor.loss_agg_mode", actor.loss_agg_mode, token_weightings),
    ]
    if has_critic(config.algorithm):
        registries.append(("critic.loss_agg_mode", config.critic.loss_agg_mode, token_weightings))
    if actor.use_kl_loss:
        registries.append(("actor.kl_loss_type", actor.kl_loss_type, kl_penalties))
    if config.algorithm.use_kl_in_reward:
        registries.append(("algorithm.kl_penalty", config.algorithm.kl_penalty, kl_penalties))
    for key, name, registry in registries:
        try:
            function = registry.get(name)
            if not callable(function):
                yield f"{marked(key)}={name!r} is not a function; set the name of one"
            elif problem := signature_problem(function, registry.kind):
                yield f"{marked(key)}={name!r}: {problem}; change its parameters"
        except ValueError as error:
            yield f"{marked(key)}: {error}"
        except Exception as error:  # whatever the user's module raises while it is imported
            yield f"{marked(key)}={name!r}: importing it raised {type(error).__name__}: {error}; correct the module"


@check
def reward_name_problems(config: Config) -> Findings:
    """Task and reward."""
    k = keys_of(config)
    if problem := task_problem(config):
        yield problem
        return
    if grades_itself(config) or not config.draws:
        return
    if config.reward.components:
        yield from component_problems(config)
        return
    named = [pair for source in sources_of(config) for pair in reward_names_of(source, config.reward.function)]
    for key, name in dict.fromkeys(named):
        if name == COMPOSITE:
            yield (f"{key}={name!r} is the sum of {k.reward.components:key}; set those, and leave reward.function out")
            continue
        try:
            check_reward(name, config.reward.kwargs)
        except ValueError as error:
            yield (f"{key}: {error}{f' ({k.reward.kwargs:key})' if config.reward.kwargs else ''}")
        yield from (
            f"{k.reward.kwargs:key}: {problem}" for problem in judge_problems(name, config.reward.kwargs, config.reward)
        )


def task_problem(config: Config) -> str | None:
    """Why a task of the data cannot be used. None: all can, and something gives rewards for what the run draws."""
    return next(filter(None, (_problem_of_task(config, source) for source in sources_of(config))), None)


def _problem_of_task(config: Config, source: SourceFiles) -> str | None:
    key = marked("data.task") if source.name is None else f"{source.key}: task"
    name = source.data.task
    try:
        task = get_task(name)
        if not config.draws:
            return None
        if task.multi_turn.environment and not config.rollout.multi_turn.environment:
            return (
                f"{key}={name!r} plays an environment in the scripted evaluation, and"
                " rollout.multi_turn.environment is not set; set rollout.multi_turn to the task's multi_turn"
            )
        given = source.reward or reward_name(config.reward)
        if not task.reward_names and given is None and not grades_itself(config):
            return f"{key}={name!r} has no reward of its own; set reward.function"
    except ValueError as error:
        return f"{key}: {error}"
    except Exception as error:  # whatever the user's module raises while it is imported
        return f"{key}={name!r}: importing it raised {type(error).__name__}: {error}; correct the module"
    return None


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceFiles:
    """One data set. `data` has its own task and system prompt. `name` and `reward` are None where it has none of its own."""

    key: str  # for messages
    name: str | None
    data: DataConfig
    files: Sequence[Path]
    val_files: Sequence[Path]
    reward: str | None
    weight: float | None


def sources_of(config: Config) -> list[SourceFiles]:
    """`data.sources`, then the data set of `data.train_files` and `data.val_files`, if they are set."""
    data = config.data
    found = []
    for number, source in enumerate(data.sources):
        task, system = source.task or data.task, source.system_prompt
        own = data.model_copy(update={"task": task, **({} if system is None else {"system_prompt": system})})
        key = f"{marked('data.sources')}[{number}] ({source.name})"
        found.append(SourceFiles(key, source.name, own, source.files, source.val_files, source.reward, source.weight))
    if data.train_files or data.val_files or not found:
        found.append(SourceFiles("data", None, data, data.train_files, data.val_files, None, None))
    return found


def with_recognised_tasks(config: Config) -> Config:
    """The config with the tasks of verl's and TRL's rows, where no task is set. Says once what was recognised."""
    data = config.data
    if "task" in data.model_fields_set or not config.draws:
        return config
    updates: dict[str, object] = {}
    drawn = [] if config.algorithm.source == "file" else data.train_files  # written responses are no form of a task
    if task := recognised_task([*drawn, *data.val_files]):
        _announce("data.task", drawn or data.val_files, task)
        updates["task"] = task
    sources = []
    for number, source in enumerate(data.sources):
        if source.task is None and (task := recognised_task([*source.files, *source.val_files])):
            _announce(f"data.sources[{number}].task", source.files or source.val_files, task)
            source = source.model_copy(update={"task": task})
        sources.append(source)
    updates["sources"] = sources
    return config.model_copy(update={"data": data.model_copy(update=updates)})


def _announce(key: str, files: Sequence[Path], task: str) -> None:
    logger.warning("%s is not set: %s has rows in %s's form (%s), so it is %r", key, files[0], task, FORMS[task], task)


@check
def source_problems(config: Config) -> Findings:
    """What `data.sources` excludes, and names that are given twice."""
    k = keys_of(config)
    data = config.data
    if not data.sources:
        return
    if data.train_files:
        yield (
            f"{k.data.sources:key} beside {k.data.train_files:key}: a run has one or the other; add the files as"
            " a source"
        )
    if config.algorithm.source == "file":
        yield (
            f"{k.data.sources:key} have weights for drawing prompts, and {k.algorithm.source} reads responses in"
            " order; set data.train_files"
        )
    if data.sampling != SamplingConfig():
        yield (
            f"data.sampling draws single prompts by their pass rates, and {k.data.sources:key} draw by the"
            " source's weight; set one of them"
        )
    names = [source.name for source in data.sources]
    for number, source in enumerate(data.sources):
        key = f"{k.data.sources:key}[{number}] ({source.name})"
        if source.name in names[:number]:
            yield f"{key}: the name is given twice; choose another one"
        if not source.files:
            yield (f"{key} has no files to train on; set its files, or name its val_files in {k.data.val_files:key}")
    accuracy = [part for part in config.reward.components if part.name == "accuracy" and part.function is None]
    if accuracy and len({get_task(source.data.task).reward for source in sources_of(config)}) > 1:
        yield (
            f"{k.reward.components:key}: accuracy is the task's own reward, and {k.data.sources:key} have tasks"
            " with different ones; set its function, or set reward in each source"
        )


def reward_names_of(source: SourceFiles, override: str | None) -> Iterator[tuple[str, str]]:
    """(key, name) of each reward function of the source's rows; "" where there is none. The task is known to be usable.

    `override`: that of `reward`, instead of the task's.
    """
    if source.reward:
        yield f"{source.key}.reward", source.reward
    elif override is not None:
        yield marked("reward.function"), override
    else:
        yield from ((marked("reward.function"), name) for name in get_task(source.data.task).reward_names or [""])
