"""Same seed and layout: the same bits. Same seed, other layout: the same samples. Stop and resume: as if never stopped."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_megatron.report.trace_file import TraceFolder
from grpo_megatron.trust.compare import compare_runs, compare_seams
from tests import tiny, vision, worlds
from tests.e2e import run_ranks
from tests.models.test_moe import MODELS as EXPERTS
from tests.runs import write_rows
from tests.stored import TIMES, metric_rows, rows_without

DELTA = {  # at this learning rate all elements change
    "rollout": {"sync": "delta", "delta_max_density": 1.0, "engine_options": {"kv_cache_gib": 0.05, "sleep_level": 1}}
}
KILLED = ("gpt_oss", "glm4_moe", "qwen3_5", "qwen3_5_moe", "qwen3_vl_moe")
TP2 = {"actor": {"megatron": {"tensor_model_parallel_size": 2}}}


def merged(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    for section, values in extra.items():
        base[section] = {**base[section], **values}
    return base


def assert_same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["weights"].keys() == b["weights"].keys()
    for name, tensor in a["weights"].items():
        assert torch.equal(tensor, b["weights"][name]), name
    assert len(a["optimizer"]) == len(b["optimizer"]) > 0
    for one, other in zip(a["optimizer"], b["optimizer"], strict=True):
        assert one.keys() == other.keys() and "exp_avg" in one
        for key, value in one.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[key])), key


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without times, throughput, memory and what the syncs sent."""
    return rows_without(folder, (*TIMES, "sync/"))


def assert_profiled(folder: Path, step: int) -> None:
    """Every rank has a trace with its phases and its collectives; the table has rank 0's phases."""
    named = {"update_weights", "gen", "reward", "update_actor", "save_checkpoint"}
    for rank in (0, 1):
        events = json.loads(gzip.decompress((folder / f"trace_rank{rank}.json.gz").read_bytes()))["traceEvents"]
        assert {f"training step {step}", "gloo:all_reduce", "gloo:all_gather", *named} <= {e["name"] for e in events}
    assert named <= set((folder / "table.txt").read_text().split())


def assert_seam(folder: Path) -> None:
    """The resume begins with the weights, moments and random states that the step before it has left; each fault is named."""
    seams = compare_seams(TraceFolder(folder))
    assert (seams.verdict, seams.num_steps) == ("equal", 1), seams
    lines = folder / "trace/steps.jsonl"
    text = lines.read_text()
    [state] = [row["facts"]["state"] for row in map(json.loads, text.splitlines()) if row.get("facts", {}).get("state")]
    assert set(state) == {"weights", "optimizer", "random state"}
    for stage, root in state.items():
        head, mark, tail = text.partition('"state": {"')  # of the resume
        lines.write_text(head + mark + tail.replace(root, "0" * 16, 1))
        seams = compare_seams(TraceFolder(folder))
        assert seams.verdict == "part" and stage in seams.cause and "after step 1" in seams.cause
    lines.write_text(text)


def test_two_steps_stop_and_a_third_equal_three_steps(workspace: Path, tmp_path: Path) -> None:
    """With tensor parallelism. (tests/soak/test_soak.py has data parallelism, with the real command.)

    Also, a run repeated with the same seed is the same bit for bit: the first two steps are compared twice. The run that
    stops has delta syncs, and the other one full syncs. Its second step is profiled, which must not change it.
    """

    def run(name: str, steps: int, profiled: range | None = None) -> list[dict[str, Any]]:
        trainer = {"total_training_steps": steps, "save_freq": 2}
        trainer["trace_keep"] = 2 if name == "halves" else None
        trainer["rollout_data_dir"] = str(tmp_path / name / "rollouts")
        # The learning rate is constant, so that it does not depend on the number of steps.
        raw = merged(run_ranks.settings(workspace, tmp_path / name, 2, trainer=trainer), TP2)
        if name == "halves":
            raw = merged(raw, DELTA)
        return worlds.run(run_ranks.train, 2, raw=raw, profiled=profiled)

    whole = run("whole", 3)
    first = run("halves", 2, profiled=range(1, 2))
    assert_profiled(tmp_path / "halves" / "profile", step=1)
    left = tmp_path / "halves/trace"  # as a kill in the step after the checkpoint leaves it
    (left / "step_000002.bin").write_bytes(b"left")
    (left / "step_000007.bin").write_bytes(b"left")
    (left / "steps.jsonl").write_text(
        (left / "steps.jsonl").read_text() + '{"step": 7, "stages": {"prompts": "0"}}\n{"st'
    )
    second = run("halves", 3)
    assert [r["first_step"] for r in second] == [2, 2]
    for a, b, c in zip(whole, first, second, strict=True):
        assert a["samples"] == {**b["samples"], **c["samples"]}
        assert_same(a, c)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "halves")
    written = [
        {path.name: path.read_text() for path in (tmp_path / name / "rollouts").iterdir()}
        for name in ("whole", "halves")
    ]
    assert written[0] == written[1] and len(written[0]) == 4  # three steps, and run.json
    assert [
        row.get("sync/density", 0) > 0 for row in metric_rows(tmp_path / "halves") if "sync/bytes_received" in row
    ] == [0, 1, 0]
    traces = [TraceFolder(tmp_path / name).steps for name in ("whole", "halves")]
    assert traces[0] == traces[1] and [len(stages) for stages in traces[0].values()] == [28] * 3
    for step in (0, 1):  # the trace's own digests, of shards, and the sync's
        assert traces[0][step]["weights"] == traces[0][step + 1]["engine weights"]
    kept = [len(list((tmp_path / name / "trace").glob("step_*.bin"))) for name in ("whole", "halves")]
    assert kept == [4, 2]  # the first one with the weights at the start
    assert_seam(tmp_path / "halves")
    before = first[0]["weights"]
    assert any(not torch.equal(before[n], whole[0]["weights"][n]) for n in before)  # the last step moved weights


@pytest.mark.parametrize("family", ["gemma3", *(pytest.param(name, marks=pytest.mark.soak) for name in KILLED)])
def test_a_killed_run_of_each_family_goes_on(workspace: Path, tmp_path: Path, family: str) -> None:
    """Its second step is repeated, with the bits of an undisturbed run. Experts are divided over both ranks."""
    if family == "qwen3_vl_moe":
        vision.make_model(tmp_path / "model", family)
        rows = [{"prompt": f"{n}?", "images": ["drawn.png"] if n % 2 else None, "answer": "1"} for n in range(9)]
        for name in ("train", "val"):
            write_rows(tmp_path / f"data/{name}.jsonl", rows)
        vision.draw(0, 56, 84).save(tmp_path / "data/drawn.png")
    else:
        shutil.copytree(workspace, tmp_path, dirs_exist_ok=True)
        changes: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": 80, "std": 0.05, **EXPERTS.get(family, {})}
        tiny.make_model(tmp_path / "model", family if family in tiny.FAMILIES else "llama2", **changes)

    world = 1 if family == "gemma3" else 2

    def run(name: str, **arguments: Any) -> list[dict[str, Any]]:
        raw = run_ranks.settings(tmp_path, tmp_path / name, world, trainer={"save_freq": 1})
        if family == "gemma3":
            raw["rollout"] |= {"engine": "transformers", "engine_options": {}}
        if family == "qwen3_vl_moe":
            raw["data"] |= {"task": "jsonl", "apply_chat_template": True, "max_prompt_length": 32}
        if "qwen3_5" in family:  # vLLM computes gated delta nets on the CPU in bfloat16 only
            raw["model"]["dtype"] = "bfloat16"
        raw["actor"]["megatron"] = {"expert_model_parallel_size": 1 if family in ("gemma3", "qwen3_5") else 2}
        return worlds.run(run_ranks.train, world, raw=raw, **arguments)

    whole = run("whole")
    with pytest.raises(AssertionError, match="died with exit code 9"):
        run("killed", kill_in_step=1)
    for one, other in zip(whole, run("killed"), strict=True):
        assert other["first_step"] == 1 and one["samples"][1] == other["samples"][1]
        assert_same(one, other)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "killed")


def test_rollouts_do_not_depend_on_the_number_of_ranks(workspace: Path, tmp_path: Path) -> None:
    """7 x 3 samples do not divide by 4, so groups are spread over ranks. lr is 0, so that step 1 is comparable too.

    Step 1 has the prompts of step 0 again, and deals them out by their lengths. The engines of four ranks decode 3 sequences
    at a time, so that ranks take waiting requests of each other. test_trajectories.py has the same for 1 and 4 ranks, with
    several turns.
    """
    drawn = []
    seven = tmp_path / "seven.jsonl"
    seven.write_text("".join((workspace / "data/train.jsonl").read_text().splitlines(keepends=True)[:7]))
    for world in (1, 4):
        raw = run_ranks.settings(workspace, tmp_path / str(world), world, data={"train_batch_size": 7})
        raw["data"] |= {"train_files": [str(seven)]}
        raw["actor"] = {"optim": {"lr": 0.0}, "share_prompts": world == 4}
        raw["rollout"] |= {"max_num_seqs": 3} if world == 4 else {}
        results = worlds.run(run_ranks.train, world, raw=raw, keep_weights=False)
        drawn.append(run_ranks.all_samples(results))
    assert drawn[0] == drawn[1]
    judged = compare_runs(*(TraceFolder(tmp_path / name) for name in ("1", "4")), tolerance=True)
    assert judged.verdict == "explained" and "gradients 0" in {one.stage for one in judged.partings}, judged
    assert len(drawn[0][0]) == 21
    first, _ = metric_rows(tmp_path / "4")
    assert 0 < first["perf/shared_prompt_ratio"] < 1 and first["training/rollout_logp_diff_max"] < 1e-4
    assert drawn[0][0] != drawn[0][1]
