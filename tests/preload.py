"""Imported once by the fork server of tests/worlds.py, so that every rank starts with the slow imports done."""

import importlib
import warnings

warnings.filterwarnings("ignore")
for module in (
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "vllm",
    "vllm.v1.executor.uniproc_executor",
):
    importlib.import_module(module)
