"""The plan of a step: from the table of all samples to the rows of each rank, their advantages and token weights.

Every rank computes the same plan from the same table: integers, float64, no communication, no random numbers.

1. Advantages, by the registered estimator, over the whole table.
2. Rows that cannot be trained on are left out of the loss: responses without a loss token, rewards that are not finite,
   cut-off responses if `mask_truncated_samples`, rows with None from the estimator. They stay in the group's statistics.
3. Mini-batches (one optimizer step each) of `ppo_mini_batch_size` prompts in prompt order; a group is never split. A
   mini-batch without a row is dropped: a step on a zero gradient would still move weights by momentum and decay.
4. Rows (for DPO: pairs) to data-parallel ranks, longest first to the lightest rank (packing.py). Lengths are prompt +
   response tokens, in the loss or not. The heaviest rank exceeds the lightest by at most one sequence.
5. Each rank's rows into micro-batches, longest first into the first that has room. A sequence longer than the cap gets
   a micro-batch of its own. Ranks with fewer micro-batches get empty ones: pipeline and gradient collectives need equal
   counts. The largest micro-batch comes first, so that a lack of memory shows at once.
6. Token weights per mini-batch, from that mini-batch's global counts of rows and loss tokens. Because of them, 4 and 5
   cannot change the gradient.

DUPO (WebSailor, arXiv 2507.02592): groups whose rewards are equal are removed, and copies of the other groups take their
places. A copy is an integer weight, which counts in the denominators as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

from grpo_megatron.algo.advantages import Advantages, advantage_estimators, check_rewards
from grpo_megatron.algo.needs import forward_only_at_zero_advantage, loss_facts
from grpo_megatron.algo.packing import (
    Assignment,
    SequenceCost,
    Unit,
    add_mini_batch,
    add_packed,
    assign,
    imbalance,
    merge_prompts,
    shared_tokens,
)
from grpo_megatron.algo.token_weights import dupo_copies, token_weights
from grpo_megatron.config import ActorConfig, AlgorithmConfig, CriticConfig
from grpo_megatron.types import GroupTable, MiniBatches, Plan, rows_of_mini_batch


def make_plan(
    table: GroupTable,
    algorithm: AlgorithmConfig,
    actor: ActorConfig,
    *,
    dp: int,
    train_batch_size: int,
    max_response_length: int,
    cost: SequenceCost | None = None,
) -> Plan:
    """The plan for one step of GRPO over `dp` data-parallel ranks, which are balanced by `cost` (None: tokens).

    `train_batch_size` is in prompts and is the mini-batch when `ppo_mini_batch_size` is null; `max_response_length` is
    in tokens and is L of seq-mean-token-sum-norm when `loss_scale_factor` is null. The last mini-batch may be short and
    then has its own, smaller counts. There may be no mini-batch at all. Raises ValueError on unknown names and on an
    estimator that returns the wrong number of advantages or one that is not finite.
    """
    lengths = table.sequence_lengths()
    trainable = _trainable(table, algorithm)
    advantages = _advantages(table, algorithm, trainable)
    copies = dupo_copies(table) if algorithm.dupo else [1] * len(table)
    in_loss = [
        can_train and advantage is not None and count > 0
        for can_train, advantage, count in zip(trainable, advantages, copies, strict=True)
    ]

    paired = loss_facts(actor).paired
    minis: list[list[Unit]] = []
    for groups in groups_of_mini_batches(table, copies, actor.mini_batch_size(train_batch_size)):
        rows_of_groups = [[row for row in group if in_loss[row]] for group in groups]
        minis.append(
            [unit for rows in rows_of_groups for unit in (_pairs(rows, advantages) if paired else _single(rows))]
        )
    silent = _rows_of_zero_advantage(advantages) if forward_only_at_zero_advantage(algorithm, actor) else set()
    chosen, shares_prompts = _assign(minis, table, actor, dp, cost, silent)

    weights = row_weights(chosen.mini_batches, table, copies, actor, max_response_length)
    metrics = _group_metrics(table) | _balance_metrics(chosen.mini_batches, chosen.lengths)
    metrics["perf/dp_imbalance_flops"] = imbalance(chosen.mini_batches, chosen.costs)
    plan = Plan(advantages, weights, chosen.mini_batches, metrics, chosen.num_forward_only, shares_prompts)
    metrics["perf/forward_only_ratio"] = _share(plan.rows_without_backward(), chosen.lengths, plan.owner())
    if actor.share_prompts:
        own, whole = (sum(of_rows[row] for row in plan.owner()) for of_rows in (chosen.lengths, lengths))
        metrics["perf/shared_prompt_ratio"] = 1.0 - own / max(1, whole)
    return plan


def _single(rows: list[int]) -> list[Unit]:
    return [[row] for row in rows]


def _assign(
    minis: list[list[Unit]],
    table: GroupTable,
    actor: ActorConfig,
    dp: int,
    cost: SequenceCost | None,
    silent: set[int],
) -> tuple[Assignment, bool]:
    """The lighter of two assignments: with whole rows, and with rows that share their prompt. And whether they do."""
    lengths, cost = table.sequence_lengths(), cost or SequenceCost(1, 0, 0)
    whole = assign(minis, dp, lengths, cost.of(lengths, table.response_length), actor, silent)
    if not actor.share_prompts:
        return whole, False
    merged = [merge_prompts(units, table, actor, silent) for units in minis]
    shared = shared_tokens(merged, table)
    own = [s - p for s, p in zip(lengths, shared, strict=True)]
    sharing = assign(merged, dp, own, cost.of(lengths, table.response_length, shared), actor, silent)
    return (sharing, True) if sharing.heaviest() < whole.heaviest() else (whole, False)


def revise_plan(
    plan: Plan, table: GroupTable, algorithm: AlgorithmConfig, actor: ActorConfig, *, max_response_length: int
) -> Plan:
    """Plans the same rows on the same ranks again, after `table` got columns that need the policy's log-probabilities.

    These are `token_penalties` (a KL penalty in the reward) and `num_kept_tokens` (without the tokens that a correction
    has rejected). Advantages and weights are computed anew. A mini-batch without a kept token is dropped.
    """
    advantages = _advantages(table, algorithm, _trainable(table, algorithm))
    copies = dupo_copies(table) if algorithm.dupo else [1] * len(table)
    weights = row_weights(plan.mini_batches, table, copies, actor, max_response_length)
    num_mini_batches = len(plan.mini_batches[0])
    kept = [i for i in range(num_mini_batches) if any(weights[row] for row in _rows_on_all_ranks(plan.mini_batches, i))]
    mini_batches = [[rank_mini_batches[i] for i in kept] for rank_mini_batches in plan.mini_batches]
    num_forward_only = [plan.num_forward_only[i] for i in kept] if plan.num_forward_only else []
    revised = Plan(advantages, weights, mini_batches, plan.metrics, num_forward_only, plan.shares_prompts)
    wrong = set(revised.rows_without_backward()) - _rows_of_zero_advantage(advantages)
    assert not wrong, f"rows {sorted(wrong)[:10]} got an advantage, and the plan gives them no backward pass"
    return revised


def supervised_plan(
    lengths: list[tuple[int, int]], actor: ActorConfig, dp: int, num_loss_tokens: list[int] | None = None
) -> Plan:
    """The plan for one step of supervised training: one mini-batch, token-mean, every advantage 1.

    `lengths[row]` is (prompt tokens, response tokens), `num_loss_tokens[row]` how many of the response are in the loss;
    None: all. Rows with an empty response are left out.
    """
    totals = [prompt + response for prompt, response in lengths]
    counts = [response for _, response in lengths] if num_loss_tokens is None else num_loss_tokens
    mini_batches: list[MiniBatches] = [[] for _ in range(dp)]
    add_mini_batch(mini_batches, [[row] for row, (_, response) in enumerate(lengths) if response], totals, actor)
    return Plan(
        advantages=[1.0] * len(lengths),
        token_weights=token_weights("token-mean", counts, [True] * len(lengths), 1.0),
        mini_batches=mini_batches,
        metrics=_balance_metrics(mini_batches, totals),
    )


def _trainable(table: GroupTable, algorithm: AlgorithmConfig) -> list[bool]:
    """Per row: it has a loss token and a reward, and was not cut off where `mask_truncated_samples` drops such rows."""
    dropped = table.truncated if algorithm.mask_truncated_samples else [False] * len(table)
    rows = zip(table.num_loss_tokens(), table.reward, dropped, strict=True)
    return [count > 0 and math.isfinite(reward) and not drop for count, reward, drop in rows]


def groups_of_mini_batches(table: GroupTable, copies: list[int], size: int) -> list[list[list[int]]]:
    """The groups (lists of rows) of each optimizer step: `size` prompts in prompt order.

    Where DUPO drops groups, the others are cut into the same number of mini-batches, of even sizes.
    """
    groups = table.groups()
    kept = [group for group in groups if any(copies[row] for row in group)]
    if len(kept) == len(groups):
        return [groups[start : start + size] for start in range(0, len(groups), size)]
    count = math.ceil(len(groups) / size)
    return [kept[i * len(kept) // count : (i + 1) * len(kept) // count] for i in range(count)]


def _pairs(rows: list[int], advantages: Advantages) -> list[Unit]:
    """[[chosen, rejected]] of one group, or [] unless it has both."""
    chosen, rejected = [], []
    for row in rows:
        advantage = advantages[row]
        if isinstance(advantage, float) and advantage > 0:
            chosen.append(row)
        if isinstance(advantage, float) and advantage < 0:
            rejected.append(row)
    return [[chosen[0], rejected[0]]] if chosen and rejected else []


def _rows_of_zero_advantage(advantages: Advantages) -> set[int]:
    """The rows that have an advantage, and it is 0 at every token."""
    return {row for row, value in enumerate(advantages) if value is not None and not _any_nonzero(value)}


def _any_nonzero(value: float | list[float]) -> bool:
    return any(value) if isinstance(value, list) else value != 0.0


def _share(rows: Iterable[int], lengths: list[int], of_rows: Iterable[int]) -> float:
    """The tokens of `rows` in those of `of_rows`."""
    return sum(lengths[row] for row in rows) / max(1, sum(lengths[row] for row in of_rows))


def _rows_on_all_ranks(mini_batches: list[MiniBatches], mini: int) -> list[int]:
    """The rows of mini-batch number `mini`, of all ranks."""
    return sorted(row for per_rank in mini_batches for row in rows_of_mini_batch(per_rank[mini]))


def row_weights(
    mini_batches: list[MiniBatches], table: GroupTable, copies: list[int], actor: ActorConfig, max_response_length: int
) -> list[float]:
    """The weight of each row's loss tokens, from the counts of its mini-batch. A row with m copies counts as m rows."""
    norm_length = actor.loss_scale_factor or float(max_response_length)
    num_tokens = table.num_kept_tokens or table.num_loss_tokens()
    weights = [0.0] * len(table)
    for mini in range(len(mini_batches[0])):
        rows = [row for row in _rows_on_all_ranks(mini_batches, mini) for _ in range(copies[row])]
        counts = [num_tokens[row] for row in rows]
        mini_weights = token_weights(actor.loss_agg_mode, counts, [True] * len(rows), norm_length)
        for row, weight in zip(rows, mini_weights, strict=True):
            weights[row] += weight
    return weights


def _advantages(table: GroupTable, algorithm: AlgorithmConfig, trainable: list[bool]) -> Advantages:
    """Run the estimator and check what it returns: it may be the user's own."""
    name = algorithm.adv_estimator
    check_rewards(table.reward)  # also for estimators of the user's own
    if advantage_estimators.facts(name).needs_values and not table.values:
        return [0.0] * len(table)  # known once the critic has read the rows, which this plan gives to the ranks
    advantages = advantage_estimators.get(name)(table, algorithm)
    if len(advantages) != len(table):
        raise ValueError(
            f"algorithm.adv_estimator={name!r} returned {len(advantages)} advantages for {len(table)} samples; "
            "return one per table row"
        )
    for row, value in enumerate(advantages):
        if isinstance(value, list) and len(value) != table.response_length[row]:
            raise ValueError(
                f"algorithm.adv_estimator={name!r} returned {len(value)} advantages for table row {row}, whose "
                f"response has {table.response_length[row]} tokens; return one per response token, or one float for all"
            )
        if value is None or not trainable[row]:
            continue
        if not (all(map(math.isfinite, value)) if isinstance(value, list) else math.isfinite(value)):
            raise ValueError(
                f"algorithm.adv_estimator={name!r} returned {value} for table row {row} (reward {table.reward[row]}); "
                "advantages must be finite: give 0 where the formula has none"
            )
    return advantages


def _group_metrics(table: GroupTable) -> dict[str, float]:
    """Shares of prompts without a gradient, and of samples without a reward.

    all_best and all_worst: every scorable reward of the prompt equals the highest (lowest) of the step. With rewards 0
    and 1 these are the prompts that are too easy and too hard. Both shares are 1 when the whole step has one reward.
    """
    groups = table.groups()
    if not groups:
        return {}
    scorable = [r for r in table.reward if math.isfinite(r)]
    best, worst = {max(scorable, default=0.0)}, {min(scorable, default=0.0)}
    values = [{table.reward[row] for row in rows if math.isfinite(table.reward[row])} for rows in groups]
    return {
        "critic/zero_variance_ratio": 1.0 - sum(len(v) > 1 for v in values) / len(groups),
        "critic/all_best_ratio": sum(v == best for v in values) / len(groups),
        "critic/all_worst_ratio": sum(v == worst for v in values) / len(groups),
        "critic/unscorable_ratio": 1.0 - len(scorable) / len(table),
    }


def _balance_metrics(mini_batches: list[MiniBatches], lengths: list[int]) -> dict[str, float]:
    """Prompt + response tokens per data-parallel rank over the step: with rows in table order, and as balanced."""
    rows_of_rank = [[row for mini in per_rank for row in rows_of_mini_batch(mini)] for per_rank in mini_batches]
    balanced = [sum(lengths[row] for row in rows) for rows in rows_of_rank]
    all_rows = sorted(itertools.chain.from_iterable(rows_of_rank))
    dp = len(mini_batches)
    cuts = [rank * len(all_rows) // dp for rank in range(dp + 1)]
    unbalanced = [sum(lengths[row] for row in all_rows[start:end]) for start, end in itertools.pairwise(cuts)]
    return {
        "global_seqlen/min": float(min(unbalanced)),
        "global_seqlen/max": float(max(unbalanced)),
        "global_seqlen/minmax_diff": float(max(unbalanced) - min(unbalanced)),
        "global_seqlen/balanced_min": float(min(balanced)),
        "global_seqlen/balanced_max": float(max(balanced)),
        "global_seqlen/mean": sum(balanced) / dp,
        "perf/dp_imbalance_tokens": imbalance(mini_batches, lengths),
    }


# -- The plan of the critic --------------------------------------------------------------------------------------------
# The critic's part of a plan: mini-batches and token weights of its own, on the rows that the policy's plan gives each rank.


def critic_plan(
    plan: Plan,
    table: GroupTable,
    algorithm: AlgorithmConfig,
    actor: ActorConfig,
    critic: CriticConfig,
    *,
    train_batch_size: int,
    max_response_length: int,
) -> Plan:
    """`plan` with the critic's own mini-batches and token weights. Every row stays on its rank."""
    copies = dupo_copies(table) if algorithm.dupo else [1] * len(table)
    mini_batches = plan.mini_batches
    if critic.ppo_mini_batch_size is not None:
        owner, lengths, counts = (
            plan.owner(),
            table.sequence_lengths(),
            table.num_kept_tokens or table.num_loss_tokens(),
        )
        mini_batches = [[] for _ in plan.mini_batches]
        for groups in groups_of_mini_batches(table, copies, critic.mini_batch_size(actor, train_batch_size)):
            rows = [row for group in groups for row in group if row in owner and counts[row]]
            of_ranks = [[[row] for row in rows if owner[row] == rank] for rank in range(len(mini_batches))]
            add_packed(mini_batches, of_ranks, lengths, actor)
    weighting = actor.model_copy(update={"loss_agg_mode": critic.loss_agg_mode})
    weights = row_weights(mini_batches, table, copies, weighting, max_response_length)
    return replace(plan, token_weights=weights, mini_batches=mini_batches, num_forward_only=[])
