"""The files that `curate` writes: pass rates, supervised rows, preference pairs, and filtered data files.

Each is an iterator of lines, so that no file is in memory as a whole (a data file in .json form is).
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.curation.options import CurateOptions
from grpo_megatron.curation.tally import ProblemTally, ResponsePlace, ResponseReader, Tally
from grpo_megatron.data.rows import checked_row, open_rows, problem_digest, question_text
from grpo_megatron.data.task import Task

# -- Which problems to keep, by their measured pass rates --------------------------------------------------------------
# DUPO (WebSailor, arXiv 2507.02592) leaves out, before training, what all of 8 responses solve: `drop_all_right`.


def kept_problems(tally: Tally) -> list[ProblemTally]:
    """The problems that the filters keep, in order."""
    return [problem for problem in tally.problems.values() if _reason(problem, tally.options) is None]


def _reason(problem: ProblemTally, options: CurateOptions) -> str | None:
    """Why the problem is left out; None: it is kept."""
    if problem.n < options.min_samples:
        return f"fewer than {options.min_samples} responses"
    if options.drop_all_right and problem.passes == problem.n:
        return "all right"
    if options.drop_all_wrong and problem.passes == 0:
        return "all wrong"
    if problem.rate < options.min_rate:
        return f"pass rate below {options.min_rate:g}"
    return f"pass rate above {options.max_rate:g}" if problem.rate > options.max_rate else None


TABLE_COLUMNS = ("rate", "low", "high", "n", "passes", "truncated", "mean_score", "mean_tokens", "question", "answer")


def pass_rate_rows(tally: Tally, reader: ResponseReader) -> Iterator[dict[str, Any]]:
    """One row per problem, as data.sampling.pass_rates reads them."""
    for problem in tally.problems.values():
        low, high = problem.interval()
        shown = reader.read(problem.first)
        yield {
            "question": question_text(shown.question),
            "answer": shown.answer,
            "rate": problem.rate,
            "low": round(low, 6),
            "high": round(high, 6),
            "n": problem.n,
            "passes": problem.passes,
            "truncated": problem.truncated,
            "mean_score": round(problem.score_sum / problem.n, 6),
            "mean_tokens": round(problem.token_sum / problem.n, 2),
        }


def json_lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """One line of JSON per row."""
    return (json.dumps(row) + "\n" for row in rows)


def csv_lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The same rows for a spreadsheet."""
    for cells in itertools.chain([TABLE_COLUMNS], ([row[name] for name in TABLE_COLUMNS] for row in rows)):
        line = io.StringIO()
        csv.writer(line).writerow(cells)
        yield line.getvalue()


def supervised_rows_of(
    problems: Iterable[ProblemTally], reader: ResponseReader, limit: int
) -> Iterator[dict[str, Any]]:
    """Rejection sampling (RFT, arXiv 2308.01825): up to `limit` different right responses per problem."""
    for problem in problems:
        for place, _ in problem.right[:limit]:
            response = reader.read(place)
            yield {"prompt": response.question, "response": response.text}


def preference_rows(
    problems: Iterable[ProblemTally], reader: ResponseReader, kind: str, limit: int
) -> Iterator[dict[str, Any]]:
    """Rows {"prompt", "chosen", "rejected"}. `kind`: "right-wrong", up to `limit` per problem, or "best-worst", one."""
    for problem in problems:
        for chosen, rejected in _pairs_of(problem, kind, limit):
            better = reader.read(chosen)
            yield {"prompt": better.question, "chosen": better.text, "rejected": reader.read(rejected).text}


def _pairs_of(problem: ProblemTally, kind: str, limit: int) -> list[tuple[ResponsePlace, ResponsePlace]]:
    if kind == "right-wrong":
        return [(right, wrong) for (right, _), (wrong, _) in zip(problem.right, problem.wrong, strict=False)][:limit]
    if problem.best is None or problem.worst is None or problem.best[0] <= problem.worst[0]:
        return []
    return [(problem.best[1], problem.worst[1])]


class FilteredRows:
    """The rows of a data file whose problem is kept, unchanged. `lines` is read once, and counts them."""

    def __init__(self, path: Path, task: Task, tally: Tally) -> None:
        self.path, self.task, self.tally = path, task, tally
        self.kept = self.measured = 0
        self.left_out: Counter[str] = Counter()  # reason -> rows

    def lines(self) -> Iterator[str]:
        """Raises ConfigError for an unreadable file or row, and if no row is left."""
        rows = open_rows(self.path)
        for number, row in enumerate(rows.rows(0, len(rows))):
            try:
                problem = self.tally.problems.get(problem_digest(*self.task.read_row(checked_row(row))))
            except ValueError as error:
                raise ConfigError(f"data file {str(self.path)!r} {rows.place(number)}: {error}") from error
            self.measured += problem is not None
            unmeasured = None if self.tally.options.keep_unmeasured else "not measured"
            if reason := _reason(problem, self.tally.options) if problem else unmeasured:
                self.left_out[reason] += 1
                continue
            self.kept += 1
            line = rows.line(number)  # of JSON lines, so that the row is written as it was
            yield (json.dumps(row) if line is None else line.decode()) + "\n"
        if not self.measured:
            raise ConfigError(
                f"data file {str(self.path)!r}: none of its questions and answers, as --task {self.task.name} reads them,"
                f" is among the {len(self.tally.problems)} measured ones; give the file and the task that the responses"
                " belong to"
            )
        if not self.kept:
            raise ConfigError(f"data file {str(self.path)!r}: no row is left ({self._reasons()}); widen the filters")

    def describe(self) -> str:
        """The line on this file in the summary."""
        total = self.kept + self.left_out.total()
        left_out = f" (left out: {self._reasons()})" if self.left_out else ""
        return f"{self.path.stem}.jsonl: {self.kept} of {total} rows{left_out}"

    def _reasons(self) -> str:
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self.left_out.items()))


# -- The summary that `curate` prints: how many problems have which pass rate, and how many of them are kept -----------

_BINS = 5  # between 0 and 1, which have lines of their own
_BAR = 40  # characters of the longest bar


def describe_tally(tally: Tally) -> str:
    """The printed summary: counts, and the problems by pass rate."""
    problems = list(tally.problems.values())
    truncated = sum(problem.truncated for problem in problems)
    mean = sum(problem.rate for problem in problems) / len(problems)
    kept = len(kept_problems(tally))
    lines = [
        f"{len(problems)} problems, {sum(problem.n for problem in problems)} responses ({truncated} truncated);"
        f" not counted: {tally.left_out} replayed or left out by the options, {tally.unscorable} without a score",
        f"mean pass rate {mean:.4f}; the filters keep {kept} problems",
        "",
        f"{'pass rate':>12} {'problems':>9}",
    ]
    bins = Counter(_bin(problem.passes, problem.n) for problem in problems)
    counts = [bins[number] for number in range(_BINS + 2)]
    for number, count in enumerate(counts):
        bar = "#" * round(_BAR * count / max(counts))
        lines.append(f"{_label(number):>12} {count:>9} {bar}".rstrip())
    return "\n".join(lines)


def _bin(passes: int, n: int) -> int:
    if passes in (0, n):
        return 0 if passes == 0 else _BINS + 1
    return 1 + passes * _BINS // n


def _label(number: int) -> str:
    if number in (0, _BINS + 1):
        return f"{'0' if number == 0 else '1'}"
    low, high = (number - 1) / _BINS, number / _BINS
    return f"{'>' if number == 1 else ''}{low:g} - <{high:g}"
