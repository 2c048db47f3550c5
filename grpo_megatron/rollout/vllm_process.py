"""How vLLM 0.32 gets into a training process, quietly and without traces, and out again. The only importer of vllm.

It imports late: `import vllm` takes seconds and rewrites the environment. One worker per process (external_launcher);
weights arrive through a WeightTransferEngine of ours that takes Hugging Face tensors by reference.

With `rollout.quantization` the stream stays the policy's own bfloat16. vLLM's layer-wise reload puts each linear layer back
on the meta device as it was before quantisation, waits until all its tensors have come, loads them, quantises them as at
the first load, and copies values and scales into the old addresses; embedding, norms and head are never quantised. Not
run on a GPU yet.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import gc
import glob
import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from grpo_megatron.config import ConfigError, RolloutConfig
from grpo_megatron.device import Device
from grpo_megatron.importing import large_imports
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.types import WeightBucket

# Loggers whose every warning is expected here: no tokenizer, buffers no checkpoint holds, a policy of another dtype.
_NOISE = (
    "vllm.renderers.base",
    "vllm.model_executor.model_loader.reload.layerwise",
    "vllm.model_executor.models.utils",
)
_CPU_NOISE = (  # no Triton, no compilation, on some no bfloat16 kernels
    "vllm.model_executor.layers.utils",
    "vllm.triton_utils.importing",
    "vllm.engine.arg_utils",
    "vllm.config.vllm",
    "vllm.platforms.cpu",
    "vllm.v1.worker.cpu_worker",
)


_CPU_MODULES = (  # that an engine on CPU imports while it is built
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.mixtral",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
)


def build(
    model_path: Path | str, rollout: RolloutConfig, mesh: Mesh, device: Device, *, dtype: str, max_model_len: int
) -> tuple[Any, Any]:
    """(vllm.LLM with dummy weights, vllm.SamplingParams). Collective over the world, after the process group.

    Raises ConfigError for `rollout.engine_kwargs` that would break the contract with the trainer.
    """
    if not device.is_cuda:
        _remove_own_leftovers(mesh)
    with _host_as_found(device), inside(device):
        vllm = _import_vllm(device)
        vllm.v1.engine.core.cleanup_dist_env_and_memory = _leave_groups
        arguments = _arguments(rollout, mesh, device)
        llm = vllm.LLM(model=str(model_path), dtype=dtype, max_model_len=max_model_len, **arguments)
        llm.init_weight_transfer_engine({"init_info": {}})
    return llm, vllm.SamplingParams


def _arguments(rollout: RolloutConfig, mesh: Mesh, device: Device) -> dict[str, Any]:
    """vllm.LLM's arguments. The user's `engine_kwargs` may add to them, and replace the tunable ones."""
    executor, transfer = _classes(on_cpu=not device.is_cuda)
    fixed: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "tensor_parallel_size": mesh.rollout_tp,
        "distributed_executor_backend": "external_launcher" if device.is_cuda else executor,
        "seed": rollout.seed,  # must agree within a block; samples have seeds of their own
        "logprobs_mode": "processed_logprobs",  # vLLM's default is before temperature: not what was drawn from
        "generation_config": "vllm",  # vLLM's default is the model folder's temperature and top_p, silently
        "weight_transfer_config": transfer,
    }
    tunable: dict[str, Any] = {
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enable_prefix_caching": rollout.enable_prefix_caching,
    }
    if device.is_cuda:  # not run on a GPU yet
        fixed["enable_sleep_mode"] = rollout.free_cache_engine
        tunable["gpu_memory_utilization"] = rollout.gpu_memory_utilization
        tunable["enforce_eager"] = rollout.enforce_eager
        fixed["quantization"] = rollout.quantization
    else:
        fixed["enforce_eager"] = True  # compiling takes minutes and a C++ compiler
        tunable["kv_cache_memory_bytes"] = int(rollout.kv_cache_gib * 2**30)  # exact, unlike VLLM_CPU_KVCACHE_SPACE
    clash = sorted({"model", "dtype", "max_model_len", *fixed} & rollout.engine_kwargs.keys())
    if clash:
        raise ConfigError(f"rollout.engine_kwargs: {', '.join(clash)} cannot be set here; the trainer depends on it")
    return {**tunable, **rollout.engine_kwargs, **fixed}


def _import_vllm(device: Device) -> Any:
    """`import vllm`, quietly unless the user has set VLLM_LOGGING_LEVEL: warnings and errors only."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # an executor class does not see to it, as the string does
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # it would report to its makers from a thread
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
        for name in _NOISE if device.is_cuda else _NOISE + _CPU_NOISE:
            logging.getLogger(name).addFilter(
                _errors_only
            )  # vLLM's configuration of logging resets levels, not filters
    with warnings.catch_warnings(), large_imports():
        warnings.simplefilter("ignore")
        import vllm
        import vllm.entrypoints.llm
        import vllm.v1.engine.core
    return vllm


def preload() -> None:
    """Once, in a process that CPU ranks are forked from: import what their engines will, and replace Triton's kernels.

    The second looks at every object of every module; a rank would copy all their pages for it.
    """
    _import_vllm(Device("cpu"))
    with large_imports():
        for name in _CPU_MODULES:
            importlib.import_module(name)
        from vllm.platforms.cpu import CpuPlatform

        CpuPlatform.register_triton_kernel_overrides()
        CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)
    # Triton's bindings would list on the console what they leak. Ranks do not end this way.
    atexit.register(os._exit, 0)


def _errors_only(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@functools.cache
def _classes(on_cpu: bool) -> tuple[type, Any]:
    """Our two pieces of vLLM, made late: a rank's executor on CPU, and the transfer that takes tensors as they are."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer import base
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader import reload
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class RankExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            env = os.environ  # tcp://: vLLM's shared memory is then named after the port, so jobs do not collide
            return f"tcp://{env['MASTER_ADDR']}:{env['MASTER_PORT']}", int(env["RANK"]), int(env["LOCAL_RANK"])

    @dataclasses.dataclass
    class Nothing(base.WeightTransferInitInfo):
        pass

    @dataclasses.dataclass
    class Tensors(base.WeightTransferUpdateInfo):
        tensors: WeightBucket

    class InProcess(base.WeightTransferEngine[Nothing, Tensors]):
        """Full Hugging Face tensors by reference; each worker cuts out its own shard, layer by layer."""

        init_info_cls, update_info_cls = Nothing, Tensors

        def init_transfer_engine(self, init_info: Nothing) -> None:
            pass

        def start_weight_update(self) -> None:
            for layer in self.model.modules() if on_cpu else ():
                method: Any = getattr(layer, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None  # vLLM packs experts on CPU once, with the kernel: make both anew
            reload.initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Tensors) -> None:
            model: Any = self.model
            model.load_weights(iter(update_info.tensors))

        def finish_weight_update(self) -> None:
            reload.finalize_layerwise_reload(self.model, self.model_config)
            for layer in self.model.modules():  # a tied head on CPU keeps its own packed copy, which no tensor renews
                if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
                    layer.quant_method.process_weights_after_loading(layer)

        def shutdown(self) -> None:
            pass

    WeightTransferEngineFactory.register_engine("grpo_megatron", InProcess)
    return RankExecutor, WeightTransferConfig(backend="grpo_megatron")


@contextlib.contextmanager
def _host_as_found(device: Device) -> Iterator[None]:
    """Undo what building an engine does to its process: reseeded generators, torchrun's LOCAL_WORLD_SIZE overwritten,
    an LD_PRELOAD that every child would inherit, threads reduced or `torch.set_num_threads` made a no-op."""
    env = {key: os.environ.get(key) for key in ("LOCAL_WORLD_SIZE", "LD_PRELOAD")}
    num_threads, set_num_threads = torch.get_num_threads(), torch.set_num_threads
    try:
        with device.preserve_rng():
            yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        for key, value in env.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextlib.contextmanager
def inside(device: Device) -> Iterator[None]:
    """Around every call into vLLM. On CPU its few compiled helpers run as plain Python: no C++ compiler needed, and no
    20 s before the first token; torch's deprecation warnings, which vLLM cannot heed, are not shown."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", FutureWarning)
        with contextlib.nullcontext() if device.is_cuda else torch.compiler.set_stance("force_eager"):
            yield


def ending(device: Device) -> contextlib.AbstractContextManager[Any]:
    """Around the end of an engine. vLLM thaws what was frozen and looks for garbage three times, seconds on CPU, where no
    memory is waited for: there, what is frozen stays so."""
    return contextlib.nullcontext() if device.is_cuda else mock.patch.object(gc, "unfreeze", lambda: None)


def _remove_own_leftovers(mesh: Mesh) -> None:
    """Remove shared memory that a killed run on this very port has left: vLLM (its AVX-512 build) would refuse to start.
    Collective."""
    if os.environ["LOCAL_RANK"] == "0":
        for path in glob.glob(f"/dev/shm/{os.environ['MASTER_PORT']}-*-cpushm_*"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    mesh.barrier()


def _leave_groups(shutdown_ray: bool = False) -> None:
    """Stands in for vLLM's clean-up, which destroys torch's default group, and with it the trainer's world, whenever an
    engine is shut down or garbage-collected. Destroys vLLM's own groups only."""
    from vllm.distributed import parallel_state

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None
