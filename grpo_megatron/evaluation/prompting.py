"""Prompts of the scripted evaluation, rendered as in training, with few-shot examples; and where a completion is cut.

A task with an environment is played instead: its trajectories have the environment, limits and driver of training.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_megatron.config import ConfigError, MultiTurnConfig
from grpo_megatron.data.benchmarks import Dataset
from grpo_megatron.data.prompts import encode_prompts
from grpo_megatron.data.task import Example, Task
from grpo_megatron.data.tokenizer import TurnRenderer, render_chat
from grpo_megatron.environments.pool import find_environment, make_environment
from grpo_megatron.evaluation.ledger import LedgerEntry, PlayedTurn
from grpo_megatron.rollout.engine import sample_seed, stable_hash
from grpo_megatron.sampling.trajectory import Trajectory, TrajectoryLimits
from grpo_megatron.types import GREEDY, Prompt

Format = Literal["chat", "text"]


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
    """Render the prompts; `system_prompt` replaces the task's own. Raises ConfigError: failing template, empty prompt.

    `tools` are JSON schemas for the chat template. An environment reads a prompt's `extra["row"]`: the row of the data
    file, with the chat as "messages".
    """
    task, problems = dataset.task, dataset.problems
    examples = _draw_examples(dataset, num_fewshot, seed)
    extras: list[dict[str, Any]] = [{} for _ in problems]
    if format == "chat":
        chats = [task.messages(p.question, e, system_prompt) for p, e in zip(problems, examples, strict=True)]
        unrendered = [json.dumps(chat) for chat in chats]
        if task.multi_turn.environment is not None:
            extras = [{"row": {**p.row, "messages": chat}} for p, chat in zip(problems, chats, strict=True)]
        try:
            texts = [render_chat(chat, tokenizer, p.uid, tools) for chat, p in zip(chats, problems, strict=True)]
        except ConfigError as error:
            raise ConfigError(f"{error}; set --format text, or --chat-template") from error
    else:
        try:
            texts = [task.plain_text(p.question, e) for p, e in zip(problems, examples, strict=True)]
        except ValueError as error:
            raise ConfigError(f"task {task.name!r}: {error}; set --format chat") from error
        unrendered = texts
    encoded = encode_prompts(texts, tokenizer, is_chat=format == "chat")
    prompts = [
        Prompt(problem.uid, tuple(ids), text, problem.answer, task.name, task.reward or "", extra)
        for problem, ids, text, extra in zip(problems, encoded, texts, extras, strict=True)
    ]
    return PromptSet(
        prompts=prompts,
        format=format,
        num_fewshot=num_fewshot,
        stop=task.text.stop if format == "text" else [],
        asked_sha256=_texts_sha256(unrendered),
        prompts_sha256=_texts_sha256(texts),
    )


def _draw_examples(dataset: Dataset, num_fewshot: int, seed: int) -> list[list[Example]]:
    """The examples of every problem. `sample` depends only on the generator and the two sizes, not on the rows."""
    count = len(dataset.problems)
    if not num_fewshot:
        return [[] for _ in range(count)]
    fewshot = dataset.task.fewshot
    assert fewshot is not None, "read_datasets refuses this"
    if fewshot.examples:
        return [dataset.pool] * count  # in the task's order
    generator = random.Random(seed if fewshot.seed is None else fewshot.seed)
    if fewshot.rule == "per-problem":
        return [generator.sample(dataset.pool, num_fewshot) for _ in range(count)]
    return [generator.sample(dataset.pool, num_fewshot)] * count


def _texts_sha256(texts: list[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def cut_at_stop(token_ids: list[int], stop: list[str], tokenizer: Any) -> tuple[str, int, bool]:
    """Cut at the first stop text: the text before it, the tokens up to and with it, and whether there was one."""

    def decoded(length: int) -> str:
        return str(tokenizer.decode(token_ids[:length], skip_special_tokens=True))

    text = decoded(len(token_ids))
    places = [text.find(s) for s in stop if s in text]
    if not places:
        return text, len(token_ids), False
    low, high = 0, len(token_ids)  # bisection: the fewest tokens whose text holds a stop text
    while low < high:
        middle = (low + high) // 2
        part = decoded(middle)
        if any(s in part for s in stop):
            high = middle
        else:
            low = middle + 1
    return text[: min(places)], low, True


# -- trajectories of tasks with an environment -------------------------------------------------------------------------
# A task file names the environment by the keys of `rollout.multi_turn`:
#
#     name: my_env
#     version: 1
#     title: My environment
#     question: ["{question}"]
#     answer: [{field: answer}]
#     reward: math                     # left out where the environment gives the rewards itself
#     max_tokens: 2048                 # generated and observed tokens of all turns
#     multi_turn: {environment: tools, tools: [calculator], max_assistant_turns: 4}
#
# The reward function grades the last turn of the assistant. Where the environment gives the rewards, a trajectory is right if
# the sum of its rewards is at least 1.

ENVIRONMENT = "environment"  # the grader of a task whose environment gives the rewards


@dataclass(frozen=True)
class Arena:
    """What a task with an environment needs besides its prompts."""

    multi_turn: MultiTurnConfig
    renderer: TurnRenderer
    gives_rewards: bool


def gives_rewards(task: Task) -> bool:
    """Whether an environment grades the task's trajectories. Raises ConfigError for a name that cannot be found."""
    name = task.multi_turn.environment
    return name is not None and find_environment(name).gives_rewards


def read_arena(task: Task, tokenizer: Any, eos_token_ids: Sequence[int]) -> Arena | None:
    """What a task with an environment needs; None for a single turn. Raises ConfigError: no such environment, a template
    that cannot render its turns."""
    if task.multi_turn.environment is None:
        return None
    try:
        environment = make_environment(task.multi_turn)
    except ConfigError as error:
        raise ConfigError(f"task {task.name!r}: {str(error).replace('rollout.multi_turn', 'multi_turn')}") from error
    renderer = TurnRenderer(tokenizer, environment.tools(), f"task {task.name!r}", end_token_ids=eos_token_ids)
    renderer.check()
    return Arena(task.multi_turn, renderer, environment.gives_rewards)


def new_trajectory(
    prompt: Prompt,
    index: int,
    *,
    run_seed: int,
    version: int,
    limits: TrajectoryLimits,
    temperature: float,
    top_p: float,
) -> Trajectory:
    """Begin a trajectory of a problem. Its seeds depend on the run's seed, the problem and the sample only."""
    is_greedy = index == GREEDY
    row: Any = prompt.extra["row"]
    return Trajectory(
        key=json.dumps([prompt.uid, index]),
        row=row,
        environment_seed=stable_hash(json.dumps(["environment", run_seed, prompt.uid])),
        seed=sample_seed(run_seed, 0, prompt.uid, index),
        limits=limits,
        temperature=0.0 if is_greedy else temperature,
        top_p=1.0 if is_greedy else top_p,
        version=version,
    )


def played_entry(prompt: Prompt, index: int, trajectory: Trajectory, tokenizer: Any) -> LedgerEntry:
    """Write the trajectory as text, turn by turn. Its text is the assistant's last turn, which the graders read."""

    def decoded(start: int, end: int, *, plain: bool) -> str:
        return str(tokenizer.decode(trajectory.response_ids[start:end], skip_special_tokens=plain))

    turns = [PlayedTurn(turn.kind, decoded(turn.start, turn.end, plain=False)) for turn in trajectory.turns]
    last = trajectory.last_turn
    return LedgerEntry(
        prompt.uid,
        index,
        decoded(*last, plain=True) if last else "",
        sum(trajectory.loss_mask()),
        trajectory.finish_reason,
        turns=turns,
        status=trajectory.status,
        reward=sum(reward for _, reward in trajectory.turn_rewards),
    )
