"""The command line: evaluate (no action), grade, compare, tasks. Exit codes: 0; 2 for a mistake of the user's; 1 else.

One process checks everything and, for more than one rank, starts them; under torchrun it is one of them. What is in the
output folder already is not drawn again; where nothing is missing, no engine is started.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.evaluation import arguments

GRADER_TIMEOUT_S = 10.0
ACTIONS = ("grade", "compare", "tasks")
StartRanks = Callable[[int, list[str], str], int]


def main(argv: list[str], start_ranks: StartRanks, is_child: bool = False) -> int:
    """Do what `argv` says. `start_ranks(world size, arguments, device)` starts the program again as ranks, which are children.

    Raises ConfigError.
    """
    if argv[:1] and argv[0] in ACTIONS:
        return {"grade": _grade, "compare": _compare, "tasks": _tasks}[argv[0]](argv[1:])
    return _evaluate(arguments.parse(argv), argv, start_ranks, is_child)


# -- evaluate ----------------------------------------------------------------------------------------------------------


def _evaluate(args: argparse.Namespace, argv: list[str], start_ranks: StartRanks, is_child: bool) -> int:
    """A process that was started by hand owns the folder, and so does torchrun's rank 0; ranks that we start do not."""
    is_rank = "RANK" in os.environ
    arguments.check(args)
    world_size = _world_size(args, is_rank)
    from grpo_megatron.evaluation import run
    from grpo_megatron.evaluation.settings import prepare

    plan = prepare(_options(args))
    owns = not is_child and os.environ.get("RANK", "0") == "0"
    with run.claimed(plan.options.output) if owns else contextlib.nullcontext():
        if owns:
            _test_graders()
            run.remember(plan)
        if not is_rank and run.is_complete(plan):
            print("every sample is there already: no engine is started", flush=True)
        elif not is_rank and world_size > 1:
            code = start_ranks(world_size, ["evaluate", *argv], args.device)
            if code:
                return code
        else:
            run.draw(plan, _engine_options(args))
        if owns:
            _finish(plan, args.report_samples, args.workers)
    return 0


def _world_size(args: argparse.Namespace, is_rank: bool) -> int:
    if not is_rank:
        return int(args.tp * (args.dp or 1))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks % args.tp or (args.dp is not None and args.tp * args.dp != ranks):
        wanted = f"--tp {args.tp}" + (f" x --dp {args.dp} = {args.tp * args.dp}" if args.dp else "")
        raise ConfigError(
            f"{wanted} does not fit the {ranks} ranks that torchrun has started; leave --dp out, and let --tp divide them"
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
        tokenizer=args.tokenizer,
        hf=args.hf,
        limit=args.limit,
        seed=args.seed,
        dtype=args.dtype,
        engine_kwargs=args.engine_kwargs,
    )


def _engine_options(args: argparse.Namespace) -> Any:
    from grpo_megatron.evaluation.run import EngineOptions

    return EngineOptions(
        tp=args.tp,
        device=args.device,
        batch_size=args.batch_size,
        max_num_seqs=args.max_num_seqs,
        kv_cache_gib=args.kv_cache_gib,
        gpu_memory_utilization=args.gpu_memory_utilization,
    )


def _test_graders() -> None:
    """Known right and wrong answers: a broken grader is found before hours of drawing. Raises RuntimeError."""
    from grpo_megatron.rewards.workers.pool import RewardPool

    with RewardPool(1, GRADER_TIMEOUT_S) as pool:
        pool.self_test()


def _finish(plan: Any, report_samples: int, workers: int) -> None:
    """Grade what was drawn, write OUT/samples, OUT/results.json and OUT/report.html, print the tables."""
    from grpo_megatron.evaluation import report, results, table
    from grpo_megatron.rewards.workers.pool import RewardPool

    output, tasks, graded = plan.options.output, {}, {}
    with RewardPool(workers, GRADER_TIMEOUT_S) as pool:
        for selected in plan.selected:
            start = time.monotonic()
            answered = results.grade_task(plan, selected, pool)
            count = len(selected.keys())
            print(f"{selected.name}: {count} samples graded in {time.monotonic() - start:.1f} s", flush=True)
            results.write_samples(output / "samples" / f"{selected.name}.jsonl", selected, answered)
            tasks[selected.name] = results.task_result(selected, answered, pool)
            graded[selected.name] = answered
    result = results.whole_result(plan, tasks)
    results.write(output / "report.html", report.render_page(result, graded, report_samples))
    results.write_result(output / "results.json", result)  # last: where it is, everything is
    print(f"\n{table.result_tables(result)}\n\nwrote {output}/results.json, samples/, report.html")


# -- the small actions -------------------------------------------------------------------------------------------------


def _grade(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("evaluate grade", description="Grade completions that came from anywhere.")
    parser.add_argument("rows", type=Path, metavar="ROWS.jsonl", help='rows {"gold": bare answer, "completion": text}')
    parser.add_argument("--task", required=True, help="gsm8k or math")
    parser.add_argument("--output", type=Path, required=True, metavar="OUT.jsonl")
    parser.add_argument(
        "--workers",
        type=arguments.positive,
        default=os.cpu_count() or 1,
        metavar="N",
        help="processes (default: the cores)",
    )
    args = parser.parse_args(argv)
    from grpo_megatron.evaluation.grading import grade_file

    counts = grade_file(args.task, args.rows, args.output, args.workers)
    print(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()))
    return 0


def _compare(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "evaluate compare", description="Is B better than A? Paired, on the same problems."
    )
    parser.add_argument("a", type=Path, metavar="A.json")
    parser.add_argument("b", type=Path, metavar="B.json")
    parser.add_argument(
        "--any-template", action="store_true", help="also where chat templates made other prompts of the same questions"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    from grpo_megatron.evaluation import comparison
    from grpo_megatron.evaluation.results import read_result

    rows = comparison.compare_results(read_result(args.a), read_result(args.b), any_template=args.any_template)
    print(json.dumps(rows, indent=1) if args.json else comparison.comparison_table(rows))
    return 0


def _tasks(argv: list[str]) -> int:
    argparse.ArgumentParser("evaluate tasks", description="The tasks that are there.").parse_args(argv)
    from grpo_megatron.evaluation.task import read_tasks, task_names

    for task in read_tasks(task_names()):
        spec = task.spec
        train = f"; few-shot: {' or '.join(spec.fewshot.files)}" if spec.fewshot else ""
        print(f"{spec.name} version {spec.version}, sha256 {task.sha256[:12]}: {spec.title}")
        print(f"    in --data: {' or '.join(spec.files)}{train}")
    return 0
