"""Modules of the user are found in the current folder and beside the config; keys are listed with their comments."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from grpo_megatron.cli.main import KeysOptions, print_keys
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.section import config_keys
from grpo_megatron.registry import find_modules, import_function


def test_modules_beside_the_config_are_found_and_shadow_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, beside = tmp_path / "here", tmp_path / "beside"
    for folder in (here, beside):
        folder.mkdir()
        (folder / "json.py").write_text("raise AssertionError('shadows the standard library')")
    (here / "mine_here.py").write_text("reward = 1")
    (beside / "mine_beside.py").write_text("reward = 2")
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = list(sys.path)
    find_modules(Path("../beside/run.yaml"))
    find_modules(Path("../beside/run.yaml"))
    assert len(sys.path) == len(before) + 2 and sys.path[: len(before)] == before
    assert (import_function("mine_here:reward"), import_function("mine_beside:reward")) == (1, 2)


def test_keys_are_listed_with_default_type_and_comment(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_keys(KeysOptions(section="rollout.val_kwargs")) == 0
    assert "rollout.val_kwargs.temperature: 0.0   (float)\n    0: greedy\n" in capsys.readouterr().out
    assert print_keys(KeysOptions()) == 0 and "model.path: needed   (Path; resume: fixed)" in capsys.readouterr().out
    assert len(list(config_keys(Config))) == len({key.name for key in config_keys(Config)})
    assert print_keys(KeysOptions(section="critic.optim.lr")) == 0
    needs = "needs algorithm.adv_estimator:needs_values"
    assert f"critic.optim.lr: 1e-05   (float; resume: schedule; {needs})" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="did you mean 'actor'"):
        print_keys(KeysOptions(section="actr"))
