"""Validation: everything that can be known to be wrong before a process group, a model or an engine exists.

Every rank runs it. Each check is a small generator of problems, in the file of its topic; all of them run, so that one
start shows every mistake. A section's own values are checked in `config/`. What is read from disk (`inputs.py`) goes
to the trainer in `Checked`, so that no file is read twice.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.checks.components import (
    CheckedEnvironment,
    check_environment,
    environment_problems,
    name_problems,
    reward_name_problems,
    source_problems,
    task_problem,
    with_recognised_tasks,
)
from grpo_megatron.checks.digests import input_problems
from grpo_megatron.checks.inputs import (
    RunRows,
    has_tokenizer,
    missing_keys,
    only_present,
    read_tokenizer,
)
from grpo_megatron.checks.layout import (
    batch_problems,
    engine_expert_problems,
    family_problems,
    length_problems,
    lora_problems,
    placement_problems,
    route_problems,
)
from grpo_megatron.checks.machine import device_problems, in_use_problems, output_problems, package_problems
from grpo_megatron.checks.methods import (
    epoch_problems,
    method_problems,
    profile_problems,
    rollout_file_problems,
    schedule_problems,
    sharing_problems,
    suspicions,
    with_total_steps,
)
from grpo_megatron.checks.models import (
    CRITIC,
    MAIN,
    OTHERS,
    ModelFolders,
    beside_problems,
    has_weights,
    score_head_problems,
    second_layout_problems,
    vision_problems,
    with_hub_models,
)
from grpo_megatron.checks.resume import resume_problems
from grpo_megatron.checks.reward_call import RewardTrial, call_rewards, column_problems, play_episode, report_trials
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.passthrough import transformer_problems
from grpo_megatron.config.problems import Problem, ProblemList
from grpo_megatron.data.tokenizer import EndTokens, read_end_tokens
from grpo_megatron.exact.limits import exact_problems
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.heads.reward_folder import RewardFolder
from grpo_megatron.models.layers.precision import hardware_problems, precision_problems
from grpo_megatron.planning.layout import world_problems
from grpo_megatron.planning.parameters import RunModels
from grpo_megatron.planning.phases import phase_shortages
from grpo_megatron.rollout.build import engine_problems, exact_engine_problem


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


@dataclass(frozen=True, kw_only=True)
class Checked(RunRows):
    """What validation has read, for the trainer to use: rows, models, tokenizer, environment."""

    arch: Architecture
    has_weights: bool  # false only in a dry run
    models: RunModels
    reward_folder: RewardFolder | None = None  # reward_model.path
    reward_folders: dict[str, RewardFolder] = field(default_factory=dict)  # reward_models
    critic_folder: RewardFolder | None = None  # critic.path
    scored_folder: RewardFolder | None = None  # model.path, where a scalar head is trained
    tokenizer: Any  # None only in a dry run for another machine
    end_tokens: EndTokens | None = None  # None only where `tokenizer` is
    environment: CheckedEnvironment | None = None  # rollout.multi_turn.environment
    episode: list[tuple[str, str]]  # (who, text) of one on a real row, if that environment was to be called
    reward_calls: list[RewardTrial]  # on real rows, if the rewards were to be called
    config: Config  # with the training steps, the tasks that were recognised, and the folders of the Hub's models

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
    start, problems = start or RunStart(), ProblemList()
    problems.add(start.problems)
    config = with_hub_models(with_recognised_tasks(config), weights=not dry_run)
    megatron = config.actor.megatron
    folders = ModelFolders.read(config, problems)
    arch = folders.arch

    has_layout = problems.add(placement_problems(config, world_size))
    training = world_size - (config.num_rollout_ranks if has_layout else 0)  # ranks
    has_layout = has_layout and problems.add(world_problems(config, training, arch)) and folders.are_complete
    has_layout &= problems.add(engine_expert_problems(config, arch))
    problems.add(route_problems(config, arch), "actor.moe.route_replay")
    override = transformer_problems(megatron.override_transformer_config)
    has_layout &= problems.add(override, "actor.megatron.override_transformer_config")
    for folder in folders.beside.values():
        has_layout &= not any(second_layout_problems(config, training, folder.arch))
    problems.add(family_problems(config, arch))
    problems.add(vision_problems(config, arch))
    problems.add(lora_problems(config, folders.lora_archs))
    problems.add(batch_problems(config))
    problems.add(length_problems(config, arch))
    problems.add(name_problems(config))
    has_task = task_problem(config) is None
    problems.add(source_problems(config) if has_task else ())
    problems.add(score_head_problems(config))
    problems.add(rollout_file_problems(config))
    problems.add(sharing_problems(config, arch))
    problems.add(environment_problems(config))
    problems.add(output_problems(config, is_plan=dry_run))
    problems.add(precision_problems(config, arch), "actor.megatron.fp8")
    exact_engine = exact_engine_problem(config.rollout.engine) if config.model.exact else None
    problems.add(exact_problems(config, training, arch, exact_engine, elsewhere=dry_run), "model.exact")
    replays = config.actor.moe.route_replay == "engine"
    engine = {"replays": replays, "has_images": arch is not None and arch.vision is not None}
    problems.add(engine_problems(config.rollout, **engine) if config.draws else (), "rollout.engine")
    problems.add(missing_keys(config))
    problems.add(beside_problems(config, training, folders))
    has_rewards = problems.add(reward_name_problems(config))
    if not dry_run:
        problems.add(package_problems(config))
        problems.add(device_problems(config, world_size))
        problems.add(hardware_problems(config), "actor.megatron")
    is_complete = has_weights(config.model.path)
    folders.check_weights(config, problems, policy=is_complete or not dry_run)

    tokenizer = end_tokens = environment = None
    is_reported = arch is None and config.model.tokenizer_path is None  # the folder is missing
    if not is_reported and (has_tokenizer(config) or not elsewhere):
        tokenizer = problems.attempt("model.tokenizer_path", read_tokenizer, config, arch)
    if tokenizer is not None:
        vocab_size = arch.vocab_size if arch else None
        end_tokens = problems.attempt("model.path", read_end_tokens, tokenizer, config.model.path, vocab_size)
    ends = end_tokens.ids if end_tokens else []
    if tokenizer is not None and config.rollout.multi_turn.environment is not None:
        environment = problems.attempt("rollout.multi_turn", check_environment, config, tokenizer, ends)
    rows = RunRows()
    if has_task and start.knows("data.task", "data.sources"):  # the task reads the rows
        config = only_present(config) if elsewhere else config
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
    calls = episode = None
    if rehearsed:
        problems.add(in_use_problems(config) if not dry_run else [])
        problems.add(input_problems(config, prints=not dry_run) if not (elsewhere or start.wrong_keys) else [])
        if has_rewards and start.knows("data.task", "data.sources", "reward"):
            calls = problems.attempt("reward.function", call_rewards, config, rows.examples)
        if environment is not None and start.knows("rollout.multi_turn"):
            episode = problems.attempt("rollout.multi_turn", play_episode, config, rows.first_of_each)
    if has_layout and start.knows(*SHORTAGE_KEYS) and (problems.problems or not dry_run):  # else the plan's verdict
        known = folders.models(config)
        problems.add(phase_shortages(config, training, known, start.device, elsewhere=elsewhere), "actor.megatron")
    problems.raise_if_any()
    assert arch is not None
    if not dry_run:
        report_trials(config, calls or [])
    if rehearsed and not dry_run:
        failing = [f"rollout.multi_turn: {text}" for who, text in episode or () if who == "WARNING"]
        print("".join(f"WARNING: {text}\n" for text in (*suspicions(config), *failing)), end="", flush=True)
    return Checked(
        **vars(rows),
        arch=arch,
        has_weights=is_complete,
        models=folders.models(config),
        reward_folder=folders.beside.get(MAIN),
        reward_folders={key.removeprefix(OTHERS): one for key, one in folders.rewards.items() if key != MAIN},
        critic_folder=folders.beside.get(CRITIC),
        scored_folder=folders.scored,
        tokenizer=tokenizer,
        end_tokens=end_tokens,
        environment=environment,
        episode=episode or [],
        reward_calls=calls or [],
        config=config,
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
