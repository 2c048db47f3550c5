"""Entry point of `python -m grpo_megatron`, by hand and under torchrun."""

import sys

from grpo_megatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
