"""What the fork server of CPU ranks also imports (see preload.py) for `rollout.engine: vllm`."""

import contextlib
import os

from grpo_megatron.cli.ranks import LAUNCHER_PID
from grpo_megatron.importing import silent_imports


def import_vllm() -> None:
    """Import the modules of the engine, in a process that CPU ranks are forked from."""
    with silent_imports():
        from grpo_megatron.rollout.vllm_process import preload

        preload()


if LAUNCHER_PID in os.environ:
    with contextlib.suppress(Exception):
        import_vllm()
