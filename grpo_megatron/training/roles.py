"""Two roles, one clock: the ranks that sample, as the ranks that train see them (`rollout.placement: separate`).

    training      W0       S0 update W1 S1 update W2 S2 update ...    W: weights, S: samples, which cross the bridge
    rollout, L=0  W0 gen 0 S0        W1 ...                           the colocated run, bit for bit
    rollout, L=1  W0 gen 0 S0 gen 1  W1 S1 gen 2 W2 S2 gen 3 ...      both roles work all the time

Which weights sample a token follows from the step and the lag L (`Clock`), never from the time, so that delays change no bit.
rollout_rank.py is the program of the other role; docs/design.md has the rest. Not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import Config
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.weights.stream import sent_parameters
from grpo_megatron.parallel.mesh import LostRank, Mesh
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.sampling.collector import Clock, Collector, Group, State, pack_groups, unpack_groups
from grpo_megatron.storage.run_files import add_event
from grpo_megatron.sync.attest import Provenance, finite_digests, probe_logprobs
from grpo_megatron.sync.digest import Expected
from grpo_megatron.sync.weight_sync import SyncHeader
from grpo_megatron.training.beside import References
from grpo_megatron.training.colocation import build_probe, build_weight_sync
from grpo_megatron.training.stopping import Cadence, read_restart
from grpo_megatron.types import Segment

# -- What rank 0 of the training sends to the first rank that samples, which shares it with the others -------------------


@dataclass(frozen=True)
class Begin:
    """The first message. `state`: of the collector; `heals`: it comes back with each step. `stage_of`: as in `stage_owners`."""

    clock: Clock
    state: State
    stage_of: Mapping[str, int]
    heals: bool = False


@dataclass(frozen=True)
class NewWeights:
    """The weights of `header.version` are on their way. `logprobs`: of the probe's tokens."""

    header: SyncHeader
    expected: Expected
    logprobs: Tensor


class StateWanted:
    """A checkpoint is saved: answer with the collector's state."""


@dataclass(frozen=True)
class End:
    """The run is over; the process ends with this exit code."""

    exit_code: int


# -- What comes back ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampledStep:
    """The numbers of a step, whose samples are sent separately.

    `versions`: of the groups (Group.version); None: a validation alone. `validation`: the version that was validated just
    before, and the results. `state`: of the collector afterwards, where the run heals.
    """

    versions: list[int] | None
    numbers: dict[str, float]  # metrics of the rollout ranks
    epoch: float
    validation: tuple[int, dict[str, float]] | None
    state: State | None = None


def is_validated(version: int, clock: Clock, cadence: Cadence | None) -> bool:
    """Returns whether a version is validated, before it samples.

    The last `lag` ones sample nothing, and only they may be in vain.
    """
    if cadence is None:
        return False
    if version == clock.num_steps:
        return cadence.validates_at_end()
    draws, is_last = bool(clock.steps(version)), version + clock.lag >= clock.num_steps
    return (draws or is_last) and cadence.validates_before(version)


class StepsAhead(Collector):
    """The collector of the steps that a checkpoint has, sampled ahead of their training; `inner` samples the others."""

    def __init__(self, inner: Collector, mesh: Mesh) -> None:
        self.inner, self.mesh = inner, mesh
        self._arrived: deque[tuple[SampledStep, list[Group]]] = (
            deque()
        )  # not trained on yet, with the samples for this rank
        self._validated: dict[int, dict[str, float]] = {}  # results of versions that have sampled nothing
        self._state: State = {}  # that the collector begins with
        self._epoch = 0.0

    def validations(self, step: int, metrics: Metrics) -> list[tuple[int, dict[str, float]]]:
        """Results that came before the samples of `step`; before the last step that was sampled so far, all."""
        before = self._arrived[0][0].validation if self._arrived else None
        validated = sorted(self._validated.items()) if len(self._arrived) == 1 else []
        return validated if before is None else [before, *validated]

    def groups(self, step: int, count: int, metrics: Metrics) -> list[Group]:
        if not self._arrived:
            groups, self._epoch = self.inner.groups(step, count, metrics), self.inner.epoch()
            return groups
        drawn, groups = self._arrived.popleft()
        self._epoch = drawn.epoch
        for name, value in drawn.numbers.items():
            if name.startswith("timing_s/"):
                metrics.seconds(name, value)
            elif name not in metrics:  # a colocated run has numbers of its own for this step's sync
                metrics.constant(name, value)
        return groups

    def epoch(self) -> float:
        return self._epoch

    def state(self) -> State:
        return self._with_ahead(self.inner.state())

    def _with_ahead(self, state: State) -> State:
        ahead = [
            {**vars(drawn), "state": None, "groups": pack_groups(groups, self.mesh)} for drawn, groups in self._arrived
        ]
        return {**state, "ahead": ahead, "validated": sorted(self._validated.items())} if ahead else state

    def load_state(self, state: State) -> None:
        self._state = {name: value for name, value in state.items() if name not in ("ahead", "validated")}
        self.inner.load_state(self._state)
        self._validated = dict(state.get("validated", ()))
        for packed in state.get("ahead", ()):
            drawn = {name: value for name, value in packed.items() if name != "groups"}
            if drawn["validation"] is not None:
                drawn["validation"] = tuple(drawn["validation"])  # a list in JSON
            self._arrived.append((SampledStep(**drawn), unpack_groups(packed["groups"], self.mesh)))


class RolloutRanks(StepsAhead):
    """The placement of samples on other ranks, and on every rank that trains the collector and the validation, too.

    It sends the policy's weights to the ranks that sample, and receives their samples and results.

    Weights are sent when the ranks that sample have nothing else to do, or from copies on the host while the next update and
    the current generation go on (sync/weight_sync.py). They are loaded between two steps, attested by digests and probed.
    Every token keeps its version and its log-probability mu: the rollout correction weighs it by pi_old / mu, the decoupled
    objective of AReaL (arXiv:2505.24298, equation 5). A checkpoint after s steps has the samples of the steps s to s + L - 1,
    and the state of the collector after them.
    """

    generator = None

    def __init__(self, config: Config, policy: Policy, cadence: Cadence | None) -> None:
        """`cadence`: of validations; None: there are none."""
        assert policy.mesh.bridge is not None
        super().__init__(Collector(), policy.mesh)
        self.cadence, self.policy, self.bridge = cadence, policy, policy.mesh.bridge
        self.is_on = cadence is not None
        self.lag, self.rollout_tp = config.rollout.lag, config.rollout.tensor_model_parallel_size
        self.weight_sync = build_weight_sync(config, policy.arch, policy.mesh, policy.device, policy.stage_of)
        self.probe, self.provenance = build_probe(config, policy.arch), Provenance(self.mesh, config.max_staleness)
        self.clock = Clock()
        self._due: dict[int, int] = {}  # version that has been sent -> answers that it owes
        self._has_sent = False
        # Where rollout ranks that are lost are replaced (cli/keeper.py):
        self.heals = self.bridge.replaces = config.replaces_rollout_ranks and bool(read_restart())
        self._config, self._next, self._validated_versions = config, 0, set[int]()  # _next: the step that arrives next
        self._kept: dict[int, list[Tensor]] = {}  # weights of the versions that owe answers, unless the policy has them

    def build_collector(self, checked: Checked, references: References | None, has_steps_ahead: bool) -> Collector:
        return self

    def build_validation(self, checked: Checked) -> RolloutRanks:
        return self

    def begin(self, first_step: int, num_steps: int) -> None:
        """Start the ranks that sample. Call it once, after `load_state`."""
        self.clock = Clock(self.lag, first_step, first_step + len(self._arrived), num_steps)
        self._next = self.clock.drawn
        self._send(Begin(self.clock, self._state, self.policy.stage_of, self.heals))

    # -- weights -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def rollout(self, version: int, metrics: Metrics) -> Iterator[None]:
        """On entry the current weights set out as `version`, if they sample or are validated. Collective. Raises RankError."""
        steps = self.clock.steps(version)
        if steps or is_validated(version, self.clock, self.cadence):
            with metrics.phase("send_weights"):
                attested = self._attested(version)
            if self.weight_sync.is_direct:  # the rollout ranks load them at once when they have nothing else to do
                self._wait(metrics, self._num_due)
            with metrics.phase("send_weights"):
                self._send_weights(version, *attested)
                if self.heals and self.lag:
                    self._kept[version] = self._copies()
            self._due[version] = len(steps) or 1
        yield

    @property
    def _num_due(self) -> int:
        return sum(self._due.values())

    def _attested(self, version: int) -> tuple[Expected, Tensor]:
        expected = finite_digests("policy", self.policy, self.weight_sync, version, is_first=not self._has_sent)
        return expected, probe_logprobs("policy", self.policy, self.probe, self.mesh)

    def _send_weights(self, version: int, expected: Expected, logprobs: Tensor) -> None:
        self.weight_sync.announce = lambda header: self._send(NewWeights(header, expected, logprobs))
        deque(self.policy.engine_weights(self.weight_sync, version), maxlen=0)
        self.weight_sync.accept(expected.weights_digest)  # the rollout ranks stop the run where they do not
        self._has_sent = True
        self.provenance.record(version, expected)

    # -- rollout ranks that are lost -----------------------------------------------------------------------------------

    def _replace(self) -> None:
        """Goes on with the rollout ranks that replace lost ones: they sample again what is due, with the same weights.

        Collective. Raises LostRank when none has come in trainer.timeout_s.
        """
        lost_at, is_first, folder = time.time(), self.mesh.rank == 0, self._config.trainer.output_dir
        lost = next(filter(None, self.mesh.all_gather(self.bridge.lost)), "")
        if is_first:
            self.bridge.lost = lost
            what = f"{lost}; the ranks that train wait for others"
            print(f"healing: {what}", flush=True)
            add_event(folder, "lost", self._next, what, who="rollout ranks", layout="unchanged")
        while True:
            newest = self.mesh.broadcast(self.bridge.successor() if is_first else 0)
            if all(self.mesh.all_gather(self._meets(newest))):
                break
        self.weight_sync = build_weight_sync(
            self._config, self.policy.arch, self.mesh, self.policy.device, self.policy.stage_of
        )
        self._send(Begin(replace(self.clock, drawn=self._next), self._state, self.policy.stage_of, self.heals))
        for version in sorted(self._due):
            with self._weights_of(version):
                self._send_weights(version, *self._attested(version))
        if is_first:
            seconds = round(time.time() - lost_at, 1)
            text = f"other rollout ranks sample step {self._next} again, {seconds} s after the loss was noticed"
            print(f"healing: {text}", flush=True)
            add_event(folder, "healed", self._next, text, seconds=[seconds])

    def _meets(self, incarnation: int) -> bool:
        try:
            self.bridge.rejoin(incarnation)
            self.bridge.meet()
        except LostRank:
            return False
        return True

    def _copies(self) -> list[Tensor]:
        return [parameter.detach().to("cpu", copy=True) for parameter in self._trained()]

    def _trained(self) -> list[Tensor]:
        parameters = sent_parameters(self.policy.model).values()
        return [*{id(one): one for one in parameters if one.requires_grad or not isinstance(one, Parameter)}.values()]

    @contextlib.contextmanager
    def _weights_of(self, version: int) -> Iterator[None]:
        """The policy has the weights of a version that owes answers, for the block."""
        if (kept := self._kept.get(version)) is None:
            yield
            return
        with self.policy.readable_weights(), torch.no_grad():
            now = self._copies()
            for parameter, value in zip(self._trained(), kept, strict=True):
                parameter.copy_(value)
            yield
            for parameter, value in zip(self._trained(), now, strict=True):
                parameter.copy_(value)

    # -- samples -------------------------------------------------------------------------------------------------------

    def validations(self, step: int, metrics: Metrics) -> list[tuple[int, dict[str, float]]]:
        """Wait for the results that are due. Collective."""
        self._wait(metrics, self._num_due if step == self.clock.num_steps - 1 else not self._arrived)
        return super().validations(step, metrics)

    def groups(self, step: int, count: int, metrics: Metrics) -> list[Group]:
        self._wait(metrics, not self._arrived)
        groups = super().groups(step, count, metrics)
        if self.clock.lag:
            _record_staleness(groups, step, metrics)
        return groups

    def before(self, step: int, metrics: Metrics) -> list[tuple[int, dict[str, float]]]:
        """See PromptValidation. The results arrive with samples: see `validations`."""
        return []

    def run(self, version: int, metrics: Metrics) -> dict[str, float]:
        """See PromptValidation. The results of the last version."""
        self._wait(metrics, self._num_due)
        return self._validated[version]

    def state(self) -> State:
        """Waits for the steps ahead, which need no weights that have not been sent."""
        for _ in range(self._num_due):
            self._receive()
        if self.heals:
            return self._with_ahead(self._state)
        self._send(StateWanted())
        return self._with_ahead(self._answer())

    def close(self, exit_code: int = 0) -> None:
        """Returns the rollout ranks end, too. Collective."""
        self._send(End(exit_code))
        self.bridge.close()

    # -- messages ------------------------------------------------------------------------------------------------------

    def _send(self, message: object) -> None:
        if self.mesh.rank == 0:
            self.bridge.send(message, to=self.bridge.num_training)
            self.bridge.flush(keep=2 * self.lag + 4)  # these may wait for the end of a step; the others have been read

    def _answer(self) -> Any:
        """Returns the next value of the first rank that samples, on every rank; None: it is lost, and replaced. Collective."""
        value = None
        with contextlib.suppress(*[LostRank] * self.heals):
            value = self.bridge.receive(self.bridge.num_training) if self.mesh.rank == 0 else None
        return self.mesh.broadcast(value)

    def _wait(self, metrics: Metrics, count: int) -> None:
        if count:
            with metrics.phase("wait_samples"):
                for _ in range(count):
                    self._receive()

    def _receive(self) -> None:
        """Take the next answer, of which one is due."""
        while (answer := self._whole_answer()) is None:
            self._replace()
        drawn, groups = answer
        version = self.clock.version(self._next) if drawn.validation is None or groups else drawn.validation[0]
        self._due[version] -= 1
        if not self._due[version]:
            del self._due[version]
            self._kept.pop(version, None)
        if drawn.validation is not None:  # ranks that replace others may repeat it
            is_known = drawn.validation[0] in self._validated_versions
            self._validated_versions.add(drawn.validation[0])
            drawn = replace(drawn, validation=None) if is_known else drawn
        if drawn.versions is None:
            self._validated |= [drawn.validation] if drawn.validation is not None else []
            return
        self._next, self._state = self._next + 1, self._state if drawn.state is None else drawn.state
        self._arrived.append((drawn, groups))

    def _whole_answer(self) -> tuple[SampledStep, list[Group]] | None:
        """Returns the next answer, with the samples for this rank. None, on every rank: the sender is lost, and replaced."""
        drawn: SampledStep | None = self._answer()
        if drawn is None:
            return None
        groups, is_lost = [Group(version, []) for version in drawn.versions or ()], False
        num_replicas = self.bridge.num_rollout_ranks // self.rollout_tp if groups else 0
        try:
            for replica in range(self.mesh.rank, num_replicas, self.mesh.world_size):
                part: list[Group] = self.bridge.receive(self.bridge.num_training + replica * self.rollout_tp)
                for group, own in zip(groups, part, strict=True):
                    group.samples.extend(own.samples)
        except LostRank:
            if not self.heals:
                raise
            is_lost = True
        return None if self.heals and any(self.mesh.all_gather(is_lost)) else (drawn, groups)


def _record_staleness(groups: list[Group], step: int, metrics: Metrics) -> None:
    """Record how many steps older the weights were that drew the tokens of a step."""
    for sample in (sample for group in groups for sample in group.samples):
        whole = Segment(0, len(sample.response_ids), sample.version, "")
        for draw in sample.segments or [whole]:
            count = draw.end - draw.start
            metrics.mean("rollout/staleness_mean", (step - draw.version) * count, count)  # over tokens
            metrics.max("rollout/staleness_max", step - draw.version)
