"""Probes of vLLM's own kernels and memory pool, without an engine."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tests.gpu.building import free_mib
from tests.gpu.probes import needs_package, probe


@probe
def vllm_import() -> dict[str, Any]:
    needs_package("vllm", "vLLM")
    from grpo_megatron.device import Device
    from grpo_megatron.rollout import vllm_process

    vllm = vllm_process._import_vllm(Device("cuda"))
    import vllm.vllm_flash_attn.flash_attn_interface as flash
    from vllm.device_allocator.cumem import cumem_available

    figures: dict[str, Any] = {"version": vllm.__version__, "sleep pool": cumem_available}
    for number in (2, 3, 4):
        available = getattr(flash, f"FA{number}_AVAILABLE", False)
        why = getattr(flash, f"FA{number}_UNAVAILABLE_REASON", "unknown to this vLLM")
        figures[f"FlashAttention {number}"] = "yes" if available else f"no ({str(why)[:80]})"
    assert cumem_available, "without vLLM's memory pool the engine cannot sleep"
    return figures


@probe
def vllm_sleep_pool() -> dict[str, Any]:
    """The pool behind sleep mode: two tags of 256 MiB, one kept on the host, one dropped."""
    needs_package("vllm", "vLLM")
    from vllm.device_allocator.cumem import CuMemAllocator

    pool = CuMemAllocator.get_instance()
    with pool.use_memory_pool(tag="weights"):
        kept = torch.arange(1 << 26, dtype=torch.int32, device="cuda")
    with pool.use_memory_pool(tag="kv_cache"):
        dropped = torch.ones(1 << 26, dtype=torch.int32, device="cuda")
    addresses = kept.data_ptr(), dropped.data_ptr()
    before = free_mib()
    pool.sleep(offload_tags=("weights",))
    freed = free_mib() - before
    pool.wake_up(["weights"])
    assert torch.equal(kept.cpu(), torch.arange(1 << 26, dtype=torch.int32))
    pool.wake_up(["kv_cache"])
    dropped.fill_(3)
    assert int(dropped[-1]) == 3 and (kept.data_ptr(), dropped.data_ptr()) == addresses
    lost = before - free_mib()
    assert freed >= 508, f"512 MiB went to sleep, and {freed:.0f} MiB more are free"
    return {"freed": (freed, "MiB of 512"), "lost after waking": (lost, "MiB")}


@probe
def second_runners_draws() -> dict[str, Any]:
    """The sampler of vLLM's second model runner: a draw depends on its seed and position only, and on the distribution."""
    needs_package("vllm", "vLLM")
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    from grpo_megatron.rollout.engine import sample_seed

    count, size = 20_000, 8
    seeds = torch.tensor([sample_seed(0, 0, "probe", i) for i in range(count)], device="cuda")
    logits = torch.linspace(-1, 2, size, device="cuda").repeat(count, 1)
    options: dict[str, Any] = {"apply_temperature": False}
    if "is_drafting" in inspect.signature(gumbel_sample).parameters:  # in vLLM 0.32, not in 0.26
        options["is_drafting"] = False

    def draw(rows: torch.Tensor) -> torch.Tensor:
        state = torch.arange(len(rows), dtype=torch.int32, device="cuda")
        ones = torch.ones(len(rows), device="cuda")
        position = torch.full((len(rows),), 7, dtype=torch.int64, device="cuda")
        return gumbel_sample(logits[rows], state, ones, seeds[rows], position, **options)

    everything = torch.arange(count, device="cuda")
    together = draw(everything)
    assert torch.equal(draw(everything.flip(0)), together.flip(0)), "the order of the batch changes draws"
    assert torch.equal(draw(everything[5:6]), together[5:6]), "the batch changes draws"
    share = torch.bincount(together, minlength=size) / count
    exact = logits[0].softmax(0)
    worst = float(((share - exact) / (exact * (1 - exact) / count).sqrt()).abs().max())
    assert worst <= 5, f"a token's share is {worst:.1f} standard errors from its probability"
    return {"largest deviation of a token's share": (worst, "standard errors")}
