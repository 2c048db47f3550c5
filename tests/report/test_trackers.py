"""Loggers besides the files: TensorBoard read back by its own reader, and trackers against modules that record the calls.

The modules refuse what the real packages refuse (tracker_signatures.py). Runs with the real packages: docs/metrics.md.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_megatron.config import TrainerConfig
from grpo_megatron.report.loggers import build_sinks, group_text
from grpo_megatron.report.metrics import Sinks
from tests.report.material import group, sample
from tests.report.tracker_signatures import Recording

ACCURACY = "val-core/gsm8k/acc/mean@1"
CONFIG = {"trainer": {"seed": 1}, "actor": {"optim": {"lr": 1e-6, "betas": [0.9, 0.99]}}}


def opened(folder: Path, logger: str, first_step: int = 0, **more: Any) -> Sinks:
    values = {"output_dir": folder, "logger": [logger], "total_training_steps": 40, "project_name": "p", "tags": ["a"]}
    config = TrainerConfig.model_validate({**values, "experiment_name": "exp/1", **more})
    return build_sinks(config, first_step=first_step, run_config=CONFIG)


def record(monkeypatch: pytest.MonkeyPatch, package: str, **results: Any) -> list[tuple[str, dict[str, Any]]]:
    calls: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setitem(sys.modules, package, Recording(package, calls, **results))  # type: ignore[arg-type]
    return calls


def named(calls: list[tuple[str, dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    return [arguments for called, arguments in calls if called == name]


# -- trackers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "run", "name_key", "folder_key", "folder"),
    [("wandb", "Run.", "name", "dir", "."), ("swanlab", "", "experiment_name", "logdir", "swanlog")],
)
def test_a_tracker_goes_on_with_a_resumed_run_only(
    package: str, run: str, name_key: str, folder_key: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record(monkeypatch, package)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    for first_step in (0, 2, 0):
        with opened(tmp_path, package, first_step) as sinks:
            sinks.log(first_step, {"x": 1.0})
    starts = named(calls, "init")
    ids = [start["id"] for start in starts]
    assert ids[0] == ids[1] != ids[2] and all(start["resume"] == "allow" for start in starts)
    assert all(re.fullmatch(r"[0-9a-f]{8}", one) for one in ids)
    assert (starts[0]["project"], starts[0][name_key], starts[0]["tags"]) == ("p", "exp/1", ["a"])
    assert starts[0]["config"] == CONFIG and Path(starts[0][folder_key]) == tmp_path / folder
    assert named(calls, f"{run}log") == [{"data": {"x": 1.0}, "step": step} for step in (0, 2, 0)]
    assert len(named(calls, f"{run}finish")) == 3


def test_mlflow_goes_on_after_the_last_step_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 0 to 3 are there, and the run resumes at 2: MLflow would keep both values of steps 2 and 3."""
    history = [SimpleNamespace(step=step) for step in range(4)]
    started = SimpleNamespace(info=SimpleNamespace(run_id="run-7"))
    calls = record(monkeypatch, "mlflow", start_run=started, get_metric_history=history)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with opened(tmp_path, "mlflow") as sinks:
        sinks.log(0, {ACCURACY: 0.5, "nan": math.nan})
    with opened(tmp_path, "mlflow", 2) as sinks:
        for step in range(2, 6):
            sinks.log(step, {"x": float(step)})
    first, second = named(calls, "start_run")
    assert (first["run_id"], second["run_id"]) == (None, "run-7")
    assert (first["run_name"], first["tags"]) == ("exp/1", {"a": "true"})
    assert named(calls, "set_tracking_uri")[0] == {"uri": f"sqlite:///{tmp_path.resolve() / 'mlflow.db'}"}
    assert named(calls, "set_experiment")[0] == {"experiment_name": "p"}
    assert named(calls, "MlflowClient.get_metric_history") == [{"run_id": "run-7", "key": "training/global_step"}]
    assert named(calls, "log_metrics") == [
        {"metrics": {"val-core/gsm8k/acc/mean_at_1": 0.5}, "step": 0},
        {"metrics": {"x": 4.0}, "step": 4},
        {"metrics": {"x": 5.0}, "step": 5},
    ]
    (parameters,) = named(calls, "log_params")  # of the first start
    assert parameters["params"] == {"trainer.seed": "1", "actor.optim.lr": "1e-06", "actor.optim.betas": "[0.9, 0.99]"}
    assert len(named(calls, "end_run")) == 2


# -- tensorboard -------------------------------------------------------------------------------------------------------


def test_tensorboard_has_scalars_an_overview_texts_and_the_config(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar import layout_pb2

    groups = [group([sample(0, 1.0, "the </pre> answer")], "prompt\n```\nof lines")]
    for first_step, offset in ((0, 0.0), (2, 100.0)):  # a crash after step 2, and a resume from the checkpoint at 2
        with opened(tmp_path, "tensorboard", first_step) as sinks:
            for step in range(first_step, first_step + 3):
                sinks.show(step, lambda: groups)
                sinks.log(step, {"critic/score/mean": step + offset, ACCURACY: 0.5})
    events = EventAccumulator(str(tmp_path / "tensorboard" / "exp_1"))  # its folder is the run's name
    events.Reload()
    scalars = [(event.step, event.value) for event in events.Scalars("critic/score/mean")]
    assert scalars == [(0, 0.0), (1, 1.0), (2, 102.0), (3, 103.0), (4, 104.0)]

    texts = [tag for tag in events.Tags()["tensors"] if tag.startswith("samples/")]
    steps = [event.step for event in events.Tensors(texts[0])]
    text = events.Tensors(texts[0])[0].tensor_proto.string_val[0].decode()
    assert set(steps) == {0, 2, 4} and "    the </pre> answer" in text and "reward 1, advantage 0.5, 3 tokens" in text

    layout = layout_pb2.Layout()
    layout.ParseFromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    charts = {chart.title: list(chart.multiline.tag) for category in layout.category for chart in category.chart}
    assert charts == {"Training reward": ["^critic/score/mean$"], "Validation reward": [f"^{re.escape(ACCURACY)}$"]}

    plugins = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"actor.optim.lr" in plugins and b"[0.9, 0.99]" in plugins


def test_a_text_cannot_end_its_block() -> None:
    text = group_text(group([sample(0, None, "one\n\ntwo\n# three")], "```\n</pre>"))
    lines = [line for line in text.splitlines() if line]
    assert [line for line in lines if not line.startswith("    ")] == ["reference answer", "**sample 0** 2 tokens"]
