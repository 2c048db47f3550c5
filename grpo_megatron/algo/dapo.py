"""DAPO (arXiv 2503.14476) and DUPO: changes of the table, after the reward function and before the advantages.

DAPO's other parts: clip-higher is `vanilla` (ppo.py) with clip_ratio_high > clip_ratio_low; its token mean is an aggregation
(`token-mean` in aggregation.py); dynamic sampling fills a batch with the groups that `advantages.is_informative` accepts
(sampling/collector.py). `method: dapo` sets them all (methods.yaml).
"""

from __future__ import annotations

from dataclasses import replace

from grpo_megatron.algo.advantages import informative_groups
from grpo_megatron.config import AlgorithmConfig, OverlongBuffer
from grpo_megatron.types import GroupTable


def overlong_penalty(length: int, max_length: int, buffer: int) -> float:
    """Computes the soft overlong penalty of a response of n tokens, in the loss or not (DAPO, section 3.4).

    0 up to L - c,   -(n - (L - c)) / c up to L,   -1 beyond         L the longest response allowed, c the buffer
    """
    return max(-1.0, min(0.0, (max_length - buffer - length) / buffer))


def with_overlong_penalty(table: GroupTable, config: OverlongBuffer, max_length: int) -> GroupTable:
    """Adds the penalty to `reward`; `raw_reward` keeps the rewards before it. Unchanged if there is no buffer."""
    if config.len is None:
        return table
    penalties = [config.penalty_factor * overlong_penalty(n, max_length, config.len) for n in table.response_length]
    rewards = [reward + penalty for reward, penalty in zip(table.reward, penalties, strict=True)]
    return replace(table, reward=rewards, raw_reward=table.raw_reward or table.reward)


def dupo_copies(table: GroupTable) -> list[int]:
    """Counts how often each row is trained on (DUPO, arXiv 2507.02592): 0 in groups whose raw rewards are all equal.

    Their places are given to the other groups in turn, in prompt order: the copies of two groups differ by at most one. All
    counts are 0 when every group's rewards are equal. A copy is an integer weight, which counts in the denominators as well.
    The advantages stay those of the original group: copies are not part of its statistics.
    """
    copies = [0] * len(table)
    informative = {table.prompt_index[rows[0]] for rows in informative_groups(table, table.raw_reward or None)}
    groups = table.groups()
    sources = [rows for rows in groups if table.prompt_index[rows[0]] in informative]
    for place in range(len(groups) if sources else 0):
        for row in sources[place % len(sources)]:
            copies[row] += 1
    return copies


def copies_of(table: GroupTable, algorithm: AlgorithmConfig) -> list[int]:
    """Counts how often each row is trained on: once without DUPO."""
    return dupo_copies(table) if algorithm.dupo else [1] * len(table)
