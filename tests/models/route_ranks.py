"""What the ranks of the route replay tests run, and transformers with the same routes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tests import tiny
from tests.models import moe_ranks
from tests.models.gradients import named_gradients
from tests.models.moe_ranks import Layout, world
from tests.models.policy_ranks import loss, share, whole

RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def build(folder: Path, device: Any, mesh: Any, replay: str, **megatron: Any) -> Any:
    """A backward pass leaves whole gradients on every rank."""
    return moe_ranks.build(folder, device, mesh, replay=replay, use_distributed_optimizer=False, **megatron)


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


def replayed(folders: list[Path], pairs: Any, routes: list[list[torch.Tensor]], layout: Layout) -> list[dict[str, Any]]:
    """Per model: log-probabilities and gradients with `routes`, in several packs, as trees, and with recomputed layers."""
    device, mesh = world(layout)
    rows = share(len(pairs), mesh.dp_rank, mesh.dp)
    results = []
    for folder, of_pairs in zip(folders, routes, strict=True):
        result: dict[str, Any] = {}
        for recomputed in (False, True):
            policy = build(folder, device, mesh, "engine", override_transformer_config=RECOMPUTED if recomputed else {})
            batch = tiny.make_batch(pairs, [[[0, 1], [2], [], [3, 4, 5]]])
            batch.routes = of_pairs
            for batch.shares_prompts in (False, policy.arch.latent is None):  # latent attention has no trees
                result[f"logprobs {batch.shares_prompts}"] = policy.logprobs(batch)
            micros = [[i] for i in range(len(rows))]
            own = tiny.make_batch(pairs, [micros], rows)
            own.routes = [of_pairs[row] for row in rows]
            policy.forward_backward(own, micros, loss)
            result[f"gradients {recomputed}"] = whole(policy, named_gradients(policy))
            result["counts"] = [sum(part) for part in zip(*mesh.all_gather(own.route_counts), strict=True)]
        results.append(result)
    return results


def own_routes(folders: list[Path], pairs: Any, layout: Layout) -> list[bool]:
    """Per model: whether a replay of the policy's own routes has the bits of the plain pass, gradients too."""
    device, mesh = world(layout)
    rows = share(len(pairs), mesh.dp_rank, mesh.dp)
    micros = [[i] for i in range(len(rows))]
    found = []
    for folder in folders:
        plain, old = (build(folder, device, mesh, replay) for replay in ("none", "old"))
        gradients, logprobs = [], []
        batch, other = (tiny.make_batch(pairs, [micros], rows) for _ in range(2))
        batch.recorded_routes = {}
        for policy in (plain, old, old):  # the third pass replays what the second one has recorded
            logprobs.append(policy.logprobs(batch))
            policy.forward_backward(batch, micros, loss)
            gradients.append(named_gradients(policy))
        same = all(torch.equal(logprobs[0], other) for other in logprobs)
        same = same and all(torch.equal(gradients[0][n], other[n]) for n in gradients[0] for other in gradients)
        assert not plain.model.training or batch.recorded_routes.keys() == {(row,) for row in range(len(rows))}
        with torch.no_grad():  # with other routers, the recorded routes stay
            for name, parameter in old.ddp.named_parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3 * name.endswith("router.weight"))
        before = [{n: t.clone() for n, t in routes.items()} for routes in batch.recorded_routes.values()]
        moved = old.logprobs(batch)
        fresh = old.logprobs(other)
        kept = [
            torch.equal(routes[n], t)
            for routes, earlier in zip(batch.recorded_routes.values(), before, strict=True)
            for n, t in earlier.items()
        ]
        found.append(same and all(kept) and not torch.equal(moved, fresh))
    return found


def engine_routes(folder: Path, layout: Layout, rollout_tp: int, rollout_ep: int = 1) -> dict[str, Any]:
    """What the engine has recorded of requests that share prompts, join late and continue each other.

    And the agreement of the policy's routers with these routes, and with the same shifted by one token and by one layer.
    """
    from grpo_megatron.config import RolloutConfig
    from grpo_megatron.models.weights.stream import engine_tensors
    from grpo_megatron.report.metrics import Metrics
    from grpo_megatron.rollout.build import build_engine
    from grpo_megatron.rollout.engine import Request, continued
    from tests.colocated import colocate

    device, mesh = world(layout, rollout_tp)
    policy = build(folder, device, mesh, "engine")
    rollout = RolloutConfig(
        tensor_model_parallel_size=rollout_tp,
        expert_parallel_size=rollout_ep,
        max_num_seqs=4,
        engine_options={"kv_cache_gib": 0.03},
    )
    tensors = engine_tensors(policy.arch, rollout_tp, reads_shards=True, rollout_ep=rollout_ep)
    limits: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 256,
        "eos_token_ids": [2],
    }
    engine = build_engine(rollout, folder, mesh, device, **limits, tensors=tensors, record_routes=True)
    colocation = colocate(policy, engine, tensors)
    long = tuple(20 + n % 60 for n in range(140))  # a block of the cache on the CPU has 128 tokens
    with colocation.rollout(0, Metrics()):
        first = [Request(long[: 140 - n % 2], n, 5 + 3 * n) for n in range(7)]
        drawn = list(zip(first, engine.generate(first, 0), strict=True))
        ids = [(*request.prompt_ids, *completion.response_ids) for request, completion in drawn]
        second = [Request((*tokens, 9, 8, 7), 50 + n, 6) for n, tokens in enumerate(ids)]
        again = engine.generate(second, 0)
        cached = engine.cache_statistics()[1]
    pairs, routes = [], []
    for (request, earlier), later in zip(drawn, again, strict=True):
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
        chosen, known = (sum(part) for part in zip(*mesh.all_gather(batch.route_counts), strict=True))
        found[name] = chosen / known
    return found


def finite_differences(folder: Path, pairs: Any, routes: list[torch.Tensor]) -> list[tuple[float, float]]:
    """For each router: the change of the summed log-probabilities along its gradient, by differences and by the gradient."""
    device, mesh = world((1, 1, 1, 1))
    policy = build(folder, device, mesh, "engine")
    batch = tiny.make_batch(pairs, [[list(range(len(pairs)))]])
    batch.routes = routes

    def summed(inputs: Any) -> Any:
        return inputs.logprobs.mul(inputs.mask).sum(), {}

    policy.forward_backward(batch, batch.mini_batches[0], summed)
    found = []
    for name, gradient in named_gradients(policy).items():
        if not name.endswith("router.weight"):
            continue
        weight = dict(policy.ddp.module.named_parameters())[name]
        direction, values = gradient / gradient.norm(), []
        start = weight.detach().clone()
        for step in (1e-2, -1e-2):
            with torch.no_grad():
                weight.copy_(start + step * direction)
            values.append(policy.logprobs(batch).double().sum().item())
        with torch.no_grad():
            weight.copy_(start)
        found.append(((values[0] - values[1]) / 2e-2, gradient.norm().item()))
    return found


def critic_values(folder: Path, pairs: Any, routes: list[torch.Tensor]) -> list[torch.Tensor]:
    """A critic's values where the policy replays nothing, the engine's routes and recorded ones."""
    from grpo_megatron.config import ActorConfig
    from grpo_megatron.models.heads.reward_folder import read_reward_folder
    from grpo_megatron.models.heads.scalar import ValueModel

    device, mesh = world((1, 1, 1, 1))
    values = []
    for replay in ("none", "engine", "old"):
        actor = ActorConfig.model_validate({"moe": {"route_replay": replay}})
        model = ValueModel(read_reward_folder(folder, "value"), "float32", actor, mesh, device)
        batch = tiny.make_batch(pairs, [[list(range(len(pairs)))]])
        batch.routes, batch.recorded_routes = routes, {}
        values.append(model.numbers(batch))
        assert batch.recorded_routes == {}
    return values
