"""Loggers: the sinks that `trainer.logger` names. Weights & Biases, SwanLab, MLflow and TensorBoard are one class each.

The run of a tracker has the project trainer.project_name, the name trainer.experiment_name and the tags trainer.tags. Its
id is in a file of the output folder: a resumed run goes on in the tracker's run, and a run from step 0 is a new one there.
Credentials, hosts and offline modes are the packages' own settings (WANDB_MODE=offline, SWANLAB_MODE=offline,
MLFLOW_TRACKING_URI).
"""

from __future__ import annotations

import importlib
import math
import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from grpo_megatron.config import ConfigError, TrainerConfig
from grpo_megatron.observability.console import ConsoleSink, console_columns
from grpo_megatron.observability.sinks import JsonlSink, ReportSink, ShownGroups, Sink, Sinks
from grpo_megatron.pages.kit import visible
from grpo_megatron.pages.panels import OTHER, page_panels
from grpo_megatron.pages.run_folder import METRICS_FILE, flat_config
from grpo_megatron.storage.run_files import add_event

TRACKERS = ("wandb", "swanlab", "mlflow")  # names in trainer.logger, and of the packages
MAX_PARAMETERS = 100  # that MLflow accepts in one call
STEP_METRIC = "training/global_step"  # every training step has it
LONGEST_PARAMETER = 500  # characters that every MLflow server accepts


class TrackedRun(NamedTuple):
    """What a tracker shows of a run. With `first_step` 0 it is a new run of the tracker."""

    output_dir: Path
    project: str
    name: str
    tags: tuple[str, ...]
    first_step: int
    config: Mapping[str, Any]

    def id_file(self, tracker: str) -> Path:
        return self.output_dir / f"{tracker}_run_id"

    def kept_id(self, tracker: str) -> str | None:
        """The id of the tracker's run that goes on; None for a new run."""
        file = self.id_file(tracker)
        return file.read_text().strip() if self.first_step > 0 and file.exists() else None

    def keep_id(self, tracker: str, run_id: str) -> str:
        self.id_file(tracker).write_text(run_id)
        return run_id

    def id_of_eight(self, tracker: str) -> str:
        """The kept id, or a new one that is kept."""
        return self.kept_id(tracker) or self.keep_id(tracker, uuid.uuid4().hex[:8])


class WandbSink(Sink):
    """Weights & Biases. Its project is WANDB_PROJECT where that is set."""

    def __init__(self, run: TrackedRun) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", run.project),
            name=run.name,
            id=run.id_of_eight("wandb"),
            resume="allow",
            dir=str(run.output_dir),
            config=dict(run.config),
            tags=list(run.tags),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class SwanLabSink(Sink):
    """SwanLab."""

    def __init__(self, run: TrackedRun) -> None:
        self._swanlab = importlib.import_module("swanlab")
        self._swanlab.init(
            project=run.project,
            experiment_name=run.name,
            id=run.id_of_eight("swanlab"),
            resume="allow",
            logdir=str(run.output_dir / "swanlog"),
            config=dict(run.config),
            tags=list(run.tags),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._swanlab.log(_finite_only(metrics), step=step)

    def close(self) -> None:
        self._swanlab.finish()


class MlflowSink(Sink):
    """MLflow. The project is its experiment. Without MLFLOW_TRACKING_URI the run is in the database OUTPUT_DIR/mlflow.db."""

    def __init__(self, run: TrackedRun) -> None:
        self._mlflow = importlib.import_module("mlflow")
        if "MLFLOW_TRACKING_URI" not in os.environ:
            self._mlflow.set_tracking_uri(f"sqlite:///{run.output_dir.resolve() / 'mlflow.db'}")
        self._mlflow.set_experiment(run.project)
        kept = run.kept_id("mlflow")
        started = self._mlflow.start_run(run_id=kept, run_name=run.name, tags=dict.fromkeys(run.tags, "true"))
        run.keep_id("mlflow", started.info.run_id)
        self._last_step = -1
        if kept is None:
            self._log_config(run.config)
        else:
            history = self._mlflow.MlflowClient().get_metric_history(kept, STEP_METRIC)
            self._last_step = max((metric.step for metric in history), default=-1)

    def _log_config(self, config: Mapping[str, Any]) -> None:
        parameters = [(key, str(value)[:LONGEST_PARAMETER]) for key, value in flat_config(config).items()]
        for first in range(0, len(parameters), MAX_PARAMETERS):
            self._mlflow.log_params(dict(parameters[first : first + MAX_PARAMETERS]))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """MLflow's names have no `@`: `mean@1` becomes `mean_at_1`. It would keep both values of a repeated step."""
        if step <= self._last_step:
            return
        values = {name.replace("@", "_at_"): value for name, value in _finite_only(metrics).items()}
        self._mlflow.log_metrics(values, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _finite_only(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


TRACKER_SINKS: dict[str, type[WandbSink] | type[SwanLabSink] | type[MlflowSink]] = {
    "wandb": WandbSink,
    "swanlab": SwanLabSink,
    "mlflow": MlflowSink,
}


# -- TensorBoard -------------------------------------------------------------------------------------------------------
# Scalars, an overview of the main ones, samples as text, and the config with the results.
# `tensorboard --logdir OUTPUT_DIR/tensorboard`. The run has the name of trainer.experiment_name. The overview is on the tab
# "Custom scalars".

MAX_TEXTS = 20  # steps of a run whose samples are written
RESULTS = ("critic/score/mean", "actor/entropy", "response_length/mean", "perf/throughput")  # beside the config
VALUE_TYPES = (bool, int, float, str)


class TensorBoardSink(Sink):
    """TensorBoard's files: scalars at every step, samples at about MAX_TEXTS steps."""

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
    """Lay out the report's panels as charts. A metric that appears only in later steps, such as a validation's, is in none."""
    layout: dict[str, dict[str, Any]] = {}
    for panel in page_panels(names, {}):
        if panel.group != OTHER:
            charts = layout.setdefault(panel.group, {})
            charts[panel.title] = ["Multiline", [f"^{re.escape(name)}$" for name, _ in panel.curves]]
    return layout


def group_text(group: Mapping[str, Any]) -> str:
    """Format a prompt and its samples as Markdown, in which each text is a block of code."""
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


# -- the sinks of a run ------------------------------------------------------------------------------------------------


def check_loggers(names: Sequence[str]) -> None:
    """Raise ConfigError if a logger's package is missing. Every rank checks for itself, before any process group."""
    for package in sorted({"tensorboard", *TRACKERS}.intersection(names)):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(
                f"trainer.logger={list(names)}: the package {package!r} does not import ({error}); "
                f"pip install {package}, or take {package!r} out of trainer.logger"
            ) from error


def build_sinks(
    config: TrainerConfig,
    *,
    rank: int = 0,
    first_step: int = 0,
    run_config: Mapping[str, Any] | None = None,
    stream: TextIO | None = None,
) -> Sinks:
    """Build the sinks of `trainer.logger`, metrics.jsonl and the report, in `trainer.output_dir`; on rank 0 only.

    `first_step`: the step that this run starts with. Later steps of an earlier run are dropped. `run_config` is recorded
    by TensorBoard and the trackers. `stream`: the console, standard output by default. Raises ConfigError on every rank if a
    package is missing.
    """
    check_loggers(config.logger)
    if rank != 0:
        return Sinks()
    folder = config.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    add_event(folder, "resumed" if first_step else "started", first_step)
    name = config.experiment_name or folder.resolve().name
    sinks: list[Sink] = []
    for logger in dict.fromkeys([*config.logger, "jsonl"]):  # always: the report is made of it
        if logger == "console":
            sinks.append(ConsoleSink(config.total_training_steps, first_step, stream, console_columns(run_config)))
        elif logger == "jsonl":
            sinks += [JsonlSink(folder / METRICS_FILE, first_step), ReportSink(folder, first_step)]
        elif logger == "tensorboard":
            steps = config.total_training_steps
            sinks.append(TensorBoardSink(folder / "tensorboard", first_step, steps, name, run_config))
        else:
            tracked = TrackedRun(folder, config.project_name, name, tuple(config.tags), first_step, run_config or {})
            sinks.append(TRACKER_SINKS[logger](tracked))
    return Sinks(sinks, folder)
