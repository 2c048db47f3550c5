"""The command line: `python -m grpo_megatron curate SOURCE... --output OUT`. Needs neither torch nor a GPU.

Exit codes: 0; 2 for a mistake of the user, and then nothing is written; else 1.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.curation import outputs
from grpo_megatron.curation.outputs import RateBand, describe_tally, kept_problems
from grpo_megatron.curation.tally import (
    CountingRules,
    ProblemTally,
    ResponseReader,
    Tally,
    source_files,
    tally_responses,
)
from grpo_megatron.data.tasks import get_task
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.atomic import new_folder, write_file

PASS_RATES = "pass_rates.jsonl"  # by this file a folder is recognised as an output of this command
SUPERVISED, PAIRS = "sft.jsonl", "pairs.jsonl"
MAX_STEP = 1 << 40

_EXAMPLES = """
pass rates of a training run, or of an evaluation with --samples 8:
  grpo-megatron curate outputs/run/rollouts --output outputs/curated
  grpo-megatron curate outputs/evaluation/model --output outputs/curated

and besides:
  --data train.jsonl --task gsm8k --min-rate 0.1    the rows that are left
  --sft 4                       up to 4 right responses per prompt
  --pairs best-worst            rows {"prompt", "chosen", "rejected"}

OUT/pass_rates.jsonl is for data.sampling.pass_rates, pass_rates.csv for a
spreadsheet. The rows of sft.jsonl and pairs.jsonl are for sft.train_files,
and for data.train_files with algorithm.source=file.
"""


def main(argv: list[str]) -> int:
    """Raises ConfigError for the user's mistakes."""
    args = _parse(argv)
    _check(args)
    reader = ResponseReader(source_files(args.sources))
    keep = max(args.sft or 0, args.pairs_per_prompt)
    rules = CountingRules(args.right, args.drop_truncated, args.first_step, args.last_step, keep)
    tally = tally_responses(reader.all(), rules)
    if not tally.problems:
        raise ConfigError(
            f"no response is counted: {tally.left_out} are left out by --drop-truncated, --first-step or --last-step, or"
            f" were replayed, and {tally.unscorable} have no score"
        )
    band = RateBand(args.min_rate, args.max_rate, args.drop_all_right, args.drop_all_wrong, args.min_samples)
    try:
        with new_folder(args.output) as folder:
            written = _write(folder, args, tally, band, reader)
            summary = "\n".join([describe_tally(tally, band), *([""] if written else []), *written])
            write_file(folder / "summary.txt", summary + "\n")
    except OSError as error:
        raise StorageError(f"cannot write --output {str(args.output)!r}: {error}") from error
    print(f"{summary}\n\nwrote {args.output}/: {', '.join(sorted(path.name for path in args.output.iterdir()))}")
    return 0


def _write(folder: Path, args: argparse.Namespace, tally: Tally, band: RateBand, reader: ResponseReader) -> list[str]:
    """Write all files into `folder`; returns a line on each that depends on the options. Raises ConfigError."""
    write_file(folder / PASS_RATES, outputs.json_lines(outputs.pass_rate_rows(tally, reader)))
    write_file(folder / "pass_rates.csv", outputs.csv_lines(outputs.pass_rate_rows(tally, reader)))
    lines = []
    for path in args.data:
        rows = outputs.FilteredRows(path, get_task(args.task), tally, band, args.keep_unmeasured)
        write_file(folder / f"{path.stem}.jsonl", rows.lines())
        lines.append(rows.describe())
    kept = kept_problems(tally, band)
    if args.sft is not None:
        lines.append(_write_rows(folder / SUPERVISED, outputs.supervised_rows_of(kept, reader, args.sft), kept, tally))
    if args.pairs is not None:
        pairs = outputs.preference_rows(kept, reader, args.pairs, args.pairs_per_prompt)
        lines.append(_write_rows(folder / PAIRS, pairs, kept, tally))
    return lines


def _write_rows(path: Path, rows: Iterable[dict[str, Any]], problems: list[ProblemTally], tally: Tally) -> str:
    """Raises ConfigError when there is no row."""
    count = Counter[str]()
    write_file(path, outputs.json_lines(_counted(rows, count)))
    if not count["rows"]:
        played = f"; {tally.trajectories} responses are trajectories, which are left out" if tally.trajectories else ""
        raise ConfigError(
            f"{path.name} would have no row: none of the {len(problems)} problems that the filters keep has complete"
            f" responses for one{played}; widen the filters, or leave the option out"
        )
    left_out = f" ({tally.trajectories} trajectories of several turns are left out)" if tally.trajectories else ""
    return f"{path.name}: {count['rows']} rows from {len(problems)} problems{left_out}"


def _counted(rows: Iterable[dict[str, Any]], count: Counter[str]) -> Iterator[dict[str, Any]]:
    for row in rows:
        count["rows"] += 1
        yield row


# -- options -----------------------------------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> None:
    """What argparse cannot check. Raises ConfigError."""
    if args.min_rate > args.max_rate:
        raise ConfigError(f"--min-rate {args.min_rate:g} is above --max-rate {args.max_rate:g}; swap them")
    if bool(args.data) != (args.task is not None):
        raise ConfigError("--data FILE and --task NAME go together: the task reads the question and answer of each row")
    if args.keep_unmeasured and not args.data:
        raise ConfigError("--keep-unmeasured is about the rows of --data FILE; add it, or leave --keep-unmeasured out")
    if args.pairs != "right-wrong" and args.pairs_per_prompt != 1:
        raise ConfigError(f"--pairs-per-prompt {args.pairs_per_prompt} needs --pairs right-wrong; best-worst makes one")
    names = [f"{path.stem}.jsonl" for path in args.data]
    for name in names:
        if names.count(name) > 1 or name in (PASS_RATES, SUPERVISED, PAIRS):
            raise ConfigError(f"--data: two files would be {args.output / name}; rename one")
    if args.output.exists() and not (args.output.is_dir() and not any(args.output.iterdir())):
        if not args.force:
            raise ConfigError(f"--output {str(args.output)!r} exists; choose another folder, or add --force")
        if not (args.output / PASS_RATES).is_file():
            raise ConfigError(f"--output {str(args.output)!r} was not written by this command; choose another folder")
    if args.task is not None:
        get_task(args.task)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "grpo-megatron curate",
        description="Pass rates per problem, from rollouts or evaluations;\nfiltered data; rows for SFT and preferences.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "sources",
        nargs="+",
        type=Path,
        metavar="SOURCE",
        help="trainer.rollout_data_dir, an evaluation's folder, files",
    )
    add("--output", type=Path, required=True, metavar="OUT", help="a new folder")
    add("--force", action="store_true", help="replace a folder that this command has written")
    counting = parser.add_argument_group("which responses count").add_argument
    counting("--right", type=finite, default=1.0, metavar="SCORE", help="lowest score of a right response (default 1)")
    counting("--drop-truncated", action="store_true", help="do not count responses that the length limit has cut off")
    counting("--first-step", type=_whole(0), metavar="N", help="of a training run: only its samples from step N on")
    counting("--last-step", type=_whole(0), metavar="N", help="of a training run: only its samples up to step N")
    keeping = parser.add_argument_group("which problems to keep").add_argument
    keeping("--min-rate", type=pass_rate, default=0.0, metavar="P", help="lowest pass rate")
    keeping("--max-rate", type=pass_rate, default=1.0, metavar="P", help="highest pass rate")
    keeping("--drop-all-right", action="store_true", help="leave out what every response solves (DUPO)")
    keeping("--drop-all-wrong", action="store_true", help="leave out what no response solves")
    keeping("--min-samples", type=_whole(1), default=1, metavar="N", help="leave out what has fewer responses")
    writing = parser.add_argument_group("what to write besides pass rates").add_argument
    writing("--data", type=Path, nargs="+", default=[], metavar="FILE", help="data files: write their kept rows")
    writing("--task", metavar="NAME", help="as data.task: how the rows of --data are read")
    writing("--keep-unmeasured", action="store_true", help="also keep the rows of --data without a response")
    writing("--sft", type=_whole(1), metavar="K", help="write up to K different right responses per problem")
    writing("--pairs", choices=("right-wrong", "best-worst"), help="write preference pairs")
    writing("--pairs-per-prompt", type=_whole(1), default=1, metavar="K", help="of right-wrong (default 1)")
    return parser.parse_args(argv)


def _whole(low: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        if not low <= (value := int(text)) <= MAX_STEP:
            raise argparse.ArgumentTypeError(f"{text[:40]} is not a whole number of {low} or more")
        return value

    return whole_number


def pass_rate(text: str) -> float:
    if not 0 <= (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text[:40]} is not a number from 0 to 1")
    return value


def finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise argparse.ArgumentTypeError(f"{text[:40]} is not a finite number")
    return value
