"""Every method with the real trainer, engine and reward workers: two ranks, one engine, two or three steps each.

These tests show that a method's data source, plan, exchange, loss and engine fit together. tests/algo has the formulas,
and examples/compare_methods.py shows that the examples learn.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_megatron.models.heads.reward_folder import check_reward_weights, read_reward_folder
from grpo_megatron.report.trace_file import TraceFolder
from grpo_megatron.starting.generated import build_tokenizer
from grpo_megatron.trust.compare import compare_runs, compare_seams
from tests import worlds
from tests.convert.folders import convert, same_bits, tensors_of
from tests.e2e import run_ranks
from tests.models.test_reward_model import make_classifier, make_step_classifier
from tests.stored import metric_rows, stored

SFT = {"loss_mode": "sft", "use_kl_loss": False}
DPO = {"loss_mode": "dpo", "use_kl_loss": False, "loss_agg_mode": "seq-mean-token-mean", "ppo_mini_batch_size": 6}
PARITY = {"function": "tests.e2e.rewards:parity_reward"}  # 0 or 1: some groups are not informative
PPO = {
    "algorithm": {"adv_estimator": "gae", "lam": 0.9, "use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.1}},
    "critic": {"lam": 0.5, "pretrain_steps": 1, "ppo_mini_batch_size": 6, "optim": {"lr": 1e-3}},
    "actor": {
        "use_kl_loss": False,
        "entropy_target": 5.0,
    },  # above log 80: the bonus grows, and is part of a checkpoint
}
ADAPTED = {"lora": {"rank": 4, "alpha": 8.0}}
LORA = {**PPO, "critic": {**PPO["critic"], **ADAPTED}, "actor": {**PPO["actor"], **ADAPTED}}
PARTIAL = {"rollout": {"partial": {"over_sample": 1.5, "chunk_tokens": 2}, "stop_token_ids": [*range(20, 45)]}}
METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dynamic": {
        "reward": PARITY,
        "data": {"gen_batch_size": 4},
        "algorithm": {"filter_groups": {"enable": True, "max_num_gen_batches": 5}},
        "trainer": {"total_training_steps": 3},
    },
    "partial": {**PARTIAL, "trainer": {"total_training_steps": 3}},
    "partial again": {**PARTIAL, "trainer": {"total_training_steps": 2, "save_freq": 2}},
    "partial resumed": {**PARTIAL, "trainer": {"total_training_steps": 3, "save_freq": 2}},
    "a3po": {**PARTIAL, "algorithm": {"rollout_correction": {"prox_logp_method": "loglinear"}}},
    "dupo": {"reward": PARITY, "algorithm": {"dupo": True}},
    "replay": {"algorithm": {"replay": {"ratio": 0.5}}, "trainer": {"total_training_steps": 3}},
    "remax": {"algorithm": {"adv_estimator": "remax"}},
    "process": {
        "algorithm": {"adv_estimator": "grpo_process"},
        "reward": {"function": "tests.e2e.rewards:step_reward"},
    },
    "kl in reward": {
        "algorithm": {
            "adv_estimator": "reinforce_plus_plus",
            "use_kl_in_reward": True,
            "kl_ctrl": {"type": "adaptive", "kl_coef": 0.5, "target_kl": 0.001, "horizon": 100},
        },
        "actor": {"use_kl_loss": False},
    },
    "gdpo with a mask": {  # four updates per batch, against the engine's log-probabilities
        "reward": {
            "length": {"kind": "group", "coefficient": 0.1},
            "function": None,
            "components": [
                {"name": name, "function": f"tests.e2e.rewards:{name}_reward"} for name in ("length", "odd")
            ],
        },
        "algorithm": {
            "adv_estimator": "gdpo",
            "gdpo_reward_keys": ["length", "odd"],
            "rollout_correction": {"bypass_mode": True, "rollout_is": None},
        },
        "actor": {
            "loss_mode": "kpop",
            "ppo_mini_batch_size": 3,
            "clip_ratio_low": 1e-6,
            "clip_ratio_high": 1e-6,
            "top_entropy_quantile": 0.4,
        },
    },
    "rejection": {"algorithm": {"rollout_correction": {"rollout_rs": "token", "rollout_rs_threshold": 1.0000001}}},
    "ppo": {**PPO, "trainer": {"total_training_steps": 3, "save_hf_at_end": True}},
    "ppo again": {**PPO, "trainer": {"total_training_steps": 2, "save_freq": 2}},
    "ppo resumed": {  # and offloaded, which changes no bit
        **PPO,
        "critic": {**PPO["critic"], "offload": True},
        "trainer": {"total_training_steps": 3, "save_freq": 2, "save_hf_at_end": True},
    },
    "lora": {**LORA, "trainer": {"total_training_steps": 3, "save_hf_at_end": "merged"}},
    "lora again": {**LORA, "trainer": {"total_training_steps": 2, "save_freq": 2}},
    "lora resumed": {**LORA, "trainer": {"total_training_steps": 3, "save_freq": 2, "save_hf_at_end": True}},
    "rft": {"algorithm": {"source": "initial", "adv_estimator": "rft", "rft_threshold": 4.0}, "actor": SFT},
    "online rft": {"algorithm": {"adv_estimator": "rft", "rft_threshold": 4.0}, "actor": SFT},
    "dpo": {"algorithm": {"source": "initial", "adv_estimator": "best_worst"}, "actor": DPO},
    "frozen models": {  # rows without an answer, and no reward function
        "algorithm": {"adv_estimator": "grpo_process"},
        "reward": {"function": None},
        "reward_model": {"kind": "process", "step_separator": "3", "coefficient": 2.0},
        "actor": {"megatron": {"offload_reference": True}},
    },
    "without rewards": {  # saved before the optimizer has done anything
        "reward": {"function": "tests.e2e.rewards:broken_reward", "max_failed_ratio": 1.0},
        "trainer": {"save_freq": 1},
    },
    "iterative": {"algorithm": {"iteration_steps": 2}, "trainer": {"total_training_steps": 3, "save_freq": 1}},
    "iterative lora": {
        "algorithm": {"iteration_steps": 2},
        "actor": {"lora": {"rank": 4, "mode": "split", "dropout": 0.1}},
        "trainer": {"total_training_steps": 3},
    },
}


# tests/algo has the formulas of these, too; test_vision.py has SFT and DPO from files
IN_THE_SOAK = ("lora", "lora again", "lora resumed", "partial again", "partial resumed", "a3po", "remax", "process")
IN_THE_SOAK += ("rejection",)


def in_the_soak(name: str) -> Any:
    return pytest.param(name, marks=[pytest.mark.soak] * (name in IN_THE_SOAK))


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, workspace: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("methods")
    is_soak = any(item.get_closest_marker("soak") and item.path == request.path for item in request.session.items)
    methods = {name: sections for name, sections in METHODS.items() if is_soak or name not in IN_THE_SOAK}
    raws = []
    for name, sections in methods.items():
        output = folder / name.replace("again", "resumed").replace(" ", "_")  # both halves share one folder
        raw = run_ranks.settings(workspace, output, 2, **sections)
        raw["rollout"]["engine"] = "transformers"  # the faster one; the other tests of this folder have vLLM
        if name == "frozen models":
            use_frozen_models(raw, workspace, folder)
        raws.append(raw)
    results, other_rank = worlds.run(run_ranks.train_many, 2, timeout_s=2300, raws=raws)
    for raw, result, other in zip(raws, results, other_rank, strict=True):
        result["token_weights"] = list(zip(result["token_weights"], other["token_weights"], strict=True))
        result["output_dir"] = Path(raw["trainer"]["output_dir"])
        result["metrics"] = metric_rows(result["output_dir"])
    return dict(zip(methods, results, strict=True))


def use_frozen_models(raw: dict[str, Any], workspace: Path, folder: Path) -> None:
    """A process reward model and an outcome one of random weights, and prompts without answers."""
    sizes = {"vocab_size": 80, "num_hidden_layers": 2}
    raw["reward_model"]["path"] = str(make_step_classifier(folder / "steps", **sizes))
    raw["reward_models"] = {"outcome": {"path": str(make_classifier(folder / "outcome", "qwen2", **sizes))}}
    for name in ("steps", "outcome"):
        build_tokenizer().save_pretrained(folder / name)
    rows = [json.loads(line) for line in (workspace / "data/train.jsonl").read_text().splitlines()]
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    raw["data"] |= {"train_files": [str(folder / "prompts.jsonl")], "val_files": []}


pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]  # one fixture does all the runs


def column(run: dict[str, Any], name: str) -> list[float]:
    return [row[name] for row in run["metrics"]]


@pytest.mark.parametrize("name", [in_the_soak(name) for name in METHODS if name != "without rewards"])
def test_it_trains_and_resumes_equal(runs: dict[str, dict[str, Any]], name: str) -> None:
    """Every update is finite. A run that stopped (`NAME again`) and went on has the bits of the unbroken one (`NAME`)."""
    run, frozen = runs[name], METHODS[name].get("critic", {}).get("pretrain_steps", 0)  # steps without an update
    assert not any("actor/grad_norm" in row for row in run["metrics"][:frozen])
    updates = {"metrics": run["metrics"][frozen:]}
    norms = column(updates, "actor/grad_norm")
    assert frozen + len(norms) == METHODS[name].get("trainer", {}).get("total_training_steps", 2) or "again" in name
    assert all(math.isfinite(norm) and norm > 0 for norm in norms)
    assert column(updates, "actor/skipped_updates") == [0] * len(norms)
    if f"{name} resumed" in runs:
        whole, stopped, resumed = (runs[key]["weights"] for key in (name, f"{name} again", f"{name} resumed"))
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(tensor, resumed[key]) for key, tensor in whole.items())
        assert not all(torch.equal(tensor, stopped[key]) for key, tensor in whole.items())


def test_steps_without_a_single_reward_change_nothing(runs: dict[str, dict[str, Any]], workspace: Path) -> None:
    before = load_file(workspace / "model/model.safetensors")
    after = runs["without rewards"]["weights"]
    assert after.keys() <= before.keys() | {"lm_head.weight"} and len(after) > 10
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items() if name in before)
    assert column(runs["without rewards"], "reward/failed_ratio") == [1.0, 1.0]


def test_dynamic_sampling_trains_on_informative_groups(runs: dict[str, dict[str, Any]]) -> None:
    assert column(runs["dynamic"], "critic/zero_variance_ratio") == [0, 0, 0]
    assert max(column(runs["dynamic"], "train/num_gen_batches")) > 1
    ages = column(runs["dynamic"], "train/left_over_staleness_max")
    assert ages[0] == 0 and max(ages) == 1  # what is left over is used, and is not older than it may be
    assert any(ratio > 0 for ratio in column(runs["dupo"], "critic/zero_variance_ratio"))  # else nothing was filtered


def test_partial_rollouts_go_on_under_newer_weights(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["partial"]
    assert column(run, "rollout/partial/waiting_groups") == [3, 3, 3]
    assert min(column(run, "rollout/partial/waiting_responses")[:2]) > 0  # the checkpoint has responses in progress
    shares = column(run, "rollout/partial/earlier_token_ratio")
    drift = column(run, "rollout_corr/k3_kl")
    assert shares[0] == 0 < min(shares[1:]) and drift[0] < 1e-9 < 1e-5 < min(drift[1:])


@pytest.mark.soak
def test_a3po_needs_no_pass_for_old_logprobs(runs: dict[str, dict[str, Any]]) -> None:
    assert not any("timing_s/old_log_prob" in row for row in runs["a3po"]["metrics"])
    assert all("timing_s/old_log_prob" in row for row in runs["partial"]["metrics"])
    assert max(column(runs["a3po"], "rollout/partial/earlier_token_ratio")) > 0


def test_dupo_trains_on_no_group_without_variance(runs: dict[str, dict[str, Any]]) -> None:
    for table, plan in zip(runs["dupo"]["tables"], runs["dupo"]["plans"], strict=True):
        informative = [rows for rows in table.groups() if len({table.reward[row] for row in rows}) > 1]
        assert set(plan.owner()) <= {row for rows in informative for row in rows}


def test_replayed_groups_are_weighed(runs: dict[str, dict[str, Any]]) -> None:
    assert column(runs["replay"], "train/replayed_groups") == [0, 3, 3]
    drift = column(runs["replay"], "rollout_corr/k3_kl")
    assert drift[0] < 1e-9 < 1e-4 < drift[1]  # the first step is on-policy, the second holds samples of older weights


@pytest.mark.soak
def test_remax_has_the_greedy_rewards(runs: dict[str, dict[str, Any]]) -> None:
    for table in runs["remax"]["tables"]:
        assert all(math.isfinite(reward) for reward in table.greedy_reward)
        assert len({(p, g) for p, g in zip(table.prompt_index, table.greedy_reward, strict=True)}) == 6


def test_parts_of_rewards_are_known_and_moved_tokens_are_masked(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["gdpo with a mask"]
    for table in run["tables"]:
        assert [sum(parts) for parts in table.reward_parts] == table.raw_reward != table.reward
        assert len({tuple(parts) for parts in table.reward_parts}) > 2
    shares = column(
        run, "actor/pg_clipfrac"
    )  # in the first of the four updates per batch, no token is beyond the bound
    assert all(0.6 < share < 0.8 for share in shares), shares
    assert [row.get("actor/entropy_coeff") for row in runs["ppo"]["metrics"]] == [
        None,
        0.0,
        0.005,
    ]  # of the steps with an update
    assert column(run, "actor/selected_frac") == pytest.approx([0.4, 0.4], abs=0.02)


@pytest.mark.soak
def test_step_rewards_reach_their_tokens(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["process"]
    for table, plan in zip(run["tables"], run["plans"], strict=True):
        for steps, length, advantage in zip(table.step_rewards, table.response_length, plan.advantages, strict=True):
            assert all(0 <= token < length for token, _ in steps)
            assert advantage == 0 or (isinstance(advantage, list) and len(advantage) == length)
        assert any(len(set(advantage)) > 1 for advantage in plan.advantages if isinstance(advantage, list))


def test_frozen_models_need_no_rule(runs: dict[str, dict[str, Any]]) -> None:
    """Step rewards: 2 x the probability of the step, and at the last one also the outcome model's score."""
    run = runs["frozen models"]
    for number, table in enumerate(run["tables"]):
        assert all(math.isfinite(reward) for reward in table.reward)
        steps = [value for row in table.step_rewards for _, value in row]
        not_last = [value for row in table.step_rewards for _, value in row[:-1]]
        assert not_last and all(0 < value < 2 for value in not_last)
        outcome = column(run, "reward_model/outcome/score/mean")[number]
        mean_step = column(run, "reward_model/step_score/mean")[number]
        assert sum(steps) == pytest.approx(2 * mean_step * len(steps) + outcome * len(table), abs=1e-4)
    names = {name for row in run["metrics"] for name in row}
    assert not {"reward/failed_ratio", "reward_model/rule_reward/mean", "reward_model/agreement"} & names


def test_kl_in_the_reward_moves_advantages_and_its_coefficient(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["kl in reward"]
    first, second = column(run, "actor/reward_kl_penalty")
    assert first == pytest.approx(0, abs=1e-6) and second > 1e-3  # the policy has left the reference
    before, after = column(run, "actor/reward_kl_penalty_coeff")
    assert before == 0.5 and after == pytest.approx(0.5 * (1 - 0.2 * 18 / 100))
    spread = [advantage for advantage in run["plans"][1].advantages if isinstance(advantage, list)]
    assert any(len(set(values)) > 1 for values in spread)  # one advantage per token, not one per sample


def test_ppo_trains_its_critic_and_resumes_with_it(
    runs: dict[str, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 0 trains the critic alone, with lambda 1: every token's target is the reward. The KL to the start is still 0.

    The converter makes the exported folder from the checkpoint's critic, bit for bit.
    """
    run, resumed = runs["ppo"], runs["ppo resumed"]
    traces = [TraceFolder(one["output_dir"]) for one in (run, resumed)]  # the critic's stages, too
    seams = compare_seams(traces[1])
    assert (compare_runs(*traces).verdict, seams.verdict, seams.num_steps) == ("equal", "equal", 1), seams
    assert {"returns", "critic gradients 0", "critic weights"} <= set(traces[0].steps[2])
    assert "critic weights" in traces[1].facts[2]["state"]
    assert all(norm > 0 for norm in column(run, "critic/grad_norm")) and column(run, "critic/lr") == [1e-3] * 3
    first, *later = column(run, "critic/values/mean")
    assert first == 0 and all(later)
    assert column(run, "critic/vf_explained_var")[0] == 0 and column(run, "critic/vf_loss")[0] > 0
    table = run["tables"][0]
    weighted = [reward * count for reward, count in zip(table.reward, table.response_length, strict=True)]
    assert column(run, "critic/returns/mean")[0] == pytest.approx(sum(weighted) / sum(table.response_length), rel=1e-5)
    for table, plan in zip(run["tables"], run["plans"], strict=True):
        advantages = [a for row, value in enumerate(plan.advantages) for a in value if table.response_length[row]]
        assert math.fsum(advantages) == pytest.approx(0, abs=1e-6)
        assert math.fsum(a * a for a in advantages) / (len(advantages) - 1) == pytest.approx(1, abs=1e-6)
    critics = [load_file(result["output_dir"] / "critic/model.safetensors") for result in (run, resumed)]
    assert set(critics[0]) == set(critics[1]) >= {"score.weight", "score.bias"}
    assert all(torch.equal(tensor, critics[1][name]) for name, tensor in critics[0].items())
    assert not torch.equal(critics[0]["model.norm.weight"], run["weights"]["model.norm.weight"])
    check_reward_weights(read_reward_folder(run["output_dir"] / "critic", "value"))  # critic.path accepts it
    part = resumed["output_dir"] / "checkpoints/step_000003/critic"
    assert convert("to-hf", part, tmp_path / "critic", "--quiet") == 0
    same_bits(critics[1], tensors_of(tmp_path / "critic"))
    exported, converted = (folder / "critic" / "config.json" for folder in (resumed["output_dir"], tmp_path))
    assert json.loads(exported.read_text()) == json.loads(converted.read_text())
    assert convert("verify", part, resumed["output_dir"] / "critic", "--quiet") == 0
    capsys.readouterr()
    assert convert("inspect", part) == 0 and "scalar head (a value model: " in capsys.readouterr().out
    shutil.copytree(part / "state", tmp_path / "copied" / "state")  # without critic.json
    arguments = ("to-hf", tmp_path / "copied", tmp_path / "out", "--quiet", "--hf", resumed["output_dir"] / "hf")
    assert convert(*arguments) == 2 and not (tmp_path / "out").exists()
    assert "put back the file" in capsys.readouterr().err


@pytest.mark.soak
def test_lora_trains_adapters_serves_their_merged_weights_and_resumes(
    runs: dict[str, dict[str, Any]], workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PPO with adapters of policy and critic. Step 0 trains the critic alone, so the KL to the base is 0 until step 2."""
    run, resumed = runs["lora"], runs["lora resumed"]
    base = load_file(workspace / "model/model.safetensors")
    changed = {name for name, tensor in base.items() if not torch.equal(tensor, run["weights"][name])}
    assert changed and all("_proj." in name and name.endswith("weight") for name in changed)
    assert {name.split(".")[-2] for name in changed} == {
        f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")
    }
    assert max(column(run, "rollout/probe_logp_diff_max")) < 1e-5
    assert column(run, "actor/reward_kl_penalty")[:2] == [0, 0] and column(run, "actor/reward_kl_penalty")[2] > 0
    step, adapters = resumed["output_dir"] / "checkpoints/step_000003", resumed["output_dir"] / "hf"  # a PEFT folder
    assert convert("to-hf", step, tmp_path / "adapters", "--quiet") == 0
    same_bits(tensors_of(adapters), tensors_of(tmp_path / "adapters"))
    settings = [
        json.loads((folder / "adapter_config.json").read_text()) for folder in (adapters, tmp_path / "adapters")
    ]
    assert settings[0] == settings[1] and "q_proj" in settings[0]["target_modules"]
    for number, source in enumerate((step, adapters)):  # the whole model, bit for bit
        assert convert("merge", source, tmp_path / f"{number}", "--quiet") == 0
        same_bits(run["weights"], tensors_of(tmp_path / f"{number}"))
        assert convert("verify", source, run["output_dir"] / "hf", "--quiet") == 0
    assert convert("to-hf", step / "critic", tmp_path / "critic", "--quiet") == 0
    same_bits(tensors_of(resumed["output_dir"] / "critic"), tensors_of(tmp_path / "critic"))
    shutil.copytree(workspace / "model", tmp_path / "other")
    save_file({name: tensor + 1 for name, tensor in base.items()}, tmp_path / "other/model.safetensors")
    capsys.readouterr()
    for command in (("merge", step, tmp_path / "x"), ("verify", step, run["output_dir"] / "hf")):
        assert convert(*command, "--hf", tmp_path / "other") == 2
        assert "adapters of another base" in (told := capsys.readouterr().err) and "other/model.safetensors has" in told
    critics = [load_file(result["output_dir"] / "critic/model.safetensors") for result in (run, resumed)]
    assert all(torch.equal(tensor, critics[1][name]) for name, tensor in critics[0].items())
    for folder in ("", "critic"):  # no base weight is stored; beside the factors, the critic's head
        names = stored(resumed["output_dir"] / "checkpoints/step_000003" / folder)
        own = [name.removeprefix("optimizer.state.") for name in names if "lora_" not in name]
        assert {name.split(".")[-2] for name in own} == ({"score"} if folder else set()), own


@pytest.mark.soak
def test_rejected_tokens_weigh_nothing_and_the_rest_sums_to_one(runs: dict[str, dict[str, Any]]) -> None:
    """Over both ranks, in each of the two mini-batches of a step."""
    assert all(0 < share < 1 for share in column(runs["rejection"], "rollout_corr/rollout_rs_masked_fraction"))
    for ranks in runs["rejection"]["token_weights"]:
        assert sum(float(weights.sum()) for weights, _ in ranks) == pytest.approx(2)
        assert all(float(weights[~mask].abs().sum()) == 0 for weights, mask in ranks)
        assert all((weights[mask] > 0).all() for weights, mask in ranks)


def test_likelihood_methods_learn_from_right_answers_only(runs: dict[str, dict[str, Any]]) -> None:
    for name in ("rft", "online rft"):
        for table, plan in zip(runs[name]["tables"], runs[name]["plans"], strict=True):
            assert {row for row, a in enumerate(plan.advantages) if a is not None} == {
                row for row, reward in enumerate(table.reward) if reward >= 4
            }
    # At step 0 policy and initial model have the same weights; step 1 shows which of them samples.
    assert runs["rft"]["tables"][0].reward == runs["online rft"]["tables"][0].reward
    assert runs["rft"]["tables"][1].reward != runs["online rft"]["tables"][1].reward


def test_dpo_starts_from_even_odds(runs: dict[str, dict[str, Any]]) -> None:
    # One mini-batch, two epochs: in the first the policy is the reference, so the loss is log 2; then it has moved.
    assert column(runs["dpo"], "actor/pg_loss")[0] < math.log(2)
    assert column(runs["dpo"], "actor/dpo_margin")[1] > 0


def test_iterative_grpo_renews_its_reference(runs: dict[str, dict[str, Any]]) -> None:
    kl = column(runs["iterative"], "actor/kl_loss")
    plain = column(runs["plain"], "actor/kl_loss")
    assert kl[:2] == plain[:2]
    assert kl[2] < kl[1] / 2  # to the renewed reference, not to the initial model
    first, second, renewed = column(runs["iterative lora"], "actor/kl_loss")
    assert renewed < second / 2 and first < second  # with adapters, of which it keeps a copy
    copies = runs["iterative lora"]["output_dir"] / "iterations"
    assert [path.name for path in copies.glob("*/*.safetensors")] == ["adapter_model.safetensors"]
