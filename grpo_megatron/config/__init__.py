"""The configuration: frozen pydantic sections, read from one YAML file plus `section.key=value` overrides.

Names follow verl where the meaning is the same (without its `actor_rollout_ref` prefix). Lengths count tokens, batch
sizes count prompts, and steps are training steps, unless the comment says otherwise. `null` is YAML's None. Each section
checks its own values here; checks that need two sections, the world size or a file are in `checks/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from grpo_megatron.config.problems import ConfigError as ConfigError
from grpo_megatron.config.problems import Problem as Problem
from grpo_megatron.config.section import (
    Beta,
    Coefficient,
    Count,
    Files,
    Fixed,
    Frequency,
    Needs,
    Processes,
    Schedule,
    Seconds,
    Seed,
)
from grpo_megatron.config.section import Section as Section

# -- `model`, `actor`, `ref` and `critic`: weights, layout, optimizer, loss --------------------------------------------


class ModelConfig(Section):
    """The model that the run starts from."""

    path: Fixed[Path]  # Hugging Face folder (config.json, *.safetensors, tokenizer), or the id of a model of the Hub
    tokenizer_path: Fixed[Path | None] = None  # null: path
    family: Fixed[str | None] = None  # null: by model_type of config.json; or my.module:FAMILY of your own
    dtype: Fixed[Literal["float32", "bfloat16"]] = "bfloat16"  # of policy, reference, reward model and engine
    exact: Fixed[bool] = False  # CPU: the engine's log-probabilities are the policy's, bit for bit (exact/rowwise.py)


class OptimConfig(Section):
    """AdamW and its learning-rate schedule. The schedule's steps are optimizer steps, not training steps."""

    lr: Schedule[float] = Field(1e-6, ge=0, le=1)
    weight_decay: float = Field(0.01, ge=0, le=1000)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(1e-8, ge=1e-30, le=1)
    clip_grad: float = Field(1.0, gt=0)  # largest L2 norm of the whole gradient
    lr_warmup_steps: Schedule[int] = Field(0, ge=0)
    # WSD: constant, then linear decay
    lr_decay_style: Schedule[Literal["constant", "linear", "cosine", "WSD"]] = "constant"
    # WSD needs it: optimizer steps of the linear decay
    lr_wsd_decay_steps: Annotated[Schedule[int | None], Needs(".lr_decay_style=WSD")] = Field(None, ge=1)
    min_lr: Annotated[Schedule[float], Needs(".lr_decay_style!=constant")] = Field(
        0.0, ge=0, le=1
    )  # the rate that a decay ends with


class Fp8Config(Section):
    """FP8 in the decoder's linear layers, by Transformer Engine (models/layers/precision.py). recipe = null: no FP8."""

    recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"] | None = None
    format: Literal["e4m3", "hybrid"] | None = None  # hybrid: e5m2 gradients; null: the recipe's own
    param_gather: bool = False  # weights are stored, and gathered over data-parallel ranks, in FP8
    wgrad: bool = True  # delayed only; false: weight gradients are computed in bf16
    margin: int = Field(0, ge=-100, le=100)  # delayed only: scales are divided by 2 ** margin
    amax_history_len: Count = 1024  # delayed only: earlier passes whose largest values set a scale
    amax_compute_algo: Literal["max", "most_recent"] = "max"  # delayed only: how that history becomes one value
    first_last_layers_bf16: bool = False  # keep the layers at both ends of the model in bf16
    num_layers_at_start_in_bf16: int = Field(1, ge=0)  # with first_last_layers_bf16
    num_layers_at_end_in_bf16: int = Field(1, ge=0)  # with first_last_layers_bf16


class LoraConfig(Section):
    """LoRA (arXiv:2106.09685) with PEFT's meanings: only low-rank adapters W0 + s B A are trained. rank = null: all weights."""

    rank: int | None = Field(None, ge=1, le=4096)  # r, the width of A and B; null: no LoRA
    alpha: Annotated[float | None, Needs(".rank")] = Field(None, gt=0, le=1e6)  # s = alpha / rank; null: rank, so s = 1
    use_rslora: Annotated[bool, Needs(".rank")] = False  # s = alpha / sqrt(rank), arXiv:2312.03732
    # all-linear (without routers, experts, embedding, head), names (q_proj ... down_proj), or a regular expression
    target_modules: Annotated[str | list[str], Needs(".rank")] = "all-linear"
    exclude_modules: Annotated[str | list[str], Needs(".rank")] = []  # names, or a regular expression
    # A's initial values: uniform within 1 / sqrt(inputs), or normal with deviation 1 / rank. B starts as zeros
    init: Annotated[Literal["kaiming", "gaussian"], Needs(".rank")] = "kaiming"
    path: Annotated[Path | None, Needs(".rank")] = None  # PEFT folder with the adapters to start from; null: new ones
    # merged: the forward pass multiplies by round(W0 + s B A), the tensor that the engine holds. split: W0 x + s B (A x),
    # which is cheaper; the engine still gets the rounded sum
    mode: Annotated[Literal["merged", "split"], Needs(".rank")] = "merged"
    # of the inputs of A in an update, not in other passes
    dropout: Annotated[float, Needs(".rank"), Needs(".mode=split")] = Field(0.0, ge=0, lt=1)

    @property
    def scale(self) -> float:
        """s. Only with a rank."""
        assert self.rank is not None
        alpha = self.rank if self.alpha is None else self.alpha
        return alpha / (self.rank**0.5 if self.use_rslora else self.rank)


class VisionConfig(Section):
    """The vision tower of a model that reads images, and the merger that turns patches into tokens."""

    freeze_tower: bool = True  # all but the merger
    freeze_merger: bool = True
    # of what is trained here; null: actor.optim.lr. Its schedule is that of actor.optim, scaled
    lr: Annotated[float | None, Needs(".freeze_tower=false or .freeze_merger=false")] = Field(None, gt=0, le=1)

    @property
    def is_frozen(self) -> bool:
        """Whether nothing of it is trained."""
        return self.freeze_tower and self.freeze_merger


class MoeConfig(Section):
    """Mixtures of experts."""

    # Whose choice of experts every pass of the policy takes (models/layers/routes.py). none: its own; engine: that of the engine
    # which drew the token (R3), and of the reference too; old: that of the pass for the old log-probabilities (R2)
    route_replay: Literal["none", "engine", "old"] = "none"


class MegatronConfig(Section):
    """Layout and kernels of training. The data-parallel size is what the other sizes leave of the world size."""

    tensor_model_parallel_size: int = Field(1, ge=1)
    pipeline_model_parallel_size: int = Field(1, ge=1)
    expert_model_parallel_size: int = Field(1, ge=1)  # data-parallel ranks over which the experts are divided
    context_parallel_size: int = Field(1, ge=1)  # ranks over which each sequence is cut; needs Transformer Engine
    sequence_parallel: bool | None = None  # null: on when tensor_model_parallel_size > 1
    use_distributed_optimizer: Fixed[bool] = True  # shard the optimizer's state over data-parallel ranks
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"  # auto: TE on CUDA, if installed
    fused_head: bool = True  # log-probabilities by Triton's kernels; on CUDA, if Triton is installed
    fp8: Fixed[Fp8Config] = Fp8Config()
    offload_optimizer: bool = False  # optimizer states go to the host during rollouts; gradient buffers are freed
    offload_reference: bool = False  # the reference and frozen reward models are on the device only while used
    # GPU: the same gradients from the same batch. Attention's backward pass takes up to twice as long; an operation without
    # a deterministic kernel is an error
    deterministic: Annotated[bool, Needs("trainer.device!=cpu")] = False
    # GPU: a token's log-probability does not depend on the rows beside it. Megatron-Core's batch-invariant products and norms in
    # Transformer Engine's layers, with flash-attn. Slower
    batch_invariant: Annotated[bool, Needs("trainer.device!=cpu"), Needs(".transformer_impl=transformer_engine")] = (
        False
    )
    override_transformer_config: dict[str, Any] = {}  # for megatron.core's TransformerConfig; wrong names are errors

    @property
    def use_sequence_parallel(self) -> bool:
        return self.tensor_model_parallel_size > 1 if self.sequence_parallel is None else self.sequence_parallel


class ActorConfig(Section):
    """The policy's loss, its batches, its optimizer and its layout."""

    # prompts per optimizer step; null: data.train_batch_size
    ppo_mini_batch_size: Schedule[int | None] = Field(None, ge=1)
    ppo_epochs: Schedule[int] = Field(1, ge=1, le=1000)  # passes over each step's batch
    ppo_max_token_len_per_gpu: int = Field(16384, ge=1)  # most tokens in one packed micro-batch
    ppo_micro_batch_size_per_gpu: int | None = Field(None, ge=1)  # most sequences in one micro-batch; null: no bound
    # compute a prompt once for all of its responses in a micro-batch, where this is cheaper
    share_prompts: bool = False
    loss_mode: str = "vanilla"  # a registered policy loss, or module:function
    loss_agg_mode: str = "token-mean"  # the weight of each token in the loss: a registered name, or module:function
    # L of seq-mean-token-sum-norm; null: data.max_response_length
    loss_scale_factor: Annotated[
        float | None, Needs(".loss_agg_mode=seq-mean-token-sum-norm or critic.loss_agg_mode=seq-mean-token-sum-norm")
    ] = Field(None, ge=1e-3, le=1e12)
    clip_ratio_low: float = Field(0.2, ge=0)  # ratios below 1 - this are clipped
    clip_ratio_high: float = Field(0.2, ge=0)  # ratios above 1 + this are clipped
    clip_ratio_c: float | None = Field(3.0, gt=1)  # dual clip: bound of the ratio at negative advantages; null: off
    cispo_clip_ratio_low: Annotated[float, Needs(".loss_mode=cispo")] = Field(
        1.0, ge=0
    )  # CISPO's lower bound is 1 - this; 1 or more: no lower bound
    tau_pos: Annotated[float, Needs(".loss_mode=sapo")] = Field(
        1.0, ge=1e-3, le=1e6
    )  # SAPO's temperature at positive advantages
    tau_neg: Annotated[float, Needs(".loss_mode=sapo")] = Field(
        1.05, ge=1e-3, le=1e6
    )  # SAPO's temperature at the other advantages
    dpo_beta: Annotated[float, Needs(".loss_mode=dpo")] = Field(
        0.1, gt=0, le=1e4
    )  # DPO's beta: how strongly the policy is kept near the reference
    use_kl_loss: bool = True  # add kl_loss_coef * KL to the reference to the loss
    kl_loss_coef: Annotated[Coefficient, Needs(".use_kl_loss=true or .kl_loss_coef=0")] = (
        0.001  # 0: the KL is not computed, and needs no reference
    )
    kl_loss_type: Annotated[str, Needs(".use_kl_loss=true")] = (
        "low_var_kl"  # the estimator of that KL (algo/divergence.py)
    )
    entropy_coeff: float = Field(0.0, ge=-1e4, le=1e4)  # times the entropy (nats), which is subtracted from the loss
    logprob_chunk_size: int = Field(1024, ge=1)  # tokens whose logits are in memory at a time
    max_skipped_steps: int = Field(10, ge=0)  # consecutive optimizer steps with a non-finite gradient; one more: stop
    optim: OptimConfig = OptimConfig()
    lora: Fixed[LoraConfig] = LoraConfig()
    moe: MoeConfig = MoeConfig()
    vision: Fixed[VisionConfig] = VisionConfig()
    megatron: MegatronConfig = MegatronConfig()

    @property
    def layers(self) -> MegatronConfig:
        """`megatron`, with Megatron-Core's layers for split adapters: Transformer Engine's do not give the normalised input."""
        is_split = self.lora.rank is not None and self.lora.mode == "split"
        return self.megatron.model_copy(update={"transformer_impl": "local"}) if is_split else self.megatron

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
    """The frozen reference model."""

    # null: the model that GRPO starts from (model.path, after the warmup if there is one)
    path: Annotated[
        Fixed[Path | None],
        Needs(
            "actor.use_kl_loss=true or algorithm.use_kl_in_reward=true or actor.loss_mode:needs_reference"
            " or algorithm.source=initial"
        ),
    ] = None


HAS_CRITIC = Needs("algorithm.adv_estimator:needs_values")


class CriticConfig(Section):
    """A model with one value per token, in the policy's layout and dtype. It is trained in every step, before the policy."""

    # Hugging Face folder: *ForTokenClassification or *ForSequenceClassification with one label (a reward model), or
    # *ForCausalLM, which gets a new head of zeros; null: the model that the policy starts from
    path: Fixed[Path | None] = None
    ppo_mini_batch_size: Schedule[int | None] = Field(None, ge=1)  # prompts per optimizer step; null: the actor's
    ppo_epochs: Schedule[int | None] = Field(None, ge=1, le=1000)  # passes over each step's batch; null: the actor's
    # a value moves at most this far in one step's updates; null: no bound
    cliprange_value: float | None = Field(0.5, gt=0)
    loss_agg_mode: str = "token-mean"  # the weight of each token in the value loss: a name as in actor.loss_agg_mode
    lam: float | None = Field(None, ge=0, le=1)  # lambda of the value's targets; null: algorithm.lam (VC-PPO has 1)
    # VAPO: lambda of a response's advantages is 1 - 1 / (lam_alpha * its loss tokens); null: algorithm.lam for all
    lam_alpha: float | None = Field(None, gt=0, le=1e4)
    # the first steps train only the critic, on returns (lambda 1); VC-PPO
    pretrain_steps: Schedule[int] = Field(0, ge=0)
    offload: bool = False  # weights, gradients and optimizer are on the host while the critic is not used
    optim: OptimConfig = OptimConfig(lr=1e-5)
    lora: Fixed[LoraConfig] = LoraConfig()

    def mini_batch_size(self, actor: ActorConfig, train_batch_size: int) -> int:
        """Prompts per optimizer step."""
        return self.ppo_mini_batch_size or actor.mini_batch_size(train_batch_size)

    def num_epochs(self, actor: ActorConfig) -> int:
        """Passes over each step's batch."""
        return self.ppo_epochs or actor.ppo_epochs

    def num_updates(self, num_steps: int, actor: ActorConfig, train_batch_size: int) -> int:
        """Optimizer steps of `num_steps` training steps."""
        mini_batches = -(-train_batch_size // self.mini_batch_size(actor, train_batch_size))
        return num_steps * mini_batches * self.num_epochs(actor)


# -- `data` and `sft`: files, prompts, the supervised warmup -----------------------------------------------------------


class SamplingConfig(Section):
    """How often each training prompt is drawn. The weight is a function of its pass rate p, which was measured before.

    An epoch is as many draws as there are prompts (data/sampler.py).
    """

    pass_rates: Path | None = None  # written by `grpo-megatron curate`; null: every prompt once per epoch
    # 1-p: Kimi k1.5, arXiv 2501.12599; p(1-p): learnability, arXiv 2502.12272; file: the rows' own "weight"
    weight: Literal["uniform", "1-p", "p(1-p)", "file"] = "uniform"
    # this share of the draws ignores the weights
    uniform_share: Annotated[float, Needs(".pass_rates"), Needs(".weight!=uniform")] = Field(0.0, ge=0, le=1)
    min_pass_rate: float = Field(0.0, ge=0, le=1)  # prompts below it are left out
    max_pass_rate: float = Field(1.0, ge=0, le=1)  # prompts above it are left out
    default_pass_rate: float | None = Field(None, ge=0, le=1)  # of prompts that the file lacks; null: an error


class DataSource(Section):
    """One of several data sets of a run. Draws follow the weights exactly: data/sampler.py."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")  # in metrics and uids
    files: Files  # to train on, as data.train_files
    val_files: Files = []  # as data.val_files
    # its share of the prompts, relative to the others; null: its number of rows
    weight: float | None = Field(None, gt=0, le=1e9)
    task: str | None = None  # null: data.task
    reward: str | None = None  # null: reward.function or reward.components; else the task's
    system_prompt: str | None = None  # null: data.system_prompt


class DataConfig(Section):
    """The files, and how their rows become prompts."""

    # How rows become prompts: a built-in task, a task file, or module:function (data/task.py). Where it is not set, rows in
    # verl's and TRL's form are recognised.
    task: Fixed[str] = "gsm8k"
    # .jsonl, .json, .csv, .parquet, .arrow or a folder of Hugging Face `datasets`, in this order: a path, a pattern or a list
    train_files: Fixed[Files] = []
    sources: Fixed[list[DataSource]] = []  # several data sets, with weights; instead of train_files
    val_files: Files = []
    train_batch_size: Schedule[Count] = 512
    # prompts per round of dynamic sampling; null: train_batch_size
    gen_batch_size: Annotated[Count | None, Needs("algorithm.filter_groups.enable=true")] = None
    val_tasks: list[str] = []  # tasks to validate on (gsm8k, math500, ...), with or without val_files
    val_data: Path | None = None  # folder with the files of val_tasks
    val_loss_files: Files = []  # responses, or pairs for a loss of pairs: their loss is part of each validation
    val_max_samples: int | None = Field(None, ge=1)  # use the first N rows of val_files, and of each task; null: all
    max_prompt_length: Fixed[int] = Field(1024, ge=1)
    max_response_length: int = Field(2048, ge=1)
    filter_overlong_prompts: Fixed[bool] = True  # drop prompts above max_prompt_length; false: they are an error
    shuffle: Fixed[bool] = True  # the training prompts, in a new order in each epoch
    seed: Fixed[Seed] = 42  # of the shuffling
    sampling: Annotated[Fixed[SamplingConfig], Needs("data.sampling.pass_rates")] = SamplingConfig()
    apply_chat_template: Fixed[bool] = True  # false: the task's plain text prompt
    chat_template: Fixed[Path | None] = None  # Jinja file; null: the tokenizer's template
    system_prompt: Fixed[str | None] = None  # null: the task's system prompt
    image_max_pixels: Fixed[int | None] = Field(None, ge=1)  # larger images are scaled down; null: the model's limit
    image_min_pixels: Fixed[int | None] = Field(None, ge=1)  # smaller images are scaled up; null: the model's limit
    max_images: Fixed[int] = Field(8, ge=1)  # most images of a prompt

    @property
    def has_prompts_to_validate(self) -> bool:
        return bool(self.val_files or self.val_tasks or any(source.val_files for source in self.sources))


class SftConfig(Section):
    """The supervised warmup before GRPO. steps = 0: there is none."""

    steps: Fixed[int] = Field(0, ge=0)  # optimizer steps
    train_files: Fixed[Files] = []  # rows {"prompt": ..., "response": ...}
    train_batch_size: Fixed[Count] = 32  # rows per optimizer step
    save_freq: Frequency = 100  # steps between its checkpoints; -1, or trainer.save_freq=-1: none
    optim: Fixed[OptimConfig] = OptimConfig()


# -- `algorithm`, `reward` and the reward models -----------------------------------------------------------------------


class FilterGroups(Section):
    """DAPO's dynamic sampling: a prompt whose samples all got the same reward is replaced by another prompt."""

    enable: Fixed[bool] = False
    # rounds per step; after them the step trains on a smaller batch
    max_num_gen_batches: Annotated[Count, Needs(".enable=true")] = 10
    # largest age of a left-over group, in steps; older ones are dropped
    max_staleness: Annotated[int, Needs(".enable=true")] = Field(1, ge=0)


class ReplayConfig(Section):
    """Groups of earlier steps in the batch. Only groups whose rewards differ are kept."""

    ratio: Fixed[float] = Field(0.0, ge=0, lt=1)  # largest share of the batch's prompts; 0: off
    size: Annotated[Count, Needs(".ratio>0")] = 512  # groups in the buffer
    # largest age of a group, in steps; older groups are dropped
    max_staleness: Annotated[int, Needs(".ratio>0")] = Field(2, ge=1)


class KlCtrl(Section):
    """The coefficient of the KL penalty in the reward. adaptive: it follows target_kl (algo/divergence.py)."""

    type: Annotated[Literal["fixed", "adaptive"], Needs("algorithm.use_kl_in_reward=true")] = "fixed"
    kl_coef: Annotated[Coefficient, Needs("algorithm.use_kl_in_reward=true or .kl_coef=0")] = (
        0.001  # adaptive: its value at the start; 0: no KL, and no reference
    )
    # adaptive: nats per token
    target_kl: Annotated[float, Needs("algorithm.use_kl_in_reward=true"), Needs(".type=adaptive")] = Field(0.1, gt=0)
    # adaptive: n samples change it by at most 20 % * n / horizon
    horizon: Annotated[int, Needs("algorithm.use_kl_in_reward=true"), Needs(".type=adaptive")] = Field(10000, ge=1)


class RolloutCorrection(Section):
    """Corrects for log-probabilities that differ between engine and policy (algo/divergence.py).

    `rollout_is` multiplies the loss by importance weights; `rollout_rs` takes tokens or whole responses out of the loss.
    """

    # the ratio of the loss is to the engine's log-probabilities, without weights: no old ones are computed
    bypass_mode: Annotated[bool, Needs("actor.loss_mode:is_likelihood=false")] = False
    rollout_is: Literal["token", "sequence", "geometric", "icepop"] | None = "token"  # null: no weights
    # larger weights are cut to it (icepop: set to 0)
    rollout_is_threshold: Annotated[float, Needs(".rollout_is")] = Field(2.0, gt=0)
    # icepop: smaller weights are set to 0; null: 1 / upper
    rollout_is_threshold_low: Annotated[float | None, Needs(".rollout_is=icepop")] = Field(None, gt=0)
    rollout_rs: Literal["token", "sequence", "geometric", "off_policy"] | None = None  # null: nothing is taken out
    # largest ratio that stays (off_policy: nats per token)
    rollout_rs_threshold: Annotated[float, Needs(".rollout_rs")] = Field(2.0, gt=0)
    # smallest ratio that stays; null: 1 / upper
    rollout_rs_threshold_low: Annotated[float | None, Needs(".rollout_rs")] = Field(None, gt=0)


class AlgorithmConfig(Section):
    """Where samples come from, their advantages, and which of them are trained on."""

    adv_estimator: str = "grpo"  # a registered advantage estimator, or module:function
    norm_adv_by_std_in_grpo: bool = True  # grpo: divide by the standard deviation of the group's rewards
    gamma: Annotated[float, Needs(".adv_estimator=reinforce_plus_plus or .adv_estimator=gae")] = Field(
        1.0, gt=0, le=1
    )  # reinforce_plus_plus, gae: discount per token
    # gae: weight of later values; 1: returns, 0: the next value alone
    lam: Annotated[float, HAS_CRITIC] = Field(1.0, ge=0, le=1)
    rft_threshold: Annotated[float, Needs(".adv_estimator=rft")] = (
        1.0  # rft: a response with at least this reward is right
    )
    # subtract kl_ctrl.kl_coef * KL to the reference from each token's reward
    use_kl_in_reward: Annotated[bool, Needs(".adv_estimator:ignores_token_penalties=false")] = False
    kl_penalty: Annotated[str, Needs(".use_kl_in_reward=true")] = (
        "kl"  # the estimator of that KL: a name as in actor.kl_loss_type
    )
    kl_ctrl: KlCtrl = KlCtrl()
    rollout_correction: RolloutCorrection = RolloutCorrection()
    # Where responses come from: the policy, the model that the run starts from, or data.train_files.
    source: Fixed[Literal["policy", "initial", "file"]] = "policy"
    # iterative GRPO: steps per outer iteration; null: one iteration
    iteration_steps: Fixed[int | None] = Field(None, ge=1)
    filter_groups: FilterGroups = FilterGroups()
    dupo: bool = False  # replace groups of equal rewards by copies of the other groups
    mask_truncated_samples: bool = False  # responses cut at the limit: out of the loss, in their group's statistics
    replay: ReplayConfig = ReplayConfig()


# -- The section `reward`: one reward function, or a weighted sum of several -------------------------------------------


class OverlongBuffer(Section):
    """DAPO's soft penalty for responses that come close to data.max_response_length (algo/plan.py)."""

    len: int | None = Field(None, ge=1)  # the penalty grows from 0 to 1 over the last so many tokens; null: off
    penalty_factor: Annotated[float, Needs(".len")] = Field(1.0, gt=0, le=1e4)  # multiplies the penalty


class Gate(Section):
    """The component counts only where the value of another component is at least `min` and at most `max`."""

    component: str  # its name
    min: float | None = None  # null: no lower bound
    max: float | None = None  # null: no upper bound


class RewardComponent(Section):
    """One term of the reward: weight x value. Its value is the metric reward/NAME/mean."""

    name: str = Field(pattern="^[A-Za-z][A-Za-z0-9_-]{0,63}$")
    function: str | None = None  # null: the reward called `name`; for the name accuracy, the task's own reward
    weight: float = Field(1.0, ge=-1e4, le=1e4)  # 0: only a metric
    kwargs: dict[str, Any] = {}  # keyword arguments of the function
    gate: Gate | None = None  # null: counts always


class RewardConfig(Section):
    """The reward function of the samples, or a weighted sum of several, and the processes that call it."""

    function: str | None = None  # a registered reward, or module:function; null: the task's own
    # the reward is their weighted sum (rewards/calling.py); not with `function`
    components: list[RewardComponent] = Field([], max_length=16)
    num_workers: Processes = 1  # processes per engine
    timeout_s: Seconds = 10.0  # wall-clock seconds per sample; then its worker is killed
    max_failed_ratio: float = Field(0.5, ge=0, le=1)  # the run stops if a larger share of a draw has no reward
    kwargs: Annotated[dict[str, Any], Needs(".components=[]")] = {}  # keyword arguments of the reward function
    overlong_buffer: OverlongBuffer = OverlongBuffer()


# -- The sections `reward_model` and `reward_models`: models that score responses --------------------------------------


HAS_STEPS = Needs("reward_model.path or actor.loss_mode:scores=step")


class ScoringModel(Section):
    """One model. `reward_models` has any number of them, frozen, each under a name of its own."""

    path: Fixed[Path | None] = None  # Hugging Face folder (models/heads/reward_folder.py); null: there is none
    kind: Annotated[Fixed[Literal["outcome", "process"]], HAS_STEPS] = "outcome"  # one score per response, or per step
    coefficient: float = Field(1.0, gt=0, le=1e4)  # multiplies its score in the sum (algo/scores.py)
    # process: the text that ends a step (data/prompts.py)
    step_separator: Annotated[str, HAS_STEPS] = Field("\n", min_length=1)


class RewardModelConfig(ScoringModel):
    """A reward model in the policy's layout. path = null: there is none.

    With algorithm.iteration_steps it learns after every outer iteration (iterative GRPO); without, it is frozen.
    """

    # in earlier outer iterations, the reward function alone gives the reward
    start_iteration: Annotated[int, Needs(".path"), Needs("algorithm.iteration_steps")] = Field(0, ge=0)
    # the sum of all models replaces the function's reward, or is added
    combine: Annotated[Literal["replace", "add"], Needs("reward_model.path or reward_models")] = "replace"
    max_pairs_per_group: int | None = Field(4, ge=1)  # (better, worse) pairs among one prompt's samples; null: all
    steps: Schedule[int] = Field(50, ge=1)  # its optimizer steps after each outer iteration
    train_batch_size: Count = 32  # pairs per optimizer step
    replay_ratio: float = Field(0.1, ge=0, lt=1)  # share of these pairs that comes from earlier outer iterations
    history_size: int = Field(2048, ge=1)  # pairs kept for the replay: a uniform sample of all earlier ones
    optim: OptimConfig = OptimConfig()

    def num_updates(self, num_steps: int, iteration_steps: int) -> int:
        """Optimizer steps of a learning reward model in `num_steps` training steps."""
        return num_steps // iteration_steps * self.steps


# -- `rollout`: the engine, sampling, several turns --------------------------------------------------------------------

# The temperatures that vLLM accepts besides 0 (greedy). It silently raises a lower one, and refuses a higher one.
ENGINE_TEMPERATURES = (0.01, 2.0)


def _of_the_engine(temperature: float) -> float:
    low, high = ENGINE_TEMPERATURES
    if temperature and not low <= temperature <= high:
        raise PydanticCustomError(
            "temperature", f"it is outside the engine's {low:g} to {high:g}; set a value in between"
        )
    return temperature


def _only(full: float) -> AfterValidator:
    """For top_p and top_k: the one value that leaves the distribution as it is."""

    def check(value: float) -> float:
        if value != full:
            text = "the policy's log-probabilities are of the full distribution; leave it out (rollout.val_kwargs may differ)"
            raise PydanticCustomError("full", text)
        return value

    return AfterValidator(check)


class ValKwargs(Section):
    """How validation samples: its own values, instead of those of `rollout`."""

    n: int = Field(1, ge=1, le=65536)  # samples per prompt
    temperature: Annotated[float, AfterValidator(_of_the_engine)] = Field(0.0, ge=0)  # 0: greedy
    top_p: float = Field(1.0, gt=0, le=1)


OF_TOOLS = Needs("rollout.multi_turn.environment=tools")


class MultiTurnConfig(Section):
    """Rollouts of several turns: an environment answers what the model writes. environment = null: single turn."""

    environment: str | None = None  # a registered environment, or module:Class (environments/environment.py)
    kwargs: dict[str, Any] = {}  # keyword arguments of the environment's class
    tools: Annotated[list[str], OF_TOOLS] = []  # registered tools, or module:function
    format: Annotated[str, OF_TOOLS] = "hermes"  # how the model writes a tool call (environments/tool_environment.py)
    max_assistant_turns: int = Field(8, ge=1)  # a trajectory ends after so many
    # tool calls of one turn that are answered; the others get an error
    max_parallel_calls: Annotated[int, OF_TOOLS] = Field(4, ge=1)
    max_tool_response_length: int = Field(256, ge=1)  # tokens of one message of an observation; longer ones are cut
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"  # what is cut
    latency_ticks: int = Field(8, ge=1)  # engine steps from the end of a turn to the observation (trajectories/)
    num_workers: int = Field(1, ge=1)  # processes per engine
    timeout_s: float = Field(30.0, gt=0)  # wall-clock seconds of one reset or step
    memory_gib: float = Field(2.0, gt=0)  # address space of one environment, above what its worker has loaded
    failed: Literal["keep", "mask"] = "keep"  # trajectories that their environment failed: in the loss, or not


class PartialConfig(Section):
    """Responses may take several steps (sampling/partial.py). over_sample = 1: every step waits for all its responses."""

    over_sample: Fixed[float] = Field(1.0, ge=1, le=2)  # prompts in progress, relative to those of a batch
    max_staleness: int = Field(2, ge=1)  # a group is trained on at most so many steps after its first token
    chunk_tokens: int = Field(512, ge=1)  # responses stop for a later step at multiples of it

    @property
    def is_on(self) -> bool:
        return self.over_sample > 1


class RolloutConfig(Section):
    """The engine, and how it samples."""

    engine: str = "vllm"  # a registered engine, or module:Class (rollout/engine.py)
    engine_options: dict[str, Any] = {}  # the engine's own section, validated by its class (rollout/vllm/arguments.py)
    n: int = Field(8, ge=1, le=65536)  # samples per prompt
    temperature: Annotated[float, AfterValidator(_of_the_engine)] = Field(1.0, gt=0)
    # no other value may be set: the policy's logprobs are of the full distribution
    top_p: Annotated[float, _only(1.0)] = 1.0
    top_k: Annotated[int, _only(-1)] = -1
    seed: Seed = 42  # each sample's seed is a hash of this, the step, the prompt and the sample's index
    # separate: the last ranks of the run only draw, the others only train (training/roles.py); colocated: all do both
    placement: Literal["colocated", "separate"] = "colocated"
    num_nodes: Annotated[Count | None, Needs("rollout.placement=separate")] = None  # whole nodes that only draw
    num_ranks: Annotated[Count | None, Needs("rollout.placement=separate")] = None  # instead of num_nodes, on one node
    # a step is drawn by the weights of so many steps before; 0: the same run as colocated, 1: both roles always work
    lag: Annotated[int, Needs("rollout.placement=separate")] = Field(0, ge=0, le=64)
    tensor_model_parallel_size: int = Field(1, ge=1)
    expert_parallel_size: int = Field(1, ge=1)  # = tensor_model_parallel_size: whole experts per rank; 1: each is cut
    gpu_memory_utilization: float = Field(0.6, gt=0, le=1)  # share of the device's memory that vLLM may take
    # sequences that one engine decodes at a time; null: what the KV cache holds (models/engine_cache.py), 256 on the CPU
    max_num_seqs: Count | None = None
    max_num_batched_tokens: int = Field(8192, ge=1)  # tokens of one engine step
    enforce_eager: bool = False  # no CUDA graphs
    free_cache_engine: bool = True  # GPU: the engine sleeps between rollouts
    quantization: Literal["fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8"] | None = None  # of the engine
    # GPU: a response does not depend on what else is drawn (vLLM's VLLM_BATCH_INVARIANT, 0.32 and Hopper or newer). Slower
    # products without split-k, for training too
    batch_invariant: Annotated[bool, Needs("trainer.device!=cpu"), Needs("rollout.engine=vllm")] = False
    enable_prefix_caching: bool = True
    update_weights_bucket_megabytes: Count = 512  # MiB of weights sent to the engine at a time
    sync: Literal["full", "delta"] = "full"  # delta: after a full sync, only elements whose bits have changed are sent
    delta_full_every: Annotated[int, Needs("rollout.sync=delta")] = Field(
        50, ge=1
    )  # every so many syncs is full all the same
    delta_max_density: Annotated[float, Needs("rollout.sync=delta")] = Field(
        0.1, gt=0, le=1
    )  # a sync is full if a larger share of the elements has changed
    # mean |logprob difference| after a sync; null: training/colocation.py
    probe_tolerance: float | None = Field(None, gt=0)
    engine_kwargs: dict[str, Any] = {}  # further arguments of vllm.LLM; wrong names are errors
    val_kwargs: ValKwargs = ValKwargs()
    # texts that end a response (or a turn); the token that completes one stays in it
    stop: list[Annotated[str, Field(min_length=1)]] = []
    stop_token_ids: list[int] = []  # further tokens that end it
    partial: Annotated[PartialConfig, Needs("rollout.partial.over_sample>1")] = PartialConfig()
    multi_turn: Annotated[MultiTurnConfig, Needs("rollout.multi_turn.environment")] = MultiTurnConfig()

    @property
    def sequences(self) -> int:
        """Sequences that one engine decodes at a time, where nothing is derived from the memory of a GPU."""
        return self.max_num_seqs or min(256, self.max_num_batched_tokens)

    @property
    def has_whole_experts(self) -> bool:
        """Whether a rank of an engine has some experts whole, and nothing of the others."""
        return self.expert_parallel_size > 1

    @model_validator(mode="before")
    @classmethod
    def _a_quantized_engine_differs(cls, values: Any) -> Any:
        """Quantisation alone moves log-probabilities by 0.1 and more, so the default tolerance is wider with it."""
        if isinstance(values, dict) and values.get("quantization") and values.get("probe_tolerance") is None:
            return {**values, "probe_tolerance": 0.3}
        return values


# -- `guards` and `trainer`: the run itself ----------------------------------------------------------------------------

DeviceName = Literal["auto", "cpu", "cuda"]


class Band(Section):
    """A range that a number of every optimizer step should be in. Both bounds null: the guard is off."""

    low: float | None = None  # the guard fires below it; null: no bound
    high: float | None = None  # the guard fires above it; null: no bound
    action: Literal["warn", "skip", "stop"] = "warn"

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Band:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise PydanticCustomError("band", "the lower bound is above the upper one; swap low and high")
        return self

    @property
    def is_on(self) -> bool:
        return self.low is not None or self.high is not None


class GuardsConfig(Section):
    """What happens when a number is not finite, or leaves its band (training/guards.py).

    warn: the run goes on. skip: the optimizer step is left out, and nothing changes. stop: the run ends.
    """

    rewards: Literal["warn", "skip", "stop"] = "stop"  # an infinite reward; NaN is a sample without a reward
    logprobs: Literal["warn", "skip", "stop"] = "skip"  # log-probabilities of loss tokens, and the loss
    gradients: Literal["skip", "stop"] = "skip"  # their norm; actor.max_skipped_steps in a row end the run
    weights: Literal["warn", "stop"] = "stop"  # after the step, before a checkpoint is saved
    grad_norm: Band = Band()  # before clipping
    entropy: Band = Band()  # nats per token, as actor/entropy
    # as actor/kl_loss
    kl: Annotated[Band, Needs("actor.use_kl_loss=true"), Needs("actor.kl_loss_coef>0")] = Band()
    response_length: Band = Band()  # tokens, the mean of the training step
    # mean |old - rollout log-probability|, as training/rollout_logp_diff_mean
    rollout_gap: Annotated[
        Band,
        Needs("actor.loss_mode:is_likelihood=false or algorithm.use_kl_in_reward=true"),
        Needs("algorithm.rollout_correction.bypass_mode=false"),  # several updates would not measure it
    ] = Band()
    # share of the engine's experts that the policy's routers would have chosen; less: its routes belong to other tokens or layers
    route_agreement: Annotated[Band, Needs("actor.moe.route_replay=engine")] = Band(low=0.75, action="stop")
    # batches written to output_dir/dumps, with the weights, each time the run is started
    max_dumps: int = Field(3, ge=0)


class TrainerConfig(Section):
    """The run itself: steps, ranks, files, saving, stopping, logging."""

    total_training_steps: Schedule[int] = Field(100, ge=0, le=1_000_000_000)
    # Instead of total_training_steps: total_epochs x floor(rows of data.train_files / data.train_batch_size) steps
    total_epochs: Schedule[int | None] = Field(None, ge=1, le=1_000_000)
    output_dir: Path = Path("outputs/run")
    save_freq: Frequency = 20  # steps between checkpoints; the last step is saved, too; -1: no checkpoint at all
    test_freq: Frequency = 5  # steps between validations; -1: only val_before_train's
    # the first steps train the critic alone
    critic_warmup: Annotated[Schedule[int], HAS_CRITIC] = Field(0, ge=0)
    val_before_train: bool = True  # validate before the first step, and after the last
    # auto: from the newest checkpoint in output_dir; disable: from the start, an earlier run's files move to earlier_001/
    resume_mode: Literal["auto", "disable"] = "auto"
    verify_checkpoints: Literal["full", "sizes"] = "full"  # before resuming, compare files by sha256, or by size only
    # resume although data, weights or tokenizer are not those of the checkpoint (checks/digests.py)
    accept_changed_inputs: bool = False
    stop_file: Path | None = None  # once this file exists, save after the step and exit with code 75
    # Unix time in seconds: the same, before a step that could end later
    stop_at: float | None = Field(None, gt=0, le=1e11)
    async_save: bool = False  # training goes on while a checkpoint is written, from a copy on the host
    max_actor_ckpt_to_keep: int | None = Field(3, ge=1)  # older checkpoints are removed; null: keep all
    # write the trained model as a Hugging Face folder, output_dir/hf; of adapters a PEFT folder, or (merged) the whole model
    save_hf_at_end: bool | Literal["merged"] = True
    # metrics.jsonl and report.html are written in any case
    logger: list[Literal["console", "jsonl", "tensorboard", "wandb", "swanlab", "mlflow"]] = ["console", "jsonl"]
    project_name: str = Field("grpo_megatron", min_length=1, max_length=128)  # of wandb, swanlab and mlflow
    # the run's name there; null: output_dir's name
    experiment_name: str | None = Field(None, min_length=1, max_length=128)
    tags: list[str] = []  # of wandb, swanlab and mlflow
    num_logged_samples: int = Field(4, ge=0)  # completions written as text per validation
    rollout_data_dir: Path | None = None  # every training sample, one .jsonl file per step; null: they are not written
    nnodes: int = Field(1, ge=1, le=65536)
    n_gpus_per_node: Processes = 8  # ranks per node, on CPU too
    device: DeviceName = "auto"  # auto: cuda if torch sees one
    seed: Fixed[Seed] = 42  # of everything in training that is neither data.seed's nor rollout.seed's
    timeout_s: Seconds = 1800.0  # seconds after which a collective fails
    stall_timeout_s: Seconds | None = 35.0  # then a rank that is silent or idle ends the run; null: never
    peak_tflops: float | None = Field(None, gt=0)  # TFLOP/s of one device, for MFU; null: by device name, if known


# -- The whole config --------------------------------------------------------------------------------------------------


class Config(Section):
    """The whole config of a run: one section per topic."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    sft: SftConfig = SftConfig()
    actor: ActorConfig = ActorConfig()
    ref: RefConfig = RefConfig()
    critic: Annotated[CriticConfig, HAS_CRITIC] = CriticConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    reward_model: Annotated[RewardModelConfig, Needs("reward_model.path")] = RewardModelConfig()
    reward_models: dict[str, ScoringModel] = {}  # further frozen models: name -> model
    algorithm: AlgorithmConfig = AlgorithmConfig()
    guards: GuardsConfig = GuardsConfig()
    trainer: TrainerConfig = TrainerConfig()

    @property
    def critic_only_steps(self) -> int:
        """The first training steps, which leave the policy as it is."""
        return max(self.trainer.critic_warmup, self.critic.pretrain_steps)

    @property
    def policy_steps(self) -> int:
        """Training steps that update the policy."""
        return max(0, self.trainer.total_training_steps - self.critic_only_steps)

    @property
    def shares_reference(self) -> bool:
        """Whether the reference is the policy without its adapters, and needs no memory of its own."""
        return self.actor.lora.rank is not None and self.ref.path in (None, self.model.path) and not self.sft.steps

    @property
    def reward_paths(self) -> list[Path]:
        """The folders of all reward models."""
        return [model.path for model in (self.reward_model, *self.reward_models.values()) if model.path is not None]

    @property
    def has_rule(self) -> bool:
        """Whether a reward function scores the samples to train on. Frozen models that replace its reward need none."""
        learns = self.reward_model.path is not None and self.algorithm.iteration_steps is not None
        is_replaced = bool(self.reward_paths) and self.reward_model.combine == "replace" and not learns
        return self.reward.function is not None or bool(self.reward.components) or not is_replaced

    @property
    def max_staleness(self) -> int:
        """Steps that a sample may be older than the step that trains on it, whatever keeps it."""
        algorithm, rollout = self.algorithm, self.rollout
        kept = (algorithm.filter_groups.max_staleness, algorithm.replay.max_staleness, rollout.partial.max_staleness)
        return rollout.lag + max(kept)

    @property
    def colocates(self) -> bool:
        """Whether a rank that trains has an engine on its device."""
        return self.draws and self.rollout.placement == "colocated"

    @property
    def num_rollout_ranks(self) -> int:
        """The last so many ranks of the run only draw. 0: every rank draws and trains."""
        rollout = self.rollout
        if rollout.placement == "colocated":
            return 0
        return rollout.num_ranks or (rollout.num_nodes or 0) * self.trainer.n_gpus_per_node

    @property
    def draws(self) -> bool:
        """Whether the run draws responses, to train on them or to validate. Otherwise it has no engine."""
        data, trainer = self.data, self.trainer
        validates = trainer.val_before_train or trainer.test_freq > 0
        trains_on_drawn = trainer.total_training_steps > 0 and self.algorithm.source != "file"
        return trains_on_drawn or (validates and data.has_prompts_to_validate)
