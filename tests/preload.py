"""Imported once by the fork server of tests/worlds.py, so that every rank starts with the slow imports done."""

import importlib
import warnings

from grpo_megatron.device import Device
from grpo_megatron.rollout import vllm_process

warnings.filterwarnings("ignore")
vllm_process._import_vllm(Device("cpu"))  # as a rank does it: settings and log filters are inherited
for module in (
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.dist_checkpointing",
    "vllm.entrypoints.llm",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
    "grpo_megatron.trainer",
):
    importlib.import_module(module)
