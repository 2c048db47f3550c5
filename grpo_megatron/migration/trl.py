"""TRL's GRPOConfig, with the arguments of transformers' trainer that it inherits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_megatron.migration.translation import OtherTrainer, Rule, Settings, none, same, unless

OVERLONG = "get_soft_overlong_punishment"  # of the rewards that TRL's command knows by name

BATCH = "per_device_train_batch_size x processes x gradient_accumulation_steps samples are one optimizer step"
AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
RECOMPUTE = "actor.megatron.override_transformer_config."
CORRECTION = "algorithm.rollout_correction"
SERVER = "the engine runs in the training processes; there is no server"


def _prompts(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    """Prompts per step on one process, as far as one machine's config can tell."""
    samples = value * settings.get("gradient_accumulation_steps", 1)
    n = settings.get("num_generations", 8)
    return (
        f"data.train_batch_size counts prompts: number of processes x {value} x"
        f" {settings.get('gradient_accumulation_steps', 1)} samples / {n} per prompt = processes x {samples / n:g}"
    )


def _generation_batch(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"data.train_batch_size": max(1, value // settings.get("num_generations", 8))}


def _beta(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"actor.use_kl_loss": True, "actor.kl_loss_coef": value} if value else {"actor.use_kl_loss": False}


def _loss(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    if value in AGGREGATIONS:
        return {"actor.loss_agg_mode": AGGREGATIONS[value]}
    return {"actor.loss_mode": value} if value in ("cispo", "sapo") else "this loss is not here"


def _epsilon(value: Any, settings: Settings) -> Mapping[str, Any]:
    ends = {"actor.clip_ratio_low": value}
    return ends if settings.get("epsilon_high") is not None else {**ends, "actor.clip_ratio_high": value}


def _scale(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    if value in (True, "group", False, "none"):
        return {"algorithm.norm_adv_by_std_in_grpo": value in (True, "group")}
    return "algorithm.adv_estimator: reinforce_plus_plus_baseline whitens over the batch"


def _level(value: Any, settings: Settings) -> Mapping[str, Any]:
    if value == "sequence":
        return {"actor.loss_mode": "gspo", "actor.loss_agg_mode": "seq-mean-token-mean"}
    return {}


def _correction(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    if not settings.get("vllm_importance_sampling_correction", True):
        return {}
    if value == "sequence_mask":  # sequences above the cap leave the loss; here its denominators, too
        cap = settings.get("vllm_importance_sampling_cap", 3.0)
        keys = {
            "rollout_is": None,
            "rollout_rs": "sequence",
            "rollout_rs_threshold": cap,
            "rollout_rs_threshold_low": 1e-6,
        }
        return {f"{CORRECTION}.{key}": item for key, item in keys.items()}
    kinds = {"token_truncate": "token", "sequence_truncate": "sequence"}
    return {f"{CORRECTION}.rollout_is": kinds[value]} if value in kinds else f"{CORRECTION}.rollout_is: icepop is near"


def _off_policy(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {f"{CORRECTION}.rollout_rs": "off_policy", f"{CORRECTION}.rollout_rs_threshold": value}


def _schedule(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    name = str(value).rpartition(".")[2].lower()
    return {"actor.optim.lr_decay_style": SCHEDULES[name]} if name in SCHEDULES else "constant, linear, cosine, WSD"


def _beta1(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"actor.optim.betas": [settings.get("adam_beta1", 0.9), settings.get("adam_beta2", 0.999)]}


def _steps(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"trainer.total_training_steps": value} if value > 0 else {}


def _epochs(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    if settings.get("max_steps", -1) > 0:
        return {}
    whole = int(value) == value and value >= 1
    return {"trainer.total_epochs": int(value)} if whole else "set trainer.total_training_steps"


def _precision(name: str) -> Rule:
    return Rule("model.dtype", convert=lambda value, settings: {"model.dtype": name} if value else {})


def _recompute(value: Any, settings: Settings) -> Mapping[str, Any]:
    settings_here = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {RECOMPUTE + key: item for key, item in settings_here.items()} if value else {}


def _no_saving(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"trainer.save_freq": -1} if str(value) == "no" else {}


def _tensor_parallel(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"rollout.tensor_model_parallel_size": value}


def _reports(value: Any, settings: Settings) -> Mapping[str, Any]:
    names = value if isinstance(value, list) else [value]
    known = ("tensorboard", "wandb", "swanlab", "mlflow")
    return {"trainer.logger": ["console", "jsonl", *(name for name in known if name in names)]}


def _reward_funcs(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    """Names as `trl grpo` reads them: functions of trl.rewards, or a dotted path. rewards/reward.py knows how to call them."""
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    if OVERLONG in names:
        return f"reward.overlong_buffer.len=256 is {OVERLONG}; name the other functions as reward.components"
    functions = [name.rpartition(".") if "." in name else ("trl.rewards", ".", name) for name in names]
    paths = [f"{module}:{function}" for module, _, function in functions]
    weights = settings.get("reward_weights")
    if len(paths) == 1 and not weights:
        return {"reward.function": paths[0]}
    if not isinstance(weights, list) or len(weights) != len(paths):
        weights = [1.0] * len(paths)
    parts = zip(functions, paths, weights, strict=True)
    return {"reward.components": [{"name": name, "function": path, "weight": w} for (_, _, name), path, w in parts]}


TRL_RULES: dict[str, Rule] = {
    # model
    "model_name_or_path": same("model.path"),
    "bf16": _precision("bfloat16"),
    "fp16": none("bfloat16 or float32: model.dtype"),
    "gradient_checkpointing": Rule(RECOMPUTE.removesuffix("."), convert=_recompute),
    **{key: none("not here") for key in ("model_init_kwargs", "disable_dropout", "cast_lm_head_to_fp32")},
    # data and batches
    "num_generations": same("rollout.n"),
    "max_prompt_length": same("data.max_prompt_length"),
    "max_completion_length": same("data.max_response_length"),
    "per_device_train_batch_size": Rule("data.train_batch_size", BATCH, _prompts),
    "generation_batch_size": Rule("data.train_batch_size", convert=_generation_batch),
    "gradient_accumulation_steps": none(f"{BATCH}; micro-batches are packed by actor.ppo_max_token_len_per_gpu"),
    "steps_per_generation": none("actor.ppo_mini_batch_size: prompts per optimizer step"),
    "num_generations_eval": same("rollout.val_kwargs.n"),
    "max_tool_calling_iterations": none("rollout.multi_turn.max_assistant_turns: turns, one more than calls"),
    "shuffle_dataset": same("data.shuffle"),
    "data_seed": same("data.seed"),
    "dataset_name": none(
        "data.train_files: the folder of `hf download NAME --repo-type dataset --local-dir FOLDER`, as FOLDER/train"
    ),
    "remove_unused_columns": none("rewards see the whole row"),
    # generation
    "temperature": same("rollout.temperature"),
    "top_p": same("rollout.top_p"),
    "top_k": unless("rollout.top_k", 0, -1),
    **{key: none("training samples from the policy's own distribution") for key in ("min_p", "repetition_penalty")},
    "generation_kwargs": none("rollout.engine_kwargs are arguments of the engine, not of sampling"),
    "chat_template_kwargs": none("not here: set data.chat_template to a changed template"),
    "use_vllm": none("rollouts are always drawn by vLLM"),
    "vllm_mode": none(SERVER),
    **{
        f"vllm_{key}": none(SERVER)
        for key in ("server_base_url", "server_host", "server_port", "server_timeout", "group_port")
    },
    "vllm_gpu_memory_utilization": same("rollout.gpu_memory_utilization"),
    "vllm_tensor_parallel_size": Rule("rollout.tensor_model_parallel_size", convert=_tensor_parallel),
    "vllm_max_model_length": none("data.max_prompt_length + data.max_response_length"),
    "vllm_enable_sleep_mode": same("rollout.free_cache_engine"),
    # algorithm
    "beta": Rule("actor.kl_loss_coef", convert=_beta),
    "num_iterations": same("actor.ppo_epochs"),
    "epsilon": Rule("actor.clip_ratio_low", convert=_epsilon),
    "epsilon_high": same("actor.clip_ratio_high"),
    "delta": same("actor.clip_ratio_c"),
    "loss_type": Rule("actor.loss_agg_mode", convert=_loss),
    "scale_rewards": Rule("algorithm.norm_adv_by_std_in_grpo", convert=_scale),
    "importance_sampling_level": Rule("actor.loss_mode", convert=_level),
    "sapo_temperature_pos": same("actor.tau_pos"),
    "sapo_temperature_neg": same("actor.tau_neg"),
    "mask_truncated_completions": same("algorithm.mask_truncated_samples"),
    "top_entropy_quantile": none("all tokens are in the loss"),
    "use_bias_correction_kl": none("a trailing + of actor.kl_loss_type takes the gradient of k2"),
    "multi_objective_aggregation": none("rewards are summed, then normalised"),
    "reward_weights": none("the weights of reward.components"),
    "reward_funcs": Rule("reward.components", convert=_reward_funcs),
    "reward_model_name_or_path": same("reward_model.path"),
    "sync_ref_model": none("algorithm.iteration_steps renews the reference every so many steps"),
    "ref_model_mixup_alpha": none("the reference is replaced, not mixed"),
    "ref_model_sync_steps": same("algorithm.iteration_steps"),
    "vllm_importance_sampling_correction": Rule(
        f"{CORRECTION}.rollout_is", convert=lambda value, settings: {} if value else {f"{CORRECTION}.rollout_is": None}
    ),
    "vllm_importance_sampling_mode": Rule(f"{CORRECTION}.rollout_is", convert=_correction),
    "off_policy_mask_threshold": Rule(f"{CORRECTION}.rollout_rs", convert=_off_policy),
    "vllm_importance_sampling_cap": same(f"{CORRECTION}.rollout_is_threshold"),
    # optimizer
    "learning_rate": same("actor.optim.lr"),
    "weight_decay": same("actor.optim.weight_decay"),
    "adam_beta1": Rule("actor.optim.betas", convert=_beta1),
    "adam_beta2": Rule("actor.optim.betas", convert=_beta1),
    "adam_epsilon": same("actor.optim.eps"),
    "max_grad_norm": same("actor.optim.clip_grad"),
    "lr_scheduler_type": Rule("actor.optim.lr_decay_style", convert=_schedule),
    "warmup_steps": same("actor.optim.lr_warmup_steps"),
    "warmup_ratio": none("set actor.optim.lr_warmup_steps: optimizer steps"),
    "optim": none("AdamW"),
    # the run
    "output_dir": same("trainer.output_dir"),
    "max_steps": Rule("trainer.total_training_steps", convert=_steps),
    "num_train_epochs": Rule("trainer.total_epochs", convert=_epochs),
    "save_steps": same("trainer.save_freq"),
    "save_strategy": Rule("trainer.save_freq", convert=_no_saving),
    "save_total_limit": same("trainer.max_actor_ckpt_to_keep"),
    "eval_steps": same("trainer.test_freq"),
    "seed": same("trainer.seed"),
    "report_to": Rule("trainer.logger", convert=_reports),
    "resume_from_checkpoint": none("a run resumes from the newest checkpoint in its folder"),
    "logging_steps": none("every step is logged"),
    "log_completions": none("trainer.num_logged_samples"),
    "run_name": same("trainer.experiment_name"),
    "deepspeed": none("the layout is actor.megatron.*"),
    "fsdp": none("the layout is actor.megatron.*"),
    "ds3_gather_for_generation": none("weights are resharded into the engine"),
    "use_peft": none("all weights are trained"),
    "use_liger_kernel": none("log-probabilities are computed in chunks: actor.logprob_chunk_size"),
}

# What TRL does where a config is silent, and this program does otherwise.
TRL_DEFAULTS: dict[str, Any] = {
    "max_completion_length": 256,
    "beta": 0.0,
    "loss_type": "dapo",
    "learning_rate": 1e-6,
    "weight_decay": 0.0,
    "lr_scheduler_type": "linear",
    "num_train_epochs": 3.0,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_importance_sampling_mode": "sequence_mask",
    "gradient_checkpointing": True,
    "save_steps": 500,
}

TRL = OtherTrainer("trl", TRL_RULES, TRL_DEFAULTS, implied={"actor.clip_ratio_c": None, "data.task": "trl"})
