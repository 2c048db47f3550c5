"""What is refused about `reward_model`, before anything starts. Each message names the key and the remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.checks import inputs
from grpo_megatron.checks.inputs import read_train_prompts
from grpo_megatron.checks.models import ModelFolders, beside_problems
from grpo_megatron.checks.validate import validate
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import ConfigError
from grpo_megatron.config.problems import ProblemList
from grpo_megatron.types import BY_MODEL
from tests import runs

WORKS = ["reward_model.path=REWARD", "algorithm.iteration_steps=2", "reward_model.start_iteration=1"]
CLASSIFIER = {"architectures": ["Qwen2ForSequenceClassification"]}


def problems(run: Path, reward: Path, overrides: list[str], world: int = 2) -> list[str]:
    """What `validate` finds about the reward model, in its order."""
    config = load_config(run / "run.yaml", [override.replace("REWARD", str(reward)) for override in overrides])
    found = ProblemList()
    folders = ModelFolders.read(config, found)
    found.add(beside_problems(config, world, folders))
    folders.check_weights(config, found, policy=False)
    return runs.texts(found.problems)


def changed(run: Path, target: Path, **config: Any) -> Path:
    """The model folder of the run with another config.json."""
    shutil.copytree(run / "model", target)
    file = target / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return target


def test_a_language_model_can_give_rewards_from_the_second_iteration_on(run: Path) -> None:
    assert problems(run, run / "model", WORKS) == []
    assert problems(run, run / "model", []) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([*WORKS[:2]], "new head scores every response 0 until trained; set reward_model.start_iteration=1"),
        ([*WORKS[:1]], "new head scores every response 0 until trained; set algorithm.iteration_steps"),
        ([*WORKS, "algorithm.adv_estimator=remax"], "'remax' needs the reward of a greedy response"),
        ([*WORKS, "rollout.n=1"], "set rollout.n=2 or more"),
        ([*WORKS, "actor.ppo_max_token_len_per_gpu=63"], "a pair of full sequences, 2 x 32"),
        ([*WORKS, "reward_model.kind=process"], "would learn from pairs of whole responses, which is for kind=outcome"),
        ([WORKS[0], "algorithm.adv_estimator=grpo_process"], "set reward_model.kind=process with such a model"),
        (["reward_models={a: {path: REWARD}}"], "reward_models.a.path='REWARD' is a language model, whose new head"),
        (["reward_models={a b: {path: REWARD}}"], "reward_models.a b: the name is part of metric names"),
        (["reward_models={a: {coefficient: 2}}"], "reward_models.a.path is not set"),
        ([WORKS[0], "algorithm.filter_groups.enable=true"], "algorithm.filter_groups.enable compares rewards while"),
    ],
)
def test_keys_against_keys(run: Path, overrides: list[str], expected: str) -> None:
    found = problems(run, run / "model", overrides)
    assert any(expected.replace("REWARD", str(run / "model")) in line for line in found), found


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["Qwen2ForTokenClassification"]}, "reward_model.kind=process reads *ForTokenClassification"),
        (CLASSIFIER, "with 2 labels cannot be a reward model"),  # transformers' default
        ({**CLASSIFIER, "id2label": {"0": "score"}}, "missing score.weight"),
        ({"hidden_size": 32}, "has shape"),
        ({"max_position_embeddings": 20}, "exceed the max_position_embeddings 20 of reward_model.path"),
    ],
)
def test_folders_that_are_no_reward_model(run: Path, tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    found = problems(run, changed(run, tmp_path / "model", **config), WORKS)
    assert any(expected in line and "reward_model.path" in line for line in found), found


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CLASSIFIER, "cannot be a process reward model: one score per step is *ForTokenClassification"),
        ({"architectures": ["Qwen2ForTokenClassification"], "num_labels": 3}, "it needs 1 or 2, not 3"),
    ],
)
def test_folders_that_are_no_process_reward_model(
    run: Path, tmp_path: Path, config: dict[str, Any], expected: str
) -> None:
    folder = changed(run, tmp_path / "model", **config)
    found = problems(run, folder, ["reward_models={steps: {path: REWARD, kind: process}}"])
    assert any(expected in line and "reward_models.steps.path" in line for line in found), found


def test_a_reward_function_is_called_where_its_reward_is_used(run: Path) -> None:
    """Frozen models replace it; a learning model needs its labels; with combine=add it is part of the sum."""

    def has_rule(*overrides: str) -> bool:
        return load_config(run / "run.yaml", list(overrides)).has_rule

    assert has_rule() and has_rule("reward_model.path=x", "algorithm.iteration_steps=2")
    assert has_rule("reward_model.path=x", "reward_model.combine=add")
    assert has_rule("reward_model.path=x", "reward.function=math")
    assert not has_rule("reward_model.path=x") and not has_rule("reward_models={a: {path: x}}")


def test_rows_need_no_answer_without_a_rule(run: Path, tmp_path: Path) -> None:
    rows = runs.write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{n} + 1 ="} for n in range(9)])
    config = load_config(run / "run.yaml", [f"data.train_files=[{rows}]", "reward_models={a: {path: x}}"])
    tokenizer = inputs.read_tokenizer(config, None)
    prompts = read_train_prompts(config, tokenizer)
    assert len(prompts) == 9 and {(prompt.answer, prompt.reward) for prompt in prompts} == {("", BY_MODEL)}
    with_rule = load_config(run / "run.yaml", [f"data.train_files=[{rows}]"])
    with pytest.raises(ConfigError, match="none of the fields .*answer|field 'answer' is missing"):
        read_train_prompts(with_rule, tokenizer)


def test_the_layout_must_fit_both_models(run: Path, tmp_path: Path) -> None:
    """The policy has 4 layers, the reward model 3, which cannot be cut into 2 stages."""
    from tests.tiny import make_model

    other = make_model(tmp_path / "model", "qwen2", **{**runs.SIZES, "num_hidden_layers": 3})
    runs.write_tokenizer(other)
    (line,) = problems(run, other, [*WORKS, "actor.megatron.pipeline_model_parallel_size=2"])
    assert line.startswith("reward_model.path=") and "does not divide the model's 3 layers" in line


def test_the_tokens_must_be_the_policys(run: Path, tmp_path: Path) -> None:
    other = changed(run, tmp_path / "model")
    runs.write_tokenizer(other, [*runs.VOCABULARY[:4], *reversed(runs.VOCABULARY[4:])])
    (line,) = problems(run, other, ["algorithm.adv_estimator=gae", f"critic.path={other}"])
    assert line.startswith("critic.path=") and "another tokenizer than the policy" in line
    (line,) = problems(run, other, WORKS)
    assert "another tokenizer than the policy: token '0' is 4 to the policy and 17 to it" in line
    (other / "tokenizer.json").unlink()
    assert problems(run, other, WORKS) == []  # the same number of tokens, and no vocabulary to compare


def test_a_start_reports_folder_weights_and_keys(run: Path, tmp_path: Path) -> None:
    """The weights of the second folder do not have the shapes of its config.json."""
    leaves_none = "=2 x algorithm.iteration_steps=2 = 4 steps leave none of"
    for path, expected in {
        "nowhere": ["reward_model.path='nowhere': it is not a folder"],
        str(changed(run, tmp_path / "model", hidden_size=32)): ["reward_model.path: model folder", leaves_none],
    }.items():
        overrides = [f"reward_model.path={path}", "algorithm.iteration_steps=2", "reward_model.start_iteration=2"]
        with pytest.raises(ConfigError) as error:
            validate(load_config(run / "run.yaml", overrides), world_size=2, dry_run=True)
        assert all(part in str(error.value) for part in expected)
