"""Benchmarks that print what they compare with.

    python tools/benchmark.py convert [--gigabytes 2] [--folder /tmp]

convert: a random Llama of that size, Hugging Face -> Megatron -> Hugging Face, against `cp` of the same files. Each is
timed until the data are on the disk (sync), sources in the page cache. Also mbridge's loader, where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a checkout that is not installed

LAYER = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def random_model(folder: Path, gigabytes: float) -> int:
    """A Hugging Face folder of about that size, 1 GB a file; returns its bytes. Random bits: nothing can be compressed."""
    import torch

    from grpo_megatron.convert.folder import replacing
    from grpo_megatron.convert.shards import header, plan
    from grpo_megatron.models.families import architecture_of, hf_shapes

    layers = max(1, round((gigabytes * 1e9 - 4 * 32000 * 4096) / 354e6))
    config = {**LAYER, "num_hidden_layers": layers}
    shapes = hf_shapes(architecture_of(config))
    noise = os.urandom(1 << 24)
    weight_map: dict[str, str] = {}
    with replacing(folder, int(gigabytes * 1e9)) as partial:
        (partial / "config.json").write_text(json.dumps(config))
        for name, held in plan(shapes, torch.bfloat16, 1 << 30).items():
            start = header(held, torch.bfloat16)
            size = sum(torch.Size(shape).numel() for shape in held.values()) * 2
            weight_map |= dict.fromkeys(held, name)
            with (partial / name).open("wb") as file:
                file.write(start)
                for done in range(0, size, len(noise)):
                    file.write(noise[: size - done])
        if len(set(weight_map.values())) > 1:
            index = {"metadata": {}, "weight_map": weight_map}
            (partial / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(file.stat().st_size for file in folder.iterdir())


def timed(action: Callable[[], Any]) -> float:
    os.sync()
    start = time.perf_counter()
    action()
    os.sync()
    return time.perf_counter() - start


def convert(args: argparse.Namespace) -> int:
    from grpo_megatron.convert.conversion import to_hf, to_megatron

    with tempfile.TemporaryDirectory(dir=args.folder, prefix="benchmark-convert-") as root:
        hf, megatron, back, copy = (Path(root) / name for name in ("hf", "megatron", "back", "copy"))
        size = random_model(hf, args.gigabytes)
        rows: list[tuple[str, float]] = []

        def measure(name: str, action: Callable[[], Any]) -> None:
            rows.append((name, timed(action)))

        def cp(source: Path) -> None:
            subprocess.run(["cp", "-r", source, copy], check=True)

        measure("cp -r (HF folder)", lambda: cp(hf))
        shutil.rmtree(copy)
        measure("to-megatron", lambda: to_megatron(hf, megatron, quiet=True))
        measure("cp -r (checkpoint)", lambda: cp(megatron))
        shutil.rmtree(copy)
        measure("to-hf, hashes compared", lambda: to_hf(megatron, back, quiet=True))
        shutil.rmtree(back)
        measure("to-hf --no-hashes", lambda: to_hf(megatron, back, quiet=True, check_hashes=False))
        base = rows[0][1]
        print(f"{size / 1e9:.2f} GB, {os.cpu_count()} cores")
        for name, seconds in rows:
            print(f"{name:24s} {seconds:7.2f} s  {size / seconds / 1e6:7.0f} MB/s  {seconds / base:5.2f} x cp")
        if importlib.util.find_spec("mbridge") is None:
            print("mbridge                  not installed, not measured")
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("convert", help="checkpoint conversion against cp")
    one.add_argument("--gigabytes", type=float, default=2.0)
    one.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    one.set_defaults(run=convert)
    args = parser.parse_args(arguments)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
