"""`grpo-megatron keys [SECTION]`: every key of a config with its default, its type and its comment."""

from __future__ import annotations

import argparse
import difflib
import json
import textwrap

from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.keys import ConfigKey, config_keys

WIDTH = 110


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "grpo-megatron keys", description="List the keys of a config: default, type and comment."
    )
    parser.add_argument(
        "section", nargs="?", default="", metavar="SECTION", help="actor, rollout.multi_turn, ... (default: all)"
    )
    print(list_keys(parser.parse_args(argv).section), end="")
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
