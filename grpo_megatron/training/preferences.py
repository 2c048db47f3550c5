"""Preferences: pairs of responses of which a rule prefers one, what is kept of them, and which make a training batch.

Every rank holds the same pairs and draws the same batches: nothing here communicates. DeepSeekMath, arXiv:2402.03300,
algorithm 1: after each outer iteration the reward model is trained on its fresh pairs with 10 % replay of earlier ones.
Departure: the paper does not say which earlier ones; here a bounded history holds a uniform sample of all there were.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.algo.plan import supervised_plan
from grpo_megatron.config import ActorConfig
from grpo_megatron.data.sampler import Sampler
from grpo_megatron.parallel.exchange import build_batch
from grpo_megatron.types import Batch, Plan


@dataclass(frozen=True)
class PreferencePair:
    """Two whole sequences, int32 [prompt + response], that answer one prompt."""

    prompt_length: int
    chosen: Tensor
    rejected: Tensor

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)


class PairHistory:
    """At most `size` pairs, a uniform sample of all that were ever added.

    Pair number i has the key random(seed, i), and the smallest keys stay: the order and the cuts of the additions change
    nothing, and neither does a stop in between.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self.num_seen = 0
        self._kept: list[tuple[int, PreferencePair]] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def pairs(self) -> list[PreferencePair]:
        """In the order in which they came."""
        return [pair for _, pair in self._kept]

    def add(self, pairs: Sequence[PreferencePair]) -> None:
        numbered = [*self._kept, *enumerate(pairs, self.num_seen)]
        self.num_seen += len(pairs)
        numbered.sort(key=lambda entry: random.Random(f"{self.seed}/{entry[0]}").random())
        self._kept = sorted(numbered[: self.size], key=lambda entry: entry[0])

    def state(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        kept = [[n, p.prompt_length, p.chosen.tolist(), p.rejected.tolist()] for n, p in self._kept]
        return {"num_seen": self.num_seen, "kept": kept}

    def load_state(self, state: dict[str, Any]) -> None:
        self.num_seen = state["num_seen"]
        self._kept = [
            (
                number,
                PreferencePair(
                    prompt, torch.tensor(chosen, dtype=torch.int32), torch.tensor(rejected, dtype=torch.int32)
                ),
            )
            for number, prompt, chosen, rejected in state["kept"]
        ]


def mixed_batch(
    fresh: Sequence[PreferencePair],
    history: Sequence[PreferencePair],
    *,
    size: int,
    replay_ratio: float,
    seed: int,
    iteration: int,
    step: int,
) -> list[PreferencePair]:
    """The pairs of update number `step` of an outer iteration: a pure function of its arguments.

    Fresh pairs come each once an epoch, in an order of their own every epoch. Replayed ones, `replay_ratio` of all in
    the long run however small the batch, are drawn from `history` without putting back. With few fresh pairs the batch
    shrinks. A pair comes twice in one batch only where two epochs meet in it.
    """
    size = min(size, max(1, int(len(fresh) / (1 - replay_ratio if history else 1))))
    ratio = replay_ratio if history else 0.0
    before, after = math.floor(step * size * ratio), math.floor((step + 1) * size * ratio)
    start, end = step * size - before, (step + 1) * size - after
    drawn = Sampler(fresh, size, seed=seed + 1_000_003 * iteration).items_from(start, end - start)
    keys = random.Random(f"{seed}/{iteration}/{step}")
    shuffled = sorted((keys.random(), i) for i in range(len(history)))
    return drawn + [history[i] for _, i in shuffled[: after - before]]


def pair_batch(pairs: Sequence[PreferencePair], actor: ActorConfig, dp_rank: int, dp: int) -> Batch:
    """This replica's share of the pairs, one mini-batch: rows 2i (chosen) and 2i + 1 (rejected) in one micro-batch.

    A pair is one unit of the plan, as long as both its sequences; the caps are the policy's.
    """
    sequences = actor.ppo_micro_batch_size_per_gpu
    caps = actor.model_copy(update={"ppo_micro_batch_size_per_gpu": sequences and max(1, sequences // 2)})
    units = supervised_plan([(0, len(pair)) for pair in pairs], caps, dp)
    plan = Plan(
        advantages=[0.0] * (2 * len(pairs)),
        token_weights=[0.0] * (2 * len(pairs)),
        mini_batches=[
            [[[row for unit in micro for row in (2 * unit, 2 * unit + 1)] for micro in mini] for mini in schedule]
            for schedule in units.mini_batches
        ],
    )
    mine = sorted(unit for unit, owner in units.owner().items() if owner == dp_rank)
    tokens = [tokens.long() for unit in mine for tokens in (pairs[unit].chosen, pairs[unit].rejected)]
    prompt_lengths = [pairs[unit].prompt_length for unit in mine for _ in range(2)]
    return build_batch(
        [row for unit in mine for row in (2 * unit, 2 * unit + 1)],
        plan,
        dp_rank,
        tokens=tokens,
        prompt_lengths=prompt_lengths,
        rollout_logprobs=[torch.zeros(len(t) - p) for t, p in zip(tokens, prompt_lengths, strict=True)],
    )
