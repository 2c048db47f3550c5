"""From the config to the stack of collectors that brings a step's samples."""

from __future__ import annotations

from collections.abc import Callable

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import Config
from grpo_megatron.data.sampler import Sampler
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.sampling.collector import Collector, FileCollector, InitialModelCollector, PolicyCollector
from grpo_megatron.sampling.dynamic import DynamicSampling
from grpo_megatron.sampling.generator import Generator
from grpo_megatron.sampling.replay import Replay


def build_collector(
    config: Config, checked: Checked, generator: Generator, mesh: Mesh, hand_over: Callable[[int, Metrics], None]
) -> Collector:
    """`hand_over(step, metrics)` gives the engine the initial model (algorithm.source=initial)."""
    data, algorithm = config.data, config.algorithm
    size = data.train_batch_size
    if algorithm.source == "file":
        return FileCollector(Sampler(checked.offline_groups, size, data.shuffle, data.seed), mesh)
    prompts = Sampler(checked.train_prompts, size, data.shuffle, data.seed)
    greedy = advantage_estimators.facts(algorithm.adv_estimator).needs_greedy_reward
    collector: Collector = PolicyCollector(generator, prompts, data, config.rollout, greedy=greedy)
    if algorithm.source == "initial":
        collector = InitialModelCollector(collector, hand_over)
    if algorithm.filter_groups.enable:
        collector = DynamicSampling(
            collector,
            mesh,
            round_size=data.gen_batch_size or size,
            max_rounds=algorithm.filter_groups.max_num_gen_batches,
        )
    if algorithm.replay.ratio:
        collector = Replay(collector, algorithm.replay, mesh)
    return collector
