"""Reward models with the real trainer, on two ranks: trained without an engine and resumed.

One world runs all of it. The tiny model starts from random weights, and learns which answers are worked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_megatron.cli.config_file import reward_defaults
from grpo_megatron.config import ConfigError
from grpo_megatron.config.methods import with_defaults
from grpo_megatron.evaluation.ask import open_model
from grpo_megatron.models.heads.reward_folder import check_reward_weights, read_reward_folder
from tests import worlds
from tests.convert.folders import convert, same_bits, tensors_of
from tests.e2e import run_ranks
from tests.stored import metric_rows

STEPS = {"train_batch_size": 16, "max_prompt_length": 32, "max_response_length": 32}
TRAINED: dict[str, dict[str, Any]] = {
    "pairs": {"trainer": {"total_training_steps": 16, "save_freq": 8}},
    "pairs again": {"trainer": {"total_training_steps": 8, "save_freq": 8}},
    "pairs resumed": {"trainer": {"total_training_steps": 16, "save_freq": 8}},
    "steps": {
        "reward_model": {"kind": "process", "step_separator": ","},
        "trainer": {"total_training_steps": 16, "save_freq": 16},
    },
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def runs(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    from grpo_megatron.starting.generated import write_example

    folder = tmp_path_factory.mktemp("reward_models")
    (folder / "data").mkdir()
    write_example("feedback", folder / "data", seed=0, num_train=256, num_val=64)
    raws = {name: trained(workspace, folder, name, sections) for name, sections in TRAINED.items()}
    results = worlds.run(run_ranks.train_in_turn, 2, timeout_s=1000, raws=list(raws.values()))[0]
    for raw, result in zip(raws.values(), results, strict=True):
        output = Path(raw["trainer"]["output_dir"])
        result |= {"metrics": metric_rows(output), "output": output}
    return dict(zip(raws, results, strict=True)) | {"data": folder / "data"}  # type: ignore[dict-item]


def trained(workspace: Path, folder: Path, name: str, sections: dict[str, Any]) -> dict[str, Any]:
    """A run of `train-reward`. Both halves of the resumed run share a folder."""
    data, output = folder / "data", folder / name.replace("again", "resumed").replace(" ", "_")
    rows = name.split()[0]
    raw = run_ranks.settings(workspace, output, 2, **sections)
    raw["data"] |= {"train_files": [str(data / f"{rows}.jsonl")], "val_files": [], **STEPS}
    raw["data"] |= {"val_loss_files": [str(data / f"{rows}_val.jsonl")]}
    raw["actor"] |= {"ppo_mini_batch_size": None, "ppo_epochs": 1, "ppo_max_token_len_per_gpu": 512}
    raw["actor"]["optim"] = {"lr": 3e-3}
    del raw["actor"]["kl_loss_coef"]
    raw["reward"] = {}
    raw["trainer"] |= {"val_before_train": True, "test_freq": 100, "save_hf_at_end": True}
    return with_defaults(raw, reward_defaults(raw))


def column(run: dict[str, Any], name: str) -> list[float]:
    return [row[name] for row in run["metrics"] if name in row]


def test_held_out_accuracy_rises(runs: dict[str, dict[str, Any]]) -> None:
    """Three of four bad answers are bare, which a tiny model tells from the others soon: about 0.87 without checking a sum.

    Of the steps, 0.69 are right: that is the accuracy of a constant score.
    """
    pairs, steps = runs["pairs"], runs["steps"]
    before, after = column(pairs, "val/pair_accuracy/pairs_val")
    assert before == 0.5 and after > 0.75  # a new head scores every response 0
    before, after = column(steps, "val/step_accuracy/steps_val")
    assert before == 0.5 and after > 0.8
    for run, name in ((pairs, "pairs_val"), (steps, "steps_val")):
        losses = column(run, f"val/loss/{name}")
        assert losses[0] == pytest.approx(0.693147, abs=1e-6) and losses[1] < 0.5
        assert column(run, f"val/brier/{name}")[1] < 0.21 and column(run, f"val/ece/{name}")[0] == pytest.approx(
            0, abs=1e-6
        )
        table = (run["output"] / "calibration.txt").read_text()
        rows = [json.loads(line) for line in (runs["data"] / f"{name}.jsonl").read_text().splitlines()]
        count = sum(len(row.get("labels", "1")) for row in rows)  # of all ranks
        assert f"{name}: {count} " in table and "mean confidence" in table


def test_a_stopped_run_goes_on_bit_for_bit(runs: dict[str, dict[str, Any]]) -> None:
    whole, resumed = runs["pairs"]["weights"], runs["pairs resumed"]["weights"]
    assert runs["pairs resumed"]["first_step"] == 8
    assert whole.keys() == resumed.keys() and "score.weight" in whole
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    assert not torch.equal(whole["score.weight"], runs["pairs again"]["weights"]["score.weight"])


def test_the_results_are_folders_for_reward_model_path(runs: dict[str, dict[str, Any]]) -> None:
    for name, kind in (("pairs", "outcome"), ("steps", "process")):
        folder = read_reward_folder(runs[name]["output"] / "hf", kind)  # type: ignore[arg-type]
        assert folder.has_head and folder.num_labels == (1 if name == "pairs" else 2)
        check_reward_weights(folder)


def test_a_checkpoint_converts_to_the_folder_of_the_end(
    runs: dict[str, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit, both kinds. The folder of the end is refused where it has no use."""
    for name, described in (("pairs", "a reward model"), ("steps", "a process reward model")):
        step, exported = runs[name]["output"] / "checkpoints/step_000016", runs[name]["output"] / "hf"
        converted = tmp_path / name
        assert convert("to-hf", step, converted, "--quiet") == 0
        same_bits(tensors_of(exported), tensors_of(converted))
        configs = [json.loads((folder / "config.json").read_text()) for folder in (exported, converted)]
        assert configs[0] == configs[1]
        assert {path.name for path in exported.iterdir()} - {path.name for path in converted.iterdir()} == set()
        assert convert("verify", step, exported, "--quiet") == 0
        for source in (step, exported):
            capsys.readouterr()
            assert convert("inspect", source) == 0
            assert f"scalar head ({described}: " in capsys.readouterr().out
        assert convert("to-megatron", exported, tmp_path / "megatron", "--quiet") == 2
        assert f"is {described}: one score" in capsys.readouterr().err
        with pytest.raises(ConfigError, match="generates no text"):
            open_model(step, None)
    assert convert("to-hf", step / "critic", tmp_path / "critic") == 2
    assert f"is not a folder: its run saved no critic; name {str(step)!r}\n" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs", "steps"]
