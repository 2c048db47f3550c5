"""References: the frozen copy of the policy that a run measures against or draws from, and its renewal.

It starts as `ref.path`, or the model that the run starts from (after the warm-up). Iterative GRPO (DeepSeekMath,
arXiv 2402.03300, algorithm 1) makes it the present policy every `algorithm.iteration_steps` steps, and keeps it in
`output_dir/iterations/step_000040/` as a Hugging Face folder, so that a run that stops within an iteration goes on with
the same one. Folders that no checkpoint needs any more are removed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from grpo_megatron.algo.needs import needs_reference, reads_reference
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.device import Device
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.reference import NoReference, Reference
from grpo_megatron.parallel.mesh import Mesh


class References:
    """Build on every rank at the same point. `start` is the model that step 0 starts from."""

    def __init__(
        self, config: Config, arch: Architecture, mesh: Mesh, device: Device, *, start: Path, first_step: int
    ) -> None:
        self.every = config.algorithm.iteration_steps
        self.folder, self.mesh = config.trainer.output_dir / "iterations", mesh
        self.initial: Reference | NoReference = NoReference()
        if needs_reference(config.algorithm, config.actor):
            self.initial = Reference(
                self._path_at(first_step) or config.ref.path or start,
                config.model,
                config.actor,
                arch,
                mesh,
                device,
                temperature=config.rollout.temperature,
            )
        # a reference that is only drawn from is not scored
        self.scored = self.initial if reads_reference(config.algorithm, config.actor) else NoReference()

    def is_due(self, step: int) -> bool:
        """Whether an outer iteration begins before step `step`, for a reference that there is."""
        if self.every is None or isinstance(self.initial, NoReference):
            return False
        return step > 0 and step % self.every == 0

    def renew(self, step: int, policy: Policy, save_hf: Callable[[Path], None], oldest_checkpoint: int) -> None:
        """Become `policy` and keep a copy, when it is due. Collective.

        `oldest_checkpoint` is the number of steps of the oldest one that a run may still resume from.
        """
        assert self.every is not None
        self.initial.copy_from(policy)
        save_hf(self._folder(step))
        if self.mesh.rank == 0:
            needed = oldest_checkpoint // self.every * self.every
            for old in self.folder.glob("step_*"):
                if int(old.name.removeprefix("step_")) < needed:
                    shutil.rmtree(old, ignore_errors=True)

    def _path_at(self, first_step: int) -> Path | None:
        """The copy that step `first_step` needs, None for the run's start or where it is made anew. Raises ConfigError."""
        if self.every is None or first_step < self.every or first_step % self.every == 0:
            return None
        path = self._folder(first_step // self.every * self.every)
        if not path.is_dir():
            raise ConfigError(
                f"step {first_step} continues the outer iteration that began at step {path.name.removeprefix('step_')},"
                f" and its reference {str(path)!r} is gone; put it back, or set trainer.resume_mode=disable"
            )
        return path

    def _folder(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"
