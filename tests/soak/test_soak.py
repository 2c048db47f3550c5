"""A short soak, by the real command: a rank is killed while it saves in the background, and then the newest checkpoint is
damaged. `make soak` has all faults. Other layouts than the saved one: tests/training/test_layout_change.py.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from grpo_megatron.report.trace_file import TraceFolder
from grpo_megatron.trust.compare import compare_runs, compare_seams
from tests import vision, worlds
from tests.e2e import run_ranks, test_vision
from tests.runs import write_rows
from tests.soak import healing, injection
from tests.soak.soak import DAMAGES, MATRIX, Fault, Soak, make_workspace, rows_of, run_command, soak_settings
from tests.stored import same_stored

STEPS = 9
ENGINE = "transformers"  # its imports take a third of vLLM's, which `make soak` has
LAST = f"checkpoints/step_{STEPS:06d}"


def fault(name: str, point: str) -> Fault:
    (fault,) = (entry for entry in MATRIX if (entry.name, entry.point) == (name, point))
    return fault


@pytest.mark.soak
def test_a_short_soak(tmp_path: Path) -> None:
    root, undisturbed, output = make_workspace(tmp_path / "inputs"), tmp_path / "undisturbed", tmp_path / "disturbed"
    worlds.run(run_ranks.train, 2, raw=soak_settings(root, undisturbed, STEPS, ENGINE), keep_weights=False)
    soak = Soak(soak_settings(root, output, STEPS, ENGINE), tmp_path, rows_of(undisturbed), random.Random(0))
    soak.attempt(fault("a rank is killed, saving in the background", "save: files"), 3)
    assert soak.steps_done == 6  # the second save was complete before the third began
    DAMAGES["a bit flipped"](output, soak.rng)
    soak.attempt(None)
    assert [attempt.problems for attempt in soak.attempts] == [[], []], soak.table()
    assert [attempt.sees for attempt in soak.attempts] == [
        "error: rank 1 was ended by SIGKILL (the machine may have run out of memory: see dmesg)",
        "the results",
    ]
    assert (output / "checkpoints/step_000006.damaged").is_dir()
    assert rows_of(output) == rows_of(undisturbed) and len(rows_of(output)) == STEPS + 1  # and the last validation
    same_stored(output / LAST, undisturbed / LAST)
    traced = TraceFolder(output)
    compared, seams = compare_runs(TraceFolder(undisturbed), traced), compare_seams(traced)
    assert (compared.verdict, compared.num_steps, seams.verdict, seams.num_steps) == ("equal", STEPS, "equal", 1)
    assert (output / "hf/model.safetensors").read_bytes() == (undisturbed / "hf/model.safetensors").read_bytes()


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["moe", "lora", "critic", "roles", "all stopped"])
def test_each_kind_of_run_heals(tmp_path: Path, kind: str) -> None:
    """A rank dies in an update; of two roles one that samples, then one that trains. The launcher finds that all are stopped."""
    name = "roles" if kind == "all stopped" else kind
    first = (
        {"point": "gen", "count": 2, "rank": 5} if name == "roles" else {"point": "update_actor", "count": 2, "rank": 1}
    )
    losses = [
        {**first, "action": "stop all ranks" if kind == "all stopped" else "kill rank", "once": str(tmp_path / "0")}
    ]
    if kind == "roles":
        second = {"point": "update_actor", "count": 1, "rank": 0, "action": "kill rank", "once": str(tmp_path / "1")}
        losses.append({**second, "after": losses[0]["once"]})
    root, expected = healing.make_inputs(tmp_path / "inputs", name), tmp_path / "undisturbed"
    code, _, err, _ = run_command(healing.settings(root, expected, name, healing=False, steps=4), tmp_path / "command")
    assert code == 0, err
    healed = healing.heal_run(root, tmp_path, name, losses, expected, steps=4)
    assert healed.problems == [] and len(healed.seconds) == len(losses)


NUM_IMAGES, EDGE = 320, 8  # tokens of an edge: 150 KB of pixels
MAX_KEPT = 40 * EDGE * EDGE * vision.COMMON["hidden_size"] * 4  # bytes: 40 images
LARGEST_GROWTH = 24 << 10  # KiB. One image of each step, from step 100 to step 300, would be 30 MB of pixels


@pytest.mark.soak
@pytest.mark.parametrize(("engine", "is_frozen"), [("transformers", True), ("transformers", False), ("vllm", True)])
def test_memory_is_flat_over_300_steps_with_images(tmp_path: Path, engine: str, is_frozen: bool) -> None:
    """On two ranks. A frozen tower keeps the features of an eighth of the images, so that it evicts some at every step."""
    vision.make_model(tmp_path / "model")
    (tmp_path / "data").mkdir()
    for number in range(NUM_IMAGES):
        edge = EDGE * vision.CELL
        vision.draw(number, edge, edge).save(tmp_path / f"data/{number}.png")
    rows = [{"prompt": "What?", "images": [f"{number}.png"], "answer": "1"} for number in range(NUM_IMAGES)]
    for name in ("train", "val"):
        write_rows(tmp_path / f"data/{name}.jsonl", rows if name == "train" else rows[:4])
    frozen = {"vision": {} if is_frozen else test_vision.TRAINED}
    steps: dict[str, Any] = {"trainer": {"total_training_steps": 300, "test_freq": 50, "save_freq": 100}}
    raw = test_vision.settings(tmp_path, tmp_path / "out", 2, **steps)
    raw["actor"] = {**frozen, "use_kl_loss": False, "optim": {"lr": 1e-4}}
    raw["data"] |= {"max_prompt_length": 110, "train_batch_size": 4, "max_response_length": 4}
    raw["rollout"] |= {"n": 2, "engine": engine} | (
        {"engine_options": {"kv_cache_gib": 0.05}} if engine == "vllm" else {}
    )
    for rank, (stored, num_computed) in enumerate(train_measured(raw=raw, usage=tmp_path)):
        assert 0 < stored <= MAX_KEPT and num_computed > NUM_IMAGES if is_frozen else stored == 0
        used = [json.loads(line) for line in (tmp_path / f"{rank}.jsonl").read_text().splitlines()]
        assert len(used) == 300
        growth = used[-1]["rss_kib"] - used[99]["rss_kib"]
        assert growth < LARGEST_GROWTH, [row["rss_kib"] for row in used[::20]]
        assert used[-1]["files"] == used[99]["files"] and used[-1]["threads"] == used[99]["threads"]


@worlds.ranks(2)
def train_measured(raw: dict[str, Any], usage: Path) -> tuple[int, int]:
    """Trains, with the memory after each step in RANK.jsonl. Returns bytes of stored features and images computed."""
    from grpo_megatron.models import vision as tower
    from grpo_megatron.report.step import StepReport

    log, init, built = StepReport.log, tower.Features.__init__, list[tower.Features]()

    def recording(self: tower.Features, *arguments: Any) -> None:
        built.append(self)
        init(self, *arguments)

    def recorded(*arguments: Any, **named: Any) -> Any:
        injection.reach("log")
        return log(*arguments, **named)

    os.environ["SOAK_USAGE"] = str(usage)
    with (
        mock.patch.object(StepReport, "log", recorded),
        mock.patch.object(tower.Features, "__init__", recording),
        mock.patch.object(tower, "MAX_KEPT", MAX_KEPT),
    ):
        run_ranks.train(raw, keep_weights=False)
    [features] = built  # the policy's
    return sum(tensor.nbytes for tensor in features._kept.values()), features.num_computed
