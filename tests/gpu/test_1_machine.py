"""The machine and the installed packages, probed in a minute. What fails here explains what fails later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu import conftest, probes


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("probes") / "results.jsonl"
    return conftest.run_checks(probes.run_probes, list(probes.PROBES), path)


@pytest.mark.parametrize("name", list(probes.PROBES))
def test_probe(results: dict[str, Any], record_figure: Callable[..., None], name: str) -> None:
    conftest.report_check(results[name], record_figure)
