"""Rollouts of several turns: the environment, its tools and the template, and what they exclude elsewhere in the config.

With algorithm.source=file an environment is allowed: validation plays it, and the rows are rendered with its tools.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_megatron.config import Config, ConfigError, MultiTurnConfig
from grpo_megatron.config.problems import Findings, check, keys_of
from grpo_megatron.data.tokenizer import TurnRenderer
from grpo_megatron.environments.environment import ChatMessage
from grpo_megatron.environments.pool import find_environment, first_messages, make_environment
from grpo_megatron.types import Prompt

SHOWN = 200  # characters of a message in the printed plan


@dataclass(frozen=True)
class CheckedEnvironment:
    """What the trainer needs of `rollout.multi_turn` besides its workers."""

    renderer: TurnRenderer
    gives_rewards: bool  # no reward function is called


@check
def environment_problems(config: Config) -> Findings:
    """Settings that contradict each other, and names that cannot be found."""
    k = keys_of(config)
    multi_turn, data = config.rollout.multi_turn, config.data
    if multi_turn.environment is None:
        if multi_turn != MultiTurnConfig():
            changed = sorted(multi_turn.model_fields_set)
            yield (
                f"{k.rollout.multi_turn:key}.{changed[0]} has no effect without an environment; set"
                " rollout.multi_turn.environment, or leave it out"
            )
        return
    key = f"{k.rollout.multi_turn.environment!r}"
    of_tools = {"tools", "format", "max_parallel_calls"} & multi_turn.model_fields_set
    if multi_turn.environment != "tools" and of_tools:
        yield (
            f"{k.rollout.multi_turn:key}.{min(of_tools)} is for environment=tools, and {key} does not read it;"
            " set the class's own arguments in rollout.multi_turn.kwargs"
        )
    if not data.apply_chat_template:
        yield (f"{key}: turns are rendered by the chat template; set {k.data.apply_chat_template:key}=true")
    if data.val_tasks:
        yield (
            f"{key}: {k.data.val_tasks} have rows of their own, which the environment does not know; name the"
            " files in data.val_files"
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
        yield from (problem.about("rollout.multi_turn.environment") for problem in error.problems)
        return
    if gives_rewards and (config.reward.function is not None or config.reward.components):
        unused = f"{k.reward.components:key}" if config.reward.components else f"{k.reward.function!r}"
        yield f"{key} gives the rewards itself, and {unused} would not be called; leave it out"
    if gives_rewards and config.reward_paths and config.reward_model.combine == "replace":
        yield (
            f"{key} gives the rewards itself, and {k.reward_model.combine} would discard them; set combine=add,"
            " or leave reward_model.path out"
        )


def grades_itself(config: Config) -> bool:
    """Whether the environment grades by itself. False, too, for a name that cannot be found."""
    name = config.rollout.multi_turn.environment
    if name is None:
        return False
    try:
        return find_environment(name).gives_rewards
    except ConfigError:
        return False


def environment_lines(config: Config, messages: Sequence[ChatMessage]) -> Iterator[tuple[str, str]]:
    """(name, text) for the printed plan: who answers, and the limits of a trajectory. Nothing for a single turn.

    `messages`: what `rehearse` has returned.
    """
    multi_turn = config.rollout.multi_turn
    if multi_turn.environment is None:
        return
    tools = f" with {', '.join(multi_turn.tools)}" if multi_turn.tools else ""
    processes = "1 worker" if multi_turn.num_workers == 1 else f"{multi_turn.num_workers} workers"
    yield "environment", f"{multi_turn.environment}{tools}; {processes} per engine, {multi_turn.timeout_s:g} s per call"
    turns, length = multi_turn.max_assistant_turns, config.data.max_response_length
    yield (
        "trajectory",
        f"at most {turns} turns and {length:,} tokens with observations, {multi_turn.max_tool_response_length:,} per tool"
        " response",
    )
    for number, message in enumerate(messages, 1):
        text = " ".join(message["content"].split())
        yield f"message {number}", f"{message['role']}: {text[:SHOWN]}{'...' if len(text) > SHOWN else ''}"


def check_environment(config: Config, tokenizer: Any, end_token_ids: Sequence[int] = ()) -> CheckedEnvironment:
    """An instance can be made, and the chat template can render its turns. Raises ConfigError."""
    rollout = config.rollout
    environment = make_environment(rollout.multi_turn)
    renderer = TurnRenderer(
        tokenizer,
        environment.tools(),
        where="rollout.multi_turn",
        stop_token_ids=rollout.stop_token_ids,
        end_token_ids=end_token_ids,
    )
    renderer.check()
    return CheckedEnvironment(renderer, environment.gives_rewards)


def rehearse(config: Config, prompts: Sequence[Prompt]) -> list[ChatMessage]:
    """The first messages of the first prompt's environment, from a worker process. Raises ConfigError. None: no prompt."""
    if config.rollout.multi_turn.environment is None or not prompts:
        return []
    return first_messages(config.rollout.multi_turn, prompts[0].extra["row"])  # type: ignore[arg-type]
