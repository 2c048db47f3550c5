"""The environment of a rank with a GPU: the table's values, the user's own, and a cache that no other user can write."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from grpo_megatron.cli.main import main
from grpo_megatron.cli.ranks import prepare_environment
from grpo_megatron.config import Config, ConfigError
from grpo_megatron.processes.variables import (
    CACHES,
    GPU_VARIABLES,
    TE_NONDETERMINISM,
    cache_folder,
    cache_problems,
    check_rank_variables,
    set_determinism_variables,
    set_gpu_variables,
)

DETERMINISTIC = {TE_NONDETERMINISM: "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
INVARIANT = {"VLLM_BATCH_INVARIANT": "1"}
NAMES = {variable.name for variable in (*GPU_VARIABLES, *CACHES)} | DETERMINISTIC.keys() | INVARIANT.keys()


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is set, and the temporary files are in `tmp_path`."""
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name not in NAMES})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_rank_with_a_gpu_gets_the_table_and_a_cache_of_its_machine(tmp_path: Path) -> None:
    assert list(set_gpu_variables()) == []
    assert {name: os.environ[name] for name, _, _ in GPU_VARIABLES} == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_CUMEM_ENABLE": "0",
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
    }
    folder = tmp_path / f"grpo-megatron-cache-{os.getuid()}"
    assert os.environ["VLLM_CACHE_ROOT"] == str(folder / "vllm")
    assert os.environ["FLASHINFER_WORKSPACE_BASE"] == str(folder / "flashinfer")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(set_gpu_variables()) == []  # a rank of this launcher: all is set, and nothing differs
    assert cache_folder() == folder  # the next run's, too


def test_values_of_the_user_stay_and_are_named() -> None:
    os.environ |= {"NCCL_CUMEM_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "TRITON_CACHE_DIR": "mine"}
    (line,) = set_gpu_variables()
    assert "NCCL_CUMEM_ENABLE=1 stays as it is set; the default here is 0 (vLLM's default" in line
    assert (os.environ["NCCL_CUMEM_ENABLE"], os.environ["TRITON_CACHE_DIR"]) == ("1", "mine")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.environ |= {
        "VLLM_CACHE_ROOT": str(tmp_path / "new"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file" / "below"),
    }
    (problem,) = cache_problems()
    assert (
        problem.startswith("TORCHINDUCTOR_CACHE_DIR=") and "Not a directory; set it to a folder that can be" in problem
    )


@pytest.mark.parametrize("kind", ["a link", "a file", "another user's"])
def test_a_name_that_somebody_else_has_taken_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    taken = tmp_path / f"grpo-megatron-cache-{os.getuid()}"
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir()
        taken.symlink_to(tmp_path / "elsewhere")
    elif kind == "a file":
        taken.touch()
    else:
        taken.mkdir()
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", iter([uid, uid + 1]).__next__)
    folder = cache_folder()
    assert folder != taken and folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    assert not list((tmp_path / "elsewhere").glob("*"))


def test_the_first_rank_prints_and_a_cpu_run_sets_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    os.environ["NCCL_NVLS_ENABLE"] = "1"
    prepare_environment("cpu")
    assert not NAMES - {"NCCL_NVLS_ENABLE"} & os.environ.keys() and capsys.readouterr().out == ""
    os.environ["RANK"] = "3"
    prepare_environment("cuda")
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and capsys.readouterr().out == ""
    os.environ["RANK"] = "0"
    prepare_environment("cuda")
    assert "NCCL_NVLS_ENABLE=1 stays" in capsys.readouterr().out


# -- results that do not change from run to run ------------------------------------------------------------------------


def test_the_switches_of_repeatable_runs_are_variables() -> None:
    def variables(**sections: Any) -> dict[str, str]:
        for name in NAMES & os.environ.keys():
            del os.environ[name]
        set_determinism_variables(Config.model_validate({"model": {"path": "x"}, **sections}))
        return {name: os.environ[name] for name in NAMES & os.environ.keys()}

    assert variables() == {}
    assert variables(actor={"megatron": {"deterministic": True}}) == DETERMINISTIC
    assert variables(rollout={"batch_invariant": True}) == INVARIANT
    assert variables(rollout={"batch_invariant": True}, algorithm={"source": "file"}) == {}


@pytest.mark.parametrize("start", ["the command", "a Trainer"])
def test_they_are_set_before_anything_asks_for_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    """The check looks for CUDA devices. Here it finds none, and refuses the run."""
    from grpo_megatron.trainer import Trainer  # Megatron-Core looks for CUDA when it is imported

    at_calls = []

    def is_available() -> bool:
        at_calls.append({name: os.environ.get(name) for name in (*DETERMINISTIC, *INVARIANT)})
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    raw = {
        "model": {"path": str(tmp_path / "model")},
        "actor": {"megatron": {"deterministic": True}},
        "rollout": {"batch_invariant": True},
        "trainer": {"device": "cuda", "n_gpus_per_node": 1},
    }
    if start == "the command":
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw))
        assert main(["train", str(tmp_path / "run.yaml")]) == 2
    else:
        with pytest.raises(ConfigError):
            Trainer(Config.model_validate(raw))
    assert at_calls and all(seen == DETERMINISTIC | INVARIANT for seen in at_calls)


@pytest.mark.parametrize(
    "given",
    [
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "0"},
        {"RANK": "", "WORLD_SIZE": "1"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "0x1", "WORLD_SIZE": "2"},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "2"},
    ],
)
def test_numbers_of_a_rank_that_cannot_be(given: dict[str, str]) -> None:
    os.environ |= given
    with pytest.raises(ConfigError, match=r"the environment has (LOCAL_)?RANK=.* a rank is a number from 0 to"):
        check_rank_variables()
