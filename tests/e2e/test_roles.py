"""Ranks that train and rollout ranks (`rollout.placement: separate`): the same run, bit for bit, whatever is delayed.

The transformers engine starts in a third of vLLM's time, so most tests take it.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests import worlds
from tests.e2e import run_ranks, test_trajectories
from tests.e2e.test_determinism import assert_same, metrics
from tests.stored import TIMES, metric_rows, rows_without

TRANSFORMERS = {"engine": "transformers", "engine_options": {}}
PARTIAL = {"partial": {"over_sample": 1.5, "chunk_tokens": 4}}
LAYOUTS = {
    "1 to 1": (1, {}, 1),
    "2 nodes to 2 nodes": (2, {}, 1),
    "tp2 to tp1": (2, {"tensor_model_parallel_size": 2}, 1),
    "pp2 to tp2": (2, {"pipeline_model_parallel_size": 2}, 2),
    "with lora": (1, {}, 1),
    "pp2 to tp2, with lora": (2, {"pipeline_model_parallel_size": 2}, 2),
    "with delta": (1, {}, 1),
    "pp2 to tp2, with delta": (2, {"pipeline_model_parallel_size": 2}, 2),
}


def settings(
    root: Path,
    output: Path,
    training: int,
    drawing: int,
    steps: int,
    megatron: dict[str, Any] | None = None,
    **rollout: Any,
) -> dict[str, Any]:
    """`rollout_ranks` 0: colocated."""
    trainer = {"total_training_steps": steps, "test_freq": 2, "val_before_train": True, "save_freq": 2}
    raw = run_ranks.settings(root, output, training + drawing, trainer=trainer)
    raw["actor"]["megatron"] = megatron or {}
    roles = {"placement": "separate", "num_ranks": drawing} if drawing else {}
    raw["rollout"] |= {**roles, **rollout}
    return raw


@pytest.mark.parametrize(
    ("layout", "engine"),
    [
        # the second node that samples has its weights from the first; the ids that top_k and top_p left travel, too
        pytest.param("2 nodes to 2 nodes", {**TRANSFORMERS, "top_k": 20, "top_p": 0.9}),
        pytest.param("1 to 1", TRANSFORMERS, marks=pytest.mark.soak),
        pytest.param("pp2 to tp2", {}, marks=pytest.mark.soak),
        pytest.param("tp2 to tp1", {}, marks=pytest.mark.soak),
        pytest.param("1 to 1", {}, marks=pytest.mark.soak),
        pytest.param("1 to 1", {**TRANSFORMERS, **PARTIAL}, marks=pytest.mark.soak),
        pytest.param("with lora", TRANSFORMERS, marks=pytest.mark.soak),
        pytest.param("pp2 to tp2, with lora", {}, marks=pytest.mark.soak),
        pytest.param("with delta", {}, marks=pytest.mark.soak),
        pytest.param("pp2 to tp2, with delta", {}, marks=pytest.mark.soak),
    ],
)
def test_without_a_lag_it_is_the_colocated_run(
    workspace: Path, tmp_path: Path, layout: str, engine: dict[str, Any]
) -> None:
    """Samples, weights, optimizer and every metric but times and what the syncs sent."""
    ranks, megatron, tp = LAYOUTS[layout]
    results = {}
    for name, drawing in (("colocated", 0), ("separate", ranks)):
        rollout = {"tensor_model_parallel_size": tp, **engine}
        raw = settings(workspace, tmp_path / name, ranks, drawing, 3, megatron, **rollout)
        raw["actor"] |= {"lora": {"rank": 4}} if "lora" in layout else {}
        if "delta" in layout:  # in bfloat16 a small step leaves most weights as they are
            raw["model"]["dtype"], raw["actor"]["optim"] = "bfloat16", {"lr": 1e-6}
            raw["rollout"] |= {"sync": "delta", "delta_full_every": 2}
            raw["rollout"]["engine_options"] |= {"sleep_level": 1}
        results[name] = worlds.run(run_ranks.train_in_roles, ranks + drawing, raw=raw, nodes_of_one="nodes" in layout)[
            :ranks
        ]
    together, apart = results["colocated"], results["separate"]
    assert run_ranks.all_samples(together) == run_ranks.all_samples(apart)
    for one, other in zip(together, apart, strict=True):
        assert_same(one, other)
    assert metrics(tmp_path / "colocated") == metrics(tmp_path / "separate")
    sent = [row["sync/bytes_received"] for row in metric_rows(tmp_path / "separate")[:3]]
    assert (sent[1] < 0.2 * sent[0]) == ("with" in layout)  # adapters, or what has changed
    assert (sent[2] == sent[0]) == ("lora" not in layout)


@pytest.mark.parametrize(
    ("lag", "rollout"),
    [pytest.param(1, {}), *(pytest.param(lag, {**PARTIAL, "top_k": 20}, marks=pytest.mark.soak) for lag in (2, 4))],
)
def test_no_delay_changes_a_bit(workspace: Path, tmp_path: Path, lag: int, rollout: dict[str, Any]) -> None:
    """Phases, messages, rewards. Also a census: each token's log-probability is that of its version's weights, and no other's."""
    results, rollout = [], {**TRANSFORMERS, **rollout, "lag": lag}
    for delays in (None, 1):
        ranks = 1, 2 if lag == 2 else 1  # nodes of one: staged weights are relayed
        raw = settings(workspace, tmp_path / str(delays), *ranks, 6, **rollout)
        raw["reward"] = {"function": "tests.e2e.rewards:late_reward", "kwargs": {"seconds": 0.02 * (delays or 0)}}
        results.append(
            worlds.run(run_ranks.train_in_roles, sum(ranks), raw=raw, delays=delays, nodes_of_one=lag == 2)[0]
        )
    assert results[0]["samples"] == results[1]["samples"]
    assert_same(*results)
    rows = metrics(tmp_path / "None")
    assert rows == metrics(tmp_path / "1")
    if PARTIAL.items() <= rollout.items():  # 4 samples nothing, and is validated
        assert rows[5]["rollout/validated_version"] == 4 and rows[-1]["step"] == 6
        return
    assert [row["rollout/staleness_mean"] for row in rows[:-1]] == [min(step, lag) for step in range(6)]
    assert rows[3]["rollout/validated_version"] == 2 and "rollout/validated_version" not in rows[2]
    assert rows[0]["rollout_corr/k3_kl"] < 1e-9 < 1e-3 < rows[1]["rollout_corr/k3_kl"]
    versions = results[0]["versions"]
    assert sorted(versions) == [0, 1, 2, 3, 4, 6]  # 5 would sample step 6; 6 is validated
    for step in (1, 3):
        errors = {v: distance(workspace / "model", versions[v], results[0]["samples"][step]) for v in (0, 1, 2, 3)}
        assert errors.pop(step - lag) < 1e-5 < 1e-2 < min(errors.values())


def distance(folder: Path, weights: dict[str, torch.Tensor], samples: list[Any]) -> float:
    """The largest difference of these weights' log-probabilities from those that the samples have."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    worst = 0.0
    for _, _, prompt, response, *_, logprobs, _ in samples:
        ids = torch.tensor([[*prompt, *response]])
        with torch.no_grad():
            found = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found = found.gather(1, ids[0, len(prompt) :, None])[:, 0]
        worst = max(worst, (found - torch.tensor(logprobs)).abs().max().item())
    return worst


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["dynamic sampling and replay", "agents"])
def test_what_else_draws_composes_with_a_lag(workspace: Path, tmp_path: Path, kind: str) -> None:
    """The agents' tool takes a random time for each answer."""
    results = []
    for delays in (None, 1):
        raw = settings(workspace, tmp_path / str(delays), 1, 1, 4, **TRANSFORMERS, lag=1)
        if kind == "agents":
            slow = {"kwargs": {"delay_s": 0.1 * (delays or 0)}}
            agents = test_trajectories.settings(workspace, tmp_path, 2, "Echo", multi_turn=slow)
            raw |= {"data": agents["data"], "actor": agents["actor"]}
            raw["rollout"] |= {name: agents["rollout"][name] for name in ("stop_token_ids", "multi_turn")}
        else:
            filtered = {"enable": True, "max_num_gen_batches": 3}
            raw["algorithm"] = {"filter_groups": filtered, "replay": {"ratio": 0.34, "max_staleness": 2}}
        results.append(worlds.run(run_ranks.train_in_roles, 2, raw=raw, delays=delays)[0])
    assert results[0]["samples"] == results[1]["samples"]
    assert_same(*results)
    assert metrics(tmp_path / "None") == metrics(tmp_path / "1")


@pytest.mark.parametrize(
    ("lag", "rollout", "deaths"),
    [
        pytest.param(1, TRANSFORMERS, [(1, "gen", 5), (0, "update_actor", 2)]),  # the second goes on after step 2
        pytest.param(2, {**TRANSFORMERS, **PARTIAL}, [(1, "gen", 5), (0, "send_weights", 2)], marks=pytest.mark.soak),
        pytest.param(1, {}, [(1, "gen", 5), (0, "save_checkpoint", 1)], marks=pytest.mark.soak),
        *(
            pytest.param(1, TRANSFORMERS, [(rank, phase, 2)], marks=pytest.mark.soak)
            for rank, phases in (
                (0, ("send_weights", "wait_samples", "adv", "ref", "save_checkpoint")),
                (1, ("wait_weights", "update_weights", "attest", "probe", "testing", "reward", "step")),
            )
            for phase in phases
        ),
    ],
)
def test_a_run_whose_ranks_die_goes_on_as_if_undisturbed(
    workspace: Path, tmp_path: Path, lag: int, rollout: dict[str, Any], deaths: list[tuple[int, str, int]]
) -> None:
    """With vLLM, whose numbers do not depend on what is sampled together, it ends in another split: two ranks sample."""

    def run(name: str, drawing: int = 1, **options: Any) -> Any:
        raw = settings(workspace, tmp_path / name, 1, drawing, 6, **rollout, lag=lag)
        return worlds.run(run_ranks.train_in_roles, 1 + drawing, raw=raw, **options)[0]

    whole = run("whole")
    for rank, phase, number in deaths:
        with pytest.raises(AssertionError) as error:
            run("disturbed", die=(rank, phase, number))
        text = str(error.value)
        assert f"--- rank {rank} ---\ndied with exit code 9" in text
        other = "training rank 0" if rank == 0 else r"rollout rank 0 \(rank 1 of the run\)"
        assert re.search(rf"lost the connection to {other}", text), text
    last = run("disturbed", drawing=1 if "engine" in rollout else 2)
    assert last["samples"] == {step: whole["samples"][step] for step in last["samples"]}
    assert_same(last, whole)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "disturbed")


@pytest.mark.soak
@pytest.mark.parametrize(("rollout", "last"), [(TRANSFORMERS, 0), ({**TRANSFORMERS, **PARTIAL}, 1)])
def test_steps_drawn_ahead_are_trained_on_with_another_lag_and_colocated(
    workspace: Path, tmp_path: Path, rollout: dict[str, Any], last: int
) -> None:
    """The checkpoint after 4 of 9 steps holds 4 to 7, of the weights 0 to 3. Colocated is, bit for bit, as without a lag.

    The colocated run dies once more when half of these are trained on, and goes on with `last` rollout ranks.
    """

    def run(name: str, drawing: int, lag: int, **options: Any) -> Any:
        named = {"lag": lag} if lag else {}
        raw = settings(workspace, tmp_path / name, 1, drawing, 9, **rollout, **named)
        return worlds.run(run_ranks.train_in_roles, 1 + drawing, raw=raw, **options)[0]

    def rows(name: str) -> list[dict[str, Any]]:
        """Without what is measured for versions that sample nothing: they are in the engine of a colocated run only."""
        return rows_without(tmp_path / name, (*TIMES, "sync/", "val", "rollout/validated", "rollout/probe"))

    with pytest.raises(AssertionError):
        run("ahead", 1, 4, die=(0, "update_actor", 5))
    for name in ("no lag", "colocated", "lag 1"):
        shutil.copytree(tmp_path / "ahead", tmp_path / name)
    expected = run("no lag", 1, 0)
    assert expected["first_step"] == 4 and sorted(expected["samples"]) == [4, 5, 6, 7, 8]
    with pytest.raises(AssertionError):
        run("colocated", 0, 0, die=(0, "update_actor", 3))
    found = run("colocated", last, 0)
    assert found["samples"] == {step: expected["samples"][step] for step in (6, 7, 8)}
    assert_same(found, expected)
    assert rows("colocated") == rows("no lag")
    validated = [row["step"] for row in metrics(tmp_path / "colocated") if any(k.startswith("val-") for k in row)]
    assert {6, 8, 9} <= set(validated)
    drawn = run("lag 1", 1, 1)["samples"]
    assert [drawn[step] == expected["samples"][step] for step in range(4, 9)] == [True] * 4 + [False]
