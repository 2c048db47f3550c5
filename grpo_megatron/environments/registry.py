"""Names in `rollout.multi_turn.environment` -> classes: registered ones, or `module:Class` of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from grpo_megatron.environments.environment import Environment
from grpo_megatron.environments.tool_environment import ToolEnvironment
from grpo_megatron.registry import Registry

environments: Registry[type[Environment]] = Registry("environment")
environments.register("tools")(ToolEnvironment)


def load_environment(name: str, kwargs: Mapping[str, Any]) -> Callable[[], Environment]:
    """Makes instances of the class called `name`. Imports the class and preloads it.

    Raises ValueError for a name that is no Environment, and whatever the user's module or its `preload` raises.
    """
    found = environment_class(name)
    found.preload(**kwargs)
    return lambda: found(**kwargs)


def environment_class(name: str) -> type[Environment]:
    """Raises ValueError for a name that is no Environment, and whatever the user's module raises."""
    found = environments.get(name)
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ValueError(f"{name!r} is no subclass of grpo_megatron.environments.environment.Environment; name one")
    return found
