"""The sections `teachers` and `distillation`: models that the policy learns from, and what it learns of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_megatron.config.actor import ActorConfig
from grpo_megatron.config.model import MoeConfig
from grpo_megatron.config.section import Needs, Processes, Seconds, Section


class TeacherConfig(Section):
    """One teacher, under a name of its own. It is frozen, and reads the policy's token ids."""

    path: Path | None = None
    """Hugging Face folder of a model with the policy's vocabulary, of any family and size"""
    adapters: Path | None = None
    """with path: a PEFT folder of LoRA, which is merged into its weights"""
    self: Literal["start", "current"] | None = None
    """instead of a path: the policy itself, as it starts or as it is; with a prompt_column"""
    renew_steps: int | None = Field(None, ge=1)
    """with self=start: every so many steps it becomes the policy of that time; null: never"""
    lag_steps: int | None = Field(None, ge=1)
    """with self=start: it is the policy of so many steps ago, read anew in each step from a copy; null: not"""
    url: str | None = None
    """instead of a path: an OpenAI-compatible server that returns prompt_logprobs, such as `vllm serve`: http://HOST:8000/v1"""
    model: str | None = None
    """with url: its name at the server"""
    api_key_env: str | None = None
    """with url: the environment variable with the server's key; null: it needs none"""
    timeout_s: Seconds = 600.0
    """with url: seconds for one response, with all attempts"""
    retries: int = Field(8, ge=0, le=100)
    """with url: further attempts after a failed one, in 0.1, 0.2, 0.4 s and so on"""
    num_requests: Processes = 16
    """with url: requests at a time of each data-parallel rank"""
    key: str | None = None
    """the value of the column distillation.key in the rows that it scores; null: its name"""
    prompt_column: str | None = None
    """the column with what it reads as the prompt, text or chat messages; null: what the policy reads"""
    max_prompt_length: int | None = Field(None, ge=1)
    """most tokens of that prompt; null: data.max_prompt_length"""
    coefficient: float = Field(1.0, gt=0, le=1e4)
    """multiplies its term in the loss"""
    dtype: Literal["bfloat16", "float32"] | None = None
    """of its weights; null: model.dtype"""
    tensor_model_parallel_size: int | None = Field(None, ge=1)
    """null: its layout is the policy's; else this layout, without context parallelism"""
    pipeline_model_parallel_size: int = Field(1, ge=1)
    """of that layout"""
    expert_model_parallel_size: int = Field(1, ge=1)
    """of that layout"""

    def layout(self, actor: ActorConfig) -> ActorConfig:
        """Returns the actor's settings with this teacher's layout, and without what concerns the policy's experts."""
        update: dict[str, Any] = {"moe": MoeConfig()}
        if self.tensor_model_parallel_size is not None:
            names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
            sizes = {name: getattr(self, name) for name in names}
            update["megatron"] = actor.megatron.model_copy(update={**sizes, "context_parallel_size": 1})
        return actor.model_copy(update=update)


HAS_TEACHERS = Needs("teachers")


class DistillationConfig(Section):
    """The objective of the teachers (algo/distillation.py)."""

    kl: Literal["sampled", "forward", "reverse", "jsd"] = "sampled"
    """sampled: the reverse KL of the sampled tokens, in the advantages; others: a divergence of distributions, in the loss"""
    beta: Annotated[float, Needs(".kl=jsd"), HAS_TEACHERS] = Field(0.5, gt=0, lt=1)
    """jsd: the teacher's share of the mixture (GKD); towards 0 it is the forward KL, towards 1 the reverse one"""
    top_k: Annotated[int, Needs(".kl!=sampled"), HAS_TEACHERS] = Field(64, ge=0, le=4096)
    """the teacher's best ids of each token; all others together are one more. 0: the whole vocabulary"""
    discount: Annotated[float, Needs(".kl=sampled"), HAS_TEACHERS] = Field(0.0, ge=0, le=1)
    """sampled: a token's term is the discounted sum of its own and all later ones; 0: its own"""
    key: str | None = None
    """the column whose value chooses a row's teacher; null: there is one"""
    loss_agg_mode: str | None = None
    """the weight of each token in the teachers' term: a name as in actor.loss_agg_mode, which null takes"""

    @property
    def reads_states(self) -> bool:
        """Says if the objective reads a teacher's full distribution, from its hidden states."""
        return self.kl != "sampled" and self.top_k == 0
