"""The nouns of the program: Prompt, Sample, GroupTable, Plan, Batch. Lists of plain numbers until a Batch is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One question, ready for the engine.

    `uid` never changes between runs (it seeds the draws); `reward` names the reward function that scores answers to it.
    """

    uid: str
    prompt_ids: tuple[int, ...]
    text: str
    answer: str
    source: str
    reward: str
    extra: Mapping[str, object] = field(default_factory=dict)


@dataclass
class Sample:
    """One drawn response. `index` is its place among the n samples of prompt number `prompt_index` of the step.

    Index `GREEDY` (-1) is the prompt's greedy response: a baseline that is scored and not trained on (ReMax).
    """

    prompt: Prompt
    prompt_index: int
    index: int
    response_ids: list[int]
    rollout_logprobs: list[float]
    finish_reason: str  # "stop" | "length"
    version: int
    text: str = ""
    reward: float = float("nan")  # NaN: unscorable (the reward raised or timed out)
    reward_metrics: dict[str, float] = field(default_factory=dict)  # what the reward function reported besides it
    steps: list[tuple[int, float]] = field(default_factory=list)  # (last token of the step, its reward), increasing


@dataclass(frozen=True)
class GroupTable:
    """One row per sample of the whole step, in (prompt_index, index) order; the same on every rank.

    Columns are lists of equal length; the last five may be empty: not known. Rows of one prompt are contiguous.
    """

    prompt_index: list[int]
    index: list[int]
    reward: list[float]  # NaN: unscorable
    prompt_length: list[int]
    response_length: list[int]
    truncated: list[bool]
    holder: list[int]  # global rank that holds the tokens
    raw_reward: list[float] = field(default_factory=list)  # the reward before any penalty; empty: the same as `reward`
    step_rewards: list[list[tuple[int, float]]] = field(default_factory=list)  # (last response token of a step, reward)
    greedy_reward: list[float] = field(default_factory=list)  # of the prompt's greedy response; NaN: unknown
    token_penalties: list[list[float]] = field(default_factory=list)  # subtracted from the reward, per response token
    num_kept_tokens: list[int] = field(default_factory=list)  # response tokens that no correction has masked

    def __len__(self) -> int:
        return len(self.prompt_index)

    def groups(self) -> list[list[int]]:
        """Row numbers of each prompt's samples, in order of prompt_index."""
        rows: dict[int, list[int]] = {}
        for row, prompt_index in enumerate(self.prompt_index):
            rows.setdefault(prompt_index, []).append(row)
        return [rows[key] for key in sorted(rows)]


# One bucket of the weight stream: (Hugging Face name, whole tensor that owns its memory)
WeightBucket = list[tuple[str, "Tensor"]]

GREEDY = -1  # Sample.index of a greedy response

# [mini-batch][micro-batch] -> rows
MiniBatches = list[list[list[int]]]


@dataclass(frozen=True)
class Plan:
    """What every rank agrees to do with the table: pure arithmetic, no communication.

    `advantages[row]` is one float for the sample, one float per response token, or None: not in the loss.
    `token_weights[row]` is the weight of each of its tokens in its mini-batch's loss. `mini_batches[dp_rank]` holds table
    rows; every dp rank has the same number of mini-batches, and of micro-batches in each (an empty list is a micro-batch
    of nothing).
    """

    advantages: list[float | list[float] | None]
    token_weights: list[float]
    mini_batches: list[MiniBatches]
    metrics: dict[str, float] = field(default_factory=dict)

    def owner(self) -> dict[int, int]:
        """Table row -> dp rank that trains on it. Dropped rows are absent."""
        return {
            row: dp_rank
            for dp_rank, mini_batches in enumerate(self.mini_batches)
            for mini in mini_batches
            for micro in mini
            for row in micro
        }


@dataclass
class Batch:
    """One data-parallel rank's share of a step: B whole sequences; R is its longest response (at least 1).

    Response-aligned tensors are [B, R] and right-padded; column t belongs to response token t.
    """

    tokens: list[Tensor]  # B tensors of int64 [prompt + response]
    prompt_lengths: list[int]
    response_mask: Tensor  # bool [B, R]
    rollout_logprobs: Tensor  # float32 [B, R], 0 where masked
    advantages: Tensor  # float32 [B, R]
    token_weights: Tensor  # float32 [B, R], 0 where masked
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
