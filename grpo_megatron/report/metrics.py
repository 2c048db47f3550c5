"""Metrics: what the ranks record during a step, and the one exchange that turns it into global numbers.

A mean travels as (sum, count) and is divided once, after the exchange: mean = sum_r s_r / sum_r c_r over ranks r. The
mean of rank means would give a rank with one token the weight of a rank with a thousand, so it is never used. Recording
costs no communication and no device synchronisation: tensors of one element stay on their device until `reduce`.

Names and definitions: verl's, over the global batch (docs/metrics.md). Differences: `std` is global too; exponents of
log-probability differences are clamped at +-20; a metric without a record is omitted, not zero.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_megatron.report.kit import appended_step, render_report
from grpo_megatron.report.run_folder import KeptSamples, RunFolder, read_metrics
from grpo_megatron.storage import StorageError
from grpo_megatron.storage.files import check_epoch, write_file
from grpo_megatron.storage.run_files import add_event, read_events
from grpo_megatron.types import GroupTable

if TYPE_CHECKING:
    from torch import Tensor


class Metrics:
    """One rank's records of the current step.

    `synchronize` waits for the device, so that `phase` measures finished work; `within(name)` is entered around each phase.
    `in_float32`: reduced numbers are rounded, so that the order of their sums, in float64, leaves no trace.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None, *, in_float32: bool = False) -> None:
        self._synchronize = synchronize or (lambda: None)
        self.within: Callable[[str], contextlib.AbstractContextManager[None]] = lambda name: contextlib.nullcontext()
        self._in_float32 = in_float32
        self._records: dict[str, tuple[str, list[Any]]] = {}
        self._constants: dict[str, float] = {}

    def when(self, contributes: bool) -> Metrics:
        """Returns this object, or one that discards its records, for ranks with a copy of another rank's numbers.

        Tensor- and pipeline-parallel ranks of one replica hold the same samples, and each sample must be counted once:
        `rollout_mismatch(metrics.when(mesh.is_replica_reporter), ...)`. `max`, `min`, `phase` and `constant` do not need it.
        """
        return self if contributes else Metrics()

    def mean(self, name: str, value_sum: float | Tensor, count: float | Tensor) -> None:
        """Adds `value_sum` over `count` items. Count 0 over all ranks: the metric is omitted."""
        self._record(name, "mean", (_detached(value_sum), _detached(count)))

    def mean_of(self, name: str, values: Tensor | Sequence[float]) -> None:
        """Adds every element of `values` (any shape) to a mean."""
        values = _float64(values)
        self.mean(name, values.sum(), values.numel())

    def std(self, name: str, values: Tensor | Sequence[float], *, kind: str = "std") -> None:
        """Adds every element to a standard deviation (ddof 1). Fewer than two elements over all ranks: omitted."""
        values = _float64(values)
        if values.numel():
            mean = values.mean()
            self._record(name, kind, (values.numel(), mean, (values - mean).square().sum()))

    population_std = functools.partialmethod(std, kind="population_std")  # ddof 0
    effective_sample_size = functools.partialmethod(std, kind="effective_sample_size")  # 1 / mean((w / mean w)^2)

    def sum(self, name: str, value: float | Tensor) -> None:
        """Adds `value` to a total over calls and ranks."""
        self._record(name, "sum", _detached(value))

    def max(self, name: str, value: float | Tensor) -> None:
        """Records the largest over calls and ranks; NaN if any is NaN."""
        self._record(name, "max", _detached(value))

    def min(self, name: str, value: float | Tensor) -> None:
        """Records the smallest over calls and ranks; NaN if any is NaN."""
        self._record(name, "min", _detached(value))

    def constant(self, name: str, value: float) -> None:
        """Records a number that is the same on every rank; it is not exchanged. The last call wins."""
        assert name not in self._records, f"metric {name!r} is recorded and constant"
        self._constants[name] = float(value)

    def __contains__(self, name: str) -> bool:
        """Tests that this step has records of it."""
        return name in self._records

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times the block as `timing_s/<name>`: wall seconds, added up over calls, slowest rank.

        A block that raises is not recorded, because waiting for a failed device would hide its error.
        """
        self._synchronize()
        start = time.perf_counter()
        with self.within(name):
            yield
            self._synchronize()
        self.seconds(f"timing_s/{name}", time.perf_counter() - start)

    def seconds(self, name: str, value: float) -> None:
        """Adds to a time: the sum of the calls, of the slowest rank."""
        self._record(name, "seconds", value)

    def reduce(self, all_gather: Callable[[Any], list[Any]] = lambda value: [value]) -> dict[str, float]:
        """Computes the step's global numbers, on every rank. Collective where `all_gather` is: `Mesh.all_gather`, or none.

        Deletes the records, so that the next step starts empty.
        """
        local = {name: (kind, self._local_state(kind, items)) for name, (kind, items) in self._records.items()}
        constants, self._constants, self._records = self._constants, {}, {}
        reduced = reduce_records(all_gather(rank_records(local)))
        if self._in_float32:
            reduced = {name: float(np.float32(value)) for name, value in reduced.items()}
        return dict(sorted((constants | reduced).items()))

    def _record(self, name: str, kind: str, item: Any) -> None:
        assert name not in self._constants, f"metric {name!r} is recorded and constant"
        known, items = self._records.setdefault(name, (kind, []))
        assert known == kind, f"metric {name!r} is recorded as {known} and as {kind}"
        items.append(item)

    def _local_state(self, kind: str, items: list[Any]) -> Any:
        """Condenses this rank's items of one metric to the small state that is exchanged."""
        if kind == "mean":
            return sum(float(s) for s, _ in items), sum(float(c) for _, c in items)
        if kind in ("std", "population_std", "effective_sample_size"):
            return merge_moments(*zip(*((float(n), float(mean), float(m2)) for n, mean, m2 in items), strict=True))
        numbers = [float(item) for item in items]
        return {"max": largest_of, "min": smallest_of}.get(kind, sum)(numbers)


def _detached(value: float | Tensor) -> float | Tensor:
    """Copies a value, so that in-place updates do not change it and the autograd graph is freed."""
    import torch

    return value.detach().clone() if isinstance(value, torch.Tensor) else float(value)


def _float64(values: Tensor | Sequence[float]) -> Tensor:
    import torch

    return values.detach().double() if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.float64)


def rollout_mismatch(metrics: Metrics, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> None:
    """Records how far the policy's log-probabilities are from the rollout engine's, for the same weights and tokens.

    All [B, R]; `mask` is the loss mask: tokens that the engine did not generate have no rollout log-probability. With
    d = old - rollout: `rollout_corr/kl` is the token mean of -d, `k3_kl` of e^d - d - 1, `mult_prob_error` of e^|d| (1
    is perfect, above 1.05 suspect), `chi2_token` of e^2d - 1. Over sequences with a loss token: the `ppl`s;
    `log_ppl_diff`, mean rollout minus mean old; `chi2_seq`, chi2 with the sum of their d.
    """
    import torch

    from grpo_megatron.algo.losses import clamp_log_ratio

    mask = mask.detach().cpu().bool()
    old, rollout = (torch.where(mask, _float64(x).cpu(), 0.0) for x in (old_logprobs, rollout_logprobs))
    old_token, rollout_token = old[mask], rollout[mask]
    probs_diff = (old_token.exp() - rollout_token.exp()).abs()
    diff = old_token - rollout_token
    bounded = clamp_log_ratio(diff)
    for name, values in (("probs", probs_diff), ("logp", diff.abs())):
        metrics.mean_of(f"training/rollout_{name}_diff_mean", values)
        if values.numel():
            metrics.max(f"training/rollout_{name}_diff_max", values.max())
    metrics.std("training/rollout_probs_diff_std", probs_diff)
    metrics.mean_of("rollout_corr/kl", -diff)
    metrics.mean_of("rollout_corr/k3_kl", bounded.exp() - bounded - 1)
    metrics.mean_of("rollout_corr/mult_prob_error", bounded.abs().exp())
    metrics.mean_of("rollout_corr/chi2_token", (2 * bounded).exp() - 1)

    num_tokens = mask.sum(1)
    has_tokens = num_tokens > 0
    old_mean, rollout_mean = (x.sum(1)[has_tokens] / num_tokens[has_tokens] for x in (old, rollout))
    log_ppl_diff = rollout_mean - old_mean
    total = clamp_log_ratio((old - rollout).sum(1)[has_tokens])
    metrics.mean_of("rollout_corr/chi2_seq", (2 * total).exp() - 1)
    metrics.mean_of("rollout_corr/training_ppl", (-old_mean).exp())
    metrics.mean_of("rollout_corr/rollout_ppl", (-rollout_mean).exp())
    metrics.mean_of("rollout_corr/ppl_ratio", clamp_log_ratio(log_ppl_diff).exp())
    metrics.mean_of("rollout_corr/log_ppl_diff", log_ppl_diff)
    metrics.mean_of("rollout_corr/log_ppl_abs_diff", log_ppl_diff.abs())


def group_table_metrics(metrics: Metrics, table: GroupTable, max_response_length: int) -> None:
    """Records rewards and lengths of every sample of the step. The table is the same on all ranks, so these are constants.

    `critic/score` is the reward before its penalties, `critic/rewards` after them. Both leave out empty responses and
    unscorable ones (NaN), and count a trajectory once. `response_length` counts all response tokens. `clip_ratio` is the share
    of responses with exactly `max_response_length` tokens, including those that stopped there by themselves.
    `truncated_ratio` is the share that the engine cut off. `response/loss_token_ratio`, reported where a loss mask has a 0, is
    the share of all response tokens that is in the loss.
    """
    if not len(table):
        return
    lengths = table.response_length
    trajectories = table.joined()
    rewards, scores = (
        [r for r, n in zip(column, trajectories.response_length, strict=True) if n and not math.isnan(r)]
        for column in (trajectories.reward, trajectories.raw_reward or trajectories.reward)
    )
    summaries: dict[str, Sequence[float]] = {
        "critic/score": scores,
        "critic/rewards": rewards,
        "response_length": lengths,
        "response_length_non_aborted": [n for n in lengths if n],
        "prompt_length": table.prompt_length,
    }
    for prefix, values in summaries.items():
        if values:
            metrics.constant(f"{prefix}/mean", sum(values) / len(values))
            metrics.constant(f"{prefix}/max", max(values))
            metrics.constant(f"{prefix}/min", min(values))
    shares: dict[str, list[bool]] = {
        "response_length/clip_ratio": [n == max_response_length for n in lengths],
        "response/truncated_ratio": table.truncated,
        "response/aborted_ratio": [n == 0 for n in lengths],
        "reward/unscorable_ratio": [math.isnan(r) for r in table.reward],
    }
    for name, flags in shares.items():
        metrics.constant(name, sum(flags) / len(flags))
    if table.loss_spans:
        metrics.constant("response/loss_token_ratio", sum(table.num_loss_tokens()) / sum(lengths))


# -- reduction: the records of all ranks -> one number per metric, in time and memory linear in ranks x metrics --------
# A rank sends its numbers as one array, and the names once beside it. Ranks that record the same metrics (most do) send the same
# layout, so their arrays are stacked and a metric is a few columns. Sums run in rank order, whatever the layouts.

Array = np.ndarray[Any, Any]
# Numbers per metric; the others have one.
WIDTHS = {"mean": 2, "std": 3, "population_std": 3, "effective_sample_size": 3}


@dataclass(frozen=True)
class RankRecords:
    """The records of one rank. `layout`: (name, kind) of each metric in `numbers`, sorted."""

    layout: tuple[tuple[str, str], ...]
    numbers: Array  # float64


def rank_records(states: Mapping[str, tuple[str, Any]]) -> RankRecords:
    """Packs name -> (kind, state); a state is a number, (sum, count) or (count, mean, squared deviations)."""
    layout = sorted((name, kind) for name, (kind, _) in states.items())
    numbers = [np.atleast_1d(np.asarray(states[name][1], dtype=np.float64)) for name, _ in layout]
    return RankRecords(tuple(layout), np.concatenate([np.empty(0), *numbers]))


def reduce_records(ranks: Sequence[RankRecords]) -> dict[str, float]:
    """Reduces to name -> value over all ranks, which are in rank order. A metric without a record is omitted."""
    # name -> (kind, ranks, their numbers) of each layout
    columns: dict[str, list[tuple[str, list[int], Array]]] = {}
    ranks_of_layout: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for rank, records in enumerate(ranks):
        ranks_of_layout.setdefault(records.layout, []).append(rank)
    for layout, members in ranks_of_layout.items():
        matrix, start = np.stack([ranks[rank].numbers for rank in members]), 0
        for name, kind in layout:
            end = start + WIDTHS.get(kind, 1)
            columns.setdefault(name, []).append((kind, members, matrix[:, start:end]))
            start = end
    values: dict[str, float | None] = {}
    for name, parts in columns.items():
        kinds = sorted({kind for kind, _, _ in parts})
        assert len(kinds) == 1, f"metric {name!r} is recorded as {kinds} on different ranks"
        values[name] = _REDUCTIONS[kinds[0]](*_in_rank_order(parts))
    return {name: value for name, value in values.items() if value is not None}


def _in_rank_order(parts: Sequence[tuple[str, list[int], Array]]) -> list[list[float]]:
    """Orders the columns of one metric by rank."""
    if len(parts) == 1:
        return [column.tolist() for column in parts[0][2].T]
    order = np.argsort(np.concatenate([members for _, members, _ in parts]))
    return [column.tolist() for column in np.concatenate([numbers for _, _, numbers in parts])[order].T]


def largest_of(values: Sequence[float]) -> float:
    """Finds the largest value; NaN if any is NaN."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def smallest_of(values: Sequence[float]) -> float:
    """Finds the smallest value; NaN if any is NaN."""
    return math.nan if any(map(math.isnan, values)) else min(values)


def _mean(sums: Sequence[float], counts: Sequence[float]) -> float | None:
    count = sum(counts)
    return sum(sums) / count if count else None


def merge_moments(
    counts: Sequence[float], means: Sequence[float], squares: Sequence[float]
) -> tuple[float, float, float]:
    """Merges to (count, mean, sum of squared deviations) of the union. Sums of squares would cancel when std << mean."""
    count = sum(counts)
    mean = sum(n * m for n, m in zip(counts, means, strict=True)) / count
    return count, mean, sum(s + n * (m - mean) ** 2 for n, m, s in zip(counts, means, squares, strict=True))


def _std(counts: Sequence[float], means: Sequence[float], squares: Sequence[float], ddof: int = 1) -> float | None:
    count, _, m2 = merge_moments(counts, means, squares)
    return math.sqrt(m2 / (count - ddof)) if count > ddof else None


def _effective_sample_size(counts: Sequence[float], means: Sequence[float], squares: Sequence[float]) -> float | None:
    count, mean, m2 = merge_moments(counts, means, squares)
    return mean**2 / (mean**2 + m2 / count) if mean else None


_REDUCTIONS: dict[str, Callable[..., float | None]] = {
    "mean": _mean,
    "std": _std,
    "population_std": functools.partial(_std, ddof=0),
    "effective_sample_size": _effective_sample_size,
    "sum": sum,
    "max": largest_of,
    "min": smallest_of,
    "seconds": largest_of,
}


# -- Sinks: where a step's metrics go. metrics.jsonl and the report (always), the console, TensorBoard, trackers -------
# Only rank 0 writes. On other ranks `Sinks` holds no sink and every call does nothing. A resumed run repeats the steps after its
# checkpoint, and no sink may keep a step twice: jsonl drops its lines from `first_step` on, TensorBoard purges them, and a
# tracker's continued run ignores or replaces the steps that it already has.

ShownGroups = list[dict[str, Any]]  # samples of a step, as report/run_folder.py describes them


class Sink:
    """A destination of a run's metrics. By default it ignores everything but metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes one step's metrics, once per step and in order of steps."""
        raise NotImplementedError

    def show(self, step: int, groups: Callable[[], ShownGroups]) -> None:
        """Takes samples of the step that is logged next. Calling `groups` takes some milliseconds."""

    def note(self, text: str) -> None:
        """Takes text for people, of one line or several."""

    def enter(self, step: int | None, phases: Sequence[str]) -> None:
        """Takes the nested phases of a step that the run is now in."""

    def close(self) -> None:
        """Ends the sink, after the last step or a failure."""


class Sinks(Sink):
    """All sinks of the run as one. A context manager: leaving it closes them, and records a failure as an event."""

    def __init__(self, sinks: Sequence[Sink] = (), output_dir: Path | None = None) -> None:
        self._sinks, self._output_dir = list(sinks), output_dir

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.log(step, metrics)

    def show(self, step: int, groups: Callable[[], ShownGroups]) -> None:
        for sink in self._sinks:
            sink.show(step, groups)

    def note(self, text: str) -> None:
        for sink in self._sinks:
            sink.note(text)

    def enter(self, step: int | None, phases: Sequence[str]) -> None:
        for sink in self._sinks:
            sink.enter(step, phases)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and self._output_dir is not None:
            events = read_events(self._output_dir)
            if not events or events[-1]["kind"] not in ("stopped", "done", "grown"):  # it did not end on request
                add_event(self._output_dir, "failed", None, f"{type(error).__name__}: {error}")
        self.close()


class JsonlSink(Sink):
    """A file with one JSON object per step: {"step": 3, "critic/score/mean": 0.25, ...}. NaN and infinities become null."""

    def __init__(self, path: Path, first_step: int = 0) -> None:
        if path.exists():  # the old file stays complete until the new one is on disk
            write_file(path, (json.dumps(row) + "\n" for row in read_metrics(path) if row["step"] < first_step))
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.append(step, {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()})

    def append(self, step: int, row: Mapping[str, Any]) -> None:
        """Adds a line, which is on the disk afterwards. Raises StorageError."""
        check_epoch()
        try:
            self._file.write(json.dumps({"step": step, **row}) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())  # before the step's checkpoint
        except OSError as error:
            raise StorageError(f"cannot write step {step} to {self._file.name}: {error}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # `log` has flushed every row, or has raised
            self._file.close()


REPORT_FILE = "report.html"
SHARE = 0.01  # of the time between two writings of the whole page
logger = logging.getLogger(__name__)


class ReportSink(Sink):
    """The page report.html. It reads metrics.jsonl, so it comes after the sink that writes it. A failure to write ends no run.

    The whole page is written at the start, at the end, and after a step when writing takes at most SHARE of the run's time. In
    the other steps a script element with the step's metrics is appended, in a fraction of a millisecond however long the run
    is; the page adds them to its curves. One that a kill has cut off is ignored.
    """

    def __init__(self, output_dir: Path, first_step: int = 0, clock: Callable[[], float] = time.perf_counter) -> None:
        self.run, self.samples, self._clock = RunFolder(output_dir), KeptSamples(output_dir, first_step), clock
        self.path = output_dir / REPORT_FILE
        self._shown: tuple[int, Callable[[], ShownGroups]] | None = None
        self._has_failed = False
        self._write()  # also where the run ends within its first step
        self._due = -math.inf

    def show(self, step: int, groups: Callable[[], ShownGroups]) -> None:
        self._shown = step, groups

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._clock() >= self._due:
            self._write()
            return
        try:
            with self.path.open("r+", encoding="utf-8") as file:  # not "a", which would make a page without a head
                file.seek(0, os.SEEK_END)
                file.write(appended_step(step, metrics))
        except OSError as error:  # a part of the line may be there: the next step writes the whole page
            self._report_failure(error)

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        begin = self._clock()
        try:
            if self._shown is not None:
                step, groups = self._shown
                self.samples.add(step, groups())
                self._shown = None
            self.run.update()
            write_file(self.path, render_report([self.run], is_live=True))
            end = self._clock()
            self._due = end + (end - begin) / SHARE
        except Exception as error:  # noqa: BLE001 - a page is no reason to end a run: a full disk, a user's tokenizer
            self._report_failure(error)

    def _report_failure(self, error: Exception) -> None:
        self._due = -math.inf
        if not self._has_failed:
            logger.warning(f"cannot write {self.path}: {type(error).__name__}: {error}")
        self._has_failed = True
