"""`tools.benchmarks convert`: checkpoint conversion, beside cp and mbridge."""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
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

from grpo_megatron.config import ConfigError
from grpo_megatron.evaluation.grading import grade
from grpo_megatron.rewards import extractors, rewards
from grpo_megatron.rewards.math.value import import_math_verify
from grpo_megatron.rewards.pool import RewardPool

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

    from grpo_megatron.convert.output import output_folder
    from grpo_megatron.convert.source import plan_shards, safetensors_header
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


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="drop the sources from the page cache before each run")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")


def add_grade_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k/test.jsonl and math/test.jsonl")
    parser.add_argument("--problems", type=int, default=200, help="number of MATH problems; three completions each")


def grade_answers(args: argparse.Namespace) -> int:
    try:
        print_rates(args.data, args.problems)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


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


# Answers per second that one core grades: GSM8K and MATH here, MATH by plain math-verify (`tools.benchmarks grade`).
#
# The completions are the reference solutions of the given files. Of MATH, one third of them are the solutions themselves,
# one third box the reference in another spelling, and one third box the answer to another problem: two of three are right.

Pairs = list[tuple[str, str]]  # (answer, completion)


def print_rates(data: Path, problems: int) -> None:
    """Print the table. Raises ConfigError when `data` has no gsm8k/test.jsonl or math/test.jsonl."""
    rows = []
    gsm8k = [(row["answer"].rpartition("#### ")[2], row["answer"]) for row in _read_rows(data / "gsm8k" / "test.jsonl")]
    rows.append(
        ("GSM8K, the reward", *_processor_rate(gsm8k, lambda answer, text: rewards.get("gsm8k")(text, answer)["acc"]))
    )
    rows.append(("GSM8K, one worker process", *_pool_rate("gsm8k", gsm8k)))
    import_math_verify()
    math = math_pairs(data / "math" / "test.jsonl", problems)
    rows.append(
        ("MATH, the reward", *_processor_rate(math, lambda answer, text: rewards.get("math")(text, answer)["acc"]))
    )
    rows.append(("MATH, one worker process", *_pool_rate("math", math)))
    rows.append(("MATH, plain math-verify", *_processor_rate(math, _plain_math_verify())))
    print(f"{'':28s}{'answers':>9s}{'right':>7s}{'answers/s':>11s}")
    for name, count, right, rate in rows:
        print(f"{name:28s}{count:9d}{right:7d}{rate:11,.0f}")
    print(
        f"{len(math) * 2 // 3} of MATH's completions should be right. Rates with workers are per second of wall clock,"
        " the others per second of processor time."
    )


def math_pairs(path: Path, problems: int) -> Pairs:
    """Three completions for each of the first `problems`."""
    rows = _read_rows(path)[:problems]
    extract = extractors.get("math").extract
    answers = [extract(row["solution"]) or "" for row in rows]
    pairs: Pairs = []
    for index, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        other = next((text for text in answers[index + 1 :] + answers if text != answer), "")
        respelt = answer.replace("\\frac", "\\dfrac").replace(",", ", ")
        pairs += [
            (answer, row["solution"]),
            (answer, f"It is $\\boxed{{ {respelt} }}$."),
            (answer, f"It is $\\boxed{{{other}}}$."),
        ]
    return pairs


def _read_rows(path: Path) -> list[dict[str, str]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(
            f"cannot read {str(path)!r}: {error.strerror}; --data names a folder with gsm8k/ and math/"
        ) from None


def _processor_rate(pairs: Pairs, is_right: Callable[[str, str], float | bool]) -> tuple[int, int, float]:
    """(number of answers, number of right ones, answers per second of processor time)."""
    start = time.process_time()
    right = sum(bool(is_right(answer, text)) for answer, text in pairs)
    return len(pairs), right, len(pairs) / (time.process_time() - start)


def _pool_rate(task: str, pairs: Pairs) -> tuple[int, int, float]:
    """As `_processor_rate`, but per second of wall clock: this process and one worker share the work."""
    with RewardPool(1) as pool:
        pool.self_test([task])
        start = time.monotonic()
        grades = grade(task, [answer for answer, _ in pairs], [text for _, text in pairs], pool)
        seconds = time.monotonic() - start
    return len(pairs), sum(verdict.correct for verdict in grades), len(pairs) / seconds


def _plain_math_verify() -> Callable[[str, str], bool]:
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def is_right(answer: str, text: str) -> bool:
        return bool(math_verify.verify(math_verify.parse(f"${answer}$"), math_verify.parse(text)))

    return is_right
