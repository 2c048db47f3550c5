"""The phases of a run that its device certainly cannot hold, as problems of the config."""

from __future__ import annotations

from grpo_megatron.checks.model_folders import ModelFolders, critic_arch
from grpo_megatron.config import Config
from grpo_megatron.config.problems import Messages, check
from grpo_megatron.device import device_bytes
from grpo_megatron.memory.parameters import parameters_from_table
from grpo_megatron.memory.phases import memory_phases, phase_problems

SHORTAGE_KEYS = (  # keys and sections that the arithmetic reads
    *("model", "actor", "ref", "critic", "reward_model", "reward_models", "rollout", "algorithm"),
    *("data.max_prompt_length", "data.max_response_length", "data.train_files", "data.val_files"),
    *("trainer.nnodes", "trainer.n_gpus_per_node", "trainer.device"),
)


@check
def phase_shortages(
    config: Config, world_size: int, models: ModelFolders, device: float | None = None, *, elsewhere: bool = False
) -> Messages:
    """The phases of a valid layout that cannot fit a device of `device` bytes. None on the CPU.

    `device` None: this rank's GPU; nothing is known of it if the run is for another machine. Not run on a GPU yet.
    """
    if device is None and not elsewhere:
        device = device_bytes(config.trainer.device)
    if device is None or config.trainer.device == "cpu":
        return
    assert models.arch is not None
    megatron = config.actor.megatron
    rewards = [
        parameters_from_table(folder.arch, megatron, has_output_head=False) for folder in models.rewards.values()
    ]
    own = critic_arch(config, models.arch, models.critic)
    critic = None if own is None else parameters_from_table(own, megatron, has_output_head=False)
    policy = parameters_from_table(models.arch, megatron, has_output_head=models.scored is None)
    phases = memory_phases(config, models.arch, world_size, policy, rewards, critic)
    yield from phase_problems(config, models.arch, phases, device)
