"""The layouts that a world and a model allow: every combination of the keys of Layout that is valid. Pure arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from grpo_megatron.checks.experts import expert_problems
from grpo_megatron.checks.layout import divisors, layout_problems
from grpo_megatron.config import Config
from grpo_megatron.models.architecture import Architecture, engine_split_problems, split_problems
from grpo_megatron.models.layers.precision import precision_problems
from grpo_megatron.planning.layout import Layout

ENGINE_NODES = 2  # an engine is on at most so many nodes, unless the config asks for more
TOKEN_FACTORS = (1, 2, 4)


def shapes(config: Config, arch: Architecture, world_size: int, per_node: int) -> Iterator[Layout]:
    """Every valid tp, pp, ep and rollout tp, with the config's other keys. tp stays within a node, if it is there now."""
    now = Layout.of(config)
    most_tp, most_engine = max(per_node, now.tp), max(ENGINE_NODES * per_node, now.rollout_tp)
    sizes = divisors(world_size)
    engines = [now.rollout_tp]
    if config.draws:
        has_whole_experts = config.rollout.has_whole_experts
        fitting = (n for n in sizes if not engine_split_problems(arch, n, has_whole_experts=has_whole_experts))
        engines = [n for n in fitting if n <= most_engine]
    experts = divisors(arch.num_experts) if arch.num_experts else [1]
    pipelines = [*_pipelines(arch.num_layers, sizes), (now.pp, now.first_layers)]
    tps = [n for n in sizes if n <= most_tp and not split_problems(arch, n)]
    for tp, (pp, first), ep in itertools.product(tps, dict.fromkeys(pipelines), experts):
        if world_size % (tp * pp * ep) or not engines:
            continue
        layout = replace(now, tp=tp, pp=pp, first_layers=first, ep=ep, rollout_tp=engines[0])
        if _is_valid(layout.applied(config), arch, world_size):
            yield from (replace(layout, rollout_tp=engine) for engine in engines)


def _pipelines(num_layers: int, sizes: list[int]) -> Iterator[tuple[int, int]]:
    """(pp, layers of the first stage): 0 where all stages are equal, else the rest that full stages leave."""
    for pp in (n for n in sizes if n <= num_layers):
        first = num_layers - (pp - 1) * -(-num_layers // pp)
        if num_layers % pp == 0:
            yield pp, 0
        elif first > 0:
            yield pp, first


def _is_valid(config: Config, arch: Architecture, world_size: int) -> bool:
    on_cpu = config.trainer.device == "cpu"
    problems = itertools.chain(
        layout_problems(config, world_size, arch),
        expert_problems(config.actor.megatron, world_size, arch, on_cpu=on_cpu),
        precision_problems(config, arch),
    )
    return next(problems, None) is None


def micro_batches(config: Config) -> list[int]:
    """Tokens of a micro-batch to try: the config's, its multiples, and half of it where a full sequence still fits."""
    tokens = config.actor.ppo_max_token_len_per_gpu
    length = config.data.max_prompt_length + config.data.max_response_length
    halves = [tokens // 2] if tokens // 2 >= length else []
    return [*halves, *(factor * tokens for factor in TOKEN_FACTORS)]


def variants(layout: Layout, config: Config) -> Iterator[Layout]:
    """`layout` with each micro-batch size, with and without recomputation and offloading, with a distributed optimizer."""
    for tokens, recompute, offload in itertools.product(micro_batches(config), (False, True), (False, True)):
        yield replace(
            layout,
            tokens=tokens,
            recompute=recompute,
            offload_optimizer=offload,
            offload_reference=offload,
            distributed_optimizer=True,
        )
