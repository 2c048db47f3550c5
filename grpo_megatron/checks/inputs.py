"""Inputs that a run reads before it starts: the tokenizer, and the rows of all data files. Every failure is a ConfigError.

Nothing is written and no process is started.
"""

from __future__ import annotations

import functools
import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from grpo_megatron.algo.losses import policy_losses
from grpo_megatron.checks.components import CheckedEnvironment, SourceFiles, grades_itself, reward_name, sources_of
from grpo_megatron.checks.reward_call import examples_of
from grpo_megatron.config import Config, ConfigError, DataConfig, SamplingConfig
from grpo_megatron.config.problems import Problem, ProblemList, Problems, keys_of, marked
from grpo_megatron.data.benchmarks import read_task_prompts
from grpo_megatron.data.images import ImageFormat
from grpo_megatron.data.prompts import TeacherColumns, load_prompts, parsed_row
from grpo_megatron.data.responses import (
    PAIR_ROWS,
    STEP_ROWS,
    OfflineGroup,
    load_offline_groups,
    load_pairs,
    load_steps,
    read_pairs,
    read_steps,
    read_written,
)
from grpo_megatron.data.rows import RowSet, is_stream, is_there
from grpo_megatron.data.sampler import Mixture, SourcePrompts, one_of_each, read_pass_rates, select_prompts
from grpo_megatron.data.stream import load_stream
from grpo_megatron.data.task import get_task
from grpo_megatron.data.tokenizer import TurnRenderer, class_beside, load_tokenizer
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import read_config
from grpo_megatron.sampling.wrappers import prompt_sampler
from grpo_megatron.types import BY_MODEL, Prompt

logger = logging.getLogger(__name__)
T = TypeVar("T")

# -- Keys and files that are needed ------------------------------------------------------------------------------------


def missing_keys(config: Config) -> Problems:
    """Checks that the keys of the data that this run needs are set."""
    k, trainer, data = keys_of(config), config.trainer, config.data
    if trainer.total_training_steps and not data.train_files and not data.sources:
        yield f"{k.trainer.total_training_steps} needs prompts; set {k.data.train_files:key}"
    validates = trainer.val_before_train or trainer.test_freq > 0
    if validates and not (data.has_prompts_to_validate or data.val_loss_files):
        yield (
            f"{k.trainer.val_before_train}, {k.trainer.test_freq}: validation needs {k.data.val_files:key}; set it (or"
            " data.val_tasks, or data.val_loss_files), or val_before_train=false and test_freq=-1"
        )
    for key, is_used in (
        (k.sft.steps, config.sft.steps),
        (k.algorithm.chord.batch_size, config.algorithm.chord.batch_size),
    ):
        if is_used and not config.sft.train_files:
            yield f"{key} needs rows to learn from; set sft.train_files, or {key:key}=0"


def only_present(config: Config) -> Config:
    """Leaves out the data files that this machine lacks. Used when the plan is for another machine."""

    def present(section: Any, *names: str) -> dict[str, Any]:
        return {name: [file for file in getattr(section, name) if is_there(file)] for name in names}

    data, sft = config.data, config.sft
    files = present(data, "train_files", "val_files", "val_loss_files")
    if data.sampling.pass_rates is not None and not data.sampling.pass_rates.exists():
        files["sampling"] = SamplingConfig()
    files["val_tasks"] = [name for name in data.val_tasks if _has_task_file(data, name)]
    files["sources"] = [source.model_copy(update=present(source, "files", "val_files")) for source in data.sources]
    sft = sft.model_copy(update=present(sft, "train_files"))
    return config.model_copy(update={"data": data.model_copy(update=files), "sft": sft})


def _has_task_file(data: DataConfig, name: str) -> bool:
    """Says if the data of a task is here; a wrong name is left to `read_task_prompts`, as is a folder that is not named."""
    try:
        files = get_task(name).files
    except ConfigError:
        return True
    return data.val_data is None or any(is_there(data.val_data / file) for file in files)


# -- The tokenizer -----------------------------------------------------------------------------------------------------

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def has_tokenizer(config: Config) -> bool:
    """Says if the folder has tokenizer files, usable or not."""
    folder = config.model.tokenizer_path or config.model.path
    return any((folder / name).exists() for name in _TOKENIZER_FILES)


def read_tokenizer(config: Config, arch: Architecture | None) -> Any:
    """Loads the tokenizer. Its ids are rows of the model's embedding. What rows need of it is told when they are read."""
    path = config.model.tokenizer_path or config.model.path
    tokenizer = load_tokenizer(path, config.data)
    if arch is not None and arch.vision is not None:
        given = read_config(config.model.path)
        tokenizer.image_format = ImageFormat.of(config.model.path, given, tokenizer, config.data)
    problems = ProblemList()
    problems.add(_tokenizer_problems(config, tokenizer, path, arch))
    problems.raise_if_any()
    name = (
        class_beside(config.model.path, tokenizer)
        if config.model.tokenizer_path is not None and arch is not None
        else ""
    )
    if name:
        logger.warning(
            "beside the model's config.json, as in hf/, this tokenizer is loaded as %s (%s in %r): ids may differ; give"
            " --tokenizer %s to evaluate, generate and vllm serve",
            *(name, type(tokenizer).__name__, str(path), shlex.quote(str(path))),
        )
    return tokenizer


def _tokenizer_problems(config: Config, tokenizer: Any, path: Path, arch: Architecture | None) -> Problems:
    k, data = keys_of(config), config.data
    size = max(len(tokenizer), tokenizer.eos_token_id + 1)
    if arch is not None and size > arch.vocab_size:
        yield (
            f"the tokenizer in {str(path)!r} has {size} tokens and the model's embedding {arch.vocab_size} rows (vocab_size"
            f" of config.json): ids from {arch.vocab_size} on have none; set {k.model.tokenizer_path:key} to the model's own"
            " tokenizer"
        )
    fields = {name: field for name, field in type(data).model_fields.items() if "image" in name}
    given = [name for name, field in fields.items() if getattr(data, name) != field.default]
    if given and arch is not None and arch.vision is None:
        keys = ", ".join(f"data.{name}={getattr(data, name)}" for name in given)
        yield f"{keys}: the model reads no images ({arch.family}); take it out, or set model.path to one that does"


# -- The rows that a run reads -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunRows:
    """Empty: the config does not ask for them, or they cannot be read."""

    train_prompts: Sequence[Prompt] = ()
    offline_groups: Sequence[OfflineGroup] = ()
    val_prompts: list[Prompt] = field(default_factory=list)  # of data.val_files, then of data.val_tasks
    supervised_rows: Sequence[OfflineGroup] = ()
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
        """Reads all rows. Without a tokenizer the files are checked, and there are no prompts."""
        data, attempt, renderer = config.data, problems.attempt, environment.renderer if environment else None
        train = attempt("data.train_files", read_train_prompts, config, tokenizer, environment, is_plan=is_plan)
        is_offline = config.trainer.total_training_steps and config.algorithm.source == "file"
        files = {"data.train_files": data.train_files if is_offline else [], "data.val_loss_files": data.val_loss_files}
        offline, val_loss = (
            attempt(key, read_loss_rows, config, key, paths, tokenizer, renderer, end_token_ids)
            for key, paths in files.items()
        )
        val = attempt("data.val_files", _read_val_prompts, config, tokenizer, environment)
        of_tasks = None
        if data.val_tasks:
            of_tasks = attempt("data.val_tasks", read_task_prompts, data, config.reward.kwargs, tokenizer)
        supervised = attempt("sft.train_files", _read_supervised, config, tokenizer, renderer, end_token_ids)
        return cls(train or [], offline or [], [*(val or []), *(of_tasks or [])], supervised or [], val_loss or [])

    @property
    def num_trained(self) -> int:
        """Rows of the training."""
        return len(self.train_prompts or self.offline_groups)

    @property
    def examples(self) -> list[Prompt]:
        """Lists the prompts that rewards are tried on."""
        return [*examples_of(self.train_prompts), *self.val_prompts]

    @property
    def first_of_each(self) -> list[Prompt]:
        """Lists the prompts that the environment may be tried on."""
        return [*one_of_each(self.train_prompts), *self.val_prompts]


def read_train_prompts(
    config: Config, tokenizer: Any | None, environment: CheckedEnvironment | None = None, *, is_plan: bool = False
) -> Sequence[Prompt]:
    """Reads the prompts to train on; none with algorithm.source=file. `environment` is that of the rollouts, if there is one.

    `is_plan`: nothing will be sampled, so a sample of many rows is measured (load_prompts).
    """
    if not config.trainer.total_training_steps or config.algorithm.source == "file":
        return []
    parts: list[SourcePrompts] = []
    teachers = TeacherColumns(config.distillation.key, config.teachers) if config.teachers else None
    for source in sources_of(config):
        reward = source.reward or reward_name(config.reward) if config.has_rule else BY_MODEL
        key = "data.train_files" if source.name is None else f"{source.key}.files"
        read = config, source, key, source.files, tokenizer, environment, reward
        prompts = _read_prompts(*read, is_plan=is_plan, teachers=teachers, limits=source.limits)
        if source.name is not None and prompts and config.data.sampling.pass_rates is not None:
            prompts = select_prompts(prompts, config.data.sampling)
        if source.name is not None and prompts:
            parts.append(SourcePrompts(source.name, prompts, source.weight or len(prompts)))
    for name in sorted(config.teachers.keys() - teachers.used) if teachers is not None and teachers.used else ():
        raise ConfigError(
            f"{marked(f'teachers.{name}')}: no row has its key {config.teachers[name].key or name!r} in the column"
            f" {config.distillation.key!r} (distillation.key); correct the key, or leave the teacher out"
        )
    if config.data.sources:
        prompts = Mixture(parts) if parts else []
    elif config.data.sampling.pass_rates is not None and prompts:
        prompts = select_prompts(prompts, config.data.sampling)
    if config.data.sampling.pass_rates is not None and not prompts:  # there is no tokenizer, or no file on this machine
        read_pass_rates(config.data.sampling.pass_rates)
    known = {None, *(source.name for source in config.data.sources)}
    if prompts and config.data.curriculum.pieces and known >= {one.source for one in config.data.curriculum.pieces}:
        prompt_sampler(prompts, config.data)  # raises ConfigError where a piece has no prompt
    return prompts


def _read_val_prompts(config: Config, tokenizer: Any | None, environment: CheckedEnvironment | None) -> list[Prompt]:
    """Reads the prompts of `data.val_files` and of each source's."""
    prompts: list[Prompt] = []
    for source in sources_of(config):
        key = "data.val_files" if source.name is None else f"{source.key}.val_files"
        reward, most = source.reward or reward_name(config.reward), config.data.val_max_samples
        prompts += _read_prompts(config, source, key, source.val_files, tokenizer, environment, reward, most)
    return prompts


def _read_prompts(
    config: Config,
    source: SourceFiles,
    key: str,
    files: Sequence[Path],
    tokenizer: Any | None,
    environment: CheckedEnvironment | None,
    reward: str | None,
    max_samples: int | None = None,
    is_plan: bool = False,
    teachers: TeacherColumns | None = None,
    limits: Mapping[str, int | None] | None = None,
) -> Sequence[Prompt]:
    renderer = environment.renderer if environment else None
    named = "" if grades_itself(config) else reward

    def load() -> Sequence[Prompt]:
        if limits is not None and len(files) == 1 and is_stream(files[0]):  # prompts to train on
            settings = tokenizer, renderer, named, source.name, teachers, limits
            return load_stream(source.data, files[0], source.name, *settings)
        read = source.data, files, tokenizer, named, max_samples, renderer
        return load_prompts(*read, source=source.name, is_plan=is_plan, teachers=teachers, limits=limits)

    return _read(key, files, tokenizer, lambda row: parsed_row(get_task(source.data.task), reward, row), load)


def _read_supervised(
    config: Config, tokenizer: Any | None, renderer: TurnRenderer | None, end_token_ids: Sequence[int]
) -> Sequence[OfflineGroup]:
    """Reads the rows of the supervised warmup, and of CHORD. `renderer` is that of the rollouts, if they have several turns."""
    files = config.sft.train_files if config.sft.steps or config.algorithm.chord.batch_size else []
    return _read(
        "sft.train_files",
        files,
        tokenizer,
        lambda row: read_written(row, ["response"]),
        lambda: load_offline_groups(config.data, files, tokenizer, {"response": 1.0}, renderer, end_token_ids),
    )


def read_loss_rows(
    config: Config,
    key: str,
    files: Sequence[Path],
    tokenizer: Any | None,
    renderer: TurnRenderer | None = None,
    end_token_ids: Sequence[int] = (),
) -> Sequence[OfflineGroup]:
    """Reads the rows of the loss from files: responses, pairs of them, or labelled steps. `key` names the files."""
    data, facts = config.data, policy_losses.facts(config.actor.loss_mode)
    separator, wanted = config.reward_model.step_separator, PAIR_ROWS

    def load() -> Sequence[OfflineGroup]:
        if facts.scores == "step":
            return load_steps(data, files, tokenizer, separator)
        if facts.scores:
            return load_pairs(data, files, tokenizer, _pad_token_id(config), renderer)
        return load_offline_groups(data, files, tokenizer, fields, renderer, end_token_ids)

    fields = {"chosen": 1.0, "rejected": 0.0} if facts.paired else {"response": 1.0}
    parse: Callable[[dict[str, Any]], object] = read_pairs
    if facts.scores == "step":
        parse, wanted = functools.partial(read_steps, separator=separator), STEP_ROWS
    elif not facts.scores:
        parse = functools.partial(read_written, fields=list(fields))
        wanted = '{"prompt", "chosen", "rejected"}' if facts.paired else '{"prompt", "response"} or {"messages"}'
    return _read(key, files, tokenizer, parse, load, f" (actor.loss_mode={config.actor.loss_mode} reads rows {wanted})")


def _pad_token_id(config: Config) -> int | None:
    """Reads the id in the model's config.json, as transformers' sequence classification reads it."""
    try:
        pad_token_id = read_config(config.model.path).get("pad_token_id")
    except (ValueError, OSError):
        return None  # the folder is reported by another check
    return pad_token_id if isinstance(pad_token_id, int) else None


def _read(
    key: str,
    files: Sequence[Path],
    tokenizer: Any | None,
    parse: Callable[[dict[str, Any]], object],
    load: Callable[[], Sequence[T]],
    wanted: str = "",
) -> Sequence[T]:
    """Calls `load()`. Without a tokenizer it only checks the files by `parse`, row by row.

    Each message of a ConfigError begins with the key, and ends with `wanted`.
    """
    if not files or (tokenizer is None and any(map(is_stream, files))):
        return []
    try:
        if tokenizer is not None:
            return load()
        for _ in RowSet(files).parsed(parse):
            pass
    except ConfigError as error:
        section = key.partition("[")[0]  # data.sources[0] (name).files
        raise ConfigError(*(Problem(f"{key}: {problem}{wanted}", (section,)) for problem in error.problems)) from error
    return []
