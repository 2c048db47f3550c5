"""Two roles, one clock: the ranks that sample, as the ranks that train see them (`rollout.placement: separate`).

    training      W0       S0 update W1 S1 update W2 S2 update ...    W: weights, S: samples, which cross the bridge
    rollout, L=0  W0 gen 0 S0        W1 ...                           the colocated run, bit for bit
    rollout, L=1  W0 gen 0 S0 gen 1  W1 S1 gen 2 W2 S2 gen 3 ...      both roles work all the time

Which weights sample a token follows from the step and the lag L (`Clock`), never from the time, so that delays change no bit.
rollout_rank.py is the program of the other role; docs/design.md has the rest. Not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import Config
from grpo_megatron.models.policy import Policy
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.sampling.collector import Clock, Collector, Group, State, pack_groups, unpack_groups
from grpo_megatron.sync.attest import Provenance, finite_digests, probe_logprobs
from grpo_megatron.sync.digest import Expected
from grpo_megatron.sync.weight_sync import SyncHeader
from grpo_megatron.training.beside import References
from grpo_megatron.training.colocation import build_probe, build_weight_sync
from grpo_megatron.training.stopping import Cadence
from grpo_megatron.types import Segment

# -- What rank 0 of the training sends to the first rank that samples, which shares it with the others -------------------


@dataclass(frozen=True)
class Begin:
    """The first message. `state`: of the collector. `stage_of`: as in `stage_owners`."""

    clock: Clock
    state: State
    stage_of: Mapping[str, int]


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
    before, and the results.
    """

    versions: list[int] | None
    numbers: dict[str, float]  # metrics of the rollout ranks
    epoch: float
    validation: tuple[int, dict[str, float]] | None


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
        ahead = [{**vars(drawn), "groups": pack_groups(groups, self.mesh)} for drawn, groups in self._arrived]
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
        self._due = 0  # arrivals that need no more weights than have been sent
        self._has_sent = False

    def build_collector(self, checked: Checked, references: References | None, has_steps_ahead: bool) -> Collector:
        return self

    def build_validation(self, checked: Checked) -> RolloutRanks:
        return self

    def begin(self, first_step: int, num_steps: int) -> None:
        """Start the ranks that sample. Call it once, after `load_state`."""
        self.clock = Clock(self.lag, first_step, first_step + len(self._arrived), num_steps)
        self._send(Begin(self.clock, self._state, self.policy.stage_of))

    # -- weights -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def rollout(self, version: int, metrics: Metrics) -> Iterator[None]:
        """On entry the current weights set out as `version`, if they sample or are validated. Collective. Raises RankError."""
        steps = self.clock.steps(version)
        if steps or is_validated(version, self.clock, self.cadence):
            self._send_weights(version, metrics)
            self._due += len(steps) or 1
        yield

    def _send_weights(self, version: int, metrics: Metrics) -> None:
        policy, is_first = self.policy, not self._has_sent
        with metrics.phase("send_weights"):
            expected = finite_digests("policy", policy, self.weight_sync, version, is_first=is_first)
            logprobs = probe_logprobs("policy", policy, self.probe, self.mesh)
        if self.weight_sync.is_direct:  # the rollout ranks load them at once when they have nothing else to do
            self._wait(metrics, self._due)
        self.weight_sync.announce = lambda header: self._send(NewWeights(header, expected, logprobs))
        with metrics.phase("send_weights"):
            deque(policy.engine_weights(self.weight_sync, version), maxlen=0)
        self.weight_sync.accept(expected.weights_digest)  # the rollout ranks stop the run where they do not
        self._has_sent = True
        self.provenance.record(version, expected)

    # -- samples -------------------------------------------------------------------------------------------------------

    def validations(self, step: int, metrics: Metrics) -> list[tuple[int, dict[str, float]]]:
        """Wait for the results that are due. Collective."""
        self._wait(metrics, self._due if step == self.clock.num_steps - 1 else not self._arrived)
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
        self._wait(metrics, self._due)
        return self._validated[version]

    def state(self) -> State:
        """Waits for the steps ahead, which need no weights that have not been sent."""
        while self._due:
            self._receive()
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
        """Returns the next value of the first rank that samples, on every rank. Collective."""
        return self.mesh.broadcast(self.bridge.receive(self.bridge.num_training) if self.mesh.rank == 0 else None)

    def _wait(self, metrics: Metrics, count: int) -> None:
        if count:
            with metrics.phase("wait_samples"):
                for _ in range(count):
                    self._receive()

    def _receive(self) -> None:
        drawn: SampledStep = self._answer()
        self._due -= 1
        if drawn.versions is None:
            assert drawn.validation is not None
            self._validated |= [drawn.validation]
            return
        groups = [Group(version, []) for version in drawn.versions]
        num_replicas = self.bridge.num_rollout_ranks // self.rollout_tp if groups else 0
        for replica in range(self.mesh.rank, num_replicas, self.mesh.world_size):
            part: list[Group] = self.bridge.receive(self.bridge.num_training + replica * self.rollout_tp)
            for group, own in zip(groups, part, strict=True):
                group.samples.extend(own.samples)
        self._arrived.append((drawn, groups))


def _record_staleness(groups: list[Group], step: int, metrics: Metrics) -> None:
    """Record how many steps older the weights were that drew the tokens of a step."""
    for sample in (sample for group in groups for sample in group.samples):
        whole = Segment(0, len(sample.response_ids), sample.version, "")
        for draw in sample.segments or [whole]:
            count = draw.end - draw.start
            metrics.mean("rollout/staleness_mean", (step - draw.version) * count, count)  # over tokens
            metrics.max("rollout/staleness_max", step - draw.version)
