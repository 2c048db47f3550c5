"""The section `critic`: the value model of PPO. Only estimators that read values have one (`algorithm.adv_estimator: gae`)."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from grpo_megatron.config.model import ActorConfig, OptimConfig
from grpo_megatron.config.section import Section


class CriticConfig(Section):
    """A model with one value per token, in the policy's layout and dtype. It is trained in every step, before the policy."""

    # Hugging Face folder: *ForTokenClassification or *ForSequenceClassification with one label (a reward model), or
    # *ForCausalLM, which gets a new head of zeros; null: the model that the policy starts from
    path: Path | None = None
    ppo_mini_batch_size: int | None = Field(None, ge=1)  # prompts per optimizer step; null: the actor's
    ppo_epochs: int | None = Field(None, ge=1, le=1000)  # passes over each step's batch; null: the actor's
    cliprange_value: float | None = Field(
        0.5, gt=0
    )  # a value moves at most this far in one step's updates; null: no bound
    loss_agg_mode: str = "token-mean"  # the weight of each token in the value loss: a name as in actor.loss_agg_mode
    lam: float | None = Field(None, ge=0, le=1)  # lambda of the value's targets; null: algorithm.lam (VC-PPO has 1)
    # VAPO: lambda of a response's advantages is 1 - 1 / (lam_alpha * its loss tokens); null: algorithm.lam for all
    lam_alpha: float | None = Field(None, gt=0, le=1e4)
    pretrain_steps: int = Field(0, ge=0)  # the first steps train only the critic, on returns (lambda 1); VC-PPO
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
