"""Make the inputs of a run: the generated data of an example, or a Hugging Face folder with random weights.

OUT is complete or absent (storage/atomic.py). --force replaces an existing one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.data import arithmetic, products, two_hops
from grpo_megatron.starting.random_model import PRESETS, SpecialTokens, write_model
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.atomic import new_folder

TASKS = {
    "arithmetic": arithmetic.write_task,
    "feedback": arithmetic.write_feedback,
    "products": products.write_products,
    "two_hops": two_hops.write_two_hops,
}
_EXAMPLES = """
  grpo-megatron prepare arithmetic OUT    for examples/quickstart.yaml
  grpo-megatron prepare feedback OUT      for examples/reward_models/
  grpo-megatron prepare products OUT      for examples/agents/calculator.yaml
  grpo-megatron prepare two_hops OUT      for examples/agents/search.yaml
  grpo-megatron prepare model OUT --preset quickstart --tokenizer DATA/tokenizer
  grpo-megatron prepare model CONFIG_JSON OUT --tokenizer DIR \\
      --set num_hidden_layers=2 --set hidden_size=64
"""
MARKERS = {"model": "config.json", "feedback": "pairs.jsonl"}  # what a folder of the command always has


def _check_out(out: Path, force: bool, marker: str) -> None:
    """Refuse an `out` that exists, unless `force` is given and it has the file `marker`: no other folder is deleted."""
    if out.exists() and not force:
        raise ConfigError(f"{str(out)!r} exists; give another folder, or --force to replace it")
    if out.exists() and not (out / marker).is_file():
        raise ConfigError(f"{str(out)!r} has no {marker}: it was not made by this command, and --force would delete it")


def _read_config(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the model config {str(path)!r}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"the model config {str(path)!r} is not a JSON object")
    return raw


def _parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "grpo-megatron prepare",
        description="Make the inputs of a run: an example's data, or a model with random weights.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="WHAT")
    helps = {
        "arithmetic": "the quickstart's",
        "feedback": "the reward model examples'",
        "products": "the calculator example's",
        "two_hops": "the search example's",
    }
    tasks = []
    for name in TASKS:
        text = f"{helps[name]} jsonl files and tokenizer/"
        tasks.append(task := commands.add_parser(name, help=text, description=f"Write {text}."))
        task.add_argument("out", type=Path, metavar="OUT", help="a new folder")
        task.add_argument("--num-train", type=int, default=4096, metavar="N", help="rows (default 4096)")
        task.add_argument("--num-val", type=int, default=256, metavar="N", help="held-out rows (default 256)")
    text = "a Hugging Face folder with random weights"
    model = commands.add_parser("model", help=text, description=f"Write {text}.")
    model.add_argument("config", type=Path, nargs="?", metavar="CONFIG_JSON", help="a config.json; or use --preset")
    model.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    model.add_argument("--preset", choices=sorted(PRESETS), help="a built-in config instead of a file")
    model.add_argument(
        "--tokenizer", type=Path, required=True, metavar="DIR", help="folder whose tokenizer files are copied"
    )
    model.add_argument("--eos-token", metavar="TOKEN", help="for a tokenizer folder that names none, e.g. '<|im_end|>'")
    model.add_argument("--pad-token", metavar="TOKEN", help="the same for padding")
    model.add_argument(
        "--std", type=float, default=0.05, metavar="X", help="standard deviation of every matrix (default 0.05)"
    )
    model.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the config")
    for command in (*tasks, model):
        command.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn (default 0)")
        command.add_argument("--force", action="store_true", help="replace OUT if it exists")
    options = parser.parse_args(arguments)
    if options.command == "model" and (options.config is None) == (options.preset is None):
        parser.error("give either CONFIG_JSON or --preset (model [CONFIG_JSON] OUT [--preset NAME] --tokenizer DIR)")
    return options


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns 0, or 2 after a user error."""
    options = _parse_args(arguments)
    try:
        marker = MARKERS.get(options.command, "sft.jsonl")
        out = options.out.absolute()
        _check_out(out, options.force, marker)
        with new_folder(out) as folder:
            if options.command in TASKS:
                TASKS[options.command](folder, options.seed, options.num_train, options.num_val)
            else:
                raw = PRESETS[options.preset] if options.preset else _read_config(options.config)
                special = SpecialTokens(options.eos_token, options.pad_token)
                write_model(raw, folder, options.tokenizer, options.seed, options.std, options.set, special)
    except (ConfigError, StorageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
