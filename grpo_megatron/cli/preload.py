"""What a fork server imports once for all CPU ranks of its machine (ranks.py); `preload_vllm.py` and
`preload_transformers.py` add the engine.

On two cores, one step on four ranks takes 25 s in this way and 45 s under torchrun (measured), and the imported modules
are in memory once. Ranks with GPUs are new programs: nothing has shown yet that vLLM's imports survive a fork there.
"""

import contextlib
import os

from grpo_megatron.cli.ranks import LAUNCHER_PID, die_with_launcher
from grpo_megatron.importing import silent_imports


def import_trainer() -> None:
    """Import the modules of the trainer, in a process that CPU ranks are forked from."""
    with silent_imports():
        import grpo_megatron.trainer  # noqa: F401


if LAUNCHER_PID in os.environ:  # this process is the fork server that ranks.start_fork_server has started
    die_with_launcher()
    os.environ[LAUNCHER_PID] = str(os.getpid())  # the parent of the ranks
    # A rank repeats an import that fails here, and reports the reason.
    with contextlib.suppress(Exception):
        import_trainer()
