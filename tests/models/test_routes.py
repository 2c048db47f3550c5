"""Route replay: given experts are computed as transformers computes them, in every layout, with gradients for the routers.

The routes here are sampled at random, so an error of one token or one layer anywhere changes the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from grpo_megatron.checks import layout as checks
from grpo_megatron.checks.layout import route_problems
from grpo_megatron.config import ActorConfig, Config, RolloutConfig
from grpo_megatron.device import Device
from grpo_megatron.models.families import architecture_of
from grpo_megatron.models.forward import pack, packed_lengths, trees_of
from grpo_megatron.models.heads.reward_folder import read_reward_folder
from grpo_megatron.models.heads.scalar import ValueModel
from grpo_megatron.models.layers.routes import RouteChoice, routes_of, take_counts
from grpo_megatron.models.weights.stream import engine_tensors
from grpo_megatron.planning.phases import route_bytes
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.rollout.build import build_engine, engine_problems
from grpo_megatron.rollout.engine import Request, continued
from grpo_megatron.rollout.vllm import versions
from grpo_megatron.rollout.vllm.versions import is_newest
from tests import tiny
from tests.colocated import colocate
from tests.models import policies
from tests.models.policies import (
    RECOMPUTE,
    Layout,
    close,
    close_rows,
    local_batch,
    loss,
    named_gradients,
    share,
    transformers_backward,
    whole,
)
from tests.models.test_moe import LAYOUTS, MODELS, NAMES, QWEN3
from tests.runs import texts
from tests.worlds import ranks

FORCED = {"qwen3_moe": (2, 8, 3), "mixtral": (2, 4, 2), "deepseek_v3": (1, 8, 3)}  # layers with experts, experts, k
_SEQUENCES = tiny.make_sequences(6)
PAIRS = [(_SEQUENCES[row - row % 2][0], response) for row, (_, response) in enumerate(_SEQUENCES)]  # prompts in twos
IN_THE_SOAK = ("DP2", "TP2+SP", "PP2", "EP2xDP4", "EP2xPP2")


# -- the ranks ---------------------------------------------------------------------------------------------------------


def random_routes(pairs: Any, layers: int, experts: int, k: int) -> list[torch.Tensor]:
    """[T, layers x k] for each pair: any experts, and at every fifth token none. Those of a prompt depend on the prompt only."""
    made = []
    for prompt, response in pairs:
        routes = []
        for ids in (prompt, prompt + response):
            generator = torch.Generator().manual_seed(sum(ids))
            draws = [torch.randperm(experts, generator=generator)[:k] for _ in range(len(ids) * layers)]
            routes.append(torch.stack(draws).view(len(ids), layers * k).to(torch.int8))
        routes[1][: len(prompt)] = routes[0]
        routes[1][4::5] = -1
        made.append(routes[1])
    return made


class Forced(TorchFunctionMode):
    """transformers' routers take `routes` [T, layers x k] of the sequence under way, layer by layer."""

    def __init__(self, experts: int, k: int) -> None:
        super().__init__()
        self.experts, self.k, self.layer = experts, k, 0
        self.routes: torch.Tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if (
            func is not torch.topk
            or args[0].shape[-1] != self.experts
            or kwargs.get("k", args[1:2]) not in (self.k, (self.k,))
        ):
            return found
        scores, wanted = args[0], self.routes[:, self.layer * self.k : (self.layer + 1) * self.k].long()
        self.layer += 1
        chosen = torch.where(wanted >= 0, wanted, found.indices)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


@contextmanager
def forced(model: Any, routes: list[torch.Tensor], experts: int, k: int) -> Iterator[None]:
    """Inside, calls of `model` compute the sequences in turn, with their routes."""
    mode, waiting, plain = Forced(experts, k), iter(routes), model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        mode.routes, mode.layer = next(waiting), 0
        with mode:
            result = plain(*args, **kwargs)
        assert mode.layer * k == mode.routes.shape[1], f"{mode.layer} routers"
        return result

    model.forward = forward
    yield


def build(folder: Path, layout: Layout, replay: str, recomputed: bool = False, **options: Any) -> Any:
    """A backward pass leaves whole gradients on every rank."""
    megatron = {"use_distributed_optimizer": False, "override_transformer_config": RECOMPUTE if recomputed else {}}
    return policies.build(folder, layout, megatron=megatron, moe={"route_replay": replay}, **options)


@ranks()
def replayed(folders: list[Path], routes: list[list[torch.Tensor]], layout: Layout) -> list[dict[str, Any]]:
    """Per model: log-probabilities and gradients with `routes`, in several packs, as trees, and with recomputed layers."""
    results = []
    for folder, of_pairs in zip(folders, routes, strict=True):
        result: dict[str, Any] = {}
        for recomputed in (False, True):
            policy = build(folder, layout, "engine", recomputed)
            batch = tiny.make_batch(PAIRS, [[[0, 1], [2], [], [3, 4, 5]]])
            batch.routes = of_pairs
            for batch.shares_prompts in (False, policy.arch.latent is None):  # latent attention has no trees
                result[f"logprobs {batch.shares_prompts}"] = policy.logprobs(batch)
            local = local_batch(PAIRS, policy.mesh)
            local.routes = [of_pairs[row] for row in share(len(PAIRS), policy.mesh.dp_rank, policy.mesh.dp)]
            policy.forward_backward(local, local.mini_batches[0], loss)
            result[f"gradients {recomputed}"] = whole(policy, named_gradients(policy))
            result["counts"] = [sum(part) for part in zip(*policy.mesh.all_gather(local.route_counts), strict=True)]
        results.append(result)
    return results


@ranks()
def own_routes(folders: list[Path], layout: Layout) -> list[bool]:
    """Per model: whether a replay of the policy's own routes has the bits of the plain pass, gradients too."""
    found = []
    for folder in folders:
        plain, old = (build(folder, layout, replay) for replay in ("none", "old"))
        gradients, logprobs = [], []
        batch, other = (local_batch(PAIRS, plain.mesh) for _ in range(2))
        [micros] = batch.mini_batches
        batch.recorded_routes = {}
        for policy in (plain, old, old):  # the third pass replays what the second one has recorded
            logprobs.append(policy.logprobs(batch))
            policy.forward_backward(batch, micros, loss)
            gradients.append(named_gradients(policy))
        same = all(torch.equal(logprobs[0], other) for other in logprobs)
        same = same and all(torch.equal(gradients[0][n], other[n]) for n in gradients[0] for other in gradients)
        assert not plain.model.training or batch.recorded_routes.keys() == {tuple(micro) for micro in micros}
        with torch.no_grad():  # with other routers, the recorded routes stay
            for name, parameter in old.ddp.named_parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3 * name.endswith("router.weight"))
        before = [{n: t.clone() for n, t in routes.items()} for routes in batch.recorded_routes.values()]
        moved, fresh = old.logprobs(batch), old.logprobs(other)
        stay = [
            torch.equal(routes[n], t)
            for routes, earlier in zip(batch.recorded_routes.values(), before, strict=True)
            for n, t in earlier.items()
        ]
        found.append(same and all(stay) and not torch.equal(moved, fresh))
    return found


@ranks()
def engine_routes(folder: Path, layout: Layout, rollout_tp: int, rollout_ep: int = 1) -> dict[str, Any]:
    """What the engine has recorded of requests that share prompts, join late and continue each other.

    And the agreement of the policy's routers with these routes, and with the same shifted by one token and by one layer.
    """
    dtype = "bfloat16" if folder.name == "qwen3_next" else "float32"  # vLLM's only one for gated delta nets on the CPU
    policy = build(folder, layout, "engine", rollout_tp=rollout_tp, dtype=dtype)
    sizes = {"tensor_model_parallel_size": rollout_tp, "expert_parallel_size": rollout_ep}
    rollout = RolloutConfig(**sizes, max_num_seqs=4, engine_options={"kv_cache_gib": 0.03})
    tensors = engine_tensors(policy.arch, rollout_tp, reads_shards=True, rollout_ep=rollout_ep)
    limits: dict[str, Any] = {"dtype": dtype, "max_model_len": 256, "eos_token_ids": [2], "record_routes": True}
    engine = build_engine(rollout, folder, policy.mesh, policy.device, **limits, tensors=tensors)
    colocation = colocate(policy, engine, tensors, dtype=dtype)
    long = tuple(20 + n % 60 for n in range(140))  # a block of the cache on the CPU has 128 tokens
    with colocation.rollout(0, Metrics()):
        first = [Request(long[: 140 - n % 2], n, 5 + 3 * n) for n in range(7)]
        sampled = list(zip(first, engine.generate(first, 0), strict=True))
        ids = [(*request.prompt_ids, *completion.response_ids) for request, completion in sampled]
        second = [Request((*tokens, 9, 8, 7), 50 + n, 6) for n, tokens in enumerate(ids)]
        again = engine.generate(second, 0)
        cached = engine.cache_statistics()[1]
    pairs, routes = [], []
    for (request, earlier), later in zip(sampled, again, strict=True):
        pairs.append((list(request.prompt_ids), [*earlier.response_ids, 9, 8, 7, *later.response_ids]))
        whole_routes = continued(earlier.routes, later.routes)
        assert whole_routes is not None and len(whole_routes) == sum(map(len, pairs[-1])) - 1
        assert earlier.routes is not None and (whole_routes[: len(earlier.routes)] == earlier.routes).all()
        routes.append(torch.nn.functional.pad(torch.from_numpy(whole_routes), (0, 0, 0, 1), value=-1))
    found: dict[str, Any] = {"routes": routes, "cached": cached}
    shifts = {"own": (0, 0), "token": (1, 0), "layer": (0, policy.arch.experts_per_token)}
    for name, (tokens, columns) in shifts.items():
        batch = tiny.make_batch(pairs, [[list(range(len(pairs)))]])
        batch.routes = [part.roll((tokens, columns), (0, 1)) for part in routes]
        policy.forward_backward(batch, batch.mini_batches[0], loss)
        chosen, known = (sum(part) for part in zip(*policy.mesh.all_gather(batch.route_counts), strict=True))
        found[name] = chosen / known
    return found


@ranks(1)
def finite_differences(folder: Path, routes: list[torch.Tensor]) -> list[tuple[float, float]]:
    """For each router: the change of the summed log-probabilities along its gradient, by differences and by the gradient."""
    policy = build(folder, LAYOUTS["1"], "engine")
    batch = tiny.make_batch(PAIRS, [[list(range(len(PAIRS)))]])
    batch.routes = routes
    policy.forward_backward(batch, batch.mini_batches[0], lambda inputs: (inputs.logprobs.mul(inputs.mask).sum(), {}))
    found = []
    for name, gradient in named_gradients(policy).items():
        if not name.endswith("router.weight"):
            continue
        weight = dict(policy.ddp.module.named_parameters())[name]
        direction, values = gradient / gradient.norm(), []
        start = weight.detach().clone()
        for step in (1e-2, -1e-2, 0):
            with torch.no_grad():
                weight.copy_(start + step * direction)
            values.append(policy.logprobs(batch).double().sum().item())
        found.append(((values[0] - values[1]) / 2e-2, gradient.norm().item()))
    return found


@ranks(1)
def critic_values(folder: Path, routes: list[torch.Tensor]) -> list[torch.Tensor]:
    """A critic's values where the policy replays nothing, the engine's routes and recorded ones."""
    device, mesh = policies.world(LAYOUTS["1"])
    values = []
    for replay in ("none", "engine", "old"):
        actor = ActorConfig.model_validate({"moe": {"route_replay": replay}})
        model = ValueModel(read_reward_folder(folder, "value"), "float32", actor, mesh, device)
        batch = tiny.make_batch(PAIRS, [[list(range(len(PAIRS)))]])
        batch.routes, batch.recorded_routes = routes, {}
        values.append(model.numbers(batch))
        assert batch.recorded_routes == {}
    return values


# -- the tests ---------------------------------------------------------------------------------------------------------


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
    return [random_routes(PAIRS, *sizes) for sizes in FORCED.values()]


def _forced(folders: list[Path]) -> list[Path]:
    return [folder for folder in folders if folder.name in FORCED]


@pytest.fixture(scope="module")
def single(folders: list[Path], routes: Any) -> list[dict[str, Any]]:
    return replayed(1, folders=_forced(folders), routes=routes, layout=LAYOUTS["1"])[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param(n, marks=[pytest.mark.soak] * (n in IN_THE_SOAK)) for n in NAMES])
def test_every_layout_computes_the_given_experts(
    folders: list[Path], routes: Any, single: list[dict[str, Any]], layout: str
) -> None:
    """Packs, shared prompts, recomputed layers, unknown routes: log-probabilities equal transformers' with these routes."""
    found, shape = [single], LAYOUTS[layout]
    if layout != "1":
        found = replayed(shape.world, folders=_forced(folders), routes=routes, layout=shape)
    for number, folder in enumerate(_forced(folders)):
        wanted = forced_logprobs(folder, routes[number], *FORCED[folder.name][1:])
        for results in found:
            got, one = results[number], single[number]
            for name in got.keys() & {"logprobs False", "logprobs True"}:
                close_rows(got[name], wanted, name)
            close(got["gradients False"], one["gradients False"], 1e-5)
            close(got["gradients True"], one["gradients False"], 1e-5)
            share = got["counts"][0] / got["counts"][1]
            assert share == pytest.approx(one["counts"][0] / one["counts"][1], abs=1e-3) and share < 0.75


def forced_logprobs(folder: Path, routes: list[torch.Tensor], experts: int, k: int) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    with torch.no_grad(), forced(model, routes, experts, k):
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
            forced(model, of_pairs, *FORCED[folder.name][1:]).__enter__()

        layer = transformers_backward(folder, PAIRS, adapt=adapt).model.layers[1]
        prefix = f"model.layers.1.{'block_sparse_moe' if folder.name == 'mixtral' else 'mlp'}."
        want = {prefix + "gate.weight": layer.mlp.gate.weight.grad}
        want |= {f"model.layers.1.self_attn.{name}": p.grad for name, p in layer.self_attn.named_parameters()}
        assert float(want[prefix + "gate.weight"].abs().max()) > 0
        close({name: one["gradients False"][name] for name in want}, want, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "count"), [("1", 2), *(pytest.param(name, None, marks=pytest.mark.soak) for name in ("1", "EP2xPP2"))]
)
def test_a_replay_of_its_own_routes_has_the_bits_of_the_plain_pass(
    folders: list[Path], layout: str, count: int | None
) -> None:
    """All families, or `count` of them, by `route_replay: old`. With other routers, the recorded experts stay."""
    for found in own_routes(LAYOUTS[layout].world, folders=folders[:count], layout=LAYOUTS[layout]):
        assert found == [True] * len(folders[:count])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout", "rollout_tp", "rollout_ep"),
    [
        pytest.param("qwen3_moe", "EP2xDP2", 2, 2, marks=pytest.mark.soak),  # e2e/test_routes.py has it in a run
        pytest.param("deepseek_v2", "1", 1, 1, marks=pytest.mark.soak),
        pytest.param("deepseek_v3", "1", 1, 1, marks=pytest.mark.soak),
        pytest.param("mixtral", "PP2", 2, 1, marks=pytest.mark.soak),
        pytest.param("glm4_moe", "1", 1, 1, marks=pytest.mark.soak),
        ("gpt_oss", "1", 1, 1),  # its first layer has a window, whose blocks of the cache are given away
        pytest.param("qwen3_next", "1", 1, 1, marks=pytest.mark.soak),  # and here a state
    ],
)
def test_the_engine_records_the_experts_that_it_computes(
    folders: list[Path], model: str, layout: str, rollout_tp: int, rollout_ep: int
) -> None:
    """vLLM's routes, also of prompts that its prefix cache has, are those of the policy. Shifted ones are not."""
    if not is_newest():
        pytest.skip("the installed vLLM's routers cannot be recorded on the CPU")
    folder = next(folder for folder in folders if folder.name == model)
    arguments = {"layout": LAYOUTS[layout], "rollout_tp": rollout_tp, "rollout_ep": rollout_ep}
    for found in engine_routes(LAYOUTS[layout].world, folder=folder, **arguments):
        assert (found["cached"] > 0 or "deepseek" in model or model == "qwen3_next") and all(
            int(routes[:-1].min()) >= 0 for routes in found["routes"]
        )
        assert found["own"] == 1.0 or (found["own"] > 0.9 and model == "qwen3_next")  # bfloat16
        assert found["token"] < (
            1 if model in ("deepseek_v3", "glm4_moe") else 0.75
        )  # a bias chooses most experts here
        assert found["layer"] < 0.75 or "deepseek" in model or model == "glm4_moe"  # with one layer of experts here


@pytest.mark.slow
def test_gradients_of_the_routers_meet_finite_differences(folders: list[Path], routes: Any) -> None:
    """With fixed experts the log-probabilities have no jumps."""
    folder, (layers, _, k) = _forced(folders)[0], FORCED["qwen3_moe"]
    known = [torch.where(part < 0, torch.arange(k).repeat(layers), part) for part in routes[0]]
    [found] = finite_differences(folder=folder, routes=known)
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


OVERRIDE, ON_GPUS = "override_transformer_config", {"trainer": {"device": "cuda"}}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("engine", {}, {"model_type": "llama", "num_experts": 0}, "but this model (llama) has no experts"),
    ("engine", {"rollout": {"engine": "transformers"}}, {}, "rollout.engine='transformers', which records no routes"),
    ("engine", {"algorithm": {"source": "file"}}, {}, "but this run samples nothing; set actor.moe.route_replay=none"),
    (
        "engine",
        {},
        {**MODELS["mixtral"], "sliding_window": 8},
        "behind the windows of all layers of this model (mixtral)",
    ),
    ("engine", {"vllm": "0.26.0"}, {}, "on the CPU: the installed vLLM's routers cannot be recorded there; install"),
    (
        "engine",
        {**ON_GPUS, "rollout": {"enable_prefix_caching": False}},
        {},
        "0.32 keeps routes beside the prefix cache",
    ),
    ("engine", {**ON_GPUS, "runner": "0"}, {}, "with VLLM_USE_V2_MODEL_RUNNER=0: that model runner"),
    ("engine", {**ON_GPUS, "runner": "1", "vllm": "0.26.0"}, {}, "with VLLM_USE_V2_MODEL_RUNNER=1: that model runner"),
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
    for module in (checks, versions):
        monkeypatch.setattr(module, "is_newest", lambda: not is_older)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", sections.pop("runner", ""))
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


@pytest.mark.parametrize(
    ("change", "copies", "of_first"),
    [(None, 1, 3), (lambda own: own.fill_(-1), 1, 3), (lambda own: own[0].fill_(9), 2, 9)],
    ids=["equal", "unknown", "other"],
)
def test_a_shared_prompt_has_the_routes_of_all_its_rows(change: Any, copies: int, of_first: int) -> None:
    """Unknown routes of the first row are those of the next one. Other routes are a copy of the prompt of their own."""
    batch = tiny.make_batch([([5, 6, 7], [8, 9]), ([5, 6, 7], [10, 11, 12]), ([5, 6, 7], [13])], [])
    batch.shares_prompts, batch.routes = True, [torch.full((len(tokens), 4), 3) for tokens in batch.tokens]
    if change is not None:
        change(batch.routes[0])
    made = pack(batch, [0, 1, 2], multiple=2, temperature=1.0, chunk=8, device=Device("cpu"))
    routes = routes_of(made.packed)
    assert isinstance(routes, torch.Tensor) and sum(packed_lengths(batch, [0, 1, 2])) == 6 + 3 * copies
    assert (routes[0] == of_first).all() and (routes[1:3] == 3).all()
    first_response = routes[3:5]
    assert (first_response == (-1 if change is not None and copies == 1 else 3)).all()
    assert (routes[5 : 6 + 3 * copies] == 3).all() and len(trees_of(batch, [0, 1, 2])) == copies


def test_a_token_whose_routes_name_an_expert_twice_has_the_routers_choice() -> None:
    """Also where one of two experts is known, and the router's choice for the other is the same. Neither counts as agreement."""
    choice, scores = RouteChoice(0, None), torch.tensor([[0.1, 0.4, 0.3, 0.2]]).repeat(3, 1)
    choice.routes = torch.tensor([[0, 3], [2, 2], [-1, 1]])
    values, experts = choice.get_replay_topk(scores, 2, 0, 0, lambda scores, k, *unused: scores.topk(k, dim=1))
    assert experts.tolist() == [[3, 0], [1, 2], [1, 2]] and torch.equal(values, scores.gather(1, experts))
    assert take_counts([choice]) == (0, 2)


@pytest.mark.slow
def test_a_critic_chooses_its_own_experts(tmp_path: Path, routes: Any) -> None:
    """And records none in the batch of the policy."""
    sizes = {**QWEN3, "num_hidden_layers": 2, "max_position_embeddings": 512}
    folder = tiny.make_classifier(tmp_path / "critic", "Token", "llama2", seed=2, **sizes)
    [values] = critic_values(folder=folder, routes=routes[0])
    assert values[0].abs().max() > 0 and all(torch.equal(values[0], other) for other in values)
