"""Settings of one evaluation: read and checked before anything is started, and what of them decides the numbers.

What decides (`EvaluationSettings.identity`) is written to OUT/run.json. A folder whose run.json differs is refused, so
that the completions in it are never those of two runs. How many ranks draw, and in which batches, decides nothing: every
sample has a seed made of (seed, task, problem, sample).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.convert.source import Source
from grpo_megatron.data.prompts import load_tokenizer
from grpo_megatron.evaluation import weights
from grpo_megatron.evaluation.grading import grader_of
from grpo_megatron.evaluation.ledger import GREEDY, Key
from grpo_megatron.evaluation.problems import Dataset, read_datasets
from grpo_megatron.evaluation.prompting import PromptSet, build, choose_format
from grpo_megatron.evaluation.task import Task, read_tasks
from grpo_megatron.models.families import read_config
from grpo_megatron.types import Prompt

RUN_FILE = "run.json"


@dataclass(frozen=True)
class Options:
    """The command line, after its types were checked."""

    model: Path
    tasks: list[str]
    output: Path
    data: Path | None = None
    files: dict[str, Path] = dataclasses.field(default_factory=dict)
    samples: int = 1
    greedy: bool = True
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    num_fewshot: int | None = None
    fewshot_seed: int = 1234
    format: str = "auto"
    chat_template: Path | None = None
    tokenizer: Path | None = None
    hf: Path | None = None
    limit: int | None = None
    seed: int = 0
    dtype: str | None = None
    engine_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Selected:
    """A task as it will be run. `drawn`: samples beside the greedy one."""

    dataset: Dataset
    prompts: PromptSet
    drawn: int
    greedy: bool
    temperature: float
    top_p: float
    max_tokens: int

    @property
    def name(self) -> str:
        return self.dataset.task.name

    def requests(self) -> list[tuple[Prompt, int]]:
        """Every (prompt, sample index), prompt by prompt: the samples of one share its cached beginning."""
        indices = [GREEDY] * self.greedy + list(range(self.drawn))
        return [(prompt, index) for prompt in self.prompts.prompts for index in indices]

    def keys(self) -> list[Key]:
        return [(prompt.uid, index) for prompt, index in self.requests()]

    def identity(self) -> dict[str, Any]:
        task, prompts, dataset = self.dataset.task, self.prompts, self.dataset
        return {
            "version": task.spec.version,
            "task_sha256": task.sha256,
            "data_sha256": dataset.sha256,
            "fewshot_sha256": dataset.pool_sha256,
            "num_problems": len(dataset.problems),
            "format": prompts.format,
            "num_fewshot": prompts.num_fewshot,
            "asked_sha256": prompts.asked_sha256,
            "prompts_sha256": prompts.prompts_sha256,
            "greedy": self.greedy,
            "samples": self.drawn,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "stop": prompts.stop,
        }


@dataclass(frozen=True)
class EvaluationSettings:
    options: Options
    source: Source
    tokenizer: Any
    selected: list[Selected]
    eos_token_ids: list[int]
    max_model_len: int
    dtype: str
    fingerprint: str

    def identity(self) -> dict[str, Any]:
        """Everything that decides the numbers, as JSON."""
        return {
            "run_format": 1,
            "model": {"sha256": self.fingerprint, "dtype": self.dtype, "eos_token_ids": self.eos_token_ids},
            "seed": self.options.seed,
            "engine_kwargs": self.options.engine_kwargs,
            "tasks": {selected.name: selected.identity() for selected in self.selected},
        }


def prepare(options: Options) -> EvaluationSettings:
    """Read and check everything. Raises ConfigError; nothing was written or started."""
    _check_sampling(options)
    tasks = read_tasks(options.tasks)
    for grader in (grader for task in tasks for grader in task.spec.graders.values()):
        grader_of(grader)
    problems: list[str] = []
    datasets: list[Dataset] = []
    source = tokenizer = None
    try:
        datasets = read_datasets(
            tasks, options.data, options.files, lambda task: _num_fewshot(options, task), options.limit
        )
    except ConfigError as error:
        problems.append(str(error))
    try:
        source = weights.open_model(options.model, options.hf)
        tokenizer = _tokenizer(options, source)
    except ConfigError as error:
        problems.append(str(error))
    if problems or source is None:
        raise ConfigError("\n".join(problems))
    selected = [_select(options, dataset, tokenizer) for dataset in datasets]
    plan = EvaluationSettings(
        options,
        source,
        tokenizer,
        selected,
        _eos_token_ids(source, tokenizer),
        max(len(p.prompt_ids) + s.max_tokens for s in selected for p in s.prompts.prompts),
        weights.dtype_of(source, options.dtype),
        weights.fingerprint(source),
    )
    _check_lengths(plan)
    check_output(plan)
    return plan


def _check_sampling(options: Options) -> None:
    if options.temperature == 0 and options.samples > 1:
        raise ConfigError(
            f"--samples {options.samples} with --temperature 0: greedy samples are all the same; set a temperature above"
            " 0 (or leave it to the task), or --samples 1"
        )
    if not options.greedy and options.samples == 1 and not options.temperature:
        raise ConfigError("--no-greedy leaves nothing to draw; set --samples 2 or more, or --temperature above 0")


def _num_fewshot(options: Options, task: Task) -> int:
    default = task.spec.fewshot.default if task.spec.fewshot else 0
    return default if options.num_fewshot is None else options.num_fewshot


def _tokenizer(options: Options, source: Source) -> Any:
    folder = options.tokenizer or source.hf_folder
    try:
        tokenizer = load_tokenizer(folder, DataConfig(chat_template=options.chat_template))
    except ConfigError as error:
        names = {
            "model.tokenizer_path": "--tokenizer",
            "model.path": "--model",
            "data.chat_template": "--chat-template",
        }
        text = str(error)
        for key, option in names.items():
            text = text.replace(key, option)
        raise ConfigError(text) from error
    if len(tokenizer) > source.arch.vocab_size:
        raise ConfigError(
            f"the tokenizer in {str(folder)!r} has {len(tokenizer)} tokens and the model's embedding"
            f" {source.arch.vocab_size} rows; set --tokenizer to the model's own"
        )
    return tokenizer


def _select(options: Options, dataset: Dataset, tokenizer: Any) -> Selected:
    spec, num_fewshot = dataset.task.spec, _num_fewshot(options, dataset.task)
    format = choose_format(spec, options.format, num_fewshot, tokenizer)
    greedy_only = options.samples == 1 and not options.temperature
    return Selected(
        dataset,
        build(dataset, format, num_fewshot, options.fewshot_seed, tokenizer),
        drawn=0 if greedy_only else options.samples,
        greedy=options.greedy,
        temperature=options.temperature or spec.sampling.temperature,
        top_p=spec.sampling.top_p if options.top_p is None else options.top_p,
        max_tokens=options.max_tokens or spec.max_tokens,
    )


def _eos_token_ids(source: Source, tokenizer: Any) -> list[int]:
    """The tokenizer's, and those of config.json and generation_config.json: chat models end a turn with another."""
    found = {tokenizer.eos_token_id}
    path = source.hf_folder / "generation_config.json"
    configs = [read_config(source.hf_folder)]
    if path.exists():
        try:
            configs.append(json.loads(path.read_text()))
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON ({error}); mend or remove it") from error
    for config in configs:
        ids = config.get("eos_token_id")
        found |= set(ids if isinstance(ids, list) else [ids]) - {None}
    return sorted(found)


def _check_lengths(plan: EvaluationSettings) -> None:
    """Prompt plus answer fit the model. No problem is ever left out: a benchmark is all of it."""
    problems = []
    most = plan.source.arch.max_position_embeddings
    for selected in plan.selected:
        longest = max(selected.prompts.prompts, key=lambda prompt: len(prompt.prompt_ids))
        length = len(longest.prompt_ids)
        if length + selected.max_tokens <= most:
            continue
        total = f"task {selected.name!r}: prompt {longest.uid} of {length} tokens + max_tokens {selected.max_tokens}"
        total += f" = {length + selected.max_tokens} exceed the model's max_position_embeddings {most}"
        less = "--num-fewshot " + str(max(0, selected.prompts.num_fewshot // 2)) if selected.prompts.num_fewshot else ""
        remedy = f"set --max-tokens {most - length} or less" if length < most else f"set {less or 'another model'}"
        problems.append(f"{total}; {remedy}")
    if problems:
        raise ConfigError("\n".join(problems))


def check_output(plan: EvaluationSettings) -> None:
    """OUT is new, empty, or of a run with the same identity. Raises ConfigError."""
    output = plan.options.output
    if not output.exists():
        return
    if not output.is_dir():
        raise ConfigError(f"--output {str(output)!r} is a file; choose a folder")
    path = output / RUN_FILE
    if not path.exists():
        if any(not entry.name.startswith(".") for entry in output.iterdir()):
            raise ConfigError(
                f"--output {str(output)!r} holds something else (it has no {RUN_FILE}); choose another folder"
            )
        return
    try:
        theirs = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not readable ({error}); remove the folder, or choose another --output") from error
    different = _differences(theirs, plan.identity(), "")
    if different:
        raise ConfigError(
            f"--output {str(output)!r} holds a run with other settings ({'; '.join(different[:6])}); choose another"
            " --output, or remove that folder"
        )


def _differences(theirs: Any, ours: Any, where: str) -> list[str]:
    """Keys with two values. A task that only one has is no difference."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        keys = sorted(theirs.keys() & ours.keys() if where == "tasks" else theirs.keys() | ours.keys())
        found = []
        for key in keys:
            found += _differences(theirs.get(key), ours.get(key), f"{where}.{key}".removeprefix("."))
        return found
    return [] if theirs == ours else [f"{where}: {_shown(theirs)} there, {_shown(ours)} here"]


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:12].rstrip('"') + "..."
