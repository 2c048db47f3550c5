"""What a rank runs to check vLLM's model runner: one engine, all checks on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.gpu import engine_life_checks
from tests.gpu.reports import perform
from tests.gpu.runner_bench import Bench
from tests.gpu.runner_checks import CHECKS

__all__ = ["CHECKS", "engine_life_checks", "run_runner_checks"]  # the module registers its checks when imported


def run_runner_checks(names: list[str], path: Path, folder: Path, dtype: str, enforce_eager: bool) -> None:
    bench = Bench(folder, dtype, enforce_eager)
    perform({name: _on(bench, CHECKS[name]) for name in names}, path)


def _on(bench: Bench, check: Callable[[Bench], Mapping[str, Any]]) -> Callable[[], Mapping[str, Any]]:
    def begin() -> Mapping[str, Any]:
        bench.push(0)
        return {"runner": bench.runner, **check(bench)}

    return begin
