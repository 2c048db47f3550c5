"""The correction step on real ranks: the same on one rank and on two, over the loss tokens alone."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from grpo_megatron.algo.losses import LossInputs, reasons_for_old_pass
from grpo_megatron.config import ActorConfig, AlgorithmConfig, DataConfig
from grpo_megatron.training.correction import Correction, build_loss, score_norms
from grpo_megatron.types import Prompt, Sample
from tests.worlds import ranks

ALGORITHMS = {
    "weights": {},
    "sequence weights": {"rollout_correction": {"rollout_is": "sequence"}},
    "rejection": {"rollout_correction": {"rollout_rs": "token", "rollout_rs_threshold": 1.5}},
    "KL in the reward": {"adv_estimator": "reinforce_plus_plus", "gamma": 0.9, "use_kl_in_reward": True},
    "both": {
        "use_kl_in_reward": True,
        "kl_ctrl": {"kl_coef": 0.5},
        "rollout_correction": {"rollout_is": "sequence", "rollout_rs": "geometric"},
    },
}


SELECTIONS = {"entropy": {"top_entropy_quantile": 0.4}, "kl_cov": {"loss_mode": "kl_cov", "kl_cov_ratio": 0.2}}


# -- The programs of the ranks -----------------------------------------------------------------------------------------


def draw(num_prompts: int, n: int) -> list[Sample]:
    """Samples whose responses have gaps in the loss mask; only sample (0, 0) has a reward if there is one prompt."""
    samples = []
    for p in range(num_prompts):
        prompt = Prompt(f"t/{p}", (1, 2), "", "", "t", "r")
        for i in range(n):
            rng = random.Random(f"{p}/{i}")
            length = rng.randint(2, 9)
            ids = [rng.randint(0, 99) for _ in range(length)]
            sample = Sample(prompt, p, i, ids, [-rng.random() for _ in ids], "stop", version=0)
            sample.loss_mask = [1] + [int(rng.random() < 0.6) for _ in range(length - 1)]
            # rollout log-probabilities of tokens outside the loss are not read
            sample.rollout_logprobs = [
                logprob if in_loss else 1e3
                for logprob, in_loss in zip(sample.rollout_logprobs, sample.loss_mask, strict=True)
            ]
            if num_prompts > 1 or i == 0:
                sample.reward = rng.choice([0.0, 0.5, 1.0])
            samples.append(sample)
    return samples


def folded(step: Any, batch: Any, mesh: Any) -> dict[str, Any]:
    """The same batch where its old log-probabilities come from the update: the metrics, and what the loss reads."""
    import torch

    from grpo_megatron.config import ActorConfig
    from grpo_megatron.models.forward import loss_inputs
    from grpo_megatron.report.metrics import Metrics
    from grpo_megatron.training.correction import build_loss

    assert step.is_folded
    metrics, old, separate = Metrics(), batch.old_logprobs, batch.correction
    batch.old_logprobs, batch.correction = None, None
    assert step.with_columns(batch, None, metrics) is None
    read: list[Any] = []

    def policy_loss(inputs: Any, actor: Any) -> Any:
        read.append(inputs)
        return inputs.logprobs, {}

    loss = build_loss(ActorConfig(use_kl_loss=False), step.algorithm, policy_loss)
    rows = list(reversed(range(len(batch))))
    loss(loss_inputs(batch, rows, old[rows].requires_grad_(), torch.zeros(old.shape)))
    batch.old_logprobs = old
    step.measure(batch, metrics)
    return {
        "metrics": metrics.reduce(mesh.all_gather),
        "in the loss": torch.equal(read[0].correction[rows], separate) and not read[0].correction.requires_grad,
        "in a dump": torch.equal(batch.correction, separate),
    }


@ranks()
def correct(num_prompts: int, algorithm: dict[str, Any]) -> dict[str, Any]:
    """The plan after the correction step, the reduced metrics, and each local row's tensors at its response tokens."""
    import torch

    from grpo_megatron.algo.plan import assign_rows, observation_weights, weigh
    from grpo_megatron.config import ActorConfig, AlgorithmConfig, DataConfig
    from grpo_megatron.device import Device
    from grpo_megatron.parallel.exchange import apply_observations, apply_plan, exchange, gather_groups
    from grpo_megatron.parallel.mesh import build_mesh
    from grpo_megatron.report.metrics import Metrics
    from grpo_megatron.training.correction import Correction

    mesh = build_mesh(Device("cpu"), tp=1, pp=1, rollout_tp=1)
    samples = draw(num_prompts, 3)
    held = samples[mesh.rank :: mesh.world_size]
    config, actor = AlgorithmConfig.model_validate(algorithm), ActorConfig(use_kl_loss=False)
    table = gather_groups(held, mesh)
    plan = assign_rows(table, config, actor, dp=mesh.dp, train_batch_size=num_prompts)
    batch = exchange(held, table, plan, mesh)
    width = batch.response_mask.shape[1]
    responses = torch.zeros(len(batch), width)
    for i, (tokens, prompt_length) in enumerate(zip(batch.tokens, batch.prompt_lengths, strict=True)):
        responses[i, : len(tokens) - prompt_length] = tokens[prompt_length:].float()
    batch.old_logprobs = torch.where(batch.response_mask, -(1 + responses.sin()), 0.0)
    batch.ref_logprobs = torch.where(batch.response_mask, -(1 + responses.cos()), 0.0)
    metrics = Metrics()
    step = Correction(config, actor, mesh, DataConfig(train_batch_size=num_prompts, max_response_length=9))
    table = step.with_columns(batch, table, metrics)
    plan = weigh(plan, table, config, actor, max_response_length=9)
    apply_plan(batch, plan, mesh.dp_rank)
    columns = {"loss_mask": batch.loss_mask, "advantages": batch.advantages, "token_weights": batch.token_weights}
    if batch.correction is not None:
        columns["correction"] = batch.correction
    batch.old_entropy = batch.old_logprobs.abs()
    for kind, rule in SELECTIONS.items():
        step.select(batch, actor.model_copy(update=rule))
        columns[f"selected by {kind}"], batch.selected = batch.selected, None
    apply_observations(batch, table, observation_weights(plan, table, 0.5))
    assert batch.observation_weights is not None and not (batch.observation_weights * batch.loss_mask).any()
    result = {
        "observed": {row: batch.observation_weights[i].tolist() for i, row in enumerate(batch.rows)},
        "rows": {
            row: {name: column[i][batch.response_mask[i]].tolist() for name, column in columns.items()}
            for i, row in enumerate(batch.rows)
        },
        "advantages": plan.advantages,
        "token_weights": plan.token_weights,
        "num_mini_batches": len(plan.mini_batches[0]),
        "metrics": metrics.reduce(mesh.all_gather),
        "spans": [table.spans_of(row) for row in range(len(table))],
    }
    if step.is_folded:
        result["folded"] = folded(step, batch, mesh)
    return result


# -- Tests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_ranks_do_what_one_does_and_tokens_outside_the_loss_get_nothing(name: str) -> None:
    algorithm = ALGORITHMS[name]
    (alone,) = correct(1, num_prompts=4, algorithm=algorithm)
    both = correct(2, num_prompts=4, algorithm=algorithm)
    samples = draw(4, 3)
    assert sorted(row for result in both for row in result["rows"]) == list(range(len(samples)))
    for result in both:
        assert result["token_weights"] == alone["token_weights"]
        assert result["advantages"] == alone["advantages"]
        assert result["metrics"] == pytest.approx(alone["metrics"], rel=1e-6, nan_ok=True)
        for row, columns in result["rows"].items():
            assert columns == alone["rows"][row]
            for t, in_loss in enumerate(samples[row].loss_mask):
                if not in_loss:
                    assert all(values[t] == 0 for values in columns.values())
    assert all(math.isfinite(value) for value in alone["metrics"].values())
    assert ("folded" in alone) == (name in ("weights", "sequence weights"))
    if "folded" in alone:
        for result in (alone, *both):
            assert result["folded"] == {"metrics": result["metrics"], "in the loss": True, "in a dump": True}
    assert alone["metrics"]["training/rollout_logp_diff_max"] < 3  # 1e3 stands outside the loss

    if name == "KL in the reward":  # the mean over samples of the mean of old - ref over their loss tokens
        kl = [
            math.fsum(math.cos(token) - math.sin(token) for token in tokens) / len(tokens)
            for sample in samples
            if (tokens := [t for t, in_loss in zip(sample.response_ids, sample.loss_mask, strict=True) if in_loss])
        ]
        assert alone["metrics"]["actor/reward_kl_penalty"] == pytest.approx(math.fsum(kl) / len(kl), rel=1e-5)

    observed = {row: weights for result in both for row, weights in result["observed"].items()}
    for row, sample in enumerate(samples):  # every token outside the loss, on both ranks together
        outside = [int(not in_loss) for in_loss in sample.loss_mask]
        share = 0.5 / sum(one.loss_mask.count(0) for one in samples)
        for of_row in (observed[row], alone["observed"][row]):
            assert of_row[: len(outside)] == pytest.approx([share * one for one in outside], rel=1e-6)
    counted = sum(sum(columns["loss_mask"]) for columns in alone["rows"].values())
    for kind, count in (("entropy", math.ceil(0.4 * counted)), ("kl_cov", int(0.2 * counted))):  # of the whole step
        chosen = sum(sum(columns[f"selected by {kind}"]) for columns in alone["rows"].values())
        assert chosen == count > 1, kind
    kept = sum(sum(columns["loss_mask"]) for columns in alone["rows"].values())
    total = sum(sum(sample.loss_mask) for sample in samples)
    assert kept < total if "rollout_rs" in algorithm.get("rollout_correction", {}) else kept == total
    weights = [weight for columns in alone["rows"].values() for weight in columns["token_weights"]]
    assert math.fsum(weights) == pytest.approx(1)  # token-mean over what is kept


def test_the_old_policy_of_a3po_lies_between_the_engines_and_the_current_one() -> None:
    """Ages 0, 1, 3: shares 0, 1/2, 3/4 of log pi - log mu = .4: ratios e^.4, e^.2, e^.1 and weights 1, e^.2, e^.3."""
    mixed = {"prox_logp_method": "loglinear", "rollout_is_threshold": 1.3}
    algorithm = AlgorithmConfig(rollout_correction=mixed)  # type: ignore[arg-type]
    actor = ActorConfig(ppo_mini_batch_size=2, use_kl_loss=False, clip_ratio_c=None)
    assert reasons_for_old_pass(algorithm, actor, 4) == []
    logprobs, ones = torch.full((1, 3), -1.0), torch.ones(1, 3)
    columns = {"logprobs": logprobs, "entropy": logprobs, "old_logprobs": logprobs, "rollout_logprobs": logprobs - 0.4}
    ages = torch.tensor([[0.0, 1.0, 3.0]])
    inputs = LossInputs(**columns, ref_logprobs=None, advantages=ones, mask=ones.bool(), token_weights=ones, ages=ages)
    loss, _ = build_loss(actor, algorithm)(inputs)
    expected = 1.2 + math.exp(0.2) * 1.2 + 1.3 * math.exp(0.1)  # e^.2 = 1.2214 is above the clip, e^.3 above C
    assert loss.item() == pytest.approx(-expected, rel=1e-6)


@pytest.mark.parametrize("mini_batch", [4, 2])
def test_the_ratio_to_the_engines_probabilities_needs_no_old_ones(mini_batch: int) -> None:
    """`bypass_mode`: rho = pi / mu, here e^(0.5 - 0.25 t). One update per step still measures pi_old against mu."""
    algorithm = AlgorithmConfig(rollout_correction={"bypass_mode": True, "rollout_is": None})  # type: ignore[arg-type]
    actor = ActorConfig(ppo_mini_batch_size=mini_batch, use_kl_loss=False, clip_ratio_c=None)
    step = Correction(algorithm, actor, None, DataConfig(train_batch_size=4))  # type: ignore[arg-type]
    assert reasons_for_old_pass(algorithm, actor, 4) == [] and step.is_folded == (mini_batch == 4)
    logprobs, mask = torch.full((1, 4), -1.0), torch.ones(1, 4, dtype=torch.bool)
    mu = torch.tensor([[-1.5, -1.25, -1.0, -0.75]])
    columns = {"logprobs": logprobs, "entropy": logprobs, "old_logprobs": logprobs, "rollout_logprobs": mu}
    ones = torch.ones(1, 4)
    inputs = LossInputs(**columns, ref_logprobs=None, advantages=ones, mask=mask, token_weights=ones)
    loss, _ = build_loss(actor, algorithm)(inputs)
    assert loss.item() == pytest.approx(-(1.2 + 1.2 + 1.0 + math.exp(-0.25)))  # clipped at 1.2


def test_a_rank_without_a_row_joins_the_exchange_of_kept_tokens() -> None:
    """One trainable sample on two ranks: the second rank has nothing to reject, and must not skip the collective."""
    algorithm = ALGORITHMS["rejection"]
    first, second = correct(2, timeout_s=60, num_prompts=1, algorithm=algorithm)
    assert list(first["rows"]) == [0] and second["rows"] == {}
    assert first["token_weights"] == second["token_weights"]
    assert first["num_mini_batches"] == second["num_mini_batches"]


def test_norms_are_above_0_where_rounding_is_larger_than_they_are() -> None:
    """p = (3/4, 1/4): 1 - 3/2 + 10/16 = 1/8. At p = 1 - 2^-24 a float32 sum of squares 1 - 2^-23 - 2^-24 leaves -2^-24."""
    squares = torch.tensor([0.625, 1 - 2**-23 - 2**-24])
    norms = score_norms(torch.tensor([0.75, 1 - 2**-24]).log(), squares).tolist()
    assert norms == [pytest.approx(0.125), 2**-23]
