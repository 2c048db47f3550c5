"""Replay: trains on groups of earlier steps together with fresh ones. None is more than `max_staleness` steps old.

Up to `ratio` of each batch comes from the buffer: the oldest groups first, each at most once. The rest is fresh. Fresh
groups whose rewards differ enter the buffer. Groups leave it when they are too old, or when it holds more than `size`.

The ratio of the surrogate loss is taken against the training engine's log-probabilities at the start of the update. The
rollout correction covers the difference between those and the log-probabilities that a sample was drawn with, for old and
fresh samples alike.
"""

from __future__ import annotations

from dataclasses import replace

from grpo_megatron.config import ReplayConfig
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.sampling.collector import Collector, Group, State, select_informative
from grpo_megatron.sampling.stored import pack_groups, unpack_groups


class Replay:
    def __init__(self, inner: Collector, replay: ReplayConfig, mesh: Mesh) -> None:
        self.inner, self.replay, self.mesh = inner, replay, mesh
        self.buffer: list[Group] = []  # in order of arrival

    def groups(self, step: int, count: int, metrics: Metrics) -> list[Group]:
        usable = [group for group in self.buffer if step - group.version <= self.replay.max_staleness]
        num_replayed = min(len(usable), int(count * self.replay.ratio))
        replayed, waiting = usable[:num_replayed], usable[num_replayed:]
        fresh = self.inner.groups(step, count - num_replayed, metrics)
        metrics.constant("train/replayed_groups", num_replayed)
        metrics.constant("train/replay_staleness_max", max((step - group.version for group in replayed), default=0))
        # Copies: the step renumbers the samples that it trains on.
        arriving = [
            Group(group.version, [replace(sample) for sample in group.samples])
            for group in select_informative(fresh, self.mesh)
        ]
        self.buffer = (waiting + arriving)[-self.replay.size :]
        for group in replayed:
            for sample in group.samples:
                sample.is_replayed = True
        return replayed + fresh

    def epoch(self) -> float:
        return self.inner.epoch()

    def state(self) -> State:
        return {"inner": self.inner.state(), "groups": pack_groups(self.buffer, self.mesh)}

    def load_state(self, state: State) -> None:
        self.inner.load_state(state["inner"])
        self.buffer = unpack_groups(state["groups"], self.mesh)
