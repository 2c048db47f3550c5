"""Which block samples what: dealt by expected length, and shared at logical times, whatever the steps take."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_megatron.rollout.engine import Completion, Request
from grpo_megatron.sampling.generator import MAX_REMEMBERED, ROUND, LengthHistory, assign_samples, stream_shared
from tests.fakes import LoneMesh, SeedEngine, prompt


def test_without_a_history_the_samples_are_cut_in_order() -> None:
    for expected in (None, [0.0] * 3, [7.0] * 3):
        assert assign_samples(3, 3, 2, expected) == [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
    assert assign_samples(2, 3, 4, [1.0, 9.0]) == [[0], [1, 2], [3], [4, 5]]  # too few prompts to deal out whole ones


def test_the_longest_prompts_are_dealt_first_to_the_block_with_the_least() -> None:
    """Prompts of 9, 5, 4, 1, 1 tokens: 9 and 5, then 4 to the second, then 1 to the first and 1 to the second."""
    assert assign_samples(5, 2, 2, [4.0, 1.0, 9.0, 5.0, 1.0]) == [[4, 5, 2, 3], [6, 7, 0, 1, 8, 9]]


def test_lengths_are_learned_per_prompt_and_the_oldest_are_forgotten() -> None:
    history, prompts = LengthHistory(), [prompt(i) for i in range(3)]
    assert history.expected(prompts) == [0.0] * 3
    history.learn(prompts[:2], [40, 80], [4, 4])
    assert history.expected(prompts) == [10.0, 20.0, 15.0]
    again = LengthHistory()
    again.load_state(history.state())
    assert again == history
    history.learn(
        [prompt(i) for i in range(10, 9 + MAX_REMEMBERED)], [1] * (MAX_REMEMBERED - 1), [1] * (MAX_REMEMBERED - 1)
    )
    assert next(iter(history.lengths)) == "p/1" and len(history.lengths) == MAX_REMEMBERED


class Blocks:
    """The meshes of blocks that run on threads: `total` waits for all of them, as a collective does."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=60)
        self.values: list[list[int]] = [[] for _ in range(count)]
        self.num_rounds = 0

    def mesh(self, rank: int) -> LoneMesh:
        mesh = LoneMesh(len(self.values), rank)

        def total(values: list[int]) -> list[int]:
            self.values[rank] = values
            self.barrier.wait()
            sums = [sum(column) for column in zip(*self.values, strict=True)]
            self.num_rounds += rank == 0
            self.barrier.wait()
            return sums

        object.__setattr__(mesh, "total", total)
        return mesh


class SlotEngine(SeedEngine):
    """A request takes its seed in steps. Records (step, number) of every submission; a step takes a random time."""

    def __init__(self, delay: float) -> None:
        super().__init__()
        self.delay, self.clock, self.most = delay, 0, 0
        self.submitted: list[tuple[int, str]] = []
        self.left: dict[str, int] = {}

    def submit(self, request_id: str, request: Request, version: int) -> None:
        super().submit(request_id, request, version)
        self.submitted.append((self.clock, request_id))
        self.left[request_id] = request.seed
        self.most = max(self.most, len(self.left))

    def poll(self) -> list[tuple[str, Completion]]:
        time.sleep(random.uniform(0, self.delay))
        self.clock += 1
        self.left = {key: steps - 1 for key, steps in self.left.items()}
        done = [key for key, steps in self.left.items() if steps == 0]
        for key in done:
            del self.left[key], self._queue[key]
        return [(key, Completion([int(key)], [0.0], "stop")) for key in done]


def draw(
    steps: Sequence[int], blocks: int, capacity: int, delay: float = 0.0
) -> tuple[list[list[int]], list[SlotEngine], Blocks]:
    """The numbers that each block drew of requests cut in order; request i takes steps[i]."""
    world, engines = Blocks(blocks), [SlotEngine(delay) for _ in range(blocks)]
    queues = assign_samples(len(steps), 1, blocks)

    def request(number: int) -> Request:
        return Request((1,), seed=steps[number], max_tokens=1)

    def run(rank: int) -> list[int]:
        stream = stream_shared(engines[rank], queues, request, 0, world.mesh(rank), capacity)  # type: ignore[arg-type]
        finished = [(number, completion.response_ids) for step in stream for number, completion in step]
        return [number for number, _ in finished]

    with ThreadPoolExecutor(blocks) as threads:
        return list(threads.map(run, range(blocks))), engines, world


LONG_FIRST = [200] * 12 + [3] * 28  # two blocks, 20 requests each: the first block has all the long ones


def test_a_block_without_work_takes_waiting_requests_whatever_steps_take() -> None:
    drawn, engines, _ = draw(LONG_FIRST, 2, capacity=4)
    assert sorted(drawn[0] + drawn[1]) == list(range(40))
    alone = 3 * 200 + 2 * 3  # steps of the first block if nobody takes from it
    assert max(engine.clock for engine in engines) < 0.75 * alone
    assert any(number < 20 for number in drawn[1])
    assert [engine.most for engine in engines] == [4, 4]
    for _ in range(2):  # moves do not depend on how long a step takes
        again, delayed, _ = draw(LONG_FIRST, 2, capacity=4, delay=0.0005)
        assert again == drawn
        assert [engine.submitted for engine in delayed] == [engine.submitted for engine in engines]


@pytest.mark.parametrize("seed", range(20))
def test_every_request_is_drawn_once(seed: int) -> None:
    generator = random.Random(seed)
    steps = [generator.choice([1, 5, ROUND, 3 * ROUND]) for _ in range(generator.randrange(1, 60))]
    drawn, engines, _ = draw(steps, generator.randrange(2, 5), capacity := generator.randrange(1, 6))
    assert sorted(number for numbers in drawn for number in numbers) == list(range(len(steps)))
    assert max(engine.most for engine in engines) <= capacity


def test_blocks_with_room_for_all_never_wait_for_each_other() -> None:
    assert draw([5] * 8, 2, capacity=4)[2].num_rounds == 0
    assert draw([5] * 9, 2, capacity=4)[2].num_rounds > 0
