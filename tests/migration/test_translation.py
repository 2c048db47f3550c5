"""Configs of other trainers become configs of this program that load, and every key is translated or explained."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_megatron.cli.config_file import load_config
from grpo_megatron.cli.main import main
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.section import config_keys
from grpo_megatron.migration.trainers import OTHER_TRAINERS
from grpo_megatron.migration.translation import ImportOptions, as_yaml, flat, import_config, known_elsewhere, translate
from grpo_megatron.untrusted import redacted, shown, visible
from tests.files import DATA

# What a user writes instead of CHANGE_ME.
WRITTEN = {
    "model.path": "/models/m",
    "data.train_files": "/data/a.jsonl",
    "data.val_files": "/data/b.jsonl",
    "data.task": "trl",
    "data.train_batch_size": "8",
    "reward.function": "mine:score",
    "trainer.experiment_name": "mine",
    "actor.optim.lr_warmup_steps": "3",
    "actor.optim.min_lr": "1.0e-8",
    "reward.components": "[{name: a, function: mine:a}]",
}


def imported(trainer: str, text: str, suffix: str, folder: Path, *overrides: str, **write: str) -> tuple[Config, str]:
    """The config that `import` writes, loaded, and its text. `write`: more values of CHANGE_ME."""
    source, target = folder / f"theirs{suffix}", folder / "ours.yaml"
    source.write_text(text)
    given: Any = {"trainer": trainer, "file": source, "overrides": tuple(overrides), "output": target}
    assert import_config(ImportOptions(**given)) == 0
    left = [key for key, value in flat(yaml.safe_load(target.read_text())).items() if value == "CHANGE_ME"]
    return load_config(target, [f"{key}={(WRITTEN | write)[key]}" for key in left]), target.read_text()


CASES = sorted((DATA / "imports").glob("*.yaml"))


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_a_config_of_another_trainer(case: Path, tmp_path: Path) -> None:
    """A file of CASES has their text, and what becomes of it: values of our config, and texts that are written or not."""
    about = yaml.safe_load(case.read_text())
    for name, text in about.get("files", {}).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    given = about["trainer"], about["text"], about["suffix"], tmp_path
    config, written = imported(*given, *about.get("overrides", ()), **about.get("write", {}))
    values = config.model_dump(mode="json")
    for key, expected in about["expected"].items():
        value = functools.reduce(dict.__getitem__, key.split("."), values)
        assert value == json.loads(json.dumps(expected).replace("$HOME", str(Path.home()))), key
    assert all(text in written for text in about.get("written", ()))
    assert not any(text in written for text in about.get("absent", ()))


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_a_file_of_another_trainer_than_the_one_named(case: Path, tmp_path: Path) -> None:
    """The keys decide. slime and Miles have nearly the same, and TRL's GKDConfig has those of its GRPOConfig, too."""
    about, source = yaml.safe_load(case.read_text()), tmp_path / "theirs"
    source = source.with_suffix(about["suffix"])
    source.write_text(about["text"])
    pairs = {"slime": {"slime", "miles"}, "miles": {"slime", "miles"}, "trl": {"trl", "trl-gkd"}}
    alike = pairs.get(about["trainer"], {about["trainer"]})
    for named in OTHER_TRAINERS:
        options: Any = {"trainer": named, "file": source, "output": tmp_path / f"{named}.yaml"}
        refused = (
            contextlib.nullcontext()
            if named in alike
            else pytest.raises(ConfigError, match=f"is of {about['trainer']}: ")
        )
        with refused:
            import_config(ImportOptions(**options))
    written = flat(yaml.safe_load((tmp_path / f"{about['trainer']}.yaml").read_text()))
    assert "data.val_files" in written or written["trainer.val_before_train"] is False


def test_files_that_name_each_other_as_defaults(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("defaults: base.yaml\n")
    with pytest.raises(ConfigError, match="more than 10 files name each other as defaults"):
        imported("nemo-rl", "defaults: base.yaml\n", ".yaml", tmp_path)


@pytest.mark.parametrize(
    ("text", "suffix", "message"),
    [
        ("", ".yaml", "must be a mapping"),
        ("just words", ".sh", "sets nothing that can be read"),
        ("GRPOConfig(", ".py", "was never closed"),
        ("x='", ".sh", "No closing quotation"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, suffix: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        imported("trl", text, suffix, tmp_path)
    assert not (tmp_path / "ours.yaml").exists()


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    script = "GRPOConfig(output_dir='out')"
    imported("trl", script, ".py", tmp_path)
    with pytest.raises(ConfigError, match="exists; name another file"):
        imported("trl", script, ".py", tmp_path)


@pytest.mark.parametrize(
    ("theirs", "steps", "told"),
    [
        ("ref_model_sync_steps: 64", None, "ref_model_sync_steps=64: sync_ref_model decides"),
        (
            "sync_ref_model: true",
            512,
            "ref_model_mixup_alpha=0.6: the reference becomes the policy here, and a mixture",
        ),
        ("sync_ref_model: true\nref_model_mixup_alpha: 1.0\nref_model_sync_steps: 64", 64, "see ref_model_sync_steps"),
    ],
)
def test_reference_of_trl_is_renewed_where_its_switch_is_set(
    theirs: str, steps: int | None, told: str, tmp_path: Path
) -> None:
    config, written = imported("trl", f"model: m\nbeta: 0.04\n{theirs}\n", ".yaml", tmp_path)
    assert config.algorithm.iteration_steps == steps and told in written
    assert ("and a mixture" in written) == ("mixture" in told)


@pytest.mark.parametrize("start", ["python3 -m", "deepspeed --module", "torchrun --nproc-per-node 8 --module"])
def test_arguments_before_one_that_names_a_python_file(start: str, tmp_path: Path) -> None:
    text = f"{start} openrlhf.cli.train_ppo_ray --pretrain /m --remote_rm_url /a/reward.py --prompt_data a.jsonl"
    text += " --prompt_max_len 8 --generate_max_len 8\n"
    config, written = imported("openrlhf", text, ".sh", tmp_path, **{"reward.function": "m:f"})
    assert str(config.model.path) == "/m" and "reward.py" in written and "nproc" not in written


def test_reward_functions_of_trl(tmp_path: Path) -> None:
    text = "reward_funcs: [accuracy_reward, my_lib.rewards.brief]\nreward_weights: [1.0, 0.5]\n"
    config, _ = imported("trl", text, ".yaml", tmp_path)
    found = [(part.name, part.function, part.weight) for part in config.reward.components]
    assert found == [("accuracy_reward", "trl.rewards:accuracy_reward", 1.0), ("brief", "my_lib.rewards:brief", 0.5)]
    (tmp_path / "ours.yaml").unlink()
    config, _ = imported("trl", "reward_funcs: my_lib.brief\n", ".yaml", tmp_path)
    assert config.reward.function == "my_lib:brief" and not config.reward.components


TRL_OWN = """
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer, get_peft_config
from trl.rewards import accuracy_reward, think_format_reward
def brief(completions, **kwargs): ...
dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
trainer = GRPOTrainer(
    model="/models/qwen", reward_funcs={rewards}, train_dataset=dataset, peft_config={peft},
    args=GRPOConfig(output_dir="out", bf16=True, per_device_train_batch_size=4, gradient_accumulation_steps=2),
)
trainer.args.temperature = 0.7
"""


def test_examples_of_trl_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TRL_OWN.format(rewards="[think_format_reward, accuracy_reward]", peft="get_peft_config(model_args)")
    config, written = imported("trl", text, ".py", tmp_path, "num_processes=8")
    assert (
        written.count("model:") == 1 and config.model.dtype == "bfloat16" and config.model.path == Path("/models/qwen")
    )
    assert [part.function for part in config.reward.components] == [
        "trl.rewards:think_format_reward",
        "trl.rewards:accuracy_reward",
    ]
    assert config.data.train_batch_size == 8 and config.rollout.temperature == 0.7  # 8 processes x 4 x 2 / 8 per prompt
    told = capsys.readouterr().err
    assert "where the command line has --use_peft, give use_peft=true" in told
    assert "load_dataset('trl-lib/DeepMath-103K', split='train'): data.train_files: rows that the script makes" in told
    (tmp_path / "ours.yaml").unlink()
    config, written = imported("trl", TRL_OWN.format(rewards="brief", peft=None), ".py", tmp_path)
    assert "move brief to another module" in written
    assert 'train_batch_size: "CHANGE_ME"' in written and "number of processes x 4 x 2 samples" in written


def test_steps_of_a_generation_tools_and_a_model_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `num_processes` decides is written; tools have their environment; a value given by another name is no warning."""
    text = "def look(city): ...\nGRPOTrainer(model=model_args.model_name_or_path, tools=[look], args=GRPOConfig(\n"
    text += "gradient_accumulation_steps=2, steps_per_generation=8, vllm_importance_sampling_clip_max=2.0))\n"
    given = ("num_processes=4", "model_name_or_path=/models/qwen")
    config, written = imported("trl", text, ".py", tmp_path, *given, **{"rollout.multi_turn.tools": "[calculator]"})
    assert (config.data.train_batch_size, config.actor.ppo_mini_batch_size) == (32, 8)  # 4 x 8 x 8 / 8, 4 x 8 x 2 / 8
    assert config.rollout.multi_turn.environment == "tools" and 'tools: "CHANGE_ME"' in written
    assert config.data.max_response_length == 512 and config.model.path == Path("/models/qwen")
    assert config.algorithm.rollout_correction.rollout_rs_threshold == 2
    assert "not known" not in capsys.readouterr().err


def test_variables_of_a_script_and_settings_that_it_does_not_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that is assigned once is its value. What LoraConfig implies is no note. A terminal shows a warning once."""
    text = "size = 4\nadapters = LoraConfig(r=size, lora_alpha=9)\nrows = []\nrows = sorted(rows)\n"
    text += "GRPOTrainer('m', f, args=GRPOConfig(num_generations=size), peft_config=adapters, train_dataset=rows)\n"
    config, written = imported("trl", text, ".py", tmp_path)
    lora = config.actor.lora
    assert (config.rollout.n, lora.rank, lora.alpha, lora.dropout) == (4, 4, 9, 0.0)
    assert 'train_dataset="${rows}"' in written  # assigned twice
    assert "peft_config" not in written and "lora_dropout=0.0: off, as here" in written
    for is_terminal, count in ((False, 2), (True, 1)):
        capsys.readouterr()
        monkeypatch.setattr("sys.stdout.isatty", lambda is_terminal=is_terminal: is_terminal)
        import_config(ImportOptions(trainer="trl", file=tmp_path / "theirs.py"))
        told = capsys.readouterr()
        assert (told.out + told.err).count('train_dataset="${rows}": data.train_files') == count


def test_a_reward_that_is_left_to_the_user_is_one_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("model: {path: m}\ndata: {task: trl, train_files: [t]}\nreward: {components: CHANGE_ME}\n")
    assert main(["train", str(config), "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert "reward.components=CHANGE_ME" in told and "has no reward of its own" not in told


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_both_of_verls_optimal_token_baselines_are_one_here(tmp_path: Path, name: str) -> None:
    text = f"algorithm: {{adv_estimator: {name}}}\nactor_rollout_ref: {{actor: {{calculate_sum_pi_squared: true}}}}\n"
    assert imported("verl", text, ".yaml", tmp_path)[0].algorithm.adv_estimator == "optimal_token_baseline"


def test_a_value_that_is_refused_here_is_left_out_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "num_generations: 4\ntop_p: 0.95\ntop_k: 5000\nvllm_importance_sampling_cap: 4.0\nscale_rewards: group\n"
    config, written = imported("trl", text, ".yaml", tmp_path)
    assert (config.rollout.top_p, config.rollout.top_k) == (
        0.95,
        64,
    ) and config.algorithm.rollout_correction.rollout_rs_threshold == 4
    assert "rollout_is_threshold:" not in written and "method: dupo" not in written
    warned = capsys.readouterr().err
    assert "top_k=5000: not written as rollout.top_k: set 4096 or less" in warned
    assert "rollout.top_p=0.95: set rollout.top_k=64 too, which bounds the ids" in warned


@pytest.mark.parametrize(
    ("keys", "kind", "bounds"),
    [
        ("rollout_is_level=sequence", "sequence", (3.0, None)),
        ("rollout_is_mode=mask", "icepop", (3.0, 1 / 3)),
        ("rollout_is=False", None, (2.0, None)),
    ],
)
def test_the_correction_of_verl_0_6(
    keys: str, kind: str | None, bounds: tuple[float, float | None], tmp_path: Path
) -> None:
    older = ["algorithm.rollout_is=True", "algorithm.rollout_is_threshold=3.0", f"algorithm.{keys}"]
    text = f"python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=4 {' '.join(older)}"
    correction = imported("verl", text, ".sh", tmp_path)[0].algorithm.rollout_correction
    assert correction.rollout_is == kind
    assert (correction.rollout_is_threshold, correction.rollout_is_threshold_low) == pytest.approx(bounds)


def test_a_value_that_is_left_to_the_user_is_refused_by_name(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: {path: CHANGE_ME}\ndata: {train_batch_size: CHANGE_ME}\ntrainer: {output_dir: CHANGE_ME}\n"
    )
    with pytest.raises(ConfigError) as refused:
        load_config(config)
    assert "trainer.output_dir=CHANGE_ME: write the value of your run there" in str(refused.value)
    assert "model.path=CHANGE_ME" in str(refused.value) and str(refused.value).count("train_batch_size") == 1


OF_OPENRLHF = "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --rollout.max_new_tokens 1024 "


@pytest.mark.parametrize("row", yaml.safe_load((DATA / "imported_adapters.yaml").read_text()))
def test_lora_is_translated(row: dict[str, Any], tmp_path: Path) -> None:
    config, written = imported(row["trainer"], row["text"], row["suffix"], tmp_path)
    assert config.actor.lora.model_dump(exclude_defaults=True) == row["expected"]
    assert row["expected"] or "lora" not in written.partition("\n# ")[0]


@pytest.mark.parametrize(
    ("trainer", "text", "suffix", "message"),
    [
        ("trl", TRL_OWN.format(rewards="brief", peft="own_config()"), ".py", "only a LoraConfig"),
        ("trl", TRL_OWN.format(rewards="brief", peft="LoraConfig(use_dora=True)"), ".py", "only W0 .* is trained here"),
        ("trl", TRL_OWN.format(rewards="brief", peft="LoraConfig(modules_to_save=['lm_head'])"), ".py", "only W0"),
        ("prime-rl", "[trainer.model.lora]\nmodules_to_save = ['lm_head']\n", ".toml", "only W0"),
    ],
)
def test_lora_that_cannot_be_translated_is_refused(
    trainer: str, text: str, suffix: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        imported(trainer, text, suffix, tmp_path)
    assert not (tmp_path / "ours.yaml").exists()


NEMO = (
    "grpo: {num_prompts_per_step: 8}\npolicy: {model_name: m, generation: {colocated: {enabled: %s, resources: %s}}}\n"
)


@pytest.mark.parametrize(
    ("enabled", "resources", "nodes", "expected"),
    [
        ("false", "{gpus_per_node: 3, num_nodes: null}", 1, {"num_ranks": 3, "num_nodes": 0}),
        ("false", "{gpus_per_node: 3, num_nodes: 1}", 1, {"num_ranks": 3, "num_nodes": 0}),
        ("false", "{gpus_per_node: 8, num_nodes: 2}", 4, {"num_ranks": 0, "num_nodes": 2}),
        ("true", "{gpus_per_node: 8, num_nodes: 2}", 4, {"num_ranks": 0, "num_nodes": 0}),
    ],
)
def test_resources_of_generation(
    enabled: str, resources: str, nodes: int, expected: dict[str, int], tmp_path: Path
) -> None:
    """NeMo-RL's GPUs of one node, or whole nodes of several. An age limit of asynchronous samples is the lag."""
    text = NEMO % (enabled, resources) + f"cluster: {{gpus_per_node: 8, num_nodes: {nodes}}}\n"
    config, _ = imported("nemo-rl", text, ".yaml", tmp_path)
    assert {name: getattr(config.rollout, name) or 0 for name in expected} == expected
    if enabled == "false":
        text = text.replace("8}", "8, async_grpo: {enabled: true, max_trajectory_age_steps: 2}}", 1)
        (tmp_path / "ours.yaml").unlink()
        assert imported("nemo-rl", text, ".yaml", tmp_path)[0].rollout.lag == 2


@pytest.mark.parametrize(
    ("trainer", "text", "temperature"),
    [
        ("slime", "python3 train.py --hf-checkpoint m --prompt-data a.jsonl --eval-prompt-data t b.jsonl %s", 0.7),
        ("slime", "python3 train.py --eval-temperature 0.2 --hf-checkpoint m --eval-prompt-data t b.jsonl %s", 0.2),
        ("slime", "python3 train.py --hf-checkpoint m --prompt-data a.jsonl %s", 0.0),  # no data to validate on
    ],
)
def test_validation_samples_as_training_does(trainer: str, text: str, temperature: float, tmp_path: Path) -> None:
    """slime: `temperature=rollout_temperature if eval_temperature is None`. Here validation is greedy by default."""
    config, written = imported(trainer, text % "--rollout-temperature 0.7 --use-tis", ".sh", tmp_path)
    assert config.rollout.val_kwargs.temperature == temperature
    assert "# Nearest method: `method: grpo`" in written  # not a3po, which truncated importance sampling is part of


def test_an_unknown_rank_is_left_to_the_user(tmp_path: Path) -> None:
    text = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=m actor_rollout_ref.model.lora_rank=$RANK"
    source, target = tmp_path / "run.sh", tmp_path / "ours.yaml"
    source.write_text(text)
    given: Any = {"trainer": "verl", "file": source, "output": target}
    assert import_config(ImportOptions(**given)) == 0
    with pytest.raises(ConfigError, match="actor.lora.rank=CHANGE_ME: write"):
        load_config(target)


def test_what_changes_the_run_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "data: {image_key: pictures, shuffle: true, truncation: left}\nalgorithm: {pf_ppo: {weight_pow: 2.0}}\n"
    text += "actor_rollout_ref: {actor: {policy_loss: {loss_mode: reinforce}}, model: {lora_rank: 0}}\n"
    source, target = tmp_path / "run.yaml", tmp_path / "ours.yaml"
    source.write_text(text)
    given: Any = {"trainer": "verl", "file": source, "output": target}
    assert import_config(ImportOptions(**given)) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert [line.split("=")[0] for line in told] == [
        "warning: data.image_key",
        "warning: algorithm.pf_ppo.weight_pow",
        "warning: actor_rollout_ref.actor.policy_loss.loss_mode",
    ]
    written = target.read_text()
    assert (
        'loss_mode: "CHANGE_ME"' in written
        and "this loss is not here" in written
        and "lora" not in written.partition("\n# Without")[0]
    )
    assert "These change the run" in written and "truncation" in written.partition("Without an equal here")[2]


VISION = {
    "verl": "actor_rollout_ref: {{model: {{path: {model}, lora_rank: {rank}, target_modules: all-linear,"
    " exclude_modules: .*visual.*}}, actor: {{{freeze}}},"
    " rollout: {{engine_kwargs: {{vllm: {{disable_mm_preprocessor_cache: true, limit_mm_per_prompt: {{image: 3}}}}}}}}}}\n"
    "data: {{image_key: images, video_key: videos}}\n",
    "easyr1": "data: {{image_key: images, image_dir: null, min_pixels: 3136, max_pixels: 1003520}}\n"
    "worker: {{actor: {{model: {{model_path: {model}, {freeze}, lora: {{rank: {rank}, exclude_modules: .*visual.*}}}}}},"
    " rollout: {{limit_images: 3}}}}\n",
}


@pytest.mark.parametrize("trainer", VISION)
def test_a_model_that_reads_images(trainer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Theirs train the tower unless it is frozen. Text models refuse these keys, and adapters leave the tower as it is."""
    for model, rank, freeze, frozen in (
        ("Qwen2.5-VL-7B-Instruct", 0, "false", False),
        ("qwen2_5_vl", 0, "true", True),
        ("qwen2-vl", 8, "false", True),
        ("Qwen2.5-7B", 0, "false", True),
    ):
        text = VISION[trainer].format(model=model, rank=rank, freeze=f"freeze_vision_tower: {freeze}")
        (tmp_path / "ours.yaml").unlink(missing_ok=True)
        config, written = imported(trainer, text, ".yaml", tmp_path)
        assert (config.actor.vision.freeze_tower, config.actor.vision.freeze_merger) == (frozen, frozen)
        assert config.data.max_images == (8 if "vl" not in model.lower() else 3)
        limits = (None, None) if trainer == "verl" or "vl" not in model.lower() else (3136, 1003520)
        assert (config.data.image_min_pixels, config.data.image_max_pixels) == limits
        assert config.actor.lora.exclude_modules == [] and "visual" not in written.partition("\n# Without")[0]
        assert "warning: " not in capsys.readouterr().err
    text = VISION[trainer].format(model="qwen2-vl", rank=0, freeze="seed: 1")
    (tmp_path / "ours.yaml").unlink()
    config, written = imported(trainer, text, ".yaml", tmp_path)
    assert not config.actor.vision.is_frozen and f"# {trainer}'s default" in written


def test_images_of_the_others(tmp_path: Path) -> None:
    text = 'args = GRPOConfig(per_device_train_batch_size=8)\nGRPOTrainer("Qwen/Qwen2.5-VL-3B-Instruct", args=args)\n'
    assert not imported("trl", text, ".py", tmp_path)[0].actor.vision.is_frozen
    (tmp_path / "ours.yaml").unlink()
    assert imported("trl", text.replace("-VL", ""), ".py", tmp_path)[0].actor.vision.is_frozen
    (tmp_path / "ours.yaml").unlink()
    script = "python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path /models/Qwen2-VL --data.image_key photos"
    script += " --data.max_len 9 --rollout.max_new_tokens 4 --actor.lr_warmup_ratio 0 --actor.min_lr_ratio 0"
    config, text = imported("openrlhf", f"{script} --data.max_images_per_prompt 2", ".sh", tmp_path)
    assert config.data.max_images == 2 and 'data.image_key="photos": a row\'s images are in its column images' in text
    (tmp_path / "ours.yaml").unlink()
    text = "seq_len = 9\nmax_steps = 5\norchestrator.train.sampling.max_completion_tokens = 4\n"
    text += '[model]\nname = "Qwen2.5-VL"\n[model.vlm]\nvision_encoder_attr = "model.visual"\nfreeze_vision_encoder = false\n'
    actor = imported("prime-rl", text, ".toml", tmp_path)[0].actor
    assert not actor.vision.is_frozen
    assert (actor.loss_mode, actor.clip_ratio_low, actor.clip_ratio_high) == ("ipo", 0.3, 0.3)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("actor_rollout_ref.actor.optim.lr", "here it is 'actor.optim.lr'"),
        ("num_generations", "trl's num_generations is 'rollout.n'"),
        ("algorithm.beta", "trl's beta is 'actor.kl_loss_coef'"),
        ("actor.lr", "there is 'actor.optim.lr'"),
        ("actor.clip_ratio", "is 'actor.clip_ratio_low'"),
        ("actor.strategy", "the strategy is always Megatron-Core"),
        ("algorithm.kl_coef", "easyr1's algorithm.kl_coef is 'actor.kl_loss_coef'"),
        ("worker.rollout.n", "`grpo-megatron import easyr1 FILE`"),
        ("orchestrator.group_size", "`grpo-megatron import prime-rl FILE`"),
        ("loss_fn.ratio_clip_min", "`grpo-megatron import nemo-rl FILE`"),
        ("rollout-batch-size", "slime's rollout-batch-size is 'data.train_batch_size'"),
    ],
)
def test_an_unknown_key_of_theirs_is_explained(key: str, hint: str, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("model: {path: m}\n")
    with pytest.raises(ConfigError) as refused:
        load_config(config, [f"{key}=1"])
    assert hint in str(refused.value)
    assert known_elsewhere("data.colour") is None and known_elsewhere("colour") is None


def test_the_tables_name_keys_of_ours() -> None:
    known = [key.name for key in config_keys(Config)]
    for trainer in OTHER_TRAINERS.values():
        ours = {
            key for rule in trainer.rules.values() for case in rule.cases.values() if case != str(case) for key in case
        }
        ours |= {*trainer.implied, *(rule.ours for rule in trainer.rules.values() if rule.ours)}
        assert not [key for key in ours if not any(key == one or key.startswith(f"{one}.") for one in known)]
        assert all(trainer.rule(key, {}) or trainer.prefixes for key in trainer.defaults)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", "GRPOConfig(beta={(1, 2): 3})"),
        ("a.py", f"GRPOConfig(beta={'-' * 30_000}1)"),
        ("a.yaml", 'data: {train_files: "\\e[31m\\x9b31m"}'),
    ],
)
def test_a_hostile_source_gives_a_config_or_a_reason(
    tmp_path: Path, name: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    with contextlib.suppress(ConfigError):
        import_config(ImportOptions(trainer="trl" if name == "a.py" else "verl", file=tmp_path / name))
    assert not {"\x1b", "\x9b"} & set(capsys.readouterr().out)


# -- slime, Miles and NeMo-RL: flags and values as their own launch scripts have them ------------------------------------


# -- nothing is lost, and no secret is written ---------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", OTHER_TRAINERS)
def test_every_key_of_theirs_is_in_the_output(trainer: str) -> None:
    """As the origin of a value, or as a comment with the reason; whatever its value and the keys beside it are."""
    other = OTHER_TRAINERS[trainer]
    refused = {key for key, rule in other.rules.items() if rule.table == "refused"}
    refused |= {old for old, name in other.renamed.items() if name in refused}
    known = sorted({*other.rules, *other.renamed, *other.defaults} - refused)
    keys = st.sampled_from([*known, "colour", "data.colour.of", "trainer.seed"])
    values = st.sampled_from(
        [None, False, True, 0, 1, 8, 0.5, "a", "$A", "sequence", "dr_grpo", "cispo", [], ["a"], {}]
    )

    @given(st.dictionaries(keys, values, max_size=8))
    @settings(max_examples=40, deadline=None, database=None)
    @example({"loss_type": "dr_grpo", "importance_sampling_level": "sequence"})
    @example({"importance_sampling_level": "sequence", "loss_type": "cispo"})
    def every_key(theirs: dict[str, Any]) -> None:
        result = translate(theirs, other)
        lines = [*result.warnings, *result.notes]
        told = {name for _, origin in result.values.values() for name in origin.partition("=")[0].split(", ")}
        told |= {name for written, _ in lines for name in written.partition("=")[0].split(", ")}
        assert told >= set(theirs), set(theirs) - told
        text = as_yaml(result, "a file")
        assert all(f"#   {written}: {why}" in text for written, why in lines)
        brought = {"ref_model_mixup_alpha"} if "sync_ref_model" in theirs else set()  # by a key that was set
        never_set = {f"{trainer}'s default {key}" for key in other.defaults.keys() - brought}
        assert not never_set & {written.partition("=")[0] for written, _ in result.warnings}

    every_key()


def test_a_value_that_replaces_another_is_named(tmp_path: Path) -> None:
    theirs = "loss_type: dr_grpo\nimportance_sampling_level: sequence\nmodel_name_or_path: a\nmodel: b\n"
    config, text = imported("trl", theirs, ".yaml", tmp_path)
    assert (config.actor.loss_mode, config.actor.loss_agg_mode) == ("gspo", "seq-mean-token-mean")
    assert 'loss_type="dr_grpo": with importance_sampling_level=sequence every response counts alike' in text
    assert 'model_name_or_path: model.path="a" is replaced by "b" of model' in text
    script = "python3 -m verl.trainer.main_ppo --config-path={} data.colour=null ~data.shuffle actor@role=fsdp"
    (tmp_path / "ours.yaml").unlink()
    text = imported("verl", script.format("config"), ".sh", tmp_path)[1]
    told, quiet = (part.split("\n") for part in text.partition("# These change the run")[2].split("# Without an equal"))
    assert [line.partition("=")[0] for line in told if "=" in line] == ["#   ~data.shuffle", "#   actor@role"]
    assert [line.partition("=")[0] for line in quiet if "=" in line] == ["#   config-path", "#   data.colour"]
    (tmp_path / "ours.yaml").unlink()
    assert (
        'config-path="mine": the settings of a file there'
        in imported("verl", script.format("mine"), ".sh", tmp_path)[1]
    )


OLD_OPENRLHF = (
    OF_OPENRLHF + "--bf16 --ref_num_nodes 1 --deepspeed_enable_sleep --vllm_sync_backend nccl --data.max_len 2048"
)


@pytest.mark.parametrize("key", ["use_wandb", "logger.wandb.key"])
def test_a_token_is_not_written_and_its_tracker_is_on(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for token in ("0123456789abcdef0123456789abcdef01234567", "anything", "$WANDB_KEY"):
        config, text = imported("openrlhf", f"{OLD_OPENRLHF} --{key} {token}", ".sh", tmp_path)
        (tmp_path / "ours.yaml").unlink()
        told = capsys.readouterr().err
        assert config.trainer.logger == ["jsonl", "console", "wandb"] and token not in text + told
        assert f'{key}="<redacted>": a secret is not written: give it in the environment (WANDB_API_KEY' in told
        assert told.count("warning: ") == 1 and "; 1 warning\n" in told and config.model.dtype == "bfloat16"
        assert "These change the run" not in text


def test_a_file_of_rows_is_taken_and_a_set_of_the_hub_is_described(tmp_path: Path) -> None:
    for name, found in {"rows.jsonl": "rows.jsonl", "OpenRLHF/prompts": "CHANGE_ME"}.items():
        _, text = imported("openrlhf", f"{OLD_OPENRLHF} --prompt_data {name}", ".sh", tmp_path)
        assert f"train_files: {found}" in text.replace("[", "").replace('"', ""), text
        (tmp_path / "ours.yaml").unlink()


@pytest.mark.parametrize(
    ("trainer", "suffix", "text"),
    [
        ("verl", ".sh", "python3 -m verl.trainer.main_ppo +data.apply_chat_template_kwargs.enable_thinking=False"),
        (
            "slime",
            ".sh",
            """python3 train.py --num-rollout 9 --apply-chat-template-kwargs '{"enable_thinking":false}'""",
        ),
        ("trl", ".py", "args = GRPOConfig(num_generations=8, chat_template_kwargs={'enable_thinking': False})\n"),
        ("nemo-rl", ".yaml", "policy: {tokenizer: {chat_template_kwargs: {enable_thinking: false}}}\n"),
    ],
)
def test_thinking_that_is_off_stays_off(trainer: str, suffix: str, text: str, tmp_path: Path) -> None:
    """radixark/miles issue 330: the value is false, which elsewhere means that a key asks for nothing."""
    config, _ = imported(trainer, text, suffix, tmp_path)
    assert config.data.chat_template_kwargs == {"enable_thinking": False}


HASH = "0123456789abcdef0123456789abcdef01234567"
SECRET_TEXTS = f"""
<<hf_abcdefghijklmnopqrstuvwxyz>>
--key <<sk-proj-0123456789abcdefghij>> x
<<sk-ant-api03-AbCdEf0123456789-AbCdEf_0123>>
<<wandb_v1_AbCdEf0123456789AbCdEf0123456789>>
login <<{HASH}>>
<<ghp_0123456789abcdefghijABCDEFGHIJ012345>>
<<github_pat_11ABCDEFG0123456789_abcdefghijklmnop>>
<<glpat-AbCdEf0123456789AbCd>>
<<xoxb-123456789012-123456789012-AbCdEfGhIj>>
<<AKIAIOSFODNN7EXAMPLE>>
http://x/v1?key=<<AIzaSyA0123456789abcdefghijklmnopqrstu>>
<<nvapi-AbCdEf0123456789AbCdEf0123456789AbCdEf>>
<<npm_0123456789abcdefghijABCDEFGHIJ012345>>
<<eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N>>
key <<-----BEGIN RSA PRIVATE KEY-----\\nProc-Type: 4,ENCRYPTED\\n\\nMIIEowIBAAKCAQEA7x==\\n-----END RSA PRIVATE KEY----->> x
cut <<-----BEGIN PRIVATE KEY-----\\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcw\\nggSjAgEAAoIBAQC7VJTUt9Us8cKj>> and so
the header alone: <<-----BEGIN OPENSSH PRIVATE KEY----->>
Authorization: Bearer <<abc.def-ghi>>
-H "Authorization: Basic <<dXNlcjpwYXNzd29yZA==>>"
bearer <<abcdefgh1234>>
http://<<me:pass>>@host:80/v1
postgres://<<u:p4ss>>@db/x
http://x/v1?token=<<abcd>>&n=1
http://s3/x?X-Amz-Signature=<<0123456789abcdef0123>>&y=1
WANDB_API_KEY=<<abc>>; run
aws_secret_access_key = <<wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY>>
{{'api_key': '<<abc>>', 'n': 1}}
{{"password":"<<swordfish>>"}}
password=<<swordfish>>
password: <<swordfish>>
The secret: <<9f8e7d6c5b4a>>, keep it
--password <<swordfish>> --n 1
--judge-api-key <<abc>> x
hf_token: <<abc>>"""
INNOCENT_TEXTS = f"""
/hub/snapshots/{HASH}/x
-----BEGIN PUBLIC KEY-----\\nMIIBIjANBgkqhkiG9w0BAQEFAAOC
commit {HASH}
git checkout {HASH}
revision: "{HASH}"
sha1={HASH}
3141592653589793238462643383279502884197
hf_checkpoint_of_the_run
risk-averse-task-0123456789-and-more
sk-learn-based-grader-v2-with-more-words
sk-large-model-2024-checkpoint
wandb_v2_run_of_the_week_2024
xoxb-hugs-and-kisses
glpat-ient-of-the-day-long
http://host:80/a@b
git@github.com:a/b
eos_token: </s>
rollout_is=token
The secret: it is the number 7.
Tell me the password: "swordfish"
my_secret = compute()
credentials: none
{{"api_key": null}}
password: str
access_key: ${{AWS_KEY}}
OPENAI_API_KEY=$KEY
session_token=None
key=os.environ["KEY"]
api_key_env=JUDGE_KEY
The bearer certificate-holder wins
access token: what is it?
reward.kwargs.secret_word=apple"""


def test_forms_of_secrets() -> None:
    """The text between the marks is redacted, and nothing else, however it is written."""
    for marked in (SECRET_TEXTS + INNOCENT_TEXTS).strip().splitlines():
        text, expected = re.sub("<<|>>", "", marked), re.sub("<<.*>>", "<redacted>", marked)
        assert (redacted(text), visible(text)) == (expected, expected) and shown(text) == repr(redacted(text))
        assert redacted({"b": (text, 1)}) == {"b": (expected, 1)}
        assert redacted(text.replace("\\n", "\n")) == expected.replace("\\n", "\n")
    given = {
        "a": [{"password": "x", "n": 1}],
        "eos_token": "</s>",
        "input_key": "q",
        "stop_token_ids": [1],
        "revision": HASH,
    }
    assert redacted(given) == {**given, "a": [{"password": "<redacted>", "n": 1}]}
