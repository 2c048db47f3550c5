"""The estimate of activations and logits against measured peaks: real Megatron-Core layers on the CPU.

The profiler records every allocation of a forward and backward pass. 1,024 tokens, 4 layers of hidden size 128; the case
with a vocabulary of 20,000 has one layer, so that the output head decides its peak.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny, worlds
from tests.models import policies

FULL: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen2", "float32", {}),
    ("qwen3", "bfloat16", {}),
    ("qwen2", "bfloat16", {**FULL, "recompute_num_layers": 2}),
    ("qwen2", "bfloat16", {**FULL, "recompute_method": "block"}),
    ("large vocabulary", "bfloat16", {}),
]


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most bytes that `call` has allocated at a time, from the profiler's record of every allocation."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def peaks(folders: dict[str, Path], cases: list[tuple[str, str, dict[str, Any]]], tokens: int) -> list[Any]:
    """Per case (family, dtype, recomputation): the measured and the estimated peak, of an update and of log-probabilities."""
    return [peak(folders[family], dtype, recompute, tokens) for family, dtype, recompute in cases]


def peak(folder: Path, dtype: str, recompute: dict[str, Any], tokens: int) -> tuple[tuple[float, float], ...]:
    from grpo_megatron.planning.parameters import forward_bytes, head_bytes, kept_bytes, working_bytes

    policy = policies.build(
        folder,
        dtype=dtype,
        megatron={"override_transformer_config": recompute},
        logprob_chunk_size=128,
        ppo_max_token_len_per_gpu=tokens,
        entropy_coeff=policies.ENTROPY_COEF,
    )
    batch = tiny.make_batch([([1] * 8, [3] * (tokens // 2 - 8))] * 2, [[[0, 1]]])

    def backward() -> None:
        policy.forward_backward(batch, [[0, 1]], policies.loss)

    backward()  # what is allocated once is no activation
    itemsize, layers = 4 if dtype == "float32" else 2, policy.arch.num_layers
    kept = kept_bytes(policy.arch, policy.actor, itemsize, stage=0, layers=layers)
    working = working_bytes(policy.arch, policy.actor, itemsize, layers=layers)
    update = kept + max(working, head_bytes(policy.arch, policy.actor, itemsize, backward=True))
    head = head_bytes(policy.arch, policy.actor, itemsize, backward=False)
    scoring = max(forward_bytes(policy.arch, policy.actor, itemsize), head)
    return (peak_bytes(backward), update), (peak_bytes(lambda: policy.logprobs(batch)), scoring)


@pytest.mark.slow
def test_the_estimate_agrees_with_measured_peaks(tmp_path: Path) -> None:
    shape = {"intermediate_size": 224, "max_position_embeddings": 2048}
    folders = {family: tiny.make_model(tmp_path / family, family, **shape) for family in ("qwen2", "qwen3")}
    large = {"num_hidden_layers": 1, "vocab_size": 20_000}
    folders["large vocabulary"] = tiny.make_model(tmp_path / "large", "qwen2", **shape, **large)
    (results,) = worlds.run(peaks, 1, folders=folders, cases=CASES, tokens=1024)
    for case, ((measured, estimated), (scoring, scoring_estimate)) in zip(CASES, results, strict=True):
        assert estimated == pytest.approx(measured, rel=0.12), case
        assert scoring_estimate == pytest.approx(scoring, rel=0.2), case
