"""Calls each reward function on a real row before anything starts: what always fails would train on nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from grpo_megatron.checks.components import resolved_components
from grpo_megatron.config import Config, ConfigError, Gate
from grpo_megatron.reading.bounds import cut, shown
from grpo_megatron.rewards.composite import COMPOSITE
from grpo_megatron.rewards.reward import RewardResult
from grpo_megatron.rewards.workers.pool import RewardPool
from grpo_megatron.types import BY_MODEL, Prompt

WRONG = "I do not know."


@dataclass(frozen=True)
class RewardCall:
    """What a reward gave for a completion that looks right, and for WRONG."""

    prompt: Prompt
    right: RewardResult
    wrong: RewardResult


def call_rewards(config: Config, prompts: Sequence[Prompt]) -> list[RewardCall]:
    """For each reward, the first prompt that has it: one completion that looks right, and one that is wrong.

    Raises ConfigError where a reward fails on both, unless reward.max_failed_ratio=1 allows that: then nothing is called.
    Takes at most 2 x reward.timeout_s per reward, and the time of importing it.
    """
    first: dict[str, Prompt] = {}
    reward = config.reward
    for prompt in prompts:
        if prompt.reward not in ("", BY_MODEL):  # "": an environment gives the rewards, or nothing does
            first.setdefault(prompt.reward, prompt)
    if not first or reward.max_failed_ratio == 1:
        return []
    items = [(p.reward, text, p.answer, p.text) for p in first.values() for text in (looks_right(p.answer), WRONG)]
    try:
        with RewardPool(1, reward.timeout_s, reward.kwargs, resolved_components(config)) as pool:
            results = pool.grade(items, quiet=True)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"the reward cannot be called: {error}") from error
    calls = [RewardCall(p, *results[2 * number : 2 * number + 2]) for number, p in enumerate(first.values())]
    failing = [call for call in calls if call.right.status != "ok" and call.wrong.status != "ok"]
    if failing:
        raise ConfigError("\n".join(_problem(call.prompt, call.right, call.wrong) for call in failing))
    return calls


def reward_lines(config: Config, calls: Sequence[RewardCall]) -> Iterator[tuple[str, str]]:
    """(name, text) for the printed plan: each reward and each of its components, and what they gave in `calls`."""
    for call in calls:
        values = (
            f"{_value(call.right, None)} for the answer of {call.prompt.uid}, {_value(call.wrong, None)} for {WRONG!r}"
        )
        yield "reward", f"{call.prompt.reward}: {values}"
        for part in resolved_components(config) if call.prompt.reward == COMPOSITE else []:
            name = part["name"]
            when = "" if part["gate"] is None else f" where {_condition(Gate(**part['gate']))}"
            values = f"{_value(call.right, name)}, {_value(call.wrong, name)}"
            yield f"  {name}"[:17], f"{part['weight']:g} x {part['function']}{when}: {values}"


def _value(result: RewardResult, name: str | None) -> str:
    """The reward, or the value of one component."""
    if result.status != "ok":
        return result.status
    if name is None:
        return f"{result.reward:g}"
    return f"{result.metrics[name]:g}" if name in result.metrics else "closed"


def _condition(gate: Gate) -> str:
    low = "" if gate.min is None else f"{gate.min:g} <= "
    high = "" if gate.max is None else f" <= {gate.max:g}"
    return f"{low}{gate.component}{high}"


def looks_right(answer: str) -> str:
    """The answer in each form that the graders of this package read, in the layout with tags."""
    return f"<think>It is {answer}, so \\boxed{{{answer}}}.\n#### {answer}\n</think>\n<answer>{answer}</answer>"


def _problem(prompt: Prompt, right: RewardResult, wrong: RewardResult) -> str:
    failures = [right.message]
    if wrong.message != right.message:
        failures.append(f"on a wrong one: {wrong.message}")
    return (
        f"reward.function: called on a real row ({prompt.uid}, answer {shown(prompt.answer, 80)}), it fails on a completion"
        f" with the answer and on one without: {cut('; '.join(failures), 1000)}; correct it"
        " (reward.max_failed_ratio=1 starts all the same)"
    )
