"""Guards: numbers that must be finite or within a band, checked before every optimizer step, with one decision for all ranks.

rewards                infinite rewards in the step's table                                     warn, skip, stop
logprobs               log-probabilities of the mini-batch's loss tokens, and its loss          warn, skip, stop
gradients              the gradient's norm                                                      skip, stop
route_agreement, ...   the bands of BANDS                                                       warn, skip, stop
weights                all weights, after the training step                                     warn, stop
"""

from __future__ import annotations

import contextlib
import logging
import math
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from grpo_megatron.algo.losses import MetricSum
from grpo_megatron.config import Band, Config
from grpo_megatron.parallel.mesh import Mesh, RankError
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.storage.run_files import add_event
from grpo_megatron.training.dump import Incident, write_dump
from grpo_megatron.types import Batch, GroupTable, rows_of_mini_batch

BANDS = ("route_agreement", "grad_norm", "entropy", "kl", "response_length", "rollout_gap")
ORDER = ("rewards", "logprobs", "gradients", *BANDS)  # causes come before their effects
CAUSES = {"route_agreement": ": the engine's routes are those of other tokens, layers or weights"}
LOSSES = ("actor/pg_loss", "actor/entropy_loss")  # the KL may be infinite where its coefficient is 0
logger = logging.getLogger(__name__)


class Detected(NamedTuple):
    """The findings of one rank in one mini-batch. Only their sum over all ranks decides."""

    gradients: float = 0.0  # ranks whose gradient is not finite
    logprobs: float = 0.0  # ranks whose log-probabilities or loss are not finite
    grad_norm: float = 0.0  # of the whole gradient: every rank adds an equal part
    num_agreeing: float = 0.0  # experts of the engine's routes that the routers would have chosen
    num_routes: float = 0.0  # experts of the engine's routes
    # the others: from one rank per replica
    entropy: float = 0.0  # nats, summed over the loss tokens
    num_tokens: float = 0.0
    kl: float = 0.0
    gap: float = 0.0  # |old - rollout log-probability|, summed over the loss tokens
    num_gap_tokens: float = 0.0


class GuardStop(RankError):
    """A guard with the action `stop` has fired. Raised on every rank at the same point."""


class Guards:
    """The guards of a run: call `begin` with every step's table, this object per optimizer step, then `record`; on every rank.

    `save_weights` writes the policy's weights as a Hugging Face folder, collectively. `phase(name)` is entered around a dump.

    Skipping changes nothing: weights, Adam's state and the schedule stay bit for bit. Every rank adds its findings to one
    small vector, whose sum decides; it replaces the sum that compares gradients for being finite, so a guard costs no
    further synchronisation. The flag of the weights travels with the metrics of the step, and a run that stops for it saves
    no checkpoint of them. `guards/NAME` counts the optimizer steps in which a guard fired. A mini-batch for which a guard
    fires is dumped (dump.py), at most `max_dumps` of them.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        save_weights: Callable[[Path], None],
        phase: Callable[[str], contextlib.AbstractContextManager[None]],
    ) -> None:
        self.config, self.guards, self.mesh, self.save_weights = config, config.guards, mesh, save_weights
        if config.model.exact:  # a difference is a fault, however small
            self.guards = self.guards.model_copy(update={"rollout_gap": Band(high=0.0, action="stop")})
        if config.actor.moe.route_replay != "engine":
            self.guards = self.guards.model_copy(update={"route_agreement": Band()})
        self.phase = phase
        self.counts: dict[str, int] = {}
        self.step = self.num_updates = self.num_dumps = 0
        self.num_infinite, self.mean_length = 0, 0.0
        self.dumped: set[str] = set()
        self.agreement = [0.0, 0.0]  # of the step: num_agreeing and num_routes of all ranks

    def begin(self, step: int, table: GroupTable) -> None:
        """Take the rewards and lengths of step `step`."""
        self.step, self.num_updates, self.dumped, self.agreement = step, 0, set(), [0.0, 0.0]
        self.num_infinite = sum(map(math.isinf, table.reward))
        self.mean_length = sum(table.response_length) / max(1, len(table))
        is_on = {name: name not in BANDS or self._band(name).is_on for name in ORDER}
        self.counts = {name: 0 for name in ORDER if is_on[name]}

    def __call__(
        self, batch: Batch, micro_batches: list[list[int]], sums: Mapping[str, MetricSum], norm: float
    ) -> bool:
        """Returns whether the optimizer step is made. Collective. Raises GuardStop. See `models.policy.Guard`."""
        own = self._findings(batch, rows_of_mini_batch(micro_batches), sums, norm)
        total = Detected(*self.mesh.total(own))
        problems = self._problems(total)
        self.agreement = [self.agreement[0] + total.num_agreeing, self.agreement[1] + total.num_routes]
        self.num_updates += 1
        if not problems:
            return True
        actions, lines = {name: self._action(name) for name in problems}, []
        for name, text in problems.items():
            self.counts[name] += 1
            where = self._ranks_with(bool(getattr(own, name))) if name in ("logprobs", "gradients") else ""
            lines.append(f"guards.{name}={actions[name]}: step {self.step}, update {self.num_updates}: {text}{where}")
        cause = next(iter(problems))
        if self.num_dumps < self.guards.max_dumps and cause not in self.dumped:  # one per step and guard
            self.dumped.add(cause)
            self.num_dumps += 1
            incident = Incident(self.step, self.num_updates, cause, problems, norm)
            lines.append(self._dump(incident, batch, micro_batches, sums))
        self._report("\n".join(lines), stops="stop" in actions.values())
        return "skip" not in actions.values()

    def record(self, metrics: Metrics, has_finite_weights: bool) -> None:
        """Add the counts of this step to its metrics. Call `check_weights` when they are reduced and written."""
        for name, count in self.counts.items():
            metrics.constant(f"guards/{name}", count)
        if self.agreement[1]:
            metrics.constant("actor/route_agreement", self.agreement[0] / self.agreement[1])
        metrics.max("guards/weights", float(not has_finite_weights))

    def check_weights(self, reduced: Mapping[str, float]) -> None:
        """Check the weights, from the reduced metrics of the step. Raises GuardStop on every rank."""
        if not reduced.get("guards/weights"):
            return
        self._report(
            f"guards.weights={self.guards.weights}: step {self.step} made weights that are not finite; lower"
            " actor.optim.lr, or start again from the last checkpoint, which is from before this step",
            stops=self.guards.weights == "stop",
        )

    def _report(self, text: str, stops: bool) -> None:
        if self.mesh.rank == 0:
            add_event(self.config.trainer.output_dir, "guard", self.step, text)
        if stops:
            raise GuardStop(text)
        if self.mesh.rank == 0:
            logger.warning(text)

    def _ranks_with(self, is_found: bool) -> str:
        """Says where it was found. Collective."""
        ranks = [rank for rank, found in enumerate(self.mesh.all_gather(is_found)) if found]
        return " on all ranks" if len(ranks) == self.mesh.world_size else f" on rank {', '.join(map(str, ranks))}"

    def _dump(
        self, incident: Incident, batch: Batch, micro_batches: list[list[int]], sums: Mapping[str, MetricSum]
    ) -> str:
        """Write the mini-batch. Returns a line for the message. Collective.

        A dump that cannot be written, for lack of space for instance, is no reason to end a run.
        """
        target = self.config.trainer.output_dir / "dumps" / f"step_{self.step:06d}_{incident.guard}"
        try:
            with self.phase("dump"):
                write_dump(target, incident, batch, micro_batches, sums, self.config, self.mesh, self.save_weights)
        except RankError as error:
            return f"  no dump: {error}"
        return f"  dumped; `python -m grpo_megatron replay {shlex.quote(str(target))}` computes its loss again"

    def _findings(self, batch: Batch, rows: list[int], sums: Mapping[str, MetricSum], norm: float) -> Detected:
        """Returns the findings of this rank. One rank of each replica adds what is summed over tokens."""
        mask = batch.loss_mask[rows]
        is_finite = all(math.isfinite(sums[name].total) for name in LOSSES if name in sums)
        given = () if batch.old_logprobs is None else (batch.old_logprobs, batch.rollout_logprobs)
        for tensor in (*given, batch.ref_logprobs):
            is_finite = is_finite and (tensor is None or bool(torch.isfinite(tensor[rows][mask]).all()))
        found = Detected(
            float(not math.isfinite(norm)),
            float(not is_finite),
            norm / self.mesh.world_size,
            *map(float, batch.route_counts),
        )
        if not self.mesh.is_replica_reporter:
            return found
        entropy, kl = sums.get("actor/entropy"), sums.get("actor/kl_loss")
        if entropy is not None and entropy.num_tokens is not None:
            found = found._replace(entropy=float(entropy.total), num_tokens=float(entropy.num_tokens))
        if kl is not None:
            found = found._replace(kl=float(kl.total))
        if batch.old_logprobs is not None and self.guards.rollout_gap.is_on:
            old, rollout = (tensor[rows][mask].double() for tensor in (batch.old_logprobs, batch.rollout_logprobs))
            found = found._replace(gap=float((old - rollout).abs().sum()), num_gap_tokens=float(old.numel()))
        return found

    def _problems(self, total: Detected) -> dict[str, str]:
        """Returns guard -> what it has found, in the order of ORDER. The same on every rank."""
        problems = {}
        if self.num_infinite:
            problems["rewards"] = f"{self.num_infinite} rewards of the step are infinite"
        if total.logprobs:
            problems["logprobs"] = "log-probabilities or the loss are not finite"
        if total.gradients:
            problems["gradients"] = "the gradient is not finite"
        values = {
            "route_agreement": total.num_agreeing / total.num_routes if total.num_routes else math.nan,
            "grad_norm": total.grad_norm,
            "entropy": total.entropy / max(1.0, total.num_tokens),
            "kl": total.kl,
            "response_length": self.mean_length,
            "rollout_gap": total.gap / max(1.0, total.num_gap_tokens),
        }
        for name, value in values.items():  # NaN is in no band and out of none: the guards above name it
            band = self._band(name)
            if band.low is not None and value < band.low:
                cause = CAUSES.get(name, "")
                problems[name] = f"{name} {value:.6g} is below guards.{name}.low={band.low:g}{cause}"
            elif band.high is not None and value > band.high:
                problems[name] = f"{name} {value:.6g} is above guards.{name}.high={band.high:g}"
        return problems

    def _band(self, name: str) -> Band:
        band: Band = getattr(self.guards, name)
        return band

    def _action(self, name: str) -> str:
        return self._band(name).action if name in BANDS else str(getattr(self.guards, name))
