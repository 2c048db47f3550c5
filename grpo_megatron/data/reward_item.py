"""What a reward function may read of a prompt and a response: a RewardItem."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_megatron.rewards.answers import opened_thought
from grpo_megatron.rewards.reward import RewardItem
from grpo_megatron.types import Prompt


def reward_item(prompt: Prompt, response: str, response_ids: Sequence[int] = (), step: int = 0) -> RewardItem:
    """The item of one response. The function reads the whole turn: a `<think>` with which the prompt opens it comes first.

    TRL calls a row conversational whose prompt is a list of messages. A row without a text "prompt" is one here too, if the
    chat template is applied: with TRL it would have such a list.
    """
    return RewardItem(
        prompt.reward,
        opened_thought(prompt.text) + response,
        prompt.answer,
        prompt=prompt.text,
        messages=prompt.messages,
        columns=prompt.columns,
        data_source=prompt.data_source,
        completion_ids=response_ids,
        step=step,
        is_chat=prompt.messages is not None and not isinstance(prompt.columns.get("prompt"), str),
    )
