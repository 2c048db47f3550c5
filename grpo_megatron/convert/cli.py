"""The command line: to-megatron, to-hf, verify, inspect.

Exit codes: 0; 1 verify has found a difference; 2 an error; 130 interrupted.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path
from typing import Any

from grpo_megatron.convert import ConvertError
from grpo_megatron.convert.conversion import check_model_layout, open_source, to_hf, to_megatron
from grpo_megatron.convert.inspection import compare_models, comparison_table, describe_model, different_settings
from grpo_megatron.convert.source import FLOATS, Source
from grpo_megatron.models.architecture import UnsupportedModel
from grpo_megatron.reading import cut
from grpo_megatron.storage import StorageError

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
PICKLE_HELP = "read *.bin weights: unpickling can run code of their author, whom you must trust"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The four commands, as sub-commands of `parser`."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    megatron = _add_action(commands, "to-megatron", "Hugging Face folder -> Megatron-Core distributed checkpoint")
    megatron.add_argument("source", type=Path, metavar="HF_DIR", help="the folder to read")
    megatron.add_argument("target", type=Path, metavar="OUT", help="the checkpoint to write")
    megatron.add_argument("--allow-pickle", action="store_true", help=PICKLE_HELP)
    text = "distributed checkpoint, training step, or its critic/ or reward_model/ -> Hugging Face folder"
    hf = _add_action(commands, "to-hf", text)
    hf.add_argument("source", type=Path, metavar="CKPT", help="such as outputs/run/checkpoints/step_000020")
    hf.add_argument("target", type=Path, metavar="OUT", help="the folder to write")
    hf.add_argument("--shard-size", type=_bytes, default=5 << 30, metavar="SIZE", help="of one file (default 5G)")
    _add_hf(hf)
    for command in (megatron, hf):
        command.add_argument("--dtype", choices=FLOATS, help="default: the dtype of the stored tensors")
        command.add_argument("--force", action="store_true", help="replace an output that this tool has written")
        command.add_argument("--no-hashes", action="store_true", help="do not compare the input with its sha256")
    verify = _add_action(commands, "verify", "compare two models, Hugging Face or Megatron, tensor by tensor")
    verify.add_argument("a", type=Path, metavar="A", help="a folder or checkpoint")
    verify.add_argument("b", type=Path, metavar="B", help="the other one")
    verify.add_argument("--allow-pickle", action="store_true", help=PICKLE_HELP)
    verify.add_argument("--no-hashes", action="store_true", help="compare tensors only")
    verify.add_argument("--dtype", choices=FLOATS, help="round both to this dtype first (default: compare bits)")
    verify.add_argument(
        "--tolerance", type=_tolerance, metavar="X", help="the largest difference of two elements that counts as none"
    )
    _add_hf(verify)
    inspect = _add_action(commands, "inspect", "print family, sizes, layout, dtype, parameters, hashes of a model")
    inspect.add_argument("source", type=Path, metavar="X", help="a folder or checkpoint")
    inspect.add_argument("--hashes", action="store_true", help="read every file and compare its sha256")
    inspect.add_argument("--allow-pickle", action="store_true", help=PICKLE_HELP)
    _add_hf(inspect)
    for command in (megatron, inspect):
        for axis in ("tp", "pp", "ep"):
            command.add_argument(
                f"--{axis}", type=_positive, default=1, metavar="N", help=f"refuse if {axis} N cannot load it"
            )
    for command in (megatron, hf, verify, inspect):
        command.add_argument(
            "--family", metavar="MODULE:FAMILY", help="your own model family, as model.family names it"
        )
    for command in (megatron, hf, verify):
        command.add_argument("--quiet", action="store_true", help="no progress")


def _add_action(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    return parser


def _add_hf(parser: argparse.ArgumentParser) -> None:
    text = "folder with config.json and tokenizer, for a checkpoint without them"
    parser.add_argument("--hf", type=Path, metavar="DIR", help=text)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500M or 5G")
    return int(found[1]) * UNITS[found[2].upper()]


def _positive(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def _run(args: argparse.Namespace) -> int:
    """Run the chosen command. Returns the exit code; errors are printed."""
    try:
        if args.action == "to-megatron":
            to_megatron(
                args.source,
                args.target,
                dtype=args.dtype,
                layout=(args.tp, args.pp, args.ep),
                force=args.force,
                allow_pickle=args.allow_pickle,
                check_hashes=not args.no_hashes,
                quiet=args.quiet,
                family=args.family,
            )
        elif args.action == "to-hf":
            to_hf(
                args.source,
                args.target,
                dtype=args.dtype,
                shard_bytes=args.shard_size,
                hf=args.hf,
                force=args.force,
                check_hashes=not args.no_hashes,
                quiet=args.quiet,
                family=args.family,
            )
        elif args.action == "verify":
            given = {"hf": args.hf, "allow_pickle": args.allow_pickle, "family": args.family}
            sources = [open_source(path, **given) for path in (args.a, args.b)]
            return _verify(sources[0], sources[1], args)
        else:
            source = open_source(args.source, hf=args.hf, allow_pickle=args.allow_pickle, family=args.family)
            check_model_layout(source.arch, args.tp, args.pp, args.ep)
            print(describe_model(source, args.hashes))
    except (ConvertError, StorageError, UnsupportedModel) as error:
        print("\n".join(cut(line, 2000) for line in f"error: {error}".splitlines()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


def _verify(a: Source, b: Source, args: argparse.Namespace) -> int:
    settings, hashes = different_settings(a, b), not args.no_hashes
    with a.checked(hashes), b.checked(hashes):
        tensors, structure = compare_models(a, b, args.quiet, dtype=args.dtype, tolerance=args.tolerance)
    print(comparison_table(tensors))
    for line in [*settings, *structure]:
        print(line)
    differing = sum(not tensor.is_equal for tensor in tensors)
    is_same = not (differing or settings or structure)
    how = f" in {args.dtype}" if args.dtype else ""
    how += f" within {args.tolerance:g}" if args.tolerance is not None else ""
    verdict = "the same" if is_same else "DIFFERENT"
    print(f"{len(tensors)} tensors compared{how}, {differing} differ: the models are {verdict}")
    return 0 if is_same else 1


def main(argv: list[str] | None = None) -> int:
    """Run `grpo-megatron convert`. Returns the exit code."""
    parser = argparse.ArgumentParser(
        "grpo-megatron convert",
        description="Hugging Face <-> Megatron-Core checkpoints, on a CPU, in bounded memory.",
        epilog="Exit codes: 0; 1 if verify has found a difference; 2 an error; 130 interrupted.",
    )
    add_arguments(parser)
    return _run(parser.parse_args(argv))
