"""The plan of a step: from the table of all samples to who trains on what, with which advantage and weight.

Every rank computes the same plan from the same table: integers, float64, no communication, no random numbers.

1. Advantages, by the registered estimator, over the whole table.
2. Rows that cannot be trained on leave the loss: empty responses, rewards that are not finite, cut-off responses if
   `mask_truncated_samples`, rows to which the estimator gives None. They keep their place in the group's statistics.
3. Mini-batches (one optimizer step each) of `ppo_mini_batch_size` prompts in prompt order; a group is never split. One
   in which no row is left is dropped: a step on a zero gradient would still move weights by momentum and decay.
4. Rows (for DPO: pairs) to data-parallel ranks, longest first to the lightest rank (Graham's LPT rule). Lengths are
   prompt + response tokens. The heaviest rank exceeds the lightest by at most one sequence.
5. Each rank's rows into micro-batches, longest first into the first that has room. A sequence longer than the cap gets
   a micro-batch of its own. Ranks with fewer micro-batches get empty ones: pipeline and gradient collectives need equal
   counts. The largest micro-batch comes first, so that a lack of memory shows at once.
6. Token weights per mini-batch, from that mini-batch's global counts. Because of them, 4 and 5 cannot change the
   gradient.

DUPO (WebSailor, arXiv 2507.02592): groups without different rewards leave, and groups with them are copied into their
places. A copy is an integer weight, which counts in the denominators as well.
"""

from __future__ import annotations

import heapq
import itertools
import math

from grpo_megatron.algo.advantages import Advantages, advantage_estimators, informative_groups
from grpo_megatron.algo.losses import PAIRED_LOSSES
from grpo_megatron.algo.shaping import dupo_copies
from grpo_megatron.algo.token_weights import token_weights
from grpo_megatron.config import ActorConfig, AlgorithmConfig
from grpo_megatron.types import GroupTable, MiniBatches, Plan


def make_plan(
    table: GroupTable,
    algorithm: AlgorithmConfig,
    actor: ActorConfig,
    *,
    dp: int,
    train_batch_size: int,
    max_response_length: int,
) -> Plan:
    """The plan for one step of GRPO over `dp` data-parallel ranks.

    `train_batch_size` is in prompts and is the mini-batch when `ppo_mini_batch_size` is null; `max_response_length` is
    in tokens and is L of seq-mean-token-sum-norm when `loss_scale_factor` is null. The last mini-batch may be short and
    then has its own, smaller counts. There may be no mini-batch at all. Raises ValueError on unknown names and on an
    estimator that returns the wrong number of advantages or one that is not finite.
    """
    lengths = [p + r for p, r in zip(table.prompt_length, table.response_length, strict=True)]
    trainable = _trainable(table, algorithm)
    advantages = _advantages(table, algorithm, trainable)
    copies = dupo_copies(table) if algorithm.dupo else [1] * len(table)
    in_loss = [ok and a is not None and c > 0 for ok, a, c in zip(trainable, advantages, copies, strict=True)]

    mini_batches: list[MiniBatches] = [[] for _ in range(dp)]
    for groups in _mini_batches(table, copies, actor.mini_batch_size(train_batch_size)):
        kept = [[row for row in group if in_loss[row]] for group in groups]
        if actor.loss_mode in PAIRED_LOSSES:
            units = [unit for group in kept if (unit := _pair(group, advantages))]
        else:
            units = [[row] for group in kept for row in group]
        _add_mini_batch(mini_batches, units, lengths, actor)

    weights = _weights(mini_batches, table, copies, actor, max_response_length)
    metrics = _group_metrics(table) | _balance_metrics(mini_batches, lengths)
    return Plan(advantages=advantages, token_weights=weights, mini_batches=mini_batches, metrics=metrics)


def revise_plan(
    plan: Plan, table: GroupTable, algorithm: AlgorithmConfig, actor: ActorConfig, *, max_response_length: int
) -> Plan:
    """The same rows on the same ranks, with what only the training engine could tell: `table` has now
    `token_penalties` (a KL penalty in the reward) or `num_kept_tokens` (tokens that a correction has masked).

    Advantages and weights are made anew. A mini-batch in which every token is masked is dropped.
    """
    advantages = _advantages(table, algorithm, _trainable(table, algorithm))
    copies = dupo_copies(table) if algorithm.dupo else [1] * len(table)
    weights = _weights(plan.mini_batches, table, copies, actor, max_response_length)
    live = [any(weights[row] for row in _rows_of_mini(plan.mini_batches, i)) for i in range(len(plan.mini_batches[0]))]
    mini_batches = [[mini for mini, alive in zip(s, live, strict=True) if alive] for s in plan.mini_batches]
    return Plan(advantages=advantages, token_weights=weights, mini_batches=mini_batches, metrics=plan.metrics)


def _trainable(table: GroupTable, algorithm: AlgorithmConfig) -> list[bool]:
    """Rows that a gradient could be taken of: something was said, it has a reward, and it was not cut off (if asked)."""
    cut = table.truncated if algorithm.mask_truncated_samples else [False] * len(table)
    rows = zip(table.response_length, table.reward, cut, strict=True)
    return [length > 0 and math.isfinite(reward) and not masked for length, reward, masked in rows]


def _mini_batches(table: GroupTable, copies: list[int], size: int) -> list[list[list[int]]]:
    """The groups of each optimizer step: `size` prompts in order, or, where some have no copy, as many even runs."""
    groups = table.groups()
    count = -(-len(groups) // size)
    kept = [group for group in groups if any(copies[row] for row in group)]
    if len(kept) == len(groups):
        return [groups[start : start + size] for start in range(0, len(groups), size)]
    return [kept[i * len(kept) // count : (i + 1) * len(kept) // count] for i in range(count)]


def _pair(rows: list[int], advantages: Advantages) -> list[int]:
    """[chosen, rejected] of one group, or nothing unless both are there."""
    chosen = [row for row in rows if isinstance(advantages[row], float) and advantages[row] > 0]  # type: ignore[operator]
    rejected = [row for row in rows if isinstance(advantages[row], float) and advantages[row] < 0]  # type: ignore[operator]
    return [chosen[0], rejected[0]] if chosen and rejected else []


def _rows_of_mini(mini_batches: list[MiniBatches], mini: int) -> list[int]:
    return sorted(row for schedule in mini_batches for micro in schedule[mini] for row in micro)


def _weights(
    mini_batches: list[MiniBatches], table: GroupTable, copies: list[int], actor: ActorConfig, max_response_length: int
) -> list[float]:
    """The weight of each row's tokens, from the counts of its mini-batch. A row with m copies is m rows there."""
    norm_length = actor.loss_scale_factor or float(max_response_length)
    num_tokens = table.num_kept_tokens or table.response_length
    weights = [0.0] * len(table)
    for mini in range(len(mini_batches[0])):
        rows = [row for row in _rows_of_mini(mini_batches, mini) for _ in range(copies[row])]
        lengths = [num_tokens[row] for row in rows]
        for row, weight in zip(
            rows, token_weights(actor.loss_agg_mode, lengths, [True] * len(rows), norm_length), strict=True
        ):
            weights[row] += weight
    return weights


def supervised_plan(lengths: list[tuple[int, int]], actor: ActorConfig, dp: int) -> Plan:
    """The plan for one step of supervised training: one mini-batch, token-mean, every advantage 1.

    `lengths[row]` is (prompt tokens, response tokens). Rows with an empty response are left out.
    """
    totals = [prompt + response for prompt, response in lengths]
    mini_batches: list[MiniBatches] = [[] for _ in range(dp)]
    _add_mini_batch(mini_batches, [[row] for row, (_, response) in enumerate(lengths) if response], totals, actor)
    return Plan(
        advantages=[1.0] * len(lengths),
        token_weights=token_weights("token-mean", [response for _, response in lengths], [True] * len(lengths), 1.0),
        mini_batches=mini_batches,
        metrics=_balance_metrics(mini_batches, totals),
    )


def _advantages(table: GroupTable, algorithm: AlgorithmConfig, trainable: list[bool]) -> Advantages:
    """Run the estimator and check it: it may be the user's own."""
    name = algorithm.adv_estimator
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
        if not all(map(math.isfinite, value if isinstance(value, list) else [value])):
            raise ValueError(
                f"algorithm.adv_estimator={name!r} returned {value} for table row {row} (reward {table.reward[row]}); "
                "advantages must be finite: give 0 where the formula has none"
            )
    return advantages


# A unit is what must stay in one micro-batch, in this order: a row, or a pair of rows.
Unit = list[int]


def _add_mini_batch(mini_batches: list[MiniBatches], units: list[Unit], lengths: list[int], actor: ActorConfig) -> None:
    """Append one mini-batch made of `units` to every rank's schedule; nothing if there are none."""
    if not units:
        return
    micro_batches = [_pack(share, lengths, actor) for share in _share_out(units, lengths, len(mini_batches))]
    count = max(len(packed) for packed in micro_batches)
    for schedule, packed in zip(mini_batches, micro_batches, strict=True):
        schedule.append(packed + [[] for _ in range(count - len(packed))])


def _longest_first(units: list[Unit], lengths: list[int]) -> list[tuple[int, Unit]]:
    """(tokens, unit), longest first."""
    sized = [(sum(lengths[row] for row in unit), unit) for unit in units]
    return sorted(sized, key=lambda entry: (-entry[0], entry[1]))


def _share_out(units: list[Unit], lengths: list[int], dp: int) -> list[list[Unit]]:
    """Units for each rank. Ties go to the lower row and the lower rank."""
    shares: list[list[Unit]] = [[] for _ in range(dp)]
    loads = [(0, rank) for rank in range(dp)]  # sorted, hence a heap
    for size, unit in _longest_first(units, lengths):
        load, rank = loads[0]
        shares[rank].append(unit)
        heapq.heapreplace(loads, (load + size, rank))
    return shares


def _pack(units: list[Unit], lengths: list[int], actor: ActorConfig) -> list[list[int]]:
    """First-fit decreasing into micro-batches under both caps."""
    max_sequences = actor.ppo_micro_batch_size_per_gpu or sum(map(len, units))
    packed: list[list[int]] = []
    room: list[int] = []  # tokens left in each; may be negative for a unit above the cap
    for size, unit in _longest_first(units, lengths):
        for i, micro in enumerate(packed):
            if size <= room[i] and len(micro) + len(unit) <= max_sequences:
                break
        else:
            i = len(packed)
            packed.append([])
            room.append(actor.ppo_max_token_len_per_gpu)
        packed[i].extend(unit)
        room[i] -= size
    return packed


def _group_metrics(table: GroupTable) -> dict[str, float]:
    """Shares of prompts without a gradient, and of samples without a reward.

    all_best and all_worst: every scorable reward of the prompt equals the highest (lowest) of the step; with 0/1
    rewards, "too easy" and "too hard". Both are 1 when the whole step has one reward.
    """
    groups = table.groups()
    if not groups:
        return {}
    scorable = [r for r in table.reward if math.isfinite(r)]
    best, worst = {max(scorable, default=0.0)}, {min(scorable, default=0.0)}
    values = [{table.reward[row] for row in rows if math.isfinite(table.reward[row])} for rows in groups]
    return {
        "critic/zero_variance_ratio": 1.0 - len(list(informative_groups(table))) / len(groups),
        "critic/all_best_ratio": sum(v == best for v in values) / len(groups),
        "critic/all_worst_ratio": sum(v == worst for v in values) / len(groups),
        "critic/unscorable_ratio": 1.0 - len(scorable) / len(table),
    }


def _balance_metrics(mini_batches: list[MiniBatches], lengths: list[int]) -> dict[str, float]:
    """Tokens per data-parallel rank over the step: rows cut into equal runs in table order, and as balanced."""
    balanced = [sum(lengths[row] for mini in s for micro in mini for row in micro) for s in mini_batches]
    kept = sorted(row for s in mini_batches for mini in s for micro in mini for row in micro)
    dp = len(mini_batches)
    cuts = [rank * len(kept) // dp for rank in range(dp + 1)]
    unbalanced = [sum(lengths[row] for row in kept[a:b]) for a, b in itertools.pairwise(cuts)]
    return {
        "global_seqlen/min": float(min(unbalanced)),
        "global_seqlen/max": float(max(unbalanced)),
        "global_seqlen/minmax_diff": float(max(unbalanced) - min(unbalanced)),
        "global_seqlen/balanced_min": float(min(balanced)),
        "global_seqlen/balanced_max": float(max(balanced)),
        "global_seqlen/mean": sum(balanced) / dp,
    }
