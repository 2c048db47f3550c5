"""The profile as a trace in the JSON trace-event format of Chrome, which ui.perfetto.dev and chrome://tracing open.

One process per rank. Its rows: steps and phases, engine steps, collectives, and waiting for the ranks that were late.
Times are microseconds from the first event on. Processes and rows are counted from 1: process 0 is the kernel's idle one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_megatron.observability.recorder import COLLECTIVE, ENGINE, PHASE, STEP, Event
from grpo_megatron.observability.step_time import TIME_PARTS, StepTime

ROWS = {"steps and phases": (STEP, PHASE), "engine steps": (ENGINE,), "collectives": (COLLECTIVE,), "waiting": ()}
WAITING_ROW = list(ROWS).index("waiting")


def trace_lines(time: StepTime, names: Sequence[str], about: Mapping[str, Any]) -> Iterator[str]:
    """The file in pieces. `names[r]` is rank r's title; `about` is kept beside the events."""
    start = min((event.begin for events in time.ranks for event in events), default=0)
    shares = [
        {"rank": rank, "step": step, "phase": phase, **{part: getattr(seconds, part) for part in TIME_PARTS}}
        for (rank, step, phase), seconds in time.shares.items()
    ]
    yield (
        '{"displayTimeUnit": "ms",\n"otherData": ' + json.dumps({**about, "seconds": shares}) + ',\n"traceEvents": [\n'
    )
    separator = ""
    for entry in _entries(time, names, start):
        yield separator + json.dumps(entry)
        separator = ",\n"
    yield "\n]}\n"


def _entries(time: StepTime, names: Sequence[str], start: int) -> Iterator[dict[str, Any]]:
    for rank, events in enumerate(time.ranks):
        yield {"ph": "M", "pid": rank + 1, "name": "process_name", "args": {"name": names[rank]}}
        yield {"ph": "M", "pid": rank + 1, "name": "process_sort_index", "args": {"sort_index": rank}}
        for row, title in enumerate(ROWS):
            yield {"ph": "M", "pid": rank + 1, "tid": row + 1, "name": "thread_name", "args": {"name": title}}
            yield {"ph": "M", "pid": rank + 1, "tid": row + 1, "name": "thread_sort_index", "args": {"sort_index": row}}
        # An outer event comes before the inner one that begins at the same time: the viewers nest them in this order.
        for event in sorted(events, key=lambda e: (e.begin, -e.end, e.kind != STEP)):
            row = next(i for i, kinds in enumerate(ROWS.values()) if event.kind in kinds)
            yield _complete(
                rank, row, event.name, event.kind, event.begin - start, event.end - start, _arguments(event)
            )
    for wait in time.waits:
        name = f"for rank {wait.late}"
        arguments = {"rank": wait.late, "in": wait.name}
        yield _complete(wait.rank, WAITING_ROW, name, "waiting", wait.begin - start, wait.end - start, arguments)


def _complete(rank: int, row: int, name: str, kind: str, begin: int, end: int, args: dict[str, Any]) -> dict[str, Any]:
    """Both ends are rounded, and not the length, so that nested events stay nested."""
    first, last = begin / 1e3, end / 1e3
    timing = {"ts": first, "dur": round(last - first, 3)}
    return {"ph": "X", "pid": rank + 1, "tid": row + 1, "name": name, "cat": kind, **timing, "args": args}


def _arguments(event: Event) -> dict[str, Any]:
    if event.kind == ENGINE:
        return {"unfinished requests": event.number}
    if event.kind == COLLECTIVE:
        group, number, size = event.key or ("", "", 0)
        return {"group": group, "number": number, "ranks": size, "cpu_ms": event.cpu / 1e6}
    return {"cpu_ms": event.cpu / 1e6}
