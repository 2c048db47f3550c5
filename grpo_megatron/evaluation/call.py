"""Evaluation from Python: `evaluate(model, tasks, output)`, with the options of the command as keyword arguments."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.config import ConfigError
from grpo_megatron.evaluation.arguments import parse_arguments
from grpo_megatron.evaluation.cli import run_evaluation
from grpo_megatron.evaluation.results import read_result


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
    return read_result(Path(output) / "results.json")


def _refuse(ranks: int, argv: list[str], device: str) -> int:
    raise ConfigError(
        f"tp x dp = {ranks} ranks, and evaluate() is one process; leave tp and dp out, or use the command"
    )
