"""`tools.benchmarks step`: samples per second of whole GRPO steps, this project beside TRL's GRPOTrainer.

Both train the same random model on the same prompts with the same reward, in float32, on two processes of one thread each:
8 samples per prompt of exactly the same number of tokens, one optimizer step per rollout, no KL term, token-mean loss. Both
sides are started in turn, and the first steps of each run are not counted. TRL is installed by the first call into an
environment of its own, outputs/benchmark/trl of this checkout. It generates by transformers' `generate`; with --trl-vllm also
by vLLM within its processes (trl_vllm.py says what this takes on the CPU).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from tools.benchmarks.trl_vllm import trl_vllm_python
from tools.benchmarks.workload import SAMPLES, WORKLOADS, Workload, machine, write_folder

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "outputs" / "benchmark"
TRL = ("trl==1.16.0", "transformers==5.19.0", "accelerate==1.15.0", "datasets==5.2.0", "torch==2.13.0+cpu")
STEPS = {"0.4M": 24, "26M": 4}
FIRST_COUNTED = {"0.4M": 6, "26M": 1}  # steps before it warm up
OWN: dict[str, list[str]] = {  # ways to run this project; the first of a workload is its best
    "0.4M": ["rollout.engine=transformers", "rollout.engine=vllm"],
    "26M": ["rollout.engine=vllm", "rollout.engine=transformers"],
}
SHARED = ["actor.share_prompts=true"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side")
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="default: both")
    parser.add_argument("--plain", action="store_true", help="this project without actor.share_prompts")
    parser.add_argument("--trl-vllm", action="store_true", help="TRL's vLLM mode, too")


def step(args: argparse.Namespace) -> int:
    python = trl_python()
    print(machine())
    print(f"TRL's environment: {', '.join(TRL)}; two processes")
    for name in args.workload or WORKLOADS:
        with tempfile.TemporaryDirectory(dir=CACHE, prefix="step-") as folder:
            measure(WORKLOADS[name], Path(folder), python, args)
    return 0


def trl_python() -> Path:
    """The interpreter of TRL's environment, which is made at the first call."""
    venv = CACHE / "trl"
    done = venv / "installed"
    if not done.exists() or done.read_text() != " ".join(TRL):
        print(f"installing {', '.join(TRL)} into {venv} (about two minutes)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        if subprocess.run([venv / "bin" / "python", "-m", "pip", "install", "--quiet", *TRL], check=False).returncode:
            raise SystemExit(
                f"error: pip could not install {', '.join(TRL)}. The wheels of torch ...+cpu are on PyTorch's own CPU index,"
                " named on its 'Get started' page (Linux, Pip, CPU): add it with PIP_EXTRA_INDEX_URL and run again"
            )
        done.write_text(" ".join(TRL))
    return venv / "bin" / "python"


def measure(workload: Workload, folder: Path, python: Path, args: argparse.Namespace) -> None:
    """Run the sides in turn and print their medians."""
    steps, first = STEPS[workload.name], FIRST_COUNTED[workload.name]
    write_folder(folder, workload, workload.prompts * steps)
    (folder / "own.yaml").write_text(yaml.safe_dump(own_config(folder, workload, steps)))
    trl = [*launch(), ROOT / "tools/benchmarks/step_trl.py", folder, workload.name]
    own = [sys.executable, *launch(), ROOT / "tools/benchmarks/step_own.py"]
    sides: dict[str, list[Any]] = {"TRL": [python, *trl, folder / "TRL.json", "--steps", steps]}
    if args.trl_vllm:
        with_vllm = trl_vllm_python(CACHE / "trl-vllm")
        sides["TRL, its vLLM mode"] = [with_vllm, *trl, folder / "TRL_vllm.json", "--steps", steps, "--vllm"]
    for number, way in enumerate(OWN[workload.name]):
        extra = [] if args.plain else SHARED
        sides[f"own, {way}"] = [*own, folder / f"own{number}.json", folder / "own.yaml", way, *extra]
    seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    for _ in range(args.rounds):
        for side, command in sides.items():
            seconds[side].append(run(command, folder, first))
    check_sizes(folder, workload, steps)
    print(
        f"{workload.name} parameters: {workload.prompts} prompts x {SAMPLES}, {workload.prompt_length} prompt tokens,"
        f" {workload.response_length} new tokens; load {os.getloadavg()[0]:.1f}; medians of {args.rounds} runs"
    )
    base = median(seconds["TRL"])
    for side, values in seconds.items():
        wall, processor = median(values)
        print(
            f"  {side:<38}{workload.num_samples / wall:8.1f} samples/s  {base[0] / wall:5.2f} x   step {wall:7.3f} s,"
            f" processor {processor:7.3f} s  {base[1] / processor:5.2f} x",
            flush=True,
        )


def own_config(folder: Path, workload: Workload, steps: int) -> dict[str, Any]:
    return {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {
            "task": "jsonl",
            "train_files": [str(folder / "train.jsonl")],
            "apply_chat_template": False,
            "shuffle": False,
            "train_batch_size": workload.prompts,
            "max_prompt_length": workload.prompt_length,
            "max_response_length": workload.response_length,
        },
        "actor": {"use_kl_loss": False, "optim": {"lr": 1e-6, "weight_decay": 0.0}},
        "rollout": {"n": SAMPLES},
        "reward": {"function": "benchmark_reward:reward"},
        "trainer": {
            "total_training_steps": steps,
            "n_gpus_per_node": 2,
            "device": "cpu",
            "logger": ["jsonl"],
            "output_dir": str(folder / "own_output"),
            "resume_mode": "disable",
            "val_before_train": False,
            "save_hf_at_end": False,
            **dict.fromkeys(("save_freq", "test_freq"), -1),
        },
    }


def launch(processes: int = 2) -> list[str]:
    port = str(random.randrange(10_000, 32_000))
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", port]


def run(command: list[Any], folder: Path, first: int) -> tuple[float, float]:
    """One run: the median seconds of the counted steps, and their mean processor seconds."""
    shutil.rmtree(folder / "own_output", ignore_errors=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{folder}:{ROOT}"}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{command[3:]} failed with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    times = next(Path(part) for part in command if str(part).endswith(".json"))
    told = json.loads(times.read_text())
    ends = (told["ends"] if isinstance(told, dict) else told)[first - 1 :]
    walls = [after[0] - before[0] for before, after in zip(ends, ends[1:], strict=False)]
    return statistics.median(walls), (ends[-1][1] - ends[0][1]) / len(walls)


def median(values: list[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(wall for wall, _ in values), statistics.median(processor for _, processor in values)


def check_sizes(folder: Path, workload: Workload, steps: int) -> None:
    """Stop unless both sides trained on responses of the intended length (end-of-sequence tokens are very rare)."""
    told = json.loads((folder / "TRL.json").read_text())
    rows = [json.loads(line) for line in (folder / "own_output/metrics.jsonl").read_text().splitlines()]
    lengths = {
        "TRL": told["mean_length"],
        "own": statistics.mean(row["response_length/mean"] for row in rows),
    }
    tokens = workload.num_samples * steps * workload.max_length
    if min(lengths.values()) < 0.99 * workload.response_length or told["tokens"] < 0.99 * tokens:
        raise SystemExit(f"the sides did not sample {workload.response_length} tokens per response: {lengths}")
    print(f"tokens per response: {lengths}; {time.strftime('%Y-%m-%d')}")
