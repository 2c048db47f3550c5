"""What a run needs from this machine: an output folder that it can write, and installed packages."""

from __future__ import annotations

import importlib.util
import os

from grpo_megatron.checks.problems import Problems
from grpo_megatron.config import Config, ConfigError, RolloutConfig
from grpo_megatron.observability.sinks import check_loggers
from grpo_megatron.rollout.build import engine_packages


def output_problems(config: Config) -> Problems:
    """The output folder can be made and written, and the loggers' packages are installed."""
    folder = config.trainer.output_dir
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        yield f"trainer.output_dir={str(folder)!r}: {str(existing)!r} is a file, not a folder; choose another"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"trainer.output_dir={str(folder)!r}: {str(existing)!r} is not writable; choose another"
    try:
        check_loggers(config.trainer.logger)
    except ConfigError as error:
        yield str(error)


def package_problems(rollout: RolloutConfig) -> Problems:
    """Megatron-Core and the engine's packages are installed. They are looked up, not imported: an import takes seconds."""
    for name, package in {"megatron": "megatron-core", **engine_packages(rollout)}.items():
        if importlib.util.find_spec(name) is None:
            yield f"the package {name!r} is not installed; pip install {package}, as requirements/ pins it"
