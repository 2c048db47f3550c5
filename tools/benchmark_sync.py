"""`tools/benchmark.py sync`: the weight sync, planned for large layouts, timed on this machine, and over a slow network."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HANG_S = 1200.0
RANK = Path(__file__).with_name("benchmark_sync_rank.py")
MODEL: dict[str, Any] = {  # 0.5 GB in bfloat16, with the proportions of a layer of a large model
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
}


def free_port() -> int:
    while True:
        port = random.SystemRandom().choice(range(10_000, 32_768))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def run_world(job: dict[str, Any], prefixes: Sequence[list[str]], address: str, per_node: int) -> list[dict[str, Any]]:
    """Start one process per prefix (what it is started with); their results in rank order."""
    with tempfile.TemporaryDirectory(prefix="benchmark-sync-") as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        world = {"WORLD_SIZE": len(prefixes), "LOCAL_WORLD_SIZE": per_node, "MASTER_ADDR": address}
        world |= {"MASTER_PORT": free_port(), "OMP_NUM_THREADS": 1, **job.get("env", {})}
        processes = []
        try:
            for rank, prefix in enumerate(prefixes):
                env = {**os.environ, **{k: str(v) for k, v in world.items()}}
                env |= {"RANK": str(rank), "LOCAL_RANK": str(rank % per_node)}
                processes.append(subprocess.Popen([*prefix, sys.executable, RANK, path], env=env))
            deadline = time.monotonic() + HANG_S
            for rank, process in enumerate(processes):
                if process.wait(max(0.0, deadline - time.monotonic())):
                    raise SystemExit(f"rank {rank} ended with {process.returncode}")
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return [json.loads(path.with_suffix(f".{rank}").read_text()) for rank in range(len(prefixes))]


def test() -> None:
    job = {"config": MODEL, "tp": 2, "pp": 2, "rollout_tp": 1, "bucket_megabytes": 512, "repeats": 3, "engine": None}
    for tp, pp, rtp in ((2, 2, 1), (2, 1, 2)):
        for r in [
            run_world(
                {**job, "tp": tp, "pp": pp, "rollout_tp": rtp, "ways": ["old", "new", "memcpy"]},
                [[]] * 4,
                "127.0.0.1",
                4,
            )[0]
        ]:
            print(tp, pp, rtp, {k: v for k, v in r.items() if k != "repeats"})
            for x in r["repeats"]:
                print(
                    {
                        k: (
                            round(v["seconds"], 2),
                            round(v["processor"], 2),
                            {a: round(b, 2) for a, b in v.get("shares", {}).items()},
                        )
                        for k, v in x.items()
                    }
                )


if __name__ == "__main__":
    test()
