"""A conversation in the terminal: one user, one model, greedy unless --temperature says otherwise.

An answer is shown when it is complete. The conversation begins with the system prompt of the run, or with that of the task.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from grpo_megatron.config import ConfigError
from grpo_megatron.data.rendering import encode_prompts, render_chat
from grpo_megatron.data.rows import Messages
from grpo_megatron.generation.drawing import Answerer

HELP = "/new begins a new conversation; /quit, or Ctrl-D, ends\n"


def hold_chat(answerer: Answerer, read: Callable[[str], str] = input) -> None:
    """Answer line by line until the user ends. `read(prompt)` returns a line, or raises EOFError. Raises ConfigError."""
    messages, turn = _beginning(answerer), 0
    print(HELP, file=sys.stderr, end="")
    while True:
        try:
            line = read("> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return
        if line == "/quit":
            return
        if line == "/new":
            messages = _beginning(answerer)
        elif line:
            answer = _answer(answerer, [*messages, {"role": "user", "content": line}], turn)
            turn += 1
            if answer is not None:
                messages += [{"role": "user", "content": line}, {"role": "assistant", "content": answer}]
                print(answer, flush=True)


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
    """The answer to the last message. None: there is no room for it, and a line has told the user."""
    settings = answerer.settings
    text = render_chat(messages, settings.tokenizer, "the conversation")
    [ids] = encode_prompts([text], settings.tokenizer, is_chat=True)
    room = settings.max_model_len - len(ids)
    if room < 1:
        print(
            f"the conversation has {len(ids)} tokens, of at most {settings.max_model_len} (--max-length); /new begins a new one",
            file=sys.stderr,
        )
        return None
    [answer] = answerer.answers([(ids, f"chat/{turn}")], min(settings.max_tokens, room))
    if answer.finish_reason == "length":
        print(f"(cut after {answer.num_tokens} tokens)", file=sys.stderr)
    return answer.text
