"""The sections `model`, `actor` and `ref`: weights, layout, optimizer, loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from grpo_megatron.config.section import Beta, Coefficient, Count, Fixed, Schedule, Section


class ModelConfig(Section):
    """The model that the run starts from."""

    path: Fixed[Path]  # Hugging Face folder: config.json, *.safetensors, tokenizer
    tokenizer_path: Fixed[Path | None] = None  # null: path
    family: Fixed[str | None] = None  # null: by model_type of config.json; or my.module:FAMILY of your own
    dtype: Fixed[Literal["float32", "bfloat16"]] = "bfloat16"  # of policy, reference, reward model and engine


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
    lr_wsd_decay_steps: Schedule[int | None] = Field(None, ge=1)  # WSD needs it: optimizer steps of the linear decay
    min_lr: Schedule[float] = Field(0.0, ge=0, le=1)  # the rate that a decay ends with


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
    fp8: Fixed[Fp8Config] = Fp8Config()
    offload_optimizer: bool = False  # optimizer states go to the host during rollouts; gradient buffers are freed
    offload_reference: bool = False  # the reference and frozen reward models are on the device only while used
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
    loss_scale_factor: float | None = Field(None, ge=1e-3, le=1e12)
    clip_ratio_low: float = Field(0.2, ge=0)  # ratios below 1 - this are clipped
    clip_ratio_high: float = Field(0.2, ge=0)  # ratios above 1 + this are clipped
    clip_ratio_c: float | None = Field(3.0, gt=1)  # dual clip: bound of the ratio at negative advantages; null: off
    cispo_clip_ratio_low: float = Field(1.0, ge=0)  # CISPO's lower bound is 1 - this; 1 or more: no lower bound
    tau_pos: float = Field(1.0, ge=1e-3, le=1e6)  # SAPO's temperature at positive advantages
    tau_neg: float = Field(1.05, ge=1e-3, le=1e6)  # SAPO's temperature at the other advantages
    dpo_beta: float = Field(0.1, gt=0, le=1e4)  # DPO's beta: how strongly the policy is kept near the reference
    use_kl_loss: bool = True  # add kl_loss_coef * KL to the reference to the loss
    kl_loss_coef: Coefficient = 0.001  # 0: the KL is not computed, and needs no reference
    kl_loss_type: str = "low_var_kl"  # the estimator of that KL (algo/divergence.py)
    entropy_coeff: float = Field(0.0, ge=-1e4, le=1e4)  # times the entropy (nats), which is subtracted from the loss
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
    """The frozen reference model."""

    # null: the model that GRPO starts from (model.path, after the warmup if there is one)
    path: Fixed[Path | None] = None


# -- The section `critic` ----------------------------------------------------------------------------------------------


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
