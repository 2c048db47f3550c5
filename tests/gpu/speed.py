"""Steps of GRPO on one GPU: seconds of each phase, tokens/s, MFU. Groups 8 and 9 are this test, with a shape each.

Not run on a GPU yet. A step is 32 prompts x 8 samples of 512 tokens, sampled with CUDA graphs, one update. The first step is
left out, and the medians of the others are printed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import Config
from grpo_megatron.device import read_hardware
from grpo_megatron.models.layers.precision import hardware_problems
from grpo_megatron.starting.generated import build_tokenizer, write_example
from tests.gpu import conftest, training_ranks
from tests.gpu.building import KIND, ON_CPU, write_random_model
from tests.stored import metric_rows

PROMPTS, SAMPLES, RESPONSE = (4, 2, 16) if ON_CPU else (32, 8, 512)
STEPS = 4
PHASES = ("step", "update_weights", "probe", "gen", "reward", "adv", "old_log_prob", "update_actor")
LEAST_MFU = 0.1  # of the update, with Transformer Engine's layers


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in the shape that the test's file names, with the quickstart's tokenizer. Its other tokens decode to nothing."""
    root = tmp_path_factory.mktemp("speed")
    (root / "data").mkdir()
    write_example("arithmetic", root / "data", seed=0, num_train=PROMPTS * STEPS, num_val=1)
    folder = write_random_model(root / "model", request.module.SHAPE)
    build_tokenizer().save_pretrained(folder)
    return folder


def settings(model: Path, out: Path, recipe: str | None) -> dict[str, Any]:
    return {
        "model": {"path": str(model), "dtype": "bfloat16"},
        "data": {
            "task": "arithmetic",
            "train_files": [str(model.parent / "data/train.jsonl")],
            "apply_chat_template": False,
            "train_batch_size": PROMPTS,
            "max_prompt_length": 32,
            "max_response_length": RESPONSE,
        },
        "actor": {
            "use_kl_loss": False,
            "optim": {"lr": 1e-6},
            "megatron": {"offload_optimizer": True, "fp8": {"recipe": recipe}},
        },
        "rollout": {"n": SAMPLES, "gpu_memory_utilization": 0.4, "max_num_seqs": PROMPTS * SAMPLES},
        "reward": {"function": "tests.e2e.rewards:length_reward"},
        "trainer": {
            "total_training_steps": STEPS,
            "val_before_train": False,
            "test_freq": -1,
            "save_freq": -1,
            "save_hf_at_end": False,
            "n_gpus_per_node": 1,
            "device": KIND,
            "output_dir": str(out),
            "logger": ["jsonl"],
        },
    }


def median(steps: list[dict[str, float]], name: str) -> float | None:
    values = sorted(row[name] for row in steps if name in row)
    return values[len(values) // 2] if values else None


@pytest.mark.parametrize("recipe", [None, "tensorwise"], ids=["bf16", "fp8"])
def test_step_time(model: Path, tmp_path: Path, record_figure: Callable[..., None], recipe: str | None) -> None:
    conftest.needs_vllm()
    if recipe is not None:
        conftest.needs_transformer_engine()
    raw = settings(model, tmp_path / "run", recipe)
    if problems := list(hardware_problems(Config.model_validate(raw), read_hardware(KIND))):  # type: ignore[arg-type]
        pytest.skip(problems[0])
    conftest.run(training_ranks.train, raw=raw)
    steps = metric_rows(tmp_path / "run")[1:]
    assert len(steps) == STEPS - 1
    times = {phase: median(steps, f"timing_s/{phase}") for phase in PHASES}
    for phase, seconds in times.items():
        if seconds is not None:
            record_figure(phase, seconds, "s")
    record_figure("tokens/s", median(steps, "perf/throughput"))
    for name in ("perf/mfu/actor", "perf/mfu/actor_infer", "perf/tflops/actor", "perf/max_memory_allocated_gb"):
        if (value := median(steps, name)) is not None:
            record_figure(name.removeprefix("perf/"), value)
    record_figure("log-probability gap", max(row["training/rollout_logp_diff_mean"] for row in steps))
    whole = times.pop("step")
    assert whole is not None
    assert all(row["response_length/mean"] == RESPONSE for row in steps) or ON_CPU  # the work that was to be measured
    assert sum(seconds or 0 for seconds in times.values()) >= 0.8 * whole or ON_CPU  # no phase is missing
    mfu = median(steps, "perf/mfu/actor")
    if mfu is not None and importlib.util.find_spec("transformer_engine") is not None:
        assert mfu >= LEAST_MFU
