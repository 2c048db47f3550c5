"""One rank of `tools/benchmark.py sync`: a real Megatron shard, synced the old way, the new way, or copied, in turn.

Started by benchmark_sync.py with torchrun's environment and the path of a job (JSON). Writes its figures beside it.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_megatron.config import MegatronConfig, RolloutConfig
from grpo_megatron.device import Device
from grpo_megatron.models.build import build_model
from grpo_megatron.models.families import architecture_of, hf_shapes
from grpo_megatron.models.resharding import Resharding
from grpo_megatron.models.sync_parameters import engine_spans
from grpo_megatron.models.weights import hf_weights, stage_owners
from grpo_megatron.parallel.mesh import Mesh, build_mesh
from grpo_megatron.rollout.build import build_engine
from grpo_megatron.rollout.engine import stable_hash
from grpo_megatron.sync.rank_plan import RankPlan
from grpo_megatron.types import WeightBucket

NOISE = 1 << 20  # random elements that the weights are made of


class Shares:
    """Seconds of a sync by what they were spent on. Nested parts count for themselves only."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inner: list[float] = []

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            spent = time.perf_counter() - begin
            self.seconds[name] += spent - self._inner.pop()
            if self._inner:
                self._inner[-1] += spent

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
        for tensor in plan.plan.tensors:
            start, stop = plan.plan.spans[tensor.name][plan.engine_rank]
            shape = (*tensor.shape[: tensor.axis], stop - start, *tensor.shape[tensor.axis + 1 :])
            self._parts[tensor.name] = torch.zeros(shape, dtype=torch.bfloat16), tensor.axis, start

    def load(self, bucket: WeightBucket) -> None:
        for name, tensor in bucket:
            memory, axis, start = self._parts[name]
            memory.copy_(tensor.narrow(axis, start, memory.shape[axis]))

    def checksum(self) -> list[int]:
        return [int(memory.view(torch.int16).sum()) for memory, _, _ in self._parts.values()]

    def clear(self) -> None:
        for memory, _, _ in self._parts.values():
            memory.zero_()


def fill(model: torch.nn.Module, seed: int) -> None:
    """Random weights, equal on ranks with the same shard (`seed`)."""
    noise = torch.randn(NOISE, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), NOISE):
                part = flat[start : start + NOISE]
                part.copy_(noise.roll(number)[: part.numel()])


class Old:
    """The sync before it was planned: every tensor whole on every rank, checked bucket by bucket.

    What the census did then is repeated here: isfinite on every tensor, and per bucket two agreements and a comparison of
    the names over all ranks.
    """

    def __init__(self, model: torch.nn.Module, arch: Any, mesh: Mesh, bucket_megabytes: int) -> None:
        self._mesh, self._stages = mesh, stage_owners(model, arch, mesh)
        self._gather = lambda: hf_weights(model, arch, mesh, bucket_megabytes << 20, self._stages)

    def stream(self, shares: Shares) -> Iterator[WeightBucket]:
        stream = shares.buckets(self._gather(), "gather")
        while True:
            bucket = next(stream, None)
            with shares.of("isfinite"):
                finite = torch.stack([tensor.isfinite().all() for _, tensor in bucket or []] or [torch.tensor(True)])
                problem = None if all(finite.tolist()) else "non-finite values"
            with shares.of("agreements"):
                self._agree(bucket, problem)
            if bucket is None:
                return
            yield [(name, tensor.detach()) for name, tensor in bucket]

    def _agree(self, bucket: WeightBucket | None, problem: str | None) -> None:
        self._mesh.agree(problem)
        names = "the end" if bucket is None else ", ".join(name for name, _ in bucket)
        extremes = torch.tensor([stable_hash(names), -stable_hash(names)])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._mesh.control)
        self._mesh.agree(None if extremes.sum() == 0 else "the ranks' streams differ")


class New:
    """The planned sync. The ranks agree at the start (within `Resharding.stream`) and once at the end."""

    def __init__(self, model: torch.nn.Module, resharding: Resharding) -> None:
        self._model, self._resharding = model, resharding

    def stream(self, shares: Shares) -> Iterator[WeightBucket]:
        yield from shares.buckets(self._resharding.stream(self._model, version=0), "exchange")
        with shares.of("agreements"):
            self._resharding.mesh.agree(None)


def load_shard(stream: Iterator[WeightBucket], shard: Shard, shares: Shares) -> None:
    for bucket in stream:
        with shares.of("load"):
            shard.load(bucket)
        del bucket


def load_engine(stream: Iterator[WeightBucket], engine: Any, shares: Shares) -> None:
    """Into vLLM, without the checks of VllmEngine.load_weights, which the streams have themselves."""
    llm = engine._llm
    with shares.of("load"):
        llm.start_weight_update()
    for bucket in stream:
        with shares.of("load"):
            llm.update_weights({"update_info": {"tensors": bucket}})
        del bucket
    with shares.of("load"):
        llm.finish_weight_update(weight_version="0")


def copies(model: torch.nn.Module) -> Callable[[], None]:
    """A memcpy of the shard, between memory that both exist already."""
    parameters = [parameter.detach() for parameter in model.parameters()]
    targets = [torch.zeros_like(parameter) for parameter in parameters]

    def copy() -> None:
        for target, parameter in zip(targets, parameters, strict=True):
            target.copy_(parameter)

    return copy


def measured(mesh: Mesh, action: Callable[[], Any]) -> dict[str, float]:
    """Seconds until all ranks have finished, and this rank's seconds of processor time."""
    dist.barrier(group=mesh.control)
    begin, processor = time.perf_counter(), time.process_time()
    action()
    own = time.perf_counter() - begin
    used = time.process_time() - processor
    dist.barrier(group=mesh.control)
    return {"seconds": time.perf_counter() - begin, "own": own, "processor": used}


def main(path: Path) -> None:
    job = json.loads(path.read_text())
    device, arch = Device("cpu"), architecture_of(job["config"])
    mesh = build_mesh(device, tp=job["tp"], pp=job["pp"], rollout_tp=job["rollout_tp"], timeout_s=300)
    sizes = {"tensor_model_parallel_size": mesh.tp, "pipeline_model_parallel_size": mesh.pp}
    model = build_model(arch, MegatronConfig.model_validate(sizes), "bfloat16", device)
    fill(model, seed=mesh.tp_rank + mesh.tp * mesh.pp_rank)
    begin = time.perf_counter()
    resharding = Resharding(
        arch,
        mesh,
        stage_owners(model, arch, mesh),
        engine_spans(arch, mesh.rollout_tp),
        dtype=torch.bfloat16,
        device=device.torch_device,
        bucket_megabytes=job["bucket_megabytes"],
    )
    planned = time.perf_counter() - begin
    ways: dict[str, Any] = {"old": Old(model, arch, mesh, job["bucket_megabytes"]), "new": New(model, resharding)}
    ways = {name: way for name, way in ways.items() if name in job["ways"]}
    copy = copies(model) if "memcpy" in job["ways"] else None
    shard, engine = None, None
    if job["engine"]:
        rollout = RolloutConfig(tensor_model_parallel_size=mesh.rollout_tp, engine_options={"kv_cache_gib": 0.03})
        options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 128, "eos_token_ids": [2]}
        engine = build_engine(rollout, job["engine"], mesh, device, expected=hf_shapes(arch), **options)
    else:
        shard = Shard(resharding.plan)
    rounds: list[dict[str, Any]] = []
    checksums = {}
    for _ in range(job["repeats"] + 1):  # the first one warms up
        figures: dict[str, Any] = {}
        for name, way in ways.items():
            shares = Shares()
            if shard is not None:
                shard.clear()
                figures[name] = measured(mesh, lambda: load_shard(way.stream(shares), shard, shares))
                checksums[name] = shard.checksum()
            else:
                figures[name] = measured(mesh, lambda: load_engine(way.stream(shares), engine, shares))
            figures[name]["shares"] = dict(shares.seconds)
        if copy is not None:
            figures["memcpy"] = measured(mesh, copy)
        rounds.append(figures)
    received = [int(side.sum(axis=1)[mesh.rank]) * 2 for side in resharding.traffic.received.values()]
    result = {"repeats": rounds[1:], "planned": planned, "received": received, "rounds": len(resharding.plan.rounds)}
    result["operations"] = sum(current.messages() for current in resharding.plan.rounds)
    result["same"] = len({tuple(values) for values in checksums.values()}) <= 1
    path.with_suffix(f".{mesh.rank}").write_text(json.dumps(result))
    if engine is not None:
        engine.shutdown()
    dist.barrier(group=mesh.control)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    import os

    os._exit(0)  # threads of vLLM and gloo would delay a normal exit
