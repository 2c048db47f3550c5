"""Stand-ins for engine and environments. Tokens are numbers below 100; what comes next is a hash of the request alone."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_megatron.rollout.engine import Completion, Request, stable_hash
from grpo_megatron.sampling.multi_turn import Answer, Trajectory, TrajectoryLimits

LIMITS = TrajectoryLimits(prompt=8, response=40, turns=4)
END = 99  # the token that ends a turn


def trajectory(number: int, **changes: object) -> Trajectory:
    settings = {"row": {"number": number}, "environment_seed": 7, "seed": number, "limits": LIMITS}
    return Trajectory(key=f"t{number}", temperature=1.0, top_p=1.0, version=3, **{**settings, **changes})  # type: ignore[arg-type]


class FakeEngine:
    """A turn takes as many polls as it has tokens; at most `width` requests are served at a time. Records the batches."""

    def __init__(self, width: int = 3) -> None:
        self.width, self.version = width, 3
        self.queue: dict[str, tuple[Request, Completion, int]] = {}  # id -> request, completion, polls left
        self.batches: list[tuple[str, ...]] = []
        self.requests: list[tuple[str, Request]] = []
        self.aborted: list[str] = []

    def submit(self, request_id: str, request: Request, version: int) -> None:
        assert version == self.version and request_id not in self.queue
        draw = stable_hash(repr((request.prompt_ids, request.seed)))
        length = 1 + draw % 7
        ids = [(draw >> i) % 90 for i in range(length - 1)] + [END]
        reason = "stop" if length <= request.max_tokens else "length"
        ids = ids[: request.max_tokens]
        self.requests.append((request_id, request))
        self.queue[request_id] = (request, Completion(ids, [-0.5] * len(ids), reason), length)

    def poll(self) -> list[tuple[str, Completion]]:
        served = list(self.queue)[: self.width]
        assert served, "polled without a request"
        self.batches.append(tuple(served))
        finished = []
        for key in served:
            request, completion, left = self.queue[key]
            self.queue[key] = (request, completion, left - 1)
            if left == 1:
                del self.queue[key]
                finished.append((key, completion))
        return finished

    def cache_statistics(self) -> tuple[int, int]:
        return 8, 2

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        for key in request_ids:
            del self.queue[key]


class FakeAnswers:
    """The environment's answer is a hash of the response so far. `log` has every call."""

    def __init__(self, done_after: int = 3, fail: dict[tuple[str, int], str] | None = None) -> None:
        self.done_after, self.fail = done_after, fail or {}
        self.open: set[str] = set()
        self.asked: set[str] = set()
        self.takes: list[tuple[str, ...]] = []

    def start(self, trajectories: Sequence[Trajectory]) -> None:
        self.open |= {t.key for t in trajectories}
        self.asked |= self.open

    def ask(self, trajectory: Trajectory) -> None:
        assert trajectory.key in self.open - self.asked and not trajectory.is_over
        self.asked.add(trajectory.key)

    def take(self, trajectories: Sequence[Trajectory]) -> list[Answer]:
        self.takes.append(tuple(t.key for t in trajectories))
        return [self._answer(t) for t in trajectories]

    def _answer(self, t: Trajectory) -> Answer:
        self.asked.remove(t.key)
        if status := self.fail.get((t.key, t.num_generated)):
            if status == "lost":
                raise RuntimeError("no worker can run")
            return Answer([], status=status, message="why")
        if not t.turns:
            return Answer([1, 2, t.row["number"]])
        draw = stable_hash(repr(t.response_ids))
        done = t.num_generated == self.done_after
        observation = [] if done else [END, *(draw >> i & 63 for i in range(draw % 4))]
        return Answer(observation, reward=0.5 if draw % 2 else None, done=done, metrics={"calls": 1.0})

    def end(self, trajectories: Sequence[Trajectory]) -> None:
        for t in trajectories:
            assert t.is_over
            self.open.remove(t.key)
