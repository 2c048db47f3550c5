"""Calls each reward function on a real row before anything starts: what always fails would train on nothing."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_megatron.checks.problems import Problems
from grpo_megatron.config import RewardConfig
from grpo_megatron.reading.bounds import cut, shown
from grpo_megatron.rewards.reward import RewardResult
from grpo_megatron.rewards.workers.pool import RewardPool
from grpo_megatron.types import BY_MODEL, Prompt

WRONG = "I do not know."


def reward_call_problems(reward: RewardConfig, prompts: Sequence[Prompt]) -> Problems:
    """For each reward, the first prompt that has it: one completion that looks right, and one that is wrong.

    A reward that fails on both is a problem, unless reward.max_failed_ratio=1 allows that. Takes at most
    2 x reward.timeout_s per reward, and the time of importing it.
    """
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        if prompt.reward not in ("", BY_MODEL):  # "": an environment gives the rewards, or nothing does
            first.setdefault(prompt.reward, prompt)
    if not first or reward.max_failed_ratio == 1:
        return
    items = [(p.reward, text, p.answer) for p in first.values() for text in (looks_right(p.answer), WRONG)]
    try:
        with RewardPool(1, reward.timeout_s, reward.kwargs) as pool:
            results = pool.grade(items, quiet=True)
    except (RuntimeError, ValueError) as error:
        yield f"the reward cannot be called: {error}"
        return
    for number, prompt in enumerate(first.values()):
        right, wrong = results[2 * number : 2 * number + 2]
        if right.status != "ok" and wrong.status != "ok":
            yield _problem(prompt, right, wrong)


def looks_right(answer: str) -> str:
    """The answer in each form that the graders of this package read."""
    return (
        f"<think>It is {answer}.</think>\nThe answer is \\boxed{{{answer}}}.\n#### {answer}\n<answer>{answer}</answer>"
    )


def _problem(prompt: Prompt, right: RewardResult, wrong: RewardResult) -> str:
    failures = [right.message]
    if wrong.message != right.message:
        failures.append(f"on a wrong one: {wrong.message}")
    return (
        f"reward.function: called on a real row ({prompt.uid}, answer {shown(prompt.answer, 80)}), it fails on a completion"
        f" with the answer and on one without: {cut('; '.join(failures), 1000)}; correct it"
        " (reward.max_failed_ratio=1 starts all the same)"
    )
