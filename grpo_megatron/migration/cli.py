"""`grpo-megatron import verl|trl FILE [key=value ...]`: a config of this program from one of another trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.options import Argument, Option, Options
from grpo_megatron.config.section import config_keys
from grpo_megatron.migration.trainers import ACTOR, OTHER_TRAINERS, TRL
from grpo_megatron.migration.translation import as_yaml, flat, read_settings, translate
from grpo_megatron.storage.atomic import write_file


class ImportOptions(Options):
    """The options of `import`."""

    program = "import"
    description = "Write a config of this program from one of verl or TRL; what has no equal becomes a comment."
    epilog = "grpo-megatron import verl run_qwen2_7b.sh --output grpo.yaml"
    trainer: Annotated[Literal["trl", "verl"], Argument("whose config FILE is")]
    file: Annotated[Path, Argument("YAML, JSON, a shell script, or a Python script (TRL)", "FILE")]
    overrides: Annotated[tuple[str, ...], Argument("settings that were given on its command line", "key=value")] = ()
    output: Annotated[Path | None, Option("write it there instead of printing it", "YAML")] = None


def import_config(options: ImportOptions) -> int:
    """Print the config, or write it to --output; returns the exit code. Raises ConfigError."""
    file, output = options.file, options.output
    result = translate(read_settings(file, list(options.overrides)), OTHER_TRAINERS[options.trainer])
    text = as_yaml(result, f"{file.name}, of {options.trainer}")
    if output is None:
        print(text, end="")
        return 0
    if output.exists():
        raise ConfigError(f"--output {output} exists; name another file, or remove it")
    try:
        write_file(output, text)
    except OSError as error:
        raise ConfigError(f"cannot write --output {output}: {error.strerror}") from error
    print(f"{output}: {len(result.values)} keys; {len(result.notes)} have no equal here", file=sys.stderr)
    return 0


# -- where a key of verl or TRL is here: for the message about an unknown key ------------------------------------------

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
    for trainer in OTHER_TRAINERS.values():
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
