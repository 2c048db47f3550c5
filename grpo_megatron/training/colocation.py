"""Colocation: policy and engine share a device. Hands its memory from one to the other, syncs and checks the weights.

Entering `rollout()`:
  1. The optimizer states and gradients are offloaded (`actor.megatron.offload_optimizer`).
  2. The engine's weights wake up, and the policy's weights are streamed into them.
  3. The engine's KV cache wakes up, after the stream's buckets are freed.
  4. A probe: engine and policy must compute the same log-probabilities of fixed tokens, or the run stops.
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
from grpo_megatron.models.resharding import Resharding
from grpo_megatron.observability.metrics import Metrics
from grpo_megatron.parallel.mesh import Mesh
from grpo_megatron.rollout.engine import RolloutEngine
from grpo_megatron.types import Batch, WeightBucket

# Upper bounds on the probe's mean |difference|. A healthy engine shows about 1e-6 in float32, 0.01 to 0.02 in bfloat16
# on text; stale or half-synced weights show 0.2 and more.
DEFAULT_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
PROBE_SEQUENCES, PROBE_LENGTH = 2, 32


class WeightSource(Protocol):
    """A model whose weights the engine can hold: the policy or the reference."""

    def engine_weights(self, resharding: Resharding, version: int) -> Iterator[WeightBucket]: ...

    def logprobs(self, batch: Batch, temperature: float | None = None) -> Tensor: ...


class Colocation:
    def __init__(
        self,
        policy: Policy,
        engine: RolloutEngine,
        mesh: Mesh,
        resharding: Resharding,
        *,
        tolerance: float,
        max_length: int,
    ) -> None:
        self.policy, self.engine, self.mesh = policy, engine, mesh
        self.resharding, self.tolerance = resharding, tolerance
        self.probe_batch = _probe_batch(policy.arch.vocab_size, min(PROBE_LENGTH, max_length - 1))
        engine.sleep()

    @contextlib.contextmanager
    def rollout(self, version: int, metrics: Metrics) -> Iterator[None]:
        """Inside, the engine holds the policy's current weights as `version` and may generate. Collective.

        Raises RankError on every rank when the sync is incomplete on any rank or the probe disagrees.
        """
        with metrics.phase("update_weights"):
            self.policy.offload()
            self.policy.device.empty_cache()
            self.engine.wake_weights()
            self.engine.load_weights(self.policy.engine_weights(self.resharding, version), version)
            self.policy.device.empty_cache()
            self.engine.wake_kv_cache()
        self._record(metrics)
        with metrics.phase("probe"):
            self.probe(metrics)
        self.resharding.accept()
        yield
        self.engine.sleep()
        self.policy.device.empty_cache()
        self.policy.onload()

    def sync_weights_from(self, source: WeightSource, version: int, metrics: Metrics) -> None:
        """Stream another model into the awake engine, which holds it until `rollout` is entered again. Collective."""
        with metrics.phase("update_weights"):
            self.engine.load_weights(source.engine_weights(self.resharding, version), version)
        self._record(metrics)
        with metrics.phase("probe"):
            self.probe(metrics, source)

    def _record(self, metrics: Metrics) -> None:
        metrics.max("sync/bytes_received", self.resharding.bytes_received)
        if self.resharding.density is not None:
            metrics.max("sync/density", self.resharding.density)

    def probe(self, metrics: Metrics, source: WeightSource | None = None) -> None:
        """Compare the engine with `source` (None: the policy) on fixed tokens at temperature 1. Collective.

        Raises RankError.
        """
        expected = (source or self.policy).logprobs(self.probe_batch, temperature=1.0)
        measured = torch.tensor(self.engine.logprobs([tokens.tolist() for tokens in self.probe_batch.tokens]))
        difference = (measured - expected).abs()
        mean, largest = difference.mean().item(), difference.max().item()
        metrics.max("rollout/probe_logp_diff_mean", mean)
        metrics.max("rollout/probe_logp_diff_max", largest)
        problem = None
        if not mean <= self.tolerance:  # also true for NaN
            problem = (
                "after the weight sync the engine's log-probabilities of fixed tokens differ from those of the model that was"
                f" sent by {mean:.3g} on average (at most {largest:.3g}), more than rollout.probe_tolerance={self.tolerance:g}: "
                "the engine does not hold that model's weights"
            )
        self.mesh.agree(problem)


def _probe_batch(vocab_size: int, length: int) -> Batch:
    """Random but fixed tokens: the first of each sequence is the prompt, the others get log-probabilities."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (PROBE_SEQUENCES, length), generator=generator)
    shape = (PROBE_SEQUENCES, length - 1)
    zeros = torch.zeros(shape)
    return Batch(
        tokens=list(tokens),
        prompt_lengths=[1] * PROBE_SEQUENCES,
        response_mask=torch.ones(shape, dtype=torch.bool),
        loss_mask=torch.ones(shape, dtype=torch.bool),
        rollout_logprobs=zeros,
        advantages=zeros,
        token_weights=zeros,
        mini_batches=[[list(range(PROBE_SEQUENCES))]],
    )
