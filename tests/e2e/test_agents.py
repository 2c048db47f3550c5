"""The agents' examples: the tiny model calls its tool more often, and the plan of the real model that plays with Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_megatron.cli import main
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.environments.tools.isolation import find_isolation
from grpo_megatron.starting.generated import ROWS_PER_STEP
from tests import worlds
from tests.e2e import run_ranks
from tests.e2e.test_examples import ROOT
from tests.files import CONFIGS, DATA, QWEN_SMALL
from tests.stored import metric_rows


@pytest.mark.soak
@pytest.mark.parametrize(("example", "metric"), [("calculator", "tool_calls"), ("openai_agent", "calls")])
def test_the_calculators_share_of_calls_rises(tmp_path: Path, example: str, metric: str) -> None:
    """A warm-up of 100 steps, of which the last 20 show mostly bare answers, and 8 steps of GRPO on one rank."""
    data, out = tmp_path / "data", tmp_path / "run"
    assert main.main(["prepare", "products", str(data)]) == 0
    tokenizer = ["--tokenizer", str(data / "tokenizer")]
    assert main.main(["prepare", "model", "--preset", "quickstart", str(tmp_path / "model"), *tokenizer]) == 0
    lines = (data / "sft.jsonl").read_text().splitlines(keepends=True)
    size = ROWS_PER_STEP
    (data / "sft.jsonl").write_text("".join(lines[: 80 * size] + lines[-20 * size :]))
    overrides = [
        f"model.path={tmp_path}/model",
        f"data.train_files=[{data}/train.jsonl]",
        f"data.val_files=[{data}/val.jsonl]",
        f"sft.train_files=[{data}/sft.jsonl]",
        "sft.steps=100",
        "sft.optim.lr_wsd_decay_steps=40",
        "actor.optim.lr=5e-4",
        "rollout.engine_options.kv_cache_gib=0.1",
        "trainer.total_training_steps=4",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.save_hf_at_end=false",
        "trainer.n_gpus_per_node=1",
        "trainer.logger=[jsonl]",
        f"trainer.output_dir={out}",
    ]
    raw = load_config(ROOT / f"examples/agents/{example}.yaml", overrides).model_dump(mode="json")
    worlds.run(run_ranks.train, 1, raw=raw, keep_weights=False)
    steps = metric_rows(out)
    calls = [row[f"trajectory/{metric}/mean"] for row in steps if f"trajectory/{metric}/mean" in row]
    assert len(calls) == 4
    # The share begins near 0.14, the share of calls in the last rows, with a standard error of 0.02 (256 trajectories).
    assert calls[0] < 0.4 and calls[-1] > calls[0] + 0.15, calls
    assert all(row["training/rollout_logp_diff_mean"] < 1e-6 for row in steps)


def test_the_plan_of_the_real_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dry run of examples/agents/gsm8k_python.yaml: every check of the config, with real problems.

    Where nothing isolates the tool's programs it is refused, with exit code 2.
    """
    monkeypatch.chdir(ROOT)
    (tmp_path / "config.json").write_text((CONFIGS / "Qwen2.5-7B-Instruct.json").read_text())
    (tmp_path / "tokenizer.json").symlink_to(QWEN_SMALL)
    about = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    for name in ("train", "test"):
        lines = (DATA / "gsm8k" / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / f"{name}.jsonl").write_text("".join((3 * lines)[:200]))
    arguments = ["--dry-run", "--world-size", "8", "--gpu-memory", "79", f"model.path={tmp_path}"]
    arguments += [f"data.train_files=[{tmp_path}/train.jsonl]", f"data.val_files=[{tmp_path}/test.jsonl]"]
    try:
        expected, said = 0, find_isolation() and "python"
    except ValueError:
        expected, said = 2, "the tool python cannot isolate programs on this machine; install bubblewrap"
    assert main.main(["train", "examples/agents/gsm8k_python.yaml", *arguments]) == expected
    printed = capsys.readouterr()
    assert said in printed.out + printed.err
