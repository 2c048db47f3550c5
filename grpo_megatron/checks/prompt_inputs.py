"""Reads the prompts of a run, to train on and to validate with. Every failure is a ConfigError that names the key."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.checks.components import reward_name
from grpo_megatron.checks.environment import CheckedEnvironment
from grpo_megatron.checks.sources import SourceFiles, sources_of
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.data.pass_rates import read_pass_rates, select_prompts
from grpo_megatron.data.prompts import load_prompts, parsed_row
from grpo_megatron.data.row_set import FilesError, RowSet
from grpo_megatron.data.sampler import Mixture, SourcePrompts
from grpo_megatron.data.survey import Survey
from grpo_megatron.data.tasks import get_task
from grpo_megatron.types import BY_MODEL, Prompt


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
        rows = RowSet(files, "rows")
        Survey(rows, parse, lambda parsed: np.zeros((len(parsed), 1), np.int32), None).run()


@contextlib.contextmanager
def named_key(key: str) -> Iterator[None]:
    """Each message of a ConfigError begins with the key."""
    try:
        yield
    except FilesError as error:
        raise ConfigError("\n".join(f"{key}: {problem}" for problem in error.problems)) from error
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
