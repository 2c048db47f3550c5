"""Methods: a method is data, a named block of defaults over the sections of a config (algo/methods.yaml).

method: dapo                          # at the top of a config: the block of DAPO
actor: {clip_ratio_high: 0.25}        # a key of the file overrides the block's
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.config.tables import read_yaml_table
from grpo_megatron.registry import did_you_mean

METHODS_FILE = Path(__file__).parents[1] / "algo" / "methods.yaml"
PART = re.compile(r"([\w.]+) / (\d+)")  # of another key's value


@dataclass(frozen=True)
class TrainingMethod:
    """One method. `keys`: `actor.loss_mode` -> value, with those of its base. The texts are for the docs."""

    title: str
    kind: str
    papers: str
    changes: str
    use: str
    keys: Mapping[str, Any]
    example: str  # its file

    def values(self, value_of: Callable[[str], Any]) -> dict[str, Any]:
        """Computes the keys with their values, from those of the keys that they depend on."""
        return {key: _part(value, value_of) for key, value in self.keys.items()}


def _part(value: Any, value_of: Callable[[str], Any]) -> Any:
    match = PART.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    total = value_of(match[1])
    return max(1, total // int(match[2])) if isinstance(total, int) else None  # None: the key itself is reported


@functools.cache
def methods() -> dict[str, TrainingMethod]:
    """Reads all methods, by name, in the order of the docs."""
    found: dict[str, TrainingMethod] = {}
    for name, entry in read_yaml_table(METHODS_FILE, "methods")[1].items():
        base = found[entry.pop("base")].keys if "base" in entry else {}
        keys = {**base, **_flat(entry.pop("config"))}
        found[name] = TrainingMethod(**{"example": f"methods/{name}.yaml", **entry}, keys=keys)
    return found


def _flat(block: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in block.items():
        values |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return values


def dated_defaults() -> dict[str, tuple[str, Any]]:
    """Reads key -> (the date since which its default holds, that default) from config/defaults.yaml."""
    dates = read_yaml_table(Path(__file__).with_name("defaults.yaml"), "defaults")[1]
    return {key: (date, value) for date in sorted(dates) for key, value in dates[date].items()}


def unknown_method(name: str) -> str:
    """Says that there is no such method, and which there are."""
    return f"there is no such method{did_you_mean(name, methods())} (known: {', '.join(methods())})"


# A config may differ in these from a method, and be that method.
MAY_DIFFER = {"actor.use_kl_loss", "actor.kl_loss_type", "actor.loss_agg_mode", "algorithm.kl_ctrl.type"}


def nearest_method(value_of: Callable[[str], Any]) -> tuple[str | None, dict[str, Any]]:
    """Finds the method of a config's estimator and loss: (its name, the keys that differ with the config's values).

    Among several it is the one with the fewest such keys. One that is off (`algorithm.dupo`, or a size of 0) is none.
    (None, {}): there is none.
    """
    candidates = []
    for name, method in methods().items():
        keys = {"actor.loss_mode": "vanilla", **method.values(value_of)}
        others = {key: value_of(key) for key, value in keys.items() if value_of(key) != value}
        if others.get("actor.use_kl_loss") is False:
            others = {key: value for key, value in others.items() if not key.startswith("actor.kl_loss_")}
        is_itself = not any(isinstance(keys[key], bool | str) or others[key] == 0 for key in others.keys() - MAY_DIFFER)
        if is_itself and not others.keys() & {"actor.loss_mode", "algorithm.adv_estimator"}:
            candidates.append((name, others))
    return min(candidates, key=lambda pair: len(pair[1]), default=(None, {}))


def with_method(raw: Mapping[str, Any], value_of: Callable[[str], Any]) -> dict[str, Any]:
    """Fills the keys that a config does not set with those of its method. An unknown method has none.

    `value_of`: the value of a key in the config, or its default.
    """
    name = raw.get("method")
    method = methods().get(name) if isinstance(name, str) else None
    return with_defaults(raw, method.values(value_of) if method else {})


def with_defaults(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Copies `raw` with the `defaults` (`actor.loss_mode` -> value) of keys that it does not set.

    A section that is no table, which is a mistake of the file, stays as it is.
    """
    result: dict[str, Any] = dict(raw)
    nested: dict[str, dict[str, Any]] = {}
    for key, value in defaults.items():
        name, _, rest = key.partition(".")
        if rest:
            nested.setdefault(name, {})[rest] = value
        else:
            result.setdefault(name, value)
    for name, values in nested.items():
        section = result.get(name, {})
        if isinstance(section, Mapping):
            result[name] = with_defaults(section, values)
    return result
