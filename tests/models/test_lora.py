"""LoRA: PEFT on transformers agrees in every layout, and what is served is what is trained.

The reference is PEFT's own forward and backward pass over transformers' model, with all factors random (B, too: with zeros,
A would have no gradient). Bounds are relative to a tensor's largest entry.
"""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from grpo_megatron.config import LoraConfig
from grpo_megatron.models.lora.layers import Lora, _adapted, _Adapter
from grpo_megatron.models.lora.merge import MERGE_ELEMENTS, merge
from grpo_megatron.models.lora.peft_folder import save_peft
from grpo_megatron.models.lora.table import lora_rows
from grpo_megatron.models.weights.hf_folder import Serving
from grpo_megatron.models.weights.sharded_state import load_sharded, save_sharded
from grpo_megatron.models.weights.stream import global_parameters, served
from tests import tiny
from tests.convert.folders import convert, same_bits, tensors_of
from tests.models.policies import (
    LAYOUTS,
    RECOMPUTE,
    Layout,
    Tensors,
    build,
    close,
    local_batch,
    loss,
    named_gradients,
    stream,
    transformers_backward,
)
from tests.models.test_moe import MODELS as EXPERTS
from tests.stored import same_stored, stored
from tests.worlds import ranks

PAIRS = tiny.make_sequences(6)
ALL = {"rank": 3, "alpha": 5.0}
SOME = {
    **ALL,
    "target_modules": ["q_proj", "v_proj", "down_proj", "up_proj"],
    "exclude_modules": ["layers.1.mlp.up_proj"],
}
FAMILIES = {"llama2": {**ALL, "use_rslora": True}, "qwen2": SOME, "qwen3": ALL, "olmo2": ALL, "gemma3": ALL}
FAMILIES |= {"deepseek_v3": ALL}
# The gate of shared experts, which PEFT's all-linear has too, has no adapter.
NEXT = ["q_proj", "k_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj", "up_proj", "down_proj"]
NEXT35 = [*NEXT, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]
FAMILIES |= {"qwen3_next": {**ALL, "target_modules": NEXT}, "gpt_oss": ALL}
DENSE = [("qwen2", "merged", {}), ("qwen2", "split", {}), ("qwen3", "split", {}), ("qwen3", "merged", RECOMPUTE)]
WHOLE = [("llama2", "merged", {}), ("gemma3", "merged", {}), ("olmo2", "merged", {})]
FAMILIES |= {"glm4_moe": ALL, "qwen3_5_moe": {**ALL, "target_modules": NEXT35}}
EXPERTS_TOO = [
    (family, mode, {}) for family in ("deepseek_v3", "qwen3_next", "gpt_oss") for mode in ("merged", "split")
]
EXPERTS_TOO += [("glm4_moe", "split", {}), ("qwen3_5_moe", "merged", {})]
CASES = {  # layout -> (family, mode, override)
    "1": DENSE + WHOLE + EXPERTS_TOO,
    "TP2+SP": DENSE + WHOLE + EXPERTS_TOO[1::2],
    "TP2": DENSE[:3],
    "PP2": [DENSE[0], DENSE[3]],
    "TP4": [DENSE[0], DENSE[1], *WHOLE[2:]],  # 2 groups of heads
    "DP2": DENSE,
    "EP2": EXPERTS_TOO[::2],  # TP2+SP has the others
    "TP2xPP2+SP": DENSE + WHOLE,
}
OFTEN = ("TP2+SP", "PP2", "EP2")
MARKS = {name: [pytest.mark.slow] for name in OFTEN}
EVERY_LAYOUT = [pytest.param(name, marks=MARKS.get(name, [pytest.mark.soak])) for name in CASES]


# -- the ranks ---------------------------------------------------------------------------------------------------------


def whole_factors(policy: Any, local: Tensors) -> Tensors:
    """Canonical factors from every rank's, of this pipeline stage's or all. Collective. Replicas must be equal."""
    gathered: list[Any] = [None] * policy.mesh.world_size
    dist.all_gather_object(gathered, (policy.mesh.tp_rank, local))
    out: Tensors = {}
    for name, row in lora_rows(policy.arch, policy.actor.lora).items():
        shards: dict[int, torch.Tensor] = {}
        for tp_rank, held in gathered:
            if name in held:
                place = tp_rank if row.split_dim is not None else 0  # a whole factor is the same on all ranks
                assert torch.equal(shards.setdefault(place, held[name]), held[name]), f"{name} differs between replicas"
        out.update(zip(row.hf, row.merge([shards[t] for t in sorted(shards)], policy.arch), strict=True))
    return out


def factors(policy: Any) -> Tensors:
    parameters = global_parameters(policy.ddp)
    return whole_factors(policy, {name: parameters[name].detach().clone() for name in policy.lora.rows})


@ranks()
def passes(
    folders: dict[str, Path], layout: Layout, values: dict[str, Tensors], cases: list[Any]
) -> list[dict[str, Any]]:
    """For each (family, lora, override): what the model computes, first with initial factors, then with `values`."""
    results = []
    for family, lora, override in cases:
        megatron = {"override_transformer_config": override, "use_distributed_optimizer": False}
        policy = build(folders[family], layout, lora=lora, megatron=megatron)
        batch, one = local_batch(PAIRS, policy.mesh, 2), tiny.make_batch(PAIRS, [[[0, 1], [2], [], [3, 4, 5]]])
        result: dict[str, Any] = {"initial": factors(policy), "served at first": stream(policy)}
        result["first"] = policy.logprobs(one)
        parameters, mesh = global_parameters(policy.ddp), policy.mesh
        with torch.no_grad():
            for name, row in policy.lora.rows.items():
                parameters[name].copy_(row.shard(values[family].__getitem__, policy.arch, mesh.tp_rank, mesh.tp))
        policy.optimizer.reload_model_params()
        with policy.lora.reading({}):
            result |= {"base": policy.logprobs(one), "served base": stream(policy)}
        result |= {"logprobs": policy.logprobs(one), "served": stream(policy)}
        policy.forward_backward(batch, batch.mini_batches[0], loss)
        result["gradients"] = whole_factors(policy, named_gradients(policy))
        result["trained"] = {name for name, p in policy.ddp.named_parameters() if p.requires_grad}
        metrics = policy.update(batch, loss)[1]
        result |= {"norm": metrics["actor/grad_norm"], "share": metrics["actor/lora_served_share"]}
        results.append(result)
    return results


@ranks()
def chain(folder: Path, layout: Layout, out: Path, done: int | None, count: int) -> dict[str, Any]:
    """`count` updates, each saved as `out`/number; after the checkpoint of `done` updates, if any, which is saved again.

    `done` None: nothing is loaded or saved.
    """
    policy = build(folder, layout, lora=SOME)
    result: dict[str, Any] = {"initial": factors(policy), "updates": []}
    if done:
        load_sharded(policy, out / f"{done}" / "state", same_world=False)
        save_sharded(policy, out / f"{done} again" / "state")
    batch = local_batch(PAIRS, policy.mesh, 2)
    for number in range(count):
        _, metrics = policy.update(batch, loss)
        result["updates"].append({"norm": metrics["actor/grad_norm"], "factors": factors(policy)})
        if done is not None:
            save_sharded(policy, out / f"{done + number + 1}" / "state")
    return result


@ranks()
def bfloat16(folder: Path, layout: Layout, lora: Any, out: Path) -> tuple[Tensors, dict[str, bool]]:
    """The served weights of adapters from `lora.path`; for each adapted weight, whether the module multiplies by them.

    The adapters are exported to `out`.
    """
    policy = build(folder, layout, lora=lora, dtype="bfloat16")
    stored, now = (
        policy.lora.stored(lora["path"], policy.arch, policy.mesh),
        policy.lora.copies(),
    )  # a reference reads them
    assert all(torch.equal(a, b) for name, pair in now.items() for a, b in zip(pair, stored[name], strict=True))
    save_peft(policy, folder, folder, out, Serving(end_token_ids=[2]))
    parameters, seen = global_parameters(policy.ddp), {}
    for name, module in policy.lora.modules.items():
        used: list[torch.Tensor] = []
        base = type(module).__mro__[2]
        with mock.patch.object(base, "forward", lambda own, x, used=used: (used.append(own.weight), (x, None))[1]):
            module(torch.zeros(1))
        seen[name] = torch.equal(used[0], served(parameters[name])) and not torch.equal(used[0], module.weight)
    return stream(policy), seen


# -- the tests ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        name: tiny.make_model(
            root / name, name if name in tiny.FAMILIES else "llama2", num_hidden_layers=2, **EXPERTS.get(name, {})
        )
        for name in FAMILIES
    }


def peft_model(folder: Path, lora: dict[str, Any]) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """transformers' model after one backward pass with PEFT's adapters; their random factors; the sums that PEFT merges."""
    import peft

    settings = {name: lora.get(name) for name in ("target_modules", "exclude_modules")}
    settings = {**settings, "target_modules": lora.get("target_modules", "all-linear")}
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        use_rslora=lora.get("use_rslora", False),
        **settings,
    )
    values: dict[str, torch.Tensor] = {}
    wrapped: Any = None

    def adapt(model: Any) -> None:
        nonlocal wrapped
        conversion = "peft.utils.transformers_weight_conversion.convert_peft_config_for_transformers"
        with mock.patch(
            conversion, lambda *unused, **too: None
        ):  # it would adapt experts, and not the layers without them
            wrapped = peft.get_peft_model(model, config)
        generator = torch.Generator().manual_seed(5)
        for name, parameter in sorted(wrapped.named_parameters()):
            if parameter.requires_grad:
                parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
                values[name.replace(".default", "")] = parameter.detach().clone()

    model = transformers_backward(folder, PAIRS, adapt=adapt)
    gradients = {name.replace(".default", ""): p.grad for name, p in wrapped.named_parameters() if p.grad is not None}
    model.expected_gradients = gradients
    sums = {}
    for name, module in wrapped.named_modules():
        if isinstance(module, peft.tuners.lora.Linear):
            key = name.removeprefix("base_model.model.") + ".weight"
            sums[key] = module.base_layer.weight.detach() + module.get_delta_weight("default").detach()
    return model, values, sums


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, Any]:
    return {family: peft_model(models[family], lora) for family, lora in FAMILIES.items()}


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_values_and_gradients_equal_peft(models: dict[str, Path], expected: dict[str, Any], layout: str) -> None:
    """The base is the files, bit for bit: at first, and without adapters. Recomputed layers have gradients on every stage."""
    cases = [(family, {**FAMILIES[family], "mode": mode}, override) for family, mode, override in CASES[layout]]
    values = {family: expected[family][1] for family in FAMILIES}
    shape = LAYOUTS[layout]
    for results in passes(shape.world, folders=models, layout=shape, values=values, cases=cases):
        for (family, _, _), result in zip(cases, results, strict=True):
            model, factors, sums = expected[family]
            torch.testing.assert_close(result["logprobs"], model.expected_logprobs, rtol=0, atol=1e-5)
            gradients = model.expected_gradients
            assert gradients.keys() == factors.keys() == result["gradients"].keys() == result["initial"].keys()
            close(result["gradients"], gradients, 1e-5)
            norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
            assert result["norm"] == pytest.approx(norm, rel=1e-5)
            assert torch.equal(result["first"], result["base"]) and not torch.equal(result["logprobs"], result["base"])
            files = tiny.read_tensors(models[family])
            for name, tensor in files.items():
                assert torch.equal(result["served base"][name], tensor) and torch.equal(
                    result["served at first"][name], tensor
                )
                torch.testing.assert_close(result["served"][name], sums.get(name, tensor), rtol=0, atol=1e-5)
                assert torch.equal(result["served"][name], tensor) == (name not in sums)
            assert all("lora_" in name for name in result["trained"])
            assert result["share"] == pytest.approx(1, abs=1e-4)  # float32


def test_the_bits_of_a_merged_weight_do_not_depend_on_its_cut() -> None:
    """Rows and columns of odd sizes: a vector unit of the processor would treat the last ones of a row differently."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        base, a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((129, 517), (5, 517), (129, 5)))
        whole = merge(base, a, b, 5 / 3)
        for rows, columns in (
            (slice(0, 1), slice(0, 517)),
            (slice(3, 100), slice(7, 24)),
            (slice(64, 129), slice(511, 514)),
        ):
            part = merge(base[rows, columns], a[:, columns], b[rows], 5 / 3)
            assert part.dtype == dtype and torch.equal(part, whole[rows, columns])
        exact = base.double() + 5 / 3 * b.double() @ a.double()
        torch.testing.assert_close(whole.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    tall = torch.randn(2100, 130, generator=generator)
    assert tall.numel() > MERGE_ELEMENTS  # several blocks; before, one
    a, b = torch.randn(3, 130, generator=generator), torch.randn(2100, 3, generator=generator)
    assert torch.equal(merge(tall, a, b, 1.0)[2050:], merge(tall[2050:], a, b[2050:], 1.0))


class SavesTwice(torch.autograd.Function):
    """Keeps a weight as Transformer Engine 2.11 does (layernorm_linear.py:466, :495): saved twice, and as `ctx.weight`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, weight)
        ctx.weight = weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return grads[0] @ weight, grads[0].flatten(0, 1).T @ x.flatten(0, 1)


class Linear(torch.nn.Module):
    """Transformer Engine's layer: the sum with the bias is a node of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(12, 8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return SavesTwice.apply(x, self.weight) + 1.0, None


def test_a_merged_weight_is_merged_twice_per_micro_batch_and_kept_by_nothing() -> None:
    """Three micro-batches under way at once, as in a pipeline. Without the repair 3 weights stay, and 9 merges are made."""
    torch.manual_seed(0)
    module: Any = Linear()
    module.__class__ = _adapted(Linear)
    lora = Lora(LoraConfig(**ALL), {})
    module.adapter = _Adapter(lora, "w", 0, [slice(0, 4), torch.tensor([5, 7])], (False, False), False, False, None)
    module.lora_a, module.lora_b = (torch.nn.Parameter(torch.randn(size)) for size in ((6, 8), (12, 3)))
    merged: list[Any] = []
    plain = _Adapter.merged

    def counted(*arguments: Any) -> torch.Tensor:
        weight = plain(*arguments)
        merged.append(weakref.ref(weight))
        return weight

    batches = [torch.randn(5, 2, 8, requires_grad=True) for _ in range(3)]
    with mock.patch.object(_Adapter, "merged", counted):
        outputs = [module(x)[0] for x in batches]
        assert len(merged) == 3 and not any(ref() is not None for ref in merged)
        for output in outputs:
            output.square().sum().backward()
    assert len(merged) == 6 and not any(ref() is not None for ref in merged)
    got = [module.lora_a.grad, module.lora_b.grad, *(x.grad for x in batches)]
    a, b = (factor.detach().clone().requires_grad_() for factor in (module.lora_a, module.lora_b))
    scale, copies = 5 / 3, [x.detach().clone().requires_grad_() for x in batches]
    delta = torch.zeros(12, 8).index_add(0, torch.arange(4), scale * b[:4] @ a[:3])
    delta = delta.index_add(0, torch.tensor([5, 7]), scale * b[[5, 7]] @ a[3:])
    sum(((x @ (module.weight + delta).T + 1).square().sum() for x in copies), torch.zeros(())).backward()
    for one, other in zip(got, [a.grad, b.grad, *(x.grad for x in copies)], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


CHAIN = ["1", "TP2+SP", "PP2", "DP2"]


@pytest.mark.slow
def test_a_checkpoint_of_adapters_resumes_in_other_layouts(models: dict[str, Path], tmp_path: Path) -> None:
    """Each layout loads what the one before has saved, saves it again (the same bits), updates once and saves.

    The last updates must be those of one rank that is never stopped. Factors are sampled from their names: the same anywhere.
    """
    common: dict[str, Any] = {"folder": models["qwen2"], "out": tmp_path}
    [alone] = chain(1, layout=LAYOUTS["1"], done=None, count=len(CHAIN), **common)
    for done, layout in enumerate(CHAIN):
        for got in chain(LAYOUTS[layout].world, layout=LAYOUTS[layout], done=done, count=1, **common):
            [got_update], want = got["updates"], alone["updates"][done]
            assert done or all(torch.equal(tensor, alone["initial"][name]) for name, tensor in got["initial"].items())
            assert got_update["norm"] == pytest.approx(want["norm"], rel=1e-5)
            for name, tensor in want["factors"].items():
                torch.testing.assert_close(
                    got_update["factors"][name], tensor, atol=1e-5, rtol=0, msg=f"{layout} {name}"
                )
        if done:
            same_stored(tmp_path / f"{done}", tmp_path / f"{done} again")
    names = {name.removeprefix("optimizer.state.") for name in stored(tmp_path / "1")}
    assert all("lora_" in name for name in names), names


@pytest.mark.slow
def test_adapters_of_peft_are_imported_exported_and_merged_bit_by_bit(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In bfloat16, in two layouts. Served weights are what modules multiply by, and what `convert merge` writes.

    `peft` and `transformers` load the exported folder, whose layers have whole names: SOME leaves one up_proj out.
    """
    import peft
    from transformers import AutoModelForCausalLM

    base = models["qwen2"]
    plain = AutoModelForCausalLM.from_pretrained(base)
    settings = {"target_modules": SOME["target_modules"], "exclude_modules": SOME["exclude_modules"]}
    adapted = peft.get_peft_model(plain, peft.LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=5, **settings))
    for number, (name, parameter) in enumerate(sorted(adapted.named_parameters())):
        if "lora_" in name:
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.data = (0.1 * values).bfloat16()
    adapted.save_pretrained(tmp_path / "given")
    given = load_file(tmp_path / "given" / "adapter_model.safetensors")
    for layout in ("1", "TP2xPP2+SP"):
        out, whole = tmp_path / layout, tmp_path / f"{layout} whole"
        lora = {**SOME, "path": tmp_path / "given"}
        results = bfloat16(LAYOUTS[layout].world, folder=base, layout=LAYOUTS[layout], lora=lora, out=out)
        same_bits(given, load_file(out / "adapter_model.safetensors"))
        assert convert("merge", out, whole, "--quiet") == 0
        for weights, own in results:
            assert own and all(own.values()), own
            same_bits(weights, tensors_of(whole))
        config, by_peft = (
            json.loads((folder / "adapter_config.json").read_text()) for folder in (out, tmp_path / "given")
        )
        assert config["base_model_name_or_path"] == str(base) and len(config["target_modules"]) == 7
        assert all(config[key] == by_peft[key] for key in ("r", "lora_alpha", "use_rslora", "bias", "peft_type"))
        assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 2
    settings_file = tmp_path / "1" / "adapter_config.json"
    moved = {**json.loads(settings_file.read_text()), "base_model_name_or_path": "nobody/nothing"}
    shutil.copytree(tmp_path / "1", tmp_path / "moved")
    (tmp_path / "moved" / "adapter_config.json").write_text(json.dumps(moved))
    assert convert("merge", tmp_path / "moved", tmp_path / "x", "--quiet") == 2
    assert "its base 'nobody/nothing' is no folder here" in capsys.readouterr().err
    assert convert("merge", tmp_path / "moved", tmp_path / "x", "--hf", base, "--quiet") == 0
    tokens, unadapted = torch.arange(50)[None], AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        loaded = [
            peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "1"),
            AutoModelForCausalLM.from_pretrained(tmp_path / "1"),
            AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32),
        ]
        peft_s, by_transformers, merged = (model.eval()(tokens).logits for model in loaded)
        assert torch.equal(peft_s, by_transformers) and not torch.equal(peft_s, unadapted(tokens).logits)
        torch.testing.assert_close(merged, peft_s, rtol=0, atol=0.1)  # bfloat16 weights against float32 ones
