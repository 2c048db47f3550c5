"""Transformer Engine and FP8 on one GPU, and two GPUs. Not run on a GPU yet.

Tolerances are derived from the number of bits, not measured: bfloat16 has a relative step of 2**-8 = 0.004, FP8 e4m3 one of
2**-3. The compared numbers are results of 8 layers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import Config
from grpo_megatron.device import read_hardware
from grpo_megatron.models.layers.precision import RECIPES, hardware_problems
from tests.gpu import conftest, engine_ranks, training_ranks
from tests.gpu.building import KIND, ON_CPU, mean_error, worst_angle
from tests.stored import metric_rows

TE, LOCAL = {"transformer_impl": "transformer_engine"}, {"transformer_impl": "local"}
TP2 = {"tensor_model_parallel_size": 2}


@pytest.fixture(scope="module")
def te(medium: Path) -> dict[str, Any]:
    conftest.needs_transformer_engine()
    return conftest.run(training_ranks.logprobs_and_gradients, folder=medium, megatron=TE, dtype="bfloat16")[0]


@pytest.fixture(scope="module")
def bf16(medium: Path) -> dict[str, Any]:
    """The bf16 run that FP8 and two GPUs are compared with. It has Transformer Engine's layers if installed."""
    return conftest.run(training_ranks.loss_curve, folder=medium, megatron={}, steps=30)[0]


def test_transformer_engine_in_bf16_is_as_exact_as_local_layers(
    medium: Path, te: dict[str, Any], record_figure: Callable[..., None]
) -> None:
    """Its error against float32 is at most twice that of the local layers. Its gradients have the same direction."""
    exact, local = (
        conftest.run(training_ranks.logprobs_and_gradients, folder=medium, megatron=LOCAL, dtype=dtype)[0]
        for dtype in ("float32", "bfloat16")
    )
    assert te["layers"] == "TELayerNormColumnParallelLinear"
    errors = mean_error(te, exact), mean_error(local, exact)
    cosine, name = worst_angle(te["gradients"], local["gradients"])
    record_figure("mean error of TE, of local layers", errors)
    record_figure("gradients' least cosine", cosine)
    assert errors[0] <= 2 * errors[1] + 1e-3
    assert cosine >= 0.98, name


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        *((recipe, {}) for recipe in RECIPES),
        ("tensorwise", {"first_last_layers_bf16": True}),
        ("tensorwise", {"param_gather": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "plain",
)
def test_fp8_follows_bf16(
    medium: Path, request: pytest.FixtureRequest, record_figure: Callable[..., None], recipe: str, options: Any
) -> None:
    """Every step's loss within a tenth of a nat and 3 percent of the bf16 run's."""
    conftest.needs_transformer_engine()
    megatron = {"fp8": {"recipe": recipe, **options}}
    wanted = Config.model_validate({"model": {"path": "x"}, "actor": {"megatron": megatron}})
    if problems := list(hardware_problems(wanted, read_hardware("cuda"))):
        pytest.skip(problems[0])
    bf16 = request.getfixturevalue("bf16")  # not before the reasons to skip
    (fp8,) = conftest.run(training_ranks.loss_curve, folder=medium, megatron=megatron, steps=30)
    pairs = list(zip(fp8["losses"], bf16["losses"], strict=True))
    record_figure("last loss in FP8, in bf16", pairs[-1])
    record_figure("largest difference", max(abs(a - b) for a, b in pairs))
    assert fp8["finite"] and fp8["names"] == bf16["names"]
    assert all(abs(a - b) <= 0.1 + 0.03 * b for a, b in pairs)
    assert any(a != b for a, b in pairs)  # it did not compute in bf16


def test_resume_with_transformer_engines_layers(
    medium: Path, tmp_path: Path, record_figure: Callable[..., None]
) -> None:
    """The restored state is bitwise the same. The next updates may differ: the kernels add in no fixed order."""
    conftest.needs_transformer_engine()
    (got,) = conftest.run(training_ranks.resumed, folder=medium, checkpoint=tmp_path / "saved", megatron=TE)
    record_figure("optimizer", got["optimizer"])
    record_figure("later weights differ by", got["difference"])
    assert got["optimizer"].startswith("transformer_engine")
    assert got["state"]
    assert got["difference"] <= 4e-3  # two updates of at most 1e-3, in opposite directions


# -- two GPUs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [{}, TP2], ids=["DP2", "TP2"])
def test_two_gpus_learn_as_one(
    medium: Path, request: pytest.FixtureRequest, record_figure: Callable[..., None], layout: dict[str, Any]
) -> None:
    """Every step's loss over NCCL, within 2 percent of one GPU's."""
    conftest.needs_devices(2)
    one = request.getfixturevalue("bf16")
    got = conftest.run(training_ranks.loss_curve, 2, folder=medium, megatron=layout, steps=30)
    pairs = list(zip(got[0]["losses"], one["losses"], strict=True))
    record_figure("last loss of two, of one", pairs[-1])
    record_figure("largest difference", max(abs(a - b) for a, b in pairs))
    assert got[0]["losses"] == got[1]["losses"] and got[0]["finite"]
    assert all(abs(a - b) <= 0.02 * b for a, b in pairs)


@pytest.mark.parametrize(
    ("layout", "rollout_tp"), [({}, 1), (TP2, 2), (TP2, 1)], ids=["DP2", "TP2-engine-TP2", "TP2-two-engines"]
)
def test_engine_on_two_gpus_has_the_policys_weights(
    medium: Path, record_figure: Callable[..., None], layout: dict[str, Any], rollout_tp: int
) -> None:
    conftest.needs_devices(2)
    conftest.needs_vllm()
    rollout = {"tensor_model_parallel_size": rollout_tp, "enforce_eager": True}
    results = conftest.run(engine_ranks.cycles, 2, folder=medium, count=2, tolerance=0.1, megatron=layout, **rollout)
    record_figure("runner", results[0]["runner"])
    record_figure("gap in each cycle, mean", [mean for mean, _ in results[0]["gaps"]])
    for got in results:
        assert max(mean for mean, _ in got["gaps"]) <= 0.012
        assert got["stale"] >= 3 * max(mean for mean, _ in got["gaps"])


def test_context_parallel_ranks_compute_what_one_does(medium: Path, te: dict[str, Any]) -> None:
    """Two GPUs: log-probabilities and summed gradients of CP 2 against CP 1, in bf16."""
    conftest.needs_devices(2)
    split = {**TE, "context_parallel_size": 2}
    both = conftest.run(training_ranks.logprobs_and_gradients, 2, folder=medium, megatron=split, dtype="bfloat16")
    assert torch.equal(both[0]["logprobs"], both[1]["logprobs"])
    for got in both:
        assert mean_error(got, te) <= 0.02
        cosine, name = worst_angle(got["gradients"], te["gradients"])
        assert cosine >= 0.98, name


# -- a GRPO run that learns the quickstart's task ----------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
ACCURACY = "val-core/arithmetic/acc/mean@1"
GAP = "training/rollout_logp_diff_mean"


def prepare(*arguments: str) -> None:
    environment = {**os.environ, **conftest.LOOPBACK}
    command = [sys.executable, "tools/prepare_data.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_sixty_steps_of_grpo_learn_the_quickstarts_task(tmp_path: Path, record_figure: Callable[..., None]) -> None:
    """In bfloat16, with Transformer Engine if installed: from less than 0.6 of the answers right to more than 0.85."""
    conftest.needs_vllm()
    data, model, out = tmp_path / "data", tmp_path / "model", tmp_path / "run"
    prepare("arithmetic", str(data), "--seed", "0")
    prepare("model", "--preset", "quickstart", str(model), "--tokenizer", str(data / "tokenizer"), "--std", "0.05")
    overrides = [
        f"model.path={model}",
        "model.dtype=bfloat16",
        f"data.train_files=[{data}/train.jsonl]",
        f"data.val_files=[{data}/val.jsonl]",
        f"sft.train_files=[{data}/sft.jsonl]",
        "actor.megatron.offload_optimizer=true",
        "rollout.gpu_memory_utilization=0.2",
        "trainer.total_training_steps=60",
        "trainer.test_freq=20",
        "trainer.save_freq=-1",
        "trainer.save_hf_at_end=false",
        "trainer.n_gpus_per_node=1",
        f"trainer.device={KIND}",
        f"trainer.output_dir={out}",
        "trainer.logger=[jsonl]",
    ]
    raw = load_config(ROOT / "examples/quickstart.yaml", overrides).model_dump(mode="json")
    conftest.run(training_ranks.train, raw=raw, limit_s=1500 if ON_CPU else 500)
    logged = metric_rows(out)
    steps = [row for row in logged if "critic/score/mean" in row]
    accuracy = {row["step"]: row[ACCURACY] for row in logged if ACCURACY in row}
    gaps = [row[GAP] for row in steps]
    record_figure("accuracy before and every 20 steps", list(accuracy.values()))
    record_figure("mean reward, first and last 5 steps", [_mean(steps[:5]), _mean(steps[-5:])])
    record_figure("log-probability gap, first step, largest", [gaps[0], max(gaps)])
    record_figure("step, median", sorted(row["timing_s/step"] for row in steps)[len(steps) // 2], "s")
    assert list(accuracy) == [0, 20, 40, 60] and len(steps) == 60
    assert accuracy[0] < 0.6
    assert accuracy[60] > 0.85 and _mean(steps[-5:]) > 0.85
    assert max(gaps) <= 0.05


def _mean(steps: list[dict[str, float]]) -> float:
    return sum(row["critic/score/mean"] for row in steps) / len(steps)
