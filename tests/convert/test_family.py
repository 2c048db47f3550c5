"""`convert verify` of one folder: a right family agrees with transformers, and wrong ones are shown for what they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_megatron.convert.inspection import convert
from grpo_megatron.convert.options import VerifyOptions
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families.decoders import ModelFamily
from grpo_megatron.models.weights.table import WeightRow, decoder_table
from tests.models import ministral3

CONFIG = {**ministral3.CONFIG, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 2}
BIASED = ModelFamily(lambda config: replace(ministral3.architecture_from(config), qkv_bias=True), decoder_table)


def _swapped(arch: Architecture) -> list[WeightRow]:
    """Gate and up of the MLP in the wrong order: equal shapes, so that only numbers show it."""
    rows = decoder_table(arch)
    return [replace(row, hf=row.hf[::-1]) if "linear_fc1" in row.megatron else row for row in rows]


SWAPPED = ModelFamily(ministral3.architecture_from, _swapped)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 1 << 16}))
    return tmp_path


@pytest.mark.parametrize(
    ("family", "code", "lines"),
    [
        pytest.param(
            "tests.models.ministral3:FAMILY",
            0,
            ["TP2     equal", "the family and transformers agree"],
            marks=pytest.mark.soak,
        ),
        (
            "tests.convert.test_family:BIASED",
            1,
            ["only in the family's table: model.layers.0.self_attn.k_proj.bias [128]"],
        ),
        pytest.param(
            "tests.convert.test_family:SWAPPED",
            1,
            ["DP2     equal", "PP2     equal", "mlp.down_proj.weight", "transformers DIFFER"],
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_family_is_proven(
    family: str, code: int, lines: list[str], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert convert(VerifyOptions(a=folder, family=family, changes={"hidden_size": 64})) == code
    printed = capfd.readouterr().out
    assert all(line in printed for line in lines), printed


def test_a_large_model_is_refused_before_anything_is_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(VerifyOptions(a=folder, family="tests.models.ministral3:FAMILY")) == 2
    assert "verify computes with 50,000,000 at most" in capsys.readouterr().err
