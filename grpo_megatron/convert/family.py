"""verify without a second model: proves a model family against transformers, with small random weights, on this CPU.

    the folder's config.json, with `changes` -> random weights in a folder, by transformers -> one pass of each

A wrong name or shape in the family's table shows in the tensors, a wrong split in TP2, PP2 or EP2, and a wrong field of the
Architecture in log-probabilities or gradients. Rows have several lengths, and share micro-batches.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, spawn

from grpo_megatron.config import ActorConfig, OptimConfig
from grpo_megatron.convert import ConvertError
from grpo_megatron.device import Device
from grpo_megatron.models.architecture import Architecture, split_problems
from grpo_megatron.models.families import architecture_of, hf_shapes, read_architecture, read_config
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.weights.hf_folder import SafetensorsFolder
from grpo_megatron.models.weights.stream import sent_parameters
from grpo_megatron.parallel.mesh import build_mesh
from grpo_megatron.storage.files import private_folder
from grpo_megatron.types import Batch

LARGEST_PROVEN = 50_000_000  # parameters: each rank computes them in float32
PROVEN_LAYOUTS = {  # of two ranks
    "DP2": {},
    "TP2": {"tensor_model_parallel_size": 2},
    "PP2": {"pipeline_model_parallel_size": 2},
    "EP2": {"expert_model_parallel_size": 2},
}
LENGTHS = ((5, 11), (1, 1), (17, 3), (8, 30))  # tokens of prompt and response
OF_LOGPROBS, OF_GRADIENTS = (
    1e-4,
    1e-3,
)  # the largest differences: of the largest log-probability, and of each tensor's largest entry


def prove_family(folder: Path, family: str | None, changes: dict[str, Any]) -> int:
    """Compare the family with transformers; print a table. Returns 1 if they differ. Raises ConvertError, UnsupportedModel."""
    config = {**read_config(folder), **changes}
    arch = architecture_of(config, family)
    if arch.vision is not None:
        raise ConvertError(f"{folder}: {arch.family} reads images; verify proves families of text alone")
    if arch.num_parameters() > LARGEST_PROVEN:
        raise ConvertError(
            f"{folder}: {arch.num_parameters():,} parameters, and verify computes with {LARGEST_PROVEN:,} at most; make"
            ' it small: --changes \'{"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 512}\''
        )
    with private_folder() as root:
        _write_model(config, root)
        files = _read_folder(root)
        problems = _problems_of_names({name: tuple(tensor.shape) for name, tensor in files.items()}, hf_shapes(arch))
        print("\n".join(problems or [f"{len(files)} tensors: names and shapes are those of transformers"]))
        if problems:
            return 1
        want = _by_transformers(root)
        layouts = [name for name in PROVEN_LAYOUTS if _fits(name, arch)]
        _by_megatron(root, family, layouts)
        print(f"{'ranks':8}{'loaded':10}{'log-probabilities':20}gradients (both of the largest)")
        agree = [_compare(name, load_file(root / name), want, files) for name in layouts]
    print(f"the family and transformers {'agree' if all(agree) else 'DIFFER'}")
    return int(not all(agree))


def _fits(layout: str, arch: Architecture) -> bool:
    """Returns whether two ranks can share the model so; prints why not."""
    if layout == "EP2" and not arch.num_experts:
        return False
    problems = {
        "DP2": [],
        "TP2": split_problems(arch, 2),
        "PP2": [f"{arch.num_layers} layers over 2 leave 1"] if arch.num_layers % 2 else [],
        "EP2": [f"{arch.num_experts} experts over 2 leave 1"] if arch.num_experts % 2 else [],
    }[layout]
    print("".join(f"{layout} left out: {problem}\n" for problem in problems), end="")
    return not problems


def _write_model(config: dict[str, Any], root: Path) -> None:
    """Writes a float32 model of transformers. No weight is 0 or 1, as in a fresh one: so a missing norm or bias shows."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    settings = {key: value for key, value in config.items() if key not in ("torch_dtype", "dtype", "auto_map")}
    settings |= dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id")
    )  # the embedding of padding has no gradient
    torch.manual_seed(0)
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    except Exception as error:  # of a config that transformers refuses
        raise ConvertError(f"transformers cannot build this config: {type(error).__name__}: {error}") from error
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            if tensor.is_floating_point():
                is_router_bias = name.endswith("correction_bias")
                tensor += (0.3 if is_router_bias else 0.06) * torch.randn(tensor.shape, generator=generator)
    model.save_pretrained(root, max_shard_size="10GB")


def _problems_of_names(stored: dict[str, tuple[int, ...]], table: dict[str, tuple[int, ...]]) -> list[str]:
    """Lists the names and shapes of transformers' files that are not those of the family's table."""
    lines = [f"only in transformers' files: {name} {list(stored[name])}" for name in stored if name not in table]
    lines += [f"only in the family's table: {name} {list(table[name])}" for name in table if name not in stored]
    for name in stored.keys() & table.keys():
        if stored[name] != table[name]:
            lines.append(f"{name}: {list(stored[name])} in transformers' files, {list(table[name])} in the table")
    return sorted(lines)


def _rows(vocab_size: int) -> list[tuple[Tensor, int, Tensor]]:
    """Returns random rows: tokens, the length of the prompt, and the weight of each response token in the scalar."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, vocab_size, (p + r,), generator=generator), p, torch.randn(r, generator=generator))
        for p, r in LENGTHS
    ]


def _by_transformers(root: Path) -> dict[str, Tensor]:
    """Returns log-probabilities by row, and gradients under the names of the files."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32).eval()
    results, scalar = {}, torch.zeros(())
    for number, (tokens, prompt, weights) in enumerate(_rows(model.config.vocab_size)):
        logp = (
            model(tokens[None]).logits[0, prompt - 1 : -1].log_softmax(-1).gather(1, tokens[prompt:, None]).squeeze(1)
        )
        scalar = scalar + (weights * logp).sum()
        results[f"row {number}"] = logp.detach()
    scalar.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(root / "gradients", max_shard_size="10GB")  # renames them as weights
    return results | _read_folder(root / "gradients")


def _read_folder(folder: Path) -> dict[str, Tensor]:
    with SafetensorsFolder(folder) as files:
        return {name: files.read(name).contiguous() for name in files.tensors}


def _by_megatron(root: Path, family: str | None, layouts: list[str]) -> None:
    """Writes a file per layout: log-probabilities by row, gradients, and weights ("loaded NAME"), of two new processes."""
    with socket.socket() as probe:  # a free port for the ranks
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of libraries that the ranks import
    try:
        spawn(_rank, (port, root, family, layouts), nprocs=2)
    except ProcessException as error:  # with the traceback, for the author of a family
        raise ConvertError(f"a pass of Megatron-Core failed: {error}") from error


def _rank(rank: int, port: int, root: Path, family: str | None, layouts: list[str]) -> None:
    """Runs on each rank. The first writes the results."""
    world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in world.items()} | {"MASTER_ADDR": "127.0.0.1"}
    arch = read_architecture(root, family)
    for name in layouts:
        results = _results(root, arch, PROVEN_LAYOUTS[name])
        if rank == 0:
            save_file(results, root / name)
        parallel_state.destroy_model_parallel()


def _results(root: Path, arch: Architecture, sizes: dict[str, int]) -> dict[str, Tensor]:
    actor = ActorConfig.model_validate({"megatron": {"use_distributed_optimizer": False, **sizes}})
    layout, device, rows = actor.megatron, Device("cpu"), _rows(arch.vocab_size)
    tp, pp, ep = (getattr(layout, f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline", "expert"))
    mesh = build_mesh(device, tp=tp, pp=pp, ep=ep, rollout_tp=1)
    policy = Policy.load(root, "float32", arch, actor, mesh, device)
    policy.set_optimizer(OptimConfig(), 1)
    results = {f"loaded {name}": tensor for name, tensor in _streamed(policy).items()}
    for number, logprobs in enumerate(policy.logprobs(_batch(rows))):
        results[f"row {number}"] = logprobs[: LENGTHS[number][1]].clone()
    local = _batch(rows[mesh.dp_rank :: mesh.dp])
    policy.forward_backward(
        local, local.mini_batches[0], lambda inputs: ((inputs.logprobs * inputs.advantages).sum(), {})
    )
    with torch.no_grad():
        for parameter in sent_parameters(policy.model).values():
            if hasattr(parameter, "main_grad"):
                parameter.copy_(parameter.main_grad)
    return results | _streamed(policy)


def _streamed(policy: Policy) -> dict[str, Tensor]:
    return {name: tensor.clone().contiguous() for bucket in policy.hf_weights() for name, tensor in bucket}


def _batch(rows: list[tuple[Tensor, int, Tensor]]) -> Batch:
    """Returns the rows as one mini-batch, of micro-batches of two."""
    width = max(len(weights) for *_, weights in rows)
    weights = torch.stack([torch.nn.functional.pad(row[2], (0, width - len(row[2]))) for row in rows])
    mask = torch.stack([torch.arange(width) < len(row[2]) for row in rows])
    micro_batches = [list(range(first, min(first + 2, len(rows)))) for first in range(0, len(rows), 2)]
    zeros, tokens, prompts = torch.zeros(mask.shape), [row[0] for row in rows], [row[1] for row in rows]
    return Batch(tokens, prompts, mask, mask, zeros, weights, zeros, mini_batches=[micro_batches])


def _compare(name: str, got: dict[str, Tensor], want: dict[str, Tensor], files: dict[str, Tensor]) -> bool:
    """Prints a layout's line; returns whether it agrees."""
    other = [tensor for tensor in files if not torch.equal(got[f"loaded {tensor}"], files[tensor])]
    rows = [row for row in want if row.startswith("row ")]
    of_rows = max(float((got[row] - want[row]).abs().max()) for row in rows)
    of_rows /= max(1.0, *(float(want[row].abs().max()) for row in rows))
    floor = 1e-6 * max(float(want[tensor].abs().max()) for tensor in files)
    ratios = {
        tensor: float((got[tensor] - want[tensor]).abs().max()) / max(float(want[tensor].abs().max()), floor)
        for tensor in files
        if not tensor.endswith("correction_bias")
    }
    worst = max(ratios, key=lambda tensor: ratios[tensor])
    loaded = "equal" if not other else f"{len(other)} differ"
    print(
        f"{name:8}{loaded:10}{of_rows:<20.1e}{ratios[worst]:.1e}{'' if ratios[worst] <= OF_GRADIENTS else f'  {worst}'}"
    )
    print("".join(f"        loaded otherwise: {tensor}\n" for tensor in other[:5]), end="")
    return not other and of_rows <= OF_LOGPROBS and ratios[worst] <= OF_GRADIENTS
