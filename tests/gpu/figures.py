"""Figures: what the GPU tests measured. One line per test at the end of the output, and a JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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
