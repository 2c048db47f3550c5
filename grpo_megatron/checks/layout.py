"""Layout arithmetic: which tp x cp x pp x dp and which rollout tp a world size and a model allow. Plain integers."""

from __future__ import annotations

import functools
import math
from typing import Any

from grpo_megatron.checks.problems import Problems
from grpo_megatron.config import Config, MegatronConfig
from grpo_megatron.models.architecture import Architecture, engine_split_problems, fitting_sizes, split_problems

TP, PP = "actor.megatron.tensor_model_parallel_size", "actor.megatron.pipeline_model_parallel_size"
CP = "actor.megatron.context_parallel_size"
ROLLOUT_TP = "rollout.tensor_model_parallel_size"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
TABLE = "actor.megatron.override_transformer_config"


def layout_problems(config: Config, world_size: int, arch: Architecture | None) -> Problems:
    """Sizes that do not divide each other. `arch` None: the model could not be read; only the world size is checked."""
    megatron, rollout_tp = config.actor.megatron, config.rollout.tensor_model_parallel_size
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    engine_split = functools.partial(engine_split_problems, has_whole_experts=config.rollout.has_whole_experts)
    yield from _context_problems(config, world_size)
    if world_size % (tp * pp):
        best_tp, best_pp = _nearest_layout(world_size, tp, pp, arch)
        keys = []
        if best_tp != tp:
            keys.append(f"{TP}={best_tp}")
        if best_pp != pp:
            keys.append(f"{PP}={best_pp}")
        yield (
            f"{TP}={tp} x {PP}={pp} = {tp * pp} does not divide the world size {world_size}; set {' and '.join(keys)},"
            f" or start a multiple of {tp * pp} ranks (trainer.nnodes x trainer.n_gpus_per_node)"
        )
    if world_size % rollout_tp:
        sizes = [n for n in divisors(world_size) if arch is None or not engine_split(arch, n)]
        best = min(sizes, key=lambda n: abs(n - rollout_tp))
        yield f"{ROLLOUT_TP}={rollout_tp} does not divide the world size {world_size}; set {ROLLOUT_TP}={best}"
    for key, size, split in ((TP, tp, split_problems), (ROLLOUT_TP, rollout_tp, engine_split)):
        if arch is not None and (problems := split(arch, size)):
            yield f"{key}={size} cannot cut this model: {', '.join(problems)}; set one of {fitting_sizes(arch, split)}"
    if arch is not None and stage_layers(arch.num_layers, megatron) is None:
        yield _stage_problem(arch.num_layers, megatron)
    if megatron.sequence_parallel and tp == 1:
        yield (
            f"actor.megatron.sequence_parallel=true needs {TP} > 1, and it is 1: the sequence has no ranks to be cut"
            " over; leave sequence_parallel out (it follows tensor parallelism)"
        )


def _context_problems(config: Config, world_size: int) -> Problems:
    """Context parallelism: its size must fit the rest of the layout, and the layers must support it."""
    megatron = config.actor.megatron
    cp, tp, pp = (
        megatron.context_parallel_size,
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
    )
    if cp == 1:
        return
    if world_size % (tp * pp) == 0 and world_size % (tp * cp * pp):
        yield (
            f"{CP}={cp} does not divide world size {world_size} / (tp {tp} x pp {pp}) = {world_size // (tp * pp)} ranks;"
            f" set one of {joined(divisors(world_size // (tp * pp)))}"
        )
    if config.trainer.device == "cpu":
        yield f"{CP}={cp} on the CPU: only Transformer Engine's attention can cut a sequence over ranks; set {CP}=1"
    elif megatron.transformer_impl == "local":
        yield (
            f"{CP}={cp} with actor.megatron.transformer_impl=local: only Transformer Engine's attention can cut a"
            f" sequence over ranks; set transformer_impl=auto, or {CP}=1"
        )
    if config.reward_paths:
        yield f"{CP}={cp} with reward_model.path: a reward model reads whole sequences on each rank; set {CP}=1"


def stage_layers(num_layers: int, megatron: MegatronConfig) -> list[int] | None:
    """Layers of each pipeline stage, as Megatron cuts them (evenly or not); None if it cannot."""
    ends: list[Any] = [megatron.override_transformer_config.get(end) for end in (FIRST, LAST)]
    given = [n for n in ends if n is not None]
    if not all(isinstance(n, int) and n > 0 for n in given):
        return None
    middle, rest = megatron.pipeline_model_parallel_size - len(given), num_layers - sum(given)
    if middle == 0:
        return given if rest == 0 else None
    if middle < 0 or rest < middle or rest % middle:
        return None
    stages = [ends[0], *[rest // middle] * middle, ends[1]]
    return [n for n in stages if n is not None]


def _stage_problem(num_layers: int, megatron: MegatronConfig) -> str:
    pp = megatron.pipeline_model_parallel_size
    override = megatron.override_transformer_config
    given = [f"{TABLE}.{end}={override[end]}" for end in (FIRST, LAST) if override.get(end) is not None]
    if given:
        return (
            f"{' and '.join(given)} with {PP}={pp} cannot cut {num_layers} layers: the other layers must divide evenly"
            " over the other stages, at least one per stage; change them"
        )
    message = f"{PP}={pp} does not divide the model's {num_layers} layers; set one of {joined(divisors(num_layers))}"
    others = -(-num_layers // pp)
    if (first := num_layers - (pp - 1) * others) > 0:
        message += f", or {TABLE}.{FIRST}={first} ({others} in each other stage)"
    return message


def _nearest_layout(world_size: int, tp: int, pp: int, arch: Architecture | None) -> tuple[int, int]:
    """The (tp, pp) that works with the fewest changed keys, then the smallest change, then the largest tp x pp."""

    def works(t: int, p: int) -> bool:
        return arch is None or (not split_problems(arch, t) and arch.num_layers % p == 0)

    def distance(layout: tuple[int, int]) -> tuple[int, int, int]:
        t, p = layout
        return (t != tp) + (p != pp), abs(t - tp) + abs(p - pp), -t * p

    layouts = ((t, p) for t in divisors(world_size) for p in divisors(world_size // t) if works(t, p))
    return min(layouts, key=distance)


def data_parallel_size(config: Config, world_size: int) -> int:
    """Of a valid layout."""
    megatron = config.actor.megatron
    return world_size // (
        megatron.tensor_model_parallel_size * megatron.context_parallel_size * megatron.pipeline_model_parallel_size
    )


def divisors(number: int) -> list[int]:
    """In increasing order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def joined(numbers: list[int]) -> str:
    """For a message: "1, 2, 4"."""
    return ", ".join(map(str, numbers))
