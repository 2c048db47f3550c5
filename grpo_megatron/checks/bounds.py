"""Numbers against their bounds: lengths, batch sizes and sampling parameters."""

from __future__ import annotations

from grpo_megatron.checks.layout import divisors
from grpo_megatron.checks.problems import Problems
from grpo_megatron.config import ENGINE_TEMPERATURES, Config, RolloutConfig
from grpo_megatron.models.architecture import Architecture


def length_problems(config: Config, arch: Architecture | None) -> Problems:
    """Prompt plus response tokens against the limits of the model, the micro-batch and the engine's scheduler."""
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    total = prompt + response
    both = f"data.max_prompt_length={prompt} + data.max_response_length={response} = {total}"
    if arch is not None and total > arch.max_position_embeddings:
        yield f"{both} exceed the model's max_position_embeddings {arch.max_position_embeddings}; lower one of them"
    if arch is not None and arch.sliding_window is not None and total > arch.sliding_window:
        yield f"{both} exceed the model's sliding window {arch.sliding_window}, which is not supported; lower one"
    cap = config.actor.ppo_max_token_len_per_gpu
    if cap < total:
        yield f"actor.ppo_max_token_len_per_gpu={cap} is less than one full sequence, {both}; set it to {total} or more"
    rollout = config.rollout
    batched = rollout.max_num_batched_tokens
    if not rollout.engine_kwargs.get("enable_chunked_prefill", True) and batched < total:
        yield (
            f"rollout.max_num_batched_tokens={batched} is less than {both}, and"
            f" rollout.engine_kwargs.enable_chunked_prefill is false; set it to {total} or more, or leave chunking on"
        )
    if batched < rollout.max_num_seqs:
        yield (
            f"rollout.max_num_batched_tokens={batched} is less than rollout.max_num_seqs={rollout.max_num_seqs}, one"
            f" token per sequence; set max_num_batched_tokens={rollout.max_num_seqs} or more"
        )


def batch_problems(config: Config) -> Problems:
    """Mini-batches must divide the batch: a smaller last one would be an optimizer step of another size."""
    size = config.data.train_batch_size
    for section, mini in (("actor", config.actor.ppo_mini_batch_size), ("critic", config.critic.ppo_mini_batch_size)):
        if mini is not None:
            yield from _mini_batch_problems(f"{section}.ppo_mini_batch_size={mini}", mini, size)


def _mini_batch_problems(key: str, mini: int, size: int) -> Problems:
    if mini > size:
        yield (
            f"{key} is more than data.train_batch_size={size} (both count prompts); set it to {size} or leave it out"
        )
    elif size % mini:
        best = min(divisors(size), key=lambda n: abs(n - mini))
        yield (
            f"{key} does not divide data.train_batch_size={size} (it leaves {size % mini} prompts); set it to {best}"
        )


def sampling_problems(config: Config) -> Problems:
    """The engine must draw from the distribution whose log-probabilities the policy computes."""
    rollout = config.rollout
    for key, value, full in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, -1)):
        if value != full:
            yield (
                f"rollout.{key}={value:g}: the policy's log-probabilities are of the full distribution, and samples must"
                f" be drawn from the same one; set rollout.{key}={full:g} (rollout.val_kwargs is free to differ)"
            )
    low, high = ENGINE_TEMPERATURES
    temperatures = {"temperature": rollout.temperature}
    if rollout.val_kwargs.temperature:  # 0 is greedy
        temperatures["val_kwargs.temperature"] = rollout.val_kwargs.temperature
    for key, value in temperatures.items():
        if not low <= value <= high:
            yield f"rollout.{key}={value:g} is outside the engine's {low:g} to {high:g}; set a value in between"


def stop_problems(rollout: RolloutConfig, arch: Architecture | None) -> Problems:
    """What ends a response besides the end-of-sequence token. `arch` is None where the model could not be read."""
    if "" in rollout.stop:
        yield f"rollout.stop={rollout.stop}: an empty text would end every response at its first token; remove it"
    size = arch.vocab_size if arch is not None else max(rollout.stop_token_ids, default=0) + 1
    if outside := [token for token in rollout.stop_token_ids if not 0 <= token < size]:
        yield (
            f"rollout.stop_token_ids={rollout.stop_token_ids}: {', '.join(map(str, outside))} is outside the model's"
            f" vocabulary of 0 to {size - 1}; remove it, or set the token's text in rollout.stop"
        )
