"""Imported once by the fork server of tests/worlds.py, so that every rank starts with the slow imports done."""

import megatron.core.distributed
import megatron.core.models.gpt.gpt_model
import megatron.core.optimizer
import megatron.core.pipeline_parallel
import vllm
import vllm.v1.executor.uniproc_executor
