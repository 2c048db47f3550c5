"""The plan: which rank trains on what. By hand, and by invariants.

Balance bound: when the heaviest rank got its last sequence it was the lightest, so heaviest - lightest <= one sequence.
Packing bound (first fit, no cap on sequences): a micro-batch is opened only when its first sequence fits nowhere, so
any two micro-batches of a rank that are not empty hold more than the cap together.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.algo.advantages import dupo_copies, overlong_penalty, with_overlong_penalty
from grpo_megatron.algo.losses import (
    folds_old_logprobs,
    is_corrected,
    needs_old_logprobs,
    needs_reference,
    reasons_for_old_pass,
)
from grpo_megatron.algo.plan import make_plan, scoring_plan, token_weightings, token_weights, weigh
from grpo_megatron.algo.ppo import length_adaptive_lams, value_targets
from grpo_megatron.config import ActorConfig, AlgorithmConfig, OverlongBuffer
from grpo_megatron.types import BRANCH, GroupTable, Plan
from tests.algo import tables

NAN = math.nan
QUICK = settings(deadline=None, derandomize=True, max_examples=100)


def make_table(groups: list[list[tuple[float, int, int]]]) -> GroupTable:
    """Groups of (reward, prompt tokens, response tokens)."""
    rewards, prompts, responses = ([[sample[i] for sample in group] for group in groups] for i in range(3))
    table = tables.make_table(rewards, responses)  # type: ignore[arg-type]
    return replace(table, prompt_length=[length for group in prompts for length in group])


def plan_of(table: GroupTable, dp: int = 1, algorithm: AlgorithmConfig | None = None, **values: Any) -> Plan:
    return make_plan(
        table,
        algorithm or AlgorithmConfig(),
        ActorConfig.model_validate(values),
        dp=dp,
        train_batch_size=4,
        max_response_length=64,
    )


def rows_of(plan: Plan, mini: int) -> list[list[int]]:
    """Rows of each rank in one mini-batch."""
    return [[row for micro in per_rank[mini] for row in micro] for per_rank in plan.mini_batches]


def test_by_hand() -> None:
    # Lengths 10, 7, 6, 5 on two ranks, longest first to the lightest: {10, 5} = 15 and {7, 6} = 13.
    # Cap 12: rank 0 packs {10}, {5}; rank 1 {7}, {6}, as 13 > 12. With cap 13 rank 1 fills one and gets an empty one.
    table = make_table([[(1, 2, 5), (0, 2, 8), (1, 2, 4), (0, 2, 3)]])
    plan = plan_of(table, dp=2, ppo_max_token_len_per_gpu=12)
    assert plan.mini_batches == [[[[1], [3]]], [[[0], [2]]]]
    assert plan_of(table, dp=2, ppo_max_token_len_per_gpu=13).mini_batches == [[[[1], [3]]], [[[0, 2], []]]]
    assert plan.advantages == pytest.approx([0.8660239, -0.8660239, 0.8660239, -0.8660239], abs=1e-7)
    assert plan.token_weights == [1 / 20] * 4
    assert plan.owner() == {0: 1, 1: 0, 2: 1, 3: 0}
    # Without balancing, the first two rows (17 tokens) and the last two (11) would be the ranks' shares.
    assert {k: v for k, v in plan.metrics.items() if k.startswith("global_seqlen")} == {
        "global_seqlen/min": 11,
        "global_seqlen/max": 17,
        "global_seqlen/minmax_diff": 6,
        "global_seqlen/balanced_min": 13,
        "global_seqlen/balanced_max": 15,
        "global_seqlen/mean": 14,
    }


def test_dropped_rows_count_nowhere() -> None:
    # Out: an unscorable sample (9 tokens) and an empty response. In: 3 + 1 + 2 tokens of three sequences.
    table = make_table([[(1, 2, 3), (NAN, 2, 9), (0, 2, 1)], [(1, 2, 0), (0, 2, 2)]])
    assert plan_of(table).owner() == {0: 0, 2: 0, 4: 0}
    assert plan_of(table).token_weights == [1 / 6, 0, 1 / 6, 0, 1 / 6]
    by_sequence = plan_of(table, loss_agg_mode="seq-mean-token-mean").token_weights
    assert by_sequence == pytest.approx([1 / 9, 0, 1 / 3, 0, 1 / 6])
    # The empty response stays in the statistics of its prompt: [1, 0] -> +-.5 / (sqrt(.5) + 1e-6).
    assert plan_of(table).advantages[4] == pytest.approx(-0.7071058, abs=1e-7)
    assert plan_of(table).advantages[1] == 0


def test_norm_length() -> None:
    table = make_table([[(1, 2, 3), (0, 2, 5)]])
    mode = "seq-mean-token-sum-norm"
    assert plan_of(table, loss_agg_mode=mode).token_weights == [1 / (2 * 64)] * 2
    assert plan_of(table, loss_agg_mode=mode, loss_scale_factor=10).token_weights == [1 / (2 * 10)] * 2


def test_a_mini_batch_with_nothing_to_learn_from_is_no_optimizer_step() -> None:
    table = make_table([[(NAN, 1, 1), (0, 1, 0)], [(1, 1, 2), (0, 1, 2)]])
    assert plan_of(table, dp=2, ppo_mini_batch_size=1).mini_batches == [[[[2]]], [[[3]]]]
    nothing = plan_of(make_table([[(NAN, 1, 1)]]), dp=2)
    assert nothing.mini_batches == [[], []]
    assert nothing.token_weights == [0]
    assert plan_of(make_table([]), dp=2).mini_batches == [[], []]


def test_group_metrics() -> None:
    groups: list[list[float]] = [[1, 0], [1, 1], [0, 0], [0, NAN], [1, 0]]
    metrics = plan_of(make_table([[(reward, 1, 1) for reward in group] for group in groups])).metrics
    assert metrics["critic/zero_variance_ratio"] == pytest.approx(3 / 5)
    assert metrics["critic/all_best_ratio"] == pytest.approx(1 / 5)
    assert metrics["critic/all_worst_ratio"] == pytest.approx(2 / 5)
    assert metrics["critic/unscorable_ratio"] == pytest.approx(1 / 10)
    assert (
        not {"critic/all_best_ratio", "critic/all_worst_ratio"} & plan_of(make_table([[(1, 1, 1)] * 2])).metrics.keys()
    )


def short(table: GroupTable, config: AlgorithmConfig) -> list[float]:
    return [0.0]


def per_token(table: GroupTable, config: AlgorithmConfig) -> list[list[float]]:
    return [[0.5] * n for n in table.response_length]


def per_prompt_token(table: GroupTable, config: AlgorithmConfig) -> list[list[float]]:
    return [[0.5] * n for n in table.prompt_length]


def not_finite(table: GroupTable, config: AlgorithmConfig) -> list[float]:
    return [NAN] * len(table)


def test_the_sequences_of_a_trajectory_count_as_one() -> None:
    """Rewards 0, 1, 1 of three trajectories. The second one has three sequences of 5, 4 and, at its end, 3 tokens."""
    whole = tables.make_table([[0.0, 1.0, 1.0]], lengths=[[3, 12, 0]])
    table = tables.make_table([[0.0, 1.0, 1.0, 1.0, 1.0]], lengths=[[3, 3, 0, 5, 4]])
    table = replace(table, index=[0, 1, 2, BRANCH + 1, 2 * BRANCH + 1])
    modes = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    for name, mode in itertools.product(("grpo", "rloo", "reinforce_plus_plus"), modes):
        algorithm = AlgorithmConfig.model_validate({"adv_estimator": name})
        expected, plan = (plan_of(t, algorithm=algorithm, loss_agg_mode=mode) for t in (whole, table))
        for column, wanted in ((plan.advantages, expected.advantages), (plan.token_weights, expected.token_weights)):
            assert column == [*wanted, wanted[1], wanted[1]]
        assert sorted(plan.rows(0)) == [0, 1, 3, 4]
    assert all(plan.metrics[key] == value for key, value in expected.metrics.items() if key.startswith("critic/"))


def test_what_is_per_token_is_joined_and_spread_again() -> None:
    """Sequences of 2, 3 and 1 tokens: rewards of turns, steps, penalties, masks and values keep their tokens."""
    table = replace(
        tables.make_table([[1.0, 1.0, 1.0]], lengths=[[1, 2, 3]], penalties=[[[0.1], [0.2, 0.3], [0.4, 0.5, 0.6]]]),
        index=[0, BRANCH, 2 * BRANCH],
        turn_rewards=[[(0, 0.5)], [(1, 0.25)], []],
        step_rewards=[[(0, 5.0)], [(0, 6.0)], [(2, 7.0)]],
        loss_spans=[[(0, 1)], [(0, 2)], [(1, 3)]],
        values=[[6.0], [1.0, 2.0], [3.0, 4.0, 5.0]],
        num_kept_tokens=[1, 2, 1],
    )
    joined = table.joined()
    assert (joined.response_length, joined.index, joined.num_kept_tokens) == ([6], [0], [4])
    assert joined.turn_rewards == [[(1, 0.25), (5, 0.5)]] and joined.step_rewards == [[(0, 6.0), (4, 7.0), (5, 5.0)]]
    assert joined.loss_spans == [[(0, 2), (3, 5), (5, 6)]] and joined.values == [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]
    assert joined.token_penalties == [[0.2, 0.3, 0.4, 0.5, 0.6, 0.1]]
    assert table.spread([[1, 2, 3, 4, 5, 6]]) == [[6], [1, 2], [3, 4, 5]] and table.spread([7]) == [7, 7, 7]
    assert replace(table, values=[[6.0], [], [3.0, 4.0, 5.0]]).joined().values == [[]]
    [of_whole] = value_targets(joined, 0.9, 0.8).values()
    assert value_targets(table, 0.9, 0.8) == {0: of_whole[5:], 1: of_whole[:2], 2: of_whole[2:5]}
    assert length_adaptive_lams(table, 0.5) == [1.0 - 1.0 / 2.5] * 3


def test_a_users_estimator_is_checked() -> None:
    table = make_table([[(1, 2, 3), (0, 2, 5)]])

    def run(function: object) -> Plan:
        name = f"{__name__}:{getattr(function, '__name__', '')}"
        return plan_of(table, algorithm=AlgorithmConfig(adv_estimator=name))

    assert run(per_token).advantages == [[0.5] * 3, [0.5] * 5]
    with pytest.raises(ValueError, match="returned 1 advantages for 2 samples"):
        run(short)
    with pytest.raises(ValueError, match="2 advantages for table row 0, whose response has 3 tokens"):
        run(per_prompt_token)
    with pytest.raises(ValueError, match=r"returned nan for table row 0 \(reward 1.0\)"):
        run(not_finite)


def test_scoring_plan() -> None:
    plan = scoring_plan([5, 0, 9], ActorConfig(ppo_max_token_len_per_gpu=8), 2)
    assert plan.mini_batches == [[[[2]]], [[[0]]]] and plan.token_weights == [0.0] * 3


samples = st.tuples(st.sampled_from([0.0, 1.0, NAN]), st.integers(1, 10), st.integers(0, 40))
some_tables = st.lists(st.lists(samples, min_size=1, max_size=6), min_size=1, max_size=7).map(make_table)
layouts = st.fixed_dictionaries(
    {
        "dp": st.integers(1, 4),
        "ppo_max_token_len_per_gpu": st.integers(8, 120),
        "ppo_micro_batch_size_per_gpu": st.none() | st.integers(1, 3),
    }
)


@QUICK
@given(
    table=some_tables,
    layout=layouts,
    mini=st.none() | st.integers(1, 8),
    mode=st.sampled_from(["token-mean", "seq-mean-token-mean"]),
)
def test_invariants(table: GroupTable, layout: dict[str, Any], mini: int | None, mode: str) -> None:
    plan = plan_of(table, ppo_mini_batch_size=mini, loss_agg_mode=mode, **layout)
    lengths = [p + r for p, r in zip(table.prompt_length, table.response_length, strict=True)]
    cap, max_sequences = layout["ppo_max_token_len_per_gpu"], layout["ppo_micro_batch_size_per_gpu"]
    kept = [row for row in range(len(table)) if table.response_length[row] > 0 and not math.isnan(table.reward[row])]

    # Every kept row is owned exactly once; dropped rows are nowhere and weigh nothing.
    num_minis = len(plan.mini_batches[0])
    owned = [row for m in range(num_minis) for rows in rows_of(plan, m) for row in rows]
    assert sorted(owned) == kept
    assert [row for row, weight in enumerate(plan.token_weights) if weight > 0] == kept

    # Mini-batches hold whole prompts, in order.
    prompts = [{table.prompt_index[row] for rows in rows_of(plan, m) for row in rows} for m in range(num_minis)]
    assert all(max(a) < min(b) for a, b in itertools.pairwise(prompts))
    assert all(max(p) - min(p) < (mini or 4) for p in prompts)

    for m in range(num_minis):
        minis = [per_rank[m] for per_rank in plan.mini_batches]
        assert len({len(micros) for micros in minis}) == 1
        assert any(micros[-1] for micros in minis)  # at least one rank needs the last micro-batch
        for micros in minis:
            filled = [micro for micro in micros if micro]
            loads = [sum(lengths[row] for row in micro) for micro in filled]
            assert all(load <= cap or len(micro) == 1 for load, micro in zip(loads, filled, strict=True))
            assert max_sequences is None or all(len(micro) <= max_sequences for micro in filled)
            if max_sequences is None and len(filled) > 1:
                assert sum(sorted(loads)[:2]) > cap
        rank_loads = [sum(lengths[row] for row in rows) for rows in rows_of(plan, m)]
        longest = max(lengths[row] for rows in rows_of(plan, m) for row in rows)
        assert max(rank_loads) - min(rank_loads) <= longest
        total = sum(plan.token_weights[row] * table.response_length[row] for rows in rows_of(plan, m) for row in rows)
        assert total == pytest.approx(1)

    assert plan_of(table, ppo_mini_batch_size=mini, loss_agg_mode=mode, **layout) == plan
    # One rank with one micro-batch: the same terms in each sum of the gradient. (test_losses.py: their sum.)
    whole = plan_of(table, ppo_mini_batch_size=mini, loss_agg_mode=mode, ppo_max_token_len_per_gpu=10**9)
    assert (whole.advantages, whole.token_weights) == (plan.advantages, plan.token_weights)
    assert [sorted(rows_of(whole, m)[0]) for m in range(len(whole.mini_batches[0]))] == [
        sorted(row for rows in rows_of(plan, m) for row in rows) for m in range(num_minis)
    ]


# -- Plans of the methods: samples left out, pairs in one micro-batch, copies in every count, and the revised plan -----

DPO = {"loss_mode": "dpo", "loss_agg_mode": "seq-mean-token-mean"}


def test_samples_without_an_advantage_count_nowhere() -> None:
    # rft: right answers only. 3 + 2 tokens of two sequences; the 9 of the wrong one are in no denominator.
    table = make_table([[(1, 2, 3), (0, 2, 9)], [(1, 2, 2), (0, 2, 4)]])
    plan = plan_of(table, algorithm=AlgorithmConfig(adv_estimator="rft"))
    assert plan.advantages == [1.0, None, 1.0, None]
    assert plan.token_weights == [1 / 5, 0, 1 / 5, 0]
    assert sorted(plan.owner()) == [0, 2]


def test_truncated_samples_stay_in_the_statistics_and_leave_the_loss() -> None:
    table = replace(make_table([[(1, 2, 3), (0, 2, 9)]]), truncated=[False, True])
    plan = plan_of(table, algorithm=AlgorithmConfig(mask_truncated_samples=True))
    assert plan.advantages[0] == pytest.approx(0.7071058, abs=1e-6)  # of a group of two
    assert plan.token_weights == [1 / 3, 0]


def test_a_pair_shares_a_micro_batch_chosen_first() -> None:
    # Best and worst of the groups: rows 1, 0 and 4, 5; the third group has no variance. Each pair has 14 and 11 tokens.
    table = make_table(
        [[(0, 2, 6), (1, 2, 4), (0.5, 2, 2)], [(0.5, 2, 1), (1, 2, 3), (0, 2, 4)], [(1, 1, 1), (1, 1, 1)]]
    )
    algorithm = AlgorithmConfig(adv_estimator="best_worst")
    plan = plan_of(table, algorithm=algorithm, dp=2, ppo_max_token_len_per_gpu=12, **DPO)
    assert plan.mini_batches == [[[[1, 0]]], [[[4, 5]]]]
    one = plan_of(table, algorithm=algorithm, ppo_max_token_len_per_gpu=25, **DPO)
    assert one.mini_batches == [[[[1, 0, 4, 5]]]]
    # seq-mean-token-mean over four sequences: 1 / (4 n_i); the rest weigh nothing.
    assert one.token_weights == [1 / 24, 1 / 16, 0, 0, 1 / 12, 1 / 16, 0, 0]


def test_a_pair_without_one_of_its_responses_is_dropped() -> None:
    table = make_table([[(0, 2, 0), (1, 2, 4)], [(1, 2, 3), (0, 2, 4)]])  # an empty response has no gradient
    assert plan_of(table, algorithm=AlgorithmConfig(adv_estimator="best_worst"), **DPO).mini_batches == [[[[2, 3]]]]


def test_dupo_copies_count_like_samples() -> None:
    # Advantages are of the original group. Of four groups two have different rewards: each counts twice.
    table = make_table([[(1, 1, 3), (0, 1, 1)], [(1, 1, 7), (1, 1, 7)], [(0, 1, 2), (1, 1, 2)], [(0, 1, 9), (0, 1, 9)]])
    assert dupo_copies(table) == [2, 2, 0, 0, 2, 2, 0, 0]
    plan = plan_of(table, algorithm=AlgorithmConfig(dupo=True))
    assert sorted(plan.owner()) == [0, 1, 4, 5]
    # N_tok = 2 (3 + 1 + 2 + 2) = 16; a row with two copies has twice the weight of a token.
    assert plan.token_weights == [2 / 16, 2 / 16, 0, 0, 2 / 16, 2 / 16, 0, 0]
    assert plan.advantages[0] == pytest.approx(0.7071058, abs=1e-6)
    sequences = plan_of(table, algorithm=AlgorithmConfig(dupo=True), loss_agg_mode="seq-mean-token-mean")
    assert sequences.token_weights[1] == pytest.approx(2 / 8)


def test_dupo_keeps_the_number_of_optimizer_steps() -> None:
    groups = [[(1, 1, 1), (0, 1, 1)], [(1, 1, 1), (1, 1, 1)]] * 2
    plan = plan_of(make_table(groups), algorithm=AlgorithmConfig(dupo=True), ppo_mini_batch_size=2)
    assert [sorted(rows_of(plan, mini)[0]) for mini in range(2)] == [[0, 1], [4, 5]]
    nothing = make_table([[(1, 1, 1), (1, 1, 1)]])
    assert plan_of(nothing, algorithm=AlgorithmConfig(dupo=True)).mini_batches == [[]]


def test_rejected_tokens_leave_every_denominator() -> None:
    table = make_table([[(1, 2, 3), (0, 2, 5)]])
    plan = plan_of(table)
    assert plan.token_weights == [1 / 8, 1 / 8]
    later = replace(table, num_kept_tokens=[1, 3])
    revised = weigh(plan, later, AlgorithmConfig(), ActorConfig(), max_response_length=64)
    assert revised.token_weights == [1 / 4, 1 / 4]
    assert revised.mini_batches == plan.mini_batches
    gone = replace(table, num_kept_tokens=[0, 0])  # nothing left: no optimizer step
    assert weigh(plan, gone, AlgorithmConfig(), ActorConfig(), max_response_length=64).mini_batches == [[]]


def test_penalties_move_the_advantages_of_the_whole_group() -> None:
    table = make_table([[(1, 2, 2), (0, 2, 2)]])
    plain = AlgorithmConfig(norm_adv_by_std_in_grpo=False)
    plan = make_plan(table, plain, ActorConfig(), dp=1, train_batch_size=1, max_response_length=8)
    assert plan.advantages == [0.5, -0.5]
    later = replace(table, token_penalties=[[0.1, 0.1], [0.0, 0.0]])  # rewards 0.8 and 0
    revised = weigh(plan, later, plain, ActorConfig(), max_response_length=8)
    assert revised.advantages == pytest.approx([0.4, -0.4])


def test_overlong_penalty_keeps_the_raw_reward() -> None:
    table = make_table([[(1, 1, 50), (1, 1, 90), (math.nan, 1, 110)]])
    assert with_overlong_penalty(table, OverlongBuffer(), 100) is table
    shaped = with_overlong_penalty(table, OverlongBuffer(len=20, penalty_factor=2.0), 100)
    assert shaped.reward[:2] == [1, 0] and math.isnan(shaped.reward[2])
    assert shaped.raw_reward[:2] == [1, 1]


def test_what_a_method_needs_computed() -> None:
    def needs(algorithm: dict, actor: dict) -> tuple[bool, bool, bool]:
        a, b = AlgorithmConfig.model_validate(algorithm), ActorConfig.model_validate({"use_kl_loss": False} | actor)
        return is_corrected(a, b), needs_old_logprobs(a, b), needs_reference(a, b)

    assert needs({}, {}) == (True, True, False)
    assert needs({"rollout_correction": {"rollout_is": None}}, {}) == (False, True, False)
    assert needs({"source": "file"}, {"loss_mode": "sft"}) == (False, False, False)
    assert needs({"source": "initial"}, {"loss_mode": "sft"}) == (False, False, True)
    assert needs({}, {"loss_mode": "dpo"}) == (False, False, True)
    assert needs({"use_kl_in_reward": True}, {}) == (True, True, True)


def test_which_runs_need_a_pass_for_old_logprobs() -> None:
    """One optimizer step on 16 prompts needs none, unless something reads them before the loss."""

    def reasons(algorithm: dict, actor: dict) -> list[str]:
        a, b = AlgorithmConfig.model_validate(algorithm), ActorConfig.model_validate({"use_kl_loss": False} | actor)
        found = reasons_for_old_pass(a, b, 16)
        assert folds_old_logprobs(a, b, 16) == (needs_old_logprobs(a, b) and not found)
        return [reason.split()[0] for reason in found]

    assert reasons({}, {}) == reasons({}, {"ppo_mini_batch_size": 16}) == []
    assert reasons({"rollout_correction": {"rollout_is": "sequence"}}, {"loss_mode": "gspo"}) == []
    assert reasons({}, {"ppo_mini_batch_size": 15}) == ["2"]
    assert reasons({}, {"ppo_mini_batch_size": 4, "ppo_epochs": 3}) == ["12"]
    assert reasons({"use_kl_in_reward": True}, {}) == ["the"]
    assert reasons({"rollout_correction": {"rollout_rs": "off_policy"}}, {}) == ["rollout_rs=off_policy"]
    assert reasons({"use_kl_in_reward": True}, {"loss_mode": "sft"}) == ["the"]
    likelihood = {"loss_mode": "sft", "ppo_epochs": 3}
    assert reasons({"rollout_correction": {"rollout_rs": "token"}}, likelihood) == []


# -- Aggregation: weights by hand, on the published token losses.
#
# Rows [1, 2] and [3, 4, 5, 6]: token-mean 21/6 = 3.5; means 1.5 and 4.5 -> 3; sums 3 and 18 -> 10.5; / L = 4 -> 2.625.


def aggregate(mode: str, rows: list[list[float]], norm_length: float = 4) -> float:
    weights = token_weights(mode, [len(row) for row in rows], norm_length)
    return math.fsum(weight * value for weight, row in zip(weights, rows, strict=True) for value in row)


@pytest.mark.parametrize(
    ("mode", "both", "first_only"),
    [
        ("token-mean", 3.5, 1.5),
        ("seq-mean-token-mean", 3, 1.5),
        ("seq-mean-token-sum", 10.5, 3),
        ("seq-mean-token-sum-norm", 2.625, 0.75),
        ("token-sum", 21, 3),
    ],
)
def test_published_aggregations(mode: str, both: float, first_only: float) -> None:
    rows: list[list[float]] = [[1, 2], [3, 4, 5, 6]]
    assert aggregate(mode, rows) == pytest.approx(both, abs=1e-12)
    assert aggregate(mode, rows[:1]) == pytest.approx(first_only, abs=1e-12)
    assert aggregate(mode, [[], *rows, []]) == pytest.approx(both, abs=1e-12)  # an empty row counts nowhere
    assert token_weights(mode, [0, 0], 4) == [0.0, 0.0] and token_weights(mode, [], 4) == []


@settings(deadline=None, derandomize=True, max_examples=100)
@given(lengths=st.lists(st.integers(0, 50), max_size=20), norm=st.integers(1, 100))
def test_sums_of_weights(lengths: list[int], norm: int) -> None:
    counted = [n for n in lengths if n]
    total = {
        mode: math.fsum(w * n for w, n in zip(token_weights(mode, lengths, norm), lengths, strict=True))
        for mode in token_weightings.names()
    }
    num_tokens, num_sequences = sum(counted), len(counted)
    assert total["token-mean"] == pytest.approx(1 if counted else 0)
    assert total["seq-mean-token-mean"] == pytest.approx(1 if counted else 0)
    assert total["token-sum"] == pytest.approx(num_tokens)
    if counted:
        assert total["seq-mean-token-sum"] == pytest.approx(num_tokens / num_sequences)
        assert total["seq-mean-token-sum-norm"] == pytest.approx(num_tokens / num_sequences / norm)


# -- The overlong penalty and DUPO's copies by hand --------------------------------------------------------------------
# L = 20480, c = 4096: the penalty begins at 16384; 18432 is half way. Group [1,0,0,1] has advantages +-.8660239; two copies
# of it in one group of eight would have std sqrt(2 / 7) and +-.9354126: a copy must not enter the statistics.


def test_overlong_penalty() -> None:
    penalties = {15000: 0, 16384: 0, 16385: -1 / 4096, 18432: -0.5, 20480: -1, 20481: -1}
    assert {length: overlong_penalty(length, 20480, 4096) for length in penalties} == penalties


def test_copies_fill_the_places_of_equal_groups() -> None:
    a = [1.0, 0.0, 0.0, 1.0]
    groups = [[1.0] * 4, a, [0.1] * 4, [0.0, math.nan, 1.0, 0.0], [0.0] * 4]
    assert dupo_copies(tables.make_table(groups)) == [0] * 4 + [3] * 4 + [0] * 4 + [2] * 4 + [0] * 4
    assert dupo_copies(tables.make_table([[0.3] * 8, [0.9] * 6])) == [0] * 14
    penalised = replace(tables.make_table([[1.0, 0.5], [1.0, 0.5]]), raw_reward=[1.0, 1.0, 1.0, 0.5])
    assert dupo_copies(penalised) == [0, 0, 2, 2]  # two right answers, one of them too long, teach nothing else
    assert tables.run(tables.make_table(groups), "grpo")[4:8] == pytest.approx(
        [0.8660239, -0.8660239, -0.8660239, 0.8660239], abs=1e-6
    )
    assert tables.run(tables.make_table([a + a]), "grpo")[0] == pytest.approx(0.9354126, abs=2e-6)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(groups=st.lists(st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=1, max_size=4), max_size=7))
def test_copies_keep_the_number_of_groups(groups: list[list[float]]) -> None:
    table = tables.make_table(groups)
    copies = dupo_copies(table)
    per_group = [{copies[row] for row in rows} for rows in table.groups()]
    assert all(len(values) == 1 for values in per_group)
    counts = [values.pop() for values in per_group]
    assert [count > 0 for count in counts] == [len(set(group)) > 1 for group in groups]
    kept = [count for count in counts if count]
    assert not kept or (sum(kept) == len(groups) and max(kept) - min(kept) <= 1)
