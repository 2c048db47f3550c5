"""Validation on held-out problems, which the run's engine answers (Validator), and on held-out rows, whose loss is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_megatron.algo.losses import LossInputs, policy_losses, total_loss
from grpo_megatron.algo.plan import make_plan
from grpo_megatron.algo.reward_models import calibration, calibration_table
from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import ActorConfig, AlgorithmConfig, Config
from grpo_megatron.config.problems import counted
from grpo_megatron.data.responses import OfflineGroup
from grpo_megatron.data.sampler import Sampler
from grpo_megatron.models.policy import Policy
from grpo_megatron.parallel.exchange import exchange, gather_groups, gather_rows
from grpo_megatron.parallel.mesh import on_first_rank
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.rollout.engine import Truncation
from grpo_megatron.sampling.collector import FileCollector, numbered_samples
from grpo_megatron.sampling.generator import Generator, is_declined
from grpo_megatron.storage.files import write_file
from grpo_megatron.training.beside import References
from grpo_megatron.training.stopping import Cadence
from grpo_megatron.types import BRANCH, Batch, Prompt, Sample

VALIDATION_ROUND = -1  # a round id that no training step has


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
    example: str | None  # the sample as text; only of the first few prompts


class PromptValidation(Protocol):
    """Validates the policy on held-out prompts, on this rank or on others."""

    is_on: bool  # there are held-out prompts

    def before(self, step: int, metrics: Metrics) -> list[tuple[int, dict[str, float]]]:
        """Results (version, metrics) that are due before `step` and are made here. Collective."""
        ...

    def run(self, version: int, metrics: Metrics) -> dict[str, float]:
        """Returns the metrics of the weights `version`, the same on every rank. Collective."""
        ...


class NoValidation:
    """The validation of a run without held-out prompts."""

    is_on = False

    def before(self, step: int, metrics: Metrics) -> list[tuple[int, dict[str, float]]]:
        return []

    def run(self, version: int, metrics: Metrics) -> dict[str, float]:
        return {}


class Validator:
    """The validation with `prompts`, as `rollout.val_kwargs` says."""

    is_on = True

    def __init__(self, generator: Generator, prompts: Sequence[Prompt], config: Config, cadence: Cadence) -> None:
        self.generator, self.prompts, self.mesh, self.cadence = generator, list(prompts), generator.mesh, cadence
        self.max_tokens, self.val = config.data.max_response_length, config.rollout.val_kwargs
        trainer = config.trainer
        self.folder, self.num_logged_samples = trainer.output_dir / "samples", trainer.num_logged_samples

    def before(self, step: int, metrics: Metrics) -> list[tuple[int, dict[str, float]]]:
        return [(step, self.run(step, metrics))] if self.cadence.validates_before(step) else []

    def run(self, version: int, metrics: Metrics) -> dict[str, float]:
        """Draw, grade, and return the `val-core/...` and `val-aux/...` metrics, the same on every rank. Collective."""
        discarded = Metrics()  # generation here counts as `testing`, not as the step's `gen`
        with metrics.phase("testing"):
            samples = self.generator.sample(
                self.prompts,
                self.val.n,
                round_id=VALIDATION_ROUND,
                version=version,
                max_tokens=self.max_tokens,
                temperature=self.val.temperature,
                truncation=Truncation(self.val.top_p),
                metrics=discarded,
            )
            graded = [s for s in samples if self.mesh.is_replica_leader and s.index < BRANCH and not is_declined(s)]
            ranks = self.mesh.all_gather([self._row(sample) for sample in graded])
            rows = sorted((row for of_rank in ranks for row in of_rank), key=lambda row: (row.prompt_index, row.index))
        if self.num_logged_samples:
            path = self.folder / f"step_{version:06d}.txt"
            on_first_rank(self.mesh, f"cannot write {path}", lambda: _write_examples(path, rows))
        return summarize(rows, self.val.n)

    def _row(self, sample: Sample) -> ValidationRow:
        is_logged = sample.prompt_index < self.num_logged_samples and sample.index == 0
        extra = {k: v for k, v in sample.reward_metrics.items() if k not in ("acc", "ok", "timeout")}
        if sample.turns:
            extra |= {"turns": float(sum(t.kind == "assistant" for t in sample.turns)), **sample.trajectory_metrics}
        value, is_truncated = sample.reward_metrics.get("acc", sample.reward), sample.finish_reason == "length"
        return ValidationRow(
            prompt_index=sample.prompt_index,
            index=sample.index,
            source=sample.prompt.source,
            value=value,
            is_acc="acc" in sample.reward_metrics,
            length=len(sample.response_ids),
            truncated=is_truncated,
            reward_metrics=tuple(sorted(extra.items())),
            example=_example(sample, value, is_truncated) if is_logged else None,
        )


def _write_examples(path: Path, rows: Sequence[ValidationRow]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(row.example for row in rows if row.example is not None)
    write_file(path, text.encode("utf-8", "backslashreplace").decode())


def _example(sample: Sample, value: float, is_truncated: bool) -> str:
    """Returns a sample as text, with what the reward function reports."""
    score = "-" if math.isnan(value) else f"{value:g}"
    about = f"{counted(len(sample.response_ids), 'token')}{', truncated' if is_truncated else ''}, scored {score}"
    notes = [f"{name}: {text}\n" for name, text in sample.reward_texts.items()]
    notes += [f"{sample.reward_failure}\n"] if sample.reward_failure else []
    reward = "".join(["--- reward\n", *notes]) if notes else ""
    return (
        f"--- prompt\n{sample.prompt.text}\n--- response ({about})\n{sample.text}\n{reward}"
        f"--- reference answer\n{sample.prompt.answer}\n"
    )


def summarize(rows: Sequence[ValidationRow], n: int) -> dict[str, float]:
    """Compute per source: mean, unbiased pass@n of 0/1 values, lengths, truncation, failures of the reward.

    A sample whose reward failed counts as wrong (0), and as a failure. Where all failed there is no mean.
    """
    metrics: dict[str, float] = {}
    for source in sorted({row.source for row in rows}):
        own = [row for row in rows if row.source == source]
        core = f"val-core/{source}/{'acc' if any(row.is_acc for row in own) else 'reward'}"
        num_failed = sum(math.isnan(row.value) for row in own)
        values = [0.0 if math.isnan(row.value) else row.value for row in own]
        if num_failed < len(own):
            metrics[f"{core}/mean@{n}"] = sum(values) / len(own)
            if n > 1 and set(values) <= {0.0, 1.0}:
                solved = {row.prompt_index for row, value in zip(own, values, strict=True) if value}
                metrics[f"{core}/pass@{n}"] = len(solved) / len({row.prompt_index for row in own})
        aux = f"val-aux/{source}"
        metrics[f"{aux}/response_length/mean"] = sum(row.length for row in own) / len(own)
        metrics[f"{aux}/truncated_ratio"] = sum(row.truncated for row in own) / len(own)
        metrics[f"{aux}/reward_failed_ratio"] = num_failed / len(own)
        reported: dict[str, list[float]] = {}
        for name, value in (pair for row in own for pair in row.reward_metrics):
            reported.setdefault(name, []).append(value)
        metrics |= {f"{aux}/{name}/mean": sum(found) / len(found) for name, found in sorted(reported.items())}
    return metrics


# -- The loss of held-out rows -----------------------------------------------------------------------------------------

WEIGHT = "weight"  # among the sums of a rank: its token weights
NOT_REPORTED = ("actor/entropy", "actor/entropy_loss")  # only log-probabilities are computed
CALIBRATION_FILE = "calibration.txt"  # in the output folder: the newest table of confidence against accuracy, per file


class ValidationLoss:
    """The loss of held-out rows `groups`, those of `data.val_loss_files`. `is_scored`: of a trained scalar head.

        val/loss/FILE                   responses: mean over the loss tokens of all rows; pairs: mean over the pairs
        val/dpo_accuracy/FILE           and what else the loss reports, under its own name, with the same mean
        val/ece/FILE, val/brier/FILE    of a scalar head: calibration over held-out pairs or steps (algo/reward_models.py)
        val/step_accuracy/FILE          of a scalar head's steps; the loss reports that of pairs, val/pair_accuracy/FILE

    FILE is the name in `data.val_loss_files` without its extension. Every rank adds up its rows in float64, and the sums of
    all ranks are divided once: a mean of means of ranks or micro-batches would depend on the layout.
    """

    def __init__(
        self,
        groups: Sequence[OfflineGroup],
        config: Config,
        policy: Policy,
        references: References | None,
        is_scored: bool,
    ) -> None:
        self.policy, self.references, self.mesh, self.is_scored = policy, references, policy.mesh, is_scored
        self.calibration_file, self.tables = config.trainer.output_dir / CALIBRATION_FILE, dict[str, str]()
        self.mode, self.algorithm, self.actor = _supervised(config)
        self.is_paired = policy_losses.facts(self.mode).paired
        files: dict[str, list[OfflineGroup]] = {}
        for group in groups:
            file = group[0].uid.rsplit("/", 2)[1]  # a prompt's uid is "source/file stem/row number"
            files.setdefault(file, []).append(group)
        self.files = {file: Sampler(rows, len(rows), shuffle=False) for file, rows in files.items()}

    def run(self, metrics: Metrics) -> dict[str, float]:
        """Compute the metrics of all files, the same on every rank. Collective."""
        results: dict[str, float] = {}
        for file, rows in self.files.items():
            with metrics.phase("testing"):
                means = self._means(file, rows)
            results |= {f"val/{name}/{file}": value for name, value in means.items()}
        return results

    def _means(self, file: str, rows: Sampler[OfflineGroup]) -> dict[str, float]:
        samples = numbered_samples(FileCollector(rows, self.mesh).groups(0, rows.batch_size, Metrics()))
        table = gather_groups(samples, self.mesh)
        plan = make_plan(
            table,
            self.algorithm,
            self.actor,
            dp=self.mesh.dp,
            train_batch_size=rows.batch_size,
            max_response_length=max(table.response_length),
        )
        batch = exchange(samples, table, plan, self.mesh)
        # Pairs are compared with the reference, whose temperature is that of the run.
        logprobs = self.policy.logprobs(batch, temperature=None if self.is_paired else 1.0)
        if self.is_paired and self.references is not None:
            batch.ref_logprobs = self.references.logprobs(batch)
        ranks = self.mesh.all_gather(self._sums(batch, logprobs) if self.mesh.is_replica_reporter else {})
        names = sorted({name for sums in ranks for name in sums})
        totals = {name: math.fsum(sums.get(name, 0.0) for sums in ranks) for name in names}
        weight = totals.pop(WEIGHT)
        means = {
            name.removeprefix("actor/").replace("pg_loss", "loss"): total / weight for name, total in totals.items()
        }
        return means | (self._calibration(file, batch, logprobs) if self.is_scored else {})

    def _sums(self, batch: Batch, logprobs: Tensor) -> dict[str, float]:
        """Returns sums over this rank's rows, with the token weights, and the sum of these weights."""
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

    def _calibration(self, file: str, batch: Batch, logprobs: Tensor) -> dict[str, float]:
        """Measure how far the probabilities of the scalar head can be trusted. Collective."""
        local = {
            row: list(zip(logprobs[i][mask].tolist(), batch.advantages[i][mask].tolist(), strict=True))
            for i, (row, mask) in enumerate(zip(batch.rows, batch.loss_mask, strict=True))
        }
        scored: dict[int, list[tuple[float, float]]] = gather_rows(
            local, self.mesh
        )  # row -> (score, advantage) of tokens
        if self.is_paired:  # log-odds that the chosen response is better; a pair's rows are neighbours
            odds, labels, rows = [], [], sorted(scored)
            for first, second in zip(rows[0::2], rows[1::2], strict=True):
                ((score, label),), ((other, opposite),) = scored[first], scored[second]
                assert label == -opposite, f"rows {first} and {second} are no pair"
                odds.append(score - other if label > 0 else other - score)
                labels.append(True)
        else:  # log-odds that the step is right
            steps = [step for row in sorted(scored) for step in scored[row]]
            odds, labels = [score for score, _ in steps], [label > 0 for _, label in steps]
        result, what = calibration(odds, labels), "pairs" if self.is_paired else "steps"
        self.tables[file] = (
            f"{file}: {result.count:,} {what}, accuracy {result.accuracy:.4f}, log loss {result.log_loss:.4f}, Brier"
            f" {result.brier:.4f}, expected calibration error {result.ece:.4f}\n{calibration_table(result)}\n"
        )
        text, target = "\n".join(self.tables.values()), self.calibration_file
        on_first_rank(self.mesh, f"cannot write {target}", lambda: write_file(target, text))
        found = {"ece": result.ece, "brier": result.brier}
        return found if self.is_paired else {**found, "step_accuracy": result.accuracy}


def _supervised(config: Config) -> tuple[str, AlgorithmConfig, ActorConfig]:
    """Returns the loss, and a plan of one mini-batch whose weights add up to 1.

    A loss of samples is replaced by that of SFT.
    """
    facts = policy_losses.facts(config.actor.loss_mode)
    mode = config.actor.loss_mode if facts.is_likelihood else "sft"
    changes: dict[str, Any] = {"ppo_mini_batch_size": None, "entropy_coeff": 0.0, "use_kl_loss": False}
    if not facts.paired and not facts.scores:
        changes |= {"loss_mode": mode, "loss_agg_mode": "token-mean"}
        return mode, AlgorithmConfig(source="file", adv_estimator="constant"), config.actor.model_copy(update=changes)
    algorithm = AlgorithmConfig(source="file", adv_estimator=config.algorithm.adv_estimator)
    return mode, algorithm, config.actor.model_copy(update=changes)


def build_validation_loss(
    config: Config, checked: Checked, policy: Policy, references: References | None
) -> ValidationLoss | None:
    """Returns the loss of held-out rows; None without any."""
    if not checked.val_loss_groups:
        return None
    return ValidationLoss(checked.val_loss_groups, config, policy, references, checked.scored_folder is not None)
