"""What happens at which step: syncs, samples, validation, saving, renewals, learning, and where a resumed run goes on.

The trainer is the real one; models, engine and ranks are stand-ins (tests/fakes.py). A policy's weights are named by the
number of its updates, so "policy after 3" is what step 3 must sample with.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from grpo_megatron.config import Config, ConfigError
from grpo_megatron.data.responses import WrittenResponse
from grpo_megatron.device import Device
from grpo_megatron.parallel.mesh import RankError
from grpo_megatron.training import placement
from tests import fakes
from tests.fakes import only
from tests.fakes import run_trainer as run
from tests.stored import rows_without

ITERATIVE = {"algorithm": {"iteration_steps": 3}}
ADAPTIVE = {"type": "adaptive", "kl_coef": 0.5, "target_kl": 0.001, "horizon": 100}
KL_IN_REWARD = {
    "algorithm": {"adv_estimator": "reinforce_plus_plus", "use_kl_in_reward": True, "kl_ctrl": ADAPTIVE},
    "actor": {"use_kl_loss": False},
}
INITIAL = {
    "algorithm": {"source": "initial", "adv_estimator": "rft", "rft_threshold": 0.5},
    "actor": {"loss_mode": "sft", "use_kl_loss": False},
}


def steps(events: list[Any], kind: str) -> list[int]:
    return [event[1] for event in only(events, kind)]


# -- one run -----------------------------------------------------------------------------------------------------------


def test_the_order_of_a_step(tmp_path: Path) -> None:
    """Step 3 of a run in which everything is due at it."""
    trainer = {"total_training_steps": 6, "test_freq": 3, "save_freq": 4}
    events, _ = run(tmp_path, trainer=trainer, algorithm={"iteration_steps": 3})
    start, end = events.index(("after", 3)), events.index(("after", 4))
    assert events[start + 1 : end] == [
        ("save hf", "iterations/step_000003", "policy after 3"),
        ("sync", 3, "policy after 3"),
        ("validate", 3, [100, 101, 102], -1),
        ("draw", 3, [0, 1], 3),
        ("reward model", 3),
        ("update", 4),
        ("save", 4),
    ]


def test_every_step_draws_with_the_weights_before_it(tmp_path: Path) -> None:
    events, rows = run(tmp_path)
    assert only(events, "sync") == [("sync", step, f"policy after {step}") for step in range(4)]
    assert only(events, "draw") == [
        ("draw", 0, [0, 1], 0),
        ("draw", 1, [2, 3], 1),
        ("draw", 2, [4, 5], 2),
        ("draw", 3, [0, 1], 3),
    ]
    assert only(events, "save hf", "reward model learns") == []
    assert [row["step"] for row in rows] == [row["training/global_step"] for row in rows] == [0, 1, 2, 3]
    assert [row["training/epoch"] for row in rows] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3])
    # old_logprobs are from before the update of the step; each update moves them by 0.01 from the sampled ones
    assert [row["training/rollout_logp_diff_mean"] for row in rows] == pytest.approx([0, 0.01, 0.02, 0.03], abs=1e-6)


@pytest.mark.parametrize(("stale", "message"), [("policy after 1", "step 2 cannot train on 4 of 4"), ("", "unknown")])
def test_a_step_refuses_samples_of_other_weights(tmp_path: Path, stale: str, message: str) -> None:
    """The engine samples with the weights of step 1 at step 2, and with nothing at all."""
    draw = fakes.WatchedGenerator.sample

    def stale_draw(self: Any, *arguments: Any, **named: Any) -> Any:
        samples = draw(self, *arguments, **named)
        for sample in samples if named["version"] == 2 else ():
            sample.weights_digest = stale
        return samples

    with mock.patch.object(fakes.WatchedGenerator, "sample", stale_draw), pytest.raises(RankError, match=message):
        run(tmp_path)


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"test_freq": -1, "val_before_train": False}, []),
        ({"test_freq": 3, "val_before_train": True}, [0, 3, 6, 7]),
        ({"test_freq": 7, "val_before_train": False}, [7]),
    ],
)
def test_when_it_validates(tmp_path: Path, trainer: dict[str, Any], expected: list[int]) -> None:
    """Before step 0 if configured, every test_freq steps, and at the end; always with the weights of that step."""
    events, rows = run(tmp_path, trainer={"total_training_steps": 7, **trainer})
    assert steps(events, "validate") == expected
    assert [row["step"] for row in rows if any(name.startswith("val-core") for name in row)] == expected
    assert only(events, "summary") == [("summary", expected)]
    for step in expected:
        place = events.index(("validate", step, [100, 101, 102], -1))
        assert events[place - 1] == ("sync", step, f"policy after {step}")


@pytest.mark.parametrize(("save_freq", "expected"), [(-1, []), (3, [3, 6, 7]), (7, [7]), (9, [7]), (2, [2, 4, 6, 7])])
def test_when_it_saves(tmp_path: Path, save_freq: int, expected: list[int]) -> None:
    """Every save_freq steps and after the last, after the update and before the run may be stopped."""
    events, _ = run(tmp_path, trainer={"total_training_steps": 7, "save_freq": save_freq})
    assert steps(events, "save") == expected
    for done in expected:
        place = events.index(("save", done))
        assert (events[place - 1][0], events[place + 1]) == ("update", ("after", done))
        assert len(only(events[:place], "update")) == done


def test_the_end_of_a_run(tmp_path: Path) -> None:
    events, _ = run(tmp_path, trainer={"save_hf_at_end": True})
    assert events[-6:] == [
        ("save hf", "hf", "policy after 4"),
        ("summary", []),
        ("finished", 4),
        "pool closed",
        "shutdown",
        "destroy mesh",
    ]
    events, _ = run(tmp_path / "failed", stop_after=2)
    assert events[-2:] == ["pool closed", "stopped"]  # only what needs no other rank


# -- outer iterations --------------------------------------------------------------------------------------------------


def test_an_iteration_renews_the_reference_and_ends_with_learning(tmp_path: Path) -> None:
    """Not before the first one. The reward model has rewarded step 2 when it learns, and that checkpoint has what it learned."""
    events, _ = run(tmp_path, **ITERATIVE, trainer={"total_training_steps": 8, "save_freq": 3})
    assert [event[1] for event in only(events, "save hf")] == ["iterations/step_000003", "iterations/step_000006"]
    for step in (3, 6):
        place = events.index(("save hf", f"iterations/step_{step:06d}", f"policy after {step}"))
        assert events[place - 1 : place + 2 : 2] == [("after", step), ("sync", step, f"policy after {step}")]
        learned = events.index(("reward model learns", step - 1))
        assert [event[0] for event in events[learned - 2 : learned + 2]] == [
            *("reward model", "update"),
            *("reward model learns", "save"),
        ]
    assert steps(events, "reward model learns") == [2, 5]
    assert steps(events, "reward model") == list(range(8))


def test_copies_of_the_reference_go_when_no_checkpoint_needs_them(tmp_path: Path) -> None:
    """The oldest checkpoint, of 4 steps, would continue the iteration that began at step 3."""

    def copies() -> list[int]:
        return sorted(int(path.name.removeprefix("step_")) for path in (tmp_path / "iterations").iterdir())

    run(tmp_path, **ITERATIVE, trainer={"total_training_steps": 10, "save_freq": 4})
    assert copies() == [3, 6, 9]
    shutil.rmtree(tmp_path / "checkpoints/step_000004")
    # The oldest is now of 8 steps, in the iteration that began at step 6.
    run(tmp_path, **ITERATIVE, trainer={"total_training_steps": 13, "save_freq": 4})
    assert copies() == [6, 9, 12]


def test_a_resumed_iteration_needs_its_copy(tmp_path: Path) -> None:
    run(tmp_path, **ITERATIVE, stop_after=4)
    shutil.rmtree(tmp_path / "iterations/step_000003")
    with pytest.raises(ConfigError, match=r"step 4 needs the policy before step 000003"):
        run(tmp_path, **ITERATIVE)


# -- the initial model -------------------------------------------------------------------------------------------------


def test_the_initial_model_answers_and_the_policy_is_validated(tmp_path: Path) -> None:
    """Two rounds at step 0, whose groups are all informative but too few; the initial model is streamed once.

    An outer iteration samples from its own start.
    """
    sections = {**INITIAL, "algorithm": {**INITIAL["algorithm"], "filter_groups": {"enable": True}}}
    events, _ = run(
        tmp_path, **sections, data={"gen_batch_size": 1}, trainer={"total_training_steps": 2, "val_before_train": True}
    )
    assert only(events, "sync", "draw", "validate")[:7] == [
        ("sync", 0, "policy after 0"),
        ("validate", 0, [100, 101, 102], -1),
        ("sync", 0, "folder start"),
        ("draw", 0, [0], 0),
        ("draw", 0, [1], 1 << 32),
        ("sync", 1, "policy after 1"),
        ("sync", 1, "folder start"),
    ]
    sections = {**INITIAL, "algorithm": {**INITIAL["algorithm"], "iteration_steps": 2}}
    events, _ = run(tmp_path / "iterative", **sections, trainer={"total_training_steps": 5})
    drawn_with = [events[i - 1][2] for i, event in enumerate(events) if event[0] == "draw"]
    assert drawn_with == ["folder start", "folder start", "policy after 2", "policy after 2", "policy after 4"]


# -- the warm-up -------------------------------------------------------------------------------------------------------

SFT = {"steps": 3, "train_batch_size": 2, "optim": {"lr": 0.5}}
ROWS = [([1], WrittenResponse([2, 3])), ([4, 5], WrittenResponse([6]))]


def test_the_warm_up_comes_first_and_has_an_optimizer_of_its_own(tmp_path: Path) -> None:
    """Three supervised updates; then a fresh optimizer for 4 steps x 2 mini-batches x 3 epochs = 24 updates."""
    actor = {"ppo_mini_batch_size": 1, "ppo_epochs": 3, "optim": {"lr": 0.25}}
    events, rows = run(tmp_path, rows=ROWS, sft=SFT, actor=actor)
    assert events[: events.index(("draw", 0, [0, 1], 0))] == [
        ("engine", "policy offloaded"),  # and no optimizer yet: vLLM requires free memory
        ("optimizer", 0.5, 3),
        *[event for step in range(3) for event in (("update", 2), ("after", step + 1))],
        ("save hf", "warmup", "policy after 3"),
        ("optimizer", 0.25, 24),
        ("sync", 0, "policy after 3"),
    ]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]


def test_a_resumed_run_does_not_warm_up_again(tmp_path: Path) -> None:
    """And its initial model is the warmed-up one, not the folder that the run was given."""
    run(tmp_path, rows=ROWS, sft=SFT, **INITIAL, stop_after=2)
    events, _ = run(tmp_path, rows=ROWS, sft=SFT, **INITIAL)
    assert only(events, "optimizer", "load", "update", "sync")[:5] == [
        ("optimizer", 1e-6, 4),
        ("load", "step_000002"),
        ("sync", 2, "policy after 5"),
        ("sync", 2, "policy after 3"),
        ("update", 2),
    ]


# -- without an engine -------------------------------------------------------------------------------------------------

FROM_FILE = {
    "algorithm": {"source": "file", "adv_estimator": "constant"},
    "actor": {"loss_mode": "sft", "use_kl_loss": False},
}


def test_a_run_that_draws_nothing_has_no_engine(tmp_path: Path) -> None:
    """No engine, no reward workers, no sync, no sample; the rest of each step is as in any run.

    Every token has log-probability -1 - 0.01 x updates, in rows of 1, 2 and 3 tokens: so has the mean over the tokens.
    """
    events, rows = run(tmp_path, **FROM_FILE, trainer={"save_freq": 4})
    assert events == [
        ("optimizer", 1e-6, 4),
        *[event for step in range(3) for event in (("reward model", step), ("update", 2), ("after", step + 1))],
        *[("reward model", 3), ("update", 2), ("save", 4), ("after", 4)],
        *[("summary", []), ("finished", 4), "destroy mesh"],
    ]
    assert [row["training/epoch"] for row in rows] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3])
    trainer = {"total_training_steps": 7, "test_freq": 3, "val_before_train": True}
    _, rows = run(tmp_path / "held out", **FROM_FILE, trainer=trainer, num_loss_rows=3)
    losses = {row["step"]: row["val/loss/held_out"] for row in rows if "val/loss/held_out" in row}
    assert losses == pytest.approx({0: 1.0, 3: 1.03, 6: 1.06, 7: 1.07}, abs=1e-6)


# -- stop and resume ---------------------------------------------------------------------------------------------------

RESUMED: dict[str, dict[str, Any]] = {
    "plain": {},
    "iterative": ITERATIVE,
    "KL in the reward": KL_IN_REWARD,
    "initial": INITIAL,
    "from a file": FROM_FILE,
    "initial, iterative": {**INITIAL, "algorithm": {**INITIAL["algorithm"], "iteration_steps": 3}},
    "dynamic": {"algorithm": {"filter_groups": {"enable": True}}, "data": {"gen_batch_size": 5}},
    "replay": {"algorithm": {"replay": {"ratio": 0.5}}},
}


@pytest.mark.parametrize(("name", "stop_after"), [("plain", 1), ("plain", 3), *((name, 4) for name in RESUMED)])
def test_stop_and_resume_are_as_if_never_stopped(tmp_path: Path, name: str, stop_after: int) -> None:
    """The same syncs, samples, updates and metrics; steps that a stopped run has done are not done again."""
    sections = {"trainer": {"total_training_steps": 7, "test_freq": 3, "val_before_train": True}, **RESUMED[name]}
    whole, _ = run(tmp_path / "whole", **sections)
    first, _ = run(tmp_path / "halves", **sections, stop_after=stop_after)
    second, _ = run(tmp_path / "halves", **sections)
    kinds = ("sync", "draw", "validate", "update", "after", "reward model", "reward model learns", "save hf")
    assert only(first, *kinds) + only(second, *kinds) == only(whole, *kinds)
    assert rows_without(tmp_path / "halves") == rows_without(tmp_path / "whole")
    validated = [] if name == "from a file" else [0, 3, 6, 7]
    assert only(second, "summary") == only(whole, "summary") == [("summary", validated)]


def test_the_adaptive_coefficient_moves_once_per_step(tmp_path: Path) -> None:
    """By -0.2 x 4 samples / horizon 100 while the KL is far below its target; the step itself used the value before."""
    _, rows = run(tmp_path, **KL_IN_REWARD)
    beta = [row["actor/reward_kl_penalty_coeff"] for row in rows]
    assert beta == pytest.approx([0.5 * 0.992**step for step in range(4)])


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    run(tmp_path, trainer={"save_freq": 4})
    events, rows = run(tmp_path, trainer={"save_freq": 4})
    assert only(events, "load", "draw", "update", "save", "finished") == [("load", "step_000004"), ("finished", 4)]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]


def test_steps_after_the_checkpoint_are_done_again(tmp_path: Path) -> None:
    """Killed after step 4 of a run that saves every three: steps 3 and 4 come twice, and count once."""
    sections: dict[str, Any] = {"trainer": {"total_training_steps": 7, "save_freq": 3}}
    whole, _ = run(tmp_path / "whole", **sections)
    run(tmp_path / "killed", **sections, stop_after=5)
    shutil.rmtree(tmp_path / "killed/checkpoints/step_000005")
    events, _ = run(tmp_path / "killed", **sections)
    assert only(events, "draw") == only(whole, "draw")[3:]
    assert rows_without(tmp_path / "killed") == rows_without(tmp_path / "whole")


# -- seeds -------------------------------------------------------------------------------------------------------------


def draws(seed: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """One number of each generator after rank `rank` has joined the world."""
    monkeypatch.setattr(placement, "build_mesh", lambda *args, **kwargs: SimpleNamespace(rank=rank))
    config = Config.model_validate({"model": {"path": "m"}, "trainer": {"seed": seed}})
    device = Device("cpu")
    with device.preserve_rng():
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        assert placement.join_world(config, device).rank == rank
        return [torch.rand(()).item(), random.random(), np.random.random()]


def test_generators_depend_on_seed_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's are alike on all ranks, Python's and numpy's differ by rank."""
    table = {(seed, rank): draws(seed, rank, monkeypatch) for seed in (1, 2, 2**63 - 1) for rank in (0, 1)}
    assert draws(2, 1, monkeypatch) == table[2, 1]
    of_torch, of_python, of_numpy = (set(column) for column in zip(*table.values(), strict=True))
    assert (len(of_torch), len(of_python), len(of_numpy)) == (3, 6, 6)
