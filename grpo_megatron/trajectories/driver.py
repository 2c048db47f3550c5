"""Plays many trajectories of one rollout block at once, on a logical clock. The result does not depend on real time.

One tick is one `engine.poll()`. The answer to a turn that ended at tick s is due at tick s + latency, however fast the
environment was: a late answer is waited for, an early one waits. If nothing is being generated, the clock jumps to the
earliest due tick. Hence the requests that meet in the engine depend on tokens only, and delays of tools change no bit.
Environments work while other trajectories are generated: `latency` ticks are the time that costs nothing.

The trajectories of one tick are answered and submitted in their order in the list. Blocks never wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
) -> Iterator[list[Trajectory]]:
    """Play every trajectory to its end. Yields after each tick what has ended in it, which is often nothing.

    `version` is that of the engine's weights, `latency` in ticks. If an environment or the engine fails as a whole, no
    request stays in the engine.
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
            due = [trajectories[i] for i in sorted(waiting) if waiting[i] <= clock]
            _answer(due, answers, clock)
            for trajectory in due:
                del waiting[number[trajectory.key]]
                if not trajectory.is_over:
                    engine.submit(trajectory.key, trajectory.request(), version)
                    generating.add(number[trajectory.key])
            ended = [trajectory for trajectory in due if trajectory.is_over]
            if generating:
                clock += 1
                for key, completion in engine.poll():
                    trajectory = trajectories[number[key]]
                    generating.remove(number[key])
                    trajectory.generated(completion, clock)
                    if trajectory.is_over:
                        ended.append(trajectory)
                    else:
                        answers.ask(trajectory)
                        waiting[number[key]] = clock + latency
            if ended:
                answers.end(ended)
            yield ended
    except BaseException:
        if engine.version == version:  # otherwise the engine itself has failed
            engine.abort([trajectories[i].key for i in sorted(generating)])
        raise


def _answer(due: Sequence[Trajectory], answers: Answers, clock: int) -> None:
    """Take the answers that are due, if there are any."""
    for trajectory, answer in zip(due, answers.take(due) if due else (), strict=True):
        if trajectory.turns:
            trajectory.answered(answer, clock)
        else:
            trajectory.begin(answer)
