"""Imports that a fork server makes once for all CPU ranks of its machine (ranks.py): the trainer, and the engine of the run.

On two cores, one step on four ranks takes 25 s in this way and 45 s under torchrun (measured), and the imported modules
are in memory once. Ranks with GPUs are new programs: nothing has shown yet that vLLM's imports survive a fork there.
"""

import contextlib
import os
import signal

from grpo_megatron.cli.failures import LAUNCHER_PID
from grpo_megatron.cli.ranks import PRELOADED_ENGINE, die_with_launcher
from grpo_megatron.imports import silent_imports


def import_trainer() -> None:
    """Import the modules of the trainer, in a process that CPU ranks are forked from."""
    with silent_imports():
        import grpo_megatron.trainer  # noqa: F401


def import_engine(name: str) -> None:
    """Import the modules of a `rollout.engine`. An engine of the user's own is imported by the ranks."""
    with silent_imports():
        if name == "vllm":
            from grpo_megatron.rollout.vllm.process import preload

            preload()
        elif name == "transformers":
            from grpo_megatron.rollout.transformers_engine import import_transformers

            import_transformers()


def _end_by_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


if LAUNCHER_PID in os.environ:  # this process is the fork server that ranks.start_fork_server has started
    die_with_launcher()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it to the whole group; the launcher answers it
    os.register_at_fork(after_in_child=_end_by_sigterm)
    os.environ[LAUNCHER_PID] = str(os.getpid())  # the parent of the ranks
    # A rank repeats an import that fails here, and reports the reason.
    with contextlib.suppress(Exception):
        import_trainer()
    with contextlib.suppress(Exception):
        import_engine(os.environ.pop(PRELOADED_ENGINE, ""))
