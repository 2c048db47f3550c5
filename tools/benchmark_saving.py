"""`tools/benchmark.py saving`: checkpoints while training goes on (`trainer.async_save`), beside those that the run waits for.

One rank on the CPU trains a random model of 26 M parameters, and saves weights and optimizer state before the first of a few
updates. The ways take turns: no save, a save that is awaited, and one that a thread writes. The time ends when the last
update is done and the checkpoint is complete.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import benchmark_passes
from benchmark_workload import machine

SHAPE: dict[str, Any] = {**benchmark_passes.WORKLOADS["26 M"], "prompts": 1, "response_length": 32}
WAYS: dict[str, bool | None] = {"no save": None, "a save that is awaited": False, "a save in the background": True}


@dataclass
class Times:
    """Seconds of every turn of one way."""

    whole: list[float] = field(default_factory=list)
    stall: list[float] = field(default_factory=list)  # in `save`, `poll` and `wait`
    copy: list[float] = field(default_factory=list)  # of it, in `save`
    update: list[float] = field(default_factory=list)  # medians over the turn's updates


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=5, help="updates in a turn, of which the first follows the save")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")


def saving(args: argparse.Namespace) -> int:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    import torch

    from grpo_megatron.device import Device
    from grpo_megatron.parallel.mesh import build_mesh

    torch.set_num_threads(1)
    print(machine())
    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="benchmark-saving-") as root:
        print(measure(Path(root), mesh, args), flush=True)
    os._exit(0)  # threads of gloo would delay a normal exit


def measure(root: Path, mesh: Any, args: argparse.Namespace) -> str:
    from grpo_megatron.config import ActorConfig, Config
    from grpo_megatron.device import Device
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.policy import Policy
    from grpo_megatron.training.checkpoint import Checkpoints
    from grpo_megatron.training.correction_step import build_loss

    benchmark_passes.write_model(root, SHAPE)
    actor = ActorConfig.model_validate({"use_kl_loss": False, "optim": {"lr": 1e-6}})
    policy = Policy.load(root, "float32", read_architecture(root), actor, mesh, Device("cpu"))
    policy.set_optimizer(actor.optim, 1)
    batch, loss = benchmark_passes.make_batch(*benchmark_passes.draw(SHAPE), actor), build_loss(actor)
    config = Config.model_validate({"model": {"path": root}, "data": {"train_files": ["train.jsonl"]}})
    size = 0

    gc.collect()
    gc.freeze()  # as in a run, whose imports are frozen: Megatron collects garbage in every save

    def turn(in_background: bool | None, times: Times) -> None:
        nonlocal size
        folder = root / "output"
        checkpoints = Checkpoints(folder, mesh, 1, in_background=bool(in_background))
        os.sync()
        begin = time.perf_counter()
        stall, updates = 0.0, []
        if in_background is not None:
            checkpoints.save(1, policy, config)
            stall += time.perf_counter() - begin
        times.copy.append(stall)
        for _ in range(args.steps):
            started = time.perf_counter()
            batch.old_logprobs = None
            policy.update(batch, loss, complete=lambda batch: None)
            updated = time.perf_counter()
            checkpoints.poll(lambda name: contextlib.nullcontext())
            stall += time.perf_counter() - updated
            updates.append(updated - started)
        waited = time.perf_counter()
        checkpoints.wait()
        times.stall.append(stall + time.perf_counter() - waited)
        times.whole.append(time.perf_counter() - begin)
        times.update.append(statistics.median(updates))
        size = max(size, sum(file.stat().st_size for file in folder.rglob("*")))
        shutil.rmtree(folder, ignore_errors=True)

    measured = {name: Times() for name in WAYS}
    for _ in range(args.repeats + 1):  # the first turn is not counted
        for name, in_background in WAYS.items():
            turn(in_background, measured[name])
    return report(measured, size, args)


def report(measured: dict[str, Times], size: int, args: argparse.Namespace) -> str:
    lines = [f"26 M parameters, {size / 1e9:.2f} GB in a checkpoint, {args.steps} updates; medians of {args.repeats}"]
    base = statistics.median(measured["no save"].whole[1:])
    for name, times in measured.items():
        columns = (times.whole, times.stall, times.copy, times.update)
        whole, stall, copy, update = (statistics.median(values[1:]) for values in columns)
        lines.append(
            f"  {name:<28}{whole:7.2f} s {whole / base:5.2f} x   the run waits {stall:6.3f} s, {copy:6.3f} s of them in"
            f" the step that saves; an update {update:6.3f} s"
        )
    return "\n".join(lines)
