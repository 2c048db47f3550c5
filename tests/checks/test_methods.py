"""Combinations of algorithms that could not mean what they say are refused, with the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.checks.methods import method_problems
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.config import Config

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "methods"


def problems(**sections: dict[str, Any]) -> list[str]:
    raw: dict[str, Any] = {"model": {"path": "m"}, "data": {"task": "arithmetic"}, **sections}
    return list(method_problems(Config.model_validate(raw)))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_short_and_sound(path: Path) -> None:
    assert list(method_problems(load_config(path))) == []
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
    "ratio of foreign samples": ({"algorithm": {"source": "initial"}}, "actor.loss_mode=vanilla needs the policy's"),
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
        "set adv_estimator=constant",
    ),
    "pairs for sft": (
        {"algorithm": {"source": "file", "adv_estimator": "best_worst"}, "actor": {"loss_mode": "sft"}},
        "set loss_mode=dpo",
    ),
    "filter of a file": (
        {"algorithm": {"source": "file", "adv_estimator": "constant", "dupo": True}, "actor": {"loss_mode": "sft"}},
        "chooses among drawn groups",
    ),
    "both fillers": (
        {"algorithm": {"dupo": True, "filter_groups": {"enable": True}}},
        "fill the same places",
    ),
    "filter of one": (
        {"algorithm": {"adv_estimator": "reinforce_plus_plus", "dupo": True}, "rollout": {"n": 1}},
        "algorithm.dupo=true compares the samples of a prompt, and rollout.n=1",
    ),
    "rounds of nothing": ({"data": {"gen_batch_size": 8}}, "set algorithm.filter_groups.enable=true"),
    "bound on nothing": ({"algorithm": {"filter_groups": {"max_staleness": 2}}}, "max_staleness=2 bounds the age"),
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
