"""Whether the rows have what the reward functions name (rewards/reward.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from grpo_megatron.checks.components import resolved_components
from grpo_megatron.checks.problems import Problems
from grpo_megatron.config import Config
from grpo_megatron.rewards import check_reward
from grpo_megatron.rewards.composite import COMPOSITE
from grpo_megatron.rewards.reward import Kwargs
from grpo_megatron.types import BY_MODEL, Prompt


def column_problems(config: Config, prompts: Sequence[Prompt]) -> Problems:
    """Parameters of reward functions that nothing gives, told by the first prompt of each reward."""
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        if prompt.reward not in ("", BY_MODEL):
            first.setdefault(prompt.reward, prompt)
    for prompt in first.values():
        for key, name, kwargs in _functions(config, prompt.reward):
            try:
                check_reward(name, kwargs)
            except ValueError:
                continue  # names.py and components.py report it
            try:
                check_reward(name, kwargs, prompt.columns)
            except ValueError as error:
                yield f"{key}: {error} (row {prompt.uid})"


def _functions(config: Config, name: str) -> Iterator[tuple[str, str, Kwargs]]:
    """(key, name, kwargs) of each function that a reward calls."""
    if name != COMPOSITE:
        yield "reward.function", name, config.reward.kwargs
        return
    for number, part in enumerate(resolved_components(config)):
        yield f"reward.components[{number}] ({part['name']})", part["function"], part["kwargs"]
