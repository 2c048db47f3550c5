"""A probe's bound: fixed where the config says so, else relative to the healthy probes of the same model.

Provenance: samples of other weights than those of their step's sync are refused, through a resume, too.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_megatron.parallel.mesh import RankError
from grpo_megatron.report.metrics import Metrics
from grpo_megatron.sync.attest import Probe, Provenance, logprobs_problem, weights_problem
from grpo_megatron.sync.digest import Expected
from grpo_megatron.types import Sample, Segment
from tests import tiny, worlds
from tests.distributed.sync_ranks import build
from tests.fakes import LoneMesh, prompt
from tests.models.policies import loss
from tests.models.test_moe import MODELS
from tests.tiny import make_batch, make_sequences


def probe(dtype: str = "bfloat16", tolerance: float | None = None) -> Probe:
    return Probe(101, 128, dtype=dtype, tolerance=tolerance)


def difference(mean: float) -> torch.Tensor:
    return torch.tensor([[mean, -mean]])


def test_later_probes_are_held_to_the_healthy_ones() -> None:
    made = probe()
    for mean in (0.011, 0.012, 0.014, 0.018, 0.025, 0.04):  # growing weights: a bfloat16 forward rounds more
        assert made.problem("policy", difference(mean), is_attested=False) is None
    problem = str(made.problem("policy", difference(0.11), is_attested=False))
    assert "by 0.11 on average (at most 0.11)" in problem and "more than 2.5 times that of healthy" in problem
    assert made.problem("policy", difference(0.09), is_attested=False) is None  # a wrong probe is not remembered
    assert made.problem("policy", difference(0.44), is_attested=True) is None  # proven weights: 5 times
    assert made.problem("policy", difference(2.3), is_attested=True)
    made = probe()
    for mean in (0.02, *[0.004] * 8):  # old ones are forgotten
        assert made.problem("policy", difference(mean), is_attested=False) is None
    assert made.problem("policy", difference(0.011), is_attested=False)  # 2.5 * 0.004
    assert made.problem("policy", difference(0.009), is_attested=False) is None


def test_a_model_that_is_not_finite_is_blamed_itself() -> None:
    """Not the sync: the message has the step, the first tensor and the cause."""
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    assert weights_problem("policy", 4, [], is_first=False) is None
    problem = str(weights_problem("policy", 4, names, is_first=False))
    assert problem.startswith("step 4: the policy's own weights are not finite: model.embed_tokens.weight (and 1 more)")
    assert "the update of step 3 was too large" in problem and "actor.optim.lr" in problem
    assert "model.norm.weight. No sync was made: they were loaded so" in str(
        weights_problem("reference", 0, names[1:], is_first=True)
    )
    assert logprobs_problem("policy", torch.zeros(3)) is None
    problem = str(logprobs_problem("policy", torch.tensor([0.0, float("nan"), float("inf")])))
    assert problem.startswith("the policy's own log-probabilities are not finite for 2 of 3 fixed tokens")


@pytest.mark.parametrize(
    ("dtype", "attested", "bound"),
    [
        ("bfloat16", False, 0.03),
        ("bfloat16", True, 0.1),
        ("float32", False, 1e-4),
        ("fp8", False, 1.0),
        ("fp8", True, 1.0),
    ],
)
def test_a_first_probe_has_an_absolute_bound(dtype: str, attested: bool, bound: float) -> None:
    made = probe(dtype)
    assert made.problem("policy", difference(0.5 * bound), is_attested=attested) is None
    assert made.problem("reference", difference(1.1 * bound), is_attested=attested)  # another model: a first probe
    assert made.problem("reference", difference(float("nan")), is_attested=attested)


def test_a_tolerance_of_the_config_is_absolute() -> None:
    made = probe(tolerance=0.3)
    for mean in (0.001, 0.29):
        assert made.problem("policy", difference(mean), is_attested=False) is None
    assert "more than rollout.probe_tolerance=0.3:" in str(made.problem("policy", difference(0.31), is_attested=False))


def small_faults(weights: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Fault -> the tensors that differ from the right ones: each taken from another layer or expert."""
    layer = "model.layers.{}.{}.weight".format
    faults = {"norm": {layer(1, "input_layernorm"): weights[layer(2, "input_layernorm")]}}
    if layer(1, "self_attn.v_proj").replace("weight", "bias") in weights:
        bias = "model.layers.{}.self_attn.v_proj.bias".format
        faults["bias"] = {bias(1): weights[bias(2)]}
    expert = "model.layers.1.mlp.experts.{}.{}_proj.weight".format
    if expert(0, "up") in weights:
        faults["expert"] = {expert(0, kind): weights[expert(5, kind)] for kind in ("gate", "up", "down")}
        faults["q norm"] = {layer(1, "self_attn.q_norm"): weights[layer(2, "self_attn.q_norm")]}
    return faults


@worlds.ranks(1)
def healthy_and_faulty(folder: Path) -> dict[str, str]:
    """Real engine and policy in bfloat16, without attestation: healthy probes, small faults, and many syncs with updates.

    Returns the error of each fault. A false alarm raises.
    """
    _, policy, engine, colocation = build(folder, 1, 1, False, 1, lr=3e-3, dtype="bfloat16")
    engine.digests = lambda: None
    real, errors, versions = policy.engine_weights, {}, itertools.count()

    def sync() -> None:
        with colocation.rollout(next(versions), Metrics()):
            pass

    for _ in range(3):
        sync()
    weights = {name: tensor for bucket in policy.hf_weights() for name, tensor in bucket}
    for name, wrong in small_faults(weights).items():
        policy.engine_weights = lambda weight_sync, version, wrong=wrong: (
            [(n, wrong.get(n, t)) for n, t in bucket] for bucket in real(weight_sync, version)
        )
        with pytest.raises(RankError) as error:
            sync()
        errors[name] = str(error.value)
    policy.engine_weights = real
    batch = make_batch(make_sequences(6), [[list(range(6))]])
    for _ in range(6):
        sync()
        policy.update(batch, loss)
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", pytest.param("qwen3_moe", marks=pytest.mark.soak)])
def test_one_wrong_small_tensor_is_noticed_without_attestation(family: str, tmp_path: Path) -> None:
    folder = tiny.make_model(tmp_path, "qwen2" if family == "qwen2" else "llama2", **MODELS.get(family, {}))
    [errors] = healthy_and_faulty(folder=folder)
    assert len(errors) >= 2
    assert all("the engine does not hold that model's weights" in text for text in errors.values()), errors


# -- provenance --------------------------------------------------------------------------------------------------------


def sent(digest: str) -> Expected:
    return Expected({}, digest, [])


def provenance() -> Provenance:
    made = Provenance(LoneMesh(), max_staleness=2)
    for version in range(6):
        made.record(version, sent(f"weights {version}"))
    return made


def sample(version: int, digest: str) -> Sample:
    return Sample(prompt(3), 0, 1, [5], [-0.1], "stop", version, weights_digest=digest)


def test_a_sample_must_be_of_the_weights_of_its_version() -> None:
    """So must every part of a response of rollout.partial: tokens of step 3, then of step 5. A step's last sync counts."""

    def drawn(digest: str) -> Sample:
        draws = [Segment(0, 1, 3, "weights 3"), Segment(1, 2, 5, digest)]
        return Sample(prompt(3), 0, 1, [5, 6], [-0.1] * 2, "stop", 3, weights_digest="weights 3", segments=draws)

    made = provenance()
    good = [sample(5, "weights 5"), sample(4, "weights 4"), sample(3, "weights 3"), drawn("weights 5")]
    made.check(5, good)
    made.check(5, [])
    refused = "step 5 cannot train on 1 of 5 samples: prompt 'p/3', sample 1 was sampled by"
    for wrong in (sample(5, "weights 4"), sample(5, ""), sample(4, "weights 5"), sample(2, "weights 2")):
        with pytest.raises(RankError, match=refused):
            made.check(5, [*good, wrong])
    for wrong in (sample(5, "weights 4"), drawn("weights 4")):
        with pytest.raises(RankError, match="with digest weights 4, but the sync of step 5 sent weights with digest"):
            made.check(5, [wrong])
    made.record(5, sent("the initial model"))
    made.check(5, [sample(5, "the initial model")])
    with pytest.raises(RankError, match="step 5"):
        made.check(5, [sample(5, "weights 5")])


@pytest.mark.parametrize("first_step", [4, 6])
def test_a_resumed_run_knows_the_weights_of_old_samples(first_step: int) -> None:
    """For longer where steps before `first_step` were sampled ahead, maybe with a larger lag than the run has now."""
    made = Provenance(LoneMesh(), max_staleness=2)
    made.load_state(json.loads(json.dumps(provenance().state())), first_step)
    made.record(6, sent("weights 6"))
    made.check(6, [sample(6, "weights 6"), sample(4, "weights 4")])
    with contextlib.nullcontext() if first_step == 6 else pytest.raises(RankError, match="step 6"):
        made.check(6, [sample(3, "weights 3")])
    for version in (7, 8):
        made.record(version, sent(f"weights {version}"))
    assert made.state() == {str(version): f"weights {version}" for version in (6, 7, 8)}
