"""`tools.benchmarks start`: seconds from the command `train` to the first sampled token, and where they go.

The run is on the CPU: the 0.4M model, no supervised warm-up, no validation; its first action is a rollout. It is killed at the
first token that a rank samples for a prompt (the probe's token is not counted). Processor time is that of all its processes.
start_marks/sitecustomize.py reports the moments from inside, so that --against measures another checkout in the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.benchmarks.workload import SAMPLES, WORKLOADS, Workload, family_processor_seconds, machine, write_folder

ROOT = Path(__file__).resolve().parents[2]
MARKS = ROOT / "tools" / "benchmarks" / "start_marks"
PIPE = "GRPO_MEGATRON_START_MARKS"
FIRST_TOKEN = "first token"
LIMIT_S = 170


@dataclass(frozen=True)
class Moment:
    """The beginning or the end of something in one process. `wall`: seconds since the command; `processor`: of the process."""

    pid: int
    rank: str | None
    moment: str
    kind: str
    wall: float
    processor: float


@dataclass(frozen=True)
class Start:
    """Seconds until the first token, and what happened until then."""

    wall: float
    processor: float
    moments: list[Moment]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument(
        "--cold", action="store_true", help="vLLM's cache of model classes is empty, as on a new machine"
    )
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="a folder with another commit, with engine vllm"
    )


def start(args: argparse.Namespace) -> int:
    workload = WORKLOADS["0.4M"]
    print(machine())
    with tempfile.TemporaryDirectory(prefix="benchmark-start-") as name:
        folder = Path(name)
        write_folder(folder, workload, workload.prompts)
        sides = {"this checkout": (ROOT, args.engine)}
        if args.against is not None:
            sides = {f"{args.against}": (args.against.resolve(), "vllm"), **sides}
        starts: dict[str, list[Start]] = {side: [] for side in sides}
        for _ in range(args.repeats):
            for side, (checkout, engine) in sides.items():
                settings = config(folder, workload, args.ranks, engine)
                starts[side].append(run(checkout, folder, settings, is_cold=args.cold))
    base: Start | None = None
    for side, runs in starts.items():
        typical = median(runs)
        base = base or typical
        print(
            f"{side}, engine {sides[side][1]}, {args.ranks} ranks, median of {args.repeats}: first token after"
            f" {typical.wall:.2f} s ({typical.wall / base.wall:.2f} x), processor time {typical.processor:.2f} s"
            f" ({typical.processor / base.processor:.2f} x)"
        )
    for side, runs in starts.items():
        print(f"\n{side}: the median run\n{waterfall(nearest(runs))}")
    return 0


def config(folder: Path, workload: Workload, ranks: int, engine: str) -> dict[str, Any]:
    rollout: dict[str, Any] = {"n": SAMPLES}
    if engine != "vllm":
        rollout["engine"] = engine
    return {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {
            "task": "jsonl",
            "train_files": [str(folder / "train.jsonl")],
            "apply_chat_template": False,
            "train_batch_size": workload.prompts,
            "max_prompt_length": workload.prompt_length,
            "max_response_length": workload.response_length,
        },
        "actor": {"use_kl_loss": False},
        "rollout": rollout,
        "reward": {"function": "benchmark_reward:reward"},
        "trainer": {
            "total_training_steps": 1,
            "n_gpus_per_node": ranks,
            "device": "cpu",
            "logger": ["console", "jsonl"],
            "output_dir": str(folder / "output"),
            "resume_mode": "disable",
            "val_before_train": False,
            **dict.fromkeys(("save_freq", "test_freq"), -1),
        },
    }


def run(checkout: Path, folder: Path, settings: dict[str, Any], *, is_cold: bool) -> Start:
    """One start of the commit in `checkout`. Raises RuntimeError if it ends without a token."""
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    pipe = folder / "marks"
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    source = os.open(pipe, os.O_RDWR)  # also a writer, so that reading does not end between two processes
    environment = {**os.environ, PIPE: str(pipe), "PYTHONPATH": f"{MARKS}:{checkout}:{folder}", "OMP_NUM_THREADS": "1"}
    if is_cold:
        environment["VLLM_CACHE_ROOT"] = tempfile.mkdtemp(dir=folder)
    command = [sys.executable, "-m", "grpo_megatron", "train", folder / "run.yaml"]
    with (folder / "console").open("w") as console, os.fdopen(source) as lines:
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(LIMIT_S)
        begin = time.time()
        process = subprocess.Popen(
            command, env=environment, cwd=checkout, stdout=console, stderr=console, start_new_session=True
        )
        moments = []
        try:
            while not moments or moments[-1].moment != FIRST_TOKEN:
                found = json.loads(lines.readline())
                moments.append(Moment(**{**found, "wall": found["wall"] - begin}))
            processor = family_processor_seconds(process.pid)
        except TimeoutError as error:
            raise RuntimeError(f"no token:\n{(folder / 'console').read_text()}") from error
        finally:
            signal.alarm(0)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Start(moments[-1].wall, processor, moments)


def _too_long(number: int, frame: object) -> None:
    raise TimeoutError


def median(runs: list[Start]) -> Start:
    return Start(
        statistics.median(one.wall for one in runs), statistics.median(one.processor for one in runs), runs[0].moments
    )


def nearest(runs: list[Start]) -> Start:
    """The run whose wall time is nearest the median."""
    middle = median(runs).wall
    return min(runs, key=lambda one: abs(one.wall - middle))


def waterfall(one: Start) -> str:
    """One line per part and process, in the order of their beginnings; indented within the part that contains it."""
    lines = [f"{'process':<14}{'part':<34}{'begins':>8}{'seconds':>9}{'processor':>11}"]
    names: dict[int, str] = {}
    depth: dict[int, int] = {}
    open_parts: dict[tuple[int, str], tuple[int, Moment, int]] = {}
    for moment in one.moments:
        name = names.setdefault(moment.pid, "launcher" if not names else f"process {len(names)}")
        if moment.rank is not None and not name.startswith("rank"):
            names[moment.pid] = name = f"rank {moment.rank}"
        key = moment.pid, moment.moment
        if moment.kind == "begin":
            open_parts[key] = len(lines), moment, depth.get(moment.pid, 0)
            depth[moment.pid] = depth.get(moment.pid, 0) + 1
            lines.append(f"{name:<14}{'  ' * (depth[moment.pid] - 1) + moment.moment:<34}{moment.wall:8.2f}")
        elif key in open_parts:
            row, begin, depth[moment.pid] = open_parts.pop(key)
            lines[row] += f"{moment.wall - begin.wall:9.2f}{moment.processor - begin.processor:11.2f}"
        else:
            lines.append(f"{name:<14}{moment.moment:<34}{moment.wall:8.2f}{'':9}{moment.processor:11.2f}")
    return "\n".join(lines)
