"""Plays many trajectories of one rollout block at once, on a logical clock. The result does not depend on real time.

One tick is one `engine.poll()`. The answer to a turn that ended at tick s is due at tick s + latency, however fast the
environment was: a late answer is waited for, an early one waits. If nothing is being generated, the clock jumps to the
earliest due tick. Hence the requests that meet in the engine depend on tokens only, and delays of tools change no bit.
Environments work while other trajectories are generated: `latency` ticks are the time that costs nothing.

The trajectories of one tick are answered and submitted in their order in the list. Blocks never wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from grpo_megatron.rollout.engine import RolloutEngine
from grpo_megatron.trajectories.trajectory import Answer, Trajectory


class Answers(Protocol):
    """The environments of one rollout block. Every rank of the block makes the same calls in the same order."""

    def start(self, trajectories: Sequence[Trajectory]) -> None:
        """Ask for the first messages of each. Returns at once."""

    def ask(self, trajectory: Trajectory) -> None:
        """Show the environment the trajectory's last turn. Returns at once."""

    def take(self, trajectories: Sequence[Trajectory]) -> list[Answer]:
        """The answers of these environments, the same on all ranks of the block. Blocks until all have answered."""

    def end(self, trajectories: Sequence[Trajectory]) -> None:
        """Their environments are no longer needed."""


def play(
    trajectories: Sequence[Trajectory], engine: RolloutEngine, answers: Answers, version: int, latency: int
) -> int:
    """Play every trajectory to its end. Returns the ticks that it took.

    `version` is that of the engine's weights, `latency` in ticks. If anything fails, no request stays in the engine.
    """
    number = {trajectory.key: i for i, trajectory in enumerate(trajectories)}
    assert len(number) == len(trajectories), "the keys of trajectories must differ"
    waiting = dict.fromkeys(range(len(trajectories)), 0)  # number of a trajectory -> tick of its environment's answer
    generating: set[int] = set()
    clock = 0
    answers.start(trajectories)
    try:
        while waiting or generating:
            if not generating:
                clock = max(clock, min(waiting.values()))
            due = sorted(i for i, tick in waiting.items() if tick <= clock)
            if due:
                _answer([trajectories[i] for i in due], answers, clock)
            for i in due:
                del waiting[i]
                if not trajectories[i].is_over:
                    engine.submit(trajectories[i].key, trajectories[i].request(), version)
                    generating.add(i)
            if not generating:
                continue
            clock += 1
            for key, completion in engine.poll():
                i = number[key]
                generating.remove(i)
                trajectories[i].generated(completion, clock)
                if trajectories[i].is_over:
                    answers.end([trajectories[i]])
                else:
                    answers.ask(trajectories[i])
                    waiting[i] = clock + latency
    except BaseException:
        if engine.version == version:  # otherwise the engine itself has failed
            engine.abort([trajectories[i].key for i in sorted(generating)])
        raise
    return clock


def _answer(due: Sequence[Trajectory], answers: Answers, clock: int) -> None:
    for trajectory, answer in zip(due, answers.take(due), strict=True):
        if trajectory.turns:
            trajectory.answered(answer, clock)
        else:
            trajectory.begin(answer)
    over = [trajectory for trajectory in due if trajectory.is_over]
    if over:
        answers.end(over)
