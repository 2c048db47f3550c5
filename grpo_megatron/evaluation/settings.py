"""What one evaluation is: its tasks, prompts and model, read and checked before anything is started.

`EvaluationSettings.identity` is everything that decides the scores. The number of ranks and the batches do not affect them:
every sample has a seed made of (seed, task, problem, sample).

A task file may name an environment by the keys of `rollout.multi_turn`. Its trajectories have the environment, limits and
driver of training:

    name: my_env
    version: 1
    title: My environment
    question: ["{question}"]
    answer: [{field: answer}]
    reward: math                     # left out where the environment gives the rewards itself
    max_tokens: 2048                 # generated and observed tokens of all turns
    multi_turn: {environment: tools, tools: [calculator], max_assistant_turns: 4}

The reward function grades the last turn of the assistant. Where the environment gives the rewards, a trajectory is right if
the sum of its rewards is at least 1; where some sums are neither 0 nor 1, their mean is reported too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.data.benchmarks import (
    DataPlaces,
    Dataset,
    check_images,
    problem_prompts,
    read_datasets,
)
from grpo_megatron.data.prompts import RowRenderer, image_format
from grpo_megatron.data.task import Example, Task, get_tasks, recognised_task
from grpo_megatron.data.tokenizer import TurnRenderer, read_end_tokens, render_chat
from grpo_megatron.environments.pool import find_environment, make_environment
from grpo_megatron.evaluation.engine import (
    EngineSettings,
    engine_dtype,
    model_tokenizer,
    open_policy,
    weights_sha256,
    with_options,
)
from grpo_megatron.evaluation.grading import grader_of
from grpo_megatron.evaluation.ledger import Key, check_output
from grpo_megatron.evaluation.options import EvaluateOptions
from grpo_megatron.rewards import check_reward
from grpo_megatron.sampling.generator import sample_indices
from grpo_megatron.types import Prompt

Format = Literal["chat", "text"]
ENVIRONMENT = "environment"  # the grader of a task whose environment gives the rewards
REWARD = "reward"  # the score of --reward


@dataclass(frozen=True)
class PromptSet:
    """A task's prompts, in the order of its file.

    `asked_sha256` is of the prompts before a chat template: equal for all models. `prompts_sha256` is of the rendered
    texts: equal for all models with one chat template.
    """

    prompts: list[Prompt]
    format: Format
    num_fewshot: int
    stop: list[str]
    asked_sha256: str
    prompts_sha256: str
    image_pixels: tuple[int, int] | None  # the fewest and the most of an image; None: no prompt has images


def choose_format(task: Task, wanted: str, num_fewshot: int, tokenizer: Any) -> Format:
    """Choose the format; `auto` is text for few-shot examples or a task of plain text, else a chat. Raises ConfigError."""
    if wanted == "text" or (wanted == "auto" and (num_fewshot or task.user_prompt is None)):
        return "text"
    if task.user_prompt is None:
        raise ConfigError(f"task {task.name!r} has plain text prompts only; set --format text")
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"task {task.name!r} needs a chat template, and the tokenizer has none; set --format text (for base models,"
            " best with --num-fewshot), or --chat-template FILE"
        )
    return "chat"


def build_prompts(
    dataset: Dataset,
    format: Format,
    num_fewshot: int,
    seed: int,
    tokenizer: Any,
    system_prompt: str | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> PromptSet:
    """Render the prompts; `system_prompt` replaces the task's own. Raises ConfigError: failing template, empty prompt, images
    that the model or the format cannot have.

    `tools` are JSON schemas for the chat template. An environment reads a prompt's `extra["row"]`: the row of the data
    file, with the chat as "messages".
    """
    task, problems = dataset.task, dataset.problems
    asked = list(zip(problems, _draw_examples(dataset, num_fewshot, seed), strict=True))
    extras: list[dict[str, Any]] = [{} for _ in problems]
    sizes, images = dataset.rows.image_sizes, image_format(tokenizer)
    data = DataConfig(apply_chat_template=format == "chat", system_prompt=system_prompt)
    renderer = RowRenderer(data, task, dataset.rows, tokenizer, None)
    try:
        check_images(renderer, problems)
    except ConfigError as error:
        raise with_options(error) from error
    if sizes and format == "text":
        raise ConfigError(f"task {task.name!r} has images, which a chat template places; set --format chat")
    if format == "chat":
        chats = [task.messages(problem.question, examples, system_prompt) for problem, examples in asked]
        if task.multi_turn.environment is not None:
            extras = [{"row": {**p.row, "messages": chat}} for p, chat in zip(problems, chats, strict=True)]
        try:
            placed = [
                images.messages(chat, len(sizes[number])) if number in sizes else chat
                for number, chat in enumerate(chats)
            ]
            texts = [render_chat(chat, tokenizer, p.uid, tools) for chat, p in zip(placed, problems, strict=True)]
        except ValueError as error:
            raise ConfigError(f"{error}; set --format text, or --chat-template") from error
        unrendered = [json.dumps(chat) for chat in chats]
    else:
        try:
            unrendered = texts = [task.plain_text(problem.question, examples) for problem, examples in asked]
        except ValueError as error:
            raise ConfigError(f"task {task.name!r}: {error}; set --format chat") from error
    prompts = problem_prompts(renderer, task, problems, texts, ({"extra": extra} for extra in extras))
    stop = task.text.stop if format == "text" else []
    asked_sha256, prompts_sha256 = (hashlib.sha256("\0".join(of).encode()).hexdigest() for of in (unrendered, texts))
    limits = (images.min_pixels, images.max_pixels) if sizes else None
    return PromptSet(prompts, format, num_fewshot, stop, asked_sha256, prompts_sha256, limits)


def _draw_examples(dataset: Dataset, num_fewshot: int, seed: int) -> list[list[Example]]:
    """The examples of every problem. `sample` depends only on the generator and the two sizes, not on the rows."""
    count, fewshot = len(dataset.problems), dataset.task.fewshot
    if not num_fewshot:
        return [[] for _ in range(count)]
    assert fewshot is not None, "read_datasets refuses this"
    if fewshot.examples:
        return [dataset.pool] * count  # in the task's order
    generator = random.Random(seed if fewshot.seed is None else fewshot.seed)
    if fewshot.rule == "per-problem":
        return [generator.sample(dataset.pool, num_fewshot) for _ in range(count)]
    return [generator.sample(dataset.pool, num_fewshot)] * count


@dataclass(frozen=True)
class Selected:
    """A task as it will be run. `drawn`: samples per problem besides the greedy one. `renderer` None: single turns."""

    dataset: Dataset
    prompts: PromptSet
    drawn: int
    greedy: bool
    temperature: float
    top_p: float
    max_tokens: int
    renderer: TurnRenderer | None = None
    gives_rewards: bool = False  # the environment does

    @property
    def graders(self) -> dict[str, str]:
        """Score -> grader, headline first."""
        return {"solved": ENVIRONMENT} if self.gives_rewards else self.dataset.task.graders

    @property
    def max_prompt_tokens(self) -> int:
        """Of the longest prompt. An environment may write its own."""
        longest = max(len(prompt.prompt_ids) for prompt in self.prompts.prompts)
        return longest if self.renderer is None else self.dataset.task.max_prompt_tokens or longest

    @property
    def name(self) -> str:
        return self.dataset.task.name

    @property
    def indices(self) -> list[int]:
        """The indices of each problem's samples, in order."""
        return sample_indices(self.drawn, greedy=self.greedy)

    def keys(self) -> list[Key]:
        """(problem, sample index) of every sample, problem by problem."""
        return [(prompt.uid, index) for prompt in self.prompts.prompts for index in self.indices]

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
            **({"image_pixels": list(prompts.image_pixels)} if prompts.image_pixels else {}),
        }


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(EngineSettings):
    """Everything that was read for a run. `fingerprint` is of the weights."""

    options: EvaluateOptions
    selected: list[Selected]
    fingerprint: str

    def identity(self) -> dict[str, Any]:
        """Everything that decides the scores, as JSON."""
        return {
            "run_format": 1,
            "model": {"sha256": self.fingerprint, "dtype": self.dtype, "eos_token_ids": self.eos_token_ids},
            "seed": self.options.seed,
            "engine_kwargs": dict(self.options.engine_kwargs),
            **({"engine": self.options.engine} if self.options.engine != "vllm" else {}),
            "tasks": {selected.name: selected.identity() for selected in self.selected},
        }


def prepare(options: EvaluateOptions) -> EvaluationSettings:
    """Read and check everything. Raises ConfigError; nothing was written or started."""
    tasks = _chosen_tasks(options)
    gives_rewards = _check_graders(tasks)
    files = {name or tasks[0].name: path for name, path in options.files.items()}
    places = DataPlaces(options.data, files)
    problems: list[str] = []
    datasets: list[Dataset] = []
    source = tokenizer = None
    try:
        source = open_policy(options)
        tokenizer = model_tokenizer(source, options, options.chat_template)
    except ConfigError as error:
        problems.append(str(error))
    try:
        images = image_format(tokenizer)
        datasets = read_datasets(tasks, places, lambda task: _num_fewshot(options, task), options.limit, images)
        if options.reward is not None:
            for dataset in datasets:
                check_reward(options.reward, {}, dataset.problems[0].row)
    except ValueError as error:  # of check_reward too
        problems.append(str(error))
    if problems or source is None:
        raise ConfigError("\n".join(problems))
    ends = read_end_tokens(tokenizer, source.hf_folder, source.arch.vocab_size).ids
    selected = [_select(options, dataset, tokenizer, ends, dataset.task.name in gives_rewards) for dataset in datasets]
    if too_long := [text for one in selected if (text := _length_problem(one, source.arch.max_position_embeddings))]:
        raise ConfigError("\n".join(too_long))
    settings = EvaluationSettings(
        options=options,
        source=source,
        tokenizer=tokenizer,
        eos_token_ids=ends,
        max_model_len=max(one.max_prompt_tokens + one.max_tokens for one in selected),
        dtype=engine_dtype(source, options.dtype),
        selected=selected,
        fingerprint=weights_sha256(source),
    )
    check_output(options.folder, settings.identity())
    return settings


def _chosen_tasks(options: EvaluateOptions) -> list[Task]:
    """The tasks by name, or the rows of --file as a task with the file's name. Raises ConfigError."""
    if options.tasks:
        tasks = get_tasks(list(options.tasks))
    else:
        file = options.files[""]
        [rows] = get_tasks([recognised_task([file]) or "jsonl"])
        tasks = [
            dataclasses.replace(rows, name=re.sub(r"[^A-Za-z0-9_-]+", "_", file.stem), title=f"Rows of {file.name}")
        ]
    if options.reward is None:
        return tasks
    return [
        dataclasses.replace(task, reward=options.reward, rewards={}, graders={REWARD: options.reward}) for task in tasks
    ]


def _check_graders(tasks: list[Task]) -> set[str]:
    """The tasks whose environment gives the rewards. Raises ConfigError: a task without a grader, an unknown grader."""
    problems, gives_rewards = [], set()
    for task in tasks:
        name = task.multi_turn.environment
        try:
            if name is not None and find_environment(name).gives_rewards:
                gives_rewards.add(task.name)
            elif not task.graders:
                problems.append(
                    f"task {task.name!r} has no grader; set --reward module:function, or add `reward` or `graders` to its"
                    " definition"
                )
        except ConfigError as error:
            problems.append(_in_task(task, error))
        for grader in task.graders.values():
            try:
                grader_of(grader)
            except ConfigError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return gives_rewards


def _in_task(task: Task, error: ConfigError) -> str:
    return f"task {task.name!r}: {str(error).replace('rollout.multi_turn', 'multi_turn')}"


def _num_fewshot(options: EvaluateOptions, task: Task) -> int:
    default = task.fewshot.default if task.fewshot else 0
    return default if options.num_fewshot is None else options.num_fewshot


def _select(
    options: EvaluateOptions, dataset: Dataset, tokenizer: Any, eos_token_ids: list[int], gives_rewards: bool
) -> Selected:
    task, num_fewshot = dataset.task, _num_fewshot(options, dataset.task)
    format = choose_format(task, options.format, num_fewshot, tokenizer)
    if format == "text" and options.system_prompt is not None:
        raise ConfigError(f"--system-prompt needs a chat, and task {task.name!r} is plain text here; unset one of them")
    renderer = None
    if task.multi_turn.environment is not None and dataset.rows.image_sizes:
        raise ConfigError(f"task {task.name!r} has an environment and rows with images; only single turns read images")
    if task.multi_turn.environment is not None:
        if format == "text":
            raise ConfigError(f"task {task.name!r} has an environment, whose turns are a chat; leave out --format text")
        try:
            tools = make_environment(task.multi_turn).tools()
        except ConfigError as error:
            raise ConfigError(_in_task(task, error)) from error
        renderer = TurnRenderer(tokenizer, tools, f"task {task.name!r}", end_token_ids=eos_token_ids)
        renderer.check()
    schemas = renderer.tools if renderer else ()
    return Selected(
        dataset,
        build_prompts(dataset, format, num_fewshot, options.fewshot_seed, tokenizer, options.system_prompt, schemas),
        drawn=0 if options.samples == 1 and not options.temperature else options.samples,
        greedy=not options.no_greedy,
        temperature=options.temperature or task.sampling.temperature,
        top_p=task.sampling.top_p if options.top_p is None else options.top_p,
        max_tokens=options.max_tokens or task.max_tokens,
        renderer=renderer,
        gives_rewards=gives_rewards,
    )


def _length_problem(selected: Selected, limit: int) -> str | None:
    """Prompt plus completion must fit the model. No problem is left out: the scores are of the whole benchmark."""
    length = selected.max_prompt_tokens
    if length + selected.max_tokens <= limit:
        return None
    longest = max(selected.prompts.prompts, key=lambda prompt: len(prompt.prompt_ids))
    what = f"prompt {longest.uid}" if len(longest.prompt_ids) == length else "max_prompt_tokens"
    if length < limit:
        remedy = f"set --max-tokens {limit - length} or less"
    elif selected.prompts.num_fewshot:
        remedy = f"set --num-fewshot {selected.prompts.num_fewshot // 2}"
    else:
        remedy = "set another model"
    return (
        f"task {selected.name!r}: {what} of {length} tokens + max_tokens {selected.max_tokens} ="
        f" {length + selected.max_tokens} exceed the model's max_position_embeddings {limit}; {remedy}"
    )
