"""Configs of verl and TRL become configs of this program that load, and every key is translated or explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.config.section import config_keys
from grpo_megatron.migration.trainers import OTHER_TRAINERS
from grpo_megatron.migration.translation import ImportOptions, import_config, known_elsewhere

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


def imported(trainer: str, text: str, suffix: str, folder: Path, *overrides: str) -> tuple[Config, str]:
    """The config that `import` writes, loaded, and its text."""
    source, target = folder / f"theirs{suffix}", folder / "ours.yaml"
    source.write_text(text)
    given: Any = {"trainer": trainer, "file": source, "overrides": tuple(overrides), "output": target}
    assert import_config(ImportOptions(**given)) == 0
    return load_config(target, ["model.path=/models/m"]), target.read_text()


def test_a_script_of_verl(tmp_path: Path) -> None:
    config, text = imported("verl", VERL_SCRIPT, ".sh", tmp_path, "data.seed=7")
    assert config.data.train_files == [Path.home() / "gsm8k/train.parquet"]
    assert config.data.val_files == [Path("/data/test.parquet")]
    assert (config.data.train_batch_size, config.data.max_response_length, config.data.seed) == (512, 8192, 7)
    assert config.data.max_prompt_length == 1024  # the default after :-
    assert (config.actor.clip_ratio_low, config.actor.clip_ratio_high, config.actor.optim.lr) == (0.1, 0.28, 1e-6)
    assert config.actor.ppo_micro_batch_size_per_gpu is None and "the token bound alone holds" in text
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
    assert 'actor_rollout_ref.model.path="$MODEL": model.path: its value is not known here' in text


def test_variables_within_each_other_and_sums(tmp_path: Path) -> None:
    """As in the scripts that verl ships: arrays of settings, `${A:-$B}`, arithmetic, a branch, a second command."""
    script = """
        TP=${TP:-2}
        infer_tp=${INFER_TP:-${TP}}; n=$(( (1024 + 1024) * 2 ))
        DEVICE=${DEVICE:-$(probe && echo npu || echo gpu)}
        if [ "$DEVICE" = gpu ]; then EP=4; else EP=8; fi
        ACTOR=(
            actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${ACTOR_TP:-"${TP}"}
            actor_rollout_ref.actor.megatron.expert_model_parallel_size=${EP}
            actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((n * 2))
            actor_rollout_ref.model.path=/models/m data.train_files=/data/a.parquet
        )
        ray start --address=$ip:6379
        python3 -m verl.trainer.main_ppo "${ACTOR[@]}" actor_rollout_ref.rollout.tensor_model_parallel_size=$infer_tp "$@"
    """
    config, text = imported("verl", script, ".sh", tmp_path, "DEVICE=gpu")
    megatron = config.actor.megatron
    assert (megatron.tensor_model_parallel_size, megatron.expert_model_parallel_size) == (2, 4)
    assert (config.rollout.tensor_model_parallel_size, config.actor.ppo_max_token_len_per_gpu) == (2, 8192)
    assert "$" not in text and "address" not in text and "DEVICE" not in text


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
    assert "path: CHANGE_ME" in text and "lr: 1.0e-06" in text and config.algorithm.kl_ctrl.kl_coef == 0.01
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


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("actor_rollout_ref.actor.optim.lr", "here it is 'actor.optim.lr'"),
        ("num_generations", "trl's num_generations is 'rollout.n'"),
        ("algorithm.beta", "trl's beta is 'actor.kl_loss_coef'"),
        ("actor.lr", "there is 'actor.optim.lr'"),
        ("actor.clip_ratio", "is 'actor.clip_ratio_low'"),
        ("actor.strategy", "the strategy is always Megatron-Core"),
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
