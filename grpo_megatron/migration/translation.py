"""Translation: another trainer's settings as a config of this one, with a comment for each key that has no equal."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.config import Config
from grpo_megatron.config.keys import ConfigKey, config_keys
from grpo_megatron.migration.rules import OtherTrainer, Settings

REQUIRED = "model.path"
UNKNOWN = re.compile(r"\$[\w{(]")  # a variable or an interpolation whose value is not known


@dataclass
class Translation:
    """`values`: our keys, with where each value comes from. `notes`: (their key and value, why it is not written)."""

    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)


def translate(settings: Settings, trainer: OtherTrainer) -> Translation:
    """What they set, then what their trainer does where they are silent. A later key does not replace an earlier one."""
    result = Translation()
    known = {key.name: key for key in config_keys(Config)}
    result.values |= {ours: (value, f"as in {trainer.name}") for ours, value in trainer.implied.items()}
    for key, value in settings.items():
        written = f"{key}={_inline(value)}"
        rule = trainer.rule(key, known)
        if UNKNOWN.search(written):
            where = f"{rule.ours}: " if rule is not None and rule.ours else ""
            result.notes.append((written, f"{where}its value is not known here"))
        elif rule is None:
            result.notes.append((written, f"not a key of {trainer.name} that is known here"))
        elif value is None and key not in trainer.defaults:
            continue
        else:
            outcome = rule.apply(value, settings)
            if isinstance(outcome, str):
                result.notes.append((written, outcome))
            else:
                result.values |= {ours: (item, key) for ours, item in outcome.items() if _is_here(ours, known)}
                result.notes += [(written, f"{ours} is not here") for ours in outcome if not _is_here(ours, known)]
    for key, value in trainer.defaults.items():
        rule = trainer.rule(key, known)
        outcome = rule.apply(value, settings) if rule is not None and key not in settings else {}
        if not isinstance(outcome, str):
            comment = f"{trainer.name}'s default"
            result.values |= {
                ours: (item, comment)
                for ours, item in outcome.items()
                if ours not in result.values and _is_here(ours, known)
            }
    _fit_mini_batch(result)
    return result


def _fit_mini_batch(result: Translation) -> None:
    """A mini-batch by default must not be larger than the batch."""
    size = result.values.get("data.train_batch_size", (512, ""))[0]
    mini, origin = result.values.get("actor.ppo_mini_batch_size", (None, ""))
    if isinstance(mini, int) and isinstance(size, int) and mini > size and origin.endswith("default"):
        del result.values["actor.ppo_mini_batch_size"]


def _is_here(name: str, known: Mapping[str, ConfigKey]) -> bool:
    return any(name == key or name.startswith(f"{key}.") for key in known)


def as_yaml(result: Translation, source: str) -> str:
    """The YAML text. Keys are in the order of the config."""
    order = {key.name: index for index, key in enumerate(config_keys(Config))}
    names = sorted(result.values, key=lambda name: (_place(name, order), name))
    lines = [f"# From {source}. Run it with --dry-run first: it shows every mistake and the plan."]
    if REQUIRED not in result.values:
        lines += ["", "model:", "  path: CHANGE_ME                # a Hugging Face folder on this machine"]
    path: list[str] = []
    for name in names:
        value, origin = result.values[name]
        *sections, leaf = name.split(".")
        shared = 0
        while shared < min(len(path), len(sections)) and path[shared] == sections[shared]:
            shared += 1
        if shared == 0:
            lines.append("")
        lines += [f"{'  ' * depth}{sections[depth]}:" for depth in range(shared, len(sections))]
        path = sections
        text = f"{'  ' * len(sections)}{leaf}: {_inline(value)}"
        lines.append(text if origin == name or origin.endswith(f".{name}") else f"{text:<58}  # {origin}")
    if result.notes:
        lines += ["", "# Without an equal here:"]
        lines += [f"#   {written}: {note}" for written, note in result.notes]
    return "\n".join(lines) + "\n"


def _place(name: str, order: dict[str, int]) -> int:
    """The place of a key, or of the table of free keys that it is in, such as override_transformer_config."""
    return next(index for key, index in order.items() if name == key or name.startswith(f"{key}."))


def _inline(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, float):
        return repr(value) if "e" not in repr(value) or "." in repr(value) else repr(value).replace("e", ".0e")
    return json.dumps(value, ensure_ascii=False, default=str)
