"""The agents' examples: the tiny model calls its tool more often, and the plan of the real model that plays with Python."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.cli import main
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.environments.sandboxes.local import walls_problem
from grpo_megatron.environments.tools.isolation import find_isolation
from grpo_megatron.starting.generated import ROWS_PER_STEP, SHELL_STEPS
from tests import worlds
from tests.e2e import run_ranks
from tests.e2e.test_examples import ROOT
from tests.files import CONFIGS, DATA, QWEN_SMALL
from tests.stored import metric_rows


def prepared(
    tmp_path: Path, example: str, data: str, shown: int, guessed: int, steps: int, harness: str = "", **more: Any
) -> dict[str, Any]:
    """The config of an example: a warm-up of the first `shown` steps, then the last `guessed`; `steps` of GRPO on one rank.

    `harness`: the warm-up's dialogues are as they are there.
    """
    folder = tmp_path / "data"
    if (agents := str(ROOT / "examples/agents")) not in sys.path:
        sys.path.append(agents)  # ranks and workers get it, and look for the agents there
    assert main.main(["prepare", data, str(folder)]) == 0
    if harness:
        write_dialogues(folder)
    options = ["--tokenizer", str(folder / "tokenizer"), "--set", "max_position_embeddings=512"]
    assert main.main(["prepare", "model", "--preset", "quickstart", str(tmp_path / "model"), *options]) == 0
    lines = (folder / "sft.jsonl").read_text().splitlines(keepends=True)
    size = ROWS_PER_STEP
    (folder / "sft.jsonl").write_text("".join(lines[: shown * size] + lines[len(lines) - guessed * size :]))
    suffix = "" if (folder / "train").is_dir() else ".jsonl"
    overrides = [
        f"data.train_files=[{folder}/train{suffix}]",
        f"data.val_files=[{folder}/val{suffix}]",
        f"sft.train_files=[{folder}/sft.jsonl]",
        f"sft.steps={shown + guessed}",
        f"trainer.total_training_steps={steps}",
        f"model.path={tmp_path}/model",
        f"sft.optim.lr_wsd_decay_steps={2 * (shown + guessed) // 5}",
        "actor.optim.lr=5e-4",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.save_hf_at_end=false",
        "trainer.n_gpus_per_node=1",
        "trainer.logger=[jsonl]",
        f"trainer.output_dir={tmp_path}/run",
        *(f"{name.replace('__', '.')}={value}" for name, value in more.items()),
    ]
    return load_config(ROOT / f"examples/agents/{example}.yaml", overrides).model_dump(mode="json")


@pytest.mark.soak
@pytest.mark.parametrize(("example", "metric"), [("calculator", "tool_calls"), ("openai_agent", "calls")])
def test_the_calculators_share_of_calls_rises(tmp_path: Path, example: str, metric: str) -> None:
    """A warm-up of 100 steps, of which the last 20 show mostly bare answers, and 4 steps of GRPO on one rank."""
    raw = prepared(tmp_path, example, "products", 80, 20, 4)
    worlds.run(run_ranks.train, 1, raw=raw, keep_weights=False)
    steps = metric_rows(tmp_path / "run")
    calls = [row[f"trajectory/{metric}/mean"] for row in steps if f"trajectory/{metric}/mean" in row]
    assert len(calls) == 4
    # The share begins near 0.14, the share of calls in the last rows, with a standard error of 0.02 (256 trajectories).
    assert calls[0] < 0.4 and calls[-1] > calls[0] + 0.15, calls
    assert all(row["training/rollout_logp_diff_mean"] < 1e-6 for row in steps)


SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def write_dialogues(folder: Path) -> None:
    """Rewrites the rows of `prepare shell` as mini-swe-agent's requests have them: the last turn submits. Adds a token for it."""
    for file in (folder / "tokenizer").iterdir():
        file.write_text(file.read_text().replace('"<unused0>"', json.dumps(SUBMIT)))
    call = {"name": "bash", "arguments": {"command": f"echo {SUBMIT}"}}
    last = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]}
    system = {"role": "system", "content": "You use bash."}
    rows = [json.loads(line)["messages"] for line in (folder / "sft.jsonl").read_text().splitlines()]
    written = [json.dumps({"messages": [system, *messages[:-1], last]}) + "\n" for messages in rows]
    (folder / "sft.jsonl").write_text("".join(written))


def trained_in_a_harness(
    tmp_path: Path, *warm_up: int, steps: int, harness: str = "", **more: Any
) -> list[dict[str, Any]]:
    """Trains the example of OpenAI's Agents SDK, or of another harness. Every turn in a row is what the engine was given and
    gave, id for id.
    """
    if harness:
        pytest.importorskip("minisweagent", reason='pip install "mini-swe-agent>=2.4,<3"')
    else:
        pytest.importorskip("agents", reason='pip install "openai-agents>=0.24,<0.25"')
    if problem := walls_problem():
        pytest.skip(f"no local sandboxes here: {problem}")
    raw = prepared(tmp_path, "agents_sdk", "shell", *warm_up, steps, harness, **more)
    if harness:
        raw["rollout"]["multi_turn"]["kwargs"] |= {
            "command": [f"tests.environments.others.{harness}:main"],
            "branches": "samples",
        }
    [result] = worlds.run(run_ranks.train, 1, timeout_s=3400.0, raw=raw, keep_weights=False)
    drawn = []
    for samples in run_ranks.all_samples([result]).values():
        for _, _, prompt, response, mask, _, turns, status, *_ in samples:
            assert status in ("ok", "turn_limit", "length"), status
            for start, end, kind, _ in turns:
                assert mask[start:end] == [int(kind == "assistant")] * (end - start)
                if kind == "assistant":
                    drawn.append(((*prompt, *response[:start]), tuple(response[start:end])))
    if raw["trainer"]["test_freq"] < 0:  # the log would have those of validation, too
        assert sorted(drawn) == sorted(result["log"])
    else:
        assert set(drawn) <= set(result["log"])
    return metric_rows(tmp_path / "run")


def test_rows_of_the_agents_sdk_are_the_engines_log(tmp_path: Path) -> None:
    """A warm-up of 40 steps without guesses, so that the SDK's tool is called; 2 steps of 2 x 4 trajectories."""
    few = {"rollout__engine": "transformers", "data__train_batch_size": 2, "rollout__n": 4}
    for row in trained_in_a_harness(tmp_path, 40, 0, steps=2, **few):
        assert row["trajectory/turns/mean"] > 1.5 and row["training/rollout_logp_diff_max"] < 1e-5, row


@pytest.mark.soak  # 11 minutes on two busy cores
def test_a_model_learns_with_the_agents_sdk(tmp_path: Path) -> None:
    """The whole example on one rank: by hand on two, the reward went from 0.03 to 0.91."""
    rows = trained_in_a_harness(tmp_path, SHELL_STEPS, 40, steps=30, actor__optim__lr=2e-4)
    rewards = [row["critic/rewards/mean"] for row in rows if "critic/rewards/mean" in row]
    assert len(rewards) == 30 and sum(rewards[:5]) < 1.5 and sum(rewards[-5:]) > 2.5, rewards


@pytest.mark.soak  # 13 minutes on two busy cores
@pytest.mark.timeout(3600)
def test_a_model_learns_with_mini_swe_agent(tmp_path: Path) -> None:
    """30 steps of GRPO, whose environment is the harness as it is; held-out folders before, and after each ten steps."""
    options: dict[str, Any] = {"rollout__engine": "transformers", "data__train_batch_size": 4, "rollout__n": 6}
    options |= {"trainer__test_freq": 10, "trainer__val_before_train": "true", "data__val_max_samples": 60}
    rows = trained_in_a_harness(tmp_path, 200, 8, steps=30, harness="mini_swe_agent", **options)
    rewards = [row["critic/rewards/mean"] for row in rows if "critic/rewards/mean" in row]
    solved = [row["val-core/folders/reward/mean@1"] for row in rows if "val-core/folders/reward/mean@1" in row]
    assert len(rewards) == 30 and sum(rewards[-5:]) > max(2.5, 5 * rewards[0] + 1), rewards
    assert len(solved) == 4 and solved[0] < 0.5 and solved[-1] > solved[0] + 0.3, solved


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
