"""The page of a plan: what it warns about, how it ends, and the command `plan`."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from grpo_megatron.checks.models import read_models
from grpo_megatron.cli import main
from grpo_megatron.cli.config_file import load_config
from grpo_megatron.cli.plan import plan_warnings, verdict_lines
from grpo_megatron.planning.cost import Workload
from grpo_megatron.planning.gpus import PlannedMachine, find_gpu
from grpo_megatron.planning.layout import world_problems
from grpo_megatron.planning.search import fit
from tests.runs import make_run

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = "examples/llama3_70b.yaml"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(autouse=True)
def in_a_folder_with_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)


def page(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main.main(list(arguments)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def section(text: str, title: str) -> list[str]:
    (part,) = [part for part in text.split("\n\n") if part.startswith(title)]
    return part.splitlines()[1:]


def warnings(text: str) -> str:
    return " ".join(line.strip() for line in section(text, "Warnings")) if "\nWarnings\n" in text else ""


def test_the_page_of_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    """70B on one node: trained are 414 million of 71 billion parameters, and there is no second model."""
    layout = [f"actor.megatron.{axis}_model_parallel_size={size}" for axis, size in (("tensor", 8), ("pipeline", 1))]
    text = page(
        capsys,
        "plan",
        EXAMPLE,
        "--world-size",
        "8",
        "--gpu",
        "h100-80",
        "trainer.nnodes=1",
        "actor.lora.rank=32",
        *layout,
    )
    words = " ".join(" ".join(section(text, "Model")).split())
    assert (
        "merged, rank 32, scale 1, 560 linear layers: 414,187,520 parameters are trained; merging takes as long as moving ~ 123"
        in words
    )
    assert any(line.split()[:2] == ["~", "merged"] for line in text.splitlines())
    assert section(text, "Memory of one rank")[1].split()[6] == "0.000"  # the reference
    assert text.splitlines()[-1].startswith("  FITS h100-80")


def test_70b_fits_and_the_page_ends_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [EXAMPLE, "--world-size", "64", "--gpu", "h100-80"]
    text = page(capsys, "train", "--dry-run", *arguments)
    assert text.splitlines()[-1] == "  FITS h100-80, 79.11 GiB usable (fullest phase: start, 62.52 GiB)"
    assert max(map(len, text.splitlines())) <= 120
    assert page(capsys, "plan", *arguments) == text
    assert section(text, "KV cache of an engine") == [
        "  ~ 29.34 GiB = 769,216 tokens of 40 KiB",
        "  187 sequences of 4,096 tokens at once (rollout.max_num_seqs=256)",
    ]
    derived = page(capsys, "plan", *arguments, "rollout.max_num_seqs=null")
    assert section(derived, "KV cache of an engine")[1:] == [
        "  186 sequences of 4,096 tokens at once (rollout.max_num_seqs=368)",
        "  ~ max_num_seqs    368, for null: 29.71 GiB / (2,048 tokens x 40 KiB + 128,256 words x 12 bytes) = 373, down to a",
        "                    multiple of 8, from 16 to 1,024",
    ]
    assert "  pipeline               1,237.0 GB" in section(text, "Bytes over the borders")
    assert not warnings(text)
    seconds = section(text, "Seconds of a step")[0]
    total, _, parts = seconds.partition(" = ")
    terms = [float(term.split()[1]) for term in parts.split(" + ")]
    assert sum(terms) == pytest.approx(float(total), abs=0.3)
    roles = ["rollout.placement=separate", "rollout.num_nodes=2", "rollout.lag=1", "trainer.nnodes=8"]
    split = page(capsys, "plan", *arguments, *roles, "algorithm.rollout_correction.rollout_is=token")
    expected = "  ([0-9.]+) = the longer of generate ([0-9.]+), and score [0-9.]+ \\+ update ([0-9.]+) \\+ sync [0-9.]+"
    found = re.fullmatch(expected, section(split, "Seconds of a step")[0])
    assert found is not None
    longer, generate, update = map(float, found.groups())
    assert longer == generate > 2 * terms[0] and update > terms[2]  # 2 engines in the place of 8, 48 GPUs in that of 64


def test_host_memory_of_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", EXAMPLE, "--world-size", "64", "--gpu", "h100-80", "--host-memory"]
    verdict = section(page(capsys, *command, "2000"), "Verdict")
    assert verdict[0].startswith("  FITS 2000 GiB of host memory per node (8 ranks: ")
    assert main.main([*command, "20"]) == 2
    captured = capsys.readouterr()
    assert section(captured.out, "Verdict")[0].startswith("  DOES NOT FIT 20 GiB of host memory per node (8 ranks: ")
    assert "8 ranks of a node x " in captured.err and "is more than --host-memory 20; set " in captured.err


def test_70b_that_does_not_fit_gets_remedies_and_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    pp = "actor.megatron.pipeline_model_parallel_size"
    command = ["plan", EXAMPLE, "--world-size", "64", "--gpu", "a100-40"]
    assert main.main(command) == 2
    captured = capsys.readouterr()
    text = captured.out
    verdict = section(text, "Verdict")
    assert verdict[-1].strip().startswith("DOES NOT FIT a100-40, 39.38 GiB usable (fullest phase: scoring, 54.11 GiB")
    assert verdict[0] == "  too large even without the estimated parts:"
    assert "- phase load does not fit" in verdict[1]
    assert sum("fullest phase" in line and " s, " in line for line in verdict) == 3
    assert f"        {pp}=8" in verdict
    assert (
        "does not fit a GPU of 39.38 GiB, even without the estimated parts (phase load, scoring, update)"
        in captured.err
    )
    config = load_config(EXAMPLE, [f"{pp}=8"])
    assert fit(config, read_models(config), 64, find_gpu("a100-40").usable_bytes).fits


def test_a_page_for_a_narrow_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The name of a GPU without its size is explained, and the verdict ends the page."""
    plans = {EXAMPLE: ["--world-size", "64", "--gpu", "a100"], str(run / "run.yaml"): []}
    for config, more in plans.items():
        with mock.patch.dict(os.environ, {"COLUMNS": "80"}):
            text = page(capsys, "plan", config, *more)
        assert max(map(len, text.splitlines())) <= 80, text
    text = page(capsys, "plan", EXAMPLE, "--world-size", "64", "--gpu", "a100")
    assert section(text, "Verdict") == [
        "  a100: taken as a100-80; a100-40 has 40 GB",
        "  FITS a100-80, 79.14 GiB usable (fullest phase: start, 62.54 GiB)",
    ]


def test_a_gpu_without_packed_attention_of_cudnn_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is installed here. Local layers need none; what only Transformer Engine has cannot be run without it."""
    command, megatron = ["plan", EXAMPLE, "--world-size", "64", "--gpu"], "actor.megatron."
    gap = "a100-80: cuDNN has no attention over packed sequences with compute capability 8.0; without flash-attn"
    text = warnings(page(capsys, *command, "a100"))
    assert gap in text and "the run takes Megatron-Core's local layers" in text
    assert "the run is refused" in warnings(
        page(capsys, *command, "a100", f"{megatron}transformer_impl=transformer_engine")
    )
    assert gap not in warnings(page(capsys, *command, "a100", f"{megatron}transformer_impl=local"))
    deterministic = f"{megatron}deterministic=true"
    assert not warnings(page(capsys, *command, "h200", deterministic))
    assert "b200: cuDNN has no deterministic attention" in warnings(page(capsys, *command, "b200", deterministic))


def test_a_plan_writes_the_resolved_config_beside_the_output_folder(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second plan replaces it. What is the user's, or of another machine, stays as it is."""
    config = str(run / "run.yaml")
    keys = ["trainer.output_dir=new/mine", "rollout.n=3"]
    title = "Every key with its value, as a config"
    for n in (3, 5):
        text = page(capsys, "plan", config, *keys, f"rollout.n={n}")
        assert section(text, title) == ["  new/mine.resolved.yaml"]
        assert load_config("new/mine.resolved.yaml").rollout.n == n
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mine.resolved.yaml"]
    assert page(capsys, "plan", "new/mine.resolved.yaml").split("\n\n")[1:] == text.split("\n\n")[1:]
    (tmp_path / "new/mine.resolved.yaml").write_text("mine: true\n")
    for keys, reason in (
        (["trainer.output_dir=new/mine"], "new/mine.resolved.yaml is not of a dry run"),
        (["--world-size", "2", f"trainer.output_dir={tmp_path}/no/folder/run"], "No such file or directory"),
    ):
        (line,) = section(page(capsys, "plan", config, *keys), title)
        assert "not written: " in line and reason in line and "--resolved-config FILE" in line
    assert (tmp_path / "new/mine.resolved.yaml").read_text() == "mine: true\n" and not (tmp_path / "no").exists()
    nameless = section(page(capsys, "plan", config, "trainer.output_dir=."), title)
    assert nameless == ["  run.resolved.yaml"]


def test_a_refused_plan_writes_nothing(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(run / "run.yaml")
    tiny = ["trainer.device=auto", "--gpu", "0.001"]
    for keys in (["rollout.n=1"], tiny, [*tiny, "--resolved-config", "all.yaml"]):
        assert main.main(["plan", config, *keys]) == 2
    assert main.main(["plan", config, "rollout.n=1", "--resolved-config", "no/all.yaml"]) == 2
    err = capsys.readouterr().err
    assert "no folder 'no'; make it" in err and err.count("rollout.n=1") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["examples"]


def test_a_machine_with_gpus_is_fitted_itself(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(run / "run.yaml"), "trainer.device=auto"]
    with mock.patch("grpo_megatron.cli.plan.device_bytes", return_value=85_000_000_000):
        assert "  FITS this machine's GPU, 79.16 GiB usable" in page(capsys, *command)
        assert "this machine" not in page(capsys, *command, "--world-size", "2").splitlines()[-1]


def test_without_a_gpu_the_verdict_names_those_that_fit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = page(capsys, "plan", EXAMPLE, "--world-size", "64").splitlines()[-1]
    assert last == "  FITS h100-80, h200, b200, a100-80, h20-96; DOES NOT FIT a100-40, l40-48"
    on_cpu = page(capsys, "plan", str(run / "run.yaml"), "--gpu", "h200")
    assert on_cpu.splitlines()[-1].startswith("  --gpu h200 is not looked at: no GPU to fit: trainer.device=cpu")


TP, PP = "actor.megatron.tensor_model_parallel_size", "actor.megatron.pipeline_model_parallel_size"
ENGINE = "rollout.tensor_model_parallel_size"
FEW = ["data.train_batch_size=9", "actor.ppo_mini_batch_size=9", "rollout.n=2"]
CASES: list[tuple[list[str], *tuple[str, ...]]] = [
    ([f"{TP}=16", f"{PP}=4"], f"{TP}=16 spans nodes of 8: 4.92 MB per token and forward pass cross the network"),
    (
        [f"{ENGINE}=16"],
        f"{ENGINE}=16 spans nodes of 8: 2.46 MB per token",
        "16 and 8 key-value heads: each head is in the cache of 2 ranks",
    ),
    (["rollout.gpu_memory_utilization=0.25"], "the engine's cache holds 10 sequences of 4,096 tokens, and 256 are"),
    (["rollout.gpu_memory_utilization=0.22"], "GiB of its 17.40 GiB for the cache, less than one sequence of 4,096"),
    (
        FEW,
        "18 samples of each optimizer step over 4 data-parallel ranks: 5 at most and 4.5 on average, so 10% of them are",
        "18 samples of a step over 8 engines: 3 at most and 2.25 on average, so 25% of them are idle",
    ),
    (
        ["data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "rollout.n=4"],
        "at most 4 micro-batches per optimizer step for 4 pipeline stages: 43% of the update is idle",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0][0])
def test_a_warning_has_its_numbers(case: tuple[list[str], *tuple[str, ...]]) -> None:
    overrides, *expected = case
    config = load_config(EXAMPLE, overrides)
    models = read_models(config)
    machine = PlannedMachine(find_gpu("h100-80"), 64)
    found = fit(config, models, 64, machine.gpu.usable_bytes)
    none: Any = SimpleNamespace(train_prompts=[], offline_groups=[], supervised_rows=[])
    text = list(plan_warnings(config, models, Workload.of(config, models), machine, found, none))
    assert all(any(words in warning for warning in text) for words in expected), text


@pytest.mark.parametrize(
    ("version", "experts", "family", "overrides", "runner", "warns"),
    [
        ("0.26.0", 8, "mixtral", [], "", True),
        ("0.26.0", 0, "llama", [], "", False),
        ("0.26.0", 0, "llama", ["rollout.temperature=0.7"], "", True),  # `runner_environment` selects it
        ("0.26.0", 8, "deepseek_v2", [], "", False),  # vLLM's own exception
        ("0.26.0", 8, "deepseek_v2", ["actor.moe.route_replay=engine"], "", True),  # but not with routes
        ("0.32.0", 8, "deepseek_v2", ["actor.moe.route_replay=engine"], "", False),
        ("0.26.0", 8, "mixtral", [], "1", False),  # the user's choice
        ("0.26.0", 8, "mixtral", ["trainer.device=cpu"], "", False),
        ("0.32.0", 8, "mixtral", [], "", False),
        ("", 8, "mixtral", [], "", False),
    ],
)
def test_vllm_026_draws_for_each_request_of_a_model_with_experts(
    version: str,
    experts: int,
    family: str,
    overrides: list[str],
    runner: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("grpo_megatron.cli.plan.installed_vllm", lambda: version)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    config = load_config(EXAMPLE, overrides)
    models = read_models(config)
    machine, work = PlannedMachine(find_gpu("h100-80"), 64), Workload.of(config, models)
    sparse = replace(models, arch=replace(models.arch, num_experts=experts, experts_per_token=2, family=family))
    none: Any = SimpleNamespace(train_prompts=[], offline_groups=[], supervised_rows=[])
    text = " ".join(plan_warnings(config, sparse, work, machine, None, none))
    assert ("takes its first model runner" in text and "install vllm 0.32" in text) == warns


def test_an_engine_without_a_cache_does_not_fit() -> None:
    config = load_config(EXAMPLE, ["rollout.gpu_memory_utilization=0.22"])
    models, machine = read_models(config), PlannedMachine(find_gpu("h100-80"), 64)
    found = fit(config, models, 64, machine.gpu.usable_bytes)
    lines = list(verdict_lines(config, models, Workload.of(config, models), machine, found))
    assert lines[0] == "too large by the estimated parts (~):"
    assert "the engine's cache does not hold one sequence of 4,096 tokens" in lines[1]
    assert "DOES NOT FIT" in lines[-1]
    assert any("rollout.gpu_memory_utilization" in line or "rollout.tensor" in line for line in lines[1:-1])
    config = load_config(EXAMPLE, ["rollout.gpu_memory_utilization=0.2"])  # the weights alone have 16.43 of 15.82
    assert fit(config, models, 64, machine.gpu.usable_bytes).is_impossible


def test_rows_and_cores(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The run has 9 rows, and 5 of the warm-up."""
    config = str(run / "run.yaml")
    assert not warnings(page(capsys, "plan", config))
    keys = ["data.train_batch_size=12", "sft.steps=1", "sft.train_batch_size=10"]
    with mock.patch.object(os, "cpu_count", return_value=1):
        text = warnings(page(capsys, "plan", config, *keys))
        assert "2 ranks on this machine's 1 cores: each gets 0.5 of one" in text
        assert "cores" not in warnings(page(capsys, "plan", config, *keys, "--world-size", "2"))
    assert "data.train_batch_size=12 and 9 rows: every step has each row 1.3 times on average" in text
    assert "sft.train_batch_size=10 and 5 rows: every step has each row 2.0 times" in text


def test_a_search_on_one_gpu_has_no_split_and_lists_nothing_that_does_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = page(capsys, "plan", EXAMPLE, "--world-size", "1", "--gpu", "24", "--search")
    assert "0 need at most" in printed and "fastest of each" not in printed and "no split fits" in printed


def test_the_search_prints_arguments_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", EXAMPLE, "--world-size", "16", "--nodes-of", "4", "--gpu", "h200", "--search"]
    text = page(capsys, *command, "--top", "3", "--mean-response", "400")
    assert "16 x h200 (139.8 GiB), nodes of 4" in text and "responses of 400 tokens on average" in text
    table = text.split("\n\n")[1].splitlines()
    assert len(table) == 1 + 3 and max(map(len, table)) <= 130
    for part, drawing in zip(text.split("as arguments:\n")[1:], (0, 4), strict=True):  # colocated, and in two roles
        arguments = [line.strip().strip("'") for line in part.partition("\n\n")[0].splitlines()]
        assert arguments
        config = load_config(EXAMPLE, ["trainer.nnodes=4", "trainer.n_gpus_per_node=4", *arguments])
        assert config.num_rollout_ranks == drawing and not list(
            world_problems(config, 16 - drawing, read_models(config).arch)
        )
        assert fit(config, read_models(config), 16 - drawing, find_gpu("h200").usable_bytes).fits


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--search", "trainer.device=cpu"], "plan --search is for GPUs, and trainer.device=cpu"),
        (["--search", "--mean-response", "3073"], "--mean-response 3073 is more than data.max_response_length=3072"),
        (["--search", "actor.megatron.context_parallel_size=2"], "does not vary actor.megatron.context_parallel_size"),
        (["--top", "3"], "--top needs --search"),
        (["--search", "--resolved-config", "x.yaml"], "leave one of them out"),
        (["--gpu", "h300"], "'h300': it is neither one of h100-80, h200"),
        (["--host-memory", "0"], "'0' is no size in GiB, such as 1024"),
        (["--nodes-of", "0"], "--nodes-of '0': set 1 or more"),
        (["--profile", "3"], "--profile measures a run, and --dry-run starts none"),
    ],
)
def test_options_that_make_no_sense(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan", EXAMPLE, *arguments]) == 2 and expected in capsys.readouterr().err


def test_a_search_counts_critic_and_reward_models(tmp_path: Path) -> None:
    """They are read from their folders, as a run reads them."""
    llama: dict[str, Any] = json.loads((ROOT / "examples/models/llama3_70b/config.json").read_text())
    head = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1, "num_hidden_layers": 8}
    (tmp_path / "config.json").write_text(json.dumps({**llama, **head}))
    keys = [f"reward_model.path={tmp_path}", "algorithm.adv_estimator=gae", "actor.use_kl_loss=false"]
    config = load_config(EXAMPLE, keys)
    models = read_models(config)
    policy, rewards, critic, _ = models.stages(config)
    assert len(rewards) == 1 and critic is not None and [stage.layers for stage in rewards[0]] == [2, 2, 2, 2]
    assert critic[-1].total < policy[-1].total  # no output head
    work = Workload.of(config, models)
    size = models.arch.num_parameters()
    assert 0.9 < work.critic_share < 1
    assert work.scoring_passes == pytest.approx(models.reward_archs[0].num_parameters() / size)
