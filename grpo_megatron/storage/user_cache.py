"""The user's cache folder: what is made again when it is missing. It may be deleted at any time."""

from __future__ import annotations

import os

CACHE_VARIABLE = "GRPO_MEGATRON_CACHE"


def cache_folder() -> str:
    """$GRPO_MEGATRON_CACHE, or else grpo_megatron in $XDG_CACHE_HOME or ~/.cache. A home that is not known stays "~"."""
    own = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get(CACHE_VARIABLE) or os.path.join(own, "grpo_megatron")
