"""Colocation: policy and engine share a device. Hands its memory from one to the other, syncs and checks the weights.

A run that draws nothing has a `PolicyAlone` instead: no engine, so nothing to hand over and nothing to sync.

Entering `rollout()`:
  1. The optimizer states and gradients are offloaded (`actor.megatron.offload_optimizer`).
  2. The engine's weights wake up, and the policy's weights are streamed into them.
  3. Attestation: the digests of the engine's own memory must be those of the policy's weights, or the run stops.
  4. The engine's KV cache wakes up, after the stream's buckets are freed.
  5. A probe: engine and policy must compute the same log-probabilities of fixed tokens, or the run stops.
On leaving, the engine sleeps, then the optimizer is onloaded. The engine also sleeps from its construction to the first
rollout. Before policy or engine takes more memory, torch's cached but unused memory is released, because the engine's
memory comes from another pool. On CPU sleeping frees nothing, but the same calls are made in the same order. Not run on
a GPU yet.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from grpo_megatron.models.policy import Policy
from grpo_megatron.models.weights.resharding import Resharding
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.mesh import Mesh, RankError
from grpo_megatron.rollout.engine import RolloutEngine
from grpo_megatron.sync.digest import Expected, compare
from grpo_megatron.training.probe import Probe, logprobs_problem, weights_problem
from grpo_megatron.training.provenance import Provenance
from grpo_megatron.types import Batch, WeightBucket


class WeightSource(Protocol):
    """A model whose weights the engine can hold: the policy or the reference."""

    def engine_weights(self, resharding: Resharding, version: int) -> Iterator[WeightBucket]: ...

    def expected_digests(self, resharding: Resharding) -> Expected: ...

    def logprobs(self, batch: Batch, temperature: float | None = None) -> Tensor: ...


class PolicyAlone:
    """The policy of a run that draws nothing: supervised training from files, validated by its loss."""

    engine: RolloutEngine | None = None

    def __init__(self, provenance: Provenance) -> None:
        self.provenance = provenance

    @contextlib.contextmanager
    def rollout(self, version: int, metrics: Metrics) -> Iterator[None]:
        """As for a Colocation. Nothing may be drawn inside."""
        yield

    def sync_weights_from(self, source: WeightSource, version: int, metrics: Metrics) -> None:
        """As for a Colocation."""
        raise AssertionError("this run draws nothing, so it has no engine that could hold weights")

    def close(self) -> None:
        """Release the engine. Collective."""


class Colocation(PolicyAlone):
    engine: RolloutEngine

    def __init__(
        self,
        policy: Policy,
        engine: RolloutEngine,
        mesh: Mesh,
        resharding: Resharding,
        *,
        probe: Probe,
        provenance: Provenance,
    ) -> None:
        super().__init__(provenance)
        self.policy, self.engine, self.mesh = policy, engine, mesh
        self.resharding, self.probe = resharding, probe
        self.weights_digest = ""  # of the weights that the engine holds
        self._is_attested = False  # the last sync
        self._has_synced = False  # since this process was started
        engine.sleep()

    @contextlib.contextmanager
    def rollout(self, version: int, metrics: Metrics) -> Iterator[None]:
        """Inside, the engine holds the policy's current weights as `version` and may generate. Collective.

        Raises RankError on every rank when the weights are not finite, the sync is incomplete on any rank, any rank of an
        engine does not hold its part of the weights, or the probe disagrees.
        """
        with metrics.phase("update_weights"):
            self.policy.offload()
            self.policy.device.empty_cache()
            self.engine.wake_weights()
        self._sync("policy", self.policy, version, metrics)
        with metrics.phase("update_weights"):
            self.policy.device.empty_cache()
            self.engine.wake_kv_cache()
        self._probe("policy", self.policy, metrics)
        self.resharding.accept(self.weights_digest)
        yield
        self.engine.sleep()
        self.policy.device.empty_cache()
        self.policy.onload()

    def sync_weights_from(self, source: WeightSource, version: int, metrics: Metrics) -> None:
        """Stream another model into the awake engine, which holds it until `rollout` is entered again. Collective."""
        self._sync("reference", source, version, metrics)
        self._probe("reference", source, metrics)

    def close(self) -> None:
        """See PolicyAlone."""
        self.engine.shutdown()

    def _sync(self, name: str, source: WeightSource, version: int, metrics: Metrics) -> None:
        """Collective. Raises RankError."""
        self.weights_digest = ""
        with metrics.phase("attest"):
            expected = source.expected_digests(self.resharding)
            if problem := weights_problem(name, version, expected.non_finite, is_first=not self._has_synced):
                raise RankError(problem)  # on every rank: `expected` is the same on all
        with metrics.phase("update_weights"):
            self.engine.load_weights(source.engine_weights(self.resharding, version), version)
        metrics.max("sync/bytes_received", self.resharding.bytes_received)
        if self.resharding.density is not None:
            metrics.max("sync/density", self.resharding.density)
        with metrics.phase("attest"):
            self.mesh.agree(self._attest(expected))
        self.weights_digest, self._has_synced = expected.weights_digest, True
        self.provenance.record(version, expected.weights_digest)

    def _attest(self, expected: Expected) -> str | None:
        """What this rank's engine holds wrongly."""
        try:
            held = self.engine.digests()
        except Exception as error:  # of any engine: the other ranks wait for this rank
            return f"the engine cannot read its own weights ({type(error).__name__}: {error})"
        self._is_attested = held is not None
        if held is None:
            return None
        return compare(expected, held, self.resharding.tensors, self.mesh.rank % self.mesh.rollout_tp, self.mesh.rank)

    def _probe(self, name: str, source: WeightSource, metrics: Metrics) -> None:
        """Compare the engine with `source` on fixed tokens at temperature 1. Collective. Raises RankError."""
        with metrics.phase("probe"):
            expected = source.logprobs(self.probe.batch, temperature=1.0)
            self.mesh.agree(logprobs_problem(name, expected))
            measured = torch.tensor(self.engine.logprobs([tokens.tolist() for tokens in self.probe.batch.tokens]))
            difference = (measured - expected).abs()
            metrics.max("rollout/probe_logp_diff_mean", difference.mean().item())
            metrics.max("rollout/probe_logp_diff_max", difference.max().item())
            self.mesh.agree(self.probe.problem(name, difference, is_attested=self._is_attested))
