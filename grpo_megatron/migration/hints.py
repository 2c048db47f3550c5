"""Where a key of verl or TRL is here: for the message about an unknown key."""

from __future__ import annotations

from typing import Any

from grpo_megatron.config import Config
from grpo_megatron.config.keys import config_keys
from grpo_megatron.migration.source import flat
from grpo_megatron.migration.trl import TRL
from grpo_megatron.migration.verl import ACTOR, VERL

TRAINERS = (VERL, TRL)
MAX_HINTS = 5
VERL_PREFIX = "actor_rollout_ref."
SECTIONS = ("data", "algorithm", "critic", "trainer", "reward_model")  # of both programs


def explained(value: Any, key: str) -> str:
    """What is known about the keys below an unknown one, if its value is a table; or nothing."""
    below = flat(value, f"{key}.") if isinstance(value, dict) else {}
    return "; ".join(f"{name}: {hint}" for name in list(below)[:MAX_HINTS] if (hint := known_elsewhere(name)))


def known_elsewhere(key: str) -> str | None:
    """What becomes of another trainer's key, or of a key in another section. None: nothing is known.

    A key may be written as there (`actor_rollout_ref.actor.clip_ratio`, `learning_rate`) or below a section of ours
    (`actor.lr`, `algorithm.beta`): then its last part counts.
    """
    if f"{key}." == VERL_PREFIX:
        return "`grpo-megatron import verl FILE` writes a config of verl in this program's terms"
    names = [name.name for name in config_keys(Config)]
    own = key.removeprefix(VERL_PREFIX)
    for trainer in TRAINERS:
        if trainer is TRL and own != key and own in names:  # verl's section, without a rule of its own
            break
        for name in dict.fromkeys([key, f"{ACTOR}{key.removeprefix('actor.')}", key.rpartition(".")[2]]):
            if name in trainer.rules and name not in SECTIONS:
                rule = trainer.rules[name]
                return (
                    f"{trainer.name}'s {name} is {rule.ours!r}"
                    if rule.ours
                    else f"{trainer.name}'s {name}: {rule.note}"
                )
    if own in names:
        return f"here it is {own!r}"
    section, _, leaf = key.rpartition(".")
    same = [name for name in names if section and name.endswith(f".{leaf}")]
    same = [name for name in same if name.startswith(f"{section.partition('.')[0]}.")] or same
    return f"there is {' and '.join(map(repr, same))}" if 0 < len(same) <= 3 else None
