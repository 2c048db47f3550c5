"""`generate`: answers to one prompt, to a file of prompts, or in a chat. Exit codes: 0; 2 for a mistake of the user.

One process checks everything. For more than one rank it then starts the ranks; under torchrun it is one of them. The requests are
those that training and validation make. Rank 0 writes. Standard output has the answers only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.data.prompts import encode_prompts, image_format
from grpo_megatron.data.rows import Messages
from grpo_megatron.data.tokenizer import render_chat
from grpo_megatron.evaluation.engine import WEIGHTS_VERSION, start_engine
from grpo_megatron.evaluation.evaluate import StartRanks
from grpo_megatron.evaluation.generate_options import GenerateOptions
from grpo_megatron.evaluation.generate_settings import GenerationSettings, placed, prepare_generation
from grpo_megatron.parallel.mesh import destroy_mesh
from grpo_megatron.rollout.engine import Request, StopTexts, sample_seed
from grpo_megatron.storage.files import write_file
from grpo_megatron.types import Prompt, PromptImage
from grpo_megatron.untrusted import reason_of, visible


def generate(options: GenerateOptions, start_ranks: StartRanks | None) -> int:
    """Answer the prompts, or hold the chat; returns the exit code. Raises ConfigError. `start_ranks`: see run_evaluation."""
    _check_output(options.output)
    settings = prepare_generation(options)
    if options.chat and settings.tokenizer.chat_template is None:
        raise ConfigError(
            "--chat needs a chat template, and the tokenizer has none; set --chat-template FILE, or use --prompt"
        )
    if options.tp > 1 and start_ranks is not None and "RANK" not in os.environ:
        return start_ranks(options.tp, options.device)
    answerer = Answerer(settings)
    if answerer.mesh.rank == 0 and settings.style.run is not None:  # it would surprise a user who does not know
        _tell(f"prompts as in {settings.style.run}: task {settings.style.task} (--task jsonl: as they are)")
    if options.chat:
        hold_chat(answerer)
    elif options.samples == 1 and options.prompt is not None and options.output is None and not options.json:
        [[answer]] = answerer.all_answers()
        _show(f"{answer.text}\n")
        if answer.finish_reason == "length":
            _tell(f"(cut after {answer.num_tokens} tokens: --max-tokens)")
    else:
        _write_rows(answerer)
    answerer.engine.shutdown()
    destroy_mesh()
    return 0


def _check_output(output: Path | None) -> None:
    """Before a model is read. Raises ConfigError."""
    if output is None:
        return
    if output.is_dir():
        raise ConfigError(f"--output {str(output)!r} is a folder; name a file")
    try:
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {str(output)!r}: its folder cannot be made ({reason_of(error)})") from error


def _write_rows(answerer: Answerer) -> None:
    """One JSON line per answer, to the file or to standard output."""
    output, start, counts = answerer.settings.options.output, time.monotonic(), [0, 0]

    def rows() -> Iterator[str]:
        for number, (prompt, answers) in enumerate(zip(answerer.settings.prompts, answerer.all_answers(), strict=True)):
            for answer in answers:
                row = {
                    "row": number,
                    "sample": answer.sample,
                    "question": prompt.question,
                    "prompt": prompt.text,
                    "completion": answer.text,
                    "tokens": answer.num_tokens,
                    "finish_reason": answer.finish_reason,
                }
                counts[0] += 1
                counts[1] += answer.num_tokens
                yield json.dumps(row, ensure_ascii=False) + "\n"

    if answerer.mesh.rank != 0:
        for _ in rows():
            pass
        return
    if output is None:
        for row in rows():
            _show(row)
    else:
        try:
            write_file(output, rows())
        except OSError as error:
            raise ConfigError(f"--output {str(output)!r} cannot be written: {reason_of(error)}") from error
    where = f" in {output}" if output is not None else ""
    _tell(f"{counts[0]} answers{where}, {counts[1]} tokens in {time.monotonic() - start:.1f} s")


# -- drawing on the rollout engine -------------------------------------------------------------------------------------

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what the first bytes of a character decode to


class TextStream:
    """Writes the text that each new token adds. What it has written in the end is the decoded answer.

    A token decodes to something else at the beginning of a text than within it. So the new tokens are decoded behind those
    that were written last, and only what exceeds the latter is written, once its last character is complete.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], write: Callable[[str], None]) -> None:
        self.ids: Sequence[int] = ()  # all tokens so far
        self._decode, self._write = decode, write
        self._first = self._end = 0  # of the tokens that were written last
        self._written = ""

    def add(self, ids: Sequence[int]) -> None:
        """`ids` are all tokens so far, of which the last is new."""
        self.ids = ids
        text, before = self._decode(ids[self._first :]), self._decode(ids[self._first : self._end])
        if len(text) > len(before) and not text.endswith(_INCOMPLETE):
            self._write_piece(text[len(before) :])
            self._first, self._end = self._end, len(ids)

    def finish(self, ids: Sequence[int] | None = None) -> str:
        """Write the rest, incomplete characters too. `ids`: the whole answer; None: the tokens so far. Returns its text."""
        whole = self._decode(self.ids if ids is None else ids)
        if not whole.startswith(self._written):  # a tokenizer that changes what it has decoded before
            self._write_piece("\n" + whole)
        elif len(whole) > len(self._written):
            self._write_piece(whole[len(self._written) :])
        return whole

    def _write_piece(self, piece: str) -> None:
        self._written += piece
        self._write(piece)


@dataclass(frozen=True)
class ModelAnswer:
    """One answer. `finish_reason`: "stop" at an end token or a stop text, "length" when it was cut, "user" by the user."""

    sample: int
    text: str
    num_tokens: int
    finish_reason: str


class WatchedStop(StopTexts):
    """Stop texts, or none, and a watcher of each token: engines ask after every token whether it completes a text."""

    def __init__(self, stop: StopTexts | None, watch: Callable[[Sequence[int]], None]) -> None:
        self.token_ids = stop.token_ids if stop else ()
        self._stop, self._watch = stop, watch

    def completed_by(self, response_ids: Sequence[int]) -> bool:
        self._watch(response_ids)
        return self._stop is not None and self._stop.completed_by(response_ids)


class Answerer:
    """The engine of this process, or this rank's part of it."""

    def __init__(self, settings: GenerationSettings) -> None:
        """Collective over the ranks. Raises RankError."""
        self.settings, stop = settings, settings.style.stop
        self._stop = StopTexts(settings.tokenizer, stop) if stop else None
        self.engine, self.mesh, self.capacity = start_engine(settings)

    def all_answers(self) -> Iterator[list[ModelAnswer]]:
        """Of each prompt of the settings, in order; `--max-num-seqs` of them are drawn at a time."""
        prompts, count = self.settings.prompts, self.settings.options.samples
        size = max(1, self.capacity // count)
        for start in range(0, len(prompts), size):
            batch = prompts[start : start + size]
            drawn = self.answers(batch, self.settings.max_tokens)
            yield from (drawn[n * count : (n + 1) * count] for n in range(len(batch)))

    def answers(self, prompts: Sequence[Prompt], max_tokens: int) -> list[ModelAnswer]:
        """`--samples` answers of each prompt, prompt by prompt. Its uid decides the draws."""
        keys = [(prompt, sample) for prompt in prompts for sample in range(self.settings.options.samples)]
        requests = [
            self._request(prompt.prompt_ids, prompt.images, prompt.uid, sample, max_tokens, self._stop)
            for prompt, sample in keys
        ]
        completions = self.engine.generate(requests, WEIGHTS_VERSION)
        return [
            ModelAnswer(sample, self._decode(one.response_ids), len(one.response_ids), one.finish_reason)
            for (_, sample), one in zip(keys, completions, strict=True)
        ]

    def streamed(
        self,
        ids: Sequence[int],
        images: Sequence[PromptImage],
        uid: str,
        max_tokens: int,
        write: Callable[[str], None],
        is_ended: Callable[[], bool],
    ) -> ModelAnswer:
        """One answer, in one process. `write` gets its text in pieces. `is_ended`, asked after each step, ends it."""
        text = TextStream(self._decode, write)
        request = self._request(ids, images, uid, 0, max_tokens, WatchedStop(self._stop, text.add))
        self.engine.submit(uid, request, WEIGHTS_VERSION)
        while not is_ended():
            for _, one in self.engine.poll():
                return ModelAnswer(0, text.finish(one.response_ids), len(one.response_ids), one.finish_reason)
        self.engine.abort([uid])
        return ModelAnswer(0, text.finish(), len(text.ids), "user")

    def _request(
        self,
        ids: Sequence[int],
        images: Sequence[PromptImage],
        uid: str,
        sample: int,
        max_tokens: int,
        stop: StopTexts | None,
    ) -> Request:
        options = self.settings.options
        return Request(
            prompt_ids=tuple(ids),
            seed=sample_seed(options.seed, 0, uid, sample),
            max_tokens=max_tokens,
            temperature=options.temperature,
            top_p=options.top_p if options.temperature else 1.0,
            top_k=(options.top_k or -1) if options.temperature else -1,
            stop_token_ids=tuple(self.settings.style.stop_token_ids),
            stop=stop,
            images=tuple(images),
        )

    def _decode(self, ids: Any) -> str:
        return str(self.settings.tokenizer.decode(ids, skip_special_tokens=True))


# -- a conversation in the terminal ------------------------------------------------------------------------------------
# One user, one model, greedy unless --temperature says otherwise. An answer is shown while it is drawn. The conversation
# begins with the system prompt of the run, or with that of the task. The images of --image belong to its first question.

HELP = "/new begins a new conversation; Ctrl-C ends an answer; /quit, or Ctrl-D, ends the chat"
EARLY_ENDS = {"length": "cut", "user": "ended by Ctrl-C"}  # of answers that have not ended by themselves


def hold_chat(answerer: Answerer, read: Callable[[str], str] = input) -> None:
    """Answer line by line until the user ends. `read(prompt)` returns a line, or raises EOFError. Raises ConfigError."""
    style, task = answerer.settings.style, answerer.settings.task
    system = task.system_prompt if style.system_prompt is None else style.system_prompt
    beginning: Messages = [{"role": "system", "content": system}] if system else []
    messages, turn = beginning, 0
    _tell(HELP)
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            _tell("")
            return
        except KeyboardInterrupt:  # no answer is being drawn: the line is given up, as in a shell
            _tell("\n" + HELP)
            continue
        if line == "/quit":
            return
        if line == "/new":
            messages = beginning
        elif line:
            question: Messages = [{"role": "user", "content": line}]
            if messages is beginning and (images := answerer.settings.images):
                try:
                    question = image_format(answerer.settings.tokenizer).messages(question, len(images))
                except ValueError as error:
                    _tell(str(error))
                    continue
            asked: Messages = [*messages, *question]
            answer = _answer(answerer, asked, turn)
            turn += 1
            if answer is not None:
                messages = [*asked, {"role": "assistant", "content": answer}]


def _answer(answerer: Answerer, messages: Messages, turn: int) -> str | None:
    """Show the answer to the last message. None: there is no room for it, and a line has told the user."""
    settings = answerer.settings
    text = render_chat(messages, settings.tokenizer, "the conversation")
    [ids] = encode_prompts([text], settings.tokenizer, is_chat=True)
    images: Sequence[PromptImage] = ()
    if settings.images:
        try:
            ids, images = placed(settings.tokenizer, ids, settings.images)
        except ValueError as error:
            _tell(str(error))
            return None
    room = settings.max_model_len - len(ids)
    if room < 1:
        _tell(
            f"the conversation has {len(ids)} tokens, of at most {settings.max_model_len} (--max-length); /new begins a new one"
        )
        return None

    with _ctrl_c_pressed() as is_pressed:
        answer = answerer.streamed(ids, images, f"chat/{turn}", min(settings.max_tokens, room), _show, is_pressed)
    print(flush=True)
    if answer.finish_reason in EARLY_ENDS:
        _tell(f"({EARLY_ENDS[answer.finish_reason]} after {answer.num_tokens} tokens)")
    return answer.text


@contextlib.contextmanager
def _ctrl_c_pressed() -> Iterator[Callable[[], bool]]:
    """Within, Ctrl-C is only noted: an exception within a step of the engine makes it unusable. A second one is raised."""
    pressed: list[int] = []

    def note(number: int, frame: Any) -> None:
        if pressed:
            signal.default_int_handler(number, frame)
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def _show(text: str) -> None:
    """To a file as it is."""
    print(visible(text) if sys.stdout.isatty() else text, end="", flush=True)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
