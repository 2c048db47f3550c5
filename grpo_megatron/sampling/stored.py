"""Stored groups: samples that wait for a later step, as plain JSON in a checkpoint.

A checkpoint holds every group whole, whichever ranks held its samples. After a resume, whole groups are dealt to the
rollout blocks in turn, so the layout may have changed.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.sampling.collector import Group
from grpo_megatron.types import UNFINISHED, Draw, Prompt, Sample, Turn

PackedGroup = dict[str, Any]


def pack_groups(groups: Sequence[Group], mesh: Mesh) -> list[PackedGroup]:
    """Every group with the samples of all ranks, as plain JSON, the same on every rank. Collective."""
    held = [index for index, group in enumerate(groups) if group.samples and mesh.is_block_leader]
    ranks = mesh.all_gather({index: _pack_samples(groups[index].samples) for index in held})
    samples_of: dict[int, list[dict[str, Any]]] = {}
    for index, of_group in itertools.chain.from_iterable(of_rank.items() for of_rank in ranks):
        samples_of.setdefault(index, []).extend(of_group)
    packed = []
    for index, group in enumerate(groups):
        samples = samples_of.get(index, [])
        packed.append({"version": group.version, "samples": sorted(samples, key=lambda sample: sample["index"])})
    return packed


def unpack_groups(packed: Sequence[PackedGroup], mesh: Mesh) -> list[Group]:
    """The inverse of `pack_groups`: every num_rollout_blocks-th group is whole in this block, the others are empty."""
    groups = [Group(entry["version"], []) for entry in packed]
    for index in range(mesh.rollout_block, len(packed), mesh.num_rollout_blocks):
        groups[index].samples.extend(unpack_sample(sample) for sample in packed[index]["samples"])
    return groups


def _pack_samples(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    return [pack_sample(sample) for sample in samples]


def pack_sample(sample: Sample) -> dict[str, Any]:
    """Long columns are stored as base64: JSON numbers would take several times the space."""
    packed = {name: getattr(sample, name) for name in Sample.__dataclass_fields__}
    is_unfinished = sample.finish_reason == UNFINISHED
    kept: dict[str, Any] = (
        {} if is_unfinished else {"columns": {}, "messages": None}
    )  # a complete sample has its reward already
    packed["prompt"] = asdict(replace(sample.prompt, **kept))
    packed["turns"] = [asdict(turn) for turn in sample.turns]
    packed["draws"] = [asdict(draw) for draw in sample.draws]
    packed["response_ids"] = _to_base64(np.asarray(sample.response_ids, dtype="<i4"))
    packed["rollout_logprobs"] = _to_base64(np.asarray(sample.rollout_logprobs, dtype="<f8"))
    packed["loss_mask"] = _to_base64(np.packbits(np.asarray(sample.loss_mask, dtype=bool)))
    return packed


def unpack_sample(packed: dict[str, Any]) -> Sample:
    prompt = dict(packed["prompt"])
    prompt["prompt_ids"] = tuple(prompt["prompt_ids"])
    columns: dict[str, Any] = {
        "prompt": Prompt(**prompt),
        "response_ids": _from_base64(packed["response_ids"], "<i4"),
        "rollout_logprobs": _from_base64(packed["rollout_logprobs"], "<f8"),
        "steps": _rewards(packed["steps"]),
        "turns": [Turn(**turn) for turn in packed.get("turns", [])],
        "turn_rewards": _rewards(packed.get("turn_rewards", [])),
        "draws": [Draw(**draw) for draw in packed.get("draws", [])],
    }
    bits = np.array(_from_base64(packed["loss_mask"], "u1"), dtype=np.uint8)
    columns["loss_mask"] = np.unpackbits(bits, count=len(columns["response_ids"])).tolist()
    return Sample(**{**packed, **columns})


def _rewards(pairs: Sequence[Sequence[float]]) -> list[tuple[int, float]]:
    """(token, reward) pairs, which JSON has as lists."""
    return [(int(token), float(reward)) for token, reward in pairs]


def _to_base64(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _from_base64(text: str, dtype: str) -> list[Any]:
    values: list[Any] = np.frombuffer(base64.b64decode(text), dtype=dtype).tolist()
    return values
