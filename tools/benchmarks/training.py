"""`tools.benchmarks passes`: the training part of a step, with and without the passes that it can do without.

One rank on the CPU, two random models. Both ways of a pair take turns on the same batch. Of a step on two ranks, the updates
of both are made one after the other, and the longer one is the step's time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import multiprocessing
import os
import random
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tools.benchmarks.workload import machine

WORKLOADS: dict[str, dict[str, Any]] = {
    "0.4 M": {
        "model": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4},
        "vocab_size": 80,
        "prompts": 16,
        "prompt_length": 24,
        "response_length": 32,
        "long_responses": True,
    },
    "26 M": {
        "model": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8},
        "vocab_size": 4096,
        "prompts": 8,
        "prompt_length": 64,
        "response_length": 128,
        "ratios": True,
    },
}
RATIOS = [(256, 64), (128, 128), (64, 256), (16, 256)]  # prompt and response tokens, 4:1 to 1:16
SAMPLES = 8
LONG = 2000  # tokens of one response of each prompt, where ranks are balanced
Ways = dict[str, Callable[[], Any]]  # the first is what the others are compared with; seconds that a way returns count


def add_passes_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workload", choices=WORKLOADS, action="append", help="default: both")


def passes(args: argparse.Namespace) -> int:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    import torch

    from grpo_megatron.device import Device
    from grpo_megatron.parallel.mesh import build_mesh

    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)
    print(f"{machine()}; {torch.get_num_threads()} threads, medians of {args.repeats}")
    for name in args.workload or WORKLOADS:
        with tempfile.TemporaryDirectory(prefix="benchmark-passes-") as root:
            for title, ways in pairs(Path(root), WORKLOADS[name], mesh).items():
                print(report_passes(f"{name} parameters, {title}", in_turn(ways, args.repeats)))
                sys.stdout.flush()
    return 0


def in_turn(ways: Ways, repeats: int) -> dict[str, float]:
    """Median seconds of each, after one turn that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, way in ways.items():
            begin = time.perf_counter()
            told = way()
            seconds[name].append(time.perf_counter() - begin if told is None else told)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def report_passes(title: str, medians: dict[str, float]) -> str:
    base = next(iter(medians.values()))
    lines = [f"  {name:<44}{value:8.3f} s  {value / base:5.2f} x" for name, value in medians.items()]
    return "\n".join([title, *lines])


def pairs(folder: Path, workload: dict[str, Any], mesh: Any) -> dict[str, Ways]:
    """Title -> the two ways."""
    from grpo_megatron.config import ActorConfig
    from grpo_megatron.device import Device
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.policy import Policy
    from grpo_megatron.training.correction import build_loss

    write_model(folder, workload)
    actor = ActorConfig.model_validate({"use_kl_loss": False, "optim": {"lr": 1e-6}})
    policy = Policy.load(folder, "float32", read_architecture(folder), actor, mesh, Device("cpu"))
    policy.set_optimizer(actor.optim, 1)
    loss = build_loss(actor)
    table, sequences = draw(workload)
    batch = make_batch(table, sequences, actor)

    def separate() -> None:
        batch.old_logprobs = policy.logprobs(batch)
        policy.update(batch, loss)

    def folded() -> None:
        batch.old_logprobs = None
        policy.update(batch, loss)

    def with_reference() -> None:
        policy.logprobs(batch)
        folded()

    # Half of the groups have equal rewards.
    uninformative = replace(
        table, reward=[r if p % 2 else 1.0 for r, p in zip(table.reward, table.prompt_index, strict=True)]
    )
    small = actor.model_copy(update={"ppo_max_token_len_per_gpu": max(map(len, sequences)) * SAMPLES})
    some = make_batch(uninformative, sequences, small)
    assert some.num_forward_only[0] > 0
    all_backward = replace(some, num_forward_only=[])

    def update(batch: Any) -> None:
        policy.update(batch, loss)

    sharing: dict[str, Ways] = {}
    if workload.get("ratios"):
        for prompt, response in RATIOS:
            shape = {**workload, "prompts": 2, "prompt_length": prompt, "response_length": response}
            sharing[f"update, prompt {prompt} and responses of at most {response} tokens"] = {
                "whole rows": functools.partial(update, make_batch(*draw(shape), actor)),
                "rows share their prompt": functools.partial(
                    update, make_batch(*draw(shape), actor.model_copy(update={"share_prompts": True}))
                ),
            }
    balance: dict[str, Ways] = {}
    if workload.get("long_responses"):
        balance[f"the slower of two ranks, one response in {SAMPLES} of {LONG} tokens"] = {
            f"balanced by {name}": functools.partial(slower, batches, update)
            for name, batches in long_tail(workload, actor, policy.arch).items()
        }
    return {
        "old log-probabilities and update": {"a pass of their own": separate, "of the update's pass": folded},
        "KL with a coefficient of 0": {"with the reference's pass": with_reference, "without it": folded},
        "update, half of the groups uninformative": {
            "a backward pass for all rows": functools.partial(update, all_backward),
            "only for rows with an advantage": functools.partial(update, some),
        },
        **balance,
        **sharing,
    }


def long_tail(workload: dict[str, Any], actor: Any, arch: Any) -> dict[str, list[Any]]:
    """Maps what ranks are balanced by to the batches of two ranks, from short responses and a few very long ones."""
    from grpo_megatron.models.flops import sequence_cost

    shape = {**workload, "prompts": 3, "response_length": 300}
    table, sequences = draw(shape, [LONG if row % SAMPLES == 0 else None for row in range(3 * SAMPLES)])
    costs = {"tokens": None, "FLOP": sequence_cost(arch)}
    return {
        name: [make_batch(table, sequences, actor, rank=rank, dp=2, cost=cost) for rank in range(2)]
        for name, cost in costs.items()
    }


def slower(batches: list[Any], update: Callable[[Any], None]) -> float:
    """Seconds of the batch that takes the longest."""
    seconds = []
    for batch in batches:
        begin = time.perf_counter()
        update(batch)
        seconds.append(time.perf_counter() - begin)
    return max(seconds)


def draw(workload: dict[str, Any], lengths: list[int | None] | None = None) -> tuple[Any, list[list[int]]]:
    """The table of one step and its sequences. Responses end after half to all of the limit; half of the rewards are 1.

    `lengths`: of each response in turn; None: as without it.
    """
    from grpo_megatron.types import GroupTable

    rng, vocab = random.Random(0), workload["vocab_size"]
    table = GroupTable([], [], [], [], [], [], [])
    sequences = []
    for p in range(workload["prompts"]):
        prompt = [rng.randrange(vocab) for _ in range(workload["prompt_length"])]
        for i in range(SAMPLES):
            length = rng.randint(workload["response_length"] // 2, workload["response_length"])
            length = (lengths[len(sequences)] if lengths else None) or length
            sequences.append([*prompt, *(rng.randrange(vocab) for _ in range(length))])
            row = (p, i, float(i % 2), len(prompt), length, False, 0)
            columns = ("prompt_index", "index", "reward", "prompt_length", "response_length", "truncated", "holder")
            for name, value in zip(columns, row, strict=True):
                getattr(table, name).append(value)
    return table, sequences


def make_batch(
    table: Any,
    sequences: list[list[int]],
    actor: Any,
    *,
    rank: int = 0,
    dp: int = 1,
    cost: Any = None,
    exact: bool = False,
) -> Any:
    import torch

    from grpo_megatron.algo.plan import make_plan
    from grpo_megatron.config import AlgorithmConfig
    from grpo_megatron.parallel.exchange import build_batch

    count = len(table.groups())
    longest = max(table.response_length)
    plan = make_plan(
        table,
        AlgorithmConfig(),
        actor,
        dp=dp,
        train_batch_size=count,
        max_response_length=longest,
        cost=cost,
        exact=exact,
    )
    rows = plan.rows(rank)
    return build_batch(
        rows,
        plan,
        rank,
        tokens=[torch.tensor(sequences[row]) for row in rows],
        prompt_lengths=[table.prompt_length[row] for row in rows],
        rollout_logprobs=[torch.full((table.response_length[row],), -1.0) for row in rows],
    )


def write_model(folder: Path, workload: dict[str, Any]) -> None:
    """A random Llama as a Hugging Face folder."""
    import torch
    from safetensors.torch import save_file

    from grpo_megatron.models.families import hf_shapes, read_architecture

    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "vocab_size": workload["vocab_size"],
        **workload["model"],
    }
    config["num_key_value_heads"] = config["num_attention_heads"]
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = hf_shapes(read_architecture(folder))
    weights = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


# `tools.benchmarks saving`: checkpoints while training goes on (`trainer.async_save`), beside those that the run waits for.
#
# One rank on the CPU trains a random model of 26 M parameters, and saves weights and optimizer state before the first of a few
# updates. The ways take turns: no save, a save that is awaited, and one that a thread writes. The time ends when the last
# update is done and the checkpoint is complete.
#
# With `--ranks 1,2,4`: what each of so many data-parallel ranks needs on its host besides the model and its optimizer, in a save
# and in a load, and what it writes. Beside ours (models/weights/local_shards.py): the same checkpoint as Megatron gathers it.

SHAPE: dict[str, Any] = {**WORKLOADS["26 M"], "prompts": 1, "response_length": 32}
WAYS: dict[str, bool | None] = {"no save": None, "a save that is awaited": False, "a save in the background": True}


@dataclass
class Times:
    """Seconds of every turn of one way."""

    whole: list[float] = field(default_factory=list)
    stall: list[float] = field(default_factory=list)  # in `save`, `poll` and `wait`
    copy: list[float] = field(default_factory=list)  # of it, in `save`
    update: list[float] = field(default_factory=list)  # medians over the turn's updates


def add_saving_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=5, help="updates in a turn, of which the first follows the save")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", help="measure host bytes of so many ranks instead, as 1,2,4", metavar="N,...")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")


def saving(args: argparse.Namespace) -> int:
    if args.ranks:
        return of_ranks(args)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), "0") | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1")
    import torch

    from grpo_megatron.device import Device
    from grpo_megatron.parallel.mesh import build_mesh

    torch.set_num_threads(1)
    print(machine())
    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="benchmark-saving-") as root:
        print(measure(Path(root), mesh, args), flush=True)
    os._exit(0)  # threads of gloo would delay a normal exit


def measure(root: Path, mesh: Any, args: argparse.Namespace) -> str:
    from grpo_megatron.config import ActorConfig, Config
    from grpo_megatron.device import Device
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.policy import Policy
    from grpo_megatron.training.checkpoint import Checkpoints
    from grpo_megatron.training.correction import build_loss

    write_model(root, SHAPE)
    actor = ActorConfig.model_validate({"use_kl_loss": False, "optim": {"lr": 1e-6}})
    policy = Policy.load(root, "float32", read_architecture(root), actor, mesh, Device("cpu"))
    policy.set_optimizer(actor.optim, 1)
    batch, loss = make_batch(*draw(SHAPE), actor), build_loss(actor)
    config = Config.model_validate({"model": {"path": root}, "data": {"train_files": ["train.jsonl"]}})
    size = 0

    gc.collect()
    gc.freeze()  # as in a run, whose imports are frozen: Megatron collects garbage in every save

    def turn(in_background: bool | None, times: Times) -> None:
        nonlocal size
        folder = root / "output"
        checkpoints = Checkpoints(folder, mesh, 1, in_background=bool(in_background))
        os.sync()
        begin = time.perf_counter()
        stall, updates = 0.0, []
        if in_background is not None:
            checkpoints.save(1, policy, config)
            stall += time.perf_counter() - begin
        times.copy.append(stall)
        for _ in range(args.steps):
            started = time.perf_counter()
            batch.old_logprobs = None
            policy.update(batch, loss)
            updated = time.perf_counter()
            checkpoints.poll()
            stall += time.perf_counter() - updated
            updates.append(updated - started)
        waited = time.perf_counter()
        checkpoints.wait()
        times.stall.append(stall + time.perf_counter() - waited)
        times.whole.append(time.perf_counter() - begin)
        times.update.append(statistics.median(updates))
        size = max(size, sum(file.stat().st_size for file in folder.rglob("*")))
        shutil.rmtree(folder, ignore_errors=True)

    measured = {name: Times() for name in WAYS}
    for _ in range(args.repeats + 1):  # the first turn is not counted
        for name, in_background in WAYS.items():
            turn(in_background, measured[name])
    return report_saving(measured, size, args)


def report_saving(measured: dict[str, Times], size: int, args: argparse.Namespace) -> str:
    lines = [f"26 M parameters, {size / 1e9:.2f} GB in a checkpoint, {args.steps} updates; medians of {args.repeats}"]
    base = statistics.median(measured["no save"].whole[1:])
    for name, times in measured.items():
        columns = (times.whole, times.stall, times.copy, times.update)
        whole, stall, copy, update = (statistics.median(values[1:]) for values in columns)
        lines.append(
            f"  {name:<28}{whole:7.2f} s {whole / base:5.2f} x   the run waits {stall:6.3f} s, {copy:6.3f} s of them in"
            f" the step that saves; an update {update:6.3f} s"
        )
    return "\n".join(lines)


# -- Host bytes of data-parallel ranks ---------------------------------------------------------------------------------

PIECES, GATHERED = "pieces", "as Megatron gathers"


def of_ranks(args: argparse.Namespace) -> int:
    os.environ["PYTHONWARNINGS"] = "ignore"  # of the libraries, in every rank
    context = multiprocessing.get_context("spawn")
    print(machine())
    print(
        f"{'ranks':>5} {'way':<20}{'save: most on a rank':>22}{'load':>9}{'written, most':>15}{'least':>9}{'wait':>9}  (MB, s)"
    )
    for count in map(int, args.ranks.split(",")):
        with (
            tempfile.TemporaryDirectory(dir=args.folder, prefix="benchmark-saving-") as folder,
            socket.socket() as probe,
        ):
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            probe.close()
            write_model(Path(folder), SHAPE)
            with context.Pool(count) as pool:
                tasks = [pool.apply_async(one_rank, (rank, count, port, folder, args.repeats)) for rank in range(count)]
                found = [task.get() for task in tasks]
        for way in (PIECES, GATHERED):
            save, load, written, wait = zip(*(rank[way] for rank in found), strict=True)
            print(
                f"{count:>5} {way:<20}{max(save) / 1e6:>22.0f}{max(load) / 1e6:>9.0f}{max(written) / 1e6:>15.0f}"
                f"{min(written) / 1e6:>9.0f}{max(wait):>9.2f}",
                flush=True,
            )
    return 0


def one_rank(rank: int, count: int, port: int, folder: str, repeats: int) -> dict[str, tuple[float, ...]]:
    """Per way: most bytes besides what was there before a save, before a load; bytes written; median seconds of a save."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    import torch

    from grpo_megatron.config import ActorConfig, Config
    from grpo_megatron.device import Device
    from grpo_megatron.models.families import read_architecture
    from grpo_megatron.models.policy import Policy
    from grpo_megatron.models.weights import sharded_state
    from grpo_megatron.parallel.mesh import build_mesh, destroy_mesh
    from grpo_megatron.training.checkpoint import Checkpoints

    torch.set_num_threads(1)
    root = Path(folder)
    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)
    megatron = {"use_distributed_optimizer": True}
    actor = ActorConfig.model_validate({"use_kl_loss": False, "optim": {"lr": 1e-6}, "megatron": megatron})
    policy = Policy.load(root, "float32", read_architecture(root), actor, mesh, Device("cpu"))
    policy.set_optimizer(actor.optim, 1)
    config = Config.model_validate({"model": {"path": root}, "data": {"train_files": ["train.jsonl"]}})
    whole = {"optimizer_as_local_shards": contextlib.nullcontext, "divide_among_replicas": lambda model, mesh: model}
    found = {}
    for way in (PIECES, GATHERED):
        with mock.patch.multiple(sharded_state, **whole) if way == GATHERED else contextlib.nullcontext():
            saves, waits = [], []
            for number in range(repeats + 1):  # the first turn also makes what is kept
                output = root / f"{way} {number}"
                checkpoints = Checkpoints(output, mesh, 1)
                begin = time.perf_counter()
                saves.append(peak(lambda checkpoints=checkpoints: checkpoints.save(1, policy, config)))
                waits.append(time.perf_counter() - begin)
                mesh.barrier()
            written = sum(file.stat().st_size for file in output.rglob(f"__{rank}_*.distcp"))
            newest = checkpoints.newest()
            load = peak(lambda checkpoints=checkpoints, newest=newest: checkpoints.load(newest, policy))
        found[way] = max(saves[1:]), load, written, statistics.median(waits[1:])
    destroy_mesh()
    return found


def peak(action: Any) -> int:
    """Bytes that the process had at most during `action`, besides those before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = status("VmRSS")
    action()
    return status("VmHWM") - before


def status(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


# `tools.benchmarks head`: device memory that the output head reads and writes per token, by torch and by the fused kernels.
#
# The bytes are counted: every torch operation of a real forward and backward pass reads its arguments and writes its result;
# views are free. Of the kernels, the forward reads the logits once, and the backward reads and writes them once
# (tests/models/test_head_kernel.py compares this with the compiled code). They are counted at one size, per element and chunk,
# and printed for a model's shape. Elements of a token (hidden states, sums) are left out. With a GPU both ways are timed, too.

TOWER = {"width": 1280, "ffn_width": 3420, "patch": 14, "merge": 2, "token_id": 151655}  # Qwen2.5-VL-3B
KERNELS = "grpo_megatron.models.layers.head_kernel"
ROWS, COLUMNS, HIDDEN = 64, 1000, 24  # of the counted passes; no two products of them are equal
WITHOUT_READS = ("empty", "zeros", "zero_", "fill_")
OF_SINGLE_ELEMENTS = ("nonzero", "index")


def add_head_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=int, default=3584, help="hidden size")
    parser.add_argument("--vocabulary", type=int, default=152064, help="rows of the output head on one rank")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1024, 4096], help="actor.logprob_chunk_size")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a timed pass")


def per_chunk(**options: bool) -> dict[str, Counter[str]]:
    """Bytes per logit and per weight that one more chunk reads and writes in a forward and in a backward pass, in bfloat16."""
    two, one = counted(2, **options), counted(1, **options)
    return {name: two[name] - one[name] for name in one}


def counted(chunks: int, *, is_fused: bool, has_entropy: bool) -> dict[str, Counter[str]]:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    kinds = {ROWS * COLUMNS: "logit", COLUMNS * HIDDEN: "weight"}
    count: Counter[str] = Counter()

    def add(tensor: Any, times: int = 1) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.numel() in kinds:
            count[kinds[tensor.numel()]] += times * tensor.element_size()

    class Traffic(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            name = function.overloadpacket.__name__
            aliases = [returned.alias_info for returned in function._schema.returns]
            is_view = any(alias is not None and not alias.is_write for alias in aliases)
            if is_view or name.startswith((*OF_SINGLE_ELEMENTS, "empty", "new_empty")):
                return result
            add(result)
            for argument in () if any(part in name for part in WITHOUT_READS) else args:
                add(argument)
            return result

    def row_statistics(logits: Any, columns: Any, temperature: float) -> Any:
        add(logits)
        return torch.ones(4, len(logits))

    def write_gradient(logits: Any, *of_tokens: Any) -> None:
        add(logits, 2)

    counts = {}
    hidden = torch.randn(chunks * ROWS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(COLUMNS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    stand_in = SimpleNamespace(row_statistics=row_statistics, write_gradient=write_gradient)
    sys.modules[KERNELS] = stand_in  # type: ignore[assignment]  # the kernels run on CUDA only
    with Traffic():
        logprobs, entropy = head(hidden, weight, torch.arange(chunks * ROWS), ROWS, is_fused)
        counts["forward"] = count.copy()
        count.clear()
        (logprobs.sum() + entropy.sum() if has_entropy else logprobs.sum()).backward()
        counts["backward"] = count
    del sys.modules[KERNELS]
    return counts


def head(hidden: Any, weight: Any, targets: Any, chunk: int, is_fused: bool) -> Any:
    import torch.distributed as dist

    from grpo_megatron.models.layers.head import vocab_parallel_logprobs

    sizes = {"vocab_size": len(weight), "tp_rank": 0, "group": dist.group.WORLD, "chunk": chunk}
    return vocab_parallel_logprobs(hidden, weight, targets, is_fused=is_fused, **sizes)


def measure_head(args: argparse.Namespace) -> int:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    print("bytes per element, and 2**20 bytes per token, of a vocabulary of", end=" ")
    print(f"{args.vocabulary}, hidden size {args.hidden}, in bfloat16")
    for pass_name in ("forward", "backward"):
        for has_entropy in (False, True) if pass_name == "backward" else (False,):
            for is_fused in (False, True):
                count = per_chunk(is_fused=is_fused, has_entropy=has_entropy)[pass_name]
                per_token = ", ".join(
                    f"{(count['logit'] + count['weight'] * args.hidden / chunk) * args.vocabulary / 2**20:.1f}"
                    f" in chunks of {chunk}"
                    for chunk in args.chunks
                )
                way = "fused" if is_fused else "torch"
                name = f"{pass_name}{' with entropy' if has_entropy else ''}, {way}"
                print(f"{name:30s} logit {count['logit']:3d}, weight {count['weight']:3d}; per token {per_token}")
    if torch.cuda.is_available():
        for chunk in args.chunks:
            for is_fused in (False, True):
                seconds = timed(args, chunk, is_fused)
                print(f"chunks of {chunk}, {'fused' if is_fused else 'torch'}:", end=" ")
                print(", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in seconds.items()))
    else:
        print("no CUDA device: not timed")
    dist.destroy_process_group()
    return 0


def timed(args: argparse.Namespace, chunk: int, is_fused: bool, repeats: int = 5) -> dict[str, float]:
    """Least seconds of a forward and of a backward pass on this GPU, after one that is not counted."""
    import torch

    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    hidden = torch.randn(args.tokens, args.hidden, **options).requires_grad_()
    weight = torch.randn(args.vocabulary, args.hidden, **options).mul_(args.hidden**-0.5).requires_grad_()
    targets = torch.randint(args.vocabulary, (args.tokens,), device="cuda")
    times: dict[str, list[float]] = {"forward": [], "backward": []}
    for _ in range(repeats + 1):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        logprobs, _ = head(hidden, weight, targets, chunk, is_fused)
        marks[1].record()
        logprobs.sum().backward()
        marks[2].record()
        torch.cuda.synchronize()
        for name, (begin, end) in zip(times, (marks[:2], marks[1:]), strict=True):
            times[name].append(begin.elapsed_time(end) / 1e3)
    return {name: min(values[1:]) for name, values in times.items()}


# -- the vision tower --------------------------------------------------------------------------------------------------


def add_tower_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pixels", type=int, default=1_000_000, help="of a square image")
    parser.add_argument(
        "--layers", type=int, default=4, help="the last one without windows; the published tower has 32"
    )
    parser.add_argument("--repeats", type=int, default=3)


def measure_tower(args: argparse.Namespace) -> int:
    """Forward and backward of one image in the published width, in turn with windows of a size together and one by one."""
    import torch
    from torch.nn import functional

    from grpo_megatron.data.images import image_patches, published_processor
    from grpo_megatron.models.architecture import Vision
    from grpo_megatron.models.vision import Features, build_tower
    from grpo_megatron.types import PromptImage

    device, edge = torch.device("cuda" if torch.cuda.is_available() else "cpu"), round(args.pixels**0.5 / 28)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    sizes = {"depth": args.layers, "fullatt_block_indexes": [args.layers - 1], "hidden_size": TOWER["width"]}
    norm = published_processor("qwen2_5_vl")[:2]
    vision = Vision(json.dumps(sizes), gated=True, sections=(16, 24, 24), norm=norm, depth=args.layers, **TOWER)
    tower: Any = build_tower(vision, 2048, dtype, device)
    for parameter in tower.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    image = PromptImage("", (edge, edge), 0, random.Random(0).randbytes(3 * (28 * edge) ** 2))
    patches = torch.from_numpy(image_patches(image, 14, 2, vision.norm)).to(device, dtype)
    grid, features, kernel = (
        torch.tensor([[1, 2 * edge, 2 * edge]], device=device),
        Features(vision, dtype),
        tower.config._attn_implementation,
    )
    passes = {
        "grpo_megatron": lambda: features.of(tower, [image])[""],
        "transformers": lambda: tower(patches, grid_thw=grid).pooler_output,
    }
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    calls = {}
    for _ in range(args.repeats + 1):
        for name, forward in passes.items():
            tower.config._attn_implementation = kernel if name == "grpo_megatron" else "sdpa"
            with mock.patch.object(
                functional, "scaled_dot_product_attention", side_effect=functional.scaled_dot_product_attention
            ) as count:
                start = time.perf_counter()
                forward().float().sum().backward()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                seconds[name].append(time.perf_counter() - start)
            calls[name] = count.call_count
    print(f"{28 * edge} x {28 * edge} pixels, {args.layers} layers, {machine()}")
    for name, of in seconds.items():
        print(f"{name:<14} {statistics.median(of[1:]):8.3f} s {calls[name]:6d} kernel calls of attention")
    return 0
