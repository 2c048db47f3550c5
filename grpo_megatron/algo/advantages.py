"""Advantage estimators: the table of a step's rewards in, one number per sample (or per response token) out.

    grpo          A_i = (r_i - mean) / (std + 1e-6)             DeepSeekMath, arXiv 2402.03300, section 4.1.2
    Dr.GRPO       A_i = r_i - mean                              arXiv 2503.20783 (norm_adv_by_std_in_grpo=false)
    rloo          A_i = r_i - mean of the others
                      = n / (n - 1) * (r_i - mean)              arXiv 2402.14740
    opo           A_i = r_i - sum(l_j r_j) / sum(l_j)           arXiv 2505.23585; l response lengths
    gpg           A_i = a (r_i - mean), a = #samples / #{r != 0}, over the step          arXiv 2504.02546
    grpo_passk    the best sample: (r_1st - r_2nd) / (std + 1e-6); the others 0          arXiv 2503.19595
    grpo_process  A_it = sum of (s - mean) / (std + 1e-6) over the steps of response i that end at or after token t;
                  mean and std over all step rewards s of the prompt's samples           DeepSeekMath, section 4.1.3

mean, std and n are over the samples of one prompt. `returns.py` has the estimators with a number for every token of the
batch or without a group, `selection.py` those of the unified view, which choose samples instead of weighing them.

Where we are stricter than the papers, which give neither ddof nor epsilon: ddof 1; float64; the mean first, then the
squared deviations (never E[r^2] - E[r]^2, which cancels); sums by `math.fsum`, whose result does not depend on the
order, so neither sample order nor data-parallel layout moves a bit. A group whose rewards are all equal gets exactly 0,
decided on the rewards: the computed std of eight times 0.1 is rounding noise, and dividing by it is how other codebases
get advantages in the thousands. gpg counts non-zero rewards, as verl does; the paper counts samples with a gradient.

A sample whose reward is not finite is unscorable: it is left out of mean, std and n, and gets 0. (The plan also leaves
it out of the loss.) An empty response that has a reward was drawn from the policy like any other and stays in. With a
KL penalty in the reward, r_i is the reward minus the penalties of the response's tokens.

Another estimator is one function with the signature of `AdvantageEstimator`, registered here or named
`package.module:function` in the config. It sees the whole step, so statistics over the global batch are exact too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from grpo_megatron.config import AlgorithmConfig
from grpo_megatron.registry import Registry
from grpo_megatron.types import GroupTable

EPSILON = 1e-6

# One entry per table row: a number for the whole response, a list of response_length numbers, or None: the sample
# leaves the loss and counts in no denominator.
Advantages = list[float | list[float] | None]
AdvantageEstimator = Callable[[GroupTable, AlgorithmConfig], Advantages]

advantage_estimators: Registry[AdvantageEstimator] = Registry("advantage estimator")

# Facts about the estimators by name, for the validation of a config.
GROUP_RELATIVE = (
    "grpo",
    "rloo",
    "opo",
    "gpg",
    "grpo_passk",
    "grpo_process",
    "reinforce_plus_plus_baseline",
    "best_worst",
)  # they compare a prompt's samples: with one sample they are 0
NEEDS_GREEDY_REWARD = ("remax",)
NEEDS_STEP_REWARDS = ("grpo_process",)
IGNORES_TOKEN_PENALTIES = ("grpo_process", "constant", "rft", "best_worst")  # a KL penalty in the reward has no effect


def is_informative(rewards: Sequence[float]) -> bool:
    """Whether a prompt's samples can teach anything: two or more scorable ones, not all of equal reward.

    Decided on the rewards themselves, never on a computed std. The rule of dynamic sampling too (DAPO).
    """
    return len({reward for reward in rewards if math.isfinite(reward)}) > 1


def penalised_rewards(table: GroupTable) -> list[float]:
    """Each sample's reward minus the penalties of its tokens, where the table has any. Not finite: unscorable."""
    if not table.token_penalties:
        return table.reward
    return [
        math.fsum([reward, *(-penalty for penalty in penalties)]) if math.isfinite(reward) else reward
        for reward, penalties in zip(table.reward, table.token_penalties, strict=True)
    ]


def scorable_groups(table: GroupTable, rewards: Sequence[float]) -> Iterator[list[int]]:
    """Rows of each prompt's scorable samples: all prompts that have one."""
    for rows in table.groups():
        scorable = [row for row in rows if math.isfinite(rewards[row])]
        if scorable:
            yield scorable


def informative_groups(table: GroupTable, rewards: Sequence[float] | None = None) -> Iterator[list[int]]:
    """Rows of the scorable samples of each prompt that `is_informative`. `rewards` null: the table's own."""
    rewards = table.reward if rewards is None else rewards
    for rows in scorable_groups(table, rewards):
        if is_informative([rewards[row] for row in rows]):
            yield rows


def deviations(values: Sequence[float]) -> list[float]:
    """Values minus their mean."""
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def group_scale(group_deviations: Sequence[float], config: AlgorithmConfig) -> float:
    """What deviations are divided by: std (ddof 1) + epsilon, or 1 without `norm_adv_by_std_in_grpo`."""
    if not config.norm_adv_by_std_in_grpo:
        return 1.0
    return math.sqrt(math.fsum(d * d for d in group_deviations) / (len(group_deviations) - 1)) + EPSILON


@advantage_estimators.register("grpo")
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


@advantage_estimators.register("rloo")
def rloo(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Leave-one-out baseline. One number per row, in units of reward.

    The left-out set's std is never divided by: with seven equal rewards in it, the eighth would explode.
    """
    advantages: Advantages = [0.0] * len(table)
    rewards = penalised_rewards(table)
    for rows in informative_groups(table, rewards):
        n = len(rows)
        for row, deviation in zip(rows, deviations([rewards[row] for row in rows]), strict=True):
            advantages[row] = deviation * n / (n - 1)
    return advantages


@advantage_estimators.register("opo")
def opo(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Length-weighted baseline: the least variance if a response's squared gradient norm grows with its length.

    One number per row, in units of reward. A group of empty responses, which the loss leaves out anyway, gets 0.
    """
    advantages: Advantages = [0.0] * len(table)
    rewards, lengths = penalised_rewards(table), table.response_length
    for rows in informative_groups(table, rewards):
        num_tokens = sum(lengths[row] for row in rows)
        if num_tokens:
            baseline = math.fsum(lengths[row] * rewards[row] for row in rows) / num_tokens
            for row in rows:
                advantages[row] = rewards[row] - baseline
    return advantages


@advantage_estimators.register("gpg")
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


@advantage_estimators.register("grpo_passk")
def grpo_passk(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Only the best sample of a prompt learns, by its lead over the second best. Two best ones: 0 for all."""
    advantages: Advantages = [0.0] * len(table)
    rewards = penalised_rewards(table)
    for rows in informative_groups(table, rewards):
        second, first = sorted(rows, key=lambda row: rewards[row])[-2:]
        scale = group_scale(deviations([rewards[row] for row in rows]), config)
        advantages[first] = (rewards[first] - rewards[second]) / scale
    return advantages


@advantage_estimators.register("grpo_process")
def grpo_process(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    """Process supervision. One number per response token; tokens after the last step get 0.

    The pool is every step of the prompt's scorable samples, so the sum grows with the number of steps; a pool of equal
    rewards gives exactly 0. Steps that are not finite are left out. Raises ValueError when the table has no steps, or
    steps that do not end inside their response, in increasing order.
    """
    if not table.step_rewards and len(table):
        raise ValueError(
            "algorithm.adv_estimator='grpo_process' needs step rewards, and the reward function gives none; set a "
            "reward.function that scores steps, or adv_estimator='grpo' for one reward per response"
        )
    advantages: Advantages = [0.0] * len(table)
    for rows in scorable_groups(table, table.reward):
        steps = {row: _finite_steps(table, row) for row in rows}
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


def _finite_steps(table: GroupTable, row: int) -> list[tuple[int, float]]:
    steps, length = table.step_rewards[row], table.response_length[row]
    ends = [end for end, _ in steps]
    if any(a >= b for a, b in zip(ends, ends[1:], strict=False)) or (ends and not 0 <= ends[0] <= ends[-1] < length):
        raise ValueError(
            f"table row {row}: steps end at response tokens {ends}, of {length}; they must increase, from 0 or more to "
            f"{length - 1} or less: mend the step reward function"
        )
    return [(end, reward) for end, reward in steps if math.isfinite(reward)]


def _rewards_to_go(steps: Sequence[tuple[int, float]], length: int) -> list[float]:
    """For every token the sum over the steps that end at or after it."""
    result: list[float] = []
    for i, (end, _) in enumerate(steps):
        result += [math.fsum(reward for _, reward in steps[i:])] * (end + 1 - len(result))
    return result + [0.0] * (length - len(result))
