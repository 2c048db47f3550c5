"""Advantage estimators, the frame: the table of a step's rewards in, one number per sample (or per response token) out.

The estimators are in the files of their families: grpo.py, reinforce.py, ppo.py, preference.py, reward_models.py. Rules for
all: rewards are float64, and sums are exact (`math.fsum`), so no order of samples and no layout changes a bit of an
advantage. A sample whose reward is not finite is unscorable: it is in no statistic, gets 0, and the plan leaves it out of
the loss. A response without a loss token that has a reward is a sample like any other, and stays in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from grpo_megatron.config import AlgorithmConfig, LengthReward, OverlongBuffer
from grpo_megatron.registry import FactRegistry
from grpo_megatron.types import GroupTable

EPSILON = 1e-6
MAX_ABSOLUTE = 1e15  # of a reward; the square is far from the limit of float32, 3e38
FAMILY_MODULES = tuple(
    f"grpo_megatron.algo.{name}"
    for name in ("grpo", "reinforce", "ppo", "preference", "reward_models", "masked", "selection")
)

# One entry per table row: a number for the whole response; a list of response_length numbers, of which those outside
# the loss are not read; or None: the sample is left out of the loss and counts in no denominator.
Advantages = list[float | list[float] | None]
AdvantageEstimator = Callable[[GroupTable, AlgorithmConfig], Advantages]


@dataclass(frozen=True)
class EstimatorFacts:
    """Facts about an estimator, for the checks and the plan. Another estimator, such as a user's own, declares them too:

    @advantage_estimators.declare(compares_group=True)
    def my_estimator(table: GroupTable, config: AlgorithmConfig) -> Advantages: ...
    """

    compares_group: bool = False  # compares the samples of a prompt: with one sample per prompt it gives 0
    needs_rewards: bool = True  # false: the advantages do not depend on rewards
    needs_greedy_reward: bool = False  # reads the reward of each prompt's greedy response
    needs_step_rewards: bool = False  # reads the rewards of single steps
    needs_reward_parts: bool = False  # reads the parts of a reward
    needs_score_norms: bool = False  # reads 1 - 2 p + sum p^2 of each token of the policy before the update
    needs_values: bool = False  # reads the critic's values: the run has a critic
    ignores_token_penalties: bool = False  # a KL penalty in the reward does not reach the advantages
    scores: Literal["", "response", "step"] = ""  # made for a loss of a scalar head (LossFacts.scores)
    makes_pairs: bool = False  # per prompt +1 for one sample (chosen), -1 for another (rejected), None for the rest


advantage_estimators: FactRegistry[AdvantageEstimator, EstimatorFacts] = FactRegistry(
    "advantage estimator", EstimatorFacts(), FAMILY_MODULES
)


def check_rewards(values: Iterable[float]) -> None:
    """Raises ValueError at a finite reward beyond MAX_ABSOLUTE: sums of squares would overflow."""
    for value in values:
        if MAX_ABSOLUTE < abs(value) < math.inf:
            raise ValueError(
                f"a reward of {value:g} is too large to compute with: a mean or a standard deviation would overflow; scale"
                f" the reward to at most {MAX_ABSOLUTE:g} (reward_model.coefficient scales that of a reward model)"
            )


def is_informative(rewards: Sequence[float]) -> bool:
    """Tests that a prompt's samples have a gradient: two or more are scorable, and their rewards are not all equal.

    This is also the rule of DAPO's dynamic sampling. The rewards decide, never a computed std: that of eight rewards 0.1 is
    rounding noise, and a division by it gives advantages in the thousands.
    """
    return len({reward for reward in rewards if math.isfinite(reward)}) > 1


def penalised_rewards(table: GroupTable) -> list[float]:
    """Subtracts the penalties of its loss tokens (KL in the reward) from each sample's reward. Not finite: unscorable."""
    check_rewards(table.reward)
    if not table.token_penalties:
        return table.reward
    rewards = list(table.reward)
    for row, reward in enumerate(table.reward):
        if math.isfinite(reward):
            penalties = at_loss_tokens(table, row, table.token_penalties[row])
            check_rewards(penalties)
            rewards[row] = math.fsum([reward, *(-penalty for penalty in penalties)])
    return rewards


def at_loss_tokens(table: GroupTable, row: int, values: Sequence[float]) -> list[float]:
    """Selects the numbers of the loss tokens from one number per response token."""
    return [value for start, end in table.spans_of(row) for value in values[start:end]]


def spread_over_response(table: GroupTable, row: int, values: Sequence[float]) -> list[float]:
    """Inverts `at_loss_tokens`: one number per response token, 0 outside the loss."""
    result = [0.0] * table.response_length[row]
    position = 0
    for start, end in table.spans_of(row):
        result[start:end] = values[position : position + end - start]
        position += end - start
    return result


def scorable_groups(table: GroupTable, rewards: Sequence[float]) -> Iterator[list[int]]:
    """Lists the rows of each prompt's scorable samples, if it has any."""
    for rows in table.groups():
        scorable = [row for row in rows if math.isfinite(rewards[row])]
        if scorable:
            yield scorable


def informative_groups(table: GroupTable, rewards: Sequence[float] | None = None) -> Iterator[list[int]]:
    """Lists the rows of each prompt's scorable samples, if it `is_informative`. `rewards` None: the table's."""
    rewards = table.reward if rewards is None else rewards
    for rows in scorable_groups(table, rewards):
        if is_informative([rewards[row] for row in rows]):
            yield rows


def per_group(table: GroupTable, estimate: Callable[[list[float], list[int]], Sequence[float]]) -> Advantages:
    """Computes one number per row: `estimate(rewards, rows)` of each prompt's scorable samples, 0 where all are equal."""
    advantages: Advantages = [0.0] * len(table)
    rewards = penalised_rewards(table)
    for rows in informative_groups(table, rewards):
        for row, value in zip(rows, estimate([rewards[row] for row in rows], rows), strict=True):
            advantages[row] = value
    return advantages


def deviations(values: Sequence[float]) -> list[float]:
    """Subtracts the mean. Squares of these give a variance; E[r^2] - E[r]^2 would cancel."""
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def group_scale(group_deviations: Sequence[float], config: AlgorithmConfig) -> float:
    """Computes the divisor of the deviations: std (ddof 1) + 1e-6, or 1 without `norm_adv_by_std_in_grpo`."""
    if not config.norm_adv_by_std_in_grpo:
        return 1.0
    return math.sqrt(math.fsum(d * d for d in group_deviations) / (len(group_deviations) - 1)) + EPSILON


def finite_steps(table: GroupTable, row: int) -> list[tuple[int, float]]:
    """Selects the row's steps with a finite reward. Raises ValueError unless they end inside the response, in order."""
    steps, length = table.step_rewards[row], table.response_length[row]
    ends = [end for end, _ in steps]
    if any(a >= b for a, b in zip(ends, ends[1:], strict=False)) or (ends and not 0 <= ends[0] <= ends[-1] < length):
        raise ValueError(
            f"table row {row}: steps end at response tokens {ends}, of {length}; they must increase, from 0 or more to "
            f"{length - 1} or less: correct the step reward function"
        )
    check_rewards(reward for _, reward in steps)
    return [(end, reward) for end, reward in steps if math.isfinite(reward)]


# -- DAPO (arXiv 2503.14476) and DUPO: changes of the table, after the reward function and before the advantages -------
# DAPO's other parts: clip-higher is `vanilla` with clip_ratio_high > clip_ratio_low; its token mean is an aggregation
# (`token-mean`); dynamic sampling fills a batch with the groups that `advantages.is_informative` accepts
# (sampling/collector.py). `method: dapo` sets them all (methods.yaml).


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


def with_length_reward(table: GroupTable, config: LengthReward) -> GroupTable:
    """Adds a reward for the length n of each response to `reward`; `raw_reward` keeps those before. Unchanged without a kind.

        group    c (1/2 - (n - min) / (max - min)), at most 0 for a wrong response     Kimi k1.5, arXiv 2501.12599, 2.3.3
        target   -c |n - target_len|                                                   L1, arXiv 2503.04697

    min and max are over the prompt's scorable responses; where all have one length, nothing is added. A response is wrong if
    its reward before all penalties is below `correct_from`. Follows the papers' formulas as other trainers' recipes quote them.
    """
    if config.kind is None:
        return table
    before, lengths, added = table.raw_reward or table.reward, table.response_length, [0.0] * len(table)
    if config.target_len is not None:
        added = [-config.coefficient * abs(n - config.target_len) for n in lengths]
    for rows in scorable_groups(table, table.reward) if config.kind == "group" else ():
        least, most = (limit(lengths[row] for row in rows) for limit in (min, max))
        for row in rows if most > least else ():
            share = 0.5 - (lengths[row] - least) / (most - least)
            added[row] = config.coefficient * (share if before[row] >= config.correct_from else min(0.0, share))
    return replace(table, reward=[r + a for r, a in zip(table.reward, added, strict=True)], raw_reward=before)


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
