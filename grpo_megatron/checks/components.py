"""Names in the config: each must stand for a function, a task or an environment that can be called."""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.kl import kl_penalties
from grpo_megatron.algo.losses import loss_facts, policy_losses
from grpo_megatron.algo.plan import token_weightings
from grpo_megatron.checks.models import has_critic
from grpo_megatron.config import Config, ConfigError, DataConfig, RewardComponent, RewardConfig
from grpo_megatron.config.methods import methods
from grpo_megatron.config.problems import Problem, Problems, keys_of, marked
from grpo_megatron.data.rows import is_stream
from grpo_megatron.data.task import FORMS, get_task, recognised_task
from grpo_megatron.data.tokenizer import STABLE_CHATML, TurnRenderer
from grpo_megatron.environments.pool import find_environment, make_environment
from grpo_megatron.registry import Registry
from grpo_megatron.rewards import check_reward, rewards
from grpo_megatron.rewards.calling import COMPOSITE

logger = logging.getLogger(__name__)

# -- Functions of the algorithm; a user's own is judged by its signature, without a call -------------------------------

CALLED_WITH = {  # kind of a registry -> the arguments, which are given by position
    "policy loss": ("inputs: LossInputs", "config: ActorConfig"),
    "advantage estimator": ("table: GroupTable", "config: AlgorithmConfig"),
    "loss aggregation mode": ("lengths: list[int]", "norm_length: float"),
    "KL estimator": ("logprobs: Tensor", "ref_logprobs: Tensor"),
}


def signature_problem(function: Any, kind: str) -> str | None:
    """Says why the function cannot be called as one of this kind; None: it can, or only a call would tell."""
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


def name_problems(config: Config) -> Problems:
    """Checks the names of estimator, loss, aggregation and KL penalties."""
    k, actor = keys_of(config), config.actor
    registries: list[tuple[Any, str, Registry[Any]]] = [
        (k.algorithm.adv_estimator, config.algorithm.adv_estimator, advantage_estimators),
        (k.actor.loss_mode, actor.loss_mode, policy_losses),
        (k.actor.loss_agg_mode, actor.loss_agg_mode, token_weightings),
    ]
    if has_critic(config.algorithm):
        registries.append((k.critic.loss_agg_mode, config.critic.loss_agg_mode, token_weightings))
    if (mode := config.distillation.loss_agg_mode) is not None:
        registries.append((k.distillation.loss_agg_mode, mode, token_weightings))
    if actor.use_kl_loss:
        registries.append((k.actor.kl_loss_type, actor.kl_loss_type, kl_penalties))
    if config.algorithm.use_kl_in_reward:
        registries.append((k.algorithm.kl_penalty, config.algorithm.kl_penalty, kl_penalties))
    for key, name, registry in registries:
        try:
            function = registry.get(name)
            if not callable(function):
                yield f"{key!r} is not a function; set the name of one"
            elif problem := signature_problem(function, registry.kind):
                yield f"{key!r}: {problem}; change its parameters"
        except ValueError as error:
            whole = f"{name!r} is a method, not a {registry.kind}; set method={name}, which sets all keys of it"
            yield f"{key:key}: {whole if name in methods() else error}"
        except Exception as error:  # whatever the user's module raises while it is imported
            yield f"{key!r}: importing it raised {type(error).__name__}: {error}; correct the module"


# -- Data sets and their tasks -----------------------------------------------------------------------------------------


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
    limits: Mapping[str, int | None]  # Prompt.n and max_tokens of what is trained on


def sources_of(config: Config) -> list[SourceFiles]:
    """Lists `data.sources`, then the data set of `data.train_files` and `data.val_files`, if they are set."""
    data = config.data
    sources = []
    for number, source in enumerate(data.sources):
        task, system = source.task or data.task, source.system_prompt
        source_data = data.model_copy(update={"task": task, **({} if system is None else {"system_prompt": system})})
        key = f"{marked('data.sources')}[{number}] ({source.name})"
        limits = {"n": source.n, "max_tokens": source.max_response_length}
        files = source.files, source.val_files
        sources.append(SourceFiles(key, source.name, source_data, *files, source.reward, source.weight, limits))
    if data.train_files or data.val_files or not sources:
        sources.append(SourceFiles("data", None, data, data.train_files, data.val_files, None, None, {}))
    return sources


def with_recognised_tasks(config: Config) -> Config:
    """Sets the tasks of verl's and TRL's rows, where no task is set. Logs once what was recognised."""
    data = config.data
    if "task" in data.model_fields_set or not config.has_rollouts:
        return config

    def recognised(key: str, files: Sequence[Path], val_files: Sequence[Path]) -> dict[str, str]:
        task = recognised_task([*files, *val_files])
        if not task:
            return {}
        file = [*files, *val_files][0]
        logger.warning("%s is not set: %s has rows in %s's form (%s), so it is %r", key, file, task, FORMS[task], task)
        return {"task": task}

    drawn = [] if config.algorithm.source == "file" else data.train_files  # written responses are no form of a task
    updates: dict[str, object] = {**recognised("data.task", drawn, data.val_files)}
    updates["sources"] = [
        source
        if source.task is not None
        else source.model_copy(update=recognised(f"data.sources[{n}].task", source.files, source.val_files))
        for n, source in enumerate(data.sources)
    ]
    return config.model_copy(update={"data": data.model_copy(update=updates)})


def source_problems(config: Config) -> Problems:
    """Yields keys that `data.sources` excludes, and names that are given twice."""
    k, data = keys_of(config), config.data
    if not data.sources:
        return
    sources = f"{k.data.sources:key}"
    if data.train_files:
        yield f"{sources} beside {k.data.train_files:key}: a run has one or the other; add the files as a source"
    if config.algorithm.source == "file":
        yield (
            f"{sources} have weights for sampling prompts, and {k.algorithm.source} reads responses in order; set"
            " data.train_files"
        )
    if data.sampling.weight != "uniform":
        yield (
            f"{k.data.sampling.weight} samples single prompts by their pass rates, and {sources} sample by the source's weight;"
            " leave one of them out"
        )
    names = [source.name for source in data.sources]
    for number, source in enumerate(data.sources):
        key = f"{sources}[{number}] ({source.name})"
        if source.name in names[:number]:
            yield f"{key}: the name is given twice; choose another one"
        longest = data.max_response_length
        if source.max_response_length is not None and source.max_response_length > longest:
            yield (
                f"{key}: max_response_length={source.max_response_length} is more than {k.data.max_response_length}; raise"
                " that, for which the engine has room"
            )
        if source.n == 1 and advantage_estimators.facts(config.algorithm.adv_estimator).compares_group:
            yield f"{key}: n=1, and {k.algorithm.adv_estimator} compares the samples of a prompt; set 2 or more"
        if any(map(is_stream, source.files)) and source.weight is None and not data.curriculum.pieces:
            yield f"{key} is a stream, which has no number of rows; set its weight"
        if not source.files:
            yield f"{key} has no files to train on; set its files, or name its val_files in {k.data.val_files:key}"
    accuracy = [part for part in config.reward.components if part.name == ACCURACY and part.function is None]
    if accuracy and len({get_task(source.data.task).reward for source in sources_of(config)}) > 1:
        yield (
            f"{k.reward.components:key}: accuracy is the task's own reward, and {sources} have tasks with different ones; set"
            " its function, or set reward in each source"
        )


def stream_problems(config: Config) -> Problems:
    """Yields settings that would silently have no effect, or another one, with streams and curricula."""
    k, data = keys_of(config), config.data
    endless = {source.name: source.files[0] for source in sources_of(config) if any(map(is_stream, source.files))}
    for path in endless.values():
        if config.trainer.total_epochs is not None:
            yield f"{k.trainer.total_epochs}: the stream {str(path)!r} has no end; set {k.trainer.total_training_steps:key}"
        if data.sampling.pass_rates is not None:
            yield f"{k.data.sampling.pass_rates}: the rows of the stream {str(path)!r} have none; leave one of them out"
    pieces, key, has_rates = (
        data.curriculum.pieces,
        f"{k.data.curriculum.pieces:key}",
        data.sampling.pass_rates is not None,
    )
    if pieces and (config.algorithm.source == "file" or data.sampling.weight != "uniform"):
        yield f"{key}: not with {k.algorithm.source} (file), nor {k.data.sampling.weight} (other than uniform); leave it out"
    named = {piece.source for piece in pieces}  # None: all sources that are no streams
    unread = [one.name for one in data.sources if one.name not in named and (None not in named or one.name in endless)]
    if pieces and unread:
        yield f"{key}: no piece has the source {unread[0]!r}, so that nothing of it would be sampled; add one, or leave it out"
    for piece in pieces:
        where, is_ranged = f"{key} ({piece.name})", (piece.min_pass_rate, piece.max_pass_rate) != (0, 1)
        if piece.source is not None and piece.source not in (names := [source.name for source in data.sources]):
            yield f"{where}: source={piece.source!r} is none of {k.data.sources:key} ({', '.join(names) or 'there are none'})"
        if [one.name for one in pieces].count(piece.name) > 1:
            yield f"{where}: the name is given twice; choose another one"
        if not has_rates and (piece.order != "random" or (is_ranged and data.curriculum.rates == "file")):
            yield (
                f"{where} needs pass rates; set {k.data.sampling.pass_rates:key}, or for a range"
                f" {k.data.curriculum.rates:key}=run"
            )
        if piece.source in endless and (is_ranged or piece.order != "random" or piece.source is None):
            yield f"{where}: a stream has no pass rates and its own order; make it a source, and name only that"
    steps = sorted({at for piece in pieces for at, _ in piece.knots})
    if empty := [step for step in steps if not any(piece.weight_at(step) for piece in pieces)]:
        yield f"{key}: at step {empty[0]} all weights are 0; give a piece a weight there"


def task_problem(config: Config) -> Problem | str | None:
    """Says why a task of the data cannot be used. None: all can, and something gives rewards for what the run samples."""
    return next((problem for source in sources_of(config) if (problem := _problem_of_task(config, source))), None)


def _problem_of_task(config: Config, source: SourceFiles) -> Problem | str | None:
    key = marked("data.task") if source.name is None else f"{source.key}: task"
    name = source.data.task
    try:
        task = get_task(name)
        if not config.has_rollouts:
            return None
        if task.multi_turn.environment and not config.rollout.multi_turn.environment:
            return (
                f"{key}={name!r} plays an environment in the scripted evaluation, and rollout.multi_turn.environment is not"
                " set; set rollout.multi_turn to the task's multi_turn"
            )
        given = source.reward or reward_name(config.reward)
        is_graded = config.has_rule or source.val_files
        if is_graded and not task.reward_names and given is None and not grades_itself(config):
            text = f"{key}={name!r} has no reward of its own; set reward.function"
            return Problem(text, ("reward.function", "reward.components"))
    except ValueError as error:
        return f"{key}: {error}"
    except Exception as error:  # whatever the user's module raises while it is imported
        return f"{key}={name!r}: importing it raised {type(error).__name__}: {error}; correct the module"
    return None


# -- Rewards: one function, or `reward.components` ---------------------------------------------------------------------

ACCURACY = "accuracy"  # the name of a component that is the task's own reward
TAKEN = ("acc", "score", "steps", "ok", "timeout")  # names of other metrics, and entries of a result


def reward_name(reward: RewardConfig) -> str | None:
    """Returns the reward of the run's samples; None: the task's own."""
    return COMPOSITE if reward.components else reward.function


def resolved_components(config: Config) -> list[dict[str, Any]]:
    """Returns the components as `rewards/calling.py` reads them. Raises ValueError for a task that cannot be used."""
    return [{**part.model_dump(), "function": _component_function(part, config)} for part in config.reward.components]


def _component_function(part: RewardComponent, config: Config) -> str:
    """Names the function of a component; "" where the task has no reward for `accuracy`."""
    if part.function or part.name != ACCURACY:
        return part.function or part.name
    return get_task(sources_of(config)[0].data.task).reward or ""  # tasks with different ones are refused


def reward_name_problems(config: Config) -> Problems:
    """Checks task and reward."""
    k = keys_of(config)
    if problem := task_problem(config):
        yield problem
        return
    if grades_itself(config) or not config.has_rollouts:
        return
    if config.reward.components:
        yield from component_problems(config)
        return
    named = [pair for source in sources_of(config) for pair in _reward_names_of(source, config.reward.function)]
    for key, name in filter(operator.itemgetter(1), dict.fromkeys(named)):  # "": nothing is graded
        if name == COMPOSITE:
            yield f"{key}={name!r} is the sum of {k.reward.components:key}; set those, and leave reward.function out"
            continue
        try:
            check_reward(name, config.reward.kwargs)
        except ValueError as error:
            yield f"{key}: {error}{f' ({k.reward.kwargs:key})' if 'kwargs' in str(error) else ''}"
        yield from (
            f"{k.reward.kwargs:key}: {problem}" for problem in _judge_problems(name, config.reward.kwargs, config)
        )


def _reward_names_of(source: SourceFiles, override: str | None) -> Iterator[tuple[str, str]]:
    """Yields (key, name) of each reward function of the source's rows; "" where there is none. `override`: `reward.function`."""
    if source.reward:
        yield f"{source.key}.reward", source.reward
    elif override is not None:
        yield marked("reward.function"), override
    else:
        yield from ((marked("reward.function"), name) for name in get_task(source.data.task).reward_names or [""])


def component_problems(config: Config) -> Problems:
    """Checks names, functions, weights and gates of the components. The task is known to be usable."""
    k, reward = keys_of(config), config.reward
    components = f"{k.reward.components:key}"
    if reward.function is not None:
        yield (
            f"{k.reward.function!r} beside {components}: a run has one or the other; write it as a component, {{name: NAME,"
            f" function: {reward.function}}}, or leave reward.components out"
        )
    if not any(part.weight for part in reward.components):
        yield f"{components}: all weights are 0, and the reward would be 0 for every sample; set one"
    names = [part.name for part in reward.components]
    for number, part in enumerate(reward.components):
        problems = [*_function_problems(part, config), *_gate_problems(part, names[:number])]
        if part.name in TAKEN:
            problems.append("the name is taken by another metric; choose another one")
        if part.name in names[:number]:
            problems.append("the name is given twice; choose another one")
        yield from (f"{components}[{number}] ({part.name}): {problem}" for problem in problems)


def _function_problems(part: RewardComponent, config: Config) -> Iterator[str]:
    name = _component_function(part, config)
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
        facts = rewards.facts(name)
        if facts.compares:
            yield f"the reward {name!r} compares samples, and a component gets them one by one; set reward.function to it"
        if facts.gives_steps:
            yield (
                f"the reward {name!r} gives rewards of single steps, which a sum has no place for; set reward.function to it,"
                " or choose a reward of the whole response"
            )
        yield from _judge_problems(name, part.kwargs, config)


def _judge_problems(name: str, kwargs: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Checks that a judge or a remote reward gives up before its worker is killed: a killed worker loses its cache."""
    limit = kwargs.get("timeout_s", 8.0)
    if name in ("judge", "remote") and isinstance(limit, int | float) and limit >= config.reward.timeout_s:
        yield (
            f"the {name}'s timeout_s={limit:g} is not below {keys_of(config).reward.timeout_s}, after which its worker is"
            f" killed; set reward.timeout_s={limit * 1.25:g}"
        )


def _gate_problems(part: RewardComponent, above: list[str]) -> Iterator[str]:
    gate = part.gate
    if gate is None:
        return
    if gate.component not in above:
        yield f"gate.component={gate.component!r} is no component above it ({', '.join(above) or 'none'}); list that one first"
    if gate.min is None and gate.max is None:
        yield "a gate needs a bound; set gate.min or gate.max"
    elif gate.min is not None and gate.max is not None and gate.min > gate.max:
        yield f"gate.min={gate.min:g} is above gate.max={gate.max:g}, so that it is never open; exchange them"


# -- Environments: rollouts of several turns, and what they exclude elsewhere in the config ----------------------------
# With algorithm.source=file an environment is allowed: validation plays it, and the rows are rendered with its tools.

SHOWN = 200  # characters of a message in the printed plan


@dataclass(frozen=True)
class CheckedEnvironment:
    """The trainer's view of `rollout.multi_turn`, besides its workers."""

    renderer: TurnRenderer
    gives_rewards: bool  # no reward function is called


def environment_problems(config: Config) -> Problems:
    """Settings that contradict each other, and names that cannot be found."""
    k, multi_turn, data = keys_of(config), config.rollout.multi_turn, config.data
    if multi_turn.environment is None:
        return
    key = f"{k.rollout.multi_turn.environment!r}"
    if not data.apply_chat_template:
        yield f"{key}: turns are rendered by the chat template; set {k.data.apply_chat_template:key}=true"
    if data.val_tasks:
        yield (
            f"{key}: {k.data.val_tasks} have rows of their own, which the environment does not know; name the files in"
            " data.val_files"
        )
    if multi_turn.max_tool_response_length >= data.max_response_length:
        yield (
            f"{k.rollout.multi_turn.max_tool_response_length} tokens of one observation leave no turn in"
            f" {k.data.max_response_length}, which counts observations, too; set it to"
            f" {max(1, data.max_response_length // 4)} or less"
        )
    try:
        gives_rewards = find_environment(multi_turn.environment).gives_rewards
    except ConfigError as error:
        yield from (Problem.of(problem, "rollout.multi_turn.environment") for problem in error.problems)
        return
    temperature = multi_turn.kwargs.get("temperature", 1.0)
    if multi_turn.environment == "command" and temperature != config.rollout.temperature:
        yield (
            f"rollout.multi_turn.kwargs.temperature={temperature} is what requests of the program may name, and"
            f" {k.rollout.temperature!r}; set it to that"
        )
    if gives_rewards and (config.reward.function is not None or config.reward.components):
        unused = f"{k.reward.components:key}" if config.reward.components else f"{k.reward.function!r}"
        yield f"{unused} would not be called, because {key} gives the rewards itself; leave it out"
    if gives_rewards and config.reward_paths and config.reward_model.combine == "replace":
        yield (
            f"{key} gives the rewards itself, and {k.reward_model.combine} would discard them; set combine=add, or leave"
            " reward_model.path out"
        )


def grades_itself(config: Config) -> bool:
    """Says if the environment grades by itself. True, too, for a name that cannot be found, a problem of its own."""
    name = config.rollout.multi_turn.environment
    try:
        return name is not None and find_environment(name).gives_rewards
    except ConfigError:
        return True


def check_environment(config: Config, tokenizer: Any, end_token_ids: Sequence[int] = ()) -> CheckedEnvironment:
    """Makes an instance, and renders turns by the chat template. Raises ConfigError."""
    rollout = config.rollout
    environment = make_environment(rollout.multi_turn)
    renderer = TurnRenderer(
        tokenizer,
        environment.tools(),
        where="rollout.multi_turn",
        stop_token_ids=rollout.stop_token_ids,
        end_token_ids=end_token_ids,
    )
    renderer.check(may_rewrite=rollout.multi_turn.history == "own")
    k = keys_of(config)
    if renderer.rewrites and loss_facts(config.actor).paired:
        raise ConfigError(
            f"{k.rollout.multi_turn.history}: this chat template changes earlier turns, which begins new rows, and"
            f" {k.actor.loss_mode!r} compares pairs of one each; set history=keep_thinking, data.chat_template={STABLE_CHATML}"
        )
    return CheckedEnvironment(renderer, environment.gives_rewards)
