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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_megatron.checks.validate import Checked
from grpo_megatron.config import Config
from grpo_megatron.data.prompts import image_format
from grpo_megatron.device import Device, DeviceMemory
from grpo_megatron.exact.layers import exact_problem
from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.forward import LanguageModel
from grpo_megatron.models.heads.scalar import ScalarPolicy, response_tokens
from grpo_megatron.models.layers.spec import DTYPES
from grpo_megatron.models.lora.peft_folder import save_peft
from grpo_megatron.models.lora.sync import AdapterCodec
from grpo_megatron.models.policy import AdapterReference, Policy
from grpo_megatron.models.weights.hf_folder import Serving, save_hf
from grpo_megatron.models.weights.stream import engine_tensors, new_weight_sync
from grpo_megatron.parallel.mesh import Grid, Mesh
from grpo_megatron.planning.phases import Phase, memory_phases
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.report.progress import awaited
from grpo_megatron.rollout.build import build_engine, find_engine
from grpo_megatron.rollout.engine import RolloutEngine
from grpo_megatron.sync.attest import EngineWeights, Probe, Provenance, finite_digests, probe_logprobs
from grpo_megatron.sync.plan import EngineTensors
from grpo_megatron.sync.weight_sync import DeltaLimits, PatchCodec, WeightSync
from grpo_megatron.training.device_memory import DeviceWatch


class Colocation(EngineWeights):
    """Shares the device between `policy` and `engine`, which sleeps from its construction to the first rollout."""

    def __init__(
        self,
        policy: Policy,
        engine: RolloutEngine,
        weight_sync: WeightSync,
        *,
        probe: Probe,
        provenance: Provenance,
        watch: DeviceWatch | None = None,
    ) -> None:
        super().__init__(engine, policy.mesh, weight_sync, probe)
        self.watch = watch or DeviceWatch(policy.mesh, policy.device.memory)
        self.policy, self.provenance = policy, provenance
        self._has_synced = False  # since this process was started
        engine.sleep()

    @contextlib.contextmanager
    def rollout(self, version: int, metrics: Metrics) -> Iterator[None]:
        """Inside, the engine holds the policy's current weights as `version` and may generate. Collective.

        Raises RankError on every rank when the weights are not finite, the sync is incomplete on any rank, any rank of an
        engine does not hold its part of the weights, the probe disagrees, or the device lacks memory (device_memory.py).
        """
        with metrics.phase("update_weights"):
            self.policy.offload()
            self.policy.device.empty_cache()
            self.watch.require_rollout()
            self.engine.wake_weights()
        self._sync("policy", self.policy, version, metrics)
        with metrics.phase("update_weights"):
            self.policy.device.empty_cache()
            self.engine.wake_kv_cache()
        self._probe("policy", self.policy, metrics)
        yield
        with self.watch.sleeping(metrics):
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
            expected = finite_digests(name, source, self.weight_sync, version, is_first=not self._has_synced)
        self.load(source.engine_weights(self.weight_sync, version), version, expected, metrics)
        self._has_synced = True
        self.provenance.record(version, expected)

    def _probe(self, name: str, source: LanguageModel | AdapterReference, metrics: Metrics) -> None:
        """Compare the engine with `source` on fixed tokens at temperature 1. Collective. Raises RankError."""
        with metrics.phase("probe"):
            self.measure(name, probe_logprobs(name, source, self.probe, self.mesh), metrics)

    def close(self) -> None:
        """Release the engine. Collective."""
        self.engine.shutdown()


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
    is_changed = config.data.chat_template is not None or config.data.chat_template_kwargs
    template = checked.tokenizer.chat_template if is_changed else None
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
        save_hf(stream, config.model.path, tokenizer_path, target, policy.mesh, serving=serving, arch=policy.arch)

    return export


def build_colocation(config: Config, checked: Checked, policy: Policy) -> Colocation | None:
    """The policy with a sleeping engine beside it. None in a run that samples nothing, which has no engine.

    Collective. Raises RankError if too little memory is free.

    The engine is built while nothing but the policy's weights is on the device. (Without `offload_optimizer` the gradient
    buffers are, too; they are then beside the engine in every rollout, so that freeing them here would help no run.)
    The connections of the weight sync are made before: their buffers must not come out of what the engine was promised.
    """
    if not config.has_rollouts:
        return None
    weight_sync = build_weight_sync(config, policy.arch, policy.mesh, policy.device, policy.stage_of)
    weight_sync.connect()
    policy.offload()
    policy.device.empty_cache()
    with awaited("building the engine of the rollouts (importing it, loading weights)", policy.mesh.rank == 0):
        engine = build_rollout_engine(config, checked, policy.mesh, policy.device)
    mesh, phases = policy.mesh, list[Phase]()
    if policy.device.is_cuda:
        phases = memory_phases(config, policy.arch, mesh.world_size, *checked.models.stages(config), stage=mesh.pp_rank)
    sleeps = config.rollout.free_cache_engine
    colocation = Colocation(
        policy,
        engine,
        weight_sync,
        probe=build_probe(config, policy.arch),
        provenance=Provenance(mesh, config.max_staleness),
        watch=DeviceWatch(mesh, policy.device.memory if sleeps else lambda: None, phases),
    )
    policy.device.empty_cache()
    policy.onload()
    return colocation


def build_probe(config: Config, arch: Architecture) -> Probe:
    """The probe of the config."""
    length = config.data.max_prompt_length + config.data.max_response_length
    tolerance = 0.0 if config.model.exact else config.rollout.probe_tolerance
    image_side = None if arch.vision is None else arch.vision.patch * arch.vision.merge
    dtype = "fp8" if config.actor.megatron.fp8.recipe or config.rollout.quantization else config.model.dtype
    return Probe(arch.vocab_size, length, dtype=dtype, tolerance=tolerance, image_side=image_side)


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
        exact=config.model.exact,
        record_routes=config.actor.moe.route_replay == "engine",
    )


def memory_problem(config: Config, memory: DeviceMemory | None) -> str | None:
    """Why the engine cannot be built now: vLLM requires gpu_memory_utilization x the device to be free. None: it can."""
    utilization = config.rollout.gpu_memory_utilization
    if memory is None or memory.free >= utilization * memory.total:
        return None
    free, total, reserved, _ = (size / 2**30 for size in memory)
    is_offloaded = config.actor.megatron.offload_optimizer
    remedy = "" if is_offloaded else "actor.megatron.offload_optimizer=true, which frees the gradient buffers, or "
    return (
        f"rollout.gpu_memory_utilization={utilization:g} x {total:.2f} GiB = {utilization * total:.2f} GiB must be free"
        f" when the engine is built, and {free:.2f} GiB are: this process's tensors have {reserved:.2f} GiB, and"
        f" {total - free - reserved:.2f} GiB are of CUDA, NCCL and other processes; set {remedy}a lower"
        " gpu_memory_utilization (train --dry-run --gpu-memory GIB shows every phase)"
    )


def build_weight_sync(
    config: Config, arch: Architecture, mesh: Mesh, device: Device, stage_of: Mapping[str, int]
) -> WeightSync:
    """Plan the sync from the policy's layout to the engine's. Collective over the run."""
    rollout, lora, options = config.rollout, config.actor.lora, dict[str, Any]()
    if mesh.bridge is not None:
        options["grid"] = replace(Grid.of(config, mesh.bridge.num_training), ranks_per_node=mesh.ranks_per_node)
        options["lag"] = rollout.lag
    if lora.rank is not None:
        options["codec"] = partial(AdapterCodec, arch=arch, lora=lora, stage_of=stage_of)
    elif rollout.sync == "delta":
        limits = DeltaLimits(rollout.delta_full_every, rollout.delta_max_density)
        options["codec"] = partial(PatchCodec, limits=limits)
    return new_weight_sync(
        arch,
        mesh,
        stage_of,
        engine_tensors_of(config, arch),
        dtype=DTYPES[config.model.dtype],
        device=device.torch_device,
        bucket_megabytes=rollout.update_weights_bucket_megabytes,
        **options,
    )


def engine_tensors_of(config: Config, arch: Architecture) -> EngineTensors:
    """Returns the options of the engine that the config names."""
    rollout = config.rollout
    reads_shards = find_engine(rollout.engine).reads_shards
    tp, ep = rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    return engine_tensors(arch, tp, reads_shards=reads_shards, rollout_ep=ep)
