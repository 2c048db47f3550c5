"""verl's keys. Most have the same name here, without `actor_rollout_ref.`; the table has the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_megatron.migration.translation import OtherTrainer, Rule, Settings, listed, none, same, unless, values

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.ref."
SINKS = {"file": "jsonl"} | {name: name for name in ("console", "tensorboard", "wandb", "swanlab", "mlflow")}
LOSS_NAMES = {name: name for name in ("vanilla", "gspo", "cispo", "sapo", "gpg")} | {"geo_mean": "gmpo"}
PACKED = "sequences are always packed"
NO_RAY = "there is no Ray and no controller process"
ACTORS_LAYOUT = "the reference has the actor's layout (actor.megatron.*)"
SCORING = "log-probabilities are computed in micro-batches of actor.ppo_max_token_len_per_gpu tokens"


def _clip_ratio(value: Any, settings: Settings) -> Mapping[str, Any]:
    """verl reads clip_ratio where clip_ratio_low and clip_ratio_high are not set."""
    ends = ("clip_ratio_low", "clip_ratio_high")
    return {f"actor.{end}": value for end in ends if settings.get(ACTOR + end) is None}


def _micro_batch(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    if settings.get(f"{ACTOR}use_dynamic_bsz"):
        return "with use_dynamic_bsz the token bound alone holds: actor.ppo_max_token_len_per_gpu"
    return {"actor.ppo_micro_batch_size_per_gpu": value}


def _warmup_steps(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"actor.optim.lr_warmup_steps": max(0, value)}


def _warmup_ratio(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    return f"set actor.optim.lr_warmup_steps to {value:g} x the number of optimizer steps" if value else {}


def _recompute(value: Any, settings: Settings) -> Mapping[str, Any]:
    override = "actor.megatron.override_transformer_config."
    return (
        {
            f"{override}recompute_granularity": "full",
            f"{override}recompute_method": "uniform",
            f"{override}recompute_num_layers": 1,
        }
        if value
        else {}
    )


def _reward_function(value: Any, settings: Settings) -> Mapping[str, Any]:
    """A file and a name; the folder of the YAML file is searched for modules, so that the file can lie beside it.

    The function stays as it is: rewards/reward.py knows verl's.
    """
    name = settings.get("custom_reward_function.name") or "compute_score"
    module = str(value).rpartition("/")[2].removesuffix(".py")
    prefix = "custom_reward_function.reward_kwargs."
    kwargs = {key.removeprefix(prefix): item for key, item in settings.items() if key.startswith(prefix)}
    return {"reward.function": f"{module}:{name}", **{f"reward.kwargs.{key}": item for key, item in kwargs.items()}}


def _overlong(value: Any, settings: Settings) -> Mapping[str, Any]:
    is_on = settings.get("reward_model.overlong_buffer.enable") or settings.get(
        "reward_model.reward_kwargs.overlong_buffer_cfg.enable"
    )
    return {"reward.overlong_buffer.len": value if is_on else None}


def _reward_model(value: Any, settings: Settings) -> Mapping[str, Any] | str:
    return {"reward_model.path": value} if settings.get("reward_model.enable") else "reward_model.enable is false"


def _total_epochs(value: Any, settings: Settings) -> Mapping[str, Any]:
    """verl's total_training_steps, where it is set, is the one that holds."""
    return {} if settings.get("trainer.total_training_steps") is not None else {"trainer.total_epochs": value}


def _val_sampling(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {} if value else {"rollout.val_kwargs.temperature": 0.0}


def _loggers(value: Any, settings: Settings) -> Mapping[str, Any]:
    names = value if isinstance(value, list) else [value]
    return {"trainer.logger": list(dict.fromkeys(["jsonl", *(SINKS[name] for name in names if name in SINKS)]))}


def _name(value: Any, settings: Settings) -> Mapping[str, Any]:
    """The name, and the folder if there is none."""
    folder = {} if settings.get("trainer.default_local_dir") is not None else {"trainer.output_dir": f"outputs/{value}"}
    return {"trainer.experiment_name": value, **folder}


def _offloads_gradients(value: Any, settings: Settings) -> Mapping[str, Any]:
    return {"actor.megatron.offload_optimizer": True} if value else {}


VERL_RULES: dict[str, Rule] = {
    # data
    "data.train_files": listed("data.train_files"),
    "data.val_files": listed("data.val_files"),
    "data.val_max_samples": unless("data.val_max_samples", -1),
    "data.seed": Rule("data.seed", convert=lambda value, settings: {} if value is None else {"data.seed": value}),
    "data.tokenizer": same("model.tokenizer_path"),
    "data.truncation": none("prompts above data.max_prompt_length are dropped, or an error; none is cut"),
    "data.val_batch_size": none("all validation prompts are one batch of the engine"),
    **{
        f"data.{key}": none("data.task=verl reads verl's columns; a task file names other ones")
        for key in ("prompt_key", "reward_fn_key")
    },
    "data.return_raw_chat": none("chat messages are rendered by the chat template: data.apply_chat_template"),
    "data.return_raw_input_ids": none("not needed"),
    "data.return_full_prompt": none("not needed"),
    "data.filter_overlong_prompts_workers": none("not needed"),
    "data.dataloader_num_workers": none("prompts are tokenised when they are drawn"),
    "data.trust_remote_code": none("remote code is never run"),
    "data.tool_config_path": none("tools are rollout.multi_turn.tools: [module:function]"),
    "data.custom_cls": none("data.task: module:task reads your rows"),
    "data.sampler": none("not here"),
    "data.datagen": none("not here"),
    "data.train_max_samples": none("not here: cut the file"),
    **{f"data.{key}": none("text only") for key in ("image_key", "video_key", "image_patch_size")},
    "data.return_multi_modal_inputs": none("text only"),
    "data.use_shm": none("not needed"),
    "data.validation_shuffle": none("validation reads its rows in order"),
    "data.apply_chat_template_kwargs": none("not here: set data.chat_template to a changed template"),
    # model
    "actor_rollout_ref.model.path": same("model.path"),
    "actor_rollout_ref.model.tokenizer_path": same("model.tokenizer_path"),
    "actor_rollout_ref.model.use_remove_padding": none(PACKED),
    "actor_rollout_ref.model.enable_gradient_checkpointing": Rule(
        "actor.megatron.override_transformer_config", convert=_recompute
    ),
    "actor_rollout_ref.model.custom_chat_template": none("data.chat_template is the path of a Jinja file"),
    "actor_rollout_ref.model.trust_remote_code": none("remote code is never run"),
    "actor_rollout_ref.model": none("not here"),
    "actor_rollout_ref.hybrid_engine": none("policy and engine always share the GPUs"),
    "actor_rollout_ref.nccl_timeout": same("trainer.timeout_s"),
    # actor
    f"{ACTOR}clip_ratio": Rule("actor.clip_ratio_low", convert=_clip_ratio),
    f"{ACTOR}policy_loss.loss_mode": values("actor.loss_mode", LOSS_NAMES, "this loss is not here"),
    f"{ACTOR}policy_loss": none("of losses that are not here"),
    f"{ACTOR}ppo_micro_batch_size_per_gpu": Rule("actor.ppo_micro_batch_size_per_gpu", convert=_micro_batch),
    f"{ACTOR}ppo_micro_batch_size": none("set actor.ppo_micro_batch_size_per_gpu, or the token bound alone"),
    f"{ACTOR}use_dynamic_bsz": none(f"{PACKED}, up to actor.ppo_max_token_len_per_gpu tokens"),
    f"{ACTOR}ulysses_sequence_parallel_size": none("long sequences: actor.megatron.context_parallel_size"),
    f"{ACTOR}grad_clip": same("actor.optim.clip_grad"),
    f"{ACTOR}shuffle": none("mini-batches keep the order of the batch"),
    f"{ACTOR}strategy": none("the strategy is always Megatron-Core"),
    f"{ACTOR}fsdp_config": none("the strategy is Megatron-Core: see actor.megatron.*"),
    f"{ACTOR}checkpoint": none("a checkpoint has weights, optimizer and the run's state"),
    f"{ACTOR}profiler": none("the command has it: train --profile STEPS"),
    f"{ACTOR}use_torch_compile": none("not used"),
    f"{ACTOR}use_fused_kernels": none("log-probabilities are computed in chunks: actor.logprob_chunk_size"),
    f"{ACTOR}entropy_from_logits_with_chunking": none("always in chunks: actor.logprob_chunk_size"),
    f"{ACTOR}freeze_vision_tower": none("text only"),
    f"{ACTOR}data_loader_seed": none("data.seed decides the order"),
    f"{ACTOR}load_weight": none("weights are always loaded"),
    f"{ACTOR}optim.lr_warmup_steps": Rule("actor.optim.lr_warmup_steps", convert=_warmup_steps),
    f"{ACTOR}optim.lr_warmup_steps_ratio": Rule("actor.optim.lr_warmup_steps", convert=_warmup_ratio),
    f"{ACTOR}optim.warmup_style": same("actor.optim.lr_decay_style"),
    f"{ACTOR}optim": none("the optimizer is AdamW, its schedule ends with the run"),
    f"{ACTOR}megatron.optimizer_offload": same("actor.megatron.offload_optimizer"),
    f"{ACTOR}megatron.grad_offload": Rule("actor.megatron.offload_optimizer", convert=_offloads_gradients),
    f"{ACTOR}megatron.param_offload": none("the policy's weights stay on the device"),
    f"{ACTOR}megatron.seed": same("trainer.seed"),
    f"{ACTOR}megatron.dtype": same("model.dtype"),
    f"{ACTOR}megatron": none("not here"),
    ACTOR.removesuffix("."): none("not here"),
    # reference
    f"{REF}megatron.param_offload": same("actor.megatron.offload_reference"),
    f"{REF}megatron": none(ACTORS_LAYOUT),
    f"{REF}fsdp_config": none(ACTORS_LAYOUT),
    f"{REF}model.path": same("ref.path"),
    **{
        f"{REF}log_prob_{key}": none(SCORING)
        for key in ("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
    },
    REF.removesuffix("."): none(ACTORS_LAYOUT),
    # rollout
    f"{ROLLOUT}name": values("rollout.engine", {"vllm": "vllm"}, "the engine is vLLM, or a class of your own"),
    f"{ROLLOUT}prompt_length": same("data.max_prompt_length"),
    f"{ROLLOUT}response_length": same("data.max_response_length"),
    f"{ROLLOUT}dtype": same("model.dtype"),
    f"{ROLLOUT}engine_kwargs.vllm": none("write them in rollout.engine_kwargs"),
    f"{ROLLOUT}checkpoint_engine.update_weights_bucket_megabytes": same("rollout.update_weights_bucket_megabytes"),
    f"{ROLLOUT}val_kwargs.do_sample": Rule("rollout.val_kwargs.temperature", convert=_val_sampling),
    f"{ROLLOUT}val_kwargs": none("validation samples from the whole distribution, or by top_p"),
    f"{ROLLOUT}calculate_log_probs": none("the engine's log-probabilities are always kept"),
    f"{ROLLOUT}max_model_len": none("data.max_prompt_length + data.max_response_length"),
    f"{ROLLOUT}enable_chunked_prefill": none("the engine decides; see rollout.engine_kwargs"),
    f"{ROLLOUT}load_format": none("the engine's weights always come from the policy"),
    f"{ROLLOUT}multi_turn.enable": none("rollout.multi_turn.environment: tools, or module:Class"),
    f"{ROLLOUT}multi_turn.max_user_turns": none("rollout.multi_turn.max_assistant_turns bounds a trajectory"),
    f"{ROLLOUT}multi_turn": none("tools are functions: rollout.multi_turn.tools: [module:function]"),
    **{
        f"{ROLLOUT}log_prob_{key}": none(SCORING)
        for key in ("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
    },
    ROLLOUT.removesuffix("."): none("not here"),
    # rewards
    "custom_reward_function.path": Rule("reward.function", convert=_reward_function),
    "custom_reward_function.name": none("see reward.function"),
    "custom_reward_function.reward_kwargs": none("see reward.kwargs"),
    "reward_model.model.path": Rule("reward_model.path", convert=_reward_model),
    "reward_model.enable": none("a reward model is used where reward_model.path is set"),
    "reward_model.reward_manager": none("reward.function, which may take lists; its signature tells how it is called"),
    **{
        f"reward_model.{name}.{key}": rule
        for name in ("overlong_buffer", "reward_kwargs.overlong_buffer_cfg")
        for key, rule in {
            "len": Rule("reward.overlong_buffer.len", convert=_overlong),
            "penalty_factor": same("reward.overlong_buffer.penalty_factor"),
            "enable": none("reward.overlong_buffer.len: null is off"),
            "log": none("always logged"),
        }.items()
    },
    "reward_model": none("a reward model has the actor's layout"),
    # algorithm
    "algorithm.filter_groups.metric": none("groups are compared by the reward itself"),
    "algorithm.kl_penalty": same("algorithm.kl_penalty"),
    "algorithm.rollout_is": values("algorithm.rollout_correction.rollout_is", {}, "see algorithm.rollout_correction"),
    "algorithm.rollout_correction.bypass_mode": none("the policy's own log-probabilities are always the old ones"),
    "algorithm": none("not here"),
    # critic
    "critic.model.path": same("critic.path"),
    "critic": none("not here; the critic has the actor's layout"),
    # trainer
    "trainer.default_local_dir": same("trainer.output_dir"),
    "trainer.experiment_name": Rule("trainer.experiment_name", convert=_name),
    "trainer.project_name": same("trainer.project_name"),
    "trainer.logger": Rule("trainer.logger", convert=_loggers),
    "trainer.total_epochs": Rule("trainer.total_epochs", convert=_total_epochs),
    "trainer.log_val_generations": same("trainer.num_logged_samples"),
    "trainer.resume_mode": values("trainer.resume_mode", {"auto": "auto", "disable": "disable"}, "set auto"),
    "trainer.resume_from_path": none("a run resumes from the newest checkpoint in its folder"),
    "trainer.balance_batch": none("tokens are always balanced over the ranks"),
    "trainer.device": values("trainer.device", {"cuda": "cuda", "cpu": "cpu"}, "cpu or cuda"),
    "trainer.val_only": none("python -m grpo_megatron evaluate"),
    "trainer": none("not here"),
    **{key: none(NO_RAY) for key in ("ray_init", "ray_kwargs", "transfer_queue", "global_profiler", "hydra")},
    "custom_reward_function": none("arguments of the function: reward.kwargs"),
    "data": none("not here"),
}

# What verl does where a config is silent, and this program does otherwise.
VERL_DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.filter_overlong_prompts": False,
    f"{ACTOR}ppo_mini_batch_size": 256,
    f"{ACTOR}use_kl_loss": False,
    f"{ROLLOUT}n": 1,
    f"{ROLLOUT}tensor_model_parallel_size": 2,
    f"{ROLLOUT}gpu_memory_utilization": 0.5,
    f"{ROLLOUT}max_num_seqs": 1024,
    "algorithm.adv_estimator": "gae",
    "algorithm.rollout_correction.rollout_is": None,
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.max_actor_ckpt_to_keep": None,
}

VERL = OtherTrainer(
    "verl", VERL_RULES, VERL_DEFAULTS, prefixes=("actor_rollout_ref.", ""), implied={"data.task": "verl"}
)
