"""Preferences: pairs of responses ranked by the rule-based reward, the history of pairs, and the batches to train on.

Every rank holds the same pairs and draws the same batches: nothing here communicates. DeepSeekMath, arXiv:2402.03300,
algorithm 1: after each outer iteration the reward model is trained on its fresh pairs with 10 % replay of earlier ones.
The paper does not say which earlier pairs. Here they come from a bounded uniform sample of all earlier pairs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.algo.plan import scoring_plan
from grpo_megatron.config import ActorConfig
from grpo_megatron.data.sampler import Sampler
from grpo_megatron.parallel.exchange import build_batch
from grpo_megatron.types import Batch, Plan


@dataclass(frozen=True)
class PreferencePair:
    """Two responses to one prompt, as whole sequences: int32 [prompt + response]."""

    prompt_length: int
    chosen: Tensor
    rejected: Tensor

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)


class PairHistory:
    """At most `size` pairs: a uniform sample of all pairs that were ever added.

    Pair number i has the key random(seed, i), and the pairs with the smallest keys are kept. So it does not matter how
    the pairs are divided over calls of `add`, nor whether the run stops between them.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self.num_seen = 0
        self._kept: list[tuple[int, PreferencePair]] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def pairs(self) -> list[PreferencePair]:
        """The pairs in the order in which they were added."""
        return [pair for _, pair in self._kept]

    def add(self, pairs: Sequence[PreferencePair]) -> None:
        """Take new pairs, which count on from the earlier ones."""
        candidates = [*self._kept, *enumerate(pairs, self.num_seen)]
        self.num_seen += len(pairs)
        candidates.sort(key=lambda entry: random.Random(f"{self.seed}/{entry[0]}").random())
        self._kept = sorted(candidates[: self.size], key=lambda entry: entry[0])

    def state(self) -> dict[str, Any]:
        """Plain numbers, which JSON can hold."""
        kept = [[i, pair.prompt_length, pair.chosen.tolist(), pair.rejected.tolist()] for i, pair in self._kept]
        return {"num_seen": self.num_seen, "kept": kept}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self.num_seen = state["num_seen"]
        self._kept = []
        for number, prompt_length, *sequences in state["kept"]:
            chosen, rejected = (torch.tensor(tokens, dtype=torch.int32) for tokens in sequences)
            self._kept.append((number, PreferencePair(prompt_length, chosen, rejected)))


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

    Each epoch over the fresh pairs has a new order and uses every pair once. Replayed pairs are drawn from `history`
    without replacement; over many updates they are `replay_ratio` of all pairs, at any batch size. With few fresh pairs
    the batch is smaller than `size`. A pair is twice in one batch only if an epoch ends inside the batch.
    """
    ratio = replay_ratio if history else 0.0
    size = min(size, max(1, int(len(fresh) / (1 - ratio))))
    replayed_before, replayed_after = math.floor(step * size * ratio), math.floor((step + 1) * size * ratio)
    start, end = step * size - replayed_before, (step + 1) * size - replayed_after
    drawn = Sampler(fresh, size, seed=seed + 1_000_003 * iteration).items_from(start, end - start)
    keys = random.Random(f"{seed}/{iteration}/{step}")
    shuffled = sorted((keys.random(), i) for i in range(len(history)))
    return drawn + [history[i] for _, i in shuffled[: replayed_after - replayed_before]]


def pair_batch(pairs: Sequence[PreferencePair], actor: ActorConfig, dp_rank: int, dp: int) -> Batch:
    """This replica's share of the pairs as one mini-batch. Rows 2i (chosen) and 2i + 1 (rejected) share a micro-batch.

    A pair is planned as one unit, as long as its two sequences together. `actor` gives the limits of a micro-batch.
    """
    limit = actor.ppo_micro_batch_size_per_gpu  # in sequences; None: no limit
    if limit is not None:
        actor = actor.model_copy(update={"ppo_micro_batch_size_per_gpu": max(1, limit // 2)})
    pair_plan = scoring_plan([len(pair) for pair in pairs], actor, dp)
    plan = Plan(
        advantages=[0.0] * (2 * len(pairs)),
        token_weights=[0.0] * (2 * len(pairs)),
        mini_batches=[[[_rows(micro) for micro in mini] for mini in minis] for minis in pair_plan.mini_batches],
    )
    local_pairs = sorted(pair for pair, owner in pair_plan.owner().items() if owner == dp_rank)
    tokens, prompt_lengths = [], []
    for pair in (pairs[i] for i in local_pairs):
        tokens += [pair.chosen.long(), pair.rejected.long()]
        prompt_lengths += [pair.prompt_length, pair.prompt_length]
    return build_batch(
        _rows(local_pairs),
        plan,
        dp_rank,
        tokens=tokens,
        prompt_lengths=prompt_lengths,
        rollout_logprobs=[torch.zeros(len(t) - p) for t, p in zip(tokens, prompt_lengths, strict=True)],
    )


def _rows(pair_numbers: Sequence[int]) -> list[int]:
    """The two rows of each pair: 2i (chosen) and 2i + 1 (rejected)."""
    return [row for number in pair_numbers for row in (2 * number, 2 * number + 1)]
