"""`evaluate` and its actions grade and tasks, and `evaluate()` of Python. Exit codes: 0; 2 for a mistake of the user.

One process checks everything. For more than one rank it then starts the ranks; under torchrun it is one of them. The samples
go to the ledger batch by batch. If it has all of them, no engine is started.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.config.problems import counted
from grpo_megatron.data.task import get_tasks, task_names
from grpo_megatron.evaluation import page as report
from grpo_megatron.evaluation import results
from grpo_megatron.evaluation.ask import Asker
from grpo_megatron.evaluation.card import write_card
from grpo_megatron.evaluation.comparison import check_against, print_against
from grpo_megatron.evaluation.grading import GRADER_TIMEOUT_S, grade_file
from grpo_megatron.evaluation.ledger import Ledger, LedgerEntry, PlayedTurn, claim_output, write_identity
from grpo_megatron.evaluation.options import EvaluateOptions, GradeOptions, TasksOptions
from grpo_megatron.evaluation.settings import EvaluationSettings, TaskRun, prepare
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.storage.files import write_file
from grpo_megatron.types import BRANCH, Sample
from grpo_megatron.untrusted import visible, visible_line

REPORT_EVERY_S = 10.0
StartRanks = Callable[[int, str], int]  # (world size, device) -> exit code: starts the ranks of this machine


def evaluate(
    model: Path | str,
    tasks: str | Sequence[str] = (),
    output: Path | str | None = None,
    *,
    data: Path | str | None = None,
    samples: int = 1,
    limit: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Sample and grade answers in this process; returns the content of `output`/results.json.

    `model`: a Hugging Face folder, a converted checkpoint, or a training step. `tasks`: names, or paths of task files, as a
    list or as one text with commas; none: the rows of `file`, which `reward` grades. `data`: the folder with the benchmarks'
    files. `samples`: per problem besides the greedy one; 1: only the greedy one. `limit`: only the first problems.
    `options`: other fields of EvaluateOptions, such as `max_tokens=256`.

    Samples that `output` has are not generated again. Raises ConfigError; RankError where memory or weights are missing.
    """
    given: dict[str, Any] = {"model": model, "output": output, "data": data, "tasks": tasks}
    chosen = EvaluateOptions(**given, samples=samples, limit=limit, **options)

    def refuse(ranks: int, device: str) -> int:
        raise ConfigError(
            f"tp x dp = {ranks} ranks, and evaluate() is one process; leave tp and dp out, or use the command"
        )

    run_evaluation(chosen, refuse)
    return results.read_result(chosen.folder / "results.json")


def run_evaluation(options: EvaluateOptions, start_ranks: StartRanks | None) -> int:
    """Sample, grade and report; returns the exit code. One process owns the output folder: the user's, or torchrun's rank 0.

    `start_ranks` is None in a rank that this program has started: the process that started it owns the folder.
    """
    is_rank = "RANK" in os.environ
    num_ranks = _num_ranks(options, is_rank)
    settings = prepare(options)
    if options.against is not None:
        check_against(options.against, settings)
    is_owner = start_ranks is not None and os.environ.get("RANK", "0") == "0"
    with claim_output(options.folder) if is_owner else contextlib.nullcontext():
        if is_owner:
            write_identity(options.folder, settings.identity())
        if not is_rank and all(
            set(run.keys()) <= Ledger(options.folder, run.name).read().keys() for run in settings.runs
        ):
            print("every sample is in the folder already: no engine is started", flush=True)
        elif start_ranks is not None and not is_rank and num_ranks > 1:
            if code := start_ranks(num_ranks, options.device):
                return code
        else:
            asker = Asker(settings.model, settings.max_model_len)
            for run in settings.runs:
                complete_ledger(settings, run, asker)
            asker.close()
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


# -- Sampling ----------------------------------------------------------------------------------------------------------


def complete_ledger(settings: EvaluationSettings, run: TaskRun, asker: Asker) -> None:
    """Sample what the ledger lacks of one task. Collective. Raises RankError when environments are lost."""
    ledger, mesh, options = Ledger(settings.options.folder, run.name), asker.mesh, settings.options
    # rank 0 reads for all: a network file system may show other ranks an older ledger
    done = mesh.broadcast(set(ledger.read()) if mesh.rank == 0 else set())
    total, num_done = len(run.keys()), len(done & set(run.keys()))
    if num_done and mesh.rank == 0:
        print(f"{run.name}: {num_done} of {total} samples are in the folder already", flush=True)
    start = last = time.monotonic()
    num_tokens, size = 0, options.batch_size * mesh.num_engine_replicas
    for batch, samples in asker.ask(run.prompts.prompts, run.answers, size, done):
        stop, tokenizer = run.answers.stop, settings.model.tokenizer
        entries = [ledger_entry(sample, stop, tokenizer) for sample in samples if sample.index < BRANCH]
        if mesh.is_replica_leader:
            ledger.append(mesh.engine_replica, entries)
        num_done += sum((prompt.uid, index) not in done for prompt in batch for index in run.answers.indices)
        num_tokens += sum(entry.num_tokens for entry in entries)
        if mesh.rank == 0 and (time.monotonic() - last >= REPORT_EVERY_S or num_done == total):
            last = time.monotonic()
            rate = num_tokens / (last - start)
            print(f"{run.name}: {num_done} of {total} samples, {rate:,.0f} tokens/s per replica", flush=True)
    mesh.barrier()


def ledger_entry(sample: Sample, stop: Sequence[str], tokenizer: Any) -> LedgerEntry:
    """Write a sample as text: cut at the first stop text, or turn by turn; then the last turn is what the graders read."""

    def decoded(start: int, end: int, *, plain: bool) -> str:
        return str(tokenizer.decode(sample.response_ids[start:end], skip_special_tokens=plain))

    uid, index, reason = sample.prompt.uid, sample.index, sample.finish_reason
    if not sample.turns and sample.status == "ok":
        text, num_tokens, was_cut = cut_at_stop(sample.response_ids, stop, tokenizer)
        return LedgerEntry(uid, index, text, num_tokens, "stop" if was_cut else reason)
    written = [turn for turn in sample.turns if turn.kind == "assistant"]
    return LedgerEntry(
        uid,
        index,
        decoded(written[-1].start, written[-1].end, plain=True) if written else "",
        sum(turn.end - turn.start for turn in written),
        reason,
        turns=[PlayedTurn(turn.kind, decoded(turn.start, turn.end, plain=False)) for turn in sample.turns],
        status=sample.status,
        reward=sample.earned + sum(reward for _, reward in sample.turn_rewards),
    )


def cut_at_stop(token_ids: list[int], stop: Sequence[str], tokenizer: Any) -> tuple[str, int, bool]:
    """Cut at the first stop text: the text before it, the tokens up to and with it, and whether there was one."""

    def decoded(length: int) -> str:
        return str(tokenizer.decode(token_ids[:length], skip_special_tokens=True))

    text = decoded(len(token_ids))
    places = [text.find(one) for one in stop if one in text]
    if not places:
        return text, len(token_ids), False
    lengths = range(len(token_ids) + 1)  # the fewest tokens with a stop text
    fewest = bisect.bisect_left(lengths, True, key=lambda length: any(one in decoded(length) for one in stop))
    return text[: min(places)], fewest, True


# -- Grading, and the other actions ------------------------------------------------------------------------------------


def _grade_and_report(settings: EvaluationSettings) -> None:
    """Grade all samples, write OUT/samples, results.json, report.html, card.md and card.json, print the tables.

    Tasks that the folder has from earlier commands stay in all three.
    """
    options, samples = settings.options, settings.options.folder / "samples"
    path = options.folder / "results.json"
    tasks = results.read_result(path)["tasks"] if path.exists() else {}
    again = {run.name for run in settings.runs}
    graded = {name: results.read_samples(samples / f"{name}.jsonl") for name in tasks if name not in again}
    kwargs = {"unsafe": True} if options.unsafe else {}
    with RewardPool(options.workers, GRADER_TIMEOUT_S, kwargs) as pool:
        for run in settings.runs:
            start = time.monotonic()
            problems = graded[run.name] = results.grade_task(settings, run, pool)
            done = f"{run.name}: {counted(len(run.keys()), 'sample')} graded"
            print(f"{done} in {time.monotonic() - start:.1f} s", flush=True)
            for text in results.grader_failures(problems):
                print(text, flush=True)
            results.write_samples(samples / f"{run.name}.jsonl", run, problems)
            tasks[run.name] = results.task_result(run, problems, pool)
    result = results.whole_result(settings, tasks)
    write_file(options.folder / "report.html", report.render_page(result, graded))
    write_card(options.folder, result, options.contamination)
    # last, so that it exists only with all other files
    write_file(path, json.dumps(result, indent=1) + "\n")
    shutil.rmtree(options.folder / "grades", ignore_errors=True)
    print(
        f"\n{visible(results.result_tables(result))}\n\nwrote {options.folder}/results.json, samples/, report.html, card.md"
    )
    if options.against is not None:
        print_against(options.against, options.folder)


def grade_rows(options: GradeOptions) -> int:
    """Grade the completions of a file; returns the exit code."""
    counts = grade_file(options.task, options.rows, options.output, options.workers, unsafe=options.unsafe)
    print(", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()))
    return 0


def list_tasks(options: TasksOptions) -> int:
    """Print the built-in tasks and the files that they need; returns the exit code."""
    for task in get_tasks(task_names()):
        print(f"{task.name} version {task.version}, sha256 {task.sha256[:12]}: {visible_line(task.title)}")
        files = f"in --data: {' or '.join(task.files)}" if task.files else f"--file {task.name}=PATH"
        fewshot = task.fewshot
        examples = f"{len(fewshot.examples)} of its own" if fewshot and fewshot.examples else ""
        examples = " or ".join(fewshot.files) if fewshot and not examples else examples
        print(f"    {files}{f'; few-shot: {examples}' if fewshot else ''}")
    return 0
