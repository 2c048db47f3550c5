"""Prompts: problems as the model reads them, through its chat template or as plain text, with few-shot examples."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from typing import Any, Literal

from grpo_megatron.config import ConfigError
from grpo_megatron.evaluation.problems import Dataset, Example, Problem, fill
from grpo_megatron.evaluation.task import TaskFile
from grpo_megatron.types import Prompt

Format = Literal["chat", "text"]
Question = str | list[dict[str, str]]


@dataclass(frozen=True)
class PromptSet:
    """A task's prompts, in the order of its file. `asked_sha256` is of the questions before any chat template, and
    `prompts_sha256` of the texts after it: the first is equal between models, the second also within a family."""

    prompts: list[Prompt]
    format: Format
    num_fewshot: int
    stop: list[str]
    asked_sha256: str
    prompts_sha256: str


def choose_format(spec: TaskFile, wanted: str, num_fewshot: int, tokenizer: Any) -> Format:
    """`auto`: a chat unless there are few-shot examples, or the task has none. Raises ConfigError."""
    if wanted == "text" or (wanted == "auto" and (num_fewshot or spec.chat is None)):
        return "text"
    if spec.chat is None:
        raise ConfigError(f"task {spec.name!r} is text only; set --format text")
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"task {spec.name!r} is asked as a chat, and the tokenizer has no chat template; set --format text (for base"
            " models, best with --num-fewshot), or --chat-template FILE"
        )
    return "chat"


def build(dataset: Dataset, format: Format, num_fewshot: int, seed: int, tokenizer: Any) -> PromptSet:
    """Raises ConfigError when the template fails or a prompt has no tokens."""
    spec = dataset.task.spec
    drawn = draw_examples(dataset, num_fewshot, seed)
    asked: list[Question] = [
        _chat(spec, problem, examples) if format == "chat" else _text(spec, problem, examples)
        for problem, examples in zip(dataset.problems, drawn, strict=True)
    ]
    texts = [
        _render(question, tokenizer, problem.uid) for question, problem in zip(asked, dataset.problems, strict=True)
    ]
    # a chat template writes its special tokens itself; plain text gets the tokenizer's own (BOS of the Llama family)
    ids = tokenizer(texts, add_special_tokens=format == "text")["input_ids"]
    if format == "text":  # a tokenizer that closes every text would end the answer before it begins
        ids = [part[:-1] if part[-1:] == [tokenizer.eos_token_id] else part for part in ids]
    for problem, part in zip(dataset.problems, ids, strict=True):
        if not part:
            raise ConfigError(f"the tokenizer makes no token of {problem.uid}; is it the model's own?")
    prompts = [
        Prompt(problem.uid, tuple(part), text, problem.answer, spec.name, spec.reward or "")
        for problem, part, text in zip(dataset.problems, ids, texts, strict=True)
    ]
    return PromptSet(
        prompts=prompts,
        format=format,
        num_fewshot=num_fewshot,
        stop=spec.text.stop if format == "text" else [],
        asked_sha256=_digest([question if isinstance(question, str) else json.dumps(question) for question in asked]),
        prompts_sha256=_digest(texts),
    )


def draw_examples(dataset: Dataset, num_fewshot: int, seed: int) -> list[list[Example]]:
    """The examples of every problem. `sample` depends on the generator and the two numbers only, not on the rows."""
    count = len(dataset.problems)
    if not num_fewshot:
        return [[] for _ in range(count)]
    fewshot = dataset.task.spec.fewshot
    assert fewshot is not None, "read_datasets has refused it"
    draw = random.Random(seed if fewshot.seed is None else fewshot.seed)
    if fewshot.rule == "per-problem":
        return [draw.sample(dataset.pool, num_fewshot) for _ in range(count)]
    return [draw.sample(dataset.pool, num_fewshot)] * count


def _chat(spec: TaskFile, problem: Problem, examples: list[Example]) -> Question:
    assert spec.chat is not None
    messages = [{"role": "system", "content": spec.chat.system}] if spec.chat.system else []
    for example in examples:
        messages.append({"role": "user", "content": fill(spec.chat.user, {"question": example.question})})
        messages.append({"role": "assistant", "content": example.solution.strip()})
    return [*messages, {"role": "user", "content": fill(spec.chat.user, {"question": problem.question})}]


def _text(spec: TaskFile, problem: Problem, examples: list[Example]) -> str:
    parts = [
        fill(spec.text.problem, {"question": e.question}) + fill(spec.text.example, {"solution": e.solution})
        for e in examples
    ]
    return "".join(parts) + fill(spec.text.problem, {"question": problem.question})


def _render(question: Question, tokenizer: Any, where: str) -> str:
    if isinstance(question, str):
        return question
    try:
        return str(tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # whatever the template raises
        raise ConfigError(
            f"the chat template fails on {where}: {type(error).__name__}: {error}; set --format text, or --chat-template"
        ) from error


def _digest(texts: list[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def stop_token_ids(stop: list[str], tokenizer: Any) -> list[int]:
    """The stop texts that are a token of their own: they end the answer in the engine."""
    found = []
    for text in stop:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) == 1 and text in tokenizer.get_vocab():
            found.append(ids[0])
    return found


def cut(token_ids: list[int], stop: list[str], tokenizer: Any) -> tuple[str, int, bool]:
    """(text before the first stop, tokens up to it, whether there was one)."""

    def decoded(length: int) -> str:
        return str(tokenizer.decode(token_ids[:length], skip_special_tokens=True))

    text = decoded(len(token_ids))
    places = [text.find(s) for s in stop if s in text]
    if not places:
        return text, len(token_ids), False
    low, high = 0, len(token_ids)  # the shortest beginning that holds a stop
    while low < high:
        middle = (low + high) // 2
        part = decoded(middle)
        low, high = (low, middle) if any(s in part for s in stop) else (middle + 1, high)
    return text[: min(places)], low, True
