"""Plans of the methods: samples left out, pairs in one micro-batch, copies in every count, and the revised plan."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from grpo_megatron.algo.needs import (
    folds_old_logprobs,
    is_corrected,
    needs_old_logprobs,
    needs_reference,
    reasons_for_old_pass,
)
from grpo_megatron.algo.plan import make_plan, revise_plan
from grpo_megatron.algo.token_weights import dupo_copies, with_overlong_penalty
from grpo_megatron.config import ActorConfig, AlgorithmConfig, OverlongBuffer
from tests.algo.test_plan import make_table, plan_of, rows_of

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
    odd = make_table([[(1, 1, 1), (0, 1, 1)], [(1, 1, 1), (1, 1, 1)], [(0, 1, 1), (0, 1, 1)]])
    assert dupo_copies(odd) == [3, 3, 0, 0, 0, 0]
    nothing = make_table([[(1, 1, 1), (1, 1, 1)]])
    assert dupo_copies(nothing) == [0, 0]
    assert plan_of(nothing, algorithm=AlgorithmConfig(dupo=True)).mini_batches == [[]]


def test_rejected_tokens_leave_every_denominator() -> None:
    table = make_table([[(1, 2, 3), (0, 2, 5)]])
    plan = plan_of(table)
    assert plan.token_weights == [1 / 8, 1 / 8]
    later = replace(table, num_kept_tokens=[1, 3])
    revised = revise_plan(plan, later, AlgorithmConfig(), ActorConfig(), max_response_length=64)
    assert revised.token_weights == [1 / 4, 1 / 4]
    assert revised.mini_batches == plan.mini_batches
    gone = replace(table, num_kept_tokens=[0, 0])  # nothing left: no optimizer step
    assert revise_plan(plan, gone, AlgorithmConfig(), ActorConfig(), max_response_length=64).mini_batches == [[]]


def test_penalties_move_the_advantages_of_the_whole_group() -> None:
    table = make_table([[(1, 2, 2), (0, 2, 2)]])
    plain = AlgorithmConfig(norm_adv_by_std_in_grpo=False)
    plan = make_plan(table, plain, ActorConfig(), dp=1, train_batch_size=1, max_response_length=8)
    assert plan.advantages == [0.5, -0.5]
    later = replace(table, token_penalties=[[0.1, 0.1], [0.0, 0.0]])  # rewards 0.8 and 0
    revised = revise_plan(plan, later, plain, ActorConfig(), max_response_length=8)
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
