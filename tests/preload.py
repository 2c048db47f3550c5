"""Imported once by the fork server of tests/worlds.py, so that every rank starts with the slow imports done: the program's
own ranks on CPU are forked so too (grpo_megatron/preload.py)."""

import warnings

warnings.filterwarnings("ignore")

from grpo_megatron.importing import large_imports  # noqa: E402

with large_imports():
    import grpo_megatron.observability.curves
    import grpo_megatron.trainer  # noqa: F401
    from grpo_megatron.rollout.vllm_process import preload

preload()
