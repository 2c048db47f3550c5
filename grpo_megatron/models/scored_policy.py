"""ScoredPolicy: a scalar head that is trained in place of a policy. Its "log-probability" of a response token is its score there.

Every response token has a score, of the state at that token. The loss mask says which scores are in the loss: the last token of a
response, or the last token of each step (data/scored.py). So batches, updates, guards and metrics are those of a policy.
"""

from __future__ import annotations

from torch import Tensor

from grpo_megatron.models.forward import Pack
from grpo_megatron.models.language_model import LanguageModel
from grpo_megatron.models.scalar_head import ScalarPolicy, read_at
from grpo_megatron.types import Batch


class ScoredPolicy(ScalarPolicy):
    def packs(self, batch: Batch, micro_batches: list[list[int]], temperature: float | None = None) -> list[Pack]:
        return [
            read_at(self, batch, pack, [range(batch.prompt_lengths[row], len(batch.tokens[row])) for row in pack.rows])
            for pack in super().packs(batch, micro_batches, temperature)
        ]

    def logprobs(self, batch: Batch, temperature: float | None = None) -> Tensor:
        """The score at every response token [B, R], float32 on the host, 0 after the end. Collective."""
        return LanguageModel.logprobs(self, batch)
