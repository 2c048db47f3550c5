"""What the fork server of tests/worlds.py imports: as for the program's own CPU ranks, and matplotlib for the curves."""

from grpo_megatron.cli.preload import import_engine, import_trainer
from grpo_megatron.importing import large_imports

import_trainer()
import_engine("vllm")
with large_imports():
    import grpo_megatron.observability.curves  # noqa: F401
