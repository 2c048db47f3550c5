"""Models that read images, over layouts, against transformers with embeddings and positions (tests/vision.py).

Rows with 1, 0, 2 and 1 images of four sizes, and an `<|image_pad|>` in every response, which is an ordinary token. The bounds are
those of test_layouts.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from grpo_megatron.config import RolloutConfig
from grpo_megatron.models.families import read_architecture
from grpo_megatron.models.forward import packed_lengths
from grpo_megatron.models.policy import Reference
from grpo_megatron.models.vision import Features, build_tower
from grpo_megatron.models.weights.file_names import PartSlice, parts_of_stack
from grpo_megatron.models.weights.sharded_state import load_sharded, save_sharded
from grpo_megatron.models.weights.stream import engine_tensors, new_weight_sync, unwrapped
from grpo_megatron.parallel.mesh import RankError
from grpo_megatron.rollout.build import build_engine
from grpo_megatron.rollout.engine import Request
from tests import tiny, vision
from tests.models.policies import (
    LAYOUTS,
    RECOMPUTE,
    Layout,
    Tensors,
    actor,
    backward_over_logits,
    build,
    close,
    close_rows,
    loss,
    named_gradients,
    share,
    stream,
    whole,
    world,
)
from tests.worlds import ranks

pytestmark = pytest.mark.slow
ROWS = vision.make_prompts()
PAIRS = [(prompt, response) for prompt, _, response in ROWS]
TRAINED = {"freeze_tower": False, "freeze_merger": False}


def trajectory_rows() -> list[Any]:
    """Rows of trajectories: the end of one, an earlier row of it, one whose second image differs, and a sibling of the first.

    The end has its second image in an observation; in the prompts of the others it is at the same place.
    """
    text, (prompt, images, _) = ROWS[1][0] * 2, ROWS[3]
    first = len(prompt) + 2
    seen = [*prompt, *text[:2], *[vision.IMAGE_PAD] * 6, *text]
    second, other = (vision.placed(seed, first, 2, 3) for seed in (50, 51))
    end = prompt, (*images, second), [*seen[len(prompt) :], vision.IMAGE_PAD, *text[:3]]
    cut = prompt, (*images, vision.placed(52, len(prompt) + 1, 1, 2)), [text[0], *[vision.IMAGE_PAD] * 2, *text[:4]]
    return [end, (seen, (*images, second), text[:4]), (seen, (*images, other), text[1:5]), cut]


IN_TURNS = trajectory_rows()
TURN_PAIRS = [(prompt, response) for prompt, _, response in IN_TURNS]


# -- the ranks ---------------------------------------------------------------------------------------------------------


def batch_of(mini_batches: Any, rows: list[int] | None = None) -> Any:
    """A Batch of `rows` of ROWS, with their images."""
    rows = list(range(len(ROWS))) if rows is None else rows
    batch = tiny.make_batch(PAIRS, mini_batches, rows)
    batch.images = [ROWS[row][1] for row in rows]
    return batch


def features_of(policy: Any) -> Any:
    """The features of the images on this rank's stage, or None."""
    return unwrapped(policy.model).features


@ranks()
def gradients_of(folder: Path, layout: Layout, recompute: bool) -> dict[str, Any]:
    """Log-probabilities and gradients by name, as whole Hugging Face tensors, of whole rows and of shared prompts."""
    megatron = {"use_distributed_optimizer": False, "override_transformer_config": RECOMPUTE if recompute else {}}
    policy = build(folder, layout, megatron=megatron, vision=TRAINED, optim={"clip_grad": 0.5})
    mine = share(len(ROWS), policy.mesh.dp_rank, policy.mesh.dp)
    local = list(range(len(mine)))
    # The last micro-batch has no image; one is empty.
    micros = [[row for row in local if mine[row] != 1], [], [row for row in local if mine[row] == 1]]
    batch = batch_of([micros], mine)
    found: dict[str, Any] = {"logprobs": dict(zip(mine, policy.logprobs(batch), strict=True)), "packings": {}}
    for batch.shares_prompts in (False, True):
        policy.forward_backward(batch, micros, loss)
        found["packings"][batch.shares_prompts] = whole(policy, named_gradients(policy))
    found["norm"] = policy.update(batch, loss)[1]["actor/grad_norm"]
    return found


@ranks()
def gradients_in_turns(folder: Path, layout: Layout) -> dict[bool, tuple[Any, Any, list[int]]]:
    """Whether rows share their tokens -> log-probabilities, gradients, and the tokens that are computed for each row."""
    policy = build(folder, layout, megatron={"use_distributed_optimizer": False}, vision=TRAINED)
    batch, found = tiny.make_batch(TURN_PAIRS, [[[0, 1, 2, 3]]]), {}
    batch.images = [images for _, images, _ in IN_TURNS]
    for batch.shares_prompts in (False, True):
        logprobs = policy.logprobs(batch)
        policy.forward_backward(batch, [[0, 1, 2, 3]], loss)
        found[batch.shares_prompts] = (
            logprobs,
            whole(policy, named_gradients(policy)),
            packed_lengths(batch, [0, 1, 2, 3]),
        )
    return found


@ranks(1)
def freezing(folder: Path) -> dict[str, Any]:
    """What is trained, computed and changed, by which parts are frozen."""
    found: dict[str, Any] = {}
    for tower, merger in itertools.product((True, False), repeat=2):
        frozen = {"freeze_tower": tower, "freeze_merger": merger}
        policy = build(folder, vision=frozen, optim={"lr": 1e-2})
        batch = batch_of([[[0, 1], [2, 3]]])
        before = policy.logprobs(batch)
        policy.update(batch, loss)
        found[tower, merger] = {"before": before, "weights": stream(policy), "after": policy.logprobs(batch)}
        found[tower, merger]["trained"] = {n for n in named_gradients(policy) if n.startswith("visual.")}
        found[tower, merger]["computed"] = features_of(policy).num_computed
    return found


@ranks(1)
def reference(folder: Path) -> int:
    """How many images a reference that is off the device between its passes computes in three of them."""
    (device, mesh), limits = world(LAYOUTS["1"]), actor(LAYOUTS["1"], megatron={"offload_reference": True})
    model = Reference.load(folder, "float32", read_architecture(folder), limits, mesh, device)
    batch = batch_of([[[0, 1], [2, 3]]])
    first = model.logprobs(batch)
    assert all(torch.equal(model.logprobs(batch), first) for _ in range(2))
    return int(features_of(model).num_computed)


@ranks(1)
def rates(folder: Path) -> dict[str, list[float]]:
    """Part of the model -> its learning rates after each of three updates, warmed up and decayed."""
    optim = {"lr": 1e-2, "min_lr": 1e-3, "lr_decay_style": "linear", "lr_warmup_steps": 1}
    policy = build(folder, vision={"freeze_tower": False, "lr": 1e-4}, optim=optim)
    policy.set_optimizer(policy.actor.optim, 3)
    out: dict[str, list[float]] = {"tower": [], "others": []}
    for _ in range(3):
        policy.update(batch_of([[[0, 1]]]), loss)
        seen = {"tower": set(), "others": set()}
        for group in policy.optimizer.param_groups:
            if group["params"]:
                seen["tower" if group["max_lr"] == 1e-4 else "others"].add(group["lr"])
        for part, found in seen.items():
            [rate] = found
            out[part].append(rate)
    return out


@ranks(1)
def low_precision(folder: Path) -> dict[str, Any]:
    """Log-probabilities in bfloat16, and the types of the tower's parameters and of its other tensors."""
    policy = build(folder, dtype="bfloat16")
    tower: Any = unwrapped(policy.ddp).visual
    others = {value.dtype for module in tower.modules() for value in vars(module).values() if torch.is_tensor(value)}
    parameters = {parameter.dtype for parameter in tower.parameters()}
    return {"logprobs": policy.logprobs(batch_of([[[0, 1, 2, 3]]])), "types": (parameters, others)}


@ranks()
def lora(folder: Path, layout: Layout, mode: str) -> dict[str, Any]:
    """An update of adapters, with recomputed layers: norm of the gradient on every stage, log-probabilities after it."""
    values = {"lora": {"rank": 4, "alpha": 32, "mode": mode}, "optim": {"lr": 1e-2, "eps": 1e-4}}
    policy = build(folder, layout, megatron={"override_transformer_config": RECOMPUTE}, **values)
    batch = batch_of([[[0, 1], [2, 3]]])
    before = policy.logprobs(batch)
    norm, names = policy.update(batch, loss)[1]["actor/grad_norm"], set(named_gradients(policy))
    return {"before": before, "after": policy.logprobs(batch), "norm": norm, "names": names, "weights": stream(policy)}


@ranks()
def checkpoint(folder: Path, layout: Layout, load: Path | None, save: Path) -> Tensors:
    """Load a checkpoint of any layout, update once, save. The tower is trained."""
    policy = build(folder, layout, optim={"lr": 1e-3, "eps": 1e-4}, vision=TRAINED)
    if load is not None:
        load_sharded(policy, load, same_world=False)
    mine = share(len(ROWS), policy.mesh.dp_rank, policy.mesh.dp)
    policy.update(batch_of([[list(range(len(mine)))]], mine), loss)
    save_sharded(policy, save)
    return stream(policy)


@ranks()
def serve(folder: Path, layout: Layout) -> dict[str, Any]:
    """The engine `transformers` after a sync of an updated policy: its log-probabilities and the policy's, and its samples."""
    policy = build(folder, layout, optim={"lr": 1e-2}, vision={"freeze_tower": False})
    tensors = engine_tensors(policy.arch, 1, reads_shards=False)
    sizes: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "bucket_megabytes": 1}
    weight_sync = new_weight_sync(policy.arch, policy.mesh, policy.stage_of, tensors, **sizes)
    parts = RolloutConfig(engine="transformers"), folder, policy.mesh, policy.device
    limits: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "eos_token_ids": [vision.EOS]}
    engine, batch, found = build_engine(*parts, tensors=tensors, **limits), batch_of([[[0, 1], [2, 3]]]), []
    copied = [p for p in policy.ddp.parameters() if p.requires_grad and not getattr(p, "tensor_model_parallel", False)]
    for parameter in copied if policy.mesh.tp_rank else ():  # as nondeterministic kernels leave them
        parameter.register_hook(lambda gradient: gradient * (1 + 1e-4))
    for version in range(2):
        engine.load_weights(policy.engine_weights(weight_sync, version), version)
        policy.expected_digests(weight_sync)
        got = engine.logprobs([tokens.tolist() for tokens in batch.tokens], batch.images)
        own = policy.logprobs(batch)
        for row, (prompt, response) in enumerate(PAIRS):
            difference = torch.tensor(got[row][len(prompt) - 1 :]) - own[row, : len(response)]
            found.append(difference.abs().max().item())
        policy.update(batch, loss)
    weights = stream(policy)
    engine.load_weights(policy.engine_weights(weight_sync, 2), 2)
    if layout.tp > 1:
        weight = unwrapped(policy.model).visual.blocks[1].attn.qkv.weight.data
        weight[3, 5] += weight[3, 5] * policy.mesh.tp_rank * 2.0**-23
        with pytest.raises(
            RankError,
            match=r"copies of 1 weights .* those of visual.blocks.1.attn.qkv.weight: ranks \[0\] against \[1\]",
        ):
            policy.expected_digests(weight_sync)
        weight[3, 5] = weights["visual.blocks.1.attn.qkv.weight"][3, 5]
    requests = [Request(tuple(p), seed, 12, images=images) for p, images, _ in ROWS for seed in (1, 2)]
    requests.append(Request(tuple(ROWS[0][0]), 1, 12, images=(vision.placed(77, ROWS[0][1][0].first),)))
    together = engine.generate(requests, 2)
    alone = [engine.generate([request], 2)[0] for request in requests]
    assert together == alone, "a sample depends on the other requests"
    for outside in (-1, len(ROWS[0][0]) - 3):
        beyond = replace(requests[0], images=(vision.placed(1, outside),))
        with pytest.raises(ValueError, match=f"at the tokens {outside} to {outside + 3} is outside the prompt of 9"):
            engine.submit("beyond", beyond, 2)
    first = replace(requests[0], max_tokens=5)
    begun = engine.generate([first], 2)[0]
    on = replace(first, prompt_ids=(*first.prompt_ids, *begun.response_ids), num_written=5, seed=9, temperature=0.0)
    rest = engine.generate([on], 2)[0]
    return {
        "differences": found,
        "samples": [
            (r.prompt_ids, r.images, c.response_ids, c.logprobs) for r, c in zip(requests, together, strict=True)
        ],
        "continued": (on.prompt_ids, on.images, rest.response_ids, rest.logprobs),
        "weights": weights,
    }


# -- the tests ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vision")
    return {family: vision.make_model(root / family, family) for family in vision.TOWERS}


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, tuple[list[torch.Tensor], dict[str, torch.Tensor]]]:
    """Family -> log-probabilities of each row, gradients by the names in files."""
    return {family: oracle(folder) for family, folder in models.items()}


def oracle(folder: Path, rows: list[Any] = ROWS) -> tuple[list[torch.Tensor], Tensors]:
    model, pairs = vision.load(folder), [(prompt, response) for prompt, _, response in rows]
    logits = [vision.logits(model, [*prompt, *response], images) for prompt, images, response in rows]
    logprobs = backward_over_logits(logits, pairs, tiny.make_batch(pairs, []))
    gradients: Tensors = {}
    for name, parameter in model.named_parameters():
        if (gradient := parameter.grad) is not None:  # in memory, experts are stacked
            name, stack = vision.in_file(name), gradient
            experts = parts_of_stack(name, tuple(stack.shape), "qwen3_vl_moe", model.config.text_config.hidden_size)
            gradients |= {part: PartSlice(stack, place)[:] for part, place, _ in experts} or {name: stack}
    return [row[: len(response)] for row, (_, response) in zip(logprobs, pairs, strict=True)], gradients


def logprobs_of(folder: Path, weights: Tensors) -> list[torch.Tensor]:
    """The log-probabilities of every row by transformers with other weights."""
    model = vision.load(folder)
    model.load_state_dict({name: weights[vision.in_file(name)] for name in model.state_dict()})
    return [vision.logprobs(model, *row).detach() for row in ROWS]


OF_EVERY_RUN = [("qwen2_5_vl", "1"), ("qwen2_vl", "1"), ("qwen2_5_vl", "TP2"), ("qwen3_vl", "1")]
OF_EVERY_RUN += [("qwen3_vl", "TP2xPP2+SP"), ("qwen3_vl_moe", "EP2")]
IN_THE_SOAK = [("qwen2_5_vl", name) for name in ("TP2+SP", "PP2", "DP2", "DP2xTP2", "TP2xPP2+SP")]
IN_THE_SOAK += [(family, name) for family in ("qwen2_vl", "qwen3_vl") for name in ("TP2", "TP2+SP", "PP2", "DP2")]
IN_THE_SOAK += [("qwen3_vl_moe", name) for name in ("1", "TP2+SP", "PP2", "DP2", "TP2xPP2+SP")]


@pytest.mark.both_stacks
@pytest.mark.parametrize(
    ("family", "layout"), [*OF_EVERY_RUN, *(pytest.param(*case, marks=pytest.mark.soak) for case in IN_THE_SOAK)]
)
def test_logprobs_and_gradients_equal_transformers(
    models: dict[str, Path], expected: dict[str, Any], family: str, layout: str
) -> None:
    """The tower is trained. Its gradients are whole on the first stage, and in the norm once. TP2 recomputes."""
    shape = LAYOUTS[layout]
    logprobs, gradients = expected[family]
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    for result in gradients_of(shape.world, folder=models[family], layout=shape, recompute=layout == "TP2"):
        for row, got in result["logprobs"].items():
            close_rows(got[None], [logprobs[row]], str(row))
        for packing in result["packings"].values():
            close(packing, gradients, 1e-5)
        assert result["norm"] == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.parametrize(("family", "layout"), [("qwen2_5_vl", "1"), ("qwen3_vl", "TP2")])
def test_images_of_observations_equal_those_of_one_turn(models: dict[str, Path], family: str, layout: str) -> None:
    """Against transformers, which reads each row as one sequence. Rows share tokens up to the first image that differs."""
    logprobs, gradients = oracle(models[family], IN_TURNS)
    lengths = [len(prompt) + len(response) for prompt, response in TURN_PAIRS]
    prompt, seen = len(TURN_PAIRS[0][0]), len(TURN_PAIRS[1][0])
    for result in gradients_in_turns(LAYOUTS[layout].world, folder=models[family], layout=LAYOUTS[layout]):
        for got, own, _ in result.values():
            for row, want in enumerate(logprobs):
                close_rows(got[row][None], [want], str(row))
            close(own, gradients, 1e-5)
        shared = [0, seen, prompt + 2, prompt]  # two tokens stand before the image that differs
        assert result[False][2] == lengths
        assert result[True][2] == [length - own for length, own in zip(lengths, shared, strict=True)]


def test_windows_of_a_size_are_one_kernel_call(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """5 x 7 tokens are 6 windows of 2 x 2 and 6 at two edges, of 2 tokens and of 1: 3 calls, and 1 in a layer without windows."""
    arch = read_architecture(models["qwen2_5_vl"])
    assert arch.vision is not None
    tower: Any = build_tower(arch.vision, arch.hidden_size, torch.float32, torch.device("cpu"))
    tower.load_state_dict(vision.load(models["qwen2_5_vl"]).model.visual.state_dict())
    calls = mock.Mock(side_effect=torch.nn.functional.scaled_dot_product_attention)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", calls)
    features, image = Features(arch.vision, torch.float32), vision.placed(1, 0, 5, 7)
    computed = features.of(tower.requires_grad_(True), [image])[image.digest]
    assert [call.args[0].shape[0] for call in calls.call_args_list] == [1, 5, 6, 1]
    assert torch.equal(features.of(tower, [image])[image.digest], computed)
    pixels, grid = vision.pixel_values([image])
    expected = vision.load(models["qwen2_5_vl"]).model.visual(pixels, grid_thw=grid).pooler_output
    torch.testing.assert_close(computed, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_what_is_frozen_stays_and_is_computed_once(models: dict[str, Path], family: str) -> None:
    """A frozen tower computes each of the four images once for three passes, a trained one at every pass."""
    (found,) = freezing(folder=models[family])
    first = vision.load(models[family]).state_dict()
    before = {vision.in_file(name): tensor for name, tensor in first.items()}
    for (tower, merger), result in found.items():
        assert any("merger" in name for name in result["trained"]) == (not merger)
        assert any("merger" not in name for name in result["trained"]) == (not tower)
        assert result["computed"] == (4 if tower and merger else 12)
        torch.testing.assert_close(result["before"], found[True, True]["before"], rtol=0, atol=0)
        for name, tensor in result["weights"].items():
            is_frozen = name.startswith("visual.") and (merger if "merger" in name else tower)
            assert torch.equal(tensor, before[name]) == is_frozen, name
    # The log-probabilities after the update are those of the new weights, also of the tower's.
    close_rows(found[False, False]["after"], logprobs_of(models[family], found[False, False]["weights"]))


def test_a_reference_off_the_device_keeps_its_features(models: dict[str, Path]) -> None:
    assert reference(folder=models["qwen2_vl"]) == [4]


def test_the_tower_has_its_own_learning_rate(models: dict[str, Path]) -> None:
    """A hundredth of the others' at every step of the schedule: warm-up to the maximum, then a line to a tenth of it."""
    (found,) = rates(folder=models["qwen2_5_vl"])
    assert found["others"] == pytest.approx([1e-2, 5.5e-3, 1e-3])
    assert found["tower"] == pytest.approx([rate / 100 for rate in found["others"]])


def test_bfloat16_keeps_the_angles_of_the_tower_in_float32(models: dict[str, Path], expected: dict[str, Any]) -> None:
    (found,) = low_precision(folder=models["qwen2_5_vl"])
    assert found["types"] == ({torch.bfloat16}, {torch.float32})
    for row, (_, response) in enumerate(PAIRS):
        want = expected["qwen2_5_vl"][0][row][: len(response)]
        assert (found["logprobs"][row, : len(response)] - want).abs().mean() < 0.1  # 0.03 (measured)


@pytest.mark.parametrize(
    ("family", "mode"),
    [("qwen2_5_vl", "merged"), ("qwen3_vl", "merged"), pytest.param("qwen2_5_vl", "split", marks=pytest.mark.soak)],
)
def test_adapters_of_the_decoder_learn_beside_a_frozen_tower(
    models: dict[str, Path], expected: dict[str, Any], family: str, mode: str
) -> None:
    """In every layout the same, with recomputed layers, whose gradients a frozen embedding would lose without a word."""
    results = [
        lora(layout.world, folder=models[family], layout=layout, mode=mode)[0]
        for layout in (LAYOUTS[name] for name in ("1", "TP2+SP", "PP2"))
    ]
    for result in results:
        close_rows(result["before"], expected[family][0])
        assert all(name.endswith(("lora_a", "lora_b")) and name.startswith("decoder.") for name in result["names"])
        assert result["norm"] == pytest.approx(results[0]["norm"], rel=1e-5) and result["norm"] > 0
        torch.testing.assert_close(result["after"], results[0]["after"], rtol=0, atol=1e-4)
    close_rows(results[0]["after"], logprobs_of(models[family], results[0]["weights"]))


@pytest.mark.soak
def test_a_checkpoint_goes_through_changes_of_layout(models: dict[str, Path], tmp_path: Path) -> None:
    """Three updates with a trained tower: each in another layout, from the checkpoint of the one before, or on one rank."""
    weights = []
    for number, names in enumerate((("1", "1", "1"), ("TP2+SP", "PP2", "DP2xTP2"))):
        load = None
        for step, name in enumerate(names):
            layout, save = LAYOUTS[name], tmp_path / f"{number}-{step}"
            (result, *_) = checkpoint(layout.world, folder=models["qwen2_5_vl"], layout=layout, load=load, save=save)
            load = save
        weights.append(result)
    before = vision.load(models["qwen2_5_vl"]).state_dict()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=2e-5, msg=name)
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, weights[0][vision.in_file(name)])}
    assert changed == before.keys()


SERVED = [("qwen2_5_vl", "1"), ("qwen2_5_vl", "TP2"), ("qwen3_vl", "PP2")]


@pytest.mark.both_stacks
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *(pytest.param(*case, marks=pytest.mark.soak) for case in SERVED),
        pytest.param("qwen2_5_vl", "TP2+SP", marks=pytest.mark.soak),
        ("qwen2_5_vl", "PP2"),
        ("qwen3_vl", "TP2+SP"),
    ],
)
def test_the_transformers_engine_computes_what_the_policy_does(
    models: dict[str, Path], family: str, layout: str
) -> None:
    """After each of three syncs of a policy whose tower is trained. Samples are those of each request alone.

    Gradients of copies on two tensor-parallel ranks are unequal: after an update the copies are equal all the same.
    """
    shape = LAYOUTS[layout]
    for result in serve(shape.world, folder=models[family], layout=shape):
        assert max(result["differences"]) <= 1e-5
        model = vision.load(models[family])
        model.load_state_dict({n: result["weights"][vision.in_file(n)] for n in model.state_dict()})
        for prompt, images, response, logprobs in [*result["samples"], result["continued"]]:
            want = vision.logprobs(model, prompt, images, response).detach()
            torch.testing.assert_close(torch.tensor(logprobs), want, rtol=0, atol=1e-5)
        samples = [response for _, _, response, _ in result["samples"]]
        assert samples[0] != samples[-1]  # equal text and seed, another image
