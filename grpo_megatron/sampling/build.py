"""Builds the stack of collectors that the config asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.config import AlgorithmConfig, DataConfig, RolloutConfig
from grpo_megatron.data.sampler import MixedSampler, Mixture, Sampler, WeightedSampler
from grpo_megatron.data.written import OfflineGroup
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.sampling.collector import (
    Collector,
    EmptyCollector,
    FileCollector,
    InitialModelCollector,
    PolicyCollector,
)
from grpo_megatron.sampling.dynamic import DynamicSampling
from grpo_megatron.sampling.generator import Generator
from grpo_megatron.sampling.partial import PartialCollector
from grpo_megatron.sampling.replay import Replay
from grpo_megatron.types import Prompt


def build_collector(
    algorithm: AlgorithmConfig,
    data: DataConfig,
    rollout: RolloutConfig,
    *,
    prompts: Sequence[Prompt],
    offline_groups: Sequence[OfflineGroup],
    generator: Generator | None,
    mesh: Mesh,
    sync_initial: Callable[[int, Metrics], None],
) -> Collector:
    """`sync_initial(step, metrics)` streams the initial model into the engine (algorithm.source=initial).

    `generator` is None in a run that draws nothing.
    `prompts` and `offline_groups` are both empty in a run without training steps.
    """
    size = data.train_batch_size
    if not prompts and not offline_groups:
        return EmptyCollector()
    if algorithm.source == "file":
        return FileCollector(Sampler(offline_groups, size, data.shuffle, data.seed), mesh)
    assert generator is not None, "a run that trains on drawn samples has an engine"
    greedy = advantage_estimators.facts(algorithm.adv_estimator).needs_greedy_reward
    from_policy = PartialCollector if rollout.partial.is_on else PolicyCollector
    collector: Collector = from_policy(generator, prompt_sampler(prompts, data), data, rollout, greedy=greedy)
    if algorithm.source == "initial":
        collector = InitialModelCollector(collector, sync_initial)
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


def prompt_sampler(prompts: Sequence[Prompt], data: DataConfig) -> Sampler[Prompt]:
    """Every prompt once per epoch; with weights of prompts or sources, in proportion to them."""
    if isinstance(prompts, Mixture):
        return MixedSampler(prompts, data.train_batch_size, data.shuffle, data.seed)
    if data.sampling.weight == "uniform":
        return Sampler(prompts, data.train_batch_size, data.shuffle, data.seed)
    return WeightedSampler(prompts, [prompt.weight for prompt in prompts], data.train_batch_size, data.seed)
