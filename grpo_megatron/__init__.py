"""GRPO training of language models on Megatron-Core, with vLLM in the same process.

    from grpo_megatron import Trainer, convert, evaluate, load_config

    config = load_config("config.yaml", ["trainer.n_gpus_per_node=1"])   # raises ConfigError, which names every wrong key
    Trainer(config).run()                                                # one rank, in this process
    convert.to_hf("outputs/run/checkpoints/step_000020", "out")
    evaluate("outputs/run/hf", ["gsm8k"], "out/gsm8k", data="data", limit=100)

Each is imported when it is asked for: `import grpo_megatron` imports neither torch nor vLLM.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from grpo_megatron.transformer_engine import examine_transformer_engine_before_megatron

if TYPE_CHECKING:
    from grpo_megatron import convert
    from grpo_megatron.cli.config_file import load_config
    from grpo_megatron.config import ConfigError
    from grpo_megatron.evaluation.evaluate import evaluate
    from grpo_megatron.trainer import Trainer

__all__ = ["ConfigError", "Trainer", "convert", "evaluate", "load_config"]
EXPORTS = {
    "ConfigError": "grpo_megatron.config",
    "Trainer": "grpo_megatron.trainer",
    "evaluate": "grpo_megatron.evaluation.evaluate",
    "load_config": "grpo_megatron.cli.config_file",
}

try:
    __version__ = version("grpo-megatron")
except PackageNotFoundError:  # run from a clone, which is not installed
    __version__ = "0.1.0"

examine_transformer_engine_before_megatron()


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
