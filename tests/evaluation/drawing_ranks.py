"""What the ranks of a world do for test_run.py: draw all samples, once whole and once with an interruption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from grpo_megatron.config.options import parse
from grpo_megatron.device import Device
from grpo_megatron.evaluation import run
from grpo_megatron.evaluation.engine import WEIGHTS_VERSION
from grpo_megatron.evaluation.ledger import Ledger, LedgerEntry, claim_output, write_identity
from grpo_megatron.evaluation.options import EvaluateOptions
from grpo_megatron.evaluation.settings import EvaluationSettings, prepare
from grpo_megatron.generation.cli import generate
from grpo_megatron.generation.options import GenerateOptions
from grpo_megatron.parallel.mesh import build_mesh, destroy_mesh
from grpo_megatron.rollout.engine import Request, StopTexts

SETTINGS: dict[str, Any] = {"tasks": ["gsm8k", "math"], "samples": 3, "max_tokens": 12, "temperature": 1.0}


def options(model: Path, data: Path, output: Path) -> EvaluateOptions:
    return EvaluateOptions(model=model, data=data, output=output, device="cpu", batch_size=9, **SETTINGS)


class Killed(Exception):
    pass


def draw_all(model: Path, data: Path, output: Path, interrupted: Path | None) -> dict[str, Any]:
    """Draw into `output`; with `interrupted`, also into that folder: killed while writing the second batch, then continued.

    Returns how often the engine generated in each, and the tokens of a greedy completion.
    """
    settings = prepare(options(model, data, output))
    device = Device("cpu")
    mesh = build_mesh(device, tp=1, pp=1, rollout_tp=1)
    engine = run._build_engine(settings, mesh, device)
    facts: dict[str, Any] = {"calls": []}

    def draw(target: Path) -> None:
        again = prepare(options(model, data, target))
        if mesh.rank == 0:
            with claim_output(target):
                write_identity(target, again.identity())
        mesh.barrier()
        with mock.patch.object(engine, "generate", wraps=engine.generate) as generate:
            try:
                for selected in again.selected:
                    run.draw_task(again, selected, engine, mesh)
            finally:
                facts["calls"].append(generate.call_count)

    draw(output)
    if interrupted is not None:
        append = Ledger.append

        def torn(self: Ledger, block: int, rows: list[LedgerEntry]) -> None:
            append(self, block, rows)
            file = self.folder / f"block_{block:04d}.jsonl"
            if file.read_bytes().count(b"\n") > 9:  # in the second batch: keep half of it
                file.write_bytes(file.read_bytes()[:-500])
                raise Killed

        with mock.patch.object(Ledger, "append", torn):
            try:
                draw(interrupted)
            except Killed:
                facts["torn"] = True
        draw(interrupted)
        draw(interrupted)
    prompt = settings.selected[0].prompts.prompts[0]
    facts["greedy"] = engine.generate([Request(prompt.prompt_ids, 0, 12, temperature=0.0)], WEIGHTS_VERSION)[
        0
    ].response_ids
    facts["stops"] = stops_draw_less(settings, engine)
    engine.shutdown()
    destroy_mesh()
    return facts


def generate_over_ranks(argv: list[str]) -> None:
    """The command `generate` on each rank of a world."""
    assert generate(parse(GenerateOptions, argv), None) == 0


def stops_draw_less(settings: EvaluationSettings, engine: Any) -> tuple[list[LedgerEntry], list[LedgerEntry], int, int]:
    """Entries of one task whose engine knows no stop text, the same when it does, and the tokens that each has drawn."""
    selected = settings.selected[0]
    everything = selected.requests()

    def draw(stop: StopTexts | None) -> list[Any]:
        requests = [run._request(settings, selected, prompt, index, stop) for prompt, index in everything]
        return list(engine.generate(requests, WEIGHTS_VERSION))

    whole = draw(None)
    texts = [settings.tokenizer.decode(c.response_ids, skip_special_tokens=True) for c in whole]
    letters = sorted({next((c for c in text if c.isascii() and c.isprintable()), "x") for text in texts[:6]})
    selected = replace(selected, prompts=replace(selected.prompts, stop=letters))
    early = draw(StopTexts(settings.tokenizer, letters))
    entries = [
        [run._ledger_entry(settings, selected, p, i, c) for (p, i), c in zip(everything, drawn, strict=True)]
        for drawn in (whole, early)
    ]
    return entries[0], entries[1], *(sum(len(c.response_ids) for c in drawn) for drawn in (whole, early))
