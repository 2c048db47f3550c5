"""Validation: everything that can be known to be wrong before a process group, a model or an engine exists.

Every rank runs it. Each check is a small generator of problems, in the file of its topic; all of them run, so that one
start shows every mistake. A section's own values are checked in `config/`. What is read from disk (`inputs.py`) goes
to the trainer in `Checked`, so that no file is read twice.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.checks import inputs
from grpo_megatron.checks.environment import CheckedEnvironment, check_environment, environment_problems, rehearse
from grpo_megatron.checks.inputs import read_train_prompts, read_val_prompts
from grpo_megatron.checks.layout import (
    batch_problems,
    engine_expert_problems,
    family_problems,
    length_problems,
    sampling_problems,
    stop_problems,
    world_problems,
)
from grpo_megatron.checks.machine import device_problems, in_use_problems, output_problems, package_problems
from grpo_megatron.checks.methods import (
    curation_problems,
    epoch_problems,
    method_problems,
    profile_problems,
    schedule_problems,
    sharing_problems,
    with_total_steps,
)
from grpo_megatron.checks.model_folders import MAIN, OTHERS, ModelFolders, critic_arch, has_weights
from grpo_megatron.checks.names import (
    name_problems,
    reward_name_problems,
    source_problems,
    task_problem,
    with_recognised_tasks,
)
from grpo_megatron.checks.resume import resume_problems
from grpo_megatron.checks.reward_call import RewardTrial, call_rewards, column_problems, examples_of, report_trials
from grpo_megatron.checks.scoring import critic_problems, reward_model_problems, score_head_problems
from grpo_megatron.config import Config, ConfigError, DataConfig
from grpo_megatron.config.passthrough import transformer_problems
from grpo_megatron.config.problems import Problem, ProblemList, Problems
from grpo_megatron.data.benchmarks import read_task_prompts
from grpo_megatron.data.sampler import one_of_each
from grpo_megatron.data.tokenizer import EndTokens, read_end_tokens
from grpo_megatron.data.written import OfflineGroup, SupervisedExample
from grpo_megatron.environments.environment import ChatMessage
from grpo_megatron.memory.parameters import RunModels
from grpo_megatron.memory.phases import phase_shortages
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.heads.folder import RewardFolder
from grpo_megatron.models.layers.precision import hardware_problems, precision_problems
from grpo_megatron.rollout.build import engine_problems
from grpo_megatron.types import Prompt

# -- The rows that a run reads -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunRows:
    """Empty: the config does not ask for them, or they cannot be read."""

    train_prompts: Sequence[Prompt] = ()
    offline_groups: Sequence[OfflineGroup] = ()
    val_prompts: list[Prompt] = field(default_factory=list)
    task_prompts: list[Prompt] = field(default_factory=list)  # data.val_tasks
    supervised: Sequence[SupervisedExample] = ()
    val_loss_groups: Sequence[OfflineGroup] = ()

    @classmethod
    def read(
        cls,
        config: Config,
        problems: ProblemList,
        tokenizer: Any | None,
        environment: CheckedEnvironment | None,
        end_token_ids: Sequence[int],
        *,
        is_plan: bool,
    ) -> RunRows:
        """Without a tokenizer the files are checked, and there are no prompts."""
        attempt, renderer = problems.attempt, environment.renderer if environment else None
        written = (config, tokenizer, renderer, end_token_ids)
        train = attempt("data.train_files", read_train_prompts, config, tokenizer, environment, is_plan=is_plan)
        offline = attempt("data.train_files", inputs.read_offline_groups, *written)
        val = attempt("data.val_files", read_val_prompts, config, tokenizer, environment)
        of_tasks = None
        if config.data.val_tasks:
            of_tasks = attempt("data.val_tasks", read_task_prompts, config.data, config.reward.kwargs, tokenizer)
        supervised = attempt("sft.train_files", inputs.read_supervised, *written)
        val_loss = attempt("data.val_loss_files", inputs.read_val_loss_groups, *written)
        return cls(train or [], offline or [], val or [], of_tasks or [], supervised or [], val_loss or [])

    @property
    def num_trained(self) -> int:
        """Rows of the training."""
        return len(self.train_prompts or self.offline_groups)

    @property
    def examples(self) -> list[Prompt]:
        """The prompts that rewards are tried on."""
        return [*examples_of(self.train_prompts), *self.val_prompts, *self.task_prompts]

    @property
    def first_of_each(self) -> list[Prompt]:
        """The prompts that the environment may be tried on."""
        return [*one_of_each(self.train_prompts), *self.val_prompts]


# -- The start of a run, and what is checked ---------------------------------------------------------------------------


@dataclass(frozen=True)
class RunStart:
    """`problems`: those that the caller has found. `profiled`: the steps of --profile. `device`: bytes of --gpu.

    `wrong_keys`: keys of the file that cannot be read; the config has their defaults.
    """

    problems: Sequence[Problem | str] = ()
    profiled: range | None = None
    device: float | None = None
    wrong_keys: Collection[str] = ()

    def knows(self, *keys: str) -> bool:
        """Whether all values of these keys or sections could be read, also if a wrong key is a misspelt one of them."""
        return not any(_concerns(wrong, key) for wrong in self.wrong_keys for key in keys)


def _concerns(wrong: str, key: str) -> bool:
    is_part = f"{wrong}.".startswith(f"{key}.") or f"{key}.".startswith(f"{wrong}.")
    return is_part or bool(difflib.get_close_matches(wrong, [key], cutoff=0.8))


SHORTAGE_KEYS = (  # keys and sections that the arithmetic of memory reads
    *("model", "actor", "ref", "critic", "reward_model", "reward_models", "rollout", "algorithm"),
    *("data.max_prompt_length", "data.max_response_length", "data.train_files", "data.val_files"),
    *("trainer.nnodes", "trainer.n_gpus_per_node", "trainer.device"),
)


@dataclass(frozen=True)
class Checked:
    """What validation has read, for the trainer to use. A list is empty if the config does not ask for its items."""

    arch: Architecture
    has_weights: bool  # false only in a dry run
    tokenizer: Any  # None only in a dry run for another machine
    train_prompts: Sequence[Prompt]  # made when they are read (data/sampler.py)
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

    def models(self, config: Config) -> RunModels:
        """The models of the run."""
        rewards = tuple(folder.arch for folder in self.all_reward_folders)
        critic = critic_arch(config, self.arch, self.critic_folder)
        return RunModels(self.arch, rewards, critic, has_head=self.scored_folder is None)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def validate(
    config: Config,
    world_size: int,
    *,
    dry_run: bool = False,
    elsewhere: bool = False,
    rehearsed: bool = False,
    start: RunStart | None = None,
) -> Checked:
    """Check the whole config for a world of `world_size` ranks. Raises ConfigError with every problem, one per line.

    `dry_run`: the model folder may lack weights, and the machine Megatron-Core and vLLM. `elsewhere`: the plan is for
    another machine, so the tokenizer and data files may be missing on this one. `rehearsed`: look whether another run uses
    the output folder, and run the user's code, the reward functions and the environment's reset, on a row of the data, in a
    worker process; one process of a run is enough. A check whose inputs are wrong themselves is left out.
    """
    start = start or RunStart()
    problems = ProblemList()
    problems.add(start.problems)
    config = with_recognised_tasks(config)
    data = config.data
    models = ModelFolders.read(config, problems)
    has_layout = problems.add(_layout_problems(config, world_size, models.arch)) and models.are_complete(config)
    others = (problem for arch in models.other_archs for problem in _layout_problems(config, world_size, arch))
    has_layout &= all(problem.is_of("rollout") for problem in others)  # only the policy is in the engine
    problems.add(_setting_problems(config, models.arch))
    problems.add(reward_model_problems(config, world_size, models.arch, models.rewards))
    problems.add(critic_problems(config, world_size, models.arch, models.critic))
    has_rewards = problems.add(reward_name_problems(config))
    if not dry_run:
        problems.add(_machine_problems(config, world_size))
    is_complete = has_weights(config.model.path)
    models.check_weights(config, problems, policy=is_complete or not dry_run)

    tokenizer = _read_tokenizer(config, models.arch, problems, elsewhere)
    end_tokens = None
    if tokenizer is not None:
        vocab_size = models.arch.vocab_size if models.arch else None
        end_tokens = problems.attempt("model.path", read_end_tokens, tokenizer, config.model.path, vocab_size)
    ends = end_tokens.ids if end_tokens else []
    environment = None
    if tokenizer is not None and config.rollout.multi_turn.environment is not None:
        environment = problems.attempt("rollout.multi_turn", check_environment, config, tokenizer, ends)
    rows = RunRows()
    if task_problem(config) is None and start.knows("data.task", "data.sources"):  # the task reads the rows
        config = inputs.only_present(config) if elsewhere else config
        is_launcher = world_size > 1 and "RANK" not in os.environ  # its ranks measure all prompts
        rows = RunRows.read(config, problems, tokenizer, environment, ends, is_plan=dry_run or is_launcher)

    has_rewards &= problems.add(column_problems(config, rows.examples))
    problems.add(epoch_problems(config, rows.num_trained))
    config = with_total_steps(config, rows.num_trained)
    problems.add(method_problems(config))
    if rows.num_trained or config.trainer.total_epochs is None:  # else nobody knows the number of steps
        problems.add(schedule_problems(config))
        problems.add(resume_problems(config) if not elsewhere else [])
        problems.add(profile_problems(config, start.profiled))
    calls = messages = None
    if rehearsed:
        problems.add(in_use_problems(config) if not dry_run else [])
        if has_rewards and start.knows("data.task", "data.sources", "reward"):
            calls = problems.attempt("reward.function", call_rewards, config, rows.examples)
        if environment is not None and start.knows("rollout.multi_turn"):
            messages = problems.attempt("rollout.multi_turn", rehearse, config, rows.first_of_each)
    if has_layout and start.knows(*SHORTAGE_KEYS) and (problems.problems or not dry_run):  # else the plan's verdict
        known = models.models(config)
        problems.add(phase_shortages(config, world_size, known, start.device, elsewhere=elsewhere), "actor.megatron")
    problems.raise_if_any()
    assert models.arch is not None
    if not dry_run:
        report_trials(config, calls or [])
    return Checked(
        models.arch,
        is_complete,
        tokenizer,
        rows.train_prompts,
        [*rows.val_prompts, *rows.task_prompts],
        rows.supervised,
        rows.offline_groups,
        models.rewards.get(MAIN),
        {key.removeprefix(OTHERS): folder for key, folder in models.rewards.items() if key != MAIN},
        environment,
        messages or [],
        calls or [],
        rows.val_loss_groups,
        scored_folder=models.scored,
        critic_folder=models.critic,
        end_tokens=end_tokens,
        data=data,
    )


def _layout_problems(config: Config, world_size: int, arch: Architecture | None) -> Problems:
    """What must hold of a model before its memory can be counted."""
    yield from world_problems(config, world_size, arch)
    yield from engine_expert_problems(config, arch)
    yield from _about(
        "actor.megatron.override_transformer_config",
        transformer_problems(config.actor.megatron.override_transformer_config),
    )


def _setting_problems(config: Config, arch: Architecture | None) -> Problems:
    """Keys against each other and against the model."""
    yield from family_problems(config, arch)
    yield from batch_problems(config)
    yield from sampling_problems(config)
    yield from stop_problems(config, arch)
    yield from name_problems(config)
    yield from source_problems(config) if task_problem(config) is None else ()
    yield from score_head_problems(config)
    yield from curation_problems(config)
    yield from sharing_problems(config, arch)
    yield from environment_problems(config)
    yield from output_problems(config)
    yield from _about("actor.megatron.fp8", precision_problems(config, arch))
    if config.draws:
        yield from _about("rollout.engine", engine_problems(config.rollout))
    yield from length_problems(config, arch)
    yield from inputs.missing_keys(config)


def _about(key: str, texts: Iterable[str]) -> Problems:
    """Problems of rooms that know no keys."""
    return (Problem(text, (key,)) for text in texts)


def _machine_problems(config: Config, world_size: int) -> Problems:
    """What a run needs here, and a plan does not."""
    yield from package_problems(config)
    yield from device_problems(config, world_size)
    yield from _about("actor.megatron", hardware_problems(config))


def _read_tokenizer(config: Config, arch: Architecture | None, problems: ProblemList, elsewhere: bool) -> Any:
    """None if there is none."""
    is_reported = arch is None and config.model.tokenizer_path is None  # the folder is missing
    if is_reported or (elsewhere and not inputs.has_tokenizer(config)):
        return None
    return problems.attempt("model.tokenizer_path", inputs.read_tokenizer, config, arch)


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
