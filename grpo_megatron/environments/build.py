"""From the section `rollout.multi_turn` to an environment's class, one instance, or a pool of worker processes."""

from __future__ import annotations

from typing import Any

from grpo_megatron.config import ConfigError, MultiTurnConfig
from grpo_megatron.environments.environment import Environment
from grpo_megatron.environments.pool import EnvironmentPool
from grpo_megatron.environments.registry import environments, load_environment

_KEY = "rollout.multi_turn.environment"


def find_environment(name: str) -> type[Environment]:
    """The class that `rollout.multi_turn.environment` names. Raises ConfigError."""
    try:
        found = environments.get(name)
    except ValueError as error:
        raise ConfigError(f"{_KEY}: {error}") from error
    except Exception as error:  # whatever the user's module raises while it is imported
        raise ConfigError(
            f"{_KEY}={name!r}: importing it raised {type(error).__name__}: {error}; correct the module"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ConfigError(
            f"{_KEY}={name!r} is no subclass of grpo_megatron.environments.environment.Environment; name one"
        )
    return found


def environment_kwargs(multi_turn: MultiTurnConfig) -> dict[str, Any]:
    """The keyword arguments of the class: `kwargs`, and for the built-in `tools` the keys about tools."""
    if multi_turn.environment != "tools":
        return dict(multi_turn.kwargs)
    own = {name: getattr(multi_turn, name) for name in ("tools", "format", "max_parallel_calls")}
    return {**own, **multi_turn.kwargs}


def make_environment(multi_turn: MultiTurnConfig) -> Environment:
    """One instance in this process, which has not been reset. Raises ConfigError."""
    assert multi_turn.environment is not None
    find_environment(multi_turn.environment)
    kwargs = environment_kwargs(multi_turn)
    try:
        return load_environment(multi_turn.environment, kwargs)()
    except Exception as error:  # whatever the user's class raises
        raise ConfigError(
            f"{_KEY}={multi_turn.environment!r} cannot be made with {kwargs}: {type(error).__name__}: {error}; correct"
            " rollout.multi_turn.kwargs, or the class"
        ) from error


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
