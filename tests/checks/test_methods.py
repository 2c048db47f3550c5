"""Combinations of algorithms that could not mean what they say are refused, with the remedy.

A user's own functions are checked by the facts that they declare, like the registered ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from grpo_megatron.algo.advantages import Advantages, advantage_estimators
from grpo_megatron.algo.losses import (
    LossInputs,
    LossMetrics,
    is_corrected,
    needs_old_logprobs,
    policy_losses,
    reads_reference,
)
from grpo_megatron.checks.methods import method_problems, sharing_problems
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import ActorConfig, AlgorithmConfig, Config
from grpo_megatron.types import GroupTable
from tests.runs import texts

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "methods"


def problems(**sections: dict[str, Any]) -> list[str]:
    raw: dict[str, Any] = {"model": {"path": "m"}, "data": {"task": "arithmetic"}, **sections}
    return texts(method_problems(Config.model_validate(raw)))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_short_and_sound(path: Path) -> None:
    assert texts(method_problems(load_config(path))) == []
    assert len(path.read_text().splitlines()) <= 30


DPO = {"loss_mode": "dpo", "loss_agg_mode": "seq-mean-token-mean"}
CASES = {
    "group of one": ({"rollout": {"n": 1}}, "rollout.n=1: algorithm.adv_estimator='grpo'"),
    "remax on a file": (
        {"algorithm": {"adv_estimator": "remax", "source": "file"}, "actor": {"loss_mode": "sft"}},
        "needs a greedy response to every prompt",
    ),
    "steps of an outcome": (
        {"algorithm": {"adv_estimator": "grpo_process"}},
        "set reward.function to arithmetic_steps",
    ),
    "sequence loss by tokens": ({"actor": {"loss_mode": "gspo"}}, "set loss_agg_mode=seq-mean-token-mean"),
    "dpo without pairs": ({"actor": DPO}, "actor.loss_mode=dpo needs pairs"),
    "half a pair": (
        {"actor": {**DPO, "ppo_micro_batch_size_per_gpu": 1}, "algorithm": {"adv_estimator": "best_worst"}},
        "has no room for a pair",
    ),
    "a pair too long": (
        {"actor": {**DPO, "ppo_max_token_len_per_gpu": 4000}, "algorithm": {"adv_estimator": "best_worst"}},
        "2 x (data.max_prompt_length + data.max_response_length) = 6144",
    ),
    "guard of a KL that is not computed": (
        {"guards": {"kl": {"high": 1.0}}, "actor": {"use_kl_loss": False}},
        "guards.kl.high=1 has no effect with actor.use_kl_loss=false; set actor.use_kl_loss=true",
    ),
    "guard of a KL of coefficient 0": (
        {"guards": {"kl": {"high": 1.0}}, "actor": {"kl_loss_coef": 0}},
        "guards.kl.high=1 has no effect with actor.kl_loss_coef=0; set actor.kl_loss_coef above 0",
    ),
    "guard of a gap that is not computed": (
        {
            "guards": {"rollout_gap": {"high": 1.0}},
            "actor": {"loss_mode": "sft"},
            "algorithm": {"source": "initial", "adv_estimator": "rft"},
        },
        "guards.rollout_gap.high=1 has no effect with actor.loss_mode=sft and algorithm.use_kl_in_reward=false",
    ),
    "ratio of foreign samples": (
        {"algorithm": {"source": "initial"}},
        "actor.loss_mode=vanilla is only for those; set loss_mode=dpo or sft",
    ),
    "two starts": (
        {"algorithm": {"source": "initial"}, "actor": {"loss_mode": "sft"}, "ref": {"path": "other"}},
        "ref.path names another",
    ),
    "replay of others": (
        {"algorithm": {"source": "initial", "replay": {"ratio": 0.5}}, "actor": {"loss_mode": "sft"}},
        "keeps samples of the policy",
    ),
    "rewards of a file": (
        {"algorithm": {"source": "file"}, "actor": {"loss_mode": "sft"}},
        "set adv_estimator=constant (SFT), or best_worst with actor.loss_mode=dpo",
    ),
    "pairs for sft": (
        {"algorithm": {"source": "file", "adv_estimator": "best_worst"}, "actor": {"loss_mode": "sft"}},
        "set loss_mode=dpo",
    ),
    "filter of a file": (
        {"algorithm": {"source": "file", "adv_estimator": "constant", "dupo": True}, "actor": {"loss_mode": "sft"}},
        "chooses among drawn groups",
    ),
    "temperature of a file": (
        {
            "algorithm": {"source": "file", "adv_estimator": "constant"},
            "actor": {"loss_mode": "sft"},
            "rollout": {"temperature": 0.7},
        },
        "rollout.temperature=0.7 would also divide the logits of the training",
    ),
    "both fillers": (
        {"algorithm": {"dupo": True, "filter_groups": {"enable": True}}},
        "fill the same places",
    ),
    "filter of one": (
        {"algorithm": {"adv_estimator": "reinforce_plus_plus", "dupo": True}, "rollout": {"n": 1}},
        "algorithm.dupo=true compares the samples of a prompt, and rollout.n=1",
    ),
    "partial rollouts of others": (
        {
            "algorithm": {"source": "initial"},
            "actor": {"loss_mode": "sft"},
            "rollout": {"partial": {"over_sample": 1.5}},
        },
        "rollout.partial.over_sample=1.5 goes on under newer weights, and algorithm.source=initial has none",
    ),
    "partial rollouts that cut nothing": (
        {"rollout": {"partial": {"over_sample": 1.5, "chunk_tokens": 2048}}},
        "chunk_tokens=2048 is not less than data.max_response_length=2048",
    ),
    "partial rollouts as the policy's own": (
        {"rollout": {"partial": {"over_sample": 1.5}}, "algorithm": {"rollout_correction": {"rollout_is": None}}},
        "trains on tokens of up to 2 earlier steps",
    ),
    "partial rollouts of several turns": (
        {"rollout": {"partial": {"over_sample": 1.5}, "multi_turn": {"environment": "tools", "tools": ["calculator"]}}},
        "cannot wait for a later step",
    ),
    "partial rollouts that are off": (
        {"rollout": {"partial": {"max_staleness": 3}}},
        "rollout.partial.max_staleness=3 has no effect with rollout.partial.over_sample=1",
    ),
    "rounds of nothing": ({"data": {"gen_batch_size": 8}}, "set algorithm.filter_groups.enable=true"),
    "bound on nothing": (
        {"algorithm": {"filter_groups": {"max_staleness": 2}}},
        "max_staleness=2 has no effect with algorithm.filter_groups.enable=false",
    ),
    "less than one group": (
        {"data": {"train_batch_size": 4}, "algorithm": {"replay": {"ratio": 0.2}}},
        "set it to 0.25 or more",
    ),
    "all overlong": ({"reward": {"overlong_buffer": {"len": 4096}}}, "more than data.max_response_length=2048"),
    "unseen penalty": (
        {"algorithm": {"adv_estimator": "rft", "use_kl_in_reward": True}},
        "algorithm.use_kl_in_reward=true has no effect",
    ),
    "nothing to renew": (
        {"algorithm": {"iteration_steps": 5}, "actor": {"use_kl_loss": False}},
        "this run has neither",
    ),
    "one iteration": ({"algorithm": {"iteration_steps": 100}}, "set it to 50 or less"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_with_the_reason(name: str) -> None:
    sections, message = CASES[name]
    found = problems(**sections)
    assert len(found) == 1 and message in found[0], found


def test_the_defaults_are_sound() -> None:
    assert problems() == []


# -- the user's own functions -----------------------------------------------------------------------------------------


@policy_losses.declare(
    is_likelihood=True, paired=True, needs_reference=True, aggregation=("seq-mean-token-mean", "seq-mean-token-sum")
)
def preference_loss(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    raise NotImplementedError


def undeclared_loss(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, LossMetrics]:
    raise NotImplementedError


@advantage_estimators.declare(compares_group=True, makes_pairs=True, ignores_token_penalties=True)
def pairs(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    raise NotImplementedError


@advantage_estimators.declare(needs_rewards=False)
def without_rewards(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    raise NotImplementedError


@advantage_estimators.declare(needs_step_rewards=True, needs_greedy_reward=True)
def steps_over_greedy(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    raise NotImplementedError


def undeclared_estimator(table: GroupTable, config: AlgorithmConfig) -> Advantages:
    raise NotImplementedError


def own(function: object) -> str:
    return f"{__name__}:{function.__name__}"  # type: ignore[attr-defined]


PREFERENCE = {"loss_mode": own(preference_loss), "loss_agg_mode": "seq-mean-token-sum"}
OWN_CASES = {
    "group of one": (
        {"rollout": {"n": 1}, "algorithm": {"adv_estimator": own(pairs)}},
        "compares the samples of a prompt with each other",
    ),
    "loss by tokens": (
        {"actor": {"loss_mode": own(preference_loss)}, "algorithm": {"adv_estimator": own(pairs)}},
        "set loss_agg_mode=seq-mean-token-mean or seq-mean-token-sum",
    ),
    "loss without pairs": ({"actor": PREFERENCE}, "needs pairs, and algorithm.adv_estimator='grpo' makes none"),
    "no room for a pair": (
        {"actor": {**PREFERENCE, "ppo_micro_batch_size_per_gpu": 1}, "algorithm": {"adv_estimator": own(pairs)}},
        "has no room for a pair",
    ),
    "rewards of a file": (
        {
            "algorithm": {"source": "file", "adv_estimator": own(undeclared_estimator)},
            "actor": {"loss_mode": "sft"},
        },
        "reads responses without rewards",
    ),
    "pairs for sft": (
        {"algorithm": {"source": "file", "adv_estimator": own(pairs)}, "actor": {"loss_mode": "sft"}},
        "reads pairs",
    ),
    "ratio of foreign samples": (
        {"algorithm": {"source": "initial"}, "actor": {"loss_mode": own(undeclared_loss)}},
        "is only for those",
    ),
    "steps of an outcome": (
        {"algorithm": {"adv_estimator": own(steps_over_greedy)}},
        "needs rewards of single steps, and the reward 'arithmetic' gives one",
    ),
    "unseen penalty": (
        {"algorithm": {"adv_estimator": own(pairs), "use_kl_in_reward": True}, "actor": PREFERENCE},
        "algorithm.use_kl_in_reward=true has no effect",
    ),
}


@pytest.mark.parametrize("name", OWN_CASES)
def test_the_users_own_functions_are_checked_by_their_facts(name: str) -> None:
    sections, message = OWN_CASES[name]
    found = problems(**sections)
    assert len(found) == 1 and message in found[0], found


@pytest.mark.parametrize(
    "sections",
    [
        {"algorithm": {"adv_estimator": own(pairs)}, "actor": PREFERENCE},
        {"algorithm": {"adv_estimator": own(pairs), "source": "file"}, "actor": PREFERENCE},
        {"algorithm": {"adv_estimator": own(without_rewards), "source": "file"}, "actor": {"loss_mode": "sft"}},
        {"algorithm": {"adv_estimator": own(undeclared_estimator)}, "actor": {"loss_mode": own(undeclared_loss)}},
        {"rollout": {"n": 1}, "algorithm": {"adv_estimator": own(undeclared_estimator), "use_kl_in_reward": True}},
        {
            "algorithm": {"adv_estimator": "no.such:function"},
            "actor": {"loss_mode": "no.such:loss"},
        },  # `names` reports them
    ],
)
def test_what_fits_is_accepted(sections: dict[str, Any]) -> None:
    assert problems(**sections) == []


def test_the_trainer_reads_the_same_facts() -> None:
    algorithm = AlgorithmConfig(rollout_correction={"rollout_is": "token"})  # type: ignore[arg-type]
    plain, preference = (
        ActorConfig(use_kl_loss=False, loss_mode=own(loss)) for loss in (undeclared_loss, preference_loss)
    )
    for need, expected in ((is_corrected, True), (needs_old_logprobs, True), (reads_reference, False)):
        assert need(algorithm, plain) is expected
        assert need(algorithm, preference) is not expected


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"actor": {"megatron": {"context_parallel_size": 2}}}, "context_parallel_size=2 cuts every sequence"),
        ({}, "transformer_impl=auto may take Transformer Engine's"),
        (
            {"actor": {"loss_mode": "dpo", "megatron": {"transformer_impl": "local"}}},
            "the pairs of actor.loss_mode=dpo",
        ),
        ({"trainer": {"device": "cpu"}, "algorithm": {"adv_estimator": "gae"}}, "not made for the critic"),
        ({"trainer": {"device": "cpu"}}, None),
        ({"actor": {"megatron": {"transformer_impl": "local"}}}, None),
    ],
)
def test_what_cannot_share_prompts(sections: dict[str, Any], message: str | None) -> None:
    raw = {"model": {"path": "m"}, **sections, "actor": {**sections.get("actor", {}), "share_prompts": True}}
    found = texts(sharing_problems(Config.model_validate(raw), None))
    assert len(found) == (message is not None) and all(message in problem for problem in found)
    raw["actor"]["share_prompts"] = False
    assert texts(sharing_problems(Config.model_validate(raw), None)) == []
