"""rollout.top_k, top_p and min_p in training, beside the definition in float64 on transformers' model.

For the logits z of a response token at temperature T, from the weights that sampled it:

    A = {v: p_v >= min_p max p},  p = softmax(z / T);   B = the top_k likeliest of A;
    C = the fewest likeliest of B whose p, renormalised over B, sums to top_p or more;
    log-probability of y = log softmax over C (z / T)[y], for the engine, the policy and the reference (whose z is its own).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import grpo_megatron
from grpo_megatron.parallel.exchange import flat_ids, split_ids
from grpo_megatron.sampling.collector import pack_sample, unpack_sample
from tests.e2e import run_ranks, test_roles
from tests.worlds import ranks

TEMPERATURE, TOP_K, TOP_P, MIN_P = 0.7, 12, 0.6, 0.1
SETTINGS = [
    *(
        f"rollout.temperature={TEMPERATURE}",
        f"rollout.top_k={TOP_K}",
        f"rollout.top_p={TOP_P}",
        f"rollout.min_p={MIN_P}",
    ),
    *("reward.function=tests.e2e.rewards:odd_reward", "actor.optim.lr=0.05", "actor.entropy_coeff=0.01"),
    *("actor.ppo_epochs=1", "actor.ppo_mini_batch_size=6", "actor.ppo_max_token_len_per_gpu=1000"),
]


@ranks(2)
def two_steps(file: Path, settings: list[str]) -> list[dict[str, Any]]:
    """The numbers of a batch of each step, and the weights that sampled it."""
    steps = []
    with grpo_megatron.open(file, [*SETTINGS, *settings]) as run:
        for start in (0, 6):
            weights = {name: tensor.clone() for bucket in run.policy.hf_weights(1) for name, tensor in bucket}
            samples = run.sample(run.prompts[start : start + 6])
            batch = run.batch(samples)
            assert batch.kept is not None and batch.ref_logprobs is not None
            old = run.policy.logprobs(batch)
            again = [unpack_sample(pack_sample(sample)) for sample in samples]
            for one, other in zip(samples, again, strict=True):
                assert [ids.tolist() for ids in one.kept] == [ids.tolist() for ids in other.kept]  # type: ignore[union-attr]
            metrics = run.forward_backward(batch) | run.optim_step()
            steps.append(
                {
                    "weights": weights,
                    "metrics": metrics,
                    "rows": list(zip(batch.tokens, batch.prompt_lengths, batch.kept, strict=True)),
                    "loss_mask": batch.loss_mask,
                    "rollout": batch.rollout_logprobs,
                    "old": old,
                    "ref": batch.ref_logprobs,
                    "squares": batch.squares,
                }
            )
    return steps


def definition(logits: torch.Tensor) -> list[int]:
    """The ids C, best first, of logits [V] over the temperature."""
    p = logits.softmax(0)
    order = [v for v in p.argsort(descending=True).tolist() if p[v] >= MIN_P * p.max()][:TOP_K]
    q, total = p[order] / p[order].sum(), 0.0
    for count, share in enumerate(q.tolist(), start=1):
        total += share
        if total >= TOP_P:
            return order[:count]
    return order


def test_counts_and_ids_in_one_column() -> None:
    """[3, 0, 1] ids, and no token at all: the counts end where they sum to what is left."""
    sets = [np.array([7, 0, 5], dtype=np.int32), np.empty(0, dtype=np.int32), np.array([9], dtype=np.int32)]
    assert flat_ids(sets).tolist() == [3, 0, 1, 7, 0, 5, 9]
    assert [ids.tolist() for ids in split_ids(flat_ids(sets))] == [[7, 0, 5], [], [9]]  # type: ignore[union-attr]
    assert split_ids(flat_ids([])) == [] and len(split_ids(flat_ids(sets[1:2] * 3))) == 3


@pytest.mark.parametrize(
    ("engine", "settings"),
    [
        pytest.param(
            "transformers",
            [
                "actor.megatron.tensor_model_parallel_size=2",
                "actor.share_prompts=true",
                "algorithm.adv_estimator=optimal_token_baseline",
            ],
            marks=pytest.mark.soak,
        ),
        ("transformers", ["model.exact=true"]),
        pytest.param(
            "vllm",
            [
                "actor.megatron.tensor_model_parallel_size=2",
                "rollout.tensor_model_parallel_size=2",
                "rollout.stop=['7']",
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["transformers", "exact", "vllm"],
)
def test_engine_policy_and_reference_have_the_definition(
    workspace: Path, tmp_path: Path, engine: str, settings: list[str]
) -> None:
    """Errors are below 1e-5, where a softmax over all ids is off by 0.3 on average. Exact: engine and policy, to the bit."""
    raw = run_ranks.settings(workspace, tmp_path / "out", 2)
    raw["rollout"] |= {"engine": engine} if engine == "vllm" else test_roles.TRANSFORMERS
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
    results = two_steps(file=tmp_path / "run.yaml", settings=settings)
    reference, policy = (
        AutoModelForCausalLM.from_pretrained(workspace / "model", dtype=torch.float64) for _ in range(2)
    )
    sizes, errors, off = [], [], []
    for step, batch in [(number, batch) for steps in results for number, batch in enumerate(steps)]:
        policy.load_state_dict(batch["weights"], strict=False)
        for row, (tokens, prompt, column) in enumerate(batch["rows"]):
            sets = split_ids(column.numpy())
            with torch.no_grad():
                logits, of_reference = (
                    model(tokens[None]).logits[0, prompt - 1 : -1] / TEMPERATURE for model in (policy, reference)
                )
            for t, token in enumerate(tokens[prompt:].tolist()):
                ids = definition(logits[t])
                assert sets[t] is not None and sorted(sets[t].tolist()) == sorted(ids)
                want, place = logits[t, ids].log_softmax(0), ids.index(token)
                of_ref = of_reference[t, ids].log_softmax(0)[place]
                found = [float(batch[name][row, t]) for name in ("rollout", "old", "ref")]
                errors += [abs(a - float(b)) for a, b in zip(found, (want[place], want[place], of_ref), strict=True)]
                if batch["squares"] is not None:
                    errors.append(abs(float(batch["squares"][row, t]) - float((2 * want).exp().sum())))
                off.append(float(want[place] - logits[t].log_softmax(0)[token]))
                sizes.append(len(ids))
                assert "exact" not in str(settings) or found[0] == found[1]
        assert batch["metrics"]["actor/kl_loss"] > 1e-4 or step == 0
    assert max(errors) < 1e-5 and sum(off) / len(off) > 0.3
    assert len(set(sizes)) > 3 and max(sizes) <= TOP_K
