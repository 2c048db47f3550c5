"""What a run reads before it starts: the model folder, the tokenizer, the prompts. Every failure is a ConfigError.

Nothing is written and no process is started. Of the weights only the headers are read: names and shapes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.algo.losses import policy_losses
from grpo_megatron.checks.problems import ProblemList, Problems
from grpo_megatron.checks.prompt_inputs import check_rows, named_key
from grpo_megatron.checks.scored_rows import read_scored_groups, trains_scores
from grpo_megatron.config import Config, ConfigError, DataConfig, SamplingConfig
from grpo_megatron.data.conversation import TurnRenderer
from grpo_megatron.data.dataset_folder import is_there
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.data.written import (
    OfflineGroup,
    SupervisedExample,
    load_offline_groups,
    load_supervised,
    read_written,
)
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import read_architecture
from grpo_megatron.models.weights.load import check_hf
from grpo_megatron.reading import ReadError, special_file_in

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def read_model(path: Path, key: str = "model.path", family: str | None = None) -> Architecture:
    """The architecture that `path`/config.json describes, of a folder of regular files. `family`: `model.family`."""
    if not path.is_dir():
        name = str(path)
        hub = f"; fetch one with: hf download {name} --local-dir DIR" if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else ""
        raise ConfigError(
            f"{key}={name!r} is not a folder; it must be a local Hugging Face folder (config.json, *.safetensors,"
            f" tokenizer){hub}"
        )
    try:
        if problem := special_file_in(path):
            raise ReadError(f"it holds {problem}; remove it")
        return read_architecture(path, family)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{key}={str(path)!r}: {error}; set it to a folder of a supported model") from error


def check_weights(path: Path, arch: Architecture, key: str = "model.path") -> None:
    """The folder holds exactly the tensors of `arch`, by name and shape."""
    try:
        check_hf(path, arch)
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise ConfigError(f"{key}: {error}\n  (fetch the folder again, or set {key} to a complete one)") from error


def has_weights(path: Path) -> bool:
    """Whether the folder has weight files, complete or not."""
    return (path / "model.safetensors.index.json").exists() or any(path.glob("*.safetensors"))


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


def missing_keys(config: Config) -> Problems:
    """The keys of the data that this run needs are set."""
    trainer = config.trainer
    data = config.data
    if trainer.total_training_steps and not data.train_files and not data.sources:
        yield f"trainer.total_training_steps={trainer.total_training_steps} needs prompts; set data.train_files"
    if (trainer.val_before_train or trainer.test_freq > 0) and not (
        data.has_prompts_to_validate or data.val_loss_files
    ):
        yield (
            f"trainer.val_before_train={str(trainer.val_before_train).lower()}, trainer.test_freq={trainer.test_freq}:"
            " validation needs data.val_files; set it (or data.val_tasks, or data.val_loss_files), or val_before_train=false and"
            " test_freq=-1"
        )
    if config.sft.steps and not config.sft.train_files:
        yield f"sft.steps={config.sft.steps} needs rows to learn from; set sft.train_files, or sft.steps=0"


def check_reference(config: Config, arch: Architecture) -> None:
    """`ref.path` holds a model of the policy's architecture: the same computation with other weights."""
    path = config.ref.path
    assert path is not None
    reference = dataclasses.asdict(read_model(path, "ref.path", config.model.family))
    policy = dataclasses.asdict(arch)
    different = [
        f"{name} {reference[name]} against {policy[name]}"
        for name in policy
        if name not in ("family", "max_position_embeddings", "sliding_window") and reference[name] != policy[name]
    ]
    if different:
        raise ConfigError(
            f"ref.path={str(path)!r} is another architecture than model.path ({', '.join(different)}); the reference"
            " must be of the policy's: leave ref.path out, or set actor.use_kl_loss=false"
        )
    check_weights(path, arch, "ref.path")


def read_tokenizer(config: Config, arch: Architecture | None) -> Any:
    """The tokenizer. Its ids are rows of the model's embedding, and it has a chat template if the data needs one."""
    path, data = config.model.tokenizer_path or config.model.path, config.data
    tokenizer = load_tokenizer(path, data)
    problems = ProblemList()
    problems.add(_tokenizer_problems(tokenizer, path, data, arch))
    problems.raise_if_any()
    return tokenizer


def _tokenizer_problems(tokenizer: Any, path: Path, data: DataConfig, arch: Architecture | None) -> Problems:
    size = max(len(tokenizer), tokenizer.eos_token_id + 1)
    if arch is not None and size > arch.vocab_size:
        yield (
            f"the tokenizer in {str(path)!r} has {size} tokens and the model's embedding {arch.vocab_size} rows"
            f" (vocab_size of config.json): ids from {arch.vocab_size} on have none; set model.tokenizer_path to the"
            " model's own tokenizer"
        )
    if data.apply_chat_template and tokenizer.chat_template is None:
        yield (
            "data.apply_chat_template=true, but the tokenizer has no chat template; set data.chat_template to a Jinja"
            " file (ChatML: examples/templates/chatml.jinja), or data.apply_chat_template=false to take texts as they"
            " are"
        )
    if data.system_prompt is not None and not data.apply_chat_template:
        yield (
            f"data.system_prompt={data.system_prompt[:40]!r} needs a chat template, and data.apply_chat_template is"
            " false; unset one of them"
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
