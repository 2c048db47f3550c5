"""Changes of a resumed run: the differences between its config and the checkpoint's, and whether each may be made.

The class of a key is part of its type in config/. Keys that the checkpoint's config lacks are of a newer program version, and
are not compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.algo.advantages import advantage_estimators
from grpo_megatron.checks.methods import is_uncorrected
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.problems import Problems, keys_of, marked
from grpo_megatron.config.section import ResumeClass, config_keys
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.run_files import STEP_FILE, on_disk, read_step, steps_of

RESUME_CLASSES = {key.name: key.resume for key in config_keys(Config)}
LONGEST_VALUE = 80  # characters of a value in a message
REMEDY = (
    "put the old value back; or start a new run from these weights: `grpo-megatron convert to-hf` makes a model folder"
    " of a checkpoint, for model.path of another trainer.output_dir"
)


@dataclass(frozen=True)
class Difference:
    """A key with another value than in the checkpoint's config. `old` and `new` are plain JSON; None: null, or no such key."""

    key: str
    old: Any
    new: Any

    @property
    def resume_class(self) -> ResumeClass:
        """Returns the class of the longest part of the key that has one: a mapping's keys have that of the mapping."""
        names = self.key.split(".")
        candidates = (".".join(names[:end]) for end in range(len(names), 0, -1))
        return next(RESUME_CLASSES[name] for name in candidates if name in RESUME_CLASSES)

    def __str__(self) -> str:
        return f"{self.key} {_shown(self.old)} -> {_shown(self.new)}"

    def __format__(self, form: str) -> str:
        """Formats it with the key marked, for a message."""
        return f"{marked(self.key)} {_shown(self.old)} -> {_shown(self.new)}" if form == "marked" else str(self)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}... ({len(text)} characters)"


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Iterator[Difference]:
    """Lists the keys of `new` with another value, in the order of the config. Both are configs as plain JSON."""
    for name, value in new.items():
        key = f"{prefix}{name}"
        if key in RESUME_CLASSES:
            yield from _value_differences(key, old.get(name, value), value)
        elif isinstance(value, Mapping):
            yield from differences(old.get(name, {}), value, f"{key}.")


def _value_differences(key: str, old: Any, new: Any) -> Iterator[Difference]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}):
            yield from _value_differences(f"{key}.{name}", old.get(name), new.get(name))
    elif old != new:
        yield Difference(key, old, new)


def resume_problems(config: Config) -> Problems:
    """Yields what the newest checkpoint on disk refuses, before ranks start. A damaged one is left to training/checkpoint.py."""
    checkpoints = on_disk(config.trainer.output_dir) if config.trainer.resume_mode == "auto" else []
    if checkpoints:
        try:
            saved = read_step(checkpoints[-1], "step", "config")
        except StorageError:
            return
        yield from refusals(checkpoints[-1], saved, config)


def check_resume(checkpoint: Path, config: Config) -> list[Difference]:
    """Returns the differences from the checkpoint's config. Raises ConfigError if one of them cannot be made."""
    saved = read_step(checkpoint, "step", "config")
    if problems := list(refusals(checkpoint, saved, config)):
        raise ConfigError(*problems)
    return list(differences(saved["config"], config.model_dump(mode="json")))


def refusals(checkpoint: Path, content: Mapping[str, Any], config: Config) -> Problems:
    """Yields why the run cannot continue from `checkpoint`, whose trainer.json has this content."""
    done, total, saved = steps_of(checkpoint), config.trainer.total_training_steps, content["config"]
    if (written := content["step"]) != done:
        yield (
            f"{checkpoint} is the checkpoint after step {written}, by its {STEP_FILE}, under another step's name; rename it to"
            f" step_{written:06d}, or remove it"
        )
    if total < done:
        yield (
            f"{keys_of(config).trainer.total_training_steps} is less than the {done} steps that {checkpoint} has done; set it to"
            f" {done} or more, or another trainer.output_dir"
        )
    ahead = len((content.get("run", {}).get("collector") or {}).get("ahead", ()))
    if ahead and is_uncorrected(config):
        yield (
            f"{checkpoint} holds {ahead} steps that earlier weights have sampled (rollout.lag), and"
            f" {keys_of(config).algorithm.rollout_correction:key} has neither rollout_is nor rollout_rs, so that they would count"
            " as the policy's own; set rollout_is=token"
        )
    estimators = [saved.get("algorithm", {}).get("adv_estimator"), config.algorithm.adv_estimator]
    had_critic, has_critic = (advantage_estimators.facts(str(name)).needs_values for name in estimators)
    if has_critic and not had_critic:
        yield (
            f"{marked('algorithm.adv_estimator')} {estimators[0]} -> {estimators[1]}: {checkpoint} has no critic; put the"
            " old value back, or start a new run"
        )
    fixed = [d for d in differences(saved, config.model_dump(mode="json")) if d.resume_class == "fixed"]
    for difference in fixed:
        remedy = f"; {REMEDY}" if difference is fixed[-1] else ""
        yield f"{difference:marked}: cannot change when a run resumes, here from {checkpoint}{remedy}"


def announcement(changed: list[Difference], updates_done: int, total_updates: int) -> str:
    """Lines for the console: each applied difference, and where the policy is in a rebuilt schedule."""
    lines = ["changed since the checkpoint:", *(f"  {difference}" for difference in changed)]
    if any(d.resume_class == "schedule" and not d.key.startswith(("reward_model.", "critic.")) for d in changed):
        lines.append(f"  the policy's learning-rate schedule continues after update {updates_done} of {total_updates}")
    return "\n".join(lines)
