"""The plan of a step: from the table of all samples to who trains on what, with which advantage and weight.

Every rank computes the same plan from the same table: integers, float64, no communication, no random numbers.

1. Advantages, by the registered estimator, over the whole table.
2. Rows that cannot be trained on leave the loss: empty responses, rewards that are not finite.
3. Mini-batches (one optimizer step each) of `ppo_mini_batch_size` prompts in prompt order; a group is never split. One
   in which no row is left is dropped: a step on a zero gradient would still move weights by momentum and decay.
4. Token weights per mini-batch, from that mini-batch's global counts.
5. Rows to data-parallel ranks, longest first to the lightest rank (Graham's LPT rule). Lengths are prompt + response
   tokens. The heaviest rank exceeds the lightest by at most one sequence.
6. Each rank's rows into micro-batches, longest first into the first that has room. A sequence longer than the cap gets
   a micro-batch of its own. Ranks with fewer micro-batches get empty ones: pipeline and gradient collectives need equal
   counts. The largest micro-batch comes first, so that a lack of memory shows at once.

Steps 5 and 6 cannot change the gradient, because of 4.
"""

from __future__ import annotations

import heapq
import itertools
import math

from grpo_megatron.algo.advantages import Advantages, advantage_estimators, informative_groups
from grpo_megatron.algo.token_weights import token_weights
from grpo_megatron.config import ActorConfig, AlgorithmConfig
from grpo_megatron.types import GroupTable, Plan, Schedule


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
    in_loss = [n > 0 and math.isfinite(r) for n, r in zip(table.response_length, table.reward, strict=True)]
    lengths = [p + r for p, r in zip(table.prompt_length, table.response_length, strict=True)]
    advantages = _advantages(table, algorithm, in_loss)
    norm_length = actor.loss_scale_factor or float(max_response_length)

    groups = table.groups()
    size = actor.ppo_mini_batch_size or train_batch_size
    weights = [0.0] * len(table)
    schedules: list[Schedule] = [[] for _ in range(dp)]
    for start in range(0, len(groups), size):
        rows = [row for group in groups[start : start + size] for row in group]
        num_tokens = [table.response_length[row] for row in rows]
        kept = [in_loss[row] for row in rows]
        for row, weight in zip(rows, token_weights(actor.loss_agg_mode, num_tokens, kept, norm_length), strict=True):
            weights[row] = weight
        _add_mini_batch(schedules, [row for row in rows if in_loss[row]], lengths, actor)

    metrics = _group_metrics(table) | _balance_metrics(schedules, lengths)
    return Plan(advantages=advantages, token_weights=weights, schedules=schedules, metrics=metrics)


def supervised_plan(lengths: list[tuple[int, int]], actor: ActorConfig, dp: int) -> Plan:
    """The plan for one step of supervised training: one mini-batch, token-mean, every advantage 1.

    `lengths[row]` is (prompt tokens, response tokens). Rows with an empty response are left out.
    """
    in_loss = [response > 0 for _, response in lengths]
    totals = [prompt + response for prompt, response in lengths]
    schedules: list[Schedule] = [[] for _ in range(dp)]
    _add_mini_batch(schedules, [row for row, kept in enumerate(in_loss) if kept], totals, actor)
    return Plan(
        advantages=[1.0] * len(lengths),
        token_weights=token_weights("token-mean", [response for _, response in lengths], in_loss, 1.0),
        schedules=schedules,
        metrics=_balance_metrics(schedules, totals),
    )


def _advantages(table: GroupTable, algorithm: AlgorithmConfig, in_loss: list[bool]) -> Advantages:
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
        if in_loss[row] and not all(map(math.isfinite, value if isinstance(value, list) else [value])):
            raise ValueError(
                f"algorithm.adv_estimator={name!r} returned {value} for table row {row} (reward {table.reward[row]}); "
                "advantages must be finite: give 0 where the formula has none"
            )
    return advantages


def _add_mini_batch(schedules: list[Schedule], rows: list[int], lengths: list[int], actor: ActorConfig) -> None:
    """Append one mini-batch made of `rows` to every rank's schedule; nothing if there are no rows."""
    if not rows:
        return
    micro_batches = [_pack(share, lengths, actor) for share in _share_out(rows, lengths, len(schedules))]
    count = max(len(packed) for packed in micro_batches)
    for schedule, packed in zip(schedules, micro_batches, strict=True):
        schedule.append(packed + [[] for _ in range(count - len(packed))])


def _longest_first(rows: list[int], lengths: list[int]) -> list[int]:
    return sorted(rows, key=lambda row: (-lengths[row], row))


def _share_out(rows: list[int], lengths: list[int], dp: int) -> list[list[int]]:
    """Rows for each rank. Ties go to the lower row and the lower rank."""
    shares: list[list[int]] = [[] for _ in range(dp)]
    loads = [(0, rank) for rank in range(dp)]  # sorted, hence a heap
    for row in _longest_first(rows, lengths):
        load, rank = loads[0]
        shares[rank].append(row)
        heapq.heapreplace(loads, (load + lengths[row], rank))
    return shares


def _pack(rows: list[int], lengths: list[int], actor: ActorConfig) -> list[list[int]]:
    """First-fit decreasing into micro-batches under both caps."""
    max_sequences = actor.ppo_micro_batch_size_per_gpu or len(rows)
    packed: list[list[int]] = []
    room: list[int] = []  # tokens left in each; may be negative for a sequence above the cap
    for row in _longest_first(rows, lengths):
        for i, micro in enumerate(packed):
            if lengths[row] <= room[i] and len(micro) < max_sequences:
                break
        else:
            i = len(packed)
            packed.append([])
            room.append(actor.ppo_max_token_len_per_gpu)
        packed[i].append(row)
        room[i] -= lengths[row]
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


def _balance_metrics(schedules: list[Schedule], lengths: list[int]) -> dict[str, float]:
    """Tokens per data-parallel rank over the step: rows cut into equal runs in table order, and as balanced."""
    balanced = [sum(lengths[row] for mini in s for micro in mini for row in micro) for s in schedules]
    kept = sorted(row for s in schedules for mini in s for micro in mini for row in micro)
    dp = len(schedules)
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
