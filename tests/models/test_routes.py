"""Route replay: given experts are computed as transformers computes them, in every layout, with gradients for the routers.

The routes here are drawn at random, so an error of one token or one layer anywhere changes the result.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_megatron.checks import layout as checks
from grpo_megatron.checks.layout import route_problems
from grpo_megatron.config import Config
from grpo_megatron.models.families import architecture_of
from grpo_megatron.models.layers.routes import routes_of
from grpo_megatron.planning.phases import route_bytes
from grpo_megatron.rollout.build import engine_problems
from grpo_megatron.rollout.engine import continued
from grpo_megatron.rollout.vllm.process import divides_experts_on_cpu
from tests import tiny, worlds
from tests.models import route_ranks
from tests.models.gradients import transformers_backward
from tests.models.policy_ranks import loss
from tests.models.test_layouts import close
from tests.models.test_moe import LAYOUTS, MODELS, QWEN3
from tests.runs import texts

FORCED = {"qwen3_moe": (2, 8, 3), "mixtral": (2, 4, 2), "deepseek_v3": (1, 8, 3)}  # layers with experts, experts, k
_SEQUENCES = tiny.make_sequences(6)
PAIRS = [(_SEQUENCES[row - row % 2][0], response) for row, (_, response) in enumerate(_SEQUENCES)]  # prompts in twos
IN_THE_SOAK = ("DP2", "TP2+SP", "PP2", "EP2xDP4", "EP2xPP2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("routes")
    longer = {"num_hidden_layers": 2, "max_position_embeddings": 512}
    made = []
    for name, changes in MODELS.items():
        rope = (
            {"rope_parameters": {**changes["rope_parameters"], "factor": 32.0}} if "rope_parameters" in changes else {}
        )
        made.append(tiny.make_model(root / name, "llama2", **{**changes, **longer, **rope}))
    return made


@pytest.fixture(scope="module")
def routes() -> list[list[torch.Tensor]]:
    return [route_ranks.random_routes(PAIRS, *sizes) for sizes in FORCED.values()]


def _forced(folders: list[Path]) -> list[Path]:
    return [folder for folder in folders if folder.name in FORCED]


@pytest.fixture(scope="module")
def single(folders: list[Path], routes: Any) -> list[dict[str, Any]]:
    arguments = {"folders": _forced(folders), "pairs": PAIRS, "routes": routes, "layout": LAYOUTS["1"]}
    return worlds.run(route_ranks.replayed, 1, **arguments)[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param(n, marks=[pytest.mark.soak] * (n in IN_THE_SOAK)) for n in LAYOUTS])
def test_every_layout_computes_the_given_experts(
    folders: list[Path], routes: Any, single: list[dict[str, Any]], layout: str
) -> None:
    """Packs, shared prompts, recomputed layers, unknown routes: log-probabilities equal transformers' with these routes."""
    ranks = [single]
    if layout != "1":
        arguments = {"folders": _forced(folders), "pairs": PAIRS, "routes": routes, "layout": LAYOUTS[layout]}
        ranks = worlds.run(route_ranks.replayed, LAYOUTS[layout][0], **arguments)
    for number, folder in enumerate(_forced(folders)):
        wanted = forced_logprobs(folder, routes[number], *FORCED[folder.name][1:])
        for results in ranks:
            got, one = results[number], single[number]
            for row, want in enumerate(wanted):
                for name in got.keys() & {"logprobs False", "logprobs True"}:
                    torch.testing.assert_close(got[name][row, : len(want)], want, rtol=0, atol=1e-5)
            close(got["gradients False"], one["gradients False"], 1e-5)
            close(got["gradients True"], one["gradients False"], 1e-5)
            share = got["counts"][0] / got["counts"][1]
            assert share == pytest.approx(one["counts"][0] / one["counts"][1], abs=1e-3) and share < 0.75


def forced_logprobs(folder: Path, routes: list[torch.Tensor], experts: int, k: int) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    with torch.no_grad(), route_ranks.forced(model, routes, experts, k):
        for prompt, response in PAIRS:
            logp = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
            found.append(logp.gather(1, torch.tensor(response)[:, None])[:, 0])
    return found


@pytest.mark.slow
def test_gradients_equal_transformers_with_the_same_routes(
    folders: list[Path], routes: Any, single: list[dict[str, Any]]
) -> None:
    """The routers have gradients through the scores of the given experts."""
    for folder, of_pairs, one in zip(_forced(folders), routes, single, strict=True):

        def adapt(model: Any, folder: Path = folder, of_pairs: Any = of_pairs) -> None:
            route_ranks.forced(model, of_pairs, *FORCED[folder.name][1:]).__enter__()

        layer = transformers_backward(folder, PAIRS, loss, adapt=adapt).model.layers[1]
        prefix = f"model.layers.1.{'block_sparse_moe' if folder.name == 'mixtral' else 'mlp'}."
        want = {prefix + "gate.weight": layer.mlp.gate.weight.grad}
        want |= {f"model.layers.1.self_attn.{name}": p.grad for name, p in layer.self_attn.named_parameters()}
        assert float(want[prefix + "gate.weight"].abs().max()) > 0
        close({name: one["gradients False"][name] for name in want}, want, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["1", pytest.param("EP2xPP2", marks=pytest.mark.soak)])
def test_a_replay_of_its_own_routes_has_the_bits_of_the_plain_pass(folders: list[Path], layout: str) -> None:
    """All families, by `route_replay: old`. With other routers, the recorded experts stay."""
    arguments = {"folders": folders, "pairs": PAIRS, "layout": LAYOUTS[layout]}
    for found in worlds.run(route_ranks.own_routes, LAYOUTS[layout][0], **arguments):
        assert found == [True] * len(MODELS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "rollout_tp", "rollout_ep"),
    [
        ("qwen3_moe", "EP2xDP2", 2, 2),
        ("deepseek_v2", "1", 1, 1),
        pytest.param("deepseek_v3", "1", 1, 1, marks=pytest.mark.soak),
        pytest.param("mixtral", "PP2", 2, 1, marks=pytest.mark.soak),
    ],
)
def test_the_engine_records_the_experts_that_it_computes(
    folders: list[Path], model: str, layout: str, rollout_tp: int, rollout_ep: int
) -> None:
    """vLLM's routes, also of prompts that its prefix cache has, are those of the policy. Shifted ones are not."""
    if not divides_experts_on_cpu():
        pytest.skip("the installed vLLM's routers cannot be recorded on the CPU")
    folder = next(folder for folder in folders if folder.name == model)
    arguments = {"layout": LAYOUTS[layout], "rollout_tp": rollout_tp, "rollout_ep": rollout_ep}
    for found in worlds.run(route_ranks.engine_routes, LAYOUTS[layout][0], folder=folder, **arguments):
        assert (found["cached"] > 0 or "deepseek" in model) and all(
            int(routes[:-1].min()) >= 0 for routes in found["routes"]
        )
        assert found["own"] == 1.0
        assert found["token"] < (0.75 if model != "deepseek_v3" else 1)  # its bias chooses most experts here
        assert found["layer"] < 0.75 or "deepseek" in model  # which has one layer with experts here


@pytest.mark.slow
def test_gradients_of_the_routers_meet_finite_differences(folders: list[Path], routes: Any) -> None:
    """With fixed experts the log-probabilities have no jumps."""
    folder, (layers, _, k) = _forced(folders)[0], FORCED["qwen3_moe"]
    known = [torch.where(part < 0, torch.arange(k).repeat(layers), part) for part in routes[0]]
    [found] = worlds.run(route_ranks.finite_differences, 1, folder=folder, pairs=PAIRS, routes=known)
    assert len(found) == layers
    for difference, gradient in found:
        assert difference == pytest.approx(gradient, rel=0.01) and gradient > 0.01


def test_routes_of_a_sequence_that_grows() -> None:
    """Those of the engine that first computed a token stay, also where a later one computes it again."""
    first = np.array([[1, 2], [3, 4], [-1, -1]], dtype=np.int8)
    second = np.array([[9, 9], [9, 9], [5, 6], [7, 8]], dtype=np.int8)
    found = continued(continued(None, first), second)
    assert found is not None and found.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert continued(first, None) is first and second.tolist()[0] == [9, 9]


@pytest.mark.parametrize(("model", "per_token"), [("qwen3_30b", 48 * 8), ("deepseek_v3", 58 * 8 * 2)])
def test_the_plan_counts_the_bytes_of_routes(model: str, per_token: int) -> None:
    """Of 4 replicas of 8 ranks. Engine: one byte for each of at most 128 experts, else two. Old: two, divided over tp and pp."""
    sizes = {"qwen3_30b": (48, 0, 8, 128), "deepseek_v3": (61, 3, 8, 256)}[model]
    names = ("num_layers", "num_dense_layers", "experts_per_token", "num_experts")
    arch = replace(architecture_of({**tiny.COMMON, **QWEN3}), **dict(zip(names, sizes, strict=True)))
    tokens = 64 * 16 * (512 + 1024)
    for replay, expected in (("engine", tokens * per_token / 4), ("old", tokens * 2 * arch.num_routes / 32)):
        config = config_of(actor={"moe": {"route_replay": replay}, "megatron": {"tensor_model_parallel_size": 8}})
        assert {kind: route_bytes(config, arch, 32, kind) for kind in ("engine", "old")} == {
            "engine": 0.0,
            "old": 0.0,
            replay: expected,
        }
    assert arch.route_bytes == per_token


def config_of(**sections: Any) -> Config:
    data = {"train_batch_size": 64, "max_prompt_length": 512, "max_response_length": 1024}
    raw: dict[str, Any] = {"model": {"path": "m"}, "data": data, "rollout": {"n": 16}, "trainer": {"device": "cpu"}}
    return Config.model_validate({**raw, **{name: {**raw.get(name, {}), **part} for name, part in sections.items()}})


OVERRIDE = "override_transformer_config"
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("engine", {}, {"model_type": "llama", "num_experts": 0}, "but this model (llama) has no experts"),
    ("engine", {"rollout": {"engine": "transformers"}}, {}, "rollout.engine='transformers', which records no routes"),
    ("engine", {"algorithm": {"source": "file"}}, {}, "but this run draws nothing; set actor.moe.route_replay=none"),
    ("engine", {"vllm": "0.26.0"}, {}, "on the CPU: the installed vLLM's routers cannot be recorded there; install"),
    ("engine", {"megatron": {OVERRIDE: {"moe_router_fusion": True}}}, {}, ".moe_router_fusion=True: routers would"),
    ("old", {"megatron": {OVERRIDE: {"recompute_modules": ["moe"]}}}, {}, ".recompute_modules=['moe']: routers"),
    ("old", {"mini": None}, {}, "one optimizer step per rollout, or bypass_mode), so there is nothing to replay"),
]


@pytest.mark.parametrize(("replay", "changes", "model", "message"), REFUSED)
def test_what_cannot_be_replayed_is_refused(
    replay: str, changes: dict[str, Any], model: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections = dict(changes)
    is_older = sections.pop("vllm", "0.32.0") == "0.26.0"
    monkeypatch.setattr(checks, "divides_experts_on_cpu", lambda: not is_older)
    actor = {"moe": {"route_replay": replay}, "megatron": sections.pop("megatron", {})}
    actor["ppo_mini_batch_size"] = sections.pop("mini", 16)
    config = config_of(actor=actor, **sections)
    arch = architecture_of({**tiny.COMMON, **(model or QWEN3)})
    found = texts([*route_problems(config, arch), *engine_problems(config.rollout, replays=replay == "engine")])
    [problem] = found
    assert message in problem and "actor.moe.route_replay=none" in problem


@pytest.mark.parametrize("shares_prompts", [False, True])
@pytest.mark.parametrize("cp", [1, 2])
def test_routes_stay_beside_their_tokens_in_a_pack(shares_prompts: bool, cp: int) -> None:
    """A token's route is its id here; padding has none. Context parallelism cuts both alike."""
    from grpo_megatron.device import Device
    from grpo_megatron.models.forward import pack

    if shares_prompts and cp > 1:
        pytest.skip("a pack of trees is not cut")
    batch = tiny.make_batch(PAIRS, [])
    batch.shares_prompts, batch.routes = shares_prompts, [tokens.unsqueeze(1) for tokens in batch.tokens]
    found = []
    for cp_rank in range(cp):
        made = pack(
            batch,
            list(range(len(PAIRS))),
            multiple=16,
            temperature=1.0,
            chunk=8,
            device=Device("cpu"),
            cp=cp,
            cp_rank=cp_rank,
        )
        routes, tokens = routes_of(made.packed), made.tokens[0]
        assert isinstance(routes, torch.Tensor) and routes.shape == (len(tokens), 1)
        known = routes[:, 0] >= 0
        assert torch.equal(routes[known, 0], tokens[known]) and not tokens[~known].any()
        found.append(int(known.sum()))
    prompts = sum(len(prompt) for prompt, _ in PAIRS) // (2 if shares_prompts else 1)
    assert sum(found) == prompts + sum(len(response) for _, response in PAIRS)


@pytest.mark.slow
def test_a_critic_chooses_its_own_experts(tmp_path: Path, routes: Any) -> None:
    """And records none in the batch of the policy."""
    sizes = {**QWEN3, "num_hidden_layers": 2, "max_position_embeddings": 512}
    folder = tiny.make_classifier(tmp_path / "critic", "Token", "llama2", seed=2, **sizes)
    [values] = worlds.run(route_ranks.critic_values, 1, folder=folder, pairs=PAIRS, routes=routes[0])
    assert values[0].abs().max() > 0 and all(torch.equal(values[0], other) for other in values)
