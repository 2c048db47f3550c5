"""A conversation in the terminal: one user, one model, greedy unless --temperature says otherwise.

An answer is shown while it is drawn. The conversation begins with the system prompt of the run, or with that of the task.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.data.rendering import encode_prompts, render_chat
from grpo_megatron.data.rows import Messages
from grpo_megatron.generation.drawing import Answerer

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
