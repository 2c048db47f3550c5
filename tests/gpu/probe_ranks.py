"""What a rank runs to probe the machine: all probes, or those that are left after a crash."""

from __future__ import annotations

from pathlib import Path

from tests.gpu import te_probes, vllm_probes
from tests.gpu.probes import PROBES
from tests.gpu.reports import perform

__all__ = ["PROBES", "run_probes", "te_probes", "vllm_probes"]  # the modules register their probes when imported


def run_probes(names: list[str], path: Path) -> None:
    perform({name: PROBES[name] for name in names}, path)
