"""CHORD by hand: mu over the steps, phi's values and gradients, the weights of a batch with rows of an expert.

log p = [log 1/2, log 1/4, 0] with weights [0.1, 0.1, 0]: phi = p (1 - p) = [1/4, 3/16], loss = 0.1 (1/4 log 2 + 3/16 log 4) and
gradient on log p -w phi = [-0.025, -0.01875, 0]. Without phi: 0.1 log 8, and -w.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from grpo_megatron.algo.chord import expert_loss, mix, mixing_weight, with_experts
from grpo_megatron.algo.plan import make_plan, observation_weights
from grpo_megatron.checks.methods import method_problems
from grpo_megatron.config import AlgorithmConfig, Config
from grpo_megatron.config.algorithm import ChordConfig
from grpo_megatron.types import GroupTable, rows_of_mini_batch
from tests.algo.inputs import actor, central_difference


@pytest.mark.parametrize(("step", "expected"), [(0, 0.9), (100, 0.475), (50, 0.05 + 0.425 * (1 + math.sqrt(0.5)))])
def test_mu_follows_a_cosine(step: int, expected: float) -> None:
    chord = ChordConfig(batch_size=1, mu=0.9, mu_end=0.05, mu_steps=200)
    assert mixing_weight(step, chord) == pytest.approx(expected)
    assert mixing_weight(200 + step, chord) == pytest.approx(0.05)
    assert mixing_weight(step, ChordConfig(batch_size=1, mu=0.1)) == 0.1


@pytest.mark.parametrize(("phi", "factors"), [(True, [1 / 4, 3 / 16]), (False, [1.0, 1.0])])
def test_the_loss_of_an_expert(phi: bool, factors: list[float]) -> None:
    logprobs = torch.tensor([[0.5, 0.25, 1.0]], dtype=torch.float64).log().requires_grad_()
    weights = torch.tensor([[0.1, 0.1, 0.0]], dtype=torch.float64)
    loss = expert_loss(logprobs, weights, ChordConfig(batch_size=1, phi=phi))
    loss.backward()
    assert loss.item() == pytest.approx(0.1 * (factors[0] * math.log(2) + factors[1] * math.log(4)))
    gradient = torch.tensor([[-0.1 * factors[0], -0.1 * factors[1], 0.0]], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, gradient)
    fixed = weights * torch.tensor([[*factors, 0.0]], dtype=torch.float64)  # phi has no gradient
    at = logprobs.detach()
    torch.testing.assert_close(central_difference(lambda x: -(fixed * x).sum(), at), gradient)


def test_a_certain_and_an_impossible_token_have_no_gradient() -> None:
    logprobs = torch.tensor([[0.0, -torch.inf]], requires_grad=True)
    weights = torch.tensor([[1.0, 0.0]])
    expert_loss(logprobs, weights, ChordConfig(batch_size=1)).backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [[0.0, 0.0]]


def table(lengths: list[int], rewards: list[float], prompts: list[int]) -> GroupTable:
    count = len(lengths)
    index = [prompts[:row].count(prompt) for row, prompt in enumerate(prompts)]
    return GroupTable(prompts, index, rewards, [5] * count, lengths, [False] * count, [0] * count)


def test_the_weights_of_a_mixed_batch() -> None:
    """2 x 2 samples and 3 rows of an expert in two optimizer steps: rows 4 and 6, then row 5. mu = 0.1.

    Step 1: rows 0, 1 have 0.9 / (2 + 4) per token, rows 4, 6 have 0.1 / (3 + 5). Step 2: 0.9 / (2 + 2), and 0.1 / 4.
    An expert's row has no advantage, and its reward counts nowhere.
    """
    policy = table([2, 4, 2, 2], [1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1])
    policy = GroupTable(**{**vars(policy), "loss_spans": [[(0, 2)], [(0, 3), (3, 4)], [(0, 2)], [(0, 2)]]})
    experts = table([3, 6, 5], [7.0, 7.0, 7.0], [2, 3, 4])
    experts = GroupTable(**{**vars(experts), "loss_spans": [[(0, 3)], [(0, 2), (4, 6)], [(0, 5)]]})
    both = with_experts(policy, experts)
    assert both.of_policy() == policy and math.isnan(both.reward[4]) and both.num_loss_tokens()[4:] == [0, 0, 0]
    options = actor(ppo_mini_batch_size=1, loss_agg_mode="token-mean")
    algorithm = AlgorithmConfig(norm_adv_by_std_in_grpo=False)
    sizes = {"dp": 1, "train_batch_size": 2, "max_response_length": 9}
    plan, weights = mix(make_plan(both, algorithm, options, **sizes), both, 0.1)
    alone = make_plan(policy, algorithm, options, **sizes)
    assert [sorted(rows_of_mini_batch(mini)) for mini in plan.mini_batches[0]] == [[0, 1, 4, 6], [2, 3, 5]]
    assert plan.token_weights == pytest.approx([0.15, 0.15, 0.225, 0.225, 0, 0, 0])
    assert weights == pytest.approx([0, 0, 0, 0, 0.1 / 8, 0.1 / 4, 0.1 / 8])
    assert plan.advantages == [0.5, -0.5, 0.5, -0.5, None, None, None]
    assert plan.metrics["critic/unscorable_ratio"] == alone.metrics["critic/unscorable_ratio"] == 0.0
    assert observation_weights(plan, both, 1.0) == [0.0] * 7  # an expert's text is not the environment's
    rejected = replace(
        both, num_kept_tokens=[2, 4, 0, 0, 0, 0, 0]
    )  # every token of step 2's samples: row 5 still teaches
    plan, weights = mix(make_plan(rejected, algorithm, options, **sizes), rejected, 0.1)
    assert sorted(rows_of_mini_batch(plan.mini_batches[0][1])) == [2, 3, 5] and weights[5] == pytest.approx(0.1 / 4)
    assert plan.token_weights[2:] == [0.0] * 5
    nothing = make_plan(with_experts(table([], [], []), experts), algorithm, options, **sizes)
    assert sorted(rows_of_mini_batch(nothing.mini_batches[0][0])) == [0, 1, 2]  # no group was informative


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actor": {"ppo_mini_batch_size": 4}, "data": {"train_batch_size": 16}}, "3 rows in 4 optimizer steps"),
        ({"actor": {"loss_mode": "dpo"}}, "loss_mode"),
        ({"algorithm": {"adv_estimator": "gae"}}, "adv_estimator"),
    ],
)
def test_what_has_no_place_for_rows_of_an_expert(changes: dict[str, dict[str, object]], message: str) -> None:
    raw: dict[str, object] = {"method": "chord_mu", "model": {"path": "x"}, **changes}
    raw["algorithm"] = {"chord": {"batch_size": 3}, **changes.get("algorithm", {})}
    assert any("chord" in str(one) and message in str(one) for one in method_problems(Config.model_validate(raw)))
