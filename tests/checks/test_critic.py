"""What is refused about the critic, before anything starts. Each message names the key and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.checks.resume import refusals
from grpo_megatron.checks.validate import validate
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.cli.plan import plan_page
from grpo_megatron.config import Config
from grpo_megatron.planning.parameters import memory_of_stages
from tests import runs
from tests.checks.test_reward_model import changed, problems

GAE = {"adv_estimator": "gae"}


def config_of(**sections: Any) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"task": "arithmetic"}, **sections})


def test_a_checkpoint_without_a_critic_cannot_go_on_with_one() -> None:
    new = config_of(algorithm=GAE)
    saved, later = ({"step": 2, "config": config.model_dump(mode="json")} for config in (config_of(), new))
    found = runs.texts(refusals(Path("run/step_000002"), saved, new))
    assert any("grpo -> gae: run/step_000002 has no critic" in problem for problem in found), found
    assert not list(refusals(Path("run/step_000002"), later, config_of()))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),  # a language model, which gets a new head
        ({"architectures": ["Qwen2ForTokenClassification"], "num_labels": 3}, "with 3 labels cannot be a value model"),
        ({"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "x"}}, "missing score.weight"),
    ],
)
def test_folders(run: Path, tmp_path: Path, config: dict[str, Any], expected: str | None) -> None:
    folder = changed(run, tmp_path / "model", **config)
    found = problems(run, folder, ["algorithm.adv_estimator=gae", f"critic.path={folder}"])
    assert found == [] if expected is None else any(expected in line and "critic.path" in line for line in found), found


def test_the_plan_counts_the_critic(run: Path) -> None:
    """A model of the policy's size without its output head: weights, gradients and 8 bytes of Adam per parameter."""
    overrides = ["algorithm.adv_estimator=gae", "algorithm.lam=0.95", "critic.lam=1", "critic.pretrain_steps=1"]
    config = load_config(run / "run.yaml", [*overrides, "critic.ppo_epochs=3"])
    checked = validate(config, 2, dry_run=True)
    plan = str(plan_page(config, checked, 2, None))
    row = (
        "critic the model that the policy starts from, new head, gamma 1, lambda 0.95 (targets 1), 3 updates per step, trained"
        " alone before step 1"
    )
    assert row in " ".join(plan.split())  # it is wrapped
    policy, _, critic = checked.models.stages(config)
    assert critic is not None and critic[0].total == policy[0].total - checked.arch.padded_vocab_size(1) * 64
    (memory,) = memory_of_stages(config, 2, policy, [], critic)
    assert memory.critic_weights == 4 * critic[0].total and memory.critic == (4 + 4 + 8 / 2) * critic[0].total
    assert "critic" in plan.split("Memory of one rank")[1].splitlines()[1]
