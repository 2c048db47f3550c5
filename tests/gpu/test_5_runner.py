"""What the project relies on in vLLM, checked on whichever model runner vLLM uses here. Not run on a GPU yet.

In bfloat16 with CUDA graphs, as in a run, and in float32, where rounding hides nothing. Every line of figures names the
runner. `VLLM_USE_V2_MODEL_RUNNER=0 make test-gpu GROUP=5` tests the first runner, `=1` the second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests import tiny
from tests.gpu import conftest, runner_bench, runner_checks

DTYPES = {"bfloat16": False, "float32": True}  # -> enforce_eager


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Starts an engine for a dtype once, and runs all checks on it."""
    root = tmp_path_factory.mktemp("runner")
    folder = tiny.make_model(root / "model", "qwen2", std=0.06, **runner_bench.MODEL)
    done: dict[str, dict[str, Any]] = {}

    def of(dtype: str) -> dict[str, Any]:
        if dtype not in done:
            done[dtype] = conftest.run_checks(
                runner_checks.run_runner_checks,
                list(runner_checks.CHECKS),
                root / f"{dtype}.jsonl",
                folder=folder,
                dtype=dtype,
                enforce_eager=DTYPES[dtype],
            )
        return done[dtype]

    return of


@pytest.mark.parametrize("name", list(runner_checks.CHECKS))
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_runner(
    results: Callable[[str], dict[str, Any]], record_figure: Callable[..., None], dtype: str, name: str
) -> None:
    conftest.needs_vllm()
    conftest.report_check(results(dtype)[name], record_figure)
