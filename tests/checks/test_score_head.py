"""What is refused about a run that trains a reward model, before anything starts; and what `train-reward` sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.checks.validate import Checked, validate
from grpo_megatron.cli.config_file import load_config, reward_defaults
from grpo_megatron.cli.main import main
from grpo_megatron.config import Config, ConfigError
from tests import runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `train-reward` on pairs."""
    folder = runs.make_run(tmp_path_factory.mktemp("reward"))
    pairs = [{"prompt": f"{n} + 1 =", "chosen": str(n + 1), "rejected": str(n)} for n in range(9)]
    steps = [{"prompt": f"{n} + 1 =", "completions": ["1 + 1", "2"], "labels": [True, False]} for n in range(9)]
    runs.write_rows(folder / "pairs.jsonl", pairs)
    runs.write_rows(folder / "steps.jsonl", steps)
    return folder


def config_of(run: Path, *overrides: str, rows: str = "pairs") -> Config:
    data = [f"data.train_files=[{run / rows}.jsonl]", "data.val_files=[]", "sft.train_files=[]"]
    return load_config(run / "run.yaml", [*data, *overrides], reward_defaults)


def checked(config: Config) -> Checked:
    return validate(config, world_size=2, dry_run=True)


@pytest.mark.parametrize(("rows", "kind"), [("pairs", "outcome"), ("steps", "process")])
def test_the_defaults_of_train_reward_are_a_valid_run(run: Path, rows: str, kind: str) -> None:
    """A language model gets a new head. Nothing is drawn, and no reference is built."""
    overrides = ["reward_model.kind=process", "reward_model.step_separator='='"] if kind == "process" else []
    config = config_of(run, *overrides, rows=rows)
    assert not config.draws
    found = checked(config)
    assert found.scored_folder is not None and found.scored_folder.kind == kind and not found.scored_folder.has_head
    assert len(found.offline_groups) == 9 and found.arch.tied
    assert not any(key.startswith("trainer.") for key in reward_defaults({"data": {"val_loss_files": ["x"]}}))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "1 + 1 =", "response": "2"}, r'field \'chosen\' is missing .*reads rows {"prompt", "chosen"'),
        ({"prompt": "1 + 1 =", "chosen": "2", "rejected": "2"}, "line 1: chosen and rejected are the same"),
    ],
)
def test_wrong_rows_are_named(run: Path, tmp_path: Path, row: dict[str, Any], expected: str) -> None:
    file = runs.write_rows(tmp_path / "rows.jsonl", [row])
    with pytest.raises(ConfigError, match=f"(?s)data.train_files: .*{expected}"):
        checked(config_of(run, f"data.train_files=[{file}]"))


def test_the_command_refuses_the_loss_of_a_language_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["actor.loss_mode=sft", "algorithm.adv_estimator=constant", f"data.train_files=[{run / 'sft.jsonl'}]"]
    arguments = ["train-reward", str(run / "run.yaml"), "data.val_files=[]", *overrides, "--dry-run"]
    assert main([*arguments, "trainer.val_before_train=false", "trainer.test_freq=-1"]) == 2
    assert "set loss_mode=bradley_terry (pairs) or step_labels (steps)" in capsys.readouterr().err
