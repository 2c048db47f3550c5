"""CUDA devices: a run without enough of them is refused before a rank starts, and a plan says for which machine it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_megatron.checks import machine
from grpo_megatron.cli import main, ranks
from grpo_megatron.cli.config_file import load_config
from tests.runs import texts


@pytest.fixture(autouse=True)
def not_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


@pytest.mark.parametrize(
    ("device", "count", "overrides", "local", "words"),
    [
        ("cuda", 0, [], None, "trainer.device=cuda, but torch sees no CUDA device on this machine; set"),
        ("auto", 1, [], None, "2 ranks on this machine need 2 CUDA devices, and torch sees 1; set"),
        ("cpu", 1, [], None, None),
        # A rank knows its machine's ranks from its launcher. Without one, they are known for one node only.
        ("cuda", 4, ["trainer.n_gpus_per_node=8"], "8", "8 ranks on this machine need 8 CUDA devices"),
        ("cuda", 4, ["trainer.nnodes=2", "trainer.n_gpus_per_node=4"], None, None),
    ],
)
def test_ranks_need_a_device_each(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    count: int,
    overrides: list[str],
    local: str | None,
    words: str | None,
) -> None:
    monkeypatch.setattr(machine, "count_cuda_devices", lambda: count)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    config = load_config(run / "run.yaml", [f"trainer.device={device}", *overrides])
    problems = texts(machine.device_problems(config, config.trainer.nnodes * config.trainer.n_gpus_per_node))
    assert len(problems) == (words is not None)
    assert words is None or problems[0].startswith(words)


def test_what_works_on_the_cpu_only_is_refused_on_gpus(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["rollout.engine=transformers", "trainer.n_gpus_per_node=1"]
    monkeypatch.setattr(machine, "count_cuda_devices", lambda: 8)
    config = load_config(run / "run.yaml", ["trainer.device=auto", *settings])
    [problem] = texts(machine.device_problems(config, 1))
    assert problem.startswith("rollout.engine=transformers on GPUs: ")
    config = load_config(run / "run.yaml", ["trainer.device=cpu", *settings])
    assert texts(machine.device_problems(config, 1)) == []


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_segments_that_cannot_sleep_are_refused(run: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(machine, "count_cuda_devices", lambda: 8)
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    settings = ["trainer.device=cuda", "rollout.engine=vllm"]
    [problem] = texts(machine.device_problems(load_config(run / "run.yaml", settings), 1))
    assert problem.startswith(
        f"{name}=max_split_size_mb:64,expandable_segments:True with rollout.free_cache_engine=true"
    )
    settings.append("rollout.free_cache_engine=false")
    assert texts(machine.device_problems(load_config(run / "run.yaml", settings), 1)) == []


def test_a_run_without_cuda_is_refused_and_its_plan_is_not(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing_may_start(*args: object) -> int:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(machine, "count_cuda_devices", lambda: 0)
    monkeypatch.setattr(ranks, "start_ranks", nothing_may_start)
    train = ["train", str(run / "run.yaml"), "trainer.device=cuda"]
    assert main.main(train) == 2
    error = capsys.readouterr().err
    assert error.splitlines() == [
        "error: trainer.device=cuda, but torch sees no CUDA device on this machine; set trainer.device=cpu or auto"
    ]
    for options in ([], ["--world-size", "64", "data.train_batch_size=64"]):
        assert main.main([*train, "--dry-run", *options]) == 0
        out = capsys.readouterr().out
        line = "device            cuda, and torch sees no CUDA device on this machine: a plan for another machine"
        assert out.count(line) == 1
        assert "kernels  " not in out


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cpu", "kernels           Megatron-Core's layers; no Transformer Engine: this run is on the CPU"),
        ("auto", "device            auto, and torch sees no CUDA device on this machine: here a run would be on"),
    ],
)
def test_the_plan_names_device_and_kernels(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], device: str, words: str
) -> None:
    monkeypatch.setattr(machine, "count_cuda_devices", lambda: 0)
    assert main.main(["train", str(run / "run.yaml"), f"trainer.device={device}", "--dry-run"]) == 0
    assert words in capsys.readouterr().out.splitlines()[4]
