"""What the fork server of tests/worlds.py imports: as for the program's own CPU ranks, and matplotlib for the curves."""

from grpo_megatron.cli.preload import import_for_ranks
from grpo_megatron.importing import large_imports

import_for_ranks()
with large_imports():
    import grpo_megatron.observability.curves  # noqa: F401
