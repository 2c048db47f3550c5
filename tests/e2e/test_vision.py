"""Whole runs of a model that reads images: examples/vision/shapes.py draws the model and the pictures, 0 to 2 for each prompt.

The transformers engine starts in a third of vLLM's time, so most tests take it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import random
import zlib
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from grpo_megatron.training.checkpoint import run_state
from grpo_megatron.types import UNFINISHED
from tests import worlds
from tests.e2e import run_ranks
from tests.e2e.test_determinism import assert_same, metrics
from tests.runs import write_rows
from tests.stored import metric_rows
from tests.training.test_guards import replayed

EXAMPLE = Path(__file__).parents[2] / "examples/vision/shapes.py"
TRAINED = {"freeze_tower": False, "freeze_merger": False}
ENGINES: dict[str, dict[str, Any]] = {
    "transformers": {"engine": "transformers", "engine_options": {}},
    "vllm": {"engine": "vllm", "engine_options": {"kv_cache_gib": 0.05}},
}
STOPS = [*range(16, 30)]  # tokens that end a response, so that responses have different lengths
PARTIAL = {"partial": {"over_sample": 2.0, "chunk_tokens": 2}, "stop_token_ids": STOPS}
THREE_LAYERS = {"num_layers_in_first_pipeline_stage": 1}
SLOW = {"lr": 1e-3, "eps": 1e-4}  # Adam without eps makes a rounding error as large as a gradient
SPECIAL = {3, 4, 5}  # <|vision_start|>, <|vision_end|>, <|image_pad|>
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "DP2": (2, {}),
    "TP2+SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": (2, {"pipeline_model_parallel_size": 2, "override_transformer_config": THREE_LAYERS}),
}


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("shapes", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/ and data/: rows with 0, 1 and 2 pictures of three sizes; the same with responses, and with pairs of them."""
    root, example = tmp_path_factory.mktemp("vision"), load_example()
    example.write_model(root / "model", 0)
    assert len({(root / "model" / name).stat().st_mode for name in ("config.json", "model.safetensors")}) == 1
    weights = load_file(root / "model/model.safetensors")
    weights["lm_head.weight"][list(SPECIAL)] = weights["lm_head.weight"][40].clone()  # a token with a share of 3%
    save_file(weights, root / "model/model.safetensors", {"format": "pt"})
    example.write_rows(root / "data", "pictures", 24, 0)
    drawn = [json.loads(line) for line in (root / "data/pictures.jsonl").read_text().splitlines()]
    rows = []
    for number in range(12):
        own = drawn[2 * number : 2 * number + number % 3]
        images = [path for row in own for path in row["images"]]
        answer = str(sum(int(row["answer"]) for row in own))
        rows.append({"prompt": "shapes?", "answer": answer, **({"images": images} if images else {})})
    write_rows(root / "data/train.jsonl", rows)
    write_rows(root / "data/val.jsonl", rows[:4])
    write_rows(root / "data/warm_up.jsonl", [{**row, "response": row["answer"]} for row in rows])
    pairs = [{"chosen": row["answer"], "rejected": str(number % 7 + 9)} for number, row in enumerate(rows)]
    write_rows(root / "data/pairs.jsonl", [{**row, **pair} for row, pair in zip(rows, pairs, strict=True)])
    return root


def settings(root: Path, output: Path, layout: str | int = "1", **sections: Any) -> dict[str, Any]:
    """`layout`: a name of LAYOUTS, or a number of data-parallel ranks."""
    world, megatron = (layout, {}) if isinstance(layout, int) else LAYOUTS[layout]
    raw = run_ranks.settings(root, output, world)
    raw["data"] |= {"task": "jsonl", "apply_chat_template": True, "max_prompt_length": 32, "max_response_length": 8}
    raw["actor"] |= {"vision": TRAINED, "megatron": megatron}
    raw["rollout"] |= ENGINES["transformers"]
    for section, values in sections.items():
        raw.setdefault(section, {}).update(values)
    return raw


def train(raw: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    world: int = raw["trainer"]["n_gpus_per_node"]
    return worlds.run(run_ranks.train, world, raw=raw, **options)


def warmed_up(root: Path) -> dict[str, Any]:
    return {"steps": 2, "train_files": [str(root / "data/warm_up.jsonl")], "train_batch_size": 6}


def tokens_of(samples: list[Any]) -> list[Any]:
    """All but the log-probabilities, which depend on the layout a little, and the reward, which leaders know."""
    return [sample[:-2] for sample in samples]


def continued(steps: dict[int, list[Any]]) -> set[int]:
    """The response tokens that others follow."""
    return {token for samples in steps.values() for sample in samples for token in sample[3][:-1]}


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_two_steps_stop_two_steps_equal_four_steps(workspace: Path, tmp_path: Path, engine: str) -> None:
    """With a trained tower, and warm-up rows with images, on two data-parallel ranks."""

    def run(name: str, steps: int) -> list[dict[str, Any]]:
        trainer = {"total_training_steps": steps, "save_freq": 2, "test_freq": 2}
        trainer["rollout_data_dir"] = str(tmp_path / name / "rollouts")
        raw = settings(workspace, tmp_path / name, 2, trainer=trainer, sft=warmed_up(workspace))
        raw["rollout"] |= ENGINES[engine]
        return train(raw)

    whole, first, second = run("whole", 4), run("halves", 2), run("halves", 4)
    assert [result["first_step"] for result in second] == [2, 2]
    for a, b, c in zip(whole, first, second, strict=True):
        assert a["samples"] == {**b["samples"], **c["samples"]}
        assert_same(a, c)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "halves")
    rows = metric_rows(tmp_path / "whole")
    assert all(row["rollout/probe_logp_diff_max"] < 1e-5 for row in rows[:4])
    assert all(row["training/rollout_logp_diff_max"] < 1e-4 for row in rows[:4])
    written = [json.loads(line) for line in (tmp_path / "whole/rollouts/step_000003.jsonl").read_text().splitlines()]
    assert {len(row.get("images", ())) for row in written} == {0, 1, 2}
    assert SPECIAL & continued(run_ranks.all_samples(whole))
    before, after = first[0]["weights"], whole[0]["weights"]
    assert any(n.startswith("visual.") and not torch.equal(before[n], after[n]) for n in before)


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.soak)])
def test_responses_in_progress_go_on_in_other_layouts(workspace: Path, tmp_path: Path, engine: str) -> None:
    """One rank, and the same run whose checkpoints, with responses that wait, go from layout to layout."""

    def run(name: str, layout: str, steps: int) -> dict[str, Any]:
        trainer = {"total_training_steps": steps, "save_freq": 1}
        raw = settings(workspace, tmp_path / name, layout, trainer=trainer, rollout={**PARTIAL, "seed": 3})
        raw["rollout"] |= ENGINES[engine]
        raw["actor"]["optim"] = SLOW
        results = train(raw)
        return {**results[0], "samples": run_ranks.all_samples(results)}

    whole, parts = run("whole", "1", 3), {}
    for steps, layout in enumerate(("TP2+SP", "PP2", "DP2"), start=1):
        last = run("parts", layout, steps)
        parts |= last["samples"]
    for step, samples in whole["samples"].items():
        assert tokens_of(parts[step]) == tokens_of(samples), step
    for name, tensor in whole["weights"].items():
        torch.testing.assert_close(last["weights"][name], tensor, rtol=0, atol=2e-5, msg=name)
    rows = metric_rows(tmp_path / "parts")
    assert max(row["rollout/partial/waiting_responses"] for row in rows[:-1]) > 0
    assert all(row["rollout/probe_logp_diff_max"] < 1e-5 for row in rows)
    # In the first step every token is of these weights, also of responses that went on.
    assert rows[0]["rollout/partial/rounds"] > 1 and rows[0]["training/rollout_logp_diff_max"] < 1e-4
    assert SPECIAL & continued(whole["samples"])


@pytest.mark.soak  # test_determinism.py has the same without images
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_samples_do_not_depend_on_the_number_of_ranks(workspace: Path, tmp_path: Path, engine: str) -> None:
    """7 x 3 samples do not divide by 4, and engines decode 3 at a time, so ranks take waiting requests of each other.

    The policy of random weights samples `<|vision_start|>`, `<|vision_end|>` and `<|image_pad|>`, too: tokens as others are.
    """
    drawn = []
    for world in (1, 4):
        raw = settings(workspace, tmp_path / str(world), world, data={"train_batch_size": 7})
        raw["actor"] |= {"optim": {"lr": 0.0}, "ppo_mini_batch_size": 7, "ppo_epochs": 1}
        raw["rollout"] |= ENGINES[engine]
        raw["rollout"] |= {"max_num_seqs": 3} if world == 4 else {}
        samples = run_ranks.all_samples(train(raw, keep_weights=False))
        assert continued(samples) >= SPECIAL
        drawn.append(samples if engine == "vllm" else {step: tokens_of(samples[step]) for step in samples})
        assert all(row["training/rollout_logp_diff_max"] < 1e-4 for row in metric_rows(tmp_path / str(world)))
    assert drawn[0] == drawn[1]
    assert len(drawn[0][0]) == 21 and drawn[0][0] != drawn[0][1]


def in_roles(
    root: Path, output: Path, drawing: int, steps: int, lag: int = 0, layout: str = "1", **rollout: Any
) -> Any:
    """`rollout_ranks` 0: colocated."""
    world, megatron = LAYOUTS[layout]
    trainer = {"total_training_steps": steps, "test_freq": 2, "val_before_train": True, "save_freq": 2}
    raw = settings(root, output, world + drawing, trainer={**trainer, "n_gpus_per_node": world + drawing})
    raw["actor"]["megatron"] = megatron
    roles = {"placement": "separate", "num_ranks": drawing, **({"lag": lag} if lag else {})} if drawing else {}
    raw["rollout"] |= {**roles, **rollout}
    return raw


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "rollout"),
    [("1", {}), pytest.param("PP2", {**ENGINES["vllm"], "tensor_model_parallel_size": 2}, marks=pytest.mark.soak)],
)
def test_ranks_that_only_draw_give_the_colocated_run(
    workspace: Path, tmp_path: Path, layout: str, rollout: dict[str, Any]
) -> None:
    """Images go to the ranks that train with their samples."""
    results, training = [], LAYOUTS[layout][0]
    for name, drawing in (("colocated", 0), ("separate", training)):
        raw = in_roles(workspace, tmp_path / name, drawing, 3, layout=layout, **rollout)
        results.append(worlds.run(run_ranks.train_in_roles, training + drawing, raw=raw)[:training])
    together, apart = results
    assert run_ranks.all_samples(together) == run_ranks.all_samples(apart)
    for one, other in zip(together, apart, strict=True):
        assert_same(one, other)
    assert metrics(tmp_path / "colocated") == metrics(tmp_path / "separate")


@pytest.mark.soak
def test_steps_drawn_ahead_wait_in_a_checkpoint(workspace: Path, tmp_path: Path) -> None:
    """A lag of 2, and responses that several steps go on with. The run dies after step 4, and goes on from step 4's end."""

    def run(name: str, **options: Any) -> Any:
        raw = in_roles(workspace, tmp_path / name, 1, 7, lag=2, **PARTIAL)
        return worlds.run(run_ranks.train_in_roles, 2, raw=raw, **options)[0]

    whole = run("whole")
    with pytest.raises(AssertionError, match="died with exit code 9"):
        run("disturbed", die=(0, "update_actor", 6))
    last = run("disturbed")
    assert last["first_step"] == 4 and last["samples"] == {step: whole["samples"][step] for step in (4, 5, 6)}
    assert_same(last, whole)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "disturbed")


# It writes a digit before the second and later turns of the model once others follow them, which begins another row.
REWRITING = "{{ '0' if message.role == 'assistant' and loop.index > 2 and not loop.last else '' }}"


@pytest.mark.parametrize(
    ("engine", "layout"),
    [("transformers", "DP2"), *(pytest.param(e, "TP2+SP", marks=pytest.mark.soak) for e in ENGINES)],
)
def test_every_turn_may_show_an_image(workspace: Path, tmp_path: Path, engine: str, layout: str) -> None:
    """Rows have what the engine was given: tokens, images and places. One rank and two give the same samples and weights.

    Two ranks share prompts. Rows of one trajectory differ in their last image.
    """
    template, before = load_example().TEMPLATE, "{%- if message.content is string %}"
    (tmp_path / "turns.jinja").write_text(template.replace(before, f"{REWRITING}{before}"))
    results = []
    for name in ("1", layout):
        raw = settings(workspace, tmp_path / name, name)
        raw["reward"] = {}
        raw["data"] |= {"chat_template": str(tmp_path / "turns.jinja"), "max_response_length": 48}
        raw["actor"] |= {"optim": SLOW, "share_prompts": name != "1", "ppo_max_token_len_per_gpu": 400}
        turns = {
            "environment": "tests.e2e.environments:Pictures",
            "max_tool_response_length": 8,
            "max_assistant_turns": 4,
        }
        raw["rollout"] |= {**ENGINES[engine], "stop_token_ids": STOPS, "multi_turn": turns}
        results.append(train(raw))
        rows = metric_rows(tmp_path / name)
        assert all(row["training/rollout_logp_diff_max"] < 1e-4 for row in rows)
        assert all(1 < row["trajectory/sequences/mean"] < row["trajectory/turns/mean"] for row in rows)
        read = []
        for sample in (sample for samples in run_ranks.all_samples(results[-1]).values() for sample in samples):
            _, _, prompt, response, _, images, turns, *_ = sample
            for start, end, kind, _ in turns:
                if kind == "assistant":
                    length = len(prompt) + start
                    context = [*prompt, *response[:start], *(image for image in images if image[1] < length)]
                    read.append((tuple(context), tuple(response[start:end])))
        assert Counter(read) == Counter(entry for one in results[-1] if one["leader"] for entry in one["log"])
        assert len({context[-1] for context, _ in read}) > 20  # different last images, or places of them
    one, other = ({step: tokens_of(s) for step, s in run_ranks.all_samples(r).items()} for r in results)
    assert one == other
    for weight, tensor in results[0][0]["weights"].items():
        torch.testing.assert_close(results[1][0]["weights"][weight], tensor, rtol=0, atol=2e-5, msg=weight)


def test_trajectories_with_images_resume_and_replay(workspace: Path, tmp_path: Path) -> None:
    """Groups with images of each turn wait for a later step (rollout.partial), and are trained on again (algorithm.replay).

    A run that is resumed at step 2 gives the same samples and weights. The dumps of its updates replay.
    """
    turns = {"environment": "tests.e2e.environments:Pictures", "max_tool_response_length": 8, "max_assistant_turns": 5}
    shared = {"multi_turn": turns, "partial": {"over_sample": 2.0, "max_staleness": 2}, "stop_token_ids": STOPS}
    raws = []
    for name in ("whole", "resumed"):
        trainer = {"total_training_steps": 4, "save_freq": 2}
        raw = settings(workspace, tmp_path / name, trainer=trainer, rollout=shared, reward={"function": None})
        raw["data"]["max_response_length"] = 48
        raw["algorithm"] = {"replay": {"ratio": 0.34, "size": 4}}
        raw["guards"] = {"grad_norm": {"high": 1e-9}}  # warns, and dumps the update
        raws.append({**raw, "resumed": 2} if name == "resumed" else raw)
    [[whole, resumed]] = worlds.run(run_ranks.train_and_resume, 1, raws=raws)
    assert resumed["samples"] == {step: whole["samples"][step] for step in (2, 3)}
    assert all(torch.equal(tensor, resumed["weights"][name]) for name, tensor in whole["weights"].items())
    rows = metric_rows(tmp_path / "whole")
    assert rows[1]["rollout/partial/waiting_responses"] > 0 and rows[2]["train/replayed_groups"] > 0
    state = run_state(tmp_path / "whole/checkpoints/step_000002")["collector"]
    for groups in (state["groups"], state["inner"]["waiting"]):
        prompts = [sample["prompt"] for group in groups for sample in group["samples"]]
        assert any(first >= len(one["prompt_ids"]) > 0 for one in prompts for *_, first in one["images"])
    under_way = [one for group in groups for one in group["samples"] if one["finish_reason"] == UNFINISHED]
    assert under_way and not any(one["prompt"]["images"] for one in under_way)  # the environment shows them again
    dumps = sorted((tmp_path / "resumed/dumps").iterdir())
    assert len(dumps) > 1
    for code, text in replayed(1, dumps=dumps[:2])[0]:
        assert code == 0, text
        _, _, difference = next(map(float, line.split()[1:]) for line in text.splitlines() if "grad_norm  " in line)
        assert abs(difference) < 1e-4, text


FILE = {"source": "file", "adv_estimator": "constant"}
SFT = {"loss_mode": "sft", "use_kl_loss": False}
DPO = {"loss_mode": "dpo", "use_kl_loss": False, "loss_agg_mode": "seq-mean-token-mean", "ppo_mini_batch_size": 6}
BUFFERS = {
    "reward": {"function": "tests.e2e.rewards:parity_reward"},  # 0 or 1: some groups are not informative
    "data": {"gen_batch_size": 8},
    "algorithm": {"filter_groups": {"enable": True, "max_num_gen_batches": 3}, "replay": {"ratio": 0.34}},
}
METHODS: dict[str, dict[str, Any]] = {
    "plain": {"actor": {"optim": SLOW}},
    "shared prompts": {"actor": {"optim": SLOW, "share_prompts": True}},
    "greedy baseline": {"algorithm": {"adv_estimator": "remax"}},
    "renewed reference": {
        "algorithm": {"iteration_steps": 2},
        "actor": {"ppo_mini_batch_size": 6, "ppo_epochs": 1},
        "trainer": {"total_training_steps": 3, "save_freq": 1},
    },
    "frozen merger": {"actor": {"vision": {"freeze_tower": False}}},
    "lora": {"actor": {"lora": {"rank": 4}, "vision": {}}},
    "sft": {"algorithm": FILE, "actor": SFT},
    "dpo": {"algorithm": {**FILE, "adv_estimator": "best_worst"}, "actor": DPO},
    "buffers": {**BUFFERS, "trainer": {"total_training_steps": 4}},
    "buffers again": {**BUFFERS, "trainer": {"total_training_steps": 2, "save_freq": 2}},
    "buffers resumed": {**BUFFERS, "trainer": {"total_training_steps": 4, "save_freq": 2}},
}


IN_THE_SOAK = ("greedy baseline", "renewed reference", "frozen merger", "sft")


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, workspace: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    folder, raws = tmp_path_factory.mktemp("methods"), []
    wanted = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    methods = {name: sections for name, sections in METHODS.items() if name not in IN_THE_SOAK or name in wanted}
    for name, sections in methods.items():
        output = folder / name.replace("again", "resumed").replace(" ", "_")  # both halves share one folder
        raw = settings(workspace, output, **sections)
        if not raw["actor"].get("use_kl_loss", True):
            del raw["actor"]["kl_loss_coef"]
        if name in ("sft", "dpo"):
            written = "warm_up.jsonl" if name == "sft" else "pairs.jsonl"
            files = [str(workspace / "data" / written)]
            raw["data"] |= {"train_files": files, "val_loss_files": files}
            raw["trainer"] |= {"test_freq": 1, "val_before_train": True}
        else:
            raw["trainer"]["rollout_data_dir"] = str(output / "rollouts")
        raws.append(raw)
    results = worlds.run(run_ranks.train_many, 1, raws=raws)[0]
    for raw, result in zip(raws, results, strict=True):
        result["output_dir"] = Path(raw["trainer"]["output_dir"])
        result["metrics"] = metric_rows(result["output_dir"])
    return dict(zip(methods, results, strict=True))


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["merged", "split"])
def test_vllm_draws_with_adapters(workspace: Path, tmp_path: Path, mode: str) -> None:
    raw = settings(workspace, tmp_path, "PP2", rollout=ENGINES["vllm"])
    raw["actor"] |= {"lora": {"rank": 4, "mode": mode}, "vision": {}}
    train(raw, keep_weights=False)
    for row in metric_rows(tmp_path):
        assert row["rollout/probe_logp_diff_max"] < 1e-5 and row["training/rollout_logp_diff_max"] < 1e-4


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] * (name in IN_THE_SOAK)) for name in METHODS]
)
def test_every_method_trains_with_images(runs: dict[str, dict[str, Any]], name: str) -> None:
    rows = [row for row in runs[name]["metrics"] if "actor/grad_norm" in row]
    assert len(rows) == METHODS[name].get("trainer", {}).get("total_training_steps", 2) or "again" in name
    for row in rows:
        assert 0 < row["actor/grad_norm"] < 1e4 and row["actor/skipped_updates"] == 0
        assert row["perf/image_tokens"] > 0
        if name in ("sft", "dpo"):
            [loss] = [value for key, value in row.items() if key.startswith("val/loss/")]
            assert 0.1 < loss < 10
        else:
            assert row["rollout/probe_logp_diff_max"] < 1e-5
            assert row["training/rollout_logp_diff_max"] < 1e-4 or row.get("train/replayed_groups")


@pytest.mark.soak
def test_a_reference_computes_images_anew_when_it_is_renewed(runs: dict[str, dict[str, Any]]) -> None:
    """It is the policy of steps 0 and 2, whose tower has been trained between them. Both steps have the same images."""
    divergences = [row["actor/kl_loss"] for row in runs["renewed reference"]["metrics"] if "actor/kl_loss" in row]
    assert divergences[0] < 1e-9 and divergences[2] < 1e-9 and divergences[1] > 1e-3


def test_shared_prompts_train_as_whole_rows(runs: dict[str, dict[str, Any]]) -> None:
    assert 0 < runs["shared prompts"]["metrics"][0]["perf/shared_prompt_ratio"] < 1
    for name, tensor in runs["plain"]["weights"].items():
        torch.testing.assert_close(runs["shared prompts"]["weights"][name], tensor, rtol=0, atol=2e-5, msg=name)


def test_adapters_leave_the_tower_as_it_is(runs: dict[str, dict[str, Any]], workspace: Path) -> None:
    """The merged weights of the decoder have changed."""
    before = load_file(workspace / "model/model.safetensors")
    assert before.keys() == runs["lora"]["weights"].keys()
    changed = {name for name, tensor in runs["lora"]["weights"].items() if not torch.equal(tensor, before[name])}
    assert len(changed) == 3 * 7 and not any(name.startswith("visual.") for name in changed)


@pytest.mark.soak
def test_a_frozen_merger_stays_while_the_tower_is_trained(runs: dict[str, dict[str, Any]], workspace: Path) -> None:
    before, after = load_file(workspace / "model/model.safetensors"), runs["frozen merger"]["weights"]
    same = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    assert same == {name for name in before if ".merger." in name}


def test_groups_that_wait_have_their_images_once(runs: dict[str, dict[str, Any]]) -> None:
    """Left-over groups of dynamic sampling, and those of the replay buffer."""
    whole, resumed = runs["buffers"], runs["buffers resumed"]
    for name, tensor in whole["weights"].items():
        assert torch.equal(tensor, resumed["weights"][name]), name
    assert sum(row["train/replayed_groups"] for row in whole["metrics"]) > 0
    state = run_state(resumed["output_dir"] / "checkpoints/step_000002")["collector"]
    assert state["groups"] and state["inner"]["left_over"]
    groups = [*state["groups"], *state["inner"]["left_over"]]
    images = [{one[0] for sample in group["samples"] for one in sample["prompt"]["images"]} for group in groups]
    assert [set(group["pixels"]) for group in groups] == images and {0, 1, 2} == set(map(len, images))


def test_rollout_files_name_images(runs: dict[str, dict[str, Any]], workspace: Path) -> None:
    """Also those of groups that have waited in a checkpoint."""
    rows = [json.loads(line) for line in (workspace / "data/train.jsonl").read_text().splitlines()]
    for name in ("plain", "buffers resumed"):
        for path in (runs[name]["output_dir"] / "rollouts").glob("step_*.jsonl"):
            for written in map(json.loads, path.read_text().splitlines()):
                given = rows[int(written["uid"].rpartition("/")[2])].get("images", [])
                found = [image["path"] for image in written.get("images", [])]
                assert found == [str(workspace / "data" / image) for image in given]


def learn(folder: Path, warm_up: int, steps: int, *, shuffled: bool) -> tuple[float, float, float]:
    """Held-out accuracies before and after GRPO in the example, shortened, and the most without a look: the share of the
    most frequent answer, plus three standard errors.

    `shuffled`: every row has the picture of another one.
    """
    example, raw = load_example(), yaml.safe_load(EXAMPLE.with_suffix(".yaml").read_text())
    example.write_model(folder / "model", 0)
    for name in ("warm_up", "train", "val"):
        example.write_rows(folder / "data", name, 256 if name == "val" else 512, 0, held_out=name == "val")
        path = folder / f"data/{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        images = [row["images"] for row in rows]
        if shuffled:
            random.Random(0).shuffle(images)
        write_rows(path, [{**row, "images": own} for row, own in zip(rows, images, strict=True)])
    raw["model"]["path"], raw["reward"]["function"] = str(folder / "model"), "examples.vision.shapes:exact"
    raw["data"] |= {f"{name}_files": [str(folder / f"data/{name}.jsonl")] for name in ("train", "val")}
    raw["sft"] |= {"steps": warm_up, "train_files": [str(folder / "data/warm_up.jsonl")]}
    raw["trainer"] |= {"total_training_steps": steps, "test_freq": steps, "save_freq": -1, "n_gpus_per_node": 1}
    raw["trainer"] |= {"output_dir": str(folder / "run"), "logger": ["jsonl"], "save_hf_at_end": False}
    worlds.run(run_ranks.train, 1, raw=raw, keep_weights=False)
    share = max(Counter(row["answer"] for row in rows).values()) / len(rows)
    key = "val-core/jsonl/reward/mean@1"
    before, after = (row[key] for row in metric_rows(folder / "run") if key in row)
    return before, after, share + 3 * math.sqrt(share * (1 - share) / len(rows))


@pytest.mark.soak
def test_a_policy_learns_to_look_unless_pictures_are_those_of_other_rows(tmp_path: Path) -> None:
    for shuffled in (False, True):
        before, after, without_a_look = learn(tmp_path / str(shuffled), 20, 60, shuffled=shuffled)
        assert before < 0.45 and (after < without_a_look if shuffled else after > 0.7), (shuffled, before, after)


def decoded(raw: dict[str, Any]) -> dict[str, Counter[int]]:
    """In a rank: the run; how many images were decoded for what, once the run has begun."""
    from grpo_megatron import run
    from grpo_megatron.data import images
    from grpo_megatron.sampling import wrappers

    plain, found, now = images._decode, {"exchange": Counter[int](), "pack_groups": Counter[int]()}, [""]

    def counted(data: bytes) -> Any:
        if now[0]:
            found[now[0]][zlib.crc32(data)] += 1
        return plain(data)

    def within(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            now[0] = name
            try:
                return function(*arguments)
            finally:
                now[0] = ""

        return call

    with (
        mock.patch.object(images, "_decode", counted),
        mock.patch.object(run, "exchange", within("exchange", run.exchange)),
        mock.patch.object(wrappers, "pack_groups", within("pack_groups", wrappers.pack_groups)),
    ):
        run_ranks.train(raw, keep_weights=False)
    return found


def test_an_image_is_decoded_once_for_all_samples_of_a_prompt(workspace: Path, tmp_path: Path) -> None:
    """Images of rows are decoded when they are read: by each engine step, by the exchange, for a checkpoint."""
    raw = settings(workspace, tmp_path, "1", **BUFFERS, trainer={"total_training_steps": 1, "save_freq": 1})
    raw["rollout"]["n"] = 4
    [found] = worlds.run(decoded, 1, raw=raw)
    assert all(found.values()) and {count for counts in found.values() for count in counts.values()} == {1}
