"""Routing: how DeepSeek's routers select and weight experts, and the selection within groups of experts.

    V2, arXiv 2405.04434: softmax scores; a group's score is that of its best expert; the weights are not renormalised
    V3, arXiv 2412.19437: sigmoid scores; experts are chosen by score + bias, a group by its two best; the weights are the
                          scores without the bias, scaled to sum to 1

The weights are multiplied by `scale`. V3's bias balances the load during pre-training. It is kept as it was loaded: a policy
whose bias moved between rollout and update would route the same tokens to other experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """`groups` 1: no groups. Of `groups`, a token reaches `groups_per_token`. `best_of_group`: experts in a group's score."""

    is_sigmoid: bool
    scale: float
    groups: int
    groups_per_token: int
    best_of_group: int


class GroupLimitedChoice:
    """Selects experts within a token's best groups. It has the interface of Megatron-Core's `RouterReplay`.

    Megatron-Core's own selection adds up the best topk // groups_per_token experts of a group. For DeepSeek-V2 (6 of 3
    groups) these are two, where the model was trained with one.
    """

    def __init__(self, best_of_group: int) -> None:
        self._best_of_group = best_of_group

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int, group_topk: int, default: Any = None
    ) -> tuple[Tensor, Tensor]:
        """scores [t, E] -> (scores [t, topk], experts [t, topk])."""
        grouped = scores.view(len(scores), num_groups, -1)  # [t, groups, E / groups]
        of_group = grouped.topk(self._best_of_group, dim=-1).values.sum(dim=-1)  # [t, groups]
        best = of_group.topk(group_topk, dim=-1, sorted=False).indices  # [t, groups_per_token]
        is_out = of_group.new_ones(of_group.shape).scatter(1, best, 0).bool().unsqueeze(-1)  # [t, groups, 1]
        values, experts = grouped.masked_fill(is_out, float("-inf")).flatten(1).topk(topk, dim=-1)
        return values, experts
