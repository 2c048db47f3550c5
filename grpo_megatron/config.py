"""The configuration: frozen pydantic sections, read from one YAML file plus `section.key=value` overrides.

Names follow verl where the meaning is the same (no `actor_rollout_ref` prefix). Lengths are tokens; batch sizes are
prompts unless the comment says otherwise. What one section can check alone is checked here; what needs two sections,
the world size or a file is checked in `validate.py`. Sections are passed around, never the whole Config.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError


class ConfigError(ValueError):
    """A mistake of the user's: one message that names key, value, arithmetic and remedy. The CLI exits with 2."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False, protected_namespaces=())


def _not_zero(steps: int) -> int:
    if steps == 0:
        raise PydanticCustomError("frequency", "every 0 steps has no meaning; set -1 for never")
    return steps


Beta = Annotated[float, Field(ge=0, lt=1)]
Frequency = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]  # in steps; -1: never


class ModelConfig(Section):
    path: Path  # Hugging Face folder: config.json, *.safetensors, tokenizer
    tokenizer_path: Path | None = None  # default: path
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


class DataConfig(Section):
    task: str = "gsm8k"  # a registered task, or module:function (see data/tasks.py)
    train_files: list[Path] = []
    val_files: list[Path] = []
    train_batch_size: int = Field(512, ge=1)
    gen_batch_size: int | None = Field(None, ge=1)  # prompts of one round of dynamic sampling; null = train_batch_size
    val_tasks: list[str] = []  # tasks of the scripted evaluation (gsm8k, math500, ...), beside or instead of val_files
    val_data: Path | None = None  # the folder that holds their files
    val_max_samples: int | None = Field(None, ge=1)  # first rows of the validation files, or of each task; null = all
    max_prompt_length: int = Field(1024, ge=1)
    max_response_length: int = Field(2048, ge=1)
    filter_overlong_prompts: bool = True  # false: an over-long prompt is an error
    shuffle: bool = True
    seed: int = 42
    apply_chat_template: bool = True  # false: the task's text is the prompt as it stands
    chat_template: Path | None = None  # a Jinja file instead of the tokenizer's own
    system_prompt: str | None = None  # null: the task's own


class OptimConfig(Section):
    lr: float = Field(1e-6, ge=0)
    weight_decay: float = Field(0.01, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, gt=0)
    lr_warmup_steps: int = Field(0, ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD"] = "constant"  # WSD: constant, then linear at the end
    lr_wsd_decay_steps: int | None = Field(None, ge=1)  # WSD only: length of the linear end
    min_lr: float = Field(0.0, ge=0)


class Fp8Config(Section):
    """FP8 in the decoder's linear layers, by Transformer Engine (models/precision.py). recipe = null: none."""

    recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = None
    format: Literal["e4m3", "hybrid"] | None = None  # hybrid: e5m2 gradients; null = the recipe's own
    param_gather: bool = False  # weights are kept, and gathered over data-parallel ranks, in FP8
    wgrad: bool = True  # delayed only; false: weight gradients in bf16
    margin: int = 0  # delayed only: scales are divided by 2 ** margin
    amax_history_len: int = Field(1024, ge=1)  # delayed only
    amax_compute_algo: Literal["max", "most_recent"] = "max"  # delayed only
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = Field(1, ge=0)  # used with first_last_layers_bf16
    num_layers_at_end_in_bf16: int = Field(1, ge=0)


class MegatronConfig(Section):
    tensor_model_parallel_size: int = Field(1, ge=1)
    pipeline_model_parallel_size: int = Field(1, ge=1)
    expert_model_parallel_size: int = Field(1, ge=1)  # data-parallel ranks that share one set of experts
    context_parallel_size: int = Field(1, ge=1)  # ranks that share each sequence; Transformer Engine only
    sequence_parallel: bool | None = None  # null: on when tensor_model_parallel_size > 1
    use_distributed_optimizer: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"  # auto: TE on CUDA where it is installed
    fp8: Fp8Config = Fp8Config()
    offload_optimizer: bool = False  # optimizer states and gradient buffers leave the device during rollouts
    offload_reference: bool = False  # the reference is on the device only while it scores
    override_transformer_config: dict[str, Any] = {}  # passed to megatron.core's TransformerConfig unread

    @property
    def use_sequence_parallel(self) -> bool:
        return self.tensor_model_parallel_size > 1 if self.sequence_parallel is None else self.sequence_parallel


class ActorConfig(Section):
    ppo_mini_batch_size: int | None = Field(None, ge=1)  # prompts per optimizer step; null = data.train_batch_size
    ppo_epochs: int = Field(1, ge=1)
    ppo_max_token_len_per_gpu: int = Field(16384, ge=1)  # tokens of one packed micro-batch
    ppo_micro_batch_size_per_gpu: int | None = Field(None, ge=1)  # at most this many sequences in one; null = no bound
    loss_mode: str = "vanilla"  # a registered policy loss, or module:function
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = Field(None, gt=0)  # L of seq-mean-token-sum-norm; null = max_response_length
    clip_ratio_low: float = Field(0.2, ge=0)
    clip_ratio_high: float = Field(0.2, ge=0)
    clip_ratio_c: float | None = Field(3.0, gt=1)  # dual clip; null = off
    cispo_clip_ratio_low: float = Field(1.0, ge=0)  # CISPO's own lower bound, 1 - this; 1 or more: none
    tau_pos: float = Field(1.0, gt=0)  # SAPO's temperature where the advantage is positive
    tau_neg: float = Field(1.05, gt=0)  # and where it is not
    dpo_beta: float = Field(0.1, gt=0)  # strength of DPO's tie to the reference
    use_kl_loss: bool = True
    kl_loss_coef: float = Field(0.001, ge=0)
    kl_loss_type: str = "low_var_kl"
    entropy_coeff: float = 0.0
    logprob_chunk_size: int = Field(1024, ge=1)  # rows of logits in memory at a time
    max_skipped_steps: int = Field(10, ge=0)  # consecutive non-finite updates before the run stops
    optim: OptimConfig = OptimConfig()
    megatron: MegatronConfig = MegatronConfig()


class RefConfig(Section):
    path: Path | None = None  # default: model.path, after the supervised warm-up if there is one


class ValKwargs(Section):
    n: int = Field(1, ge=1)
    temperature: float = Field(0.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)


class RolloutConfig(Section):
    n: int = Field(8, ge=1)  # samples per prompt
    temperature: float = Field(1.0, gt=0)
    top_p: float = 1.0  # training refuses other values: the policy scores the full distribution
    top_k: int = -1
    seed: int = 42
    tensor_model_parallel_size: int = Field(1, ge=1)
    gpu_memory_utilization: float = Field(0.6, gt=0, le=1)
    kv_cache_gib: float = Field(1.0, gt=0)  # CPU only: vLLM's KV cache per rank
    max_num_seqs: int = Field(256, ge=1)
    max_num_batched_tokens: int = Field(8192, ge=1)
    enforce_eager: bool = False
    free_cache_engine: bool = True  # GPU: sleep between rollouts
    sleep_level: Literal[1, 2] = 2  # 1: weights wait on the host; 2: dropped (the sync brings them anyway)
    quantization: Literal["fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8"] | None = None  # in the engine
    enable_prefix_caching: bool = True
    update_weights_bucket_megabytes: int = Field(512, ge=1)
    probe_tolerance: float | None = Field(None, gt=0)  # mean |logprob difference| after a sync; null = by dtype
    engine_kwargs: dict[str, Any] = {}  # passed to vllm.LLM unread
    val_kwargs: ValKwargs = ValKwargs()

    @model_validator(mode="before")
    @classmethod
    def _a_quantized_engine_differs(cls, values: Any) -> Any:
        """Its log-probabilities are off by 0.1 and more with the right weights: a default that lets them pass."""
        if isinstance(values, dict) and values.get("quantization") and values.get("probe_tolerance") is None:
            return {**values, "probe_tolerance": 0.3}
        return values


class OverlongBuffer(Section):
    """DAPO's soft penalty for responses that come close to data.max_response_length."""

    len: int | None = Field(None, ge=1)  # tokens below the limit from which the penalty grows, to 1 at it; null: off
    penalty_factor: float = Field(1.0, gt=0)


class RewardConfig(Section):
    function: str | None = None  # a registered reward, or module:function; null = the task's own
    num_workers: int = Field(1, ge=1)  # processes per rank
    timeout_s: float = Field(10.0, gt=0)  # wall clock per sample, then the worker is killed
    kwargs: dict[str, Any] = {}
    overlong_buffer: OverlongBuffer = OverlongBuffer()


class FilterGroups(Section):
    """DAPO's dynamic sampling: prompts whose samples all got one reward are drawn again, as other prompts."""

    enable: bool = False
    max_num_gen_batches: int = Field(10, ge=1)  # rounds a step; then it trains on what there is


class ReplayConfig(Section):
    """Groups of earlier steps in the batch. Only groups with different rewards are kept."""

    ratio: float = Field(0.0, ge=0, lt=1)  # of the batch's prompts, at most; 0: off
    size: int = Field(512, ge=1)  # groups
    max_staleness: int = Field(2, ge=1)  # steps since they were drawn; older ones are dropped


class KlCtrl(Section):
    """The coefficient of the KL penalty in the reward; adaptive: moved towards target_kl (algo/kl.py)."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = Field(0.001, ge=0)  # adaptive: at the start
    target_kl: float = Field(0.1, gt=0)  # nats per token
    horizon: int = Field(10000, ge=1)  # samples over which an error of 100 % is corrected


class RolloutCorrection(Section):
    """Weights (_is) and masks (_rs) for tokens that the two engines do not agree on (algo/correction.py)."""

    rollout_is: Literal["token", "sequence", "geometric", "icepop"] | None = "token"  # null: no weights
    rollout_is_threshold: float = Field(2.0, gt=0)  # weights above it are cut to it (icepop: to 0)
    rollout_is_threshold_low: float | None = Field(None, gt=0)  # icepop: 0 below; null = 1 / rollout_is_threshold
    rollout_rs: Literal["token", "sequence", "geometric", "off_policy"] | None = None  # null: nothing is rejected
    rollout_rs_threshold: float = Field(2.0, gt=0)  # ratio above which a token or sequence leaves; off_policy: nats
    rollout_rs_threshold_low: float | None = Field(None, gt=0)  # below which; null = 1 / rollout_rs_threshold


class RewardModelConfig(Section):
    """A reward model trained along with the policy (iterative GRPO), in the policy's layout. Without `path`: none."""

    path: Path | None = None  # Hugging Face folder: *ForSequenceClassification, or *ForCausalLM, which gets a new head
    start_iteration: int = Field(0, ge=0)  # outer iterations before this one are rewarded by the rules alone
    combine: Literal["replace", "add"] = "replace"  # its score instead of the rule's reward, or added to it
    coefficient: float = Field(1.0, gt=0)  # multiplies its score
    max_pairs_per_group: int | None = Field(4, ge=1)  # (better, worse) pairs of one prompt's samples; null = no bound
    steps: int = Field(50, ge=1)  # updates after each outer iteration
    train_batch_size: int = Field(32, ge=1)  # pairs
    replay_ratio: float = Field(0.1, ge=0, lt=1)  # of a batch's pairs, from earlier outer iterations
    history_size: int = Field(2048, ge=1)  # pairs of earlier outer iterations that are kept, drawn uniformly from all
    optim: OptimConfig = OptimConfig()


class AlgorithmConfig(Section):
    adv_estimator: str = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    gamma: float = Field(1.0, gt=0, le=1)  # discount per token; reinforce_plus_plus
    rft_threshold: float = 1.0  # rft: rewards from here on are right answers
    use_kl_in_reward: bool = False  # the reward of each token minus kl_ctrl.kl_coef * KL to the reference
    kl_penalty: str = "kl"  # its estimator: the names of actor.kl_loss_type
    kl_ctrl: KlCtrl = KlCtrl()
    rollout_correction: RolloutCorrection = RolloutCorrection()
    source: Literal["policy", "initial", "file"] = "policy"  # of the responses: drawn now, from the start's model, read
    iteration_steps: int | None = Field(None, ge=1)  # iterative GRPO: steps until the reference is renewed; null: never
    filter_groups: FilterGroups = FilterGroups()
    dupo: bool = False  # groups without different rewards give their place to copies of those with
    mask_truncated_samples: bool = False  # cut-off responses stay in their group's statistics and out of the loss
    replay: ReplayConfig = ReplayConfig()


class SftConfig(Section):
    """The supervised warm-up before GRPO: the same `Policy.update` with another loss. steps = 0: none."""

    steps: int = Field(0, ge=0)
    train_files: list[Path] = []  # rows {"prompt": ..., "response": ...}
    train_batch_size: int = Field(32, ge=1)  # rows
    optim: OptimConfig = OptimConfig()


class TrainerConfig(Section):
    total_training_steps: int = Field(100, ge=0)
    output_dir: Path = Path("outputs/run")
    save_freq: Frequency = 20  # steps between checkpoints; -1: never; the last step is saved unless -1
    test_freq: Frequency = 5
    val_before_train: bool = True
    resume_mode: Literal["auto", "disable"] = "auto"
    verify_checkpoints: Literal["full", "sizes"] = (
        "full"  # before resuming; full: sha256 of every byte, shared by ranks
    )
    stop_file: Path | None = None  # once it exists: save after the step and leave with exit code 75
    stop_at: float | None = Field(None, gt=0)  # unix time: the same before a step that may end after it
    max_actor_ckpt_to_keep: int | None = Field(3, ge=1)
    save_hf_at_end: bool = True
    logger: list[Literal["console", "jsonl", "tensorboard", "wandb"]] = ["console", "jsonl"]
    num_logged_samples: int = Field(4, ge=0)  # completions written as text per evaluation
    nnodes: int = Field(1, ge=1)
    n_gpus_per_node: int = Field(8, ge=1)  # processes per node, on CPU too
    device: Literal["auto", "cpu", "cuda"] = "auto"
    seed: int = 42
    timeout_s: float = Field(1800.0, gt=0)  # every collective's deadline
    peak_tflops: float | None = Field(None, gt=0)  # for MFU; null: by device name, where known


class Config(Section):
    model: ModelConfig
    data: DataConfig = DataConfig()
    sft: SftConfig = SftConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
