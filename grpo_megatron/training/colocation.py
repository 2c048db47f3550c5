"""Colocation: policy and engine share a device. Hands its memory from one to the other, syncs and checks the weights.

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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import Config
from grpo_megatron.data.prompts import image_format
from grpo_megatron.device import Device, DeviceMemory
from grpo_megatron.exact.layers import exact_problem
from grpo_megatron.models.architecture import Architecture, Vision
from grpo_megatron.models.forward import LanguageModel
from grpo_megatron.models.heads.scalar import ScalarPolicy, response_tokens
from grpo_megatron.models.layers.spec import DTYPES
from grpo_megatron.models.lora.peft_folder import save_peft
from grpo_megatron.models.lora.sync import AdapterBridge, AdapterResharding
from grpo_megatron.models.policy import AdapterReference, Policy
from grpo_megatron.models.weights.hf_folder import Serving, save_hf
from grpo_megatron.models.weights.stream import BridgeResharding, DeltaBridge, Resharding, engine_tensors
from grpo_megatron.parallel.mesh import Mesh, RankError
from grpo_megatron.planning.traffic import grid_of
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.report.progress import awaited
from grpo_megatron.rollout.build import build_engine, find_engine
from grpo_megatron.rollout.engine import RolloutEngine
from grpo_megatron.sync.delta import DeltaLimits
from grpo_megatron.sync.digest import Expected, compare
from grpo_megatron.sync.plan import EngineTensors
from grpo_megatron.types import Batch, PromptImage, Sample, WeightBucket

# -- Probe -------------------------------------------------------------------------------------------------------------
# Probe: engine and policy must compute the same log-probabilities of fixed tokens after a sync.
#
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
# Below rounding, and left to the attestation (sync/digest.py): one wrong query or key bias, one expert of 64, and stale tensors.

NUM_SEQUENCES, LENGTH = 8, 64
NUM_HEALTHY = 8  # probes that are remembered
FACTOR, FACTOR_ATTESTED = 2.5, 5.0
FLOOR = {"float32": 1e-5, "bfloat16": 0.002}
FIRST = {"float32": 1e-4, "bfloat16": 0.03}  # bound of a first probe
FIRST_ATTESTED = {"float32": 1e-4, "bfloat16": 0.1}  # the same where the weights are known to be equal


class Probe:
    """Compares what engine and policy compute, not what they hold.

    It misses a stale tensor: a step changes a tensor by less than rounding shows. The attestation names such tensors.
    `tolerance`: a fixed bound instead of the relative one, or None. `dtype`: of the models.
    """

    def __init__(
        self, vocab_size: int, max_length: int, *, dtype: str, tolerance: float | None, vision: Vision | None = None
    ) -> None:
        self.batch = fixed_tokens(vocab_size, min(LENGTH, max_length - 1), vision)
        self.dtype, self.tolerance = dtype, tolerance
        self._healthy: dict[str, deque[float]] = {}  # model -> means of its last healthy probes

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


def fixed_tokens(vocab_size: int, length: int, vision: Vision | None = None) -> Batch:
    """Random but fixed tokens: the first of each sequence is the prompt, the others get log-probabilities.

    `vision`: of a model that reads images. The first sequence then has one of two tokens, if there is room.
    """
    images: list[tuple[PromptImage, ...]] = []
    if vision is not None and length > 3:
        pixels = bytes(torch.arange(6 * (vision.patch * vision.merge) ** 2).mul(97).remainder(251).tolist())
        images = [(PromptImage("probe", (1, 2), 1, pixels),), *[()] * (NUM_SEQUENCES - 1)]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (NUM_SEQUENCES, length), generator=generator)
    shape = (NUM_SEQUENCES, length - 1)
    zeros = torch.zeros(shape)
    return Batch(
        tokens=list(tokens),
        prompt_lengths=[1] * NUM_SEQUENCES,
        response_mask=torch.ones(shape, dtype=torch.bool),
        loss_mask=torch.ones(shape, dtype=torch.bool),
        rollout_logprobs=zeros,
        advantages=zeros,
        token_weights=zeros,
        mini_batches=[[list(range(NUM_SEQUENCES))]],
        images=images,
    )


# -- Provenance --------------------------------------------------------------------------------------------------------
# Provenance: which weights drew a sample. No step trains on samples of other weights than those it believes.


class Provenance:
    """The digest of the weights of each step's last sync, for as many steps as a sample may be old."""

    def __init__(self, mesh: Mesh, max_staleness: int) -> None:
        self.mesh, self.max_staleness = mesh, max_staleness
        self._digests: dict[int, str] = {}
        self._keeps_until = 0

    def record(self, version: int, digest: str) -> None:
        """The engine holds weights with this digest as `version`."""
        self._digests[version] = digest
        if version >= self._keeps_until:
            self._digests = {v: d for v, d in self._digests.items() if v >= version - self.max_staleness}

    def check(self, step: int, samples: Sequence[Sample]) -> None:
        """Each sample was drawn by the weights that were synced for its version. Collective. Raises RankError.

        A digest is "" where it is not known: the checkpoint that the run resumed from had none.
        """
        wrong = []
        for sample in samples:
            draws = [(draw.version, draw.weights_digest) for draw in sample.draws]
            for version, digest in draws or [(sample.version, sample.weights_digest)]:
                if digest != self._digests.get(version, ""):
                    wrong.append((sample, version, digest))
                    break
        problem = None
        if wrong:
            first, version, digest = wrong[0]
            problem = (
                f"step {step} cannot train on {len(wrong)} of {len(samples)} samples: prompt {first.prompt.uid!r}, sample "
                f"{first.index} was drawn by weights with digest {digest or 'unknown'}, but the sync of step {version} sent"
                f" weights with digest {self._digests.get(version) or 'unknown'}; resume from the last checkpoint"
            )
        self.mesh.agree(problem)

    def state(self) -> dict[str, Any]:
        """Plain JSON, whose keys are text."""
        return {str(version): digest for version, digest in self._digests.items()}

    def load_state(self, state: dict[str, Any], first_step: int) -> None:
        """Samples of the steps before `first_step`, drawn with the lag of the checkpoint, may be older than this run's."""
        self._keeps_until = first_step + self.max_staleness
        self._digests = {int(version): digest for version, digest in state.items()}


class HeldWeights:
    """The weights that an engine holds: loaded, attested and probed. All methods are collective, and raise RankError."""

    def __init__(self, engine: RolloutEngine, mesh: Mesh, resharding: Resharding, probe: Probe) -> None:
        self.engine, self.mesh, self.resharding, self.probe = engine, mesh, resharding, probe
        self.weights_digest = ""  # of the weights that the engine holds
        self._is_attested = False  # the last sync

    def load(self, weights: Iterator[WeightBucket], version: int, expected: Expected, metrics: Metrics) -> None:
        """Afterwards the engine holds `weights` as `version`, and their digests are `expected`."""
        self.weights_digest = ""
        with metrics.phase("update_weights"):
            self.engine.load_weights(weights, version)
        metrics.max("sync/bytes_received", self.resharding.bytes_received)
        if self.resharding.density is not None:
            metrics.max("sync/density", self.resharding.density)
        with metrics.phase("attest"):
            self.mesh.agree(self._attest(expected))
        self.resharding.attested()
        self.weights_digest = expected.weights_digest

    def _attest(self, expected: Expected) -> str | None:
        """Says what this rank's engine holds wrongly, if anything."""
        try:
            held = self.engine.digests()
        except Exception as error:  # of any engine: the other ranks wait for this rank
            return f"the engine cannot read its own weights ({type(error).__name__}: {error})"
        self._is_attested = held is not None
        if held is None:
            return None
        return compare(expected, held, self.resharding.tensors, self.mesh.rank % self.mesh.rollout_tp, self.mesh.rank)

    def measure(self, name: str, expected: Tensor, metrics: Metrics) -> None:
        """Compare the engine's log-probabilities of the probe's tokens with `expected`, those of the model `name`."""
        batch = self.probe.batch
        images = {"images": batch.images} if batch.images else {}  # an engine for text has no such argument
        measured = torch.tensor(self.engine.logprobs([tokens.tolist() for tokens in batch.tokens], **images))
        difference = (measured - expected).abs()
        metrics.max("rollout/probe_logp_diff_mean", difference.mean().item())
        metrics.max("rollout/probe_logp_diff_max", difference.max().item())
        self.mesh.agree(self.probe.problem(name, difference, is_attested=self._is_attested))


class Colocation(HeldWeights):
    """Shares the device between `policy` and `engine`, which sleeps from its construction to the first rollout."""

    def __init__(
        self,
        policy: Policy,
        engine: RolloutEngine,
        resharding: Resharding,
        *,
        probe: Probe,
        provenance: Provenance,
    ) -> None:
        super().__init__(engine, policy.mesh, resharding, probe)
        self.policy, self.provenance = policy, provenance
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

    def sync_weights_from(self, source: LanguageModel | AdapterReference, version: int, metrics: Metrics) -> None:
        """Stream another model into the awake engine, which holds it until `rollout` is entered again. Collective."""
        self._sync("reference", source, version, metrics)
        self._probe("reference", source, metrics)

    def _sync(self, name: str, source: LanguageModel | AdapterReference, version: int, metrics: Metrics) -> None:
        """Collective. Raises RankError."""
        self.weights_digest = ""
        with metrics.phase("attest"):
            expected = finite_digests(name, source, self.resharding, version, is_first=not self._has_synced)
        self.load(source.engine_weights(self.resharding, version), version, expected, metrics)
        self._has_synced = True
        self.provenance.record(version, expected.weights_digest)

    def _probe(self, name: str, source: LanguageModel | AdapterReference, metrics: Metrics) -> None:
        """Compare the engine with `source` on fixed tokens at temperature 1. Collective. Raises RankError."""
        with metrics.phase("probe"):
            self.measure(name, probe_logprobs(name, source, self.probe, self.mesh), metrics)

    def close(self) -> None:
        """Release the engine. Collective."""
        self.engine.shutdown()


def finite_digests(
    name: str, source: LanguageModel | AdapterReference, resharding: Resharding, version: int, *, is_first: bool
) -> Expected:
    """The digests of the model's weights, on every rank. Collective. Raises RankError if any weight is not finite."""
    expected = source.expected_digests(resharding)
    if problem := weights_problem(name, version, expected.non_finite, is_first=is_first):
        raise RankError(problem)  # on every rank: `expected` is the same on all
    return expected


def probe_logprobs(name: str, source: LanguageModel | AdapterReference, probe: Probe, mesh: Mesh) -> Tensor:
    """The model's log-probabilities of the probe's tokens. Collective. Raises RankError if any is not finite."""
    logprobs = source.logprobs(probe.batch, temperature=1.0)
    mesh.agree(logprobs_problem(name, logprobs))
    return logprobs


# -- Construction ------------------------------------------------------------------------------------------------------


def build_policy(config: Config, checked: Checked, mesh: Mesh, device: Device) -> Policy:
    """The model that is trained: a language model, or one that scores (actor.loss_mode). Collective."""
    if checked.scored_folder is not None:
        folder = checked.scored_folder
        places, lora = response_tokens, config.actor.lora
        return ScalarPolicy(folder, config.model.dtype, config.actor, mesh, device, places=places, lora=lora)
    model, temperature = config.model, config.rollout.temperature
    if model.exact:
        layouts = config.actor.megatron, config.rollout
        for tp in sorted({layout.tensor_model_parallel_size for layout in layouts}):
            mesh.agree(exact_problem(checked.arch, tp, model.dtype))
    parts = (Path(model.path), model.dtype, checked.arch, config.actor, mesh, device)
    return Policy.load(*parts, temperature=temperature, exact=model.exact)


def build_export(config: Config, checked: Checked, policy: Policy) -> Callable[..., None]:
    """The function that writes the policy as a Hugging Face folder. Calling it is collective.

    With `adapters=True` it is a PEFT folder, where the policy is a language model with LoRA; else the whole model.

    A server of the folder stops where rollouts stop: at every end token, and at `rollout.stop_token_ids`.
    """
    tokenizer_path = config.model.tokenizer_path or config.model.path
    ends = set(checked.end_tokens.ids if checked.end_tokens else []) | set(config.rollout.stop_token_ids)
    template = None if config.data.chat_template is None else checked.tokenizer.chat_template
    images = image_format(checked.tokenizer)
    serving = Serving(template, sorted(ends), images and (images.min_pixels, images.max_pixels))

    def export(target: Path, *, adapters: bool = False) -> None:
        if isinstance(policy, ScalarPolicy):
            policy.save_hf(target, tokenizer_path)
            return
        if adapters and policy.lora is not None:
            save_peft(policy, config.model.path, tokenizer_path, target, serving)
            return
        stream = policy.hf_weights(config.rollout.update_weights_bucket_megabytes)
        save_hf(stream, config.model.path, tokenizer_path, target, policy.mesh, serving=serving)

    return export


def build_colocation(config: Config, checked: Checked, policy: Policy) -> Colocation | None:
    """The policy with a sleeping engine beside it. None in a run that draws nothing, which has no engine.

    Collective. Raises RankError if too little memory is free.

    The engine is built while nothing but the policy's weights is on the device. (Without `offload_optimizer` the gradient
    buffers are, too; they are then beside the engine in every rollout, so that freeing them here would help no run.)
    The connections of the weight sync are made before: their buffers must not come out of what the engine was promised.
    """
    if not config.draws:
        return None
    resharding = build_resharding(config, policy.arch, policy.mesh, policy.device, policy.stage_of)
    resharding.connect()
    policy.offload()
    policy.device.empty_cache()
    with awaited("building the engine of the rollouts (importing it, loading weights)", policy.mesh.rank == 0):
        engine = build_rollout_engine(config, checked, policy.mesh, policy.device)
    colocation = Colocation(
        policy,
        engine,
        resharding,
        probe=build_probe(config, policy.arch),
        provenance=Provenance(policy.mesh, config.max_staleness),
    )
    policy.device.empty_cache()
    policy.onload()
    return colocation


def build_probe(config: Config, arch: Architecture) -> Probe:
    """The probe of the config."""
    length = config.data.max_prompt_length + config.data.max_response_length
    tolerance = 0.0 if config.model.exact else config.rollout.probe_tolerance
    return Probe(arch.vocab_size, length, dtype=config.model.dtype, tolerance=tolerance, vision=arch.vision)


def build_rollout_engine(config: Config, checked: Checked, mesh: Mesh, device: Device) -> RolloutEngine:
    """The engine, awake and without usable weights. Collective. Raises RankError if too little memory is free."""
    assert checked.end_tokens is not None, "only a dry run has no tokenizer"
    mesh.agree(memory_problem(config, device.memory()))
    return build_engine(
        config.rollout,
        config.model.path,
        mesh,
        device,
        dtype=config.model.dtype,
        max_model_len=config.data.max_prompt_length + config.data.max_response_length,
        eos_token_ids=checked.end_tokens.ids,
        tensors=engine_tensors_of(config, checked.arch),
        **({"exact": True} if config.model.exact else {}),
        **({"record_routes": True} if config.actor.moe.route_replay == "engine" else {}),
    )


def memory_problem(config: Config, memory: DeviceMemory | None) -> str | None:
    """Why the engine cannot be built now: vLLM requires gpu_memory_utilization x the device to be free. None: it can."""
    utilization = config.rollout.gpu_memory_utilization
    if memory is None or memory.free >= utilization * memory.total:
        return None
    free, total, reserved = (size / 2**30 for size in memory)
    is_offloaded = config.actor.megatron.offload_optimizer
    remedy = "" if is_offloaded else "actor.megatron.offload_optimizer=true, which frees the gradient buffers, or "
    return (
        f"rollout.gpu_memory_utilization={utilization:g} x {total:.2f} GiB = {utilization * total:.2f} GiB must be free"
        f" when the engine is built, and {free:.2f} GiB are: this process's tensors have {reserved:.2f} GiB, and"
        f" {total - free - reserved:.2f} GiB are of CUDA, NCCL and other processes; set {remedy}a lower"
        " gpu_memory_utilization (train --dry-run --gpu-memory GIB shows every phase)"
    )


def build_resharding(
    config: Config, arch: Architecture, mesh: Mesh, device: Device, stage_of: Mapping[str, int]
) -> Resharding:
    """The plan from the policy's layout to the engine's. Collective over the run."""
    rollout, lora = config.rollout, config.actor.lora
    layout = arch, mesh, stage_of, engine_tensors_of(config, arch)
    options: dict[str, Any] = {
        "dtype": DTYPES[config.model.dtype],
        "device": device.torch_device,
        "bucket_megabytes": rollout.update_weights_bucket_megabytes,
    }
    limits = DeltaLimits(rollout.delta_full_every, rollout.delta_max_density) if rollout.sync == "delta" else None
    if mesh.bridge is not None:
        grid = replace(grid_of(config, mesh.bridge.num_training), ranks_per_node=mesh.ranks_per_node)
        options |= {"grid": grid, "lag": rollout.lag}
        if lora.rank is not None:
            return AdapterBridge(*layout, lora, **options)
        return (
            BridgeResharding(*layout, **options) if limits is None else DeltaBridge(*layout, limits=limits, **options)
        )
    if lora.rank is not None:
        return AdapterResharding(*layout, lora, **options)
    return Resharding(*layout, delta=limits, **options)


def engine_tensors_of(config: Config, arch: Architecture) -> EngineTensors:
    """What an engine of the config gets."""
    rollout = config.rollout
    reads_shards = find_engine(rollout.engine).reads_shards
    tp, ep = rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    return engine_tensors(arch, tp, reads_shards=reads_shards, rollout_ep=ep)
