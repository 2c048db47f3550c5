"""The machine and the installed packages, probed in a minute. What fails here explains what fails later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu import conftest, probe_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("probes") / "results.jsonl"
    return conftest.run_checks(probe_ranks.run_probes, list(probe_ranks.PROBES), path)


@pytest.mark.parametrize("name", list(probe_ranks.PROBES))
def test_probe(results: dict[str, Any], record_figure: Callable[..., None], name: str) -> None:
    conftest.report_check(results[name], record_figure)
