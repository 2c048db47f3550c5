"""`generate`: answers to one prompt, to a file of prompts, or in a chat. Exit codes: 0; 2 for a mistake of the user.

One process checks everything. For more than one rank it then starts the ranks; under torchrun it is one of them. Rank 0
writes. Standard output has the answers only.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_megatron.config import ConfigError
from grpo_megatron.generation.arguments import parse_generation

if TYPE_CHECKING:
    from grpo_megatron.generation.drawing import Answerer
    from grpo_megatron.generation.settings import GenerationSettings


def main(argv: list[str], start_ranks: Callable[[int, list[str], str], int], is_rank: bool = False) -> int:
    """Do what `argv` says; returns the exit code. Raises ConfigError. `start_ranks` as in evaluation/cli.py."""
    args = parse_generation(argv)
    _check_output(args.output)
    from grpo_megatron.generation.settings import prepare_generation

    settings = prepare_generation(args)
    if args.chat:
        from grpo_megatron.generation.chat import check_chat

        check_chat(settings.tokenizer.chat_template)
    if args.tp > 1 and not is_rank:
        return start_ranks(args.tp, ["generate", *argv], args.device)
    _run_generation(args, settings)
    return 0


def _check_output(output: Path | None) -> None:
    """Before a model is read. Raises ConfigError."""
    if output is None:
        return
    if output.is_dir():
        raise ConfigError(f"--output {str(output)!r} is a folder; name a file")
    try:
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {str(output)!r}: its folder cannot be made ({error.strerror})") from error


def _run_generation(args: argparse.Namespace, settings: GenerationSettings) -> None:
    from grpo_megatron.generation.drawing import Answerer
    from grpo_megatron.parallel.mesh import destroy_mesh

    answerer = Answerer(settings, args)
    if answerer.mesh.rank == 0:
        _say_style(settings)
    if args.chat:
        from grpo_megatron.generation.chat import hold_chat

        hold_chat(answerer)
    elif args.samples == 1 and args.prompt is not None and args.output is None and not args.json:
        [[answer]] = answerer.all_answers()
        print(answer.text, flush=True)
        if answer.finish_reason == "length":
            print(f"(cut after {answer.num_tokens} tokens: --max-tokens)", file=sys.stderr)
    else:
        _write_rows(args, answerer)
    answerer.engine.shutdown()
    destroy_mesh()


def _say_style(settings: GenerationSettings) -> None:
    """Prompts that are rendered in the way of a run would surprise a user who does not know."""
    style = settings.style
    if style.run is not None:
        print(f"prompts as in {style.run}: task {style.task} (--task jsonl: as they are)", file=sys.stderr)


def _write_rows(args: argparse.Namespace, answerer: Answerer) -> None:
    from grpo_megatron.storage.atomic import write_file

    start, counts = time.monotonic(), [0, 0]
    rows = _rows(answerer, counts)
    if answerer.mesh.rank != 0:
        for _ in rows:
            pass
        return
    if args.output is not None:
        try:
            write_file(args.output, rows)
        except OSError as error:
            raise ConfigError(f"--output {str(args.output)!r} cannot be written: {error.strerror}") from error
    else:
        for row in rows:
            sys.stdout.write(row)
            sys.stdout.flush()
    seconds = time.monotonic() - start
    where = f" in {args.output}" if args.output is not None else ""
    print(f"{counts[0]} answers{where}, {counts[1]} tokens in {seconds:.1f} s", file=sys.stderr)


def _rows(answerer: Answerer, counts: list[int]) -> Iterator[str]:
    """One JSON line per answer. `counts`: answers and tokens so far."""
    prompts = answerer.settings.prompts
    for number, (prompt, answers) in enumerate(zip(prompts, answerer.all_answers(), strict=True)):
        for answer in answers:
            row: dict[str, Any] = {
                "row": number,
                "sample": answer.sample,
                "question": prompt.question,
                "prompt": prompt.text,
                "completion": answer.text,
                "tokens": answer.num_tokens,
                "finish_reason": answer.finish_reason,
            }
            counts[0] += 1
            counts[1] += answer.num_tokens
            yield json.dumps(row, ensure_ascii=False) + "\n"
