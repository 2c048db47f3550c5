"""What a fork server imports, once for all CPU ranks of its machine (ranks.py). For nobody else: it ends with its launcher.

On two cores a run of one step on four ranks takes 25 s instead of torchrun's 45, and what was imported is in memory once.
Ranks with GPUs are processes of their own: nothing here has shown that what vLLM imports there survives a fork.
"""

import contextlib
import os
import warnings

from grpo_megatron.cli.ranks import LAUNCHER_PID, die_with_launcher
from grpo_megatron.importing import large_imports

die_with_launcher()
os.environ[LAUNCHER_PID] = str(os.getpid())  # the ranks' parent, whose end is theirs

# What cannot be imported here is imported again in the ranks, where the reason is told.
with contextlib.suppress(Exception), warnings.catch_warnings(), large_imports():
    warnings.simplefilter("ignore")
    from grpo_megatron.rollout.vllm_process import preload

    preload()
