"""The report of a step: its metrics, the rollout files, and the samples that the page shows.

StepReport reduces all metrics of a step over the ranks in one exchange, and writes them to the sinks.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from grpo_megatron.config import Config
from grpo_megatron.data.task import get_task
from grpo_megatron.models.flops import mfu_metrics, peaks, throughput
from grpo_megatron.models.forward import MetricSums, num_padding_tokens, packed_lengths
from grpo_megatron.models.policy import Policy
from grpo_megatron.parallel.mesh import Mesh, on_first_rank
from grpo_megatron.report.kit import thumbnails
from grpo_megatron.report.metrics import Metrics, Sinks, group_table_metrics
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.files import clear_leftovers, write_file
from grpo_megatron.storage.run_files import claim_rollout_folder, remove_rollouts_from, rollout_file
from grpo_megatron.types import BRANCH, ENDINGS, GREEDY, Batch, GroupTable, Plan, Sample


class StepGuards(Protocol):
    """The part of `training.guards.Guards` that a report calls."""

    def record(self, metrics: Metrics, has_finite_weights: bool) -> None: ...

    def check_weights(self, reduced: Mapping[str, float]) -> None: ...


class StepReport:
    """The report of a run, or of its warm-up, which has a config of its own."""

    def __init__(self, config: Config, tokenizer: Any, policy: Policy, sinks: Sinks, guards: StepGuards) -> None:
        self.policy, self.mesh, self.sinks, self.guards = policy, policy.mesh, sinks, guards
        self.max_response_length, self.num_epochs = config.data.max_response_length, config.actor.ppo_epochs
        self.has_sources = bool(config.data.sources or get_task(config.data.task).rewards)
        self.kl_coef = config.actor.kl_loss_coef if config.actor.use_kl_loss else 0.0
        self.validation_overlaps = config.rollout.lag > 0
        self.trains_tower = not config.actor.vision.is_frozen
        self.peaks = peaks(config, policy.device.name, policy.arch.num_layers)
        self.shown = ShownSamples(self.mesh, tokenizer, config.has_rollouts)
        self.rollouts = None
        if config.trainer.rollout_data_dir is not None:
            folder, output_dir = config.trainer.rollout_data_dir, config.trainer.output_dir
            self.rollouts = RolloutFiles(folder, output_dir, self.mesh, tokenizer)

    def log(
        self,
        step: int,
        metrics: Metrics,
        samples: Sequence[Sample],
        table: GroupTable,
        plan: Plan,
        batch: Batch,
        *,
        epoch: float,
    ) -> dict[str, float]:
        """Writes the step's samples; completes its `metrics`, reduces them over the ranks, writes and returns them. Collective.

        Raises GuardStop when the step has made weights that are not finite, after its metrics are written.
        """
        if self.rollouts is not None:
            self.rollouts.write(step, metrics, samples, table, plan)
        local = metrics.when(self.mesh.is_replica_reporter)
        local.mean_of("critic/advantages/mean", batch.advantages[batch.loss_mask])
        packs = [packed_lengths(batch, rows) for mini in batch.mini_batches for rows in mini]
        padding = sum(num_padding_tokens(lengths, self.policy.multiple, self.mesh.cp) for lengths in packs)
        local.mean("perf/padding_ratio", padding, padding + sum(map(sum, packs)))
        if self.policy.arch.vision is not None:
            local.sum("perf/image_tokens", sum(image.num_tokens for images in batch.images for image in images))
        record_samples(metrics.when(self.mesh.is_replica_leader), samples, has_sources=self.has_sources)
        group_table_metrics(metrics, table, self.max_response_length)
        for name, value in {**plan.metrics, **self.policy.device.memory_gib()}.items():
            (metrics.max if name.startswith("perf/") else metrics.constant)(name, value)
        metrics.constant("training/global_step", step)
        metrics.constant("training/epoch", epoch)
        metrics.constant("actor/kl_coef", self.kl_coef)
        self.guards.record(metrics, self.policy.has_finite_weights())
        reduced = metrics.reduce(self.mesh.all_gather)
        if (groups := self.shown.gather(samples, table, plan, batch)) is not None:
            self.sinks.show(step, groups)
        self.sinks.log(step, reduced | self._speed(reduced, table, plan))
        self.guards.check_weights(reduced)
        return reduced

    def _speed(self, reduced: Mapping[str, float], table: GroupTable, plan: Plan) -> dict[str, float]:
        lengths = [p + r for p, r in zip(table.prompt_length, table.response_length, strict=True)]
        num_devices = self.mesh.world_size
        return throughput(reduced, sum(lengths), self.mesh.run_size, overlaps=self.validation_overlaps) | mfu_metrics(
            reduced,
            self.policy.arch,
            lengths,
            num_devices=num_devices,
            num_epochs=self.num_epochs,
            forward_only_lengths=[lengths[row] for row in plan.rows_without_backward()],
            image_tokens=reduced.get("perf/image_tokens", 0.0),
            trains_tower=self.trains_tower,
            **self.peaks,
        )


def record_samples(metrics: Metrics, samples: Sequence[Sample], *, has_sources: bool) -> None:
    """Records means over the step's samples of all ranks, without greedy ones.

    reward/failed_ratio, timeout_ratio, <name>/mean    what the reward functions reported besides the reward
    reward, data, response_length/source/<source>/...  of each source, if `has_sources`
    trajectory/...                                     of samples of several turns, and of failed ones:
        turns                       turns of the assistant: mean and max
        sequences                   token sequences: more than one where the chat template changes earlier turns
        generated_tokens            tokens that the policy wrote (in the loss, unless the trajectory is masked)
        observation_tokens, _share  tokens that environments wrote, and their share of all response tokens
        status/<status>             share of the trajectories that ended so
        <name>/mean                 what the environment reports, summed over a trajectory (tool_calls, tool_errors, ...)
    """
    names = {"ok": "failed_ratio", "timeout": "timeout_ratio"}
    drawn = [sample for sample in samples if sample.index != GREEDY]
    sequences: defaultdict[tuple[int, int], list[Sample]] = defaultdict(list)
    for sample in drawn:
        sequences[sample.prompt_index, sample.index % BRANCH].append(sample)
    for sample in drawn:
        if sample.index >= BRANCH:
            continue
        for name, value in sample.reward_metrics.items():
            metrics.mean(f"reward/{names.get(name, f'{name}/mean')}", 1.0 - value if name == "ok" else value, 1)
        if has_sources:
            source = sample.prompt.source
            metrics.sum(f"data/source/{source}/samples", 1)
            metrics.mean(f"response_length/source/{source}/mean", len(sample.response_ids), 1)
            if not math.isnan(sample.reward):
                metrics.mean(f"reward/source/{source}/mean", sample.reward, 1)
        if sample.turns or sample.status != "ok":
            _record_trajectory(metrics, sample, sequences[sample.prompt_index, sample.index])


def _record_trajectory(metrics: Metrics, sample: Sample, sequences: Sequence[Sample]) -> None:
    tokens = {"assistant": 0, "observation": 0}
    turns = [turn for sequence in sequences for turn in sequence.turns]
    for turn in turns:
        tokens[turn.kind] += turn.end - turn.start
    num_turns = sum(turn.kind == "assistant" for turn in turns)
    metrics.mean("trajectory/sequences/mean", len(sequences), 1)
    metrics.mean("trajectory/turns/mean", num_turns, 1)
    metrics.max("trajectory/turns/max", num_turns)
    metrics.mean("trajectory/generated_tokens/mean", tokens["assistant"], 1)
    metrics.mean("trajectory/observation_tokens/mean", tokens["observation"], 1)
    metrics.mean("trajectory/observation_share", tokens["observation"], sum(tokens.values()))
    for status in ENDINGS:
        metrics.mean(f"trajectory/status/{status}", float(sample.status == status), 1)
    for name, value in sample.trajectory_metrics.items():
        metrics.mean(f"trajectory/{name}/mean", value, 1)


def record_update(metrics: Metrics, sums: Sequence[MetricSums], constants: dict[str, float], contributes: bool) -> None:
    """Records the results of `Policy.update`: token means, and sums averaged over the optimizer steps.

    `sums` has one dict per optimizer step. `contributes` is true on one rank per replica.
    """
    local = metrics.when(contributes)
    for step_sums in sums:
        for name, part in step_sums.items():
            if part.num_tokens is None:
                local.sum(name, part.total / len(sums))
            else:
                local.mean(name, part.total, part.num_tokens)
    for name, value in constants.items():
        metrics.constant(name, value)


# -- Rollout files -----------------------------------------------------------------------------------------------------

TOKENS_PER_PART = 1 << 20  # prompt and response tokens that rank 0 receives at once: some 5 MB of text


class RolloutFiles:
    """Files with every sample that a step trained on, one line each: trainer.rollout_data_dir/step_000012.jsonl.

        prompt, response        the data file's question and the response: a row that algorithm.source=file can read
        turns, prompt_text      instead of `response`, of a trajectory: its turns and first messages as the model read them
        answer                  the reference answer
        score, reward           the reward before and after its penalties; null: unscorable
        advantage               the mean over the response's tokens in the loss; null: it was not trained on
        metrics, texts, failure what the reward function and the environment reported
        step, version, weights  the step; the version and digest of the weights that generated the response
        replayed                whether the file of an earlier step has the response, too (algorithm.replay)
        uid, group, index       the row of the data file; the prompt's number in the step; the sample's number in its group
        images                  the facts of each image, without pixels; absent without images
        source, finish_reason, status, prompt_tokens, response_tokens

    Lines are in the order of (group, index), whatever the layout. The first rank of each engine replica makes the lines of its
    samples, and rank 0 receives them replica by replica, never a complete step. A file is complete or absent. The first file
    that is written replaces those of that step and all later ones, which an interrupted run has left.
    """

    def __init__(self, folder: Path, output_dir: Path, mesh: Mesh, tokenizer: Any) -> None:
        self.folder, self.output_dir, self.mesh, self.tokenizer = folder, output_dir, mesh, tokenizer
        self._is_open = False

    def write(self, step: int, metrics: Metrics, samples: Sequence[Sample], table: GroupTable, plan: Plan) -> None:
        """Writes the samples of `table`, which are spread over all ranks. Collective.

        Raises RankError on every rank when rank 0 cannot write.
        """
        with metrics.phase("dump_rollout_generations"):
            if not self._is_open:
                task = f"cannot write trainer.rollout_data_dir={self.folder}"
                on_first_rank(self.mesh, task, lambda: self._open(step))
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
        """Makes the lines of the file on rank 0, and empty texts on the other ranks."""
        local, planned = _by_place(samples), plan.owner()

        def lines(rows: list[int]) -> bytes:
            made = []
            for row in rows:
                advantage = mean_advantage(plan.advantages[row], table.spans_of(row)) if row in planned else None
                sample = local[table.prompt_index[row], table.index[row]]
                made.append(self._line(step, sample, row, table, advantage))
            return "".join(made).encode()

        for holder, rows in parts_of(table, TOKENS_PER_PART):
            content = self.mesh.relay(holder, functools.partial(lines, rows))
            yield "" if content is None else content.decode()

    def _line(self, step: int, sample: Sample, row: int, table: GroupTable, advantage: float | None) -> str:
        reported = {**sample.reward_metrics, **sample.trajectory_metrics}
        content: dict[str, Any] = {
            "prompt": sample.prompt.question,
            **self._response(sample),
            "answer": sample.prompt.answer,
            "score": _finite((table.raw_reward or table.reward)[row]),
            "reward": _finite(table.reward[row]),
            "advantage": advantage,
            "metrics": {name: _finite(value) for name, value in sorted(reported.items())},
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
        if images := sample.prompt.columns.get("images"):
            content["images"] = images
        return json.dumps(content, allow_nan=False) + "\n"

    def _response(self, sample: Sample) -> dict[str, Any]:
        if not sample.turns:
            return {"response": sample.text}
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=False)
        turns = [{"kind": t.kind, "text": decode(sample.response_ids[t.start : t.end])} for t in sample.turns]
        return {"turns": turns, "prompt_text": sample.prompt.text}


def parts_of(table: GroupTable, max_tokens: int) -> Iterator[tuple[int, list[int]]]:
    """Splits the table into (rank, rows that are on it), in the table's order.

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
    """Computes the mean over the tokens of `spans`; None without an advantage or a token."""
    if not isinstance(advantage, list):
        return advantage
    values = [value for start, end in spans for value in advantage[start:end]]
    return math.fsum(values) / len(values) if values else None


def _by_place(samples: Sequence[Sample]) -> dict[tuple[int, int], Sample]:
    return {(sample.prompt_index, sample.index): sample for sample in samples}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# -- Samples on the report page ----------------------------------------------------------------------------------------

MAX_SAMPLES = 8  # of a group
MAX_SHOWN_ROWS = 6  # of a trajectory: its first one, and the last ones
HEAD, TAIL = 300, 100  # tokens of a response that are shown; those between them are left out
LONGEST_PROMPT = 4000  # characters
LONGEST_CHARACTER = 4  # tokens of one byte each that are one character

Groups = list[dict[str, Any]]  # as report/run_folder.py describes them
TokenNumbers = list[float | None]


class ShownSamples:
    """Two groups of a step on the page, with the log-probabilities of engine and policy for each token.

    One is the group whose rewards differ most, the other the first of the rest, which nothing has selected. The ranks that
    generated the samples send their texts, and the ranks that train on them the policy's log-probabilities, some kilobytes, to
    rank 0. `is_generated`: an engine generated the samples; those of a file have only the policy's numbers.
    """

    def __init__(self, mesh: Mesh, tokenizer: Any, is_generated: bool) -> None:
        self.mesh, self.texts, self.is_generated = mesh, TokenTexts(tokenizer), is_generated

    def gather(
        self, samples: Sequence[Sample], table: GroupTable, plan: Plan, batch: Batch
    ) -> Callable[[], Groups] | None:
        """Returns on rank 0 a function that makes the groups as plain data; None on the other ranks."""
        groups, samples_at = shown_rows(table), _by_place(samples)
        rows = {row for group in groups for row in group}
        local = {row for row in rows if table.holder[row] == self.mesh.rank}
        described = {row: self._describe(samples_at[table.prompt_index[row], table.index[row]]) for row in local}
        for row in local & {group[0] for group in groups}:
            if images := samples_at[table.prompt_index[row], table.index[row]].prompt.images:
                described[row][0]["images"] = thumbnails(images)
        records = self.mesh.gather((described, self._policy(rows, batch)))
        if not records:
            return None
        facts = {row: fact for part, _ in records for row, fact in part.items()}
        policy = {row: numbers for _, part in records for row, numbers in part.items()}
        places = {row: (n, len(rows)) for rows in table.trajectories for n, row in enumerate(rows, start=1)}

        def shown(row: int) -> dict[str, Any]:
            prompt, about, ids, engine = facts[row]
            policy_logprobs, gaps = policy.get(row, ([None] * len(ids), [None] * len(ids)))
            logprobs = engine if self.is_generated else policy_logprobs
            number, count = places[row]
            head, ends = min(HEAD, len(ids)), [turn["end"] for turn in about["turns"]]
            borders = sorted({0, head, *ends, len(ids)})
            pieces: list[list[Any]] = []
            made = {0: 0}  # shown tokens -> their pieces
            for start, end in itertools.pairwise(borders):
                pieces += self.texts.pieces(ids[start:end], logprobs[start:end], gaps[start:end])
                made[end] = len(pieces)
            length = int(table.response_length[row])
            return {
                **about,
                **({"row": number, "rows": count, "prompt": prompt["prompt"]} if count > 1 else {}),
                "turns": [{**turn, "end": made[turn["end"]]} for turn in about["turns"]],
                "reward": _digits(table.reward[row]),
                "score": _digits((table.raw_reward or table.reward)[row]),
                "advantage": _digits(mean_advantage(plan.advantages[row], table.spans_of(row))),
                "tokens": length,
                "drawn": self.is_generated,
                "pieces": pieces,
                "cut": max(0, length - HEAD - TAIL),
                "cut_at": made[head],
            }

        return lambda: [{**facts[group[0]][0], "samples": [shown(row) for row in group]} for group in groups]

    def _describe(self, sample: Sample) -> tuple[dict[str, Any], dict[str, Any], list[int], TokenNumbers]:
        """Describes a sample: its prompt, its facts, its shown tokens, and the engine's log-probabilities of them.

        These are None outside the loss mask, and without an engine.
        """
        places = shown_tokens(len(sample.response_ids))
        has_engine = self.is_generated and len(sample.rollout_logprobs) == len(sample.response_ids)
        rewards, metrics = dict(sample.turn_rewards), {**sample.reward_metrics, **sample.trajectory_metrics}
        turns = [
            {
                "kind": turn.kind,
                "end": bisect.bisect_left(places, turn.end),
                "tokens": turn.end - turn.start,
                "trained": sum(sample.loss_mask[turn.start : turn.end]),
                "reward": _digits(rewards.get(turn.end - 1)),
                "clock": turn.clock,
                "seconds": _digits(turn.seconds),
            }
            for turn in sample.turns
        ]
        about = {
            "index": sample.index % BRANCH,
            "turns": turns,
            "finish_reason": sample.finish_reason,
            "status": sample.status,
            "failure": sample.reward_failure[:LONGEST_PROMPT],
            "metrics": {name: _digits(value) for name, value in sorted(metrics.items())},
        }
        prompt = {"uid": sample.prompt.uid, "source": sample.prompt.source, "answer": _cut(str(sample.prompt.answer))}
        logprobs = [sample.rollout_logprobs[p] if has_engine and sample.loss_mask[p] else None for p in places]
        return {**prompt, "prompt": _cut(sample.prompt.text)}, about, [sample.response_ids[p] for p in places], logprobs

    def _policy(self, rows: set[int], batch: Batch) -> dict[int, tuple[TokenNumbers, TokenNumbers]]:
        """Looks up row -> (policy's log-probabilities, their differences from the engine's) at the kept tokens."""
        if batch.old_logprobs is None or not self.mesh.is_replica_reporter:
            return {}
        numbers: dict[int, tuple[TokenNumbers, TokenNumbers]] = {}
        columns = batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask
        for number, row in enumerate(batch.rows):
            if row in rows:
                places = shown_tokens(len(batch.tokens[number]) - batch.prompt_lengths[number])
                old, engine, mask = (column[number].tolist() for column in columns)
                gaps = [old[place] - engine[place] if mask[place] and self.is_generated else None for place in places]
                numbers[row] = [old[place] if mask[place] else None for place in places], gaps
        return numbers


def shown_rows(table: GroupTable) -> list[list[int]]:
    """Selects the table rows of the shown groups, in the order of their trajectories; the same on every rank."""

    def spread(group: list[int]) -> float:
        finite = [table.reward[row] for row in group if math.isfinite(table.reward[row])]
        return max(finite) - min(finite) if finite else -1.0

    groups = table.groups()
    most_spread = max(groups, key=spread, default=[])
    others = [group for group in groups if group is not most_spread]
    chosen = [set(group) for group in (most_spread, *others[:1]) if group]
    of_groups = [[rows for rows in table.trajectories if rows[-1] in group][:MAX_SAMPLES] for group in chosen]
    return [[row for rows in group for row in (*rows[:1], *rows[1:][1 - MAX_SHOWN_ROWS :])] for group in of_groups]


def shown_tokens(length: int) -> list[int]:
    """Lists the places of the tokens that are shown of a response."""
    return [place for place in range(length) if place < HEAD or place >= length - TAIL]


class TokenTexts:
    """The texts of tokens as parts of a longer text: with leading spaces, and characters of several tokens complete."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._text = functools.cache(self._decoded_alone)

    def pieces(
        self, ids: Sequence[int], logprobs: Sequence[float | None], gaps: Sequence[float | None]
    ) -> list[list[Any]]:
        """Makes [text, log-probability, gap] of each token. Tokens that are one character together have their sums."""
        made: list[list[Any]] = []
        first = 0
        while first < len(ids):
            last = first + 1
            text = self._text(*ids[first:last])
            while text.endswith("\ufffd") and last < len(ids) and last - first < LONGEST_CHARACTER:
                last += 1
                text = self._text(*ids[first:last])
            made.append([text, _sum(logprobs[first:last], 4), _sum(gaps[first:last], None)])
            first = last
        return made

    def _decoded_alone(self, *ids: int) -> str:
        def decode(some: list[int]) -> str:
            return str(self._tokenizer.decode(some, skip_special_tokens=False))

        return decode([ids[0], *ids]).removeprefix(decode([ids[0]]))  # some tokenizers strip a text's start


def _sum(values: Sequence[float | None], decimals: int | None) -> float | None:
    if any(value is None or not math.isfinite(value) for value in values):
        return None
    total = math.fsum(value for value in values if value is not None)
    return _digits(total) if decimals is None else round(total, decimals)


def _digits(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_PROMPT else f"{text[:LONGEST_PROMPT]}... ({len(text):,} characters)"
