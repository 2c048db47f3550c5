"""Trackers of experiments: Weights & Biases, SwanLab, MLflow. Each is one class over the package's own calls.

A run has the project trainer.project_name, the name trainer.experiment_name and the tags trainer.tags. Its id is in a file
of the output folder: a resumed run goes on in the tracker's run, and a run from step 0 is a new one there. Credentials, hosts and
offline modes are the packages' own settings (WANDB_MODE=offline, SWANLAB_MODE=offline, MLFLOW_TRACKING_URI).
"""

from __future__ import annotations

import importlib
import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from grpo_megatron.observability.sink import Sink
from grpo_megatron.report.run_folder import flat_config

TRACKERS = ("wandb", "swanlab", "mlflow")  # names in trainer.logger, and of the packages
MAX_PARAMETERS = 100  # that MLflow accepts in one call
STEP_METRIC = "training/global_step"  # every training step has it
LONGEST_PARAMETER = 500  # characters that every MLflow server accepts


class TrackedRun(NamedTuple):
    """What a tracker shows of a run. `first_step` 0: a new run of the tracker."""

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
    """WANDB_PROJECT, where it is set, is the project."""

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
    """The project is MLflow's experiment. Without MLFLOW_TRACKING_URI the run is in the database OUTPUT_DIR/mlflow.db."""

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
