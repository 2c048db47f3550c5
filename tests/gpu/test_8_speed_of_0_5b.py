"""Steps of GRPO in the shape of Qwen2.5-0.5B: seconds of each phase, tokens/s, MFU. Not run on a GPU yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu import speed


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return speed.speed_models(tmp_path_factory)


@pytest.mark.parametrize("recipe", [None, "tensorwise"], ids=["bf16", "fp8"])
def test_step_time(
    models: Callable[[str], Path], tmp_path: Path, record_figure: Callable[..., None], recipe: str | None
) -> None:
    speed.check_step_time(models, tmp_path, record_figure, "0.5B", recipe)
