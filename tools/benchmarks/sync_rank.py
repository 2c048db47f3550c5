"""The ranks of one node for `tools.benchmarks sync`: a real Megatron shard each, synced the old way and the new way in turn.

    python sync_rank.py JOBS.json FIRST_RANK

Started by sync.py, once per node. It imports everything and forks the node's ranks, job by job. Every rank writes
its figures beside the jobs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_megatron.config import MegatronConfig, RolloutConfig
from grpo_megatron.device import Device
from grpo_megatron.models.build import build_model
from grpo_megatron.models.families import architecture_of
from grpo_megatron.models.optimizer import wrap_ddp
from grpo_megatron.models.weights.stream import engine_tensors, new_weight_sync, sent_parameters, stage_owners
from grpo_megatron.parallel.mesh import Mesh, build_mesh
from grpo_megatron.processes.process import die_with_parent
from grpo_megatron.rollout.build import build_engine
from grpo_megatron.rollout.vllm import process as vllm_process
from grpo_megatron.sync.digest import compare as compare_digests
from grpo_megatron.sync.digest import digest_groups, slice_digest
from grpo_megatron.sync.exchange import RankPlan
from grpo_megatron.sync.plan import NETWORK, NODE
from grpo_megatron.sync.weight_sync import DeltaLimits, PatchCodec, WeightSync
from grpo_megatron.types import WeightBucket

NOISE = 1 << 20  # random elements that the weights are made of


class Shares:
    """Seconds of a sync, and of processor time, by what they were spent on. Nested parts count for themselves only."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.processor: Counter[str] = Counter()
        self._inner: list[list[float]] = []

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        begin = time.perf_counter(), time.process_time()
        self._inner.append([0.0, 0.0])
        try:
            yield
        finally:
            spent = [time.perf_counter() - begin[0], time.process_time() - begin[1]]
            inner = self._inner.pop()
            self.seconds[name] += spent[0] - inner[0]
            self.processor[name] += spent[1] - inner[1]
            if self._inner:
                self._inner[-1] = [a + b for a, b in zip(self._inner[-1], spent, strict=True)]

    def buckets(self, stream: Iterator[WeightBucket], name: str) -> Iterator[WeightBucket]:
        while True:
            with self.of(name):
                bucket = next(stream, None)
            if bucket is None:
                return
            yield bucket
            del bucket


class Shard:
    """An engine's memory on one rank, filled as vLLM's weight loaders do it: narrow, then copy_."""

    def __init__(self, plan: RankPlan) -> None:
        self._parts: dict[str, tuple[Tensor, int, int]] = {}
        self._whole = {tensor.name: tensor for tensor in plan.plan.tensors}
        for tensor in plan.plan.tensors:
            start, stop = plan.plan.spans[tensor.name][plan.engine_rank]
            shape = (*tensor.shape[: tensor.axis], stop - start, *tensor.shape[tensor.axis + 1 :])
            self._parts[tensor.name] = torch.zeros(shape, dtype=torch.bfloat16), tensor.axis, start

    def load(self, bucket: WeightBucket) -> None:
        for name, tensor in bucket:
            memory, axis, start = self._parts[name]
            memory.copy_(tensor.narrow(axis, start, memory.shape[axis]))

    def digests(self) -> list[int]:
        """As an engine computes them of its own memory."""
        values = [slice_digest(memory, self._whole[name], start) for name, (memory, _, start) in self._parts.items()]
        return torch.stack(values).tolist()

    def clear(self) -> None:
        for memory, _, _ in self._parts.values():
            memory.zero_()


def fill(model: torch.nn.Module, mesh: Mesh) -> None:
    """Random weights. Ranks with the same shard get the same ones."""
    noise = torch.randn(NOISE, generator=torch.Generator().manual_seed(mesh.pp_rank)).to(torch.bfloat16)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            is_cut = getattr(parameter, "tensor_model_parallel", False)
            rolled = noise.roll(number * mesh.tp + (mesh.tp_rank if is_cut else 0))
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), NOISE):
                flat[start : start + NOISE].copy_(rolled[: flat.numel() - start])


def change(model: torch.nn.Module, mesh: Mesh, share: float, seed: int) -> None:
    """Flip the lowest bit of about this share of the elements, the same ones on ranks with the same shard."""
    for number, parameter in enumerate(model.parameters()):
        shard = mesh.tp_rank if getattr(parameter, "tensor_model_parallel", False) else mesh.tp
        generator = torch.Generator().manual_seed(hash((seed, mesh.pp_rank, shard, number)))
        bits = parameter.detach().view(torch.int16).view(-1)
        bits[torch.randint(bits.numel(), (int(share * bits.numel()),), generator=generator)] ^= 1


class New:
    """The planned sync. The ranks agree at the start (within `WeightSync.stream`) and once at the end. Then the digests of
    what each engine rank must hold are computed and added up over the ranks."""

    def __init__(self, model: torch.nn.Module, weight_sync: WeightSync) -> None:
        self._model, self._weight_sync = model, weight_sync

    def stream(self, shares: Shares) -> Iterator[WeightBucket]:
        yield from shares.buckets(self._weight_sync.stream(sent_parameters(self._model), version=0), "exchange")
        with shares.of("agreements"):
            self._weight_sync.mesh.agree(None)
        with shares.of("expected digests"):
            self.expected = self._weight_sync.expected_digests(sent_parameters(self._model))


def load_shard(stream: Iterator[WeightBucket], shard: Shard, shares: Shares) -> None:
    for bucket in stream:
        with shares.of("load"):
            shard.load(bucket)
        del bucket
    with shares.of("engine digests"):
        shard.digests()


def load_engine(stream: Iterator[WeightBucket], engine: Any, shares: Shares) -> None:
    """Into vLLM."""
    with shares.of("load"):
        engine.load_weights(stream, 0)
    with shares.of("engine digests"):
        engine.digests()


def copies(model: torch.nn.Module) -> Callable[[], None]:
    """A memcpy of the shard, between memory that both exist already."""
    parameters = [parameter.detach() for parameter in model.parameters()]
    targets = [torch.zeros_like(parameter) for parameter in parameters]

    def copy() -> None:
        for target, parameter in zip(targets, parameters, strict=True):
            target.copy_(parameter)

    return copy


def bare_exchange(weight_sync: WeightSync) -> Callable[[], None]:
    """Sends the bytes that must cross nodes, in one message from each rank: the best that the connection does now."""
    grid, rank = weight_sync.plan.plan.grid, weight_sync.mesh.rank
    size = weight_sync.traffic.received[NETWORK].sum() / grid.world_size
    out, into = (torch.zeros(int(size), dtype=torch.bfloat16) for _ in range(2))
    peer = (rank + grid.ranks_per_node) % grid.world_size

    def exchange() -> None:
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, into, peer), dist.P2POp(dist.isend, out, peer)])
        for work in works:
            work.wait()

    return exchange


def measured(mesh: Mesh, action: Callable[[], Any]) -> dict[str, float]:
    """Seconds until all ranks have finished, and this rank's seconds of processor time."""
    dist.barrier(group=mesh.control)
    begin, processor = time.perf_counter(), time.process_time()
    action()
    own = time.perf_counter() - begin
    used = time.process_time() - processor
    dist.barrier(group=mesh.control)
    return {"seconds": time.perf_counter() - begin, "own": own, "processor": used}


def build(job: dict[str, Any]) -> tuple[Mesh, torch.nn.Module, Any, Callable[..., WeightSync]]:
    """Mesh, model, architecture, and what makes a plan."""
    device, arch = Device("cpu"), architecture_of(job["config"])
    mesh = build_mesh(device, tp=job["tp"], pp=job["pp"], rollout_tp=job["rollout_tp"], timeout_s=300)
    sizes = {"tensor_model_parallel_size": mesh.tp, "pipeline_model_parallel_size": mesh.pp}
    megatron = MegatronConfig.model_validate(sizes)
    model = wrap_ddp(build_model(arch, megatron, "bfloat16", device), megatron, device)  # as in Policy
    fill(model, mesh)
    planner = functools.partial(
        new_weight_sync,
        arch,
        mesh,
        stage_owners(model, arch, mesh),
        engine_tensors(arch, mesh.rollout_tp, reads_shards=True),
        dtype=torch.bfloat16,
        device=device.torch_device,
        bucket_megabytes=job["bucket_megabytes"],
    )
    return mesh, model, arch, planner


def compare_delta(job: dict[str, Any]) -> dict[str, Any]:
    """The figures of one rank: a full sync, then one after each share of the elements has changed, `repeats` times."""
    mesh, model, _, planner = build(job)
    begin = time.perf_counter()
    full = planner()
    planned = time.perf_counter() - begin
    delta = planner(codec=functools.partial(PatchCodec, limits=DeltaLimits(full_every=1 << 30, max_density=1.0)))
    shard, engine_rank = Shard(full.plan), mesh.rank % mesh.rollout_tp

    def sync(weight_sync: WeightSync) -> dict[str, Any]:
        shares, way = Shares(), New(model, weight_sync)
        shard.clear()
        figures = measured(mesh, functools.partial(load_shard, way.stream(shares), shard, shares))
        held = dict(zip(full.tensors.tensors, shard.digests(), strict=True))
        if compare_digests(way.expected, held, full.tensors, engine_rank, mesh.rank):
            raise SystemExit("a sync has loaded wrong weights")
        weight_sync.accept(way.expected.weights_digest)
        received = {"received": weight_sync.bytes_received, "density": weight_sync.header.density}
        return {**figures, "shares": dict(shares.seconds), "used": dict(shares.processor), **received}

    for weight_sync in (full, delta):  # to warm up
        sync(weight_sync)
    repeats = []
    for repeat in range(job["repeats"]):
        figures = {"full": sync(full)}
        for share in job["changes"]:
            change(model, mesh, share, repeat)
            figures[f"{100 * share:g} %"] = sync(delta)
        repeats.append(figures)
    return {"repeats": repeats, "planned": planned, **counted(full)}


def compare(job: dict[str, Any]) -> dict[str, Any]:
    """The figures of one rank: every way in turn, `repeats` times after one to warm up."""
    mesh, model, _, planner = build(job)
    begin = time.perf_counter()
    weight_sync = planner()
    planned = time.perf_counter() - begin
    new = New(model, weight_sync)
    engine = built_engine(job, mesh, weight_sync) if job["engine"] else None
    shard = None if engine is not None else Shard(weight_sync.plan)
    baselines = {"memcpy": copies(model), "bare": bare_exchange(weight_sync)}
    repeats: list[dict[str, Any]] = []
    for _ in range(job["repeats"] + 1):
        figures: dict[str, Any] = {}
        for name in job["ways"]:
            shares = Shares()
            if name in baselines:
                action = baselines[name]
            elif shard is None:
                action = functools.partial(load_engine, new.stream(shares), engine, shares)
            else:
                shard.clear()
                action = functools.partial(load_shard, new.stream(shares), shard, shares)
            figures[name] = {**measured(mesh, action), "shares": dict(shares.seconds), "used": dict(shares.processor)}
        repeats.append(figures)
    if engine is not None:
        engine.shutdown()
    return {"repeats": repeats[1:], "planned": planned, **counted(weight_sync)}


def counted(weight_sync: WeightSync) -> dict[str, Any]:
    """Returns the planned bytes of this rank and of its node, in bfloat16."""
    plan, rank, grid = weight_sync.plan, weight_sync.mesh.rank, weight_sync.plan.plan.grid
    network, node = (weight_sync.traffic.received[phase].sum(axis=1) * 2 for phase in (NETWORK, NODE))
    return {
        "received": int(network[rank] + node[rank]),
        "over_border": int(sum(network[r] for r in range(len(network)) if grid.node(r) == grid.node(rank))),
        "rounds": len(plan.rounds),
        "operations": sum(current.num_messages() for current in plan.rounds),
        "buffers": int(weight_sync.traffic.buffers().max() * 2),
        "model": 2 * sum(tensor.numel for tensor in plan.plan.tensors),
        "tensors": len(plan.plan.tensors),
        "loads": len(weight_sync.tensors.units(rank % grid.rollout_tp)),
        "digests": sum(len(group[0]) for group in digest_groups(plan.digest_slices())),
    }


def built_engine(job: dict[str, Any], mesh: Mesh, weight_sync: WeightSync) -> Any:
    rollout = RolloutConfig(tensor_model_parallel_size=mesh.rollout_tp, engine_options={"kv_cache_gib": 0.03})
    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 128, "eos_token_ids": [2]}
    return build_engine(rollout, job["engine"], mesh, Device("cpu"), tensors=weight_sync.tensors, **options)


def run_rank(path: Path, number: int, job: dict[str, Any], rank: int) -> None:
    os.environ |= {"RANK": str(rank), "MASTER_PORT": str(job["port"])}
    os.environ["LOCAL_RANK"] = str(rank % int(os.environ["LOCAL_WORLD_SIZE"]))
    result = compare_delta(job) if job.get("changes") else compare(job)
    path.with_suffix(f".{number}.{rank}").write_text(json.dumps(result))
    dist.barrier()


def fork_rank(path: Path, number: int, job: dict[str, Any], rank: int) -> int:
    """The process id of the rank."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        die_with_parent(parent)
        run_rank(path, number, job, rank)
        code = 0
    except BaseException:  # noqa: BLE001 - the process must not return into its parent's code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # threads of vLLM and gloo would delay a normal exit


def main(path: Path, first: int) -> int:
    jobs = json.loads(path.read_text())
    if any(job["engine"] for job in jobs):
        vllm_process.preload()
    ranks = range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))
    for number, job in enumerate(jobs):
        children = {fork_rank(path, number, job, rank) for rank in ranks}
        while children:
            child, status = os.wait()
            children.discard(child)
            if status:
                return 1  # the other ranks end with this process
    return 0


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stderr.flush()
    os._exit(code)  # vLLM's preload replaces the code of a normal exit
