"""Metrics: exact small sums, two real gloo ranks, and a mismatch vector by hand (V13).

V13: old log-probs -1 x 4, rollout log-probs [-.5, -1.5, -.8, -2.5], so d = old - rollout = [-.5, .5, -.2, 1.5]:
    kl = mean(-d) = -1.3 / 4 = -.325          k3 = mean(e^d) - mean(d) - 1 = 1.8889180 - .325 - 1 = .5639179
    chi2_token = mean(e^2d) - 1 = 4.9605046   mult_prob_error = mean(e^|d|) = 2.2501336
    training_ppl = e^1                        rollout_ppl = e^1.325 = 3.7621854      ppl_ratio = e^-.325 = .7225274
"""

from __future__ import annotations

import math
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from grpo_megatron.models.flops import throughput
from grpo_megatron.parallel.mesh import all_gather_values
from grpo_megatron.report.metrics import Metrics, group_table_metrics, rollout_mismatch
from grpo_megatron.types import GroupTable

OLD = [-1.0] * 4
ROLLOUT = [-0.5, -1.5, -0.8, -2.5]
V13 = {
    "rollout_corr/kl": -0.325,
    "rollout_corr/k3_kl": 0.5639179,
    "rollout_corr/chi2_token": 4.9605046,
    "rollout_corr/chi2_seq": 12.463738,
    "rollout_corr/training_ppl": 2.7182818,
    "rollout_corr/rollout_ppl": 3.7621854,
    "rollout_corr/ppl_ratio": 0.7225274,
    "rollout_corr/mult_prob_error": 2.2501336,
}


def _two_ranks(rank: int, folder: str) -> None:
    """Rank 0 holds one item, rank 1 three: a mean of rank means would be wrong everywhere."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    metrics = Metrics()
    metrics.mean_of("mean", [10.0] if rank == 0 else [1.0, 2.0, 3.0])
    metrics.std("std", [10.0] if rank == 0 else [1.0, 2.0, 3.0])
    metrics.sum("sum", rank + 1)
    metrics.max("max", -5.0 - rank)
    metrics.min("min", -5.0 - rank)
    metrics.max("nan", math.nan if rank == 1 else 1.0)
    metrics.constant("constant", 7)
    metrics.mean("nowhere", 0.0, 0)
    if rank == 1:
        metrics.mean("only_on_1", 6.0, 4)
    metrics.when(rank == 0).sum("sequences", 5)  # rank 1 is a tensor-parallel copy of rank 0
    with mock.patch("time.perf_counter", iter([0.0, 1.0 + rank]).__next__), metrics.phase("wait"):
        pass
    mask = torch.ones(1, 2, dtype=torch.bool)
    share = slice(0, 2) if rank == 0 else slice(2, 4)
    rollout_mismatch(metrics, torch.tensor([OLD[share]]), torch.tensor([ROLLOUT[share]]), mask)
    torch.save(metrics.reduce(partial(all_gather_values, group=dist.new_group(backend="gloo"))), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def reduced(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    folder = tmp_path_factory.mktemp("ranks")
    spawn(_two_ranks, args=(str(folder),), nprocs=2)
    return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]


GLOBAL = {
    "mean": 4.0,  # (10 + 1 + 2 + 3) / 4; the mean of rank means is 6
    "std": math.sqrt((36 + 9 + 4 + 1) / 3),
    "sum": 3.0,
    "max": -5.0,
    "min": -6.0,
    "constant": 7.0,
    "only_on_1": 1.5,
    "sequences": 5.0,  # 10 if the copy counted
    "timing_s/wait": 2.0,  # the slowest rank's; 1 and 2 seconds by a mocked clock
}


@pytest.mark.slow
def test_every_rank_gets_the_same_global_numbers(reduced: list[dict[str, float]]) -> None:
    different = [k for k in reduced[0] if reduced[0][k] != reduced[1].get(k) and not math.isnan(reduced[0][k])]
    assert different == [] and list(reduced[0]) == list(reduced[1]) == sorted(reduced[0])
    assert {name: reduced[0][name] for name in GLOBAL} == pytest.approx(GLOBAL, rel=1e-12)
    assert "nowhere" not in reduced[0] and math.isnan(reduced[0]["nan"])


def test_mismatch_does_not_depend_on_the_placement_of_tokens(reduced: list[dict[str, float]]) -> None:
    """Token means of two ranks with two tokens each are V13's; sequence means are of two sequences now.

    Sequence mean log-probs: rollout -1 and -1.65, old -1: rollout_ppl = (e + e^1.65) / 2.
    """
    for name in ("kl", "k3_kl", "chi2_token", "mult_prob_error"):
        assert reduced[0][f"rollout_corr/{name}"] == pytest.approx(V13[f"rollout_corr/{name}"], abs=1e-6)
    assert reduced[0]["rollout_corr/rollout_ppl"] == pytest.approx((math.e + math.exp(1.65)) / 2, abs=1e-6)
    assert reduced[0]["training/rollout_logp_diff_max"] == pytest.approx(1.5)
    whole = Metrics()
    rollout_mismatch(whole, torch.tensor([OLD]), torch.tensor([ROLLOUT]), torch.ones(1, 4, dtype=torch.bool))
    expected = whole.reduce()
    for name in ("mean", "std", "max"):
        key = f"training/rollout_probs_diff_{name}"
        assert reduced[0][key] == pytest.approx(expected[key], rel=1e-12)


def test_v13() -> None:
    """With one masked column of garbage and one empty sequence, which count nowhere."""
    old = torch.tensor([[*OLD, math.nan], [0.0] * 5], dtype=torch.float64)
    rollout = torch.tensor([[*ROLLOUT, -math.inf], [9.0] * 5], dtype=torch.float64)
    mask = torch.tensor([[True] * 4 + [False], [False] * 5])
    metrics = Metrics()
    rollout_mismatch(metrics, old, rollout, mask)
    reduced = metrics.reduce()
    for name, value in V13.items():
        assert reduced[name] == pytest.approx(value, abs=1e-6), name
    assert reduced["rollout_corr/log_ppl_diff"] == pytest.approx(-0.325)
    assert reduced["rollout_corr/log_ppl_abs_diff"] == pytest.approx(0.325)
    assert reduced["training/rollout_logp_diff_mean"] == pytest.approx(2.7 / 4)
    assert reduced["training/rollout_logp_diff_max"] == pytest.approx(1.5)
    probs = [abs(math.exp(-1) - math.exp(r)) for r in ROLLOUT]
    mean = sum(probs) / 4
    assert reduced["training/rollout_probs_diff_mean"] == pytest.approx(mean)
    assert reduced["training/rollout_probs_diff_std"] == pytest.approx(
        math.sqrt(sum((p - mean) ** 2 for p in probs) / 3)
    )


def test_mismatch_of_an_impossible_token_and_of_nothing() -> None:
    """The engine gives a token probability 0: d = inf, bounded to 20 in every exponent. No token at all: no metric."""
    metrics = Metrics()
    rollout_mismatch(metrics, torch.tensor([[-1.0]]), torch.tensor([[-math.inf]]), torch.tensor([[True]]))
    reduced = metrics.reduce()
    assert reduced["rollout_corr/mult_prob_error"] == pytest.approx(math.exp(20))
    assert reduced["training/rollout_logp_diff_max"] == math.inf
    rollout_mismatch(metrics, torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    assert metrics.reduce() == {}


def test_micro_batches_add_up_and_the_next_step_starts_empty() -> None:
    metrics = Metrics()
    running = torch.zeros((), requires_grad=True)
    value = running + 3
    metrics.mean("loss", value, torch.tensor(2))
    value.detach().add_(100)  # a caller's buffer may change after it was recorded
    metrics.mean("loss", 5.0, 2)
    metrics.sum("flags", torch.tensor(True))
    assert metrics.reduce() == {"flags": 1.0, "loss": 2.0}
    assert metrics.reduce() == {}


def test_std_survives_a_large_mean() -> None:
    """[1e9 - 1, 1e9, 1e9 + 1] in two calls: variance 1, where sum of squares minus square of sum is off by hundreds."""
    metrics = Metrics()
    metrics.std("std", [1e9 - 1, 1e9])
    metrics.std("std", [1e9 + 1])
    metrics.std("one", [4.0])
    assert metrics.reduce() == {"std": pytest.approx(1.0, rel=1e-9)}


def test_phase_synchronises_around_the_block_and_adds_up() -> None:
    calls: list[str] = []
    metrics = Metrics(synchronize=lambda: calls.append("sync"))
    for _ in range(2):
        with metrics.phase("gen"):
            calls.append("work")
            time.sleep(0.02)
    with pytest.raises(ZeroDivisionError), metrics.phase("broken"):
        _ = 1 / 0
    assert calls == ["sync", "work", "sync"] * 2 + ["sync"]
    reduced = metrics.reduce()
    assert list(reduced) == ["timing_s/gen"]
    assert reduced["timing_s/gen"] >= 0.04


def test_a_name_has_one_kind() -> None:
    metrics = Metrics()
    metrics.sum("x", 1)
    with pytest.raises(AssertionError, match="'x' is recorded as sum and as max"):
        metrics.max("x", 1)
    with pytest.raises(AssertionError, match="'x' is recorded and constant"):
        metrics.constant("x", 1)


def _table(**columns: Any) -> GroupTable:
    size = len(columns["reward"])
    defaults: dict[str, Any] = {
        "prompt_index": [0] * size,
        "index": list(range(size)),
        "prompt_length": [4] * size,
        "truncated": [False] * size,
        "holder": [0] * size,
    }
    return GroupTable(**{**defaults, **columns})


def test_group_table_metrics() -> None:
    """Five samples: scores 1, 0 and -1 count; row 2 is unscorable, row 3 is empty (its score counts nowhere)."""
    metrics = Metrics()
    table = _table(
        reward=[1.0, 0.0, math.nan, 5.0, -1.0],
        prompt_length=[3, 3, 3, 8, 8],
        response_length=[6, 10, 10, 0, 4],
        truncated=[False, True, False, False, False],
    )
    group_table_metrics(metrics, table, max_response_length=10)
    parts = {  # mean, max, min. Without a penalty the reward is the score itself
        "critic/score": (0.0, 1.0, -1.0),
        "critic/rewards": (0.0, 1.0, -1.0),
        "response_length": (6.0, 10.0, 0.0),
        "response_length_non_aborted": (7.5, 10.0, 4.0),
        "prompt_length": (5.0, 8.0, 3.0),
    }
    expected = {f"{n}/{k}": v for n, vs in parts.items() for k, v in zip(("mean", "max", "min"), vs, strict=True)}
    expected["response_length/clip_ratio"] = 0.4  # both of length 10, though one stopped by itself
    names = ("response/truncated_ratio", "response/aborted_ratio", "reward/unscorable_ratio")
    assert metrics.reduce() == pytest.approx({**expected, **dict.fromkeys(names, 0.2)})
    group_table_metrics(metrics, _table(reward=[math.nan], response_length=[2]), max_response_length=10)
    reduced = metrics.reduce()
    assert reduced["reward/unscorable_ratio"] == 1.0
    assert not any(name.startswith("critic/score") for name in reduced)
    group_table_metrics(metrics, _table(reward=[], response_length=[]), max_response_length=10)
    assert metrics.reduce() == {}
    masked = _table(reward=[1.0, 0.0], response_length=[6, 4], loss_spans=[[(0, 2), (5, 6)], [(0, 4)]])
    group_table_metrics(
        metrics, masked, max_response_length=10
    )  # lengths count all tokens, one share those in the loss
    reduced = metrics.reduce()
    assert (reduced["response_length/mean"], reduced["response/loss_token_ratio"]) == (5, 0.7)


def test_throughput() -> None:
    """1200 tokens, 4 devices: 10 s whole, of which 4 s testing. The save before the step does not count."""
    timings = {"timing_s/step": 10.0, "timing_s/testing": 4.0, "timing_s/save_checkpoint": 1.0, "timing_s/gen": 5.0}
    found = throughput(timings, 1200, 4)
    assert (found.pop("perf/throughput"), found.pop("perf/throughput_train")) == (30.0, 50.0)
    assert throughput(timings, 1200, 4, overlaps=True)["perf/throughput_train"] == 30.0  # with a lag
    assert found == throughput({}, 1200, 4) == {"perf/total_num_tokens": 1200.0}
