"""Starts and stops vLLM inside a training process, without output and side effects.

vLLM is imported late: `import vllm` takes seconds and changes the environment. There is one worker per process
(external_launcher). Weights arrive through a WeightTransferEngine of this file, which takes Hugging Face tensors by
reference.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import gc
import glob
import importlib
import json
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from grpo_megatron.device import Device
from grpo_megatron.exact.vllm import use_exact_layers
from grpo_megatron.imports import large_imports, replaced, without
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.rollout.engine import EngineSetup
from grpo_megatron.rollout.vllm.arguments import runner_environment, vllm_arguments
from grpo_megatron.rollout.vllm.images import importing_models, serve_images
from grpo_megatron.rollout.vllm.memory import EngineMemory
from grpo_megatron.rollout.vllm.versions import (
    adapted,
    divide_cpu_experts,
    finish_without_routes,
    image_arguments,
    replace_triton_kernels,
)
from grpo_megatron.types import WeightBucket

# Loggers of expected warnings only: no tokenizer, buffers that no checkpoint has, a policy of another dtype, no processor of
# images.
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

# Optional packages that vLLM would import. opentelemetry: for `otlp_traces_endpoint`, which is refused.
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


def build_llm(setup: EngineSetup) -> tuple[Any, Any]:
    """Builds (vllm.LLM with dummy weights, vllm.SamplingParams). Collective over the world, after the process group.

    Raises ConfigError for `rollout.engine_kwargs` whose values the trainer must set itself.
    """
    rollout, mesh, device = setup.rollout, setup.mesh, setup.device
    has_images = any(name.startswith("visual.") for name in setup.tensors.tensors)
    if not device.is_cuda:
        _remove_leftovers(mesh)
    with _host_unchanged(device, mesh), inside_vllm(device):
        vllm = _import_vllm(device)
        vllm.v1.engine.core.cleanup_dist_env_and_memory = _destroy_vllm_groups
        if device.is_cuda:
            for name, value in runner_environment(rollout, setup.dtype, vllm.__version__, device.capability).items():
                os.environ.setdefault(name, value)
            if setup.record_routes and mesh.rank % mesh.rollout_tp:
                finish_without_routes()
        elif rollout.has_whole_experts:
            divide_cpu_experts()
        if setup.exact:
            use_exact_layers()
        executor, transfer = _classes(on_cpu=not device.is_cuda)
        arguments = vllm_arguments(
            rollout,
            setup.options,
            max_model_len=setup.max_model_len,
            rollout_tp=mesh.rollout_tp,
            on_cuda=device.is_cuda,
            executor=executor,
            transfer=transfer,
            has_latents=any(name.endswith("kv_a_proj_with_mqa.weight") for name in setup.tensors.tensors),
            has_states=any(name.endswith("linear_attn.A_log") for name in setup.tensors.tensors),
            record_routes=setup.record_routes,
            has_images=has_images,
        )
        arguments |= image_arguments() if has_images else {}
        if '"quantization_config"' in (Path(setup.model_path) / "config.json").read_text():
            arguments["hf_overrides"] = _without_quantization
        # A step that lacks room for an image divides its prompt, which only a GPU can. The largest image must always fit.
        prompts_per_step = 1 if device.is_cuda else rollout.sequences
        architectures = _load_model_class(setup.model_path, setup.max_model_len * prompts_per_step if has_images else 0)
        if architectures:
            arguments["hf_overrides"] = {"architectures": architectures}
        llm = vllm.LLM(model=str(setup.model_path), dtype=setup.dtype, **arguments)
        llm.init_weight_transfer_engine({"init_info": {}})
    return llm, vllm.SamplingParams


def _without_quantization(config: Any) -> Any:
    """Removes what config.json says of weights in its folder (gpt-oss: MXFP4). The engine gets the policy's."""
    if hasattr(config, "quantization_config"):  # vLLM asks first with a config that has no fields
        del config.quantization_config
    return config


def _import_vllm(device: Device) -> Any:
    """Imports vllm. It logs warnings and errors only, unless the user has set VLLM_LOGGING_LEVEL."""
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
    """Imports what engines on CPU need, and replaces Triton's kernels. Once, in the process that CPU ranks are forked from.

    Replacing the kernels visits every object of every module. In a forked rank it would copy all of their memory pages.
    """
    _import_vllm(Device("cpu"))
    with large_imports():
        for name in _CPU_MODULES:
            importlib.import_module(name)
        replace_triton_kernels()
    # At a normal exit Triton's bindings print a list of leaked objects. Ranks do not exit this way.
    atexit.register(os._exit, 0)


def _load_model_class(folder: Path | str, image_tokens: int) -> list[str]:
    """Imports the model's class here, before vLLM starts another Python to do so. Returns the names of the classes.

    Where no images are read, a model with a tower is that of its decoder: Qwen3_5ForCausalLM.

    vLLM inspects a class that it has not imported in a process of its own, so as not to initialise CUDA in this one, and
    caches the result in ~/.cache/vllm. With an empty cache every rank starts such a process, which imports torch and vLLM:
    as long as the rest of the start. A rank has initialised CUDA already. Not run on a GPU yet.

    `image_tokens`: see `serve_images`; 0: the model reads none.
    """
    from vllm import ModelRegistry

    names = json.loads((Path(folder) / "config.json").read_bytes()).get("architectures") or []
    if not image_tokens:
        decoders = [name.replace("ForConditionalGeneration", "ForCausalLM") for name in names]
        names = [new if new in ModelRegistry.models else old for new, old in zip(decoders, names, strict=True)]
    for name in names:
        if name in ModelRegistry.models:  # others are left to vLLM, which may have a replacement
            # vLLM's file of Qwen3.5 has its tower, too.
            with importing_models() if image_tokens or name.startswith("Qwen3_5") else contextlib.nullcontext():
                model = ModelRegistry.models[name].load_model_cls()
            if image_tokens:
                serve_images(model, image_tokens)
            ModelRegistry.register_model(name, model)
    return names


@functools.cache
def _classes(on_cpu: bool) -> tuple[type, Any]:
    """Defines (executor class of a CPU rank, weight transfer config), which need vLLM imported."""
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
        """Takes full Hugging Face tensors by reference. Each worker loads its shard, layer by layer.

        vLLM's models divide a stack of experts again, and make one call for each. So it goes to the weight loader directly.

        With `rollout.quantization` the stream is still the policy's bfloat16. vLLM puts each linear layer back on the meta
        device, as it was before quantisation. Once all tensors of the layer have arrived, it loads them, quantises them as at
        the first load, and copies values and scales to the old addresses. Embedding, norms and head are never quantised. Not
        run on a GPU yet.
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
            update_info.memory.load(update_info.tensors, lambda others: model.load_weights(iter(others)))

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
    """Undoes what building an engine does to its process. Inside, vLLM finds its rank in the world of its role.

    vLLM reseeds the random generators, overwrites torchrun's LOCAL_WORLD_SIZE, sets an LD_PRELOAD that every child process
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
def inside_vllm(device: Device) -> Iterator[None]:
    """Surrounds every call into vLLM.

    On CPU the few functions that vLLM compiles run as plain Python. This needs no C++ compiler, and saves 20 s before the
    first token. torch's deprecation warnings are hidden: they address vLLM's code.
    """
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", FutureWarning)
        with contextlib.nullcontext() if device.is_cuda else torch.compiler.set_stance("force_eager"):
            yield


def ending_vllm(device: Device) -> contextlib.AbstractContextManager[Any]:
    """Surrounds the shutdown of an engine.

    vLLM calls `gc.unfreeze` and then collects garbage three times, which takes seconds. On CPU nothing else needs the
    memory, so frozen objects stay frozen there.
    """
    return contextlib.nullcontext() if device.is_cuda else replaced(gc, unfreeze=lambda: None)


def _remove_leftovers(mesh: Mesh) -> None:
    """Removes shared memory that a killed run on the same port has left. Collective.

    Otherwise vLLM (its AVX-512 build) would refuse to start.
    """
    if mesh.rank % mesh.ranks_per_node == 0 or os.environ["LOCAL_RANK"] == "0":
        for path in glob.glob(f"/dev/shm/{os.environ['MASTER_PORT']}-*-cpushm_*"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    mesh.barrier()


def _destroy_vllm_groups(shutdown_ray: bool = False) -> None:
    """Destroys vLLM's process groups only. Replaces vLLM's clean-up.

    vLLM's clean-up destroys torch's default group whenever an engine is shut down or garbage-collected. The trainer needs
    that group.
    """
    from vllm.distributed import parallel_state

    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
            parallel_state._WORLD = None
