"""Reward functions of the end-to-end tests, for worker processes: no heavy imports here."""

from __future__ import annotations


def length_reward(completion: str, answer: str) -> float:
    """Dense and exact: random models get different rewards, so every step has a gradient."""
    return float(sum(map(ord, completion)) % 7)


def parity_reward(completion: str, answer: str) -> float:
    """0 or 1: some groups of three agree."""
    return float(sum(map(ord, completion)) % 2)


def step_reward(completion: str, answer: str) -> dict[str, object]:
    """Two steps: up to the middle of the text, and to its end."""
    middle, end = max(1, len(completion) // 2), len(completion)
    steps = [(middle, float(ord(completion[0]) % 3)), (end, length_reward(completion, answer))]
    return {"score": length_reward(completion, answer), "steps": steps if end > middle else []}


def troubled_reward(completion: str, answer: str) -> float:
    """Raises for one answer in three, never returns for one in a few."""
    kind = sum(map(ord, completion)) % 6
    if kind in (0, 3):
        raise KeyError("no such answer")
    while kind == 5:
        pass
    return float(kind)


def broken_reward(completion: str, answer: str) -> float:
    raise ValueError("never works")
