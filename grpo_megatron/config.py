"""The configuration: frozen pydantic sections, read from one YAML file plus `section.key=value` overrides.

Names follow verl where the meaning is the same (without its `actor_rollout_ref` prefix). Lengths count tokens, batch
sizes count prompts, and steps are training steps, unless the comment says otherwise. `null` is YAML's None. Each section
checks its own values here; checks that need two sections, the world size or a file are in `checks/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError


class ConfigError(ValueError):
    """A mistake in the user's input. The message names key, value, arithmetic and remedy; the CLI exits with code 2."""


# The temperatures that vLLM accepts besides 0 (greedy). It silently raises a lower one, and refuses a higher one.
ENGINE_TEMPERATURES = (0.01, 2.0)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False, protected_namespaces=())


def _not_zero(steps: int) -> int:
    if steps == 0:
        raise PydanticCustomError("frequency", "every 0 steps has no meaning; set -1 for never")
    return steps


Beta = Annotated[float, Field(ge=0, lt=1)]
Frequency = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]  # every so many steps; -1: never


class ModelConfig(Section):
    path: Path  # Hugging Face folder: config.json, *.safetensors, tokenizer
    tokenizer_path: Path | None = None  # null: path
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of policy, reference, reward model and engine


class DataConfig(Section):
    task: str = "gsm8k"  # how rows become prompts: a built-in task, a task file, or module:function (data/tasks.py)
    train_files: list[Path] = []  # .jsonl or .json, read in this order
    val_files: list[Path] = []
    train_batch_size: int = Field(512, ge=1)
    gen_batch_size: int | None = Field(None, ge=1)  # prompts per round of dynamic sampling; null: train_batch_size
    val_tasks: list[str] = []  # tasks to validate on (gsm8k, math500, ...), with or without val_files
    val_data: Path | None = None  # folder with the files of val_tasks
    val_max_samples: int | None = Field(None, ge=1)  # use the first N rows of val_files, and of each task; null: all
    max_prompt_length: int = Field(1024, ge=1)
    max_response_length: int = Field(2048, ge=1)
    filter_overlong_prompts: bool = True  # drop prompts above max_prompt_length; false: they are an error
    shuffle: bool = True  # the training prompts, in a new order in each epoch
    seed: int = 42  # of the shuffling
    apply_chat_template: bool = True  # false: the task's plain text prompt
    chat_template: Path | None = None  # Jinja file; null: the tokenizer's template
    system_prompt: str | None = None  # null: the task's system prompt


class OptimConfig(Section):
    """AdamW and its learning-rate schedule. The schedule's steps are optimizer steps, not training steps."""

    lr: float = Field(1e-6, ge=0)
    weight_decay: float = Field(0.01, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, gt=0)  # largest L2 norm of the whole gradient
    lr_warmup_steps: int = Field(0, ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine", "WSD"] = "constant"  # WSD: constant, then linear decay
    lr_wsd_decay_steps: int | None = Field(None, ge=1)  # WSD needs it: optimizer steps of the linear decay
    min_lr: float = Field(0.0, ge=0)  # the rate that a decay ends with


class Fp8Config(Section):
    """FP8 in the decoder's linear layers, by Transformer Engine (models/precision.py). recipe = null: no FP8."""

    recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = None
    format: Literal["e4m3", "hybrid"] | None = None  # hybrid: e5m2 gradients; null: the recipe's own
    param_gather: bool = False  # weights are stored, and gathered over data-parallel ranks, in FP8
    wgrad: bool = True  # delayed only; false: weight gradients are computed in bf16
    margin: int = 0  # delayed only: scales are divided by 2 ** margin
    amax_history_len: int = Field(1024, ge=1)  # delayed only: earlier passes whose largest values set a scale
    amax_compute_algo: Literal["max", "most_recent"] = "max"  # delayed only: how that history becomes one value
    first_last_layers_bf16: bool = False  # keep the layers at both ends of the model in bf16
    num_layers_at_start_in_bf16: int = Field(1, ge=0)  # with first_last_layers_bf16
    num_layers_at_end_in_bf16: int = Field(1, ge=0)  # with first_last_layers_bf16


class MegatronConfig(Section):
    """Layout and kernels of training. The data-parallel size is what the other sizes leave of the world size."""

    tensor_model_parallel_size: int = Field(1, ge=1)
    pipeline_model_parallel_size: int = Field(1, ge=1)
    expert_model_parallel_size: int = Field(1, ge=1)  # data-parallel ranks over which the experts are divided
    context_parallel_size: int = Field(1, ge=1)  # ranks over which each sequence is cut; needs Transformer Engine
    sequence_parallel: bool | None = None  # null: on when tensor_model_parallel_size > 1
    use_distributed_optimizer: bool = True  # shard the optimizer's state over data-parallel ranks
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"  # auto: TE on CUDA, if installed
    fp8: Fp8Config = Fp8Config()
    offload_optimizer: bool = False  # optimizer states go to the host during rollouts; gradient buffers are freed
    offload_reference: bool = False  # the reference is on the device only while it is used
    override_transformer_config: dict[str, Any] = {}  # for megatron.core's TransformerConfig; wrong names are errors

    @property
    def use_sequence_parallel(self) -> bool:
        return self.tensor_model_parallel_size > 1 if self.sequence_parallel is None else self.sequence_parallel


class ActorConfig(Section):
    ppo_mini_batch_size: int | None = Field(None, ge=1)  # prompts per optimizer step; null: data.train_batch_size
    ppo_epochs: int = Field(1, ge=1)  # passes over each step's batch
    ppo_max_token_len_per_gpu: int = Field(16384, ge=1)  # most tokens in one packed micro-batch
    ppo_micro_batch_size_per_gpu: int | None = Field(None, ge=1)  # most sequences in one micro-batch; null: no bound
    loss_mode: str = "vanilla"  # a registered policy loss, or module:function
    loss_agg_mode: str = "token-mean"  # the weight of each token in the loss: a registered name, or module:function
    loss_scale_factor: float | None = Field(None, gt=0)  # L of seq-mean-token-sum-norm; null: data.max_response_length
    clip_ratio_low: float = Field(0.2, ge=0)  # ratios below 1 - this are clipped
    clip_ratio_high: float = Field(0.2, ge=0)  # ratios above 1 + this are clipped
    clip_ratio_c: float | None = Field(3.0, gt=1)  # dual clip: bound of the ratio at negative advantages; null: off
    cispo_clip_ratio_low: float = Field(1.0, ge=0)  # CISPO's lower bound is 1 - this; 1 or more: no lower bound
    tau_pos: float = Field(1.0, gt=0)  # SAPO's temperature at positive advantages
    tau_neg: float = Field(1.05, gt=0)  # SAPO's temperature at the other advantages
    dpo_beta: float = Field(0.1, gt=0)  # DPO's beta: how strongly the policy is kept near the reference
    use_kl_loss: bool = True  # add kl_loss_coef * KL to the reference to the loss
    kl_loss_coef: float = Field(0.001, ge=0)
    kl_loss_type: str = "low_var_kl"  # the estimator of that KL (algo/kl.py)
    entropy_coeff: float = 0.0  # coefficient of the entropy (nats), which is subtracted from the loss
    logprob_chunk_size: int = Field(1024, ge=1)  # tokens whose logits are in memory at a time
    max_skipped_steps: int = Field(10, ge=0)  # consecutive optimizer steps with a non-finite gradient; one more: stop
    optim: OptimConfig = OptimConfig()
    megatron: MegatronConfig = MegatronConfig()

    def mini_batch_size(self, train_batch_size: int) -> int:
        """Prompts per optimizer step."""
        return self.ppo_mini_batch_size or train_batch_size

    def num_mini_batches(self, train_batch_size: int) -> int:
        """Mini-batches per training step; a last one may be smaller."""
        return -(-train_batch_size // self.mini_batch_size(train_batch_size))

    def num_updates(self, num_steps: int, train_batch_size: int) -> int:
        """Optimizer steps of `num_steps` training steps."""
        return num_steps * self.num_mini_batches(train_batch_size) * self.ppo_epochs


class RefConfig(Section):
    path: Path | None = None  # null: the model that GRPO starts from (model.path, after the warmup if there is one)


class ValKwargs(Section):
    """How validation samples: its own values, instead of those of `rollout`."""

    n: int = Field(1, ge=1)  # samples per prompt
    temperature: float = Field(0.0, ge=0)  # 0: greedy
    top_p: float = Field(1.0, gt=0, le=1)


class MultiTurnConfig(Section):
    """Rollouts of several turns: an environment answers what the model writes. environment = null: single turn."""

    environment: str | None = None  # a registered environment, or module:Class (environments/environment.py)
    kwargs: dict[str, Any] = {}  # keyword arguments of the environment's class
    tools: list[str] = []  # environment=tools: registered tools, or module:function
    format: str = "hermes"  # how the model writes a tool call (environments/calls.py)
    max_assistant_turns: int = Field(8, ge=1)  # a trajectory ends after so many
    max_parallel_calls: int = Field(4, ge=1)  # tool calls of one turn that are answered; the others get an error
    max_tool_response_length: int = Field(256, ge=1)  # tokens of one message of an observation; longer ones are cut
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"  # what is cut
    latency_ticks: int = Field(8, ge=1)  # engine steps from the end of a turn to the observation (trajectories/)
    num_workers: int = Field(1, ge=1)  # processes per engine
    timeout_s: float = Field(30.0, gt=0)  # wall-clock seconds of one reset or step
    memory_gib: float = Field(2.0, gt=0)  # address space of one environment, above what its worker has loaded
    failed: Literal["keep", "mask"] = "keep"  # trajectories that their environment failed: in the loss, or not


class RolloutConfig(Section):
    engine: str = "vllm"  # a registered engine, or module:Class (rollout/engine.py)
    engine_options: dict[str, Any] = {}  # the engine's own section, validated by its class (rollout/vllm_arguments.py)
    n: int = Field(8, ge=1)  # samples per prompt
    temperature: float = Field(1.0, gt=0)
    top_p: float = 1.0  # no other value may be set: the policy's logprobs are of the full distribution
    top_k: int = -1  # no other value may be set, either
    seed: int = 42  # each sample's seed is a hash of this, the step, the prompt and the sample's index
    tensor_model_parallel_size: int = Field(1, ge=1)
    gpu_memory_utilization: float = Field(0.6, gt=0, le=1)  # share of the device's memory that vLLM may take
    max_num_seqs: int = Field(256, ge=1)  # sequences that one engine decodes at a time
    max_num_batched_tokens: int = Field(8192, ge=1)  # tokens of one engine step
    enforce_eager: bool = False  # no CUDA graphs
    free_cache_engine: bool = True  # GPU: the engine sleeps between rollouts
    quantization: Literal["fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8"] | None = None  # of the engine
    enable_prefix_caching: bool = True
    update_weights_bucket_megabytes: int = Field(512, ge=1)  # MiB of weights sent to the engine at a time
    sync: Literal["full", "delta"] = "full"  # delta: after a full sync, only elements whose bits have changed are sent
    delta_full_every: int = Field(50, ge=1)  # every so many syncs is full all the same
    delta_max_density: float = Field(0.1, gt=0, le=1)  # a sync is full if a larger share of the elements has changed
    probe_tolerance: float | None = Field(None, gt=0)  # mean |logprob difference| after a sync; null: training/probe.py
    engine_kwargs: dict[str, Any] = {}  # further arguments of vllm.LLM; wrong names are errors
    val_kwargs: ValKwargs = ValKwargs()
    stop: list[str] = []  # texts that end a response (or a turn); the token that completes one stays in it
    stop_token_ids: list[int] = []  # further tokens that end it
    multi_turn: MultiTurnConfig = MultiTurnConfig()

    @model_validator(mode="before")
    @classmethod
    def _a_quantized_engine_differs(cls, values: Any) -> Any:
        """Quantisation alone moves log-probabilities by 0.1 and more, so the default tolerance is wider with it."""
        if isinstance(values, dict) and values.get("quantization") and values.get("probe_tolerance") is None:
            return {**values, "probe_tolerance": 0.3}
        return values


class OverlongBuffer(Section):
    """DAPO's soft penalty for responses that come close to data.max_response_length (algo/shaping.py)."""

    len: int | None = Field(None, ge=1)  # the penalty grows from 0 to 1 over the last so many tokens; null: off
    penalty_factor: float = Field(1.0, gt=0)  # multiplies the penalty


class RewardConfig(Section):
    function: str | None = None  # a registered reward, or module:function; null: the task's own
    num_workers: int = Field(1, ge=1)  # processes per engine
    timeout_s: float = Field(10.0, gt=0)  # wall-clock seconds per sample; then its worker is killed
    kwargs: dict[str, Any] = {}  # keyword arguments of the reward function
    overlong_buffer: OverlongBuffer = OverlongBuffer()


class FilterGroups(Section):
    """DAPO's dynamic sampling: a prompt whose samples all got the same reward is replaced by another prompt."""

    enable: bool = False
    max_num_gen_batches: int = Field(10, ge=1)  # rounds per step; after them the step trains on a smaller batch
    max_staleness: int = Field(1, ge=0)  # largest age of a left-over group, in steps; older ones are dropped


class ReplayConfig(Section):
    """Groups of earlier steps in the batch. Only groups whose rewards differ are kept."""

    ratio: float = Field(0.0, ge=0, lt=1)  # largest share of the batch's prompts; 0: off
    size: int = Field(512, ge=1)  # groups in the buffer
    max_staleness: int = Field(2, ge=1)  # largest age of a group, in steps; older groups are dropped


class KlCtrl(Section):
    """The coefficient of the KL penalty in the reward. adaptive: it follows target_kl (algo/kl.py)."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = Field(0.001, ge=0)  # adaptive: its value at the start
    target_kl: float = Field(0.1, gt=0)  # adaptive: nats per token
    horizon: int = Field(10000, ge=1)  # adaptive: n samples change it by at most 20 % * n / horizon


class RolloutCorrection(Section):
    """Corrects for log-probabilities that differ between engine and policy (algo/correction.py).

    `rollout_is` multiplies the loss by importance weights; `rollout_rs` takes tokens or whole responses out of the loss.
    """

    rollout_is: Literal["token", "sequence", "geometric", "icepop"] | None = "token"  # null: no weights
    rollout_is_threshold: float = Field(2.0, gt=0)  # larger weights are cut to it (icepop: set to 0)
    rollout_is_threshold_low: float | None = Field(None, gt=0)  # icepop: smaller weights are set to 0; null: 1 / upper
    rollout_rs: Literal["token", "sequence", "geometric", "off_policy"] | None = None  # null: nothing is taken out
    rollout_rs_threshold: float = Field(2.0, gt=0)  # largest ratio that stays (off_policy: nats per token)
    rollout_rs_threshold_low: float | None = Field(None, gt=0)  # smallest ratio that stays; null: 1 / upper


class RewardModelConfig(Section):
    """A reward model in the policy's layout. path = null: there is none.

    With algorithm.iteration_steps it learns after every outer iteration (iterative GRPO); without, it is frozen.
    """

    path: Path | None = None  # Hugging Face folder: *ForSequenceClassification, or *ForCausalLM, which gets a new head
    start_iteration: int = Field(0, ge=0)  # in earlier outer iterations, the reward function alone gives the reward
    combine: Literal["replace", "add"] = "replace"  # the score replaces the function's reward, or is added to it
    coefficient: float = Field(1.0, gt=0)  # multiplies the score
    max_pairs_per_group: int | None = Field(4, ge=1)  # (better, worse) pairs among one prompt's samples; null: all
    steps: int = Field(50, ge=1)  # its optimizer steps after each outer iteration
    train_batch_size: int = Field(32, ge=1)  # pairs per optimizer step
    replay_ratio: float = Field(0.1, ge=0, lt=1)  # share of these pairs that comes from earlier outer iterations
    history_size: int = Field(2048, ge=1)  # pairs kept for the replay: a uniform sample of all earlier ones
    optim: OptimConfig = OptimConfig()

    def num_updates(self, num_steps: int, iteration_steps: int) -> int:
        """Optimizer steps of a learning reward model in `num_steps` training steps."""
        return num_steps // iteration_steps * self.steps


class AlgorithmConfig(Section):
    adv_estimator: str = "grpo"  # a registered advantage estimator, or module:function
    norm_adv_by_std_in_grpo: bool = True  # grpo: divide by the standard deviation of the group's rewards
    gamma: float = Field(1.0, gt=0, le=1)  # reinforce_plus_plus: discount per token
    rft_threshold: float = 1.0  # rft: a response with at least this reward is right
    use_kl_in_reward: bool = False  # subtract kl_ctrl.kl_coef * KL to the reference from each token's reward
    kl_penalty: str = "kl"  # the estimator of that KL: a name as in actor.kl_loss_type
    kl_ctrl: KlCtrl = KlCtrl()
    rollout_correction: RolloutCorrection = RolloutCorrection()
    # Where responses come from: the policy, the model that the run starts from, or data.train_files.
    source: Literal["policy", "initial", "file"] = "policy"
    iteration_steps: int | None = Field(None, ge=1)  # iterative GRPO: steps per outer iteration; null: one iteration
    filter_groups: FilterGroups = FilterGroups()
    dupo: bool = False  # replace groups of equal rewards by copies of the other groups
    mask_truncated_samples: bool = False  # responses cut at the limit: out of the loss, in their group's statistics
    replay: ReplayConfig = ReplayConfig()


class SftConfig(Section):
    """The supervised warmup before GRPO. steps = 0: there is none."""

    steps: int = Field(0, ge=0)  # optimizer steps
    train_files: list[Path] = []  # rows {"prompt": ..., "response": ...}
    train_batch_size: int = Field(32, ge=1)  # rows per optimizer step
    optim: OptimConfig = OptimConfig()


class TrainerConfig(Section):
    total_training_steps: int = Field(100, ge=0)
    output_dir: Path = Path("outputs/run")
    save_freq: Frequency = 20  # steps between checkpoints; the last step is saved, too; -1: no checkpoint at all
    test_freq: Frequency = 5  # steps between validations; -1: only val_before_train's
    val_before_train: bool = True  # validate before the first step, and after the last
    # auto: from the newest checkpoint in output_dir; disable: from the start, an earlier run's files move to earlier_001/
    resume_mode: Literal["auto", "disable"] = "auto"
    verify_checkpoints: Literal["full", "sizes"] = "full"  # before resuming, compare files by sha256, or by size only
    stop_file: Path | None = None  # once this file exists, save after the step and exit with code 75
    stop_at: float | None = Field(None, gt=0)  # Unix time in seconds: the same, before a step that could end later
    max_actor_ckpt_to_keep: int | None = Field(3, ge=1)  # older checkpoints are removed; null: keep all
    save_hf_at_end: bool = True  # write the trained model as a Hugging Face folder, output_dir/hf
    logger: list[Literal["console", "jsonl", "tensorboard", "wandb"]] = ["console", "jsonl"]
    num_logged_samples: int = Field(4, ge=0)  # completions written as text per validation
    nnodes: int = Field(1, ge=1)
    n_gpus_per_node: int = Field(8, ge=1)  # ranks per node, on CPU too
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if torch sees one
    seed: int = 42  # of everything in training that is neither data.seed's nor rollout.seed's
    timeout_s: float = Field(1800.0, gt=0)  # seconds after which a collective fails
    peak_tflops: float | None = Field(None, gt=0)  # TFLOP/s of one device, for MFU; null: by device name, if known


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
