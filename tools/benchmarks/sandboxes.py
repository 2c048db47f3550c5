"""`tools.benchmarks sandboxes`: task folders in local sandboxes, as many at a time as a step has trajectories.

The environments are real, a process each, in the workers of a run; the model is not. Each has its start, a command, and its
verifier in a second sandbox. Memory is the share of each process (Pss) while all wait for the model. Then as many are killed, and
their folders swept.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from grpo_megatron.environments.pool import EnvironmentPool
from grpo_megatron.processes.process import tree
from grpo_megatron.starting.generated import shell_tasks
from grpo_megatron.storage import files
from tools.benchmarks.workload import machine

TIMEOUT_S = 600.0
TURN = '<tool_call>{"name": "bash", "arguments": {"command": "cat * > out"}}</tool_call>'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=1000, help="sandboxes at a time")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="rollout.multi_turn.num_workers")


def sandboxes(args: argparse.Namespace) -> int:
    """Prints seconds, processor milliseconds of one trajectory, and memory of each phase."""
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        os.environ["TMPDIR"] = tempfile.tempdir = name
        tasks = Path(name, "tasks")
        for row in shell_tasks(0, 500, held_out=False):
            for path, text in row.items():
                (tasks / path).parent.mkdir(parents=True, exist_ok=True)
                (tasks / path).write_text(text)
        folders = sorted(tasks.iterdir())
        rows = [
            {"folder": str(folders[i % len(folders)]), "messages": [{"role": "user", "content": "x"}]}
            for i in range(args.count)
        ]
        _measure(rows, args.workers)
        os.environ.pop("TMPDIR")
        tempfile.tempdir = None
    return 0


def _measure(rows: list[dict[str, object]], workers: int) -> None:
    kwargs = {"call_timeout_s": TIMEOUT_S, "memory_mib": 256, "disk_mib": 16}
    keys = [str(number) for number in range(len(rows))]

    def start(pool: EnvironmentPool) -> None:
        for key, row in zip(keys, rows, strict=True):
            pool.start(key, row, int(key))

    def step(pool: EnvironmentPool, completion: str | None) -> None:
        for key in keys:
            pool.step(key, completion)

    with EnvironmentPool("folders", kwargs, workers, TIMEOUT_S) as pool:
        _phase("workers", pool, keys[:0], lambda: pool.wait([]))
        _phase("start", pool, keys, lambda: start(pool))
        before = sum(map(_pss, tree(os.getpid()) - {os.getpid()}))
        print(
            f"idle: {before / len(keys) / 1024:.2f} MiB per trajectory, its process and its share of the workers included"
        )
        _phase("a command", pool, keys, lambda: step(pool, TURN))
        _phase("verifier", pool, keys, lambda: step(pool, None))
        pool.end(keys)
        _phase("start again", pool, keys, lambda: start(pool))
    left = [folder for folder in Path(tempfile.gettempdir()).glob(f"{files.PREFIX}*") if folder.is_dir()]
    files.MIN_AGE_S, began = -1.0, time.perf_counter()
    files.remove_leftovers()
    print(
        json.dumps({"folders left by killed trajectories": len(left), "sweep_s": round(time.perf_counter() - began, 2)})
    )


def _phase(name: str, pool: EnvironmentPool, keys: list[str], call: Callable[[], object]) -> None:
    began, used = time.perf_counter(), _cpu()
    call()
    failed = [outcome for outcome in pool.wait(keys).values() if outcome.step is None]
    seconds = time.perf_counter() - began
    each = f", {1000 * (_cpu() - used) / len(keys):.0f} ms of all processors per trajectory" if keys else ""
    print(f"{name}: {seconds:.2f} s{each}, {len(failed)} failed {failed[:1] or ''}", flush=True)


def _cpu() -> float:
    """Reads the seconds that the machine's processors have worked."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def _pss(pid: int) -> int:
    """Reads the proportional memory of a process, in KiB."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
