"""Advantage estimators: the table of a step's rewards in, one number per sample (or per response token) out.

    grpo          A_i = (r_i - mean) / (std + 1e-6)             DeepSeekMath, arXiv 2402.03300, section 4.1.2
    Dr.GRPO       A_i = r_i - mean                              arXiv 2503.20783 (norm_adv_by_std_in_grpo=false)
    rloo          A_i = r_i - mean of the others
                      = n / (n - 1) * (r_i - mean)              arXiv 2402.14740
    opo           A_i = r_i - sum(l_j r_j) / sum(l_j)           arXiv 2505.23585; l numbers of loss tokens
    gpg           A_i = a (r_i - mean), a = #samples / #{r != 0}, over the step          arXiv 2504.02546
    grpo_passk    the best sample: (r_1st - r_2nd) / (std + 1e-6); the others 0          arXiv 2503.19595
    grpo_process  A_it = sum of (s - mean) / (std + 1e-6) over the steps of response i that end at or after token t;
                  mean and std over all step rewards s of the prompt's samples           DeepSeekMath, section 4.1.3

mean, std and n are over the samples of one prompt. `returns.py` has the estimators that compare all tokens of the batch,
or a response with a greedy one. Those that choose samples, of the unified view, are at the end of this file.

Where we are stricter than the papers, which give neither ddof nor epsilon: ddof 1; float64; the mean first, then the
squared deviations (never E[r^2] - E[r]^2, which cancels); sums by `math.fsum`, whose result does not depend on the
order. So results are bit-identical for every sample order and data-parallel layout. A group of equal rewards gets exactly
0. Equality is decided on the rewards: the computed std of eight rewards 0.1 is rounding noise, and a division by it gives
advantages in the thousands. gpg counts non-zero rewards, as verl does; the paper counts samples with a gradient.

A reward beyond MAX_ABSOLUTE is refused: sums of squares would overflow, and float32 could not hold what is left.

A sample whose reward is not finite is unscorable: it is left out of mean, std and n, and gets 0. (The plan also leaves
it out of the loss.) A response without a loss token that has a reward is a sample of the policy like any other and
stays in. With a KL penalty in the reward, r_i is the reward minus the penalties of the response's loss tokens.
grpo_process also counts a step that ends at a token outside the loss: its reward belongs to the tokens before it.

Another estimator is one function with the signature of `AdvantageEstimator`: registered here, or the user's own
`package.module:function`. It gets the whole step, so statistics over the global batch are exact too. Declare what
validation must know about it (the fields of `EstimatorFacts`):

    @advantage_estimators.declare(compares_group=True)
    def my_estimator(table: GroupTable, config: AlgorithmConfig) -> Advantages: ...
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from grpo_megatron.config import AlgorithmConfig
from grpo_megatron.registry import FactRegistry
from grpo_megatron.types import GroupTable

EPSILON = 1e-6
MAX_ABSOLUTE = 1e15  # of a reward; the square is far from the limit of float32, 3e38

# One entry per table row: a number for the whole response; a list of response_length numbers, of which those outside
# the loss are not read; or None: the sample is left out of the loss and counts in no denominator.
Advantages = list[float | list[float] | None]
AdvantageEstimator = Callable[[GroupTable, AlgorithmConfig], Advantages]


@dataclass(frozen=True)
class EstimatorFacts:
    """Facts about an estimator that validation and the plan read."""

    compares_group: bool = False  # compares the samples of a prompt: with one sample per prompt it gives 0
    needs_rewards: bool = True  # false: the advantages do not depend on rewards
    needs_greedy_reward: bool = False  # reads the reward of each prompt's greedy response
    needs_step_rewards: bool = False  # reads the rewards of single steps
    needs_values: bool = False  # reads the critic's values: the run has a critic
    ignores_token_penalties: bool = False  # a KL penalty in the reward does not reach the advantages
    scores: Literal["", "response", "step"] = ""  # made for a loss of a scalar head (LossFacts.scores)
    makes_pairs: bool = False  # per prompt +1 for one sample (chosen), -1 for another (rejected), None for the rest


advantage_estimators: FactRegistry[AdvantageEstimator, EstimatorFacts] = FactRegistry(
    "advantage estimator", EstimatorFacts()
)


def check_rewards(values: Iterable[float]) -> None:
    """Raises ValueError at a finite reward beyond MAX_ABSOLUTE. Not finite: unscorable, hence allowed."""
    for value in values:
        if MAX_ABSOLUTE < abs(value) < math.inf:
            raise ValueError(
                f"a reward of {value:g} is too large to compute with: a mean or a standard deviation would overflow; scale"
                f" the reward to at most {MAX_ABSOLUTE:g} (reward_model.coefficient scales that of a reward model)"
            )


def is_informative(rewards: Sequence[float]) -> bool:
    """Whether a prompt's samples have a gradient: two or more are scorable, and their rewards are not all equal.

    Decided on the rewards themselves, never on a computed std. Dynamic sampling (DAPO) has the same rule.
    """
    return len({reward for reward in rewards if math.isfinite(reward)}) > 1


def penalised_rewards(table: GroupTable) -> list[float]:
    """Each sample's reward minus the penalties of its loss tokens, where the table has any. Not finite: unscorable."""
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
    """The inverse of `at_loss_tokens`: one number per response token, 0 outside the loss."""
    result = [0.0] * table.response_length[row]
    position = 0
    for start, end in table.spans_of(row):
        result[start:end] = values[position : position + end - start]
        position += end - start
    return result


def scorable_groups(table: GroupTable, rewards: Sequence[float]) -> Iterator[list[int]]:
    """Rows of the scorable samples of each prompt that has any."""
    for rows in table.groups():
        scorable = [row for row in rows if math.isfinite(rewards[row])]
        if scorable:
            yield scorable


def informative_groups(table: GroupTable, rewards: Sequence[float] | None = None) -> Iterator[list[int]]:
    """Rows of the scorable samples of each prompt that `is_informative`. `rewards` None: the table's."""
    rewards = table.reward if rewards is None else rewards
    for rows in scorable_groups(table, rewards):
        if is_informative([rewards[row] for row in rows]):
            yield rows


def deviations(values: Sequence[float]) -> list[float]:
    """Values minus their mean."""
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def group_scale(group_deviations: Sequence[float], config: AlgorithmConfig) -> float:
    """The divisor of the deviations: std (ddof 1) + epsilon, or 1 without `norm_adv_by_std_in_grpo`."""
    if not config.norm_adv_by_std_in_grpo:
        return 1.0
    return math.sqrt(math.fsum(d * d for d in group_deviations) / (len(group_deviations) - 1)) + EPSILON


@advantage_estimators.register("grpo", compares_group=True)
def grpo(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """GRPO, or Dr.GRPO with `norm_adv_by_std_in_grpo=False`. One number per row, in units of standard deviations."""
    advantages: Advantages = [0.0] * len(table)
    rewards = penalised_rewards(table)
    for rows in informative_groups(table, rewards):
        centred = deviations([rewards[row] for row in rows])
        scale = group_scale(centred, config)
        for row, deviation in zip(rows, centred, strict=True):
            advantages[row] = deviation / scale
    return advantages


@advantage_estimators.register("rloo", compares_group=True)
def rloo(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Leave-one-out baseline. One number per row, in units of reward.

    There is no division by the std of the other samples: it is 0 where they all have the same reward.
    """
    advantages: Advantages = [0.0] * len(table)
    rewards = penalised_rewards(table)
    for rows in informative_groups(table, rewards):
        n = len(rows)
        for row, deviation in zip(rows, deviations([rewards[row] for row in rows]), strict=True):
            advantages[row] = deviation * n / (n - 1)
    return advantages


@advantage_estimators.register("opo", compares_group=True)
def opo(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Length-weighted baseline: the least variance if a response's squared gradient norm grows with its length.

    One number per row, in units of reward. A group without any loss token, which the plan leaves out anyway, gets 0.
    """
    advantages: Advantages = [0.0] * len(table)
    rewards, lengths = penalised_rewards(table), table.num_loss_tokens()
    for rows in informative_groups(table, rewards):
        num_tokens = sum(lengths[row] for row in rows)
        if num_tokens:
            baseline = math.fsum(lengths[row] * rewards[row] for row in rows) / num_tokens
            for row in rows:
                advantages[row] = rewards[row] - baseline
    return advantages


@advantage_estimators.register("gpg", compares_group=True)
def gpg(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Deviation from the group's mean, scaled up by the share of rewards that are not 0. Meant for `loss_mode: gpg`."""
    advantages: Advantages = [0.0] * len(table)
    rewards = penalised_rewards(table)
    scorable = [reward for reward in rewards if math.isfinite(reward)]
    alpha = len(scorable) / max(1, sum(reward != 0 for reward in scorable))
    for rows in informative_groups(table, rewards):
        for row, deviation in zip(rows, deviations([rewards[row] for row in rows]), strict=True):
            advantages[row] = alpha * deviation
    return advantages


@advantage_estimators.register("grpo_passk", compares_group=True)
def grpo_passk(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """The best sample of a prompt gets its lead over the second best, the others 0. With two best samples all get 0."""
    advantages: Advantages = [0.0] * len(table)
    rewards = penalised_rewards(table)
    for rows in informative_groups(table, rewards):
        second, first = sorted(rows, key=lambda row: rewards[row])[-2:]
        scale = group_scale(deviations([rewards[row] for row in rows]), config)
        advantages[first] = (rewards[first] - rewards[second]) / scale
    return advantages


@advantage_estimators.register(
    "grpo_process", compares_group=True, needs_step_rewards=True, ignores_token_penalties=True
)
def grpo_process(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Process supervision. One number per response token; tokens after the last step get 0.

    mean and std are over every step of the prompt's scorable samples, so the sum grows with the number of steps. Equal
    step rewards give exactly 0. Steps that are not finite are left out. Raises ValueError when the table has no steps,
    or steps that do not end inside their response, in increasing order.
    """
    if not table.step_rewards and len(table):
        raise ValueError(
            "algorithm.adv_estimator='grpo_process' needs step rewards, and the reward function gives none; set a "
            "reward.function that scores steps, or adv_estimator='grpo' for one reward per response"
        )
    advantages: Advantages = [0.0] * len(table)
    for rows in scorable_groups(table, table.reward):
        steps = {row: finite_steps(table, row) for row in rows}
        pool = [reward for row in rows for _, reward in steps[row]]
        if not is_informative(pool):
            continue
        centred = deviations(pool)
        scale = group_scale(centred, config)
        normalised = iter([deviation / scale for deviation in centred])
        for row in rows:
            advantages[row] = _rewards_to_go(
                [(end, next(normalised)) for end, _ in steps[row]], table.response_length[row]
            )
    return advantages


def finite_steps(table: GroupTable, row: int) -> list[tuple[int, float]]:
    """The row's steps with a finite reward. Raises ValueError unless they end inside the response, in increasing order."""
    steps, length = table.step_rewards[row], table.response_length[row]
    ends = [end for end, _ in steps]
    if any(a >= b for a, b in zip(ends, ends[1:], strict=False)) or (ends and not 0 <= ends[0] <= ends[-1] < length):
        raise ValueError(
            f"table row {row}: steps end at response tokens {ends}, of {length}; they must increase, from 0 or more to "
            f"{length - 1} or less: correct the step reward function"
        )
    check_rewards(reward for _, reward in steps)
    return [(end, reward) for end, reward in steps if math.isfinite(reward)]


def _rewards_to_go(steps: Sequence[tuple[int, float]], length: int) -> list[float]:
    """For every token the sum of the rewards of the steps that end at or after it."""
    result: list[float] = []
    for i, (end, _) in enumerate(steps):
        result += [math.fsum(reward for _, reward in steps[i:])] * (end + 1 - len(result))
    return result + [0.0] * (length - len(result))


# -- Selections of samples ---------------------------------------------------------------------------------------------
# Estimators of the unified view: supervised learning, RFT and DPO as a selection of samples (DeepSeekMath, section 5).
#
#     constant    1 for every sample                                                          SFT
#     rft         1 where reward >= algorithm.rft_threshold; None elsewhere                   RFT, online RFT (2308.01825)
#     preference  1 + margin for the chosen, -(1 + margin) for the rejected response          pairs for bradley_terry
#     step_labels 1 at the last token of a right step, -1 at that of a wrong one              labels for step_labels
#     best_worst  +1 for the best and -1 for the worst sample of a prompt; None elsewhere     pairs for DPO (2305.18290)
#
# The methods differ in the source of the responses, in the reward, and in the coefficient of each log-probability's
# gradient. These are the coefficients (of DPO: the sign; its loss determines the size). The losses for them are `sft` and
# `dpo`. None is not an advantage of 0: a row with None is left out, and counts in no denominator.


@advantage_estimators.register("constant", needs_rewards=False, ignores_token_penalties=True)
def constant(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """1 for every sample."""
    return [1.0] * len(table)


@advantage_estimators.register("rft", ignores_token_penalties=True)
def rft(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """1 for each right answer; None for a wrong one and for a sample without a reward."""
    return [1.0 if reward >= config.rft_threshold else None for reward in table.reward]


@advantage_estimators.register("best_worst", compares_group=True, makes_pairs=True, ignores_token_penalties=True)
def best_worst(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """One pair per prompt, by reward. Of equal rewards the lowest index is taken; all equal: no pair.

    A response without a loss token has no gradient and cannot be part of a pair.
    """
    advantages: Advantages = [None] * len(table)
    num_loss_tokens = table.num_loss_tokens()
    for group in scorable_groups(table, table.reward):
        rows = [row for row in group if num_loss_tokens[row]]
        if is_informative([table.reward[row] for row in rows]):
            advantages[min(rows, key=lambda row: (-table.reward[row], table.index[row]))] = 1.0
            advantages[min(rows, key=lambda row: (table.reward[row], table.index[row]))] = -1.0
    return advantages


@advantage_estimators.register(
    "preference", needs_rewards=False, makes_pairs=True, ignores_token_penalties=True, scores="response"
)
def preference(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """The pair of `best_worst`, with the difference of the two rewards in place of 1.

    Rows of a file have the rewards 1 + margin (chosen) and 0 (rejected), see data/responses.py.
    """
    check_rewards(table.reward)
    advantages = best_worst(table, config)
    for group in table.groups():
        pair = [row for row in group if advantages[row] is not None]
        if pair:
            difference = max(table.reward[row] for row in pair) - min(table.reward[row] for row in pair)
            for row in pair:
                advantages[row] = math.copysign(difference, advantages[row])  # type: ignore[arg-type]
    return advantages


@advantage_estimators.register("step_labels", needs_rewards=False, ignores_token_penalties=True, scores="step")
def step_labels(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """One number per response token, from step rewards of 1 (right) and 0 (wrong)."""
    check_rewards(table.reward)
    advantages: Advantages = []
    for row, length in enumerate(table.response_length):
        values = [0.0] * length
        for token, label in table.step_rewards[row] if table.step_rewards else []:
            values[token] = 2.0 * label - 1.0
        advantages.append(values)
    return advantages
