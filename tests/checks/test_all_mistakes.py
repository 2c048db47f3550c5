"""One start shows every mistake, in the order of the file: keys, rules, files, the user's code, the folder, the GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from grpo_megatron.checks.components import signature_problem
from grpo_megatron.checks.validate import RunStart
from grpo_megatron.cli import main
from grpo_megatron.cli.config_file import WrongKeys, load_config
from grpo_megatron.planning import phases
from tests.runs import make_run

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


MODULE = """
from grpo_megatron.environments.environment import Environment

def reward(completion, answer):
    raise KeyError("gold")

def loss(inputs, config, beta): ...

class Game(Environment):
    def reset(self, row, seed):
        raise KeyError("board")

    def step(self, answer):
        raise AssertionError("is never played")
"""
TP = "actor.megatron.tensor_model_parallel_size"
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '<sep>' }}{% endfor %}"
ALL = [  # in the order of the file
    ("trainer.projct_name", "did you mean 'trainer.project_name'"),
    ("rollout.n", "one alone has advantage 0"),
    ("rollout.multi_turn.environment", "its reset fails on the first row of the data (raised: KeyError: 'board' ("),
    ("actor.loss_mode", "its signature is (inputs, config, beta)"),
    ("actor.ppo_mini_batch_size", "does not divide data.train_batch_size=8"),
    ("actor.megatron", "phase load does not fit a device of 0.00 GiB"),
    ("reward.function", "called on a real row (arithmetic/train/0, answer '1'), it fails on"),
]
SECTIONS: dict[str, dict[str, Any]] = {
    "trainer": {"projct_name": "x", "output_dir": "out", "device": "auto"},
    "rollout": {"n": 1, "multi_turn": {"environment": "user_code_of_mistakes:Game", "max_tool_response_length": 4}},
    "actor": {"loss_mode": "user_code_of_mistakes:loss", "ppo_mini_batch_size": 3},
    "data": {"apply_chat_template": True},
    "reward": {"function": "user_code_of_mistakes:reward"},
}


@pytest.fixture(scope="module")
def user_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("run"))
    (folder / "turns.jinja").write_text(TEMPLATE)
    (folder / "user_code_of_mistakes.py").write_text(MODULE)
    return folder


@pytest.fixture
def here(user_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(user_run)
    return tmp_path


def write_config(user_run: Path, path: Path, **sections: dict[str, Any]) -> str:
    raw = yaml.safe_load((user_run / "run.yaml").read_text())
    raw["data"]["chat_template"] = str(user_run / "turns.jinja")
    for name, values in sections.items():
        raw[name] = {**raw.pop(name, {}), **values}  # at the end of the file
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    return str(path)


def started_problems(capsys: pytest.CaptureFixture[str], *command: str) -> list[str]:
    assert main.main(list(command)) == 2
    out, err = capsys.readouterr()
    assert "error: " in err and "Layout\n" not in out
    return [text for text in re.split(r"\n(?=error: )", err.strip()) if text.startswith("error: ")]


def test_seven_mistakes_of_seven_kinds_in_one_error(
    user_run: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(user_run, here / "run.yaml", **SECTIONS)
    with mock.patch.object(phases, "device_bytes", return_value=3 << 20):
        before = sorted(here.rglob("*"))
        found = started_problems(capsys, "train", config)
        assert sorted(here.rglob("*")) == before
    found = [text for text in found if "phase" not in text or "phase load" in text]  # one phase stands for all
    assert len(found) == len(ALL), found
    for (key, message), problem in zip(ALL, found, strict=True):
        assert key in problem and message in problem, problem


def test_a_plan_lists_a_shortage_with_the_other_mistakes(
    user_run: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone it is the plan's verdict."""
    command = ["plan", str(user_run / "run.yaml"), "trainer.device=auto", "--gpu", "0.004"]
    found = started_problems(capsys, *command, "rollout.n=1")
    assert "rollout.n=1" in found[0] and all("does not fit a device of 0.00 GiB" in text for text in found[1:])
    assert len(found) > 1
    assert not [text for text in started_problems(capsys, *command, "rollout.n=1", f"{TP}=3") if "phase" in text]
    assert main.main(command) == 2
    assert "DOES NOT FIT 0.004 GiB" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("wrong", "number"),
    [
        ("reward.timeout=60", 1),  # the function may only have been too slow
        ("reward.function=user_code_of_mistakes:rewrd", 1),
        ("actor.megatron.tensor_parallel=2", 2),  # the reward is called all the same
    ],
)
def test_a_check_of_wrong_inputs_is_left_out(
    user_run: Path, here: Path, capsys: pytest.CaptureFixture[str], wrong: str, number: int
) -> None:
    command = [
        "train",
        str(user_run / "run.yaml"),
        "reward.function=user_code_of_mistakes:reward",
        "trainer.device=auto",
    ]
    with mock.patch.object(phases, "device_bytes", return_value=4 << 20):
        found = started_problems(capsys, *command, "trainer.projct_name=x", wrong)
    found = [text for text in found if "projct" not in text and "phase" not in text]
    assert len(found) == number, found
    assert not list(here.iterdir())


@pytest.mark.parametrize("wrong, key", [
    ("trainer", "trainer.nnodes"),  # the section is no mapping

    ("trainer.n_gpu_per_node", "trainer.n_gpus_per_node"),  # misspelt
])  # fmt: skip
def test_a_value_that_could_not_be_read_is_not_used(wrong: str, key: str) -> None:
    assert not RunStart(wrong_keys=[wrong]).knows(key)
    assert RunStart(wrong_keys=[wrong]).knows("data.max_prompt_length", "actor")
