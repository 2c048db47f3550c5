"""The settings of one evaluation: its tasks, prompts and model, read and checked before anything is started.

`EvaluationSettings.identity` is everything that decides the scores. The number of ranks and the batches do not affect them:
every sample has a seed made of (seed, task, problem, sample). A task file may name an environment (docs/evaluation.md).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_megatron.config import ConfigError, DataConfig
from grpo_megatron.config.problems import ProblemList
from grpo_megatron.data.benchmarks import DataPlaces, Dataset, problem_prompts, read_datasets
from grpo_megatron.data.images import NOT_FILES, are_files
from grpo_megatron.data.prompts import check_tokenizer, image_format
from grpo_megatron.data.task import Example, Task, get_tasks, recognised_task
from grpo_megatron.data.tokenizer import TurnRenderer
from grpo_megatron.environments.pool import find_environment, make_environment
from grpo_megatron.evaluation.ask import AnswerSettings, AskedModel, weights_sha256, with_options
from grpo_megatron.evaluation.grading import grader_of
from grpo_megatron.evaluation.ledger import Key, check_output
from grpo_megatron.evaluation.options import EvaluateOptions
from grpo_megatron.types import Prompt

Format = Literal["chat", "text"]
ENVIRONMENT = "environment"  # the grader of a task whose environment gives the rewards
REWARD = "reward"  # the score of --reward
FEWSHOT_SEED = 1234  # of the choice of examples, where the task names none


@dataclass(frozen=True)
class PromptSet:
    """A task's prompts, in the order of its file.

    `asked_sha256` is of the prompts before a chat template: equal for all models. `prompts_sha256` is of the rendered
    texts: equal for all models with one chat template.
    """

    prompts: list[Prompt]
    format: Format
    num_fewshot: int
    asked_sha256: str
    prompts_sha256: str
    image_pixels: tuple[int, int] | None  # the fewest and the most of an image; None: no prompt has images
    longest: int  # tokens of the longest prompt


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
    turns: TurnRenderer | None = None,
) -> PromptSet:
    """Render the prompts; `system_prompt` replaces the task's own. `turns`: renders those of the task's environment.

    Raises ConfigError: failing template, empty prompt, images that the model or the format cannot have.
    """
    data = DataConfig(apply_chat_template=format == "chat", system_prompt=system_prompt)
    try:
        prompts = problem_prompts(dataset, data, tokenizer, turns, _choose_examples(dataset, num_fewshot, seed))
        longest = max(len(prompt.prompt_ids) for prompt in prompts)  # renders all
    except ConfigError as error:
        raise with_options(error) from error
    texts = [prompt.text for prompt in prompts]
    check_tokenizer(tokenizer, texts)
    unrendered = [json.dumps(prompt.messages) for prompt in prompts] if format == "chat" else texts
    images = image_format(tokenizer)
    return PromptSet(
        prompts,
        format,
        num_fewshot,
        _sha256_of_texts(unrendered),
        _sha256_of_texts(texts),
        (images.min_pixels, images.max_pixels) if dataset.rows.image_sizes else None,
        longest,
    )


def _sha256_of_texts(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _choose_examples(dataset: Dataset, num_fewshot: int, seed: int) -> list[Sequence[Example]]:
    """Choose the examples of every problem. The choice depends on the seed and the two sizes, not on the rows."""
    count, fewshot = len(dataset.problems), dataset.task.fewshot
    if not num_fewshot:
        return [()] * count
    assert fewshot is not None, "read_datasets refuses this"
    if fewshot.examples:
        return [dataset.pool] * count  # in the task's order
    generator = random.Random(seed if fewshot.seed is None else fewshot.seed)
    if fewshot.rule == "per-problem":
        return [generator.sample(dataset.pool, num_fewshot) for _ in range(count)]
    return [generator.sample(dataset.pool, num_fewshot)] * count


@dataclass(frozen=True)
class TaskRun:
    """A task as it will be run."""

    dataset: Dataset
    prompts: PromptSet
    answers: AnswerSettings

    @property
    def graders(self) -> dict[str, str]:
        """Score -> grader, headline first."""
        return {"solved": ENVIRONMENT} if self.answers.gives_rewards else self.dataset.task.graders

    @property
    def name(self) -> str:
        return self.dataset.task.name

    def keys(self) -> list[Key]:
        """List (problem, sample index) of every sample, problem by problem."""
        return [(prompt.uid, index) for prompt in self.prompts.prompts for index in self.answers.indices]

    def identity(self) -> dict[str, Any]:
        task, prompts, dataset, answers = self.dataset.task, self.prompts, self.dataset, self.answers
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
            "greedy": answers.greedy,
            "samples": answers.samples,
            "temperature": answers.temperature,
            "top_p": answers.top_p,
            "max_tokens": answers.max_tokens,
            "stop": answers.stop,
            **({"image_pixels": list(prompts.image_pixels)} if prompts.image_pixels else {}),
        }


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Everything that was read for an evaluation. `fingerprint` is of the weights."""

    options: EvaluateOptions
    model: AskedModel
    runs: list[TaskRun]
    fingerprint: str

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt plus completion."""
        return max(run.answers.max_prompt_tokens + run.answers.max_tokens for run in self.runs)

    def identity(self) -> dict[str, Any]:
        """Collect everything that decides the scores, as JSON."""
        model = self.model
        return {
            "run_format": 1,
            "model": {"sha256": self.fingerprint, "dtype": model.dtype, "eos_token_ids": model.eos_token_ids},
            "seed": self.options.seed,
            "engine_kwargs": dict(self.options.engine_kwargs),
            **({"engine": self.options.engine} if self.options.engine != "vllm" else {}),
            "tasks": {run.name: run.identity() for run in self.runs},
        }


def prepare(options: EvaluateOptions) -> EvaluationSettings:
    """Read and check everything. Raises ConfigError; nothing was written or started."""
    tasks = _chosen_tasks(options)
    gives_rewards = _check_graders(tasks, options.unsafe)
    places = DataPlaces(options.data, {name or tasks[0].name: path for name, path in options.files.items()})
    problems, datasets = ProblemList(), list[Dataset]()
    model = problems.attempt("", AskedModel.read, options, options.chat_template)
    try:
        images = image_format(model.tokenizer) if model else None
        datasets = read_datasets(tasks, places, lambda task: _num_fewshot(options, task), options.limit, images)
        for dataset in datasets:
            for grader in dataset.task.graders.values():
                problems.attempt("", grader_of, grader, dataset.problems[0].row, unsafe=options.unsafe)
    except ValueError as error:
        problems.add([str(error)])
    problems.raise_if_any()
    assert model is not None
    runs = [_task_run(options, dataset, model, dataset.task.name in gives_rewards) for dataset in datasets]
    if too_long := [text for run in runs if (text := _length_problem(run, model.max_positions))]:
        raise ConfigError("\n".join(too_long))
    settings = EvaluationSettings(options=options, model=model, runs=runs, fingerprint=weights_sha256(model.source))
    check_output(options.folder, settings.identity())
    return settings


def _chosen_tasks(options: EvaluateOptions) -> list[Task]:
    """Find the tasks by name, or the rows of --file as a task with the file's name. Raises ConfigError."""
    if options.tasks:
        tasks = get_tasks(list(options.tasks))
    else:
        file = options.files[""]
        [rows] = get_tasks([recognised_task([file]) or "jsonl"])
        name = re.sub(r"[^A-Za-z0-9_-]+", "_", file.stem)
        tasks = [dataclasses.replace(rows, name=name, title=f"Rows of {file.name}")]
    if options.reward is None:
        return tasks
    graded: dict[str, Any] = {"reward": options.reward, "rewards": {}, "graders": {REWARD: options.reward}}
    return [dataclasses.replace(task, **graded) for task in tasks]


def _check_graders(tasks: list[Task], unsafe: bool) -> set[str]:
    """Find the tasks whose environment gives the rewards. Raises ConfigError: a task without a grader, an unknown grader."""
    problems, gives_rewards = ProblemList(), set()
    for task in tasks:
        name = task.multi_turn.environment
        try:
            if name is not None and find_environment(name).gives_rewards:
                gives_rewards.add(task.name)
            elif not task.graders:
                text = f"task {task.name!r} has no grader; set --reward module:function, or add"
                problems.add([f"{text} `reward` or `graders` to its definition"])
        except ConfigError as error:
            problems.add([_in_task(task, error)])
        for grader in task.graders.values():
            problems.attempt("", grader_of, grader, unsafe=unsafe)
    problems.raise_if_any()
    return gives_rewards


def _in_task(task: Task, error: ConfigError) -> str:
    return f"task {task.name!r}: {str(error).replace('rollout.multi_turn', 'multi_turn')}"


def _num_fewshot(options: EvaluateOptions, task: Task) -> int:
    default = task.fewshot.default if task.fewshot else 0
    return default if options.num_fewshot is None else options.num_fewshot


def _task_run(options: EvaluateOptions, dataset: Dataset, model: AskedModel, gives_rewards: bool) -> TaskRun:
    task, num_fewshot, tokenizer = dataset.task, _num_fewshot(options, dataset.task), model.tokenizer
    format = choose_format(task, options.format, num_fewshot, tokenizer)
    if format == "text" and options.system_prompt is not None:
        raise ConfigError(f"--system-prompt needs a chat, and task {task.name!r} is plain text here; unset one of them")
    turns = None
    if task.multi_turn.environment is not None:
        if dataset.rows.image_sizes and not all(are_files(problem.row) for problem in dataset.problems):
            raise ConfigError(f"task {task.name!r}: a row has an image that is no file, and {NOT_FILES}")
        if format == "text":
            raise ConfigError(f"task {task.name!r} has an environment, whose turns are a chat; leave out --format text")
        try:
            tools = make_environment(task.multi_turn).tools()
        except ConfigError as error:
            raise ConfigError(_in_task(task, error)) from error
        turns = TurnRenderer(tokenizer, tools, f"task {task.name!r}", end_token_ids=model.eos_token_ids)
        turns.check(may_rewrite=task.multi_turn.history == "own")
    prompts = build_prompts(dataset, format, num_fewshot, FEWSHOT_SEED, tokenizer, options.system_prompt, turns)
    answers = AnswerSettings(
        samples=0 if options.samples == 1 and not options.temperature else options.samples,
        greedy=not options.no_greedy,
        temperature=options.temperature or task.sampling.temperature,
        top_p=task.sampling.top_p if options.top_p is None else options.top_p,
        max_tokens=options.max_tokens or task.max_tokens,
        stop=task.text.stop if format == "text" else [],
        turns=turns,
        multi_turn=task.multi_turn,
        gives_rewards=gives_rewards,
        max_prompt_tokens=(turns and task.max_prompt_tokens) or prompts.longest,  # an environment may write its own
    )
    return TaskRun(dataset, prompts, answers)


def _length_problem(run: TaskRun, limit: int) -> str | None:
    """Check that prompt plus completion fit the model. No problem is left out: the scores are of the whole benchmark."""
    length, max_tokens = run.answers.max_prompt_tokens, run.answers.max_tokens
    if length + max_tokens <= limit:
        return None
    longest = max(run.prompts.prompts, key=lambda prompt: len(prompt.prompt_ids))
    what = f"prompt {longest.uid}" if len(longest.prompt_ids) == length else "max_prompt_tokens"
    if length < limit:
        remedy = f"set --max-tokens {limit - length} or less"
    elif run.prompts.num_fewshot:
        remedy = f"set --num-fewshot {run.prompts.num_fewshot // 2}"
    else:
        remedy = "set another model"
    return (
        f"task {run.name!r}: {what} of {length} tokens + max_tokens {max_tokens} = {length + max_tokens} exceed the model's"
        f" max_position_embeddings {limit}; {remedy}"
    )
