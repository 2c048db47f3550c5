"""Prompts: rows of a task's files -> prompts, through the tokenizer's chat template or as plain text.

All rows are checked before the run; only the numbers of rows with fitting prompts stay in memory. A prompt is made when it
is read. Every rank has all prompts of a step by uid, reward and answer. Only the ranks that sample the responses render and
tokenise them (150 us, measured with GSM8K). responses.py renders rows with responses in the same way.
"""

from __future__ import annotations

import base64
import bisect
import logging
import math
import unicodedata
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from grpo_megatron.config import ConfigError, DataConfig, TeacherConfig
from grpo_megatron.config.problems import Problem
from grpo_megatron.data.images import IMAGE_MARK, NOT_FILES, are_files, has_images, illustrated
from grpo_megatron.data.rows import Messages, Question, RowSet, read_question
from grpo_megatron.data.sampler import LazySequence, keep_fitting
from grpo_megatron.data.task import Example, Task, get_task
from grpo_megatron.data.tokenizer import TurnRenderer, decoded_by_file, render_chat, tokenizer_classes
from grpo_megatron.rewards.reward import PIXELS, RewardItem, opened_thought, reads_answer
from grpo_megatron.types import BY_MODEL, Prompt, PromptImage
from grpo_megatron.untrusted import shown

logger = logging.getLogger(__name__)

SAMPLED_FROM = 200_000  # rows from which on a plan measures a sample
CHECKED = 32  # first prompts that the tokenizer is tried on
SAMPLED_PER_CHUNK = 8  # prompts of each chunk of rows

ParsedRow = tuple[Question, str, str, dict[str, Any]]  # question, answer, reward, row
# token ids of a prompt, and what reads its images
Placed = tuple[tuple[int, ...], Callable[[], tuple[PromptImage, ...]]]


def load_prompts(
    data: DataConfig,
    files: Sequence[Path],
    tokenizer: Any,
    reward_override: str | None = None,
    max_samples: int | None = None,
    renderer: TurnRenderer | None = None,
    *,
    source: str | None = None,
    is_plan: bool = False,
    teachers: TeacherColumns | None = None,
    limits: Mapping[str, int | None] | None = None,
) -> LazySequence[Prompt]:
    """Load the prompts of `files` (data.train_files, or data.val_files with `max_samples` = data.val_max_samples), in order.

    A prompt longer than data.max_prompt_length tokens is dropped and counted. With data.filter_overlong_prompts=false it
    is an error. `uid` is "source/file/row number"; row numbers start at 0 and count dropped rows. Only the first
    `max_samples` rows over all files are used. Raises ConfigError.

    `renderer`: the prompts are for an environment. Their template shows its tools, and `extra["row"]` has the data row, with
    the task's chat as "messages". `reward_override=""`: no reward function scores them. BY_MODEL: nor have they an answer.
    `source`: the name in data.sources, instead of the task's. `is_plan`: this process samples nothing, so of SAMPLED_FROM rows
    and more only a sample of the lengths is measured, and no prompt is dropped. `teachers`: those of the rows. `limits`: Prompt.n
    and max_tokens.
    """
    task = get_task(data.task)
    if reward_override is None and task.reward is None and not task.rewards:
        keys = ("data.task", "reward.function", "reward.components")
        raise ConfigError(Problem(f"data.task={data.task!r} has no reward of its own; set reward.function", keys))
    rows = RowSet(files, source or task.name, image_format(tokenizer))
    used = min(len(rows), max_samples or len(rows))
    reader = PromptReader(data, task, rows, tokenizer, renderer, reward_override, source, teachers, limits or {})
    is_sampled = is_plan and len(rows) >= SAMPLED_FROM
    numbers = {name: number for number, name in enumerate(task.reward_names)}
    kinds, fits, measured = np.zeros(used, np.int8), np.ones(used, np.bool_), 0

    for chunk in rows.parsed(reader.parsed):
        parsed_rows = [(number, parsed) for number, parsed in chunk if number < used]
        kinds[[number for number, _ in parsed_rows]] = [numbers.get(reward, 0) for _, (_, _, reward, _) in parsed_rows]
        parsed_rows = parsed_rows[:SAMPLED_PER_CHUNK] if is_sampled else parsed_rows
        questions = [(number, parsed[0]) for number, parsed in parsed_rows]
        fits[[number for number, _ in questions]] = reader.fit(questions)
        for number, parsed in parsed_rows if teachers is not None else ():
            reader.of_teacher(number, parsed[3])  # raises
        measured += len(questions)
    what = f"prompts are longer than {data.max_prompt_length} tokens"
    table = partial(keep_fitting, data, fits, kinds, reader.make, what, rows.uid)
    if is_sampled:
        table(measured)  # warns
        fits[:] = True
    return table(measured)


@dataclass(frozen=True)
class TeacherColumns:
    """The columns that tell a row's teacher, and what it reads. `key`: distillation.key."""

    key: str | None
    teachers: Mapping[str, TeacherConfig]
    used: set[str] = field(default_factory=set)  # names of the teachers of the rows so far

    def of(self, row: Mapping[str, Any]) -> tuple[str, Question | None]:
        """Find the name of the row's teacher, and its own prompt. Raises ValueError."""
        name = next(iter(self.teachers))
        if self.key is not None:
            value = row.get(self.key)
            names = {teacher.key or name: name for name, teacher in self.teachers.items()}
            if not isinstance(value, str) or value not in names:
                now = f"is {shown(value)}" if self.key in row else "is missing"
                raise ValueError(
                    f"distillation.key: column {self.key!r} {now}, and no teacher has this key"
                    f" ({', '.join(names)}); add one, or take the row out"
                )
            name = names[value]
        self.used.add(name)
        column = self.teachers[name].prompt_column
        return name, None if column is None else read_question(dict(row), column)


@dataclass(frozen=True)
class RowRenderer:
    """A renderer and tokeniser of the questions of a RowSet. `where` is put before a row's uid in messages."""

    data: DataConfig
    task: Task
    rows: RowSet
    tokenizer: Any
    renderer: TurnRenderer | None
    where: ClassVar[str] = ""

    def text(self, number: int, question: Question, examples: Sequence[Example] = ()) -> str:
        """Render the prompt of a row, after worked examples. Raises ConfigError."""
        where, count = self.where + self.rows.uid(number), len(self.rows.image_sizes.get(number, ()))
        return render_prompt(
            self.data,
            self.task,
            question,
            self.tokenizer,
            where,
            tools=self.renderer.tools if self.renderer else (),
            num_images=count,
            examples=examples,
        )

    def check_images(self, question: Question, row: Mapping[str, Any], responses: Sequence[object] = ()) -> None:
        """Check that the prompt of a row can show its images. Raises ValueError."""
        if not has_images(row):
            return
        images = image_format(self.tokenizer)
        if images is None:
            raise ValueError(
                "has images, and the model reads none; set model.path to one that reads images (Qwen2.5-VL), or take the"
                " columns image and images, and the image parts of messages, out"
            )
        if IMAGE_MARK in str(responses):
            raise ValueError(f"has images, and {IMAGE_MARK} after the prompt; only the prompt can show images")
        if self.data.apply_chat_template and self.task.user_prompt is not None:  # else it is refused when rendered
            images.messages(self.task.messages(question, system_prompt=self.data.system_prompt), len(row["images"]))

    def prompt(
        self,
        number: int,
        question: Question,
        row: Mapping[str, Any] | None = None,
        examples: Sequence[Example] = (),
        **fields: Any,
    ) -> RowPrompt:
        """Make the prompt of a row, which is rendered when it is read. `fields`: those of Prompt.

        `row`: what rewards and environments read; None: there is neither.
        """
        if row is not None:
            messages = chat_of(self.data, self.task, question, examples)
            fields |= {"question": question, "columns": row, "data_source": source_of_row(row), "messages": messages}
            if self.renderer:
                if messages and number in self.rows.image_sizes:
                    messages = illustrated(messages, row["images"])
                fields["extra"] = {"row": {**row, "messages": messages}}  # what an environment's reset reads
        images = {} if number in self.rows.image_sizes else {"images": ()}
        return RowPrompt.of(
            partial(self.text, number, question, examples), partial(self._placed, number), **fields, **images
        )

    def _placed(self, number: int, text: str) -> Placed:
        """Tokenise a rendered prompt; returns its ids and a reader of its images. Raises ConfigError."""
        [ids] = self.encode([text])
        ids, places = self._expanded(number, ids)
        return tuple(ids), partial(self.rows.images, number, places)

    def _expanded(self, number: int, ids: list[int]) -> tuple[list[int], list[int]]:
        """Replace each image's placeholder by one per token; returns the ids and the images' places."""
        if number not in self.rows.image_sizes:
            return ids, []
        try:
            expanded: tuple[list[int], list[int]] = image_format(self.tokenizer).placed(
                ids, self.rows.image_sizes[number]
            )
        except ValueError as error:
            raise ConfigError(f"{self.where}{self.rows.uid(number)}: {error}") from error
        return expanded

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise rendered prompts."""
        return encode_prompts(texts, self.tokenizer, is_chat=self.data.apply_chat_template)

    @cached_property
    def bound(self) -> LengthBound:
        """The test for prompts that certainly have at most data.max_prompt_length tokens."""
        return LengthBound(self.data.max_prompt_length, partial(self.text, 0), self.encode)

    def fit(self, questions: list[tuple[int, Question]]) -> list[bool]:
        """Tell for each (row number, question) whether its prompt has at most data.max_prompt_length tokens."""
        if questions and questions[0][0] == 0:
            check_tokenizer(self.tokenizer, [self.text(*question) for question in questions[:CHECKED]])
        sizes = self.rows.image_sizes
        fits = [number not in sizes and self.bound.fits(question) for number, question in questions]
        unsure = [place for place, is_certain in enumerate(fits) if not is_certain]
        encoded = self.encode([self.text(*questions[place]) for place in unsure])
        for place, ids in zip(unsure, encoded, strict=True):
            fits[place] = len(self._expanded(questions[place][0], ids)[0]) <= self.data.max_prompt_length
        return fits


def check_tokenizer(tokenizer: Any, texts: Sequence[str]) -> None:
    """Warn of the first prompt of which the tokenizer loses text, once for each tokenizer."""
    texts = texts[:CHECKED]
    if getattr(tokenizer, "loss_is_reported", False) or not texts:
        return
    for text, ids in zip(texts, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True):
        back = tokenizer.decode(ids)
        if _letters(back) != _letters(text):
            lost = [word for word in dict.fromkeys(text.split()) if _letters(word) not in _letters(back)]
            cause = (
                "the model cannot read what its vocabulary lacks; write the rows without it, or take another model"
                if _letters(text) != _letters(decoded_by_file(tokenizer, text))
                else "that class does not fit its files. transformers takes the class of config.json's model_type first: copy the"
                " tokenizer's files alone to another folder, and set model.tokenizer_path (evaluate, generate: --tokenizer) to it"
            )
            logger.warning(
                "the tokenizer (%s) turns %r into %r%s: %s",
                tokenizer_classes(tokenizer),
                text[:120],
                back[:120],
                f", without {', '.join(map(repr, lost[:5]))}"[:120] if lost else "",
                cause,
            )
            tokenizer.loss_is_reported = True
            return


def _letters(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split())


@dataclass(frozen=True)
class PromptReader(RowRenderer):
    """A maker of the prompts of a RowSet, with the arguments of `load_prompts`."""

    reward: str | None
    source: str | None
    teachers: TeacherColumns | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)  # Prompt.n and max_tokens

    def parsed(self, row: dict[str, Any]) -> ParsedRow:
        """Read a row, and check its images and its teacher. Raises ValueError."""
        parsed = parsed_row(self.task, self.reward, row)
        self.check_images(parsed[0], row)
        if self.renderer and has_images(row) and not are_files(row):
            raise ValueError(f"has images, and one is no file: {NOT_FILES}")
        if self.teachers is not None:
            self.teachers.of(row)
        return parsed

    def of_teacher(self, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
        """Make the fields of Prompt about the row's teacher. Raises ConfigError."""
        if self.teachers is None:
            return {}
        try:
            name, question = self.teachers.of(row)
        except ValueError as error:
            raise ConfigError(f"{self.rows.uid(number)}: {error}") from error
        if question is None:
            return {"teacher": name}
        [ids] = self.encode([self.text(number, question)])
        config = self.teachers.teachers[name]
        longest = config.max_prompt_length or self.data.max_prompt_length
        if len(ids) > longest:
            raise ConfigError(
                f"{self.rows.uid(number)}: the prompt of teacher {name!r} has {len(ids)} tokens, and"
                f" teachers.{name}.max_prompt_length={longest}; set it to {len(ids)} or more"
            )
        return {"teacher": name, "teacher_ids": tuple(ids)}

    def make(self, number: int, row: dict[str, Any] | None = None) -> Prompt:
        """Make the prompt of a row; `row` None: of the files. Raises ConfigError when it cannot be read any more."""
        row = self.rows.row(number) if row is None else row
        question, answer, reward, row = parsed_row(self.task, self.reward, row)
        source = self.source or (source_of_row(row) if self.task.rewards else "") or self.task.name
        return self.prompt(
            number,
            question,
            row,
            uid=self.rows.uid(number),
            answer=answer,
            source=source,
            reward=reward,
            **self.limits,
            **self.of_teacher(number, row),
        )


class _ReadImages:
    """The images of a RowPrompt, decoded again when nothing refers to them. `replace` sets it: no data descriptor."""

    def __get__(self, prompt: RowPrompt | None, owner: type) -> tuple[PromptImage, ...]:
        if prompt is None:
            return ()
        references = prompt.__dict__.get("_images", ())
        images = tuple(image for reference in references if (image := reference()) is not None)
        if not references or len(images) < len(references):
            images = prompt._placed[1]()
            prompt.__dict__["_images"] = [*map(weakref.ref, images)]
        return images


class RowPrompt(Prompt):
    """A Prompt whose text and tokens are made when they are first read. Made by `of`; `replace` sees the fields of Prompt.

    Images are decoded when they are read, and freed when nothing refers to them: many prompts stay in memory.
    """

    images = _ReadImages()  # type: ignore[assignment]

    @classmethod
    def of(cls, render: Callable[[], str], place: Callable[[str], Placed], **fields: Any) -> RowPrompt:
        """Make a prompt. `fields`: those of Prompt but `text`, `prompt_ids` and `images`."""
        prompt = cls.__new__(cls)
        prompt.__dict__.update({"extra": {}, "columns": {}, **fields}, _render=render, _place=place)
        return prompt

    @cached_property
    def text(self) -> str:  # type: ignore[override]
        return str(self.__dict__["_render"]())

    @cached_property
    def _placed(self) -> Placed:
        placed: Placed = self.__dict__["_place"](self.text)
        return placed

    @cached_property
    def prompt_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        return self._placed[0]


def parsed_row(task: Task, reward: str | None, row: dict[str, Any]) -> ParsedRow:
    """Read a row by its task. `reward` replaces that of the task.

    Raises ValueError for a row that the task cannot read, or that no reward can grade.
    """
    task.check_columns(row)
    try:
        question, answer = task.read_unanswered(row) if reward == BY_MODEL else task.read_row(row)
    except ValueError:
        if reward is None or reads_answer(reward):
            raise
        question, answer = task.read_unanswered(row)
    return question, answer, task.reward_of(row, answer) if reward is None else reward, row


def chat_of(data: DataConfig, task: Task, question: Question, examples: Sequence[Example] = ()) -> Messages | None:
    """Make the messages that the chat template renders; None for a plain text prompt."""
    return task.messages(question, examples, data.system_prompt) if data.apply_chat_template else None


def source_of_row(row: Mapping[str, Any]) -> str:
    """Read the row's "data_source", verl's name of the data set; "" where it has none."""
    source = row.get("data_source")
    return source if isinstance(source, str) else ""


def render_prompt(
    data: DataConfig,
    task: Task,
    question: Question,
    tokenizer: Any,
    where: str,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    num_images: int = 0,
    examples: Sequence[Example] = (),
) -> str:
    """Render the prompt's text as `data` says. Raises ConfigError when the template is missing or fails.

    `tools` are JSON schemas for the chat template. `num_images`: of the row, each with one placeholder in the text.
    """
    if num_images and not data.apply_chat_template:
        raise ConfigError(f"{where} has images, which a chat template places; set data.apply_chat_template=true")
    if not data.apply_chat_template:
        if data.system_prompt is not None:
            raise ConfigError(
                "data.system_prompt needs a chat template, and data.apply_chat_template is false; unset one of them"
            )
        if not isinstance(question, str):
            raise ConfigError(f"{where} is a list of chat messages; set data.apply_chat_template=true")
        return task.plain_text(question, examples)
    if task.user_prompt is None:
        raise ConfigError(f"task {task.name!r} has plain text prompts only; set data.apply_chat_template=false")
    if tokenizer.chat_template is None:
        raise ConfigError(
            "the tokenizer has no chat template; set data.chat_template to a Jinja file (ChatML:"
            " examples/templates/chatml.jinja), or data.apply_chat_template=false for plain text prompts"
        )
    messages = task.messages(question, examples, data.system_prompt)
    try:
        if num_images:
            messages = image_format(tokenizer).messages(messages, num_images)
        return render_chat(messages, tokenizer, where, tools)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise ConfigError(f'{error} (a template without system turns: set data.system_prompt="")') from error
        raise ConfigError(f"{where}: {error}") from error


def image_format(tokenizer: Any) -> Any:
    """Get the ImageFormat of a tokenizer's model (checks/inputs.py sets it). None: it reads no images."""
    return getattr(tokenizer, "image_format", None)


def encode_prompts(texts: Sequence[str], tokenizer: Any, *, is_chat: bool) -> list[list[int]]:
    """Tokenise rendered prompts. Raises ConfigError when a text has no token.

    A chat template writes its special tokens itself. Plain text gets the tokenizer's own (BOS in the Llama family), but
    no end-of-sequence token: it would end the response before it begins.
    """
    encoded: list[list[int]] = tokenizer(list(texts), add_special_tokens=not is_chat)["input_ids"] if texts else []
    if not is_chat:
        encoded = [ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids for ids in encoded]
    for text, ids in zip(texts, encoded, strict=True):
        if not ids:
            raise ConfigError(
                f"the tokenizer ({tokenizer_classes(tokenizer)}) makes no token of the prompt {text[:80]!r}; name one that has"
                " its characters with model.tokenizer_path"
            )
    return encoded


STAND_IN_CONTENT = " \"b\\c\" <d> & 'e'\n\t{f} \u00e9" * 3  # what JSON and HTML would escape
BOUNDARY = 32  # tokens
NORMAL_FORMS: tuple[Literal["NFC", "NFD", "NFKC", "NFKD"], ...] = ("NFC", "NFD", "NFKC", "NFKD")


class LengthBound:
    """A test that a prompt certainly has at most `limit` tokens, without rendering or tokenising it.

    A token stands for one byte of the normalised text at least. So a prompt has at most as many tokens as its contents have
    bytes, plus those that the template adds. These are counted once for each sequence of roles, with a stand-in for the
    contents, and BOUNDARY tokens are added for words that the template's text and the contents form together. A template that
    changes or repeats contents gives no bound.
    """

    def __init__(
        self, limit: int, render: Callable[[Question], str], encode: Callable[[Sequence[str]], list[list[int]]]
    ) -> None:
        self._limit, self._render, self._encode = limit, render, encode
        self._added: dict[tuple[str, ...], float] = {}  # roles -> tokens; () is a question that is a text

    def fits(self, question: Question) -> bool:
        """Tell whether the prompt certainly fits."""
        if isinstance(question, str):
            roles, size = (), most_tokens(question)
        elif all(message.keys() == {"role", "content"} for message in question):
            roles = tuple(message["role"] for message in question)
            size = sum(most_tokens(message["content"]) for message in question)
        else:  # names, tool calls
            return False
        if roles not in self._added:
            self._added[roles] = self._measured(roles)
        return size + self._added[roles] <= self._limit

    def _measured(self, roles: tuple[str, ...]) -> float:
        def rendered(content: str) -> str:
            return self._render([{"role": role, "content": content} for role in roles] if roles else content)

        try:
            short, long = rendered("1"), rendered(f"1{STAND_IN_CONTENT}")
        except ConfigError:  # reported with the row
            return math.inf
        grown = (len(roles) or 1) * len(STAND_IN_CONTENT.encode())
        if len(long.encode()) > len(short.encode()) + grown:
            return math.inf
        return len(self._encode([short])[0]) + BOUNDARY


def most_tokens(text: str) -> int:
    """Bound the tokens of a text: by its bytes, also after a tokenizer's normalisation."""
    if text.isascii():
        return len(text)
    forms = [text, *(unicodedata.normalize(form, text) for form in NORMAL_FORMS)]
    return max(len(form.encode()) for form in forms)


class _WithPixels(dict[str, Any]):
    """The columns of a row with images, for reward functions. The images are read if one names PIXELS."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt.columns)
        self._prompt = prompt

    def __missing__(self, name: str) -> list[str]:
        if name != PIXELS:
            raise KeyError(name)
        return [base64.b64encode(image.pixels).decode() for image in self._prompt.images]


def reward_item(prompt: Prompt, response: str, response_ids: Sequence[int] = (), step: int = 0) -> RewardItem:
    """Make the item that a reward function reads of a prompt and one response.

    The function reads the whole turn: a `<think>` with which the prompt opens it comes first. TRL calls a row conversational
    whose prompt is a list of messages. A row without a text "prompt" is one here too, if the chat template is applied: with
    TRL it would have such a list.
    """
    return RewardItem(
        prompt.reward,
        opened_thought(prompt.text) + response,
        prompt.answer,
        prompt=prompt.text,
        messages=prompt.messages,
        columns=_WithPixels(prompt) if prompt.columns.get("images") else prompt.columns,
        data_source=prompt.data_source,
        completion_ids=response_ids,
        step=step,
        is_chat=prompt.messages is not None and not isinstance(prompt.columns.get("prompt"), str),
    )


# -- Steps of a response -----------------------------------------------------------------------------------------------
# A step ends where the separator is complete in the decoded text, and at the end of the response. Its last token is the
# one that completes the separator: the last token of the shortest prefix of tokens whose text reaches that place. So a step
# ends on a token boundary, also where one token has the end of a step, the separator and the beginning of the next step.
# Steps that end within one token are one step. Blank steps are none: of "a\n\nb\n" with the separator "\n" the steps are
# "a" and "b".
#
# The response is tokenized in one piece, as the policy samples it. TRL's PRMTrainer tokenizes every step by itself and puts a
# separator behind the last one, too. Here the last step ends with the end-of-sequence token, or where the response was cut.

Decode = Callable[[Sequence[int]], str]


def step_ends(ids: Sequence[int], decode: Decode, separator: str) -> list[int]:
    """Find the last token of every step; at least one if there is a token. `decode` leaves special tokens out."""
    if not ids:
        return []
    text, ends, start = decode(ids), [], 0
    while (place := text.find(separator, start)) != -1:
        end = place + len(separator)
        if text[start:place].strip():
            ends.append(end)
        start = end
    tokens = tokens_at(ends, ids, decode)
    if text[start:].strip() or not tokens:
        tokens.append(len(ids) - 1)
    return list(dict.fromkeys(tokens))


def tokens_at(ends: Sequence[int], ids: Sequence[int], decode: Decode) -> list[int]:
    """Find for each increasing place in the text the last token of the shortest prefix with a text that reaches it."""
    low, tokens = 0, []
    for end in ends:
        last = range(len(ids) - 1)
        low = bisect.bisect_left(last, end, lo=low, key=lambda token: len(decode(ids[: token + 1])))
        tokens.append(low)
    return tokens
