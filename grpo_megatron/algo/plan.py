"""The plan of a step: from the table of all samples to the rows of each rank, their advantages and token weights.

Every rank computes the same plan from the same table: integers, float64, no communication, no random numbers.

1. Advantages, by the registered estimator, over the whole table.
2. Rows that cannot be trained on are left out of the loss: responses without a loss token, rewards that are not finite,
   cut-off responses if `mask_truncated_samples`, rows with None from the estimator. They stay in the group's statistics.
3. Mini-batches (one optimizer step each) of `ppo_mini_batch_size` prompts in prompt order; a group is never split. A
   mini-batch without a row is dropped: a step on a zero gradient would still move weights by momentum and decay.
4. Rows (for DPO: pairs) to data-parallel ranks, highest cost first to the lightest rank (Graham's LPT rule). The heaviest
   rank exceeds the lightest by at most one of them.
5. Each rank's rows into micro-batches, longest first into the first that has room (first-fit decreasing). A sequence longer
   than the cap gets a micro-batch of its own. Ranks with fewer micro-batches get empty ones: pipeline and gradient
   collectives need equal counts. The largest micro-batch comes first, so that a lack of memory shows at once.
6. Token weights per mini-batch, from that mini-batch's global counts of rows and loss tokens. Because of them, 4 and 5
   cannot change the gradient.

Here: ranks and micro-batches; token weights; then the plan. The
critic's plan has mini-batches of its own on the same rows.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from grpo_megatron.algo.advantages import Advantages, advantage_estimators, check_rewards, copies_of
from grpo_megatron.config import ActorConfig, AlgorithmConfig, CriticConfig
from grpo_megatron.registry import Registry
from grpo_megatron.types import BRANCH, GroupTable, MiniBatches, Plan, is_shared, rows_of_mini_batch

# -- Ranks and micro-batches -------------------------------------------------------------------------------------------
# The cost of a sequence of s tokens, r of them in the response, is its multiply-adds in a forward pass (models/flops.py
# derives them; the output head reads response tokens only):
#
#     P s + V h r + d H L s^2
#
# A layer with a window of w tokens has m (2 s - m) in place of s^2, with m = min(s, w).
#
# The cost is used where attention is at least a tenth of the mini-batch's. Elsewhere it is s: balanced tokens are balanced
# memory too. Packing is by tokens in either case, since they are what fills a device.
#
# Where `actor.share_prompts` is set, a unit may also be several rows of one prompt, or of one trajectory, which share a copy
# of what their prompts begin with (models/forward.py). Its later rows are without these tokens, and cost the less. The plan
# takes such units if the heaviest rank gets lighter by them: they are larger, so ranks may be less even.
#
# A row without a gradient (`forward_only_at_zero_advantage`) needs no backward pass, which costs twice the forward pass. Such
# rows get micro-batches of their own, the last ones of a mini-batch, if that is cheaper. A micro-batch counts 3 with a
# backward pass and 1 without. A full one is assumed: a step of one micro-batch stays as it is.

Unit = list[int]  # rows that must stay in one micro-batch, in this order: one, a pair, or those that share their prompt

LEAVES = 8  # exact/rowwise.py's NUM_BLOCKS
LEAST_ATTENTION = 10  # attention counts where it is at least one part in so many


@dataclass(frozen=True)
class SequenceCost:
    """The factors of the formula: P, V h and d H L, the last also for layers with a window."""

    per_token: int
    per_response_token: int
    per_square: float
    per_windowed_square: float = 0
    window: int = 0

    def attention(self, length: int) -> float:
        """Returns the multiply-adds of a sequence in attention."""
        seen = min(length, self.window)
        return self.per_square * length * length + self.per_windowed_square * seen * (2 * length - seen)

    def of(
        self, lengths: Sequence[int], response_lengths: Sequence[int], shared: Sequence[int] | None = None
    ) -> list[int]:
        """The cost of each sequence, from its tokens and its response tokens; the tokens where attention is cheap.

        `shared`: how many of its first tokens another sequence computes.
        """
        shared = shared or [0] * len(lengths)
        head = self.per_response_token * sum(response_lengths)
        attention = sum(map(self.attention, lengths))
        if (LEAST_ATTENTION - 1) * attention < self.per_token * sum(lengths) + head:
            return [s - p for s, p in zip(lengths, shared, strict=True)]
        return [
            round(self.per_token * (s - p) + self.per_response_token * r + self.attention(s) - self.attention(p))
            for s, r, p in zip(lengths, response_lengths, shared, strict=True)
        ]


@dataclass(frozen=True)
class Assignment:
    """Ranks and micro-batches of a step: what `types.Plan` has, and the tokens and costs of each row that it is made from."""

    mini_batches: list[MiniBatches]
    num_forward_only: list[int]
    lengths: list[int]
    costs: list[int]
    shares_prompts: bool = False

    def heaviest(self) -> int:
        """The cost of the heaviest rank, summed over the mini-batches."""
        return sum(max(of_rank) for of_rank in _costs_of_ranks(self.mini_batches, self.costs))


def assign(
    units_of_mini_batches: list[list[Unit]],
    dp: int,
    lengths: list[int],
    costs: list[int],
    actor: ActorConfig,
    forward_only: Collection[int] = (),
) -> Assignment:
    """One mini-batch for each list of units, none for an empty one. `forward_only`: the rows without a gradient."""
    mini_batches: list[MiniBatches] = [[] for _ in range(dp)]
    counts, without = [], frozenset(forward_only)
    for units in filter(None, units_of_mini_batches):
        packed, count = pack_units(balance(units, costs, dp), lengths, actor), 0
        kinds: tuple[list[Unit], list[Unit]] = ([], [])  # with a gradient, without
        for unit in units:
            kinds[without.issuperset(unit)].append(unit)
        if kinds[True]:
            with_gradient, silent = (pack_units(balance(kind, costs, dp), lengths, actor) for kind in kinds)
            if 3 * len(with_gradient[0]) + len(silent[0]) < 3 * len(packed[0]):
                packed, count = [a + b for a, b in zip(with_gradient, silent, strict=True)], len(silent[0])
        for of_rank, micro_batches in zip(mini_batches, packed, strict=True):
            of_rank.append(micro_batches)
        counts.append(count)
    return Assignment(mini_batches, counts, lengths, costs)


def assign_leaves(units_of_mini_batches: list[list[Unit]], dp: int, lengths: list[int]) -> Assignment:
    """`model.exact`: the rows of a mini-batch, in table order, as LEAVES neighbouring parts of equal numbers of rows.

    A part's gradients are added row by row, and the parts' by one tree (exact/layers.py). Rank r of D has the parts
    [8 r / D, 8 (r + 1) / D). A micro-batch is one row; all parts have as many, the last ones of them empty.
    """
    mini_batches: list[MiniBatches] = [[] for _ in range(dp)]
    for units in filter(None, units_of_mini_batches):
        rows = sorted(itertools.chain.from_iterable(units))
        cuts = [len(rows) * leaf // LEAVES for leaf in range(LEAVES + 1)]
        leaves = [[[row] for row in rows[start:end]] for start, end in itertools.pairwise(cuts)]
        size = max(map(len, leaves))
        for leaf in leaves:
            leaf += [[] for _ in range(size - len(leaf))]
        for rank, of_rank in enumerate(mini_batches):
            of_rank.append(list(itertools.chain.from_iterable(leaves[rank * LEAVES // dp : (rank + 1) * LEAVES // dp])))
    return Assignment(mini_batches, [0] * len(mini_batches[0]), lengths, lengths)


def _lighter(
    minis: list[list[Unit]],
    table: GroupTable,
    actor: ActorConfig,
    dp: int,
    cost: SequenceCost,
    silent: set[int],
) -> Assignment:
    """The lighter of two assignments: with whole rows, and with rows that share their prompt if the config allows it."""
    lengths = table.sequence_lengths()
    whole = assign(minis, dp, lengths, cost.of(lengths, table.response_length), actor, silent)
    if not actor.share_prompts:
        return whole
    merged, shared = [merge_prompts(units, table, actor, silent) for units in minis], [0] * len(table)
    for unit in itertools.chain.from_iterable(merged):
        for row in unit[1:]:  # the first row of the unit computes the tokens
            shared[row] = shared_with_first(table, row)
    own = [s - p for s, p in zip(lengths, shared, strict=True)]
    sharing = assign(merged, dp, own, cost.of(lengths, table.response_length, shared), actor, silent)
    return replace(sharing, shares_prompts=True) if sharing.heaviest() < whole.heaviest() else whole


def shared_with_first(table: GroupTable, row: int) -> int:
    """The tokens that a row shares with the first row of its unit: its prompt, or what its trajectory's end begins with."""
    return table.shared_length[row] if table.shared_length else table.prompt_length[row]


def merge_prompts(
    units: list[Unit], table: GroupTable, actor: ActorConfig, forward_only: Collection[int] = ()
) -> list[Unit]:
    """Units of one row each -> units of rows that share their first tokens, as many as a micro-batch has room for."""

    def kind_of(row: int) -> tuple[bool, int, int]:
        return row in forward_only, table.prompt_index[row], table.index[row] % BRANCH if table.shared_length else 0

    most = actor.ppo_micro_batch_size_per_gpu or len(units)
    merged: list[Unit] = []
    kind, room = None, 0
    for [row] in sorted(units, key=lambda unit: (kind_of(unit[0]), unit)):
        shared, length = shared_with_first(table, row), table.prompt_length[row] + table.response_length[row]
        fits = kind == kind_of(row) and length - shared <= room and len(merged[-1]) < most
        if fits and is_shared(shared, table.prompt_length[row]):
            merged[-1].append(row)
            room -= length - shared
        else:
            merged.append([row])
            kind, room = kind_of(row), actor.ppo_max_token_len_per_gpu - length
    return merged


def balance(units: list[Unit], costs: list[int], dp: int) -> list[list[Unit]]:
    """The units of each rank. Ties go to the lower row and the lower rank."""
    units_of_rank: list[list[Unit]] = [[] for _ in range(dp)]
    loads = [(0, rank) for rank in range(dp)]  # sorted, hence a heap
    for cost, unit in _highest_first(units, costs):
        load, rank = loads[0]
        units_of_rank[rank].append(unit)
        heapq.heapreplace(loads, (load + cost, rank))
    return units_of_rank


def pack_units(units_of_rank: list[list[Unit]], lengths: list[int], actor: ActorConfig) -> MiniBatches:
    """The micro-batches of each rank, as many on each: at least one, and empty ones at the end."""
    packed = [_pack(units, lengths, actor) for units in units_of_rank]
    count = max(1, *map(len, packed))
    return [micro_batches + [[] for _ in range(count - len(micro_batches))] for micro_batches in packed]


def _highest_first(units: list[Unit], values: list[int]) -> list[tuple[int, Unit]]:
    """(sum of its rows' values, unit), highest first."""
    return sorted(((sum(values[row] for row in unit), unit) for unit in units), key=lambda pair: (-pair[0], pair[1]))


def _pack(units: list[Unit], lengths: list[int], actor: ActorConfig) -> list[list[int]]:
    """First-fit decreasing into micro-batches under both caps, with the padding of context parallelism."""
    cp = actor.megatron.context_parallel_size
    if cp > 1:
        lengths = [n + (-n % (2 * cp)) for n in lengths]
    max_sequences = actor.ppo_micro_batch_size_per_gpu or sum(map(len, units))
    packed: list[list[int]] = []
    room: list[int] = []  # tokens left in each; may be negative for a unit above the cap
    for size, unit in _highest_first(units, lengths):
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


def imbalance(mini_batches: list[MiniBatches], costs: list[int]) -> float:
    """The heaviest rank's cost, as a fraction above the mean rank's. Ranks wait for each other at every mini-batch."""
    of_ranks = _costs_of_ranks(mini_batches, costs)
    heaviest, total = sum(map(max, of_ranks)), sum(map(sum, of_ranks))
    return heaviest * len(mini_batches) / total - 1.0 if total else 0.0


def _costs_of_ranks(mini_batches: list[MiniBatches], costs: list[int]) -> list[list[int]]:
    """[mini-batch][rank]"""
    return [
        [sum(costs[row] for row in rows_of_mini_batch(per_rank[mini])) for per_rank in mini_batches]
        for mini in range(len(mini_batches[0]))
    ]


# -- Aggregation: loss = sum over tokens of weight * token loss, with weights that are fixed before batching -----------
# They are known before anything is packed, so micro-batches, padding and parallel layouts cannot change the gradient.
# Averaging the means of micro-batches, as several codebases do, makes the gradient depend on all three.

# (n_i of the responses that count: all > 0, at least one; L) -> one weight per response
TokenWeighting = Callable[[list[int], float], list[float]]

token_weightings: Registry[TokenWeighting] = Registry("loss aggregation mode")

_WEIGHTINGS: dict[str, TokenWeighting] = {
    "token-mean": lambda lengths, norm_length: [1.0 / sum(lengths)] * len(lengths),
    "seq-mean-token-mean": lambda lengths, norm_length: [1.0 / (len(lengths) * length) for length in lengths],
    "seq-mean-token-sum": lambda lengths, norm_length: [1.0 / len(lengths)] * len(lengths),
    "seq-mean-token-sum-norm": lambda lengths, norm_length: [1.0 / (len(lengths) * norm_length)] * len(lengths),
    "token-sum": lambda lengths, norm_length: [1.0] * len(lengths),
}
for _mode, _weighting in _WEIGHTINGS.items():
    token_weightings.register(_mode)(_weighting)


def token_weights(mode: str, num_loss_tokens: list[int], norm_length: float) -> list[float]:
    """Computes the weight of each response's loss tokens in the loss of ONE optimizer step.

        token-mean                1 / N_tok                DAPO, arXiv 2503.14476
        seq-mean-token-mean       1 / (N_seq * n_i)        DeepSeekMath, arXiv 2402.03300: 1/G sum 1/|o_i|
        seq-mean-token-sum        1 / N_seq
        seq-mean-token-sum-norm   1 / (N_seq * L)          Dr.GRPO, arXiv 2503.20783; L is constant through the run
        token-sum                 1

    n_i is the number of loss tokens of response i, N_tok = sum n_i and N_seq = #{n_i > 0}, both over the optimizer step: every
    micro-batch, every data-parallel rank. A response that is left out, or has no loss token, counts in neither.

    `num_loss_tokens[i]` is n_i of every response of the whole optimizer step, not of one rank's share; 0 leaves a response
    out. `norm_length` is L in tokens. Raises ValueError on an unknown mode.
    """
    weighting = token_weightings.get(mode)
    counts = [count for count in num_loss_tokens if count]
    weights = iter(weighting(counts, norm_length) if counts else [])
    return [next(weights) if count else 0.0 for count in num_loss_tokens]


# -- The plan ----------------------------------------------------------------------------------------------------------


def make_plan(
    table: GroupTable,
    algorithm: AlgorithmConfig,
    actor: ActorConfig,
    *,
    dp: int,
    train_batch_size: int,
    max_response_length: int,
    cost: SequenceCost | None = None,
    exact: bool = False,
) -> Plan:
    """`assign_rows`, then `weigh`: the plan of rows whose advantages and weights need no log-probabilities."""
    plan = assign_rows(table, algorithm, actor, dp=dp, train_batch_size=train_batch_size, cost=cost, exact=exact)
    return weigh(plan, table, algorithm, actor, max_response_length=max_response_length)


def assign_rows(
    table: GroupTable,
    algorithm: AlgorithmConfig,
    actor: ActorConfig,
    *,
    dp: int,
    train_batch_size: int,
    cost: SequenceCost | None = None,
    exact: bool = False,
    given: Advantages | None = None,
    distills: bool = False,
) -> Plan:
    """Decide which of `dp` data-parallel ranks trains on which rows; balanced by `cost` (None: tokens).

    `train_batch_size` is in prompts and is the mini-batch when `ppo_mini_batch_size` is null. The last mini-batch may be
    short and then has its own, smaller counts. There may be no mini-batch at all. `exact`: see `assign_leaves`. `given`:
    advantages by row, in place of the estimator's. `distills`: see `_trainable`; then every row has a gradient. The plan
    has the advantages that the rewards give, and no token weights: see `weigh`. Raises ValueError on unknown names and on
    an estimator that returns the wrong number of advantages or one that is not finite.
    """
    from grpo_megatron.algo.losses import forward_only_at_zero_advantage, loss_facts  # they import torch

    policy = table.of_policy()
    if given is None:
        trainable = _trainable(policy, algorithm, distills)
        advantages = _advantages(policy, algorithm, trainable)
    else:
        trainable, advantages = [count > 0 for count in policy.num_loss_tokens()], given
    copies = copies_of(policy, algorithm)
    in_loss = [
        can_train and advantage is not None and count > 0
        for can_train, advantage, count in zip(trainable, advantages, copies, strict=True)
    ]
    paired = loss_facts(actor).paired
    minis: list[list[Unit]] = []
    for groups in groups_of_mini_batches(policy, copies, actor.mini_batch_size(train_batch_size)):
        minis.append([])
        for group in groups:
            rows = [row for row in group if in_loss[row]]
            minis[-1] += _pairs(rows, advantages) if paired else [[row] for row in rows]
    experts = range(len(policy), len(table))  # CHORD: equal parts for the mini-batches
    minis = minis or [[] for _ in experts[:1]]
    for number, row in enumerate(experts):
        minis[number % len(minis)].append([row])
    is_silent = forward_only_at_zero_advantage(algorithm, actor) and not distills
    silent = _rows_of_zero_advantage(advantages) if is_silent else set()
    if exact:
        chosen = assign_leaves(minis, dp, table.sequence_lengths())
    else:
        chosen = _lighter(minis, table, actor, dp, cost or SequenceCost(1, 0, 0), silent)

    metrics = _group_metrics(policy.joined())
    advantages = [*advantages, *[None] * len(experts)]
    plan = Plan(advantages, [], chosen.mini_batches, metrics, chosen.num_forward_only, chosen.shares_prompts)
    metrics |= _balance_metrics(plan, chosen)
    if actor.share_prompts:
        own, whole = (
            sum(of_rows[row] for row in plan.owner()) for of_rows in (chosen.lengths, table.sequence_lengths())
        )
        metrics["perf/shared_prompt_ratio"] = 1.0 - own / max(1, whole)
    return plan


def weigh(
    plan: Plan,
    table: GroupTable,
    algorithm: AlgorithmConfig,
    actor: ActorConfig,
    *,
    max_response_length: int,
    distills: bool = False,
) -> Plan:
    """The assigned plan with its token weights and final advantages. Call it once, when log-probabilities are known.

    Columns of `table` that need log-probabilities: `token_penalties` (a KL penalty in the reward), `score_norms` and `values`
    (of a critic) change the advantages. `num_kept_tokens` (without the tokens that a correction has rejected) changes the
    counts, and a mini-batch without a kept token is dropped. `max_response_length`, in tokens, is L of
    seq-mean-token-sum-norm when `loss_scale_factor` is null. No row changes its rank.
    """
    advantages, policy = plan.advantages, table.of_policy()
    of_experts = len(table) - len(policy)
    if table.token_penalties or table.values or table.score_norms:
        estimated = _advantages(policy, algorithm, _trainable(policy, algorithm, distills))
        advantages = [*estimated, *[None] * of_experts]
    kept = kept_mini_batches(plan, table)
    weighed = replace(
        plan,
        advantages=advantages,
        mini_batches=[[of_rank[i] for i in kept] for of_rank in plan.mini_batches],
        num_forward_only=[plan.num_forward_only[i] for i in kept] if plan.num_forward_only else [],
    )
    copies = copies_of(policy, algorithm)
    weights = row_weights(weighed.mini_batches, policy, copies, actor, max_response_length) + [0.0] * of_experts
    wrong = set(weighed.rows_without_backward()) - _rows_of_zero_advantage(advantages)
    assert not wrong, f"rows {sorted(wrong)[:10]} got an advantage, and the plan gives them no backward pass"
    return replace(weighed, token_weights=weights)


def kept_mini_batches(plan: Plan, table: GroupTable) -> list[int]:
    """The numbers of the mini-batches in which a correction has left a token, or which have a row of an expert."""
    numbers = range(len(plan.mini_batches[0]))
    if not table.num_kept_tokens:
        return list(numbers)
    kept = [*table.num_kept_tokens[: len(table.of_policy())], *map(len, table.expert_spans[len(table.of_policy()) :])]
    return [i for i in numbers if any(kept[row] for row in _rows_on_all_ranks(plan.mini_batches, i))]


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
    copies, mini_batches = copies_of(table, algorithm), plan.mini_batches
    if critic.ppo_mini_batch_size is not None:
        owner, lengths = plan.owner(), table.sequence_lengths()
        counts = table.num_kept_tokens or table.num_loss_tokens()
        mini_batches = [[] for _ in plan.mini_batches]
        for groups in groups_of_mini_batches(table, copies, critic.mini_batch_size(actor, train_batch_size)):
            rows = [row for group in groups for row in group if row in owner and counts[row]]
            units = [[[row] for row in rows if owner[row] == rank] for rank in range(len(mini_batches))]
            for of_rank, micro_batches in zip(mini_batches, pack_units(units, lengths, actor), strict=True):
                of_rank += [micro_batches] if rows else []
    weighting = actor.model_copy(update={"loss_agg_mode": critic.loss_agg_mode})
    weights = row_weights(mini_batches, table, copies, weighting, max_response_length)
    return replace(plan, token_weights=weights, mini_batches=mini_batches, num_forward_only=[])


def scoring_plan(lengths: list[int], actor: ActorConfig, dp: int) -> Plan:
    """The plan to pass rows of these lengths (tokens) through a model once: one mini-batch, no advantages, no weights."""
    assigned = assign([[[row] for row, length in enumerate(lengths) if length]], dp, lengths, lengths, actor)
    return Plan([0.0] * len(lengths), [0.0] * len(lengths), assigned.mini_batches)


def _trainable(table: GroupTable, algorithm: AlgorithmConfig, distills: bool = False) -> list[bool]:
    """Per row: it has a loss token and a reward, and was not cut off where `mask_truncated_samples` drops such rows.

    `distills`: the rows learn from a teacher, which needs no reward. Those without one have advantage 0. A critic reads rewards.
    """
    without_reward = distills and not advantage_estimators.facts(algorithm.adv_estimator).needs_values
    dropped = table.truncated if algorithm.mask_truncated_samples else [False] * len(table)
    rows = zip(table.num_loss_tokens(), table.reward, dropped, strict=True)
    return [count > 0 and (without_reward or math.isfinite(reward)) and not drop for count, reward, drop in rows]


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
    numbers = {row: value for row in rows if isinstance(value := advantages[row], float)}
    chosen = [row for row, value in numbers.items() if value > 0]
    rejected = [row for row, value in numbers.items() if value < 0]
    return [[chosen[0], rejected[0]]] if chosen and rejected else []


def _rows_of_zero_advantage(advantages: Advantages) -> set[int]:
    """The rows that have an advantage, and it is 0 at every token."""
    known = ((row, value) for row, value in enumerate(advantages) if value is not None)
    return {row for row, value in known if not any(value if isinstance(value, list) else [value])}


def _rows_on_all_ranks(mini_batches: list[MiniBatches], mini: int) -> list[int]:
    """The rows of mini-batch number `mini`, of all ranks."""
    return sorted(row for per_rank in mini_batches for row in rows_of_mini_batch(per_rank[mini]))


def row_weights(
    mini_batches: list[MiniBatches], table: GroupTable, copies: list[int], actor: ActorConfig, max_response_length: int
) -> list[float]:
    """The weight of each row's loss tokens, from the counts of its mini-batch. A row with m copies counts as m rows.

    The rows of one trajectory, which are in one mini-batch, count as one.
    """
    norm_length = actor.loss_scale_factor or float(max_response_length)
    num_tokens = table.num_kept_tokens or table.num_loss_tokens()
    trajectories = table.trajectories
    weights = [0.0] * len(trajectories)
    for mini in range(len(mini_batches[0])):
        present = set(_rows_on_all_ranks(mini_batches, mini))
        counts = {i: sum(num_tokens[row] for row in rows if row in present) for i, rows in enumerate(trajectories)}
        numbers = [i for i, count in counts.items() if count for _ in range(copies[trajectories[i][-1]])]
        mini_weights = token_weights(actor.loss_agg_mode, [counts[i] for i in numbers], norm_length)
        for i, weight in zip(numbers, mini_weights, strict=True):
            weights[i] += weight
    return table.spread(weights)


def observation_weights(plan: Plan, table: GroupTable, coefficient: float) -> list[float]:
    """The weight of each row's tokens that an environment wrote: coefficient / their number in the mini-batch, on all ranks.

    ECHO: the policy also learns to predict them, by cross entropy (as in prime-rl, with one coefficient for all roles, and
    with the chat template's marks around them). Text that a later row of a trajectory has in its prompt is not among them.
    """
    policy = table.of_policy()
    counts = [length - count for length, count in zip(policy.response_length, policy.num_loss_tokens(), strict=True)]
    counts += [0] * (len(table) - len(policy))
    return weights_by_count(plan, counts, coefficient)


def weights_by_count(plan: Plan, counts: Sequence[int], coefficient: float) -> list[float]:
    """coefficient / the counts of all rows in the mini-batch, on all ranks, for each row that has a count; 0 for the others."""
    weights = [0.0] * len(counts)
    for mini in range(len(plan.mini_batches[0])):
        rows = [row for row in _rows_on_all_ranks(plan.mini_batches, mini) if counts[row]]
        total = sum(counts[row] for row in rows)
        for row in rows:
            weights[row] = coefficient / total
    return weights


def _advantages(table: GroupTable, algorithm: AlgorithmConfig, trainable: list[bool]) -> Advantages:
    """Per row. The estimator compares trajectories: the sequences of one are one response to it, however many they are."""
    can_train = [any(trainable[row] for row in rows) for rows in table.trajectories]
    return table.spread(_estimated(table.joined(), algorithm, can_train))


def _estimated(table: GroupTable, algorithm: AlgorithmConfig, trainable: list[bool]) -> Advantages:
    """Run the estimator and check what it returns: it may be the user's own."""
    name = algorithm.adv_estimator
    check_rewards(table.reward)  # also for estimators of the user's own
    facts = advantage_estimators.facts(name)
    if (facts.needs_values and not table.values) or (facts.needs_score_norms and not table.score_norms):
        return [0.0] * len(table)  # known once a model has read the rows, which this plan gives to the ranks
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
    and 1 these are the prompts that are too easy and too hard. Where the whole step has one reward they are absent.
    """
    groups = table.groups()
    if not groups:
        return {}
    scorable = [r for r in table.reward if math.isfinite(r)]
    best, worst = {max(scorable, default=0.0)}, {min(scorable, default=0.0)}
    values = [{table.reward[row] for row in rows if math.isfinite(table.reward[row])} for rows in groups]
    extremes = {"critic/all_best_ratio": best, "critic/all_worst_ratio": worst} if best != worst else {}
    return {
        "critic/zero_variance_ratio": 1.0 - sum(len(v) > 1 for v in values) / len(groups),
        "critic/unscorable_ratio": 1.0 - len(scorable) / len(table),
        **{name: sum(v == extreme for v in values) / len(groups) for name, extreme in extremes.items()},
    }


def _balance_metrics(plan: Plan, assigned: Assignment) -> dict[str, float]:
    """Prompt + response tokens per data-parallel rank over the step: with rows in table order, and as balanced."""
    lengths, dp = assigned.lengths, len(plan.mini_batches)

    def tokens(rows: list[int]) -> int:
        return sum(lengths[row] for row in rows)

    rows_of_rank = [plan.rows(rank) for rank in range(dp)]
    balanced, all_rows = [tokens(rows) for rows in rows_of_rank], sorted(itertools.chain.from_iterable(rows_of_rank))
    cuts = [rank * len(all_rows) // dp for rank in range(dp + 1)]
    unbalanced = [tokens(all_rows[start:end]) for start, end in itertools.pairwise(cuts)]
    return {
        "global_seqlen/min": float(min(unbalanced)),
        "global_seqlen/max": float(max(unbalanced)),
        "global_seqlen/minmax_diff": float(max(unbalanced) - min(unbalanced)),
        "global_seqlen/balanced_min": float(min(balanced)),
        "global_seqlen/balanced_max": float(max(balanced)),
        "global_seqlen/mean": sum(balanced) / dp,
        "perf/dp_imbalance_tokens": imbalance(plan.mini_batches, lengths),
        "perf/dp_imbalance_flops": imbalance(plan.mini_batches, assigned.costs),
        "perf/forward_only_ratio": tokens(plan.rows_without_backward()) / max(1, sum(balanced)),
    }
