"""`python -m grpo_megatron prepare`, from a checkout: the generated data of an example, or a model with random weights."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed

from grpo_megatron.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["prepare", *sys.argv[1:]]))
