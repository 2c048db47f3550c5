"""Resuming with another config: every key has a class, changes are applied and announced, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_megatron.algo.kl import KlController
from grpo_megatron.checks.resume import differences, refusals, resume_problems
from grpo_megatron.checks.validate import validate
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.cli.main import main
from grpo_megatron.config import Config, ConfigError, KlCtrl
from grpo_megatron.training.stopping import is_done, record
from tests.fakes import only
from tests.fakes import run_trainer as run
from tests.runs import make_run, texts


def config(**sections: Any) -> Config:
    return Config.model_validate({"model": {"path": "m"}, **sections})


def test_differences_are_those_of_values_and_of_mappings() -> None:
    old = config(actor={"optim": {"lr": 1e-4}}, reward={"kwargs": {"a": 1, "b": 2}}).model_dump(mode="json")
    new = config(actor={"optim": {"lr": 5e-5}}, reward={"kwargs": {"b": "x" * 100, "c": [3]}}).model_dump(mode="json")
    del old["trainer"]["peak_tflops"]  # a key that an older version did not have
    found = list(differences(old, new))
    assert [str(difference) for difference in found] == [
        "actor.optim.lr 0.0001 -> 5e-05",
        "reward.kwargs.a 1 -> null",
        f"reward.kwargs.b 2 -> {'x' * 80}... (100 characters)",
        "reward.kwargs.c null -> [3]",
    ]
    assert [difference.resume_class for difference in found] == ["schedule", "applies", "applies", "applies"]


# -- a run that resumes ------------------------------------------------------------------------------------------------


def test_changes_are_announced_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """config.yaml stays that of the first start; each later attempt has its differences from it. No file has a secret."""
    trainer = {"logger": ["console", "jsonl"], "save_freq": 2}
    secret = {"api_key": "of-the-judge", "url": "https://me:of-the-judge@host/", "note": "sk-0123456789abcdefghijkl"}
    run(tmp_path, trainer={**trainer, "total_training_steps": 2}, reward={"kwargs": secret})
    first = (tmp_path / "config.yaml").read_text()
    capsys.readouterr()
    actor = {"ppo_epochs": 2, "optim": {"lr": 5e-5, "lr_decay_style": "linear"}}
    changed: dict[str, Any] = {
        "actor": actor,
        "reward": {"timeout_s": 7, "kwargs": {**secret, "api_key": "of-another-judge"}},
    }
    events, _ = run(tmp_path, trainer={**trainer, "total_training_steps": 5}, **changed)
    assert only(events, "optimizer", "load")[-2:] == [("optimizer", 5e-5, 10), ("load", "step_000002")]
    out = capsys.readouterr().out
    expected = [
        "changed since the checkpoint:",
        "  actor.ppo_epochs 1 -> 2",
        "  actor.optim.lr 1e-06 -> 5e-05",
        "  actor.optim.lr_decay_style constant -> linear",
        "  reward.timeout_s 10.0 -> 7.0",
        "  trainer.total_training_steps 2 -> 5",
        "  the policy's learning-rate schedule continues after update 4 of 10",
    ]
    assert "\n".join(expected) in out
    run(tmp_path, trainer={**trainer, "total_training_steps": 5}, **changed)
    out += capsys.readouterr().out
    assert "changed since" not in out.partition("of 10")[2]
    for written in (out.encode(), *(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())):
        assert not [value for value in ("of-the-judge", "sk-0123", "of-another-judge") if value.encode() in written]
    with pytest.raises(ConfigError, match="reward.kwargs.api_key=<redacted>: a record has no secrets; give it again"):
        load_config(tmp_path / "config.yaml")
    assert (tmp_path / "config.yaml").read_text() == first
    attempts = {path.name: yaml.safe_load(path.read_text()) for path in (tmp_path / "config_attempts").iterdir()}
    difference = {
        "actor": actor,
        "reward": {"timeout_s": 7.0},
        "trainer": {"total_training_steps": 5},
    }
    assert attempts == {"002.yaml": difference, "003.yaml": difference}


def test_a_start_without_a_checkpoint_is_a_first_start(tmp_path: Path) -> None:
    run(tmp_path, trainer={"save_freq": 2, "total_training_steps": 2})
    run(tmp_path, trainer={"save_freq": 2, "total_training_steps": 2, "test_freq": 7})
    for path in (tmp_path / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    run(tmp_path, trainer={"total_training_steps": 3})
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["trainer"]["total_training_steps"] == 3
    assert not (tmp_path / "config_attempts").exists()


def test_an_unreadable_record_of_the_first_start_is_kept(tmp_path: Path) -> None:
    run(tmp_path, stop_after=2)
    (tmp_path / "config.yaml").write_text("a: [")
    run(tmp_path)
    assert (tmp_path / "config.yaml").read_text() == "a: ["
    assert yaml.safe_load((tmp_path / "config_attempts/002.yaml").read_text())["model"]["path"] == "start"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"data": {"seed": 7}}, "data.seed 42 -> 7: cannot change when a run resumes, here from "),
    ({"sft": {"optim": {"lr": 1.0}}}, "sft.optim.lr 1e-06 -> 1.0: cannot change"),
    ({"rollout": {"partial": {"over_sample": 1.5}}}, "rollout.partial.over_sample 1.0 -> 1.5: cannot change"),
    ({"trainer": {"total_training_steps": 1}}, "trainer.total_training_steps=1 is less than the 2 steps that "),
]


@pytest.mark.parametrize(("sections", "message"), REFUSED)
def test_what_must_not_change_is_refused_by_name(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    """In the trainer, which knows the undamaged checkpoint. The next tests check what happens before ranks start."""
    run(tmp_path, stop_after=2)
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        run(tmp_path, **sections)
    assert not (tmp_path / "config_attempts").exists()


def test_steps_that_were_drawn_ahead_need_a_correction(tmp_path: Path) -> None:
    def refused(**correction: Any) -> list[str]:
        raw = config(algorithm={"rollout_correction": correction})
        saved = {"step": 2, "config": raw.model_dump(mode="json"), "run": {"collector": {"ahead": [{}]}}}
        return texts(refusals(tmp_path / "step_000002", saved, raw))

    (problem,) = refused(rollout_is=None)
    assert "holds 1 step that earlier weights have sampled" in problem and "set rollout_is=token" in problem
    assert refused() == []


def test_the_coefficient_of_a_resumed_adaptive_controller() -> None:
    """It goes on from the saved value, unless the user has set another start."""
    saved = {"kl_coef": 0.3, "start": 0.5}
    for start, expected in ((0.5, 0.3), (0.7, 0.7)):
        controller = KlController(KlCtrl(type="adaptive", kl_coef=start))
        controller.load_state(saved)
        assert controller.kl_coef == expected


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The folder of make_run, with an output folder in which four steps are done."""
    folder = make_run(tmp_path)
    raw = yaml.safe_load((folder / "run.yaml").read_text())
    raw["trainer"] |= {"output_dir": str(folder / "out"), "save_hf_at_end": False}
    (folder / "run.yaml").write_text(yaml.safe_dump(raw))
    checkpoint = folder / "out/checkpoints/step_000004"
    checkpoint.mkdir(parents=True)
    saved = {"step": 4, "config": Config.model_validate(raw).model_dump(mode="json")}
    (checkpoint / "trainer.json").write_text(json.dumps(saved))
    record(folder / "out", "done", 4, checkpoint, 0)
    return folder


def test_a_finished_run_ends_at_once(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No rank starts, and outcome.json stays. What is missing, or another number of steps, is not done."""
    assert main(["train", str(finished / "run.yaml")]) == 0
    assert capsys.readouterr().out.startswith(f"already done: {finished}/out has all 4 steps")
    assert (finished / "out/outcome.json").exists()
    trainer = config(trainer={"output_dir": finished / "out", "total_training_steps": 4}).trainer
    assert not is_done(trainer)  # its Hugging Face folder is missing
    trainer = trainer.model_copy(update={"save_hf_at_end": False})
    assert is_done(trainer)
    assert not is_done(trainer.model_copy(update={"total_training_steps": 5}))
    assert not is_done(trainer.model_copy(update={"resume_mode": "disable"}))
    record(finished / "out", "stopped", 4, None, 75)  # before the last validation
    assert not is_done(trainer)


def test_validation_refuses_before_ranks_start(finished: Path) -> None:
    """All of it at once."""
    arguments = ["data.seed=7", "sft.steps=3", "trainer.total_training_steps=3", "rollout.n=5"]
    with pytest.raises(ConfigError) as raised:
        validate(load_config(finished / "run.yaml", arguments), world_size=2)
    checkpoint = finished / "out/checkpoints/step_000004"
    refused = f"cannot change when a run resumes, here from {checkpoint}"
    total, seed, warm_up = str(raised.value).splitlines()
    assert total.startswith(f"trainer.total_training_steps=3 is less than the 4 steps that {checkpoint} has done")
    assert seed == f"data.seed 42 -> 7: {refused}"
    assert warm_up.startswith(f"sft.steps 0 -> 3: {refused}; start a new run in another trainer.output_dir")


def test_a_damaged_checkpoint_is_not_judged(finished: Path) -> None:
    """The ranks set it aside and compare with the one before."""
    changed = config(data={"seed": 7}, trainer={"output_dir": finished / "out"})
    assert list(resume_problems(changed))
    (finished / "out/checkpoints/step_000004/trainer.json").write_text("{")
    assert not list(resume_problems(changed))
