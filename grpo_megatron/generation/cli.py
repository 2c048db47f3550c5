"""`generate`: answers to one prompt, to a file of prompts, or in a chat. Exit codes: 0; 2 for a mistake of the user.

One process checks everything. For more than one rank it then starts the ranks; under torchrun it is one of them. Rank 0
writes. Standard output has the answers only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.data.prompts import encode_prompts
from grpo_megatron.data.rows import Messages
from grpo_megatron.data.tokenizer import render_chat
from grpo_megatron.evaluation.cli import StartRanks
from grpo_megatron.generation.drawing import Answerer
from grpo_megatron.generation.options import GenerateOptions
from grpo_megatron.generation.settings import GenerationSettings, prepare_generation
from grpo_megatron.parallel.mesh import destroy_mesh
from grpo_megatron.storage.atomic import write_file


def generate(options: GenerateOptions, start_ranks: StartRanks | None) -> int:
    """Answer the prompts, or hold the chat; returns the exit code. Raises ConfigError. `start_ranks`: see run_evaluation."""
    _check_output(options.output)
    settings = prepare_generation(options)
    if options.chat:
        check_chat(settings.tokenizer.chat_template)
    if options.tp > 1 and start_ranks is not None and "RANK" not in os.environ:
        return start_ranks(options.tp, options.device)
    _run_generation(settings)
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
        raise ConfigError(f"--output {str(output)!r}: its folder cannot be made ({error.strerror})") from error


def _run_generation(settings: GenerationSettings) -> None:
    options, answerer = settings.options, Answerer(settings)
    if answerer.mesh.rank == 0:
        _say_style(settings)
    if options.chat:
        hold_chat(answerer)
    elif options.samples == 1 and options.prompt is not None and options.output is None and not options.json:
        [[answer]] = answerer.all_answers()
        print(answer.text, flush=True)
        if answer.finish_reason == "length":
            print(f"(cut after {answer.num_tokens} tokens: --max-tokens)", file=sys.stderr)
    else:
        _write_rows(answerer)
    answerer.engine.shutdown()
    destroy_mesh()


def _say_style(settings: GenerationSettings) -> None:
    """Prompts that are rendered in the way of a run would surprise a user who does not know."""
    style = settings.style
    if style.run is not None:
        print(f"prompts as in {style.run}: task {style.task} (--task jsonl: as they are)", file=sys.stderr)


def _write_rows(answerer: Answerer) -> None:
    output = answerer.settings.options.output
    start, counts = time.monotonic(), [0, 0]
    rows = _rows(answerer, counts)
    if answerer.mesh.rank != 0:
        for _ in rows:
            pass
        return
    if output is not None:
        try:
            write_file(output, rows)
        except OSError as error:
            raise ConfigError(f"--output {str(output)!r} cannot be written: {error.strerror}") from error
    else:
        for row in rows:
            sys.stdout.write(row)
            sys.stdout.flush()
    seconds = time.monotonic() - start
    where = f" in {output}" if output is not None else ""
    print(f"{counts[0]} answers{where}, {counts[1]} tokens in {seconds:.1f} s", file=sys.stderr)


def _rows(answerer: Answerer, counts: list[int]) -> Iterator[str]:
    """One JSON line per answer. `counts`: answers and tokens so far."""
    prompts = answerer.settings.prompts
    for number, (prompt, answers) in enumerate(zip(prompts, answerer.all_answers(), strict=True)):
        for answer in answers:
            row: dict[str, Any] = {
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


# -- a conversation in the terminal ------------------------------------------------------------------------------------
# One user, one model, greedy unless --temperature says otherwise. An answer is shown while it is drawn. The conversation
# begins with the system prompt of the run, or with that of the task.

HELP = "/new begins a new conversation; Ctrl-C ends an answer; /quit, or Ctrl-D, ends the chat"
EARLY_ENDS = {"length": "cut", "user": "ended by Ctrl-C"}  # of answers that have not ended by themselves


def hold_chat(answerer: Answerer, read: Callable[[str], str] = input) -> None:
    """Answer line by line until the user ends. `read(prompt)` returns a line, or raises EOFError. Raises ConfigError."""
    messages, turn = _beginning(answerer), 0
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
            messages = _beginning(answerer)
        elif line:
            answer = _answer(answerer, [*messages, {"role": "user", "content": line}], turn)
            turn += 1
            if answer is not None:
                messages += [{"role": "user", "content": line}, {"role": "assistant", "content": answer}]


def check_chat(template: str | None) -> None:
    """Raise ConfigError unless there is a template to render a conversation."""
    if template is None:
        raise ConfigError(
            "--chat needs a chat template, and the tokenizer has none; set --chat-template FILE, or use --prompt"
        )


def _beginning(answerer: Answerer) -> Messages:
    style, task = answerer.settings.style, answerer.settings.task
    system = task.system_prompt if style.system_prompt is None else style.system_prompt
    return [{"role": "system", "content": system}] if system else []


def _answer(answerer: Answerer, messages: Messages, turn: int) -> str | None:
    """Show the answer to the last message. None: there is no room for it, and a line has told the user."""
    settings = answerer.settings
    text = render_chat(messages, settings.tokenizer, "the conversation")
    [ids] = encode_prompts([text], settings.tokenizer, is_chat=True)
    room = settings.max_model_len - len(ids)
    if room < 1:
        _tell(
            f"the conversation has {len(ids)} tokens, of at most {settings.max_model_len} (--max-length); /new begins a new one"
        )
        return None
    with _ctrl_c_pressed() as is_pressed:
        answer = answerer.streamed(ids, f"chat/{turn}", min(settings.max_tokens, room), _show, is_pressed)
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


def _show(piece: str) -> None:
    print(piece, end="", flush=True)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
