"""`python -m grpo_megatron`, and what torchrun starts."""

import sys

from grpo_megatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
