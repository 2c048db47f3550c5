"""Reward functions of the end-to-end tests. Worker processes import this file, so it has no heavy imports."""

from __future__ import annotations

import random
import time


def length_reward(completion: str, answer: str) -> float:
    """0 to 6: the samples of a random model get different rewards, so that every step has a gradient."""
    return float(sum(map(ord, completion)) % 7)


def odd_reward(response: str, answer: str) -> float:
    """0 to 2, by the length of the words."""
    return float(sum(map(len, response.split())) % 3)


def late_reward(completion: str, answer: str, seconds: float) -> float:
    """`length_reward`, after up to so many seconds."""
    time.sleep(random.uniform(0, seconds))
    return length_reward(completion, answer)


def parity_reward(completion: str, answer: str) -> float:
    """0 or 1: some groups of three have equal rewards."""
    return float(sum(map(ord, completion)) % 2)


def step_reward(completion: str, answer: str) -> dict[str, object]:
    """Rewards two steps: one ends in the middle of the text, one at its end."""
    middle, end = max(1, len(completion) // 2), len(completion)
    steps = [(middle, float(ord(completion[0]) % 3)), (end, length_reward(completion, answer))]
    return {"score": length_reward(completion, answer), "steps": steps if end > middle else []}


def troubled_reward(completion: str, answer: str) -> float:
    """Raises for two completions in six, and never returns for one in six."""
    kind = sum(map(ord, completion)) % 6
    if kind in (0, 3):
        raise KeyError("no such answer")
    while kind == 5:
        time.sleep(1)
    return float(kind)


def broken_reward(completion: str, answer: str) -> float:
    raise ValueError("never works")


def scheduled_reward(completion: str, answer: str, step: int) -> dict[str, float]:
    """Depends on the answer and the step alone, so that a curriculum moves alike in every layout."""
    return {"score": float(sum(map(ord, completion)) % 7), "acc": float((int(answer) + step) % 3 == 0)}
