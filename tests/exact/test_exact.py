"""`model.exact`: the engine's log-probabilities are the policy's bit for bit, and a run is the same in every layout.

Nothing here has a tolerance. The ranks have one thread each (tests/worlds.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from grpo_megatron.config import Config
from grpo_megatron.exact import rowwise
from grpo_megatron.exact.layers import exact_logprobs
from grpo_megatron.exact.limits import exact_problems
from grpo_megatron.exact.self_test import ExactShapes, self_test
from grpo_megatron.models.families import read_architecture
from grpo_megatron.models.layers.head import KeptTargets
from grpo_megatron.rollout.build import exact_engine_problem
from grpo_megatron.starting.prepare import ArithmeticOptions, prepare_inputs
from tests import tiny, worlds
from tests.e2e import run_ranks
from tests.exact import ranks
from tests.models.policies import LAYOUTS
from tests.stored import metric_rows

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 192,  # over tp 4 no multiple of a vector's elements: torch's own silu would differ
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
OWN = tiny.make_sequences(11, vocab=128, longest=70)
PAIRS = [([*OWN[row - row % 3][0], *OWN[row - row % 3][1]], own) for row, (_, own) in enumerate(OWN)]  # 3 to a prompt


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: tiny.make_model(root / family, family, **SIZES) for family, _ in ranks.CASES}


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> dict[str, Any]:
    """One rank's log-probabilities, gradients and norm, and what the engine says of the same tokens."""
    return worlds.run(ranks.both, 1, folders=models, pairs=PAIRS, layout=LAYOUTS["1"])[0]


@pytest.mark.slow
@pytest.mark.both_stacks
def test_engine_equals_policy_in_prefill_and_decode(alone: dict[str, Any]) -> None:
    for family, dtype in ranks.CASES:
        assert torch.equal(alone[f"{family} {dtype} shared"], alone[f"{family} {dtype} 0"])
        drawn, prefilled = alone[f"{family} {dtype} sampled"], alone[f"{family} {dtype} prefilled"]
        assert len(drawn) == len(prefilled) == len(PAIRS)
        for row, policy in enumerate(alone[f"{family} {dtype} of sampled"]):
            assert torch.equal(policy[: len(drawn[row])], drawn[row]), (family, dtype, row)
            assert torch.equal(policy[: len(drawn[row])], prefilled[row]), (family, dtype, row)


SOAK = [pytest.param(name, marks=pytest.mark.soak) for name in ("TP4", "TP2", "PP2", "DP2", "DP2xTP2")]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["TP2xPP2+SP", *SOAK])
def test_every_layout_has_the_bits_of_one_rank(models: dict[str, Path], alone: dict[str, Any], layout: str) -> None:
    """Log-probabilities in two packings and with shared prompts, every element of every gradient, and the gradient's norm."""
    shape = LAYOUTS[layout]
    folders = {name: folder for name, folder in models.items() if shape[2] == 1 or name != "llama3"}  # tied
    for got in worlds.run(ranks.on_layout, shape[0], folders=folders, pairs=PAIRS, layout=shape):
        assert {key for key in alone if key.endswith("gradients") and key.split()[0] in folders} <= got.keys()
        for key, value in got.items():
            if isinstance(value, dict):
                wrong = [name for name, tensor in value.items() if not torch.equal(tensor, alone[key][name])]
                assert value.keys() == alone[key].keys() and not wrong, (key, wrong)
            else:
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(alone[key.replace("shared", "0")])), key


# -- whole runs --------------------------------------------------------------------------------------------------------

EXACT = {"model": {"exact": True}, "rollout": {"engine": "transformers"}}
UNLIKE = (
    "timing_s/",
    "perf/",
    "global_seqlen/",
    "memory/",
    "sync/",
    "rollout/prefix_cache_hit_rate",
)  # what a layout may change


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exact")
    prepare_inputs(ArithmeticOptions(out=root / "data", seed=0))
    wide = {"hidden_size": 256}  # heads of 32 dimensions, the fewest that vLLM has on a CPU
    for name, changed in (("model", {}), ("model_of_vllm", wide)):
        tiny.make_model(root / name, "qwen2", **{**SIZES, **changed})
        for file in (root / "data/tokenizer").iterdir():
            shutil.copy(file, root / name)
    return root


def merged(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `extra`, key by key."""
    both = {key: merged(base[key], extra[key]) for key in base.keys() & extra.keys() if isinstance(extra[key], dict)}
    return {**base, **extra, **both}


def settings(root: Path, output: Path, world: int, **sections: Any) -> dict[str, Any]:
    raw = run_ranks.settings(root, output, world, rollout={"engine_options": {}})
    return merged(merged(raw, EXACT), sections)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(UNLIKE)} for row in metric_rows(folder)]


@pytest.mark.slow
def test_a_run_is_the_same_in_another_layout_and_resumes_there(workspace: Path, tmp_path: Path) -> None:
    """Two steps on one rank; and one step with TP2 x DP2, the second with DP2. Weights, samples and metrics."""

    def run(name: str, world: int, tp: int, steps: int) -> list[dict[str, Any]]:
        raw = settings(
            workspace,
            tmp_path / name,
            world,
            actor={"megatron": {"tensor_model_parallel_size": tp}},
            trainer={"total_training_steps": steps, "save_freq": 1},
        )
        return worlds.run(run_ranks.train, world, raw=raw)

    [whole] = run("whole", 1, 1, 2)
    halves = run("halves", 4, 2, 1), run("halves", 2, 1, 2)
    drawn = [run_ranks.all_samples(part) for part in ([whole], *halves)]
    assert drawn[0] == {**drawn[1], **drawn[2]} and len(drawn[0]) == 2
    for name, tensor in halves[1][0]["weights"].items():
        assert torch.equal(tensor, whole["weights"][name]), name
    rows = metrics(tmp_path / "whole")
    assert rows == metrics(tmp_path / "halves") and len(rows) == 2
    for row in rows:
        assert row["training/rollout_logp_diff_max"] == row["rollout/probe_logp_diff_max"] == 0
        assert row["actor/grad_norm"] > 0


VLLM = [  # training world, TP and PP; the engine's TP; type
    pytest.param(2, 1, 1, 2, "bfloat16", id="DP2-TP2"),
    *(
        pytest.param(*case, marks=pytest.mark.soak, id=name)
        for name, case in {
            "1-1": (1, 1, 1, 1, "float32"),
            "1-1 bfloat16": (1, 1, 1, 1, "bfloat16"),
            "DP2-TP2 float32": (2, 1, 1, 2, "float32"),
            "TP2-1": (2, 2, 1, 1, "float32"),
            "TP2-TP2": (2, 2, 1, 2, "bfloat16"),
            "TP2xPP2-TP2": (4, 2, 2, 2, "float32"),
            "PP2-1": (2, 1, 2, 1, "bfloat16"),
            "TP4-TP2": (4, 4, 1, 2, "float32"),
            "TP4-1": (4, 4, 1, 1, "bfloat16"),
        }.items()
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "tp", "pp", "rollout_tp", "dtype"), VLLM)
def test_vllm_draws_from_the_policy(
    workspace: Path, tmp_path: Path, world: int, tp: int, pp: int, rollout_tp: int, dtype: str
) -> None:
    """Two steps: sync, sample, update. Every token's log-probability, and the probe's after each sync, are the policy's."""
    raw = settings(
        workspace,
        tmp_path / "run",
        world,
        model={"dtype": dtype, "path": str(workspace / "model_of_vllm")},
        rollout={"engine": "vllm", "tensor_model_parallel_size": rollout_tp, "engine_options": {"kv_cache_gib": 0.05}},
        actor={"megatron": {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}},
    )
    worlds.run(run_ranks.train, world, raw=raw)
    rows = metrics(tmp_path / "run")
    assert len(rows) == 2
    for row in rows:
        assert row["training/rollout_logp_diff_max"] == row["rollout/probe_logp_diff_max"] == 0
        assert row["actor/grad_norm"] > 0


@pytest.mark.soak
def test_200_steps_of_the_quickstart_have_no_difference(tmp_path: Path) -> None:
    """With vLLM, on two ranks, as the documentation says it is started. The last steps learn: the entropy is small."""
    command = [
        sys.executable,
        "-m",
        "grpo_megatron",
        "quickstart",
        "model.exact=true",
        "trainer.total_training_steps=200",
    ]
    subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    rows = [row for row in metric_rows(tmp_path / "outputs/quickstart/run") if "critic/rewards/mean" in row]
    assert len(rows) == 200 and rows[-1]["actor/entropy"] < 0.1
    for row in rows:
        assert row["training/rollout_logp_diff_max"] == row["rollout/probe_logp_diff_max"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [*(pytest.param(name, marks=pytest.mark.soak) for name in ("another tree", "another block")), "a rounding more"],
)
def test_a_fault_in_one_side_stops_the_run(workspace: Path, tmp_path: Path, fault: str) -> None:
    raw = settings(workspace, tmp_path / "run", 1, model={"dtype": "bfloat16"})
    with pytest.raises(Exception, match=r"rollout_gap|log-probabilities of fixed tokens differ"):
        worlds.run(ranks.train_with_fault, 1, raw=raw, fault=fault)


# -- the self-test and what is refused ---------------------------------------------------------------------------------

SHAPES = ExactShapes([(64, 128, [64, 32])], [(64, 64)], heads=4, groups=2, head_dim=16, vocab_size=128, tp=2)


@pytest.fixture
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_test_passes_here(one_thread: None, dtype: torch.dtype) -> None:
    assert self_test(SHAPES, dtype) is None


def test_the_self_test_finds_threads_and_kernels_that_look_at_their_shapes(one_thread: None) -> None:
    torch.set_num_threads(2)
    assert "torch has 2 threads on this rank" in (self_test(SHAPES, torch.float32) or "")
    torch.set_num_threads(1)
    plain = torch.nn.functional.linear
    with mock.patch.object(torch.nn.functional, "linear", lambda x, w, b=None: plain(x, w, b) * (1 + len(x) * 1e-6)):
        assert "have other bits than the same among" in (self_test(SHAPES, torch.float32) or "")
    with mock.patch.object(rowwise, "FEWEST_QUERIES", 1):
        assert "has other bits when it is decoded" in (self_test(SHAPES, torch.float32) or "")


@pytest.mark.parametrize("is_cut", [False, True])
def test_the_heads_gradients_are_those_of_the_distribution_at_the_temperature(one_thread: None, is_cut: bool) -> None:
    """Beside float64 autograd; both the log-probabilities and the entropies have a gradient. Cut: over three ids each."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 64, requires_grad=True), torch.randn(100, 64, requires_grad=True)
    targets, coefficients = torch.randint(100, (20,)), torch.randn(2, 20)
    group = mock.Mock(size=lambda: 1, rank=lambda: 0)
    with mock.patch.object(torch.distributed, "all_reduce"):
        given: Any = {"vocab_size": 100, "tp_rank": 0, "group": group, "temperature": 0.7, "chunk": 16}
        ids = torch.stack([targets, (targets + 1) % 100, (targets + 40) % 100], 1)
        kept = KeptTargets.of(torch.full((20,), 3), ids.flatten(), ids.device) if is_cut else None
        logprobs, entropy = exact_logprobs(hidden, weight, targets, kept, **given)
        (coefficients[0] * logprobs + coefficients[1] * entropy).sum().backward()
    doubles = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    outside = torch.ones(20, 100, dtype=torch.bool).scatter(1, ids, False) & is_cut
    logp = (doubles[0] @ doubles[1].T / 0.7).masked_fill(outside, -1e300).log_softmax(1)
    entropies = -(logp.exp() * logp).sum(1)
    (coefficients[0] * logp[torch.arange(20), targets] + coefficients[1] * entropies).sum().backward()
    for ours, reference in zip((hidden, weight), doubles, strict=True):
        assert ours.grad is not None and reference.grad is not None
        torch.testing.assert_close(ours.grad.double(), reference.grad, rtol=1e-4, atol=1e-4)


REFUSED = r"""
rollout.quantization=fp8_per_block => rollout.quantization=fp8_per_block is not covered; leave it out
rollout.tensor_model_parallel_size=3 => rollout.tensor_model_parallel_size=3 does not divide the 8 blocks of every sum
trainer.device=cuda => set trainer.device=cpu, or for a GPU rollout.batch_invariant=true
algorithm.rollout_correction.rollout_is=icepop => algorithm.rollout_correction.rollout_is corrects a difference that is 0
algorithm.rollout_correction.bypass_mode=true => bypass_mode corrects a difference that is 0; leave it out
algorithm.rollout_correction.rollout_rs=token => rollout_rs corrects a difference that is 0; leave it out
rollout.lag=1 => rollout.lag=1 trains on samples of earlier weights
algorithm.replay.ratio=0.2 => algorithm.replay.ratio=0.2 trains on samples of earlier weights
algorithm.filter_groups.enable=true => algorithm.filter_groups.max_staleness=1 trains on samples of earlier weights
actor.megatron.context_parallel_size=2 => context_parallel_size=2 is not covered
algorithm.adv_estimator=gae => needs a critic, which is not covered
actor.megatron.tensor_model_parallel_size=3 => does not divide the 8 blocks of every sum; set 1, 2, 4 or 8
trainer.nnodes=3 => 6 ranks / (tp 1 x pp 1) = 6 data-parallel ranks do not divide the 8 parts
"""


@pytest.mark.parametrize("case", REFUSED.strip().splitlines())
def test_what_is_not_covered_is_refused(models: dict[str, Path], case: str) -> None:
    override, message = case.split(" => ")
    key, value = override.split("=")
    raw: dict[str, Any] = {"model": {"path": "m"}, "trainer": {"n_gpus_per_node": 2, "device": "cpu"}}
    raw = merged(raw, EXACT)
    nested: Any = json.loads(value) if value[0].isdigit() or value == "true" else value
    for part in reversed(key.split(".")):
        nested = {part: nested}
    config = Config.model_validate(merged(raw, nested))
    world = config.trainer.nnodes * config.trainer.n_gpus_per_node
    found = list(
        exact_problems(config, world, read_architecture(models["qwen2"]), exact_engine_problem(config.rollout.engine))
    )
    assert len(found) == 1 and message in str(found[0]) and str(found[0]).endswith("or leave model.exact out")


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({"num_experts": 4}, 1, "has experts"),
        ({"ffn_hidden_size": 100}, 1, "the MLP width 100 cannot be cut into 8 blocks, 100 / 8 = 12.5"),
        ({"vocab_size": 100}, 2, "with a vocabulary of 100, which is not a multiple of 64"),
    ],
)
def test_models_that_do_not_fit_are_refused(
    models: dict[str, Path], changes: dict[str, Any], tp: int, message: str
) -> None:
    raw = merged({"model": {"path": "m"}, "trainer": {"device": "cpu"}}, EXACT)
    raw = merged(raw, {"actor": {"megatron": {"tensor_model_parallel_size": tp}}})
    arch = replace(read_architecture(models["qwen2"]), **changes)
    [found] = exact_problems(Config.model_validate(raw), tp, arch)
    assert message in str(found)
