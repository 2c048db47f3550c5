"""The resolved configuration of a plan: every key with its value, as a file that can be run."""

from __future__ import annotations

from pathlib import Path

import yaml

from grpo_megatron.config import Config, ConfigError
from grpo_megatron.storage.atomic import write_file

YAML_WIDTH = 100  # characters per line


def write_resolved(config: Config, path: Path) -> None:
    """Raises ConfigError if the file exists or cannot be written."""
    if path.exists():
        raise ConfigError(f"--resolved-config {path} exists; name another file, or remove it")
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, width=YAML_WIDTH, default_flow_style=None)
    try:
        write_file(path, text)
    except OSError as error:
        raise ConfigError(f"cannot write --resolved-config {path}: {error.strerror}") from error
