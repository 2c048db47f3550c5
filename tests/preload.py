"""Imported once by the fork server of tests/worlds.py, so that every rank starts with the slow imports done.

The engine's own modules too, the way the program imports them: what that leaves in the environment is the same as when a
rank does it, and a rank needs a fraction of the seconds. Two passes over the whole heap are also made here, not in every
rank, where they would copy each page that they look at: vLLM's replacement of Triton kernels, and garbage collection.
"""

import gc
import importlib
import warnings

from grpo_megatron.device import Device
from grpo_megatron.rollout.vllm_process import _import_vllm

warnings.filterwarnings("ignore")
_import_vllm(Device("cpu"))
for module in (
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "vllm.entrypoints.llm",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.mixtral",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "grpo_megatron.trainer",
):
    importlib.import_module(module)

from vllm.platforms.cpu import CpuPlatform  # noqa: E402

CpuPlatform.register_triton_kernel_overrides()
CpuPlatform.register_triton_kernel_overrides = classmethod(lambda cls: None)
gc.collect()
gc.freeze()
