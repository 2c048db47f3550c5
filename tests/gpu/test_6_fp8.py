"""FP8 through Transformer Engine: every recipe learns like bf16. Not run on a GPU yet.

Tolerances are derived from the number of bits, not measured: FP8 e4m3 has a relative step of 2**-3. The compared losses are
those of 8 layers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import Config
from grpo_megatron.device import read_hardware
from grpo_megatron.models.layers.precision import RECIPES, hardware_problems
from tests.gpu import conftest, training_ranks


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        *((recipe, {}) for recipe in RECIPES),
        ("tensorwise", {"first_last_layers_bf16": True}),
        ("tensorwise", {"param_gather": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_fp8_follows_bf16(
    medium: Path, request: pytest.FixtureRequest, record_figure: Callable[..., None], recipe: str, options: Any
) -> None:
    """Every step's loss within a tenth of a nat and 3 percent of the bf16 run's."""
    conftest.needs_transformer_engine()
    megatron = {"fp8": {"recipe": recipe, **options}}
    wanted = Config.model_validate({"model": {"path": "x"}, "actor": {"megatron": megatron}})
    if problems := list(hardware_problems(wanted, read_hardware("cuda"))):
        pytest.skip(problems[0])
    bf16 = request.getfixturevalue("bf16")  # not before the reasons to skip
    (fp8,) = conftest.run(training_ranks.loss_curve, folder=medium, megatron=megatron, steps=30)
    pairs = list(zip(fp8["losses"], bf16["losses"], strict=True))
    record_figure("last loss in FP8, in bf16", pairs[-1])
    record_figure("largest difference", max(abs(a - b) for a, b in pairs))
    assert fp8["finite"] and fp8["names"] == bf16["names"]
    assert all(abs(a - b) <= 0.1 + 0.03 * b for a, b in pairs)
    assert any(a != b for a, b in pairs)  # it did not compute in bf16
