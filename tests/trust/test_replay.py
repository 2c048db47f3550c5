"""`diff --replay` runs the step where two runs part again, from a real checkpoint, and says which side repeats its record.

One run is made. Copies of it have another record, another layout in their config, or no checkpoint. Runs are those of the
command, on forked ranks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from grpo_megatron.report.trace_file import Leaves, TraceFolder
from grpo_megatron.trust import replay
from grpo_megatron.trust.compare import Diff, Leaf, Parting, compare_runs
from grpo_megatron.trust.diff import DiffOptions, diff_sections, print_diff
from tests import worlds
from tests.models.test_reward_model import make_classifier
from tests.runs import make_run, write_tokenizer
from tests.trust.test_diff import change_step

SETTINGS = [
    *("rollout.engine=transformers", "data.train_batch_size=4", "actor.optim.lr=0.01", "trainer.save_freq=1"),
    *(
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.save_hf_at_end=false",
        "trainer.logger=[jsonl]",
    ),
    *("trainer.total_training_steps=2", "actor.optim.lr_decay_style=cosine", "trainer.n_gpus_per_node=1"),
    "reward.function=tests.trust.rewards_of_certify:odd",
]


def program(words: Sequence[str], log: Path, variables: Mapping[str, str]) -> int:
    """Runs the command as a rank, with its output in `log`."""
    from grpo_megatron.cli.main import main

    os.environ.update(variables)
    with log.open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    return main(list(words))


def replay_program(
    words: Sequence[str], log: Path, settings: Mapping[str, Any], variables: Mapping[str, str] = MappingProxyType({})
) -> int:
    log.touch()
    parts = {"words": words, "log": log, "variables": dict(variables)}
    try:
        return max(worlds.run(program, settings["trainer"]["n_gpus_per_node"], **parts))
    except AssertionError:  # a refused config
        return 2


def another_reward(run: Path) -> None:
    """Changes the record of a reward in step 1."""

    def change(stages: dict[str, Leaves]) -> None:
        stages["rewards"].digests[3] += np.uint64(1)

    change_step(run, 1, change)


def started_again(settings: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / "config_attempts").mkdir()
        (run / "config_attempts/002.yaml").write_text(settings)

    return change


two_ranks = started_again("trainer: {n_gpus_per_node: 2}\nactor: {megatron: {tensor_model_parallel_size: 2}}\n")


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("replay"))
    settings = [*SETTINGS, f"trainer.output_dir={folder / 'honest'}"]
    code = replay_program(
        ["train", f"{folder / 'run.yaml'}", *settings], folder / "log", {"trainer": {"n_gpus_per_node": 1}}
    )
    assert code == 0, (folder / "log").read_text()
    return folder / "honest"


EXACT, FROM = "every digest is equal", "repeat its record from step_000001, in "
# what a copy of the run differs in, what one process has instead of one rank, what is said of the copy, and of both
CASES: list[tuple[Callable[[Path], Any], dict[str, Any] | None, str, str]] = [
    (another_reward, None, f"does not {FROM}one process: step 1, rewards: 1 of 16 rows", "alone does not"),
    (two_ranks, None, f"repeats its record from step_000001, in one process: {EXACT}", "both repeat"),
    (two_ranks, {"trainer": {"n_gpus_per_node": 1}}, "in its 2 ranks: rounding explains", ""),
    (lambda run: shutil.rmtree(run / "checkpoints"), None, "no checkpoint is less than 1 steps before step 1", ""),
]


def test_which_side_repeats_its_record(honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "replay_program", replay_program)
    monkeypatch.setattr(replay, "MAX_DISTANCE", 1)
    for number, (change, layout, seen, follows) in enumerate(CASES):
        copy = tmp_path / f"{number}"
        shutil.copytree(honest, copy)
        change(copy)
        result = Diff("", "", partings=[Parting(1, "rewards", "row")])
        with monkeypatch.context() as patches:
            if layout is not None:
                patches.setattr(replay, "ONE_PROCESS", layout)
            sides = [TraceFolder(folder) for folder in ([honest, copy] if follows else [copy])]
            result.replays = list(replay.replay(result, sides))
        assert result.replays[len(sides) - 1].startswith(f"{copy}: ") and seen in result.replays[len(sides) - 1]
        assert follows in result.replays[-1] and ("run again", result.replays) in list(diff_sections(result))
        assert not follows or f"in one process: {EXACT}" in result.replays[0]
    assert "equal" in next(replay.replay(Diff("", ""), []))
    other, name = tmp_path / "other", "model.layers.1.self_attn.k_proj.weight"
    shutil.copytree(honest, other)
    started_again("actor: {entropy_coeff: 0.1}\n")(other)
    result = Diff("", "", partings=[Parting(1, "gradients 0", "tensor", leaves=(Leaf(name, {}, {}),))])
    lines = list(replay.replay(result, [TraceFolder(honest), TraceFolder(other)]))
    assert lines[2].startswith(f"{name} in these replays: 8192 of 8192 elements differ, by at most"), lines
    assert [line.split(" [")[0] for line in lines[3:5]] == ["  first of them: left", "  first of them: right"]


@pytest.mark.soak
def test_models_beside_the_policy_and_the_warm_up_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A critic, a reward model that learns after each step, and a warm-up of two steps."""
    folder = make_run(tmp_path)
    sizes = {"vocab_size": 101, "num_hidden_layers": 2}
    model = make_classifier(tmp_path / "scores", "qwen2", **sizes)
    write_tokenizer(model)
    base = [*SETTINGS, "algorithm.adv_estimator=gae", "algorithm.iteration_steps=1", f"reward_model.path={model}"]
    base += ["sft.steps=2", "reward_model.steps=2", "actor.use_kl_loss=false"]
    runs = {
        "honest": [],
        "beside": ["critic.optim.lr=0.02", "reward_model.optim.lr=0.02"],
        "warm-up": ["sft.optim.lr=0.02"],
    }
    for name, changes in runs.items():
        settings, log = [*base, *changes, f"trainer.output_dir={tmp_path / name}"], tmp_path / f"{name}.log"
        words = ["train", f"{folder / 'run.yaml'}", *settings]
        assert replay_program(words, log, {"trainer": {"n_gpus_per_node": 1}}) == 0, log.read_text()
    result = compare_runs(*(TraceFolder(tmp_path / name) for name in ("honest", "beside")))
    stages = [one.stage for one in result.partings]
    assert stages == [
        "critic weights",
        "reward model losses 1",
        "reward model gradients 1",
        "reward model gradient norm 1",
        "reward model weights",
    ]
    assert result.cause.startswith("of the critic: the optimizer")
    assert "score.weight" in TraceFolder(tmp_path / "honest").tensors("critic weights")
    assert print_diff(DiffOptions(left=tmp_path / "honest", right=tmp_path / "warm-up", replay=True)) == 1
    text = capsys.readouterr().out
    assert f"{tmp_path}/warm-up/sft" in text and "first: step 0, weights" in text and "not run again" in text
    assert print_diff(DiffOptions(left=tmp_path / "honest", right=tmp_path / "beside")) == 1
    assert "the warm-ups: equal: every digest of 2 steps" in capsys.readouterr().out
