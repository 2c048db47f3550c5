"""The data sets of a run: `data.train_files` and `data.val_files`, or each of `data.sources`, with their tasks and rewards."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_megatron.checks.problems import Problems
from grpo_megatron.config import Config, DataConfig, SamplingConfig
from grpo_megatron.data.tasks import FORMS, get_task, recognised_task

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SourceFiles:
    """One data set. `data` has its own task and system prompt. `name` and `reward` are None where it has none of its own."""

    key: str  # for messages
    name: str | None
    data: DataConfig
    files: Sequence[Path]
    val_files: Sequence[Path]
    reward: str | None
    weight: float | None


def sources_of(config: Config) -> list[SourceFiles]:
    """`data.sources`, then the data set of `data.train_files` and `data.val_files`, if they are set."""
    data = config.data
    found = []
    for number, source in enumerate(data.sources):
        task, system = source.task or data.task, source.system_prompt
        own = data.model_copy(update={"task": task, **({} if system is None else {"system_prompt": system})})
        key = f"data.sources[{number}] ({source.name})"
        found.append(SourceFiles(key, source.name, own, source.files, source.val_files, source.reward, source.weight))
    if data.train_files or data.val_files or not found:
        found.append(SourceFiles("data", None, data, data.train_files, data.val_files, None, None))
    return found


def with_recognised_tasks(config: Config) -> Config:
    """The config with the tasks of verl's and TRL's rows, where no task is set. Says once what was recognised."""
    data = config.data
    if "task" in data.model_fields_set or not config.draws:
        return config
    updates: dict[str, object] = {}
    drawn = [] if config.algorithm.source == "file" else data.train_files  # written responses are no form of a task
    if task := recognised_task([*drawn, *data.val_files]):
        _announce("data.task", drawn or data.val_files, task)
        updates["task"] = task
    sources = []
    for number, source in enumerate(data.sources):
        if source.task is None and (task := recognised_task([*source.files, *source.val_files])):
            _announce(f"data.sources[{number}].task", source.files or source.val_files, task)
            source = source.model_copy(update={"task": task})
        sources.append(source)
    updates["sources"] = sources
    return config.model_copy(update={"data": data.model_copy(update=updates)})


def _announce(key: str, files: Sequence[Path], task: str) -> None:
    logger.warning("%s is not set: %s has rows in %s's form (%s), so it is %r", key, files[0], task, FORMS[task], task)


def source_problems(config: Config) -> Problems:
    """What `data.sources` excludes, and names that are given twice."""
    data = config.data
    if not data.sources:
        return
    if data.train_files:
        yield "data.sources beside data.train_files: a run has one or the other; add the files as a source"
    if config.algorithm.source == "file":
        yield (
            "data.sources have weights for drawing prompts, and algorithm.source=file reads responses in order; set"
            " data.train_files"
        )
    if data.sampling != SamplingConfig():
        yield (
            "data.sampling draws single prompts by their pass rates, and data.sources draw by the source's weight; set one"
            " of them"
        )
    names = [source.name for source in data.sources]
    for number, source in enumerate(data.sources):
        key = f"data.sources[{number}] ({source.name})"
        if source.name in names[:number]:
            yield f"{key}: the name is given twice; choose another one"
        if not source.files:
            yield f"{key} has no files to train on; set its files, or name its val_files in data.val_files"
    accuracy = [part for part in config.reward.components if part.name == "accuracy" and part.function is None]
    if accuracy and len({get_task(source.data.task).reward for source in sources_of(config)}) > 1:
        yield (
            "reward.components: accuracy is the task's own reward, and data.sources have tasks with different ones; set its"
            " function, or set reward in each source"
        )


def reward_names_of(source: SourceFiles, override: str | None) -> Iterator[tuple[str, str]]:
    """(key, name) of each reward function of the source's rows; "" where there is none. The task is known to be usable.

    `override`: that of `reward`, instead of the task's.
    """
    if source.reward:
        yield f"{source.key}.reward", source.reward
    elif override is not None:
        yield "reward.function", override
    else:
        yield from (("reward.function", name) for name in get_task(source.data.task).reward_names or [""])
