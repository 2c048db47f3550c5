"""Group tables for the tests of estimators: a test gives the columns that matter to it."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_megatron.algo.advantages import Advantages, advantage_estimators
from grpo_megatron.config import AlgorithmConfig
from grpo_megatron.types import GroupTable

Step = tuple[int, float]


def make_table(
    groups: Sequence[Sequence[float]],
    lengths: Sequence[Sequence[int]] | None = None,
    steps: Sequence[Sequence[list[Step]]] | None = None,
    greedy: Sequence[float] | None = None,
    penalties: Sequence[Sequence[list[float]]] | None = None,
) -> GroupTable:
    """One inner sequence per prompt; by default a response has 3 tokens. `greedy` has one number per prompt."""
    rows = [(p, i) for p, group in enumerate(groups) for i in range(len(group))]
    lengths = lengths or [[3] * len(group) for group in groups]
    return GroupTable(
        prompt_index=[p for p, _ in rows],
        index=[i for _, i in rows],
        reward=[float(groups[p][i]) for p, i in rows],
        prompt_length=[2] * len(rows),
        response_length=[lengths[p][i] for p, i in rows],
        truncated=[False] * len(rows),
        holder=[0] * len(rows),
        step_rewards=[steps[p][i] for p, i in rows] if steps else [],
        greedy_reward=[greedy[p] for p, _ in rows] if greedy else [],
        token_penalties=[penalties[p][i] for p, i in rows] if penalties else [],
    )


def run(table: GroupTable, name: str, **config: object) -> Advantages:
    values = advantage_estimators.get(name)(table, AlgorithmConfig.model_validate({"adv_estimator": name} | config))
    assert len(values) == len(table)
    return values


def per_token(table: GroupTable, values: Advantages) -> list[list[float]]:
    """One advantage per response token of every row; [] for rows with None."""
    return [
        [] if value is None else value if isinstance(value, list) else [value] * length
        for value, length in zip(values, table.response_length, strict=True)
    ]
