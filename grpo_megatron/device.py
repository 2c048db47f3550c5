"""The differences between CPU and CUDA, which are in this file only: backend, seeds, memory, Megatron-Core on CPU.

Megatron-Core calls CUDA functions in about twenty places even when every tensor is on the host. `Device.megatron()`
replaces those calls with CPU ones inside a `with` block; on CUDA it replaces nothing. Enter it around build, forward,
backward, optimizer step, save and load; never around vLLM.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from grpo_megatron.config import ConfigError
from grpo_megatron.imports import replaced
from grpo_megatron.processes.variables import TE_NONDETERMINISM
from grpo_megatron.transformer_engine import (
    Version,
    examine_transformer_engine,
    leave_megatron_uncompiled,
    parse_version,
)

leave_megatron_uncompiled(torch.version.cuda)


@dataclass(frozen=True)
class Hardware:
    """Optional device features. Versions are (major, minor); None: the machine does not have the feature.

    `capability` is the device's compute capability, `cuda_version` the CUDA that torch was built with.
    `transformer_engine_problem` is the reason why Transformer Engine cannot be used, or None.
    """

    capability: Version | None
    cuda_version: Version | None
    transformer_engine_problem: str | None = None

    @property
    def is_cuda(self) -> bool:
        return self.capability is not None


def read_hardware(kind: Literal["auto", "cpu", "cuda"]) -> Hardware:
    """Returns this machine's features for a run with `trainer.device` = `kind`. Imports a usable Transformer Engine."""
    transformer_engine_problem = examine_transformer_engine()[1]
    if kind == "cpu" or not torch.cuda.is_available():
        return Hardware(None, None, transformer_engine_problem)
    index = int(os.environ.get("LOCAL_RANK", "0"))
    return Hardware(
        torch.cuda.get_device_capability(index), parse_version(torch.version.cuda or "0"), transformer_engine_problem
    )


def device_bytes(kind: Literal["auto", "cpu", "cuda"]) -> int | None:
    """Returns the memory of this rank's GPU, for a run with `trainer.device` = `kind`. None: the run is on the CPU."""
    if kind == "cpu" or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(int(os.environ.get("LOCAL_RANK", "0"))).total_memory)


class DeviceMemory(NamedTuple):
    """Bytes of a GPU. `reserved`: torch's memory in this process, free or in use; `allocated`: that of its tensors."""

    free: int
    total: int
    reserved: int
    allocated: int = 0


def count_cuda_devices() -> int:
    """Returns the number of CUDA devices that torch sees on this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class Device:
    """One rank's device. `kind` is "cpu" or "cuda"; the rank's tensors are on `torch_device`."""

    def __init__(self, kind: Literal["auto", "cpu", "cuda"] = "auto", local_rank: int | None = None) -> None:
        if kind == "auto":
            kind = "cuda" if torch.cuda.is_available() else "cpu"
        self.kind, self.torch_device = kind, torch.device("cpu")
        if kind == "cuda":
            if not torch.cuda.is_available():
                raise ConfigError("trainer.device=cuda, but torch sees no CUDA device; set trainer.device=cpu or auto")
            index = int(os.environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank
            torch.cuda.set_device(index)
            self.torch_device = torch.device("cuda", index)

    @property
    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def capability(self) -> Version:
        """The compute capability; (0, 0) on the CPU."""
        return torch.cuda.get_device_capability(self.torch_device) if self.is_cuda else (0, 0)

    @property
    def name(self) -> str:
        """The marketing name, for the table of peak FLOP/s; "cpu" on the CPU."""
        return torch.cuda.get_device_name(self.torch_device) if self.is_cuda else "cpu"

    @property
    def backend(self) -> str:
        """The torch.distributed backend of the device's own groups."""
        return "nccl" if self.is_cuda else "gloo"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def empty_cache(self) -> None:
        if self.is_cuda:
            torch.cuda.empty_cache()

    def memory(self) -> DeviceMemory | None:
        """Returns the memory of the GPU. None: the CPU, whose memory is not divided."""
        if not self.is_cuda:
            return None
        by_torch = torch.cuda.memory_reserved(self.torch_device), torch.cuda.memory_allocated(self.torch_device)
        return DeviceMemory(*torch.cuda.mem_get_info(self.torch_device), *by_torch)

    def memory_gib(self) -> dict[str, float]:
        """Memory of this rank in GiB (2**30 bytes). The metric names, with `_gb`, are verl's but for the last.

        The peaks count the engine's pool as allocated while it sleeps and its memory is free: vLLM's allocator unmaps it
        unseen by torch. What is taken of the device now is `device_memory_used_gb`, with contexts, NCCL and other processes.
        """
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux reports KiB
        if not self.is_cuda:
            return {"perf/cpu_memory_used_gb": host}
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return {
            "perf/cpu_memory_used_gb": host,
            "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated(self.torch_device) / 2**30,
            "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved(self.torch_device) / 2**30,
            "perf/device_memory_used_gb": (total - free) / 2**30,
        }

    # -- random state: vLLM reseeds every generator of its process, and `generate` advances torch's --------------------

    def seed(self, seed: int, rank: int) -> None:
        """Seeds torch's generators alike on all ranks, as Megatron-Core expects, and Python's and numpy's per rank."""
        torch.manual_seed(seed)
        random.seed(f"{seed}/{rank}")
        np.random.seed(np.random.SeedSequence([seed, rank]).generate_state(4))

    def rng_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if self.is_cuda:
            state["cuda"] = torch.cuda.get_rng_state(self.torch_device)
        return state

    def set_rng_state(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        if self.is_cuda:
            torch.cuda.set_rng_state(state["cuda"], self.torch_device)

    @contextlib.contextmanager
    def preserve_rng(self) -> Iterator[None]:
        """Restore every generator at the end: a resumed run must not depend on what the engine has sampled."""
        state = self.rng_state()
        try:
            yield
        finally:
            self.set_rng_state(state)

    @contextlib.contextmanager
    def preserve_torch_rng(self) -> Iterator[None]:
        """Does `preserve_rng` without Python's and numpy's generators, whose states take 0.2 ms to copy."""
        state, *on_device = self.torch_states()
        try:
            yield
        finally:
            torch.set_rng_state(state)
            for one in on_device:
                torch.cuda.set_rng_state(one, self.torch_device)

    def torch_states(self) -> list[torch.Tensor]:
        """Returns the states of torch's generators: the host's, and the device's if it is a GPU."""
        on_device = [torch.cuda.get_rng_state(self.torch_device)] if self.is_cuda else []
        return [torch.get_rng_state(), *on_device]

    def megatron(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context in which Megatron-Core's own code must run. Re-entrant."""
        _define_router_product()
        if not self.is_cuda:
            return _megatron_on_cpu()
        return _deterministic() if os.environ.get(TE_NONDETERMINISM) == "0" else contextlib.nullcontext()


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Makes torch's operations deterministic or raise. With `warn_only`, its memory-efficient attention would not be."""
    was_on, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time and decides nothing
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def _define_router_product() -> None:
    """Without Transformer Engine, the router of Megatron-Core 0.16 compares an undefined name with None: NameError."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


class _CudaToCpu(TorchFunctionMode):
    """Replaces `device="cuda"` with the CPU, and lets `Tensor.type()` return the CUDA names that Megatron compares with."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None:  # most of the calls of a step
            kwargs = {}
        elif (device := kwargs.get("device")) is not None and (type(device) is int or str(device).startswith("cuda")):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.cuda:
            return args[0]
        out = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and isinstance(out, str):
            return out.replace("torch.", "torch.cuda.", 1)
        return out


class _Stream:
    """A stand-in for torch.cuda.Stream and Event. On the CPU there is nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def nothing(self, *args: Any, **kwargs: Any) -> None: ...

    synchronize = wait_stream = wait_event = wait = record = nothing

    def record_event(self, *args: Any) -> _Stream:
        return self


_depth = 0  # of nested contexts; the patches are process-wide, and only the outermost one applies them


@contextlib.contextmanager
def _plain_optimizers() -> Iterator[None]:
    """Makes Megatron-Core use torch's optimizers and norms; those of Transformer Engine and Apex are CUDA kernels."""
    from megatron.core import optimizer, utils
    from megatron.core.optimizer import clip_grads, distrib_optimizer
    from megatron.core.optimizer import optimizer as base

    scale = {
        "multi_tensor_applier": utils.local_multi_tensor_applier,
        "multi_tensor_scale_impl": utils.local_multi_tensor_scale,
    }
    flags: dict[str, Any] = dict.fromkeys(("HAVE_APEX_OR_TE", "USING_TE_OPTIMIZER", "USING_APEX_OPTIMIZER"), False)
    plain: dict[str, Any] = {"Adam": torch.optim.AdamW, "SGD": torch.optim.SGD, "USING_PYTORCH_OPTIMIZER": True}
    with (
        replaced(optimizer, **plain),
        replaced(distrib_optimizer, Adam=torch.optim.Adam, **flags),
        replaced(clip_grads, l2_norm_impl=utils.local_multi_tensor_l2_norm, **scale),
        replaced(base, **scale),
    ):
        yield


@contextlib.contextmanager
def _megatron_on_cpu() -> Iterator[None]:
    global _depth
    if _depth:
        yield
        return
    import megatron.core.tensor_parallel.random as megatron_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    run_backward = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def backward(*args: Any, **kwargs: Any) -> Any:
        # A TorchFunctionMode is off inside its own handler, where backward() runs. Recomputation in backward() needs it on.
        with _CudaToCpu():
            return run_backward(*args, **kwargs)

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def get_rng(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    stream = _Stream()
    cuda: dict[str, Any] = {
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda *args: stream,
        "stream": lambda *args: contextlib.nullcontext(),
        "current_device": lambda: "cpu",
        "synchronize": nothing,
        "empty_cache": nothing,
        "manual_seed": torch.manual_seed,
        "get_rng_state": get_rng,
        "set_rng_state": set_rng,
    }
    _depth += 1
    try:
        with (
            replaced(torch.cuda, **cuda),
            _plain_optimizers(),
            replaced(torch.cuda.nvtx, range_push=nothing, range_pop=nothing),
            replaced(megatron_random, _get_cuda_rng_state=get_rng, _set_cuda_rng_state=set_rng),
            replaced(moe_utils, te_general_gemm=None),  # with Transformer Engine: a CUDA kernel
            replaced(token_dispatcher, maybe_move_tensor_to_cpu=to_host),
            replaced(torch.autograd, _engine_run_backward=backward),
            _CudaToCpu(),
        ):
            yield
    finally:
        _depth -= 1


# -- the heap of glibc -------------------------------------------------------------------------------------------------
# By default glibc gives large blocks back to the kernel, which clears every page again for the next tensor: 4,000 page faults
# per step of a model of 0.4 M parameters, 150,000 with 26 M (measured). Here tensors of up to LARGEST_KEPT bytes are reused, and
# the free end of the heap is given back only above MOST_KEPT bytes.

LARGEST_KEPT = 64 << 20, 32 << 20  # bytes; the second is the most that glibc before 2.35 takes
MOST_KEPT = 1 << 30
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_SET_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Keeps memory that tensors free in the process. Returns False where the user has set these limits, and without glibc."""
    if sys.platform != "linux" or any(name in os.environ for name in _SET_BY_USER):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is None:
        return False
    is_larger = any(mallopt(_M_MMAP_THRESHOLD, size) for size in LARGEST_KEPT)
    return is_larger and bool(mallopt(_M_TRIM_THRESHOLD, MOST_KEPT))
