"""Digests of vLLM's own memory, with real engines: never a false alarm, and every wrong tensor is named with slice and rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_megatron.rollout.vllm_process import computes_latents_on_cpu
from tests.rollout.memory_ranks import attest
from tests.worlds import run

pytestmark = pytest.mark.slow

# ranks = rollout tp -> (family, dtype, rollout ep, with all faults). Biases, q and k norms, a tied head, experts.
CASES = {
    1: [
        ("qwen2", "float32", 1, True),
        ("mixtral", "bfloat16", 1, True),
        ("qwen3", "bfloat16", 1, False),
        ("llama-tied", "float32", 1, False),
        ("qwen3-moe", "float32", 1, False),
        ("deepseek-v3", "bfloat16", 1, False),
    ],
    2: [
        ("qwen3-moe", "bfloat16", 1, True),
        ("qwen2", "bfloat16", 1, True),
        ("llama-tied", "bfloat16", 1, False),
        ("qwen3", "float32", 1, False),
        ("mixtral", "float32", 1, False),
        ("mixtral", "bfloat16", 2, True),
    ],
}


@pytest.mark.parametrize("tp", CASES)
def test_wrong_weights_are_named_and_good_ones_never(tp: int, tmp_path: Path) -> None:
    cases = [case for case in CASES[tp] if computes_latents_on_cpu() or case[0] != "deepseek-v3"]
    run(attest, tp, folder=tmp_path, tp=tp, cases=cases)
