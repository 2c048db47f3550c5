"""What the ranks of the reward model tests run. A layout is (world, tp, pp, sequence parallel), as in `policy_ranks`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests import tiny
from tests.models import policy_ranks
from tests.models.gradients import named_gradients
from tests.models.policy_ranks import Layout, stream, world

HEADS = ("score.weight", "score.bias")
OPTIM = {"lr": 1e-3, "clip_grad": 0.5, "eps": 1e-4, "weight_decay": 0.0}


def scalar(
    folder: Path, kind: Any, layout: Layout, *, model_class: Any = None, dtype: str = "float32", **options: Any
) -> Any:
    """A ScalarPolicy, or `model_class`, with an optimizer. `megatron` and `places` are among the options."""
    from grpo_megatron.config import OptimConfig
    from grpo_megatron.models.heads.reward_folder import read_reward_folder
    from grpo_megatron.models.heads.scalar import ScalarPolicy

    device, mesh = world(layout)
    limits, optim = actor(layout, options.pop("megatron", None)), OptimConfig.model_validate(OPTIM)
    source = read_reward_folder(folder, kind)
    model = (model_class or ScalarPolicy)(source, dtype, limits, mesh, device, optim=optim, **options)
    with model.in_use():
        model.set_optimizer(optim, 2)
        policy_ranks.check_counts(model, has_output_head=False)
    return model


def build(folder: Path, layout: Layout, **options: Any) -> Any:
    """A reward model that learns."""
    from grpo_megatron.models.heads.reward_folder import read_reward_folder
    from grpo_megatron.models.heads.scalar import last_token

    return scalar(folder, "outcome", layout, places=last_token(read_reward_folder(folder)), **options)


def actor(layout: Layout, megatron: Any = None) -> Any:
    return policy_ranks.actor(layout, megatron=megatron, ppo_max_token_len_per_gpu=120)


def make_pairs(count: int = 5, *, seed: int = 0) -> Any:
    """Pairs of various lengths: each prompt of `tiny.make_sequences` with its own and another prompt's response."""
    from grpo_megatron.training.reward_model import PreferencePair

    drawn = tiny.make_sequences(2 * count, seed=seed)
    pairs = []
    for (prompt, chosen), (_, rejected) in zip(drawn[:count], drawn[count:], strict=True):
        both = [torch.tensor([*prompt, *response], dtype=torch.int32) for response in (chosen, rejected)]
        pairs.append(PreferencePair(len(prompt), *both))
    return pairs


def scores(
    folders: dict[str, Path], sequences: Any, layout: Layout, steps: dict[str, Path] | None = None, ends: Any = None
) -> dict[str, torch.Tensor]:
    """Family -> scores, in micro-batches of different sizes, one of them empty. `steps`: folders of process reward models."""
    batch = tiny.make_batch(sequences, [[[0, 1], [2], [], [3, 4, 5]]])
    out = {family: build(folder, layout).numbers(batch)[:, 0] for family, folder in folders.items()}
    out |= {f"frozen {family}": frozen(folder, layout).numbers(batch)[:, 0] for family, folder in folders.items()}
    places = [[batch.prompt_lengths[row] + end for end in of_row] for row, of_row in enumerate(ends or ())]
    return out | {
        name: frozen(folder, layout, "process").numbers(batch, places) for name, folder in (steps or {}).items()
    }


def frozen(folder: Path, layout: Layout, kind: Any = "outcome") -> Any:
    """A model that is not trained. Its weights are on the host before and after each batch."""
    from grpo_megatron.models.heads.reward_folder import read_reward_folder
    from grpo_megatron.models.heads.scalar import FrozenScalar

    device, mesh = world(layout)
    model = FrozenScalar(
        read_reward_folder(folder, kind), "float32", actor(layout, {"offload_reference": True}), mesh, device
    )

    def check(forward: Any) -> Any:
        def checked(*args: Any) -> Any:
            assert all(p.untyped_storage().nbytes() == 0 for p in model.model.parameters() if p.numel() > 1)
            out = forward(*args)
            assert all(p.untyped_storage().nbytes() == 0 for p in model.model.parameters() if p.numel() > 1)
            return out

        return checked

    model.forward_batch = check(model.forward_batch)
    return model


def decoded(ids: Any) -> str:
    """Token 7 ends a step; token 2 is a special token, which has no text."""
    return "".join("" if token == 2 else ";" if token == 7 else "x" for token in ids)


def frozen_loop(outcome: Path, process: Path, layout: Layout, combine: str) -> dict[str, Any]:
    """A step rewarded by the sum of two frozen models: 2 x the outcome model's score, 0.5 x that of the process model."""

    from grpo_megatron.config import RewardModelConfig, ScoringModel
    from grpo_megatron.parallel.exchange import gather_groups
    from grpo_megatron.report.metrics import Metrics
    from grpo_megatron.training.reward_model import FrozenReward, Scorer

    config = RewardModelConfig.model_validate({"path": outcome, "coefficient": 2.0, "combine": combine})
    steps = ScoringModel.model_validate({"path": process, "coefficient": 0.5, "step_separator": ";", "kind": "process"})
    _, mesh = world(layout)
    limits = actor(layout)
    scorers = [
        Scorer("", config, frozen(outcome, layout), limits),
        Scorer("prm", steps, frozen(process, layout, "process"), limits, decoded),
    ]
    samples = make_samples(mesh, 0)
    table = gather_groups(samples, mesh)
    metrics = Metrics()
    rewarded = FrozenReward(config, scorers).reward(0, samples, table, metrics)
    whole = [(list(s.prompt.prompt_ids), s.response_ids) for part in mesh.all_gather(samples) for s in part]
    order = [(s.prompt_index, s.index) for part in mesh.all_gather(samples) for s in part]
    sequences = [pair for _, pair in sorted(zip(order, whole, strict=True))]
    reduced = metrics.reduce(mesh.all_gather)
    return {"table": rewarded, "rules": table.reward, "sequences": sequences, "metrics": reduced}


def update(folder: Path, pairs: Any, layout: Layout) -> dict[str, Any]:
    """Whole gradients of one backward pass. Then, with the distributed optimizer, metrics and weights of an update."""
    from grpo_megatron.training.reward_model import pair_batch, pair_loss, update_pairs

    model = build(folder, layout, megatron={"use_distributed_optimizer": False})  # leaves whole gradients on every rank
    batch = pair_batch(pairs, model.actor, model.mesh.dp_rank, model.mesh.dp)
    model.forward_backward(batch, batch.mini_batches[0], pair_loss(len(pairs)))
    gradients = whole(model, named_gradients(model))
    model = build(folder, layout)
    metrics = update_pairs(model, batch, len(pairs))
    return {"gradients": gradients, "metrics": metrics, "weights": stream(model)}


def whole(model: Any, local: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hugging Face gradients from all ranks' gradients. Ranks with the same head must have the same gradient. Collective."""
    held = [part for part in model.mesh.all_gather({name: local[name] for name in HEADS if name in local}) if part]
    assert all(torch.equal(head[name], held[0][name]) for head in held for name in held[0])
    return policy_ranks.whole(model, {name: tensor for name, tensor in local.items() if name not in HEADS}) | held[0]


def saved(folder: Path, pairs: Any, layout: Layout, target: Path, dtype: str = "float32") -> torch.Tensor:
    """Two updates, then a Hugging Face folder and, beside it, a checkpoint. Returns the scores of the chosen sequences."""
    from grpo_megatron.models.weights.sharded_state import save_sharded
    from grpo_megatron.training.reward_model import pair_batch, update_pairs

    model = build(folder, layout, dtype=dtype)
    batch = pair_batch(pairs, model.actor, model.mesh.dp_rank, model.mesh.dp)
    for _ in range(2):
        assert update_pairs(model, batch, len(pairs))["reward_model/grad_norm"] > 0
    model.save_hf(target, folder)
    save_sharded(model, target.parent / "reward_model" / "state")
    sequences = [(p.chosen[: p.prompt_length].tolist(), p.chosen[p.prompt_length :].tolist()) for p in pairs]
    return model.numbers(tiny.make_batch(sequences, [[[i] for i in range(len(sequences))]]))[:, 0]


def poisoned(folder: Path) -> dict[str, Any]:
    """Two ranks. In the second update the weights of rank 1 give NaN."""
    from grpo_megatron.models.weights.stream import unwrapped
    from grpo_megatron.training.reward_model import pair_batch, update_pairs

    model = build(folder, (2, 1, 1, False))
    pairs = make_pairs()
    batch = pair_batch(pairs, model.actor, model.mesh.dp_rank, 2)
    first = update_pairs(model, batch, len(pairs))
    before = stream(model)
    head = unwrapped(model.ddp).score.weight
    if model.mesh.rank == 1:
        kept, head.data = head.data, head.data * float("nan")
    second = update_pairs(model, batch, len(pairs))
    if model.mesh.rank == 1:
        head.data = kept
    return {"norms": [first["reward_model/grad_norm"], second["reward_model/grad_norm"]], "same": same(before, model)}


def same(before: dict[str, torch.Tensor], model: Any) -> bool:
    after = stream(model)
    return all(torch.equal(before[name], after[name]) for name in before)


def read_at(cp: int) -> list[int]:
    """The token at which each of three sequences is read, from the shares of `cp` ranks."""
    from types import SimpleNamespace

    from grpo_megatron.device import Device
    from grpo_megatron.models.heads.scalar import ScalarReader, last_token

    tokens = [list(range(10, 10 + n)) for n in (2, 6, 9)]
    batch = tiny.make_batch([(t[:1], t[1:]) for t in tokens], [])
    found = torch.zeros(3, dtype=torch.int64)
    for cp_rank in range(cp):
        scorer = ScalarReader.__new__(ScalarReader)  # the index arithmetic needs no model
        scorer.mesh = SimpleNamespace(cp=cp, cp_rank=cp_rank)  # type: ignore[assignment]
        scorer.device, scorer.multiple, scorer.temperature, scorer.chunk = Device("cpu"), 2 * cp, 1.0, 8
        scorer.routers, scorer.arch = [], SimpleNamespace(vision=None)  # type: ignore[assignment]
        scorer.places = last_token(SimpleNamespace(pad_token_id=None))  # type: ignore[arg-type]
        (pack,) = scorer.packs(batch, [[0, 1, 2]])
        assert pack.share is not None and pack.share.num_targets == 3
        found[pack.share.target_indices] += pack.tokens[0, pack.targets.state_indices]
    return found.tolist()


# -- the loop: samples in, rewards out, training after each outer iteration ---------------------------------------------


def make_samples(mesh: Any, step: int, *, prompts: int = 4, n: int = 4, good: int = 7) -> list[Any]:
    """This rank's share of a step's samples. The reward is 1 if token `good` is at least twice in the response."""
    from grpo_megatron.types import Prompt, Sample

    samples = []
    for p in range(prompts):
        generator = torch.Generator().manual_seed(1000 * step + p)
        ids = torch.randint(10, 100, (3 + p % 5,), generator=generator).tolist()
        prompt = Prompt(uid=f"{p}", prompt_ids=tuple(ids), text="", answer="", source="", reward="")
        for i in range(n):
            response = torch.randint(0, 100, (int(torch.randint(6, 12, (), generator=generator)),), generator=generator)
            often = torch.rand(len(response), generator=generator) < (0.5 if i % 2 else 0.1)
            response = response.masked_fill(often, good).tolist()
            sample = Sample(prompt, p, i, response, [-1.0] * len(response), "stop", step)
            sample.reward = float(response.count(good) >= 2)
            samples.append(sample)
    return samples[mesh.rank :: mesh.world_size]


def loop(
    folder: Path,
    layout: Layout,
    during: range,
    *,
    load: Path | None = None,
    save: Path | None = None,
    prompts: int = 4,
    megatron: Any = None,
    dtype: str = "float32",
    **config: Any,
) -> dict[str, Any]:
    """Outer iterations of two steps. Returns rewards and metrics of every step, and the final weights."""
    from grpo_megatron.parallel.exchange import gather_groups
    from grpo_megatron.report.metrics import Metrics
    from grpo_megatron.training.reward_model import LearningReward

    settings = {"steps": 3, "train_batch_size": 4, "history_size": 8, "start_iteration": 1, **config}
    model = build(folder, layout, megatron=megatron, dtype=dtype)
    rewards = LearningReward(
        model_config(folder, settings), model, model.actor, iteration_steps=2, total_steps=8, seed=5
    )
    if load is not None:
        rewards.load(load, same_world=True)
    out: dict[str, Any] = {"rewards": [], "rules": [], "metrics": []}
    for step in during:
        samples = make_samples(model.mesh, step, prompts=prompts)
        table = gather_groups(samples, model.mesh)
        metrics = Metrics()
        rewarded = rewards.reward(step, samples, table, metrics)
        if (step + 1) % 2 == 0:
            rewards.learn(step, metrics)
        out["rules"].append(table.reward)
        out["rewards"].append(rewarded.reward)
        out["metrics"].append(metrics.reduce(model.mesh.all_gather))
        assert replace(rewarded, reward=table.reward) == table
    if save is not None:
        rewards.save(save)
    out["weights"] = stream(model)
    out["pairs"] = [number for number, *_ in rewards.history.state()["kept"]]
    return out


def model_config(folder: Path, settings: dict[str, Any]) -> Any:
    from grpo_megatron.config import RewardModelConfig

    return RewardModelConfig.model_validate({"path": folder, "optim": OPTIM, **settings})
