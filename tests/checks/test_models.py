"""The models of a run, before anything starts: folders beside the policy, models that score, models that read images.

Each message names the key and the remedy. The run is that of tests/runs.py, on 2 ranks.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from grpo_megatron.checks import inputs, layout
from grpo_megatron.checks.components import reward_name_problems
from grpo_megatron.checks.inputs import read_train_prompts
from grpo_megatron.checks.layout import family_problems, lora_problems
from grpo_megatron.checks.methods import method_problems
from grpo_megatron.checks.models import ModelFolders, beside_problems, vision_problems
from grpo_megatron.checks.resume import refusals
from grpo_megatron.checks.validate import Checked, validate
from grpo_megatron.cli import main
from grpo_megatron.cli.config_file import load_config, reward_defaults
from grpo_megatron.cli.plan import plan_page
from grpo_megatron.config import Config, ConfigError, RolloutConfig
from grpo_megatron.config.problems import Problem, ProblemList
from grpo_megatron.exact.limits import exact_problems
from grpo_megatron.models.architecture import UnsupportedModel
from grpo_megatron.models.families import FAMILIES, architecture_of, hf_shapes
from grpo_megatron.models.layers.precision import precision_problems
from grpo_megatron.planning.layout import world_problems
from grpo_megatron.planning.parameters import memory_of_stages
from grpo_megatron.rollout import transformers_engine
from grpo_megatron.rollout.build import engine_problems
from grpo_megatron.rollout.vllm import versions
from grpo_megatron.types import BY_MODEL
from tests import runs, tiny, vision
from tests.files import published_config
from tests.models.test_moe import MODELS
from tests.planning import published
from tests.runs import cases, texts

# -- Models beside the policy: critic and reward models ----------------------------------------------------------------

WORKS = ["reward_model.path=REWARD", "algorithm.iteration_steps=2", "reward_model.start_iteration=1"]
GAE = {"adv_estimator": "gae"}
CLASSIFIER, TOKENS = ({"architectures": [f"Qwen2For{kind}Classification"]} for kind in ("Sequence", "Token"))


def problems(run: Path, reward: Path, overrides: list[str], world: int = 2) -> list[str]:
    """Lists the problems that `validate` finds with the reward model, in its order."""
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


KEYS = """
PATH ITERATES => new head scores every response 0 until trained; set reward_model.start_iteration=1
PATH => new head scores every response 0 until trained; set algorithm.iteration_steps
WORKS algorithm.adv_estimator=remax => 'remax' needs the reward of a greedy response
WORKS rollout.n=1 => set rollout.n=2 or more
WORKS actor.ppo_max_token_len_per_gpu=63 => a pair of full sequences, 2 x 32
WORKS reward_model.kind=process => would learn from pairs of whole responses, which is for kind=outcome
PATH algorithm.adv_estimator=grpo_process => set reward_model.kind=process with such a model
'reward_models={a: {path: REWARD}}' => reward_models.a.path='REWARD' is a language model, whose new head
'reward_models={a b: {path: REWARD}}' => reward_models.a b: the name is part of metric names
'reward_models={a: {coefficient: 2}}' => reward_models.a.path is not set
rollout.top_k=101 => rollout.top_k=101 keeps all of the 101 ids; set a smaller number
'teachers={t: {path: REWARD}}' distillation.kl=jsd distillation.top_k=101 => not fewer than the policy's 101 ids
PATH algorithm.filter_groups.enable=true => algorithm.filter_groups.enable compares rewards while
"""


@pytest.mark.parametrize(
    ("overrides", "expected"), cases(KEYS, WORKS=" ".join(WORKS), PATH=WORKS[0], ITERATES=WORKS[1])
)
def test_keys_against_keys(run: Path, overrides: list[str], expected: list[str]) -> None:
    found = problems(run, run / "model", overrides)
    assert any(expected[0].replace("REWARD", str(run / "model")) in line for line in found), found


CRITIC, PROCESS = (
    ["algorithm.adv_estimator=gae", "critic.path=REWARD"],
    ["reward_models={a: {path: REWARD, kind: process}}"],
)
FOLDERS: list[tuple[list[str], dict[str, Any], str]] = [  # overrides, changes of config.json, parts of the message
    (WORKS, TOKENS, "reward_model.kind=process reads *ForTokenClassification"),
    (WORKS, CLASSIFIER, "with 2 labels cannot be a reward model"),  # transformers' default
    (WORKS, {**CLASSIFIER, "id2label": {"0": "score"}}, "missing score.weight"),
    (WORKS, {"hidden_size": 32}, "has shape"),
    (WORKS, {"max_position_embeddings": 20}, "exceed the max_position_embeddings 20 of reward_model.path"),
    (PROCESS, CLASSIFIER, "cannot be a process reward model: one score per step is *ForTokenClassification"),
    (PROCESS, {**TOKENS, "num_labels": 3}, "it needs 1 or 2, not 3"),
    (CRITIC, {**TOKENS, "num_labels": 3}, "with 3 labels cannot be a value model"),
    (CRITIC, {**CLASSIFIER, "id2label": {"0": "x"}}, "missing score.weight"),
]


@pytest.mark.parametrize(("overrides", "config", "expected"), FOLDERS)
def test_folders(run: Path, tmp_path: Path, overrides: list[str], config: dict[str, Any], expected: str) -> None:
    key = {id(WORKS): "reward_model.path", id(PROCESS): "reward_models.a.path", id(CRITIC): "critic.path"}[
        id(overrides)
    ]
    found = problems(run, changed(run, tmp_path / "model", **config), overrides)
    assert any(expected in line and key in line for line in found), found


def test_a_language_model_becomes_a_critic(run: Path) -> None:
    assert problems(run, run / "model", CRITIC) == []  # it gets a new head


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
    other = tiny.make_model(tmp_path / "model", "qwen2", **{**runs.SIZES, "num_hidden_layers": 3})
    runs.write_tokenizer(other)
    (line,) = problems(run, other, [*WORKS, "actor.megatron.pipeline_model_parallel_size=2"])
    assert line.startswith("reward_model.path=") and "does not divide the model's 3 layers" in line


@pytest.mark.parametrize(("estimator", "count"), [("zero", 0), ("grpo", 1)])
def test_rows_without_a_reward_are_for_teachers_alone(run: Path, estimator: str, count: int) -> None:
    overrides = ["data.task=jsonl", "~data.val_files", "teachers.large.path=large"]
    config = load_config(run / "run.yaml", [*overrides, f"algorithm.adv_estimator={estimator}"])
    found = [Problem.of(problem).text for problem in reward_name_problems(config)]
    assert found == count * ["data.task='jsonl' has no reward of its own; set reward.function"]


def test_a_teacher_must_fit_the_policy(run: Path, tmp_path: Path) -> None:
    """Its layers and its tokens; of another family, another size and with fewer rows of a vocabulary it fits."""
    sizes = {**runs.SIZES, "num_hidden_layers": 3, "num_key_value_heads": 4}
    path = ["teachers.large.path=REWARD"]
    smaller = tiny.make_model(tmp_path / "smaller", "mistral", **{**sizes, "vocab_size": 90})
    runs.write_tokenizer(smaller)
    assert problems(run, smaller, path) == []
    other = tiny.make_model(tmp_path / "model", "mistral", **{**sizes, "vocab_size": 128})
    runs.write_tokenizer(other)
    assert problems(run, other, [*path, "algorithm.adv_estimator=zero"]) == []
    (line,) = problems(run, other, [*path, "actor.megatron.pipeline_model_parallel_size=2"])
    assert line.startswith("teachers.large.path=") and "does not divide the model's 3 layers" in line
    (line,) = problems(run, other, [*path, "teachers.large.tensor_model_parallel_size=4"])
    assert line.startswith("teachers.large.path=") and "teachers.large.tensor_model_parallel_size" in line
    assert problems(run, other, [*path, "teachers.large.tensor_model_parallel_size=2"]) == []
    runs.write_tokenizer(other, [*runs.VOCABULARY[:-2], *reversed(runs.VOCABULARY[-2:])])
    (line,) = problems(run, other, path)
    assert f"has another tokenizer than the policy: token {runs.VOCABULARY[-2]!r}" in line
    (other / "model.safetensors").write_bytes(b"")
    assert any(
        "teachers.large.path" in line and "fetch the folder again" in line for line in problems(run, other, path)
    )


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


def plain_config(**sections: Any) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"task": "arithmetic"}, **sections})


def test_a_checkpoint_without_a_critic_cannot_go_on_with_one() -> None:
    new = plain_config(algorithm=GAE)
    saved, later = ({"step": 2, "config": config.model_dump(mode="json")} for config in (plain_config(), new))
    found = texts(refusals(Path("run/step_000002"), saved, new))
    assert any("grpo -> gae: run/step_000002 has no critic" in problem for problem in found), found
    assert not list(refusals(Path("run/step_000002"), later, plain_config()))


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
    policy, _, critic, _ = checked.models.stages(config)
    assert critic is not None and critic[0].total == policy[0].total - checked.arch.padded_vocab_size(1) * 64
    (memory,) = memory_of_stages(config, 2, policy, [], critic)
    assert memory.critic_weights == 4 * critic[0].total and memory.critic == (4 + 4 + 8 / 2) * critic[0].total
    assert "critic" in plan.split("Memory of one rank")[1].splitlines()[1]


# -- A policy that learns to score: `train-reward` ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `train-reward` on pairs."""
    folder = runs.make_run(tmp_path_factory.mktemp("reward"))
    pairs = [{"prompt": f"{n} + 1 =", "chosen": str(n + 1), "rejected": str(n)} for n in range(9)]
    steps = [{"prompt": f"{n} + 1 =", "completions": ["1 + 1", "2"], "labels": [True, False]} for n in range(9)]
    runs.write_rows(folder / "pairs.jsonl", pairs)
    runs.write_rows(folder / "steps.jsonl", steps)
    return folder


def reward_config(pairs_run: Path, *overrides: str, rows: str = "pairs") -> Config:
    data = [f"data.train_files=[{pairs_run / rows}.jsonl]", "data.val_files=[]", "sft.train_files=[]"]
    return load_config(pairs_run / "run.yaml", [*data, *overrides], reward_defaults)


def checked(config: Config) -> Checked:
    return validate(config, world_size=2, dry_run=True)


@pytest.mark.parametrize(("rows", "kind"), [("pairs", "outcome"), ("steps", "process")])
def test_the_defaults_of_train_reward_are_a_valid_run(pairs_run: Path, rows: str, kind: str) -> None:
    """A language model gets a new head. Nothing is sampled, and no reference is built."""
    overrides = ["reward_model.kind=process", "reward_model.step_separator='='"] if kind == "process" else []
    config = reward_config(pairs_run, *overrides, rows=rows)
    assert not config.has_rollouts
    found = checked(config)
    assert found.scored_folder is not None and found.scored_folder.kind == kind and not found.scored_folder.has_head
    assert len(found.offline_groups) == 9 and found.arch.tied
    assert not any(key.startswith("trainer.") for key in reward_defaults({"data": {"val_loss_files": ["x"]}}))


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "1 + 1 =", "response": "2"}, r'field \'chosen\' is missing .*reads rows {"prompt", "chosen"'),
        ({"prompt": "1 + 1 =", "chosen": "2", "rejected": "2"}, "line 1: chosen and rejected are the same"),
    ],
)
def test_wrong_rows_are_named(pairs_run: Path, tmp_path: Path, row: dict[str, Any], expected: str) -> None:
    file = runs.write_rows(tmp_path / "rows.jsonl", [row])
    with pytest.raises(ConfigError, match=f"(?s)data.train_files: .*{expected}"):
        checked(reward_config(pairs_run, f"data.train_files=[{file}]"))


def test_the_command_refuses_the_loss_of_a_language_model(pairs_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [
        "actor.loss_mode=sft",
        "algorithm.adv_estimator=constant",
        f"data.train_files=[{pairs_run / 'sft.jsonl'}]",
    ]
    arguments = ["train-reward", str(pairs_run / "run.yaml"), "data.val_files=[]", *overrides, "--dry-run"]
    assert main.main([*arguments, "trainer.val_before_train=false", "trainer.test_freq=-1"]) == 2
    assert "set loss_mode=bradley_terry (pairs) or step_labels (steps)" in capsys.readouterr().err


# -- Models that read images -------------------------------------------------------------------------------------------

READS_IMAGES, READS_TEXT = (published.architecture(f"Qwen2.5-{name}7B-Instruct") for name in ("VL-", ""))
IMAGES = "this model (qwen2_5_vl) reads images"


def config_of(tmp_path: Path, overrides: list[str]) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: m}\ntrainer: {total_training_steps: 4}\n")
    return load_config(path, overrides)


OF_IMAGES = f"""
rollout.n=8 =>
actor.vision.freeze_tower=false actor.vision.freeze_merger=false actor.vision.lr=1e-6 =>
actor.lora.rank=8 =>
rollout.sync=delta actor.vision.freeze_tower=false =>
actor.megatron.fp8.recipe=blockwise actor.vision.freeze_merger=false =>
actor.megatron.overlap_param_gather=true =>
actor.megatron.overlap_param_gather=true actor.vision.freeze_merger=false
    => actor.megatron.overlap_param_gather=true gathers weights in the order of the forward pass, which leaves the trained
    tower out where a micro-batch has no image (actor.vision.freeze_merger=false); set overlap_param_gather=false
actor.megatron.context_parallel_size=2
    => actor.megatron.context_parallel_size=2: {IMAGES}, and Megatron-Core would give each rank's part of a sequence the
    M-RoPE angles of other tokens; set it to 1
actor.lora.rank=8 actor.vision.freeze_merger=false
    => actor.lora.rank=8 trains adapters of the decoder alone, and actor.vision.freeze_merger=false
actor.vision.freeze_tower=false actor.vision.lr=1e-6 actor.optim.lr=0
    => actor.vision.lr=1e-06 has the schedule of actor.optim.lr=0, scaled, which 0 cannot be; set actor.optim.lr
rollout.quantization=fp8_per_tensor => rollout.quantization=fp8_per_tensor: {IMAGES}, and vLLM would
algorithm.adv_estimator=gae => algorithm.adv_estimator='gae' needs a critic, which has no images, and {IMAGES};
reward_model.path=r => reward_model.path: a reward model has no images, and {IMAGES}; leave it out, or
'reward_models={{a: {{path: r}}}}' => reward_models.a.path: a reward model has no images, and {IMAGES};
"""


@pytest.mark.parametrize(("overrides", "expected"), cases(OF_IMAGES))
def test_what_a_model_that_reads_images_cannot_be_combined_with(
    overrides: list[str], expected: list[str], tmp_path: Path
) -> None:
    config = config_of(tmp_path, overrides)
    found = texts(vision_problems(config, READS_IMAGES))
    assert len(found) == len(expected) and all(map(str.startswith, found, expected)), found
    assert not any(IMAGES in problem for problem in texts(vision_problems(config, READS_TEXT)))


class OwnEngine(transformers_engine.TransformersEngine):
    """A user's engine that reads no images."""

    reads_images = False


@pytest.mark.parametrize("override", ["freeze_tower=false", "freeze_merger=false", "lr=1e-6"])
def test_keys_of_a_tower_need_one(override: str, tmp_path: Path) -> None:
    (problem,) = texts(vision_problems(config_of(tmp_path, [f"actor.vision.{override}"]), READS_TEXT))
    name, _, value = override.partition("=")
    reason = "but this model (qwen2) reads no images; leave it out, or set another model.path"
    assert problem == f"actor.vision.{name}={value.replace('1e-6', '1e-06')}, {reason}"


def test_a_rate_of_what_is_frozen_has_no_effect(tmp_path: Path) -> None:
    (problem,) = texts(method_problems(config_of(tmp_path, ["actor.vision.lr=1e-6"])))
    assert problem == (
        "actor.vision.lr=1e-06 has no effect with actor.vision.freeze_tower=true and actor.vision.freeze_merger=true; set"
        " actor.vision.freeze_tower=false or actor.vision.freeze_merger=false, or leave it out"
    )
    trained = ["actor.vision.lr=1e-6", "actor.vision.freeze_merger=false"]
    assert not texts(method_problems(config_of(tmp_path, trained)))


def test_equal_bits_are_not_promised(tmp_path: Path) -> None:
    exact = ["model.exact=true", "trainer.device=cpu", "rollout.engine=transformers"]
    expected = (
        "model.exact=true: the family qwen2_5_vl has a vision tower; set another model.path, or leave model.exact out"
    )
    found = texts(exact_problems(config_of(tmp_path, exact), 1, READS_IMAGES))
    assert expected in found and expected not in texts(exact_problems(config_of(tmp_path, exact), 1, READS_TEXT))


def test_an_engine_must_read_images() -> None:
    rollout = RolloutConfig(engine="tests.checks.test_models:OwnEngine")
    (problem,) = engine_problems(rollout, has_images=True)
    assert problem == (
        "rollout.engine='tests.checks.test_models:OwnEngine' serves no model that reads images (reads_images=False); set"
        " rollout.engine=vllm or transformers, or a model.path that reads text alone"
    )
    assert not list(engine_problems(rollout))
    rollout = RolloutConfig(engine="transformers")
    assert not list(engine_problems(rollout, has_images=True))
    (problem,) = engine_problems(rollout, has_experts=True)
    assert "rollout.engine='transformers' serves no mixture of experts" in problem


def test_fp8_is_of_the_decoder(tmp_path: Path) -> None:
    """The tower's MLP of 3,420 is no multiple of 16, and no reason to refuse it."""
    config = config_of(tmp_path, ["actor.megatron.fp8.recipe=blockwise", "actor.megatron.fp8.param_gather=true"])
    assert texts(precision_problems(config, READS_IMAGES)) == texts(precision_problems(config, READS_TEXT))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"mrope_section": [24, 20, 20]}}, "mrope_interleaved=False: qwen3_vl has true"),
        ({"rope_scaling": {"mrope_section": [24, 20, 21]}}, r"mrope_section=\[24, 20, 21\] must be three sizes"),
        ({"attention_bias": True}, "qwen3_vl with attention_bias=true"),
        ({"deepstack_visual_indexes": [8, 27]}, r"deepstack_visual_indexes=\[8, 27\] must be increasing .* has 27"),
        ({"deepstack_visual_indexes": [16, 8]}, r"deepstack_visual_indexes=\[16, 8\] must be increasing"),
        ({"num_hidden_layers": 2}, "no more than the decoder's 2 layers"),
        ({"hidden_act": "gelu"}, "vision_config.hidden_act='gelu'"),
        ({"norm_topk_prob": False}, "qwen3_vl_moe_text with norm_topk_prob=false: transformers scales the weights"),
    ],
)
def test_what_qwen3_vl_cannot_have_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    size = "30B-A3B" if "norm_topk_prob" in changes else "8B"
    config = copy.deepcopy(published_config(f"Qwen3-VL-{size}-Instruct"))
    for key, value in changes.items():
        next(part for part in (config, config["vision_config"], config["text_config"]) if key in part)[key] = value
    with pytest.raises(UnsupportedModel, match=message):
        architecture_of(config)


def test_deepstack_needs_layers_outside_cuda_graphs(tmp_path: Path) -> None:
    config = config_of(tmp_path, ["actor.megatron.override_transformer_config={cuda_graph_impl: local}"])
    (problem,) = texts(vision_problems(config, published.architecture("Qwen3-VL-8B-Instruct")))
    assert "={'cuda_graph_impl': 'local'}: this model (qwen3_vl) reads images, and adds them behind 3 layers" in problem
    assert not texts(vision_problems(config, READS_IMAGES))


def test_deepstack_needs_its_layers_in_the_first_stage(tmp_path: Path) -> None:
    """36 layers: three in each of 12 stages, two in each of 18."""
    arch = published.architecture("Qwen3-VL-8B-Instruct")

    first = "actor.megatron.override_transformer_config.num_layers_in_first_pipeline_stage"

    def problems(pp: int, *overrides: str) -> list[str]:
        config = config_of(tmp_path, [f"actor.megatron.pipeline_model_parallel_size={pp}", *overrides])
        return texts(world_problems(config, pp, arch))

    reason = "of 36 layers to the first stage, which has the tower, and images are added behind the first 3 (DeepStack)"
    assert problems(18) == [
        f"actor.megatron.pipeline_model_parallel_size=18 leaves 2 {reason}; set {first}=3 or more, or"
        " actor.megatron.pipeline_model_parallel_size=12"
    ]
    assert problems(6, f"{first}=1") == [f"{first}=1 leaves 1 {reason}; set it to 3 or more"]
    assert not problems(12) and not problems(6, f"{first}=6")


@pytest.fixture(scope="module")
def images_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks whose rows have no images."""
    folder = tmp_path_factory.mktemp("run")
    vision.make_model(folder / "model")
    runs.write_rows(folder / "train.jsonl", [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(8)])
    config: dict[str, Any] = {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"task": "arithmetic", "train_files": [str(folder / "train.jsonl")], "train_batch_size": 8},
        "rollout": {"n": 4, "engine": "transformers"},
        "trainer": {
            "total_training_steps": 4,
            "n_gpus_per_node": 2,
            "device": "cpu",
            "val_before_train": False,
            "test_freq": -1,
        },
    }
    config["data"] |= {"max_prompt_length": 64, "max_response_length": 16}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder


def test_one_start_shows_them_all(images_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And text alone is a plan, which shows the tower on the first stage."""
    arguments = ["train", str(images_run / "run.yaml"), "--dry-run", "actor.megatron.pipeline_model_parallel_size=2"]
    assert main.main(arguments) == 0
    text = " ".join(capsys.readouterr().out.split())
    arch = architecture_of(vision.make_config().to_dict())
    assert arch.vision is not None
    tower = f"{arch.vision.num_parameters(64):,} parameters"
    assert f"images tower of 2 layers x 64, MLP 80, {tower}, whole on each rank of stage 0; frozen, so" in text
    assert "at most 8 per prompt, of 64 tokens of 28 x 28 pixels" in text
    assert f"stage 0 has the vision tower besides its layers: {tower}" in text
    wrong = ["actor.vision.lr=1e-6", "model.exact=true", "rollout.engine=tests.checks.test_models:OwnEngine"]
    assert main.main([*arguments, *wrong]) == 2
    found = capsys.readouterr().err
    for part in (
        "actor.vision.lr=1e-06 has no",
        "has a vision tower;",
        "serves no model that",
    ):
        assert part in found


# -- Families that a part of the run cannot compute --------------------------------------------------------------------

V3, NEXT, OSS = ({**tiny.COMMON, **MODELS[name]} for name in ("deepseek_v3", "qwen3_next", "gpt_oss"))
OLMO = {**tiny.COMMON, **tiny.FAMILIES["olmo2"]}
MISTRAL = {**tiny.COMMON, "model_type": "mistral", "sliding_window": 16}
MODELS_PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
FP8 = {"actor": {"megatron": {"fp8": {"recipe": "blockwise"}}}}
BF16 = {"model": {"path": "m", "dtype": "bfloat16"}}
OF_FAMILIES: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
    (V3, {}, None),
    (OLMO, {}, None),
    ({**OLMO, "head_dim": 16}, {}, "and this model's have 16; set rollout.engine=transformers"),
    ({**OLMO, "head_dim": 16}, {"rollout": {"engine": "transformers"}}, None),
    (V3, FP8, "fp8.recipe=blockwise: FP8 is not supported for latent attention (deepseek_v3)"),
    ({**V3, "kv_lora_rank": 256}, {}, "kernels for kv_lora_rank=512 and qk_rope_head_dim=64 only, and"),
    ({**V3, "kv_lora_rank": 256}, {"rollout": {"engine": "my.module:Engine"}}, None),
    ({**V3, "kv_lora_rank": 256}, {"trainer": {"device": "cuda"}}, None),
    (OLMO, {"actor": {"megatron": {"transformer_impl": "transformer_engine"}}}, "set transformer_impl=auto"),
    (OLMO, {"actor": {"megatron": {"context_parallel_size": 2}}}, "context_parallel_size=2 needs Transformer Engine"),
    (MISTRAL, {}, None),
    (MISTRAL, {"actor": {"megatron": {"context_parallel_size": 2}}}, "context_parallel_size=2 is not made for sliding"),
    (NEXT, BF16, None),
    (
        NEXT,
        {"model": {"path": "m", "dtype": "float32"}},
        "dtype=float32 with rollout.engine=vllm on the CPU: its kernels of",
    ),
    (NEXT, {"trainer": {"device": "cuda"}}, None),
    (
        {**NEXT, "linear_key_head_dim": 32},
        BF16,
        "have heads of 64 or 128, and config.json gives linear_key_head_dim=32",
    ),
    (NEXT, {**BF16, "rollout": {"engine": "transformers"}}, "no states of gated delta nets (qwen3_next); set rollout"),
    (OSS, {}, None),
    (OSS, FP8, "FP8 is not supported for attention sinks (gpt_oss)"),
    (NEXT, {**BF16, **FP8}, "FP8 is not supported for gated delta nets (qwen3_next)"),
    (
        NEXT,
        {**BF16, "actor": {"megatron": {"context_parallel_size": 2}}},
        "has no gated delta nets here, as this model",
    ),
    (
        NEXT,
        {**BF16, "actor": {"megatron": {"tensor_model_parallel_size": 2, "sequence_parallel": False}}},
        "nobody would sum the gradients of the norms of gated delta nets (qwen3_next)",
    ),
]


@pytest.mark.parametrize(("model", "changes", "message"), OF_FAMILIES)
def test_what_a_part_of_the_run_cannot_compute(
    model: dict[str, Any], changes: dict[str, Any], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "is_newest", lambda: True)
    problems = _of_family(model, changes)
    assert len(problems) == (message is not None)
    assert message is None or message in problems[0]


def _of_family(model: dict[str, Any], changes: dict[str, Any]) -> list[str]:
    raw: dict[str, Any] = {"model": {"path": "m"}, "trainer": {"device": "cpu", "output_dir": "o"}}
    raw |= {section: {**raw.get(section, {}), **values} for section, values in changes.items()}
    return texts(family_problems(Config.model_validate(raw), architecture_of(model)))


LINES = re.findall(r"^\| (`(?!model_type).*) \|$", MODELS_PAGE, re.MULTILINE)
ROWS = [[cell.strip(" `") for cell in line.split("|")] for line in LINES]


def test_the_page_of_models_has_every_family() -> None:
    with_rows = {row[0] for row in ROWS}
    refused = FAMILIES.keys() - with_rows
    assert with_rows <= FAMILIES.keys() and len(with_rows) == len(ROWS)
    for name in refused:
        assert f"`{name}`" in MODELS_PAGE
        with pytest.raises(UnsupportedModel, match="not supported"):
            architecture_of({"model_type": name})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_page_of_models_says_what_the_checks_refuse(row: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    monkeypatch.setattr(layout, "is_newest", lambda: True)
    name, kind, experts, lora, images, exact, fp8, engines, _ = row
    listed = [*MODELS.values(), *tiny.FAMILIES.values()]
    settings = next(
        (changes for changes in listed if changes["model_type"].removesuffix("_text") in (name, name[:-5])), {}
    )
    settings = {**tiny.COMMON, **settings}
    if settings.get("model_type") == f"{name}_text":
        settings = {"model_type": name, "text_config": settings}
    config = vision.make_config(name) if images == "yes" else AutoConfig.for_model(**settings)
    with torch.device("meta"):
        model = (AutoModelForImageTextToText if images == "yes" else AutoModelForCausalLM).from_config(config)
    assert type(model).__name__ == kind

    arch = architecture_of(config.to_dict())
    split = Config.model_validate(
        {"model": {"path": "m", "exact": True}, "actor": {"lora": {"rank": 8, "mode": "split"}}}
    )
    replay = Config.model_validate({"model": {"path": "m"}, "actor": {"moe": {"route_replay": "engine"}}})
    assert (experts == "yes") == (not texts(layout.route_problems(replay, arch)))
    assert (experts == "yes", images == "yes") == (bool(arch.num_experts), arch.vision is not None)
    assert (lora == "merged") == any(
        "has a norm between" in text for text in texts(lora_problems(split, {"actor": arch}))
    )
    assert (exact == "-") == any("the family" in text for text in texts(exact_problems(split, 1, arch)))
    assert (fp8 == "-") == any("FP8 is not" in text for text in _of_family(config.to_dict(), FP8))
    if images != "yes":  # its tensors have other names in the files
        is_served = arch.delta is None and hf_shapes(arch).keys() <= model.state_dict().keys()
        assert ("transformers" in engines) == is_served


def test_an_older_vllm_has_no_latent_attention_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.26 raises "MLA is not supported on CPU." while it is built."""
    monkeypatch.setattr(versions, "_installed", lambda *names: "0.26.0")
    [problem] = _of_family(V3, {})
    assert "the installed vLLM has no latent attention there, as this model (deepseek_v3) needs" in problem
    assert _of_family(V3, {"trainer": {"device": "cuda"}}) == _of_family(OLMO, {}) == []
