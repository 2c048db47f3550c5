"""What a change of each config key means for a run that resumes. One class per key; a test compares the table with Config.

APPLIES    the new value holds from the next step on
SCHEDULE   as APPLIES, and the learning-rate schedule is rebuilt: the run continues at its place in the new schedule
FIXED      what the checkpoint holds would have another meaning, or the new value would have no effect: refused

A key whose value is a mapping (`reward.kwargs`) has one class for all of the mapping.
"""

from __future__ import annotations

from typing import Literal

ResumeClass = Literal["applies", "schedule", "fixed"]
APPLIES: ResumeClass = "applies"
SCHEDULE: ResumeClass = "schedule"
FIXED: ResumeClass = "fixed"


def _keys(prefix: str, names: str, kind: ResumeClass) -> dict[str, ResumeClass]:
    return {f"{prefix}.{name}": kind for name in names.split()}


_OPTIMIZER_SCHEDULE = "lr lr_warmup_steps lr_decay_style lr_wsd_decay_steps min_lr"
_OPTIMIZER_VALUES = "weight_decay betas eps clip_grad"

RESUME_CLASSES: dict[str, ResumeClass] = {
    # Token ids, weights and the initial reference come from these.
    **_keys("model", "path tokenizer_path family dtype", FIXED),
    **_keys("ref", "path", FIXED),
    # A checkpoint holds a position in the prompts. These decide which prompts there are, and their order.
    **_keys("data", "task train_files sources shuffle seed", FIXED),
    **_keys("data.sampling", "pass_rates weight uniform_share", FIXED),
    **_keys("data.sampling", "min_pass_rate max_pass_rate default_pass_rate", FIXED),
    **_keys("data", "max_prompt_length filter_overlong_prompts", FIXED),
    **_keys("data", "apply_chat_template chat_template system_prompt", FIXED),
    **_keys("data", "val_files val_tasks val_data val_loss_files val_max_samples", APPLIES),
    **_keys("data", "gen_batch_size max_response_length", APPLIES),
    **_keys("data", "train_batch_size", SCHEDULE),  # with the mini-batch size it gives the updates per step
    # The warm-up is over.
    **_keys("sft", "steps train_files train_batch_size", FIXED),
    **_keys("sft", "save_freq", APPLIES),
    **_keys("sft.optim", f"{_OPTIMIZER_SCHEDULE} {_OPTIMIZER_VALUES}", FIXED),
    # The policy.
    **_keys("actor", "ppo_mini_batch_size ppo_epochs", SCHEDULE),
    **_keys("actor", "ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu logprob_chunk_size", APPLIES),
    **_keys("actor", "share_prompts", APPLIES),
    **_keys("actor", "loss_mode loss_agg_mode loss_scale_factor", APPLIES),
    **_keys("actor", "clip_ratio_low clip_ratio_high clip_ratio_c cispo_clip_ratio_low", APPLIES),
    **_keys("actor", "tau_pos tau_neg dpo_beta use_kl_loss kl_loss_coef kl_loss_type entropy_coeff", APPLIES),
    **_keys("actor", "max_skipped_steps", APPLIES),
    **_keys("actor.optim", _OPTIMIZER_SCHEDULE, SCHEDULE),
    **_keys("actor.optim", _OPTIMIZER_VALUES, APPLIES),
    # The critic: its weights and optimizer are in the checkpoint.
    **_keys("critic", "path", FIXED),
    **_keys("critic", "ppo_mini_batch_size ppo_epochs", SCHEDULE),
    **_keys("critic", "pretrain_steps", SCHEDULE),  # with critic_warmup it gives the policy's number of updates
    **_keys("critic", "cliprange_value loss_agg_mode lam lam_alpha offload", APPLIES),
    **_keys("critic.optim", _OPTIMIZER_SCHEDULE, SCHEDULE),
    **_keys("critic.optim", _OPTIMIZER_VALUES, APPLIES),
    # The layout. Checkpoints are independent of it, except that plain and distributed optimizers name their state differently.
    **_keys("actor.megatron", "tensor_model_parallel_size pipeline_model_parallel_size", APPLIES),
    **_keys("actor.megatron", "expert_model_parallel_size context_parallel_size sequence_parallel", APPLIES),
    **_keys("actor.megatron", "use_distributed_optimizer", FIXED),
    **_keys("actor.megatron", "overlap_grad_reduce overlap_param_gather transformer_impl", APPLIES),
    **_keys("actor.megatron", "offload_optimizer offload_reference override_transformer_config", APPLIES),
    # Scales and their histories are part of the checkpoint.
    **_keys("actor.megatron.fp8", "recipe format param_gather wgrad margin", FIXED),
    **_keys("actor.megatron.fp8", "amax_history_len amax_compute_algo first_last_layers_bf16", FIXED),
    **_keys("actor.megatron.fp8", "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16", FIXED),
    # The engine is built anew.
    **_keys("rollout", "engine engine_options n temperature top_p top_k seed tensor_model_parallel_size", APPLIES),
    "rollout.expert_parallel_size": APPLIES,
    **_keys("rollout", "gpu_memory_utilization max_num_seqs max_num_batched_tokens enforce_eager", APPLIES),
    **_keys("rollout", "free_cache_engine quantization enable_prefix_caching", APPLIES),
    **_keys("rollout", "update_weights_bucket_megabytes sync delta_full_every delta_max_density", APPLIES),
    **_keys("rollout", "probe_tolerance engine_kwargs stop stop_token_ids", APPLIES),
    **_keys(
        "rollout.partial", "over_sample", FIXED
    ),  # a checkpoint holds the responses in progress, or has no place for them
    **_keys("rollout.partial", "max_staleness chunk_tokens", APPLIES),
    **_keys("rollout.multi_turn", "environment kwargs tools format max_assistant_turns max_parallel_calls", APPLIES),
    **_keys("rollout.multi_turn", "max_tool_response_length tool_response_truncate_side latency_ticks", APPLIES),
    **_keys("rollout.multi_turn", "num_workers timeout_s memory_gib failed", APPLIES),
    **_keys("rollout.val_kwargs", "n temperature top_p", APPLIES),
    **_keys("reward", "function components num_workers timeout_s kwargs max_failed_ratio", APPLIES),
    **_keys("reward.overlong_buffer", "len penalty_factor", APPLIES),
    # The reward model: its weights, optimizer and pairs are in the checkpoint.
    **_keys("reward_model", "path kind", FIXED),
    **_keys("reward_model", "start_iteration combine coefficient max_pairs_per_group", APPLIES),
    **_keys("reward_model", "step_separator", APPLIES),
    "reward_models": APPLIES,  # frozen: no checkpoint has anything of them
    **_keys("reward_model", "train_batch_size replay_ratio history_size", APPLIES),
    **_keys("reward_model", "steps", SCHEDULE),
    **_keys("reward_model.optim", _OPTIMIZER_SCHEDULE, SCHEDULE),
    **_keys("reward_model.optim", _OPTIMIZER_VALUES, APPLIES),
    # The method.
    **_keys("algorithm", "adv_estimator norm_adv_by_std_in_grpo gamma lam rft_threshold", APPLIES),
    **_keys("algorithm", "use_kl_in_reward kl_penalty dupo mask_truncated_samples", APPLIES),
    **_keys("algorithm", "source iteration_steps", FIXED),  # the position in the data; the reference of this iteration
    **_keys("algorithm.kl_ctrl", "type target_kl horizon", APPLIES),
    **_keys("algorithm.kl_ctrl", "kl_coef", APPLIES),
    **_keys("algorithm.rollout_correction", "rollout_is rollout_is_threshold rollout_is_threshold_low", APPLIES),
    **_keys("algorithm.rollout_correction", "rollout_rs rollout_rs_threshold rollout_rs_threshold_low", APPLIES),
    **_keys(
        "algorithm.filter_groups", "enable", FIXED
    ),  # a checkpoint holds its left-over groups, or has no place for them
    **_keys("algorithm.filter_groups", "max_num_gen_batches max_staleness", APPLIES),
    **_keys("algorithm.replay", "ratio", FIXED),  # the same for replayed groups
    **_keys("algorithm.replay", "size max_staleness", APPLIES),
    # The run.
    **_keys("trainer", "total_training_steps total_epochs critic_warmup", SCHEDULE),
    **_keys("trainer", "output_dir save_freq test_freq val_before_train resume_mode verify_checkpoints", APPLIES),
    **_keys("trainer", "stop_file stop_at max_actor_ckpt_to_keep save_hf_at_end logger num_logged_samples", APPLIES),
    **_keys("trainer", "rollout_data_dir project_name experiment_name tags async_save", APPLIES),
    **_keys("trainer", "nnodes n_gpus_per_node device timeout_s stall_timeout_s peak_tflops", APPLIES),
    **_keys("trainer", "seed", FIXED),  # the checkpoint holds the states of the generators
    # What is done about a number, not the number itself.
    **_keys("guards", "rewards logprobs gradients weights max_dumps", APPLIES),
    **_keys("guards.grad_norm", "low high action", APPLIES),
    **_keys("guards.entropy", "low high action", APPLIES),
    **_keys("guards.kl", "low high action", APPLIES),
    **_keys("guards.response_length", "low high action", APPLIES),
    **_keys("guards.rollout_gap", "low high action", APPLIES),
}
