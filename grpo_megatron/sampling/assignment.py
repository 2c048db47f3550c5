"""Assignment: which rollout block draws which samples of a draw, and in which order.

Without any history the samples are ordered by prompt and cut into one contiguous range per block, of nearly equal length.
Once lengths of earlier responses are known, whole prompts are dealt out by expected length instead: longest first, each to the
block with the fewest expected tokens (Graham's LPT rule), which draws them in this order. So no block begins its longest
responses last. Requests have their own seeds: the assignment decides only where and when a sample is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.rollout.engine import Completion, Request, RolloutEngine
from grpo_megatron.types import Prompt, Sample

MAX_REMEMBERED = 65_536  # prompts; the oldest are forgotten


@dataclass
class LengthHistory:
    """Mean tokens of the last responses to each prompt, by uid. The same on every rank."""

    lengths: dict[str, float] = field(default_factory=dict)

    def expected(self, prompts: Sequence[Prompt]) -> list[float]:
        """Tokens per response. Prompts without a history count as the mean of the others; all as 0 if none has one."""
        known = [self.lengths[prompt.uid] for prompt in prompts if prompt.uid in self.lengths]
        mean = sum(known) / len(known) if known else 0.0
        return [self.lengths.get(prompt.uid, mean) for prompt in prompts]

    def learn(self, prompts: Sequence[Prompt], num_tokens: Sequence[int], n: int) -> None:
        """`num_tokens`: of all n responses of each prompt together, on all ranks."""
        for prompt, total in zip(prompts, num_tokens, strict=True):
            self.lengths.pop(prompt.uid, None)  # to the end of the order
            self.lengths[prompt.uid] = total / n
        for uid in list(self.lengths)[: max(0, len(self.lengths) - MAX_REMEMBERED)]:
            del self.lengths[uid]

    def state(self) -> dict[str, Any]:
        return dict(self.lengths)

    def load_state(self, state: dict[str, Any]) -> None:
        self.lengths = {str(uid): float(length) for uid, length in state.items()}


def token_sums(samples: Sequence[Sample], num_prompts: int) -> list[int]:
    """Response tokens of each prompt's samples here."""
    sums = [0] * num_prompts
    for sample in samples:
        sums[sample.prompt_index] += len(sample.response_ids)
    return sums


def assign_samples(
    num_prompts: int, per_prompt: int, num_blocks: int, expected: Sequence[float] | None = None
) -> list[list[int]]:
    """For each block the numbers of its samples, in the order to draw them. Sample i of prompt p is p * per_prompt + i."""
    total = num_prompts * per_prompt
    if expected is None or len(set(expected)) <= 1 or num_prompts < num_blocks:
        cuts = [block * total // num_blocks for block in range(num_blocks + 1)]
        return [list(range(start, end)) for start, end in zip(cuts, cuts[1:], strict=False)]
    queues: list[list[int]] = [[] for _ in range(num_blocks)]
    loads = [0.0] * num_blocks
    for prompt in sorted(range(num_prompts), key=lambda p: -expected[p]):
        block = loads.index(min(loads))
        queues[block].extend(range(prompt * per_prompt, (prompt + 1) * per_prompt))
        loads[block] += expected[prompt] * per_prompt
    return queues


# -- Sharing -----------------------------------------------------------------------------------------------------------
# Sharing: a rollout block that runs out of work takes waiting requests of the others, at logical times.
#
# An engine decodes `capacity` sequences at a time. A block hands its engine no more than that; its other requests wait here.
# Every ROUND engine steps, as long as any request waits anywhere, the blocks tell each other how many wait and how many are
# being drawn. From these numbers every rank computes the same moves: requests at the end of the longest queue go to blocks
# with free places. Nothing is sent, because every rank knows all prompts; and nothing depends on how long a step takes, so
# that the same requests are drawn together in every run.

ROUND = 32  # engine steps: at most so long a block without work waits for the others


def stream_shared(
    engine: RolloutEngine,
    queues: Sequence[Sequence[int]],
    request: Callable[[int], Request],
    version: int,
    mesh: Mesh,
    capacity: int,
) -> Iterator[list[tuple[int, Completion]]]:
    """Yields what finishes on this block, one list per engine step. `queues[b]` numbers the requests of block b, in order.

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
    """Returns for every block how many requests wait, and how many its engine has. Collective."""
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
