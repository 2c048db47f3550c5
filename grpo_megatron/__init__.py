"""GRPO training of language models on Megatron-Core, with vLLM in the same process."""

from importlib.metadata import PackageNotFoundError, version

from grpo_megatron.extensions import examine_engine_before_megatron

try:
    __version__ = version("grpo-megatron")
except PackageNotFoundError:  # run from a clone, which is not installed
    __version__ = "0.1.0"

examine_engine_before_megatron()
