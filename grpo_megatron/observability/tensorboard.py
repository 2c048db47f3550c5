"""TensorBoard: scalars, an overview of the main ones, samples as text, and the config with the results.

`tensorboard --logdir OUTPUT_DIR/tensorboard`. The run has the name of trainer.experiment_name. The overview is on the tab
"Custom scalars".
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.observability.sink import ShownGroups, Sink
from grpo_megatron.report.panels import OTHER, page_panels
from grpo_megatron.report.run_folder import flat_config
from grpo_megatron.report.visible_text import visible

MAX_TEXTS = 20  # steps of a run whose samples are written
RESULTS = ("critic/score/mean", "actor/entropy", "response_length/mean", "perf/throughput")  # beside the config
VALUE_TYPES = (bool, int, float, str)


class TensorBoardSink(Sink):
    def __init__(
        self,
        folder: Path,
        first_step: int = 0,
        total_steps: int = 1,
        name: str = "run",
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        run_name = re.sub(r"[^\w.-]+", "_", name).lstrip(".") or "run"  # a folder
        self._writer = SummaryWriter(str(folder / run_name), purge_step=first_step)
        self._every, self._config, self._has_overview = max(1, total_steps // MAX_TEXTS), run_config or {}, False

    def show(self, step: int, groups: Callable[[], ShownGroups]) -> None:
        if step % self._every == 0:
            for number, group in enumerate(groups()):
                self._writer.add_text(f"samples/{number}", group_text(group), step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._has_overview:
            self._has_overview = True
            self._writer.add_custom_scalars(overview(sorted(metrics)))
            self._add_config([name for name in metrics if name in RESULTS or name.startswith("val-core/")])
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def _add_config(self, results: Sequence[str]) -> None:
        """The tab "HParams" shows the config beside the last values of these metrics."""
        from torch.utils.tensorboard.summary import hparams

        settings = {key: v if isinstance(v, VALUE_TYPES) else str(v) for key, v in flat_config(self._config).items()}
        for summary in hparams(settings, dict.fromkeys(results, 0.0)) if settings else ():
            self._writer._get_file_writer().add_summary(summary)

    def close(self) -> None:
        self._writer.close()


def overview(names: Sequence[str]) -> dict[str, Any]:
    """The panels of the report as charts. A metric that appears in later steps only, such as a validation's, is in none."""
    layout: dict[str, dict[str, Any]] = {}
    for panel in page_panels(names, {}):
        if panel.group != OTHER:
            charts = layout.setdefault(panel.group, {})
            charts[panel.title] = ["Multiline", [f"^{re.escape(name)}$" for name, _ in panel.curves]]
    return layout


def group_text(group: Mapping[str, Any]) -> str:
    """A prompt and its samples as Markdown, in which each text is a block of code."""
    parts = [_block(group["prompt"]), f"reference answer\n{_block(group['answer'])}"]
    for sample in group["samples"]:
        numbers = [f"{name} {sample[name]:g}" for name in ("reward", "advantage") if _is_finite(sample[name])]
        text = "".join(piece[0] for piece in sample["pieces"])
        head = ", ".join([*numbers, f"{sample['tokens']} tokens"])
        parts.append(f"**sample {sample['index']}** {head}\n{_block(text)}")
    return "\n\n".join(parts)


def _block(text: str) -> str:
    """Indented, which no text can end."""
    return "\n" + "\n".join(f"    {line}" for line in visible(text).splitlines() or [""]) + "\n"


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
