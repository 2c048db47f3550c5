"""Sharing: a rollout block that runs out of work takes waiting requests of the others, at logical times.

An engine decodes `capacity` sequences at a time. A block hands its engine no more than that; its other requests wait here.
Every ROUND engine steps, as long as any request waits anywhere, the blocks tell each other how many wait and how many are
being drawn. From these numbers every rank computes the same moves: requests at the end of the longest queue go to blocks
with free places. Nothing is sent, because every rank knows all prompts; and nothing depends on how long a step takes, so
that the same requests are drawn together in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.rollout.engine import Completion, Request, RolloutEngine

ROUND = 32  # engine steps: at most so long a block without work waits for the others


def stream_shared(
    engine: RolloutEngine,
    queues: Sequence[Sequence[int]],
    request: Callable[[int], Request],
    version: int,
    mesh: Mesh,
    capacity: int,
) -> Iterator[list[tuple[int, Completion]]]:
    """What finishes on this block, one list per engine step. `queues[b]` numbers the requests of block b, in order.

    Collective over the world while anything waits, then over the block. Raises as RolloutEngine.stream does.
    """
    if all(len(queue) <= capacity for queue in queues) or mesh.num_rollout_blocks == 1:
        own = list(queues[mesh.rollout_block])
        for finished in engine.stream([request(number) for number in own], version):
            yield [(own[place], completion) for place, completion in finished]
        return
    waiting = [list(queue) for queue in queues]
    unfinished: dict[str, int] = {}
    engine.require(version)
    try:
        while any(waiting):
            own = waiting[mesh.rollout_block]
            for _ in range(ROUND):
                while own and len(unfinished) < capacity:
                    number = own.pop(0)
                    engine.submit(str(number), request(number), version)
                    unfinished[str(number)] = number
                if unfinished:
                    yield [(unfinished.pop(key), completion) for key, completion in engine.poll()]
            waiting = _moved(waiting, *_counts(mesh, len(own), len(unfinished)), capacity)
        while unfinished:
            yield [(unfinished.pop(key), completion) for key, completion in engine.poll()]
    finally:
        if unfinished and engine.version is not None:
            engine.abort(list(unfinished))


def _counts(mesh: Mesh, num_waiting: int, num_drawn: int) -> tuple[list[int], list[int]]:
    """Of every block: requests that wait, and requests that its engine has. Collective."""
    blocks = mesh.num_rollout_blocks
    local = [0] * (2 * blocks)
    if mesh.is_block_leader:
        local[mesh.rollout_block], local[blocks + mesh.rollout_block] = num_waiting, num_drawn
    totals = mesh.total(local)
    return totals[:blocks], totals[blocks:]


def _moved(
    waiting: Sequence[Sequence[int]], num_waiting: Sequence[int], num_drawn: Sequence[int], capacity: int
) -> list[list[int]]:
    """The queues after the moves. A block takes its own from the front, so that the last `num_waiting` of its list are left."""
    queues = [list(queue[len(queue) - left :]) for queue, left in zip(waiting, num_waiting, strict=True)]
    loads = [left + drawn for left, drawn in zip(num_waiting, num_drawn, strict=True)]
    while True:
        taker = loads.index(min(loads))
        giver = max(range(len(queues)), key=lambda block: (len(queues[block]), -block))
        if loads[taker] >= capacity or not queues[giver] or loads[giver] - loads[taker] < 2:
            return queues
        queues[taker].append(queues[giver].pop())
        loads[taker] += 1
        loads[giver] -= 1
