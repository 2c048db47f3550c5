"""The quickest evidence: one GRPO run in bf16 that learns the quickstart's task, with its figures as one table.

Not run on a GPU yet.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_megatron.cli.config_file import load_config
from tests.gpu import conftest, training_ranks
from tests.gpu.building import KIND, ON_CPU
from tests.stored import metric_rows

ROOT = Path(__file__).parents[2]
ACCURACY = "val-core/arithmetic/acc/mean@1"
GAP = "training/rollout_logp_diff_mean"


TABLE = {  # metric -> unit
    **{f"timing_s/{phase}": "s" for phase in ("step", "update_weights", "gen", "old_log_prob", "update_actor")},
    "perf/throughput": "tokens/s",
    "perf/device_memory_used_gb": "GiB",
}


def prepare(*arguments: str) -> None:
    environment = {**os.environ, **conftest.LOOPBACK}
    command = [sys.executable, "-m", "grpo_megatron", "prepare", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def quickstart_config(folder: Path, *overrides: str) -> dict[str, Any]:
    """Prepare the quickstart's data and random model in `folder`; returns its config in bfloat16 on this device."""
    data, model = folder / "data", folder / "model"
    prepare("arithmetic", str(data), "--seed", "0")
    prepare("model", "--preset", "quickstart", str(model), "--tokenizer", str(data / "tokenizer"), "--std", "0.05")
    common = [
        f"model.path={model}",
        "model.dtype=bfloat16",
        f"data.train_files=[{data}/train.jsonl]",
        f"data.val_files=[{data}/val.jsonl]",
        f"sft.train_files=[{data}/sft.jsonl]",
        "rollout.gpu_memory_utilization=0.2",
        "trainer.save_freq=-1",
        "trainer.save_hf_at_end=false",
        f"trainer.device={KIND}",
        f"trainer.output_dir={folder / 'run'}",
        "trainer.logger=[jsonl]",
    ]
    return load_config(ROOT / "examples/quickstart.yaml", [*common, *overrides]).model_dump(mode="json")


def learn(folder: Path, steps: int, test_freq: int, *changes: str) -> tuple[dict[float, float], list[dict[str, float]]]:
    """Run the quickstart in bfloat16 on this device. Returns the accuracy by step, and the metrics of every step."""
    raw = quickstart_config(
        folder,
        "actor.megatron.offload_optimizer=true",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={test_freq}",
        "trainer.n_gpus_per_node=1",
        *changes,
    )
    conftest.run(training_ranks.train, raw=raw, limit_s=1500 if ON_CPU else 500)
    logged = metric_rows(folder / "run")
    accuracy = {row["step"]: row[ACCURACY] for row in logged if ACCURACY in row}
    return accuracy, [row for row in logged if "critic/score/mean" in row]


def test_sixty_steps_of_grpo_learn_the_quickstarts_task(tmp_path: Path, record_figure: Callable[..., None]) -> None:
    """In bfloat16, with Transformer Engine if installed: from less than 0.6 of the answers right to more than 0.85."""
    conftest.needs_vllm()
    accuracy, steps = learn(tmp_path, 60, 20)
    gaps = [row[GAP] for row in steps]
    record_figure("accuracy before and every 20 steps", list(accuracy.values()))
    record_figure("mean reward, first and last 5 steps", [_mean(steps[:5]), _mean(steps[-5:])])
    record_figure("log-probability gap, first step, largest", [gaps[0], max(gaps)])
    for name, unit in TABLE.items():
        if values := sorted(row[name] for row in steps if name in row):
            record_figure(f"{name}, median", values[len(values) // 2], unit)
    assert list(accuracy) == [0, 20, 40, 60] and len(steps) == 60
    assert accuracy[0] < 0.6
    assert accuracy[60] > 0.85 and _mean(steps[-5:]) > 0.85
    assert max(gaps) <= 0.05


def _mean(steps: list[dict[str, float]]) -> float:
    return sum(row["critic/score/mean"] for row in steps) / len(steps)
