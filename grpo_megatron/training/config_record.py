"""The configs of a run's attempts: the first one whole, later ones as differences from it.

config.yaml               of the first start, the one whose weights the run goes on with
config_attempts/002.yaml  what the second attempt, the first resumed one, has changed; {} if nothing

A start without a checkpoint is a first start: it replaces the records of earlier ones, of which nothing is left.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from grpo_megatron.checks.resume import differences
from grpo_megatron.parallel.mesh import Mesh, on_first_rank
from grpo_megatron.storage.atomic import remove_folder, write_file

CONFIG_FILE, ATTEMPTS_FOLDER = "config.yaml", "config_attempts"


def record_config(output_dir: Path, mesh: Mesh, config: dict[str, Any], *, resumed: bool) -> None:
    """Collective. `config` is plain JSON. Raises RankError on every rank when rank 0 cannot write."""
    first = output_dir / CONFIG_FILE
    task = f"cannot write {first}"
    if resumed and first.exists():
        on_first_rank(mesh, f"cannot write into {output_dir / ATTEMPTS_FOLDER}", lambda: _write_attempt(first, config))
    else:
        on_first_rank(mesh, task, lambda: _write_first(first, config))


def _write_first(path: Path, config: dict[str, Any]) -> None:
    if (path.parent / ATTEMPTS_FOLDER).exists():
        remove_folder(path.parent / ATTEMPTS_FOLDER)
    write_file(path, _yaml(config))


def _write_attempt(first: Path, config: dict[str, Any]) -> None:
    try:
        original = yaml.safe_load(first.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError):  # damaged: record the whole config
        original = None
    folder = first.parent / ATTEMPTS_FOLDER
    folder.mkdir(exist_ok=True)
    numbers = [int(path.stem) for path in folder.glob("*.yaml") if path.stem.isdecimal()]
    changed = _nested(original, config) if isinstance(original, dict) else config
    write_file(folder / f"{max(numbers, default=1) + 1:03d}.yaml", _yaml(changed))


def _nested(original: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The differences as sections, so that they can be laid over the original. A removed key is null."""
    changed: dict[str, Any] = {}
    for difference in differences(original, config):
        *sections, name = difference.key.split(".")
        section = changed
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = difference.new
    return changed


def _yaml(content: dict[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False)
