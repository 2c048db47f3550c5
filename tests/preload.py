"""What the fork server of tests/worlds.py imports: as for the program's own CPU ranks."""

from grpo_megatron.cli.preload import import_engine, import_trainer

import_trainer()
import_engine("vllm")
