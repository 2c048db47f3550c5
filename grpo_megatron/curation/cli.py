"""The command `curate`: `grpo-megatron curate SOURCE... --output OUT`. Needs neither torch nor a GPU.

Exit codes: 0; 2 for a mistake of the user, and then nothing is written; else 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.curation import outputs
from grpo_megatron.curation.options import PAIRS, PASS_RATES, SUPERVISED, CurateOptions
from grpo_megatron.curation.outputs import describe_tally, kept_problems
from grpo_megatron.curation.tally import ProblemTally, ResponseReader, Tally, source_files, tally_responses
from grpo_megatron.data.task import get_task
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.atomic import new_folder, write_file


def curate(options: CurateOptions) -> int:
    """Write the folder; returns the exit code. Raises ConfigError for the user's mistakes."""
    _check_output(options)
    if options.task is not None:
        get_task(options.task)
    reader = ResponseReader(source_files(list(options.sources)))
    tally = tally_responses(reader.all(), options)
    if not tally.problems:
        raise ConfigError(
            f"no response is counted: {tally.left_out} are left out by --drop-truncated, --first-step or --last-step, or"
            f" were replayed, and {tally.unscorable} have no score"
        )
    try:
        with new_folder(options.output) as folder:
            written = _write(folder, tally, reader)
            summary = "\n".join([describe_tally(tally), *([""] if written else []), *written])
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


def _write(folder: Path, tally: Tally, reader: ResponseReader) -> list[str]:
    """Write all files into `folder`; returns a line on each that depends on the options. Raises ConfigError."""
    options, kept, lines = tally.options, kept_problems(tally), []
    write_file(folder / PASS_RATES, outputs.json_lines(outputs.pass_rate_rows(tally, reader)))
    write_file(folder / "pass_rates.csv", outputs.csv_lines(outputs.pass_rate_rows(tally, reader)))
    for path in options.data:
        rows = outputs.FilteredRows(path, get_task(options.task or ""), tally)
        write_file(folder / f"{path.stem}.jsonl", rows.lines())
        lines.append(rows.describe())
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
