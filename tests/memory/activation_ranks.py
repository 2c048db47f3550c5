"""What the rank of test_activations.py runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests import tiny
from tests.models import policy_ranks


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
    from grpo_megatron.memory.parameters import forward_bytes, head_bytes, kept_bytes, working_bytes

    policy = policy_ranks.build(
        folder,
        1,
        1,
        False,
        dtype=dtype,
        megatron={"override_transformer_config": recompute},
        logprob_chunk_size=128,
        ppo_max_token_len_per_gpu=tokens,
        entropy_coeff=policy_ranks.ENTROPY_COEF,
    )
    batch = tiny.make_batch([([1] * 8, [3] * (tokens // 2 - 8))] * 2, [[[0, 1]]])

    def backward() -> None:
        policy.backward(batch, [[0, 1]], policy_ranks.loss, [])

    backward()  # what is allocated once is no activation
    itemsize, layers = 4 if dtype == "float32" else 2, policy.arch.num_layers
    kept = kept_bytes(policy.arch, policy.actor, itemsize, stage=0, layers=layers)
    working = working_bytes(policy.arch, policy.actor, itemsize, layers=layers)
    update = kept + max(working, head_bytes(policy.arch, policy.actor, itemsize, backward=True))
    head = head_bytes(policy.arch, policy.actor, itemsize, backward=False)
    scoring = max(forward_bytes(policy.arch, policy.actor, itemsize), head)
    return (peak_bytes(backward), update), (peak_bytes(lambda: policy.logprobs(batch)), scoring)
