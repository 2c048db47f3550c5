"""Validation: everything that can be known to be wrong before a process group, a model or an engine exists.

Every rank runs it. Each check is a small generator of problems, in the file of its topic; all of them run, so that one
start shows every mistake. A section's own values are checked in `config/`. What is read from disk (`inputs.py`) goes
to the trainer in `Checked`, so that no file is read twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.algo.needs import reads_reference
from grpo_megatron.checks import inputs
from grpo_megatron.checks.bounds import batch_problems, length_problems, sampling_problems, stop_problems
from grpo_megatron.checks.environment import CheckedEnvironment, check_environment, environment_problems, rehearse
from grpo_megatron.checks.experts import expert_problems
from grpo_megatron.checks.layout import layout_problems
from grpo_megatron.checks.learning_rate import schedule_problems
from grpo_megatron.checks.machine import device_problems, output_problems, package_problems
from grpo_megatron.checks.memory import parameters_from_table
from grpo_megatron.checks.methods import method_problems
from grpo_megatron.checks.names import name_problems, task_problem
from grpo_megatron.checks.passes import sharing_problems
from grpo_megatron.checks.passthrough import transformer_problems
from grpo_megatron.checks.phases import memory_phases, phase_problems
from grpo_megatron.checks.problems import ProblemList, Problems
from grpo_megatron.checks.resume import resume_problems
from grpo_megatron.checks.reward_call import reward_call_problems
from grpo_megatron.checks.reward_model import check_reward_folder, read_reward_model, reward_model_problems
from grpo_megatron.config import Config
from grpo_megatron.data.prompts import OfflineGroup, SupervisedExample
from grpo_megatron.device import device_bytes
from grpo_megatron.environments.environment import ChatMessage
from grpo_megatron.evaluation.validation import read_task_prompts
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.precision import hardware_problems, precision_problems
from grpo_megatron.models.reward_folder import RewardFolder
from grpo_megatron.rollout.build import engine_problems
from grpo_megatron.types import Prompt


@dataclass(frozen=True)
class Checked:
    """What validation has read, for the trainer to use. A list is empty if the config does not ask for its items."""

    arch: Architecture
    has_weights: bool  # false only in a dry run
    tokenizer: Any  # None only in a dry run for another machine
    train_prompts: list[Prompt]
    val_prompts: list[Prompt]
    supervised_rows: list[SupervisedExample]
    offline_groups: list[OfflineGroup] = field(default_factory=list)  # algorithm.source=file: instead of train_prompts
    reward_folder: RewardFolder | None = None  # reward_model.path
    environment: CheckedEnvironment | None = None  # rollout.multi_turn.environment
    first_messages: list[ChatMessage] = field(default_factory=list)  # of that environment, if it was to be called


def validate(
    config: Config, world_size: int, *, dry_run: bool = False, elsewhere: bool = False, rehearsed: bool = False
) -> Checked:
    """Check the whole config for a world of `world_size` ranks. Raises ConfigError with every problem, one per line.

    `dry_run`: the model folder may lack weights, and the machine Megatron-Core and vLLM. `elsewhere`: the plan is for
    another machine, so the tokenizer and data files may be missing on this one. `rehearsed`: run the user's code, the reward
    functions and the environment's reset,
    on a row of the data, in a worker process; one process of a run is enough.
    """
    problems = ProblemList()
    arch = problems.attempt(inputs.read_model, config.model.path)
    reward_folder = None
    if config.reward_model.path is not None:
        reward_folder = problems.attempt(read_reward_model, config.reward_model.path)

    problems.add(layout_problems(config, world_size, arch))
    problems.add(expert_problems(config.actor.megatron, world_size, arch, on_cpu=config.trainer.device == "cpu"))
    problems.add(batch_problems(config))
    problems.add(sampling_problems(config))
    problems.add(stop_problems(config.rollout, arch))
    problems.add(name_problems(config))
    problems.add(method_problems(config))
    problems.add(sharing_problems(config))
    problems.add(environment_problems(config))
    problems.add(schedule_problems(config))
    problems.add(output_problems(config))
    problems.add(precision_problems(config, arch))
    problems.add(reward_model_problems(config, world_size, arch, reward_folder))
    problems.add(transformer_problems(config.actor.megatron.override_transformer_config))
    problems.add(engine_problems(config.rollout))
    problems.add(length_problems(config, arch))
    problems.add(inputs.missing_keys(config))
    if not elsewhere:
        problems.add(resume_problems(config))
    if not dry_run:
        problems.add(package_problems(config.rollout))
        problems.add(device_problems(config, world_size))
        problems.add(hardware_problems(config))

    has_weights = inputs.has_weights(config.model.path)
    if arch is not None:
        if has_weights or not dry_run:
            problems.attempt(inputs.check_weights, config.model.path, arch)
        if reads_reference(config.algorithm, config.actor) and config.ref.path is not None:
            problems.attempt(inputs.check_reference, config, arch)
    if reward_folder is not None:
        problems.attempt(check_reward_folder, reward_folder)

    tokenizer = None
    folder_is_missing = arch is None and config.model.tokenizer_path is None  # reported above
    if not folder_is_missing and (inputs.has_tokenizer(config) or not elsewhere):
        tokenizer = problems.attempt(inputs.read_tokenizer, config, arch)
    environment = None
    if tokenizer is not None and config.rollout.multi_turn.environment is not None:
        environment = problems.attempt(check_environment, config, tokenizer)
    renderer = environment.renderer if environment else None
    train_prompts = offline_groups = val_prompts = task_prompts = supervised_rows = None
    if task_problem(config) is None:  # the task reads the rows
        config = inputs.only_present(config) if elsewhere else config
        train_prompts = problems.attempt(inputs.read_train_prompts, config, tokenizer, environment)
        offline_groups = problems.attempt(inputs.read_offline_groups, config, tokenizer, renderer)
        val_prompts = problems.attempt(inputs.read_val_prompts, config, tokenizer, environment)
        if config.data.val_tasks:
            task_prompts = problems.attempt(read_task_prompts, config.data, config.reward.kwargs, tokenizer)
        supervised_rows = problems.attempt(inputs.read_supervised, config, tokenizer, renderer)

    problems.raise_if_any()
    assert arch is not None
    messages = None
    if rehearsed:
        prompts = [*(train_prompts or []), *(val_prompts or []), *(task_prompts or [])]
        problems.add(reward_call_problems(config.reward, prompts))
        messages = problems.attempt(rehearse, config, [*(train_prompts or []), *(val_prompts or [])])
        problems.raise_if_any()
    if not dry_run:
        problems.add(phase_shortages(config, world_size, arch, reward_folder))
        problems.raise_if_any()
    return Checked(
        arch,
        has_weights,
        tokenizer,
        train_prompts or [],
        [*(val_prompts or []), *(task_prompts or [])],
        supervised_rows or [],
        offline_groups or [],
        reward_folder,
        environment,
        messages or [],
    )


def phase_shortages(
    config: Config, world_size: int, arch: Architecture, reward_folder: RewardFolder | None
) -> Problems:
    """The phases of a valid config that cannot fit this rank's GPU. None on the CPU. Not run on a GPU yet."""
    device = device_bytes(config.trainer.device)
    if device is None:
        return
    megatron, reward_model = config.actor.megatron, None
    if reward_folder is not None:
        reward_model = parameters_from_table(reward_folder.arch, megatron, has_output_head=False)
    phases = memory_phases(config, arch, world_size, parameters_from_table(arch, megatron), reward_model)
    yield from phase_problems(config, arch, phases, device)
