"""GRPO training of language models on Megatron-Core, with vLLM in the same process."""

from grpo_megatron.extensions import examine_engine_before_megatron

examine_engine_before_megatron()
