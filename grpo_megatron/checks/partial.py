"""Responses that take several steps (`rollout.partial`): what they cannot be combined with, and their lines of the plan."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from grpo_megatron.checks.problems import Problems
from grpo_megatron.config import Config, PartialConfig
from grpo_megatron.rewards.reward import rewards


def partial_problems(config: Config) -> Problems:
    partial, algorithm, longest = config.rollout.partial, config.algorithm, config.data.max_response_length
    if not partial.is_on:
        if partial != PartialConfig():
            changed = min(partial.model_fields_set - {"over_sample"})
            yield (
                f"rollout.partial.{changed} has no effect with rollout.partial.over_sample=1, which waits for every response;"
                " set over_sample above 1 (1.25, say), or leave it out"
            )
        return
    key = f"rollout.partial.over_sample={partial.over_sample:g}"
    if algorithm.source != "policy":
        yield f"{key} goes on under newer weights, and algorithm.source={algorithm.source} has none; leave rollout.partial out"
    if config.rollout.multi_turn.environment is not None:
        yield (
            f"{key}: a trajectory of several turns cannot wait for a later step; leave out rollout.partial or"
            " rollout.multi_turn"
        )
    if partial.chunk_tokens >= longest:
        yield (
            f"rollout.partial.chunk_tokens={partial.chunk_tokens} is not less than data.max_response_length={longest}, so that"
            f" no response would be cut; set it to {max(1, longest // 8)}, say"
        )
    name = config.reward.function
    if name is not None and rewards.facts(name).compares:
        yield f"{key}: reward.function={name} compares the samples of a draw, which finish in different steps; leave one out"
    correction = algorithm.rollout_correction
    if correction.rollout_is is None and correction.rollout_rs is None:
        yield (
            f"{key} trains on tokens of up to {partial.max_staleness} earlier steps, and algorithm.rollout_correction has"
            " neither rollout_is nor rollout_rs, so that they would count as the policy's own; set rollout_is=token"
        )


def partial_lines(config: Config) -> Iterator[tuple[str, str]]:
    partial, batch = config.rollout.partial, config.data.train_batch_size
    if partial.is_on:
        yield (
            "partial rollouts",
            f"{ceil(batch * partial.over_sample)} prompts in progress for a batch of {batch}, in rounds of"
            f" {partial.chunk_tokens:,} tokens; none waits more than {partial.max_staleness} steps",
        )
