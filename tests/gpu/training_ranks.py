"""What the ranks of the GPU tests of training run. (Functions of a module: a spawned process can import them.)"""

from __future__ import annotations

import os
import runpy
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from grpo_megatron.models.lora.layers import _Adapter
from tests import vision
from tests.gpu.building import (
    KIND,
    TRAINED_TOWER,
    batch_with_images,
    build_policy,
    layer_class,
    likelihood,
    sequences,
    whole_batch,
    worst_angle,
)
from tests.models.policies import named_gradients
from tests.tiny import make_batch

# -- layers ------------------------------------------------------------------------------------------------------------


def in_each_dtype(folder: Path, megatron: dict[str, Any], dtypes: list[str]) -> list[dict[str, Any]]:
    """`logprobs_and_gradients` in one process for all."""
    return [logprobs_and_gradients(folder, megatron, dtype) for dtype in dtypes]


def logprobs_and_gradients(folder: Path, megatron: dict[str, Any], dtype: str) -> dict[str, Any]:
    policy = build_policy(folder, {"use_distributed_optimizer": False, **megatron}, dtype=dtype)
    batch = whole_batch(sequences(8, 400))
    logprobs = policy.logprobs(batch)
    policy.forward_backward(batch, batch.mini_batches[0], likelihood)
    gradients = {name: g.float().cpu() for name, g in named_gradients(policy).items()}
    return {"layers": layer_class(policy), "logprobs": logprobs, "gradients": gradients, "mask": batch.response_mask}


def with_adapters(folder: Path, megatron: dict[str, Any]) -> dict[str, Any]:
    """Merged LoRA without recomputation: gradients, how often a weight is merged, and how many merged ones are there at most."""
    policy = build_policy(folder, megatron, lora={"rank": 8, "alpha": 16.0})
    generator = torch.Generator().manual_seed(0)
    for module in policy.lora.modules.values():  # B is 0 at first, and A would have no gradient
        module.lora_b.data.copy_(0.02 * torch.randn(module.lora_b.shape, generator=generator))
    batch, plain = whole_batch(sequences(8, 400)), _Adapter.merged
    merged: list[Any] = []
    alive = 0

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal alive
        weight = plain(*arguments)
        merged.append(weakref.ref(weight))
        alive = max(alive, sum(ref() is not None for ref in merged))
        return weight

    with mock.patch.object(_Adapter, "merged", counted):
        policy.forward_backward(batch, batch.mini_batches[0], likelihood)
    per_micro = len(merged) / len(policy.lora.modules) / len(batch.mini_batches[0])
    gradients = {name: g.float().cpu() for name, g in named_gradients(policy).items()}
    return {"layers": layer_class(policy), "gradients": gradients, "merges": per_micro, "alive": alive}


def alone_and_together(folder: Path, megatron: dict[str, Any]) -> dict[str, Any]:
    """The largest difference between a row's log-probabilities alone and among seven others."""
    policy, pairs = build_policy(folder, megatron), sequences(8, 400)
    together = policy.logprobs(whole_batch(pairs))
    worst = 0.0
    for row, pair in enumerate(pairs):
        alone = policy.logprobs(whole_batch([pair]))
        worst = max(worst, float((together[row : row + 1, : alone.shape[1]] - alone).abs().max()))
    return {"layers": layer_class(policy), "worst": worst}


def loss_curve(folder: Path, megatron: dict[str, Any], steps: int) -> dict[str, Any]:
    """The loss of each step of memorising 8 sequences of random tokens, divided over the data-parallel ranks."""
    policy = build_policy(folder, megatron, lr=3e-4)
    mesh, pairs = policy.mesh, sequences(8, 400)
    rows = list(range(len(pairs)))[mesh.dp_rank :: mesh.dp]
    batch = make_batch(pairs, [[list(range(i, min(i + 4, len(rows)))) for i in range(0, len(rows), 4)]], rows)
    losses = []
    for _ in range(steps):
        sums, _ = policy.update(batch, likelihood)
        parts = mesh.all_gather(float(sums[0]["loss"].total))  # the same on all ranks of a replica
        losses.append(sum(parts) * mesh.dp / mesh.world_size)
    streamed = {name: bool(t.isfinite().all()) for bucket in policy.hf_weights() for name, t in bucket}
    return {"losses": losses, "finite": all(streamed.values()), "names": len(streamed), "layers": layer_class(policy)}


# -- optimizer ---------------------------------------------------------------------------------------------------------


def resumed(folder: Path, checkpoint: Path, megatron: dict[str, Any]) -> dict[str, Any]:
    """Two updates, save, two more updates; compared with a new policy that loads and makes the last two updates.

    Local layers are deterministic with attention as plain matrix products and torch's deterministic algorithms.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from grpo_megatron.models.optimizer import each_optimizer
    from grpo_megatron.models.weights import sharded_state

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # saves time only
    batch = whole_batch(sequences(8, 200))

    def weights(policy: Any) -> dict[str, torch.Tensor]:
        return {name: t.cpu() for bucket in policy.hf_weights() for name, t in bucket}

    def inner_state(policy: Any) -> list[torch.Tensor]:
        """Main parameters, moments and step counts, in the order of the parameter groups."""
        out = []
        for one in each_optimizer(policy.optimizer):
            for group in one.optimizer.param_groups:
                for parameter in group["params"]:
                    held = {"step": group.get("step", 0), **one.optimizer.state[parameter]}  # torch: one per parameter
                    out += [parameter.detach().cpu(), *(torch.as_tensor(held[name]).cpu() for name in sorted(held))]
        return out

    def two_updates(policy: Any) -> None:
        with sdpa_kernel(SDPBackend.MATH):
            for _ in range(2):
                policy.update(batch, likelihood)

    first = build_policy(folder, megatron)
    two_updates(first)
    checkpoint.mkdir()
    sharded_state.save_sharded(first, checkpoint)
    at_save = inner_state(first)
    kind = type(each_optimizer(first.optimizer)[0].optimizer).__module__
    second = build_policy(folder, megatron)
    sharded_state.load_sharded(second, checkpoint, same_world=True)
    second.load_state(first.state())
    restored = inner_state(second)
    out = {
        "optimizer": kind,
        "state": len(at_save) == len(restored) and all(map(torch.equal, at_save, restored)),
        "saved_tensors": len(at_save),
    }
    for policy in (first, second):
        two_updates(policy)
    expected, resumed_weights = weights(first), weights(second)
    out["weights"] = all(torch.equal(expected[name], resumed_weights[name]) for name in expected)
    out["difference"] = max(float((expected[name] - resumed_weights[name]).abs().max()) for name in expected)
    return out


# -- against transformers ----------------------------------------------------------------------------------------------


def against_transformers(folder: Path, megatron: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities of the same response tokens: by the policy and by transformers, in bfloat16, and exactly."""
    pairs = sequences(16, 400)
    policy = build_policy(folder, megatron)
    batch = whole_batch(pairs)
    ours = policy.logprobs(batch)[batch.response_mask]
    theirs, exact = (_transformers(folder, pairs, dtype) for dtype in (torch.bfloat16, torch.float32))
    difference = ours - theirs
    return {
        "layers": layer_class(policy),
        "tokens": len(ours),
        "mean": difference.abs().mean().item(),
        "max": difference.abs().max().item(),
        "k3": (difference.exp() - difference - 1).mean().item(),
        "mult_prob_error": difference.abs().exp().mean().item(),
        "own_error": (ours - exact).abs().mean().item(),
        "their_error": (theirs - exact).abs().mean().item(),
        "spread": exact.std().item(),
    }


@torch.no_grad()
def _transformers(folder: Path, pairs: Any, dtype: torch.dtype) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = loaded.to(KIND).eval()
    parts = []
    for prompt, response in pairs:
        ids = torch.tensor([prompt + response], device=KIND)
        logp = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        parts.append(logp.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu())
    return torch.cat(parts)


def copies(folder: Path, megatron: dict[str, Any], steps: int) -> dict[str, torch.Tensor]:
    """The weights that tensor-parallel ranks have in full, after updates of everything, the tower too."""
    policy, batch = build_policy(folder, megatron, **TRAINED_TOWER), batch_with_images(vision.make_prompts())
    for _ in range(steps):
        policy.update(batch, likelihood)
    named = policy.ddp.named_parameters()
    return {n: p.detach().float().cpu() for n, p in named if not getattr(p, "tensor_model_parallel", False)}


def images_against_transformers(folder: Path, megatron: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Log-probabilities with 0 to 2 images, and the trained tower's gradients, beside transformers' on the CPU."""
    rows = vision.make_prompts()
    policy = build_policy(folder, {"use_distributed_optimizer": False, **megatron}, dtype=dtype, **TRAINED_TOWER)
    batch = batch_with_images(rows)
    ours = policy.logprobs(batch)[batch.response_mask]
    policy.forward_backward(batch, batch.mini_batches[0], likelihood)
    tower = {n: g.float().cpu() for n, g in named_gradients(policy).items() if n.startswith("visual.")}
    model = vision.load(folder)
    exact = torch.cat([vision.logprobs(model, *row) for row in rows])
    (-exact.mean()).backward()
    wanted = {vision.in_file(n): p.grad for n, p in model.named_parameters() if n.startswith("model.visual.")}
    with torch.no_grad():
        theirs = torch.cat([vision.logprobs(model.to(torch.bfloat16), *row) for row in rows])
    cosine, name = worst_angle(tower, wanted)
    return {
        "layers": layer_class(policy),
        "own_error": (ours - exact).abs().mean().item(),
        "their_error": (theirs - exact).abs().mean().item(),
        "spread": exact.std().item(),
        "cosine": cosine,
        "name": name,
    }


# -- whole runs --------------------------------------------------------------------------------------------------------


def train(raw: dict[str, Any]) -> None:
    """Run the config `raw` to its end. Its results are in the run's metrics.jsonl."""
    from grpo_megatron.checks.validate import validate
    from grpo_megatron.config import Config
    from grpo_megatron.report.console import Summary
    from grpo_megatron.trainer import Trainer

    config = Config.model_validate(raw)
    checked = validate(config, int(os.environ["WORLD_SIZE"]))
    with mock.patch.object(Summary, "show", lambda self, sinks: None):  # draws curves, with a package not needed here
        Trainer(config, checked).run()


def train_in_roles(raw: dict[str, Any]) -> dict[str, Any]:
    """`train` on the first rank, and `RolloutRank` on the second. Returns how the weights crossed."""
    from grpo_megatron.checks.validate import validate
    from grpo_megatron.config import Config
    from grpo_megatron.parallel.bridge import Bridge
    from grpo_megatron.training.rollout_rank import RolloutRank

    devices: set[str] = set()

    def recorded(self: Bridge, sends: Any, receives: Any, **options: bool) -> Any:
        devices.update(buffer.device.type for _, buffer in (*sends, *receives))
        return post(self, sends, receives, **options)

    post, config = Bridge.post, Config.model_validate(raw)
    with mock.patch.object(Bridge, "post", recorded):
        if os.environ["RANK"] == "0":
            train(raw)
        else:
            RolloutRank(config, validate(config, 2)).run()
    return {"devices": sorted(devices)}


def links() -> tuple[float, list[str]]:
    """GB/s of the rails of a GPU, and what `slurm/preflight.py` says of the link between two, of which each plays a node."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    preflight = runpy.run_path(str(Path(__file__).parents[2] / "slurm" / "preflight.py"))
    rails = sum(preflight["rails"]()) / 8
    facts = [{"node": f"n{rank}", "rails": rails} for rank in range(int(os.environ["WORLD_SIZE"]))]
    return rails, preflight["network_problems"](KIND, facts)
