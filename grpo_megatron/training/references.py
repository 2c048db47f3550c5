"""References: the frozen model of the KL term, or the model that a run samples from, and its renewal.

It starts as `ref.path`, or as the policy after the warm-up. Iterative GRPO (DeepSeekMath, arXiv:2402.03300, algorithm 1)
replaces it with the current policy every `algorithm.iteration_steps` steps, and keeps a copy in
`output_dir/iterations/step_000040/`, so that a run resumed within an iteration has the same reference. A policy with LoRA
that starts from the reference's weights shares one model with it: its base, or the adapters of an earlier time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from grpo_megatron.algo.losses import reads_reference
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.device import Device
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.policy import AdapterReference, Policy, Reference
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.storage.files import remove_folder
from grpo_megatron.storage.run_files import on_disk, steps_of
from grpo_megatron.training.stopping import Cadence
from grpo_megatron.types import Batch

WARMUP_FOLDER = "warmup"  # in the output folder: the model after the warm-up, which GRPO and its reference start from


def policy_start(config: Config) -> Path:
    """Returns the model that the policy starts from: the warm-up's result, if there is one."""
    return config.trainer.output_dir / WARMUP_FOLDER if config.sft.steps else config.model.path


class References:
    """The reference of a run. Build it on every rank after the warm-up. Raises ConfigError if a resumed run lacks its copy.

    The reference of step 0 is `ref.path`, or what the policy starts from. Copies of renewed ones are in `iterations`.
    """

    def __init__(
        self,
        config: Config,
        arch: Architecture,
        mesh: Mesh,
        device: Device,
        cadence: Cadence,
        first_step: int,
        policy: Policy,
    ) -> None:
        actor, algorithm = config.actor, config.algorithm
        self.mesh, self.cadence, self.folder = mesh, cadence, config.trainer.output_dir / "iterations"
        self.is_read = reads_reference(algorithm, actor)
        copy = self._copy_for(first_step)
        path = copy or config.ref.path or policy_start(config)
        self.reference: Reference | AdapterReference
        if policy.lora is not None and (copy is not None or path == config.model.path):
            adapters = copy or (config.actor.lora.path if config.ref.path is None else None)
            stored = policy.lora.stored(adapters, arch, mesh) if adapters is not None else {}
            self.reference = AdapterReference(policy, stored)
        else:
            parts = (path, config.model.dtype, arch, actor, mesh, device)
            self.reference = Reference.load(*parts, temperature=config.rollout.temperature, exact=config.model.exact)

    def logprobs(self, batch: Batch) -> Tensor | None:
        """Returns None where nothing reads them: the run only samples from the reference. Collective."""
        return self.reference.logprobs(batch) if self.is_read else None

    def renew(self, step: int, policy: Policy, save_hf: Callable[..., None]) -> None:
        """Take the policy's weights before step `step`, and keep a copy of them. Collective."""
        if policy.lora is not None and isinstance(self.reference, Reference):
            self.reference = AdapterReference(policy, {})
        self.reference.copy_from(policy)
        save_hf(self._copy_of(step), adapters=True)
        if self.mesh.rank == 0:
            oldest_checkpoint = next(map(steps_of, on_disk(self.folder.parent)), 0)  # a run may still resume from it
            oldest_needed = self.cadence.iteration_start(oldest_checkpoint)
            for copy in self.folder.glob("step_*"):
                if int(copy.name.removeprefix("step_")) < oldest_needed:
                    remove_folder(copy)

    def _copy_for(self, first_step: int) -> Path | None:
        """Returns the copy to load when a run begins at `first_step`.

        None: it is the start's, or renewed before that step.
        """
        start = self.cadence.iteration_start(first_step)
        if start in (0, first_step):
            return None
        copy = self._copy_of(start)
        if not copy.is_dir():
            raise ConfigError(
                f"step {first_step} continues the outer iteration that began at step {copy.name.removeprefix('step_')},"
                f" and its reference {str(copy)!r} is gone; put it back, or set trainer.resume_mode=disable"
            )
        return copy

    def _copy_of(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"
