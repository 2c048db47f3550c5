"""Settings of one evaluation: read and checked before anything is started.

`EvaluationSettings.identity` is everything that decides the scores. The number of ranks and the batches do not affect
them: every sample has a seed made of (seed, task, problem, sample).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.convert.source import Source
from grpo_megatron.data.benchmarks import DataPlaces, Dataset, read_datasets
from grpo_megatron.data.task import Task, get_tasks
from grpo_megatron.data.tokenizer import read_end_tokens
from grpo_megatron.evaluation.engine import engine_dtype, model_tokenizer, open_model, weights_sha256
from grpo_megatron.evaluation.grading import grader_of
from grpo_megatron.evaluation.ledger import Key, check_output
from grpo_megatron.evaluation.options import EvaluateOptions
from grpo_megatron.evaluation.prompting import (
    ENVIRONMENT,
    Arena,
    PromptSet,
    build_prompts,
    choose_format,
    gives_rewards,
    read_arena,
)
from grpo_megatron.models.architecture import engine_split_problems, fitting_sizes
from grpo_megatron.types import GREEDY, Prompt


@dataclass(frozen=True)
class Selected:
    """A task as it will be run. `drawn`: samples per problem besides the greedy one."""

    dataset: Dataset
    prompts: PromptSet
    drawn: int
    greedy: bool
    temperature: float
    top_p: float
    max_tokens: int
    arena: Arena | None = None  # None: single turns

    @property
    def graders(self) -> dict[str, str]:
        """Score -> grader, headline first."""
        return {"solved": ENVIRONMENT} if self.arena and self.arena.gives_rewards else self.dataset.task.graders

    @property
    def max_prompt_tokens(self) -> int:
        """Of the longest prompt. An environment may write its own."""
        longest = max(len(prompt.prompt_ids) for prompt in self.prompts.prompts)
        return longest if self.arena is None else self.dataset.task.max_prompt_tokens or longest

    @property
    def name(self) -> str:
        return self.dataset.task.name

    def requests(self) -> list[tuple[Prompt, int]]:
        """Every (prompt, sample index), prompt by prompt: the engine computes each prompt's key-value cache once."""
        indices = ([GREEDY] if self.greedy else []) + list(range(self.drawn))
        return [(prompt, index) for prompt in self.prompts.prompts for index in indices]

    def keys(self) -> list[Key]:
        return [(prompt.uid, index) for prompt, index in self.requests()]

    def identity(self) -> dict[str, Any]:
        task, prompts, dataset = self.dataset.task, self.prompts, self.dataset
        return {
            "version": task.version,
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
    """Everything that was read for a run. `max_model_len`: tokens of the longest prompt plus completion."""

    options: EvaluateOptions
    source: Source
    tokenizer: Any
    selected: list[Selected]
    eos_token_ids: list[int]
    max_model_len: int
    dtype: str
    fingerprint: str

    def identity(self) -> dict[str, Any]:
        """Everything that decides the scores, as JSON."""
        return {
            "run_format": 1,
            "model": {"sha256": self.fingerprint, "dtype": self.dtype, "eos_token_ids": self.eos_token_ids},
            "seed": self.options.seed,
            "engine_kwargs": dict(self.options.engine_kwargs),
            "tasks": {selected.name: selected.identity() for selected in self.selected},
        }


def prepare(options: EvaluateOptions) -> EvaluationSettings:
    """Read and check everything. Raises ConfigError; nothing was written or started."""
    tp = options.tp
    tasks = get_tasks(list(options.tasks))
    _check_graders(tasks)
    places = DataPlaces(options.data, options.files)
    problems: list[str] = []
    datasets: list[Dataset] = []
    source = tokenizer = None
    try:
        datasets = read_datasets(tasks, places, lambda task: _num_fewshot(options, task), options.limit)
    except ConfigError as error:
        problems.append(str(error))
    try:
        source = open_model(options.model, options.hf, options.family)
        if split_problems := engine_split_problems(source.arch, tp):
            problems.append(
                f"--tp {tp} cannot split the model {str(options.model)!r}: {', '.join(split_problems)}; set one of"
                f" {fitting_sizes(source.arch, engine_split_problems)}"
            )
        tokenizer = model_tokenizer(source, options.tokenizer, options.chat_template)
    except ConfigError as error:
        problems.append(str(error))
    if problems or source is None:
        raise ConfigError("\n".join(problems))
    eos_token_ids = read_end_tokens(tokenizer, source.hf_folder, source.arch.vocab_size).ids
    selected = [_select(options, dataset, tokenizer, eos_token_ids) for dataset in datasets]
    settings = EvaluationSettings(
        options,
        source,
        tokenizer,
        selected,
        eos_token_ids,
        max(one.max_prompt_tokens + one.max_tokens for one in selected),
        engine_dtype(source, options.dtype),
        weights_sha256(source),
    )
    _check_lengths(settings)
    check_output(options.folder, settings.identity())
    return settings


def _check_graders(tasks: list[Task]) -> None:
    problems = []
    for task in tasks:
        try:
            if not task.graders and not gives_rewards(task):
                problems.append(f"task {task.name!r} has no grader; add `reward` or `graders` to its definition")
        except ConfigError as error:
            problems.append(f"task {task.name!r}: {str(error).replace('rollout.multi_turn', 'multi_turn')}")
    for grader in (grader for task in tasks for grader in task.graders.values()):
        try:
            grader_of(grader)
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))


def _num_fewshot(options: EvaluateOptions, task: Task) -> int:
    default = task.fewshot.default if task.fewshot else 0
    return default if options.num_fewshot is None else options.num_fewshot


def _select(options: EvaluateOptions, dataset: Dataset, tokenizer: Any, eos_token_ids: list[int]) -> Selected:
    task, num_fewshot = dataset.task, _num_fewshot(options, dataset.task)
    format = choose_format(task, options.format, num_fewshot, tokenizer)
    if format == "text" and options.system_prompt is not None:
        raise ConfigError(f"--system-prompt needs a chat, and task {task.name!r} is plain text here; unset one of them")
    arena = None
    if task.multi_turn.environment is not None:
        if format == "text":
            raise ConfigError(f"task {task.name!r} has an environment, whose turns are a chat; leave out --format text")
        arena = read_arena(task, tokenizer, eos_token_ids)
    tools = arena.renderer.tools if arena else ()
    greedy_only = options.samples == 1 and not options.temperature
    return Selected(
        dataset,
        build_prompts(dataset, format, num_fewshot, options.fewshot_seed, tokenizer, options.system_prompt, tools),
        drawn=0 if greedy_only else options.samples,
        greedy=not options.no_greedy,
        temperature=options.temperature or task.sampling.temperature,
        top_p=task.sampling.top_p if options.top_p is None else options.top_p,
        max_tokens=options.max_tokens or task.max_tokens,
        arena=arena,
    )


def _check_lengths(settings: EvaluationSettings) -> None:
    """Prompt plus completion must fit the model. No problem is left out: the scores are of the whole benchmark."""
    problems = []
    limit = settings.source.arch.max_position_embeddings
    for selected in settings.selected:
        longest = max(selected.prompts.prompts, key=lambda prompt: len(prompt.prompt_ids))
        what = f"prompt {longest.uid}" if len(longest.prompt_ids) == selected.max_prompt_tokens else "max_prompt_tokens"
        length = selected.max_prompt_tokens
        if length + selected.max_tokens <= limit:
            continue
        total = f"task {selected.name!r}: {what} of {length} tokens + max_tokens {selected.max_tokens}"
        total += f" = {length + selected.max_tokens} exceed the model's max_position_embeddings {limit}"
        if length < limit:
            remedy = f"set --max-tokens {limit - length} or less"
        elif selected.prompts.num_fewshot:
            remedy = f"set --num-fewshot {selected.prompts.num_fewshot // 2}"
        else:
            remedy = "set another model"
        problems.append(f"{total}; {remedy}")
    if problems:
        raise ConfigError("\n".join(problems))
