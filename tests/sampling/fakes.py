"""Stand-ins for tests in one process: a mesh of one rank, a collector with known rewards, a generator without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grpo_megatron.parallel.mesh import Mesh, RankError
from grpo_megatron.rewards.reward import RewardItem, RewardResult
from grpo_megatron.rollout.engine import Completion, Request, RolloutEngine
from grpo_megatron.sampling.collector import Group, State
from grpo_megatron.types import GREEDY, Prompt, Sample


class LoneMesh(Mesh):
    """A world of one rank without process groups. It can report `world_size` blocks, for cuts that send nothing."""

    def __init__(self, world_size: int = 1, rank: int = 0) -> None:
        sizes = {"tp": 1, "pp": 1, "dp": world_size, "ep": 1, "rollout_tp": 1}
        places = {"tp_rank": 0, "pp_rank": 0, "dp_rank": rank}
        groups = {"control": None, "tp_group": None, "pp_group": None, "ep_group": None}
        super().__init__(world_size=world_size, rank=rank, **sizes, **places, **groups)

    def total(self, values: list[int]) -> list[int]:
        return values

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    gather = all_gather

    def agree(self, problem: str | None) -> None:
        if problem is not None:
            raise RankError(problem)

    def broadcast(self, value: Any) -> Any:
        return value

    def barrier(self) -> None: ...


class SeedEngine:
    """The response to a request is its seed modulo 100, and then 7 more tokens where that is odd; the longer ones finish last.

    Records requests and versions. `after_step` is called in each step.
    """

    def __init__(self, after_step: Callable[[], None] = lambda: None) -> None:
        self.version = 0
        self.requests: list[Request] = []
        self.versions: list[int] = []
        self.after_step = after_step
        self._queue: dict[str, Request] = {}

    require: Any = lambda self, version: None
    stream = RolloutEngine.stream
    generate = RolloutEngine.generate

    @property
    def num_unfinished(self) -> int:
        return len(self._queue)

    def submit(self, request_id: str, request: Request, version: int) -> None:
        self.requests.append(request)
        self.versions.append(version)
        self._queue[request_id] = request

    def poll(self) -> list[tuple[str, Completion]]:
        self.after_step()
        even = {i: r for i, r in self._queue.items() if r.seed % 2 == 0}
        finished = even or self._queue
        self._queue = {i: r for i, r in self._queue.items() if i not in finished}
        ids = {i: [r.seed % 100] * (1 if even else 8) for i, r in finished.items()}
        return [(i, Completion(ids[i], [-1.0] * len(ids[i]), "stop")) for i in finished]

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            del self._queue[request_id]

    def cache_statistics(self) -> tuple[int, int]:
        return 8, 6


class CountingEngine(SeedEngine):
    """The response to prompt `number` is 0, 1, 2, ... of `lengths[number]` tokens; a request gives max_tokens of them at most."""

    def __init__(self, lengths: Sequence[int], after_step: Callable[[], None] = lambda: None) -> None:
        super().__init__(after_step)
        self.lengths = lengths

    def poll(self) -> list[tuple[str, Completion]]:
        self.after_step()
        finished, self._queue = self._queue, {}
        return [(i, self._completion(request)) for i, request in finished.items()]

    def _completion(self, request: Request) -> Completion:
        start, length = request.num_written, self.lengths[request.prompt_ids[0]]
        assert request.prompt_ids[1:] == tuple(range(start)), "the prompt must end with the response so far"
        end = min(length, start + request.max_tokens)
        ids = list(range(start, end))
        return Completion(ids, [-1.0 - request.seed % 7] * len(ids), "stop" if end == length else "length")


def prompt(number: int) -> Prompt:
    return Prompt(f"p/{number}", (number,), f"question {number}", "answer", "task", "reward")


class ScriptedCollector:
    """Prompt number p of the endless sequence gets the rewards `script[p % len(script)]`. Records the requests."""

    def __init__(self, script: Sequence[tuple[float, ...]], mesh: Mesh) -> None:
        self.script, self.mesh, self.cursor = list(script), mesh, 0
        self.requests: list[tuple[int, int]] = []  # step, count

    def groups(self, step: int, count: int, metrics: Any) -> list[Group]:
        self.requests.append((step, count))
        groups = []
        for number in range(self.cursor, self.cursor + count):
            rewards = self.script[number % len(self.script)]
            held = range(self.mesh.rollout_block, len(rewards), self.mesh.num_rollout_blocks)
            samples = [
                Sample(
                    prompt=prompt(number),
                    prompt_index=number - self.cursor,
                    index=i,
                    response_ids=[number, i],
                    rollout_logprobs=[-0.1, -0.2],
                    finish_reason="stop",
                    version=step,
                    reward=rewards[i],
                )
                for i in held
            ]
            groups.append(Group(step, samples))
        self.cursor += count
        return groups

    def epoch(self) -> float:
        return self.cursor / len(self.script)

    def state(self) -> State:
        return {"cursor": self.cursor}

    def load_state(self, state: State) -> None:
        self.cursor = state["cursor"]


class FakeRewardPool:
    """Grades the n-th sample of a draw with `grade(completion, n)`. `events` tells the order of all calls."""

    num_workers = 2

    def __init__(
        self,
        grade: Callable[[str, int], RewardResult] = lambda text, n: RewardResult(float(len(text)), {"acc": 1.0}),
        problem: str | None = None,
    ) -> None:
        self.grade, self.problem = grade, problem
        self.events: list[str] = []
        self.items: list[RewardItem] = []

    def begin(self, names: list[str]) -> None:
        self.events, self.items = [f"begin {names}"], []

    def submit(self, item: RewardItem) -> None:
        self.events.append("submit")
        self.items.append(item)

    def serve(self) -> None:
        self.events.append("serve")
        if self.problem:
            raise RuntimeError(self.problem)

    def collect(self) -> list[RewardResult]:
        self.events.append("collect")
        return [self.grade(item.completion, number) for number, item in enumerate(self.items)]


class FakeGenerator:
    """Responses with the rewards `reward(prompt, index, draw_id)`; records every draw."""

    def __init__(
        self, reward: Callable[[Prompt, int, int], float] = lambda prompt, index, draw_id: float(index)
    ) -> None:
        self.reward = reward
        self.draws: list[dict[str, Any]] = []

    def draw(
        self, prompts: Sequence[Prompt], n: int, *, greedy: bool = False, metrics: Any, **arguments: Any
    ) -> list[Sample]:
        self.draws.append({"uids": [p.uid for p in prompts], "n": n, "greedy": greedy, **arguments})
        indices = [*([GREEDY] if greedy else []), *range(n)]
        return [
            Sample(
                prompt=p,
                prompt_index=place,
                index=index,
                response_ids=[1, 2 + index],
                rollout_logprobs=[-1.0, -1.0],
                finish_reason="stop",
                version=arguments["version"],
                reward=self.reward(p, index, arguments["draw_id"]),
            )
            for place, p in enumerate(prompts)
            for index in indices
        ]
