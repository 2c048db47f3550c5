"""`evaluate` and its actions grade, compare and tasks, and `evaluate()` of Python. Exit codes: 0; 2 for a mistake of the user.

One process checks everything. For more than one rank it then starts the ranks; under torchrun it is one of them. Samples
that the output folder holds are not drawn again. If it holds all of them, no engine is started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.data.task import get_tasks, task_names
from grpo_megatron.evaluation import comparison, report, results, run
from grpo_megatron.evaluation.grading import grade_file
from grpo_megatron.evaluation.ledger import claim_output, write_identity
from grpo_megatron.evaluation.options import CompareOptions, EvaluateOptions, GradeOptions, TasksOptions
from grpo_megatron.evaluation.settings import EvaluationSettings, prepare
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.storage.atomic import write_file

GRADER_TIMEOUT_S = 10.0
StartRanks = Callable[[int, str], int]  # (world size, device) -> exit code: starts the ranks of this machine


def evaluate(
    model: Path | str,
    tasks: Sequence[str],
    output: Path | str,
    *,
    data: Path | str | None = None,
    samples: int = 1,
    limit: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Draw and grade answers in this process; returns the content of `output`/results.json.

    `model`: a Hugging Face folder, a converted checkpoint, or a training step. `tasks`: names, or paths of task files. `data`:
    the folder with the benchmarks' files. `samples`: drawn per problem besides the greedy one; 1: only the greedy one. `limit`:
    only the first problems. `options`: other fields of EvaluateOptions, such as `max_tokens=256`.

    Samples that `output` holds are not drawn again. Raises ConfigError; RankError where memory or weights are missing.
    """
    known = [field.name for field in dataclasses.fields(EvaluateOptions)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"evaluate() has no option {name!r}{f'; did you mean {close[0]!r}?' if close else ''} (known: {', '.join(known)})"
            )
    given: dict[str, Any] = {"model": model, "output": output, "data": data, "samples": samples, "limit": limit}
    chosen = EvaluateOptions(tasks=tuple(tasks), **given, **options)
    run_evaluation(chosen, _refuse)
    return results.read_result(chosen.folder / "results.json")


def _refuse(ranks: int, device: str) -> int:
    raise ConfigError(
        f"tp x dp = {ranks} ranks, and evaluate() is one process; leave tp and dp out, or use the command"
    )


def run_evaluation(options: EvaluateOptions, start_ranks: StartRanks | None) -> int:
    """Draw, grade and report; returns the exit code. One process owns the output folder: the user's, or torchrun's rank 0.

    `start_ranks` is None in a rank that this program has started: the process that started it owns the folder.
    """
    is_rank = "RANK" in os.environ
    num_ranks = _num_ranks(options, is_rank)
    settings = prepare(options)
    is_owner = start_ranks is not None and os.environ.get("RANK", "0") == "0"
    with claim_output(options.folder) if is_owner else contextlib.nullcontext():
        if is_owner:
            _test_graders()
            write_identity(options.folder, settings.identity())
        if not is_rank and run.is_complete(settings):
            print("every sample was drawn before: no engine is started", flush=True)
        elif start_ranks is not None and not is_rank and num_ranks > 1:
            code = start_ranks(num_ranks, options.device)
            if code:
                return code
        else:
            run.draw_samples(settings)
        if is_owner:
            _grade_and_report(settings)
    return 0


def _num_ranks(options: EvaluateOptions, is_rank: bool) -> int:
    tp, dp = options.tp, options.dp
    if not is_rank:
        return tp * (dp or 1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks % tp or (dp is not None and tp * dp != ranks):
        layout = f"--tp {tp} x --dp {dp} = {tp * dp}" if dp else f"--tp {tp}"
        raise ConfigError(
            f"{layout} does not fit the {ranks} ranks that torchrun has started; leave --dp out, and set --tp to a divisor"
            f" of {ranks}"
        )
    return ranks


def _test_graders() -> None:
    """Grade known right and wrong answers, so that a broken grader is found before hours of generation.

    Raises RuntimeError.
    """
    with RewardPool(1, GRADER_TIMEOUT_S) as pool:
        pool.self_test()


def _grade_and_report(settings: EvaluationSettings) -> None:
    """Grade all samples, write OUT/samples, OUT/results.json and OUT/report.html, print the tables."""
    options, tasks, graded = settings.options, {}, {}
    with RewardPool(options.workers, GRADER_TIMEOUT_S) as pool:
        for selected in settings.selected:
            start = time.monotonic()
            graded_problems = results.grade_task(settings, selected, pool)
            num_samples = len(selected.keys())
            print(f"{selected.name}: {num_samples} samples graded in {time.monotonic() - start:.1f} s", flush=True)
            results.write_samples(options.folder / "samples" / f"{selected.name}.jsonl", selected, graded_problems)
            tasks[selected.name] = results.task_result(selected, graded_problems, pool)
            graded[selected.name] = graded_problems
    result = results.whole_result(settings, tasks)
    write_file(options.folder / "report.html", report.render_page(result, graded, options.report_samples))
    results.write_result(options.folder / "results.json", result)  # last, so that it exists only with all other files
    print(f"\n{results.result_tables(result)}\n\nwrote {options.folder}/results.json, samples/, report.html")


# -- the other actions -------------------------------------------------------------------------------------------------


def grade_rows(options: GradeOptions) -> int:
    """Grade the completions of a file; returns the exit code."""
    counts = grade_file(options.task, options.rows, options.output, options.workers)
    print(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()))
    return 0


def print_comparison(options: CompareOptions) -> int:
    """Print the paired comparison of two results; returns the exit code."""
    a, b = results.read_result(options.a), results.read_result(options.b)
    rows = comparison.compare_results(a, b, any_template=options.any_template)
    print(json.dumps(rows, indent=1) if options.json else comparison.paired_table(rows))
    return 0


def list_tasks(options: TasksOptions) -> int:
    """Print the built-in tasks and the files that they need; returns the exit code."""
    for task in get_tasks(task_names()):
        print(f"{task.name} version {task.version}, sha256 {task.sha256[:12]}: {task.title}")
        files = f"in --data: {' or '.join(task.files)}" if task.files else f"--file {task.name}=PATH"
        fewshot = task.fewshot
        examples = f"{len(fewshot.examples)} of its own" if fewshot and fewshot.examples else ""
        examples = " or ".join(fewshot.files) if fewshot and not examples else examples
        print(f"    {files}{f'; few-shot: {examples}' if fewshot else ''}")
    return 0
