"""What the ranks of the collector tests run: real groups over real gloo, drawn by a stand-in for the engine."""

from __future__ import annotations

from typing import Any

from grpo_megatron.sampling.collector import Group, State, number
from grpo_megatron.types import Prompt, Sample


class Scripted:
    """Prompt number p of the endless sequence gets the rewards `script[p]`; a prompt's samples straddle the blocks."""

    def __init__(self, script: list[tuple[float, float]], mesh: Any) -> None:
        self.script, self.mesh, self.position = script, mesh, 0

    def groups(self, step: int, count: int, metrics: Any) -> list[Group]:
        start, self.position = self.position, self.position + count
        return [
            [
                Sample(
                    Prompt(f"t/{p}", (1,), "", "", "t", "r"), p - start, i, [p, i], [-0.1, -0.2], "stop", step, reward=r
                )
                for i, r in enumerate(self.script[p % len(self.script)])
                if i % self.mesh.num_rollout_blocks == self.mesh.rollout_block
            ]
            for p in range(start, start + count)
        ]

    def epoch(self) -> float:
        return self.position / len(self.script)

    def state(self) -> State:
        return {"position": self.position}

    def load_state(self, state: State) -> None:
        self.position = state["position"]


def _everyone(groups: list[Group], mesh: Any) -> list[tuple[int, int, int, int]]:
    """(place, prompt, index, version) of every rank's samples."""
    import torch.distributed as dist

    mine = [(s.prompt_index, s.response_ids[0], s.index, s.version) for s in number(groups)]
    parts: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(parts, mine, group=mesh.control)
    return sorted(entry for part in parts for entry in part)


def collect(kind: str, script: list[tuple[float, float]], counts: list[int], resume_at: int | None = None) -> list[Any]:
    """The groups of each step; before step `resume_at` the collector is thrown away and made anew from its state."""
    import json

    from grpo_megatron.config import ReplayConfig
    from grpo_megatron.device import Device
    from grpo_megatron.observability.metrics import Metrics
    from grpo_megatron.parallel.mesh import build_mesh
    from grpo_megatron.sampling.dynamic import DynamicSampling
    from grpo_megatron.sampling.replay import Replay

    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)

    def build() -> Any:
        inner = Scripted(script, mesh)
        if kind == "informative":
            return DynamicSampling(inner, mesh, round_size=3, max_rounds=3)
        return Replay(inner, ReplayConfig(ratio=0.5, size=3, max_staleness=2), mesh)

    collector, out = build(), []
    for step, count in enumerate(counts):
        if step == resume_at:
            state = json.loads(json.dumps(collector.state()))
            collector = build()
            collector.load_state(state)
        metrics = Metrics()
        groups = collector.groups(step, count, metrics)
        out.append((_everyone(groups, mesh), metrics.reduce(mesh.all_gather)))
    return out
