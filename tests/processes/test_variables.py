"""The environment of a rank with a GPU: the table's values, the user's own, and a cache that no other user can write."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from grpo_megatron.cli.ranks import prepare_environment
from grpo_megatron.processes.variables import CACHES, GPU_VARIABLES, cache_folder, set_gpu_variables

NAMES = {variable.name for variable in (*GPU_VARIABLES, *CACHES)}


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
        own = os.getuid()
        monkeypatch.setattr(os, "getuid", iter([own, own + 1]).__next__)
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
