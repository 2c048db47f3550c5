"""`diff`: the first place where two runs part, and why (compare.py). As text, as JSON, and as a page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from grpo_megatron.config import ConfigError
from grpo_megatron.config.options import Argument, Option, Options
from grpo_megatron.imports import large_imports
from grpo_megatron.report.kit import html_page
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.files import write_file
from grpo_megatron.storage.run_files import TRACE_FOLDER, WARM_UP_FOLDER
from grpo_megatron.untrusted import visible


class DiffOptions(Options):
    """The options of `diff`."""

    program = "diff"
    description = "Find the first step, stage and row or tensor where two runs part, from their traces."
    epilog = "Exit codes: 0 if they are equal (--tolerance: or rounding explains the differences), 1 if not, 2 for bad input."
    left: Annotated[Path, Argument("the trainer.output_dir of a run", "RUN1")]
    right: Annotated[Path | None, Argument("and of another one", "RUN2")] = None
    itself: Annotated[bool, Option("check that RUN1's resumes join without a seam", flags=("--self",))] = False
    tolerance: Annotated[
        float | None,
        Option(
            "tell a wrong run from one that rounds differently; X times the bounds (default: 1)", "X", bare=1.0, gt=0
        ),
    ] = None
    replay: Annotated[
        bool, Option("run that step again from each run's nearest checkpoint, and say which side repeats its record")
    ] = False
    json_file: Annotated[Path | None, Option("write the result as JSON", "FILE", flags=("--json",))] = None
    page: Annotated[Path | None, Option("write the result as a page", "FILE")] = None

    def problems(self) -> Iterator[str]:
        """Yields a missing or a needless second run."""
        if self.itself == (self.right is not None):
            yield "name two runs; or one with --self, which looks at its resumes"
        if self.right is not None and self.left.resolve() == self.right.resolve():
            yield f"both runs are {self.left}; name another one, or leave it out and give --self"
        for flag, file in (("--json", self.json_file), ("--page", self.page)):
            if file is not None and (file.is_dir() or not file.parent.is_dir()):
                yield f"{flag} {file}: name a file in a folder that exists"
        if self.itself and self.replay:
            yield "--replay runs the step where two runs part again; leave it out, or name two runs"


def print_diff(options: DiffOptions) -> int:
    """Compare the runs, print and write the result; returns the exit code of the epilog."""
    with large_imports():
        from grpo_megatron.report.trace_file import TraceFolder
        from grpo_megatron.trust.compare import compare_runs, compare_seams
        from grpo_megatron.trust.replay import replay

    try:
        sides = [TraceFolder(run) for run in (options.left, options.right) if run is not None]
        folders = [run for side in sides if ((run := side.run / WARM_UP_FOLDER) / TRACE_FOLDER).is_dir()]
        before = [TraceFolder(folder) for folder in folders]
        if options.right is None:
            result = compare_seams(*sides, *before)
        else:
            scale = options.tolerance or 1.0
            result = compare_runs(*sides, tolerance=options.tolerance is not None, scale=scale)
            if len(before) == len(sides):
                warm_up = compare_runs(*before, tolerance=options.tolerance is not None, scale=scale)
                if warm_up.verdict in ("part", "wrong"):  # the run follows from it
                    result = warm_up
                else:
                    result.notes.append(f"the warm-ups: {VERDICTS[warm_up.verdict].format(steps=warm_up.num_steps)}")
            if options.replay:
                result.replays = list(replay(result, sides, scale))
    except StorageError as error:
        raise ConfigError(str(error)) from error
    sections = dict(diff_sections(result))
    print(
        visible(
            "\n".join(line for title, lines in sections.items() for line in (title, *(f"  {one}" for one in lines)))
        )
    )
    if options.json_file is not None:
        write_file(options.json_file, json.dumps(asdict(result), indent=1) + "\n")
    if options.page is not None:
        write_file(options.page, html_page("diff", f"{result.left} and {result.right}", {}, sections=sections))
    return 0 if result.verdict in ("equal", "explained") else 1


VERDICTS = {
    "equal": "equal: every digest of {steps} steps",
    "explained": "different, and rounding explains it",
    "part": "the runs part",
    "wrong": "different, and rounding does not explain it",
}


def diff_sections(result: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield (heading, lines) of a result (`compare.Diff`)."""
    from grpo_megatron.trust.compare import leaf_lines

    if result.left == result.right:
        verdict = "joins without a seam" if result.verdict == "equal" else "a resume has a seam"
        yield f"{verdict}: {result.num_steps} resume{'s' if result.num_steps != 1 else ''}", [f"{result.left}"]
    else:
        yield VERDICTS[result.verdict].format(steps=result.num_steps), [f"{result.left}", f"{result.right}"]
    if result.changes:
        yield "what differs", [f"{c.kind} {c.key}: {c.left} | {c.right} ({c.effect})" for c in result.changes]
    if first := result.first:
        where = f"{first.count} of {first.total} {first.kind}s" if first.leaves else first.measured
        where = where or f"its {first.kind}s are no longer kept"
        yield f"first: step {first.step}, {first.stage}", [where, *leaf_lines(first.leaves), *result.texts]
        yield "likely cause", [result.cause]
        later = [one for one in result.partings if one is not first]
        lines = [f"step {p.step}, {p.stage}: {_judged(p)}" for p in (first, *later)]
        if any(one.measured and one.judgement != "not judged" for one in result.partings):
            yield "what rounding explains", [line for line, p in zip(lines, (first, *later), strict=True) if p.measured]
        elif later:
            yield "later in the step, as a consequence", lines[1:]
    if result.replays:
        yield "run again", result.replays
    if result.independent:
        yield "also different, and no consequence", result.independent
    if result.notes:
        yield "notes", result.notes


def _judged(parting: Any) -> str:
    count, is_judged = f"{parting.count} of {parting.total}", parting.measured and parting.judgement != "not judged"
    judged = f"{parting.judgement} ({parting.measured})" if is_judged else ""
    return ": ".join(filter(None, [count if parting.count else "", judged])) or parting.measured or "no longer kept"
