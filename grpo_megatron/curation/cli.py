"""The command `curate`: `grpo-megatron curate SOURCE... --output OUT`. Needs neither torch nor a GPU.

Exit codes: 0; 2 for a mistake of the user, and then nothing is written; else 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from grpo_megatron.config import ConfigError
from grpo_megatron.config.options import Argument, Option, Options
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

counting, keeping, writing = (
    partial(Option, group=group)
    for group in ("which responses count", "which problems to keep", "what to write besides pass rates")
)


class CurateOptions(Options):
    """The options of `curate`."""

    program = "curate"
    description = "Pass rates per problem, from rollouts or evaluations;\nfiltered data; rows for SFT and preferences."
    epilog = """
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
    groups = ("which responses count", "which problems to keep", "what to write besides pass rates")
    sources: Annotated[tuple[Path, ...], Argument("trainer.rollout_data_dir, an evaluation's folder, files", "SOURCE")]
    output: Annotated[Path, Option("a new folder", "OUT")]
    force: Annotated[bool, Option("replace a folder that this command has written")] = False
    right: Annotated[float, counting("lowest score of a right response (default 1)", "SCORE")] = 1.0
    drop_truncated: Annotated[bool, counting("do not count responses that the length limit has cut off")] = False
    first_step: Annotated[
        int | None, counting("of a training run: only its samples from step N on", "N", low=0, high=MAX_STEP)
    ] = None
    last_step: Annotated[
        int | None, counting("of a training run: only its samples up to step N", "N", low=0, high=MAX_STEP)
    ] = None
    min_rate: Annotated[float, keeping("lowest pass rate", "P", low=0, high=1)] = 0.0
    max_rate: Annotated[float, keeping("highest pass rate", "P", low=0, high=1)] = 1.0
    drop_all_right: Annotated[bool, keeping("leave out what every response solves (DUPO)")] = False
    drop_all_wrong: Annotated[bool, keeping("leave out what no response solves")] = False
    min_samples: Annotated[int, keeping("leave out what has fewer responses", "N", low=1)] = 1
    data: Annotated[tuple[Path, ...], writing("data files: write their kept rows", "FILE")] = ()
    task: Annotated[str | None, writing("as data.task: how the rows of --data are read", "NAME")] = None
    keep_unmeasured: Annotated[bool, writing("also keep the rows of --data without a response")] = False
    sft: Annotated[int | None, writing("write up to K different right responses per problem", "K", low=1)] = None
    pairs: Annotated[Literal["right-wrong", "best-worst"] | None, writing("write preference pairs")] = None
    pairs_per_prompt: Annotated[int, writing("of right-wrong (default 1)", "K", low=1)] = 1

    def problems(self) -> Iterator[str]:
        """Options that do not go together, and data files whose rows would be one file."""
        if self.min_rate > self.max_rate:
            yield f"--min-rate {self.min_rate:g} is above --max-rate {self.max_rate:g}; swap them"
        if bool(self.data) != (self.task is not None):
            yield "--data FILE and --task NAME go together: the task reads the question and answer of each row"
        if self.keep_unmeasured and not self.data:
            yield "--keep-unmeasured is about the rows of --data FILE; add it, or leave --keep-unmeasured out"
        if self.pairs != "right-wrong" and self.pairs_per_prompt != 1:
            yield f"--pairs-per-prompt {self.pairs_per_prompt} needs --pairs right-wrong; best-worst makes one"
        names = [f"{path.stem}.jsonl" for path in self.data]
        for name in dict.fromkeys(names):
            if names.count(name) > 1 or name in (PASS_RATES, SUPERVISED, PAIRS):
                yield f"--data: two files would be {self.output / name}; rename one"


def curate(options: CurateOptions) -> int:
    """Write the folder; returns the exit code. Raises ConfigError for the user's mistakes."""
    _check_output(options)
    if options.task is not None:
        get_task(options.task)
    reader = ResponseReader(source_files(list(options.sources)))
    keep = max(options.sft or 0, options.pairs_per_prompt)
    rules = CountingRules(options.right, options.drop_truncated, options.first_step, options.last_step, keep)
    tally = tally_responses(reader.all(), rules)
    if not tally.problems:
        raise ConfigError(
            f"no response is counted: {tally.left_out} are left out by --drop-truncated, --first-step or --last-step, or"
            f" were replayed, and {tally.unscorable} have no score"
        )
    band = RateBand(
        options.min_rate, options.max_rate, options.drop_all_right, options.drop_all_wrong, options.min_samples
    )
    try:
        with new_folder(options.output) as folder:
            written = _write(folder, options, tally, band, reader)
            summary = "\n".join([describe_tally(tally, band), *([""] if written else []), *written])
            write_file(folder / "summary.txt", summary + "\n")
    except OSError as error:
        raise StorageError(f"cannot write --output {str(options.output)!r}: {error}") from error
    print(f"{summary}\n\nwrote {options.output}/: {', '.join(sorted(path.name for path in options.output.iterdir()))}")
    return 0


def _check_output(options: CurateOptions) -> None:
    """Raises ConfigError for an output folder that may not be replaced."""
    output = options.output
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        if not options.force:
            raise ConfigError(f"--output {str(output)!r} exists; choose another folder, or add --force")
        if not (output / PASS_RATES).is_file():
            raise ConfigError(f"--output {str(output)!r} was not written by this command; choose another folder")


def _write(folder: Path, options: CurateOptions, tally: Tally, band: RateBand, reader: ResponseReader) -> list[str]:
    """Write all files into `folder`; returns a line on each that depends on the options. Raises ConfigError."""
    write_file(folder / PASS_RATES, outputs.json_lines(outputs.pass_rate_rows(tally, reader)))
    write_file(folder / "pass_rates.csv", outputs.csv_lines(outputs.pass_rate_rows(tally, reader)))
    lines = []
    for path in options.data:
        rows = outputs.FilteredRows(path, get_task(options.task or ""), tally, band, options.keep_unmeasured)
        write_file(folder / f"{path.stem}.jsonl", rows.lines())
        lines.append(rows.describe())
    kept = kept_problems(tally, band)
    if options.sft is not None:
        lines.append(
            _write_rows(folder / SUPERVISED, outputs.supervised_rows_of(kept, reader, options.sft), kept, tally)
        )
    if options.pairs is not None:
        pairs = outputs.preference_rows(kept, reader, options.pairs, options.pairs_per_prompt)
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
