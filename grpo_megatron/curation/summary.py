"""The summary that `curate` prints: how many problems have which pass rate, and how many of them are kept."""

from __future__ import annotations

from grpo_megatron.curation.selection import RateBand, kept_problems
from grpo_megatron.curation.tally import Tally

_BINS = 5  # between 0 and 1, which have lines of their own
_BAR = 40  # characters of the longest bar


def describe_tally(tally: Tally, band: RateBand) -> str:
    problems = list(tally.problems.values())
    truncated = sum(problem.truncated for problem in problems)
    mean = sum(problem.rate for problem in problems) / len(problems)
    kept = len(kept_problems(tally, band))
    lines = [
        f"{len(problems)} problems, {tally.num_responses} responses ({truncated} truncated);"
        f" not counted: {tally.left_out} replayed or left out by the options, {tally.unscorable} without a score",
        f"mean pass rate {mean:.4f}; the filters keep {kept} problems",
        "",
        f"{'pass rate':>12} {'problems':>9}",
    ]
    counts = [0] * (_BINS + 2)
    for problem in problems:
        counts[_bin(problem.passes, problem.n)] += 1
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
