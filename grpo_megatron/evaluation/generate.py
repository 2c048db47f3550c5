"""`generate`: answers to one prompt, to a file of prompts, or in a chat. Exit codes: 0; 2 for a mistake of the user.

One process checks everything. For more than one rank it then starts the ranks; under torchrun it is one of them. Rank 0
writes. Standard output has the answers only. A chat is a conversation of one user with one model: it begins with the system
prompt of the run, or with that of the task; the images of --image belong to its first question.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.config.problems import counted
from grpo_megatron.data.prompts import image_format
from grpo_megatron.data.rows import Messages
from grpo_megatron.data.tokenizer import render_chat
from grpo_megatron.evaluation.ask import WEIGHTS_VERSION, Asker, placed_prompt
from grpo_megatron.evaluation.evaluate import StartRanks
from grpo_megatron.evaluation.generate_settings import GenerationSettings, prepare_generation
from grpo_megatron.evaluation.options import GenerateOptions
from grpo_megatron.rollout.engine import StopTexts, Truncation, sample_seed
from grpo_megatron.storage.files import write_file
from grpo_megatron.types import Prompt, Sample
from grpo_megatron.untrusted import reason_of, visible

HELP = "/new begins a new conversation; Ctrl-C ends an answer; /quit, or Ctrl-D, ends the chat"
EARLY_ENDS = {"length": "cut", "user": "ended by Ctrl-C"}  # of answers that have not ended by themselves
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # the text of the first bytes of a character


def show(text: str) -> None:
    """Write an answer to standard output; to a file as it is."""
    print(visible(text) if sys.stdout.isatty() else text, end="", flush=True)


def tell(line: str) -> None:
    """Write a line about the answers to standard error."""
    print(line, file=sys.stderr, flush=True)


def hold_chat(settings: GenerationSettings, asker: Asker, read: Callable[[str], str] = input) -> None:
    """Answer line by line until the user ends. `read(prompt)` returns a line, or raises EOFError. Raises ConfigError."""
    style, task = settings.style, settings.task
    system = task.system_prompt if style.system_prompt is None else style.system_prompt
    beginning: Messages = [{"role": "system", "content": system}] if system else []
    messages, turn = beginning, 0
    tell(HELP)
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            tell("")
            return
        except KeyboardInterrupt:  # between answers: the line is given up, as in a shell
            tell("\n" + HELP)
            continue
        if line == "/quit":
            return
        if line == "/new":
            messages = beginning
        elif line:
            question: Messages = [{"role": "user", "content": line}]
            try:
                if messages is beginning and settings.images:
                    question = image_format(settings.model.tokenizer).messages(question, len(settings.images))
                prompt = _prompt([*messages, *question], settings, f"chat/{turn}")
            except ConfigError:  # a template that fails
                raise
            except ValueError as error:
                tell(str(error))
                continue
            answer = _answer(settings, asker, prompt)
            turn += 1
            messages = [*messages, *question, {"role": "assistant", "content": answer}]


def _prompt(messages: Messages, settings: GenerationSettings, uid: str) -> Prompt:
    """Render a conversation. Raises ConfigError: the template fails; ValueError: the question cannot be answered."""
    tokenizer, limit = settings.model.tokenizer, settings.max_model_len
    text = render_chat(messages, tokenizer, "the conversation")
    prompt = placed_prompt(tokenizer, uid, text, settings.images, is_chat=True)
    if (length := len(prompt.prompt_ids)) >= limit:
        raise ValueError(
            f"the conversation has {length} tokens, of at most {limit} (--max-length); /new begins a new one"
        )
    return prompt


def _answer(settings: GenerationSettings, asker: Asker, prompt: Prompt) -> str:
    """Show the answer while it is sampled, until it ends or Ctrl-C is pressed. Returns its text."""
    answers, tokenizer = settings.answers, settings.model.tokenizer
    text = TextStream(lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)), show)
    with contextlib.ExitStack() as opened:
        generator = asker.generator(answers, opened)
    room = min(answers.max_tokens, settings.max_model_len - len(prompt.prompt_ids))
    seed = sample_seed(settings.options.seed, 0, prompt.uid, 0)
    request = generator.request(prompt, 0, seed, room, answers.temperature, Truncation(answers.top_p, answers.top_k))
    request = replace(request, stop=WatchedStop(request.stop, text.add))
    ids: Sequence[int] | None = None
    reason = "user"
    with _ctrl_c_pressed() as is_pressed:
        asker.engine.submit(prompt.uid, request, WEIGHTS_VERSION)
        while ids is None and not is_pressed():
            for _, completion in asker.engine.poll():
                ids, reason = completion.response_ids, completion.finish_reason
        if ids is None:
            asker.engine.abort([prompt.uid])
        answer = text.finish(ids)
    print(flush=True)
    if reason in EARLY_ENDS:
        tell(f"({EARLY_ENDS[reason]} after {counted(len(text.ids if ids is None else ids), 'token')})")
    return answer


class WatchedStop(StopTexts):
    """Stop texts, or none, and a watcher of each token: engines ask after every token whether it completes a text."""

    def __init__(self, stop: StopTexts | None, watch: Callable[[Sequence[int]], None]) -> None:
        self.token_ids = stop.token_ids if stop else ()
        self._stop, self._watch = stop, watch

    def completed_by(self, response_ids: Sequence[int]) -> bool:
        self._watch(response_ids)
        return self._stop is not None and self._stop.completed_by(response_ids)


class TextStream:
    """Writes the text that each new token adds. All that it has written in the end is the decoded answer.

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
            self._write_more(text[len(before) :])
            self._first, self._end = self._end, len(ids)

    def finish(self, ids: Sequence[int] | None = None) -> str:
        """Write the rest, incomplete characters too. `ids`: the full answer; None: the tokens so far. Returns its text."""
        text = self._decode(self.ids if ids is None else ids)
        if not text.startswith(self._written):  # a tokenizer that changes what it has decoded before
            self._write_more("\n" + text)
        elif len(text) > len(self._written):
            self._write_more(text[len(self._written) :])
        return text

    def _write_more(self, text: str) -> None:
        self._written += text
        self._write(text)


@contextlib.contextmanager
def _ctrl_c_pressed() -> Iterator[Callable[[], bool]]:
    """Note Ctrl-C instead of raising: an exception within a step of the engine makes it unusable. A second one is raised."""
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


# -- The command -------------------------------------------------------------------------------------------------------


def generate(options: GenerateOptions, start_ranks: StartRanks | None) -> int:
    """Answer the prompts, or hold the chat; returns the exit code. Raises ConfigError. `start_ranks`: see run_evaluation."""
    _check_output(options.output)
    settings = prepare_generation(options)
    if options.tp > 1 and start_ranks is not None and "RANK" not in os.environ:
        return start_ranks(options.tp, options.device)
    asker = Asker(settings.model, settings.max_model_len)
    style, is_shown = settings.style, options.output is None and not options.as_json
    if asker.mesh.rank == 0 and style.run is not None:  # it would surprise a user who does not expect it
        task = style.task if style.task == "jsonl" else f"{style.task} (--task jsonl: as they are)"
        tell(f"prompts as in {style.run}: task {task}")
    if options.chat:
        hold_chat(settings, asker)
    elif options.samples == 1 and options.prompt is not None and is_shown:
        [(_, [sample])] = asker.ask(settings.prompts, settings.answers, 1)
        show(f"{_text(settings, sample)}\n")
        if sample.finish_reason == "length":
            tell(f"(cut after {counted(len(sample.response_ids), 'token')}: --max-tokens)")
    else:
        _write_rows(settings, asker)
    asker.close()
    return 0


def _check_output(output: Path | None) -> None:
    """Check the output before a model is read. Raises ConfigError."""
    if output is None:
        return
    if output.is_dir():
        raise ConfigError(f"--output {str(output)!r} is a folder; name a file")
    try:
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {str(output)!r}: its folder cannot be made ({reason_of(error)})") from error


def _write_rows(settings: GenerationSettings, asker: Asker) -> None:
    """Write one JSON line per answer, to the file or to standard output."""
    output, start, counts = settings.options.output, time.monotonic(), Counter[str]()

    def rows() -> Iterator[str]:
        first = 0
        for prompts, samples in asker.ask(settings.prompts, settings.answers, asker.capacity):
            for sample in samples:
                row = {
                    "row": first + sample.prompt_index,
                    "sample": sample.index,
                    "question": sample.prompt.question,
                    "prompt": sample.prompt.text,
                    "completion": _text(settings, sample),
                    "tokens": len(sample.response_ids),
                    "finish_reason": sample.finish_reason,
                }
                counts.update(answers=1, tokens=len(sample.response_ids))
                yield json.dumps(row, ensure_ascii=False) + "\n"
            first += len(prompts)

    if asker.mesh.rank != 0:
        for _ in rows():
            pass
        return
    if output is None:
        for row in rows():
            show(row)
    else:
        try:
            write_file(output, rows())
        except OSError as error:
            raise ConfigError(f"--output {str(output)!r} cannot be written: {reason_of(error)}") from error
    where = f" in {output}" if output is not None else ""
    answers, tokens = counted(counts["answers"], "answer"), counted(counts["tokens"], "token")
    tell(f"{answers}{where}, {tokens} in {time.monotonic() - start:.1f} s")


def _text(settings: GenerationSettings, sample: Sample) -> str:
    return str(settings.model.tokenizer.decode(sample.response_ids, skip_special_tokens=True))
