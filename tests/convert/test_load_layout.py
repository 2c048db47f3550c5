"""The options that `inspect` prints for Megatron-LM. By hand, Megatron-LM was run with them: docs/conversion.md."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_megatron.convert.layout import further_options, unsupported_there
from grpo_megatron.models.families import architecture_of
from tests.convert import folders

ROPE = {"rope_theta": 1e4, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("family", "rope", "options", "missing"),
    [
        ("qwen2", {}, "--norm-epsilon 1e-06", None),
        ("qwen3", {}, "--norm-epsilon 1e-06 --qk-layernorm", None),
        ("llama3", {"rope_type": "llama3", "factor": 8.0}, "--use-rope-scaling --rope-scaling-factor 8.0", None),
        ("llama3", {"rope_type": "llama3", "factor": 32.0}, "--rope-scaling-factor 32.0", "with 8, not 32"),
        ("llama2", {"rope_type": "linear", "factor": 2.0}, "--rotary-seq-len-interpolation-factor 2", "do not use it"),
        ("llama2", {"rope_type": "linear", "factor": 1.5}, "", "takes integers"),
        ("olmo2", {}, "", "a layer spec of your own"),
    ],
)
def test_the_options_of_a_model(family: str, rope: dict[str, Any], options: str, missing: str | None) -> None:
    changes = {"rope_parameters": {**ROPE, **rope}} if rope else {}
    arch = architecture_of(folders.config_of(family, **changes))
    assert options in further_options(arch) and (rope or further_options(arch).startswith(options))
    problem = unsupported_there(arch)
    assert problem is None if missing is None else missing in str(problem)
