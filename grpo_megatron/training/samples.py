"""Rollout files: every sample that a step trained on, one line each, in trainer.rollout_data_dir/step_000012.jsonl.

    prompt, response        the data file's question and the response: a row that algorithm.source=file can read
    turns, prompt_text      instead of `response`, of a trajectory: its turns and first messages as the model read them
    answer                  the reference answer
    score, reward           the reward before and after its penalties; null: unscorable
    advantage               the mean over the response's tokens in the loss; null: it was not trained on
    metrics, texts, failure what the reward function and the environment reported
    step, version, weights  the step; the version and digest of the weights that drew the response
    replayed                whether the file of an earlier step has the response, too (algorithm.replay)
    uid, group, index       the row of the data file; the prompt's number in the step; the sample's number in its group
    source, finish_reason, status, prompt_tokens, response_tokens

Lines are in the order of (group, index). They do not depend on the layout of the ranks. Each rollout block makes the lines
of its own samples, and rank 0 receives them block by block: it never holds the whole step. A file is complete or absent.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from grpo_megatron.config import TrainerConfig
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.mesh import Mesh, on_first_rank
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.files import clear_leftovers, write_file
from grpo_megatron.storage.run_files import claim_rollout_folder, remove_rollouts_from, rollout_file
from grpo_megatron.types import Batch, GroupTable, Plan, Sample

TOKENS_PER_PART = 1 << 20  # prompt and response tokens that rank 0 receives at once: some 5 MB of text


class RolloutWriter(Protocol):
    """Keeps the samples of every step, or does not."""

    def write(self, step: int, metrics: Metrics, samples: Sequence[Sample], table: GroupTable, plan: Plan) -> None:
        """Write the samples of `table`, which all ranks hold together. Collective."""


class NoRolloutFiles:
    """Writes nothing: `trainer.rollout_data_dir` is not set."""

    def write(self, step: int, metrics: Metrics, samples: Sequence[Sample], table: GroupTable, plan: Plan) -> None: ...


class RolloutFiles:
    """The first file that it writes replaces those of that step and all later ones, which an interrupted run has left."""

    def __init__(self, folder: Path, output_dir: Path, mesh: Mesh, tokenizer: Any) -> None:
        self.folder, self.output_dir, self.mesh, self.tokenizer = folder, output_dir, mesh, tokenizer
        self._is_open = False

    def write(self, step: int, metrics: Metrics, samples: Sequence[Sample], table: GroupTable, plan: Plan) -> None:
        """Collective. Raises RankError on every rank when rank 0 cannot write."""
        with metrics.phase("dump_rollout_generations"):
            if not self._is_open:
                on_first_rank(
                    self.mesh, f"cannot write trainer.rollout_data_dir={self.folder}", lambda: self._open(step)
                )
                self._is_open = True
            parts = self._parts(step, samples, table, plan)
            problem = None
            if self.mesh.rank == 0:
                try:
                    write_file(rollout_file(self.folder, step), parts)
                except (OSError, StorageError) as error:
                    problem = f"cannot write the rollouts of step {step} to {self.folder}: {error}"
            deque(parts, maxlen=0)  # other ranks send; rank 0 receives what it could not write
            self.mesh.agree(problem)

    def _open(self, step: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        claim_rollout_folder(self.folder, self.output_dir)
        clear_leftovers(self.folder)
        remove_rollouts_from(self.folder, step)

    def _parts(self, step: int, samples: Sequence[Sample], table: GroupTable, plan: Plan) -> Iterator[str]:
        """The lines of the file, on rank 0; on the other ranks, empty texts."""
        held = {(sample.prompt_index, sample.index): sample for sample in samples}
        advantages = {
            row: mean_advantage(plan.advantages[row], table.spans_of(row))
            for row in plan.owner()
            if table.holder[row] == self.mesh.rank
        }

        def lines(rows: list[int]) -> bytes:
            local = [held[table.prompt_index[row], table.index[row]] for row in rows]
            made = (self._line(step, s, row, table, advantages.get(row)) for s, row in zip(local, rows, strict=True))
            return "".join(made).encode()

        for holder, rows in parts_of(table, TOKENS_PER_PART):
            content = self.mesh.relay(holder, functools.partial(lines, rows))
            yield "" if content is None else content.decode()

    def _line(self, step: int, sample: Sample, row: int, table: GroupTable, advantage: float | None) -> str:
        scores = table.raw_reward or table.reward
        content: dict[str, Any] = {
            "prompt": sample.prompt.question,
            **self._response(sample),
            "answer": sample.prompt.answer,
            "score": _finite(scores[row]),
            "reward": _finite(table.reward[row]),
            "advantage": advantage,
            "metrics": _finite_values({**sample.reward_metrics, **sample.trajectory_metrics}),
            "texts": sample.reward_texts,
            "failure": sample.reward_failure,
            "step": step,
            "version": sample.version,
            "weights": sample.weights_digest,
            "replayed": sample.is_replayed,
            "uid": sample.prompt.uid,
            "group": sample.prompt_index,
            "index": sample.index,
            "source": sample.prompt.source,
            "finish_reason": sample.finish_reason,
            "status": sample.status,
            "prompt_tokens": table.prompt_length[row],
            "response_tokens": table.response_length[row],
        }
        return json.dumps(content, allow_nan=False) + "\n"

    def _response(self, sample: Sample) -> dict[str, Any]:
        if not sample.turns:
            return {"response": sample.text}
        turns = [
            {"kind": turn.kind, "text": self._decoded(sample.response_ids[turn.start : turn.end])}
            for turn in sample.turns
        ]
        return {"turns": turns, "prompt_text": sample.prompt.text}

    def _decoded(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))


def build_rollout_files(config: TrainerConfig, mesh: Mesh, tokenizer: Any) -> RolloutWriter:
    """The writer that `trainer.rollout_data_dir` asks for."""
    if config.rollout_data_dir is None:
        return NoRolloutFiles()
    return RolloutFiles(config.rollout_data_dir, config.output_dir, mesh, tokenizer)


def parts_of(table: GroupTable, max_tokens: int) -> Iterator[tuple[int, list[int]]]:
    """(rank, rows that it holds) of runs of rows with one holder, in the table's order.

    A part has at most `max_tokens` tokens, or one row.
    """
    for holder, run in itertools.groupby(range(len(table)), key=lambda row: table.holder[row]):
        part: list[int] = []
        tokens = 0
        for row in run:
            length = table.prompt_length[row] + table.response_length[row]
            if part and tokens + length > max_tokens:
                yield holder, part
                part, tokens = [], 0
            part.append(row)
            tokens += length
        yield holder, part


def mean_advantage(advantage: float | list[float] | None, spans: Sequence[tuple[int, int]]) -> float | None:
    """The mean over the tokens of `spans`; None without an advantage or a token."""
    if not isinstance(advantage, list):
        return advantage
    values = [value for start, end in spans for value in advantage[start:end]]
    return math.fsum(values) / len(values) if values else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _finite_values(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in sorted(values.items())}


# -- Samples in the report ---------------------------------------------------------------------------------------------
# ShownSamples: what the report shows of a step's samples. Two groups, with log-probabilities of engine and policy per token.
#
# One group is the one whose rewards differ most. The other is the first of the remaining ones, which nothing has selected. The
# ranks that drew the samples have their texts, and the ranks that train on them have the policy's log-probabilities. Both go to
# rank 0; they are some kilobytes. Token ids become text only where a report is written.

MAX_SAMPLES = 8  # of a group
HEAD, TAIL = 300, 100  # tokens of a response that are shown; those between them are left out
SHOWN_PARTS = (slice(HEAD), slice(HEAD, None))  # of the kept tokens
LONGEST_PROMPT = 4000  # characters
LONGEST_CHARACTER = 4  # tokens of one byte each that are one character

Groups = list[dict[str, Any]]  # as pages/run_folder.py describes them
TokenNumbers = list[float | None]


@dataclass(frozen=True)
class _Drawn:
    """One sample, from the rank that holds it. `logprobs`: the engine's; None outside the loss mask, and without an engine."""

    about: dict[str, Any]
    prompt: dict[str, str]
    ids: list[int]
    logprobs: list[float | None]


class ShownSamples:
    """`is_drawn`: an engine drew the samples; otherwise they come from a file, and only the policy's numbers are shown."""

    def __init__(self, mesh: Mesh, tokenizer: Any, is_drawn: bool) -> None:
        self.mesh, self.texts, self.is_drawn = mesh, TokenTexts(tokenizer), is_drawn

    def gather(
        self, samples: Sequence[Sample], table: GroupTable, plan: Plan, batch: Batch
    ) -> Callable[[], Groups] | None:
        """Collective. On rank 0, a function that makes the groups as plain data; None on the other ranks."""
        groups = shown_rows(table)
        rows = [row for group in groups for row in group]
        held = {(sample.prompt_index, sample.index): sample for sample in samples}
        drawn = {
            row: self._drawn(held[table.prompt_index[row], table.index[row]])
            for row in rows
            if table.holder[row] == self.mesh.rank
        }
        records = self.mesh.gather((drawn, self._policy(set(rows), batch)))
        if not records:
            return None
        all_drawn = {row: found for part, _ in records for row, found in part.items()}
        policy = {row: values for _, part in records for row, values in part.items()}
        return functools.partial(self._groups, groups, table, plan, all_drawn, policy)

    def _drawn(self, sample: Sample) -> _Drawn:
        kept = kept_tokens(len(sample.response_ids))
        has_engine = self.is_drawn and len(sample.rollout_logprobs) == len(sample.response_ids)
        about = {
            "index": sample.index,
            "finish_reason": sample.finish_reason,
            "status": sample.status,
            "failure": sample.reward_failure[:LONGEST_PROMPT],
            "metrics": {name: _digits(value) for name, value in sorted(sample.reward_metrics.items())},
        }
        prompt = {"uid": sample.prompt.uid, "source": sample.prompt.source, "answer": _cut(str(sample.prompt.answer))}
        return _Drawn(
            about,
            {**prompt, "prompt": _cut(sample.prompt.text)},
            [sample.response_ids[place] for place in kept],
            [sample.rollout_logprobs[p] if has_engine and sample.loss_mask[p] else None for p in kept],
        )

    def _policy(self, rows: set[int], batch: Batch) -> dict[int, tuple[TokenNumbers, TokenNumbers]]:
        """Row -> (policy's log-probabilities, their differences from the engine's) at the kept tokens."""
        if batch.old_logprobs is None or not self.mesh.is_first_replica_rank:
            return {}
        found: dict[int, tuple[TokenNumbers, TokenNumbers]] = {}
        for number, row in enumerate(batch.rows):
            if row in rows:
                kept = kept_tokens(len(batch.tokens[number]) - batch.prompt_lengths[number])
                old, engine, mask = (
                    tensor[number].tolist() for tensor in (batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask)
                )
                policy: TokenNumbers = [old[place] if mask[place] else None for place in kept]
                compared = [mask[place] and self.is_drawn for place in kept]
                gaps: TokenNumbers = [
                    old[p] - engine[p] if is_on else None for p, is_on in zip(kept, compared, strict=True)
                ]
                found[row] = policy, gaps
        return found

    def _groups(
        self,
        groups: list[list[int]],
        table: GroupTable,
        plan: Plan,
        drawn: dict[int, _Drawn],
        policy: dict[int, tuple[TokenNumbers, TokenNumbers]],
    ) -> Groups:
        scores = table.raw_reward or table.reward
        made = []
        for group in groups:
            samples = []
            for row in group:
                found, length = drawn[row], int(table.response_length[row])
                nothing: TokenNumbers = [None] * len(found.ids)
                own, gaps = policy.get(row, (nothing, nothing))
                logprobs = found.logprobs if self.is_drawn else own
                head, tail = (self.texts.pieces(found.ids[part], logprobs[part], gaps[part]) for part in SHOWN_PARTS)
                samples.append(
                    {
                        **found.about,
                        "reward": _digits(table.reward[row]),
                        "score": _digits(scores[row]),
                        "advantage": _digits(mean_advantage(plan.advantages[row], table.spans_of(row))),
                        "tokens": length,
                        "drawn": self.is_drawn,
                        "pieces": head + tail,
                        "cut": max(0, length - HEAD - TAIL),
                        "cut_at": len(head),
                    }
                )
            made.append({**drawn[group[0]].prompt, "samples": samples})
        return made


def shown_rows(table: GroupTable) -> list[list[int]]:
    """The table rows of the shown groups. The same on every rank."""
    groups = table.groups()
    if not groups:
        return []
    most_spread = max(groups, key=lambda group: _spread([table.reward[row] for row in group]))
    others = [group for group in groups if group is not most_spread]
    return [group[:MAX_SAMPLES] for group in (most_spread, *others[:1])]


def kept_tokens(length: int) -> list[int]:
    """The places of the tokens that are shown of a response."""
    return [place for place in range(length) if place < HEAD or place >= length - TAIL]


def _spread(rewards: Sequence[float]) -> float:
    finite = [reward for reward in rewards if math.isfinite(reward)]
    return max(finite) - min(finite) if finite else -1.0


class TokenTexts:
    """The text of each token as a part of a longer text: with its leading space, and characters of several tokens whole."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def pieces(
        self, ids: Sequence[int], logprobs: Sequence[float | None], gaps: Sequence[float | None]
    ) -> list[list[Any]]:
        """[text, log-probability, gap] of each token. Tokens that are one character together have their sums."""
        made: list[list[Any]] = []
        first = 0
        while first < len(ids):
            last = first + 1
            text = self._text(ids[first:last])
            while text.endswith("\ufffd") and last < len(ids) and last - first < LONGEST_CHARACTER:
                last += 1
                text = self._text(ids[first:last])
            made.append([text, _sum(logprobs[first:last], 4), _sum(gaps[first:last], None)])
            first = last
        return made

    def _text(self, ids: Sequence[int]) -> str:
        if len(ids) == 1 and ids[0] in self._known:
            return self._known[ids[0]]
        text = self._decoded([ids[0], *ids]).removeprefix(
            self._decoded(ids[:1])
        )  # some tokenizers strip a text's start
        if len(ids) == 1:
            self._known[ids[0]] = text
        return text

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def _sum(values: Sequence[float | None], decimals: int | None) -> float | None:
    if any(value is None or not math.isfinite(value) for value in values):
        return None
    total = math.fsum(value for value in values if value is not None)
    return _digits(total) if decimals is None else round(total, decimals)


def _digits(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_PROMPT else f"{text[:LONGEST_PROMPT]}... ({len(text):,} characters)"
