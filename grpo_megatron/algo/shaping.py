"""Changes to a step's rewards and groups, after the reward function and before the advantages.

    soft overlong penalty   0 below L - c, -(n - (L - c)) / c up to L, -1 beyond       DAPO, arXiv 2503.14476
    copies                  groups with different rewards take the places of the rest   DUPO, arXiv 2507.02592

n response tokens (in the loss or not), L the longest response allowed, c the buffer.
"""

from __future__ import annotations

from dataclasses import replace

from grpo_megatron.algo.advantages import informative_groups
from grpo_megatron.config import OverlongBuffer
from grpo_megatron.types import GroupTable


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """The (negative) reward of a response of `length` tokens: 0 to -1."""
    return max(-1.0, min(0.0, (max_length - buffer - length) / buffer))


def with_overlong_penalty(table: GroupTable, config: OverlongBuffer, max_length: int) -> GroupTable:
    """The table with the penalty in `reward`; `raw_reward` keeps the rewards before it. Unchanged if there is no buffer."""
    if config.len is None:
        return table
    penalties = [config.penalty_factor * overlong_penalty(n, max_length, config.len) for n in table.response_length]
    rewards = [reward + penalty for reward, penalty in zip(table.reward, penalties, strict=True)]
    return replace(table, reward=rewards, raw_reward=table.raw_reward or table.reward)


def dupo_copies(table: GroupTable) -> list[int]:
    """How often each row counts: 0 in groups whose rewards are equal, 1 or more in the others.

    The places are given to the other groups in turn, in prompt order: the copies of two groups differ by at most one. All
    counts are 0 when every group's rewards are equal. The advantages stay those of the original group: copies are not
    part of its statistics.
    """
    copies = [0] * len(table)
    informative = {table.prompt_index[rows[0]] for rows in informative_groups(table)}
    groups = table.groups()
    kept = [rows for rows in groups if table.prompt_index[rows[0]] in informative]
    for place in range(len(groups) if kept else 0):
        for row in kept[place % len(kept)]:
            copies[row] += 1
    return copies
