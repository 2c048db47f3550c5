"""Commands that print what is known: `keys` of a config, and the loss of a dumped batch, computed again (`replay`)."""

from __future__ import annotations

import difflib
import json
import textwrap
from pathlib import Path
from typing import Annotated

from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.options import Argument, Option, Options
from grpo_megatron.config.section import ConfigKey, config_keys
from grpo_megatron.importing import large_imports

WIDTH = 110  # of the comments on keys


class KeysOptions(Options):
    """The options of `keys`."""

    program, description = "keys", "List the keys of a config: default, type and comment."
    section: Annotated[str, Argument("actor, rollout.multi_turn, ... (default: all)", "SECTION")] = ""


def print_keys(options: KeysOptions) -> int:
    """Print every key of a section with its default, its type and its comment; returns the exit code."""
    print(list_keys(options.section), end="")
    return 0


def list_keys(section: str) -> str:
    """A text for the terminal. `section`: the beginning of the names; "" for all. Raises ConfigError: no such section."""
    keys = list(config_keys(Config))
    chosen = [key for key in keys if not section or key.name == section or key.name.startswith(f"{section}.")]
    if not chosen:
        sections = sorted({".".join(key.name.split(".")[:depth]) for key in keys for depth in (1, 2, 3)})
        close = difflib.get_close_matches(section, sections, n=1)
        known = ", ".join(dict.fromkeys(key.name.partition(".")[0] for key in keys))
        raise ConfigError(
            f"no key of a config begins with {section!r}{f'; did you mean {close[0]!r}?' if close else ''} (sections: {known})"
        )
    return "\n".join(_described(key) for key in chosen) + "\n"


def _described(key: ConfigKey) -> str:
    default = "needed" if key.is_required else json.dumps(key.default, default=str)
    lines = [f"{key.name}: {default}   ({key.kind})"]
    return "\n".join([*lines, *textwrap.wrap(key.comment, WIDTH, initial_indent="    ", subsequent_indent="    ")])


# -- replay ------------------------------------------------------------------------------------------------------------


class ReplayOptions(Options):
    """The options of `replay`."""

    program = "replay"
    description = "Compute the loss of a dumped mini-batch again, on one CPU process."
    epilog = "Exit codes: 0 if the loss is that of the run, 1 if it is not, 2 if DUMP cannot be read."
    dump: Annotated[Path, Argument("OUTPUT_DIR/dumps/step_000012_NAME", "DUMP")]
    tolerance: Annotated[
        float | None, Option("of the loss; default: 1e-6 in float32, 1e-2 in bfloat16", "X", low=0)
    ] = None


def replay_dump(options: ReplayOptions) -> int:
    """Compute the loss of a dumped mini-batch again, in this process; returns the exit code of the epilog."""
    with large_imports():
        from grpo_megatron.training.dump import TOLERANCE, read_dump, recompute

    dump = read_dump(options.dump)
    incident = dump.incident
    print(f"step {incident.step}, update {incident.update}, guard {incident.guard}: {len(dump.batch)} responses")
    for text in incident.problems.values():
        print(f"  {text}")
    tolerance = TOLERANCE[dump.config.model.dtype] if options.tolerance is None else options.tolerance
    compared = recompute(dump)
    width = max(len(row.name) for row in compared)
    print(f"{'':{width}}  {'recorded':>14}  {'replayed':>14}  {'difference':>10}")
    for row in compared:
        print(
            f"{row.name:{width}}  {row.recorded:14.8g}  {row.recomputed:14.8g}  {row.recomputed - row.recorded:10.1e}"
        )
    is_same = compared[0].is_equal(tolerance)
    print(f"the loss is {'that of the run' if is_same else 'another one'} (tolerance {tolerance:g})")
    return 0 if is_same else 1
