"""Evaluator: held-out problems on the live engine, with the task's own reward. Draws do not change from step to step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_megatron.config import DataConfig, RolloutConfig
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.sampling.generator import Generator
from grpo_megatron.types import Prompt, Sample

VALIDATION_DRAW = -1  # a step number that training never has: evaluation draws the same way every time


@dataclass(frozen=True)
class Answer:
    """What every rank gets to know of one evaluated sample."""

    prompt_index: int
    index: int
    source: str
    value: float  # `acc` if the reward reports it, else the reward; NaN if it failed
    is_acc: bool
    length: int
    truncated: bool
    scores: tuple[tuple[str, float], ...]
    example: tuple[str, str, str] | None  # prompt, response, gold answer: of the first few only


class Evaluator:
    def __init__(
        self,
        generator: Generator,
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
        """Draw, score, and return the `val-core/...` and `val-aux/...` metrics, the same on every rank. Collective."""
        inner = Metrics()  # its generation seconds belong to `testing`, not to the step's `gen`
        with metrics.phase("testing"):
            samples = self.generator.draw(
                self.prompts,
                self.val.n,
                draw_id=VALIDATION_DRAW,
                version=version,
                max_tokens=self.max_tokens,
                temperature=self.val.temperature,
                top_p=self.val.top_p,
                metrics=inner,
            )
            answers = self._gather(samples)
        if self.mesh.rank == 0 and self.num_logged_samples:
            self._write_examples(version, answers)
        return summarize(answers, self.val.n)

    def _gather(self, samples: Sequence[Sample]) -> list[Answer]:
        mine = [self._answer(sample) for sample in samples] if self.mesh.is_block_leader else []
        answers = [answer for part in self.mesh.all_gather(mine) for answer in part]
        return sorted(answers, key=lambda a: (a.prompt_index, a.index))

    def _answer(self, sample: Sample) -> Answer:
        shown = sample.prompt_index < self.num_logged_samples and sample.index == 0
        extra = {k: v for k, v in sample.reward_metrics.items() if k not in ("acc", "ok", "timeout")}
        return Answer(
            prompt_index=sample.prompt_index,
            index=sample.index,
            source=sample.prompt.source,
            value=sample.reward_metrics.get("acc", sample.reward),
            is_acc="acc" in sample.reward_metrics,
            length=len(sample.response_ids),
            truncated=sample.finish_reason == "length",
            scores=tuple(sorted(extra.items())),
            example=(sample.prompt.text, sample.text, sample.prompt.answer) if shown else None,
        )

    def _write_examples(self, version: int, answers: Sequence[Answer]) -> None:
        folder = self.output_dir / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        parts = [
            f"--- prompt\n{a.example[0]}\n--- response ({a.length} tokens{', truncated' if a.truncated else ''}, "
            f"scored {a.value:g})\n{a.example[1]}\n--- gold answer\n{a.example[2]}\n"
            for a in answers
            if a.example is not None
        ]
        (folder / f"step_{version:06d}.txt").write_text("\n".join(parts))


def summarize(answers: Sequence[Answer], n: int) -> dict[str, float]:
    """Per source: mean over samples, unbiased pass@n for 0/1 values, lengths, truncation, failures of the reward.

    A sample whose reward failed counts as wrong (0), and is reported.
    """
    out: dict[str, float] = {}
    for source in sorted({a.source for a in answers}):
        mine = [a for a in answers if a.source == source]
        kind = "acc" if any(a.is_acc for a in mine) else "reward"
        values = [0.0 if math.isnan(a.value) else a.value for a in mine]
        out[f"val-core/{source}/{kind}/mean@{n}"] = sum(values) / len(values)
        if n > 1 and set(values) <= {0.0, 1.0}:
            solved = {a.prompt_index for a, value in zip(mine, values, strict=True) if value}
            out[f"val-core/{source}/{kind}/pass@{n}"] = len(solved) / len({a.prompt_index for a in mine})
        aux = f"val-aux/{source}"
        out[f"{aux}/response_length/mean"] = sum(a.length for a in mine) / len(mine)
        out[f"{aux}/truncated_ratio"] = sum(a.truncated for a in mine) / len(mine)
        out[f"{aux}/reward_failed_ratio"] = sum(math.isnan(a.value) for a in mine) / len(mine)
        for name in sorted({name for a in mine for name, _ in a.scores}):
            reported = [value for a in mine for key, value in a.scores if key == name]
            out[f"{aux}/{name}/mean"] = sum(reported) / len(reported)
    return out
