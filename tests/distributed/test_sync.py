"""After every sync the engine has the policy's weights, for all layouts. A faulty sync stops every rank."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests import tiny, worlds
from tests.distributed import sync_ranks
from tests.models.policies import LAYOUTS

# (family, training layout, rollout tp): training layouts, every rollout tp, families
CASES = [
    ("qwen2-tied", "DP2", 2),
    ("mistral", "TP2+SP", 2),
    ("llama3", "PP2", 2),
    ("qwen3", "TP2xPP2+SP", 4),
    ("gemma3", "TP2+SP", 1),
]
# (family, training layout, rollout tp, ranks per node): the ranks are taken for several nodes, so that parts are relayed
NODES = [
    ("qwen2-tied", "PP2", 2, 1),
]
# whose kind others have: make soak runs them
LONG = [
    ("qwen2", "1", 1, None),
    ("qwen3", "DP2", 1, None),
    ("qwen3", "TP2+SP", 1, None),
    ("qwen2-tied", "PP2", 1, None),
    ("llama3", "TP2xPP2+SP", 1, 2),
    ("olmo2", "DP2xTP2", 2, None),  # vLLM has it by transformers' modules
    ("seed_oss", "TP2+SP", 2, None),  # likewise
    ("llama3", "DP2xTP2", 4, None),
    ("qwen2", "TP4", 2, 2),
    ("llama2", "TP2xPP2+SP", 1, None),
    ("qwen2-tied", "TP2xPP2+SP", 2, None),
    ("qwen3", "DP2xTP2", 1, None),
    ("qwen2", "TP2xPP2+SP", 4, 2),
    ("qwen3", "TP2xPP2+SP", 2, 1),
    ("mistral", "DP2xTP2", 1, 2),
    ("llama2", "DP2xTP2", 4, 1),
    ("qwen3", "TP4", 1, 2),
    ("gemma3", "TP2xPP2+SP", 2, None),
]
YARN = {"rope_type": "yarn", "factor": 32.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    changes: dict[str, dict[str, Any]] = {"mistral": {"rope_parameters": YARN}, "gemma3": {"sliding_window_pattern": 2}}
    return {
        family: tiny.make_model(root / family, family, num_hidden_layers=2, **changes.get(family, {}))
        for family in tiny.FAMILIES
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layout", "rollout_tp", "ranks_per_node"),
    [*((*c, None) for c in CASES), *NODES, *(pytest.param(*case, marks=pytest.mark.soak) for case in LONG)],
)
def test_engine_and_policy_agree_after_every_sync(
    models: dict[str, Path], family: str, layout: str, rollout_tp: int, ranks_per_node: int | None
) -> None:
    """Bounds in float32: mean 1e-6, max 1e-5, over three cycles of sync and update that change the samples.

    Every sync is attested: what the engine loaded equals the policy's weights bit for bit.
    """
    shape = LAYOUTS[layout]
    results = worlds.run(
        sync_ranks.cycles,
        shape[0],
        folder=models[family],
        layout=shape,
        rollout_tp=rollout_tp,
        num_cycles=3,
        lr=1e-2,
        temperature=0.8,
        ranks_per_node=ranks_per_node,
    )
    for result in results:
        assert max(result["mean"]) <= 1e-6
        assert max(result["max"]) <= 1e-5
        first, second, third = result["tokens"]
        assert first != second != third


@pytest.mark.slow
def test_bfloat16_engine_and_policy_agree_to_rounding(models: dict[str, Path]) -> None:
    """Both round every activation to 8 bits of mantissa, but at different points of the computation."""
    shape = LAYOUTS["TP2+SP"]
    arguments = {"layout": shape, "rollout_tp": 1, "num_cycles": 2, "lr": 1e-2, "dtype": "bfloat16"}
    for result in worlds.run(sync_ranks.cycles, 2, folder=models["qwen3"], **arguments):
        assert 1e-6 < max(result["mean"]) <= 0.03


@pytest.mark.slow
def test_without_learning_nothing_changes(models: dict[str, Path]) -> None:
    """Learning rate 0 for four cycles. Reused buckets, races and incomplete syncs would show as other samples."""
    shape = LAYOUTS["PP2"]
    results = worlds.run(
        sync_ranks.cycles, 2, folder=models["qwen2-tied"], layout=shape, rollout_tp=2, num_cycles=4, lr=0.0
    )
    for result in results:
        assert all(tokens == result["tokens"][0] for tokens in result["tokens"])


@pytest.mark.slow
def test_a_delta_is_a_full_sync_bit_for_bit(models: dict[str, Path]) -> None:
    """bfloat16, Adam at 1e-6, a full sync every 5. Bytes: below a quarter of a full sync's where few elements changed."""
    shape = LAYOUTS["TP2xPP2+SP"]
    results = worlds.run(sync_ranks.delta_and_full, 4, folder=models["qwen2"], layout=shape, rollout_tp=2, lr=1e-6)
    for result in results:
        assert result["delta"] == result["full"]
        assert all(a != b for a, b in itertools.pairwise(result["full"])), "the weights change in every step"
        assert "rank 3: the engine cannot read its own weights (RuntimeError: unreadable)" in result["error"]
        densities = [metrics.get("sync/density") for metrics in result["metrics"]]
        received = [metrics["sync/bytes_received"] for metrics in result["metrics"]]
        # the first is full, and the one after the failure
        assert [density is None for density in densities] == [True, False, False, True, False, False]
        assert all(0 < density < 0.1 for density in densities if density is not None)
        assert received[0] == received[3] > 0
        assert all(0 < received[step] < received[0] / 4 for step in (1, 2, 4, 5))


# (family, layout, rollout tp, mode, dtype)
ADAPTED = [
    ("qwen2", "TP2+SP", 1, "merged", "bfloat16"),
    pytest.param("qwen3", "PP2", 2, "merged", "bfloat16", marks=pytest.mark.soak),
    ("qwen2-tied", "DP2", 2, "split", "float32"),
    pytest.param("llama3", "TP2xPP2+SP", 2, "merged", "bfloat16", marks=pytest.mark.soak),
    pytest.param("qwen2", "TP2xPP2+SP", 1, "merged", "bfloat16", marks=pytest.mark.soak),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout", "rollout_tp", "mode", "dtype"), ADAPTED)
def test_a_sync_of_adapters_sends_factors_and_vllm_holds_the_policys_bits(
    models: dict[str, Path], family: str, layout: str, rollout_tp: int, mode: str, dtype: str
) -> None:
    """The base travels in the first sync, after the one that failed, and after it was written to."""
    shape = LAYOUTS[layout]
    arguments = {"layout": shape, "rollout_tp": rollout_tp, "lora": {"rank": 4, "mode": mode}, "dtype": dtype}
    for result in worlds.run(sync_ranks.adapters, shape[0], folder=models[family], **arguments):
        base, factors = result["base"], result["factors"]
        assert f"rank {shape[0] - 1}: the engine cannot read its own weights (RuntimeError: )" in result["error"]
        first = base + factors
        assert result["received"] == [first, factors, factors, first, factors, 0, factors, first, factors]
        digests = result["digests"]
        assert digests[2] == "" and digests[5] == digests[0]  # the base: at first, and as the reference
        assert len(set(digests)) == 8 and factors <= base / 4
        assert result["drawn"][0] != result["drawn"][-1]


FAULTS = {
    "missing": "rank 1: cannot read weights: 'decoder.layers.1.mlp.linear_fc2.weight'",
    "nan": "the policy's own weights are not finite: ",
    "exception": "rank 1: KeyError: 'broken stream'",
    "stale": "the weights that were sent, model.layers.1.mlp.down_proj.weight columns 0 to 112 on rank 1",
    "other_model": "the engine does not hold that model's weights",
}


@pytest.mark.slow
def test_a_fault_on_one_rank_stops_every_rank(models: dict[str, Path]) -> None:
    """On every rank the message names the rank and the tensor. Afterwards the engine refuses to generate."""
    for results in worlds.run(sync_ranks.faulty, 2, folder=models["qwen2"], faults=list(FAULTS)):
        for fault, (error, refused) in results.items():
            assert FAULTS[fault] in error and refused, fault


@pytest.mark.slow
def test_a_rank_that_is_killed_in_the_middle_is_named(models: dict[str, Path]) -> None:
    with pytest.raises(AssertionError, match="the weight sync lost its connection to rank 1") as raised:
        worlds.run(sync_ranks.killed, 2, folder=models["qwen2"])
    assert "rank 1 ---\ndied with exit code -9" in str(raised.value)
    assert "LostRank: " in str(raised.value)  # and no second error hides it
    assert "During handling of the above" not in str(raised.value)
