"""A checkpoint goes through six changes of layout, and changed optimizer settings are used in each later update.

Every layout loads what the one before has saved, saves it again at once (weights and Adam's state must be the same bits),
and updates once. Loss, gradient norm and weights must be those of one rank that is never stopped, within 1e-5.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests import tiny
from tests.models.policies import LAYOUTS, Layout, build, loss, share, stream
from tests.stored import same_stored
from tests.worlds import ranks

QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
CHAIN: list[Layout] = [  # the first checkpoint is of one rank
    Layout(2, tp=2, sp=None),
    Layout(2, ep=2),
    Layout(2, pp=2),
    Layout(2),
    Layout(4, pp=2, ep=2),
]
PAIRS = tiny.make_sequences(6, longest=16)


# -- The programs of the ranks -----------------------------------------------------------------------------------------

OPTIM = {"lr": 1e-3, "clip_grad": 0.5, "eps": 1e-4, "lr_decay_style": "linear"}  # eps: see tests/models/policies.py


def _build(model: Path, layout: Layout, num_updates: int, **optim: Any) -> Any:
    from grpo_megatron.config import OptimConfig

    policy = build(model, layout)
    policy.set_optimizer(OptimConfig.model_validate({**OPTIM, **optim}), num_updates)
    return policy


def _config(model: Path) -> Any:
    from grpo_megatron.config import Config

    return Config.model_validate({"model": {"path": model}})


def _update(policy: Any, pairs: Any) -> dict[str, Any]:
    """The loss over all ranks, the gradient norm, the learning rate, and the weights after the update."""
    rows = share(len(pairs), policy.mesh.dp_rank, policy.mesh.dp)
    batch = tiny.make_batch(pairs, [[[i] for i in range(len(rows))]], rows)
    (sums,), metrics = policy.update(batch, loss)
    counts = policy.mesh.is_replica_reporter
    parts = policy.mesh.all_gather(float(sums["actor/pg_loss"].total) if counts else 0.0)
    return {
        "loss": sum(parts),
        "norm": metrics["actor/grad_norm"],
        "lr": metrics["actor/lr"],
        "weights": stream(policy),
    }


def whole_run(model: Path, pairs: Any, out: Path, num_updates: int) -> list[dict[str, Any]]:
    """`num_updates` updates on one rank; saves after the first."""
    from grpo_megatron.training.checkpoint import Checkpoints

    policy = _build(model, LAYOUTS["1"], num_updates)
    results = [_update(policy, pairs)]
    Checkpoints(out, policy.mesh, keep=None).save(1, policy, _config(model))
    return results + [_update(policy, pairs) for _ in range(1, num_updates)]


@ranks()
def one_update(model: Path, pairs: Any, out: Path, layout: Layout, done: int, num_updates: int) -> dict[str, Any]:
    """Load the checkpoint of `done` updates, save it again as it is (into out/again), update once, save."""
    from grpo_megatron.training.checkpoint import Checkpoints

    policy = _build(model, layout, num_updates)
    checkpoints = Checkpoints(out, policy.mesh, keep=None)
    newest = checkpoints.newest()
    assert newest is not None and checkpoints.load(newest, policy) == done
    config = _config(model)
    Checkpoints(out / "again", policy.mesh, keep=None).save(done, policy, config)
    result = _update(policy, pairs)
    checkpoints.save(done + 1, policy, config)
    return result


def changed_settings(model: Path, pairs: Any, out: Path) -> list[dict[str, Any]]:
    """Two updates of a run of two; then three of the same run, extended to five with other settings."""
    from grpo_megatron.training.checkpoint import Checkpoints

    policy = _build(model, LAYOUTS["1"], 2)
    mesh = policy.mesh
    first = [_used(policy, pairs) for _ in range(2)]
    path = Checkpoints(out, mesh, keep=None).save(2, policy, _config(model))
    changes = {"lr": 2e-3, "min_lr": 5e-4, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}
    policy = _build(model, LAYOUTS["1"], 5, **changes)
    Checkpoints(out, mesh, keep=None).load(path, policy)
    return first + [_used(policy, pairs) for _ in range(3)]


def _used(policy: Any, pairs: Any) -> dict[str, Any]:
    """The settings of each parameter group inside the optimizer's step, and Adam's step count after it."""
    from grpo_megatron.models.optimizer import each_optimizer, group_settings

    seen: dict[str, Any] = {}
    step = policy.optimizer.step

    def watched() -> Any:
        seen["groups"] = [dict(group) for group in group_settings(policy.optimizer)]
        return step()

    with mock.patch.object(policy.optimizer, "step", watched):
        _update(policy, pairs)
    states = [state for part in each_optimizer(policy.optimizer) for state in part.optimizer.state.values()]
    return {**seen, "steps": {float(torch.as_tensor(state["step"])) for state in states}}


def positions(model: Path) -> list[int]:
    """The place in the schedule after 6 updates, 2 per training step, with 2, 4 and 1 updates per training step."""
    from grpo_megatron.config import OptimConfig

    policy = _build(model, LAYOUTS["1"], 20)
    state = {"schedule": {"num_steps": 6, "period": 2}, "num_skipped_in_a_row": 0}
    found = []
    for period in (2, 4, 1):
        policy.set_optimizer(OptimConfig(), 20, period=period)
        policy.load_state(state)
        found.append(policy.num_updates)
    return found


@ranks()
def one_rank(model: Path, pairs: Any, out: Path, num_updates: int) -> dict[str, Any]:
    """All that one rank does, in one world."""
    return {
        "updates": whole_run(model, pairs, out, num_updates),
        "settings": changed_settings(model, pairs, out / "settings"),
        "positions": positions(model),
    }


@ranks()
def in_both_ways(model: Path, pairs: Any, out: Path, layout: Layout) -> None:
    """A checkpoint in pieces, and one that Megatron gathers; then each is loaded by the other's reader, and saved again."""
    import contextlib

    from grpo_megatron.models.weights import sharded_state
    from grpo_megatron.training.checkpoint import Checkpoints

    @contextlib.contextmanager
    def gathered() -> Any:
        whole = {
            "optimizer_as_local_shards": contextlib.nullcontext,
            "divide_among_replicas": lambda model, mesh: model,
        }
        with mock.patch.multiple(sharded_state, **whole):
            yield

    policy, config = _build(model, layout, 2), _config(model)
    _update(policy, pairs)
    for name, way in (("pieces", contextlib.nullcontext), ("whole", gathered)):
        with way():
            Checkpoints(out / name, policy.mesh, keep=None).save(1, policy, config)
    for name, way in (("whole", contextlib.nullcontext), ("pieces", gathered)):
        checkpoints, other = Checkpoints(out / name, policy.mesh, keep=None), _build(model, layout, 2)
        newest = checkpoints.newest()
        assert newest is not None
        with way():
            checkpoints.load(newest, other)
        Checkpoints(out / f"{name} again", policy.mesh, keep=None).save(1, other, config)


# -- Tests -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("layouts") / "model", "llama2", num_hidden_layers=2, **QWEN3_MOE)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chain")


@pytest.fixture(scope="module")
def alone(model: Path, out: Path) -> dict[str, Any]:
    """One rank: the run that is never stopped, which leaves the first checkpoint in `out`, and the changed settings."""
    arguments: dict[str, Any] = {"model": model, "pairs": PAIRS, "out": out, "num_updates": 1 + len(CHAIN)}
    (result,) = one_rank(1, **arguments)
    return dict(result)


@pytest.mark.slow
def test_five_changes_of_layout(model: Path, out: Path, alone: dict[str, Any]) -> None:
    for done, layout in enumerate(CHAIN, start=1):
        results = one_update(
            layout[0],
            model=model,
            pairs=PAIRS,
            out=out,
            layout=layout,
            done=done,
            num_updates=1 + len(CHAIN),
        )
        name = f"checkpoints/step_{done:06d}"
        same_stored(out / name, out / "again" / name)
        want = alone["updates"][done]
        for got in results:
            assert got["lr"] == want["lr"]
            assert got["loss"] == pytest.approx(want["loss"], abs=1e-5), layout
            assert got["norm"] == pytest.approx(want["norm"], rel=1e-5), layout
            assert got["weights"].keys() == want["weights"].keys()
            for tensor_name, tensor in want["weights"].items():
                torch.testing.assert_close(got["weights"][tensor_name], tensor, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_changed_settings_are_used_and_other_mini_batches_keep_the_training_step(alone: dict[str, Any]) -> None:
    """A linear schedule of 2 updates ends at 0. Extended to 5, it falls from 2e-3 to 5e-4: 1 - n/5 of the way at update n.

    Three training steps are done, with 2 updates each: in a schedule of 2, 4 and 1 updates per training step.
    """
    for number, update in enumerate(alone["settings"], start=1):
        is_changed = number > 2
        rate = 5e-4 + 1.5e-3 * (1 - number / 5) if is_changed else 1e-3 * (1 - number / 2)
        for group in update["groups"]:
            assert group["lr"] == pytest.approx(rate, abs=1e-12)
            assert group["betas"] == ((0.8, 0.9) if is_changed else (0.9, 0.999))
            assert group["eps"] == (1e-3 if is_changed else 1e-4)
            assert group["weight_decay"] == pytest.approx((0.1 if is_changed else 0.01) * group["wd_mult"])
        assert update["steps"] == {number}  # Adam's bias correction goes on
        assert any(group["wd_mult"] == 1 for group in update["groups"])
    assert alone["positions"] == [6, 12, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [Layout(2), pytest.param(Layout(4, tp=2, sp=None), marks=pytest.mark.soak), Layout(4, pp=2, ep=2)]
)
def test_every_rank_writes_its_share_of_what_megatron_would_gather(model: Path, tmp_path: Path, layout: Layout) -> None:
    """Both kinds of checkpoint have the same tensors, and both readers read both. Older checkpoints are of the second kind."""
    in_both_ways(layout[0], model=model, pairs=PAIRS, out=tmp_path, layout=layout)

    def written(name: str) -> list[int]:
        folder = tmp_path / name / "checkpoints/step_000001/state"
        return [sum(file.stat().st_size for file in folder.glob(f"__{rank}_*.distcp")) for rank in range(layout[0])]

    for name in ("whole", "whole again", "pieces again"):
        same_stored(tmp_path / "pieces/checkpoints/step_000001", tmp_path / name / "checkpoints/step_000001")
    pieces, whole = written("pieces"), written("whole")
    assert layout[2] > 1 or max(pieces) < 1.15 * min(pieces), pieces  # stages differ
    assert max(pieces) < 0.7 * max(whole), (pieces, whole)  # of the last layout's experts each has one holder
