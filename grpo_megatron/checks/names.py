"""Names in the config: each must stand for a function that can be called."""

from __future__ import annotations

from typing import Any

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.kl import kl_penalties
from grpo_megatron.algo.losses import policy_losses
from grpo_megatron.algo.token_weights import token_weightings
from grpo_megatron.checks.components import component_problems, judge_problems, reward_name
from grpo_megatron.checks.critic import has_critic
from grpo_megatron.checks.environment import grades_itself
from grpo_megatron.checks.problems import Problems
from grpo_megatron.checks.signatures import signature_problem
from grpo_megatron.checks.sources import SourceFiles, reward_names_of, sources_of
from grpo_megatron.config import Config
from grpo_megatron.data.tasks import get_task
from grpo_megatron.registry import Registry
from grpo_megatron.rewards import check_reward
from grpo_megatron.rewards.composite import COMPOSITE


def name_problems(config: Config) -> Problems:
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
                yield f"{key}={name!r} is not a function; set the name of one"
            elif problem := signature_problem(function, registry.kind):
                yield f"{key}={name!r}: {problem}; change its parameters"
        except ValueError as error:
            yield f"{key}: {error}"
        except Exception as error:  # whatever the user's module raises while it is imported
            yield f"{key}={name!r}: importing it raised {type(error).__name__}: {error}; correct the module"


def reward_name_problems(config: Config) -> Problems:
    """Task and reward."""
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
            yield f"{key}={name!r} is the sum of reward.components; set those, and leave reward.function out"
            continue
        try:
            check_reward(name, config.reward.kwargs)
        except ValueError as error:
            yield f"{key}: {error}{' (reward.kwargs)' if config.reward.kwargs else ''}"
        yield from (
            f"reward.kwargs: {problem}" for problem in judge_problems(name, config.reward.kwargs, config.reward)
        )


def task_problem(config: Config) -> str | None:
    """Why a task of the data cannot be used. None: all can, and something gives rewards for what the run draws."""
    return next(filter(None, (_problem_of_task(config, source) for source in sources_of(config))), None)


def _problem_of_task(config: Config, source: SourceFiles) -> str | None:
    key = "data.task" if source.name is None else f"{source.key}: task"
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
