"""Events of a run, one JSON line each, in output_dir/events.jsonl: when it was started, resumed, stopped, or went wrong.

    {"time": 1700000000.0, "kind": "resumed", "step": 12, "text": "..."}

The file is only appended to, over all attempts. `time` is Unix time in seconds; `step` counts from 0, or is null.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

EVENTS_FILE = "events.jsonl"
EVENT_KINDS = ("started", "resumed", "guard", "stopped", "stalled", "failed", "done")
LONGEST_TEXT = 2000  # characters


def add_event(output_dir: Path, kind: str, step: int | None, text: str = "") -> None:
    """Append an event. For one rank only. A full disk is not reported here: the next metrics or checkpoint report it."""
    assert kind in EVENT_KINDS, kind
    line = json.dumps({"time": round(time.time(), 3), "kind": kind, "step": step, "text": text[:LONGEST_TEXT]}) + "\n"
    with contextlib.suppress(OSError), (output_dir / EVENTS_FILE).open("a", encoding="utf-8") as file:
        file.write(line)


def read_events(output_dir: Path) -> list[dict[str, Any]]:
    """The events in file order. Damaged lines are left out; without a file there are none."""
    try:
        lines = (output_dir / EVENTS_FILE).read_bytes().splitlines()
    except OSError:
        return []
    events = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            event = json.loads(line)
            if (
                isinstance(event, dict)
                and event.get("kind") in EVENT_KINDS
                and isinstance(event.get("time"), float | int)
            ):
                events.append({"step": None, "text": "", **event})
    return events
