"""`grpo-megatron import verl|trl FILE [key=value ...]`: a config of this program from one of another trainer."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from grpo_megatron.config import ConfigError
from grpo_megatron.migration.source import read_settings
from grpo_megatron.migration.translation import as_yaml, translate
from grpo_megatron.migration.trl import TRL
from grpo_megatron.migration.verl import VERL
from grpo_megatron.storage.atomic import write_file

OTHER_TRAINERS = {trainer.name: trainer for trainer in (VERL, TRL)}


def main(argv: list[str]) -> int:
    """Prints the config, or writes it to --output. Raises ConfigError."""
    parser = argparse.ArgumentParser(
        "grpo-megatron import",
        description="Write a config of this program from one of verl or TRL; what has no equal becomes a comment.",
        epilog="grpo-megatron import verl run_qwen2_7b.sh --output grpo.yaml",
    )
    parser.add_argument("trainer", choices=sorted(OTHER_TRAINERS), help="whose config FILE is")
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML, JSON, a shell script, or a Python script (TRL)")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that were given on its command line"
    )
    parser.add_argument("--output", type=Path, metavar="YAML", help="write it there instead of printing it")
    args = parser.parse_args(argv)
    result = translate(read_settings(args.file, args.overrides), OTHER_TRAINERS[args.trainer])
    text = as_yaml(result, f"{args.file.name}, of {args.trainer}")
    if args.output is None:
        print(text, end="")
        return 0
    if args.output.exists():
        raise ConfigError(f"--output {args.output} exists; name another file, or remove it")
    try:
        write_file(args.output, text)
    except OSError as error:
        raise ConfigError(f"cannot write --output {args.output}: {error.strerror}") from error
    print(f"{args.output}: {len(result.values)} keys; {len(result.notes)} have no equal here", file=sys.stderr)
    return 0
