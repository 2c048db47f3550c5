"""Replay: groups of earlier steps beside the fresh ones, never older than `max_staleness` steps.

Each step up to `ratio` of the batch comes from the buffer, the oldest groups first, each at most once; the rest is
fresh. Fresh groups with different rewards enter the buffer; what is too old, or too many, leaves it. The ratio of the
surrogate is taken against the training engine's log-probabilities at the start of the update; how far those are from
the weights that drew a sample is what the rollout correction weighs, for old samples as for fresh ones.
"""

from __future__ import annotations

import base64
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from grpo_megatron.config import ReplayConfig
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.sampling.collector import Collector, Group, State, informative
from grpo_megatron.types import Prompt, Sample


class Replay:
    def __init__(self, inner: Collector, replay: ReplayConfig, mesh: Mesh) -> None:
        self.inner, self.replay, self.mesh = inner, replay, mesh
        self.buffer: list[tuple[int, Group]] = []  # (step it was drawn for, group), oldest first

    def groups(self, step: int, count: int, metrics: Metrics) -> list[Group]:
        self.buffer = [(s, group) for s, group in self.buffer if step - s <= self.replay.max_staleness]
        taken = self.buffer[: int(count * self.replay.ratio)]
        self.buffer = self.buffer[len(taken) :]
        fresh = self.inner.groups(step, count - len(taken), metrics)
        metrics.constant("train/replayed_groups", len(taken))
        metrics.constant("train/replay_staleness_max", max((step - s for s, _ in taken), default=0))
        kept = [(step, [replace(sample) for sample in group]) for group in informative(fresh, self.mesh)]  # copies
        self.buffer = (self.buffer + kept)[-self.replay.size :]
        return [group for _, group in taken] + fresh

    def epoch(self) -> float:
        return self.inner.epoch()

    def state(self) -> State:
        groups = gather_state([group for _, group in self.buffer], self.mesh)
        return {"inner": self.inner.state(), "steps": [s for s, _ in self.buffer], "groups": groups}

    def load_state(self, state: State) -> None:
        self.inner.load_state(state["inner"])
        groups = share_out(state["groups"], self.mesh)
        self.buffer = list(zip(state["steps"], groups, strict=True))


def gather_state(groups: list[Group], mesh: Mesh) -> list[list[dict[str, Any]]]:
    """Collective: every group whole, as plain JSON, the same on every rank."""
    mine = [[pack_sample(s) for s in group] for group in groups] if mesh.is_block_leader else [[] for _ in groups]
    everyone = mesh.all_gather(mine)
    whole = [[s for part in everyone for s in part[place]] for place in range(len(groups))]
    return [sorted(group, key=lambda s: s["index"]) for group in whole]


def share_out(groups: list[list[dict[str, Any]]], mesh: Mesh) -> list[Group]:
    """This block's part of gathered groups: whole groups, in turn over the blocks of whatever layout there is now."""
    mine = [place % mesh.num_rollout_blocks == mesh.rollout_block for place in range(len(groups))]
    return [[unpack_sample(s) for s in group] if held else [] for held, group in zip(mine, groups, strict=True)]


def pack_sample(sample: Sample) -> dict[str, Any]:
    """Plain JSON. Long columns travel as base64: numbers in text would be ten times the size."""
    out = {name: getattr(sample, name) for name in Sample.__dataclass_fields__}
    out["prompt"] = asdict(sample.prompt)
    out["response_ids"] = _text(np.asarray(sample.response_ids, dtype="<i4"))
    out["rollout_logprobs"] = _text(np.asarray(sample.rollout_logprobs, dtype="<f8"))
    out["loss_mask"] = _text(np.packbits(np.asarray(sample.loss_mask, dtype=bool)))
    return out


def unpack_sample(packed: dict[str, Any]) -> Sample:
    prompt = dict(packed["prompt"])
    prompt["prompt_ids"] = tuple(prompt["prompt_ids"])
    columns = {
        "prompt": Prompt(**prompt),
        "response_ids": np.frombuffer(base64.b64decode(packed["response_ids"]), dtype="<i4").tolist(),
        "rollout_logprobs": np.frombuffer(base64.b64decode(packed["rollout_logprobs"]), dtype="<f8").tolist(),
        "steps": [(int(token), float(reward)) for token, reward in packed["steps"]],
    }
    bits = np.frombuffer(base64.b64decode(packed["loss_mask"]), dtype=np.uint8)
    columns["loss_mask"] = np.unpackbits(bits, count=len(columns["response_ids"])).tolist()
    return Sample(**{**packed, **columns})


def _text(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()
