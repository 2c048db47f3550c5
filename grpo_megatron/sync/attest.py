"""Proof of what the engine has after a sync: digests of its memory, a probe of what it computes, and the origin of samples.

EngineWeights loads, attests and probes. Probe compares log-probabilities, which finds an engine that computes something else.
Provenance refuses to train on samples of other weights than those of their step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_megatron.parallel.mesh import Mesh, RankError
from grpo_megatron.sync.digest import Expected, compare
from grpo_megatron.sync.weight_sync import WeightSync
from grpo_megatron.types import Batch, PromptImage, Sample, WeightBucket

# The measure is the mean |difference| over about 500 tokens. Two correct engines differ by rounding: 1e-6 in float32; 0.002
# to 0.012 in bfloat16 for models of 4 to 12 layers (measured on CPU). It depends on model and layout, so the bound is relative:
#
#     bound = factor * max(FLOOR, the largest of the last healthy probes of this run and model)
#
# The factor is larger where an attestation has proven the weights: only an engine that computes something else is left to find,
# and a false alarm would end a healthy run.
#
# Measured in bfloat16, 4 to 12 layers: healthy probes of neighbouring steps vary by a factor of 1.3, with experts by 2. One
# wrong norm or value bias gives 2.9 to 35 times the healthy value, one wrong expert of 8 gives 2.7 to 6 times.
# Below rounding, and left to the attestation (digest.py): one wrong query or key bias, one expert of 64, and stale tensors.
#
# FP8 on either side: e4m3 rounds a number by up to 2^-4 of it, 0.026 on average (root mean square), and so does each product of
# two such tensors by 0.037, whatever its length. Emulated in random models of 4 to 80 layers (scales of 1 x 128 and 128 x 128,
# logits of standard deviation 2 to 4), healthy probes are 0.14 to 0.91, seven to ten times bfloat16's. A wrong RoPE gives 0.5
# to 3, so that the first bound finds another model only; later ones are relative again.
NUM_SEQUENCES, LENGTH = 8, 64
NUM_HEALTHY = 8  # probes that are remembered
FACTOR, FACTOR_ATTESTED = 2.5, 5.0
FLOOR = {"float32": 1e-5, "bfloat16": 0.002, "fp8": 0.02}
FIRST = {"float32": 1e-4, "bfloat16": 0.03, "fp8": 1.0}  # bound of a first probe
FIRST_ATTESTED = {**FIRST, "bfloat16": 0.1}  # the same where the weights are known to be equal


class Probe:
    """Fixed tokens for which engine and policy must compute the same log-probabilities after a sync.

    It misses a stale tensor: a step changes a tensor by less than rounding shows. The attestation names such tensors.
    `tolerance`: a fixed bound instead of the relative one, or None. `dtype`: of the models, or fp8. `image_side`: pixels along a
    side of an image token, for models that read images.
    """

    def __init__(
        self, vocab_size: int, max_length: int, *, dtype: str, tolerance: float | None, image_side: int | None = None
    ) -> None:
        self.batch = fixed_tokens(vocab_size, min(LENGTH, max_length - 1), image_side)
        self.dtype, self.tolerance = dtype, tolerance
        self._healthy: dict[str, deque[float]] = {}  # model -> means of its last healthy probes

    def forget(self) -> None:
        """Forget the healthy probes: the next model is not the last one, a step later."""
        self._healthy.clear()

    def problem(self, model: str, difference: Tensor, *, is_attested: bool) -> str | None:
        """Says why the differences of the batch's log-probabilities are too large, if they are. Remembers a healthy probe."""
        mean, factor, origin = difference.abs().mean().item(), FACTOR_ATTESTED if is_attested else FACTOR, ""
        if self.tolerance is not None:
            bound, origin = self.tolerance, "rollout.probe_tolerance=" if self.tolerance else "model.exact's "
        elif model in self._healthy:
            bound = factor * max(FLOOR[self.dtype], *self._healthy[model])
            origin = f"{factor:g} times that of healthy probes of this run: "
        else:
            bound = (FIRST_ATTESTED if is_attested else FIRST)[self.dtype]
        if mean <= bound:  # false for NaN
            self._healthy.setdefault(model, deque(maxlen=NUM_HEALTHY)).append(mean)
            return None
        return (
            "after the weight sync the engine's log-probabilities of fixed tokens differ from those of the model that was"
            f" sent by {mean:.3g} on average (at most {difference.abs().max().item():.3g}), more than {origin}{bound:.3g}: "
            "the engine does not hold that model's weights"
        )


def fixed_tokens(vocab_size: int, length: int, image_side: int | None = None) -> Batch:
    """Make random but fixed tokens: the first of each sequence is the prompt, the others get log-probabilities.

    With `image_side`, the first sequence has an image of two tokens, if there is room.
    """
    images: list[tuple[PromptImage, ...]] = []
    if image_side is not None and length > 3:
        pixels = bytes(torch.arange(6 * image_side**2).mul(97).remainder(251).tolist())
        images = [(PromptImage("probe", (1, 2), 1, pixels),), *[()] * (NUM_SEQUENCES - 1)]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (NUM_SEQUENCES, length), generator=generator)
    shape = (NUM_SEQUENCES, length - 1)
    zeros, ones = torch.zeros(shape), torch.ones(shape, dtype=torch.bool)
    return Batch(
        tokens=list(tokens),
        prompt_lengths=[1] * NUM_SEQUENCES,
        response_mask=ones,
        loss_mask=ones,
        rollout_logprobs=zeros,
        advantages=zeros,
        token_weights=zeros,
        mini_batches=[[list(range(NUM_SEQUENCES))]],
        images=images,
    )


class Provenance:
    """The digest of the weights of each step's last sync, for as many steps as a sample may be old."""

    def __init__(self, mesh: Mesh, max_staleness: int) -> None:
        self.mesh, self.max_staleness = mesh, max_staleness
        self._digests: dict[int, str] = {}
        self.complete: Mapping[str, int] = {}  # digests of the tensors of the last sync
        self._keeps_until = 0

    def record(self, version: int, expected: Expected) -> None:
        """Note that the engine has weights with these digests as `version`."""
        self.complete = expected.complete
        self._digests[version] = expected.weights_digest
        if version >= self._keeps_until:
            self._digests = {v: d for v, d in self._digests.items() if v >= version - self.max_staleness}

    def check(self, step: int, samples: Sequence[Sample]) -> None:
        """Check that the weights of each sample are those that were synced for its version. Collective. Raises RankError.

        A digest is "" where it is not known: the checkpoint that the run resumed from had none.
        """
        wrong = []
        for sample in samples:
            draws = [(draw.version, draw.weights_digest) for draw in sample.segments]
            for version, digest in draws or [(sample.version, sample.weights_digest)]:
                if digest != self._digests.get(version, ""):
                    wrong.append((sample, version, digest))
                    break
        problem = None
        if wrong:
            first, version, digest = wrong[0]
            problem = (
                f"step {step} cannot train on {len(wrong)} of {len(samples)} samples: prompt {first.prompt.uid!r}, sample "
                f"{first.index} was sampled by weights with digest {digest or 'unknown'}, but the sync of step {version} sent"
                f" weights with digest {self._digests.get(version) or 'unknown'}; resume from the last checkpoint"
            )
        self.mesh.agree(problem)

    def state(self) -> dict[str, Any]:
        """Return plain JSON, whose keys are text."""
        return {str(version): digest for version, digest in self._digests.items()}

    def load_state(self, state: dict[str, Any], first_step: int) -> None:
        """Restore. Samples of steps before `first_step`, generated with the checkpoint's lag, may be older than this run's."""
        self._keeps_until = first_step + self.max_staleness
        self._digests = {int(version): digest for version, digest in state.items()}


class EngineWeights:
    """An engine's weights: loaded, attested and probed. All methods are collective, and raise RankError.

    `engine` is a RolloutEngine, and every `metrics` a Metrics; their rooms stand below this one.
    """

    def __init__(self, engine: Any, mesh: Mesh, weight_sync: WeightSync, probe: Probe) -> None:
        self.engine, self.mesh, self.weight_sync, self.probe = engine, mesh, weight_sync, probe
        self.weights_digest = ""  # of the weights in the engine
        self._is_attested = False  # the last sync

    def load(self, weights: Iterator[WeightBucket], version: int, expected: Expected, metrics: Any) -> None:
        """Load `weights` as `version`. Afterwards their digests in the engine are `expected`."""
        self.weights_digest = ""
        with metrics.phase("update_weights"):
            self.engine.load_weights(weights, version)
        metrics.max("sync/bytes_received", self.weight_sync.bytes_received)
        if self.weight_sync.header.density is not None:
            metrics.max("sync/density", self.weight_sync.header.density)
        with metrics.phase("attest"):
            self.mesh.agree(self._attest(expected))
        self.weights_digest = expected.weights_digest

    def _attest(self, expected: Expected) -> str | None:
        """Says which of this rank's weights in the engine are wrong, if any."""
        try:
            digests = self.engine.digests()
        except Exception as error:  # of any engine: the other ranks wait for this rank
            return f"the engine cannot read its own weights ({type(error).__name__}: {error})"
        self._is_attested = digests is not None
        if digests is None:
            return None
        return compare(
            expected, digests, self.weight_sync.tensors, self.mesh.rank % self.mesh.rollout_tp, self.mesh.rank
        )

    def measure(self, model: str, expected: Tensor, metrics: Any) -> None:
        """Compare the engine's log-probabilities of the probe's tokens with `expected`, those of the model named `model`.

        If they are close enough, the next sync may build on this one.
        """
        batch = self.probe.batch
        images = {"images": batch.images} if batch.images else {}  # an engine for text has no such argument
        measured = torch.tensor(self.engine.logprobs([tokens.tolist() for tokens in batch.tokens], **images))
        difference = (measured - expected).abs()
        metrics.max("rollout/probe_logp_diff_mean", difference.mean().item())
        metrics.max("rollout/probe_logp_diff_max", difference.max().item())
        self.mesh.agree(self.probe.problem(model, difference, is_attested=self._is_attested))
        self.weight_sync.accept(self.weights_digest)


class SentModel(Protocol):
    """A model that a sync sends: the policy or a reference."""

    def expected_digests(self, weight_sync: WeightSync) -> Expected: ...

    def logprobs(self, batch: Batch, temperature: float | None = None) -> Tensor: ...


def finite_digests(name: str, model: SentModel, weight_sync: WeightSync, version: int, *, is_first: bool) -> Expected:
    """Compute the digests of the model's weights, on every rank. Collective. Raises RankError if any is not finite."""
    expected = model.expected_digests(weight_sync)
    if problem := weights_problem(name, version, expected.non_finite, is_first=is_first):
        raise RankError(problem)  # on every rank: `expected` is the same on all
    return expected


def probe_logprobs(name: str, model: SentModel, probe: Probe, mesh: Mesh) -> Tensor:
    """Compute the model's log-probabilities of the probe's tokens. Collective. Raises RankError if any is not finite."""
    logprobs = model.logprobs(probe.batch, temperature=1.0)
    mesh.agree(logprobs_problem(name, logprobs))
    return logprobs


def weights_problem(model: str, step: int, non_finite: Sequence[str], *, is_first: bool) -> str | None:
    """Why the weights of a model cannot be sent: they are wrong themselves. `is_first`: no update was made before."""
    if not non_finite:
        return None
    others = f" (and {len(non_finite) - 1} more)" if len(non_finite) > 1 else ""
    origin = "they were loaded so; check the model's folder or the checkpoint"
    if not is_first:
        origin = (
            f"the update of step {step - 1} was too large; resume from the last checkpoint with a lower actor.optim.lr or"
            " actor.optim.clip_grad"
        )
    return f"step {step}: the {model}'s own weights are not finite: {non_finite[0]}{others}. No sync was made: {origin}"


def logprobs_problem(model: str, logprobs: Tensor) -> str | None:
    """Why log-probabilities of the trained model, whose weights are finite, cannot be compared with those of the engine."""
    wrong = int((~logprobs.isfinite()).sum())
    if not wrong:
        return None
    return (
        f"the {model}'s own log-probabilities are not finite for {wrong} of {logprobs.numel()} fixed tokens, although its"
        " weights are: they are too large to be computed with, or config.json describes another model; lower"
        " actor.optim.lr, or check config.json (the engine has not been asked yet)"
    )
