"""Faults inside a rank: at the n-th time that it reaches a point of the program, it does something bad.

SOAK_FAULT   {"point": "update_actor", "count": 3, "rank": 1, "action": "kill rank"} (soak.py)
SOAK_USAGE   a folder: after each step every rank appends its memory, descriptors and threads to RANK.jsonl
SOAK_OUTPUT  the run's output folder
"""

from __future__ import annotations

import collections
import functools
import importlib
import json
import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# A point is a phase of a step (Metrics.phase), or the begin of one of these functions.
FUNCTIONS = {
    "start": ("grpo_megatron.training.placement", "build_colocation"),
    "log": ("grpo_megatron.report.step", "StepReport.log"),
    "save: state": ("grpo_megatron.training.checkpoint", "save_sharded"),
    "save: files": ("grpo_megatron.models.weights.sharded_state", "ShardedWrite.write"),
    "save: manifest": ("grpo_megatron.training.checkpoint", "write_manifest"),
    "save: rename": ("grpo_megatron.training.checkpoint", "publish_folder"),
    "save: prune": ("grpo_megatron.training.checkpoint", "Checkpoints._prune"),
    "export": ("grpo_megatron.training.colocation", "save_hf"),
}
LIMIT = 4096  # bytes that a file may have on the "full disk"
_reached: collections.Counter[str] = collections.Counter()


def install() -> None:
    """Called in every rank before it begins."""
    from grpo_megatron.report.metrics import Metrics

    phase = Metrics.phase

    def watched(self: Metrics, name: str) -> Any:
        reach(name)
        return phase(self, name)

    Metrics.phase = watched  # type: ignore[method-assign]
    for point, (module, name) in FUNCTIONS.items():
        owner: Any = importlib.import_module(module)
        *classes, attribute = name.split(".")
        for part in classes:
            owner = getattr(owner, part)
        setattr(owner, attribute, _preceded(point, getattr(owner, attribute)))


def _preceded(point: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        reach(point)
        return function(*arguments, **named)

    return wrapper


def reach(point: str) -> None:
    _reached[point] += 1
    if point == "log" and "SOAK_USAGE" in os.environ:
        _record_usage(Path(os.environ["SOAK_USAGE"]))
    fault = json.loads(os.environ.get("SOAK_FAULT", "{}"))
    mine = (point, _reached[point], int(os.environ["RANK"]))
    if fault and (fault["point"], fault["count"], fault["rank"]) == mine and _is_first(fault):
        ACTIONS[fault["action"]]()


def _is_first(fault: dict[str, Any]) -> bool:
    """Says if the fault is to happen: one with a file `once` happens in one process, though healing starts the rank again."""
    if "once" not in fault:
        return True
    try:
        Path(fault["once"]).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _record_usage(folder: Path) -> None:
    status = Path("/proc/self/status").read_text()
    resident = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")))
    usage = {"rss_kib": resident, "files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}
    with (folder / f"{os.environ['RANK']}.jsonl").open("a") as file:
        file.write(json.dumps(usage) + "\n")


# -- actions -----------------------------------------------------------------------------------------------------------


def _launcher() -> int:
    return int(os.environ["SOAK_LAUNCHER"])


def _twice() -> None:
    os.kill(_launcher(), signal.SIGINT)
    time.sleep(1)  # two signals at once would be one
    os.kill(_launcher(), signal.SIGINT)


ACTIONS: dict[str, Callable[[], None]] = {
    "kill rank": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill launcher": lambda: os.kill(_launcher(), signal.SIGKILL),
    "kill all": lambda: os.killpg(os.getpgid(_launcher()), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(_launcher(), signal.SIGTERM),
    "SIGUSR1": lambda: os.kill(_launcher(), signal.SIGUSR1),
    "SIGINT": lambda: os.kill(_launcher(), signal.SIGINT),
    "SIGINT twice": _twice,
    "full disk": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT)),
    "delete folder": lambda: shutil.rmtree(os.environ["SOAK_OUTPUT"]),
}
