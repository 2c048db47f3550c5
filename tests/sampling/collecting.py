"""What the ranks of the collector tests run: real groups over real gloo, drawn by a stand-in for the engine."""

from __future__ import annotations

import json
import random
import time
from typing import Any

from tests.sampling.fakes import CountingEngine, ScriptedCollector, prompt


def _all_samples(groups: list[Any], mesh: Any) -> list[tuple[int, int, int, int]]:
    """(place, prompt, index, version) of the samples of every rank."""
    from grpo_megatron.sampling.collector import numbered_samples

    local = [(s.prompt_index, s.response_ids[0], s.index, s.version) for s in numbered_samples(groups)]
    return sorted(entry for entries in mesh.all_gather(local) for entry in entries)


def collect(kind: str, script: list[tuple[float, float]], counts: list[int], resume_at: int | None = None) -> list[Any]:
    """The groups of each step; before step `resume_at` the collector is replaced by a new one with its state."""
    from grpo_megatron.config import ReplayConfig
    from grpo_megatron.device import Device
    from grpo_megatron.parallel.mesh import build_mesh
    from grpo_megatron.report.metrics import Metrics
    from grpo_megatron.sampling.wrappers import DynamicSampling, Replay

    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)

    def build() -> Any:
        inner = ScriptedCollector(script, mesh)
        if kind == "dynamic":
            return DynamicSampling(inner, mesh, round_size=3, max_rounds=3, max_staleness=1)
        return Replay(inner, ReplayConfig(ratio=0.5, size=3, max_staleness=2), mesh)

    collector, out = build(), []
    for step, count in enumerate(counts):
        if step == resume_at:
            state = json.loads(json.dumps(collector.state()))
            collector = build()
            collector.load_state(state)
        metrics = Metrics()
        groups = collector.groups(step, count, metrics)
        out.append((_all_samples(groups, mesh), metrics.reduce(mesh.all_gather)))
    return out


def collect_partial(lengths: list[int], resume_at: int | None) -> list[Any]:
    """Per step the samples of all ranks: (place, index, tokens, versions), drawn with random delays. `resume_at` as above."""
    from grpo_megatron.config import DataConfig, RolloutConfig
    from grpo_megatron.data.sampler import Sampler
    from grpo_megatron.device import Device
    from grpo_megatron.parallel.mesh import build_mesh
    from grpo_megatron.report.metrics import Metrics
    from grpo_megatron.sampling.collector import numbered_samples
    from grpo_megatron.sampling.generator import Generator
    from grpo_megatron.sampling.partial import PartialCollector

    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)
    partial = {"over_sample": 1.5, "max_staleness": 2, "chunk_tokens": 4}
    rollout = RolloutConfig.model_validate({"n": 2, "partial": partial})

    def build() -> Any:
        engine: Any = CountingEngine(lengths, after_step=lambda: time.sleep(random.uniform(0, 0.005)))
        generator = Generator(engine, None, None, mesh, rollout, lambda: "")
        sampler = Sampler([prompt(i) for i in range(len(lengths))], 2, shuffle=False)
        return PartialCollector(generator, sampler, DataConfig(max_response_length=12), rollout)

    collector, out = build(), []
    for step in range(5):
        if step == resume_at:
            state = json.loads(json.dumps(collector.state()))
            collector = build()
            collector.load_state(state)
        local = [
            (s.prompt_index, s.index, s.prompt.uid, s.response_ids, s.rollout_logprobs, [d.version for d in s.draws])
            for s in numbered_samples(collector.groups(step, 2, Metrics()))
        ]
        out.append(sorted(entry for entries in mesh.all_gather(local) for entry in entries))
    return out
