"""What the rank programs of model tests share: layouts, policies from a folder, the tests' loss, gradients and weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from grpo_megatron.algo.kl import kl_penalties
from grpo_megatron.algo.losses import LossInputs, policy_losses, total_loss
from grpo_megatron.config import ActorConfig, OptimConfig
from grpo_megatron.device import Device
from grpo_megatron.models.families import read_architecture
from grpo_megatron.models.heads.reward_folder import read_reward_folder
from grpo_megatron.models.heads.scalar import ScalarPolicy
from grpo_megatron.models.policy import Policy
from grpo_megatron.models.weights import stream as weights
from grpo_megatron.parallel.mesh import Mesh, build_mesh
from grpo_megatron.planning.parameters import parameters_from_table
from tests import tiny

Tensors = dict[str, torch.Tensor]


class Layout(NamedTuple):
    """`sp`: sequence parallelism; None: as `actor.megatron` decides."""

    world: int
    tp: int = 1
    pp: int = 1
    sp: bool | None = False
    ep: int = 1


LAYOUTS = {
    "1": Layout(1),
    "DP2": Layout(2),
    "TP2": Layout(2, tp=2),
    "TP2+SP": Layout(2, tp=2, sp=True),
    "PP2": Layout(2, pp=2),
    "EP2": Layout(2, ep=2),
    "EP2xDP4": Layout(4, ep=2),
    "EP2xPP2": Layout(4, pp=2, ep=2),
    "TP2xPP2+SP": Layout(4, tp=2, pp=2, sp=True),
    "DP2xTP2": Layout(4, tp=2),
    "TP4": Layout(4, tp=4, sp=True),
    "PP4": Layout(4, pp=4),
}
OPTIM = {
    "lr": 1e-3,
    "clip_grad": 0.5,
    "eps": 1e-4,
}  # Adam's first step is lr * g / (|g| + eps): a small eps lets rounding
# pick the sign where g is almost zero
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@functools.cache  # a process has one layout for its whole life
def world(layout: Layout, rollout_tp: int = 1) -> tuple[Device, Mesh]:
    device = Device("cpu")
    return device, build_mesh(device, tp=layout.tp, pp=layout.pp, ep=layout.ep, rollout_tp=rollout_tp)


def actor(layout: Layout, *, megatron: Any = None, **values: Any) -> ActorConfig:
    sizes = {"tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp}
    sizes |= {"expert_model_parallel_size": layout.ep, "sequence_parallel": layout.sp}
    return ActorConfig.model_validate({"megatron": {**sizes, **(megatron or {})}, **values})


def build(
    folder: Path,
    layout: Layout = LAYOUTS["1"],
    *,
    dtype: str = "float32",
    temperature: float = 1.0,
    family: str | None = None,
    rollout_tp: int = 1,
    **values: Any,
) -> Policy:
    """A policy with an optimizer. `values` are those of the section `actor`."""
    device, mesh = world(layout, rollout_tp)
    config = actor(layout, **{"logprob_chunk_size": 7, "optim": OPTIM, **values})
    arch = read_architecture(folder, family)
    policy = Policy.load(folder, dtype, arch, config, mesh, device, temperature=temperature)
    policy.set_optimizer(config.optim, 1)
    check_counts(policy)
    return policy


def check_counts(policy: Any, has_output_head: bool = True) -> None:
    """Megatron-Core's modules have as many parameters as the plan of the run counts in the weight table."""
    chosen = {"lora": policy.actor.lora, "vision": policy.actor.vision}
    parts = policy.arch, policy.actor.megatron
    stage = parameters_from_table(*parts, has_output_head=has_output_head, **chosen)[policy.mesh.pp_rank]
    parameters = [parameter for name, parameter in policy.ddp.named_parameters() if "score." not in name]
    assert sum(parameter.numel() for parameter in parameters) == stage.with_adapters
    assert sum(parameter.numel() for parameter in parameters if parameter.requires_grad) == stage.trained.total
    if policy.lora is not None:
        of_layer: dict[str, list[int]] = {}
        for name, module in policy.lora.modules.items():
            of_layer.setdefault(name.split(".")[2], []).append(module.weight.numel())
        assert stage.merged_layer == max(map(sum, of_layer.values()))
        assert stage.merged_weight == max(map(max, of_layer.values()))


def share(count: int, dp_rank: int, dp: int) -> list[int]:
    """The rows of one data-parallel rank."""
    return list(range(count))[dp_rank::dp]


def local_batch(pairs: Any, mesh: Mesh, micro: int = 1, **options: Any) -> Any:
    """This rank's rows as one mini-batch of micro-batches of `micro` rows."""
    rows = share(len(pairs), mesh.dp_rank, mesh.dp)
    local = list(range(len(rows)))
    return tiny.make_batch(pairs, [[local[i : i + micro] for i in range(0, len(local), micro)]], rows, **options)


# -- the loss ----------------------------------------------------------------------------------------------------------

KL_COEF, ENTROPY_COEF = 0.1, 0.05


def loss(inputs: Any) -> Any:
    """Clipped surrogate + KL + entropy, composed by the real code. `hand_built_loss` computes the same by hand."""
    config = ActorConfig(kl_loss_coef=KL_COEF, entropy_coeff=ENTROPY_COEF)
    return total_loss(inputs, config, policy_losses.get("vanilla"), kl_penalties.get("low_var_kl"))


def hand_built_loss(logprobs: Any, entropy: Any, old: Any, ref: Any, advantages: Any) -> torch.Tensor:
    """Per token [N], from the formulas: clip 0.2, dual clip 3, k3."""
    ratio = (logprobs - old).exp()
    surrogate = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    surrogate = torch.where(advantages < 0, surrogate.minimum(-3 * advantages), surrogate)
    k3 = (ref - logprobs).exp() - 1 - (ref - logprobs)
    return surrogate + KL_COEF * k3 - ENTROPY_COEF * entropy


# -- gradients and weights ---------------------------------------------------------------------------------------------


def close(got: Tensors, want: Tensors, tolerance: float) -> None:
    """Relative to each tensor's largest entry: the relative error of an element near zero says nothing."""
    assert got.keys() == want.keys()
    for name in want:
        scale = want[name].abs().max()
        assert scale > 0, name
        worst = ((got[name] - want[name]).abs().max() / scale).item()
        assert worst <= tolerance, f"{name}: {worst}"


def close_rows(got: torch.Tensor, want: list[torch.Tensor], message: str = "") -> None:
    """Rows [B, R] of log-probabilities, values or scores equal those of another model; behind their ends they are 0."""
    for row, expected in enumerate(want):
        torch.testing.assert_close(got[row, : len(expected)], expected, rtol=0, atol=1e-5, msg=f"{message} {row}")
        assert not got[row, len(expected) :].any(), f"{message} {row}"


def same(got: Tensors, want: Tensors) -> None:
    """Bit by bit, for every name of `want`."""
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def named_gradients(policy: Any) -> Tensors:
    """This rank's summed gradients by global Megatron name."""
    parameters = weights.global_parameters(policy.ddp).items()
    trained = ((name, p) for name, p in parameters if isinstance(p, torch.nn.Parameter) and p.requires_grad)
    return {name: p.main_grad.clone() for name, p in trained}  # type: ignore[attr-defined]


def stream(policy: Any) -> Tensors:
    """Copies of the tensors that the model streams: every one once."""
    out: Tensors = {}
    for bucket in policy.hf_weights(1):
        for name, tensor in bucket:
            assert name not in out, name
            out[name] = tensor.clone()
    return out


def whole(policy: Any, local: Tensors) -> Tensors:
    """Hugging Face tensors from every rank's Megatron tensors, merged by the weight rows. Collective.

    Only those of `local` on some rank. Replicas must be equal, unless the distributed optimizer leaves each rank a part of
    the sums.
    """
    mesh, are_equal = policy.mesh, not policy.actor.megatron.use_distributed_optimizer
    gathered: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(gathered, (mesh.tp_rank, mesh.ep_rank, local))
    names = set().union(*(held for _, _, held in gathered))
    rows = {name: row for name, row in weights.model_rows(policy.arch).items() if not row.is_constant}
    # A whole gradient misses nothing, unless parameters are frozen.
    assert names >= rows.keys() or any(not parameter.requires_grad for parameter in policy.ddp.parameters())
    out: Tensors = {}
    for name, row in ((name, row) for name, row in rows.items() if name in names):
        owner = row.ep_rank(policy.arch, mesh.ep)
        shards: dict[int, torch.Tensor] = {}  # of the first replica
        for tp_rank, ep_rank, held in gathered:
            assert name not in held or owner in (None, ep_rank), f"{name} is on expert-parallel rank {ep_rank}"
            if name in held:
                first = shards.setdefault(tp_rank, held[name])
                assert not are_equal or torch.equal(held[name], first), f"{name} differs between replicas"
        out.update(zip(row.hf, row.merge([shards[t] for t in sorted(shards)], policy.arch), strict=True))
    return out


# -- transformers ------------------------------------------------------------------------------------------------------


class _NoFloat32(TorchFunctionMode):
    """transformers converts to float32 in its norms. In a float64 model such a conversion would round: leave it out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_float32 = func is torch.Tensor.float or torch.float32 in (*args[1:], kwargs.get("dtype"))
        if func in (torch.Tensor.to, torch.Tensor.float) and is_float32 and args[0].dtype is torch.float64:
            return args[0]
        return func(*args, **kwargs)


def transformers_backward(
    folder: Path, pairs: Any, dtype: torch.dtype = torch.float32, *, masked: bool = False, adapt: Any = None
) -> Any:
    """transformers' model after one backward pass of `loss` over all pairs, in `dtype`: its parameters have `grad`.

    `masked`: with the loss mask of `make_batch(masked=True)`. `adapt(model)`: called before the pass.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if adapt is not None:
        adapt(model)
    logits = []
    for prompt, response in pairs:
        with _NoFloat32():
            logits.append(model(torch.tensor([prompt + response])).logits[0])
    model.expected_logprobs = backward_over_logits(logits, pairs, tiny.make_batch(pairs, [], masked=masked))
    return model


def backward_over_logits(logits: list[torch.Tensor], pairs: Any, batch: Any) -> torch.Tensor:
    """The backward pass of `loss`, from the logits of each whole sequence. Returns the log-probabilities [B, R]."""
    width, dtype = batch.response_mask.shape[1], logits[0].dtype
    logprobs, entropies = [], []
    for (prompt, response), of_row in zip(pairs, logits, strict=True):
        logp = of_row[len(prompt) - 1 : -1].log_softmax(-1)
        padding = (0, width - len(response))
        logprobs.append(pad(logp.gather(1, torch.tensor(response)[:, None]).squeeze(1), padding))
        entropies.append(pad(-(logp.exp() * logp).sum(-1), padding))
    names = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "token_weights")
    given: dict[str, Any] = {name: getattr(batch, name).to(dtype) for name in names}
    inputs = LossInputs(logprobs=torch.stack(logprobs), entropy=torch.stack(entropies), mask=batch.loss_mask, **given)
    loss(inputs)[0].backward()
    return inputs.logprobs.detach()


# -- models with a scalar head -----------------------------------------------------------------------------------------

HEADS = ("score.weight", "score.bias")


def scalar(
    folder: Path,
    kind: Any,
    layout: Layout,
    *,
    model_class: type[ScalarPolicy] = ScalarPolicy,
    dtype: str = "float32",
    megatron: Any = None,
    **options: Any,
) -> Any:
    """A ScalarPolicy, or `model_class`, with an optimizer. `places` is among the options."""
    device, mesh = world(layout)
    limits = actor(layout, megatron=megatron, ppo_max_token_len_per_gpu=120)
    optim = OptimConfig.model_validate({**OPTIM, "weight_decay": 0.0})
    model = model_class(read_reward_folder(folder, kind), dtype, limits, mesh, device, optim=optim, **options)
    with model.in_use():
        model.set_optimizer(optim, 2)
        check_counts(model, has_output_head=False)
    return model


def whole_scalar(model: Any, local: Tensors) -> Tensors:
    """Hugging Face gradients from all ranks' gradients. Ranks with the same head must have the same gradient. Collective."""
    held = [part for part in model.mesh.all_gather({name: local[name] for name in HEADS if name in local}) if part]
    assert all(torch.equal(head[name], held[0][name]) for head in held for name in held[0])
    return whole(model, {name: tensor for name, tensor in local.items() if name not in HEADS}) | held[0]
