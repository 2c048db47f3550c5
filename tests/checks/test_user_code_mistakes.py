"""What only the user's code, the folder, the GPU or the command line can tell is in the same error as all other mistakes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from grpo_megatron.checks.validate import RunStart
from grpo_megatron.cli import main
from grpo_megatron.planning import phases
from grpo_megatron.storage.files import LOCK_FILE, FolderLock, lock_holder
from tests.runs import make_run

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
    ("trainer.total_training_steps", "--profile: the run has 4 steps, counted from 0, so there is no step 9"),
    ("trainer.projct_name", "did you mean 'trainer.project_name'"),
    ("trainer.output_dir", "it is in use by process"),
    ("rollout.n", "one alone has advantage 0"),
    ("rollout.multi_turn.environment", "its reset fails on the first row of the data (raised: KeyError: 'board')"),
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
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("run"))
    (folder / "turns.jinja").write_text(TEMPLATE)
    (folder / "user_code_of_mistakes.py").write_text(MODULE)
    return folder


@pytest.fixture
def here(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(run)
    return tmp_path


def write_config(run: Path, path: Path, **sections: dict[str, Any]) -> str:
    raw = yaml.safe_load((run / "run.yaml").read_text())
    raw["data"]["chat_template"] = str(run / "turns.jinja")
    for name, values in sections.items():
        raw[name] = {**raw.pop(name, {}), **values}  # at the end of the file
    path.write_text(yaml.safe_dump(raw, sort_keys=False))
    return str(path)


def problems_of(capsys: pytest.CaptureFixture[str], *command: str) -> list[str]:
    assert main.main(list(command)) == 2
    out, err = capsys.readouterr()
    assert "error: " in err and "Layout\n" not in out
    return [text for text in re.split(r"\n(?=error: )", err.strip()) if text.startswith("error: ")]


def test_nine_mistakes_of_nine_kinds_in_one_error(run: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(run, here / "run.yaml", **SECTIONS)
    (here / "out").mkdir()
    with FolderLock(here / "out"), mock.patch.object(phases, "device_bytes", return_value=1 << 20):
        before = sorted(here.rglob("*"))
        found = problems_of(capsys, "train", config, "--profile", "3-9")
        assert sorted(here.rglob("*")) == before
    found = [text for text in found if "phase" not in text or "phase load" in text]  # one phase stands for all
    assert len(found) == len(ALL), found
    for (key, message), problem in zip(ALL, found, strict=True):
        assert key in problem and message in problem, problem


def test_a_plan_lists_a_shortage_with_the_other_mistakes(
    run: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone it is the plan's verdict."""
    command = ["plan", str(run / "run.yaml"), "trainer.device=auto", "--gpu", "0.001"]
    found = problems_of(capsys, *command, "rollout.n=1")
    assert "rollout.n=1" in found[0] and all("does not fit a device of 0.00 GiB" in text for text in found[1:])
    assert len(found) > 1
    assert not [text for text in problems_of(capsys, *command, "rollout.n=1", f"{TP}=3") if "phase" in text]
    assert main.main(command) == 2
    assert "DOES NOT FIT 0.001 GiB" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("wrong", "number"),
    [
        ("reward.timeout=60", 1),  # the function may only have been too slow
        ("reward.function=user_code_of_mistakes:rewrd", 1),
        ("actor.megatron.tensor_parallel=2", 2),  # the reward is called all the same
    ],
)
def test_a_check_of_wrong_inputs_is_left_out(
    run: Path, here: Path, capsys: pytest.CaptureFixture[str], wrong: str, number: int
) -> None:
    command = ["train", str(run / "run.yaml"), "reward.function=user_code_of_mistakes:reward", "trainer.device=auto"]
    with mock.patch.object(phases, "device_bytes", return_value=1 << 20):
        found = problems_of(capsys, *command, "trainer.projct_name=x", wrong)
    found = [text for text in found if "projct" not in text and "phase" not in text]
    assert len(found) == number, found
    assert not list(here.iterdir())


def test_a_lock_is_looked_at_without_a_trace(tmp_path: Path) -> None:
    assert lock_holder(tmp_path) is None and lock_holder(tmp_path / "nowhere") is None
    assert not list(tmp_path.iterdir())
    with FolderLock(tmp_path) as held:
        assert (lock_holder(tmp_path) or "").startswith("process ")
        assert held.is_in_place()
    assert (tmp_path / LOCK_FILE).exists() and lock_holder(tmp_path) is None


@pytest.mark.parametrize("wrong, key", [
    ("trainer", "trainer.nnodes"),  # the section is no mapping

    ("trainer.n_gpu_per_node", "trainer.n_gpus_per_node"),  # misspelt
])  # fmt: skip
def test_a_value_that_could_not_be_read_is_not_used(wrong: str, key: str) -> None:
    assert not RunStart(wrong_keys=[wrong]).knows(key)
    assert RunStart(wrong_keys=[wrong]).knows("data.max_prompt_length", "actor")
