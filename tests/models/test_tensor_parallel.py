"""Which tensor-parallel sizes a model allows: the policy's, and those of the engine, which also cuts the vocabulary.

Vocabulary of vLLM: rows padded to a multiple of 64. 1,000 rows become 1,024 = 341 x 3 + 1.
"""

from __future__ import annotations

from typing import Any

import pytest

from grpo_megatron.models.architecture import Architecture, engine_split_problems, fitting_sizes, split_problems
from grpo_megatron.models.families import architecture_of

CONFIG = {
    "model_type": "mixtral", "hidden_size": 96, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 960,
    "num_attention_heads": 12, "num_key_value_heads": 12, "num_local_experts": 5, "num_experts_per_tok": 2,
}  # fmt: skip


def _arch(**changes: Any) -> Architecture:
    return architecture_of({**CONFIG, **changes})


@pytest.mark.parametrize(
    ("changes", "tp", "problems"),
    [
        ({}, 3, []),  # 5 experts: each rank holds a part of every expert
        (
            {"num_key_value_heads": 1},
            5,
            ["12 attention heads over 5 leave 2", "48 rows of an expert's MLP over 5 leave 3"],
        ),
        ({"num_key_value_heads": 2}, 4, []),  # each of 2 heads on 2 ranks
        ({"num_key_value_heads": 4}, 6, ["4 key-value heads and 6 ranks: neither number divides the other"]),
        ({"intermediate_size": 50}, 4, ["50 rows of an expert's MLP over 4 leave 2"]),
        ({"model_type": "llama", "intermediate_size": 50}, 4, ["50 rows of the MLP over 4 leave 2"]),
    ],
)
def test_heads_groups_and_mlp(changes: dict[str, Any], tp: int, problems: list[str]) -> None:
    assert split_problems(_arch(**changes), tp) == problems
    assert [p for p in engine_split_problems(_arch(**changes), tp) if "vocabulary" not in p] == problems


def test_an_engine_may_have_whole_experts() -> None:
    """5 experts of 48 rows: 3 ranks can cut each of them, and cannot have the same number of them each; 5 can."""
    cut = "48 rows of an expert's MLP over 5 leave 3"
    assert engine_split_problems(_arch(), 3, has_whole_experts=True) == ["5 experts over 3 leave 2"]
    assert cut in engine_split_problems(_arch(), 5)
    assert not any("expert" in problem for problem in engine_split_problems(_arch(), 5, has_whole_experts=True))


def test_the_engine_also_cuts_the_vocabulary() -> None:
    assert split_problems(_arch(vocab_size=1000), 3) == []
    assert engine_split_problems(_arch(vocab_size=1000), 3) == [
        "1024 rows of the vocabulary (1000, padded to a multiple of 64) over 3 leave 1"
    ]
    assert engine_split_problems(_arch(vocab_size=1024), 3) == ["1024 rows of the vocabulary over 3 leave 1"]
    assert engine_split_problems(_arch(vocab_size=900), 3) == []  # 960 = 320 x 3
    assert fitting_sizes(_arch(), split_problems) == "1, 2, 3, 4, 6, 12"
    assert fitting_sizes(_arch(vocab_size=1000), engine_split_problems) == "1, 2, 4"
