"""Layouts: the keys that a search may change, the layouts that a world and a model allow, and why others are refused."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from grpo_megatron.config import Config, MegatronConfig
from grpo_megatron.config.problems import Problems, keys_of, marked, written
from grpo_megatron.models.architecture import Architecture, engine_split_problems, fitting_sizes, split_problems
from grpo_megatron.models.layers.precision import precision_problems
from grpo_megatron.planning.parameters import FIRST, LAST, recomputes_all, stage_layers

FULL_RECOMPUTATION = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TP, PP = "actor.megatron.tensor_model_parallel_size", "actor.megatron.pipeline_model_parallel_size"
ROLLOUT_TP = "rollout.tensor_model_parallel_size"
OVERRIDES = "actor.megatron.override_transformer_config"
LAYOUT_KEYS = {  # field of Layout -> key of the config
    "tp": TP,
    "pp": PP,
    "first_layers": OVERRIDES,
    "ep": "actor.megatron.expert_model_parallel_size",
    "rollout_tp": ROLLOUT_TP,
    "tokens": "actor.ppo_max_token_len_per_gpu",
    "recompute": OVERRIDES,
    "offload_optimizer": "actor.megatron.offload_optimizer",
    "offload_reference": "actor.megatron.offload_reference",
    "distributed_optimizer": "actor.megatron.use_distributed_optimizer",
    "utilization": "rollout.gpu_memory_utilization",
}


@dataclass(frozen=True)
class Layout:
    """The values of the keys that a search may change."""

    tp: int = 1
    pp: int = 1
    first_layers: int = 0  # layers of the first pipeline stage; 0: as many as each other stage has
    ep: int = 1
    rollout_tp: int = 1
    tokens: int = 16384
    recompute: bool = False  # all activations of each layer
    offload_optimizer: bool = False
    offload_reference: bool = False
    distributed_optimizer: bool = True
    utilization: float = 0.6  # the engine's share of the GPU

    @classmethod
    def of(cls, config: Config) -> Layout:
        """Reads the layout of a config."""
        megatron = config.actor.megatron
        values = {name: config.at(key) for name, key in LAYOUT_KEYS.items() if key != OVERRIDES}
        first = megatron.override_transformer_config.get(FIRST) or 0
        return cls(first_layers=first, recompute=recomputes_all(megatron), **values)

    def applied(self, config: Config) -> Config:
        """Returns `config` in this layout. Values are not validated again: `shapes` makes valid ones."""
        megatron = config.actor.megatron
        return config.with_values(
            {
                **{key: getattr(self, name) for name, key in LAYOUT_KEYS.items()},
                OVERRIDES: self._overrides(megatron),
                "actor.megatron.sequence_parallel": megatron.sequence_parallel if self.tp > 1 else None,
                "rollout.expert_parallel_size": self.rollout_tp if config.rollout.has_whole_experts else 1,
            }
        )

    def _overrides(self, megatron: MegatronConfig) -> dict[str, Any]:
        """Returns the table with or without recomputation, and with this pipeline's first stage."""
        table = dict(megatron.override_transformer_config)
        pipeline = megatron.pipeline_model_parallel_size, table.get(FIRST) or 0
        if (self.pp, self.first_layers) != pipeline:
            table.pop(FIRST, None)
            table.pop(LAST, None)
            table |= {FIRST: self.first_layers} if self.first_layers else {}
        if self.recompute != recomputes_all(megatron):
            table = {key: value for key, value in table.items() if not key.startswith("recompute_")}
            table |= FULL_RECOMPUTATION if self.recompute else {}
        return table

    def replicas(self, world_size: int) -> int:
        """Counts the ranks with the same parameters, experts excepted."""
        return world_size // (self.tp * self.pp)

    def largest_stage(self, num_layers: int) -> float:
        """Returns the layers of the largest pipeline stage, as a multiple of the mean."""
        if not self.first_layers or self.pp == 1:
            return 1.0
        others = (num_layers - self.first_layers) / (self.pp - 1)
        return max(others, self.first_layers) * self.pp / num_layers

    def changed(self, other: Layout) -> list[str]:
        """Names the fields in which this layout differs from `other`."""
        return [field.name for field in fields(self) if getattr(self, field.name) != getattr(other, field.name)]

    def distance(self, other: Layout) -> tuple[int, float]:
        """Returns (changed keys, levels): a level is a factor of two, a switch, or 0.1 of the engine's share."""
        changed = self.changed(other)
        return len(changed), sum(_levels(name, getattr(self, name), getattr(other, name)) for name in changed)

    def overrides(self, config: Config) -> Iterator[str]:
        """Yields the arguments of the command line that change `config` to this layout."""
        after = self.applied(config)
        others = "rollout.expert_parallel_size", "actor.megatron.sequence_parallel"
        for key in dict.fromkeys([*LAYOUT_KEYS.values(), *others]):
            value = after.at(key)
            if value != config.at(key) and isinstance(value, dict):
                yield f"{key}={{{', '.join(f'{name}: {written(one)}' for name, one in value.items())}}}"
            elif value != config.at(key):
                yield f"{key}={written(value)}"


def _levels(name: str, new: Any, old: Any) -> float:
    if isinstance(new, bool) or name == "first_layers":
        return 1.0
    return abs(new - old) / 0.1 if name == "utilization" else abs(math.log2(new / old))


# -- Why a layout is refused -------------------------------------------------------------------------------------------


def world_problems(config: Config, world_size: int, arch: Architecture | None) -> Problems:
    """Yields the sizes that do not divide each other, or the model. `arch` None: the model could not be read.

    `world_size`: ranks that train. The ranks that generate are the same, or `rollout.num_ranks`.
    """
    k = keys_of(config).actor.megatron
    megatron, rollout_tp = config.actor.megatron, config.rollout.tensor_model_parallel_size
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    engine_split = functools.partial(engine_split_problems, has_whole_experts=config.rollout.has_whole_experts)
    if world_size % (tp * pp):
        best_tp, best_pp = _nearest_layout(world_size, tp, pp, arch)
        changes = [f"{key}={best}" for key, best, now in ((TP, best_tp, tp), (PP, best_pp, pp)) if best != now]
        yield (
            f"{k.tensor_model_parallel_size} x {k.pipeline_model_parallel_size} = {tp * pp} does not divide the world size"
            f" {world_size}; set {' and '.join(changes)}, or start a multiple of {tp * pp} ranks (trainer.nnodes x"
            " trainer.n_gpus_per_node)"
        )
    else:
        yield from _replica_problems(config, world_size // (tp * pp))
    rollout_ranks = config.num_rollout_ranks
    if (ranks := rollout_ranks or world_size) % rollout_tp:
        sizes = [n for n in divisors(ranks) if arch is None or not engine_split(arch, n)]
        best = min(sizes, key=lambda n: abs(n - rollout_tp))
        what = f"the {ranks} rollout ranks" if rollout_ranks else f"the world size {ranks}"
        yield f"{marked(ROLLOUT_TP)}={rollout_tp} does not divide {what}; set {ROLLOUT_TP}={best}"
    for key, size, split in ((TP, tp, split_problems), (ROLLOUT_TP, rollout_tp, engine_split)):
        if arch is not None and (problems := split(arch, size)):
            yield f"{marked(key)}={size} cannot cut this model: {', '.join(problems)}; set one of {fitting_sizes(arch, split)}"
    if arch is not None:
        layers, levels = stage_layers(arch.num_layers, megatron), arch.vision.levels if arch.vision else 0
        if layers is None:
            yield _stage_problem(arch.num_layers, megatron)
        elif layers[0] < levels:
            given, remedy = f"{marked(OVERRIDES)}.{FIRST}={layers[0]}", f"set it to {levels} or more"
            if megatron.override_transformer_config.get(FIRST) is None:
                most = max(n for n in divisors(arch.num_layers) if arch.num_layers // n >= levels)
                given = f"{k.pipeline_model_parallel_size}"
                remedy = f"set {OVERRIDES}.{FIRST}={levels} or more, or {PP}={most}"
            yield (
                f"{given} leaves {layers[0]} of {arch.num_layers} layers to the first stage, which has the tower, and images are"
                f" added behind the first {levels} (DeepStack); {remedy}"
            )
    if megatron.sequence_parallel and tp == 1:
        yield f"{k.sequence_parallel} needs {TP} > 1, and it is 1; leave it out (it follows tensor parallelism)"
    if megatron.context_parallel_size > 1:
        yield from _context_problems(config)
    if arch is not None:
        yield from _expert_problems(config, arch)


def _replica_problems(config: Config, replicas: int) -> Problems:
    """Yields context and expert parallel sizes that do not divide `replicas` = world size / (tp x pp)."""
    k, megatron = keys_of(config).actor.megatron, config.actor.megatron
    for key, size, what in (
        (k.context_parallel_size, megatron.context_parallel_size, "sequences"),
        (k.expert_model_parallel_size, megatron.expert_model_parallel_size, "experts"),
    ):
        if replicas % size:
            yield (
                f"{key} does not divide the {replicas} ranks that world size / (tp x pp) leaves to divide the {what}; set"
                f" one of {joined(divisors(replicas))}"
            )


def _context_problems(config: Config) -> Problems:
    """Yields what lacks support of context parallelism."""
    k = keys_of(config)
    key, remedy = f"{k.actor.megatron.context_parallel_size}", "set actor.megatron.context_parallel_size=1"
    attention = "only Transformer Engine's attention can cut a sequence over ranks"
    if config.trainer.device == "cpu":
        yield f"{key} on the CPU: {attention}; {remedy}"
    elif config.actor.megatron.transformer_impl == "local":
        yield f"{key} with {k.actor.megatron.transformer_impl}: {attention}; set transformer_impl=auto, or {remedy}"
    if config.reward_paths:
        yield f"{key} with {k.reward_model.path:key}: a reward model reads whole sequences on each rank; {remedy}"


def _stage_problem(num_layers: int, megatron: MegatronConfig) -> str:
    pp = megatron.pipeline_model_parallel_size
    override = megatron.override_transformer_config
    given = [f"{marked(OVERRIDES)}.{end}={override[end]}" for end in (FIRST, LAST) if override.get(end) is not None]
    if given:
        return (
            f"{' and '.join(given)} with {marked(PP)}={pp} cannot cut {num_layers} layers: the other layers must divide evenly"
            " over the other stages, at least one per stage; change them"
        )
    message = (
        f"{marked(PP)}={pp} does not divide the model's {num_layers} layers; set one of {joined(divisors(num_layers))}"
    )
    others = -(-num_layers // pp)
    if (first := num_layers - (pp - 1) * others) > 0:
        message += f", or {OVERRIDES}.{FIRST}={first} ({others} in each other stage)"
    return message


def _nearest_layout(world_size: int, tp: int, pp: int, arch: Architecture | None) -> tuple[int, int]:
    """Returns the valid (tp, pp) with the fewest changed keys, then the smallest change, then the largest tp x pp."""

    def distance(layout: tuple[int, int]) -> tuple[int, int, int]:
        t, p = layout
        return (t != tp) + (p != pp), abs(t - tp) + abs(p - pp), -t * p

    layouts = ((t, p) for t in divisors(world_size) for p in divisors(world_size // t))
    return min(
        ((t, p) for t, p in layouts if arch is None or (not split_problems(arch, t) and arch.num_layers % p == 0)),
        key=distance,
    )


def data_parallel_size(config: Config, world_size: int) -> int:
    """Counts the data-parallel ranks of a valid layout."""
    megatron = config.actor.megatron
    sizes = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
    return world_size // (sizes * megatron.context_parallel_size)


def divisors(number: int) -> list[int]:
    """Lists the divisors of a number in increasing order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def joined(numbers: list[int]) -> str:
    """Joins numbers for a message: "1, 2, 4"."""
    return ", ".join(map(str, numbers))


def _expert_problems(config: Config, arch: Architecture) -> Problems:
    """Yields what is wrong with the layout of the policy's experts."""
    k, megatron = keys_of(config).actor.megatron, config.actor.megatron
    tp, ep, key = megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size, k.expert_model_parallel_size
    if ep > 1 and not arch.num_experts:
        yield f"{key}, but this model ({arch.family}) has no experts; set actor.megatron.expert_model_parallel_size=1"
        return
    if arch.num_experts % ep:
        yield f"{key} does not divide the model's {arch.num_experts} experts; set one of {joined(divisors(arch.num_experts))}"
    if arch.num_experts and tp > 1 and not megatron.use_sequence_parallel:
        yield (
            f"{k.tensor_model_parallel_size} without sequence parallelism: Megatron-Core cannot train experts in that layout;"
            " leave actor.megatron.sequence_parallel out (it follows tensor parallelism)"
        )
    if config.trainer.device == "cpu" and ep > 1 and tp > 1:
        yield (
            f"{key} x {k.tensor_model_parallel_size} on the CPU: gloo cannot gather the experts' unequal token counts over"
            f" tensor-parallel ranks; set {TP}=1 or actor.megatron.expert_model_parallel_size=1, or run on GPUs"
        )


# -- The layouts that a world and a model allow ------------------------------------------------------------------------

ENGINE_NODES = 2  # an engine is on at most so many nodes, unless the config asks for more


def shapes(config: Config, arch: Architecture, world_size: int, per_node: int) -> Iterator[Layout]:
    """Yields every valid tp, pp, ep and rollout tp, with the config's other keys. tp stays within a node, if it is there now."""
    now = Layout.of(config)
    most_tp, most_engine = max(per_node, now.tp), max(ENGINE_NODES * per_node, now.rollout_tp)
    sizes = divisors(world_size)
    engines = [now.rollout_tp]
    if config.colocates:
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
    """Yields (pp, layers of the first stage): 0 where all stages are equal, else the rest that full stages leave."""
    for pp in (n for n in sizes if n <= num_layers):
        first = num_layers - (pp - 1) * -(-num_layers // pp)
        if num_layers % pp == 0:
            yield pp, 0
        elif first > 0:
            yield pp, first


def _is_valid(config: Config, arch: Architecture, world_size: int) -> bool:
    return not any(world_problems(config, world_size, arch)) and not any(precision_problems(config, arch))


def micro_batches(config: Config) -> list[int]:
    """Lists the micro-batches to try: the config's tokens, 2 and 4 times as many, and half where a full sequence still fits."""
    tokens = config.actor.ppo_max_token_len_per_gpu
    length = config.data.max_prompt_length + config.data.max_response_length
    halves = [tokens // 2] if tokens // 2 >= length else []
    return [*halves, tokens, 2 * tokens, 4 * tokens]


def variants(layout: Layout, config: Config) -> Iterator[Layout]:
    """Yields each micro-batch size, with and without recomputation and offloading, with a distributed optimizer."""
    offloads = [False, True]
    if config.rollout.placement == "separate":  # there is nothing to make room for
        offloads = [False]
    for tokens, recompute, offload in itertools.product(micro_batches(config), (False, True), offloads):
        yield replace(
            layout,
            tokens=tokens,
            recompute=recompute,
            offload_optimizer=offload,
            offload_reference=offload,
            distributed_optimizer=True,
        )
