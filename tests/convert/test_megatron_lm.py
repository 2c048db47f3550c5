"""Checkpoints under Transformer Engine's specs and under local specs. The expected names come from Megatron-Core.

Transformer Engine does not run: only the specs that name its modules are read (tests/convert/stand_in_engine.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.convert import layout
from grpo_megatron.convert.layout import further_options, unsupported_there
from grpo_megatron.models.families import architecture_of, table_of
from grpo_megatron.models.weights.table import expand_table
from tests.convert import folders

FAMILY = {"dense": "llama2", "qk_norm": "qwen3", "experts": "qwen3_moe", "experts grouped": "qwen3_moe"}
NORMS = ("input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm")


@pytest.fixture(scope="module")
def specs() -> dict[str, list[str]]:
    """Spec -> names of a layer's norms, in the order of NORMS."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.convert.stand_in_engine"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.both_stacks
def test_names_in_the_specs(specs: dict[str, list[str]]) -> None:
    """The names are written out, so that a change of them in Megatron-Core fails this test."""
    fused = ["self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"]
    heads = ["self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"]
    assert specs["te dense"] == specs["local dense"] == fused
    assert specs["te qk_norm"] == specs["local qk_norm"] == specs["local experts"] == [*fused, *heads]
    assert specs["te experts"] == specs["te experts grouped"] == [fused[0], "pre_mlp_layernorm.weight", *heads]


@pytest.mark.parametrize("kind", FAMILY)
@pytest.mark.slow
@pytest.mark.both_stacks
def test_a_converted_checkpoint_has_every_name_that_a_spec_reads(kind: str, specs: dict[str, list[str]]) -> None:
    """That such names are read as well: test_round_trip.py."""
    arch = architecture_of(folders.config_of(FAMILY[kind]))
    for engine in ("te", "local"):
        for norm, name in zip(NORMS, specs.get(f"{engine} {kind}", []), strict=False):
            rows = [row for row in expand_table(table_of(arch), arch) if row.megatron.endswith(f".{norm}.weight")]
            assert len(rows) == arch.num_layers
            for row in rows:
                assert f"decoder.layers.{name}" in {place.key for place in layout.written_places(row, arch)}


# -- the options that `inspect` prints for Megatron-LM; by hand, Megatron-LM was run with them: docs/conversion.md -----


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
