"""`tools.benchmarks head`: device memory that the output head reads and writes per token, by torch and by the fused kernels.

The bytes are counted: every torch operation of a real forward and backward pass reads its arguments and writes its result;
views are free. Of the kernels, the forward reads the logits once, and the backward reads and writes them once
(tests/models/test_head_kernel.py compares this with the compiled code). They are counted at one size, per element and chunk,
and printed for a model's shape. Elements of a token (hidden states, sums) are left out. With a GPU both ways are timed, too.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

KERNELS = "grpo_megatron.models.layers.head_kernel"
ROWS, COLUMNS, HIDDEN = 64, 1000, 24  # of the counted passes; no two products of them are equal
WITHOUT_READS = ("empty", "zeros", "zero_", "fill_")
OF_SINGLE_ELEMENTS = ("nonzero", "index")


def add_arguments(parser: argparse.ArgumentParser) -> None:
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

    from grpo_megatron.models.build import vocab_parallel_logprobs

    sizes = {"vocab_size": len(weight), "tp_rank": 0, "group": dist.group.WORLD, "chunk": chunk}
    return vocab_parallel_logprobs(hidden, weight, targets, is_fused=is_fused, **sizes)


def run(args: argparse.Namespace) -> int:
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
