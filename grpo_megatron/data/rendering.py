"""Rendering: a task's question -> the prompt's text -> token ids. Training, validation and evaluation share it."""

from __future__ import annotations

import contextlib
import math
import resource
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from grpo_megatron.config import ConfigError
from grpo_megatron.data.fields import Question
from grpo_megatron.processes.process import time_limit
from grpo_megatron.reading import cut

# -- Limits on a chat template: it is a program that comes with a model, and it may loop or build a text of gigabytes --

TEMPLATE_S = 2.0  # processor seconds for one chat; a usual one takes a millisecond, and the first some 0.1 s to compile
TEMPLATE_BYTES = 2 << 30  # that one chat may add to the memory
MAX_RENDERED = 1 << 24  # characters of one chat
STAND_IN_CONTENT = " \"b\\c\" <d> & 'e'\n\t{f} \u00e9" * 3  # what JSON and HTML would escape
BOUNDARY = 32  # tokens
NORMAL_FORMS: tuple[Literal["NFC", "NFD", "NFKC", "NFKD"], ...] = ("NFC", "NFD", "NFKC", "NFKD")


@contextlib.contextmanager
def _memory_limit(size: int) -> Iterator[None]:
    """The process may map `size` bytes more than it has mapped. No limit where /proc does not tell that."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with open("/proc/self/statm") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + size
    except OSError:
        yield
        return
    bounds = [bound for bound in (limit, *before) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    where: str,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    generate: bool = True,
) -> str:
    """The text that the tokenizer's chat template makes of `messages` and the tools' JSON schemas.

    `generate`: up to the beginning of the assistant's turn. Raises ConfigError when the template fails or takes too long;
    `where` names the row in the message.
    """
    try:
        options = {"tools": list(tools) or None, "tokenize": False, "add_generation_prompt": generate}
        with time_limit(TEMPLATE_S, "it"), _memory_limit(TEMPLATE_BYTES):  # the first one works on the main thread only
            text = str(tokenizer.apply_chat_template(list(messages), **options))
    except MemoryError as error:
        raise ConfigError(f"the chat template fails on {where}: it takes {TEMPLATE_BYTES >> 30} GiB or more") from error
    except Exception as error:  # whatever the template raises
        reason = cut(f"{type(error).__name__}: {error}", 500)
        raise ConfigError(f"the chat template fails on {where}: {reason}") from error
    if len(text) > MAX_RENDERED:
        raise ConfigError(
            f"the chat template makes {len(text):,} characters of {where}; at most {MAX_RENDERED:,} are accepted"
        )
    return text


def encode_prompts(texts: Sequence[str], tokenizer: Any, *, is_chat: bool) -> list[list[int]]:
    """Token ids of rendered prompts. Raises ConfigError when a text has no token.

    A chat template writes its special tokens itself. Plain text gets the tokenizer's own (BOS in the Llama family), but
    no end-of-sequence token: it would end the response before it begins.
    """
    encoded: list[list[int]] = tokenizer(list(texts), add_special_tokens=not is_chat)["input_ids"] if texts else []
    if not is_chat:
        encoded = [ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids for ids in encoded]
    for text, ids in zip(texts, encoded, strict=True):
        if not ids:
            raise ConfigError(f"the tokenizer makes no token of the prompt {text[:80]!r}")
    return encoded


class LengthBound:
    """Whether a prompt certainly has at most `limit` tokens, known without rendering or tokenising it.

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
        """False where it is not certain."""
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
    """The most tokens that a text can have: its bytes, also after a tokenizer's normalisation."""
    if text.isascii():
        return len(text)
    forms = [text, *(unicodedata.normalize(form, text) for form in NORMAL_FORMS)]
    return max(len(form.encode()) for form in forms)
