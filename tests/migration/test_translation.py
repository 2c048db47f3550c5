"""Configs of other trainers become configs of this program that load, and every key is translated or explained."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.section import config_keys
from grpo_megatron.migration.trainers import OTHER_TRAINERS
from grpo_megatron.migration.translation import ImportOptions, as_yaml, flat, import_config, known_elsewhere, translate
from grpo_megatron.untrusted import redacted, shown, visible

VERL_SCRIPT = r"""
#!/bin/bash
prompts=512
max_len=$((1024 * 8))
export NCCL_DEBUG=WARN
python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer.yaml' \
    algorithm.adv_estimator=grpo \
    data.train_files="['$HOME/gsm8k/train.parquet']" \
    data.val_files=/data/test.parquet \
    data.train_batch_size=${prompts} \
    data.max_response_length=${max_len} \
    data.max_prompt_length=${max_prompt:-1024} \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.clip_ratio=0.1 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
    actor_rollout_ref.ref.megatron.param_offload=True \
    actor_rollout_ref.rollout.val_kwargs.do_sample=False \
    actor_rollout_ref.rollout.n=5 \
    reward_model.overlong_buffer.enable=False reward_model.overlong_buffer.len=4096 \
    custom_reward_function.path=/home/me/my_reward.py custom_reward_function.name=score \
    +custom_reward_function.reward_kwargs.bonus=2 \
    trainer.logger='["console","wandb","mlflow"]' trainer.experiment_name=qwen \
    trainer.n_gpus_per_node=8 trainer.colour=blue $@
"""
TRL_SCRIPT = """
from trl import GRPOConfig, GRPOTrainer
raise SystemExit("this script must not run")
args = GRPOConfig(
    output_dir="out", num_generations=4, per_device_train_batch_size=16, gradient_accumulation_steps=2, beta=0.04,
    learning_rate=5e-6, loss_type="dr_grpo", scale_rewards=False, epsilon=0.1, max_steps=50, run_name=name,
)
"""


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


def imported(trainer: str, text: str, suffix: str, folder: Path, *overrides: str) -> tuple[Config, str]:
    """The config that `import` writes, loaded, and its text."""
    source, target = folder / f"theirs{suffix}", folder / "ours.yaml"
    source.write_text(text)
    given: Any = {"trainer": trainer, "file": source, "overrides": tuple(overrides), "output": target}
    assert import_config(ImportOptions(**given)) == 0
    left = [key for key, value in flat(yaml.safe_load(target.read_text())).items() if value == "CHANGE_ME"]
    return load_config(target, [f"{key}={WRITTEN[key]}" for key in left]), target.read_text()


def test_a_script_of_verl(tmp_path: Path) -> None:
    config, text = imported("verl", VERL_SCRIPT, ".sh", tmp_path, "data.seed=7")
    assert config.data.train_files == [Path.home() / "gsm8k/train.parquet"]
    assert config.data.val_files == [Path("/data/test.parquet")]
    assert (config.data.train_batch_size, config.data.max_response_length, config.data.seed) == (512, 8192, 7)
    assert config.data.max_prompt_length == 1024  # the default after :-
    assert (config.actor.clip_ratio_low, config.actor.clip_ratio_high, config.actor.optim.lr) == (0.1, 0.28, 1e-6)
    assert config.actor.ppo_micro_batch_size_per_gpu is None and "use_dynamic_bsz decides" in text
    assert config.actor.loss_mode == "gmpo"
    assert config.actor.megatron.override_transformer_config == {"recompute_granularity": "full"}
    assert config.actor.megatron.offload_reference
    assert config.reward.function == "my_reward:score" and config.reward.overlong_buffer.len is None
    assert config.reward.kwargs == {"bonus": 2}
    assert config.trainer.logger == ["jsonl", "console", "wandb", "mlflow"]
    assert (config.trainer.output_dir, config.trainer.experiment_name) == (Path("outputs/qwen"), "qwen")
    # What verl does where the script is silent.
    assert not config.actor.use_kl_loss and config.rollout.tensor_model_parallel_size == 2
    assert config.actor.ppo_mini_batch_size == 256
    assert 'trainer.colour="blue": not here' in text
    assert 'path: "CHANGE_ME"' in text and 'actor_rollout_ref.model.path="$MODEL": its value is not known here' in text


def test_variables_within_each_other_and_sums(tmp_path: Path) -> None:
    """As in the scripts that verl ships: arrays of settings, `${A:-$B}`, arithmetic, a second command."""
    script = """
        TP=${TP:-2}
        infer_tp=${INFER_TP:-${TP}}; n=$(( (1024 + 1024) * 2 ))
        EP=${EP:-$(python3 -c 'print(4)' && echo 8)}
        ACTOR=(
            actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${ACTOR_TP:-"${TP}"}
            actor_rollout_ref.actor.megatron.expert_model_parallel_size=${EP}
            actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((n * 2))
            actor_rollout_ref.model.path=/models/m data.train_files=/data/a.parquet
        )
        ray start --address=$ip:6379
        python3 -m verl.trainer.main_ppo "${ACTOR[@]}" actor_rollout_ref.rollout.tensor_model_parallel_size=$infer_tp "$@"
    """
    config, text = imported("verl", script, ".sh", tmp_path, "EP=4")
    megatron = config.actor.megatron
    assert (megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size) == (2, 4)
    assert (config.rollout.tensor_model_parallel_size, config.actor.ppo_max_token_len_per_gpu) == (2, 8192)
    assert "$" not in text and "address" not in text and "EP=" not in text


def test_a_script_of_trl_is_read_and_not_run(tmp_path: Path) -> None:
    config, text = imported("trl", TRL_SCRIPT, ".py", tmp_path)
    assert (config.rollout.n, config.actor.optim.lr, config.data.max_response_length) == (4, 5e-6, 256)
    assert config.actor.use_kl_loss and config.actor.kl_loss_coef == 0.04
    assert config.actor.loss_agg_mode == "seq-mean-token-sum-norm"
    assert not config.algorithm.norm_adv_by_std_in_grpo
    assert config.actor.clip_ratio_low == config.actor.clip_ratio_high == 0.1 and config.actor.clip_ratio_c is None
    assert (config.trainer.total_training_steps, config.trainer.output_dir) == (50, Path("out"))
    assert "16 x 2 samples / 4 per prompt = processes x 8" in text
    assert "its value is not known here" in text  # run_name=name


def test_a_yaml_file_without_a_model_says_where_to_write_it(tmp_path: Path) -> None:
    theirs = "algorithm: {kl_ctrl: {kl_coef: 0.01}}\nactor_rollout_ref: {actor: {optim: {lr: 1e-6}}}\n"
    config, text = imported("verl", theirs, ".yaml", tmp_path)
    assert 'path: "CHANGE_ME"' in text and "lr: 1.0e-06" in text and config.algorithm.kl_ctrl.kl_coef == 0.01
    assert config.algorithm.adv_estimator == "gae" and "# verl's default" in text


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
    imported("trl", TRL_SCRIPT, ".py", tmp_path)
    with pytest.raises(ConfigError, match="exists; name another file"):
        imported("trl", TRL_SCRIPT, ".py", tmp_path)


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
    assert "data.train_files: rows that the script makes" in told
    (tmp_path / "ours.yaml").unlink()
    config, written = imported("trl", TRL_OWN.format(rewards="brief", peft=None), ".py", tmp_path)
    assert "move brief to a module of its own" in written
    assert 'train_batch_size: "CHANGE_ME"' in written and "number of processes x 4 x 2 samples" in written


def test_a_value_that_is_left_to_the_user_is_refused_by_name(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "model: {path: CHANGE_ME}\ndata: {train_batch_size: CHANGE_ME}\ntrainer: {output_dir: CHANGE_ME}\n"
    )
    with pytest.raises(ConfigError) as refused:
        load_config(config)
    assert "trainer.output_dir=CHANGE_ME: write the value of your run there" in str(refused.value)
    assert "model.path=CHANGE_ME" in str(refused.value) and str(refused.value).count("train_batch_size") == 1


OF_VERL = "actor_rollout_ref: {model: {path: m, "
OF_OPENRLHF = "python3 -m openrlhf.cli.train_ppo_ray --pretrain m --rollout.max_new_tokens 1024 "
SCRIPT_OF_TRL = TRL_OWN.replace("dataset =", "adapters = {given}\ndataset =")
ADAPTERS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("verl", OF_VERL + "lora_rank: 32}}", ".yaml", {"rank": 32, "alpha": 16}),
    (
        "verl",
        OF_VERL + "lora_rank: 8, lora_alpha: 32, target_modules: 'q_proj,v_proj', exclude_modules: null}}",
        ".yaml",
        {"rank": 8, "alpha": 32, "target_modules": ["q_proj", "v_proj"]},
    ),
    (
        "verl",
        OF_VERL + "lora: {rank: 8, type: lora, dropout: 0.1, target_modules: [linear_qkv, linear_fc2]}}}",
        ".yaml",
        {
            "rank": 8,
            "alpha": 32,
            "dropout": 0.1,
            "mode": "split",
            "target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"],
        },
    ),
    ("verl", OF_VERL + "lora_rank: 0, lora_alpha: 16, target_modules: all-linear}}", ".yaml", {}),
    (
        "trl",
        SCRIPT_OF_TRL.format(
            given="LoraConfig(r=4, lora_alpha=16, task_type=TaskType.CAUSAL_LM)", rewards="brief", peft="adapters"
        ),
        ".py",
        {"rank": 4, "alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    ),
    (
        "trl",
        TRL_OWN.format(rewards="brief", peft="peft.LoraConfig(target_modules='all-linear', use_rslora=True)"),
        ".py",
        {"rank": 8, "alpha": 8, "use_rslora": True},
    ),
    (
        "trl",
        "trl grpo --model_name_or_path m --use_peft --lora_r 32 --lora_target_modules all-linear",
        ".sh",
        {"rank": 32, "alpha": 32, "dropout": 0.05, "mode": "split"},
    ),
    ("trl", "trl grpo --model_name_or_path m --lora_r 32", ".sh", {}),
    ("easyr1", "worker: {actor: {model: {lora: {rank: 64}}}}", ".yaml", {"rank": 64, "alpha": 64}),
    ("openrlhf", OF_OPENRLHF + "--ds.lora.rank 8 --ds.lora.dropout 0", ".sh", {"rank": 8, "alpha": 16}),
    (
        "openrlhf",
        OF_OPENRLHF + "--lora_rank 8 --lora_alpha 32 --target_modules q_proj k_proj",
        ".sh",
        {"rank": 8, "alpha": 32, "target_modules": ["q_proj", "k_proj"]},
    ),
]


@pytest.mark.parametrize(("trainer", "text", "suffix", "expected"), ADAPTERS)
def test_lora_is_translated(trainer: str, text: str, suffix: str, expected: dict[str, Any], tmp_path: Path) -> None:
    config, written = imported(trainer, text, suffix, tmp_path)
    assert config.actor.lora.model_dump(exclude_defaults=True) == expected
    assert expected or "lora" not in written.partition("\n# ")[0]


@pytest.mark.parametrize(
    ("trainer", "text", "suffix", "message"),
    [
        ("trl", TRL_OWN.format(rewards="brief", peft="own_config()"), ".py", "only a LoraConfig"),
        ("trl", TRL_OWN.format(rewards="brief", peft="LoraConfig(use_dora=True)"), ".py", "only W0 .* is trained here"),
        ("trl", TRL_OWN.format(rewards="brief", peft="LoraConfig(modules_to_save=['lm_head'])"), ".py", "only W0"),
        ("prime-rl", "[trainer.model.lora]\nalpha = 64\nrank = 32\n", ".toml", "training all weights instead would"),
    ],
)
def test_lora_that_cannot_be_translated_is_refused(
    trainer: str, text: str, suffix: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        imported(trainer, text, suffix, tmp_path)
    assert not (tmp_path / "ours.yaml").exists()


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
    text += "actor_rollout_ref: {actor: {policy_loss: {loss_mode: dppo_tv}}, model: {lora_rank: 0}}\n"
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
    text = "seq_len = 9\norchestrator.train.sampling.max_completion_tokens = 4\n"
    text += '[model]\nname = "Qwen2.5-VL"\n[model.vlm]\nvision_encoder_attr = "model.visual"\nfreeze_vision_encoder = false\n'
    with pytest.raises(KeyError, match="actor.loss_mode"):
        imported("prime-rl", text, ".toml", tmp_path)
    written = yaml.safe_load((tmp_path / "ours.yaml").read_text())
    assert written["actor"]["vision"] == {"freeze_tower": False, "freeze_merger": False}


EASYR1 = """
data: {train_files: org/math@train, rollout_batch_size: 512, mini_rollout_batch_size: null, max_response_length: 2048}
algorithm: {adv_estimator: grpo, disable_kl: false, use_kl_loss: true, kl_penalty: low_var_kl, kl_coef: 1.0e-2}
worker:
  actor: {global_batch_size: 128, optim: {lr: 1.0e-6, strategy: adamw}, model: {lora: {rank: 0}}}
  rollout: {n: 5, val_override_config: {temperature: 0.6, top_p: 0.95, n: 1}}
trainer: {total_epochs: 15, save_limit: -1, logger: [file, wandb]}
"""


def test_easyr1(tmp_path: Path) -> None:
    """A script names the YAML file that its settings replace; `algorithm.kl_coef` is a loss or a reward."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/config.yaml").write_text(EASYR1)
    script = "MODEL=/models/q\npython3 -m verl.trainer.main config=examples/config.yaml"
    script += (
        " worker.actor.model.model_path=${MODEL} worker.rollout.val_override_config='{\"n\":16}' trainer.max_steps=9"
    )
    config, _ = imported("easyr1", script, ".sh", tmp_path)
    assert (config.rollout.n, config.data.train_batch_size, config.actor.ppo_mini_batch_size) == (5, 512, 128)
    assert (config.actor.use_kl_loss, config.actor.kl_loss_coef, config.actor.clip_ratio_high) == (True, 0.01, 0.3)
    assert (config.rollout.val_kwargs.n, config.rollout.val_kwargs.temperature) == (16, 0.6)
    assert (config.trainer.total_training_steps, config.trainer.max_actor_ckpt_to_keep) == (9, None)
    (tmp_path / "ours.yaml").unlink()
    given = ("algorithm.use_kl_loss=false", "algorithm.kl_penalty=kl", "algorithm.online_filtering=true")
    assert config.algorithm.filter_groups.max_num_gen_batches == 10  # a limit without filtering would be refused
    config, _ = imported("easyr1", EASYR1, ".yaml", tmp_path, *given)
    assert config.algorithm.filter_groups.max_num_gen_batches == 20
    assert (config.actor.use_kl_loss, config.algorithm.use_kl_in_reward) == (False, True)
    assert (config.algorithm.kl_ctrl.kl_coef, config.algorithm.kl_penalty) == (0.01, "kl")


@pytest.mark.parametrize(
    "names",
    [
        "--actor.model_name_or_path /models/m --rollout.batch_size 512 --train.batch_size 1024"
        " --rollout.n_samples_per_prompt 16 --data.max_len 9216 --rollout.max_new_tokens 8192 --algo.kl.init_coef 1e-4"
        " --algo.kl.use_loss --algo.kl.estimator k2 --algo.advantage.estimator group_norm --actor.eps_clip_low_high 0.2 0.27"
        " --eval.steps -1 --actor.lr_warmup_ratio 0 --actor.min_lr_ratio 0 --algo.advantage.is_correction_enable"
        " --algo.advantage.is_correction_type icepop --algo.advantage.is_correction_threshold 0.5 5.0",
        "--pretrain /models/m --rollout_batch_size 512 --train_batch_size 1024 --n_samples_per_prompt 16 --max_len 9216"
        " --generate_max_len 8192 --init_kl_coef 1e-4 --use_kl_loss --kl_estimator k2 --advantage_estimator group_norm"
        " --eps_clip_low_high 0.2 0.27 --eval_steps -1 --lr_warmup_ratio 0 --actor.min_lr_ratio 0"
        " --enable_vllm_is_correction --algo.advantage.is_correction_type icepop",
    ],
)
def test_openrlhf(names: str, tmp_path: Path) -> None:
    """The names of the present version, and of earlier ones."""
    script = (
        f"ray job submit --address=http://127.0.0.1 -- python3 -m openrlhf.cli.train_ppo_ray {names} --data.input_key q"
    )
    config, text = imported("openrlhf", script, ".sh", tmp_path)
    assert (config.data.train_batch_size, config.actor.ppo_mini_batch_size, config.rollout.n) == (
        512,
        64,
        16,
    )  # 1024 / 16
    assert (config.data.max_prompt_length, config.data.max_response_length) == (1024, 8192)
    assert (config.actor.use_kl_loss, config.actor.kl_loss_coef, config.actor.kl_loss_type) == (True, 1e-4, "mse")
    assert (config.actor.clip_ratio_low, config.actor.clip_ratio_high) == (0.2, 0.27)
    correction = config.algorithm.rollout_correction
    assert (correction.rollout_is, correction.rollout_is_threshold_low, correction.rollout_is_threshold) == (
        "icepop",
        0.5,
        5,
    )
    assert config.trainer.test_freq == -1 and config.actor.optim.betas == (0.9, 0.95)
    assert 'data.input_key="q": a task file names the columns' in text and "address" not in text


def test_prime_rl(tmp_path: Path) -> None:
    text = """
        max_steps = 20
        seq_len = 2048
        [model]
        name = "/models/m"
        [orchestrator]
        batch_size = 128
        group_size = 16
        [orchestrator.train.sampling]
        max_completion_tokens = 128
        [[orchestrator.train.source]]
        name = "reverse-text"
        [trainer.optim]
        lr = 3e-6
        [trainer.loss]
        type = "default"
        [inference.vllm]
        tensor_parallel_size = 2
        [ckpt]
    """
    with pytest.raises(KeyError, match="actor.loss_mode"):  # left to the user
        imported("prime-rl", text, ".toml", tmp_path)
    config = load_config(
        tmp_path / "ours.yaml", ["actor.loss_mode=vanilla", "data.train_files=a.jsonl", "trainer.output_dir=out"]
    )
    assert (config.data.train_batch_size, config.rollout.n, config.trainer.total_training_steps) == (
        8,
        16,
        20,
    )  # 128 / 16
    assert (config.data.max_prompt_length, config.data.max_response_length) == (1920, 128)
    assert (config.actor.optim.lr, config.rollout.tensor_model_parallel_size) == (3e-6, 2)
    assert not config.actor.use_kl_loss and not config.algorithm.norm_adv_by_std_in_grpo


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

SLIME = r"""
source "${SCRIPT_DIR}/models/qwen3-30B-A3B.sh"
CKPT_ARGS=( --hf-checkpoint /root/Qwen3-30B-A3B --ref-load /root/Qwen3_torch_dist --save /root/run/ --save-interval 20 )
ROLLOUT_ARGS=( --prompt-data /root/dapo.jsonl --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
   --rm-type math --num-rollout 3000 --rollout-batch-size 8 --n-samples-per-prompt 4 --rollout-max-response-len 8192
   --rollout-temperature 0.8 --global-batch-size 16 --balance-data # a comment
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std )
EVAL_ARGS=( --eval-interval 20 --eval-prompt-data aime /root/aime.jsonl gpqa /root/gpqa.jsonl --n-samples-per-eval-prompt 16
   --eval-max-response-len 16384 --eval-top-p 0.7 )
PERF_ARGS=( --tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   --use-dynamic-batch-size --max-tokens-per-gpu 20480 --micro-batch-size 1 )
GRPO_ARGS=( --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --kl-loss-type low_var_kl --kl-coef 0.00
   --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28 --use-tis )
OPTIMIZER_ARGS=( --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
   --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer )
WANDB_ARGS=( --use-wandb --wandb-project slime-dev --wandb-group qwen3-TIS --wandb-key ${WANDB_KEY} )
MISC_ARGS=( --sglang-mem-fraction-static 0.7 --sglang-cuda-graph-bs 1 2 4 8 $(seq 16 8 256) --attention-dropout 0.0
   --rollout-num-gpus-per-engine 8 --attention-backend flash )
ray start --head --node-ip-address ${MASTER_ADDR} --num-gpus 8
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="${RUNTIME_ENV_JSON}" \
   -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} \
   ${ROLLOUT_ARGS[@]} ${OPTIMIZER_ARGS[@]} ${GRPO_ARGS[@]} ${WANDB_ARGS[@]} ${PERF_ARGS[@]} ${EVAL_ARGS[@]} ${MISC_ARGS[@]}
"""


def test_slime_and_miles(tmp_path: Path) -> None:
    config, text = imported("slime", SLIME, ".sh", tmp_path)
    data, actor, megatron = config.data, config.actor, config.actor.megatron
    assert (data.train_batch_size, config.rollout.n, actor.ppo_mini_batch_size) == (8, 4, 4)  # 16 samples / 4
    assert (data.max_response_length, data.task, data.shuffle) == (8192, "math", True)
    assert data.val_files == [Path("/root/aime.jsonl"), Path("/root/gpqa.jsonl")]
    assert (megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size) == (4, 8)
    assert megatron.override_transformer_config["recompute_method"] == "uniform" and megatron.offload_optimizer
    assert (actor.ppo_max_token_len_per_gpu, actor.ppo_micro_batch_size_per_gpu) == (20480, None)
    assert (actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (True, 0.001, "low_var_kl")
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.28, None)
    assert (actor.loss_agg_mode, actor.optim.betas, actor.optim.weight_decay) == (
        "seq-mean-token-mean",
        (0.9, 0.98),
        0.1,
    )
    assert config.algorithm.rollout_correction.rollout_is == "token" and config.algorithm.filter_groups.enable
    assert (config.rollout.tensor_model_parallel_size, config.rollout.gpu_memory_utilization) == (8, 0.7)
    assert (config.rollout.val_kwargs.n, config.rollout.val_kwargs.top_p, config.trainer.test_freq) == (16, 0.7, 20)
    assert config.trainer.logger == ["jsonl", "console", "wandb"] and "WANDB_KEY" not in text
    assert "These change" in text and text.count("a secret is not written") == 1 and "KEY=VALUE" not in text
    (tmp_path / "ours.yaml").unlink()
    adapters = '--lora-rank 32 --lora-dropout 0.0 --target-modules "all-linear" --megatron-to-hf-mode bridge --colocate'
    text = (
        SLIME.replace("--colocate", adapters)
        .replace("--use-tis", "--calculate-per-token-loss")
        .replace("--use-kl-loss", "")
    )
    config, text = imported("miles", text.replace("slime", "miles"), ".sh", tmp_path)
    assert config.actor.lora.model_dump(exclude_defaults=True) == {"rank": 32, "alpha": 16}
    assert (config.actor.loss_agg_mode, config.actor.use_kl_loss) == ("token-mean", False)
    assert config.algorithm.rollout_correction.rollout_is is None and config.algorithm.filter_groups.enable


NEMO = """
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, max_num_epochs: 1, max_num_steps: 1000000, val_period: 10,
  normalize_rewards: true, use_leave_one_out_baseline: true, max_rollout_turns: 1, seed: 42, async_grpo: {enabled: false}}
loss_fn: {reference_policy_kl_penalty: 0.01, reference_policy_kl_type: k3, ratio_clip_min: 0.2, ratio_clip_max: 0.28,
  ratio_clip_c: null, token_level_loss: true, use_importance_sampling_correction: false}
checkpointing: {enabled: true, checkpoint_dir: results/grpo, save_period: 10, keep_top_k: 3}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  tokenizer: {name: "${policy.model_name}"}
  train_global_batch_size: 256
  train_micro_batch_size: 4
  max_total_sequence_length: 512
  precision: bfloat16
  max_grad_norm: 1.0
  dtensor_cfg: {enabled: true, tensor_parallel_size: 1, activation_checkpointing: true}
  megatron_cfg: {enabled: false, tensor_model_parallel_size: 1, sequence_parallel: false,
    optimizer: {lr: 5.0e-6, adam_beta1: 0.9, adam_beta2: 0.98}, scheduler: {lr_decay_style: constant, lr_warmup_iters: 13}}
  sequence_packing:
    train_mb_tokens: "${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}"
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 3.0e-6, betas: [0.9, 0.999]}}
  generation: {backend: vllm, max_new_tokens: 384, temperature: 1.0, val_temperature: "${.temperature}", stop_strings: null,
    vllm_cfg: {tensor_parallel_size: 2, max_model_len: "${policy.max_total_sequence_length}"},
    colocated: {enabled: true, resources: {num_nodes: null}}}
data: {train: {data_path: /data/a.jsonl}, validation: null, default: {prompt_file: cot.txt}, shuffle: true}
logger: {wandb_enabled: true, mlflow_enabled: false, wandb: {project: grpo-dev, name: mine}}
cluster: {gpus_per_node: 8, num_nodes: 2}
"""


def test_nemo_rl(tmp_path: Path) -> None:
    """A file stands on those that `defaults` names; values may be those of other keys; one strategy's keys count."""
    config, text = imported("nemo-rl", NEMO, ".yaml", tmp_path)
    assert (config.data.train_batch_size, config.rollout.n, config.actor.ppo_mini_batch_size) == (
        32,
        16,
        16,
    )  # 256 / 16
    assert (config.data.max_prompt_length, config.data.max_response_length) == (128, 384)
    assert (config.actor.optim.lr, config.actor.optim.betas, config.actor.ppo_max_token_len_per_gpu) == (
        3e-6,
        (0.9, 0.999),
        2048,
    )
    assert (config.actor.clip_ratio_high, config.actor.kl_loss_coef, config.actor.kl_loss_type) == (
        0.28,
        0.01,
        "low_var_kl",
    )
    assert config.actor.megatron.override_transformer_config["recompute_granularity"] == "full"
    assert (config.rollout.val_kwargs.temperature, config.rollout.tensor_model_parallel_size) == (1.0, 2)
    assert config.trainer.total_epochs == 1 and config.trainer.logger == ["jsonl", "console", "wandb"]
    assert (config.trainer.nnodes, config.trainer.save_freq, config.model.tokenizer_path) == (2, 10, None)
    assert (
        "the group's other rewards there" in text and text.partition("These change the run")[2].count(": mean and") == 1
    )
    (tmp_path / "ours.yaml").rename(tmp_path / "first.yaml")
    (tmp_path / "base.yaml").write_text(NEMO)
    above = "defaults: base.yaml\npolicy: {megatron_cfg: {enabled: true, tensor_model_parallel_size: 2, sequence_parallel: true},"
    above += " optimizer: null, dtensor_cfg: {enabled: false}}\ncheckpointing: {enabled: false}\ngrpo: {max_num_steps: 500}\n"
    config, text = imported("nemo-rl", above, ".yaml", tmp_path)
    assert (config.actor.optim.lr, config.actor.optim.betas, config.actor.optim.lr_warmup_steps) == (
        5e-6,
        (0.9, 0.98),
        13,
    )
    assert (config.actor.megatron.tensor_model_parallel_size, config.actor.megatron.sequence_parallel) == (2, None)
    assert config.actor.megatron.override_transformer_config == {} and config.rollout.n == 16
    assert (config.trainer.total_training_steps, config.trainer.save_freq) == (
        500,
        -1,
    ) and "optimizer.kwargs" not in text
    (tmp_path / "base.yaml").write_text("defaults: base.yaml\n")
    (tmp_path / "ours.yaml").unlink()
    with pytest.raises(ConfigError, match="more than 10 files name each other as defaults"):
        imported("nemo-rl", above, ".yaml", tmp_path)


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
        never_set = {f"{trainer}'s default {key}" for key in other.defaults}
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
        assert told.count("warning: ") == 1 and config.model.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf_abcdefghijklmnopqrstuvwxyz", "<redacted>"),
        ("--key sk-proj-0123456789abcdefghij x", "--key <redacted> x"),
        ("Authorization: Bearer abc.def-ghi", "Authorization: Bearer <redacted>"),
        ("http://me:pass@host:80/v1", "http://<redacted>@host:80/v1"),
        ("WANDB_API_KEY=abc; run", "WANDB_API_KEY=<redacted>; run"),
        ("{'api_key': 'abc', 'n': 1}", "{'api_key': '<redacted>', 'n': 1}"),
        ("login 0123456789abcdef0123456789abcdef01234567", "login <redacted>"),
        *(
            (text, text)
            for text in (
                "/hub/snapshots/0123456789abcdef0123456789abcdef01234567/x",
                "commit 0123456789abcdef0123456789abcdef01234567",
                "hf_checkpoint_of_the_run",
                "risk-averse-task-0123456789-and-more",
                "http://host:80/a@b",
                "eos_token: </s>",
                "rollout_is=token",
                "git@github.com:a/b",
            )
        ),
    ],
)
def test_forms_of_secrets(text: str, expected: str) -> None:
    assert (redacted(text), visible(text), shown(text)) == (expected, expected, repr(expected))
    table = redacted(
        {"a": [{"password": "x", "n": 1}], "eos_token": "</s>", "input_key": "q", "stop_token_ids": [1], "b": (text,)}
    )
    assert table == {
        "a": [{"password": "<redacted>", "n": 1}],
        "eos_token": "</s>",
        "input_key": "q",
        "stop_token_ids": [1],
        "b": (expected,),
    }
