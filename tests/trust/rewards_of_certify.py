"""Rewards of the runs that test_certify.py and test_diff.py start. Worker processes import this file: no heavy imports."""

import time


def odd(response: str, answer: str) -> float:
    """A reward that differs within a group of random responses."""
    return float(sum(map(len, response.split())) % 3)


def zero(response: str, answer: str) -> float:
    """A reward that gives no gradient."""
    return 0.0


def clock(response: str, answer: str) -> float:
    """A reward that is no function of the response."""
    return time.time() % 1
