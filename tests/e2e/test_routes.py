"""Route replay in whole runs: every token has the experts with which an engine computed it.

The weights never change, so engine and policy choose the same experts, and a route that is one token or layer off is seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_megatron.rollout.vllm.versions import is_newest
from grpo_megatron.training.guards import GuardStop
from tests import tiny, worlds
from tests.e2e import run_ranks, test_roles, test_trajectories
from tests.e2e.test_recipes import EXPERTS
from tests.soak.soak import make_workspace
from tests.stored import metric_rows
from tests.training.test_guards import replayed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_newest(), reason="the installed vLLM's routers cannot be recorded on the CPU"),
]
REPLAY: dict[str, Any] = {"moe": {"route_replay": "engine"}, "optim": {"lr": 0.0}}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With experts."""
    root = make_workspace(tmp_path_factory.mktemp("routes"))
    tiny.make_model(root / "model", "llama2", model_type="qwen3_moe", vocab_size=80, head_dim=64, std=0.05, **EXPERTS)
    return root


def agreements(output: Path) -> list[float]:
    return [row["actor/route_agreement"] for row in metric_rows(output) if "actor/grad_norm" in row]


@pytest.mark.soak
def test_partial_rollouts_over_two_engines_and_a_resume(workspace: Path, tmp_path: Path) -> None:
    """Responses that several steps continue, whose samples are in a checkpoint, with experts over two ranks."""
    for steps in (1, 2):
        raw = run_ranks.settings(workspace, tmp_path, 2, actor=REPLAY)
        raw["actor"]["megatron"] = {"expert_model_parallel_size": 2}
        raw["rollout"] |= {"partial": {"over_sample": 1.5, "chunk_tokens": 4}}
        raw["trainer"] |= {"total_training_steps": steps, "save_freq": 1}
        worlds.run(run_ranks.train, 2, raw=raw, keep_weights=False)
    rows = metric_rows(tmp_path)
    assert agreements(tmp_path) == [1.0] * 2 and all(row["rollout/partial/rounds"] > 1 for row in rows)
    assert any(row["rollout/partial/earlier_token_ratio"] for row in rows)


def test_trajectories_with_observations(workspace: Path, tmp_path: Path) -> None:
    raw = test_trajectories.settings(workspace, tmp_path, 1, "Echo")
    raw["actor"] = REPLAY
    worlds.run(run_ranks.train, 1, raw=raw, keep_weights=False)
    assert agreements(tmp_path) == [1.0, 1.0]
    assert metric_rows(tmp_path)[0]["trajectory/observation_share"] > 0.1


@pytest.mark.soak
def test_ranks_that_only_draw_send_routes_a_step_ahead(workspace: Path, tmp_path: Path) -> None:
    raw = test_roles.settings(workspace, tmp_path, 2, 1, 3, {"pipeline_model_parallel_size": 2}, lag=1)
    raw["actor"] |= REPLAY
    worlds.run(run_ranks.train_in_roles, 3, raw=raw)
    assert agreements(tmp_path) == [1.0] * 3


@pytest.mark.soak
def test_old_routes_are_replayed_in_a_run(workspace: Path, tmp_path: Path) -> None:
    """Two passes over two mini-batches; the first update starts from the ratio 1."""
    raw = run_ranks.settings(workspace, tmp_path, 1, actor={"moe": {"route_replay": "old"}})
    worlds.run(run_ranks.train, 1, raw=raw, keep_weights=False)
    assert all(0 <= row["actor/ppo_kl"] < 0.5 and "actor/route_agreement" not in row for row in metric_rows(tmp_path))


def shifted(raw: dict[str, Any], tokens: int, columns: int) -> str:
    """Train on routes that are some tokens or columns off."""
    from grpo_megatron.rollout.vllm.routes import RouteTable

    plain = RouteTable.routes

    def wrong(*arguments: Any) -> Any:
        routes = plain(*arguments)
        return np.roll(routes, (tokens, columns), (0, 1))

    RouteTable.routes = wrong  # type: ignore[method-assign]
    try:
        run_ranks.train(raw, keep_weights=False)
    except GuardStop as error:
        return str(error)
    return "the run went on"


@pytest.mark.parametrize(("tokens", "columns"), [(1, 0), pytest.param(0, 2, marks=pytest.mark.soak)])
def test_routes_of_other_tokens_or_layers_stop_the_run(
    workspace: Path, tmp_path: Path, tokens: int, columns: int
) -> None:
    raw = run_ranks.settings(workspace, tmp_path, 1, actor=REPLAY)
    raw["guards"] = {"route_agreement": {"low": 0.9, "action": "stop"}}  # of four experts, others have half by chance
    [message] = worlds.run(shifted, 1, raw=raw, tokens=tokens, columns=columns)
    assert "guards.route_agreement=stop: step 0, update 1: route_agreement 0." in message
    assert "the engine's routes are those of other tokens, layers or weights" in message
    [(code, text)] = replayed(1, dumps=[tmp_path / "dumps/step_000000_route_agreement"])[0]
    assert code == 0 and "the loss is that of the run" in text  # a dump has the routes, too
