"""`diff` raises no alarm over honest pairs: layouts, engines, micro-batches, delays, kills, and resumes."""

from __future__ import annotations

import itertools
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import grpo_megatron
from grpo_megatron.trust import certify
from grpo_megatron.trust.certify import PROOFS
from grpo_megatron.trust.compare import compare_runs
from tests.runs import SIZES, make_run
from tests.tiny import make_model
from tests.trust import test_diff
from tests.trust.test_certify import SETTINGS, RankBench
from tests.worlds import ranks

NUM_CASES = 8  # each with other prompts, and so with other samples
VLLM = ["rollout.engine=vllm", "rollout.enforce_eager=true", "rollout.engine_options.kv_cache_gib=0.05"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, ["trainer.n_gpus_per_node=1"]),
    "one sequence": (1, ["trainer.n_gpus_per_node=1", "actor.ppo_micro_batch_size_per_gpu=1"]),
    "short micro-batches": (1, ["trainer.n_gpus_per_node=1", "actor.ppo_max_token_len_per_gpu=40"]),
    "two data-parallel": (2, []),
    "two data-parallel, short micro-batches": (2, ["actor.ppo_max_token_len_per_gpu=40"]),
    "two tensor-parallel": (2, ["actor.megatron.tensor_model_parallel_size=2"]),
    "two pipeline stages": (2, ["actor.megatron.pipeline_model_parallel_size=2"]),
    "prompts once": (1, ["trainer.n_gpus_per_node=1", "actor.share_prompts=true"]),
    "vLLM": (1, ["trainer.n_gpus_per_node=1", *VLLM]),
    "vLLM, two tensor-parallel": (2, ["actor.megatron.tensor_model_parallel_size=2", *VLLM]),
}
KILLED = ("one rank", "two tensor-parallel", "two pipeline stages", "vLLM")  # in real runs, and resumed


def disturbed(point: str, step: int, content: Any) -> None:
    """Delays each rank by chance; before step 1, a resume."""
    run = test_diff.RUN[0]
    time.sleep(random.random() * 0.02 * (1 + run.mesh.rank))
    if (point, step) == ("prompts", 1):
        state = Path(run.config.trainer.output_dir).parent / "between"
        run.save_state(state)
        run.load_state(state)


@ranks()
def make_honest_runs(folder: Path, overrides: list[str]) -> None:
    settings = [*test_diff.SETTINGS, *overrides, f"trainer.output_dir={folder / 'out'}"]
    with grpo_megatron.open(folder.parent / "run.yaml", settings) as run:
        run.save_state(folder / "state")
        for case in range(NUM_CASES):
            test_diff.make_steps(run, folder / f"{case}", case=case)
            test_diff.make_steps(run, folder / f"{case} disturbed", disturbed, case=case)


@pytest.mark.soak
def test_honest_pairs(tmp_path: Path) -> None:
    make_run(tmp_path)
    make_model(tmp_path / "model", "qwen2", **{**SIZES, "num_attention_heads": 2, "num_key_value_heads": 2})  # for vLLM
    for layout, (size, overrides) in LAYOUTS.items():
        make_honest_runs(size, folder=tmp_path / layout, overrides=overrides)
    wrong, count = [], 0
    for case in range(NUM_CASES):
        combined = itertools.combinations(LAYOUTS, 2)
        combined = ((one, other) for one, other in combined if ("vLLM" in one) == ("vLLM" in other))  # same samples
        pairs = [((one, f"{case}"), (other, f"{case}")) for one, other in combined]
        pairs += [((layout, f"{case}"), (layout, f"{case} disturbed")) for layout in LAYOUTS]
        for left, right in pairs:
            is_same = left[0] == right[0]
            sides = test_diff.traces(tmp_path, "/".join(left), "/".join(right))
            result, count = compare_runs(*sides, tolerance=not is_same), count + 1
            if result.verdict not in (("equal",) if is_same else ("equal", "explained")):
                wrong.append(f"{left} and {right}: {result.verdict}, {result.first}, {result.cause}")
    print(f"{count} pairs, {len(wrong)} alarms")
    assert not wrong and count >= 300, "\n".join(wrong)


@pytest.mark.soak
@pytest.mark.parametrize("layout", KILLED)
def test_a_killed_rank(tmp_path: Path, layout: str) -> None:
    """Four times a rank is killed in another phase; the resumed run is the undisturbed one, bit for bit, without a seam."""
    folder, (size, overrides) = make_run(tmp_path), LAYOUTS[layout]
    make_model(folder / "model", "qwen2", **{**SIZES, "num_attention_heads": 2, "num_key_value_heads": 2})
    arguments = [*SETTINGS[:4], *overrides, f"trainer.n_gpus_per_node={size}", f"trainer.output_dir={tmp_path / 'out'}"]
    config = grpo_megatron.load_config(folder / "run.yaml", arguments)
    bench = RankBench(config, [f"{folder / 'run.yaml'}", *arguments], tmp_path / "work", time.monotonic() + 3000)
    bench.work.mkdir()
    assert certify._make_base(bench) == ("base", 0), (bench.work / "base.log").read_text()
    assert PROOFS["the same run again"][1](bench)[0] == "green" and bench.is_exact
    for _ in range(4):
        state, measured = PROOFS["kill and resume"][1](bench)
        assert state == "green" and "every digest of 2 steps" in measured, measured
        shutil.rmtree(bench.work / "resumed")
        (bench.work / "killed").unlink()
