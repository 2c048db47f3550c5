"""The sections `actor`, `ref` and `critic`: losses, batches, optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from grpo_megatron.config.model import LoraConfig, MegatronConfig, MoeConfig, OptimConfig, VisionConfig
from grpo_megatron.config.section import Coefficient, Fixed, Needs, Schedule, Section


class ActorConfig(Section):
    """The policy's loss, its batches, its optimizer and its layout."""

    ppo_mini_batch_size: Schedule[int | None] = Field(None, ge=1)
    """prompts per optimizer step; null: data.train_batch_size"""
    ppo_epochs: Schedule[int] = Field(1, ge=1, le=1000)
    """passes over each step's batch"""
    ppo_max_token_len_per_gpu: int = Field(16384, ge=1)
    """most tokens in one packed micro-batch"""
    ppo_micro_batch_size_per_gpu: int | None = Field(None, ge=1)
    """most sequences in one micro-batch; null: no bound"""
    share_prompts: bool = False
    """compute a prompt once for all of its responses in a micro-batch, where this is cheaper"""
    loss_mode: str = "vanilla"
    """a registered policy loss, or module:function"""
    loss_agg_mode: str = "token-mean"
    """the weight of each token in the loss: a registered name, or module:function"""
    loss_scale_factor: Annotated[
        float | None, Needs(".loss_agg_mode=seq-mean-token-sum-norm or critic.loss_agg_mode=seq-mean-token-sum-norm")
    ] = Field(None, ge=1e-3, le=1e12)
    """L of seq-mean-token-sum-norm; null: data.max_response_length"""
    clip_ratio_low: float = Field(0.2, ge=0, le=1)
    """ratios below 1 - this are clipped; dppo_*, ipo, kpop: a bound of probabilities or nats (algo/masked.py)"""
    clip_ratio_high: float = Field(0.2, ge=0)
    """ratios above 1 + this are clipped; dppo_*, ipo, kpop: as above"""
    clip_ratio_c: float | None = Field(3.0, gt=1)
    """dual clip: bound of the ratio at negative advantages (losses of algo/masked.py: at all); null: off"""
    cispo_clip_ratio_low: Annotated[float, Needs(".loss_mode=cispo")] = Field(1.0, ge=0)
    """CISPO's lower bound is 1 - this; 1 or more: no lower bound"""
    tau_pos: Annotated[float, Needs(".loss_mode=sapo")] = Field(1.0, ge=1e-3, le=1e6)
    """SAPO's temperature at positive advantages"""
    tau_neg: Annotated[float, Needs(".loss_mode=sapo")] = Field(1.05, ge=1e-3, le=1e6)
    """SAPO's temperature at the other advantages"""
    vespo_k_pos: Annotated[float, Needs(".loss_mode=vespo")] = Field(2.0, ge=0, le=10)
    """VESPO's power of the ratio at advantages of 0 or more: larger, the sooner it forgets responses that became unlikely"""
    vespo_lambda_pos: Annotated[float, Needs(".loss_mode=vespo")] = Field(3.0, ge=0.1, le=1e3)
    """VESPO's decay there: larger, the sooner it forgets responses that became likely"""
    vespo_k_neg: Annotated[float, Needs(".loss_mode=vespo")] = Field(3.0, ge=0, le=10)
    """the power at negative advantages"""
    vespo_lambda_neg: Annotated[float, Needs(".loss_mode=vespo")] = Field(2.0, ge=0.1, le=1e3)
    """the decay at negative advantages"""
    fipo_decay_rate: Annotated[float, Needs(".loss_mode=fipo")] = Field(32.0, gt=0, le=1e6)
    """FIPO: tokens after which a later token counts half"""
    fipo_clip_range: Annotated[float, Needs(".loss_mode=fipo")] = Field(0.2, ge=0, le=1)
    """FIPO: a token's weight is at most 1 + this"""
    fipo_clip_high_only: Annotated[bool, Needs(".loss_mode=fipo")] = True
    """FIPO: the weight is at least 1; false: 1 - fipo_clip_range"""
    fipo_safety_threshold: Annotated[float, Needs(".loss_mode=fipo")] = Field(4.0, ge=1, le=1e6)
    """FIPO: at negative advantages, no weight above 1 for tokens with a larger ratio"""
    top_entropy_quantile: Annotated[
        float,
        Needs(".loss_mode!=clip_cov"),
        Needs(".loss_mode!=kl_cov"),
        Needs(".loss_mode:is_likelihood=false"),
    ] = Field(1.0, gt=0, le=1)
    """share of the step's tokens, those of highest entropy, that have a policy loss (algo/selection.py); 1: all"""
    clip_cov_ratio: Annotated[float, Needs(".loss_mode=clip_cov")] = Field(0.0002, gt=0, le=1)
    """Clip-Cov: share of the step's tokens without a policy loss"""
    clip_cov_lb: Annotated[float, Needs(".loss_mode=clip_cov")] = 1.0
    """Clip-Cov: they have a larger covariance than this"""
    clip_cov_ub: Annotated[float, Needs(".loss_mode=clip_cov")] = 5.0
    """Clip-Cov: and a smaller one than this"""
    kl_cov_ratio: Annotated[float, Needs(".loss_mode=kl_cov")] = Field(0.0002, gt=0, le=1)
    """KL-Cov: share of the step's tokens with a penalty"""
    ppo_kl_coef: Annotated[float, Needs(".loss_mode=kl_cov")] = Field(1.0, ge=0, le=1e4)
    """KL-Cov: times |log ratio| of these tokens"""
    dro_beta: Annotated[float, Needs(".loss_mode=dro")] = Field(0.1, gt=0, le=1e4)
    """DRO's beta: how strongly the policy is kept near the one that sampled"""
    dpo_beta: Annotated[float, Needs(".loss_mode=dpo")] = Field(0.1, gt=0, le=1e4)
    """DPO's beta: how strongly the policy is kept near the reference"""
    use_kl_loss: bool = True
    """add kl_loss_coef * KL to the reference to the loss"""
    kl_loss_coef: Annotated[Coefficient, Needs(".use_kl_loss=true or .kl_loss_coef=0")] = 0.001
    """0: the KL is not computed, and needs no reference"""
    kl_loss_type: Annotated[str, Needs(".use_kl_loss=true")] = "low_var_kl"
    """the estimator of that KL (algo/kl.py)"""
    use_unbiased_kl: Annotated[bool, Needs(".use_kl_loss=true")] = False
    """multiply that KL by the ratio of the policies: its gradient is unbiased off-policy, with k1 and k3 (algo/losses.py)"""
    entropy_coeff: float = Field(0.0, ge=-1e4, le=1e4)
    """times the entropy (nats), which is subtracted from the loss"""
    entropy_target: float | None = Field(None, gt=0, le=100)
    """adapt entropy_coeff after each step to keep the mean entropy of a token above this (nats); null: it is fixed"""
    entropy_coef_delta: Annotated[float, Needs(".entropy_target")] = Field(0.005, gt=0, le=1e4)
    """the size of one change"""
    entropy_coef_max: Annotated[float, Needs(".entropy_target")] = Field(1.0, gt=0, le=1e4)
    """its largest value; the smallest is 0"""
    echo_coef: Annotated[float, Needs("rollout.multi_turn.environment")] = Field(0.0, ge=0, le=1e4)
    """ECHO: times the mean cross entropy on text that the environment wrote in a response; 0: none (0.1 in prime-rl)"""
    logprob_chunk_size: int = Field(1024, ge=1)
    """tokens whose logits are in memory at a time"""
    max_skipped_steps: int = Field(10, ge=0)
    """consecutive optimizer steps with a non-finite gradient; one more: stop"""
    optim: OptimConfig = OptimConfig()
    lora: Fixed[LoraConfig] = LoraConfig()
    moe: MoeConfig = MoeConfig()
    vision: Fixed[VisionConfig] = VisionConfig()
    megatron: MegatronConfig = MegatronConfig()

    @property
    def layers(self) -> MegatronConfig:
        """Returns `megatron`, with Megatron-Core's layers for split adapters.

        Transformer Engine's do not give the normalised input.
        """
        is_split = self.lora.rank is not None and self.lora.mode == "split"
        return self.megatron.model_copy(update={"transformer_impl": "local"}) if is_split else self.megatron

    def mini_batch_size(self, train_batch_size: int) -> int:
        """Prompts per optimizer step."""
        return self.ppo_mini_batch_size or train_batch_size

    def num_mini_batches(self, train_batch_size: int) -> int:
        """Mini-batches per training step; a last one may be smaller."""
        return -(-train_batch_size // self.mini_batch_size(train_batch_size))

    def num_updates(self, num_steps: int, train_batch_size: int) -> int:
        """Counts optimizer steps of `num_steps` training steps."""
        return num_steps * self.num_mini_batches(train_batch_size) * self.ppo_epochs


class RefConfig(Section):
    """The frozen reference model."""

    path: Annotated[
        Fixed[Path | None],
        Needs(
            "actor.use_kl_loss=true or algorithm.use_kl_in_reward=true or actor.loss_mode:needs_reference or"
            " algorithm.source=initial"
        ),
    ] = None
    """null: the model that GRPO starts from (model.path, after the warmup if there is one)"""


HAS_CRITIC = Needs("algorithm.adv_estimator:needs_values")


class CriticConfig(Section):
    """A model with one value per token, in the policy's layout and dtype. It is trained in every step, before the policy."""

    path: Fixed[Path | None] = None
    """Hugging Face folder: *ForTokenClassification or *ForSequenceClassification with one label (a reward model), or
    *ForCausalLM, which gets a new head of zeros; null: the model that the policy starts from"""
    ppo_mini_batch_size: Schedule[int | None] = Field(None, ge=1)
    """prompts per optimizer step; null: the actor's"""
    ppo_epochs: Schedule[int | None] = Field(None, ge=1, le=1000)
    """passes over each step's batch; null: the actor's"""
    cliprange_value: float | None = Field(0.5, gt=0)
    """a value moves at most this far in one step's updates; null: no bound"""
    loss_agg_mode: str = "token-mean"
    """the weight of each token in the value loss: a name as in actor.loss_agg_mode"""
    lam: float | None = Field(None, ge=0, le=1)
    """lambda of the value's targets; null: algorithm.lam (VC-PPO has 1)"""
    lam_alpha: float | None = Field(None, gt=0, le=1e4)
    """VAPO: lambda of a response's advantages is 1 - 1 / (lam_alpha * its loss tokens); null: algorithm.lam for all"""
    pretrain_steps: Schedule[int] = Field(0, ge=0)
    """the first steps train only the critic, on returns (lambda 1); VC-PPO"""
    offload: bool = False
    """weights, gradients and optimizer are on the host while the critic is not used"""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    lora: Fixed[LoraConfig] = LoraConfig()

    def mini_batch_size(self, actor: ActorConfig, train_batch_size: int) -> int:
        """Prompts per optimizer step."""
        return self.ppo_mini_batch_size or actor.mini_batch_size(train_batch_size)

    def num_epochs(self, actor: ActorConfig) -> int:
        """Passes over each step's batch."""
        return self.ppo_epochs or actor.ppo_epochs

    def num_updates(self, num_steps: int, actor: ActorConfig, train_batch_size: int) -> int:
        """Counts optimizer steps of `num_steps` training steps."""
        mini_batches = -(-train_batch_size // self.mini_batch_size(actor, train_batch_size))
        return num_steps * mini_batches * self.num_epochs(actor)
