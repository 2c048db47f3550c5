"""Reports: many checks in one process, each result on disk before the next check starts.

A process that crashes, for example by a CUDA error, loses only the check that it was in.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

Check = Callable[..., Mapping[str, Any] | None]  # returns figures: name -> value, or name -> (value, unit)


class Skipped(Exception):
    """A check cannot run here; the text says why."""


def perform(checks: Mapping[str, Check], path: Path, *arguments: Any) -> None:
    """Call every check with `arguments`; append what it returned, or its traceback, to `path`."""
    for name, check in checks.items():
        _append(path, {"name": name, "outcome": "crashed", "figures": {}, "text": "", "seconds": 0.0})
        start, text, figures = time.monotonic(), "", {}
        try:
            figures = dict(check(*arguments) or {})
            outcome = "passed"
        except Skipped as error:
            outcome, text = "skipped", str(error)
        except Exception:
            outcome, text = "failed", traceback.format_exc()
        seconds = round(time.monotonic() - start, 2)
        _append(path, {"name": name, "outcome": outcome, "figures": figures, "text": text, "seconds": seconds})
        if outcome == "failed" and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # raises if the device is unusable from now on: the other checks need a new process


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Check -> its last record. "crashed": the process ended within the check."""
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return {record["name"]: record for record in records}


def fail(path: Path, name: str, text: str) -> None:
    _append(path, {"name": name, "outcome": "failed", "figures": {}, "text": text, "seconds": 0.0})


def _append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


# -- figures -----------------------------------------------------------------------------------------------------------


class Figures:
    """Collects (test, name, value, unit). `path`: the JSON file, written after every test, or None."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.device = ""
        self.tests: dict[str, dict[str, Any]] = {}

    def add(self, test: str, name: str, value: Any, unit: str = "") -> None:
        self._of(test)["figures"][name] = [value, unit]

    def end(self, test: str, outcome: str, seconds: float, reason: str = "") -> None:
        self._of(test).update(outcome=outcome, seconds=round(seconds, 1), reason=reason)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({"device": self.device, "tests": self.tests}, indent=1) + "\n")

    def lines(self) -> Iterator[str]:
        """The device, then one line per test that measured something."""
        if self.device:
            yield self.device
        for test, record in self.tests.items():
            if record["figures"]:
                shown = "; ".join(
                    f"{name} {_shown(value)}{' ' + unit if unit else ''}"
                    for name, (value, unit) in record["figures"].items()
                )
                yield f"{test} [{record['outcome']}, {record['seconds']} s]: {shown}"

    def _of(self, test: str) -> dict[str, Any]:
        return self.tests.setdefault(test, {"outcome": "", "seconds": 0.0, "reason": "", "figures": {}})


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)
