"""Checkpoints: one directory a step, complete or absent.

    output_dir/checkpoints/step_000020/
        state/          Megatron-Core distributed checkpoint: policy, optimizer, random state of every rank
        trainer.json    step, schedule, config, world; written last

Everything is written to a hidden sibling that is renamed when every rank is done, so a directory with the final name is
complete. The data position is the step: samplers are pure functions of it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from grpo_megatron.config import Config, ConfigError
from grpo_megatron.models import state as model_state
from grpo_megatron.models.policy import Policy
from grpo_megatron.parallel.mesh import Mesh

MANIFEST = "trainer.json"


class Checkpoints:
    """The checkpoints of one output folder. `keep`: how many of the newest to keep, None for all."""

    def __init__(self, output_dir: Path, mesh: Mesh, keep: int | None) -> None:
        self.root, self.mesh, self.keep = output_dir / "checkpoints", mesh, keep

    def newest(self) -> Path | None:
        """The newest complete checkpoint. Collective: rank 0 looks, so that all ranks see the same."""
        import torch.distributed as dist

        found: list[Any] = [self._complete()[-1] if self.mesh.rank == 0 and self._complete() else None]
        dist.broadcast_object_list(found, src=0, group=self.mesh.control)
        return found[0]  # type: ignore[no-any-return]

    def _complete(self) -> list[Path]:
        return sorted(p for p in self.root.glob("step_*") if (p / MANIFEST).exists())

    def save(self, step: int, policy: Policy, config: Config) -> Path:
        """Collective: write the state after `step` steps. Raises RankError on every rank when the disk refuses."""
        final = self.root / f"step_{step:06d}"
        partial = self.root / f".step_{step:06d}.partial"
        self._on_first_rank(lambda: self._start(partial))
        problem = None
        try:
            model_state.save(policy, partial / "state")
        except OSError as error:
            problem = f"cannot write checkpoint {partial}: {error}"
        self.mesh.agree(problem)
        manifest = {
            "step": step,
            "policy": policy.state(),
            "world_size": self.mesh.world_size,
            "config": config.model_dump(mode="json"),
        }
        self._on_first_rank(lambda: self._publish(partial, final, manifest))
        return final

    def load(self, path: Path, policy: Policy) -> int:
        """Collective: restore the policy. Returns the number of steps it has done."""
        manifest = json.loads((path / MANIFEST).read_text())
        same_world = manifest["world_size"] == self.mesh.world_size
        model_state.load(policy, path / "state", same_world=same_world)
        policy.load_state(manifest["policy"])
        return int(manifest["step"])

    def _start(self, partial: Path) -> None:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "state").mkdir(parents=True)

    def _publish(self, partial: Path, final: Path, manifest: dict[str, Any]) -> None:
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        if self.keep is not None:
            for old in self._complete()[: -self.keep]:
                shutil.rmtree(old)

    def _on_first_rank(self, action: Any) -> None:
        problem = None
        if self.mesh.rank == 0:
            try:
                action()
            except OSError as error:
                problem = f"checkpoint in {self.root}: {error}"
        self.mesh.agree(problem)


def check_same_model(path: Path, config: Config) -> None:
    """Raise ConfigError when the checkpoint was written for another model folder."""
    theirs = json.loads((path / MANIFEST).read_text())["config"]["model"]["path"]
    if Path(theirs) != config.model.path:
        raise ConfigError(
            f"{path} was written by a run with model.path={theirs}, this one has model.path={config.model.path}; "
            "set another trainer.output_dir or trainer.resume_mode=disable"
        )
