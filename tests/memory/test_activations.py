"""The estimate of activations and logits against measured peaks: real Megatron-Core layers on the CPU.

The profiler records every allocation of a forward and backward pass. 1,024 tokens, 4 layers of hidden size 128; the case
with a vocabulary of 20,000 has one layer, so that the output head decides its peak.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import tiny, worlds
from tests.memory import activation_ranks

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


@pytest.mark.slow
def test_the_estimate_agrees_with_measured_peaks(tmp_path: Path) -> None:
    shape = {"intermediate_size": 224, "max_position_embeddings": 2048}
    folders = {family: tiny.make_model(tmp_path / family, family, **shape) for family in ("qwen2", "qwen3")}
    large = {"num_hidden_layers": 1, "vocab_size": 20_000}
    folders["large vocabulary"] = tiny.make_model(tmp_path / "large", "qwen2", **shape, **large)
    (results,) = worlds.run(activation_ranks.peaks, 1, folders=folders, cases=CASES, tokens=1024)
    for case, ((measured, estimated), (scoring, scoring_estimate)) in zip(CASES, results, strict=True):
        assert estimated == pytest.approx(measured, rel=0.12), case
        assert scoring_estimate == pytest.approx(scoring, rel=0.2), case
