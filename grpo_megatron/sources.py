"""From the config to the stack of collectors that brings a step's samples."""

from __future__ import annotations

from collections.abc import Callable

from grpo_megatron.algo.advantages import NEEDS_GREEDY_REWARD
from grpo_megatron.collector import Collector, Drawn, FromFile, FromInitial
from grpo_megatron.config import Config
from grpo_megatron.data.sampler import Sampler
from grpo_megatron.filtering import Informative
from grpo_megatron.generator import Generator
from grpo_megatron.metrics import Metrics
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.replay import Replayed
from grpo_megatron.validate import Checked


def build_collector(
    config: Config, checked: Checked, generator: Generator, mesh: Mesh, hand_over: Callable[[int, Metrics], None]
) -> Collector:
    """`hand_over(step, metrics)` gives the engine the initial model (algorithm.source=initial)."""
    data, algorithm = config.data, config.algorithm
    size = data.train_batch_size
    if algorithm.source == "file":
        return FromFile(Sampler(checked.answered, size, data.shuffle, data.seed), mesh)
    prompts = Sampler(checked.train_prompts, size, data.shuffle, data.seed)
    greedy = algorithm.adv_estimator in NEEDS_GREEDY_REWARD
    collector: Collector = Drawn(generator, prompts, data, config.rollout, greedy=greedy)
    if algorithm.source == "initial":
        collector = FromInitial(collector, hand_over)
    if algorithm.filter_groups.enable:
        collector = Informative(
            collector,
            mesh,
            round_size=data.gen_batch_size or size,
            max_rounds=algorithm.filter_groups.max_num_gen_batches,
        )
    if algorithm.replay.ratio:
        collector = Replayed(collector, algorithm.replay, mesh)
    return collector
