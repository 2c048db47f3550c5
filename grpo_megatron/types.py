"""The data types of the program: Prompt, Sample, GroupTable, Plan, Batch. Lists of plain numbers until a Batch is made.

There are two masks over response tokens. The **response mask** is true at every response token of a padded row. The **loss
mask** is true at those response tokens that are in the loss: a 0 in `Sample.loss_mask` takes a token out of the loss and
out of every denominator (text that an environment wrote into the response, for example). The token is still part of
the sequence that the model reads, and of every length that counts tokens to compute or to generate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One question, ready for the engine.

    `uid` never changes between runs (it seeds the sampling). `reward` names the reward function of its completions.
    """

    uid: str
    prompt_ids: tuple[int, ...]
    text: str
    answer: str
    source: str
    reward: str
    extra: Mapping[str, object] = field(default_factory=dict)


GREEDY = -1  # Sample.index of a greedy response


@dataclass
class Sample:
    """One generated response. `index` is its number among the n samples of prompt `prompt_index` of the step.

    Index `GREEDY` (-1) is the prompt's greedy response: a baseline that gets a reward and is not trained on (ReMax).
    """

    prompt: Prompt
    prompt_index: int
    index: int
    response_ids: list[int]
    rollout_logprobs: list[float]  # one per response token; not read where loss_mask is 0
    finish_reason: str  # "stop" | "length"
    version: int
    weights_digest: str = field(default="", kw_only=True)  # of the weights that drew it; "": not drawn by an engine
    text: str = ""
    reward: float = float("nan")  # NaN: unscorable (the reward raised or timed out)
    reward_metrics: dict[str, float] = field(default_factory=dict)  # what the reward function also reports
    steps: list[tuple[int, float]] = field(default_factory=list)  # (last token of the step, its reward), increasing
    loss_mask: list[int] = field(default_factory=list)  # 1 or 0 per response token; default: 1 everywhere
    reward_texts: dict[str, str] = field(default_factory=dict, kw_only=True)  # what it reports that is not a number
    reward_failure: str = field(default="", kw_only=True)  # why there is no reward

    def __post_init__(self) -> None:
        if not self.loss_mask:
            self.loss_mask = [1] * len(self.response_ids)
        assert len(self.loss_mask) == len(self.response_ids), (
            f"loss_mask has {len(self.loss_mask)} entries for {len(self.response_ids)} response tokens"
        )


TokenSpan = tuple[int, int]  # response tokens [start, end)


@dataclass(frozen=True)
class GroupTable:
    """One row per sample of the whole step, in (prompt_index, index) order; the same on every rank.

    Columns are lists of equal length; those with a default may be empty. Rows of one prompt are contiguous.
    """

    prompt_index: list[int]
    index: list[int]
    reward: list[float]  # NaN: unscorable
    prompt_length: list[int]
    response_length: list[int]  # all response tokens, in the loss or not
    truncated: list[bool]
    holder: list[int]  # global rank that holds the tokens
    raw_reward: list[float] = field(default_factory=list)  # the reward before any penalty; empty: the same as `reward`
    step_rewards: list[list[tuple[int, float]]] = field(default_factory=list)  # (last response token of a step, reward)
    greedy_reward: list[float] = field(default_factory=list)  # of the prompt's greedy response; NaN: unknown
    token_penalties: list[list[float]] = field(default_factory=list)  # subtracted from the reward, per response token
    loss_spans: list[list[TokenSpan]] = field(default_factory=list)  # increasing runs of loss_mask = 1; empty: all ones
    num_kept_tokens: list[int] = field(default_factory=list)  # loss tokens that no correction has rejected; empty: all

    def __len__(self) -> int:
        return len(self.prompt_index)

    def groups(self) -> list[list[int]]:
        """Row numbers of each prompt's samples, in order of prompt_index."""
        rows: dict[int, list[int]] = {}
        for row, prompt_index in enumerate(self.prompt_index):
            rows.setdefault(prompt_index, []).append(row)
        return [rows[key] for key in sorted(rows)]

    def spans_of(self, row: int) -> list[TokenSpan]:
        """The response tokens of one row that are in the loss."""
        return self.loss_spans[row] if self.loss_spans else [(0, self.response_length[row])]

    def num_loss_tokens(self) -> list[int]:
        """How many response tokens of each row are in the loss, before any correction."""
        if not self.loss_spans:
            return self.response_length
        return [sum(end - start for start, end in spans) for spans in self.loss_spans]


# One bucket of the weight stream: (Hugging Face name, whole tensor that owns its memory)
WeightBucket = list[tuple[str, "Tensor"]]

# [mini-batch][micro-batch] -> rows
MiniBatches = list[list[list[int]]]


@dataclass(frozen=True)
class Plan:
    """What every rank does with the table: pure arithmetic, no communication.

    `advantages[row]` is one float for the sample, one float per response token, or None: the row is not in the loss.
    `token_weights[row]` is the weight of each of the row's loss tokens in the loss of its mini-batch.
    `mini_batches[dp_rank]` holds table rows. Every data-parallel rank has the same number of mini-batches, and of
    micro-batches in each; an empty list is a micro-batch without a row.
    """

    advantages: list[float | list[float] | None]
    token_weights: list[float]
    mini_batches: list[MiniBatches]
    metrics: dict[str, float] = field(default_factory=dict)

    def owner(self) -> dict[int, int]:
        """Table row -> dp rank that trains on it. Dropped rows are absent."""
        return {row: dp_rank for dp_rank in range(len(self.mini_batches)) for row in self.rows(dp_rank)}

    def rows(self, dp_rank: int) -> list[int]:
        """Table rows that `dp_rank` trains on, in increasing order."""
        rows = [row for mini in self.mini_batches[dp_rank] for row in rows_of_mini_batch(mini)]
        return sorted(rows)


def rows_of_mini_batch(mini_batch: list[list[int]]) -> list[int]:
    """The rows of all micro-batches of one mini-batch, in their order."""
    return [row for micro_batch in mini_batch for row in micro_batch]


@dataclass
class Batch:
    """One data-parallel rank's share of a step: B whole sequences; R is its longest response (at least 1).

    Response-aligned tensors are [B, R] and right-padded; column t belongs to response token t.
    """

    tokens: list[Tensor]  # B tensors of int64 [prompt + response]
    prompt_lengths: list[int]
    response_mask: Tensor  # bool [B, R]: is a response token, not padding
    loss_mask: Tensor  # bool [B, R]: is a response token in the loss; a correction may reject more of them
    rollout_logprobs: Tensor  # float32 [B, R], 0 at padding
    advantages: Tensor  # float32 [B, R], 0 outside the loss mask
    token_weights: Tensor  # float32 [B, R], 0 outside the loss mask
    mini_batches: MiniBatches  # rows of this batch
    rows: list[int] = field(default_factory=list)  # the table row of each sequence
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    correction: Tensor | None = None  # float32 [B, R], multiplies the policy loss; None: 1

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def lengths(self) -> list[int]:
        return [len(t) for t in self.tokens]
