"""What the ranks of tests/slurm/test_checkpoints.py run: one world for all of its tests."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any


def _damage(root: Path) -> None:
    """Flip one bit of the newest checkpoint, truncate a file of the one before, remove a file of the one before that."""
    flipped, cut, lost = (sorted((root / f"step_00000{n}/state").glob("__1_*.distcp"))[0] for n in (4, 3, 2))
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    os.truncate(cut, cut.stat().st_size - 1)
    lost.unlink()


def checkpoints(model: Path, out: Path) -> dict[str, Any]:
    from grpo_megatron.config import Config, ConfigError, OptimConfig
    from grpo_megatron.training.checkpoint import Checkpoints
    from tests.models.policy_ranks import build

    policy = build(model, 1, 1, False)
    policy.set_optimizer(OptimConfig(), 10)
    mesh, config = policy.mesh, Config.model_validate({"model": {"path": model}})
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("grpo_megatron.training.checkpoint").addHandler(handler)

    first = Checkpoints(out, mesh, keep=None)
    if mesh.rank == 0:
        for leftover in (".step_000009.partial", ".step_000009.removed"):
            (out / "checkpoints" / leftover).mkdir(parents=True)
    for step in range(1, 5):
        first.save(step, policy, config)
    result: dict[str, Any] = {
        "undamaged": Checkpoints(out, mesh, keep=None).newest(),
        "warnings at first": list(warnings),
    }
    result["leftovers"] = list((out / "checkpoints").glob(".*"))
    mesh.barrier()
    if mesh.rank == 0:
        _damage(out / "checkpoints")
    mesh.barrier()
    result["by sizes"] = Checkpoints(out, mesh, keep=None, verify="sizes").newest()
    again = Checkpoints(out, mesh, keep=1)
    result["found"] = found = again.newest()
    result["warnings"] = list(warnings)
    assert found is not None
    result["steps"] = again.load(found, policy)
    result["set aside"] = sorted(path.name for path in (out / "checkpoints").glob("*.damaged"))
    again.save(2, policy, config)  # keep=1: damaged checkpoints do not count
    result["kept"] = sorted(path.name for path in (out / "checkpoints").glob("step_??????"))
    mesh.barrier()
    if mesh.rank == 0:
        (out / "checkpoints/step_000002/manifest.json").unlink()
    mesh.barrier()
    try:
        again.newest()
    except ConfigError as error:
        result["error"] = str(error)
    return {**result, "stops": _stops(mesh, out)}


def _stops(mesh: Any, out: Path) -> dict[str, Any]:
    """Way to request a stop -> (steps done when it stopped, message). Only one rank gets the request."""
    from grpo_megatron.config import TrainerConfig
    from grpo_megatron.training import stopping

    def run(config: TrainerConfig, request: Any = lambda: None) -> tuple[int, str]:
        watch = stopping.Stopping(config, mesh)
        for step in range(1, 20):
            if step == 3:
                request()
            time.sleep(0.02)
            try:
                watch.after(step, lambda done: out / f"checkpoints/step_{done}")
            except stopping.Stopped as stopped:
                return step, str(stopped)
        return 0, "never"

    stopping.listen()
    base = {"output_dir": out}
    stops = {"nothing": run(TrainerConfig(**base))}
    stops["time"] = run(TrainerConfig(**base, stop_at=time.time() + 3600 * (mesh.rank == 1)))
    file = out / "stop"
    stops["file"] = run(TrainerConfig(**base, stop_file=file), lambda: mesh.rank == 0 and file.touch())
    mesh.barrier()
    stops["signal"] = run(TrainerConfig(**base), lambda: mesh.rank == 1 and os.kill(os.getpid(), signal.SIGUSR1))
    return stops
