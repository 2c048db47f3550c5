"""Rendering: a task's question -> the prompt's text -> token ids. Training, validation and evaluation share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.data.template_limits import MAX_RENDERED, TEMPLATE_BYTES, template_limits
from grpo_megatron.reading.bounds import cut


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
        with template_limits():
            text = str(
                tokenizer.apply_chat_template(
                    list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=generate
                )
            )
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
