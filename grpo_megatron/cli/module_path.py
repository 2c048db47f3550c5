"""Where a config's `my.module:function` is looked for."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def find_modules(config: Path) -> None:
    """Look for modules in the current folder, and beside the config, too. What is found today stays what is found.

    `python -m grpo_megatron` looks in the current folder first, the command `grpo-megatron` nowhere of the user's own.
    Reward workers and environments get the same path from this process.
    """
    for folder in (os.getcwd(), str(config.parent.absolute())):
        if folder not in sys.path and not ("" in sys.path and folder == os.getcwd()):
            sys.path.append(folder)
