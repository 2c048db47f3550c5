"""Grading: the rewards of the samples of one round. Workers grade what is complete while the engine generates the rest.

Where grading should take less than WORTH_OVERLAP_S of a worker's time, as in the last round with the same functions, it
waits until all is generated: workers that wake up for microseconds would only take the engine's processor. The rewards are
the same either way. A reward that compares the samples of its batch gets them all at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from grpo_megatron.data.prompts import reward_item, tokens_at
from grpo_megatron.parallel.mesh import Mesh, RankError
from grpo_megatron.processes.pool import FirstFailure
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rewards.reward import RewardResult, opened_thought, rewards
from grpo_megatron.types import BRANCH, BY_MODEL, Sample, Turn

WORTH_OVERLAP_S = 0.05
FAILED = ("error", "timeout")  # of RewardResult.status; "none" is no failure


class Grading:
    """The grading of one round: `begin`, then `add` each complete sample and call `serve` often, then `finish`.

    Without a pool it does nothing.
    """

    def __init__(self, pool: RewardPool | None, tokenizer: Any) -> None:
        self.pool, self.tokenizer = pool, tokenizer
        self._functions: frozenset[str] = frozenset()  # of this round
        self._seconds_per_sample: dict[frozenset[str], float] = {}  # in the last round with these functions
        self._overlaps = True
        self._samples: list[Sample] = []  # in the order in which the pool got them
        self._waiting: list[Sample] = []  # for the last one to be sampled
        self._kept = FirstFailure(pool)

    def begin(self, rewards: Iterable[str], num_samples: int) -> None:
        """Prepare for the first sample.

        `rewards` names all reward functions of the round, `num_samples` are to be graded here.
        """
        self._samples, self._waiting, self._kept.text = [], [], None
        self._functions = frozenset(rewards) - {BY_MODEL}
        seconds = self._seconds_per_sample.get(self._functions, math.inf)
        self._overlaps = seconds * num_samples > self._worth_overlap
        self._kept.attempt(lambda pool: pool.begin())

    def add(self, sample: Sample) -> None:
        """Queue a complete sample, if a function rewards it, and set its text. Returns at once."""
        if self.pool is None:
            return
        sample.text = self._text(sample.response_ids)
        if sample.prompt.reward != BY_MODEL:
            if self._overlaps and not rewards.facts(sample.prompt.reward).compares:
                self._samples.append(sample)
                self._submit(sample)
            else:
                self._waiting.append(sample)

    def serve(self) -> None:
        """Hand out and take what can be without waiting."""
        if self._overlaps:
            self._kept.attempt(lambda pool: pool.serve())

    def finish(self) -> str | None:
        """Wait for the last result, then set reward, its metrics and steps of all samples.

        Returns why the workers cannot run at all, if so: then every rank must stop.
        """
        for sample in sorted(self._waiting, key=lambda sample: (sample.prompt_index, sample.index)):
            self._samples.append(sample)
            self._submit(sample)
        results: list[RewardResult] = self._kept.attempt(lambda pool: pool.collect()) or []
        if results:
            has_failed = any(r.status in FAILED for r in results)
            seconds = math.inf if has_failed else sum(r.seconds for r in results) / len(results)
            self._seconds_per_sample[self._functions] = seconds
        for sample, result in zip(self._samples, results, strict=False):
            sample.reward = result.reward
            sample.reward_metrics = {
                **result.metrics,
                "ok": float(result.status not in FAILED),
                "timeout": float(result.status == "timeout"),
            }
            sample.reward_texts, sample.reward_failure = result.texts, result.message
            opened = len(opened_thought(sample.prompt.text))
            sample.steps = self._step_tokens(sample, [(end - opened, reward) for end, reward in result.steps])
        return self._kept.text

    @property
    def _worth_overlap(self) -> float:
        """Returns the seconds of all workers together."""
        return 0.0 if self.pool is None else WORTH_OVERLAP_S * self.pool.num_workers

    def _submit(self, sample: Sample) -> None:
        item = reward_item(sample.prompt, sample.text, sample.response_ids, sample.version)
        self._kept.attempt(lambda pool: pool.submit(item))

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _step_tokens(self, sample: Sample, steps: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
        """Converts (end of the step in the text, reward) -> (index of the token that completes it, reward).

        See `tokens_at`. Steps that end within one token become one step, with their mean reward.
        """
        rewards: dict[int, list[float]] = {}
        ends = tokens_at([end for end, _ in steps], sample.response_ids, self._text)
        for token, (_, reward) in zip(ends, steps, strict=True):
            rewards.setdefault(token, []).append(reward)
        return [(token, sum(values) / len(values)) for token, values in rewards.items()]


# -- Rewards of trajectories -------------------------------------------------------------------------------------------
# TurnGrading: the rewards of trajectories.
#
# An environment with `gives_rewards` grades by itself: the reward is the sum over the turns. Otherwise the reward function
# reads the text of the assistant's last turn, and what single turns have earned is added. `Sample.steps` are the function's
# steps if it gives some, else what the turns have earned, with the function's reward at the end of the last turn. A
# trajectory without a turn, because its environment did not start, cannot be scored (NaN).


class TurnGrading(Grading):
    """The grading of trajectories. `pool` is also None where the environment gives the rewards."""

    def __init__(self, pool: RewardPool | None, tokenizer: Any, *, gives_rewards: bool) -> None:
        super().__init__(pool, tokenizer)
        self.gives_rewards = gives_rewards
        self._last_turns: list[tuple[Sample, Turn, Sample]] = []  # trajectory, its last turn, that turn as a sample

    def begin(self, rewards: Iterable[str], num_samples: int) -> None:
        """Forget the trajectories of the last round, then begin as `Grading` does."""
        self._last_turns = []
        super().begin(rewards, num_samples)

    def add(self, sample: Sample) -> None:
        """Queue the last turn of a complete trajectory, or take the rewards of its environment. Returns at once."""
        turn = next((turn for turn in reversed(sample.turns) if turn.kind == "assistant"), None)
        if turn is None or sample.index >= BRANCH:
            return
        if self.gives_rewards:
            sample.reward = math.fsum(reward for _, reward in sample.turn_rewards)
            sample.steps = list(sample.turn_rewards)
            return
        ids = sample.response_ids[turn.start : turn.end]
        alone = replace(sample, response_ids=ids, loss_mask=[], turns=[], turn_rewards=[])
        self._last_turns.append((sample, turn, alone))
        super().add(alone)

    def finish(self) -> str | None:
        """Wait as `Grading` does, then add the rewards of last turns to those of the other turns."""
        problem = super().finish()
        for sample, turn, alone in self._last_turns:
            sample.reward = math.fsum([alone.reward, *(reward for _, reward in sample.turn_rewards)])
            sample.reward_metrics = alone.reward_metrics
            sample.reward_texts, sample.reward_failure = alone.reward_texts, alone.reward_failure
            sample.steps = [(turn.start + token, reward) for token, reward in alone.steps]
            if not sample.steps and sample.turn_rewards:
                parts = dict(sample.turn_rewards)
                parts[turn.end - 1] = parts.get(turn.end - 1, 0.0) + alone.reward
                sample.steps = sorted(parts.items())
        return problem


# -- Failed rewards ----------------------------------------------------------------------------------------------------
# Failed rewards: a run whose reward function fails on most samples must stop, because it would train on nothing.


def check_failures(what: str, samples: Sequence[Sample], max_failed_ratio: float, mesh: Mesh) -> None:
    """Compare the share of samples without a reward, over all ranks, with `reward.max_failed_ratio`. Collective.

    `samples`: those whose rewards this rank knows. Those that only a reward model scores do not count, and a reward that does
    not apply to a sample has not failed on it. `what` they are begins the message. Raises RankError on every rank.
    """
    samples = [sample for sample in samples if sample.prompt.reward != BY_MODEL]
    failed = [sample for sample in samples if math.isnan(sample.reward) and not is_declined(sample)]
    reports = mesh.all_gather((len(samples), len(failed), failed[0].reward_failure if failed else ""))
    total, num_failed = sum(report[0] for report in reports), sum(report[1] for report in reports)
    if num_failed > max_failed_ratio * total:
        first = next(report[2] for report in reports if report[1])
        raise RankError(  # on every rank: all have the same reports
            f"{what}: {num_failed:,} of {total:,} samples ({100 * num_failed / total:.0f} %) have no reward, more than"
            f" reward.max_failed_ratio={max_failed_ratio:g} allows; the first failure: {first or 'no reason is known'};"
            " correct the reward function, or raise reward.max_failed_ratio"
        )


def is_declined(sample: Sample) -> bool:
    """Returns whether the reward function has declined to score the sample (TRL's None). That is no failure."""
    return math.isnan(sample.reward) and sample.reward_metrics.get("ok") == 1.0
