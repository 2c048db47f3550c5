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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from grpo_megatron.config import TrainerConfig
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.disk import on_first_rank
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.parallel.relay import relay
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.atomic import clear_leftovers, write_file
from grpo_megatron.storage.run_files import claim_rollout_folder, remove_rollouts_from, rollout_file
from grpo_megatron.types import GroupTable, Plan, Sample

TOKENS_PER_PART = 1 << 20  # prompt and response tokens that rank 0 receives at once: some 5 MB of text


class RolloutWriter(Protocol):
    def write(self, step: int, metrics: Metrics, samples: Sequence[Sample], table: GroupTable, plan: Plan) -> None:
        """Write the samples of `table`, which all ranks hold together. Collective."""


class NoRolloutFiles:
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
            content = relay(holder, functools.partial(lines, rows), self.mesh)
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
