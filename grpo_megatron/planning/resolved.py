"""The resolved configuration of a plan: every key with its value, as a file that can be run.

It is written to the file of --resolved-config, or else beside the run's output folder: a run finds nothing in its folder
that it has not written itself.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from grpo_megatron.config import Config, ConfigError
from grpo_megatron.storage.files import write_file

YAML_WIDTH = 100  # characters per line
HEADER = "# Every key of a run with its value. A dry run has written this file, and the next one replaces it.\n"
_REMEDY = "--resolved-config FILE writes it elsewhere"


def write_resolved(config: Config, path: Path) -> None:
    """Raises ConfigError if the file exists or cannot be written."""
    if problem := resolved_problem(path):
        raise ConfigError(problem)
    try:
        write_file(path, _text(config))
    except OSError as error:
        raise ConfigError(f"cannot write --resolved-config {path}: {error.strerror}") from error


def resolved_problem(path: Path) -> str | None:
    """Why --resolved-config cannot be written; None if nothing is known against it."""
    if path.exists():
        return f"--resolved-config {path} exists; name another file, or remove it"
    if not path.absolute().parent.is_dir():
        return (
            f"--resolved-config {path}: the folder {str(path.parent)!r} does not exist; make it, or name another file"
        )
    return None


def write_beside_run(config: Config) -> str:
    """Write or replace OUTPUT_DIR.resolved.yaml. Returns its path, or why it was not written.

    Only a relative output folder may get a new parent folder: an absolute one may be that of another machine.
    """
    output_dir = config.trainer.output_dir
    path = resolved_path(output_dir)
    if path.exists() and not _is_of_a_dry_run(path):
        return f"not written: {path} is not of a dry run; {_REMEDY}"
    try:
        if not output_dir.is_absolute():
            path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, HEADER + _text(config))
    except OSError as error:
        return f"not written: {path}: {error.strerror}; {_REMEDY}"
    return str(path)


def resolved_path(output_dir: Path) -> Path:
    """`outputs/run` -> `outputs/run.resolved.yaml`. A folder without a name of its own, such as ".", holds the file."""
    if output_dir.name in ("", ".."):
        return output_dir / "run.resolved.yaml"
    return output_dir.with_name(f"{output_dir.name}.resolved.yaml")


def _text(config: Config) -> str:
    values = config.model_dump(mode="json")
    return str(yaml.safe_dump(values, sort_keys=False, width=YAML_WIDTH, default_flow_style=None))


def _is_of_a_dry_run(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as file:
            return file.readline() == HEADER
    except (OSError, UnicodeDecodeError):
        return False
