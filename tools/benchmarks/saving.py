"""`tools.benchmarks saving`: checkpoints while training goes on (`trainer.async_save`), beside those that the run waits for.

One rank on the CPU trains a random model of 26 M parameters, and saves weights and optimizer state before the first of a few
updates. The ways take turns: no save, a save that is awaited, and one that a thread writes. The time ends when the last
update is done and the checkpoint is complete.

With `--ranks 1,2,4`: what each of so many data-parallel ranks needs on its host besides the model and its optimizer, in a save
and in a load, and what it writes. Beside our shards (models/weights/local_shards.py): the same checkpoint as Megatron gathers it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from tools.benchmarks import passes
from tools.benchmarks.workload import machine

SHAPE: dict[str, Any] = {**passes.WORKLOADS["26 M"], "prompts": 1, "response_length": 32}
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
    parser.add_argument("--ranks", help="measure host bytes of so many ranks instead, as 1,2,4", metavar="N,...")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")


def saving(args: argparse.Namespace) -> int:
    if args.ranks:
        return of_ranks(args)
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

    passes.write_model(root, SHAPE)
    actor = ActorConfig.model_validate({"use_kl_loss": False, "optim": {"lr": 1e-6}})
    policy = Policy.load(root, "float32", read_architecture(root), actor, mesh, Device("cpu"))
    policy.set_optimizer(actor.optim, 1)
    batch, loss = passes.make_batch(*passes.draw(SHAPE), actor), build_loss(actor)
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


# -- Host bytes of data-parallel ranks ---------------------------------------------------------------------------------

PIECES, GATHERED = "pieces", "as Megatron gathers"


def of_ranks(args: argparse.Namespace) -> int:
    os.environ["PYTHONWARNINGS"] = "ignore"  # of the libraries, in every rank
    context = multiprocessing.get_context("spawn")
    print(machine())
    print(
        f"{'ranks':>5} {'way':<20}{'save: most on a rank':>22}{'load':>9}{'written, most':>15}{'least':>9}{'wait':>9}  (MB, s)"
    )
    for count in map(int, args.ranks.split(",")):
        with (
            tempfile.TemporaryDirectory(dir=args.folder, prefix="benchmark-saving-") as folder,
            socket.socket() as probe,
        ):
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            probe.close()
            passes.write_model(Path(folder), SHAPE)
            with context.Pool(count) as pool:
                tasks = [pool.apply_async(one_rank, (rank, count, port, folder, args.repeats)) for rank in range(count)]
                found = [task.get() for task in tasks]
        for way in (PIECES, GATHERED):
            save, load, written, wait = zip(*(rank[way] for rank in found), strict=True)
            print(
                f"{count:>5} {way:<20}{max(save) / 1e6:>22.0f}{max(load) / 1e6:>9.0f}{max(written) / 1e6:>15.0f}"
                f"{min(written) / 1e6:>9.0f}{max(wait):>9.2f}",
                flush=True,
            )
    return 0


def one_rank(rank: int, count: int, port: int, folder: str, repeats: int) -> dict[str, tuple[float, ...]]:
    """Per way: most bytes besides what was there before a save, before a load; bytes written; median seconds of a save."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    import torch

    from grpo_megatron.config import ActorConfig, Config
    from grpo_megatron.device import Device
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.policy import Policy
    from grpo_megatron.models.weights import sharded_state
    from grpo_megatron.parallel.mesh import build_mesh, destroy_mesh
    from grpo_megatron.training.checkpoint import Checkpoints

    torch.set_num_threads(1)
    root = Path(folder)
    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)
    megatron = {"use_distributed_optimizer": True}
    actor = ActorConfig.model_validate({"use_kl_loss": False, "optim": {"lr": 1e-6}, "megatron": megatron})
    policy = Policy.load(root, "float32", read_architecture(root), actor, mesh, Device("cpu"))
    policy.set_optimizer(actor.optim, 1)
    config = Config.model_validate({"model": {"path": root}, "data": {"train_files": ["train.jsonl"]}})
    whole = {"optimizer_as_local_shards": contextlib.nullcontext, "divide_among_replicas": lambda model, mesh: model}
    found = {}
    for way in (PIECES, GATHERED):
        with mock.patch.multiple(sharded_state, **whole) if way == GATHERED else contextlib.nullcontext():
            saves, waits = [], []
            for number in range(repeats + 1):  # the first turn also makes what is kept
                output = root / f"{way} {number}"
                checkpoints = Checkpoints(output, mesh, 1)
                begin = time.perf_counter()
                saves.append(peak(lambda checkpoints=checkpoints: checkpoints.save(1, policy, config)))
                waits.append(time.perf_counter() - begin)
                mesh.barrier()
            written = sum(file.stat().st_size for file in output.rglob(f"__{rank}_*.distcp"))
            newest = checkpoints.newest()
            load = peak(lambda checkpoints=checkpoints, newest=newest: checkpoints.load(newest, policy))
        found[way] = max(saves[1:]), load, written, statistics.median(waits[1:])
    destroy_mesh()
    return found


def peak(action: Any) -> int:
    """Bytes that the process had at most during `action`, besides those before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = status("VmRSS")
    action()
    return status("VmHWM") - before


def status(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
