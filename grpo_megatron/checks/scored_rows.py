"""Reads the rows of a run that trains a scalar head (algo/losses.py). Every failure is a ConfigError."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.algo.losses import policy_losses
from grpo_megatron.checks.problems import ProblemList
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.data.conversation import TurnRenderer
from grpo_megatron.data.rows import read_rows
from grpo_megatron.data.scored import PAIR_ROWS, STEP_ROWS, load_pairs, load_steps, read_pairs, read_steps
from grpo_megatron.data.written import OfflineGroup
from grpo_megatron.models.families import read_config


def trains_scores(config: Config) -> bool:
    """Whether the model that is trained has a scalar head."""
    return bool(policy_losses.facts(config.actor.loss_mode).scores)


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
                    read_rows, file, lambda row: read_steps(row, separator) if of_steps else read_pairs(row)
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
