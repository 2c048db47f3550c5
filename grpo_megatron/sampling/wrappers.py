"""Collectors around other collectors: dynamic sampling and replay; and the stack of collectors that a config asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.config import AlgorithmConfig, DataConfig, ReplayConfig, RolloutConfig
from grpo_megatron.data.curriculum import Curriculum
from grpo_megatron.data.responses import OfflineGroup
from grpo_megatron.data.sampler import FirstRankShare, MixedSampler, Mixture, Sampler, WeightedSampler, alone
from grpo_megatron.data.stream import StreamPrompts, StreamSampler
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.sampling.collector import (
    Clock,
    Collector,
    FileCollector,
    Group,
    PolicyCollector,
    State,
    pack_groups,
    select_informative,
    unpack_groups,
)
from grpo_megatron.sampling.generator import Generator
from grpo_megatron.sampling.partial import PartialCollector, PartialTrajectories
from grpo_megatron.types import Prompt


class DynamicSampling(Collector):
    """The collector of DAPO's rounds.

    `round_size` is in prompts, `max_staleness` in steps (0: left-over groups are never used).

    DAPO, arXiv:2503.14476, section 3.2: generate rounds until the batch is full of informative groups, those whose raw
    rewards differ. After `max_rounds` rounds the step trains on the groups that it has, even on none: every denominator
    counts only these. Departure: groups beyond the batch are left over for later steps instead of being thrown away. A
    left-over group is dropped once it is more than `max_staleness` steps old. With B prompts per batch, m groups missing
    from it and a share p of informative groups in the last round, a round has

        prompts = min(round_size, ceil((m + max_staleness * B) / p))

    so that it yields about what this step and the next `max_staleness` steps can train on.
    """

    def __init__(self, inner: Collector, mesh: Mesh, *, round_size: int, max_rounds: int, max_staleness: int) -> None:
        self.inner, self.mesh = inner, mesh
        self.round_size, self.max_rounds, self.max_staleness = round_size, max_rounds, max_staleness
        self.left_over: list[Group] = []  # oldest first
        self.last_round = (0, 0)  # informative groups, sampled groups

    def groups(self, step: int, count: int, metrics: Metrics) -> list[Group]:
        kept = [group for group in self.left_over if step - group.version <= self.max_staleness]
        num_dropped = len(self.left_over) - len(kept)
        rounds = 0
        while len(kept) < count and rounds < self.max_rounds:
            drawn = self.inner.groups(step, self._num_prompts(count - len(kept), count), metrics)
            informative = select_informative(drawn, self.mesh)
            self.last_round = (len(informative), len(drawn))
            kept = kept + informative
            rounds += 1
        batch, self.left_over = kept[:count], kept[count:]
        metrics.constant("train/num_gen_batches", rounds)
        metrics.constant("train/batch_fill_ratio", len(batch) / count)
        metrics.constant("train/left_over_groups_dropped", num_dropped)
        metrics.constant("train/left_over_staleness_max", max((step - group.version for group in batch), default=0))
        return batch

    def _num_prompts(self, missing: int, batch_size: int) -> int:
        """Returns the prompts of the next round: see the class.

        A full round if the last round had no informative group.
        """
        informative, drawn = self.last_round
        if not informative:
            return self.round_size
        usable = missing + self.max_staleness * batch_size
        return min(self.round_size, -(-usable * drawn // informative))

    def epoch(self) -> float:
        return self.inner.epoch()

    def state(self) -> State:
        return {
            "inner": self.inner.state(),
            "left_over": pack_groups(self.left_over, self.mesh),
            "last_round": list(self.last_round),
        }

    def load_state(self, state: State) -> None:
        self.inner.load_state(state["inner"])
        self.left_over = unpack_groups(state["left_over"], self.mesh)
        informative, drawn = state["last_round"]
        self.last_round = (informative, drawn)


# -- Replay ------------------------------------------------------------------------------------------------------------
# Replay: trains on groups of earlier steps together with fresh ones. None is more than `max_staleness` steps old.
#
# Up to `ratio` of each batch comes from the buffer: the oldest groups first, each at most once. The rest is fresh. Fresh
# groups whose rewards differ enter the buffer. Groups leave it when they are too old, or when it holds more than `size`.
#
# The ratio of the surrogate loss is taken against the policy's log-probabilities at the start of the update. The
# rollout correction covers the difference between those and the log-probabilities of its own weights, for old and
# fresh samples alike.


class Replay(Collector):
    """A collector that takes up to `replay.ratio` of a step's groups from a buffer, and the others from `inner`."""

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


# -- The stack of collectors -------------------------------------------------------------------------------------------
# Builds the stack of collectors that the config asks for.


def build_collector(
    algorithm: AlgorithmConfig,
    data: DataConfig,
    rollout: RolloutConfig,
    *,
    prompts: Sequence[Prompt],
    offline_groups: Sequence[OfflineGroup],
    generator: Generator | None,
    mesh: Mesh,
    sync_initial: Callable[[int, Metrics], None] | None = None,
    clock: Clock | None = None,
) -> Collector:
    """`sync_initial(step, metrics)` streams the initial model into the engine (algorithm.source=initial). `clock` None: no lag.

    `generator` is None in a run that samples nothing.
    `prompts` and `offline_groups` are both empty in a run without training steps.
    """
    size = data.train_batch_size
    if not prompts and not offline_groups:
        return Collector()
    if algorithm.source == "file":
        return FileCollector(Sampler(offline_groups, size, data.shuffle, data.seed), mesh)
    assert generator is not None, "a run that trains on generated samples has an engine"
    greedy = advantage_estimators.facts(algorithm.adv_estimator).needs_greedy_reward
    partial = PartialCollector if rollout.multi_turn.environment is None else PartialTrajectories
    from_policy: type[PolicyCollector] = partial if rollout.partial.is_on else PolicyCollector
    prepare = sync_initial if algorithm.source == "initial" else None
    sampler = prompt_sampler(prompts, data, lambda make: mesh.broadcast(make() if mesh.rank == 0 else None))
    collector: Collector = from_policy(generator, sampler, data, rollout, greedy=greedy, prepare=prepare, clock=clock)
    if algorithm.filter_groups.enable:
        collector = DynamicSampling(
            collector,
            mesh,
            round_size=data.gen_batch_size or size,
            max_rounds=algorithm.filter_groups.max_num_gen_batches,
            max_staleness=algorithm.filter_groups.max_staleness,
        )
    if algorithm.replay.ratio:
        collector = Replay(collector, algorithm.replay, mesh)
    return collector


def prompt_sampler(prompts: Sequence[Prompt], data: DataConfig, share: FirstRankShare = alone) -> Sampler[Prompt]:
    """Returns every prompt once per epoch; with weights of prompts or sources, in proportion to them; or a curriculum.

    `share`: how the rank that reads streams gives their rows to the others.
    """
    size, order = data.train_batch_size, (data.train_batch_size, data.shuffle, data.seed)
    sources = prompts.sources if isinstance(prompts, Mixture) else []
    parts = {source.name: source.prompts for source in sources}
    streams = {name: StreamSampler(p, size, share) for name, p in parts.items() if isinstance(p, StreamPrompts)}
    if data.curriculum.pieces:
        has_rates = data.sampling.pass_rates is not None
        return Curriculum(prompts, data.curriculum, *order, has_rates=has_rates, streams=streams)
    if isinstance(prompts, StreamPrompts):
        return StreamSampler(prompts, size, share)
    if isinstance(prompts, Mixture):
        return MixedSampler(prompts, *order, streams=streams)
    if data.sampling.weight == "uniform":
        return Sampler(prompts, *order)
    return WeightedSampler(prompts, [prompt.weight for prompt in prompts], size, data.seed)
