"""Writes docs/keys.md from the declarations of the config: `python -m tools.keys_page`. tests/test_docs.py compares the two."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

from grpo_megatron.config import Config, DataSource, RewardComponent, ScoringModel, TeacherConfig
from grpo_megatron.config.section import ConfigKey, Section, config_keys

PAGE = Path(__file__).resolve().parents[1] / "docs" / "keys.md"
HEAD = """# All keys of a config

Every key with its default, its type and its effect. `grpo-megatron keys SECTION` prints the same, since when each default holds,
and what a change means for a run that resumes ([training](training.md)). A key that is not in this list is an error, and so is
one that is set without what it needs (`KEY:FACT`: a value with this fact). Names follow verl where the meaning is the same.

This page is written from the sources by `python -m tools.keys_page`.
"""
ENTRIES = {
    "data.sources[]": DataSource,
    "reward.components[]": RewardComponent,
    "reward_models.NAME": ScoringModel,
    "teachers.NAME": TeacherConfig,
}


def keys_page() -> str:
    """Writes one table per section, in the order of the sources. Entries of lists and mappings follow at the end."""
    keys = list(config_keys(Config))
    keys += [key for prefix, entry in ENTRIES.items() for key in config_keys(entry, f"{prefix}.")]
    sections: dict[str, list[str]] = {}
    for key in keys:
        sections.setdefault(key.section, []).append(_row(key))
    parts = [HEAD.rstrip()]
    for name, rows in sections.items():
        heading, about = (f"`{name}`", inspect.getdoc(_section(name))) if name else ("Top level", None)
        parts += [
            f"## {heading}",
            *([about] if about else []),
            "\n".join(["| key | default | type | effect |", "| --- " * 4 + "|", *rows]),
        ]
    return "\n\n".join(parts) + "\n"


def _section(name: str) -> type[Section]:
    kind: Any = ENTRIES.get(name, Config)
    for part in name.split(".") if name not in ENTRIES else ():
        kind = kind.model_fields[part].annotation
    return kind


def _row(key: ConfigKey) -> str:
    name = key.name.removeprefix(f"{key.section}.")
    default = "required" if key.is_required else f"`{json.dumps(key.default, default=str)}`"
    kind = re.sub(r"Literal\[([^]]*)\]", r"\1", key.kind).replace(" | ", " or ").replace("None", "null")
    needs = [f"needs {' and '.join(f'`{one}`' for one in key.needs)}"] if key.needs else []
    text = "; ".join([*filter(None, [key.description.removesuffix(".")]), *needs]).replace("|", r"\|")
    return f"| `{name}` | {default} | `{kind}` | {text} |"


if __name__ == "__main__":
    PAGE.write_text(keys_page(), encoding="utf-8")
