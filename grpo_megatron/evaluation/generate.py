"""`generate`: answers to one prompt, to a file of prompts, or in a chat. Exit codes: 0; 2 for a mistake of the user.

One process checks everything. For more than one rank it then starts the ranks; under torchrun it is one of them. Rank 0
writes. Standard output has the answers only.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from grpo_megatron.config import ConfigError
from grpo_megatron.evaluation.ask import Asker
from grpo_megatron.evaluation.chat import hold_chat, show, tell
from grpo_megatron.evaluation.evaluate import StartRanks
from grpo_megatron.evaluation.generate_settings import GenerationSettings, prepare_generation
from grpo_megatron.evaluation.options import GenerateOptions
from grpo_megatron.storage.files import write_file
from grpo_megatron.types import Sample
from grpo_megatron.untrusted import reason_of


def generate(options: GenerateOptions, start_ranks: StartRanks | None) -> int:
    """Answer the prompts, or hold the chat; returns the exit code. Raises ConfigError. `start_ranks`: see run_evaluation."""
    _check_output(options.output)
    settings = prepare_generation(options)
    if options.tp > 1 and start_ranks is not None and "RANK" not in os.environ:
        return start_ranks(options.tp, options.device)
    asker = Asker(settings.model, settings.max_model_len)
    style, is_shown = settings.style, options.output is None and not options.as_json
    if asker.mesh.rank == 0 and style.run is not None:  # it would surprise a user who does not expect it
        tell(f"prompts as in {style.run}: task {style.task} (--task jsonl: as they are)")
    if options.chat:
        hold_chat(settings, asker)
    elif options.samples == 1 and options.prompt is not None and is_shown:
        [(_, [sample])] = asker.ask(settings.prompts, settings.answers, 1)
        show(f"{_text(settings, sample)}\n")
        if sample.finish_reason == "length":
            tell(f"(cut after {len(sample.response_ids)} tokens: --max-tokens)")
    else:
        _write_rows(settings, asker)
    asker.close()
    return 0


def _check_output(output: Path | None) -> None:
    """Check the output before a model is read. Raises ConfigError."""
    if output is None:
        return
    if output.is_dir():
        raise ConfigError(f"--output {str(output)!r} is a folder; name a file")
    try:
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {str(output)!r}: its folder cannot be made ({reason_of(error)})") from error


def _write_rows(settings: GenerationSettings, asker: Asker) -> None:
    """Write one JSON line per answer, to the file or to standard output."""
    output, start, counts = settings.options.output, time.monotonic(), Counter[str]()

    def rows() -> Iterator[str]:
        first = 0
        for prompts, samples in asker.ask(settings.prompts, settings.answers, asker.capacity):
            for sample in samples:
                row = {
                    "row": first + sample.prompt_index,
                    "sample": sample.index,
                    "question": sample.prompt.question,
                    "prompt": sample.prompt.text,
                    "completion": _text(settings, sample),
                    "tokens": len(sample.response_ids),
                    "finish_reason": sample.finish_reason,
                }
                counts.update(answers=1, tokens=len(sample.response_ids))
                yield json.dumps(row, ensure_ascii=False) + "\n"
            first += len(prompts)

    if asker.mesh.rank != 0:
        for _ in rows():
            pass
        return
    if output is None:
        for row in rows():
            show(row)
    else:
        try:
            write_file(output, rows())
        except OSError as error:
            raise ConfigError(f"--output {str(output)!r} cannot be written: {reason_of(error)}") from error
    where = f" in {output}" if output is not None else ""
    tell(f"{counts['answers']} answers{where}, {counts['tokens']} tokens in {time.monotonic() - start:.1f} s")


def _text(settings: GenerationSettings, sample: Sample) -> str:
    return str(settings.model.tokenizer.decode(sample.response_ids, skip_special_tokens=True))
