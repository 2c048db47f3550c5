"""What a run reads before it starts: the model folder, the tokenizer, the prompts. Every failure is a ConfigError.

Nothing is written and no process is started. Of the weights only the headers are read: names and shapes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.algo.losses import policy_losses
from grpo_megatron.checks.environment import CheckedEnvironment
from grpo_megatron.checks.model_folders import trains_scores
from grpo_megatron.checks.names import SourceFiles, reward_name, sources_of
from grpo_megatron.config import Config, ConfigError, SamplingConfig
from grpo_megatron.config.problems import Findings, Problem, ProblemList, check, keys_of
from grpo_megatron.data.pass_rates import read_pass_rates, select_prompts
from grpo_megatron.data.prompts import load_prompts, parsed_row
from grpo_megatron.data.rows import RowSet, is_there, read_rows
from grpo_megatron.data.sampler import Mixture, SourcePrompts
from grpo_megatron.data.task import get_task
from grpo_megatron.data.tokenizer import TurnRenderer, load_tokenizer
from grpo_megatron.data.written import (
    PAIR_ROWS,
    STEP_ROWS,
    OfflineGroup,
    SupervisedExample,
    load_offline_groups,
    load_pairs,
    load_steps,
    load_supervised,
    read_pairs,
    read_steps,
    read_written,
)
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import read_config
from grpo_megatron.types import BY_MODEL, Prompt

# -- The prompts to train on and to validate with ----------------------------------------------------------------------


def read_train_prompts(
    config: Config, tokenizer: Any | None, environment: CheckedEnvironment | None = None, *, is_plan: bool = False
) -> Sequence[Prompt]:
    """The prompts to train on; none with algorithm.source=file. `environment` is that of the rollouts, if there is one.

    `is_plan`: nothing will be drawn, so a sample of many rows is measured (load_prompts).
    """
    if not config.trainer.total_training_steps or config.algorithm.source == "file":
        return []
    parts: list[SourcePrompts] = []
    for source in sources_of(config):
        reward = source.reward or reward_name(config.reward) if config.has_rule else BY_MODEL
        key = "data.train_files" if source.name is None else f"{source.key}.files"
        prompts = _read_prompts(source, key, source.files, tokenizer, None, environment, reward, is_plan)
        if source.name is not None and prompts:
            parts.append(SourcePrompts(source.name, prompts, source.weight or len(prompts)))
    if config.data.sources:
        return Mixture(parts) if parts else []
    if config.data.sampling.pass_rates is None:
        return prompts
    if not prompts:  # there is no tokenizer, or no file on this machine
        read_pass_rates(config.data.sampling.pass_rates)
        return prompts
    return select_prompts(prompts, config.data.sampling)


def read_val_prompts(
    config: Config, tokenizer: Any | None, environment: CheckedEnvironment | None = None
) -> list[Prompt]:
    """The prompts of `data.val_files` and of each source's. `environment` is that of the rollouts, if there is one."""
    found: list[Prompt] = []
    for source in sources_of(config):
        key = "data.val_files" if source.name is None else f"{source.key}.val_files"
        reward, most = source.reward or reward_name(config.reward), config.data.val_max_samples
        found += _read_prompts(source, key, source.val_files, tokenizer, most, environment, reward, False)
    return found


def _read_prompts(
    source: SourceFiles,
    key: str,
    files: Sequence[Path],
    tokenizer: Any | None,
    max_samples: int | None,
    environment: CheckedEnvironment | None,
    reward: str | None,
    is_plan: bool,
) -> Sequence[Prompt]:
    """If the tokenizer could not be read, the files are checked and no prompt is made."""
    if not files:
        return []
    task = get_task(source.data.task)
    if tokenizer is None:
        check_rows(key, files, lambda row: parsed_row(task, reward, row))
        return []
    renderer = environment.renderer if environment else None
    reward = "" if environment and environment.gives_rewards else reward
    with named_key(key):
        return load_prompts(
            source.data, files, tokenizer, reward, max_samples, renderer, source=source.name, is_plan=is_plan
        )


def check_rows(key: str, files: Sequence[Path], parse: Callable[[dict[str, Any]], object]) -> None:
    """Raise one ConfigError for all files that cannot be read or have wrong rows."""
    with named_key(key):
        for _ in RowSet(files).parsed(parse):
            pass


@contextlib.contextmanager
def named_key(key: str) -> Iterator[None]:
    """Each message of a ConfigError begins with the key."""
    try:
        yield
    except ConfigError as error:
        section = key.partition("[")[0]  # data.sources[0] (name).files
        raise ConfigError(*(Problem(f"{key}: {problem}", (section,)) for problem in error.problems)) from error


# -- The rows of a run that trains a scalar head -----------------------------------------------------------------------


def read_scored_groups(
    config: Config, key: str, files: Sequence[Path], tokenizer: Any | None, renderer: TurnRenderer | None
) -> Sequence[OfflineGroup]:
    """The rows of `files` for the loss. If the tokenizer could not be read, the files are checked and there are no groups."""
    separator, of_steps = (
        config.reward_model.step_separator,
        policy_losses.facts(config.actor.loss_mode).scores == "step",
    )
    try:
        if tokenizer is None:
            problems = ProblemList()
            for file in files:
                problems.attempt(
                    key, read_rows, file, lambda row: read_steps(row, separator) if of_steps else read_pairs(row)
                )
            problems.raise_if_any()
            return []
        if of_steps:
            return load_steps(config.data, files, tokenizer, separator)
        return load_pairs(config.data, files, tokenizer, _pad_token_id(config), renderer)
    except ConfigError as error:
        wanted = STEP_ROWS if of_steps else PAIR_ROWS
        raise ConfigError(f"{key}: {error} (actor.loss_mode={config.actor.loss_mode} reads rows {wanted})") from error


def _pad_token_id(config: Config) -> int | None:
    """Of the model's config.json, as transformers' sequence classification reads it."""
    try:
        pad_token_id = read_config(config.model.path).get("pad_token_id")
    except (ValueError, OSError):
        return None  # the folder is reported by another check
    return pad_token_id if isinstance(pad_token_id, int) else None


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def has_tokenizer(config: Config) -> bool:
    """Whether the folder has tokenizer files, usable or not."""
    folder = config.model.tokenizer_path or config.model.path
    return any((folder / name).exists() for name in TOKENIZER_FILES)


def only_present(config: Config) -> Config:
    """The config without the data files that this machine lacks. Used when the plan is for another machine."""

    def present(files: list[Path]) -> list[Path]:
        return [file for file in files if is_there(file)]

    data, sft = config.data, config.sft
    names = ("train_files", "val_files", "val_loss_files")
    files: dict[str, Any] = {name: present(getattr(data, name)) for name in names}
    if data.sampling.pass_rates is not None and not data.sampling.pass_rates.exists():
        files["sampling"] = SamplingConfig()
    files["sources"] = [
        source.model_copy(update={"files": present(source.files), "val_files": present(source.val_files)})
        for source in data.sources
    ]
    warmup = {"train_files": present(sft.train_files)}
    return config.model_copy(update={"data": data.model_copy(update=files), "sft": sft.model_copy(update=warmup)})


@check
def missing_keys(config: Config) -> Findings:
    """The keys of the data that this run needs are set."""
    k = keys_of(config)
    trainer = config.trainer
    data = config.data
    if trainer.total_training_steps and not data.train_files and not data.sources:
        yield (f"{k.trainer.total_training_steps} needs prompts; set {k.data.train_files:key}")
    if (trainer.val_before_train or trainer.test_freq > 0) and not (
        data.has_prompts_to_validate or data.val_loss_files
    ):
        yield (
            f"{k.trainer.val_before_train}, {k.trainer.test_freq}: validation needs {k.data.val_files:key}; set"
            " it (or data.val_tasks, or data.val_loss_files), or val_before_train=false and test_freq=-1"
        )
    if config.sft.steps and not config.sft.train_files:
        yield (f"{k.sft.steps} needs rows to learn from; set sft.train_files, or sft.steps=0")


def read_tokenizer(config: Config, arch: Architecture | None) -> Any:
    """The tokenizer. Its ids are rows of the model's embedding, and it has a chat template if the data needs one."""
    path, data = config.model.tokenizer_path or config.model.path, config.data
    tokenizer = load_tokenizer(path, data)
    problems = ProblemList()
    problems.add(_tokenizer_problems(config, tokenizer, path, arch))
    problems.raise_if_any()
    return tokenizer


@check
def _tokenizer_problems(config: Config, tokenizer: Any, path: Path, arch: Architecture | None) -> Findings:
    k, data = keys_of(config), config.data
    size = max(len(tokenizer), tokenizer.eos_token_id + 1)
    if arch is not None and size > arch.vocab_size:
        yield (
            f"the tokenizer in {str(path)!r} has {size} tokens and the model's embedding {arch.vocab_size} rows"
            f" (vocab_size of config.json): ids from {arch.vocab_size} on have none; set"
            f" {k.model.tokenizer_path:key} to the model's own tokenizer"
        )
    if data.apply_chat_template and tokenizer.chat_template is None:
        yield (
            f"{k.data.apply_chat_template}, but the tokenizer has no chat template; set data.chat_template to a"
            " Jinja file (ChatML: examples/templates/chatml.jinja), or data.apply_chat_template=false to take"
            " texts as they are"
        )
    if data.system_prompt is not None and not data.apply_chat_template:
        yield (
            f"{k.data.system_prompt!r} needs a chat template, and {k.data.apply_chat_template:key} is false;"
            " unset one of them"
        )


def read_supervised(
    config: Config, tokenizer: Any | None, renderer: TurnRenderer | None = None, end_token_ids: Sequence[int] = ()
) -> Sequence[SupervisedExample]:
    """The rows of the supervised warmup, as token ids. `renderer` is that of the rollouts, if they have several turns.

    `end_token_ids`: those of `EndTokens`.
    """
    key, files = "sft.train_files", config.sft.train_files
    if not config.sft.steps or not files:
        return []
    if tokenizer is None:
        check_rows(key, files, lambda row: read_written(row, ["response"]))
        return []
    with named_key(key):
        return load_supervised(config.data, files, tokenizer, renderer, end_token_ids)


def read_offline_groups(
    config: Config, tokenizer: Any | None, renderer: TurnRenderer | None = None, end_token_ids: Sequence[int] = ()
) -> Sequence[OfflineGroup]:
    """The rows of algorithm.source=file: a prompt with its response, or with a chosen and a rejected one for DPO.

    `renderer` and `end_token_ids` as in `read_supervised`.
    """
    if not config.trainer.total_training_steps or config.algorithm.source != "file":
        return []
    return _read_written(config, "data.train_files", config.data.train_files, tokenizer, renderer, end_token_ids)


def read_val_loss_groups(
    config: Config, tokenizer: Any | None, renderer: TurnRenderer | None = None, end_token_ids: Sequence[int] = ()
) -> Sequence[OfflineGroup]:
    """The rows of `data.val_loss_files`, of the kind that `read_offline_groups` reads for the same loss."""
    files = config.data.val_loss_files
    return _read_written(config, "data.val_loss_files", files, tokenizer, renderer, end_token_ids)


def _read_written(
    config: Config,
    key: str,
    files: Sequence[Path],
    tokenizer: Any | None,
    renderer: TurnRenderer | None,
    end_token_ids: Sequence[int],
) -> Sequence[OfflineGroup]:
    """If the tokenizer could not be read, the files are checked and there are no groups."""
    if not files:
        return []
    if trains_scores(config):
        return read_scored_groups(config, key, files, tokenizer, renderer)
    pairs = policy_losses.facts(config.actor.loss_mode).paired
    fields = {"chosen": 1.0, "rejected": 0.0} if pairs else {"response": 1.0}
    if tokenizer is None:
        check_rows(key, files, lambda row: read_written(row, list(fields)))
        return []
    try:
        return load_offline_groups(config.data, files, tokenizer, fields, renderer, end_token_ids)
    except ConfigError as error:
        wanted = '{"prompt", "chosen", "rejected"}' if pairs else '{"prompt", "response"} or {"messages"}'
        raise ConfigError(f"{key}: {error} (actor.loss_mode={config.actor.loss_mode} reads rows {wanted})") from error
