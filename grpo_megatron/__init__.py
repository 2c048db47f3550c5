"""GRPO training of language models on Megatron-Core, with vLLM in the same process.

    import grpo_megatron

    with grpo_megatron.open("grpo.yaml") as run:                      # every part, built once on every rank
        samples = run.sample(rows, n=8)                               # docs/python.md: the seven verbs
    grpo_megatron.Trainer(grpo_megatron.load_config("grpo.yaml")).run()

Each name is imported when it is asked for: `import grpo_megatron` imports neither torch nor vLLM.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_megatron.transformer_engine import examine_transformer_engine_before_megatron

if TYPE_CHECKING:
    from grpo_megatron import convert
    from grpo_megatron.algo.direct import advantages, policy_loss
    from grpo_megatron.cli.config_file import load_config
    from grpo_megatron.config import Config, ConfigError
    from grpo_megatron.evaluation.evaluate import evaluate
    from grpo_megatron.run import Run
    from grpo_megatron.trainer import Trainer

__all__ = ["ConfigError", "Run", "Trainer", "advantages", "convert", "evaluate", "load_config", "open", "policy_loss"]
EXPORTS = {
    "ConfigError": "grpo_megatron.config",
    "Run": "grpo_megatron.run",
    "Trainer": "grpo_megatron.trainer",
    "advantages": "grpo_megatron.algo.direct",
    "evaluate": "grpo_megatron.evaluation.evaluate",
    "load_config": "grpo_megatron.cli.config_file",
    "policy_loss": "grpo_megatron.algo.direct",
}

try:
    __version__ = version("grpo-megatron")
except PackageNotFoundError:  # run from a clone, which is not installed
    __version__ = "0.1.0"

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported: else vLLM prints a NUMA remark
examine_transformer_engine_before_megatron()


def open(config: Config | Path | str, overrides: Sequence[str] = ()) -> Run:
    """Build every part of a run on this rank: `with grpo_megatron.open("grpo.yaml") as run: ...`. Collective.

    `config`: a YAML file, with `overrides` such as "rollout.n=4", or a `Config`. Without torchrun this process is the only
    rank. Under torchrun every rank calls it, and then the same verbs in the same order. Raises ConfigError, which names
    every wrong key, before any process group is made.
    """
    from grpo_megatron.cli.config_file import load_config
    from grpo_megatron.cli.failures import silence_libraries

    silence_libraries()
    from grpo_megatron.run import Run

    if isinstance(config, str | Path):
        config = load_config(config, [overrides] if isinstance(overrides, str) else list(overrides))
    elif overrides:
        raise TypeError("overrides change a YAML file; change a Config with config.with_values({...})")
    return Run(config)


def __getattr__(name: str) -> Any:
    if name == "convert":
        return import_module("grpo_megatron.convert")
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*(name for name in globals() if name.startswith("__")), *__all__])
