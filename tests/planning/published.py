"""Published step times of other systems, as workloads of the cost model. Lengths, layouts and times are theirs.

Rows of 2,048 samples: NeMo-RL on H100, from its performance pages (v0.5, v0.6), and for 70B from its blog of v0.3 and
issue 959. They run a pass for old log-probabilities and one for the reference in every step, and four optimizer steps of
512 samples. Mean lengths follow from tokens/s/GPU x GPUs x seconds / samples. Assumed, as not published beside the time:
the rollout tp of 32B and 30B-A3B, micro-batches of one longest sequence, and the layout of 235B, which has 512 samples.
Qwen2-7B: verl's log of Megatron training, whose GPU is not named.

Published rows without batch, lengths or GPU cannot be computed, and asynchronous runs have no step of four parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import architecture_of
from grpo_megatron.planning.cost import StepSeconds, Workload, step_seconds
from grpo_megatron.planning.gpus import GPUS, Gpu, PlannedMachine
from grpo_megatron.planning.layout import Layout
from tests.files import published_config

OTHERS: dict[str, dict[str, Any]] = {  # of which tests/data/hf_configs has no file
    "Qwen3-32B": {
        **published_config("Qwen3-8B"),
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "Qwen3-235B-A22B": {
        **published_config("Qwen3-30B-A3B"),
        "hidden_size": 4096,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
    },
    "Qwen2-7B": published_config("Qwen2.5-7B-Instruct"),
}
# The part that verl's log was written on is not named. Its FLOP/s and MFU give a peak of 115 TFLOP/s: an L20, on PCIe.
L20 = Gpu("l20", 44.5, 119.5, 0.864e12, 32e9, 32e9)


@dataclass(frozen=True)
class PublishedStep:
    """`seconds` of a step. `phases`: published seconds of parts of it. `used_as`: in words."""

    model: str
    gpus: int
    samples: int
    longest: int  # prompt and response together
    response: float  # mean tokens
    layout: Layout
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    prompt: float = 110.0
    updates: int = 4
    cache_share: float = 0.6
    used_as: str = "test"
    gpu: Gpu = GPUS["h100-80"]
    group: int = 32

    @property
    def workload(self) -> Workload:
        return Workload(
            arch=architecture(self.model),
            samples=self.samples,
            samples_per_prompt=self.group,
            prompt_tokens=self.prompt,
            response_tokens=self.response,
            longest_response=self.longest - round(self.prompt),
            scoring_passes=2.0,
            updates=self.updates,
        )

    def estimated(self) -> StepSeconds:
        machine = PlannedMachine(self.gpu, self.gpus)
        return step_seconds(self.workload, self.layout, machine, self.cache_tokens)

    @property
    def cache_tokens(self) -> float:
        """Of an engine that has `cache_share` of its GPUs' memory."""
        from grpo_megatron.models.engine_cache import kv_token_bytes

        arch, tp = self.workload.arch, self.layout.rollout_tp
        free = self.cache_share * self.gpu.usable_bytes - 2 * arch.num_parameters() / tp
        return free / kv_token_bytes(arch, tp, 2)


@cache
def architecture(name: str) -> Architecture:
    return architecture_of(OTHERS[name] if name in OTHERS else published_config(name))


STEPS = (
    PublishedStep(
        "Llama-3.1-70B", 64, 2048, 4096, 398, Layout(tp=4, pp=4, rollout_tp=8, tokens=4096), 147.0,
        {"generate": 84.0, "score": 18.0, "update": 28.0, "sync": 14.0}, used_as="set the constants; another weight sync",
    ),
    PublishedStep("Llama-3.1-8B", 16, 2048, 4096, 1019, Layout(pp=2, tokens=4096), 92.8),
    PublishedStep("Qwen3-32B", 32, 2048, 4096, 3251, Layout(tp=4, pp=4, rollout_tp=4, tokens=4096), 376.0),
    PublishedStep("Qwen3-30B-A3B", 32, 2048, 4096, 3200, Layout(ep=8, rollout_tp=4, tokens=4096), 192.0),
    PublishedStep(
        "Qwen3-235B-A22B", 128, 512, 8192, 5698, Layout(tp=2, pp=8, ep=16, rollout_tp=16, tokens=8192), 395.0,
        updates=1, used_as="test; batch and layout partly assumed",
    ),
    PublishedStep(
        "Qwen2-7B", 16, 5120, 2048, 222, Layout(tp=4, pp=2, rollout_tp=4, tokens=4096), 297.0,
        {"generate": 45.0, "score": 107.0, "update": 144.0}, gpu=L20, group=5,
        used_as="test; GPU assumed",
    ),
)  # fmt: skip


def rows() -> list[str]:
    """The table of docs/layouts.md."""
    lines = ["| published run | used as | published s | estimated s | off by |", "| --- | --- | ---: | ---: | ---: |"]
    for step in STEPS:
        estimate = step.estimated()
        run = f"{step.model}, {step.gpus} {step.gpu.name.split('-')[0].upper()}"
        lines.append(
            f"| {run} | {step.used_as} | {step.seconds:.0f} | {estimate.step:.0f} | {_miss(estimate.step, step.seconds)} |"
        )
        for name, seconds in step.phases.items():
            own = getattr(estimate, name)
            lines.append(f"| - {name} | | {seconds:.0f} | {own:.0f} | {_miss(own, seconds)} |")
    return lines


def _miss(estimated: float, published: float) -> str:
    return f"{100 * (estimated / published - 1):+.0f} %"
