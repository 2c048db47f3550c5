"""Validator: the run's engine answers held-out problems, the task's own reward grades them. The seeds never change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.algo.losses import LossInputs, policy_losses, total_loss
from grpo_megatron.algo.plan import make_plan
from grpo_megatron.algo.scores import Calibration, calibration, calibration_table
from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import ActorConfig, AlgorithmConfig, Config, DataConfig, RolloutConfig, TrainerConfig
from grpo_megatron.data.sampler import Sampler
from grpo_megatron.data.written import OfflineGroup
from grpo_megatron.models.policy import Policy
from grpo_megatron.observability.console import Summary
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.exchange import exchange, gather_groups, gather_rows
from grpo_megatron.parallel.mesh import Mesh, on_first_rank
from grpo_megatron.sampling.collector import FileCollector, numbered_samples
from grpo_megatron.sampling.generator import Generator
from grpo_megatron.sampling.grading import is_declined
from grpo_megatron.storage.files import write_file
from grpo_megatron.training.beside.references import References
from grpo_megatron.training.stopping import Cadence
from grpo_megatron.types import Batch, Prompt, Sample

VALIDATION_DRAW = -1  # a draw id that no training step has


@dataclass(frozen=True)
class ValidationRow:
    """One sample, as gathered on every rank."""

    prompt_index: int
    index: int
    source: str
    value: float  # `acc` if the reward function reports it, else the reward; NaN if it failed
    is_acc: bool
    length: int  # response tokens
    truncated: bool
    reward_metrics: tuple[tuple[str, float], ...]  # and what the environment reports
    example: tuple[str, str, str, str] | None  # prompt, response, notes, answer; only of the first few prompts


class Validator:
    """Validates with `prompts`, as `rollout.val_kwargs` says. `generator` None: the run has no engine and must not call `run`."""

    def __init__(
        self,
        generator: Generator | None,
        prompts: Sequence[Prompt],
        data: DataConfig,
        rollout: RolloutConfig,
        mesh: Mesh,
        trainer: TrainerConfig,
    ) -> None:
        self.generator, self.prompts, self.mesh = generator, list(prompts), mesh
        self.max_tokens, self.val = data.max_response_length, rollout.val_kwargs
        self.output_dir, self.num_logged_samples = trainer.output_dir, trainer.num_logged_samples

    def run(self, version: int, metrics: Metrics) -> dict[str, float]:
        """Draw, grade, and return the `val-core/...` and `val-aux/...` metrics, the same on every rank. Collective."""
        assert self.generator is not None, "a run that validates by drawing has an engine"
        discarded = Metrics()  # generation here counts as `testing`, not as the step's `gen`
        with metrics.phase("testing"):
            samples = self.generator.draw(
                self.prompts,
                self.val.n,
                draw_id=VALIDATION_DRAW,
                version=version,
                max_tokens=self.max_tokens,
                temperature=self.val.temperature,
                top_p=self.val.top_p,
                metrics=discarded,
            )
            rows = self._gather(samples)
        if self.mesh.rank == 0 and self.num_logged_samples:
            self._write_examples(version, rows)
        return summarize(rows, self.val.n)

    def _gather(self, samples: Sequence[Sample]) -> list[ValidationRow]:
        local_rows = (
            [self._row(sample) for sample in samples if not is_declined(sample)] if self.mesh.is_block_leader else []
        )
        rows = [row for rows_of_rank in self.mesh.all_gather(local_rows) for row in rows_of_rank]
        return sorted(rows, key=lambda row: (row.prompt_index, row.index))

    def _row(self, sample: Sample) -> ValidationRow:
        is_logged = sample.prompt_index < self.num_logged_samples and sample.index == 0
        extra = {k: v for k, v in sample.reward_metrics.items() if k not in ("acc", "ok", "timeout")}
        if sample.turns:
            extra |= {"turns": float(sum(t.kind == "assistant" for t in sample.turns)), **sample.trajectory_metrics}
        return ValidationRow(
            prompt_index=sample.prompt_index,
            index=sample.index,
            source=sample.prompt.source,
            value=sample.reward_metrics.get("acc", sample.reward),
            is_acc="acc" in sample.reward_metrics,
            length=len(sample.response_ids),
            truncated=sample.finish_reason == "length",
            reward_metrics=tuple(sorted(extra.items())),
            example=(sample.prompt.text, sample.text, _notes(sample), sample.prompt.answer) if is_logged else None,
        )

    def _write_examples(self, version: int, rows: Sequence[ValidationRow]) -> None:
        folder = self.output_dir / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        parts = []
        for row in rows:
            if row.example is None:
                continue
            prompt, response, notes, answer = row.example
            score = "-" if math.isnan(row.value) else f"{row.value:g}"
            about = f"{row.length} tokens{', truncated' if row.truncated else ''}, scored {score}"
            response = f"--- response ({about})\n{response}\n{notes}"
            parts.append(f"--- prompt\n{prompt}\n{response}--- reference answer\n{answer}\n")
        text = "\n".join(parts)
        (folder / f"step_{version:06d}.txt").write_text(text, encoding="utf-8", errors="backslashreplace")


def _notes(sample: Sample) -> str:
    """The texts that the reward function reports for a sample."""
    notes = [f"{name}: {text}\n" for name, text in sample.reward_texts.items()]
    if sample.reward_failure:
        notes.append(f"{sample.reward_failure}\n")
    return "".join(["--- reward\n", *notes]) if notes else ""


def summarize(rows: Sequence[ValidationRow], n: int) -> dict[str, float]:
    """Per source: mean over samples, unbiased pass@n for 0/1 values, lengths, truncation, failures of the reward.

    A sample whose reward failed counts as wrong (0), and as a failure. Where all failed there is no mean.
    """
    metrics: dict[str, float] = {}
    for source in sorted({row.source for row in rows}):
        metrics |= _summarize_source(source, [row for row in rows if row.source == source], n)
    return metrics


def _summarize_source(source: str, rows: Sequence[ValidationRow], n: int) -> dict[str, float]:
    kind = "acc" if any(row.is_acc for row in rows) else "reward"
    values = [0.0 if math.isnan(row.value) else row.value for row in rows]
    core, aux = f"val-core/{source}/{kind}", f"val-aux/{source}"
    metrics: dict[str, float] = {}
    is_scored = not all(math.isnan(row.value) for row in rows)
    if is_scored:
        metrics[f"{core}/mean@{n}"] = sum(values) / len(values)
    if is_scored and n > 1 and set(values) <= {0.0, 1.0}:
        solved = {row.prompt_index for row, value in zip(rows, values, strict=True) if value}
        metrics[f"{core}/pass@{n}"] = len(solved) / len({row.prompt_index for row in rows})
    metrics[f"{aux}/response_length/mean"] = sum(row.length for row in rows) / len(rows)
    metrics[f"{aux}/truncated_ratio"] = sum(row.truncated for row in rows) / len(rows)
    metrics[f"{aux}/reward_failed_ratio"] = sum(math.isnan(row.value) for row in rows) / len(rows)
    for name in sorted({name for row in rows for name, _ in row.reward_metrics}):
        reported = [value for row in rows for key, value in row.reward_metrics if key == name]
        metrics[f"{aux}/{name}/mean"] = sum(reported) / len(reported)
    return metrics


# -- The loss of held-out rows -----------------------------------------------------------------------------------------
# ValidationLoss: the loss of held-out supervised rows, or of held-out pairs, under the current weights.
#
#     val/loss/FILE           responses: mean over the loss tokens of all rows; pairs: mean over the pairs
#     val/dpo_accuracy/FILE   and whatever else the loss reports, under its own name, with the same mean
#
# FILE is the name in `data.val_loss_files` without its extension. The numbers do not depend on the layout. Every rank adds up
# its rows in float64, and the sums of all ranks are divided once. A mean of means, of ranks or of micro-batches, would be
# another number wherever these have different numbers of tokens.

WEIGHT = "weight"  # among the sums of a rank: its token weights
NOT_REPORTED = ("actor/entropy", "actor/entropy_loss")  # only log-probabilities are computed


class ValidationLoss:
    """`groups` are the rows of `data.val_loss_files`. Without rows every method returns at once."""

    def __init__(
        self,
        groups: Sequence[OfflineGroup],
        config: Config,
        policy: Policy,
        references: References,
        cadence: Cadence,
    ) -> None:
        self.policy, self.references, self.cadence = policy, references, cadence
        self.output_dir = config.trainer.output_dir
        self.mode, self.algorithm, self.actor = _supervised(config)
        self.is_paired = policy_losses.facts(self.mode).paired
        files: dict[str, list[OfflineGroup]] = {}
        for group in groups:
            files.setdefault(_file_of(group[0]), []).append(group)
        self.files = {file: Sampler(rows, len(rows), shuffle=False) for file, rows in files.items()}

    def run(self, metrics: Metrics) -> dict[str, float]:
        """The metrics of the header, the same on every rank. Collective."""
        results: dict[str, float] = {}
        for file, rows in self.files.items():
            with metrics.phase("testing"):
                means = self._means(file, rows)
            results |= {f"val/{name}/{file}": value for name, value in means.items()}
        return results

    def before(self, step: int, metrics: Metrics, summary: Summary) -> None:
        """Runs before step `step`, when due; the result is logged with that step. Collective."""
        if not self.cadence.validates_before(step):
            return
        results = self.run(metrics)
        summary.add(step, results)
        for name, value in results.items():
            metrics.constant(name, value)

    def _means(self, file: str, rows: Sampler[OfflineGroup]) -> dict[str, float]:
        mesh = self.policy.mesh
        samples = numbered_samples(FileCollector(rows, mesh).groups(0, rows.batch_size, Metrics()))
        table = gather_groups(samples, mesh)
        plan = make_plan(
            table,
            self.algorithm,
            self.actor,
            dp=mesh.dp,
            train_batch_size=rows.batch_size,
            max_response_length=max(table.response_length),
        )
        batch = exchange(samples, table, plan, mesh)
        # Pairs are compared with the reference, whose temperature is that of the run.
        logprobs = self.policy.logprobs(batch, temperature=None if self.is_paired else 1.0)
        batch.ref_logprobs = self.references.logprobs(batch) if self.is_paired else None
        local = self._sums(batch, logprobs) if mesh.is_first_replica_rank else {}
        return _divided(mesh.all_gather(local)) | self._also(file, batch, logprobs)

    def _also(self, file: str, batch: Batch, logprobs: Tensor) -> dict[str, float]:
        """Further numbers of the same rows, the same on every rank. Collective."""
        return {}

    def _sums(self, batch: Batch, logprobs: Tensor) -> dict[str, float]:
        """Sums over this rank's rows, with the token weights, and the sum of these weights."""
        sums: dict[str, float] = {}
        for rows in [micro for mini in batch.mini_batches for micro in mini if micro]:

            def part(column: Tensor, rows: list[int] = rows) -> Tensor:
                return column[rows].double()

            inputs = LossInputs(
                logprobs=part(logprobs),
                entropy=part(torch.zeros_like(logprobs)),
                old_logprobs=part(logprobs),
                rollout_logprobs=part(batch.rollout_logprobs),
                ref_logprobs=None if batch.ref_logprobs is None else part(batch.ref_logprobs),
                advantages=part(batch.advantages),
                mask=batch.loss_mask[rows],
                token_weights=part(batch.token_weights),
            )
            _, found = total_loss(inputs, self.actor, policy_losses.get(self.mode), None)
            sums[WEIGHT] = sums.get(WEIGHT, 0.0) + float(inputs.token_weights.sum())
            for name, metric in found.items():
                if metric.num_tokens is None and name not in NOT_REPORTED:
                    sums[name] = sums.get(name, 0.0) + float(metric.total)
        return sums


def _supervised(config: Config) -> tuple[str, AlgorithmConfig, ActorConfig]:
    """The loss, and a plan of one mini-batch whose weights add up to 1. A loss of samples is replaced by that of SFT."""
    facts = policy_losses.facts(config.actor.loss_mode)
    mode = config.actor.loss_mode if facts.is_likelihood else "sft"
    changes: dict[str, Any] = {"ppo_mini_batch_size": None, "entropy_coeff": 0.0, "use_kl_loss": False}
    if not facts.paired and not facts.scores:
        changes |= {"loss_mode": mode, "loss_agg_mode": "token-mean"}
        return mode, AlgorithmConfig(source="file", adv_estimator="constant"), config.actor.model_copy(update=changes)
    algorithm = AlgorithmConfig(source="file", adv_estimator=config.algorithm.adv_estimator)
    return mode, algorithm, config.actor.model_copy(update=changes)


def _file_of(prompt: Prompt) -> str:
    """A prompt's uid is "source/file stem/row number"."""
    return prompt.uid.rsplit("/", 2)[1]


def _divided(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """{name: mean} from every rank's sums. `pg_loss` is called `loss`."""
    names = sorted({name for sums in ranks for name in sums} - {WEIGHT})
    weight = math.fsum(sums.get(WEIGHT, 0.0) for sums in ranks)
    return {
        name.removeprefix("actor/").replace("pg_loss", "loss"): math.fsum(sums.get(name, 0.0) for sums in ranks)
        / weight
        for name in names
    }


# -- How far the probabilities of a scalar head can be trusted ---------------------------------------------------------

CALIBRATION_FILE = "calibration.txt"


class ScoreValidation(ValidationLoss):
    """What ValidationLoss reports of a trained scalar head, and its calibration.

        val/ece/FILE, val/brier/FILE    over held-out pairs, or over held-out steps (algo/scores.py)
        val/step_accuracy/FILE          of steps; that of pairs, val/pair_accuracy/FILE, is reported by the loss

    `calibration.txt` in the output folder has the newest table of confidence against accuracy, per file.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.tables: dict[str, str] = {}

    def _also(self, file: str, batch: Batch, logprobs: Tensor) -> dict[str, float]:
        mesh = self.policy.mesh
        local = {
            row: list(zip(logprobs[i][mask].tolist(), batch.advantages[i][mask].tolist(), strict=True))
            for i, (row, mask) in enumerate(zip(batch.rows, batch.loss_mask, strict=True))
        }
        scored = gather_rows(local, mesh)
        predictions = _of_pairs(scored) if self.is_paired else _of_steps(scored)
        result = calibration([odds for odds, _ in predictions], [label for _, label in predictions])
        self.tables[file] = _described(file, result, "pairs" if self.is_paired else "steps")
        text, target = "\n".join(self.tables.values()), self.output_dir / CALIBRATION_FILE
        on_first_rank(mesh, f"cannot write {target}", lambda: write_file(target, text))
        found = {"ece": result.ece, "brier": result.brier}
        return found if self.is_paired else {**found, "step_accuracy": result.accuracy}


Scored = dict[int, list[tuple[float, float]]]  # table row -> (score, advantage) of its scored tokens


def _of_pairs(scored: Scored) -> list[tuple[float, bool]]:
    """(log-odds that the chosen response is better, True), by pair. The rows of a pair are neighbours in the table."""
    rows = sorted(scored)
    pairs = zip(rows[0::2], rows[1::2], strict=True)
    margins = []
    for first, second in pairs:
        ((score, label),), ((other, opposite),) = scored[first], scored[second]
        assert label == -opposite, f"rows {first} and {second} are no pair"
        margins.append((score - other if label > 0 else other - score, True))
    return margins


def _of_steps(scored: Scored) -> list[tuple[float, bool]]:
    """(log-odds that the step is right, whether it is), by row and step."""
    return [(score, label > 0) for row in sorted(scored) for score, label in scored[row]]


def _described(file: str, result: Calibration, what: str) -> str:
    head = (
        f"{file}: {result.count:,} {what}, accuracy {result.accuracy:.4f}, log loss {result.log_loss:.4f}, Brier"
        f" {result.brier:.4f}, expected calibration error {result.ece:.4f}"
    )
    return f"{head}\n{calibration_table(result)}\n"


def build_validation_loss(
    config: Config, checked: Checked, policy: Policy, references: References, cadence: Cadence
) -> ValidationLoss:
    """The loss of held-out rows; with a scalar head, its calibration too."""
    kind = ValidationLoss if checked.scored_folder is None else ScoreValidation
    return kind(checked.val_loss_groups, config, policy, references, cadence)
