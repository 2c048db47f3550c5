"""What the ranks of the heartbeat tests run in worlds of their own."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import torch

TIMEOUT_S = 1.0


def healthy(folder: Path) -> list[str]:
    """Rank 1 does slowly what a healthy rank may do, each for longer than the time of a stall; rank 0 waits for it."""
    from grpo_megatron.device import Device
    from grpo_megatron.parallel.heartbeat import Heartbeat
    from grpo_megatron.parallel.mesh import build_mesh

    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)

    def compute() -> None:
        end = time.monotonic() + 3 * TIMEOUT_S
        while time.monotonic() < end:
            torch.ones(64, 64) @ torch.ones(64, 64)

    def wait_for_a_process() -> None:
        subprocess.run(["sleep", str(3 * TIMEOUT_S)], check=True)

    def wait_for_the_disk() -> None:
        time.sleep(3 * TIMEOUT_S)

    done = []
    with Heartbeat(folder, mesh, TIMEOUT_S) as heartbeat:
        for name, work in (("gen", compute), ("reward", wait_for_a_process)):
            with heartbeat.phase("step"), heartbeat.phase(name):
                if mesh.rank == 1:
                    work()
                mesh.barrier()
            done.append(name)
        with heartbeat.phase("save_checkpoint"):
            if mesh.rank == 1:
                wait_for_the_disk()
            mesh.barrier()
        done.append("save_checkpoint")
    return done


def late(folder: Path) -> Any:
    """Nothing is watched, and rank 1 comes too late for a collective: the error that rank 0 gets."""
    from grpo_megatron.device import Device
    from grpo_megatron.parallel.heartbeat import Heartbeat
    from grpo_megatron.parallel.mesh import build_mesh
    from grpo_megatron.parallel.stalls import StalledRank

    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1, timeout_s=4.0)
    over = folder / "over"
    with Heartbeat(folder, mesh, None) as heartbeat:
        heartbeat.step = 5
        try:
            with heartbeat.naming_timeouts(), heartbeat.phase("step"):
                with heartbeat.phase("reward"):
                    while mesh.rank == 1 and not over.exists():
                        time.sleep(0.1)
                mesh.agree(None)
        except StalledRank as error:
            over.touch()
            return str(error), type(error.__cause__).__name__
        except RuntimeError as error:  # rank 1: the other one is gone
            return type(error).__name__
    return None
