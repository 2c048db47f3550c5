"""What is refused about models that read images, before anything starts. Each message names the key and the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_megatron.checks.methods import method_problems
from grpo_megatron.checks.models import vision_problems
from grpo_megatron.cli import main
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import Config, RolloutConfig
from grpo_megatron.exact.limits import exact_problems
from grpo_megatron.models.architecture import UnsupportedModel
from grpo_megatron.models.families import architecture_of
from grpo_megatron.models.layers.precision import precision_problems
from grpo_megatron.rollout import transformers_engine
from grpo_megatron.rollout.build import engine_problems
from tests import vision
from tests.files import published_config
from tests.planning import published
from tests.runs import texts, write_rows

READS_IMAGES, READS_TEXT = (published.architecture(f"Qwen2.5-{name}7B-Instruct") for name in ("VL-", ""))
IMAGES = "this model (qwen2_5_vl) reads images"


def config_of(tmp_path: Path, overrides: list[str]) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text("model: {path: m}\ntrainer: {total_training_steps: 4}\n")
    return load_config(path, overrides)


class OwnEngine(transformers_engine.TransformersEngine):
    """A user's engine that reads no images."""

    reads_images = False


CASES: list[tuple[list[str], str | None]] = [
    ([], None),
    (["actor.vision.freeze_tower=false", "actor.vision.freeze_merger=false", "actor.vision.lr=1e-6"], None),
    (["actor.lora.rank=8"], None),
    (["rollout.sync=delta", "actor.vision.freeze_tower=false"], None),
    (["actor.megatron.fp8.recipe=blockwise", "actor.vision.freeze_merger=false"], None),
    (["actor.megatron.overlap_param_gather=true"], None),
    (
        ["actor.megatron.overlap_param_gather=true", "actor.vision.freeze_merger=false"],
        "actor.megatron.overlap_param_gather=true gathers weights in the order of the forward pass, which leaves the trained"
        " tower out where a micro-batch has no image (actor.vision.freeze_merger=false); set overlap_param_gather=false",
    ),
    (
        ["actor.megatron.context_parallel_size=2"],
        f"actor.megatron.context_parallel_size=2: {IMAGES}, and Megatron-Core would give each rank's part of a sequence the"
        " M-RoPE angles of other tokens; set it to 1",
    ),
    (
        ["actor.lora.rank=8", "actor.vision.freeze_merger=false"],
        "actor.lora.rank=8 trains adapters of the decoder alone, and actor.vision.freeze_merger=false",
    ),
    (
        ["actor.vision.freeze_tower=false", "actor.vision.lr=1e-6", "actor.optim.lr=0"],
        "actor.vision.lr=1e-06 has the schedule of actor.optim.lr=0, scaled, which 0 cannot be; set actor.optim.lr",
    ),
    (
        ["rollout.multi_turn.environment=calculator"],
        f"rollout.multi_turn.environment='calculator': {IMAGES}, and a trajectory of several turns has none; leave"
        " rollout.multi_turn out, or set a model.path that reads text alone",
    ),
    (["rollout.quantization=fp8_per_tensor"], f"rollout.quantization=fp8_per_tensor: {IMAGES}, and vLLM would"),
    (
        ["algorithm.adv_estimator=gae"],
        f"algorithm.adv_estimator='gae' needs a critic, which has no images, and {IMAGES};",
    ),
    (["reward_model.path=r"], f"reward_model.path: a reward model has no images, and {IMAGES}; leave it out, or"),
    (["reward_models={a: {path: r}}"], f"reward_models.a.path: a reward model has no images, and {IMAGES};"),
]


@pytest.mark.parametrize(("overrides", "expected"), CASES)
def test_what_a_model_that_reads_images_cannot_be_combined_with(
    overrides: list[str], expected: str | None, tmp_path: Path
) -> None:
    config = config_of(tmp_path, overrides)
    found = texts(vision_problems(config, READS_IMAGES))
    assert len(found) == (expected is not None), found
    assert expected is None or found[0].startswith(expected), found
    assert not any(IMAGES in problem for problem in texts(vision_problems(config, READS_TEXT)))


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
    rollout = RolloutConfig(engine="tests.checks.test_vision:OwnEngine")
    (problem,) = engine_problems(rollout, has_images=True)
    assert problem == (
        "rollout.engine='tests.checks.test_vision:OwnEngine' serves no model that reads images (reads_images=False); set"
        " rollout.engine=vllm or transformers, or a model.path that reads text alone"
    )
    assert not list(engine_problems(rollout))
    assert not list(engine_problems(RolloutConfig(engine="transformers"), has_images=True))


def test_fp8_is_of_the_decoder(tmp_path: Path) -> None:
    """The tower's MLP of 3,420 is no multiple of 16, and no reason to refuse it."""
    config = config_of(tmp_path, ["actor.megatron.fp8.recipe=blockwise", "actor.megatron.fp8.param_gather=true"])
    assert texts(precision_problems(config, READS_IMAGES)) == texts(precision_problems(config, READS_TEXT))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_another_generation_is_refused_by_name(family: str) -> None:
    with pytest.raises(
        UnsupportedModel, match=f"model_type={family}: its angles are interleaved .* use a Qwen2.5-VL or"
    ):
        architecture_of({**published_config("Qwen2.5-VL-3B-Instruct"), "model_type": family})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks whose rows have no images."""
    folder = tmp_path_factory.mktemp("run")
    vision.make_model(folder / "model")
    write_rows(folder / "train.jsonl", [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(8)])
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


def test_one_start_shows_them_all(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And text alone is a plan, which shows the tower on the first stage."""
    arguments = ["train", str(run / "run.yaml"), "--dry-run", "actor.megatron.pipeline_model_parallel_size=2"]
    assert main.main(arguments) == 0
    text = " ".join(capsys.readouterr().out.split())
    arch = architecture_of(vision.make_config().to_dict())
    assert arch.vision is not None
    tower = f"{arch.vision.num_parameters(64):,} parameters"
    assert f"images tower of 2 layers x 64, MLP 80, {tower}, whole on each rank of stage 0; frozen, so" in text
    assert "at most 8 per prompt, of 64 tokens of 28 x 28 pixels" in text
    assert f"stage 0 has the vision tower besides its layers: {tower}" in text
    wrong = ["actor.vision.lr=1e-6", "model.exact=true", "rollout.engine=tests.checks.test_vision:OwnEngine"]
    assert main.main([*arguments, *wrong, "rollout.multi_turn.environment=calculator"]) == 2
    found = capsys.readouterr().err
    for part in (
        "actor.vision.lr=1e-06 has no",
        "has a vision tower;",
        "serves no model that",
        "several turns has none",
    ):
        assert part in found
