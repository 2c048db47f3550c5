"""Reports: many checks in one process, each result on disk before the next check starts.

A process that crashes, for example by a CUDA error, loses only the check that it was in.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping
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
