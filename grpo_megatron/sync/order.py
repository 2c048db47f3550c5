"""The order in which a sync sends: which modules follow each other, and which streams travel side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from grpo_megatron.sync.tensors import SyncParameter

_P = TypeVar("_P")


def in_sync_order(parameters: Sequence[SyncParameter]) -> list[SyncParameter]:
    """Stages take turns, module by module, so that all stages send at about the same time.

    A module (attention input with its bias, all experts of a layer) is never interrupted: an engine keeps what it has of
    a module until all of it has arrived.
    """
    stages: dict[int, dict[str, list[SyncParameter]]] = {}
    for parameter in parameters:
        stages.setdefault(parameter.stage, {}).setdefault(module_of(parameter.name), []).append(parameter)
    queues = [list(stages[stage].values()) for stage in sorted(stages)]
    longest = max(len(queue) for queue in queues)
    ordered = [queue[i] for i in range(longest) for queue in queues if i < len(queue)]
    return [parameter for module in ordered for parameter in module]


def side_by_side(parts: list[_P], stream_of: Callable[[_P], Hashable], numel: Callable[[_P], int]) -> list[_P]:
    """Several streams of parts as one, each in its order, so that all are equally far at any time."""
    streams = [stream_of(part) for part in parts]
    if len(set(streams)) == 1:
        return parts
    sent: Counter[Hashable] = Counter()
    middles = []
    for stream, part in zip(streams, parts, strict=True):
        size = numel(part)
        middles.append(sent[stream] + size / 2)
        sent[stream] += size
    shares = [middle / sent[stream] for stream, middle in zip(streams, middles, strict=True)]
    return [parts[i] for i in sorted(range(len(parts)), key=shares.__getitem__)]


def largest_modules(parameters: Sequence[SyncParameter]) -> int:
    """Elements of the largest module of every stage, together."""
    modules: Counter[tuple[int, str]] = Counter()
    for parameter in parameters:
        modules[parameter.stage, module_of(parameter.name)] += parameter.numel
    largest: dict[int, int] = {}
    for (stage, _), size in modules.items():
        largest[stage] = max(size, largest.get(stage, 0))
    return sum(largest.values())


def module_of(name: str) -> str:
    """The module of a parameter, as an engine loads it. All experts of a layer are one."""
    return name.split(".experts.")[0] if ".experts." in name else name.rpartition(".")[0]
