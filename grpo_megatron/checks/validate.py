"""Validation: what can be known to be wrong before a process group, a model or an engine exists. Every rank runs it.

One small generator a topic; each yields problems that name the key, its value, the arithmetic and the remedy. All of
them run, so that one start shows all mistakes. What a section can check alone is in `config.py`; what is on disk is
read by `inputs.py` and handed to the trainer in `Checked`, so that nothing is read twice.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.algo.kl import kl_penalties
from grpo_megatron.algo.losses import policy_losses
from grpo_megatron.algo.needs import reads_reference
from grpo_megatron.algo.token_weights import token_weightings
from grpo_megatron.checks import inputs
from grpo_megatron.checks.experts import expert_problems
from grpo_megatron.checks.layout import layout_problems
from grpo_megatron.checks.learning_rate import schedule_problems
from grpo_megatron.checks.methods import method_problems
from grpo_megatron.checks.passthrough import transformer_problems
from grpo_megatron.checks.reward_model import reward_model_problems
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.data.prompts import OfflineGroup
from grpo_megatron.data.tasks import get_task
from grpo_megatron.evaluation.validation import read_task_prompts
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.precision import hardware_problems, precision_problems
from grpo_megatron.observability.sinks import check_loggers
from grpo_megatron.registry import Registry
from grpo_megatron.rewards import check_reward
from grpo_megatron.rollout.build import engine_packages, engine_problems
from grpo_megatron.types import Prompt

P = ParamSpec("P")
T = TypeVar("T")
Problems = Iterator[str]

TEMPERATURES = (0.01, 2.0)  # vLLM silently raises what is below, and refuses what is above


@dataclass(frozen=True)
class Checked:
    """What validation has read, for the trainer to use. Lists are empty where the config asks for none."""

    arch: Architecture
    has_weights: bool  # false only in a dry run
    tokenizer: Any  # None only in a dry run for another machine
    train_prompts: list[Prompt]
    val_prompts: list[Prompt]
    supervised_rows: list[inputs.SupervisedRow]
    offline_groups: list[OfflineGroup] = field(default_factory=list)  # algorithm.source=file: instead of train_prompts


def validate(config: Config, world_size: int, *, dry_run: bool = False, elsewhere: bool = False) -> Checked:
    """Check the whole config for a world of `world_size` ranks. Raises ConfigError with every problem, one a line.

    `dry_run`: the model folder need not hold weights, nor the machine Megatron-Core and vLLM. `elsewhere`: it plans for
    another machine; tokenizer and data files that are not on this one are not missed.
    """
    problems: list[str] = []

    def attempt(read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return read(*args, **kwargs)
        except ConfigError as error:
            problems.append(str(error))
            return None

    arch = attempt(inputs.read_model, config.model.path)
    problems += layout_problems(config, world_size, arch)
    problems += expert_problems(config.actor.megatron, world_size, arch, on_cpu=config.trainer.device == "cpu")
    for topic in (batches, sampling, names, method_problems, schedule_problems, outputs):
        problems += topic(config)
    problems += precision_problems(config, arch)
    problems += reward_model_problems(config, world_size, arch)
    problems += transformer_problems(config.actor.megatron.override_transformer_config)
    problems += engine_problems(config.rollout)
    problems += lengths(config, arch)
    if not dry_run:
        problems += packages(config)
        problems += hardware_problems(config)

    has_weights = inputs.has_weights(config.model.path)
    if arch is not None:
        if has_weights or not dry_run:
            attempt(inputs.check_weights, config.model.path, arch)
        if reads_reference(config.algorithm, config.actor) and config.ref.path is not None:
            attempt(inputs.check_reference, config, arch)

    tokenizer = None
    named = arch is None and config.model.tokenizer_path is None  # one that is in no folder has been named already
    if not named and not (elsewhere and not inputs.has_tokenizer(config)):
        tokenizer = attempt(inputs.read_tokenizer, config, arch)
    problems += files(config)
    config = inputs.only_present(config) if elsewhere else config
    train_prompts = val_prompts = supervised_rows = offline_groups = None
    if _task_problem(config) is None:
        if config.trainer.total_training_steps and config.data.train_files:
            if config.algorithm.source == "file":
                offline_groups = attempt(inputs.read_offline_groups, config, tokenizer)
            else:
                train_prompts = attempt(inputs.read_train_prompts, config, tokenizer)
        if config.data.val_files:
            val_prompts = attempt(inputs.read_val_prompts, config, tokenizer)
        if config.data.val_tasks:
            asked = attempt(read_task_prompts, config.data, config.reward.kwargs, tokenizer)
            val_prompts = [*(val_prompts or []), *(asked or [])]
        if config.sft.steps and config.sft.train_files:
            supervised_rows = attempt(inputs.read_supervised, config, tokenizer)
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    assert arch is not None
    return Checked(
        arch,
        has_weights,
        tokenizer,
        train_prompts or [],
        val_prompts or [],
        supervised_rows or [],
        offline_groups or [],
    )


# -- the model's limits ----------------------------------------------------------------------------------------------


def lengths(config: Config, arch: Architecture | None) -> Problems:
    """Prompt plus response against the model, the packing cap and the engine's scheduler."""
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    total = prompt + response
    both = f"data.max_prompt_length={prompt} + data.max_response_length={response} = {total}"
    if arch is not None and total > arch.max_position_embeddings:
        yield f"{both} exceed the model's max_position_embeddings {arch.max_position_embeddings}; lower one of them"
    if arch is not None and arch.sliding_window is not None and total > arch.sliding_window:
        yield f"{both} exceed the model's sliding window {arch.sliding_window}; windows are not computed: lower one"
    cap = config.actor.ppo_max_token_len_per_gpu
    if cap < total:
        yield f"actor.ppo_max_token_len_per_gpu={cap} is less than one full sequence, {both}; set it to {total} or more"
    rollout = config.rollout
    batched = rollout.max_num_batched_tokens
    if not rollout.engine_kwargs.get("enable_chunked_prefill", True) and batched < total:
        yield (
            f"rollout.max_num_batched_tokens={batched} is less than {both}, and"
            f" rollout.engine_kwargs.enable_chunked_prefill is false; set it to {total} or more, or leave chunking on"
        )
    if batched < rollout.max_num_seqs:
        yield (
            f"rollout.max_num_batched_tokens={batched} is less than rollout.max_num_seqs={rollout.max_num_seqs}, one"
            f" token a sequence; set max_num_batched_tokens={rollout.max_num_seqs} or more"
        )


# -- keys against keys ------------------------------------------------------------------------------------------------


def batches(config: Config) -> Problems:
    """Mini-batches must cut the batch evenly: an odd last one would be a step of another size, every step."""
    size, mini = config.data.train_batch_size, config.actor.ppo_mini_batch_size
    if mini is None:
        return
    if mini > size:
        yield (
            f"actor.ppo_mini_batch_size={mini} is more than data.train_batch_size={size} (both count prompts);"
            f" set it to {size} or leave it out"
        )
    elif size % mini:
        best = min((n for n in range(1, size + 1) if size % n == 0), key=lambda n: abs(n - mini))
        yield (
            f"actor.ppo_mini_batch_size={mini} does not divide data.train_batch_size={size} (it leaves {size % mini}"
            f" prompts); set it to {best}"
        )


def sampling(config: Config) -> Problems:
    """What the policy scores must be what the engine draws from."""
    rollout = config.rollout
    for key, value, full in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, -1)):
        if value != full:
            yield (
                f"rollout.{key}={value:g}: training scores the full distribution, and samples must be drawn from the"
                f" same one; set rollout.{key}={full:g} (rollout.val_kwargs is free to differ)"
            )
    low, high = TEMPERATURES
    drawn = {"temperature": rollout.temperature}
    if rollout.val_kwargs.temperature:  # 0 is greedy
        drawn["val_kwargs.temperature"] = rollout.val_kwargs.temperature
    for key, value in drawn.items():
        if not low <= value <= high:
            yield f"rollout.{key}={value:g} is outside the engine's {low:g} to {high:g}; set a value in between"


def names(config: Config) -> Problems:
    """Every name in the config stands for a function that can be called."""
    actor = config.actor
    registries: list[tuple[str, str, Registry[Any]]] = [
        ("algorithm.adv_estimator", config.algorithm.adv_estimator, advantage_estimators),
        ("actor.loss_mode", actor.loss_mode, policy_losses),
        ("actor.loss_agg_mode", actor.loss_agg_mode, token_weightings),
    ]
    if actor.use_kl_loss:
        registries.append(("actor.kl_loss_type", actor.kl_loss_type, kl_penalties))
    if config.algorithm.use_kl_in_reward:
        registries.append(("algorithm.kl_penalty", config.algorithm.kl_penalty, kl_penalties))
    for key, name, registry in registries:
        try:
            if not callable(registry.get(name)):
                yield f"{key}={name!r} is not a function; set the name of one"
        except ValueError as error:
            yield f"{key}: {error}"
        except Exception as error:  # whatever the user's module raises while it is imported
            yield f"{key}={name!r}: importing it raised {type(error).__name__}: {error}; mend the module"
    if problem := _task_problem(config):
        yield problem
        return
    try:
        check_reward(config.reward.function or get_task(config.data.task).reward or "", config.reward.kwargs)
    except ValueError as error:
        yield f"reward.function: {error}"


def _task_problem(config: Config) -> str | None:
    try:
        if get_task(config.data.task).reward is None and config.reward.function is None:
            return f"data.task={config.data.task!r} has no reward of its own; set reward.function"
    except ValueError as error:
        return f"data.task: {error}"
    except Exception as error:  # whatever the user's module raises while it is imported
        return f"data.task={config.data.task!r}: importing it raised {type(error).__name__}: {error}; mend the module"
    return None


# -- files and packages -----------------------------------------------------------------------------------------------


def files(config: Config) -> Problems:
    """The data that the run will ask for is given."""
    trainer = config.trainer
    if trainer.total_training_steps and not config.data.train_files:
        yield f"trainer.total_training_steps={trainer.total_training_steps} needs prompts; set data.train_files"
    if (trainer.val_before_train or trainer.test_freq > 0) and not (config.data.val_files or config.data.val_tasks):
        yield (
            f"trainer.val_before_train={str(trainer.val_before_train).lower()}, trainer.test_freq={trainer.test_freq}:"
            " evaluation needs data.val_files; set it (or data.val_tasks), or val_before_train=false and test_freq=-1"
        )
    if config.sft.steps and not config.sft.train_files:
        yield f"sft.steps={config.sft.steps} needs rows to learn from; set sft.train_files, or sft.steps=0"


def outputs(config: Config) -> Problems:
    """The output folder can be made and written, and the loggers' packages are there."""
    folder = config.trainer.output_dir
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        yield f"trainer.output_dir={str(folder)!r}: {str(existing)!r} is a file, not a folder; choose another"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"trainer.output_dir={str(folder)!r}: {str(existing)!r} is not writable; choose another"
    try:
        check_loggers(config.trainer.logger)
    except ConfigError as error:
        yield str(error)


def packages(config: Config) -> Problems:
    """Megatron-Core and the engine's packages are installed; they are not imported."""
    for name, package in {"megatron": "megatron-core", **engine_packages(config.rollout)}.items():
        if importlib.util.find_spec(name) is None:
            yield f"the package {name!r} is not installed; pip install {package}, as requirements/ pins it"
