"""From the section `rollout.multi_turn` to an environment's class, one instance, or a pool of worker processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_megatron.config import ConfigError, MultiTurnConfig
from grpo_megatron.environments.environment import ChatMessage, Environment
from grpo_megatron.environments.pool import EnvironmentPool
from grpo_megatron.environments.registry import environment_class

_KEY = "rollout.multi_turn.environment"


def find_environment(name: str) -> type[Environment]:
    """The class that `rollout.multi_turn.environment` names. Raises ConfigError."""
    try:
        return environment_class(name)
    except ValueError as error:
        raise ConfigError(f"{_KEY}: {error}") from error
    except Exception as error:  # whatever the user's module raises while it is imported
        raise ConfigError(
            f"{_KEY}={name!r}: importing it raised {type(error).__name__}: {error}; correct the module"
        ) from error


def environment_kwargs(multi_turn: MultiTurnConfig) -> dict[str, Any]:
    """The keyword arguments of the class: `kwargs`, and for the built-in `tools` the keys about tools."""
    if multi_turn.environment != "tools":
        return dict(multi_turn.kwargs)
    own = {name: getattr(multi_turn, name) for name in ("tools", "format", "max_parallel_calls")}
    return {**own, **multi_turn.kwargs}


def make_environment(multi_turn: MultiTurnConfig) -> Environment:
    """One instance in this process, neither preloaded nor reset. Raises ConfigError."""
    assert multi_turn.environment is not None
    found, kwargs = find_environment(multi_turn.environment), environment_kwargs(multi_turn)
    try:
        return found(**kwargs)
    except Exception as error:  # whatever the user's class raises
        raise ConfigError(
            f"{_KEY}={multi_turn.environment!r} cannot be made with {kwargs}: {type(error).__name__}: {error}; correct"
            " rollout.multi_turn.kwargs, or the class"
        ) from error


def first_messages(multi_turn: MultiTurnConfig, row: Mapping[str, Any]) -> list[ChatMessage]:
    """What the environment's reset gives for a row, in a worker as during the run. Raises ConfigError."""
    key = f"{_KEY}={multi_turn.environment!r}"
    try:
        with build_pool(multi_turn.model_copy(update={"num_workers": 1})) as pool:
            pool.start("first row", row, seed=0)
            outcome = pool.wait(["first row"])["first row"]
    except RuntimeError as error:
        raise ConfigError(f"{key}: {error}") from error
    if outcome.step is None:
        raise ConfigError(
            f"{key}: its reset fails on the first row of the data ({outcome.status}: {outcome.message}); the row's fields"
            f" are {', '.join(row)}"
        )
    if not outcome.step.messages:
        raise ConfigError(f"{key}: its reset gives no message for the first row of the data; the prompt would be empty")
    return outcome.step.messages


def build_pool(multi_turn: MultiTurnConfig) -> EnvironmentPool:
    """The workers of one engine. Raises ConfigError for kwargs that are no JSON."""
    assert multi_turn.environment is not None
    try:
        return EnvironmentPool(
            multi_turn.environment,
            environment_kwargs(multi_turn),
            multi_turn.num_workers,
            multi_turn.timeout_s,
            multi_turn.memory_gib,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
