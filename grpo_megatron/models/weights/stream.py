"""Weights of a model in a layout: its parameters by name, and the streams that an engine or a Hugging Face folder gets.

`Resharding` streams the weights of a training layout to engines of any rollout layout. `hf_weights` is the same stream for a
folder: every rank reads every tensor whole.

The float32 buffers of a model (its constants) travel beside its parameters. DeepSeek-V3 chooses experts by score + bias. A
bias that is rounded to bfloat16 chooses others wherever two sums are closer than the rounding. The plan of a weight sync has
one dtype, so the biases travel apart. They are small.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_megatron.models.architecture import ENGINE_VOCABULARY_MULTIPLE, Architecture
from grpo_megatron.models.families import table_of
from grpo_megatron.models.weights.table import QKV, HeadsNorm, Replicated, Vocabulary, WeightRow, expand_table
from grpo_megatron.parallel.mesh import Grid, Mesh, RankError, all_gather_values
from grpo_megatron.sync.delta import DeltaLimits, DeltaSync, ReceivedPatches, SentPatches
from grpo_megatron.sync.digest import Expected, Share, expected_digests
from grpo_megatron.sync.exchange import Envelope, Exchange, Pool, RankPlan, point_to_point, snapshot
from grpo_megatron.sync.plan import (
    EngineSpans,
    EngineTensors,
    Interval,
    SyncParameter,
    SyncTensor,
    Traffic,
    plan_rounds,
)
from grpo_megatron.types import WeightBucket

CONSTANTS = (".router.expert_bias",)  # buffers with a row in the weight table
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
# Transformer Engine fuses a norm into the linear layer that follows. Only the name of the tensor differs.
TE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}


class WeightsError(ValueError):
    """A Hugging Face folder that cannot be read, or tensors that are not the model's. The message names wrong tensors."""

    tells_what_to_do = True  # the command line prints it without a traceback


# -- the parameters of a rank ------------------------------------------------------------------------------------------


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The GPTModel inside DDP and Float16Module."""
    while hasattr(model, "module"):
        model = model.module  # type: ignore[assignment]
    return model


def global_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every parameter of this rank, and every constant, by its global Megatron name in the local layer spec.

    Layer numbers are global. They come from each layer's own `layer_number`, so uneven stages need no offset. Expert
    numbers are global too, from each layer's own `local_expert_indices`.
    """
    inner = unwrapped(model)
    layers: Any = inner.decoder.layers  # type: ignore[union-attr]
    parameters: dict[str, Tensor] = {}
    constants = ((name, buffer) for name, buffer in inner.named_buffers() if name.endswith(CONSTANTS))
    for name, parameter in (*inner.named_parameters(), *constants):
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            layer = layers[int(parts[2])]
            parts[2] = str(layer.layer_number - 1)
            if parts[3:5] == ["mlp", "experts"]:
                parts[5:] = _global_expert(parts[5:], layer.mlp.local_expert_indices)
        whole = ".".join(parts)
        for local, fused in TE_NAMES.items():
            whole = whole.removesuffix(fused) + local if whole.endswith(fused) else whole
        parameters[whole] = parameter
    return parameters


def _global_expert(parts: list[str], indices: list[int]) -> list[str]:
    """The rest of a name after `mlp.experts.`, in the form of sequential experts, with the expert's global number.

    Sequential experts are named local_experts.0.linear_fc1.weight, grouped ones linear_fc1.weight0.
    """
    if parts[0] == "local_experts":
        return [parts[0], str(indices[int(parts[1])]), *parts[2:]]
    linear, weight = parts
    return ["local_experts", str(indices[int(weight.removeprefix("weight"))]), linear, "weight"]


def dequantized(parameter: Tensor) -> Tensor:
    """The parameter's values as an ordinary tensor. Only a parameter stored in FP8 (`fp8.param_gather`) is converted."""
    from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor

    return dequantize_fp8_tensor(parameter) if is_float8tensor(parameter) else parameter.detach()


def served(parameter: Tensor) -> Tensor:
    """The values that the model multiplies by, as an ordinary tensor. Those of an adapted weight are merged now."""
    adapted: Any = getattr(parameter, "adapted", None)  # set by models/lora/layers.py
    return dequantized(parameter.detach()) if adapted is None else adapted.served()  # type: ignore[no-any-return]


@torch.no_grad()
def set_parameter(parameter: Tensor, values: Tensor) -> None:
    """Set a parameter's values. If it is stored in FP8, also set its exact values, which the optimizer copies to float32."""
    parameter.copy_(values)
    get_exact = getattr(parameter, "get_high_precision_init_val", None)
    if get_exact is not None and (exact := get_exact()) is not None:
        exact.copy_(values)


def model_rows(arch: Architecture) -> dict[str, WeightRow]:
    """Global Megatron name -> row, for the whole model, in stream order: embedding, layers, final norm, head."""
    return {row.megatron: row for row in expand_table(table_of(arch), arch)}


def stage_owners(model: torch.nn.Module, arch: Architecture, mesh: Mesh) -> dict[str, int]:
    """Collective: Megatron name -> the first pipeline stage that has it."""
    names_of_stage: list[str] = []
    for names in all_gather_values(list(global_parameters(model)), mesh.ep_group):
        names_of_stage += names
    owners: dict[str, int] = {}
    for stage, names in enumerate(all_gather_values(names_of_stage, mesh.pp_group)):
        for name in names:
            owners.setdefault(name, stage)
    missing = [name for name in model_rows(arch) if name not in owners]
    if missing:
        raise WeightsError(f"no pipeline stage holds {', '.join(missing[:10])} ({len(missing)} in all)")
    return owners


# -- what the weight sync knows of a model -----------------------------------------------------------------------------


def stages_of_parameters(arch: Architecture, layers: Sequence[int]) -> dict[str, int]:
    """Megatron name -> pipeline stage, for stages with these numbers of layers. `stage_owners` asks the ranks instead."""
    of_layer = [stage for stage, count in enumerate(layers) for _ in range(count)]
    out = {}
    for name in model_rows(arch):
        if ".layers." in name:
            out[name] = of_layer[int(name.split(".")[2])]
        else:
            out[name] = 0 if "embedding" in name or name.startswith("visual.") else len(layers) - 1
    return {**out, HEAD: len(layers) - 1}


def sync_parameters(
    arch: Architecture, grid: Grid, stage_of: Mapping[str, int], rows: Iterable[WeightRow] | None = None
) -> list[SyncParameter]:
    """All parameters of the model, in the order of its table, without its constants. `stage_of`: Megatron name -> stage.

    A tied embedding is on the head's stage too. (A critic has no head.) `rows`: of other parameters.
    """
    head_stage = stage_of.get(HEAD, 0) if arch.tied else 0
    copies = {EMBEDDING: (head_stage,)} if head_stage > 0 else {}
    return [
        SyncParameter(
            name=row.megatron,
            tensors=tuple(SyncTensor(n, s, row.axis) for n, s in zip(row.hf, row.hf_shapes(arch), strict=True)),
            stages=(stage_of[row.megatron], *copies.get(row.megatron, ())),
            ep_rank=row.ep_rank(arch, grid.ep),
            pieces=tuple(row.pieces(arch, tp_rank, grid.tp) for tp_rank in range(grid.tp)),
        )
        for row in (model_rows(arch).values() if rows is None else rows)
        if not row.is_constant
    ]


def engine_tensors(arch: Architecture, rollout_tp: int, *, reads_shards: bool, rollout_ep: int = 1) -> EngineTensors:
    """The tensors that an engine of `rollout_tp` ranks gets, and the part of each that each rank reads.

    `reads_shards`: the parts that vLLM reads. Linear layers are cut evenly. Key-value heads are shared by several ranks if
    there are more ranks than heads. The vocabulary is padded to a multiple of 64 first, so that the last rank has fewer
    tokens, or none. With `rollout_ep` (1 or `rollout_tp`), a rank reads neighbouring experts whole, and nothing of the
    others; and it stacks the experts of a layer. Without `reads_shards`, every rank reads everything, one by one.
    """
    tensors: dict[str, SyncTensor] = {}
    spans: dict[str, tuple[Interval, ...]] = {}
    stacks: dict[str, str] = {}
    for row in model_rows(arch).values():
        for index, (name, shape) in enumerate(zip(row.hf, row.hf_shapes(arch), strict=True)):
            tensor = tensors[name] = SyncTensor(name, shape, row.axis)
            module, numbered, kind = name.partition(f".experts.{row.expert}.")
            if numbered and reads_shards:
                stacks[name] = f"{module}.experts.{kind}"
            if not reads_shards:
                spans[name] = ((0, tensor.length),) * rollout_tp
            elif row.expert is not None and rollout_ep > 1:
                owner = row.ep_rank(arch, rollout_tp)
                spans[name] = tuple((0, tensor.length if rank == owner else 0) for rank in range(rollout_tp))
            else:
                spans[name] = tuple(_span(row, index, tensor.length, arch, r, rollout_tp) for r in range(rollout_tp))
    return EngineTensors(tensors, spans, stacks)


def _span(row: WeightRow, index: int, length: int, arch: Architecture, rank: int, ranks: int) -> Interval:
    if isinstance(row, (Replicated, HeadsNorm)):
        return 0, length
    if isinstance(row, Vocabulary):
        size = -(-length // ENGINE_VOCABULARY_MULTIPLE) * ENGINE_VOCABULARY_MULTIPLE // ranks
        return min(rank * size, length), min((rank + 1) * size, length)
    if isinstance(row, QKV) and index > 0 and arch.num_query_groups < ranks and not arch.post_norms:
        head = rank // (ranks // arch.num_query_groups)
        return head * arch.head_dim, (head + 1) * arch.head_dim
    size = length // ranks
    return rank * size, (rank + 1) * size


# -- streams -----------------------------------------------------------------------------------------------------------


class Resharding:
    """Planned once, for every model of the layout. Collective: built on every rank at the same point. Raises RankError."""

    def __init__(
        self,
        arch: Architecture,
        mesh: Mesh,
        stage_of: Mapping[str, int],
        tensors: EngineTensors,
        *,
        dtype: torch.dtype,
        device: torch.device,
        bucket_megabytes: int,
        delta: DeltaLimits | None = None,
        grid: Grid | None = None,
    ) -> None:
        """`tensors`: what each rank of an engine reads. `bucket_megabytes`: MiB of all buffers of a rank together.

        `delta`: changes are sent where possible (see `DeltaSync`); None: every sync is full. `grid`: of all ranks of the run,
        where the mesh is that of a role.
        """
        self.mesh, self.tensors, self.dtype, self.device = mesh, tensors, dtype, device
        self._pool, self._budget = Pool(dtype, device), (bucket_megabytes << 20) // dtype.itemsize
        self._grid = grid or mesh.grid()
        parameters, units = sync_parameters(arch, self._grid, stage_of), tensors.units(mesh.rank % mesh.rollout_tp)
        self.plan, self.traffic = self._planned(parameters, tensors.spans, units)
        rows = model_rows(arch)
        self._constants: dict[int, list[tuple[str, SyncTensor]]] = {}  # of each stage: (Megatron name, tensor)
        for row in rows.values():
            if row.is_constant:
                tensor = SyncTensor(row.hf[0], row.hf_shapes(arch)[0], 0)
                self._constants.setdefault(stage_of[row.megatron], []).append((row.megatron, tensor))
        self._shares = [*self.plan.shares(), *self._constant_shares()]
        self._plans = [self.plan]  # all whose messages are sent
        self._shapes = {p.name: rows[p.name].local_shape(arch, mesh.tp) for p in self.plan.parameters()}
        self._delta: DeltaSync | None = None
        if delta is not None:
            with self._kept_on_host("rollout.sync=delta", "set rollout.sync=full"):
                self._delta = DeltaSync(self.plan, point_to_point, mesh, pool=self._pool, limits=delta)

    def _planned(
        self, parameters: list[SyncParameter], spans: EngineSpans, units: Mapping[str, list[str]] | None
    ) -> tuple[RankPlan, Traffic]:
        """Collective. This rank's plan, and the traffic of all ranks."""
        plan, rounds, traffic = plan_rounds(parameters, spans, self._grid, self._budget)
        if len(set(self.mesh.all_gather(plan.digest))) > 1:
            raise RankError("the ranks have planned different weight syncs: their configs or their versions differ")
        return RankPlan(plan, rounds, self.mesh.run_rank, units), traffic

    @contextlib.contextmanager
    def _kept_on_host(self, key: str, remedy: str) -> Iterator[None]:
        """Collective. Around the allocation of what `key` keeps."""
        problem = None
        try:
            yield
        except RuntimeError as error:  # out of memory
            problem = f"no memory on the host for what {key} keeps there: {error}; {remedy}"
        self.mesh.agree(problem)

    def connect(self) -> None:
        """Send one element to every rank that a sync will send to. Collective.

        NCCL allocates the buffers of a connection at its first message, gigabytes where a rank has many peers
        (planning/phases.py). After this call they are no longer part of the free memory.
        """
        sides = zip(*(plan.peers() for plan in self._plans), strict=True)
        targets, sources = (sorted({peer for peers in side for peer in peers}) for side in sides)
        element = torch.zeros(1, dtype=self.dtype, device=self.device)
        receives = [(peer, torch.empty_like(element)) for peer in sources]
        point_to_point([(peer, element) for peer in targets], receives)()
        dist.all_reduce(element)  # as the digests do

    @property
    def bytes_received(self) -> int:
        """The bytes that this rank received in the last sync."""
        if self._delta is not None:
            return self._delta.bytes_received
        return self.plan.elements_received * self.dtype.itemsize

    @property
    def density(self) -> float | None:
        """The share of elements that had changed at the last sync. None: they were not compared."""
        return None if self._delta is None else self._delta.density

    def attested(self) -> None:
        """The engine holds what was streamed last, of whichever model."""

    def accept(self, weights_digest: str) -> None:
        """The engine holds what was streamed last, of the policy, and computes with it. The next sync may send changes."""
        if self._delta is not None:
            self._delta.accept(weights_digest)

    def stream(self, model: torch.nn.Module, version: int) -> Iterator[WeightBucket]:
        """Full-shaped tensors, of which this rank's part is filled (see `Exchange`). Collective. Raises RankError.

        The parameters must not change before the stream has ended: some of them are handed over as they are.
        """
        parameters = _with_tied_head(global_parameters(model))
        problem, buckets = None, None
        try:
            for name, shape in self._shapes.items():
                if name not in parameters:
                    raise ValueError(f"{name} is missing")
                if tuple(parameters[name].shape) != shape:
                    raise ValueError(f"{name} has shape {tuple(parameters[name].shape)}, expected {shape}")
            buckets = self._buckets(parameters, version)
        except (ValueError, RuntimeError) as error:  # RuntimeError: out of memory
            problem = f"cannot send weights: {error}"
        self.mesh.agree(problem)
        assert buckets is not None
        yield from buckets
        yield from self._stream_constants(parameters)

    def _buckets(self, parameters: Mapping[str, Tensor], version: int) -> Iterator[WeightBucket]:
        """The stream without constants. No communication before its first bucket."""
        if self._delta is not None:
            return self._delta.stream(_reader(parameters), version)
        return Exchange(self.plan, _reader(parameters), point_to_point, self._pool).stream()

    def expected_digests(self, model: torch.nn.Module) -> Expected:
        """The digests of the model's current weights, for each rank of the engine. Collective. Raises RankError."""
        problem, expected = None, None
        try:
            read = _reader(_with_tied_head(global_parameters(model)))
            expected = expected_digests(self._shares, read, self.tensors, dist.all_reduce, self.device)
        except (KeyError, ValueError, RuntimeError) as error:
            problem = f"cannot read weights: {error}"
        self.mesh.agree(problem)
        assert expected is not None
        return expected

    def _constant_shares(self) -> list[Share]:
        """The constants that this rank digests for the attestation: those of its stage, if it is the stage's first rank."""
        if (self.mesh.tp_rank, self.mesh.cp_rank, self.mesh.dp_rank) != (0, 0, 0):
            return []
        readers, held = tuple(range(self._grid.rollout_tp)), self._constants.get(self.mesh.pp_rank, [])
        return [Share(name, tensor, 0, tensor.length, 0, readers) for name, tensor in held]

    def _stream_constants(self, parameters: Mapping[str, Tensor]) -> Iterator[WeightBucket]:
        """Every constant on every rank, one bucket per stage. Collective over the pipeline's ranks."""
        for stage, held in sorted(self._constants.items()):
            sizes = [tensor.numel for _, tensor in held]
            flat = torch.empty(sum(sizes), dtype=torch.float32, device=self.device)
            if self.mesh.pp_rank == stage:
                flat.copy_(torch.cat([parameters[name].detach() for name, _ in held]))
            if self.mesh.pp > 1:
                dist.broadcast(flat, self.mesh.stage_rank(stage), group=self.mesh.pp_group)
            yield [(tensor.name, part) for (_, tensor), part in zip(held, flat.split(sizes), strict=True)]


class BridgeResharding(Resharding):
    """From the ranks that train to those that draw. Built on all of them with the same `grid`, without a delta.

    A rank that trains copies what it sends to the host, and goes on: nothing of `stream` waits for the other role, and nothing
    is in the stream. A rank that draws receives the next version on the host while it draws.
    """

    def __init__(self, *args: Any, lag: int, **named: Any) -> None:
        super().__init__(*args, **named)
        assert self.mesh.bridge is not None
        self.bridge, self.lag = self.mesh.bridge, lag
        self._host = Pool(self.dtype, torch.device("cpu"))
        self._on_their_way: deque[Callable[[], None]] = deque()
        self._arriving: Exchange | None = None

    def _buckets(self, parameters: Mapping[str, Tensor], version: int) -> Iterator[WeightBucket]:
        # A step is drawn by the version of `lag` steps before, and the trainer has its samples: that version has arrived.
        while len(self._on_their_way) > self.lag:
            self._on_their_way.popleft()()
        self._on_their_way.append(self.bridge.post(self._snapshot(parameters), []))
        return iter(())

    def _snapshot(self, parameters: Mapping[str, Tensor]) -> list[Envelope]:
        return snapshot(self.plan, _reader(parameters), self._host)

    def _stream_constants(self, parameters: Mapping[str, Tensor]) -> Iterator[WeightBucket]:
        held = self._constants.get(self.mesh.pp_rank, [])
        if held and (self.mesh.tp_rank, self.mesh.cp_rank, self.mesh.dp_rank) == (0, 0, 0):
            values = [(tensor.name, parameters[name].detach().cpu()) for name, tensor in held]
            self.bridge.send(values, to=self.bridge.num_training)
        return iter(())

    def expect(self) -> None:
        """A rank that draws receives the next version from now on."""
        self._arriving = self._staged(self.plan)

    def _staged(self, plan: RankPlan) -> Exchange:
        return Exchange(plan, holds_nothing, self.bridge.post, self._pool, stage=self._host)

    def received(self) -> Iterator[WeightBucket]:
        """On the ranks that draw, the version that `expect` was called for. Collective over them."""
        yield from self._arrived()
        for stage in sorted(self._constants):
            values = self.bridge.receive(stage * self._grid.tp * self._grid.replicas) if self.mesh.rank == 0 else []
            yield [(name, value.to(self.device)) for name, value in self.mesh.broadcast(values)]

    def _arrived(self) -> Iterator[WeightBucket]:
        assert self._arriving is not None, "expect was not called"
        yield from self._arriving.stream()
        self._arriving = None


class DeltaBridge(BridgeResharding):
    """The same with `rollout.sync: delta`: of each message what has changed since the version before."""

    def __init__(self, *args: Any, limits: DeltaLimits, **named: Any) -> None:
        super().__init__(*args, **named)
        self._sent = SentPatches(limits)
        self._received = ReceivedPatches(self.bridge.post, lambda rank: rank < self.bridge.num_training)

    @property
    def bytes_received(self) -> int:
        """See Resharding."""
        return self._received.bytes_received

    def _snapshot(self, parameters: Mapping[str, Tensor]) -> list[Envelope]:
        return self._sent.messages(super()._snapshot(parameters))

    def _staged(self, plan: RankPlan) -> Exchange:
        staged = Exchange(plan, holds_nothing, self._received.post, self._pool, stage=self._host)
        self._received.expect()
        return staged


def holds_nothing(name: str) -> Tensor:
    """What a rank that draws reads in the place of parameters."""
    raise KeyError(f"a rank that draws has no {name}")


def _with_tied_head(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The head by the embedding's name too, where a stage has only the head. Plans read it if they are tied."""
    return {EMBEDDING: parameters[HEAD], **parameters} if HEAD in parameters else parameters


def _reader(parameters: Mapping[str, Tensor]) -> Callable[[str], Tensor]:
    return lambda name: served(parameters[name])


def hf_weights(
    model: torch.nn.Module, arch: Architecture, mesh: Mesh, bucket_megabytes: int, stage_of: Mapping[str, int]
) -> Iterator[WeightBucket]:
    """Collective: every rank gets every Hugging Face tensor, whole. `bucket_megabytes`: of all buffers of a rank together.

    `stage_of` maps each Megatron name to its stage (`stage_owners`). Tensors may share their memory with the model or with a
    later bucket: copy what is kept. Raises RankError.
    """
    config: Any = unwrapped(model).config
    device = next(model.parameters()).device
    tensors, dtype = engine_tensors(arch, mesh.rollout_tp, reads_shards=False), config.params_dtype
    options: dict[str, Any] = {"dtype": dtype, "device": device, "bucket_megabytes": bucket_megabytes}
    yield from Resharding(arch, mesh, stage_of, tensors, **options).stream(model, version=0)
