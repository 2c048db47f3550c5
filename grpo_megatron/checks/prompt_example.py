"""One prompt of the run as text, for the printed plan: special tokens are shown as the tokenizer writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from grpo_megatron.checks.data_plan import counted
from grpo_megatron.types import Prompt

if TYPE_CHECKING:
    from grpo_megatron.checks.validate import Checked

MAX_CHARACTERS = 3000  # of a long prompt, both ends


def prompt_lines(checked: Checked) -> Iterator[str]:
    """The prompt on which the reward was called, else the first one of the run. Nothing without prompts or a tokenizer."""
    prompt = _example(checked)
    if prompt is None or checked.tokenizer is None:
        return
    yield f"{prompt.uid}, {counted(len(prompt.prompt_ids), 'token')}:"
    text = str(checked.tokenizer.decode(list(prompt.prompt_ids), skip_special_tokens=False))
    yield from (f"  | {line}".rstrip() for line in _shortened(text).split("\n"))


def _example(checked: Checked) -> Prompt | None:
    called = [trial.prompt for trial in checked.reward_calls[:1]]
    lists: list[Sequence[Prompt]] = [called, checked.train_prompts, checked.val_prompts]
    offline = [group[0] for group in checked.offline_groups[:1]]
    return next((prompts[0] for prompts in [*lists, offline] if prompts), None)


def _shortened(text: str) -> str:
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters are not shown ...]\n{text[-half:]}"
