"""From the `rollout` section to the arguments of `vllm.LLM`. Imports no vLLM.

Most keys have verl's names and places (`rollout.gpu_memory_utilization`, `rollout.max_num_seqs`, ...). Keys that verl lacks are
in `rollout.engine_options` (`VllmOptions`). All other arguments of vLLM go into `rollout.engine_kwargs`, which is passed on.
"""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import Field

from grpo_megatron.config import ConfigError, RolloutConfig, Section
from grpo_megatron.config.passthrough import PassThrough
from grpo_megatron.rollout.engine import training_truncation


class VllmOptions(Section):
    """`rollout.engine_options` of vLLM."""

    kv_cache_gib: float = Field(1.0, gt=0, le=4096)  # CPU only: the key-value cache of one rank
    sleep_level: Literal[1, 2] = (
        2  # GPU. 1: sleeping weights are kept on the host; 2: dropped (every sync sends them anew)
    )


_CONTRACT = "the trainer depends on its own value; leave it out"
_NEVER = "this program does not support it; leave it out"
_CODE = "it makes vLLM run code from elsewhere; leave it out"
_SOCKETS = "it makes vLLM open network connections; leave it out"
_IMAGES = "this program gives vLLM the patches of images itself; leave it out"
_MODEL = "the engine must compute what the policy computes; change the model's config.json"

# Arguments by which a config file could run code or open sockets. A dot: a key of an argument that is a table itself.
UNSAFE = {
    **dict.fromkeys(("trust_remote_code", "code_revision", "model_class_overrides", "config_format"), _CODE),
    **dict.fromkeys(("tokenizer_mode", "scheduler_cls", "worker_extension_cls", "logits_processors"), _CODE),
    **dict.fromkeys(("reasoning_parser", "reasoning_parser_plugin", "io_processor_plugin"), _CODE),
    **dict.fromkeys(("additional_config", "log_config_file", "logging_config", "profiler_config"), _CODE),
    **dict.fromkeys(("compilation_config.backend", "compilation_config.inductor_compile_config"), _CODE),
    **dict.fromkeys(("compilation_config.inductor_passes", "compilation_config.pass_config"), _CODE),
    **dict.fromkeys(("kv_transfer_config", "ec_transfer_config", "kv_events_config", "otlp_traces_endpoint"), _SOCKETS),
    **dict.fromkeys(("kv_offloading_backend", "master_addr", "master_port", "nnodes", "node_rank"), _SOCKETS),
    **dict.fromkeys(("data_parallel_address", "data_parallel_rpc_port", "data_parallel_backend"), _SOCKETS),
    **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens"), _NEVER),
    **dict.fromkeys(("hf_overrides", "hf_config_path", "model_weights", "model_impl"), _MODEL),
}

ENGINE_KWARGS = PassThrough(
    key="rollout.engine_kwargs",
    package="vllm",
    sources={"engine/arg_utils.py": "EngineArgs"},
    owned={
        **UNSAFE,
        **dict.fromkeys(("mm_device_do_normalize", "mm_encoder_tp_mode", "mm_processor_cache_gb"), _IMAGES),
        **dict.fromkeys(("limit_mm_per_prompt", "language_model_only", "skip_mm_profiling"), _IMAGES),
        **dict.fromkeys(
            ("load_format", "skip_tokenizer_init", "weight_transfer_config", "generation_config"), _CONTRACT
        ),
        "override_generation_config": "rollout.stop_token_ids and the keys of rollout say how it samples",
        **dict.fromkeys(("distributed_executor_backend", "logprobs_mode", "runner", "worker_cls"), _CONTRACT),
        **dict.fromkeys(("pipeline_parallel_size", "data_parallel_size", "enable_eplb", "eplb_config"), _NEVER),
        "expert_placement_strategy": _CONTRACT,
        "enable_expert_parallel": "set rollout.expert_parallel_size",
        "enable_sleep_mode": "set rollout.free_cache_engine",
        "model": "set model.path",
        "tokenizer": "set model.tokenizer_path",
        "dtype": "set model.dtype",
        "max_model_len": "it is data.max_prompt_length + data.max_response_length",
        "seed": "set rollout.seed",
        **{
            name: f"set rollout.{name}" for name in ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
        },
        **{name: f"set rollout.{name}" for name in ("enforce_eager", "quantization", "enable_prefix_caching")},
        "tensor_parallel_size": "set rollout.tensor_model_parallel_size",
    },
)


# vLLM's CPU kernel rotates the rows of a slice of a head as if they were contiguous, and latent attention passes such slices:
# log-probabilities were off by 0.3 (measured, vLLM 0.32). The plain torch code is right.
PLAIN_ROTATION = {"custom_ops": ["-rotary_embedding"]}
CPU_LATENTS = {"backend": "CPU_MLA"}  # where the processor has AMX, vLLM would take other kernels


def runner_environment(
    rollout: RolloutConfig, dtype: str, vllm_version: str, capability: tuple[int, ...] = (0, 0)
) -> dict[str, str]:
    """Returns environment variables that select vLLM's kernels on CUDA. Empty: vLLM's choice.

    On Hopper DeepGEMM takes float32 scales, as the trainer's FP8 has them. By default vLLM quantises the quantised blocks again
    with scales that are powers of two (`deepgemm_post_process_fp8_weight_block`). Blackwell's kernels read no other scales.

    The second model runner of vLLM 0.26, its choice for dense models, divides bfloat16 logits by the temperature in place.
    Logits between 16 and 32 have steps of 0.125 there, so at a temperature other than 1 log-probabilities would be off by
    up to 0.06. The first runner divides in float32, and so does the second runner of vLLM 0.32 (v1/worker/gpu/sample).
    """
    rounds = vllm_version.startswith("0.26.") and dtype == "bfloat16" and rollout.temperature != 1
    scales = {"VLLM_USE_DEEP_GEMM_E8M0": "0"} if capability[0] == 9 else {}
    return {"VLLM_USE_V2_MODEL_RUNNER": "0", **scales} if rounds else scales


# Families with experts that have vLLM 0.26's second runner by default (config/vllm.py)
SECOND_RUNNER_MOE = ("deepseek_v2",)


def loops_over_requests(
    rollout: RolloutConfig, dtype: str, family: str, is_moe: bool, vllm_version: str, *, record_routes: bool = False
) -> bool:
    """Returns True if vLLM on CUDA samples the noise of each seeded request by a separate kernel call, in a loop on the host.

    The first model runner does (`random_sample` of v1/sample/ops/topk_topp_sampler.py). vLLM 0.26 takes it for models with
    experts or to record routes, and wherever `runner_environment` selects it. vLLM 0.32 has one kernel for all requests.
    """
    if not vllm_version.startswith("0.26."):
        return False
    chosen = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") or runner_environment(rollout, dtype, vllm_version).get(
        "VLLM_USE_V2_MODEL_RUNNER"
    )
    return chosen == "0" if chosen else is_moe and (record_routes or family not in SECOND_RUNNER_MOE)


def vllm_arguments(
    rollout: RolloutConfig,
    options: VllmOptions,
    *,
    max_model_len: int,
    rollout_tp: int,
    on_cuda: bool,
    executor: Any,
    transfer: Any,
    has_latents: bool = False,
    has_states: bool = False,
    record_routes: bool = False,
    has_images: bool = False,
) -> dict[str, Any]:
    """Makes arguments of vllm.LLM. `rollout.engine_kwargs` may add to them and replace the tunable ones. Raises ConfigError.

    `executor` is the class that runs a rank's worker on the CPU; `transfer` is vLLM's weight transfer config.
    `has_latents`: the model has latent attention.
    `has_states`: it has gated delta nets. `record_routes`: see routes.py. `has_images`: it has a vision tower.
    """
    fixed: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "tensor_parallel_size": rollout_tp,
        "enable_expert_parallel": rollout.has_whole_experts,
        "distributed_executor_backend": "external_launcher" if on_cuda else executor,
        "seed": rollout.seed,  # must be the same within a replica; every sample also has its own seed
        "logprobs_mode": "processed_logprobs",  # vLLM's default ignores temperature: not the sampled distribution
        "generation_config": "vllm",  # vLLM's default silently takes temperature and top_p from the model folder
        "weight_transfer_config": transfer,
    }
    if rollout.top_k > 0:
        fixed["max_logprobs"] = training_truncation(rollout).max_kept
    if has_images:
        # Every rank has the full tower, as the trainer sends it, and computes some of the images.
        fixed["mm_encoder_tp_mode"] = "data" if rollout_tp > 1 else "weights"
        fixed["mm_processor_cache_gb"] = 0  # nothing is processed
        fixed["skip_mm_profiling"] = not on_cuda
    tunable: dict[str, Any] = {
        "max_num_seqs": rollout.sequences,
        "max_num_batched_tokens": min(
            rollout.max_num_batched_tokens, rollout.sequences * max_model_len
        ),  # vLLM warns of more
        "enable_prefix_caching": rollout.enable_prefix_caching,
    }
    if on_cuda:  # not run on a GPU yet
        fixed["enable_sleep_mode"] = rollout.free_cache_engine
        fixed["quantization"] = rollout.quantization
        fixed |= {"enable_return_routed_experts": True} if record_routes else {}
        tunable["gpu_memory_utilization"] = rollout.gpu_memory_utilization
        tunable["enforce_eager"] = rollout.enforce_eager
    else:
        fixed["enforce_eager"] = True  # compiling takes minutes and needs a C++ compiler
        # vLLM's model runner on CPU rewinds a request's generator after each chunk of its prompt. Generators on CPU cannot
        # be rewound ("CPU Generator does not use offset"), so every prompt must be computed in one step.
        fixed["enable_chunked_prefill"] = False
        tunable["max_num_batched_tokens"] = max(tunable["max_num_batched_tokens"], max_model_len)
        if has_states:  # vLLM keeps the states of prefixes only where it divides prompts
            tunable["enable_prefix_caching"] = False
        if has_latents:
            fixed["compilation_config"], fixed["attention_config"] = PLAIN_ROTATION, CPU_LATENTS
        tunable["kv_cache_memory_bytes"] = int(options.kv_cache_gib * 2**30)  # exact, unlike VLLM_CPU_KVCACHE_SPACE
    fixed["max_model_len"] = max_model_len
    clash = sorted({"model", "dtype", *fixed} & rollout.engine_kwargs.keys())
    if clash:
        raise ConfigError(f"rollout.engine_kwargs: {', '.join(clash)} cannot be set here; the trainer depends on it")
    if unsafe := ENGINE_KWARGS.owned_by(rollout.engine_kwargs).keys() & UNSAFE.keys():
        raise ConfigError("; ".join(f"rollout.engine_kwargs.{name}: {UNSAFE[name]}" for name in sorted(unsafe)))
    return {**tunable, **rollout.engine_kwargs, **fixed}
