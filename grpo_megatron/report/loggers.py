"""Loggers: the sinks that `trainer.logger` names. Weights & Biases, SwanLab, MLflow and TensorBoard.

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
from grpo_megatron.report.console import ConsoleSink, console_columns
from grpo_megatron.report.kit import OTHER, page_panels
from grpo_megatron.report.metrics import JsonlSink, ReportSink, ShownGroups, Sink, Sinks
from grpo_megatron.report.run_folder import METRICS_FILE, flat_config
from grpo_megatron.storage.run_files import add_event
from grpo_megatron.untrusted import visible

# -- trackers ----------------------------------------------------------------------------------------------------------

MAX_PARAMETERS = 100  # that MLflow accepts in one call
STEP_METRIC = "training/global_step"  # every training step has it
LONGEST_PARAMETER = 500  # characters that every MLflow server accepts


class TrackedRun(NamedTuple):
    """The facts about a run for a tracker. `resumed_id`: of the tracker's run that goes on; None for a new run."""

    output_dir: Path
    project: str
    name: str
    tags: list[str]
    config: dict[str, Any]
    id_file: Path
    resumed_id: str | None

    def id_of_eight(self) -> str:
        """Returns the id of the run that goes on, or a new one, and writes it to the file."""
        run_id = self.resumed_id or uuid.uuid4().hex[:8]
        self.id_file.write_text(run_id)
        return run_id


class TrackerSink(Sink):
    """A sink of two functions of a tracker's package: one that logs metrics of a step, and one that ends the run."""

    def __init__(self, log: Callable[[dict[str, float], int], Any], close: Callable[[], Any]) -> None:
        self._log, self._close = log, close

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log(dict(metrics), step)

    def close(self) -> None:
        self._close()


def open_wandb(run: TrackedRun) -> TrackerSink:
    """Opens a run of Weights & Biases. Its project is WANDB_PROJECT where that is set."""
    tracked = importlib.import_module("wandb").init(
        project=os.environ.get("WANDB_PROJECT", run.project),
        name=run.name,
        id=run.id_of_eight(),
        resume="allow",
        dir=str(run.output_dir),
        config=run.config,
        tags=run.tags,
    )
    return TrackerSink(lambda metrics, step: tracked.log(metrics, step=step), tracked.finish)


def open_swanlab(run: TrackedRun) -> TrackerSink:
    """Opens a run of SwanLab."""
    swanlab = importlib.import_module("swanlab")
    swanlab.init(
        project=run.project,
        experiment_name=run.name,
        id=run.id_of_eight(),
        resume="allow",
        logdir=str(run.output_dir / "swanlog"),
        config=run.config,
        tags=run.tags,
    )
    return TrackerSink(lambda metrics, step: swanlab.log(_finite_only(metrics), step=step), swanlab.finish)


def open_mlflow(run: TrackedRun) -> TrackerSink:
    """Opens a run of MLflow, in the experiment `project`. Without MLFLOW_TRACKING_URI it is in the database OUTPUT_DIR/mlflow.db.

    Its names have no `@`: `mean@1` becomes `mean_at_1`. It would keep both values of a repeated step.
    """
    mlflow, last_step = importlib.import_module("mlflow"), -1
    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(f"sqlite:///{run.output_dir.resolve() / 'mlflow.db'}")
    mlflow.set_experiment(run.project)
    started = mlflow.start_run(run_id=run.resumed_id, run_name=run.name, tags=dict.fromkeys(run.tags, "true"))
    run.id_file.write_text(started.info.run_id)
    if run.resumed_id is None:
        parameters = [(key, str(value)[:LONGEST_PARAMETER]) for key, value in flat_config(run.config).items()]
        for first in range(0, len(parameters), MAX_PARAMETERS):
            mlflow.log_params(dict(parameters[first : first + MAX_PARAMETERS]))
    else:
        history = mlflow.MlflowClient().get_metric_history(run.resumed_id, STEP_METRIC)
        last_step = max((metric.step for metric in history), default=-1)

    def log(metrics: dict[str, float], step: int) -> None:
        if step > last_step:
            values = {name.replace("@", "_at_"): value for name, value in _finite_only(metrics).items()}
            mlflow.log_metrics(values, step=step)

    return TrackerSink(log, mlflow.end_run)


def _finite_only(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


# Names in trainer.logger, and of the packages.
TRACKERS = {"wandb": open_wandb, "swanlab": open_swanlab, "mlflow": open_mlflow}


# -- TensorBoard: scalars, an overview of the main ones, samples as text, and the config with the results --------------
# `tensorboard --logdir OUTPUT_DIR/tensorboard`. The run has the name of trainer.experiment_name. The overview is on the tab
# "Custom scalars".

MAX_TEXTS = 20  # steps of a run whose samples are written
RESULTS = ("critic/score/mean", "actor/entropy", "response_length/mean", "perf/throughput")  # beside the config


class TensorBoardSink(Sink):
    """TensorBoard's files: scalars at every step, samples at about MAX_TEXTS steps."""

    def __init__(
        self, folder: Path, first_step: int, total_steps: int, name: str, run_config: Mapping[str, Any]
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        run_name = re.sub(r"[^\w.-]+", "_", name).lstrip(".") or "run"  # a folder
        self._writer = SummaryWriter(str(folder / run_name), purge_step=first_step)
        self._every, self._config, self._has_overview = max(1, total_steps // MAX_TEXTS), run_config, False

    def show(self, step: int, groups: Callable[[], ShownGroups]) -> None:
        if step % self._every == 0:
            for number, group in enumerate(groups()):
                self._writer.add_text(f"samples/{number}", group_text(group), step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._has_overview:
            self._has_overview = True
            self._add_overview(sorted(metrics))
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def _add_overview(self, names: Sequence[str]) -> None:
        """Shows the report's panels as charts. Metrics that appear only in later steps, such as a validation's, are in none.

        The tab "HParams" shows the config beside the last values of the main metrics.
        """
        from torch.utils.tensorboard.summary import hparams

        layout: dict[str, dict[str, Any]] = {}
        for panel in page_panels(names, {}):
            if panel.group != OTHER:
                charts = layout.setdefault(panel.group, {})
                charts[panel.title] = ["Multiline", [f"^{re.escape(name)}$" for name, _ in panel.curves]]
        self._writer.add_custom_scalars(layout)
        results = [name for name in names if name in RESULTS or name.startswith("val-core/")]
        settings = {
            key: value if isinstance(value, bool | int | float | str) else str(value)
            for key, value in flat_config(self._config).items()
        }
        for summary in hparams(settings, dict.fromkeys(results, 0.0)) if settings else ():
            self._writer._get_file_writer().add_summary(summary)

    def close(self) -> None:
        self._writer.close()


def group_text(group: Mapping[str, Any]) -> str:
    """Formats a prompt and its samples as Markdown, in which each text is an indented block, which no text can end."""

    def block(text: str) -> str:
        return "\n" + "\n".join(f"    {line}" for line in visible(text).splitlines() or [""]) + "\n"

    parts = [block(group["prompt"]), f"reference answer\n{block(group['answer'])}"]
    for sample in group["samples"]:
        known = {name: sample[name] for name in ("reward", "advantage") if sample[name] is not None}
        numbers = [f"{name} {value:g}" for name, value in known.items() if math.isfinite(value)]
        head = ", ".join([*numbers, f"{sample['tokens']} tokens"])
        parts.append(f"**sample {sample['index']}** {head}\n{block(''.join(piece[0] for piece in sample['pieces']))}")
    return "\n\n".join(parts)


# -- the sinks of a run ------------------------------------------------------------------------------------------------


def check_loggers(names: Sequence[str]) -> None:
    """Raises ConfigError if a logger's package is missing. Every rank checks for itself, before any process group."""
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
    """Builds the sinks of `trainer.logger`, metrics.jsonl and the report, in `trainer.output_dir`; on rank 0 only.

    `first_step`: the step that this run starts with. Later steps of an earlier run are dropped. `run_config` is recorded
    by TensorBoard and the trackers. `stream`: the console, standard output by default. Raises ConfigError on every rank if a
    package is missing.
    """
    check_loggers(config.logger)
    if rank != 0:
        return Sinks()
    folder, total, settings = config.output_dir, config.total_training_steps, dict(run_config or {})
    folder.mkdir(parents=True, exist_ok=True)
    add_event(folder, "resumed" if first_step else "started", first_step)
    name = config.experiment_name or folder.resolve().name
    sinks: list[Sink] = []
    for logger in dict.fromkeys([*config.logger, "jsonl"]):  # always: the report is made of it
        if logger == "console":
            sinks.append(ConsoleSink(total, first_step, stream, console_columns(run_config)))
        elif logger == "jsonl":
            sinks += [JsonlSink(folder / METRICS_FILE, first_step), ReportSink(folder, first_step)]
        elif logger == "tensorboard":
            sinks.append(TensorBoardSink(folder / "tensorboard", first_step, total, name, settings))
        else:
            id_file = folder / f"{logger}_run_id"
            resumed_id = id_file.read_text().strip() if first_step > 0 and id_file.exists() else None
            tracked = TrackedRun(folder, config.project_name, name, list(config.tags), settings, id_file, resumed_id)
            sinks.append(TRACKERS[logger](tracked))
    return Sinks(sinks, folder)
