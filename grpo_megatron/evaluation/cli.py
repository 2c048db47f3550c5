"""The command line: evaluate (no action), grade, compare, tasks. Exit codes: 0; 2 for a mistake of the user; else 1.

One process checks everything. For more than one rank it then starts the ranks; under torchrun it is one of them. Samples
that the output folder holds are not drawn again. If it holds all of them, no engine is started.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.evaluation import options
from grpo_megatron.evaluation.options import parse_arguments
from grpo_megatron.storage.atomic import write_file

GRADER_TIMEOUT_S = 10.0
StartRanks = Callable[[int, list[str], str], int]


def main(argv: list[str], start_ranks: StartRanks, is_child: bool = False) -> int:
    """Do what `argv` says; returns the exit code. Raises ConfigError.

    `start_ranks(world size, arguments, device)` starts this program once per rank, with `is_child`.
    """
    if argv and argv[0] in ACTIONS:
        return ACTIONS[argv[0]](argv[1:])
    return run_evaluation(options.parse_arguments(argv), argv, start_ranks, is_child)


# -- evaluate ----------------------------------------------------------------------------------------------------------


def run_evaluation(args: argparse.Namespace, argv: list[str], start_ranks: StartRanks, is_child: bool = False) -> int:
    """Draw, grade and report; returns the exit code. One process owns the output folder: the user's, or torchrun's rank 0."""
    is_rank = "RANK" in os.environ
    options.check_arguments(args)
    num_ranks = _num_ranks(args, is_rank)
    from grpo_megatron.evaluation import run
    from grpo_megatron.evaluation.ledger import claim_output, write_identity
    from grpo_megatron.evaluation.settings import prepare

    settings = prepare(_options(args), args.tp)
    is_owner = not is_child and os.environ.get("RANK", "0") == "0"
    with claim_output(settings.options.output) if is_owner else contextlib.nullcontext():
        if is_owner:
            _test_graders()
            write_identity(settings.options.output, settings.identity())
        if not is_rank and run.is_complete(settings):
            print("every sample was drawn before: no engine is started", flush=True)
        elif not is_rank and num_ranks > 1:
            code = start_ranks(num_ranks, ["evaluate", *argv], args.device)
            if code:
                return code
        else:
            run.draw_samples(settings, _engine_options(args))
        if is_owner:
            _grade_and_report(settings, args.report_samples, args.workers)
    return 0


def _num_ranks(args: argparse.Namespace, is_rank: bool) -> int:
    if not is_rank:
        return int(args.tp * (args.dp or 1))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks % args.tp or (args.dp is not None and args.tp * args.dp != ranks):
        layout = f"--tp {args.tp}"
        if args.dp:
            layout += f" x --dp {args.dp} = {args.tp * args.dp}"
        raise ConfigError(
            f"{layout} does not fit the {ranks} ranks that torchrun has started; leave --dp out, and set --tp to a divisor"
            f" of {ranks}"
        )
    return ranks


def _options(args: argparse.Namespace) -> Any:
    from grpo_megatron.evaluation.settings import Options

    name = args.model.resolve().name
    return Options(
        model=args.model,
        tasks=[task for task in args.tasks.split(",") if task],
        output=args.output or Path("outputs/evaluation") / name,
        data=args.data,
        files={task: Path(path) for task, _, path in (file.partition("=") for file in args.file)},
        samples=args.samples,
        greedy=not args.no_greedy,
        temperature=args.temperature,
        top_p=args.top_p,
        max_tokens=args.max_tokens,
        num_fewshot=args.num_fewshot,
        fewshot_seed=args.fewshot_seed,
        format=args.format,
        chat_template=args.chat_template,
        system_prompt=args.system_prompt,
        tokenizer=args.tokenizer,
        hf=args.hf,
        family=args.family,
        limit=args.limit,
        seed=args.seed,
        dtype=args.dtype,
        engine_kwargs=args.engine_kwargs,
    )


def _engine_options(args: argparse.Namespace) -> Any:
    from grpo_megatron.evaluation.engine import EngineOptions

    return EngineOptions(
        tp=args.tp,
        device=args.device,
        batch_size=args.batch_size,
        max_num_seqs=args.max_num_seqs,
        kv_cache_gib=args.kv_cache_gib,
        gpu_memory_utilization=args.gpu_memory_utilization,
    )


def _test_graders() -> None:
    """Grade known right and wrong answers, so that a broken grader is found before hours of generation.

    Raises RuntimeError.
    """
    from grpo_megatron.rewards.pool import RewardPool

    with RewardPool(1, GRADER_TIMEOUT_S) as pool:
        pool.self_test()


def _grade_and_report(settings: Any, report_samples: int, workers: int) -> None:
    """Grade all samples, write OUT/samples, OUT/results.json and OUT/report.html, print the tables."""
    from grpo_megatron.evaluation import report, results
    from grpo_megatron.rewards.pool import RewardPool

    output, tasks, graded = settings.options.output, {}, {}
    with RewardPool(workers, GRADER_TIMEOUT_S) as pool:
        for selected in settings.selected:
            start = time.monotonic()
            graded_problems = results.grade_task(settings, selected, pool)
            num_samples = len(selected.keys())
            print(f"{selected.name}: {num_samples} samples graded in {time.monotonic() - start:.1f} s", flush=True)
            results.write_samples(output / "samples" / f"{selected.name}.jsonl", selected, graded_problems)
            tasks[selected.name] = results.task_result(selected, graded_problems, pool)
            graded[selected.name] = graded_problems
    result = results.whole_result(settings, tasks)
    write_file(output / "report.html", report.render_page(result, graded, report_samples))
    results.write_result(output / "results.json", result)  # last, so that it exists only with all other files
    print(f"\n{results.result_tables(result)}\n\nwrote {output}/results.json, samples/, report.html")


# -- the other actions -------------------------------------------------------------------------------------------------


def _grade(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("grpo-megatron evaluate grade", description="Grade completions of a file.")
    parser.add_argument(
        "rows", type=Path, metavar="ROWS.jsonl", help='rows {"answer": bare reference answer, "completion": text}'
    )
    parser.add_argument("--task", required=True, metavar="NAME", help="gsm8k or math")
    parser.add_argument("--output", type=Path, required=True, metavar="OUT.jsonl", help="a new file")
    parser.add_argument(
        "--workers",
        type=options.positive_integer,
        default=os.cpu_count() or 1,
        metavar="N",
        help="worker processes (default: one per core)",
    )
    args = parser.parse_args(argv)
    from grpo_megatron.evaluation.grading import grade_file

    counts = grade_file(args.task, args.rows, args.output, args.workers)
    print(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()))
    return 0


def _compare(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "grpo-megatron evaluate compare", description="Is B better than A? Paired, on the same problems."
    )
    parser.add_argument("a", type=Path, metavar="A.json", help="results.json of one evaluation")
    parser.add_argument("b", type=Path, metavar="B.json", help="and of the other")
    parser.add_argument(
        "--any-template",
        action="store_true",
        help="compare although chat templates rendered the same questions differently",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    from grpo_megatron.evaluation import comparison
    from grpo_megatron.evaluation.results import read_result

    rows = comparison.compare_results(read_result(args.a), read_result(args.b), any_template=args.any_template)
    print(json.dumps(rows, indent=1) if args.json else comparison.paired_table(rows))
    return 0


def _tasks(argv: list[str]) -> int:
    argparse.ArgumentParser("grpo-megatron evaluate tasks", description="Print the built-in tasks.").parse_args(argv)
    from grpo_megatron.data.tasks import get_tasks, task_names

    for task in get_tasks(task_names()):
        print(f"{task.name} version {task.version}, sha256 {task.sha256[:12]}: {task.title}")
        files = f"in --data: {' or '.join(task.files)}" if task.files else f"--file {task.name}=PATH"
        examples = f"; few-shot: {_few_shot(task.fewshot)}" if task.fewshot else ""
        print(f"    {files}{examples}")
    return 0


def _few_shot(fewshot: Any) -> str:
    return f"{len(fewshot.examples)} of its own" if fewshot.examples else " or ".join(fewshot.files)


ACTIONS: dict[str, Callable[[list[str]], int]] = {"grade": _grade, "compare": _compare, "tasks": _tasks}


# -- Evaluation from Python: `evaluate(model, tasks, output)`, with the options of the command as keyword arguments ----


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
    only the first problems. `options`: others of `grpo-megatron evaluate --help`, with underscores: `max_tokens=256`.

    Samples that `output` holds are not drawn again. Raises ConfigError; RankError where memory or weights are missing.
    """
    args = parse_arguments(["--model", str(model), "--tasks", ",".join(tasks)])
    known = vars(args)
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"evaluate() has no option {name!r}{f'; did you mean {close[0]!r}?' if close else ''} (known: {', '.join(known)})"
            )
    known.update(options, data=None if data is None else Path(data), output=Path(output), samples=samples, limit=limit)
    run_evaluation(args, [], _refuse)
    from grpo_megatron.evaluation.results import read_result

    return read_result(Path(output) / "results.json")


def _refuse(ranks: int, argv: list[str], device: str) -> int:
    raise ConfigError(
        f"tp x dp = {ranks} ranks, and evaluate() is one process; leave tp and dp out, or use the command"
    )
