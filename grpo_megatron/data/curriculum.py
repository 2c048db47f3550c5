"""Curricula: a batch mixed from pieces, each a set of prompts with a share that follows a schedule (`data.curriculum`).

Piece k has the share w_k(s) / sum(w(s)) of step s, w between the steps of its schedule being linear. Every prompt adds its
shares to the credits of the pieces that have a prompt; the one with the largest credit gives it and pays 1 (smooth weighted
round robin), so that with constant weights each piece stays within about a prompt of its share (1.2 was the most, measured in
4,000 random mixes of 3 to 20 pieces). Each piece goes through its prompts in epochs of its own. The order is a function of
(data.seed, steps so far), and with `rates: run` of the rewards, too: both are the same in every layout. A checkpoint has the
credits, the places and the rates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from grpo_megatron.config import ConfigError, CurriculumConfig, CurriculumPiece
from grpo_megatron.data.sampler import Mixture, Sampler, SamplerState
from grpo_megatron.types import GREEDY, Prompt, Sample

RIGHT_FROM = 1.0  # of "acc", else of the reward: from which on a response is right, as in `curate`
Rates = np.ndarray[Any, np.dtype[np.float64]]


class _Ordered(Sampler[int]):
    """The candidates of a piece. `keys`: sort each epoch by these, after its shuffle; None: leave it shuffled."""

    def __init__(self, items: Sequence[int], shuffle: bool, seed: str, keys: Rates | None) -> None:
        super().__init__(items, 1, shuffle or keys is not None, seed)
        self.keys = keys

    def _order_of(self, epoch: int) -> Any:
        order = super()._order_of(epoch)
        return order if self.keys is None else order[np.argsort(self.keys[order], kind="stable")]


class Curriculum(Sampler[Prompt]):
    """The sampler of `config.pieces`. `streams`: samplers of sources that have no end. Raises ConfigError: an empty piece.

    `prompts` have the pass rates of data.sampling.pass_rates, if it is set. With rates=run, `learn` replaces them.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        config: CurriculumConfig,
        batch_size: int,
        shuffle: bool,
        seed: int,
        *,
        has_rates: bool,
        streams: Mapping[str, Sampler[Prompt]],
    ) -> None:
        super().__init__(prompts, batch_size, shuffle, seed)
        self.pieces, self.learns, self.streams = config.pieces, config.rates == "run", streams
        self.rates: Rates = np.array([one.pass_rate for one in prompts] if has_rates else [math.nan] * len(prompts))
        self.credits, self.places = [0.0] * len(config.pieces), [0] * len(config.pieces)
        self.numbers: dict[str, int] = {}  # uid of a prompt that was sampled -> its index, where rates are learnt
        self.counts: Counter[str] = Counter()  # prompts of the last step, by piece
        self.step = -1  # of the last call
        self.orders = [None if piece.source in streams else self._order(piece) for piece in config.pieces]

    def _order(self, piece: CurriculumPiece) -> _Ordered:
        spans = {"": range(len(self.items))}
        if isinstance(self.items, Mixture):
            parts = zip(self.items.sources, self.items.starts, strict=True)
            spans = {one.name: range(start, start + len(one.prompts)) for one, start in parts}
        wanted = [name for name in spans if name not in self.streams and piece.source in (None, name)]
        numbers = np.concatenate([np.arange(0), *(np.array(spans[name]) for name in wanted)]).astype(int)
        numbers = numbers if self.learns else numbers[self._fits(piece, self.rates[numbers])]
        if not len(numbers) or piece.min_pass_rate > piece.max_pass_rate:
            raise ConfigError(
                f"data.curriculum.pieces: {piece.name} has no prompt: none"
                f"{f' of source {piece.source!r}' if piece.source else ''} has a pass rate of {piece.min_pass_rate:g} to"
                f" {piece.max_pass_rate:g}; widen the range, or leave the piece out"
            )
        sign = {"random": 0, "easiest": -1, "hardest": 1}[piece.order]
        keys = sign * self.rates[numbers] if sign else None
        return _Ordered(numbers.tolist(), self.shuffle, f"{self.seed}/piece/{piece.name}", keys)

    @staticmethod
    def _fits(piece: CurriculumPiece, rates: Rates) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Tell which pass rates are in the piece's range. A prompt without one fits every range, so that it gets one."""
        return np.isnan(rates) | ((rates >= piece.min_pass_rate) & (rates <= piece.max_pass_rate))

    def items_from(self, start: int, count: int, step: int = 0) -> list[Prompt]:
        """Pick the next `count` prompts, for step `step`. `start` is not read: the credits and places are the position."""
        weights = [piece.weight_at(step) for piece in self.pieces]
        fits = [
            np.ones(0, bool) if one is None else self._fits(p, self.rates)
            for p, one in zip(self.pieces, self.orders, strict=True)
        ]
        has_prompts = [one is None or bool(fit[one.items].any()) for fit, one in zip(fits, self.orders, strict=True)]
        usable = [k for k, weight in enumerate(weights) if weight and has_prompts[k]]
        if not usable:  # all rates have left their ranges
            usable = [k for k, weight in enumerate(weights) if weight]
            fits = [np.ones_like(fit) for fit in fits]
        total, chosen = math.fsum(weights[k] for k in usable), []
        for _ in range(count):
            for k in usable:
                self.credits[k] += weights[k] / total
            chosen.append(max(usable, key=lambda k: self.credits[k]))
            self.credits[chosen[-1]] -= 1
        self.counts = self.counts if step == self.step else Counter()  # a step of dynamic sampling has several calls
        self.counts.update(self.pieces[k].name for k in chosen)
        self.step = step
        read = {
            k: iter(self.streams[str(self.pieces[k].source)].items_from(0, chosen.count(k), step))
            for k in usable
            if self.orders[k] is None
        }
        return [next(read[k]) if k in read else self._next(k, fits[k]) for k in chosen]

    def _next(self, k: int, fits: np.ndarray[Any, np.dtype[np.bool_]]) -> Prompt:
        order = self.orders[k]
        assert order is not None
        while True:
            index = order.items[order.index_at(self.places[k])]
            self.places[k] += 1
            if fits[index]:
                break
        prompt = self.items[index]
        if self.learns:
            self.numbers[prompt.uid] = index
        return prompt

    def epoch_at(self, cursor: int) -> float:
        return 0.0 if self.streams else super().epoch_at(cursor)

    def learn(self, counts: Mapping[str, tuple[int, int]]) -> None:
        """Set the pass rates of prompts, by uid, to (right responses, responses). The same on every rank."""
        for uid, (right, total) in counts.items():
            if total and uid in self.numbers:
                self.rates[self.numbers[uid]] = right / total

    def state(self) -> SamplerState:
        """Return the position, and with rates=run index and rate of every prompt that was sampled. Collective with streams."""
        measured = [
            [uid, index, None if math.isnan(rate := self.rates[index]) else float(rate)]
            for uid, index in self.numbers.items()
        ]
        streams = {name: stream.state() for name, stream in self.streams.items()}
        return {"credits": [*self.credits], "places": [*self.places], "rates": measured, "streams": streams}

    def load_state(self, state: SamplerState) -> None:
        self.credits, self.places = list(state["credits"]), list(state["places"])
        for uid, index, rate in state["rates"]:
            self.numbers[uid], self.rates[index] = index, math.nan if rate is None else rate
        for name, stream in self.streams.items():
            stream.load_state(state["streams"][name])


def right_counts(samples: Iterable[Sample]) -> Counter[tuple[str, bool]]:
    """Count (uid of the prompt, response is right) over samples that have a reward. Greedy responses do not count."""
    scored = [one for one in samples if math.isfinite(one.reward) and one.index != GREEDY]
    return Counter((one.prompt.uid, one.reward_metrics.get("acc", one.reward) >= RIGHT_FROM) for one in scored)
