"""One start shows every mistake, in the order of the file: wrong keys, unknown names, rules across keys, files, signatures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grpo_megatron.checks.components import signature_problem
from grpo_megatron.cli import main
from grpo_megatron.cli.config_file import WrongKeys, load_config

CONFIG = """
trainer: {device: cpu, total_training_steps: 5, nnods: 2, val_before_train: false, test_freq: -1}
rollout: {n: 1, temperature: 9}
model: {path: MODEL}
actor: {loss_mode: vanila, clip_ratio_high: wide, loss_agg_mode: "all_mistakes:weights"}
data: {task: arithmetic, train_files: [ROWS], train_batch_size: 8}
reward: {components: [{name: format, wieght: 2}, {name: length}, {weight: 3}]}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "all_mistakes.py").write_text("def weights(lengths): ...\n")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n{"prompt": 3}\n{"answer": 4}\n')
    text = CONFIG.replace("MODEL", str(tmp_path / "nowhere")).replace("ROWS", str(rows))
    path = tmp_path / "run.yaml"
    path.write_text(text.replace("{name: length}, ", ""))
    monkeypatch.syspath_prepend(tmp_path)
    return path


def problems_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    code = main.main(["train", *arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    return re.split(r"\n(?=error: )", err.strip())


def test_a_wrong_key_has_no_consequences(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt train_files is not also a run without data; a batch size that cannot be read divides nothing."""
    text = config.read_text().replace("train_files", "train_fles").replace("n: 1, temperature: 9", "n: 4")
    config.write_text(text.replace(": 8}", ": x}"))
    problems = problems_of(capsys, str(config), "actor.loss_mode=vanilla", "actor.ppo_mini_batch_size=5")
    keys = [re.findall(r"'?([a-z]+\.[a-z_.0-9]+)", problem)[0] for problem in problems]
    expected = ["trainer.nnods", "model.path", "actor.clip_ratio_high", "actor.loss_agg_mode", "data.train_batch_size"]
    assert keys[:4] == expected[:4]
    assert sorted(keys[4:6]) == ["data.train_batch_size", "data.train_fles"]
    assert keys[6:] == ["reward.components.0.wieght", "reward.components.1.name"]


def test_what_is_left_of_a_file_with_wrong_keys(config: Path) -> None:
    with pytest.raises(WrongKeys) as wrong:
        load_config(config)
    left = wrong.value.config
    assert left is not None
    assert (left.rollout.n, left.actor.clip_ratio_high, left.trainer.nnodes) == (1, 0.2, 1)
    assert [part.name for part in left.reward.components] == ["format"]
    expected = {"trainer.nnods", "trainer.nnodes", "actor.clip_ratio_high", "reward.components.wieght"}
    expected |= {"rollout.temperature"}
    assert wrong.value.keys == expected | {"reward.components.weight", "reward.components.name"}
    config.write_text("trainer: [1]\nrollout: {n: 0}\n")
    with pytest.raises(WrongKeys) as wrong:
        load_config(config)
    assert wrong.value.keys == {"model", "trainer", "rollout.n"}
    assert wrong.value.config is not None


@pytest.mark.parametrize(
    ("function", "kind", "problem"),
    [
        (lambda inputs, config: 0, "policy loss", None),
        (max, "policy loss", None),
        (lambda inputs, config, beta: 0, "policy loss", "missing a required argument: 'beta'"),
        (lambda table: 0, "advantage estimator", "(table: GroupTable, config: AlgorithmConfig): too many positional"),
        (lambda table, config: (yield), "advantage estimator", "it is async or a generator"),
    ],
)
def test_signatures(function: object, kind: str, problem: str | None) -> None:
    found = signature_problem(function, kind)
    assert found is None if problem is None else problem in (found or "")
