"""Validation: everything that can be known to be wrong before a process group, a model or an engine exists.

Every rank runs it. Each check is a small generator of problems, in the file of its topic; all of them run, so that one
start shows every mistake. A section's own values are checked in `config/`. What is read from disk (`inputs.py`) goes
to the trainer in `Checked`, so that no file is read twice.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.algo.needs import reads_reference
from grpo_megatron.checks import inputs
from grpo_megatron.checks.bounds import batch_problems, length_problems, sampling_problems, stop_problems
from grpo_megatron.checks.critic import critic_arch, critic_problems, read_critic
from grpo_megatron.checks.curation import curation_problems
from grpo_megatron.checks.environment import CheckedEnvironment, check_environment, environment_problems, rehearse
from grpo_megatron.checks.epochs import epoch_problems, with_total_steps
from grpo_megatron.checks.experts import engine_expert_problems, expert_problems
from grpo_megatron.checks.families import family_problems
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
from grpo_megatron.checks.prompt_inputs import read_train_prompts, read_val_prompts
from grpo_megatron.checks.resume import resume_problems
from grpo_megatron.checks.reward_call import RewardTrial, call_rewards, examples_of, report_trials
from grpo_megatron.checks.reward_columns import column_problems
from grpo_megatron.checks.reward_model import (
    MAIN,
    OTHERS,
    check_reward_folder,
    read_reward_model,
    reward_model_problems,
    scoring_models,
)
from grpo_megatron.checks.score_head import read_scored_model, score_head_problems
from grpo_megatron.checks.scored_rows import trains_scores
from grpo_megatron.checks.sources import source_problems, with_recognised_tasks
from grpo_megatron.config import Config, ConfigError, DataConfig
from grpo_megatron.data.end_tokens import EndTokens, read_end_tokens
from grpo_megatron.data.item_table import one_of_each
from grpo_megatron.data.written_groups import OfflineGroup, SupervisedExample
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
    train_prompts: Sequence[Prompt]  # made when they are read (data/item_table.py)
    val_prompts: list[Prompt]
    supervised_rows: Sequence[SupervisedExample]
    offline_groups: Sequence[OfflineGroup] = field(
        default_factory=list
    )  # algorithm.source=file: instead of train_prompts
    reward_folder: RewardFolder | None = None  # reward_model.path
    reward_folders: dict[str, RewardFolder] = field(default_factory=dict)  # reward_models
    scored_folder: RewardFolder | None = field(default=None, kw_only=True)  # model.path, where a scalar head is trained
    environment: CheckedEnvironment | None = None  # rollout.multi_turn.environment
    first_messages: list[ChatMessage] = field(default_factory=list)  # of that environment, if it was to be called
    reward_calls: list[RewardTrial] = field(default_factory=list)  # on real rows, if the rewards were to be called
    val_loss_groups: Sequence[OfflineGroup] = field(default_factory=list)  # data.val_loss_files
    critic_folder: RewardFolder | None = None  # critic.path
    end_tokens: EndTokens | None = None  # None only where `tokenizer` is
    data: DataConfig | None = field(default=None, kw_only=True)  # with the tasks that were recognised

    def resolved(self, config: Config) -> Config:
        """The config with the training steps that `trainer.total_epochs` means, and the tasks that were recognised."""
        if self.data is not None:
            config = config.model_copy(update={"data": self.data})
        return with_total_steps(config, len(self.train_prompts or self.offline_groups))

    @property
    def all_reward_folders(self) -> list[RewardFolder]:
        """The one of reward_model.path first."""
        return [*filter(None, [self.reward_folder]), *self.reward_folders.values()]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


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
    config = with_recognised_tasks(config)
    data = config.data
    scored_folder = None
    if trains_scores(config):
        scored_folder = problems.attempt(read_scored_model, config)
        arch = scored_folder.arch if scored_folder is not None else None
    else:
        arch = problems.attempt(inputs.read_model, config.model.path, "model.path", config.model.family)
    reward_folders = {}
    for key, model in scoring_models(config).items():
        if (folder := problems.attempt(read_reward_model, model, key)) is not None:
            reward_folders[key] = folder
    critic_folder = None
    if config.critic.path is not None:
        critic_folder = problems.attempt(read_critic, config.critic.path)

    problems.add(layout_problems(config, world_size, arch))
    problems.add(family_problems(config, arch))
    on_cpu = config.trainer.device == "cpu"
    problems.add(expert_problems(config.actor.megatron, world_size, arch, on_cpu=on_cpu))
    problems.add(engine_expert_problems(config.rollout, arch, on_cpu=on_cpu))
    problems.add(batch_problems(config))
    problems.add(sampling_problems(config))
    problems.add(stop_problems(config.rollout, arch))
    problems.add(name_problems(config))
    problems.add(source_problems(config) if task_problem(config) is None else [])
    problems.add(score_head_problems(config))
    problems.add(curation_problems(config))
    problems.add(sharing_problems(config, arch))
    problems.add(environment_problems(config))
    problems.add(output_problems(config))
    problems.add(precision_problems(config, arch))
    problems.add(reward_model_problems(config, world_size, arch, reward_folders))
    problems.add(critic_problems(config, world_size, arch, critic_folder))
    problems.add(transformer_problems(config.actor.megatron.override_transformer_config))
    if config.draws:
        problems.add(engine_problems(config.rollout))
    problems.add(length_problems(config, arch))
    problems.add(inputs.missing_keys(config))
    if not dry_run:
        problems.add(package_problems(config))
        problems.add(device_problems(config, world_size))
        problems.add(hardware_problems(config))

    has_weights = inputs.has_weights(config.model.path)
    if arch is not None:
        if (has_weights or not dry_run) and scored_folder is not None:
            problems.attempt(check_reward_folder, scored_folder, "model")
        elif has_weights or not dry_run:
            problems.attempt(inputs.check_weights, config.model.path, arch)
        if reads_reference(config.algorithm, config.actor) and config.ref.path is not None:
            problems.attempt(inputs.check_reference, config, arch)
    for key, folder in reward_folders.items():
        problems.attempt(check_reward_folder, folder, key)
    if critic_folder is not None:
        problems.attempt(check_reward_folder, critic_folder, "critic")

    tokenizer = None
    folder_is_missing = arch is None and config.model.tokenizer_path is None  # reported above
    if not folder_is_missing and (inputs.has_tokenizer(config) or not elsewhere):
        tokenizer = problems.attempt(inputs.read_tokenizer, config, arch)
    end_tokens = None
    if tokenizer is not None:
        end_tokens = problems.attempt(read_end_tokens, tokenizer, config.model.path, arch.vocab_size if arch else None)
    ends = end_tokens.ids if end_tokens else []
    environment = None
    if tokenizer is not None and config.rollout.multi_turn.environment is not None:
        environment = problems.attempt(check_environment, config, tokenizer, ends)
    renderer = environment.renderer if environment else None
    train_prompts = offline_groups = val_prompts = task_prompts = supervised_rows = val_loss_groups = None
    if task_problem(config) is None:  # the task reads the rows
        config = inputs.only_present(config) if elsewhere else config
        train_prompts = problems.attempt(read_train_prompts, config, tokenizer, environment, is_plan=dry_run)
        offline_groups = problems.attempt(inputs.read_offline_groups, config, tokenizer, renderer, ends)
        val_prompts = problems.attempt(read_val_prompts, config, tokenizer, environment)
        if config.data.val_tasks:
            task_prompts = problems.attempt(read_task_prompts, config.data, config.reward.kwargs, tokenizer)
        supervised_rows = problems.attempt(inputs.read_supervised, config, tokenizer, renderer, ends)
        val_loss_groups = problems.attempt(inputs.read_val_loss_groups, config, tokenizer, renderer, ends)

    prompts = [*examples_of(train_prompts or []), *(val_prompts or []), *(task_prompts or [])]
    problems.add(column_problems(config, prompts))
    num_rows = len(train_prompts or offline_groups or [])
    problems.add(epoch_problems(config, num_rows))
    config = with_total_steps(config, num_rows)
    problems.add(method_problems(config))
    if num_rows or config.trainer.total_epochs is None:  # else nobody knows the number of steps
        problems.add(schedule_problems(config))
        problems.add(resume_problems(config) if not elsewhere else [])
    problems.raise_if_any()
    assert arch is not None
    messages = calls = None
    if rehearsed:
        calls = problems.attempt(call_rewards, config, prompts)
        messages = problems.attempt(rehearse, config, [*one_of_each(train_prompts or []), *(val_prompts or [])])
        problems.raise_if_any()
    if not dry_run:
        report_trials(config, calls or [])
        problems.add(phase_shortages(config, world_size, arch, reward_folders, critic_folder))
        problems.raise_if_any()
    return Checked(
        arch,
        has_weights,
        tokenizer,
        train_prompts or [],
        [*(val_prompts or []), *(task_prompts or [])],
        supervised_rows or [],
        offline_groups or [],
        reward_folders.pop(MAIN, None),
        {key.removeprefix(OTHERS): folder for key, folder in reward_folders.items()},
        environment,
        messages or [],
        calls or [],
        val_loss_groups or [],
        scored_folder=scored_folder,
        critic_folder=critic_folder,
        end_tokens=end_tokens,
        data=data,
    )


def check_alone(config: Config) -> Checked:
    """`validate` for a `Trainer` that was built by hand: in a notebook, or on a rank of torchrun. Raises ConfigError."""
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed\.")  # the user cannot act on them
    world_size = int(os.environ.get("WORLD_SIZE", "1"))  # 1 too after an earlier Trainer of this process
    if world_size > 1:
        return validate(config, world_size, rehearsed=os.environ["RANK"] == "0")
    nodes, each = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if nodes * each > 1:
        raise ConfigError(
            f"trainer.nnodes={nodes} x trainer.n_gpus_per_node={each} = {nodes * each} ranks, and a Trainer is one of them; set"
            " both to 1, or start the config with: grpo-megatron train CONFIG"
        )
    return validate(config, 1, rehearsed=True)


def phase_shortages(
    config: Config,
    world_size: int,
    arch: Architecture,
    reward_folders: Mapping[str, RewardFolder],
    critic_folder: RewardFolder | None = None,
) -> Problems:
    """The phases of a valid config that cannot fit this rank's GPU. None on the CPU. Not run on a GPU yet."""
    device = device_bytes(config.trainer.device)
    if device is None:
        return
    megatron = config.actor.megatron
    reward_models = [
        parameters_from_table(folder.arch, megatron, has_output_head=False) for folder in reward_folders.values()
    ]
    own = critic_arch(config, arch, critic_folder)
    critic = None if own is None else parameters_from_table(own, megatron, has_output_head=False)
    phases = memory_phases(config, arch, world_size, parameters_from_table(arch, megatron), reward_models, critic)
    yield from phase_problems(config, arch, phases, device)
