"""How long the last start with the same model took, so that the first line of the next run can say it.

The file starts.json in the cache folder, {"2 ranks of MODEL": seconds}, has the last MAX_STARTS. It may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from grpo_megatron.storage.atomic import write_file
from grpo_megatron.storage.user_cache import cache_folder

STARTS_FILE, MAX_STARTS = "starts.json", 50
LONGEST_S = 1e6  # of a start; what is longer was not written here
BEGAN = "GRPO_MEGATRON_START"  # in the environment of ranks: the start's Unix time, a space, its name in the file


def starts_path() -> Path:
    return Path(cache_folder()) / STARTS_FILE


def begin_start(name: str) -> float | None:
    """The start begins now. Seconds of the last one of this name; None: there was none."""
    os.environ[BEGAN] = f"{time.time()} {name}"
    return _known().get(name)


def finish_start() -> None:
    """The first step begins: the start, if this process knows of one, is over. A second call does nothing."""
    began, _, name = os.environ.pop(BEGAN, "").partition(" ")
    if not name:
        return
    known = _known()
    known.pop(name, None)  # the newest is the last
    with contextlib.suppress(OSError, ValueError):  # a home that cannot be written; a variable that the user has set
        known[name] = round(time.time() - float(began), 1)
        newest = dict(list(known.items())[-MAX_STARTS:])
        starts_path().parent.mkdir(parents=True, exist_ok=True)
        write_file(starts_path(), json.dumps(newest, indent=1) + "\n")


def _known() -> dict[str, float]:
    try:
        known = json.loads(starts_path().read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {name: s for name, s in known.items() if type(s) in (int, float) and 0 <= s < LONGEST_S}  # not NaN
