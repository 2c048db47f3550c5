"""Benchmarks of conversion, grading, the weight sync, rollouts and training passes, beside what they are compared with.

    python -m tools.benchmarks convert [--gigabytes 2] [--repeats 5] [--cold] [--folder DIR]
    python -m tools.benchmarks grade --data DIR [--problems 200]
    python -m tools.benchmarks sync [--engine | --network | --preset llama-70b | --plan MODEL_FOLDER] [--delta]
    python -m tools.benchmarks overlap [--milliseconds 4] [--workers 1]
    python -m tools.benchmarks passes [--workload "26 M"]
    python -m tools.benchmarks head [--hidden 3584] [--vocabulary 152064]
    python -m tools.benchmarks lora [--workload 26M] [--rank 32]
    python -m tools.benchmarks routes [--steps 3] [--pages DIR]
    python -m tools.benchmarks waiting [--steps 12]
    python -m tools.benchmarks roles [--steps 12] [--decode 0.025] [--update 0.8]
    python -m tools.benchmarks saving [--steps 5] [--folder DIR]
    python -m tools.benchmarks scale [--ranks 64 512 4096] [--samples 65536]
    python -m tools.benchmarks start [--ranks 2] [--engine transformers] [--cold] [--against CHECKOUT]
    python -m tools.benchmarks step [--workload 0.4M] [--rounds 3] [--plain] [--trl-vllm]
    python -m tools.benchmarks rollout | update | transformers | exact [--workload 0.4M] [--repeats 5]

convert: a random Llama of that size, Hugging Face -> Megatron -> Hugging Face. Compared with `cp` of the same files, and
with `cp` followed by `sha256sum` of the copy, since the converter hashes what it writes. All take turns; the medians are
printed. A time ends when the command returns (the converter's files are on the disk by then, those of cp are not), and
again when `sync` returns. Everything runs in one process, so Python's start is not counted. mbridge too, if installed.

grade: answers graded per second on one core, of DIR/gsm8k/test.jsonl and DIR/math/test.jsonl, the latter beside math-verify.

sync: a random Llama of 0.56 GB on four ranks, synced by the plan and, in turn, as it was before, with every tensor whole on
every rank. --engine: into vLLM. --network: between two network namespaces (root). --delta: syncs that send changes beside full
ones, also with --network. --preset, --plan: large layouts, only planned.

overlap: rewards graded while the engine generates, beside rewards graded afterwards; in a step and in a validation. passes: the
training part of a step with and without passes that it can do without. head: bytes per token that the output head reads and
writes, by torch and by the fused kernels; on a GPU also seconds.

lora: step time, memory and sync bytes of LoRA, merged and split, beside training of all weights, on two ranks. routes: engine
against trainer on experts in bfloat16, with the engine's routes beside without.

waiting: two ranks with responses of very different lengths: steps that wait for all beside partial rollouts, and requests
of one rank beside requests that ranks share. roles: steps of ranks that train and draw in turn beside ranks of two roles.

saving: checkpoints that are written while training goes on, beside checkpoints that the run waits for. scale: the host side of
a step of 65,536 samples in worlds of 64, 512 and 4,096 ranks, simulated in this process.

start: from the command to the first sampled token on the CPU, and where the time goes; beside another checkout.

step: whole steps beside TRL's GRPOTrainer, which is installed into an environment of its own.

rollout: an engine's `generate` beside bare `vllm.LLM.generate`. update: the policy's update beside Megatron-Core's forward and
backward of the same packs. transformers: the same beside a training step of transformers. exact: log-probabilities, update and
rollout with `model.exact` beside without. Each on one rank.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.benchmarks import (
    grading,
    head,
    lora,
    overlap,
    passes,
    rank,
    roles,
    routes,
    saving,
    scale,
    start,
    step,
    sync,
    waiting,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a checkout that is not installed

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
    """Write a Hugging Face folder of about that size, 1 GB per file; returns its bytes. Random bits cannot be compressed."""
    import torch

    from grpo_megatron.convert.hf import plan_shards, safetensors_header
    from grpo_megatron.convert.output import output_folder
    from grpo_megatron.models.families import architecture_of, hf_shapes

    layers = max(1, round((gigabytes * 1e9 - 4 * 32000 * 4096) / 354e6))
    config = {**LAYER, "num_hidden_layers": layers}
    shapes = hf_shapes(architecture_of(config))
    dtypes = dict.fromkeys(shapes, torch.bfloat16)
    noise = os.urandom(1 << 24)
    weight_map: dict[str, str] = {}
    with output_folder(folder, int(gigabytes * 1e9)) as partial:
        (partial / "config.json").write_text(json.dumps(config))
        for name, file_shapes in plan_shards(shapes, dtypes, 1 << 30).items():
            size = sum(torch.Size(shape).numel() for shape in file_shapes.values()) * 2
            weight_map |= dict.fromkeys(file_shapes, name)
            with (partial / name).open("wb") as file:
                file.write(safetensors_header(file_shapes, dtypes))
                for written in range(0, size, len(noise)):
                    file.write(noise[: size - written])
        if len(set(weight_map.values())) > 1:
            index = {"metadata": {}, "weight_map": weight_map}
            (partial / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(file.stat().st_size for file in folder.iterdir())


Times = tuple[float, float, float]  # seconds until the action returned, until sync returned, and of processor time


def timed(action: Callable[[], Any]) -> Times:
    os.sync()
    begin, processor_begin = time.perf_counter(), processor_seconds()
    action()
    returned = time.perf_counter()
    os.sync()
    return returned - begin, time.perf_counter() - begin, processor_seconds() - processor_begin


def processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    os.sync()
    for path in folder.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def convert(args: argparse.Namespace) -> int:
    from grpo_megatron.convert import to_hf, to_megatron

    with tempfile.TemporaryDirectory(dir=args.folder, prefix="benchmark-convert-") as root:
        hf, megatron, out = (Path(root) / name for name in ("hf", "megatron", "out"))
        size = random_model(hf, args.gigabytes)
        to_megatron(hf, megatron, quiet=True)

        def run(*command: Any) -> None:
            subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)

        def copy_and_hash() -> None:
            run("cp", "-r", hf, out)
            run("sha256sum", *sorted(out.iterdir()))

        rows: dict[str, tuple[Path, Callable[[], Any]]] = {
            "cp -r": (hf, lambda: run("cp", "-r", hf, out)),
            "cp -r, then sha256sum": (hf, copy_and_hash),
            "to-megatron": (hf, lambda: to_megatron(hf, out, quiet=True)),
            "to-hf": (megatron, lambda: to_hf(megatron, out, quiet=True)),
            "to-hf --no-hashes": (megatron, lambda: to_hf(megatron, out, quiet=True, no_hashes=True)),
        }
        times: dict[str, list[Times]] = {name: [] for name in rows}
        for _ in range(args.repeats):
            for name, (source, action) in rows.items():
                if args.cold:
                    forget(source)
                times[name].append(timed(action))
                shutil.rmtree(out)
        load = os.getloadavg()[0]
        state = "dropped from" if args.cold else "in"
        print(f"{size / 1e9:.2f} GB, {os.cpu_count()} cores, load {load:.1f}, sources {state} the page cache,", end=" ")
        print(f"medians of {args.repeats}")
        report({name: tuple(map(statistics.median, zip(*t, strict=True))) for name, t in times.items()}, size)
        print(beside_mbridge(hf, size, args.repeats))
    return 0


def report(medians: dict[str, tuple[float, ...]], size: int) -> None:
    base = medians["cp -r"]
    print(f"{'':24s} returns   MB/s   x cp   on disk   x cp   processor   x cp")
    for name, (returned, synced, processor) in medians.items():
        print(
            f"{name:24s} {returned:6.2f} s {size / returned / 1e6:6.0f} {returned / base[0]:6.2f}  {synced:6.2f} s"
            f" {synced / base[1]:6.2f}    {processor:6.2f} s {processor / base[2]:6.2f}"
        )


def beside_mbridge(folder: Path, size: int, repeats: int) -> str:
    """Seconds to fill a model in memory, by this project's loader and by mbridge's.

    mbridge writes no checkpoint, and its own models need Transformer Engine on a GPU. Its conversion runs on a CPU:
    `load_weights` into this project's model, whose parameters get Transformer Engine's names for it.
    """
    if importlib.util.find_spec("mbridge") is None:
        return "mbridge: not installed, not measured"
    import torch
    from mbridge import AutoBridge  # type: ignore[import-not-found]

    from grpo_megatron.config import MegatronConfig
    from grpo_megatron.device import Device
    from grpo_megatron.models.build import build_model
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.weights.hf_folder import load_hf
    from grpo_megatron.models.weights.stream import TE_NAMES, unwrapped
    from grpo_megatron.parallel.mesh import build_mesh

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29765"}
    device, arch = Device("cpu"), read_architecture(folder)
    mesh = build_mesh(device, tp=1, pp=1, rollout_tp=1)
    model = build_model(arch, MegatronConfig(), "bfloat16", device)
    inner: Any = unwrapped(model)

    class Renamed(torch.nn.Module):
        decoder = inner.decoder

        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
            out = {}
            for name, tensor in inner.state_dict().items():
                local = next((end for end in TE_NAMES if name.endswith("." + end)), None)
                out[name.removesuffix(local) + TE_NAMES[local] if local else name] = tensor
            return out

    bridge = AutoBridge.from_pretrained(str(folder))
    own_times, mbridge_times = [], []
    same = True
    for _ in range(repeats):
        own_times.append(timed(lambda: load_hf(model, folder, arch, mesh))[0])
        weights = [parameter.detach().view(torch.int16).clone() for parameter in model.parameters()]
        mbridge_times.append(timed(lambda: bridge.load_weights([Renamed()], str(folder)))[0])
        for weight, parameter in zip(weights, model.parameters(), strict=True):
            same = same and torch.equal(weight, parameter.detach().view(torch.int16))
        del weights
    own, mbridge = statistics.median(own_times), statistics.median(mbridge_times)
    return (
        f"into a model in memory, same contents: {same}; grpo_megatron {own:.2f} s, {size / own / 1e6:.0f} MB/s; mbridge"
        f" {mbridge:.2f} s, {size / mbridge / 1e6:.0f} MB/s"
    )


def grade(args: argparse.Namespace) -> int:

    from grpo_megatron.config import ConfigError

    try:
        grading.print_rates(args.data, args.problems)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    convert_parser = commands.add_parser("convert", help="checkpoint conversion against cp")
    convert_parser.add_argument("--gigabytes", type=float, default=2.0)
    convert_parser.add_argument("--repeats", type=int, default=5)
    convert_parser.add_argument(
        "--cold", action="store_true", help="drop the sources from the page cache before each run"
    )
    convert_parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure"
    )
    convert_parser.set_defaults(run=convert)
    grade_parser = commands.add_parser("grade", help="grading, beside plain math-verify")
    grade_parser.add_argument(
        "--data", type=Path, required=True, help="folder with gsm8k/test.jsonl and math/test.jsonl"
    )
    grade_parser.add_argument(
        "--problems", type=int, default=200, help="number of MATH problems; three completions each"
    )
    grade_parser.set_defaults(run=grade)
    sync_parser = commands.add_parser("sync", help="the weight sync, old and new")
    sync.add_arguments(sync_parser)
    sync_parser.set_defaults(run=sync.sync)
    overlap_parser = commands.add_parser("overlap", help="rewards graded during and after generation")
    overlap.add_arguments(overlap_parser)
    overlap_parser.set_defaults(run=overlap.overlap)
    passes_parser = commands.add_parser("passes", help="training with and without passes that can be left out")
    passes.add_arguments(passes_parser)
    passes_parser.set_defaults(run=passes.passes)
    head_parser = commands.add_parser("head", help="the output head by torch and by fused kernels")
    head.add_arguments(head_parser)
    head_parser.set_defaults(run=head.run)
    lora_parser = commands.add_parser("lora", help="LoRA, merged and split, beside training of all weights")
    lora.add_arguments(lora_parser)
    lora_parser.set_defaults(run=lora.lora)
    routes_parser = commands.add_parser("routes", help="a mixture of experts with and without route replay")
    routes.add_arguments(routes_parser)
    routes_parser.set_defaults(run=routes.routes)
    waiting_parser = commands.add_parser("waiting", help="partial rollouts, and requests that ranks share")
    waiting.add_arguments(waiting_parser)
    waiting_parser.set_defaults(run=waiting.waiting)
    roles_parser = commands.add_parser("roles", help="ranks of two roles, beside ranks that train and draw in turn")
    roles.add_arguments(roles_parser)
    roles_parser.set_defaults(run=roles.roles)
    saving_parser = commands.add_parser("saving", help="checkpoints while training goes on")
    saving.add_arguments(saving_parser)
    saving_parser.set_defaults(run=saving.saving)
    scale_parser = commands.add_parser("scale", help="the host side of a step with thousands of ranks")
    scale.add_arguments(scale_parser)
    scale_parser.set_defaults(run=scale.scale)
    start_parser = commands.add_parser("start", help="the start of a run, up to the first sampled token")
    start.add_arguments(start_parser)
    start_parser.set_defaults(run=start.start)
    step_parser = commands.add_parser("step", help="whole steps, beside TRL")
    step.add_arguments(step_parser)
    step_parser.set_defaults(run=step.step)
    for name, (run, text) in rank.BENCHMARKS.items():
        rank_parser = commands.add_parser(name, help=text)
        rank.add_arguments(rank_parser)
        rank_parser.set_defaults(run=run)
    args = parser.parse_args(arguments)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
