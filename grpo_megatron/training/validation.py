"""Validator: the run's engine answers held-out problems, the task's own reward grades them. The seeds never change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_megatron.config import DataConfig, RolloutConfig
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.sampling.failures import is_declined
from grpo_megatron.sampling.generator import Generator
from grpo_megatron.types import Prompt, Sample

VALIDATION_DRAW = -1  # a draw id that no training step has


@dataclass(frozen=True)
class ValidationRow:
    """One sample, as gathered on every rank."""

    prompt_index: int
    index: int
    source: str
    value: float  # `acc` if the reward function reports it, else the reward; NaN if it failed
    is_acc: bool
    length: int  # response tokens
    truncated: bool
    reward_metrics: tuple[tuple[str, float], ...]  # and what the environment reports
    example: tuple[str, str, str, str] | None  # prompt, response, notes, answer; only of the first few prompts


class Validator:
    def __init__(
        self,
        generator: Generator | None,
        prompts: Sequence[Prompt],
        data: DataConfig,
        rollout: RolloutConfig,
        mesh: Mesh,
        output_dir: Path,
        num_logged_samples: int,
    ) -> None:
        self.generator, self.prompts, self.mesh = generator, list(prompts), mesh
        self.max_tokens, self.val = data.max_response_length, rollout.val_kwargs
        self.output_dir, self.num_logged_samples = output_dir, num_logged_samples

    def run(self, version: int, metrics: Metrics) -> dict[str, float]:
        """Draw, grade, and return the `val-core/...` and `val-aux/...` metrics, the same on every rank. Collective."""
        assert self.generator is not None, "a run that validates by drawing has an engine"
        discarded = Metrics()  # generation here counts as `testing`, not as the step's `gen`
        with metrics.phase("testing"):
            samples = self.generator.draw(
                self.prompts,
                self.val.n,
                draw_id=VALIDATION_DRAW,
                version=version,
                max_tokens=self.max_tokens,
                temperature=self.val.temperature,
                top_p=self.val.top_p,
                metrics=discarded,
            )
            rows = self._gather(samples)
        if self.mesh.rank == 0 and self.num_logged_samples:
            self._write_examples(version, rows)
        return summarize(rows, self.val.n)

    def _gather(self, samples: Sequence[Sample]) -> list[ValidationRow]:
        local_rows = (
            [self._row(sample) for sample in samples if not is_declined(sample)] if self.mesh.is_block_leader else []
        )
        rows = [row for rows_of_rank in self.mesh.all_gather(local_rows) for row in rows_of_rank]
        return sorted(rows, key=lambda row: (row.prompt_index, row.index))

    def _row(self, sample: Sample) -> ValidationRow:
        is_logged = sample.prompt_index < self.num_logged_samples and sample.index == 0
        extra = {k: v for k, v in sample.reward_metrics.items() if k not in ("acc", "ok", "timeout")}
        if sample.turns:
            extra |= {"turns": float(sum(t.kind == "assistant" for t in sample.turns)), **sample.trajectory_metrics}
        return ValidationRow(
            prompt_index=sample.prompt_index,
            index=sample.index,
            source=sample.prompt.source,
            value=sample.reward_metrics.get("acc", sample.reward),
            is_acc="acc" in sample.reward_metrics,
            length=len(sample.response_ids),
            truncated=sample.finish_reason == "length",
            reward_metrics=tuple(sorted(extra.items())),
            example=(sample.prompt.text, sample.text, _notes(sample), sample.prompt.answer) if is_logged else None,
        )

    def _write_examples(self, version: int, rows: Sequence[ValidationRow]) -> None:
        folder = self.output_dir / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        parts = []
        for row in rows:
            if row.example is None:
                continue
            prompt, response, notes, answer = row.example
            score = "-" if math.isnan(row.value) else f"{row.value:g}"
            about = f"{row.length} tokens{', truncated' if row.truncated else ''}, scored {score}"
            response = f"--- response ({about})\n{response}\n{notes}"
            parts.append(f"--- prompt\n{prompt}\n{response}--- reference answer\n{answer}\n")
        text = "\n".join(parts)
        (folder / f"step_{version:06d}.txt").write_text(text, encoding="utf-8", errors="backslashreplace")


def _notes(sample: Sample) -> str:
    """What the reward function says of a sample besides numbers."""
    notes = [f"{name}: {text}\n" for name, text in sample.reward_texts.items()]
    if sample.reward_failure:
        notes.append(f"{sample.reward_failure}\n")
    return "".join(["--- reward\n", *notes]) if notes else ""


def summarize(rows: Sequence[ValidationRow], n: int) -> dict[str, float]:
    """Per source: mean over samples, unbiased pass@n for 0/1 values, lengths, truncation, failures of the reward.

    A sample whose reward failed counts as wrong (0), and as a failure. Where all failed there is no mean.
    """
    metrics: dict[str, float] = {}
    for source in sorted({row.source for row in rows}):
        metrics |= _summarize_source(source, [row for row in rows if row.source == source], n)
    return metrics


def _summarize_source(source: str, rows: Sequence[ValidationRow], n: int) -> dict[str, float]:
    kind = "acc" if any(row.is_acc for row in rows) else "reward"
    values = [0.0 if math.isnan(row.value) else row.value for row in rows]
    core, aux = f"val-core/{source}/{kind}", f"val-aux/{source}"
    metrics: dict[str, float] = {}
    is_scored = not all(math.isnan(row.value) for row in rows)
    if is_scored:
        metrics[f"{core}/mean@{n}"] = sum(values) / len(values)
    if is_scored and n > 1 and set(values) <= {0.0, 1.0}:
        solved = {row.prompt_index for row, value in zip(rows, values, strict=True) if value}
        metrics[f"{core}/pass@{n}"] = len(solved) / len({row.prompt_index for row in rows})
    metrics[f"{aux}/response_length/mean"] = sum(row.length for row in rows) / len(rows)
    metrics[f"{aux}/truncated_ratio"] = sum(row.truncated for row in rows) / len(rows)
    metrics[f"{aux}/reward_failed_ratio"] = sum(math.isnan(row.value) for row in rows) / len(rows)
    for name in sorted({name for row in rows for name, _ in row.reward_metrics}):
        reported = [value for row in rows for key, value in row.reward_metrics if key == name]
        metrics[f"{aux}/{name}/mean"] = sum(reported) / len(reported)
    return metrics
