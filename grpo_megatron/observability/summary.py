"""What a run leaves for a person: the table of held-out results before and after, the curves, and where things are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from grpo_megatron.observability.sinks import Sinks, format_table, read_metrics

OUTPUTS = {
    "hf": "the trained model, a Hugging Face folder",
    "curves.png": "learning curves",
    "metrics.jsonl": "every metric of every step",
    "samples": "completions at each evaluation, as text",
    "checkpoints": "what a later run resumes from",
    "warmup": "the model after the supervised warm-up",
    "tensorboard": "the metrics for TensorBoard",
    "config.yaml": "the configuration as it was run",
}


class Summary:
    """Collects evaluation results by step; `show` prints the first beside the last."""

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir
        self.evaluations: dict[str, dict[int, float]] = {}  # metric -> step -> value

    def add(self, step: int, results: Mapping[str, float]) -> None:
        for name, value in results.items():
            self.evaluations.setdefault(name, {})[step] = value

    def recall(self) -> None:
        """What the run evaluated before it was interrupted, from its own metrics.jsonl."""
        with contextlib.suppress(FileNotFoundError):
            for row in read_metrics(self.output_dir / "metrics.jsonl"):
                self.add(row["step"], {name: value for name, value in row.items() if name.startswith("val-")})

    def show(self, sinks: Sinks) -> None:
        """Print the table and the list of files, draw the curves. Rank 0."""
        rows = [
            [name.removeprefix("val-core/").removeprefix("val-aux/"), steps[min(steps)], steps[max(steps)]]
            for name, steps in sorted(
                self.evaluations.items(), key=lambda item: (item[0].startswith("val-aux"), item[0])
            )
            if len(steps) > 1
        ]
        if rows:
            sinks.note("\n" + format_table(rows, ["held-out problems", "before", "after"]))
        with contextlib.suppress(FileNotFoundError):  # no jsonl sink, no curves
            from grpo_megatron.observability.curves import plot  # matplotlib: not for every rank at its start

            plot(self.output_dir / "metrics.jsonl", self.output_dir / "curves.png")
        sinks.note("\n" + "\n".join(self._files()))

    def _files(self) -> Iterator[str]:
        present = [
            (self.output_dir / name, what) for name, what in OUTPUTS.items() if (self.output_dir / name).exists()
        ]
        width = max((len(str(path)) for path, _ in present), default=0)
        for path, what in present:
            yield f"{path!s:<{width}}  {what}"
